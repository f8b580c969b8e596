"""A sweep: every cell on the same prompts, in fixed units, by one process or several, into one
results.jsonl.

A cell is (method, relaxation, temperature, draft length, seed). A text depends on its cell and
prompt alone, and units are cut the same way however many processes share them, so a run that was
killed and started again, or was divided, ends with the texts of a single one. Process i of n
appends to results.i-of-n.jsonl and decodes every n-th unit; the last to finish writes
results.jsonl, whose bytes are those of a single process but for the measured seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..data.tasks import Task
from ..files import read_settings, within, write_whole
from ..runtime.completion import Request
from ..runtime.engine import Engine
from ..runtime.sampling import Sampling
from ..verifier.methods import method as find_method
from ..verifier.relax import parse
from .results import RESULTS, SETTINGS, read_results
from .scoring import PositionSums, score_positions


class Cell(NamedTuple):
    """One way of decoding and the seed of its texts; the draft length of `plain`, which drafts
    nothing, is 0.
    """

    method: str
    relaxation: str
    temperature: float
    draft_length: int
    seed: int


def every_cell(
    methods: list[str],
    relaxations: list[str],
    seeds: list[int],
    temperatures: list[float] = [1.0],  # noqa: B006
    draft_lengths: list[int] = [5],  # noqa: B006
) -> list[Cell]:
    """Every combination once, in the order given; what is wrong with them is said before any model
    is loaded.
    """
    lists = {"methods": methods, "relaxations": relaxations, "seeds": seeds}
    lists |= {"temperatures": temperatures, "draft_lengths": draft_lengths}
    for name, values in lists.items():
        if not values:
            raise ValueError(f"`{name}` is empty; name at least one")
    for relaxation in relaxations:
        parse(relaxation)
    for method in methods:
        if method != "plain":
            find_method(method)
    for temperature in temperatures:
        Sampling(temperature=temperature)
    for length in draft_lengths:
        within(1, draft_lengths=length)
    if bad := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise ValueError(f"`seeds` must lie in 0..{2**31 - 1}, got {bad[0]}")
    cells = [
        Cell(method, relaxation, float(temperature), length if method != "plain" else 0, seed)
        for temperature in temperatures
        for length in draft_lengths
        for method in methods
        for relaxation in (relaxations if method != "plain" else ["none"])
        for seed in seeds
    ]
    return list(dict.fromkeys(cells))


@dataclass
class Sweep:
    """What is to be decoded, and where to.

    engines: one for each cell without its seed; prompts: token ids; batch: prompts of a unit,
        decoded together.
    settings: all that decides the texts besides a cell, for SETTINGS.
    """

    folder: Path
    cells: list[Cell]
    engines: dict[Cell, Engine]
    task: Task
    prompts: list[list[int]]
    new_tokens: int
    batch: int
    settings: dict[str, Any]
    num_shards: int = 1
    shard_index: int = 0

    @property
    def share(self) -> str:
        """This process among all of them, in file names."""
        return f"{self.shard_index}-of-{self.num_shards}"

    @property
    def place(self) -> Path:
        """The folder that this process locks."""
        return self.folder if self.num_shards == 1 else self.folder / f".worker-{self.share}"

    @property
    def file(self) -> Path:
        """What this process appends to."""
        return self.folder / (RESULTS if self.num_shards == 1 else f"results.{self.share}.jsonl")

    @property
    def units(self) -> list[range]:
        count = len(self.prompts)
        return [
            range(start, min(start + self.batch, count)) for start in range(0, count, self.batch)
        ]

    def begin(self) -> None:
        """Refuse a folder that was begun with other settings, naming the first; else write them
        down.
        """
        path = self.folder / SETTINGS
        settings = json.loads(json.dumps(self.settings))
        if path.is_file():
            settings = _merged(read_settings(path), settings, self.folder)
        elif self.files():
            raise ValueError(
                f"{self.folder} holds {self.files()[0].name} but no {SETTINGS}; choose another"
                " --out, or delete the folder"
            )
        self._write(path, json.dumps(settings, indent=2) + "\n")

    def files(self) -> list[Path]:
        """Every file of results in the folder, the whole first."""
        whole = self.folder / RESULTS
        return [
            *([whole] if whole.is_file() else []),
            *sorted(self.folder.glob("results.*-of-*.jsonl")),
        ]

    def decode(self, cells: list[Cell] | None = None) -> None:
        """Append the lines of every unit of this process that no file holds as a whole; `cells` are
        by default all.
        """
        if self.file.is_file():
            self._drop_halves()
        cells = self.cells if cells is None else cells
        done = self.whole_units()
        mine = self.units[self.shard_index :: self.num_shards]
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("texts"),
        )
        with Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
        ) as progress:
            bar = progress.add_task("", total=len(cells) * sum(map(len, mine)), completed=0)
            for cell in cells:
                progress.update(bar, description=_words(cell))
                missing = [unit for unit in mine if (cell, unit.start) not in done]
                progress.advance(bar, sum(map(len, mine)) - sum(map(len, missing)))
                if missing:
                    self._warm(cell, missing[0])
                for unit in missing:
                    lines = [json.dumps(record) + "\n" for record in self.records(cell, unit)]
                    with open(self.file, "a", encoding="utf-8") as file:
                        file.write("".join(lines))
                    progress.advance(bar, len(unit))

    def whole_units(self) -> set[tuple[Cell, int]]:
        """(cell, first prompt) of the units that some file holds as a whole."""
        return {key for path in self.files() for key in self._whole(read_results(path))}

    def complete(self) -> bool:
        """Whether every cell is there on every prompt, whoever decoded it."""
        done = self.whole_units()
        return all((cell, unit.start) in done for cell in self.cells for unit in self.units)

    def merge(self) -> None:
        """Write the results of several processes as one file, where there are some; call it where
        they are complete.
        """
        if self.files() == [self.folder / RESULTS]:
            return
        found: dict[Cell, dict[int, str]] = {}
        for path in self.files():
            records = read_results(path)
            whole = self._whole(records)
            for record in records:
                if self._key(record) in whole:
                    found.setdefault(cell_of(record), {})[record["prompt"]] = (
                        json.dumps(record) + "\n"
                    )
        path = self.folder / RESULTS
        before = map(cell_of, read_results(path)) if path.is_file() else ()
        order = dict.fromkeys([*before, *self.cells])
        lines = [found[cell][prompt] for cell in order for prompt in sorted(found.get(cell, ()))]
        self._write(path, "".join(lines))

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
            yield {
                **cell._asdict(),
                "prompt": index,
                "id": example.id,
                "task": task.name,
                "metric": task.metric,
                "score": _score(task, example, completion.text, total),
                "text": completion.text,
                "tokens": completion.tokens,
                "finished": completion.finished,
                "drafted": completion.drafted,
                "accepted": completion.accepted,
                "target_calls": completion.target_calls,
                "draft_calls": completion.draft_calls,
                "drafted_by_depth": completion.drafted_by_depth,
                "accepted_by_depth": completion.accepted_by_depth,
                "substitutions": completion.substitutions,
                "positions": total.positions,
                "acceptance": total.acceptance,
                "bias": total.bias,
                "weight": total.weight,
                "target_logprob": total.target_logprob,
                "seconds": seconds,
                "batch": len(unit),
            }

    def _warm(self, cell: Cell, unit: range) -> None:
        """The first call allocates and compiles; it belongs to no text's time."""
        request = Request(self.prompts[unit.start], 0, 2, self.task.stop)
        self.engines[cell._replace(seed=0)].run({unit.start: request})

    def _drop_halves(self) -> None:
        """Take the lines of half-written units out of this process's file; they are decoded again."""
        records = read_results(self.file)
        whole = self._whole(records)
        text = "".join(
            json.dumps(record) + "\n" for record in records if self._key(record) in whole
        )
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

    def _write(self, path: Path, text: str) -> None:
        """Several processes may write the same at the same moment: each has a file of its own,
        either may come last.
        """
        os.replace(write_whole(path.with_name(f".{path.name}.{self.share}"), text), path)


