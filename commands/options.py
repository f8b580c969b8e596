"""A command's options from its signature: parsing, `--config`, `--print_config`, and a sentence for
what does not fit.

Built on jsonargparse. Added here: a flag needs no `true` (`--hidden`), a list needs no brackets
(`--methods token block`, numbers also `--seeds 0,1`), a name that does not exist is answered with
the nearest one.
"""

from __future__ import annotations

import inspect
import json
import re
from argparse import ArgumentError
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace, get_loader

from . import settings


def parse(
    function: Callable,
    args: list[str],
    name: str,
    extra: Callable[[ArgumentParser], Any] | None = None,
) -> dict:
    """The keyword arguments for `function` that `args` and the settings file in them give.

    name: the command, as in `diversed gather`; its first word names the file's section.
    extra: adds options that are not in the signature.
    """
    parser = make_parser({"": function}, name)
    if extra:
        extra(parser)
    args, file = take_config(args)
    values = {}
    if file:
        section = name.split()[0]
        whole = settings.load(file)
        values = settings.shared(whole, section)
        values = settings.select(values, section, option_names(parser), file.name)
        check_sections(whole, [section], file.name)
    return read(parser, args, values, name)


def make_parser(
    functions: dict[str, Callable], name: str, skip: Mapping[str, set] = MappingProxyType({})
):
    """A parser with the options of each function, under its key in `functions` (none where the key
    is empty).

    skip: for a key, the options to leave out.
    """
    whole = functions.get("")
    doc = inspect.cleandoc(whole.__doc__ or "").split("\n\nArgs:")[0] if whole else None
    usage = f"diversed {name} [--config NAME_OR_PATH] [--option value ...]"
    parser = ArgumentParser(
        prog=f"diversed {name}",
        usage=usage,
        description=doc,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="config", help="A settings file, or the name of a packaged one."
    )
    for key, function in functions.items():
        parser.add_function_arguments(
            function, key or None, as_group=bool(key), skip=set(skip.get(key, ()))
        )
    return parser


def read(parser: ArgumentParser, args: list[str], values: dict, name: str) -> dict:
    """Parsed options as objects: `args` over `values` (from a settings file) over the signature's
    defaults.
    """
    options = vars(parser.instantiate(check(parser, args, values, name)))
    return {key: value for key, value in options.items() if key != "config"}


def check(parser: ArgumentParser, args: list[str], values: dict, name: str) -> Namespace:
    """Options parsed and not yet made into objects; what does not fit is a ValueError with a
    sentence.
    """
    start = [f"--config={json.dumps(values, default=str)}"] if values else []
    try:
        return parser.parse_args(start + spell_out(parser, args, name))
    except ArgumentError as error:
        raise ValueError(explain(error, parser, name)) from error


def take_config(args: list[str]) -> tuple[list[str], Any]:
    """`args` without `--config NAME_OR_PATH`, and the file that it names (or None)."""
    rest, file, words = [], None, iter(args)
    for word in words:
        if word == "--config":
            word = f"--config={next(words, '')}"
        if word == "--config=":
            raise ValueError("`--config` needs a value, the name or the path of a settings file")
        if word.startswith("--config="):
            file = settings.find(word.removeprefix("--config="))
        else:
            rest.append(word)
    return rest, file


def check_sections(values: dict, done: Collection[str], file: str) -> None:
    """Refuse unknown keys in the sections of other commands too: a typo should not wait for its
    stage.
    """
    from ..cli import COMMANDS, command, reads_own_options

    for section in COMMANDS:
        if (
            section in done
            or not settings.is_section(section, values.get(section))
            or not values.get(section)
        ):
            continue
        function = command(section)
        if not reads_own_options(function):
            options = option_names(make_parser({"": function}, section))
            settings.select({section: values[section]}, section, options, file)


def option_names(parser: ArgumentParser) -> list[str]:
    """Every option, nested ones as `sampling.temperature`."""
    names = (action.dest for action in parser._actions)
    return [name for name in names if name.split(".")[-1] not in ("help", "config", "print_config")]


