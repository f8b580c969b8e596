"""Figures of the bargain, drawn by matplotlib: frontier.png, and the SVG of the report page.

Colour tells the kind of relaxation, the marker tells the method or, on the page, what else differs
between points. Points carry their labels, so nothing has to be looked up in a legend; colours are
Okabe and Ito's, safe for colour-blind eyes. On the page they become the colours of its style sheet,
which has others for a dark screen.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..files import write_whole
from ..verifier.methods import is_lossy
from .placement import BESIDE, Label, obstacles, write_around, write_labels
from .results import kind_of, rule_of, static_place

Row = dict[str, Any]
KINDS = {  # colour, line style, name
    "exact": ("#000000", "none", "exact decoding"),
    "static": ("#0072b2", "-", "static blend"),
    "learned": ("#d55e00", "-", "learned head"),
    "code": ("#009e73", "--", "weight function"),
    "other": ("#cc79a7", "--", "other rules"),
}
INK, SOFT, RULE, FAINT = "#222222", "#555555", "#666666", "#e6e6e6"
PAGE_COLOURS = {colour: f"var(--{kind})" for kind, (colour, *_) in KINDS.items()}
PAGE_COLOURS |= {INK: "var(--ink)", SOFT: "var(--soft)", RULE: "var(--rule)"}
PAGE_COLOURS |= {FAINT: "var(--faint)", "#ffffff": "var(--paper)"}
MARKERS = "osD^vP*X"
SPEED_NAMES = {"tokens_per_call": "tokens per target call", "step_acceptance": "step acceptance"}
LOWER_LEFT = ("lower left", (0.0, -0.02))  # where the page's figures tell markers apart


@dataclass(frozen=True)
class Series:
    """A line of a figure: a value at each tick, nan if there is none; its kind, marker and name."""

    values: list[float]
    kind: str
    marker: int
    name: str


def short_name(row: Row, rows: Sequence[Row]) -> str:
    """The name of a point among others: its share, its bias, the bundle's name if there are
    several.
    """
    rule = rule_of(row["relaxation"])
    if is_lossy(row["method"]):
        return row["method"]
    if rule.kind != "learned":
        return rule.label or rule.kind
    bundles = {rule_of(other["relaxation"]).folder for other in rows} - {None}
    family = rule.folder.name.removeprefix("bundle-")
    return ", ".join(filter(None, (family * (len(bundles) > 1), rule.label))) or "bias 0"


def frontier(rows: list[Row], out: str | Path, title: str | None = None) -> Path:
    """Draw the rows of `eval.summary.summarise` into `out` (.png, .svg or .pdf by its ending)."""
    if not rows:
        raise ValueError("there is no result to draw; run `diversed eval` first")
    out = Path(out)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    drawn = io.BytesIO()
    with _style("frontier"):
        figure, axes = _canvas((8.6, 5.4), (0.09, 0.20, 0.88, 0.655), 10, 150)
        groups = [[row for row in rows if row["method"] == method] for method in methods]
        known, _ = _draw_points(axes, groups, "tokens_per_call", 10)
        labels = _labels(known, "tokens_per_call", kinds_named=True)
        write_around(figure, axes, labels, obstacles(axes), 9.5)
        _describe_axes(axes, rows)
        _describe_figure(figure, rows, title)
        if len(methods) > 1:
            # Beside the name of the axis, where no point can be; a corner inside may hold the end
            # of an interval.
            _marker_legend(figure, methods, "center right", (0.98, 0.128))
        dated = {"Date": None} if out.suffix == ".svg" else None
        figure.savefig(drawn, format=out.suffix[1:], dpi=figure.dpi, metadata=dated)
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(out, drawn.getvalue())


def frontier_svg(groups: dict[str, list[Row]], speed: str, name: str) -> str:
    """Quality against a speed for the page: words -> rows that share a marker; name: unique on
    it.
    """
    rows = [row for group in groups.values() for row in group]
    with _style(f"{name} {speed}"):
        figure, axes = _canvas((5.4, 4.1), (0.1, 0.13, 0.87, 0.77), 9)
        known, tips = _draw_points(axes, list(groups.values()), speed, 8.5)
        labels = _labels(known, speed, kinds_named=False)
        write_around(figure, axes, labels, obstacles(axes), 8.5)
        axes.set_xlabel(SPEED_NAMES[speed], loc="right", color=INK)
        axes.set_title(readable(rows[0]["metric"] or "score"), loc="left", fontsize=9.5, color=INK)
        if len(groups) > 1:
            _marker_legend(figure, list(groups), *LOWER_LEFT)
        return _svg(figure, tips, f"quality against {SPEED_NAMES[speed]}")


def lines_svg(
    series: list[Series],
    ticks: list[str],
    axis_names: tuple[str, str],
    name: str,
    markers: Sequence[str] = (),
) -> str:
    """Lines over evenly spaced ticks for the page, each named at its end.

    axis_names: of x and y; name: with that of x unique on the page; markers: what they stand for.
    """
    x_name, y_name = axis_names
    names = [line.name if len(line.name) < 23 else f"{line.name[:21]}…" for line in series]
    with _style(f"{name} {x_name}"):
        room = 0.05 + 0.0135 * max(map(len, names))
        figure, axes = _canvas((5.4, 4.1), (0.1, 0.13, 0.9 - room, 0.77), 9)
        labels, tips = [], []
        for line, end_name in zip(series, names, strict=True):
            style = {"color": KINDS[line.kind][0], "marker": MARKERS[line.marker % len(MARKERS)]}
            (drawn,) = axes.plot(ticks, line.values, markersize=5, linewidth=1.2, **style)
            drawn.set_gid(f"tip-{len(tips)}")
            known = {
                tick: value
                for tick, value in zip(ticks, line.values, strict=True)
                if not math.isnan(value)
            }
            numbers = ", ".join(f"{tick}: {value:.4g}" for tick, value in known.items())
            tips.append(f"{line.name}: {numbers}")
            last = list(known.values())[-1]
            labels.append(Label(len(ticks) - 1, last, readable(end_name), style["color"]))
        axes.set_ylim(bottom=0)
        axes.set_xlabel(x_name, loc="right", color=INK)
        axes.set_title(y_name, loc="left", fontsize=9.5, color=INK)
        labels.sort(key=lambda label: -label.y)
        write_labels(figure, axes, labels, [], BESIDE, 8.5, figure.bbox.extents)
        if len(markers) > 1:
            _marker_legend(figure, markers, *LOWER_LEFT)
        return _svg(figure, tips, f"{y_name} against {x_name}")


@contextmanager
def _style(name: str) -> Iterator[None]:
    """Text that is text, no formulas in it, the same bytes twice; ids that begin with `name`
    alone.
    """
    options = {"svg.fonttype": "none", "svg.hashsalt": readable(name), "text.parse_math": False}
    with rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's fonts may have it
        yield


def _canvas(
    size: tuple[float, float], frame: tuple[float, float, float, float], font: float, dpi: int = 72
) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, dpi=dpi, facecolor="#ffffff")
    FigureCanvasAgg(figure)
    axes = figure.add_axes(frame)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=font)
    return figure, axes


def _draw_points(
    axes: Any, groups: list[list[Row]], speed: str, font: float
) -> tuple[list[list[Row]], list[str]]:
    """Points with intervals and lines of every group, which has a marker of its own. What was
    drawn of each group by speed, and what each point says when it is pointed at.
    """
    tips, known = [], []
    axes.margins(x=0.09, y=0.14)
    for number, group in enumerate(groups):
        rows = [row for row in group if not (math.isnan(row[speed]) or math.isnan(row["score"]))]
        rows.sort(key=lambda row: row[speed])
        known.append(rows)
        for kind, line in _lines(rows, speed):
            colour, style, _ = KINDS[kind]
            values = [[row[name] for row in line] for name in (speed, "score")]
            axes.plot(*values, color=colour, linestyle=style, linewidth=1.6, alpha=0.5, zorder=2)
        for row in rows:
            marker = MARKERS[number % len(MARKERS)]
            _draw_point(axes, row, speed, marker, font).set_gid(f"tip-{len(tips)}")
            tips.append(_tip(row, speed))
    if all(row["score_low"] >= 0 for rows in known for row in rows):
        low, high = axes.get_ylim()
        axes.set_ylim(bottom=max(low, -0.05 * high))
    return known, tips


def _lines(rows: list[Row], speed: str) -> list[tuple[str, list[Row]]]:
    """(kind, rows in order) of what is joined: exact decoding with the static blends, and one
    bundle at several biases.
    """
    families: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        at = static_place(row["relaxation"])
        if at is None:
            families.setdefault(rule_of(row["relaxation"]).base, []).append((row[speed], row))
        else:
            families.setdefault("", []).append((at, row))
    lines = [sorted(family, key=lambda member: member[0]) for family in families.values()]
    joined = []
    for line in lines:
        rows = [row for _, row in line]
        # The best of a line may be exact decoding, the last of it never is.
        kinds = {kind_of(row) for row in rows} - {"exact"}
        if len(rows) > 1:
            joined.append((kinds.pop(), rows))
    return joined


def _draw_point(axes: Any, row: Row, speed: str, marker: str, font: float) -> Line2D:
    kind = kind_of(row)
    drawn = axes.errorbar(
        row[speed],
        row["score"],
        yerr=_interval(row, "score"),
        xerr=_interval(row, speed),
        color=KINDS[kind][0],
        marker=marker,
        markersize=0.65 * font if kind == "static" else 0.8 * font,
        markeredgecolor="#ffffff",
        markeredgewidth=0.8,
        elinewidth=1.3,
        capsize=0.25 * font,
        zorder=3 if kind == "static" else 4,
    )
    return drawn.lines[0]


def _interval(row: Row, name: str) -> list[list[float]] | None:
    """Distances to the ends of an interval, as matplotlib takes them; None if there is none."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or math.isnan(low):
        return None
    return [[max(0, row[name] - low)], [max(0, high - row[name])]]


