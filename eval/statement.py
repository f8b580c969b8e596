"""The statement that a comparison ends in: is a learned point better than static blending at the
same quality?

The static points, exact decoding and ensemble:w in the order of w, are joined by straight lines in
the plane of quality (mean score) and speed; those that blend logarithms (ensemble:w;blend=logits)
stand on the other side of exact decoding, so that a learned point is compared with the faster of
both kinds. At the learned point's quality the static speed is the largest on that line at this
quality or a better one; where the line nowhere reaches it, the speed of its point of highest
quality. The difference of the learned speed and this one is bootstrapped by prompt, all points on
the same resampled prompts, so that both the learned point and the line it is compared with vary.
Below, `better` is an interval above 0 by more than LEAST, `worse` one below 0 by as much, else `not
shown`.

Whoever looks at several learned points and tells of the best is wrong more often than at one: the
interval that decides is then corrected for their number (Bonferroni: level 5 % / number). A point
that was chosen on other prompts needs no correction. Points are compared at the same method,
temperature and draft length only.

Below the lowest static quality there is nothing to compare with, and a point there would pass for
better by its losses: where more than 2.5 % of resamples lie there the verdict is not `better`. See
tests/support/nominal.py for how often the rest errs.

Two speeds, never mixed: tokens per target call, and step acceptance (see speed.py).

Where a gate given as code was measured beside it, such as the oracle of `sums`, which knows which
tokens are wording, its speed is compared with the same static speed: what a learned point of this
quality could have gained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy

from ..verifier.relax import parse
from .figure import describe
from .quality import RESAMPLES, resampled

SPEEDS = {
    "tokens per target call": ("tokens", "target_calls"),
    "step acceptance": ("acceptance", "positions"),
}
LEVEL, POWER = (
    0.05,
    0.8,
)  # of a two-sided test, and of the trials that should find a true difference
LEAST = 5e-4  # of either speed: a smaller difference is none in three digits, as of a gate that is all but closed


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
    gates: (relaxation, quality, its speed - static) of every gate given as code on the same
        prompts.
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
    points = list(dict.fromkeys(map(_point, records)))
    found = []
    for method, relaxation, temperature, length in points:
        beside = [other for other in points if _group(other) == (method, temperature, length)]
        if (
            is_learned(relaxation)
            and sum(static_place(other[1]) is not None for other in beside) > 1
        ):
            looked = learned_points(points, relaxation, chosen)
            found += statements(
                records, method, relaxation, temperature, length, looked, resamples, seed
            )
    return found


def is_learned(relaxation: str) -> bool:
    """Whether a relaxation is a trained gate: a bundle, not a gate given as code."""
    return describe(relaxation)[0] == "learned"


def learned_points(points: Sequence[tuple], relaxation: str, chosen: Sequence[str]) -> int:
    """How many learned points are looked at together with this one; points begin with (method,
    relaxation).
    """
    return sum(
        is_learned(other) and (other in chosen) == (relaxation in chosen) for _, other, *_ in points
    )


def compared_with(points: Sequence[tuple], point: tuple, chosen: Sequence[str] = ()) -> str:
    """What a point of a sweep is compared with, in words; a point is (method, relaxation,
    temperature, length).
    """
    points = list(dict.fromkeys(other[:4] for other in points))
    beside = [other[1] for other in points if _group(other) == _group(point)]
    if point[1] == "none":
        return "nothing, the others are compared with it"
    words = ["none, paired by prompt"] if "none" in beside else ["nothing; add the relaxation none"]
    statics = sum(static_place(other) is not None for other in beside)
    if is_learned(point[1]) and statics > 1:
        looked = learned_points(points, point[1], chosen)
        words.append(
            f"the line of {statics} static points"
            + (f", one of {looked} learned points" * (looked > 1))
        )
    elif is_learned(point[1]):
        words.append("no static line; add several ensemble:w")
    return "; ".join(words)


def _point(record: dict[str, Any]) -> tuple[str, str, float | None, int | None]:
    return (
        record["method"],
        record["relaxation"],
        record.get("temperature"),
        record.get("draft_length"),
    )


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
    temperature, draft_length: of the point, where the records have several.
    looked: learned points looked at on these prompts, whose number the verdict's interval is
        corrected for.
    """
    groups = {_group(_point(record)) for record in records if record["method"] == method}
    asked = {1: temperature, 2: draft_length}
    groups = [
        group for group in groups if all(value in (None, group[i]) for i, value in asked.items())
    ]
    if len(groups) > 1:
        raise ValueError(
            f"{method} was measured at {len(groups)} pairs of temperature and draft length; name"
            " one with `temperature` and `draft_length`"
        )
    cells: dict[str, dict[int, list[dict]]] = {}
    for record in records:
        if _group(_point(record)) in groups:
            cells.setdefault(record["relaxation"], {}).setdefault(record["prompt"], []).append(
                record
            )
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
    names = [relaxation, *(name for _, name in statics)]
    prompts = sorted(set.intersection(*(set(cells[name]) for name in names)))
    if len(prompts) < 2:
        raise ValueError(
            f"{relaxation} and the static points share {len(prompts)} prompts; measure them on the"
            " same"
        )
    gates = [
        name for name in cells if describe(name)[0] == "gate" and cells[name].keys() >= set(prompts)
    ]
    tables, *beside = (
        {
            column: table([cells[name] for name in (first, *names[1:])], prompts, column)
            for column in COLUMNS
        }
        for first in (relaxation, *gates)
    )
    point = (method, relaxation, *groups[0][1:])
    found = [_compare(point, speed, tables, looked, resamples, seed) for speed in SPEEDS]
    return [
        replace(
            one,
            gates=tuple(
                (name, *_gain(each, one)) for name, each in zip(gates, beside, strict=True)
            ),
        )
        for one in found
    ]


