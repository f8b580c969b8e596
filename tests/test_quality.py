"""Scores agree with their public definitions; intervals cover what they claim and pair what they should."""

import itertools
import json
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from diversed.assets.sums import problems
from diversed.data.scores import (
    SCORES,
    bleu,
    exact,
    exact_number,
    final_number,
    mean_log_probability,
    rouge,
)
from diversed.eval.intervals import (
    bootstrap,
    mcnemar,
    paired_bootstrap,
    percentiles,
    ratio_of_sums,
    resample,
    same_texts,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("#### -3", "-3"),
        ("#### 1,234.50", "1234.50"),
        ("####7", "7"),
        ("#### $18", "18"),
        ("#### 18.", "18"),
        ("#### 109,200,000", "109200000"),
        ("#### 72\n\nQuestion: and 5?\n#### 6", "72"),
        ("#### Step 1: add\nso it is 9", "9"),
        ("He has 4. The answer is 18. Then 5.", "18"),
        ("THE FINAL ANSWER IS: **$-5**, not 7", "-5"),
        ("The answer is\n12, or 3", "3"),
        ("The answer is easy.\nThe answer is 8. 9", "8"),
        ("He pays $1,000.", "1000"),
        ("10-3", "3"),
        ("48/2=<<48/2=24>>24 clips", "24"),
        ("x = \u22123", "-3"),
        ("(-$3)", "-3"),
        ("it fell by \u20133", "-3"),
        ("- 3", "-3"),
        ("18%", "18"),
        ("3/4", "3/4"),
        (".5", "0.5"),
        ("1,2,3", "3"),
        ("5.", "5"),
        ("\u0663", "3"),
        ("nothing", None),
        ("", None),
    ],
)
def test_final_number_reads_what_a_person_would(text, number):
    assert final_number(text) == (None if number is None else Fraction(number))


def test_equal_numbers_score_one_however_they_are_written():
    assert exact_number("The answer is 18.00 dollars", "so\n#### 18") == 1.0
    assert exact_number("#### 1,000", "#### 1000") == 1.0
    assert exact_number("#### 19", "#### 18") == 0.0
    assert exact_number("no idea", "#### 18") == 0.0


def test_reference_without_a_number_is_refused():
    with pytest.raises(ValueError, match="`reference` must hold a number"):
        exact_number("#### 1", "none")


@given(st.integers(-(10**12), 10**12), st.integers(0, 99))
def test_a_number_survives_every_way_of_writing_it(whole, cents):
    for written in (f"{whole}.{cents:02}", f"{whole:,}.{cents:02}"):
        for frame in ("#### {}", "The answer is {}.", "so in the end {}", "#### {}\n\nQuestion: 5"):
            assert final_number(frame.format(written)) == Fraction(f"{whole}.{cents:02}")


@given(st.text(alphabet="0123456789,.-#$ answeri\n", max_size=60))
def test_final_number_never_fails_and_keeps_to_the_public_marker(text):
    found = final_number(text)
    assert found is None or isinstance(found, Fraction)
    public = re.search(r"#### (-?[0-9]+)(?![0-9,.])", text)
    if public and text.index("####") == public.start():
        assert found == Fraction(public.group(1))


@needs_shared
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k_references_agree_with_the_public_regex(split, count):
    with open(SHARED / "gsm8k" / f"{split}.jsonl", encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == count
    for answer in answers:
        public = re.search(r"#### (\-?[0-9\.\,]+)", answer).group(1).replace(",", "")
        assert final_number(answer) == Fraction(public)
        assert exact_number(answer, answer) == 1.0
        assert exact_number(f"The answer is {public}.", answer) == 1.0


def test_sums_references_end_in_the_number_after_the_marker():
    for row in problems("test", 50, 0):
        assert final_number(row["reference"]) == int(row["reference"].split("#### ")[1])


def test_rouge_matches_counts_by_hand():
    text, reference = "the dog sat on a mat", "the cat sat on the mat"
    assert rouge(text, reference, "rouge1") == pytest.approx(4 / 6, abs=1e-7)  # the, sat, on, mat
    assert rouge(text, reference, "rouge2") == pytest.approx(1 / 5, abs=1e-7)  # sat on
    assert rouge(text, reference, "rougeL") == pytest.approx(4 / 6, abs=1e-7)
    assert rouge("", reference, "rouge2") == 0.0
    assert rouge("Running dogs!", "run dog", "rouge2") == 1.0  # case, punctuation and Porter stems do not count


SENTENCES = [
    "Pawnbrokers shine in Singapore as the middle class feels the pinch.",
    "The middle class in Singapore is feeling a pinch, and pawnbrokers shine.",
    "Organisers said almost 890,000 people visited the festival.",
    "Nearly 890,000 people came to Edinburgh's festival, said organisers.",
]


# What tokenisers may disagree on: case, signs, accents, numbers, underscores, nothing at all.
ODD = ["", "!", "don't STOP", "state-of-the-art U.S. 3.14 x_y", "na\u00efve caf\u00e9", "ponies run running ran", "a\nb\tc  d"]


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_that_of_the_reference_implementation(kind):
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind], use_stemmer=True)
    for text, reference in itertools.product(SENTENCES + ODD, repeat=2):
        expected = scorer.score(reference, text)[kind].fmeasure
        assert rouge(text, reference, kind) == pytest.approx(expected, abs=1e-7)  # torchmetrics is float32