def _tip(row: Row, speed: str) -> str:
    said = [row["relaxation"]]
    if row.get("temperature") is not None:
        said.append(f"temperature {row['temperature']:g}, draft length {row['draft_length']}")
    for name, words in (("score", row.get("metric") or "score"), (speed, SPEED_NAMES[speed])):
        ends = ""
        if _interval(row, name):
            ends = f" [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"
        said.append(f"{words} {row[name]:.3f}{ends}")
    return ", ".join(said)


def _labels(groups: list[list[Row]], speed: str, kinds_named: bool) -> list[Label]:
    """A label for every relaxation, at the first group's point; those that name a kind first.

    kinds_named: whether one point of a kind says what the kind is.
    """
    first: dict[str, Row] = {}
    for group in groups:
        for row in group:
            first.setdefault(row["relaxation"], row)
    rows = list(first.values())
    labels = []
    for kind in KINDS:
        points = [row for row in rows if kind_of(row) == kind]
        # The fastest point of a kind names it; of the static line the best, where it is steep.
        by = ("score", speed) if kind == "static" else (speed,)
        namer = max(points, key=lambda row: [row[name] for name in by], default=None)
        for row in points:
            bold = kinds_named and row is namer
            words = short_name(row, rows)
            if kinds_named:
                words = _words(kind, words, bold)
            labels.append(Label(row[speed], row["score"], readable(words), KINDS[kind][0], bold))
    names = {label.words for label in labels if label.bold}
    labels = [label for label in labels if label.bold or label.words not in names]
    return sorted(labels, key=lambda label: not label.bold)


