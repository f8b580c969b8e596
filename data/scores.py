"""Scores of a text against its reference, by their public definitions.

final_number  the number that an answer ends up with, see `data.final_number`.
rouge         ROUGE F1 with Porter stemming, as summarisation papers report it. It is computed by
              torchmetrics, which agrees with rouge-score (google-research) up to float32. The words
              are those of `words`: for ASCII the same, and words of every other script.
bleu          sacreBLEU of one sentence (exponential smoothing, effective order), divided by 100.
              Its tokenizer is 13a; for references in Chinese it is zh, for other scripts without
              spaces char. BLEU of torchmetrics is 0 if a text shares no 4-gram with its reference.
pass_at_1     1 where the text's program runs and passes the reference's tests in the sandbox
              (`sandbox`), else 0.

All lie in [0, 1], larger is better. `target_logprob` needs no reference: the mean log-probability,
in nats a token, that the target gives the text (`mean_log_probability`, from the target's rows: the
text alone does not hold it).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from . import sandbox
from .code_answers import program, testable
from .final_number import final_number, readable

# Han, kana, bopomofo, Thai, Lao, Tibetan, Myanmar, Khmer: words are written without spaces.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u312f\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


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
        rouge_score(text, reference, normalizer=str, tokenizer=words, rouge_keys=kind)[
            f"{kind}_fmeasure"
        ]
    )


def bleu(text: str, reference: str) -> float:
    """sacreBLEU of one sentence, in [0, 1]."""
    scorer = _sentence_bleu(bleu_tokenizer(reference))
    # Rounding takes a perfect text to 100.00000000000004.
    return min(1.0, scorer.sentence_score(text, [reference]).score / 100)


def words(text: str) -> list[str]:
    """Words of a text in lower case, of every script; a script without spaces gives characters.

    A word is a run of letters, their marks and digits. ASCII words of more than three letters are
    stemmed, as rouge-score does.
    """
    spaced = []
    for character in unicodedata.normalize("NFC", text).lower():
        known = unicodedata.category(character)[0] in "LMN"
        one = f" {character} " if UNSPACED.match(character) else character
        spaced.append(one if known else " ")
    return [
        _stemmer().stem(word) if _long_ascii(word) else word for word in "".join(spaced).split()
    ]


def bleu_tokenizer(reference: str) -> str:
    """sacreBLEU's tokenizer for the script that the reference is mostly written in."""
    letters = [character for character in reference if character.isalpha()]
    unspaced = [character for character in letters if UNSPACED.match(character)]
    if 2 * len(unspaced) <= len(letters):
        return "13a"
    return "zh" if all("\u4e00" <= character <= "\u9fff" for character in unspaced) else "char"


def pass_at_1(text: str, reference: str) -> float:
    """1.0 where the program in the text passes the tests in the reference, else 0.0."""
    return float(sandbox.passes(*program(text, reference)))


def missing(score: str, reference: str | None) -> str:
    """What the score needs and the reference does not hold, in words; "" where nothing is
    missing.
    """
    if score == "final_number" and not readable(reference):
        return "a number that can be read in full, no formula, time, date or ratio,"
    if score.startswith("rouge") and len(words(reference)) < 1 + (score == "rouge2"):
        return "two words" if score == "rouge2" else "a word"
    if score == "bleu" and not reference.strip():
        return "a text"
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


def _long_ascii(word: str) -> bool:
    return len(word) > 3 and word.isascii()


@cache
def _stemmer():
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()


@cache
def _sentence_bleu(tokenizer: str):
    from sacrebleu.metrics import BLEU

    return BLEU(tokenize=tokenizer, effective_order=True)
