"""The statement that a comparison ends in: is a learned point better than static blending at the
same quality?

The static line. Each static point has a quality (mean score) and a speed. The points are exact
decoding and every ensemble:w. Straight lines join them in the order of w. Points that blend
logarithms (ensemble:w;blend=logits) stand on the other side of exact decoding, so a learned point
is compared with the faster of both kinds.

The static speed at a learned point's quality is the largest on the line at this quality or a better
one. If the line nowhere reaches the quality, it is the speed of the line's point of highest
quality.

The difference of the learned speed and the static speed is bootstrapped by prompt. All points use
the same resampled prompts, so the learned point and the line both vary. The verdict is `better` if
the interval lies above 0 by more than LEAST, `worse` if it lies below 0 by as much, else `not
shown`.

Several learned points. Whoever looks at several and tells of the best is wrong more often than at
one. The interval that decides is therefore corrected for their number (Bonferroni: level 5 % /
number). A point that was chosen on other prompts needs no correction. Points are compared at the
same method, temperature and draft length only.

Below the lowest static quality there is nothing to compare with, and a point there would pass for
better by its losses. If more than 2.5 % of resamples lie there, the verdict is not `better`.
tests/support/nominal.py measures how often the rest errs.

Two speeds are never mixed: tokens per target call, and step acceptance (see scoring.py).

A weight function given as code may stand beside the learned points, such as the oracle of `sums`,
which knows the tokens that are wording. Its speed is compared with the same static speed: that is
what a learned point of this quality could have gained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy

from .intervals import RESAMPLES, percentiles, resample
from .results import point_of, rule_of, static_place

SPEEDS = {
    "tokens per target call": ("tokens", "target_calls"),
    "step acceptance": ("acceptance", "positions"),
}
COLUMNS = ("score", *dict.fromkeys(column for pair in SPEEDS.values() for column in pair))
LEVEL = 0.05  # of a two-sided test
POWER = 0.8  # share of trials that should find a true difference
# Of either speed. A smaller difference would print as 0.000 (a head that is almost closed produces
# such), so it is treated as none.
LEAST = 5e-4


@dataclass(frozen=True)
class Statement:
    """One comparison.

    speed: a key of SPEEDS; learned: the learned point's; static: that of static blending at the
        same quality.
    quality: the learned point's mean score.
    difference, low, high: learned - static with a 95 % percentile interval.
    looked, corrected_low, corrected_high: learned points looked at on these prompts, and the
        interval corrected for it.
    below: share of resamples in which the learned point's quality is lower than every static one's.
    verdict: of the corrected interval: better, worse or not shown; prompts_needed: that would show
        this difference in 80 % of trials, or None.
    gates: (relaxation, quality, its speed - static) of every weight function given as code on the
        same prompts.
    """

    method: str
    relaxation: str
    temperature: float | None
    draft_length: int | None
    speed: str
    quality: float
    learned: float
    static: float
    difference: float
    low: float
    high: float
    looked: int
    corrected_low: float
    corrected_high: float
    below: float
    verdict: str
    prompts: int
    prompts_needed: int | None
    gates: tuple[tuple[str, float, float], ...] = ()

    def __str__(self) -> str:
        more = (
            ""
            if self.prompts_needed is None
            else f" (about {self.prompts_needed} prompts would show it)"
        )
        if self.below > LEVEL / 2 and self.verdict != "worse":
            more = " (no static point has so low a quality; measure larger weights)"
        at = corrected = ""
        if self.temperature is not None:
            at = f" at temperature {self.temperature:g}, draft length {self.draft_length}"
        if self.looked > 1:
            corrected = (
                f", [{self.corrected_low:+.3f}, {self.corrected_high:+.3f}] corrected for"
                f" {self.looked} learned points"
            )
        gates = "".join(
            f"; the gate {name} ({quality:.4f}) gains {gain:+.3f}"
            for name, quality, gain in self.gates
        )
        against = "to differ from" if self.verdict == "not shown" else "than"
        return (
            f"{self.method} {self.relaxation}{at}: {self.verdict}{more} {against} static blending"
            f" of the same quality ({self.quality:.4f}) in {self.speed}: {self.learned:.3f} against"
            f" {self.static:.3f}, difference {self.difference:+.3f} [{self.low:+.3f},"
            f" {self.high:+.3f}]{corrected}, {self.prompts} prompts{gates}"
        )


def every_statement(
    records: Sequence[dict[str, Any]],
    chosen: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Statement]:
    """Both comparisons of every learned point that static points of its method, temperature and
    draft length allow.

    chosen: relaxations that were chosen on other prompts: they are corrected for their own number
        only.
    """
    points = list(dict.fromkeys(map(point_of, records)))
    found = []
    for point in points:
        if rule_of(point[1]).kind == "learned" and len(_statics_beside(points, point)) > 1:
            looked = _looked_at(points, point[1], chosen)
            found += statements(records, *point, looked, resamples, seed)
    return found


def _statics_beside(points: Sequence[tuple], point: tuple) -> list[tuple]:
    """The static points that a point is compared with."""
    return [
        other
        for other in points
        if _group(other) == _group(point) and static_place(other[1]) is not None
    ]


def _looked_at(points: Sequence[tuple], relaxation: str, chosen: Sequence[str]) -> int:
    """How many learned points are looked at together with this one."""
    learned = [name for _, name, *_ in points if rule_of(name).kind == "learned"]
    return sum((name in chosen) == (relaxation in chosen) for name in learned)


def compared_with(points: Sequence[tuple], point: tuple, chosen: Sequence[str] = ()) -> str:
    """What a point of a sweep is compared with, in words; a point is (method, relaxation,
    temperature, length).
    """
    points = list(dict.fromkeys(other[:4] for other in points))
    statics = _statics_beside(points, point)
    if point[1] == "none":
        return "nothing, the others are compared with it"
    exact = any(other[1] == "none" for other in statics)
    words = ["none, paired by prompt" if exact else "nothing; add the relaxation none"]
    if rule_of(point[1]).kind == "learned":
        line = "no static line; add several ensemble:w"
        if len(statics) > 1:
            line = f"the line of {len(statics)} static points"
            looked = _looked_at(points, point[1], chosen)
            if looked > 1:
                line += f", one of {looked} learned points"
        words.append(line)
    return "; ".join(words)


def _group(point: tuple) -> tuple:
    """(method, temperature, draft_length): points are compared within it."""
    return point[0], *point[2:4]


def statements(
    records: Sequence[dict[str, Any]],
    method: str,
    relaxation: str,
    temperature: float | None = None,
    draft_length: int | None = None,
    looked: int = 1,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Statement]:
    """Both comparisons of one learned point with the static points of the same method among the
    records.

    records: lines of results.jsonl. Only prompts that every point has are used; a prompt's seeds
        are pooled.
    temperature, draft_length: of the point.
    looked: learned points looked at on these prompts, whose number the verdict's interval is
        corrected for.
    """
    cells: dict[str, dict[int, list[dict]]] = {}
    for record in records:
        if _group(point_of(record)) == (method, temperature, draft_length):
            texts = cells.setdefault(record["relaxation"], {})
            texts.setdefault(record["prompt"], []).append(record)
    statics = sorted((place, name) for name in cells if (place := static_place(name)) is not None)
    if relaxation not in cells:
        raise ValueError(
            f"no results of {method} with {relaxation}; measured are {', '.join(cells) or 'none'}"
        )
    if len(statics) < 2:
        raise ValueError(
            f"{method} has {len(statics)} static points; measure none and several ensemble:w"
            " beside it"
        )
    names = [name for _, name in statics]
    prompts = sorted(set.intersection(*(set(cells[name]) for name in (relaxation, *names))))
    if len(prompts) < 2:
        raise ValueError(
            f"{relaxation} and the static points share {len(prompts)} prompts; measure them on the"
            " same"
        )

    def tables(first: str) -> dict[str, numpy.ndarray]:
        points = [cells[name] for name in (first, *names)]
        return {column: table(points, prompts, column) for column in COLUMNS}

    gates = {
        name: tables(name)
        for name in cells
        if rule_of(name).kind == "code" and cells[name].keys() >= set(prompts)
    }
    mine = tables(relaxation)
    point = (method, relaxation, temperature, draft_length)
    found = []
    for speed in SPEEDS:
        one = _compare(point, speed, mine, looked, resamples, seed)
        gains = tuple((name, *_gain(its, one)) for name, its in gates.items())
        found.append(replace(one, gates=gains))
    return found


def table(
    cells: Sequence[dict[int, list[dict]]], prompts: Sequence[int], column: str
) -> numpy.ndarray:
    """[points, prompts]: the mean score of a prompt's texts, or the sum of another column over
    them.
    """

    def value(texts: list[dict]) -> float:
        if column == "tokens":
            return sum(len(text["tokens"]) for text in texts)
        total = sum(text[column] for text in texts)
        return total / len(texts) if column == "score" else total

    return numpy.array(
        [[value(cell[prompt]) for prompt in prompts] for cell in cells], dtype=numpy.float64
    )


def _compare(
    point: tuple,
    speed: str,
    tables: dict[str, numpy.ndarray],
    looked: int,
    resamples: int,
    seed: int,
) -> Statement:
    count = tables["score"].shape[1]
    quality, learned, static = _observed(tables, speed)
    drawn, below = differences(tables, speed, resamples, seed)
    difference = learned - static
    low, high = map(float, percentiles(drawn, LEVEL))
    corrected_low, corrected_high = map(float, percentiles(drawn, LEVEL / looked))
    verdict = "not shown"
    if is_better(corrected_low, below):
        verdict = "better"
    elif corrected_high < -LEAST:
        verdict = "worse"
    needed = None
    if verdict == "not shown" and below <= LEVEL / 2 and abs(difference) > LEAST:
        # From the side of the interval that reaches LEAST, which shrinks with the root of the
        # number of prompts. The spread of all resamples would ask for fewer prompts than there
        # were if the interval is lopsided.
        side = difference - corrected_low if difference > 0 else corrected_high - difference
        more = 1 + NormalDist().inv_cdf(POWER) / NormalDist().inv_cdf(1 - LEVEL / 2 / looked)
        needed = math.ceil(count * (side * more / (abs(difference) - LEAST)) ** 2)
    return Statement(
        *point,
        speed,
        quality,
        learned,
        static,
        difference,
        low,
        high,
        looked,
        corrected_low,
        corrected_high,
        below,
        verdict,
        count,
        needed,
    )


def is_better(low: float, below: float) -> bool:
    """Whether an interval that begins at `low` is called better; below: see `Statement`."""
    return low > LEAST and below <= LEVEL / 2


def _gain(tables: dict[str, numpy.ndarray], one: Statement) -> tuple[float, float]:
    """Quality of the first point, given as code, and what it gains over the static speed of a
    statement.
    """
    quality, speed, _ = _observed(tables, one.speed)
    return quality, speed - one.static


def _observed(tables: dict[str, numpy.ndarray], speed: str) -> tuple[float, float, float]:
    """Quality and speed of the first point, and the speed of static blending at that quality, on
    all prompts.
    """
    part, whole = SPEEDS[speed]
    quality = tables["score"].mean(1)[None]
    speeds = (tables[part].sum(1) / tables[whole].sum(1))[None]
    static = static_speed(quality[:, 0], quality[:, 1:], speeds[:, 1:])
    return float(quality[0, 0]), float(speeds[0, 0]), float(static[0])


def differences(
    tables: dict[str, numpy.ndarray], speed: str, resamples: int, seed: int
) -> tuple[numpy.ndarray, float]:
    """([resamples] learned speed minus that of static blending at the same quality, share below the
    line's qualities).

    tables: one [points, prompts] a column, the learned point first, then the static ones in their
        order.
    """
    prompts = tables["score"].shape[1]
    names = ("score", *SPEEDS[speed])

    def compare(sums: numpy.ndarray) -> numpy.ndarray:
        score, part, whole = numpy.split(sums, 3, axis=1)
        quality, speeds = score / prompts, part / whole
        static = static_speed(quality[:, 0], quality[:, 1:], speeds[:, 1:])
        below = quality[:, 0] < quality[:, 1:].min(1)
        return numpy.stack([speeds[:, 0] - static, below], 1)

    drawn = resample(
        numpy.concatenate([tables[name] for name in names]).T, compare, resamples, seed
    )
    return drawn[:, 0], float(drawn[:, 1].mean())


def static_speed(
    quality: numpy.ndarray, qualities: numpy.ndarray, speeds: numpy.ndarray
) -> numpy.ndarray:
    """[R] the largest speed at `quality` [R] or better on the line through the points [R, P], in
    their order.
    """
    wanted, rows = quality[:, None], numpy.arange(len(quality))
    at_points = numpy.where(qualities >= wanted, speeds, -numpy.inf).max(1)
    before, after = qualities[:, :-1], qualities[:, 1:]
    crossing = (before >= wanted) != (after >= wanted)
    share = numpy.divide(
        wanted - before, after - before, out=numpy.zeros_like(before), where=crossing
    )
    between = numpy.where(
        crossing, speeds[:, :-1] + share * numpy.diff(speeds, axis=1), -numpy.inf
    ).max(1)
    reached = qualities.max(1) >= quality
    return numpy.where(
        reached, numpy.maximum(at_points, between), speeds[rows, qualities.argmax(1)]
    )