def _words(kind: str, name: str, first: bool) -> str:
    """The label of one point; the first of a kind says what the kind is."""
    said = KINDS[kind][2]
    if kind == "exact":
        return said
    if kind == "code":
        return name
    if not first or kind == "other":
        return name
    if kind == "static":
        return f"{said}, w = {name}"
    return said if name == "bias 0" else f"{said}, {name}"


def _describe_axes(axes: Any, rows: list[Row]) -> None:
    arrow = "\N{RIGHTWARDS ARROW}"
    style = {"fontsize": 11, "color": INK}
    speed = f"tokens per target call  (accepted + 1, mean)  {arrow} faster"
    axes.set_xlabel(speed, loc="left", **style)
    axes.set_ylabel(readable(f"{rows[0].get('metric') or 'score'}  {arrow} better"), **style)


def _describe_figure(figure: Figure, rows: list[Row], title: str | None) -> None:
    """Title, and the small print that says what is shown."""
    title = title or "What speed costs: quality against tokens per target call"
    figure.text(0.09, 0.935, title, fontsize=14, weight="bold")
    said = [f"task {rows[0]['task']}"] if rows[0].get("task") else []
    said.append(f"{span([row['prompts'] for row in rows])} held-out prompts a point")
    seeds = [row["seeds"] for row in rows]
    if max(seeds) > 1:
        said.append(f"{span(seeds)} seeds")
    subtitle = f"{', '.join(said)}; bars are 95 % bootstrap intervals over prompts"
    figure.text(0.09, 0.888, readable(subtitle), fontsize=10.5, color="#444444")
    small = (
        "w and the heads' weights are the draft's share of the blend (1 \N{MINUS SIGN} w) target +"
        " w draft; bias is added to the learned head's logit.\nTokens per target call count the"
        " bonus token of each call and end with the text."
    )
    logits = any(rule_of(row["relaxation"]).blend == "logits" for row in rows)
    if logits:
        small += " Blend logits: target^(1 − w) draft^w instead."
    if len({row["method"] for row in rows}) > 1:
        small += "\n" if logits else " "  # which fills the line
        small += f"Labels stand at the points of {rows[0]['method']}."
    figure.text(0.09, 0.028, small, fontsize=8.5, color=RULE, linespacing=1.4)


