"""The report page: one HTML file that shows what was measured, and from which files.

The page needs no network and no other file; it is a function of the files in the run folders alone,
the same bytes twice. page.html is its template, in which every value is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
from importlib.resources import files as packaged
from itertools import chain, groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from .figure import KINDS, SPEED_NAMES, Row, Series, frontier_svg, lines_svg, readable, short_name
from .provenance import differing_settings, origins, same_again
from .results import kind_of, point_of, rule_of
from .run_data import LIKELIHOOD, Run, files


def page(runs: list[Run], numbers: list[dict[str, Any] | str]) -> str:
    """The whole page; numbers: what `token_numbers` says of each run."""
    rows = [row for run in runs for row in run.rows]
    style, script = (_packaged(f"page.{kind}") for kind in ("css", "js"))
    titles = [
        f"{run.settings['task']}: {run.settings['target'].get('name')} with draft"
        f" {run.settings['draft'].get('name')}"
        for run in runs
    ]
    several = [
        name
        for name in ("run", "task", "temperature", "draft_length")
        if len({row[name] for row in rows}) > 1
    ]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "signed": signed, "interval": interval}
    environment.filters |= {"in_words": in_words, "at": settings_words, "cell": cell}
    written = environment.from_string(_packaged("page.html")).render(
        title="; ".join(dict.fromkeys(titles)),
        style=style,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        runs=[_view(run, found, len(runs) > 1) for run, found in zip(runs, numbers, strict=True)],
        groups=[_figures(words, group) for words, group in _groups(rows).items()],
        batches=_batches(runs, rows),
        likelihood=any(row["metric"] == LIKELIHOOD for row in rows),
        rows=rows,
        named=[*several, "method", "relaxation"],
        metrics=dict.fromkeys(row["metric"] or "score" for row in rows),
        differing=differing_settings(runs),
    )
    return readable(written.lstrip())


def _packaged(name: str) -> str:
    return packaged(__package__).joinpath(name).read_text(encoding="utf-8")


def _view(run: Run, numbers: dict[str, Any] | str, several: bool) -> dict[str, Any]:
    """What the template reads of a run."""
    compared = groupby(run.statements, lambda one: point_of(vars(one)))
    return {
        **vars(run),
        "heading": run.name if several else "",
        "metric": run.rows[0]["metric"] or "score",
        "compared": [list(statements) for _, statements in compared],
        "numbers": numbers,
        "origins": origins(run),
        "again": same_again(run),
        "files": files(run),
        "methods": dict.fromkeys(row["method"] for row in run.rows),
        "settings_words": dict.fromkeys(map(settings_words, run.rows)),
    }


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Words -> the rows that share figures: one task and method; in one run also one temperature
    and draft length.
    """
    found: dict[str, list[Row]] = {}
    alone = len({row["run"] for row in rows}) == 1
    for row in rows:
        if row["method"] != "plain":
            words = f"{row['task']}, {row['method']} verification"
            if alone:
                words += f", {settings_words(row)}"
            found.setdefault(words, []).append(row)
    return found


def _variants(rows: list[Row]) -> dict[str, list[Row]]:
    """Words -> the rows of one run, temperature and draft length, of which they say what
    differs.
    """
    names = {"run": "{}", "temperature": "temperature {}", "draft_length": "draft length {}"}
    several = [name for name in names if len({row[name] for row in rows}) > 1]
    found: dict[str, list[Row]] = {}
    for row in rows:
        words = ", ".join(names[name].format(row[name]) for name in several)
        found.setdefault(words, []).append(row)
    return found


