"""The sections of the report page that are figures: quality against speed, acceptance by depth,
tokens/s by batch.
"""

from __future__ import annotations

import math
from pathlib import Path

from ..data.scores import SCORES
from ..verifier.relax import parse
from .charts import Line, Point, lines, scatter, symbol
from .figure import KINDS, describe
from .markup import Markup, tag
from .results import static_place
from .run_data import Run
from .sections import Row, interval, number, section, settings_words, wide

LIKELIHOOD = SCORES["target_logprob"].metric
SPEED_NAMES = {"tokens_per_call": "tokens per target call", "step_acceptance": "step acceptance"}
LEGEND = {
    "exact": "exact decoding",
    "static": "static blend, labelled with the draft's share w",
    "learned": "learned gate, labelled with its bias",
    "code": "gate given as code",
    "other": "other rules",
}


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Words -> the rows that share figures: one task and method; in one run also one temperature
    and draft length.
    """
    found: dict[str, list[Row]] = {}
    alone = len({row["run"] for row in rows}) == 1
    for row in rows:
        if row["method"] != "plain":
            words = f"{row['task']}, {row['method']} verification"
            found.setdefault(f"{words}, {settings_words(row)}" if alone else words, []).append(row)
    return found


def _variants(rows: list[Row]) -> dict[tuple, str]:
    """(run, temperature, draft length) -> words that tell them apart."""
    keys = list(
        dict.fromkeys((row["run"], row["temperature"], row["draft_length"]) for row in rows)
    )
    names = ("{}", "temperature {}", "draft length {}")
    several = [index for index in range(3) if len({key[index] for key in keys}) > 1]
    return {key: ", ".join(names[index].format(key[index]) for index in several) for key in keys}


def _variant(row: Row) -> tuple:
    return row["run"], row["temperature"], row["draft_length"]


def name_of(row: Row, rows: list[Row]) -> str:
    """A point's short name: its share, its bias, with the bundle's name where the rows have
    several.
    """
    kind, words = describe(row["relaxation"])
    bundles = {_bundle(other) for other in rows if describe(other["relaxation"])[0] == "learned"}
    if kind == "learned":
        family = _bundle(row).removeprefix("bundle-") if len(bundles) > 1 else ""
        return ", ".join(filter(None, (family, words))) or "bias 0"
    return words or kind


def _bundle(row: Row) -> str:
    return Path(parse(row["relaxation"], recorded=True).base).name


def frontiers(rows: list[Row]) -> Markup:
    about = (
        "Upper right is better. Bars are 95 % intervals in both directions, prompts resampled; the"
        " blue line joins exact decoding and the static blends in the order of w, those of"
        " probabilities on one side and those of logits on the other. Hover a point for its"
        " numbers."
    )
    if any(row["metric"] == LIKELIHOOD for row in rows):
        about += (
            " A log-probability above exact decoding's is no better quality: such a rule leaves out"
            " tokens that the target itself writes now and then, and its texts are not the target's"
            " (texts p)."
        )
    parts = [tag("p", about)]
    for words, group in groups(rows).items():
        metric = group[0]["metric"] or "score"
        charts = [
            tag("figure", scatter(*_points(group, speed), name, metric))
            for speed, name in SPEED_NAMES.items()
        ]
        parts.append([tag("h3", words), tag("div", charts, class_="pair"), _legend(group)])
    return section("frontier", "Quality against speed", parts)


def _points(rows: list[Row], speed: str) -> tuple[list[Point], list[list[Point]]]:
    """Every row's point, and the lines of each variant: exact and static blends in order, a bundle
    by its biases.
    """
    variants = list(_variants(rows))
    points, families = [], {}
    for row in sorted(rows, key=lambda row: row[speed]):
        if any(math.isnan(row[name]) for name in (speed, f"{speed}_low", f"{speed}_high", "score")):
            continue
        kind, words = describe(row["relaxation"])
        shape = variants.index(_variant(row))
        x, y = ((row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in (speed, "score"))
        name = name_of(row, rows)
        title = (
            f"{row['relaxation']} {_variants(rows)[_variant(row)]}: {row['metric']}"
            f" {number(y[0], 3)}"
        )
        title += (
            f"{interval(*y[1:], 3)}, {SPEED_NAMES[speed]} {number(x[0], 3)}{interval(*x[1:], 3)}"
        )
        point = Point(
            x, y, kind, shape, name if shape == 0 or kind in ("learned", "code") else "", title
        )
        points.append(point)
        if (place := static_place(row["relaxation"])) is not None:
            families.setdefault((shape, "static"), []).append((place, point))
        elif kind == "learned":
            families.setdefault((shape, parse(row["relaxation"], recorded=True).base), []).append(
                (x[0], point)
            )
    ordered = [
        [point for _, point in sorted(line, key=lambda pair: pair[0])] for line in families.values()
    ]
    return points, [line for line in ordered if len(line) > 1]


def _legend(rows: list[Row]) -> Markup:
    kinds = [kind for kind in KINDS if any(describe(row["relaxation"])[0] == kind for row in rows)]
    items = [tag("li", symbol(kind, 0), LEGEND[kind]) for kind in kinds]
    variants = _variants(rows)
    if len(variants) > 1:
        items += [
            tag("li", symbol("plain", shape), words)
            for shape, words in enumerate(variants.values())
        ]
    return tag("ul", items, class_="legend")


def depths(rows: list[Row]) -> Markup:
    parts = [
        tag(
            "p",
            "Share of the target calls that drafted to a depth in which all drafted tokens up to it"
            " were kept; drafts that reach past the end of the text count up to it. Static blends:"
            " the smallest and largest w.",
        )
    ]
    for words, group in groups(rows).items():
        ticks = [
            str(depth)
            for depth in range(1, 1 + max(len(row["acceptance_by_depth"]) for row in group))
        ]
        if not ticks:
            continue
        chart = lines(
            [_depth_line(row, group, len(ticks)) for row in _main(group)],
            ticks,
            "depth",
            "accepted so far",
        )
        head = [tag("th", words, scope="col") for words in ("relaxation", *ticks)]
        body = [
            tag(
                "tr",
                tag("th", row["relaxation"], *_aside(row, group), scope="row"),
                [tag("td", number(value, 3)) for value in row["acceptance_by_depth"]],
            )
            for row in group
        ]
        table = wide(
            tag("table", tag("thead", tag("tr", head)), tag("tbody", body)), "Acceptance by depth"
        )
        details = tag("details", tag("summary", "All cells in numbers"), table)
        parts.append(
            [tag("h3", words), tag("figure", chart, class_="one"), _legend(_main(group)), details]
        )
    return section("depth", "Acceptance by depth", parts)


def _aside(row: Row, rows: list[Row]) -> list[Markup]:
    words = _variants(rows)[_variant(row)]
    return [tag("small", f" {words}")] if words else []


def _main(rows: list[Row]) -> list[Row]:
    """Exact decoding, the learned points and gates, and of every variant's static blends the
    outermost.
    """
    chosen = []
    for variant in _variants(rows):
        mine = [row for row in rows if _variant(row) == variant]
        statics = [row for row in mine if describe(row["relaxation"])[0] == "static"]
        statics.sort(key=lambda row: parse(row["relaxation"], recorded=True).constant)
        outer = statics[:1] + statics[1:][-1:]
        chosen += [
            row
            for row in mine
            if row in outer or describe(row["relaxation"])[0] in ("exact", "learned", "code")
        ]
    return chosen


def _name(row: Row, rows: list[Row]) -> str:
    """The name at a line's end, where no other point of the static line says what a bare number is."""
    name = name_of(row, rows)
    return f"w {name}" if describe(row["relaxation"])[0] == "static" else name


