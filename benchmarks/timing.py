"""How every benchmark measures: cases in turns, medians, and one JSON document of rows.

A benchmark is a file bench_NAME.py with a typed `run(*, option: type = default, ...)` that returns
a list of rows. A row is
    case, value, unit     what was measured, and the number (a median), in `unit`
    low, high             the interval around it; optional
    vs                    {other case: ratio of this value to that case's}; optional
This file needs neither jsonargparse nor datasets, for machines that lack them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from ..files import MEASURED, machine, versions, write_whole

Name = TypeVar("Name", bound=Hashable)
Case = TypeVar("Case")


def in_turns(
    cases: dict[Name, Case], measure: Callable[[Case, int], Any], repeats: int, progress: str = ""
) -> dict[Name, list]:
    """What `measure` finds for every case in each of `repeats` turns.

    The cases take turns, so that a busy machine slows all of them alike. A turn before the first
    one is not kept, because it computes what is computed once.

    measure:  (case, number of the turn) -> what is kept; the number is 0 in the turn that is not.
    progress: the words beside the progress bar; without them there is none.
    """
    kept: dict[Name, list] = {name: [] for name in cases}
    turns = range(repeats + 1)
    for turn in track(turns, progress, console=Console(stderr=True), disable=not progress):
        for name, case in cases.items():
            found = measure(case, turn)
            if turn:
                kept[name].append(found)
    return kept


def seconds(
    work: Callable[[], object],
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds that `work` takes; on a GPU between two events there."""
    if device == "cpu":
        start = clock()
        work()
        return clock() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def row(case: str, values: list[float], unit: str, **more: Any) -> dict:
    """The row of a case: the median of its values, with the lowest and the highest."""
    span = {"low": min(values), "high": max(values)}
    return {"case": case, "value": statistics.median(values), "unit": unit, **span, **more}


def record(rows: list[dict]) -> dict:
    """The document: `rows` with where and when they were measured."""
    return {
        "machine": machine(),
        "versions": versions(MEASURED),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "rows": rows,
    }


def write(document: dict, file: str | Path) -> None:
    """Write the document whole or not at all."""
    write_whole(file, json.dumps(document, indent=1) + "\n")


def table(document: dict) -> str:
    """The document as text: one line a row, then machine and versions."""
    lines = [("case", "value", "unit", "interval", "compared")]
    for found in document["rows"]:
        interval = ""
        if found.get("low") is not None:
            interval = f"{found['low']:.4g} to {found['high']:.4g}"
        ratios = [f"{ratio:.2f}x {other}" for other, ratio in found.get("vs", {}).items()]
        value = f"{found['value']:.4g}"
        lines.append((found["case"], value, found["unit"], interval, ", ".join(ratios)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells).rstrip())
    measured = ", ".join(map(str, document["machine"].values()))
    about = [f"{key} {value}" for key, value in document["versions"].items()]
    return "\n".join([*text, "", measured, f"{', '.join(about)}; {document['date']}"])
