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
from ..verifier.methods import is_lossy
from .figure import frontier, span
from .results import RESULTS, SETTINGS, exact_beside, kind_of, point_of, read_results
from .run_data import remember
from .summary import summarise

FIGURE = "frontier.png"
LOOPING = 0.05  # share of 4-grams by which a relaxed text must repeat itself more to be told of


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
    for note in filter(None, (empty_texts(records), looping_texts(rows))):
        console.print(note, highlight=False, soft_wrap=True)
    console.print(
        "\n".join(["", str(folder / RESULTS), *pictures]), highlight=False, soft_wrap=True
    )
    return rows


def empty_texts(records: list[dict[str, Any]]) -> str | None:
    """A sentence if exact decoding often writes nothing, which is a matter of the prompt and of
    no relaxation.
    """
    texts = [record.get("text") for record in records if kind_of(record) == "exact"]
    empty = sum(text is not None and not text.strip() for text in texts)
    if empty <= len(texts) / 10:
        return None
    return (
        f"note: {empty} of {len(texts)} texts of exact decoding are empty; a chat model may need"
        " --data.chat, other models another --data.template"
    )


def looping_texts(rows: list[dict[str, Any]]) -> str | None:
    """A sentence if relaxed texts repeat themselves by LOOPING more than exact decoding's."""
    exact = {_group(row): row["repetition"] for row in rows if kind_of(row) == "exact"}
    found = []
    for row in rows:
        before = exact.get(_group(row))
        if None not in (before, row["repetition"]) and row["repetition"] > before + LOOPING:
            found.append(
                f"{row['method']} {row['relaxation']} {row['repetition']:.2f} ({before:.2f})"
            )
    if not found:
        return None
    return (
        "note: relaxed texts repeat themselves; share of 4-grams that occurred before (exact"
        f" decoding's): {', '.join(found)}"
    )


def _group(row: dict[str, Any]) -> tuple:
    method, _, *at = exact_beside(point_of(row))
    return method, *at


def figures(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """File name -> the rows of one temperature and draft length; `plain`, which drafts nothing, is
    in all of them.
    """
    groups = list(dict.fromkeys((row["temperature"], row["draft_length"]) for row in rows))
    groups = [group for group in groups if group[1] != 0] or groups
    found = {}
    for temperature, length in groups:
        name = f"frontier-T{temperature:g}-L{length}.png" if found else FIGURE
        found[name] = [
            row
            for row in rows
            if row["temperature"] == temperature and row["draft_length"] in (0, length)
        ]
    return found


NUMBERS = {  # head: key of a row, digits
    "step\naccept.": ("step_acceptance", 3),
    "accept.\nshare": ("accepted_share", 3),
    "tokens /\ncall": ("tokens_per_call", 2),
    "tokens\n/ s": ("tokens_per_second", 0),
    "mean\nweight": ("mean_weight", 3),
    "mean\nbias": ("mean_bias", 4),
    "subst.\n/ text": ("substitutions", 2),
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
    longest = max(len(row["relaxation"]) for row in rows)
    table.add_column("method", no_wrap=True)
    table.add_column("relaxation", overflow="fold", min_width=min(40, longest))
    several = [
        name for name in ("temperature", "draft_length") if len({row[name] for row in rows}) > 1
    ]
    heads = ["score\n95 % interval", "minus exact\npaired interval", "score\np", "texts\np"]
    for name in (*(name.replace("_", "\n") for name in several), *heads, *NUMBERS):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        difference = "exact" if kind_of(row) == "exact" else "-"
        if row["difference"] is not None:
            difference = _interval(row, "difference", "+")
        table.add_row(
            row["method"],
            row["relaxation"],
            *(f"{row[name]:g}" for name in several),
            _interval(row, "score"),
            difference,
            _p_value(row["mcnemar"]),
            _p_value(row["text_p"]),
            *(_number(row[name], digits) for name, digits in NUMBERS.values()),
        )
    console.print(table)
    notes = _NOTES.format(
        texts=span([row["requests"] for row in rows]),
        seeds=span([row["seeds"] for row in rows]),
        at=_at(rows),
        **{**settings, "metric": first["metric"], "sampling": _words(settings["sampling"])},
    )
    if any(is_lossy(row["method"]) for row in rows):
        notes += _LOSSY
    console.print(notes, highlight=False, markup=False)


_NOTES = """\
{texts} texts a row ({prompts:,} prompts, {seeds} seed(s)); {at}{sampling}.
score: {metric}, mean over prompts with 95 % bootstrap interval; minus exact: against relaxation none, paired by prompt.
score p: exact test of McNemar for 0/1 scores; texts p: of the hypothesis that the first 32 tokens of the texts have the
same law as exact decoding's (counts of tokens and of neighbours, the two texts of a prompt exchanged at random).
step accept.: mean over positions of 1 - TV(draft, relaxed target), the end of text included; no draft length in it.
accept. share: accepted / drafted tokens, nothing after the end of a text counted; it falls with the draft length.
tokens / call: per target call, the bonus token and the end of text counted, nothing after it; the prefill is no call.
tokens / s: texts of a batch of {batch} together, wall time of decoding with both models and the prefill, {threads} CPU
thread(s), {device}, {dtype}; the last texts of a batch run in a smaller one.
mean weight: the draft's share over positions; mean bias: mean over positions of TV(target, relaxed target).
subst. / text: expected tokens of a text that are not the target's own (sum of TV(target, relaxed row) as decoded)."""
_LOSSY = """
fly is lossy though no row is relaxed: step accept., mean weight and mean bias are those of exact decoding; compare its
score, tokens / call and subst. / text."""


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


def _interval(row: dict[str, Any], name: str, sign: str = "") -> str:
    value, low, high = (f"{row[name + end]:{sign}.3f}" for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


def _p_value(value: float | None) -> str:
    return "-" if value is None else "<.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"