def span(counts: list[int]) -> str:
    """The least and the largest of some counts, once if they are equal."""
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _marker_legend(
    figure: Figure, names: Sequence[str], location: str, anchor: tuple[float, float]
) -> None:
    marks = [
        Line2D([], [], linestyle="none", marker=MARKERS[number % len(MARKERS)], color=SOFT)
        for number in range(len(names))
    ]
    figure.legend(
        marks,
        list(map(readable, names)),
        loc=location,
        bbox_to_anchor=anchor,
        ncol=len(names),
        frameon=False,
        fontsize=8.5,
        columnspacing=0.6,
        handletextpad=0,
        labelcolor=SOFT,
    )


def _svg(figure: Figure, tips: list[str], words: str) -> str:
    """The figure as a part of a page: in the page's colours, with the tips as titles, no ids but
    those that are referred to.
    """
    drawn = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(drawn, format="svg", metadata=nothing, transparent=True)
    text = drawn.getvalue()
    text = text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{words}"', 1)
    for useless in (r"<style type.*?</style>", r"<clipPath.*?</clipPath>", r' clip-path="[^"]*"'):
        text = re.sub(useless, "", text, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    for colour, name in PAGE_COLOURS.items():
        text = text.replace(colour, name)
    return re.sub(
        r'<g id="tip-(\d+)">',
        lambda found: f"<g><title>{escape(tips[int(found[1])])}</title>",
        text,
    )


def readable(text: str) -> str:
    """What no file or page can hold, half a surrogate pair or a control character, replaced."""
    text = text.encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", text)
