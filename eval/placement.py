"""Labels beside the points of a figure: each lies at the nearest place at which it covers
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import IdentityTransform

Box = tuple[float, float, float, float]  # left, bottom, right, top; in pixels
# Where a label may lie, seen from its point: (right, up) in points, the nearest first.
SIDES = ((1, 0.6), (1, 0), (-1, -0.6), (-1, 0), (1, -0.6), (-1, 0.6), (0, 1), (0, -1))
AROUND = [
    (right * away, up * away)
    for away in (9, 13, 18, 25, 34, 46, 60, 80, 105)
    for right, up in SIDES
]
# To the right, rather below than above: labels that come from the top down keep their order.
BESIDE = [(10, -down) for down in range(0, 240, 3)] + [(10, up) for up in range(3, 240, 3)]
FAR = 14  # points between a point and its label from which on a line joins them


@dataclass(frozen=True)
class Label:
    """Words beside the point x, y of a figure; bold if it names more than the point."""

    x: float
    y: float
    words: str
    colour: str
    bold: bool = False


def place(
    spots: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    taken: Sequence[Box],
    frame: Box,
    offsets: Sequence[tuple[float, float]],
) -> list[Box]:
    """The boxes of labels, each where it covers least, the nearest first.

    spots: what each label belongs to; sizes: (width, height) of each; taken: boxes that must not be
        covered, to which every label's is added; frame: the box to stay in.
    offsets: (right, up) from the spot to the nearest edge of the label, which is centred at 0; the
        first are preferred.
    """
    boxes = []
    for (x, y), (width, height) in zip(spots, sizes, strict=True):
        best = (math.inf, (x, y, x + width, y + height))
        others = numpy.array([*taken, *boxes], dtype=float).reshape(-1, 4)
        for rank, (right, up) in enumerate(offsets):
            left = x + right - width * (1 - numpy.sign(right)) / 2
            bottom = y + up - height * (1 - numpy.sign(up)) / 2
            box = (float(left), float(bottom), float(left + width), float(bottom + height))
            outside = box[0] < frame[0] or box[1] < frame[1]
            outside |= box[2] > frame[2] or box[3] > frame[3]
            cost = 10 * _shared(box, others).sum() + rank + 1e6 * outside
            if cost < best[0]:
                best = (cost, box)
        boxes.append(best[1])
    return boxes


def _shared(box: Box, others: numpy.ndarray) -> numpy.ndarray:
    """[n] the area that a box shares with each of the others [n, 4]."""
    wide = numpy.minimum(box[2], others[:, 2]) - numpy.maximum(box[0], others[:, 0])
    high = numpy.minimum(box[3], others[:, 3]) - numpy.maximum(box[1], others[:, 1])
    return wide.clip(0) * high.clip(0)


def write_around(
    figure: Figure, axes: Any, labels: list[Label], taken: list[Box], font: float
) -> None:
    """Labels around their points, which may stand out on the right a little."""
    left, bottom, right, top = axes.bbox.extents
    write_labels(figure, axes, labels, taken, AROUND, font, (left, bottom, right + 12, top))


def write_labels(
    figure: Figure,
    axes: Any,
    labels: list[Label],
    taken: list[Box],
    offsets: list[tuple[float, float]],
    font: float,
    frame: Box,
) -> None:
    """Put every label where it covers no point, no interval, no line and no other label."""
    axes.autoscale_view()  # else matplotlib settles the limits when it draws
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    pixels = {"transform": IdentityTransform()}
    texts, sizes = [], []
    for label in labels:
        weight = "bold" if label.bold else "normal"
        style = {"color": label.colour, "fontsize": font, "fontweight": weight}
        texts.append(figure.text(0, 0, label.words, va="bottom", zorder=6, **style, **pixels))
        box = texts[-1].get_window_extent(renderer).padded(2 * scale)
        sizes.append((box.width, box.height))
    spots = [tuple(axes.transData.transform((label.x, label.y))) for label in labels]
    scaled = [(right * scale, up * scale) for right, up in offsets]
    boxes = place(spots, sizes, taken, frame, scaled)
    for text, label, (x, y), (left, bottom, right, top) in zip(
        texts, labels, spots, boxes, strict=True
    ):
        text.set_position((left + 2 * scale, bottom + 2 * scale))
        end = (min(max(x, left), right), min(max(y, bottom), top))
        if math.dist((x, y), end) > FAR * scale:  # too far to be taken for granted
            line = ([x, end[0]], [y, end[1]])
            colour = label.colour
            figure.add_artist(Line2D(*line, color=colour, linewidth=0.6, alpha=0.8, **pixels))


def obstacles(axes: Any) -> list[Box]:
    """Everything drawn that a label must not cover: points, intervals, lines."""
    scale = axes.figure.dpi / 72
    boxes, paths = [], []
    for line in axes.get_lines():
        corners = axes.transData.transform(line.get_xydata())
        if line.get_marker() != "None":
            reach = (line.get_markersize() / 2 + 2) * scale
            boxes += [_around(x, y, reach) for x, y in corners]
        if line.get_linestyle() != "None":
            paths.append(corners)
    for bars in axes.collections:
        paths += map(axes.transData.transform, bars.get_segments())
    for start, end in chain(*map(pairwise, paths)):
        count = max(2, int(math.dist(start, end) / (6 * scale)))
        boxes += [_around(x, y, 2) for x, y in numpy.linspace(start, end, count)]
    return boxes


def _around(x: float, y: float, reach: float) -> Box:
    return (x - reach, y - reach, x + reach, y + reach)
