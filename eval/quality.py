"""Quality of a method's texts: corpus BLEU, means with 95 % intervals, paired differences. One text: `data.scores`.

Intervals are percentile bootstraps over prompts: the texts of one prompt (its seeds) are drawn together, since they
share its difficulty. Two methods on the same prompts are compared by the bootstrap of their paired differences, which
is narrower than the difference of their intervals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from ..data.scores import SCORES, exact, exact_number, final_number, rouge

__all__ = [
    "SCORES", "bootstrap", "corpus_bleu", "exact", "exact_number", "final_number", "paired_bootstrap", "rouge",
]  # fmt: skip
CHUNK = 1 << 22  # drawn indices at a time: 32 MB


def corpus_bleu(texts: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """(sacreBLEU of the corpus in points, 0 to 100, and its signature, which belongs beside the number)."""
    from sacrebleu.metrics import BLEU

    if not texts or len(texts) != len(references):
        raise ValueError(
            f"`texts` must be as many as `references`, at least one, got {len(texts)} and {len(references)}"
        )
    metric = BLEU()
    score = metric.corpus_score(list(texts), [list(references)]).score
    return score, str(metric.get_signature())


def bootstrap(
    values: Sequence[float], resamples: int = 10_000, seed: int = 0, clusters: Sequence[int] | None = None
) -> tuple[float, float, float]:
    """(mean, low, high) with a 95 % percentile interval.

    values:   [S], one score a text.
    clusters: [S], the prompt of every text; the texts of a prompt are resampled together. None: each text by itself.
    """
    values = _finite(values, "values")
    groups = numpy.arange(len(values)) if clusters is None else numpy.unique(clusters, return_inverse=True)[1]
    if groups.shape != values.shape:
        raise ValueError(f"`clusters` must be [S] like `values` {list(values.shape)}, got {list(groups.shape)}")
    if resamples < 1:
        raise ValueError(f"`resamples` must be at least 1, got {resamples}")
    total, size = numpy.bincount(groups, values), numpy.bincount(groups)
    generator = numpy.random.default_rng(seed)
    means, done = numpy.empty(resamples), 0
    while done < resamples:
        rows = min(resamples - done, max(1, CHUNK // len(total)))
        drawn = generator.integers(len(total), size=(rows, len(total)))
        means[done : done + rows] = total[drawn].sum(1) / size[drawn].sum(1)
        done += rows
    low, high = numpy.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def paired_bootstrap(
    values: Sequence[float],
    baseline: Sequence[float],
    clusters: Sequence[int] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(difference, low, high): mean of values - baseline with a 95 % interval, below 0 where the baseline is better.

    values, baseline: [S], the scores of two methods on the same prompts (and seeds) in the same order.
    clusters:         [S], the prompt of every text, as in `bootstrap`.
    """
    values, baseline = _finite(values, "values"), _finite(baseline, "baseline")
    if values.shape != baseline.shape:
        raise ValueError(
            f"`baseline` must be [S] like `values` {list(values.shape)}, got {list(baseline.shape)}; are both methods"
            " scored on the same prompts?"
        )
    return bootstrap(values - baseline, resamples, seed, clusters)


def _finite(values: Sequence[float], name: str) -> numpy.ndarray:
    array = numpy.asarray(values, dtype=numpy.float64)
    if array.ndim != 1 or not array.size or not numpy.isfinite(array).all():
        raise ValueError(
            f"`{name}` must be [S] finite numbers, at least one, got {numpy.array2string(array, threshold=6)}"
        )
    return array
