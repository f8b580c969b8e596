"""The statement that a comparison ends in: is a learned point better than static blending at the same quality?

The static points, exact decoding and ensemble:w in the order of w, are joined by straight lines in the plane of quality
(mean score) and speed. At the learned point's quality the static speed is the largest on that line at this quality or a
better one; where the line nowhere reaches it, the speed of its point of highest quality. The difference of the learned
speed and this one is bootstrapped by prompt, all points on the same resampled prompts, so that both the learned point
and the line it is compared with vary. Below, `better` is an interval above 0, `worse` one below 0, else `not shown`.

Two speeds, never mixed: tokens per target call, and step acceptance (see speed.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..verifier.relax import parse

SPEEDS = {"tokens per target call": ("tokens", "target_calls"), "step acceptance": ("acceptance", "positions")}
CHUNK = 500  # resamples at a time
POWER = 1.96 + 0.8416  # of a two-sided 5 % test that finds a true difference in 80 % of trials


@dataclass(frozen=True)
class Statement:
    """One comparison.

    speed: a key of SPEEDS; learned: the learned point's; static: that of static blending at the same quality.
    quality: the learned point's mean score.
    difference, low, high: learned - static with a 95 % percentile interval.
    verdict: better, worse or not shown; prompts_needed: that would show this difference in 80 % of trials, or None.
    """

    method: str
    relaxation: str
    speed: str
    quality: float
    learned: float
    static: float
    difference: float
    low: float
    high: float
    verdict: str
    prompts: int
    prompts_needed: int | None

    def __str__(self) -> str:
        more = "" if self.prompts_needed is None else f" (about {self.prompts_needed} prompts would show it)"
        return (
            f"{self.method} {self.relaxation}: {self.verdict}{more} than static blending of the same quality "
            f"({self.quality:.4f}) in {self.speed}: {self.learned:.3f} against {self.static:.3f}, difference "
            f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}], {self.prompts} prompts"
        )


def statements(
    records: Sequence[dict[str, Any]], method: str, relaxation: str, resamples: int = 10_000, seed: int = 0
) -> list[Statement]:
    """Both comparisons of one learned point with the static points of the same method among the records.

    records: lines of results.jsonl. Only prompts that every point has are used; a prompt's seeds are pooled.
    """
    cells: dict[str, dict[int, list[dict]]] = {}
    for record in records:
        if record["method"] == method:
            cells.setdefault(record["relaxation"], {}).setdefault(record["prompt"], []).append(record)
    statics = sorted((weight, name) for name in cells if (weight := _static_weight(name)) is not None)
    if relaxation not in cells:
        raise ValueError(f"no results of {method} with {relaxation}; measured are {', '.join(cells) or 'none'}")
    if len(statics) < 2:
        raise ValueError(f"{method} has {len(statics)} static points; measure none and several ensemble:w beside it")
    names = [relaxation, *(name for _, name in statics)]
    prompts = sorted(set.intersection(*(set(cells[name]) for name in names)))
    if len(prompts) < 2:
        raise ValueError(f"{relaxation} and the static points share {len(prompts)} prompts; measure them on the same")
    tables = {column: _table([cells[name] for name in names], prompts, column) for column in COLUMNS}
    return [_compare(method, relaxation, speed, tables, resamples, seed) for speed in SPEEDS]


COLUMNS = ("score", *dict.fromkeys(column for pair in SPEEDS.values() for column in pair))


def _static_weight(relaxation: str) -> float | None:
    """The constant share of a static point; none is 0. None for learned points and for rules that are no blend."""
    rule = parse(relaxation)
    plain = rule.budget is None and rule.blend == "probabilities"
    return rule.constant if plain and rule.name in ("none", "ensemble") else None


def _table(cells: Sequence[dict[int, list[dict]]], prompts: Sequence[int], column: str) -> numpy.ndarray:
    """[points, prompts]: the mean score of a prompt's texts, or the sum of another column over them."""

    def value(texts: list[dict]) -> float:
        if column == "tokens":
            return sum(len(text["tokens"]) for text in texts)
        total = sum(text[column] for text in texts)
        return total / len(texts) if column == "score" else total

    return numpy.array([[value(cell[prompt]) for prompt in prompts] for cell in cells], dtype=numpy.float64)


def _compare(
    method: str, relaxation: str, speed: str, tables: dict[str, numpy.ndarray], resamples: int, seed: int
) -> Statement:
    part, whole = SPEEDS[speed]
    chosen = {"score": tables["score"], "part": tables[part], "whole": tables[whole]}
    count = chosen["score"].shape[1]
    quality, speeds = _points(chosen, numpy.ones((1, count)))
    static = static_speed(quality[0, 0], quality[0, 1:], speeds[0, 1:])
    drawn = [
        one_speed[0] - static_speed(one[0], one[1:], one_speed[1:])
        for weights in _resampled(count, resamples, seed)
        for one, one_speed in zip(*_points(chosen, weights), strict=True)
    ]
    difference = float(speeds[0, 0] - static)
    low, high = (float(bound) for bound in numpy.percentile(drawn, [2.5, 97.5]))
    verdict = "better" if low > 0 else "worse" if high < 0 else "not shown"
    needed = None
    if verdict == "not shown" and difference:
        needed = math.ceil(count * (POWER * float(numpy.std(drawn)) / difference) ** 2)
    return Statement(
        method, relaxation, speed, float(quality[0, 0]), float(speeds[0, 0]), float(static), difference, low, high,
        verdict, count, needed,
    )  # fmt: skip


def _points(tables: dict[str, numpy.ndarray], weights: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(qualities, speeds), each [resamples, points]; weights [resamples, prompts], how often each prompt was drawn."""
    sums = {name: weights @ table.T for name, table in tables.items()}
    return sums["score"] / weights.sum(1, keepdims=True), sums["part"] / sums["whole"]


def _resampled(prompts: int, resamples: int, seed: int) -> Iterator[numpy.ndarray]:
    generator = numpy.random.default_rng(seed)
    for start in range(0, resamples, CHUNK):
        size = min(CHUNK, resamples - start)
        yield generator.multinomial(prompts, numpy.full(prompts, 1 / prompts), size).astype(numpy.float64)


def static_speed(quality: float, qualities: numpy.ndarray, speeds: numpy.ndarray) -> float:
    """The largest speed at `quality` or better on the line through the points [P], in their order; see above."""
    if qualities.max() < quality:
        return float(speeds[qualities.argmax()])
    best = speeds[qualities >= quality].max()
    before, after = qualities[:-1], qualities[1:]
    crossing = (before >= quality) != (after >= quality)
    if crossing.any():
        share = (quality - before[crossing]) / (after[crossing] - before[crossing])
        best = max(best, (speeds[:-1][crossing] + share * numpy.diff(speeds)[crossing]).max())
    return float(best)
