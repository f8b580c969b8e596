"""Figures of the report page: SVG of 400 x 300 units whose text is text and whose colours are the
page's.

A figure fills the width of a phone or half of a desk's; hovering a point shows its numbers. Colours
are classes (k-exact, k-static, ...) that page.css defines for a light and a dark page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .markup import Markup, tag

WIDTH, HEIGHT = 400, 300
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 26, 40  # of the frame around the plot
SIZE = 11  # of the text
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-4,-4h8v8h-8z",
    "M0,-5l5,9h-10z",
    "M0,-6l5,6l-5,6l-5,-6z",
)
SHAPES += ("M-5,-5l10,10m0,-10l-10,10", "M0,5l5,-9h-10z")
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """x, y: (value, low, high), low and high of a 95 % interval; kind: a key of figure.KINDS.

    shape: index of SHAPES; label: words beside the point, "" for none; title: what hovering shows.
    """

    x: tuple[float, float, float]
    y: tuple[float, float, float]
    kind: str
    shape: int
    label: str
    title: str


@dataclass(frozen=True)
class Line:
    """values: one at each tick, None where there is none."""

    values: list[float | None]
    kind: str
    shape: int
    label: str


@dataclass(frozen=True)
class Scale:
    """Data values `low` to `high` on units `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(
            self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1
        )

    def ticks(self) -> list[float]:
        """About five round values."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next((many for many in (1, 2, 5) if (self.high - self.low) / (step * many) < 6), 10)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(index * step, 10) for index in range(first, last + 1)]


def scatter(points: list[Point], lines: list[list[Point]], x_name: str, y_name: str) -> Markup:
    """Points with both intervals, lines through some of them, and labels that cover nothing."""
    across = _scale([value for point in points for value in point.x], LEFT, WIDTH - RIGHT, pad=0.06)
    up = _scale([value for point in points for value in point.y], HEIGHT - BOTTOM, TOP, pad=0.08)
    drawn = [_axes(across, up, x_name, y_name)]
    places = [[(across(point.x[0]), up(point.y[0])) for point in line] for line in lines]
    for line, corners in zip(lines, places, strict=True):
        where = " ".join(f"{x},{y}" for x, y in corners)
        drawn.append(tag("polyline", points=where, class_=f"line k-{line[-1].kind}"))
    taken = [box for corners in places for box in _along(corners)]
    for point in points:
        x, y = across(point.x[0]), up(point.y[0])
        ends = across(point.x[1]), across(point.x[2]), up(point.y[1]), up(point.y[2])
        bars = tag("path", d=f"M{ends[0]},{y}H{ends[1]}M{x},{ends[2]}V{ends[3]}", class_="bar")
        mark = tag(
            "path",
            d=SHAPES[point.shape % len(SHAPES)],
            transform=f"translate({x} {y}) scale(.75)",
            class_="mark",
        )
        drawn.append(tag("g", tag("title", point.title), bars, mark, class_=f"k-{point.kind}"))
        taken += [
            (x - 6, y - 6, x + 6, y + 6),
            (x - 1, ends[3], x + 1, ends[2]),
            (ends[0], y - 1, ends[1], y + 1),
        ]
    for point in sorted(points, key=lambda point: (-len(point.label), point.x)):
        if point.label:
            drawn.append(_label(across(point.x[0]), up(point.y[0]), point, taken))
    return _figure(drawn, f"{y_name} against {x_name}; every number is in the table of all cells")


def lines(
    series: list[Line], ticks: list[str], x_name: str, y_name: str, zero: bool = False
) -> Markup:
    """Lines over evenly spaced ticks, each named at its end. zero: the y axis begins at 0."""
    longest = max(len(_short(line.label)) for line in series)
    end = WIDTH - 14 - 0.56 * SIZE * longest
    values = [value for line in series for value in line.values if value is not None]
    up = _scale([*values, *([0] if zero else [])], HEIGHT - BOTTOM, TOP, pad=0.04)
    spots = [
        LEFT + 12 + (end - LEFT - 18) * index / max(1, len(ticks) - 1)
        for index in range(len(ticks))
    ]
    named = [(f"{spot:.1f}", tick) for spot, tick in zip(spots, ticks, strict=True)]
    drawn = [_axes(named, up, x_name, y_name, end)]
    for line in series:
        known = [
            (x, up(value), value)
            for x, value in zip(spots, line.values, strict=True)
            if value is not None
        ]
        where = " ".join(f"{x:.1f},{y}" for x, y, _ in known)
        numbers = ", ".join(
            f"{tick}: {value:.4g}"
            for tick, value in zip(ticks, line.values, strict=True)
            if value is not None
        )
        marks = [
            tag(
                "path",
                d=SHAPES[line.shape % len(SHAPES)],
                transform=f"translate({x:.1f} {y}) scale(.7)",
                class_="mark",
            )
            for x, y, _ in known
        ]
        title = tag("title", f"{line.label}: {numbers}")
        drawn.append(
            tag(
                "g",
                title,
                tag("polyline", points=where, class_="line"),
                marks,
                class_=f"k-{line.kind}",
            )
        )
    ends = [
        (up([value for value in line.values if value is not None][-1]), line) for line in series
    ]
    for y, (real, line) in _spread(sorted(ends, key=lambda end: end[0])):
        drawn.append(
            tag(
                "path",
                d=f"M{end - 4:.1f},{real}L{end + 6:.1f},{y:.1f}",
                class_=f"bar k-{line.kind}",
            )
        )
        drawn.append(
            tag(
                "text",
                _short(line.label),
                x=f"{end + 9:.1f}",
                y=f"{y + 4:.1f}",
                class_=f"k-{line.kind}",
            )
        )
    return _figure(drawn, f"{y_name} against {x_name}")


def symbol(kind: str, shape: int) -> Markup:
    """A point alone, for a legend."""
    mark = tag("path", d=SHAPES[shape % len(SHAPES)], class_="mark")
    return tag("svg", mark, viewBox="-7 -7 14 14", class_=f"symbol k-{kind}", aria_hidden="true")


def _figure(drawn: list[Markup], words: str) -> Markup:
    return tag("svg", drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=words)


def _scale(values: list[float], start: float, end: float, pad: float) -> Scale:
    low, high = min(values), max(values)
    room = (high - low) * pad or abs(high) * 0.1 or 1
    return Scale(low - room if low < 0 or low - room > 0 else min(0, low), high + room, start, end)


def _axes(
    across: Scale | list[tuple[str, str]], up: Scale, x_name: str, y_name: str, end: float = 0
) -> Markup:
    """Grid, ticks and names. across: the scale of x, or (place, words) of every tick."""
    end, floor = end or WIDTH - RIGHT, HEIGHT - BOTTOM
    drawn = [tag("path", d=f"M{LEFT},{TOP}V{floor}H{end:.1f}", class_="axis")]
    for value in up.ticks():
        drawn.append(tag("path", d=f"M{LEFT},{up(value)}H{end:.1f}", class_="grid"))
        drawn.append(tag("text", f"{value:g}", x=LEFT - 5, y=up(value) + 4, text_anchor="end"))
    named = (
        [(across(value), f"{value:g}") for value in across.ticks()]
        if isinstance(across, Scale)
        else across
    )
    for place, words in named:
        drawn.append(tag("path", d=f"M{place},{TOP}V{floor}", class_="grid"))
        drawn.append(tag("text", words, x=place, y=floor + 15, text_anchor="middle"))
    drawn.append(tag("text", y_name, x=4, y=13, class_="name"))
    return tag(
        "g", drawn, tag("text", x_name, x=end, y=HEIGHT - 6, text_anchor="end", class_="name")
    )


def _label(x: float, y: float, point: Point, taken: list[Box]) -> Markup:
    """The point's label at the nearest place where it covers nothing, which is then taken."""
    name = _short(point.label)
    width, best = 0.57 * SIZE * len(name), None
    for distance in (8, 12, 17, 24, 33, 44, 60):
        for right, down in (
            (1, -0.7),
            (1, 0.3),
            (-1, 0.7),
            (-1, 0.3),
            (1, 0.9),
            (-1, -0.7),
            (0, -1),
            (0, 1),
        ):
            left = x + right * distance - width * (1 - right) / 2
            middle = y + down * distance
            box = (left - 2, middle - 6, left + width + 2, middle + 6)
            outside = (
                box[0] < LEFT or box[2] > WIDTH or box[1] < TOP - 8 or box[3] > HEIGHT - BOTTOM
            )
            cost = sum(_shared(box, other) for other in taken) + distance + 1e6 * outside
            if best is None or cost < best[0]:
                best = cost, box, distance
    _, box, distance = best
    taken.append(box)
    lead = None
    if distance > 12:  # too far to be taken for granted
        end = box[0] if box[0] > x else box[2] if box[2] < x else x
        lead = tag(
            "path",
            d=f"M{x},{y}L{end:.1f},{(box[1] + box[3]) / 2:.1f}",
            class_=f"lead k-{point.kind}",
        )
    words = tag(
        "text",
        name,
        x=f"{box[0] + 2:.1f}",
        y=f"{(box[1] + box[3]) / 2 + 4:.1f}",
        class_=f"k-{point.kind}",
    )
    return tag("g", lead, words)


def _along(corners: list[tuple[float, float]]) -> list[Box]:
    """Small boxes along a line, which labels keep off."""
    boxes = []
    for (x, y), (to_x, to_y) in zip(corners, corners[1:], strict=False):
        count = max(2, int(math.dist((x, y), (to_x, to_y)) / 5))
        for index in range(count + 1):
            spot = x + (to_x - x) * index / count, y + (to_y - y) * index / count
            boxes.append((spot[0] - 1.5, spot[1] - 1.5, spot[0] + 1.5, spot[1] + 1.5))
    return boxes


def _shared(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    return max(0, min(one[2], other[2]) - max(one[0], other[0])) * max(
        0, min(one[3], other[3]) - max(one[1], other[1])
    )


def _spread(ends: list[tuple[float, Line]]) -> list[tuple[float, tuple[float, Line]]]:
    """(place, end) of labels from the top down, a line's height apart and inside the frame."""
    places: list[float] = []
    for y, _ in ends:
        places.append(max(y, places[-1] + SIZE + 1) if places else y)
    over = max(0.0, places[-1] - (HEIGHT - BOTTOM)) if places else 0
    for index in reversed(range(len(places))):
        limit = places[index + 1] - SIZE - 1 if index + 1 < len(places) else places[index] - over
        places[index] = min(places[index], limit)
    return list(zip(places, ends, strict=True))


def _short(label: str) -> str:
    return label if len(label) < 23 else label[:21] + "\N{HORIZONTAL ELLIPSIS}"
