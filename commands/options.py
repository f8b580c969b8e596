"""The options of a command come from its signature; here the words of a command line become them.

    def gather(run: Run, models: Models = Models(), *, samples: int = 4)

A parameter before the `*` is a group: a dataclass whose fields are options without a prefix, as
`--target`. Its default in the signature gives their defaults. A parameter after the `*` is an
option itself; if it is a dataclass, its fields have its name before them, as
`--sampling.temperature`. Docstrings give the help.

jsonargparse parses. Added here: a flag needs no `true` (`--hidden`), a list needs no brackets
(`--methods token block`, numbers also `--seeds 0,1`), an unknown name is answered with the nearest
one, and every refusal is one sentence.
"""

from __future__ import annotations

import inspect
import json
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace, get_loader

from ..files import nearest
from . import settings
from .table import command

LARGEST = 2**63 - 1
PAIR = re.compile(r"\\ud[89ab]..\\ud[c-f]..")
OPTION = re.compile(r"--[\w.]+\+?(=.*)?", re.DOTALL)


def parse(function: Callable, args: list[str], name: str) -> dict[str, Any]:
    """The options of `function` that a command line gives, by name, for `call`.

    name: the command, as in `diversed gather`; its first word names its section in a settings file.
    """
    return read(make_parser(function, name), args, name)


def call(verb: str | Callable, **options: Any) -> Any:
    """Run a command from Python: `call("gather", out="traces", prompts=64)`.

    verb:    a verb of the command line, or the function behind it.
    options: those of the command line by name, as Python values; nested options such as `data` are
             dataclasses or dictionaries.
    """
    function = command(verb) if isinstance(verb, str) else verb
    return function(**filled(function, options))


