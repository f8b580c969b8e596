"""Which fields of a row are the prompt, the article and the reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..files import close_to
from .sources import Source


class Blank(ValueError):
    """A row without text, or without the reference that the score needs."""


@dataclass(frozen=True)
class Layout:
    """Field names; a dot reaches inside lists and objects: "translation.de", "turns.0".

    where:  (field, value): only rows with this value count.
    inside: pattern that matches any text; its first group is the wanted part of the prompt's or
        article's field.
    """

    prompt: str | None = None
    article: str | None = None
    reference: str | None = None
    where: tuple[str, str] | None = None
    inside: str = r"(?s)(.*)"

    @property
    def fields(self) -> list[str]:
        return [
            f
            for f in (self.prompt, self.article, self.reference, self.where and self.where[0])
            if f
        ]

    def holds(self, row: dict) -> bool:
        """Whether the row counts."""
        return self.where is None or row.get(self.where[0]) == self.where[1]

    def read(self, row: dict, place: str) -> tuple[str, str, str | None]:
        """(prompt, article, reference) of a row; "" and None for what the layout does not name."""
        prompt, article = (
            re.match(self.inside, text_of(row, field, place)).group(1) if field else ""
            for field in (self.prompt, self.article)
        )
        if not (prompt + article).strip():
            raise Blank(
                f"{place} has an empty prompt (field {self.prompt or self.article}); fill it or"
                " delete the row"
            )
        reference = text_of(row, self.reference, place) if self.reference else None
        if reference is not None and not reference.strip():
            raise Blank(
                f"{place} has an empty reference (field {self.reference}); fill it or delete"
                " the row"
            )
        return prompt, article, reference


def choose(layouts: Sequence[Layout], source: Source) -> Layout:
    """The first layout whose fields the source has, in the first row that counts; ValueError names
    what there is.
    """
    for layout in layouts if source.local else layouts[:1]:
        first = next((i for i, row in enumerate(source.rows) if layout.holds(row)), None)
        if first is not None and not any(
            _lacks(source.rows[first], field) for field in layout.fields
        ):
            return layout
    row, place = source.rows[0], source.place(0)
    if len(layouts) == 1:
        field = next(field for field in layouts[0].fields if _lacks(row, field))
        raise ValueError(_no_field(row, field, place))
    wanted = "; or ".join(", ".join(layout.fields) for layout in layouts)
    raise ValueError(
        f"{place} must have the fields {wanted}; it has {_listing(row)}; name others with"
        " `data.prompt_field`, `data.article_field` and `data.reference_field`"
    )


def _lacks(row: dict, field: str) -> bool:
    try:
        _lookup(row, field)
    except LookupError:
        return True
    return False


def _lookup(row: dict, field: str):
    if field in row:
        return row[field]
    value = row
    for key in field.split("."):
        if isinstance(value, dict):
            value = value[key]
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)]
        else:
            raise LookupError(field)
    return value


def text_of(row: dict, field: str, place: str) -> str:
    """The text in a field of a row; ValueError, or Blank where it is null."""
    try:
        value = _lookup(row, field)
    except LookupError:
        raise ValueError(_no_field(row, field, place)) from None
    if value is None:
        raise Blank(
            f"{place} must hold text in the field {field}, got null; fill it or delete the row"
        )
    if not isinstance(value, str | int | float):
        inside = next(iter(value if isinstance(value, dict) else map(str, range(len(value)))), None)
        hint = f"; name what is inside, such as {field}.{inside}" if inside else ""
        raise ValueError(
            f"{place} must hold text in the field {field}, got a {type(value).__name__}{hint}"
        )
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{place} must hold valid Unicode in the field {field}, got half a surrogate pair"
        ) from None
    return str(value)


def _no_field(row: dict, field: str, place: str) -> str:
    return f"{place} has no field {field}, it has {_listing(row)}{close_to(field, row)}"


def _listing(row: dict) -> str:
    return ", ".join(map(str, row)) or "no field"
