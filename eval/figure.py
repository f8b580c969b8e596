"""One picture of the bargain: quality against tokens per target call, with intervals.

Colour tells the relaxation (exact, static blend, learned head, gate given as code), the marker
tells the method. Points carry their labels, so nothing has to be looked up in a legend; colours are
Okabe and Ito's, safe for colour-blind eyes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..verifier.relax import parse

KINDS = {  # colour, line style, words at the end of the line
    "exact": ("#000000", "none", "exact decoding"),
    "static": ("#0072B2", "-", "static blend,\ndraft's share w"),
    "learned": ("#D55E00", "-", "learned head"),
    "code": ("#009E73", "--", "gate"),
    "other": ("#CC79A7", "--", "other rules"),
}
MARKERS = "osD^vP*X"


def frontier(rows: list[dict[str, Any]], out: str | Path, title: str | None = None) -> Path:
    """Draw the rows of `eval.summary.summarise` into `out` (.png, .svg or .pdf by its ending)."""
    if not rows:
        raise ValueError("there is no result to draw; run `diversed eval` first")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    out = Path(out)
    figure = Figure(figsize=(8.6, 5.4), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.09, 0.20, 0.88, 0.655))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    labels = _draw(axes, rows, methods)
    _dress(figure, axes, rows, methods, title)
    _place(figure, axes, labels, rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(
        drawn, format=out.suffix[1:], metadata={"Date": None} if out.suffix == ".svg" else None
    )
    return write_whole(out, drawn.getvalue())


def describe(relaxation: str) -> tuple[str, str]:
    """(kind, words of its label) of a relaxation string."""
    rule = parse(relaxation, recorded=True)
    return rule.kind, rule.label


def _draw(
    axes, rows: list[dict[str, Any]], methods: list[str]
) -> list[tuple[float, float, str, str, bool]]:
    """Points, intervals and lines; returns the labels (x, y, words, colour, names its kind) that
    still need a place.

    Only the first method that has a kind of points gets their labels: the other methods' lie in the
    same order.
    """
    labels, named, namers = [], set(), {}
    bundles = {
        _family(row, "learned") for row in rows if describe(row["relaxation"])[0] == "learned"
    }
    first = {
        describe(row["relaxation"])[0]: row["method"]
        for method in reversed(methods)
        for row in rows
        if row["method"] == method
    }
    for row in sorted(rows, key=lambda row: row["tokens_per_call"]):
        kind = describe(row["relaxation"])[0]
        if row["method"] == first[kind] and (
            kind != "static" or kind not in namers or row["score"] >= namers[kind]["score"]
        ):
            namers[kind] = (
                row  # the fastest point of a kind names it; of the static line the best, where it is steep
            )
    for number, method in enumerate(methods):
        mine = [(row, *describe(row["relaxation"])) for row in rows if row["method"] == method]
        exact = [row for row, kind, _ in mine if kind == "exact"][:1]
        fresh = {kind for _, kind, _ in mine} - named
        for kind, (colour, style, words) in KINDS.items():
            points = [(row, label) for row, found, label in mine if found == kind]
            points.sort(key=lambda point: point[0]["tokens_per_call"])
            for family in dict.fromkeys(_family(row, kind) for row, _ in points):
                chosen = [(row, label) for row, label in points if _family(row, kind) == family]
                line = (exact if kind == "static" else []) + [row for row, _ in chosen]
                _draw_line(axes, line, colour, style)
                for row, label in chosen:
                    _draw_point(
                        axes, row, colour, MARKERS[number % len(MARKERS)], small=kind == "static"
                    )
                    if kind in fresh:
                        if kind == "learned" and len(bundles) > 1:
                            label = ", ".join(
                                filter(None, (Path(family).name.removeprefix("bundle-"), label))
                            )
                        text = _words(kind, label, words, row is namers[kind])
                        labels.append(
                            (
                                row["tokens_per_call"],
                                row["score"],
                                text,
                                colour,
                                row is namers[kind],
                            )
                        )
        named |= fresh
    names = {words for _, _, words, _, name in labels if name}
    labels = [label for label in labels if label[4] or label[2] not in names]
    return sorted(labels, key=lambda label: not label[4])  # the names find their places first


def _draw_line(axes, line: list[dict[str, Any]], colour: str, style: str) -> None:
    x, y = ([row[name] for row in line] for name in ("tokens_per_call", "score"))
    axes.plot(x, y, color=colour, linestyle=style, linewidth=1.6, alpha=0.5, zorder=2)


def _draw_point(axes, row: dict[str, Any], colour: str, marker: str, small: bool) -> None:
    y = row["score"]
    axes.errorbar(
        row["tokens_per_call"],
        y,
        [[max(0, y - row["score_low"])], [max(0, row["score_high"] - y)]],
        color=colour,
        marker=marker,
        markersize=6.5 if small else 8,
        markeredgecolor="white",
        markeredgewidth=0.8,
        elinewidth=1.3,
        capsize=2.5,
        zorder=3 if small else 4,
    )


def _words(kind: str, label: str, words: str, first: bool) -> str:
    """The label of one point; the first of a kind says what the kind is."""
    if kind == "exact":
        return f"{words}, {label}" if label else words
    if kind == "code":
        return label if "gate" in label else f"{label} gate"
    if kind == "static":
        return f"static blend, w = {label}" if first else label
    return ", ".join(filter(None, (words if first else "", label or ("" if first else "bias 0"))))


def _family(row: dict[str, Any], kind: str) -> str:
    """Points of one family are joined: the static weights of one way of blending, one bundle at
    several biases.
    """
    rule = parse(row["relaxation"], recorded=True)
    return rule.blend if kind == "static" else rule.base


def _dress(figure, axes, rows: list[dict[str, Any]], methods: list[str], title: str | None) -> None:
    """Title, axes, and the small print that says what is shown."""
    metric, task = rows[0].get("metric") or "score", rows[0].get("task")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#666666")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#333333", labelsize=10)
    axes.margins(x=0.09, y=0.14)
    low, high = axes.get_ylim()
    if all(row["score_low"] >= 0 for row in rows):
        axes.set_ylim(bottom=max(low, -0.05 * high))
    dark = {"fontsize": 11, "color": "#222222"}
    axes.set_xlabel(
        "tokens per target call  (accepted + 1, mean)  \N{RIGHTWARDS ARROW} faster",
        loc="left",
        **dark,
    )
    axes.set_ylabel(f"{metric}  \N{RIGHTWARDS ARROW} better", **dark)
    title = title or "What speed costs: quality against tokens per target call"
    figure.text(0.09, 0.935, title, fontsize=14, weight="bold")
    counts = sorted({row["prompts"] for row in rows})
    seeds = sorted({row["seeds"] for row in rows})
    sample = (
        " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
        + " held-out prompts a point"
    )
    sample += (
        f", {' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds"
        if seeds[-1] > 1
        else ""
    )
    subtitle = ", ".join(filter(None, (f"task {task}" if task else "", sample)))
    subtitle += "; bars are 95 % bootstrap intervals over prompts"
    figure.text(0.09, 0.888, subtitle, fontsize=10.5, color="#444444")
    small = (
        "w and the gates' weights are the draft's share of the blend (1 \N{MINUS SIGN} w) target +"
        " w draft; bias is added to the learned gate's logit.\nTokens per target call count the"
        " extra token of each call and end with the text."
    )
    if any(parse(row["relaxation"], recorded=True).blend == "logits" for row in rows):
        small += " Blend logits: target^(1 − w) draft^w instead."
    if len(methods) > 1:
        small += "\n" if "Blend" in small else " "  # which fills the line
        small += f"Labels stand at the points of {methods[0]}."
    figure.text(0.09, 0.028, small, fontsize=8.5, color="#666666", linespacing=1.4)
    if len(methods) > 1:
        for number, method in enumerate(methods):
            axes.plot(
                [], [], MARKERS[number % len(MARKERS)], color="#555555", markersize=7, label=method
            )
        # Beside the name of the axis, where no point can be; a corner inside may hold the end of an
        # interval.
        figure.legend(
            loc="center right",
            bbox_to_anchor=(0.98, 0.128),
            ncol=len(methods),
            frameon=False,
            fontsize=9,
            columnspacing=0.6,
            handletextpad=0,
        )


def _place(
    figure, axes, labels: list[tuple[float, float, str, str, bool]], rows: list[dict[str, Any]]
) -> None:
    """Put every label at the nearest place where it covers no point, no interval, no line and no
    other label.
    """
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    taken = _obstacles(axes, rows, renderer)
    for x, y, words, colour, name in labels:
        text = axes.annotate(
            words,
            (x, y),
            xytext=(0, 0),
            textcoords="offset points",
            color=colour,
            fontsize=10 if name else 9,
            weight="bold" if name else "normal",
            zorder=6,
        )
        best = None
        for distance in (9, 13, 18, 25, 34, 46):
            for across, up in (
                (1, 1),
                (1, 0),
                (-1, -1),
                (-1, 0),
                (1, -1),
                (-1, 1),
                (0, 1),
                (0, -1),
            ):
                _move(text, distance, across, up)
                box = text.get_window_extent(renderer).padded(2)
                outside = (
                    box.x0 < frame.x0
                    or box.x1 > frame.x1 + 20
                    or box.y0 < frame.y0
                    or box.y1 > frame.y1 + 20
                )
                cost = sum(_overlap(box, other) for other in taken) + distance * 2 + 1e6 * outside
                if best is None or cost < best[0]:
                    best = (cost, (distance, across, up), box)
        _move(text, *best[1])
        taken.append(best[2])


def _move(text, distance: float, across: int, up: int) -> None:
    """Move a label `distance` points from its point: `across` to the left or right, `up` or down
    (-1, 0, 1).
    """
    text.set_position((across * distance, up * distance * (0.6 if across else 1)))
    text.set(horizontalalignment={1: "left", 0: "center", -1: "right"}[across])
    text.set(verticalalignment={1: "bottom", 0: "center", -1: "top"}[up])


def _obstacles(axes, rows: list[dict[str, Any]], renderer) -> list:
    """Boxes [pixels] of everything drawn that a label must not cover: points with intervals, lines."""
    import numpy
    from matplotlib.transforms import Bbox

    boxes = []
    for row in rows:
        ends = [
            (row["tokens_per_call"], row[name]) for name in ("score_low", "score", "score_high")
        ]
        (x, low), (_, y), (_, high) = axes.transData.transform(ends)
        boxes.append(Bbox.from_extents(x - 9, min(low, y - 9), x + 9, max(high, y + 9)))
    for line in axes.get_lines():
        corners = line.get_xydata()
        if line.get_linestyle() == "None" or len(corners) < 2:
            continue
        for start, end in zip(corners, corners[1:], strict=False):
            (x0, y0), (x1, y1) = axes.transData.transform([start, end])
            for share in numpy.linspace(0, 1, max(2, int(abs(x1 - x0) + abs(y1 - y0)) // 6)):
                x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
                boxes.append(Bbox.from_extents(x - 2, y - 2, x + 2, y + 2))
    return boxes


def _overlap(one, other) -> float:
    """Area in square pixels that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(0, width) * max(0, height)
