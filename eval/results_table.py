"""Results -> a table with what its words mean, and the figure; both are functions of results.jsonl
and eval.json.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..files import read_settings
from .figure import frontier
from .results import RESULTS, SETTINGS, read_results
from .run_data import remember
from .summary import summarise

FIGURE = "frontier.png"


def report(folder: str | Path, console: Console | None = None) -> list[dict[str, Any]]:
    """Print the table, draw the figure and write down the command of a folder of results; returns
    the rows.
    """
    folder = Path(folder)
    remember(folder)
    records = read_results(folder / RESULTS)
    rows = summarise(records)
    settings = read_settings(folder / SETTINGS)
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=200)
    pictures = [str(frontier(group, folder / name)) for name, group in figures(rows).items()]
    print_table(rows, settings, console)
    if note := empty_texts(records):
        console.print(note, highlight=False, soft_wrap=True)
    console.print(
        "\n".join(["", str(folder / RESULTS), *pictures]), highlight=False, soft_wrap=True
    )
    return rows


def empty_texts(records: list[dict[str, Any]]) -> str | None:
    """A sentence where exact decoding often writes nothing, which is a matter of the prompt and of
    no relaxation.
    """
    texts = [record.get("text") for record in records if record["relaxation"] == "none"]
    empty = sum(text is not None and not text.strip() for text in texts)
    if empty <= len(texts) / 10:
        return None
    return (
        f"note: {empty} of {len(texts)} texts of exact decoding are empty; a chat model may need"
        " --data.chat, other models another --data.template"
    )


def figures(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """File name -> the rows of one temperature and draft length; `plain`, which drafts nothing, is
    in all of them.
    """
    groups = list(dict.fromkeys((row["temperature"], row["draft_length"]) for row in rows))
    groups = [group for group in groups if group[1] != 0] or groups
    names = [
        FIGURE,
        *(f"frontier-T{temperature:g}-L{length}.png" for temperature, length in groups[1:]),
    ]
    return {
        name: [
            row
            for row in rows
            if row["temperature"] == group[0] and row["draft_length"] in (0, group[1])
        ]
        for name, group in zip(names, groups, strict=True)
    }


def print_table(rows: list[dict[str, Any]], settings: dict[str, Any], console: Console) -> None:
    """The rows of `summarise` as a table, with what its words mean under it."""
    first = rows[0]
    title = (
        f"{first['task']}, {settings['split']}: {settings['target']['name']} with draft"
        f" {settings['draft']['name']}"
    )
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD
    )
    table.add_column("method", no_wrap=True)
    table.add_column(
        "relaxation",
        overflow="fold",
        min_width=min(40, max(len(row["relaxation"]) for row in rows)),
    )
    names = (
        "score\n95 % interval",
        "minus exact\npaired interval",
        "score\np",
        "texts\np",
        "step\naccept.",
        "accept.\nshare",
    )
    names += ("tokens /\ncall", "tokens\n/ s", "mean\nweight", "mean\nbias", "subst.\n/ text")
    several = [
        name for name in ("temperature", "draft_length") if len({row[name] for row in rows}) > 1
    ]
    for name in (*(name.replace("_", "\n") for name in several), *names):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        difference = "exact" if row["relaxation"] == "none" else "-"
        if row["difference"] is not None:
            difference = (
                f"{row['difference']:+.3f} [{row['difference_low']:+.3f},"
                f" {row['difference_high']:+.3f}]"
            )
        table.add_row(
            row["method"],
            row["relaxation"],
            *(f"{row[name]:g}" for name in several),
            f"{row['score']:.3f} [{row['score_low']:.3f}, {row['score_high']:.3f}]",
            difference,
            _p_value(row["mcnemar"]),
            _p_value(row["text_p"]),
            _number(row["step_acceptance"], 3),
            _number(row["accepted_share"], 3),
            _number(row["tokens_per_call"], 2),
            _number(row["tokens_per_second"], 0),
            _number(row["mean_weight"], 3),
            _number(row["mean_bias"], 4),
            _number(row["substitutions"], 2),
        )
    console.print(table)
    texts, seeds = sorted({row["requests"] for row in rows}), [row["seeds"] for row in rows]
    console.print(
        _NOTES.format(
            texts=" to ".join(f"{count:,}" for count in dict.fromkeys((texts[0], texts[-1]))),
            seeds=" to ".join(map(str, dict.fromkeys((min(seeds), max(seeds))))),
            at=_at(rows),
            **{**settings, "metric": first["metric"], "sampling": _words(settings["sampling"])},
        ),
        highlight=False,
        markup=False,
    )


_NOTES = """\
{texts} texts a row ({prompts:,} prompts, {seeds} seed(s)); {at}{sampling}.
score: {metric}, mean over prompts with 95 % bootstrap interval; minus exact: against relaxation none, paired by prompt.
score p: exact test of McNemar for 0/1 scores; texts p: of the hypothesis that the first 32 tokens of the texts have the
same law as exact decoding's (counts of tokens and of neighbours, the two texts of a prompt exchanged at random).
step accept.: mean over positions of 1 - TV(draft, relaxed target), the end of text included; no draft length in it.
accept. share: accepted / drafted tokens, nothing after the end of a text counted; it falls with the draft length.
tokens / call: per target call, the extra token and the end of text counted, nothing after it; the prefill is no call.
tokens / s: texts of a batch of {batch} together, wall time of decoding with both models and the prefill, {threads} CPU
thread(s), {device}, {dtype}; the last texts of a batch run in a smaller one.
mean weight: the draft's share over positions; mean bias: mean over positions of TV(target, relaxed target).
subst. / text: expected tokens of a text that are not the target's own (sum of TV(target, relaxed row) as decoded)."""


def _at(rows: list[dict[str, Any]]) -> str:
    """The draft lengths and temperatures of the rows, in words."""
    lengths = sorted({row["draft_length"] for row in rows if row["draft_length"]})
    temperatures = sorted({row["temperature"] for row in rows if row["temperature"] is not None})
    words = [
        ("draft length", ", ".join(map(str, lengths))),
        ("temperature", ", ".join(f"{t:g}" for t in temperatures)),
    ]
    return "".join(f"{name} {values}, " for name, values in words if values)


def _words(sampling: dict[str, float]) -> str:
    return ", ".join(
        f"{name.replace('_', '-')} {value:g}"
        for name, value in sampling.items()
        if name != "temperature"
    )


def _p_value(value: float | None) -> str:
    return "-" if value is None else "<.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"
