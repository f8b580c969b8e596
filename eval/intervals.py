"""Intervals over prompts, and two tests of paired texts.

Intervals are percentile bootstraps over prompts: the texts of one prompt (its seeds) are drawn
together, since they share its difficulty. Two methods on the same prompts are compared by the
bootstrap of their paired differences, which is narrower than the difference of their intervals.
Beside it stand two tests: `mcnemar` of 0/1 scores, and `same_texts`, which needs no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy

RESAMPLES = 10_000
CHUNK = 1 << 22  # drawn indices at a time: 32 MB
FIRST = 32  # tokens of a text that `same_texts` looks at
BUCKETS = 1024  # that the counts of tokens and pairs of tokens are hashed into
SWAPS = 2000  # random exchanges of a prompt's texts; a p-value has steps of 1 / 2001
SWAPS_AT_ONCE = 200


def resample(
    columns: numpy.ndarray,
    statistic: Callable[[numpy.ndarray], numpy.ndarray],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> numpy.ndarray:
    """[R, ...] a statistic in R resamples of as many prompts as there are.

    columns:   [P, C] what each prompt adds to C sums, such as its tokens and its target calls.
    statistic: sums [R, C] over the resampled prompts -> values [R, ...].
    """
    if resamples < 1:
        raise ValueError(f"`resamples` must be at least 1, got {resamples}")
    parts = [statistic(drawn @ columns) for drawn in _drawn(len(columns), resamples, seed)]
    return numpy.concatenate(parts)


def percentiles(values: numpy.ndarray, level: float = 0.05) -> tuple[numpy.ndarray, numpy.ndarray]:
    """(low, high), each [...]: the central 1 - level of resampled values [R, ...]."""
    low, high = numpy.percentile(values, [100 * level / 2, 100 - 100 * level / 2], axis=0)
    return low, high


def ratio(sums: numpy.ndarray) -> numpy.ndarray:
    """[...] the first of two sums [..., 2] over the second; nan if that is 0."""
    with numpy.errstate(invalid="ignore", divide="ignore"):
        return sums[..., 0] / sums[..., 1]


def bootstrap(
    values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, low, high) with a 95 % percentile interval; values: [P], one score a prompt, the mean
    over its texts.
    """
    values = _finite(values, "values")
    return ratio_of_sums(values, numpy.ones(len(values)), resamples, seed)