def test_bleu_is_that_of_torchmetrics_where_no_order_is_missing_and_elsewhere_torchmetrics_does_not_smooth():
    """Why sacreBLEU is the scorer: a text without a 4-gram of its reference, or shorter than one, gets 0 of torchmetrics."""
    from torchmetrics.functional.text import sacre_bleu_score

    for reference in SENTENCES:
        text = reference.replace("the", "their")
        other = float(sacre_bleu_score([text], [[reference]]))
        assert bleu(text, reference) == pytest.approx(other, abs=1e-6)  # torchmetrics is float32
    for text in ("The middle class.", "The middle of a class that feels."):
        assert float(sacre_bleu_score([text], [[SENTENCES[1]]])) == 0.0 < bleu(text, SENTENCES[1])


def test_bleu_of_one_sentence_lies_between_nothing_and_itself():
    assert bleu(SENTENCES[0], SENTENCES[0]) == 1.0
    assert bleu("", SENTENCES[0]) == 0.0
    assert 0.0 < bleu(SENTENCES[1], SENTENCES[0]) < 1.0


def test_exact_ignores_white_space_only():
    assert exact(" a  b\n", "a b") == 1.0
    assert exact("A b", "a b") == 0.0


@pytest.mark.parametrize("name", [name for name, score in SCORES.items() if score.function and name != "pass_at_1"])
def test_every_score_gives_a_text_equal_to_its_reference_one(name):
    assert SCORES[name].function("so the sum is\n#### 12", "so the sum is\n#### 12") == pytest.approx(1.0, abs=1e-12)


def test_target_log_probability_is_a_mean_in_nats():
    assert mean_log_probability([0.5, 0.25]) == pytest.approx(-1.5 * math.log(2), abs=1e-12)
    assert mean_log_probability([0.0]) == pytest.approx(math.log(1e-30), abs=1e-9)
    with pytest.raises(ValueError, match="empty text"):
        mean_log_probability([])


def test_bootstrap_agrees_with_the_normal_interval():
    values = (numpy.random.default_rng(0).random(1000) < 0.3).astype(float)
    mean, low, high = bootstrap(values)
    half = 1.96 * math.sqrt(mean * (1 - mean) / 1000)
    assert mean == values.mean()
    # A percentile of 10,000 resamples wobbles by 0.02 to 0.03 standard errors; 0.1 is out of its reach.
    assert low == pytest.approx(mean - half, abs=0.1 * half)
    assert high == pytest.approx(mean + half, abs=0.1 * half)
    assert bootstrap(values) == (mean, low, high)


def test_bootstrap_covers_the_truth_about_nineteen_times_in_twenty():
    generator = numpy.random.default_rng(1)
    covered = 0
    for trial in range(400):
        _, low, high = bootstrap(generator.random(100), resamples=400, seed=trial)
        covered += low <= 0.5 <= high
    # Binomial(400, .95) has standard deviation 4.4; four of them and one for the percentile's own finite-sample loss.
    assert 400 * 0.95 - 22 <= covered <= 400 * 0.95 + 18


def test_copies_of_a_text_add_no_certainty_when_resampled_by_prompt():
    values = numpy.random.default_rng(2).random(50)
    assert ratio_of_sums(8 * values, numpy.full(50, 8)) == pytest.approx(bootstrap(values), abs=1e-12)
    _, low, high = bootstrap(numpy.repeat(values, 8))
    assert high - low < 0.5 * (bootstrap(values)[2] - bootstrap(values)[1])


def test_a_resample_is_the_mean_over_its_texts_where_prompts_have_unequal_many():
    # Two prompts, one text of score 1 and three of 0: resamples have mean 1, 0 (a quarter each) or 1/4 (half).
    assert ratio_of_sums([1, 0], [1, 3]) == (0.25, 0.0, 1.0)
    # 80 prompts, half with one text of 1, half with five of 0: prompts average 1/2, texts 1/6.
    mean, low, high = ratio_of_sums([1, 0] * 40, [1, 5] * 40)
    assert mean == pytest.approx(1 / 6, abs=1e-12)
    assert low < mean < high < 0.3


