"""REINFORCE with new texts at every update: whose texts they are, what is learned from them, and what a kill changes."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diversed import cli, load_bundle
from diversed.data.batches import collate
from diversed.data.writing import Writer
from diversed.runtime.relaxer import load_relaxer
from diversed.runtime.rollouts import Sampler
from diversed.runtime.sampling import Sampling
from diversed.train.module import HeadOptions, logit_of
from diversed.train.objectives import reinforce
from diversed.train.on_policy import OnPolicyHead, Updates, normalised

from .support.kills import series
from .support.models import relaxed_law, tiny_pair

VOCAB = 4


def module_of(features="logits", updates=None, prompts=((2, 3),), length=3, score=lambda text, example: float("w2" in text)):
    pair = tiny_pair(VOCAB, end=False)
    task = SimpleNamespace(name="odd", scores_text=True, score=score, examples=[None] * len(prompts))
    hidden = features in ("hidden", "both", "tokens+hidden", "logits+tokens+hidden")
    sampler = Sampler(pair, load_relaxer("ensemble:0.5", pair, Sampling()), Sampling(), length, hidden=hidden)
    updates = updates or Updates()
    writer = Writer(sampler, task, [list(prompt) for prompt in prompts], updates.samples, 0, 3)
    torch.manual_seed(1)
    module = OnPolicyHead(HeadOptions(features=features, acceptance="sum", lambda_=0.3), writer, updates)
    last = module.head.net[-1] if module.head.width else module.head.net
    last.weight.data.normal_()
    return pair, module


def test_texts_have_the_law_of_the_head_as_it_is():
    """20,000 texts of three tokens against the law of the head's relaxed rows, within 5 s.d."""
    count = 20_000
    pair, module = module_of(updates=Updates(prompts_per_update=1, samples=count))
    gate = lambda q, p, hidden: module.head.weight(q.float(), p.float())  # noqa: E731
    for shift in (0.0, 1.5):
        with torch.no_grad():
            module.head.net.bias += shift
            law = relaxed_law(pair, [2, 3], "learned", 3, gate=gate).double()
        writer = replace(module.writer, sampler=replace(module.writer.sampler, relaxer=module._relaxer()))
        token = torch.tensor([text.tokens for text in module._texts(0, writer)[0]])
        place = token @ torch.tensor([VOCAB**2, VOCAB, 1])
        found = torch.bincount(place, minlength=VOCAB**3) / count
        error = (found - law).abs() / (law * (1 - law) / count).sqrt().clamp_min(1e-4)
        assert error.max() < 5


@pytest.mark.parametrize("features", ["logits", "both", "tokens", "logits+tokens+hidden"])
def test_the_ratios_are_1_and_weights_are_those_of_the_head(features):
    _, module = module_of(features, prompts=((2, 3), (1, 0), (3, 3)))
    batch = collate(module.fresh(2))
    logit = logit_of(module.head, batch)
    mask = batch["mask"]
    # Float16 keeps hidden states to three digits.
    torch.testing.assert_close(torch.sigmoid(logit)[mask], batch["weight"][mask], atol=2e-3 if "hidden" in features or features == "both" else 1e-5, rtol=0)


def test_the_gradient_is_that_of_the_expected_objective():
    """One token, 40,000 texts: the gradient of the loss against that of the sum over all texts, advantages as they are."""
    pair, module = module_of(length=1, updates=Updates(prompts_per_update=1, samples=40_000))
    batch = collate(module.fresh(0))
    loss = reinforce(torch.sigmoid(logit_of(module.head, batch)), batch, lambda_=0.3, ratio_clip=0.2, acceptance_term="sum")
    found = torch.autograd.grad(loss, module.head.net.bias)[0]
    with torch.no_grad():
        p, q = (model.module(torch.tensor([[2, 3]])).logits[0, -1].softmax(-1) for model in (pair.target, pair.draft))
    mean, spread = batch["reward"].mean(), batch["reward"].std(unbiased=False)
    worth = (torch.tensor([0.0, 0.0, 1.0, 0.0]) - mean) / spread
    weight = module.head.weight(q, p)
    row = (1 - weight) * p + weight * q
    value = (row * worth).sum() + 0.3 * (1 - (1 - weight) * 0.5 * (p - q).abs().sum())
    expected = -torch.autograd.grad(value, module.head.net.bias)[0]
    assert float(found) == pytest.approx(float(expected), abs=0.003)  # 5 s.d.
    assert abs(float(expected)) > 0.01


def test_advantages_are_rewards_over_their_spread():
    assert normalised(torch.tensor([0.0, 1.0, 1.0, 0.0])).tolist() == [-1, 1, 1, -1]
    assert normalised(torch.full((5,), 0.7)).tolist() == [0] * 5


def test_prompts_are_taken_in_turns_and_no_text_comes_twice():
    _, module = module_of(updates=Updates(prompts_per_update=2, samples=4), prompts=((2, 3), (1, 0), (3, 3)))
    chosen = [module._prompts(update) for update in range(6)]
    taken = [(prompt, turn) for each in chosen for turn, prompts in each.items() for prompt in prompts]
    assert len(set(taken)) == len(taken) == 12
    for turn in range(4):
        assert sorted(prompt for prompt, when in taken if when == turn) == [0, 1, 2]


def run(out, *words):
    usual = ["--prompts", "6", "--samples", "2", "--prompts_per_update", "3", "--max_new_tokens", "40", "--model.lr", "0.02"]
    return cli.main(["reinforce", "--out", str(out), *usual, *words])


def test_a_head_that_is_trained_on_its_own_texts_becomes_a_bundle(tmp_path, capsys):
    assert run(tmp_path / "train", "--updates", "3", "--model.features", "logits+tokens") == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "train" / "train.json").read_text())
    rows = record["figures"]
    assert len(rows) == 3 and printed.count("tokens generated so far") == 3
    spent = [row["generated"] for row in rows]
    assert spent == sorted(spent) and spent[0] >= 12 and record["settings"]["on_policy"]["updates"] == 3
    assert cli.main(["export", "--train", str(tmp_path / "train"), "--out", str(tmp_path / "bundle")]) == 0
    assert load_bundle(tmp_path / "bundle").card.training["settings"]["acceptance"] == "sum"
    words = ["decode", "--prompt", "Ann has 2", "--relaxation", str(tmp_path / "bundle"), "--max_new_tokens", "4"]
    assert cli.main(words) == 0
    assert run(tmp_path / "train", "--updates", "3", "--model.features", "logits+tokens") == 0
    assert "is already trained" in capsys.readouterr().out
    assert run(tmp_path / "train", "--updates", "4", "--model.features", "logits+tokens") == 2
    assert "was begun with on_policy.updates 3, now it is 4" in capsys.readouterr().err


def test_a_run_that_was_killed_ends_with_the_same_bytes(tmp_path):
    assert series("reinforce", tmp_path / "reinforce", 2, random.Random(1))["kills"] == 2


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--sampling.temperature", "0"], "nothing is drawn at temperature 0"),
        (["--first_weight", "1"], "`first_weight` must lie between 0 and 1"),
        (["--updates", "0"], "`updates` must be at least 1"),
        (["--model.objective", "attribution"], "for others gather texts and use `diversed train`"),
        (["--model.blend", "logits"], "for others gather texts and use `diversed train`"),
        (["--model.patience", "2"], "for others gather texts and use `diversed train`"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, capsys, words, sentence):
    assert run(tmp_path / "out", *words) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