def _drawn(prompts: int, resamples: int, seed: int) -> Iterator[numpy.ndarray]:
    """[R, prompts] chunk by chunk: how often every prompt was drawn in each of R resamples of as
    many prompts.
    """
    generator = numpy.random.default_rng(seed)
    done = 0
    while done < resamples:
        rows = min(resamples - done, max(1, CHUNK // prompts))
        drawn = (
            generator.integers(prompts, size=(rows, prompts))
            + prompts * numpy.arange(rows)[:, None]
        )
        yield (
            numpy.bincount(drawn.ravel(), minlength=rows * prompts)
            .reshape(rows, prompts)
            .astype(numpy.float64)
        )
        done += rows


def ratio_of_sums(
    parts: Sequence[float], wholes: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(sum of parts / sum of wholes, low, high) with a 95 % percentile interval.

    parts, wholes: [P], the sums over a prompt's texts, which are resampled together.
    """
    columns = numpy.array([parts, wholes], dtype=numpy.float64).T
    low, high = percentiles(resample(columns, ratio, resamples, seed))
    return float(ratio(columns.sum(0))), float(low), float(high)


def paired_bootstrap(
    values: Sequence[float], baseline: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(difference, low, high): mean of values - baseline with a 95 % interval, below 0 if the
    baseline is better.

    values, baseline: [P], the scores of two methods on the same prompts in the same order.
    """
    values, baseline = _finite(values, "values"), _finite(baseline, "baseline")
    if values.shape != baseline.shape:
        raise ValueError(
            f"`baseline` must be [P] like `values` {list(values.shape)}, got"
            f" {list(baseline.shape)}; are both methods scored on the same prompts?"
        )
    return bootstrap(values - baseline, resamples, seed)


def mcnemar(values: Sequence[float], baseline: Sequence[float]) -> tuple[int, int, float]:
    """(prompts scored better, prompts scored worse, p-value) of two methods on the same prompts.

    The exact two-sided p-value of McNemar's test: if both methods are equally good, each prompt
    that they score differently is better or worse with probability 1/2. values, baseline: [P], one
    score a prompt, the mean over its texts, which makes it the sign test of prompts.
    """
    better = sum(value > before for value, before in zip(values, baseline, strict=True))
    worse = sum(value < before for value, before in zip(values, baseline, strict=True))
    count, ways, term = better + worse, 0, 1
    for fewer in range(min(better, worse) + 1):
        ways += term
        term = term * (count - fewer) // (fewer + 1)
    return better, worse, min(1.0, 2 * ways / 2**count)


def same_texts(
    texts: Sequence[tuple[int, Sequence[int]]],
    baseline: Sequence[tuple[int, Sequence[int]]],
    seed: int = 0,
) -> float:
    """p-value of the hypothesis that both methods write the same texts: small if they are told
    apart. No scores.

    texts, baseline: (prompt, tokens) of every text of two methods on the same prompts; the first
        FIRST tokens count.

    The statistic is sum over g of (sum over prompts of the difference in how often g occurs)^2 /
    (how often g occurs in all texts), with g every token and every pair of neighbours, hashed into
    BUCKETS. It is compared with its value if both texts of a prompt change places at random,
    SWAPS times; p is the share of values at least as large, the one without changes counted. A
    prompt's several texts are averaged and change places together.

    The test is exact if the texts of a prompt are drawn independently. Points of the same seed
    share their random numbers; then it holds for many prompts, because the sum over prompts has
    mean 0 and the covariance of the swaps.
    """
    prompts = {
        prompt: row
        for row, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in (*texts, *baseline)))
    }
    first, second = _counts(texts, prompts), _counts(baseline, prompts)
    total = (first + second).sum(0)
    difference = (first - second)[:, total > 0] / numpy.sqrt(total[total > 0])
    observed = (difference.sum(0) ** 2).sum()
    generator, larger = numpy.random.default_rng(seed), 1
    for _ in range(SWAPS // SWAPS_AT_ONCE):
        signs = generator.choice([-1.0, 1.0], size=(SWAPS_AT_ONCE, len(prompts)))
        # Sums in another order differ by rounding, and equal ones count.
        larger += int((((signs @ difference) ** 2).sum(1) >= observed * (1 - 1e-9)).sum())
    return larger / (SWAPS + 1)


def _counts(texts: Sequence[tuple[int, Sequence[int]]], prompts: dict[int, int]) -> numpy.ndarray:
    """[P, BUCKETS] how often tokens and pairs of neighbours occur in a prompt's text, the mean over
    its texts.
    """
    counts, size = numpy.zeros((len(prompts), BUCKETS)), numpy.zeros(len(prompts))
    for prompt, tokens in texts:
        tokens = tokens[:FIRST]
        grams = [
            *tokens,
            *((one * 1_000_003) ^ (other * 7_919 + 1) for one, other in pairwise(tokens)),
        ]
        counts[prompts[prompt]] += numpy.bincount(
            [gram % BUCKETS for gram in grams], minlength=BUCKETS
        )
        size[prompts[prompt]] += 1
    return counts / size[:, None]


def _finite(values: Sequence[float], name: str) -> numpy.ndarray:
    array = numpy.asarray(values, dtype=numpy.float64)
    if array.ndim != 1 or not array.size or not numpy.isfinite(array).all():
        raise ValueError(
            f"`{name}` must be [P] finite numbers, at least one, got"
            f" {numpy.array2string(array, threshold=6)}"
        )
    return array