def spell_out(parser: ArgumentParser, args: list[str], name: str) -> list[str]:
    """The command line as jsonargparse wants it: flags with a value, lists in brackets, only names
    that exist.
    """
    spelled, words = [], list(args)
    while words:
        word = words.pop(0)
        if not re.fullmatch(r"--[\w.]+\+?(=.*)?", word, re.DOTALL):
            spelled.append(word)
            continue
        option = word.split("=")[0]
        kind = _kind(parser, option, name)
        following = 0
        while "=" not in word and following < len(words) and not words[following].startswith("--"):
            following += 1
        if kind is bool and "=" not in word and not following:
            word = f"{word}=true"
        elif (inner := _item(kind, words[:following])) and not words[0].startswith("["):
            items = words[:following] if inner is str else ",".join(words[:following]).split(",")
            try:
                items = [item if inner is str else get_loader("yaml")(item) for item in items]
            except Exception:  # the loader's errors have no common type
                given = " ".join(words[:following])
                raise ValueError(
                    f"`{option.strip('-')}` must be {describe(kind)}, got {given!r}"
                ) from None
            word, words = f"{word}={json.dumps(items)}", words[following:]
        elif following == 1 and words[0].startswith("-"):
            # argparse takes a bare -1e-3 for an option
            word = f"{word}={words.pop(0)}"
        spelled.append(word)
    return spelled


def _item(kind: Any, values: list[str]) -> Any:
    """The type of an item where `values` are the items of a list, None where they are not."""
    kinds = (
        [inner for inner in get_args(kind) if inner is not NoneType] if _is_union(kind) else [kind]
    )
    lists = [inner for inner in kinds if get_origin(inner) in (list, tuple)]
    bare = _is_union(kind) and (values == ["null"] or (len(values) == 1 and len(kinds) > 1))
    return get_args(lists[0])[0] if lists and values and not bare else None


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _kind(parser: ArgumentParser, option: str, name: str) -> Any:
    """The type of an option; unknown ones are refused with the nearest name."""
    known = parser._option_string_actions
    if option in known:
        return getattr(known[option], "_typehint", None)
    inside = [known[leaf] for leaf in known if option.startswith(f"{leaf}.") and leaf != "--config"]
    if inside and getattr(inside[0], "_typehint", None) is not None:
        return None
    names = [f"--{key}" for key in option_names(parser)]
    raise ValueError(
        f"`{option}` is not an option of `diversed {name}`{settings.nearest(option, names)}"
    )


def explain(error: ArgumentError, parser: ArgumentParser, name: str) -> str:
    """jsonargparse's complaint as one sentence."""
    message = " ".join(str(error).split())
    missing = re.search(r"arguments are required: (.+)", message)
    if missing:
        return (
            f"`diversed {name}` needs"
            f" {', '.join(f'--{key.strip()}' for key in missing[1].split(','))}"
        )
    extra = re.search(r"unrecognized arguments: (.+)", message)
    if extra:
        return (
            f"`{extra[1]}` is not understood by `diversed {name}`; options are written --name value"
        )
    lonely = re.search(r"argument (--\S+): expected one argument", message)
    if lonely:
        return f"`{lonely[1].rstrip(',')}` needs a value"
    group = re.search(r'Parser key "([^"]+)": Unable to load config', message)
    if group:
        return (
            f"`{group[1]}` is a group of options, written --{group[1]}.NAME value; --help lists"
            " them"
        )
    typed = re.search(r'Parser key "([^"]+)": .*(?:Got|Given) value:(.*)', message)
    action = parser._option_string_actions.get(f"--{typed[1]}") if typed else None
    kind = getattr(action, "_typehint", None)
    if kind is None:
        return message
    unknown = re.search(r"NestedArg\(key='([^']+)'|Option '([^']+)' is not accepted", message)
    classes = [inner for inner in (kind, *get_args(kind)) if is_dataclass(inner)]
    names = [f"{typed[1]}.{field.name}" for inner in classes for field in fields(inner)]
    if unknown and names:
        key = unknown[1] or unknown[2]
        return (
            f"`{typed[1]}.{key}` is not an option of `diversed"
            f" {name}`{settings.nearest(f'{typed[1]}.{key}', names)}"
        )
    return f"`{typed[1]}` must be {describe(kind)}, got {typed[2].strip() or 'nothing'}"


def describe(kind: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if _is_union(kind):
        return " or ".join(describe(item) for item in inner)
    if origin in (list, tuple):
        return f"a list, each item {describe(inner[0])}"
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        NoneType: "null",
    }
    return words.get(kind) or getattr(kind, "__name__", str(kind))