COLUMNS = ("score", *dict.fromkeys(column for pair in SPEEDS.values() for column in pair))


def static_place(relaxation: str) -> float | None:
    """Where a static point stands on the line: at its share of the draft, at minus that where it
    blends logarithms.

    0 for exact decoding, None for learned points, budgets and rules that are no blend.
    """
    rule = parse(relaxation)
    if rule.budget is not None or rule.name not in ("none", "ensemble"):
        return None
    return rule.constant if rule.blend == "probabilities" else -rule.constant


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
    tails = 100 * LEVEL / 2 / numpy.array([1, looked])
    (low, corrected_low), (high, corrected_high) = (
        map(float, numpy.percentile(drawn, ends)) for ends in (tails, 100 - tails)
    )
    reached = below <= LEVEL / 2
    verdict = (
        "better"
        if is_better(corrected_low, below)
        else "worse"
        if corrected_high < -LEAST
        else "not shown"
    )
    needed = None
    if verdict == "not shown" and reached and abs(difference) > LEAST:
        # From the side of the interval that reaches LEAST, which shrinks with the root of the
        # number of prompts. The spread of all resamples would ask for fewer prompts than there
        # were, where the interval is lopsided.
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
    """Quality of the first point, a gate, and what it gains over the static speed of a statement."""
    quality, speed, _ = _observed(tables, one.speed)
    return quality, speed - one.static


def _observed(tables: dict[str, numpy.ndarray], speed: str) -> tuple[float, float, float]:
    """Quality and speed of the first point, and the speed of static blending at that quality, on
    all prompts.
    """
    quality, speeds = _points(tables, speed, numpy.ones((1, tables["score"].shape[1])))
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
    drawn, below = [], 0
    for weights in resampled(tables["score"].shape[1], resamples, seed):
        qualities, speeds = _points(tables, speed, weights)
        drawn.append(speeds[:, 0] - static_speed(qualities[:, 0], qualities[:, 1:], speeds[:, 1:]))
        below += int((qualities[:, 0] < qualities[:, 1:].min(1)).sum())
    return numpy.concatenate(drawn), below / resamples


def _points(
    tables: dict[str, numpy.ndarray], speed: str, weights: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(qualities, speeds), each [resamples, points]; weights [resamples, prompts], how often each
    prompt was drawn.
    """
    score, part, whole = (weights @ tables[column].T for column in ("score", *SPEEDS[speed]))
    return score / weights.sum(1, keepdims=True), part / whole


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