def cell_of(record: dict[str, Any]) -> Cell:
    """The cell that a record of results.jsonl belongs to."""
    return Cell(*(record[field] for field in Cell._fields))


def _words(cell: Cell) -> str:
    seed = f" seed {cell.seed}" if cell.seed else ""
    return f"{cell.method} {cell.relaxation} T {cell.temperature:g} L {cell.draft_length}{seed}"


def _merged(before: dict[str, Any], now: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a folder that is continued: those it was begun with, and every head that was
    used.
    """
    if lacking := [
        name for name in ("heads", "sampling") if not isinstance(before.get(name), dict)
    ]:
        raise ValueError(
            f"{folder / SETTINGS} is damaged (it lists no {lacking[0]}); choose another --out or"
            " delete the folder"
        )
    heads = before["heads"] | now["heads"]
    if changed := [head for head, value in before["heads"].items() if heads[head] != value]:
        raise ValueError(
            f"{folder} holds results of another head under the name {changed[0]}; choose another"
            " --out or delete the folder"
        )
    # A record of an older version does not say its temperature and draft length: they are those of
    # the beginning.
    temperature = {"temperature": before["sampling"].get("temperature")}
    now = now | {
        "heads": heads,
        "sampling": now["sampling"] | temperature,
        "draft_length": before.get("draft_length"),
    }
    for name, value in now.items():
        if name not in ("heads", "chosen") and before.get(name) != value:
            raise ValueError(
                f"{folder} was begun with `{name}` {before.get(name)}, now it is {value}; choose"
                " another --out or delete it"
            )
    return now


def _score(task: Task, example: Any, text: str, total: PositionSums) -> float:
    if task.scores_text:
        return task.score(text, example)
    return total.target_logprob / max(1, total.positions)