def _figures(words: str, rows: list[Row]) -> dict[str, Any]:
    """The figures of rows that share them, and their acceptance by depth as a table."""
    variants = _variants(rows)
    depth = max(len(row["acceptance_by_depth"]) for row in rows)
    series, table = [], []
    for marker, (said, variant) in enumerate(variants.items()):
        table += [(row["relaxation"], said, row["acceptance_by_depth"]) for row in variant]
        for row in _main(variant):
            known = row["acceptance_by_depth"]
            values = known + [math.nan] * (depth - len(known))
            if not all(map(math.isnan, values)):
                series.append(Series(values, kind_of(row), marker, _end_name(row, rows)))
    ticks = [str(one) for one in range(1, 1 + depth)]
    by_depth = ""
    if series:
        by_depth = lines_svg(series, ticks, ("depth", "accepted so far"), words, list(variants))
    kinds = set(map(kind_of, rows))
    return {
        "words": words,
        "kinds": [kind for kind in KINDS if kind in kinds],
        "frontiers": [frontier_svg(variants, speed, words) for speed in SPEED_NAMES],
        "depth": by_depth,
        "ticks": ticks,
        "table": table,
    }


def _main(rows: list[Row]) -> list[Row]:
    """Exact decoding, learned points and code, and the outermost of the static blends."""
    statics = [row for row in rows if kind_of(row) == "static"]
    statics.sort(key=lambda row: rule_of(row["relaxation"]).constant)
    outer = statics[:1] + statics[1:][-1:]
    kinds = ("exact", "learned", "code")
    return [row for row in rows if row in outer or kind_of(row) in kinds]


def _end_name(row: Row, rows: list[Row]) -> str:
    """The name at a line's end: there a bare number would not say that it is a weight."""
    name = short_name(row, rows)
    return f"w {name}" if kind_of(row) == "static" else name


def _batches(runs: list[Run], rows: list[Row]) -> list[tuple[str, str]]:
    """(words, figure) of tokens per second against the batch, if the runs have several."""
    sizes = {run.name: run.settings["batch"] for run in runs}
    ticks = sorted(set(sizes.values()))
    figures = []
    for words, group in _groups(rows).items():
        found: dict[tuple[str, str], dict[int, float]] = {}
        for row in chain(*map(_main, _variants(group).values())):
            key = _end_name(row, group), kind_of(row)
            found.setdefault(key, {})[sizes[row["run"]]] = row["tokens_per_second"]
        series = [
            Series([speeds.get(size, math.nan) for size in ticks], kind, 0, name)
            for (name, kind), speeds in found.items()
            if len(speeds) > 1
        ]
        if series:
            names = list(map(str, ticks))
            figures.append((words, lines_svg(series, names, ("batch", "tokens/s"), words)))
    return figures


def number(value: float | None, digits: int) -> str:
    """A value as text, an en dash if there is none."""
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def signed(value: float | None, digits: int) -> str:
    """A difference as text, with its sign."""
    plus = "+" if value is not None and value > 0 else ""
    return plus + number(value, digits)


def interval(low: float | None, high: float | None, digits: int) -> str:
    """The ends of an interval as text, empty if there is none."""
    if low is None or high is None:
        return ""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def cell(row: Row, name: str, digits: int) -> tuple[str, str, str]:
    """What the table shows of a row: value, interval, and what it is sorted by."""
    value = row[name]
    ends = interval(row.get(f"{name}_low"), row.get(f"{name}_high"), digits)
    if value is None or math.isnan(value):
        return number(value, digits), ends, ""
    shown = signed(value, digits) if name == "difference" else number(value, digits)
    if name in ("mcnemar", "text_p") and value < 10**-digits:
        shown = f"<{10**-digits:g}"
    return shown, ends, f"{value:.8g}"


def settings_words(row: Row) -> str:
    """The temperature and draft length of a row, in words."""
    temperature = "unknown" if row["temperature"] is None else f"{row['temperature']:g}"
    return f"temperature {temperature}, draft length {row['draft_length']}"


def in_words(value: Any) -> str:
    """A value of a JSON file for people: what is inside it with commas between, None left out."""
    if isinstance(value, dict):
        known = {name: inner for name, inner in value.items() if inner is not None}
        return ", ".join(f"{name} {in_words(inner)}" for name, inner in known.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(in_words, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
