"""Results -> a table with what its words mean, and the figure; both are functions of results.jsonl and eval.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .figure import frontier
from .speed import summarise

RESULTS, SETTINGS, FIGURE = "results.jsonl", "eval.json", "frontier.png"


def report(folder: str | Path, console: Console | None = None) -> list[dict[str, Any]]:
    """Print the table and draw the figure of a folder of results; returns the rows."""
    folder = Path(folder)
    rows = summarise(folder / RESULTS)
    settings = json.loads((folder / SETTINGS).read_text())
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=200)
    picture = frontier(rows, folder / FIGURE)
    print_table(rows, settings, console)
    console.print(f"\n{folder / RESULTS}\n{picture}", highlight=False, soft_wrap=True)
    return rows


def print_table(rows: list[dict[str, Any]], settings: dict[str, Any], console: Console) -> None:
    """The rows of `summarise` as a table, with what its words mean under it."""
    first = rows[0]
    title = f"{first['task']}, {settings['split']}: {settings['target']['name']} with draft {settings['draft']['name']}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    table.add_column("relaxation", overflow="fold", min_width=min(40, max(len(row["relaxation"]) for row in rows)))
    names = ("score\n95 % interval", "minus exact\npaired interval", "step\naccept.", "accept.\nshare")
    names += ("tokens /\ncall", "tokens\n/ s", "mean\nweight", "mean\nbias", "subst.\n/ text")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        difference = "exact" if row["relaxation"] == "none" else "-"
        if row["difference"] is not None:
            difference = f"{row['difference']:+.3f} [{row['difference_low']:+.3f}, {row['difference_high']:+.3f}]"
        table.add_row(
            row["method"], row["relaxation"], f"{row['score']:.3f} [{row['score_low']:.3f}, {row['score_high']:.3f}]",
            difference, _number(row["step_acceptance"], 3), _number(row["accepted_share"], 3),
            _number(row["tokens_per_call"], 2), _number(row["tokens_per_second"], 0), _number(row["mean_weight"], 3),
            _number(row["mean_bias"], 4), _number(row["substitutions"], 2),
        )  # fmt: skip
    console.print(table)
    texts = sorted({row["requests"] for row in rows})
    console.print(
        _NOTES.format(
            metric=first["metric"], texts=" to ".join(f"{count:,}" for count in dict.fromkeys((texts[0], texts[-1]))),
            seeds=max(row["seeds"] for row in rows), **{**settings, "sampling": _words(settings["sampling"])},
        ),
        highlight=False, markup=False,
    )  # fmt: skip


_NOTES = """\
{texts} texts a row ({prompts:,} prompts, {seeds} seed(s)); {sampling}; draft length {draft_length}.
score: {metric}, mean over prompts with 95 % bootstrap interval; minus exact: against relaxation none, paired by prompt.
step accept.: mean over positions of 1 - TV(draft, relaxed target), the end of text included; no draft length in it.
accept. share: accepted / drafted tokens, nothing after the end of a text counted; it falls with the draft length.
tokens / call: per target call, the extra token and the end of text counted, nothing after it; the prefill is no call.
tokens / s: texts of a batch of {batch} together, wall time of decoding with both models and the prefill, {threads} CPU
thread(s), {device}, {dtype}; the last texts of a batch run in a smaller one.
mean weight: the draft's share over positions; mean bias: mean over positions of TV(target, relaxed target).
subst. / text: expected tokens of a text that are not the target's own (sum of TV(target, relaxed row) as decoded)."""


def _words(sampling: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in sampling.items())


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"
