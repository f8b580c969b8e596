"""A sweep: every cell on the same prompts, in fixed units, by one process or several, into one
results.jsonl.

A cell is (method, relaxation, temperature, draft length, seed). A text depends on its cell and
prompt alone, and units are cut the same way however many processes share them. So a run that was
killed and started again, or was divided, ends with the texts of a single one.

Process i of n appends to results.i-of-n.jsonl and decodes every n-th unit. The last process to
finish writes results.jsonl. Its bytes are what a single process writes, but for the measured
seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..data.tasks import Task
from ..files import (
    SETTINGS_FORMAT,
    Folder,
    Progress,
    cut_units,
    open_own,
    sealed,
    write_object,
    write_whole,
)
from ..runtime.completion import Request
from ..runtime.engine import Engine
from .results import RESULTS, SETTINGS, read_results, run_of
from .scoring import score_positions
from .summary import repetition


class Cell(NamedTuple):
    """One way of decoding and the seed of its texts; the draft length of `plain`, which drafts
    nothing, is 0.
    """

    method: str
    relaxation: str
    temperature: float
    draft_length: int
    seed: int


# Settings to which a later run may add, with what they are checksums of.
GROWING = {"heads": "head", "contents": "head, blend or code"}
COMPLETION = ("text", "tokens", "finished", "drafted", "accepted", "target_calls", "draft_calls")
COMPLETION += ("drafted_by_depth", "accepted_by_depth", "substitutions")


@dataclass
class Sweep:
    """What is to be decoded, and where to.

    engines: one for each cell without its seed; prompts: token ids; batch: prompts of a unit,
        decoded together.
    settings: all that decides the texts besides a cell, for SETTINGS.
    """

    folder: Folder
    cells: list[Cell]
    engines: dict[Cell, Engine]
    task: Task
    prompts: list[list[int]]
    new_tokens: int
    batch: int
    settings: dict[str, Any]

    @property
    def results(self) -> Path:
        """The file that holds everything in the end."""
        return self.folder.path / RESULTS

    @property
    def file(self) -> Path:
        """What this process appends to."""
        if self.folder.num_shards == 1:
            return self.results
        return self.folder.path / f"results.{self.folder.share}.jsonl"

    @property
    def units(self) -> list[range]:
        return cut_units(len(self.prompts), self.batch)

    def begin(self) -> None:
        """Refuse a folder that was begun with other settings, naming the first; else write them
        down.
        """
        with self.folder.turn():
            before, now = self.folder.begun(), json.loads(json.dumps(self.settings))
            if not before and self.files():
                raise ValueError(
                    f"{self.folder.path} holds {self.files()[0].name} but no {SETTINGS}; choose"
                    " another --out, or delete the folder"
                )
            if before:
                now = self._continued(before, now)
            now = SETTINGS_FORMAT | now
            if now != before:
                write_object(self.folder.path / SETTINGS, now)

    def _continued(self, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        """The settings of a folder that is continued: those it was begun with, and every head that
        was used.
        """
        self.folder.refuse_others(before, {})
        path = self.folder.path
        for name in (*GROWING, "sampling"):
            if not isinstance(before.get(name), dict):
                raise ValueError(
                    f"{path / SETTINGS} is damaged (it lists no {name}); choose another --out or"
                    " delete the folder"
                )
        grown = {name: before[name] | now.pop(name) for name in GROWING}
        for name, what in GROWING.items():
            if changed := [k for k, value in before[name].items() if grown[name][k] != value]:
                raise ValueError(
                    f"{path} holds results of another {what} under the name {changed[0]}; choose"
                    " another --out or delete the folder"
                )
        told = {name: now.pop(name) for name in ("chosen", "least")}
        # A record of an older version does not say its temperature and draft length: they are those
        # of the beginning.
        now["sampling"]["temperature"] = before["sampling"].get("temperature")
        now["draft_length"] = before.get("draft_length")
        self.folder.refuse_others(before, now)
        return now | told | grown

    @property
    def run(self) -> str:
        """What its lines are tied to."""
        return run_of(self.settings)

    def files(self) -> list[Path]:
        """Every file of results in the folder, the whole first."""
        parts = sorted(self.folder.path.glob("results.*-of-*.jsonl"))
        return [path for path in (self.results, *parts) if path.is_file()]

    def decode(self, cells: list[Cell] | None = None) -> None:
        """Append the lines of every unit of this process that no file holds as a whole; `cells` are
        by default all.
        """
        if self.file.is_file():
            self._drop_halves()
        done = self.whole_units()
        mine = self.folder.share_of(self.units)
        missing = {
            cell: [unit for unit in mine if (cell, unit.start) not in done]
            for cell in (self.cells if cells is None else cells)
        }
        total = len(missing) * sum(map(len, mine))
        left = sum(len(unit) for units in missing.values() for unit in units)
        with Progress("texts", total, total - left) as progress:
            for cell, units in missing.items():
                if units:
                    self._warm(cell, units[0])
                for unit in units:
                    lines = [sealed(record, self.run) for record in self.records(cell, unit)]
                    with os.fdopen(open_own(self.file, os.O_WRONLY | os.O_APPEND), "ab") as file:
                        file.write("".join(lines).encode())
                    progress.add(len(unit), what=f"{_words(cell)}, texts")

    def whole_units(self) -> set[tuple[Cell, int]]:
        """(cell, first prompt) of the units that some file holds as a whole."""
        return {key for path in self.files() for key in self._whole(read_results(path))}

    def complete(self) -> bool:
        """Whether every cell is there on every prompt, whoever decoded it."""
        done = self.whole_units()
        return all((cell, unit.start) in done for cell in self.cells for unit in self.units)

    def merge(self) -> None:
        """Write the results of several processes as one file, if there are some; call it when they
        are complete.
        """
        if self.files() == [self.results]:
            return
        found: dict[Cell, dict[int, str]] = {}
        before: list[Cell] = []
        for path in self.files():
            records = read_results(path)
            whole = self._whole(records)
            for record in records:
                if self._key(record) in whole:
                    line = sealed(record, self.run)
                    found.setdefault(cell_of(record), {})[record["prompt"]] = line
            if path == self.results:
                before = list(map(cell_of, records))
        order = dict.fromkeys([*before, *self.cells])
        lines = [found[cell][prompt] for cell in order for prompt in sorted(found.get(cell, ()))]
        write_whole(self.results, "".join(lines))

    def records(self, cell: Cell, unit: range) -> Iterator[dict[str, Any]]:
        """Decode one unit of prompts; one record a text."""
        engine, task = self.engines[cell._replace(seed=0)], self.task
        requests = {
            index: Request(self.prompts[index], cell.seed << 32 | index, self.new_tokens, task.stop)
            for index in unit
        }
        began = time.perf_counter()
        completions = engine.run(requests).values()
        seconds = (time.perf_counter() - began) / len(unit)
        tokens = [completion.tokens for completion in completions]
        prompts = [request.tokens for request in requests.values()]
        sums = score_positions(engine.pair, prompts, tokens, engine.relaxer, engine.sampling)
        for index, completion, total in zip(unit, completions, sums, strict=True):
            example = task.examples[index]
            score = total.target_logprob / max(1, total.positions)
            if task.scores_text:
                score = task.score(completion.text, example)
            yield {
                **cell._asdict(),
                "prompt": index,
                "id": example.id,
                "task": task.name,
                "metric": task.metric,
                "score": score,
                **{name: getattr(completion, name) for name in COMPLETION},
                **asdict(total),
                "repetition": repetition(completion.tokens),
                "seconds": seconds,
                "batch": len(unit),
            }

    def _warm(self, cell: Cell, unit: range) -> None:
        """The first call allocates and compiles; it belongs to no text's time."""
        request = Request(self.prompts[unit.start], 0, 2, self.task.stop)
        self.engines[cell._replace(seed=0)].run({unit.start: request})

    def _drop_halves(self) -> None:
        """Take the lines of half-written units out of this process's file; they are decoded
        again.
        """
        records = read_results(self.file)
        whole = self._whole(records)
        kept = [record for record in records if self._key(record) in whole]
        text = "".join(sealed(record, self.run) for record in kept)
        if text != self.file.read_text(encoding="utf-8"):
            write_whole(self.file, text)

    def _whole(self, records: list[dict[str, Any]]) -> set[tuple[Cell, int]]:
        found: dict[tuple[Cell, int], set[int]] = {}
        for record in records:
            found.setdefault(self._key(record), set()).add(record["prompt"])
        sizes = {unit.start: len(unit) for unit in self.units}
        return {key for key, prompts in found.items() if len(prompts) == sizes.get(key[1])}

    def _key(self, record: dict[str, Any]) -> tuple[Cell, int]:
        return cell_of(record), record["prompt"] // self.batch * self.batch


def cell_of(record: dict[str, Any]) -> Cell:
    """The cell that a record of results.jsonl belongs to."""
    return Cell(*(record[field] for field in Cell._fields))


def _words(cell: Cell) -> str:
    seed = f" seed {cell.seed}" if cell.seed else ""
    return f"{cell.method} {cell.relaxation} T {cell.temperature:g} L {cell.draft_length}{seed}"
