"""How often the statements err, on stored results: a point without training under two seeds is its own twin.

One seed stands for a learned point, the other for the line's, so every `better` is a false
alarm and every interval of a quality drop that leaves out 0 a miss. A trial draws prompts with
replacement and tosses a coin on each for which seed is which; intervals are as good as they say if
false alarms come in at most 2.5 % of trials and misses in 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from diversed.eval.comparison import (
    COLUMNS,
    LEVEL,
    SPEEDS,
    Least,
    Texts,
    compare,
    table,
    untrained,
)
from diversed.eval.intervals import paired_bootstrap
from diversed.eval.results import POINT


@dataclass(frozen=True)
class Rate:
    """found of trials, beside the most that a binomial of the nominal rate passes with probability
    1 %.

    what: a key of SPEEDS, found are trials that call this point better; or "quality drop",
        found are misses.
    """

    method: str
    relaxation: str
    temperature: float | None
    draft_length: int | None
    what: str
    trials: int
    found: int
    allowed: int

    def __str__(self) -> str:
        return (
            f"{self.method} {self.relaxation}, {self.what}: {self.found} of {self.trials}"
            f" ({self.found / self.trials:.2%}),"
            f" {'within' if self.found <= self.allowed else 'ABOVE'} the bound of {self.allowed}"
        )


def rates(
    records: Sequence[dict[str, Any]],
    trials: int = 1000,
    resamples: int = 1000,
    prompts: int | None = None,
    seed: int = 0,
) -> list[Rate]:
    """The false alarms of every point without training that has two seeds, and the misses of exact decoding's
    quality drop.

    prompts: drawn in a trial; as many as there are if not given.
    """
    found = []
    for group, twins in _twins(records).items():
        names = list(twins)
        shared = sorted(
            set.intersection(*(set(texts) for pair in twins.values() for texts in pair))
        )
        tables = {
            column: numpy.stack(
                [table([twins[name][side] for name in names], shared, column) for side in (0, 1)]
            )
            for column in COLUMNS
        }
        trial = _Trials(names, tables, trials, resamples, prompts or len(shared), seed)
        method, *at = group
        for row, name in enumerate(names):
            counts = [(speed, trial.alarms(row, speed), LEVEL / 2) for speed in SPEEDS]
            counts += [("quality drop", trial.misses(row), LEVEL)] if name == "none" else []
            found += [
                Rate(method, name, *at, what, trials, n, allowed(trials, rate))
                for what, n, rate in counts
            ]
    if not found:
        raise ValueError(
            "these results hold no two seeds of several points without training; measure none and"
            " ensemble:w twice"
        )
    return found


def allowed(trials: int, rate: float, level: float = 0.99) -> int:
    """The smallest count that a binomial of `trials` and `rate` stays within with probability
    `level`.
    """
    term = (1 - rate) ** trials
    count, total = 0, term
    while total < level:
        count += 1
        term *= (trials - count + 1) / count * rate / (1 - rate)
        total += term
    return count


@dataclass(frozen=True)
class _Trials:
    """tables: column -> [2, points, P], the two seeds of every point without training, of `names`."""

    names: list[str]
    tables: dict[str, numpy.ndarray]
    trials: int
    resamples: int
    prompts: int
    seed: int

    def alarms(self, row: int, speed: str) -> int:
        """Trials that call the point in `row` better than the line, whatever the least difference."""
        count = 0
        for trial, (prompts, first) in enumerate(self._draws()):
            tables = {
                name: numpy.concatenate(
                    [values[first, row, prompts][None], values[1 - first, :, prompts].T]
                )
                for name, values in self.tables.items()
            }
            point, texts = ("", "", None, None), Texts(tables, self.names)
            found = compare(point, speed, texts, 1, self.resamples, trial, Least(0, 0))
            count += found.verdict == "better"
        return count

    def misses(self, row: int) -> int:
        """Trials whose interval of the quality drop between both seeds leaves out 0."""
        scores, count = self.tables["score"], 0
        for trial, (prompts, first) in enumerate(self._draws()):
            sides = (scores[first, row, prompts], scores[1 - first, row, prompts])
            _, low, high = paired_bootstrap(*sides, resamples=self.resamples, seed=trial)
            count += not low <= 0 <= high
        return int(count)

    def _draws(self):
        """(prompts [prompts], which seed stands for the learned point there [prompts]) of every
        trial.
        """
        generator = numpy.random.default_rng(self.seed)
        for _ in range(self.trials):
            drawn = generator.integers(self.tables["score"].shape[-1], size=self.prompts)
            yield drawn, generator.integers(2, size=self.prompts)


def _twins(records: Sequence[dict[str, Any]]) -> dict[tuple, dict[str, tuple[dict, dict]]]:
    """(method, temperature, draft_length) -> relaxation -> its texts by prompt, for two
    seeds.
    """
    cells: dict[tuple, dict[str, dict[int, dict[int, list]]]] = {}
    for record in records:
        method, name, *at = (record.get(field) for field in POINT)
        if untrained(name):
            seeds = cells.setdefault((method, *at), {}).setdefault(name, {})
            seeds.setdefault(record["seed"], {}).setdefault(record["prompt"], []).append(record)
    found = {}
    for group, points in cells.items():
        pairs = {
            name: tuple(seeds.values())[:2] for name, seeds in points.items() if len(seeds) > 1
        }
        if len(pairs) > 1:
            found[group] = pairs
    return found
