"""Scores of a text against its reference, by their public definitions.

final_number  the number that an answer ends up with, see `data.final_number`.
rouge         ROUGE F1 with Porter stemming, as summarisation papers report it. It is computed by
              torchmetrics, which agrees with rouge-score (google-research) up to float32.
bleu          sacreBLEU of one sentence (13a, exponential smoothing, effective order), divided by
              100. That of torchmetrics is 0 if a text shares no 4-gram with its reference.
pass_at_1     1 where the text's program runs and passes the reference's tests in the sandbox (`sandbox`), else 0.

All lie in [0, 1], larger is better. `target_logprob` needs no reference: the mean log-probability,
in nats a token, that the target gives the text (`mean_log_probability`, from the target's rows: the
text alone does not hold it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from . import sandbox
from .code_answers import program, testable
from .final_number import final_number, readable


def exact_number(text: str, reference: str) -> float:
    """1.0 where text and reference end up with equal numbers (18 equals 18.00), else 0.0."""
    expected = final_number(reference)
    if not readable(reference):
        raise ValueError(
            "`reference` must hold a number that can be read in full for the score final_number,"
            f" got {reference[:80]!r}"
        )
    return float(final_number(text) == expected)


def exact(text: str, reference: str) -> float:
    """1.0 where the two are equal up to white space, else 0.0."""
    return float(text.split() == reference.split())


def rouge(text: str, reference: str, kind: str) -> float:
    """ROUGE F1 of one text; kind is rouge1, rouge2 or rougeL."""
    from torchmetrics.functional.text import rouge_score

    return float(
        rouge_score(text, reference, use_stemmer=True, rouge_keys=kind)[f"{kind}_fmeasure"]
    )


def bleu(text: str, reference: str) -> float:
    """sacreBLEU of one sentence, in [0, 1]."""
    # Rounding takes a perfect text to 100.00000000000004.
    return min(1.0, _sentence_bleu().sentence_score(text, [reference]).score / 100)


def pass_at_1(text: str, reference: str) -> float:
    """1.0 where the program in the text passes the tests in the reference, else 0.0."""
    return float(sandbox.passes(*program(text, reference)))


def missing(score: str, reference: str | None) -> str:
    """What the score needs and the reference does not hold, in words; "" where nothing is missing."""
    if score == "final_number" and not readable(reference):
        return "a number that can be read in full, no formula, time, date or ratio,"
    if score == "pass_at_1" and not testable(reference):
        return "tests in Python"
    return ""


def mean_log_probability(target_prob: Sequence[float]) -> float:
    """The score target_logprob, in nats a token; target_prob: p(token) of the target at every token
    of the text.
    """
    if not len(target_prob):
        raise ValueError(
            "`target_prob` must hold a probability for every token of the text, got an empty text"
        )
    return math.fsum(math.log(max(float(p), 1e-30)) for p in target_prob) / len(target_prob)


class Score(NamedTuple):
    """function(text, reference) -> float, None where the text alone does not hold it; metric is its
    name in tables.
    """

    function: Callable[[str, str], float] | None
    metric: str


SCORES = {
    "exact": Score(exact, "exact match"),
    "final_number": Score(exact_number, "exact match (final number)"),
    "rouge1": Score(lambda text, reference: rouge(text, reference, "rouge1"), "ROUGE-1"),
    "rouge2": Score(lambda text, reference: rouge(text, reference, "rouge2"), "ROUGE-2"),
    "rougeL": Score(lambda text, reference: rouge(text, reference, "rougeL"), "ROUGE-L"),
    "bleu": Score(bleu, "sentence BLEU"),
    "pass_at_1": Score(pass_at_1, "pass@1"),
    "target_logprob": Score(None, "target log-probability"),
}


@cache
def _sentence_bleu():
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)
