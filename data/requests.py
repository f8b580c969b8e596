"""A file of prompts and the file of their results: what a line may say, and how a run that was
killed continues.

One object a line goes in, with `prompt` or the turns of a conversation as `messages` and, if they
differ from the options of the command, `id`, `seed`, `max_new_tokens`, `stop` and `relaxation`. A
relaxation is a rule or a bundle: a file names no code. One line a request comes out, in the same
order. Requests are decoded in units of fixed size, and the lines of a unit are written together. A
unit that a kill cut off is decoded again from its beginning: its batches are then the same,
floating point repeats, and the file ends with the bytes of a run in one go.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fields import TEXT, Field, fault, list_of, optional, unknown, whole
from ..files import SEEDS, Folder, cut_units, open_own, sealed, unsealed, within
from ..runtime.bundle import read_card
from ..runtime.chat import CONVERSATION, Turns
from ..runtime.completion import Completion
from ..runtime.prompt import check_text
from ..verifier.relax import parse
from .sources import scan_rows

FIELDS = {
    "prompt": optional(TEXT),
    "messages": optional(CONVERSATION),
    "id": optional(Field(lambda value: type(value) in (str, int), "a text or a whole number")),
    "seed": optional(whole(*SEEDS)),
    "max_new_tokens": optional(whole(1)),
    "stop": optional(
        list_of(lambda text: isinstance(text, str) and bool(text), "texts, none empty")
    ),
    "relaxation": optional(TEXT),
}


@dataclass(frozen=True)
class Line:
    """One request as it was written; `place` reads "line 7 of prompts.jsonl", the rest is that line
    or the options.
    """

    place: str
    id: str | int
    prompt: str | Turns
    seed: int
    max_new_tokens: int
    stop: tuple[str, ...]
    relaxation: str


def read_lines(path: str | Path, options: dict[str, Any]) -> tuple[list[Line], list[str]]:
    """The requests of the file, and what is wrong with its other lines, before any model is loaded;
    `options` are those of the command.

    A line that leaves out its id or seed has i, counted from 0, and seed * 2^32 + i.
    """
    within(-(1 << 31), (1 << 31) - 1, seed=options["seed"])
    check_relaxation(options["relaxation"])
    lines: list[Line] = []
    bad: list[str] = []
    seen: dict[str | int, str] = {}
    for index, (place, row) in enumerate(scan_rows(Path(path))):
        try:
            line = _line(index, place, row, options)
            if line.id in seen:
                raise ValueError(
                    f"{place} has the id {line.id!r} of {seen[line.id]}; give every request its own"
                )
        except ValueError as error:
            bad.append(str(error))
            continue
        seen[line.id] = place
        lines.append(line)
    return lines, bad


def _line(index: int, place: str, row: dict | ValueError, options: dict[str, Any]) -> Line:
    """The request on a line; ValueError that says what is wrong with it."""
    if isinstance(row, ValueError):
        raise row
    own = {name: value for name, value in row.items() if value is not None}
    try:
        _check_fields(own)
    except (ValueError, OSError) as error:
        raise ValueError(f"{place}: {error}") from None
    if options["method"] == "plain" and own.get("relaxation", "none") != "none":
        raise ValueError(
            f"{place} relaxes towards the draft, and method plain has none; leave `relaxation` out"
        )
    values = {"id": index, "seed": (options["seed"] << 32) + index}
    values |= {name: options[name] for name in ("max_new_tokens", "stop", "relaxation")} | own
    if "messages" in values:
        values["prompt"] = tuple(values.pop("messages"))
    return Line(place, **values)


def _check_fields(row: dict) -> None:
    if wrong := unknown(row, FIELDS) or fault(row, FIELDS):
        raise ValueError(wrong)
    if ("prompt" in row) == ("messages" in row):
        raise ValueError("`prompt` is missing, a text; or `messages`, a conversation, but not both")
    for turn in row.get("messages", ()):
        if turn["content"]:
            check_text(turn["content"])
    if "prompt" in row:
        check_text(row["prompt"])
    check_relaxation(row.get("relaxation", "none"), code=False)


def check_relaxation(relaxation: str, code: bool = True) -> None:
    """Refuse what is no relaxation, or names a folder that is no bundle, before any model is
    loaded.

    code: whether it may name a function, which is imported and so runs.
    """
    rule = parse(relaxation)
    if rule.name == "learned" and not rule.source:
        raise ValueError("`learned` needs to know which head: give the bundle's folder")
    if rule.is_code and not code:
        raise ValueError(
            f"a file cannot name code to run, got `relaxation` {relaxation!r}; give it with"
            " --relaxation"
        )
    if rule.folder:
        read_card(rule.folder)


class Results:
    """The file of results. Beside it a folder `FILE.run` holds the settings it was begun with, and
    the lock.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lines: list[Line] = []
        run = self.path.with_name(f"{self.path.name}.run")
        self.folder = Folder(run, option="--output", results=self.path)
        self.run = ""  # what its lines are tied to
        self.size = 0  # of what was written whole, bytes

    def begin(self, settings: dict[str, Any], lines: list[Line], unit: int) -> int:
        """Number of requests whose results are there; other settings are refused, what a kill cut
        off is dropped.
        """
        if self.path.exists() and not self.folder.begun():
            raise ValueError(
                f"{self.path} exists and {self.folder.path / self.folder.name} does not; choose"
                " another --output or delete it"
            )
        self.folder.begin(settings)
        self.run = json.dumps(settings)
        self.lines, self.units = lines, cut_units(len(lines), unit)
        return self._kept()

    def _kept(self) -> int:
        """Whole units of results in the file, in requests; the rest of the file is cut off."""
        if not self.path.exists():
            return 0
        found = self.path.read_bytes().split(b"\n")[:-1]
        for number, (raw, line) in enumerate(zip(found, [*self.lines, None], strict=False), 1):
            if line is None or unsealed(raw, self.run).get("id") != line.id:
                wanted = "a result, there are no more requests"
                if line:
                    wanted = f"the result of {line.place}"
                raise ValueError(
                    f"line {number} of {self.path} is not {wanted}; choose another --output or"
                    " delete it"
                )
        kept = max((unit.stop for unit in self.units if unit.stop <= len(found)), default=0)
        self.size = sum(len(raw) + 1 for raw in found[:kept])
        if self.path.stat().st_size > self.size:
            with os.fdopen(open_own(self.path, os.O_WRONLY), "wb") as file:
                file.truncate(self.size)
        return kept

    def append(self, completions: dict[int, Completion], eos: tuple[int, ...]) -> None:
        """Write the results of one unit of lines, given by their index; `eos` are the tokens that
        end a text.
        """
        results = [_result(self.lines[i], completion, eos) for i, completion in completions.items()]
        lines = "".join(sealed(result, self.run) for result in results).encode()
        with os.fdopen(open_own(self.path, os.O_WRONLY | os.O_APPEND), "ab") as file:
            if file.tell() != self.size:
                raise ValueError(
                    f"{self.path} was changed while it was written; run the same command again, or"
                    f" delete it and {self.folder.path}"
                )
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self.size += len(lines)


def _result(line: Line, completion: Completion, eos: tuple[int, ...]) -> dict[str, Any]:
    """What is written of a request: nothing that depends on the clock, which would tell a resumed
    run from another.
    """
    c = completion
    ended = "end" if c.tokens[-1] in eos else "stop"
    return {
        "id": line.id,
        "text": c.text,
        "tokens": c.tokens,
        "reason": ended if c.finished else "length",
        "seed": line.seed,
        "relaxation": line.relaxation,
        "drafted": c.drafted,
        "accepted": c.accepted,
        "drafted_by_depth": c.drafted_by_depth,
        "accepted_by_depth": c.accepted_by_depth,
        "target_calls": c.target_calls,
        "draft_calls": c.draft_calls,
        "mean_weight": None if math.isnan(c.mean_weight) else c.mean_weight,
        "substitutions": c.substitutions,
        "budget": parse(line.relaxation).budget,
    }