def filled(function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a command, its groups made of the options that are their fields."""
    arguments = dict(options)
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(parameter.default) and isinstance(arguments.get(name), Mapping):
            arguments[name] = replace(parameter.default, **arguments[name])
    for name, group in groups(function).items():
        own = [field.name for field in fields(group)]
        chosen = {option: arguments.pop(option) for option in own if option in arguments}
        default = inspect.signature(function).parameters[name].default
        if default is inspect.Parameter.empty:
            arguments[name] = group(**chosen)
        else:
            arguments[name] = replace(default, **chosen)
    return arguments


def groups(function: Callable) -> dict[str, type]:
    """The parameters of a command that are groups of options, with their dataclasses."""
    kinds = get_type_hints(inspect.unwrap(function))
    return {
        name: kinds[name]
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and is_dataclass(kinds.get(name))
    }


def make_parser(function: Callable, name: str, skip: Iterable[str] = ()) -> ArgumentParser:
    """A parser of a command's options, all but those in `skip`."""
    doc = inspect.cleandoc(function.__doc__ or "").split("\n\nArgs:")[0]
    parser = ArgumentParser(
        prog=f"diversed {name}",
        usage=f"diversed {name} [--config NAME_OR_PATH] [--option value ...]",
        description=doc,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", action="config", help="A settings file, or the name of a packaged one."
    )
    add_options(parser, function, set(skip))
    return parser


def add_options(parser: ArgumentParser, function: Callable, skip: set[str]) -> None:
    """Add the options of a command to a parser."""
    shared = groups(function)
    for name, group in shared.items():
        parser.add_class_arguments(group, None, as_group=False, skip=skip)
        default = inspect.signature(function).parameters[name].default
        if default is not inspect.Parameter.empty:
            values = asdict(default).items()
            parser.set_defaults({option: value for option, value in values if option not in skip})
    parser.add_function_arguments(function, None, as_group=False, skip=skip | set(shared))


def read(parser: ArgumentParser, args: list[str], name: str) -> dict[str, Any]:
    """The options as objects: `args` over the settings files that they name over the defaults."""
    args, files = take_configs(args)
    section = name.split()[0]
    values = settings.chosen(files, section, option_names(parser))
    check_sections(files, [section])
    options = vars(parser.instantiate(check(parser, args, values, name)))
    return {option: value for option, value in options.items() if option != "config"}


def check(parser: ArgumentParser, args: list[str], values: dict, name: str) -> Namespace:
    """The options, not yet objects; what does not fit is a ValueError with a sentence."""
    start = [f"--config={written(values)}"] if values else []
    try:
        found = parser.parse_args(start + spell_out(parser, args, name))
    except ArgumentError as error:
        raise ValueError(explain(error, parser, name)) from error
    for option, value in found.items():
        if value != "" or name != "run":  # which fills in what lies in its folder
            _refuse_odd(option, value)
    return found


def _refuse_odd(option: str, value: Any) -> None:
    """Refuse what no option can mean: a whole number beyond any machine, a text without letters."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if type(each) is int and abs(each) > LARGEST:
            raise ValueError(f"`{option}` must lie within {-LARGEST}..{LARGEST}, got {each}")
    if value == "":
        raise ValueError(f"`{option}` must not be empty; give a value or leave it out")


def take_configs(args: list[str]) -> tuple[list[str], list[settings.File]]:
    """`args` without every `--config NAME_OR_PATH`, and the settings files that they name."""
    rest, files, words = [], [], iter(args)
    for word in words:
        if word == "--config":
            word = f"--config={next(words, '')}"
        if word == "--config=":
            raise ValueError("`--config` needs a value, the name or the path of a settings file")
        if word.startswith("--config="):
            files.append(settings.read(word.removeprefix("--config=")))
        else:
            rest.append(word)
    return rest, files


def check_sections(files: list[settings.File], done: Iterable[str]) -> None:
    """Refuse unknown keys in the sections of other commands: a typo should not wait for its
    stage.
    """
    for file in files:
        for section, own in file.values.items():
            other = settings.is_section(section, own) and own and section not in done
            if other and takes_options(command(section)):
                names = option_names(make_parser(command(section), section))
                settings.select({section: own}, section, names, file.name)


def takes_options(function: Callable) -> bool:
    """Whether a command has typed options; one with the parameter `args` reads words itself."""
    return list(inspect.signature(function).parameters) != ["args"]


def option_names(parser: ArgumentParser) -> list[str]:
    """Every option, nested ones as `sampling.temperature`."""
    names = (action.dest for action in parser._actions)
    return [name for name in names if name.split(".")[-1] not in ("help", "config", "print_config")]


def grouped(args: list[str]) -> list[tuple[str, list[str]]]:
    """Every option with the words after it that are its values."""
    found: list[tuple[str, list[str]]] = []
    for word in args:
        if word.startswith("--") or not found:
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def spell_out(parser: ArgumentParser, args: list[str], name: str) -> list[str]:
    """The words as jsonargparse wants them: flags with a value, lists in brackets, known names."""
    spelled = []
    for option, values in grouped(args):
        if OPTION.fullmatch(option):
            kind = _kind(parser, option.split("=")[0], name)
            spelled += _spelled(option, values, kind)
        else:
            spelled += [option, *values]
    return spelled


def _spelled(option: str, values: list[str], kind: Any) -> list[str]:
    if "=" in option:
        return [option, *values]
    if kind is bool and not values:
        return [f"{option}=true"]
    item = _item(kind, values)
    bracket = (
        values and values[0].startswith("[") and (len(values) == 1 or values[-1].endswith("]"))
    )
    if item and not bracket:
        return [f"{option}={written(_items(option, values, kind, item))}"]
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{option}={values[0]}"]  # argparse takes a bare -1e-3 for an option
    return [option, *values]


def written(value: Any) -> str:
    """A value as YAML in one line. JSON writes an emoji as two halves, which YAML refuses."""
    text = json.dumps(value, default=str)
    return PAIR.sub(lambda halves: json.loads(f'"{halves[0]}"'), text)


def _items(option: str, values: list[str], kind: Any, item: Any) -> list:
    """The items of a list, read as YAML if they are not texts."""
    if item is str:
        return values
    try:
        return [get_loader("yaml")(value) for value in ",".join(values).split(",")]
    except Exception:  # the loader's errors have no common type
        given = " ".join(values)
        raise ValueError(f"`{option.strip('-')}` must be {describe(kind)}, got {given!r}") from None


def _item(kind: Any, values: list[str]) -> Any:
    """The type of an item if `values` are the items of a list, else None."""
    kinds = [kind]
    if _is_union(kind):
        kinds = [inner for inner in get_args(kind) if inner is not NoneType]
    lists = [inner for inner in kinds if get_origin(inner) in (list, tuple)]
    bare = _is_union(kind) and (values == ["null"] or (len(values) == 1 and len(kinds) > 1))
    return get_args(lists[0])[0] if lists and values and not bare else None


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _kind(parser: ArgumentParser, option: str, name: str) -> Any:
    """The type of an option; an unknown one is refused with the nearest name."""
    known = parser._option_string_actions
    if option in known:
        return getattr(known[option], "_typehint", None)
    around = [leaf for leaf in known if option.startswith(f"{leaf}.") and leaf != "--config"]
    if around and getattr(known[around[-1]], "_typehint", None) is not None:
        return None
    names = [f"--{key}" for key in option_names(parser)]
    raise ValueError(f"`{option}` is not an option of `diversed {name}`{nearest(option, names)}")


# What jsonargparse complains of, and what is said.
REFUSALS = {
    r"unrecognized arguments: (.+)": (
        "`{what}` is not understood by `diversed {name}`; options are written --name value"
    ),
    r"argument (--[^\s,]+)\S*: expected one argument": "`{what}` needs a value",
    r'Parser key "([^"]+)": Unable to load config': (
        "`{what}` is a group of options, written --{what}.NAME value; --help lists them"
    ),
}


def explain(error: ArgumentError, parser: ArgumentParser, name: str) -> str:
    """jsonargparse's complaint as one sentence."""
    message = " ".join(str(error).split())
    if found := re.search(r"arguments are required: (.+)", message):
        needed = ", ".join(f"--{key.strip()}" for key in found[1].split(","))
        return f"`diversed {name}` needs {needed}"
    for complaint, words in REFUSALS.items():
        if found := re.search(complaint, message):
            return words.format(what=found[1], name=name)
    typed = re.search(r'Parser key "([^"]+)": .*(?:Got|Given) value:(.*)', message)
    action = parser._option_string_actions.get(f"--{typed[1]}") if typed else None
    kind = getattr(action, "_typehint", None)
    if kind is None:
        return message
    unknown = re.search(r"NestedArg\(key='([^']+)'|Option '([^']+)' is not accepted", message)
    classes = [inner for inner in (kind, *get_args(kind)) if is_dataclass(inner)]
    names = [f"{typed[1]}.{field.name}" for inner in classes for field in fields(inner)]
    if unknown and names:
        key = f"{typed[1]}.{unknown[1] or unknown[2]}"
        return f"`{key}` is not an option of `diversed {name}`{nearest(key, names)}"
    return f"`{typed[1]}` must be {describe(kind)}, got {typed[2].strip() or 'nothing'}"


WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def describe(kind: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if _is_union(kind):
        return " or ".join(describe(item) for item in inner)
    if origin in (list, tuple):
        return f"a list, each item {describe(inner[0])}"
    return WORDS.get(kind) or getattr(kind, "__name__", str(kind))
