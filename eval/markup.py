"""HTML and SVG that is escaped by construction: a string is text, only what `tag` returns is
markup.
"""

from __future__ import annotations

import html
import re

VOID = {"meta", "link", "br"}  # of HTML; every element of SVG is closed


class Markup(str):
    """A string that is already markup."""


def tag(element: str, /, *children: object, **attributes: object) -> Markup:
    """One element.

    children: text (escaped), markup, lists of both; None is left out.
    attributes: `class_` is class, `data_v` is data-v; None and False are left out, True has no
        value.
    """
    words = [element]
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words.append(key if value is True else f'{key}="{text(value)}"')
    inside = joined(children)
    return Markup(
        f"<{' '.join(words)}>" if element in VOID else f"<{' '.join(words)}>{inside}</{element}>"
    )


def joined(children: object) -> Markup:
    """The children one after the other, text escaped."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, list | tuple):
        return Markup("".join(map(joined, children)))
    return text(children)


def text(value: object) -> Markup:
    """A value as text. What no file or page can hold, half a surrogate pair or a control character,
    becomes U+FFFD.
    """
    readable = (
        str(value).encode("utf-8", "replace").decode() if not str(value).isascii() else str(value)
    )
    return Markup(
        html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", readable))
    )
