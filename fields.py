"""What a JSON object from a file may say: a table {field: Field} and one function that finds the
first fault.

A field's name may lead into inner objects: `target.hidden_size`. The caller puts the fault into its
own sentence, with the place of the object before it and what to do behind it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .files import nearest, read_object

MISSING = object()


@dataclass(frozen=True)
class Field:
    """good: whether a value may stand there; words: what it must be, such as "a text".

    needed: whether the field must be there. each: the fields of every object in a list.
    """

    good: Callable[[Any], bool]
    words: str
    needed: bool = True
    each: Mapping[str, Field] | None = None


def optional(field: Field) -> Field:
    """A field that may be left out."""
    return replace(field, needed=False)


TEXT = Field(lambda value: isinstance(value, str), "a text")
FLAG = Field(lambda value: isinstance(value, bool), "true or false")
OBJECT = Field(lambda value: isinstance(value, dict), "an object")


def whole(low: int | None = None, high: int | None = None) -> Field:
    """A whole number in low .. high."""
    return Field(
        lambda value: type(value) is int and _between(value, low, high),
        f"a whole number{_range(low, high)}",
    )


def number(low: float | None = None, high: float | None = None) -> Field:
    """A finite number in low .. high."""
    return Field(
        lambda value: (
            type(value) in (int, float)
            and -math.inf < value < math.inf
            and _between(value, low, high)
        ),
        f"a number{_range(low, high)}",
    )


def one_of(*values: Any) -> Field:
    """One of these values."""
    return Field(lambda value: value in values, f"one of {', '.join(map(str, values))}")


def list_of(good: Callable[[Any], bool], words: str, least: int = 0) -> Field:
    """A list of at least `least` values; words: what they are, such as "texts"."""
    return Field(
        lambda value: isinstance(value, list) and len(value) >= least and all(map(good, value)),
        f"a list of {words}" + (f", at least {least}" if least else ""),
    )


def objects(fields: Mapping[str, Field], least: int = 0) -> Field:
    """A list of at least `least` objects with these fields."""
    return replace(list_of(lambda value: True, "objects", least), each=fields)


def fault(values: Any, fields: Mapping[str, Field]) -> str:
    """What is wrong with the first field that is not what it must be; empty if all are."""
    if not isinstance(values, dict):
        return f"it must be an object, got {_short(values)}"
    for name, field in fields.items():
        value = _at(values, name)
        if value is MISSING:
            if field.needed:
                return f"`{name}` is missing, {field.words}"
            continue
        if not field.good(value):
            return f"`{name}` must be {field.words}, got {_short(value)}"
        for place, inner in enumerate(value if field.each else ()):
            if found := fault(inner, field.each):
                return f"`{name}` {place}: {found}"
    return ""


def unknown(values: Mapping[str, Any], fields: Mapping[str, Field]) -> str:
    """The first field that is not in the table, with the nearest that is; empty if there is
    none.
    """
    names = [name for name in values if name not in fields]
    return f"`{names[0]}` is not a field{nearest(names[0], fields)}" if names else ""


def read_checked(path: Path, fields: Mapping[str, Field], remedy: str) -> dict[str, Any]:
    """The object in a JSON file, with the fields of the table.

    remedy: what the user can do about a damaged file, the end of the sentence.
    """
    values = read_object(path, remedy)
    if found := fault(values, fields):
        raise ValueError(f"{path} is damaged ({found}); {remedy}")
    return values


def _at(values: Any, name: str) -> Any:
    """The value under a dotted name, MISSING if it is not there."""
    for part in name.split("."):
        if not isinstance(values, dict) or part not in values:
            return MISSING
        values = values[part]
    return values


def _between(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" in {low}..{high}"
    if low is not None:
        return f", at least {low}"
    return "" if high is None else f", at most {high}"


def _short(value: Any) -> str:
    return json.dumps(value)[:60]
