"""The statement that a comparison ends in: is a learned point better than what needs no training
and has the same quality?

The line. Each point without training has a quality (mean score) and a speed. The points are exact
decoding, every ensemble:w and every other rule, with whatever options. Straight lines join exact
decoding and the blends in the order of w; points that blend logarithms (ensemble:w;blend=logits)
stand on the other side of exact decoding. Every other point is joined to exact decoding alone: who
decodes a share of the texts by it gets a quality in proportion, and at most a speed in proportion.

The speed of the line at a learned point's quality is the largest on it at this quality or a better
one. If the line nowhere reaches the quality, it is the speed of its point of highest quality.

The difference of the learned speed and that of the line is bootstrapped by prompt. All points use
the same resampled prompts, so the learned point and the line both vary. The verdict is `better` if
the interval lies above 0 and the difference above the least one that counts (`Least`), `worse` if
both lie below, `equal` if no difference in the interval counts, else `not shown`. With `not shown`
stands the power: how many prompts would show a difference that just counts, its interval above 0,
in 80 % of trials.

A point without training that may be as good also forbids `better`: one whose quality and whose
speed are both not shown to be lower. Next to a corner of the line there are two ways to lie beyond
it, each with its chance to do so by luck, so each is tested at half the level.

Several learned points. Whoever looks at several and tells of the best is wrong more often than at
one. The interval that decides is therefore corrected for their number (Bonferroni: level 5 % /
number). A point that was chosen on other prompts needs no correction. Points are compared at the
same method, temperature and draft length only.

Below the lowest quality on the line there is nothing to compare with, and a point there would pass
for better by its losses. If more than 2.5 % of resamples lie there, the verdict is not `better`.
tests/support/nominal.py measures how often the rest errs.

Two speeds are never mixed: tokens per target call, and step acceptance (see scoring.py).

A weight function given as code may stand beside the learned points, such as the oracle of `sums`,
which knows the tokens that are wording. Its speed is compared with that of the same line: that is
what a learned point of this quality could have gained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from statistics import NormalDist
from typing import Any

import numpy

from .intervals import RESAMPLES, percentiles, resample
from .results import exact_beside, point_of, rule_of, static_place

SPEEDS = {
    "tokens per target call": ("tokens", "target_calls"),
    "step acceptance": ("acceptance", "positions"),
}
COLUMNS = ("score", *dict.fromkeys(column for pair in SPEEDS.values() for column in pair))
LEVEL = 0.05  # of a two-sided test
AGAINST = {"better": "than", "worse": "than", "equal": "to", "not shown": "to differ from"}
POWER = 0.8  # share of trials that should find a true difference


@dataclass(frozen=True)
class Least:
    """The least differences that count.

    Args:
        tokens_per_call: of tokens per target call, as a share of the line's.
        step_acceptance: of step acceptance.
    """

    tokens_per_call: float = 0.02
    step_acceptance: float = 0.005

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
                raise ValueError(f"`least.{name}` must be a number of at least 0, got {value!r}")

    def of(self, speed: str, line: float) -> float:
        """The least difference of a key of SPEEDS from the speed of the line."""
        return self.step_acceptance if speed == "step acceptance" else self.tokens_per_call * line


@dataclass(frozen=True)
class Statement:
    """One comparison.

    speed: a key of SPEEDS; learned: the learned point's; line: that of the line at the same
        quality.
    rival: what the line is at this quality: a point without training, or "static blending".
    quality: the learned point's mean score.
    difference, low, high: learned - line with a 95 % percentile interval.
    least: the least difference that counts.
    looked, corrected_low, corrected_high: learned points looked at on these prompts, and the
        interval corrected for it.
    below: share of resamples in which the learned point's quality is lower than every other one's.
    unbeaten: points without training that may be as good in quality and in speed.
    verdict: better, worse, equal or not shown; prompts_needed: that would show the least
        difference in 80 % of trials, or None if there are as many.
    codes: (relaxation, quality, its speed - the line's) of every weight function given as code on
        the same prompts.
    """

    method: str
    relaxation: str
    temperature: float | None
    draft_length: int | None
    speed: str
    quality: float
    learned: float
    line: float
    rival: str
    difference: float
    low: float
    high: float
    least: float
    looked: int
    corrected_low: float
    corrected_high: float
    below: float
    unbeaten: tuple[str, ...]
    verdict: str
    prompts: int
    prompts_needed: int | None
    codes: tuple[tuple[str, float, float], ...] = ()

    @property
    def against(self) -> str:
        """The word between the verdict and what it is about."""
        return AGAINST[self.verdict]

    def __str__(self) -> str:
        more = ""
        if self.below > LEVEL / 2 and self.verdict != "worse":
            more = " (no point without training has so low a quality; measure stronger ones)"
        elif self.verdict == "not shown" and self.difference > self.least and self.unbeaten:
            more = f" ({self.unbeaten[0]} may be as good)"
        elif self.prompts_needed is not None:
            more = f" (about {self.prompts_needed} prompts would show {self.least:.3f})"
        at = corrected = ""
        if self.temperature is not None:
            at = f" at temperature {self.temperature:g}, draft length {self.draft_length}"
        if self.looked > 1:
            corrected = (
                f", [{self.corrected_low:+.3f}, {self.corrected_high:+.3f}] corrected for"
                f" {self.looked} learned points"
            )
        codes = "".join(
            f"; the weight function {name} ({quality:.4f}) gains {gain:+.3f}"
            for name, quality, gain in self.codes
        )
        return (
            f"{self.method} {self.relaxation}{at}: {self.verdict}{more} {self.against} what needs"
            f" no training and has the same quality ({self.quality:.4f}) in {self.speed}:"
            f" {self.learned:.3f} against {self.line:.3f} ({self.rival}), difference"
            f" {self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}]{corrected}; from"
            f" {self.least:.3f} on it counts; {self.prompts} prompts{codes}"
        )


def every_statement(
    records: Sequence[dict[str, Any]],
    chosen: Sequence[str] = (),
    resamples: int = RESAMPLES,
    least: Least = Least(),
) -> list[Statement]:
    """Both comparisons of every learned point that points without training of its method,
    temperature and draft length allow.

    chosen: relaxations that were chosen on other prompts: they are corrected for their own number
        only.
    least: the least differences that count.
    """
    points = list(dict.fromkeys(map(point_of, records)))
    found = []
    for point in points:
        if rule_of(point[1]).kind == "learned" and len(_rivals_beside(points, point)) > 1:
            looked = _looked_at(points, point[1], chosen)
            found += statements(records, *point, looked, resamples, least)
    return found


def _rivals_beside(points: Sequence[tuple], point: tuple) -> list[tuple]:
    """The points without training that a point is compared with."""
    return [other for other in points if _group(other) == _group(point) and untrained(other[1])]


def untrained(relaxation: str) -> bool:
    """Whether a relaxation needs no training; a function that the user gives may have had one."""
    return rule_of(relaxation).kind in ("exact", "static", "other")


def _looked_at(points: Sequence[tuple], relaxation: str, chosen: Sequence[str]) -> int:
    """How many learned points are looked at together with this one."""
    learned = [name for _, name, *_ in points if rule_of(name).kind == "learned"]
    return sum((name in chosen) == (relaxation in chosen) for name in learned)


def compared_with(points: Sequence[tuple], point: tuple, chosen: Sequence[str] = ()) -> str:
    """What a point of a sweep is compared with, in words; a point is (method, relaxation,
    temperature, length).
    """
    point = point[:4]
    points = list(dict.fromkeys(other[:4] for other in points))
    rivals = _rivals_beside(points, point)
    if point == exact_beside(point):
        return "nothing, the others are compared with it"
    exact = exact_beside(point) in points
    words = ["none, paired by prompt" if exact else "nothing; add the relaxation none"]
    if rule_of(point[1]).kind == "learned":
        line = "nothing without training; add ensemble:w and other rules"
        if len(rivals) > 1:
            line = f"the line of {len(rivals)} points without training"
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
    least: Least = Least(),
) -> list[Statement]:
    """Both comparisons of one learned point with the points without training of the same method
    among the records.

    records: lines of results.jsonl. Only prompts that every point has are used; a prompt's seeds
        are pooled.
    temperature, draft_length: of the point.
    looked: learned points looked at on these prompts, whose number the verdict's interval is
        corrected for.
    least: the least differences that count.
    """
    cells: dict[str, dict[int, list[dict]]] = {}
    for record in records:
        if _group(point_of(record)) == (method, temperature, draft_length):
            texts = cells.setdefault(record["relaxation"], {})
            texts.setdefault(record["prompt"], []).append(record)
    names = [name for name in cells if untrained(name)]
    if relaxation not in cells:
        raise ValueError(
            f"no results of {method} with {relaxation}; measured are {', '.join(cells) or 'none'}"
        )
    if len(names) < 2:
        raise ValueError(
            f"{method} has {len(names)} points without training; measure none, several ensemble:w"
            " and other rules beside it"
        )
    prompts = sorted(set.intersection(*(set(cells[name]) for name in (relaxation, *names))))
    if len(prompts) < 2:
        raise ValueError(
            f"{relaxation} and the points without training share {len(prompts)} prompts; measure"
            " them on the same"
        )

    def tables(first: str) -> dict[str, numpy.ndarray]:
        points = [cells[name] for name in (first, *names)]
        return {column: table(points, prompts, column) for column in COLUMNS}

    codes = {
        name: tables(name)
        for name in cells
        if rule_of(name).kind == "code" and cells[name].keys() >= set(prompts)
    }
    mine = tables(relaxation)
    point = (method, relaxation, temperature, draft_length)
    found = []
    for speed in SPEEDS:
        one = compare(point, speed, Texts(mine, names), looked, resamples, 0, least)
        gains = tuple((name, *_gain(its, one)) for name, its in codes.items())
        found.append(replace(one, codes=gains))
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


def line_of(names: Sequence[str]) -> list[list[int]]:
    """The parts of the line, each the indices of the points that straight lines join."""
    places = [
        (place, index)
        for index, name in enumerate(names)
        if (place := static_place(name)) is not None
    ]
    parts = [[index for _, index in sorted(places)]]
    exact = [index for index, name in enumerate(names) if name == "none"]
    parts += [[*exact, index] for index, name in enumerate(names) if static_place(name) is None]
    return [part for part in parts if part]


@dataclass(frozen=True)
class Texts:
    """tables: one [points, prompts] a column of COLUMNS, the compared point first, then those of
    `names`, which need no training.
    """

    tables: dict[str, numpy.ndarray]
    names: Sequence[str]


def compare(
    point: tuple,
    speed: str,
    texts: Texts,
    looked: int,
    resamples: int,
    seed: int,
    least: Least,
) -> Statement:
    """One comparison of the first of the texts' points with the others; see `statements`."""
    tables, line = texts.tables, line_of(texts.names)
    count = tables["score"].shape[1]
    quality, learned, rival_speed = _observed(tables, speed, line)
    drawn, below, ahead = differences(tables, speed, line, resamples, seed)
    difference, counts = learned - rival_speed, least.of(speed, rival_speed)
    low, high = map(float, percentiles(drawn, LEVEL))
    corrected_low, corrected_high = map(float, percentiles(drawn, LEVEL / looked))
    lowest = numpy.percentile(ahead, 100 * LEVEL / looked / 4, axis=0).max(0)
    rivals = [name for name, one in zip(texts.names, lowest, strict=True) if one <= 0]
    verdict = "not shown"
    if corrected_low > 0 and difference > counts and below <= LEVEL / 2 and not rivals:
        verdict = "better"
    elif corrected_high < 0 and difference < -counts:
        verdict = "worse"
    elif max(-corrected_low, corrected_high) < counts and below <= LEVEL / 2:
        verdict = "equal"
    needed = None
    if verdict == "not shown" and below <= LEVEL / 2 and counts > 0:
        # From the lower side of the interval, which shrinks with the root of the number of prompts.
        # The spread of all resamples would ask for fewer prompts if the interval is lopsided.
        more = 1 + NormalDist().inv_cdf(POWER) / NormalDist().inv_cdf(1 - LEVEL / 2 / looked)
        needed = math.ceil(count * ((difference - corrected_low) * more / counts) ** 2)
        needed = needed if needed > count else None  # so many would have shown it
    return Statement(
        *point,
        speed,
        quality,
        learned,
        rival_speed,
        _rival(texts, speed, line, quality),
        difference,
        low,
        high,
        counts,
        looked,
        corrected_low,
        corrected_high,
        below,
        tuple(rivals),
        verdict,
        count,
        needed,
    )


def _rival(texts: Texts, speed: str, line: list[list[int]], quality: float) -> str:
    """What is fastest on the line at a quality."""
    _, qualities, speeds = _points(texts.tables, speed)
    wanted = numpy.array([quality])
    reached = [_part_speed(wanted, qualities[:, part], speeds[:, part])[0] for part in line]
    part = line[int(numpy.argmax(reached))]
    if max(reached) == -numpy.inf:
        return texts.names[int(qualities[0].argmax())]
    return (
        "static blending"
        if static_place(texts.names[part[-1]]) is not None
        else texts.names[part[-1]]
    )


def _gain(tables: dict[str, numpy.ndarray], one: Statement) -> tuple[float, float]:
    """Quality of the first point, given as code, and what it gains over the line of a statement."""
    first, _, _ = _points(tables, one.speed)
    return float(first[0]), float(first[1]) - one.line


def _points(
    tables: dict[str, numpy.ndarray], speed: str
) -> tuple[tuple[float, float], numpy.ndarray, numpy.ndarray]:
    """((quality, speed) of the first point, qualities [1, P] and speeds [1, P] of the others), on
    all prompts.
    """
    part, whole = SPEEDS[speed]
    quality = tables["score"].mean(1)[None]
    speeds = (tables[part].sum(1) / tables[whole].sum(1))[None]
    return (quality[0, 0], speeds[0, 0]), quality[:, 1:], speeds[:, 1:]


def _observed(
    tables: dict[str, numpy.ndarray], speed: str, line: list[list[int]]
) -> tuple[float, float, float]:
    """Quality and speed of the first point, and the speed of the line at that quality, on all
    prompts.
    """
    (quality, mine), qualities, speeds = _points(tables, speed)
    rival = line_speed(numpy.array([quality]), qualities, speeds, line)
    return float(quality), float(mine), float(rival[0])


def differences(
    tables: dict[str, numpy.ndarray], speed: str, line: list[list[int]], resamples: int, seed: int
) -> tuple[numpy.ndarray, float, numpy.ndarray]:
    """([resamples] learned speed minus that of the line at the same quality, share below the
    line's qualities, [resamples, 2, P] learned quality and speed minus those of every other point).

    tables: one [points, prompts] a column, the learned point first, then those of the line.
    line: indices among the latter, see `line_of`.
    """
    prompts = tables["score"].shape[1]
    names = ("score", *SPEEDS[speed])

    def compare(sums: numpy.ndarray) -> numpy.ndarray:
        score, part, whole = numpy.split(sums, 3, axis=1)
        quality, speeds = score / prompts, part / whole
        rival = line_speed(quality[:, 0], quality[:, 1:], speeds[:, 1:], line)
        below = quality[:, 0] < quality[:, 1:].min(1)
        ahead = [values[:, :1] - values[:, 1:] for values in (quality, speeds)]
        return numpy.concatenate([(speeds[:, 0] - rival)[:, None], below[:, None], *ahead], 1)

    drawn = resample(
        numpy.concatenate([tables[name] for name in names]).T, compare, resamples, seed
    )
    return drawn[:, 0], float(drawn[:, 1].mean()), drawn[:, 2:].reshape(len(drawn), 2, -1)


def line_speed(
    quality: numpy.ndarray,
    qualities: numpy.ndarray,
    speeds: numpy.ndarray,
    line: list[list[int]],
) -> numpy.ndarray:
    """[R] the largest speed at `quality` [R] or better on the line through the points [R, P], whose
    parts are lists of indices.
    """
    best = numpy.max(
        [_part_speed(quality, qualities[:, part], speeds[:, part]) for part in line], axis=0
    )
    highest = speeds[numpy.arange(len(quality)), qualities.argmax(1)]
    return numpy.where(best > -numpy.inf, best, highest)


def _part_speed(
    quality: numpy.ndarray, qualities: numpy.ndarray, speeds: numpy.ndarray
) -> numpy.ndarray:
    """[R] the largest speed at `quality` [R] or better on the straight lines through the points
    [R, P] in their order; -inf if they do not reach it.
    """
    wanted = quality[:, None]
    at_points = numpy.where(qualities >= wanted, speeds, -numpy.inf).max(1)
    before, after = qualities[:, :-1], qualities[:, 1:]
    crossing = (before >= wanted) != (after >= wanted)
    share = numpy.divide(
        wanted - before, after - before, out=numpy.zeros_like(before), where=crossing
    )
    between = numpy.where(crossing, speeds[:, :-1] + share * numpy.diff(speeds, axis=1), -numpy.inf)
    return numpy.maximum(at_points, between.max(1, initial=-numpy.inf))
