"""Every method and relaxation on the packaged pair, real weights and all."""

import pytest
import torch
from diversed.assets import sums
from diversed.data.scores import exact_number
from diversed.runtime.engine import decode
from diversed.runtime.model import load_pair
from diversed.runtime.sampling import Sampling
from diversed.verifier.methods import METHODS

ORACLE = "diversed.assets.sums:oracle"
RELAXATIONS = ("none", "ensemble:0.3", "lenient:0.5", "cascade-opt:0.3", "typical:0.3,0.6", ORACLE)


@pytest.fixture(scope="module")
def pair():
    return load_pair()


@pytest.fixture(scope="module")
def problems(pair):
    chosen = sums.problems("test", 12)
    return chosen, [pair.tokenizer(problem["prompt"]).input_ids for problem in chosen]


@pytest.fixture(scope="module")
def greedy(pair, problems):
    texts = []
    for prompt in problems[1]:
        out = pair.target.module.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=80, pad_token_id=pair.tokenizer.pad_token_id
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("method", ["plain", *METHODS])
def test_at_temperature_zero_every_method_writes_what_transformers_generates(pair, problems, greedy, method, capsys):
    """A text may part from the greedy one only where the two best logits are within rounding; ties are told."""
    texts = decode(pair, problems[1], method=method, sampling=Sampling(temperature=0), max_new_tokens=80, batch=12)
    for prompt, completion, expected in zip(problems[1], texts, greedy, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(completion.tokens, expected, strict=False)) if a != b), None)
        if parted is not None:
            with torch.no_grad():
                logits = pair.target.module(torch.tensor([prompt + expected[:parted]])).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] < 1e-4, "more than float32 logits of size 10 are rounded by"
            with capsys.disabled():
                print(f"\n{method}: a tie at token {parted}")
        else:
            assert completion.tokens == expected


@pytest.mark.parametrize("method", METHODS)
def test_every_relaxation_runs_in_every_method_and_its_statistics_are_sane(pair, problems, method):
    for relaxation in RELAXATIONS:
        texts = decode(pair, problems[1], method=method, relaxation=relaxation, max_new_tokens=80, batch=12)
        assert all(c.finished or len(c.tokens) == 80 for c in texts)
        assert all(0 <= c.accepted <= c.drafted and c.substitutions >= 0 for c in texts)
        assert (sum(c.substitutions for c in texts) == 0) == (relaxation == "none")
        assert all(c.tokens_per_target_call <= 6 for c in texts)


def test_the_oracle_gate_is_faster_than_exact_decoding_and_answers_as_well(pair):
    """120 problems: the gain in tokens per call is many times its standard error; the scores differ by at most 10 %.

    Two binomial rates near .95 over 120 problems differ by 2.8 points (one standard deviation).
    """
    chosen = sums.problems("validation", 120)
    prompts = [pair.tokenizer(problem["prompt"]).input_ids for problem in chosen]
    score, speed = {}, {}
    for relaxation in ("none", ORACLE):
        texts = decode(pair, prompts, relaxation=relaxation, max_new_tokens=80, batch=120)
        score[relaxation] = sum(exact_number(c.text, p["reference"]) for c, p in zip(texts, chosen, strict=True)) / 120
        speed[relaxation] = sum(len(c.tokens) for c in texts) / sum(c.target_calls for c in texts)
    assert speed[ORACLE] > 1.2 * speed["none"]
    assert abs(score[ORACLE] - score["none"]) <= 0.1
