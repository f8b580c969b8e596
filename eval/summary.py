"""results.jsonl -> one row of figures per point; everything that is printed or drawn comes from
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .intervals import bootstrap, mcnemar, paired_bootstrap, same_texts
from .results import POINT, exact_beside, point_of, read_results

Record = dict[str, Any]
SUMMED = ("drafted", "accepted", "target_calls", "positions", "acceptance", "bias")
SUMMED += ("target_logprob", "substitutions", "seconds")
GRAM = 4  # tokens of a run whose repetition is counted
COMPARED = ("difference", "difference_low", "difference_high")
COMPARED += ("better", "worse", "mcnemar", "text_p")


def summarise(results: str | Path | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of figures per (method, relaxation, temperature, draft_length), seeds pooled, as they
    first appear.

    results: path of results.jsonl, or its records.

    score, score_low, score_high:  mean and 95 % bootstrap interval over prompts (a prompt's seeds
                                   are averaged first)
    difference, ..._low, ..._high: score minus that of exact decoding, all else equal, paired by
        prompt; or None
    better, worse, mcnemar:        if scores are 0 or 1, how many prompts this point scores better
                                   and worse than relaxation none, and the p-value of
                                   `intervals.mcnemar`; else None
    text_p:                        p-value of `intervals.same_texts` against the texts of relaxation
                                   none; or None
    step_acceptance, mean_bias, mean_weight: means over all positions; mean_weight None if it is
        not a blend
    accepted_share:                accepted / drafted tokens, what lies after the end of a text left
                                   out
    tokens_per_call:               tokens per target call, the bonus token and the end-of-text token
                                   counted
    tokens_per_second:             tokens / seconds of decoding, the texts of a batch together
    substitutions:                 expected tokens per text that are not the target's own
    tokens_per_text:               mean length, the end-of-text token counted
    repetition:                    share of the runs of GRAM tokens that occurred before in the same
        text; None if no text is so long
    target_logprob:                mean log-likelihood of a token under the target, nats, each at
                                   least log 1e-30
    acceptance_by_depth:           accepted / drafted at depth 1, 2, ...
    """
    records = read_results(results) if isinstance(results, str | Path) else list(results)
    points: dict[tuple, list[Record]] = {}
    for record in records:
        points.setdefault(point_of(record), []).append(record)
    rows = []
    for point, texts in points.items():
        exact = points.get(exact_beside(point), [])
        beside = {} if point == exact_beside(point) else _beside(texts, exact)
        rows.append(_figures(texts) | dict.fromkeys(COMPARED) | beside | _rates(texts))
    return rows


def _figures(texts: list[Record]) -> dict[str, Any]:
    """What a point is, how many texts it has, and their score."""
    scores = list(_scores(texts).values())
    mean, low, high = bootstrap(scores)
    row = {name: texts[0].get(name) for name in (*POINT, "task", "metric", "batch")}
    seeds = len({record["seed"] for record in texts})
    row |= {"requests": len(texts), "prompts": len(scores), "seeds": seeds}
    return row | {"score": mean, "score_low": low, "score_high": high}


def _rates(texts: list[Record]) -> dict[str, Any]:
    total = {field: sum(record[field] for record in texts) for field in SUMMED}
    tokens = sum(len(record["tokens"]) for record in texts)
    weights = [record["weight"] for record in texts]
    mean_weight = None if None in weights else _ratio(sum(weights), total["positions"])
    drafted, accepted = (_by_depth(texts, f"{name}_by_depth") for name in ("drafted", "accepted"))
    by_depth = [_ratio(*counts) for counts in zip_longest(accepted, drafted, fillvalue=0)]
    return {
        "step_acceptance": _ratio(total["acceptance"], total["positions"]),
        "accepted_share": _ratio(total["accepted"], total["drafted"]),
        "tokens_per_call": _ratio(tokens, total["target_calls"]),
        "tokens_per_second": _ratio(tokens, total["seconds"]),
        "mean_weight": mean_weight,
        "mean_bias": _ratio(total["bias"], total["positions"]),
        "substitutions": _ratio(total["substitutions"], len(texts)),
        "target_logprob": _ratio(total["target_logprob"], total["positions"]),
        "tokens_per_text": _ratio(tokens, len(texts)),
        "repetition": repetition(*(record["tokens"] for record in texts)),
        "acceptance_by_depth": by_depth,
    }


def repetition(*texts: Sequence[int]) -> float | None:
    """Share of the runs of GRAM tokens that occurred before in the same text; None if no text is so
    long. A text that loops comes near 1.
    """
    grams = [
        list(zip(*(tokens[start:] for start in range(GRAM)), strict=False)) for tokens in texts
    ]
    total = sum(map(len, grams))
    return 1 - sum(len(set(each)) for each in grams) / total if total else None


def _beside(texts: list[Record], exact: list[Record]) -> dict[str, Any]:
    """The COMPARED figures of a point beside exact decoding, on the prompts that both have."""
    scores, baseline = _scores(texts), _scores(exact)
    both = [prompt for prompt in scores if prompt in baseline]
    if not both:
        return {}
    values = [scores[prompt] for prompt in both]
    before = [baseline[prompt] for prompt in both]
    shared = set(both)
    tests = (None, None, None)
    if all(record["score"] in (0, 1) for record in (*texts, *exact)):
        tests = mcnemar(values, before)
    mine, its = (
        [(record["prompt"], record["tokens"]) for record in side if record["prompt"] in shared]
        for side in (texts, exact)
    )
    figures = (*paired_bootstrap(values, before), *tests, same_texts(mine, its))
    return dict(zip(COMPARED, figures, strict=True))


def _scores(texts: list[Record]) -> dict[int, float]:
    """prompt -> the mean score of its texts."""
    scores: dict[int, list[float]] = {}
    for record in texts:
        scores.setdefault(record["prompt"], []).append(record["score"])
    return {prompt: sum(values) / len(values) for prompt, values in scores.items()}


def _by_depth(texts: list[Record], name: str) -> list[int]:
    counts = [record.get(name, []) for record in texts]
    return [sum(row) for row in zip_longest(*counts, fillvalue=0)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