def test_pairing_removes_what_both_methods_share():
    difficulty = numpy.random.default_rng(3).random(200)
    difference, low, high = paired_bootstrap(difficulty - 0.01, difficulty)
    assert difference == pytest.approx(-0.01, abs=1e-12)
    assert low == pytest.approx(-0.01, abs=1e-12) and high == pytest.approx(-0.01, abs=1e-12)
    _, low, high = bootstrap(difficulty)
    assert high - low > 0.05


def test_paired_bootstrap_is_antisymmetric_and_zero_against_itself():
    first, second = numpy.random.default_rng(4).random((2, 60))
    difference, low, high = paired_bootstrap(first, second)
    # Percentiles of 10,000 numbers lie between two of them: mirrored interpolation, equal to rounding.
    assert paired_bootstrap(second, first) == pytest.approx((-difference, -high, -low), abs=1e-12)
    assert paired_bootstrap(first, first) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 0), (3, 9), (120, 80)])
def test_mcnemar_is_the_binomial_test_of_the_prompts_that_differ(better, worse):
    values = [1.0] * better + [0.0] * worse + [1.0, 0.0]
    baseline = [0.0] * better + [1.0] * worse + [1.0, 0.0]
    expected = binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert mcnemar(values, baseline) == (better, worse, pytest.approx(expected, rel=1e-9))


def texts(generator, prompts, probability):
    """A text of 40 tokens a prompt, each token 3 with a probability and else 0 to 2."""
    draws = generator.random((prompts, 40))
    return [(i, numpy.where(row < probability, 3, (row * 997).astype(int) % 3).tolist()) for i, row in enumerate(draws)]


def test_texts_of_one_law_are_told_apart_no_more_often_than_the_level():
    """300 trials at 5 %: 25 are the 99 % bound of a binomial."""
    generator = numpy.random.default_rng(0)
    pairs = [[texts(generator, 15, 0.3) for _ in range(2)] for _ in range(300)]
    found = sum(same_texts(*pair, seed=trial) <= 0.05 for trial, pair in enumerate(pairs))
    assert 3 <= found <= 25


def test_texts_of_two_laws_are_told_apart_within_their_first_tokens_only():
    generator = numpy.random.default_rng(1)
    first, other = texts(generator, 40, 0.3), texts(generator, 40, 0.5)
    assert same_texts(first, other) < 0.01
    late = [(prompt, tokens[:32] + [7] * 8) for prompt, tokens in first]
    assert same_texts(first, late) == 1.0 and same_texts(first, first) == 1.0


def test_the_p_value_is_the_share_of_all_exchanges_that_are_as_extreme():
    """Four prompts have 16 exchanges; of 2000 random ones a share strays by less than 5 of its deviations, 0.06."""
    first, other = [(i, [5, 6] * (i + 1)) for i in range(4)], [(i, [8, 9] * (i + 1)) for i in range(4)]
    assert same_texts(first, other) == pytest.approx(2 / 16, abs=0.06)  # none exchanged, or all


def test_one_prompt_gives_an_interval_of_no_width():
    assert bootstrap([0.25]) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: bootstrap([]), "`values` must be .* at least one"),
        (lambda: bootstrap([1.0, math.nan]), "finite numbers"),
        (lambda: bootstrap([1.0], resamples=0), "`resamples` must be at least 1"),
        (lambda: paired_bootstrap([1.0], [1.0, 2.0]), "scored on the same prompts"),
    ],
)
def test_unusable_scores_are_refused_in_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_resample_draws_as_many_prompts_as_there_are_and_keeps_a_prompts_columns_together():
    columns = numpy.stack([numpy.ones(7), numpy.arange(7), 10 * numpy.arange(7)], 1)
    sums = resample(columns, lambda sums: sums, resamples=50)
    assert sums.shape == (50, 3) and (sums[:, 0] == 7).all() and (sums[:, 2] == 10 * sums[:, 1]).all()
    assert len(set(sums[:, 1])) > 10
    assert (resample(columns, lambda sums: sums, resamples=50) == sums).all()
    assert (resample(columns, lambda sums: sums, resamples=50, seed=1) != sums).any()
    with pytest.raises(ValueError, match="`resamples` must be at least 1, got 0"):
        resample(columns, lambda sums: sums, resamples=0)


def test_the_interval_of_a_ratio_is_that_of_a_mean_where_every_whole_is_one():
    parts = numpy.random.default_rng(0).random(30)
    assert ratio_of_sums(parts, numpy.ones(30)) == pytest.approx(bootstrap(parts), rel=1e-12)
    assert ratio_of_sums(3 * parts, parts) == pytest.approx((3, 3, 3), rel=1e-12)


def test_percentiles_leave_half_of_the_level_on_either_side():
    values = numpy.arange(1001.0)
    assert [end.tolist() for end in percentiles(values, 0.1)] == pytest.approx([50, 950])
    low, high = percentiles(numpy.stack([values, -values], 1))
    assert low.tolist() == pytest.approx([25, -975]) and high.tolist() == pytest.approx([975, -25])