def _depth_line(row: Row, rows: list[Row], depth: int) -> Line:
    kind = describe(row["relaxation"])[0]
    found = [None if math.isnan(value) else value for value in row["acceptance_by_depth"]]
    shape = list(_variants(rows)).index(_variant(row))
    return Line((found + [None] * depth)[:depth], kind, shape, _name(row, rows))


def batches(runs: list[Run], rows: list[Row]) -> Markup | None:
    """Tokens per second against the batch, where the runs have several."""
    sizes = {run.name: run.settings["batch"] for run in runs}
    ticks = sorted(set(sizes.values()))
    if len(ticks) < 2:
        return None
    parts = []
    for words, group in groups(rows).items():
        found: dict[tuple, dict[int, Row]] = {}
        for row in _main(group):
            found.setdefault((_name(row, group), describe(row["relaxation"])[0]), {})[
                sizes[row["run"]]
            ] = row
        series = [
            Line(
                [by[size]["tokens_per_second"] if size in by else None for size in ticks],
                kind,
                0,
                name,
            )
            for (name, kind), by in found.items()
            if len(by) > 1
        ]
        if series:
            chart = lines(series, [str(size) for size in ticks], "batch", "tokens/s", zero=True)
            parts.append(
                [tag("h3", f"Tokens/s against batch: {words}"), tag("figure", chart, class_="one")]
            )
    return tag("div", parts) if parts else None
