"""`diversed eval --dry_run`: the cells of a sweep, what they cost, and what each will be compared
with.
"""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .comparison import compared_with
from .results import read_results
from .sweep import Cell, Sweep, cell_of


def tell(sweep: Sweep) -> None:
    """Print the table; models and prompts are loaded, nothing is written."""
    console = Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=200)
    records = [record for path in sweep.files() for record in read_results(path)]
    done = sweep.whole_units()
    missing = {
        cell: sum(len(unit) for unit in sweep.units if (cell, unit.start) not in done)
        for cell in sweep.cells
    }
    seconds, source = _seconds(sweep, records, missing)
    table = Table(header_style="bold", box=SIMPLE_HEAD)
    for name in (
        "method",
        "relaxation",
        "temperature",
        "draft length",
        "seed",
        "texts to decode",
        "seconds",
    ):
        table.add_column(
            name, justify="left" if name in ("method", "relaxation") else "right", overflow="fold"
        )
    table.add_column("compared with", overflow="fold")
    points = list(dict.fromkeys([*map(cell_of, records), *sweep.cells]))
    for cell in sweep.cells:
        method, relaxation, temperature, length, seed = cell
        table.add_row(
            method,
            relaxation,
            f"{temperature:g}",
            str(length),
            str(seed),
            f"{missing[cell]:,}",
            f"{missing[cell] * seconds[cell]:,.0f}",
            compared_with(points, cell, sweep.settings["chosen"]),
        )
    console.print(table)
    total = sum(missing[cell] * seconds[cell] for cell in sweep.cells)
    console.print(
        f"{sum(missing.values()):,} texts to decode of {len(sweep.cells) * len(sweep.prompts):,},"
        f" about {total:,.0f} s of decoding in one process, {source}; scoring comes on top",
        highlight=False,
        soft_wrap=True,
    )


def _seconds(
    sweep: Sweep, records: list[dict[str, Any]], missing: dict[Cell, int]
) -> tuple[dict[Cell, float], str]:
    """Seconds a text of every cell, and where the figure comes from: earlier records, else a
    probe.
    """
    began: dict[Cell, list[float]] = {}
    for record in records:
        began.setdefault(cell_of(record)._replace(seed=0), []).append(record["seconds"])
    if began:
        known = [second for values in began.values() for second in values]
        source = (
            f"estimated from {len(known):,} texts decoded before (of the same point if it has some)"
        )
    else:
        unit = max(sweep.units, key=len)
        first = next(cell for cell in sweep.cells if missing[cell])
        known = [record["seconds"] for record in sweep.records(first, unit)]
        source = f"estimated from a probe of {len(unit)} texts of {first.method} {first.relaxation}"
    known_mean = sum(known) / len(known)
    means = {cell: sum(values) / len(values) for cell, values in began.items()}
    return {cell: means.get(cell._replace(seed=0), known_mean) for cell in sweep.cells}, source
