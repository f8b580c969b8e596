"""Labels of importance against plain implementations, and what is trained on them."""

import itertools
import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diversed import cli
from diversed.data.batches import Texts, collate
from diversed.data.importance import Labeller, Labels, harm
from diversed.data.traces import read_manifest, read_shard, read_shards, write_shard
from diversed.data.writing import Writer
from diversed.runtime.relaxer import load_relaxer
from diversed.runtime.rollouts import Sampler
from diversed.runtime.sampling import Sampling
from diversed.train.objectives import attribution, judge
from diversed.train.rewards import scored

from .support.kills import series
from .support.models import rows_after, tiny_pair

PROMPTS = [[2, 3, 4], [5, 2], [3, 3, 6, 2], [4, 5, 5]]
GREEDY = Sampling(0)


def score(text, example):
    """Half of all texts are right, whatever a text says."""
    return float(sum(ord(letter) for letter in text) % 2)


def writer(pair, sampling=GREEDY, length=8, score=score, samples=1):
    task = SimpleNamespace(name="odd", scores_text=True, score=score, examples=[None] * len(PROMPTS))
    sampler = Sampler(pair, load_relaxer("none", pair, sampling), sampling, length)
    return Writer(sampler, task, PROMPTS, samples, 0, 5)


def labelled(pair, sampling=GREEDY, length=8, score=score, samples=1, **options):
    labels = Labels(**{"label": "counterfactual"} | options)
    return Labeller(writer(pair, sampling, length, score, samples), labels).unit(range(len(PROMPTS)))


def texts_of(shard):
    """(prompt, tokens, alternatives, labels) of every text."""
    for number, (start, end) in enumerate(itertools.pairwise(shard.start.tolist())):
        columns = (shard.token, shard.alternative, shard.label)
        yield PROMPTS[int(shard.prompt[number])], *(column[start:end].tolist() for column in columns)


def best(model, tokens):
    """The arg max behind these tokens, by the module alone."""
    with torch.no_grad():
        return int(model.module(torch.tensor([tokens])).logits[0, -1].argmax())


def finished(pair, prompt, text, length):
    """The target's greedy text from `text` on."""
    text = list(text)
    while len(text) < length and not (text and text[-1] in pair.eos):
        text.append(best(pair.target, prompt + text))
    return text


def right(pair, text):
    words = pair.tokenizer.decode([token for token in text if token not in pair.eos])
    return score(words, None)


@pytest.fixture(scope="module", params=[0, 1, 2])
def pair(request):
    return tiny_pair(9, seed=10 * request.param + 3)


def test_counterfactual_labels_are_what_the_score_loses(pair):
    seen = 0
    shard, cost = labelled(pair)
    generated = 0
    for (prompt, text, others, labels), reward in zip(texts_of(shard), shard.reward.tolist(), strict=True):
        assert text == finished(pair, prompt, [], 8) and reward == right(pair, text)
        generated += len(text)
        for at, (token, other, label) in enumerate(zip(text, others, labels, strict=True)):
            assert other == best(pair.draft, prompt + text[:at])
            if other == token or not reward:
                assert math.isnan(label)
                continue
            changed = finished(pair, prompt, [*text[:at], other], 8)
            assert label == reward - right(pair, changed)
            generated += len(changed) - at - 1
            seen += 1
    assert cost == {"generated": generated, "forced": 0}
    assert seen > 2 or not shard.reward.any()


def test_both_kinds_of_label_occur():
    labels = torch.cat([labelled(tiny_pair(9, seed=seed))[0].label for seed in (3, 13, 23)])
    known = labels[~labels.isnan()]
    assert {0.0, 1.0} == set(known.tolist())


@pytest.mark.parametrize("options", [{}, {"label": "suffix", "label_suffix": 3}, {"label_order": "sequential"}])
def test_the_number_that_is_judged_together_changes_nothing(pair, options):
    whole, cost = labelled(pair, **options)
    for most in (1, 3):
        found, same = labelled(pair, label_batch=most, **options)
        assert torch.equal(found.token, whole.token) and same == cost
        torch.testing.assert_close(found.label, whole.label, equal_nan=True)


def test_sequential_labels_keep_what_does_no_harm(pair):
    """From left to right, by the definition: AutoJudge, section 3."""
    shard, cost = labelled(pair, label_order="sequential")
    kept = 0
    for (prompt, text, _, labels), reward in zip(texts_of(shard), shard.reward.tolist(), strict=True):
        own = finished(pair, prompt, [], 8)
        expected, now, at = {}, own, 0
        while right(pair, own) and at < len(now):
            other = best(pair.draft, prompt + now[:at])
            if other != now[at]:
                changed = finished(pair, prompt, [*now[:at], other], 8)
                expected[at] = right(pair, now) - right(pair, changed)
                if expected[at] <= 0:
                    now, kept = changed, kept + 1
            at += 1
        assert text == now and reward == right(pair, now)
        assert {at: label for at, label in enumerate(labels) if not math.isnan(label)} == expected
    assert cost["forced"] or not kept


def test_columns_of_given_texts_are_those_of_the_texts_that_were_drawn(pair):
    sampler = Sampler(pair, load_relaxer("none", pair, Sampling()), Sampling(), 8, hidden=True, alternatives=True)
    prompts = dict(enumerate(PROMPTS))
    drawn = sampler.run(prompts, 2, lambda prompt, sample: prompt + 7 * sample)
    again = sampler.run(prompts, 2, lambda prompt, sample: prompt + 7 * sample, [text.tokens for text in drawn])
    for one, other in zip(drawn, again, strict=True):
        assert one.tokens == other.tokens and one.finished == other.finished
        assert one.columns.keys() == other.columns.keys()
        for name in one.columns:
            torch.testing.assert_close(one.columns[name], other.columns[name])


def test_suffix_labels_are_what_the_likelihood_of_the_next_tokens_loses(pair):
    shard, cost = labelled(pair, Sampling(), label="suffix", label_suffix=3)
    forced = 0

    def likelihood(prompt, text, at, token):
        behind = text[at + 1 : at + 4]
        tokens = prompt + text[:at] + [token] + behind
        with torch.no_grad():
            rows = pair.target.module(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        first = len(prompt) + at
        return sum(rows[first + i, token] for i, token in enumerate(behind)) / max(len(behind), 1)

    for prompt, text, others, labels in texts_of(shard):
        for at, (token, other, label) in enumerate(zip(text, others, labels, strict=True)):
            if token == other:
                assert math.isnan(label)
                continue
            lost = likelihood(prompt, text, at, token) - likelihood(prompt, text, at, other)
            assert label == pytest.approx(float(lost), abs=1e-4)
            forced += 2 * min(3, len(text) - at - 1)
    assert cost == {"generated": len(shard.token), "forced": forced} and forced > 10


def expected_score(pair, rows, kept):
    """Of the texts of three tokens that begin with `kept`."""
    if len(kept) == 3:
        return right(pair, list(kept))
    return sum(float(rows[tuple(kept)][token]) * expected_score(pair, rows, [*kept, token]) for token in range(4))


def test_above_temperature_0_a_label_is_the_expected_loss(monkeypatch):
    """Vocabulary of 4, three tokens: the mean of 1,000 continuations is the sum over all of them."""
    monkeypatch.setattr(f"{__name__}.PROMPTS", [[2, 3], [1, 0, 2], [3, 3], [0, 1]])
    pair, count = tiny_pair(4, end=False, seed=8), 1000
    shard, _ = labelled(pair, Sampling(), 3, label_samples=count, samples=2, label_batch=4096)
    worst, seen = 0.0, 0
    for prompt, text, others, labels in texts_of(shard):
        worth = partial(expected_score, pair, rows_after(pair.target, prompt, 3, 4))

        for at, (other, label) in enumerate(zip(others, labels, strict=True)):
            if not math.isnan(label):
                worst = max(worst, abs(label - (worth(text[: at + 1]) - worth([*text[:at], other]))))
                seen += 1
    assert seen > 3
    assert worst < 5 * math.sqrt(2 * 0.25 / count)  # 5 s.d. of a difference of two means of coins


def test_above_temperature_0_mismatches_are_those_of_the_maximal_coupling():
    """As many as the draft's row differs from the target's: TV in the mean."""
    pair = tiny_pair(9, seed=3)
    sampler = Sampler(pair, load_relaxer("none", pair, Sampling()), Sampling(), 6, alternatives=True)
    texts = sampler.run(dict(enumerate(PROMPTS)), 500, lambda prompt, sample: 1000 * prompt + sample)
    differs = torch.cat([text.columns["alternative"] != text.columns["token"] for text in texts]).double()
    tv = torch.cat([text.columns["tv"] for text in texts]).double()
    assert abs(float((differs - tv).mean())) < 5 * float((tv * (1 - tv)).mean().sqrt()) / math.sqrt(len(tv))


def test_what_labels_say_of_harm():
    labels = torch.tensor([1.0, 0.0, -1.0, 0.4, torch.nan])
    found = harm(labels, {"kind": "counterfactual"})
    assert found[:4].tolist() == pytest.approx([1, 0, 0, 0.4]) and found[4].isnan()
    found = harm(labels, {"kind": "suffix", "threshold": 0.3})
    assert found[:4].tolist() == [1, 0, 0, 1] and found[4].isnan()


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"label_order": "sequential"}, "`label_order` would change nothing without `label`"),
        ({"label": "suffix", "label_samples": 2}, "`label_samples` would change nothing beside the label suffix"),
        ({"label": "counterfactual", "label_suffix": 3}, "`label_suffix` would change nothing beside the label counterfactual"),
        ({"label": "suffix", "label_threshold": -1.0}, "`label_threshold` must be a number of nats of at least 0"),
        ({"label": "suffix", "label_threshold": math.nan}, "`label_threshold` must be a number of nats of at least 0"),
        ({"label": "suffix", "label_batch": 0}, "`label_batch` must be at least 1"),
    ],
)
def test_options_without_effect_and_out_of_range_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Labels(**options)


def test_labels_that_temperature_0_or_the_task_cannot_have_are_refused():
    pair = tiny_pair(9)
    with pytest.raises(ValueError, match="sequential keeps tokens without harm"):
        labelled(pair, Sampling(), label_order="sequential")
    with pytest.raises(ValueError, match="would be the same text at temperature 0"):
        labelled(pair, label_samples=2)
    made = writer(pair)
    made.task.scores_text = False
    with pytest.raises(ValueError, match="or give --label suffix"):
        Labeller(made, Labels("counterfactual"))
    assert Labeller(made, Labels("suffix"))


def test_the_losses_are_the_likelihoods_of_their_definitions():
    logit = torch.tensor([[0.3, -1.2, 2.0, 0.1], [0.5, 0.0, -0.7, 1.0]], requires_grad=True)
    told = torch.tensor([[1.0, torch.nan, 0.0, 0.25], [torch.nan, torch.nan, torch.nan, 1.0]])
    mask = torch.tensor([[True] * 4, [True, True, True, False]])  # the last label is padding
    batch = {"harm": told, "mask": mask, "graded": torch.tensor([False, False])}
    probability = torch.sigmoid(-logit[0, [0, 2, 3]])
    right = torch.tensor([1.0, 0.0, 0.25])
    entropy = -(right * probability.log() + (1 - right) * (1 - probability).log()).sum() / 2
    torch.testing.assert_close(judge(logit, batch), entropy)
    judge(logit, batch).backward()
    assert logit.grad.isfinite().all() and logit.grad[0, 1] == 0 == logit.grad[1, 3]

    rewards = {"reward": torch.tensor([1.0, 0.0]), "base": torch.tensor([0.9, 0.9]),
               "substituted": torch.tensor([[True, False, True, False], [False, True, False, False]])}  # fmt: skip
    rate = (-logit.detach()[0, [0, 2, 3]]).exp()
    spoilt = 1 - (-rate).exp()
    told_loss = -(right * spoilt.log() + (1 - right) * (1 - spoilt).log()).sum() / 2
    alone = attribution(logit, {name: value for name, value in (batch | rewards).items() if name != "harm"})
    torch.testing.assert_close(attribution(logit, batch | rewards), alone + told_loss)


def gathered(folder, *words):
    usual = ["--prompts", "16", "--samples", "1", "--unit", "8", "--sampling.temperature", "0", "--max_new_tokens", "40"]
    assert cli.main(["gather", "--out", str(folder), "--go_on", "true", *usual, *words]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Traces of the packaged pair without labels, with labels that say different things, and with equal ones."""
    place = tmp_path_factory.mktemp("labels")
    return SimpleNamespace(
        bare=gathered(place / "bare", "--relaxation", "coin:0.4"),
        labels=gathered(place / "labels", "--label", "suffix", "--label_threshold", "0.5"),
        equal=gathered(place / "equal", "--label", "suffix", "--label_threshold", "900"),
    )


def train(capsys, out, *words):
    status = cli.main(["train", "--out", str(out), "--trainer.max_epochs", "2", *words])
    return status, capsys.readouterr().err


def test_judge_learns_from_labels_alone_and_refuses_what_holds_none(folders, tmp_path, capsys):
    words = ("--model.objective", "judge", "--data.traces")
    assert train(capsys, tmp_path / "one", *words, folders.labels)[0] == 0
    status, error = train(capsys, tmp_path / "two", *words, folders.bare)
    assert status == 2 and "holds no labels of importance, which this objective learns from" in error
    status, error = train(capsys, tmp_path / "three", *words, folders.equal)
    assert status == 2 and "labels say 0" in error and "nothing to learn apart" in error


def test_attribution_reads_labels_beside_texts(folders, tmp_path, capsys):
    both = Texts([folders.bare, folders.labels], scored, labels="some")
    none = both.harm.isnan()
    first = both.folder.repeat_interleave(both.length) == 0
    assert none[first].all() and not none[~first].all()
    batch = collate([both[0], both[len(both) - 1]])
    assert batch["harm"].shape == batch["tv"].shape and batch["harm"][0].isnan().all()
    assert "harm" not in collate([Texts([folders.labels], scored)[0]])
    words = ("--model.objective", "attribution", "--data.traces", folders.bare, folders.labels)
    assert train(capsys, tmp_path / "both", *words)[0] == 0


def test_the_manifest_says_what_labels_are_and_what_they_cost(folders):
    manifest = read_manifest(folders.labels)
    assert manifest["label"] == {"kind": "suffix", "order": "independent", "samples": 1, "suffix": 20, "threshold": 0.5}
    assert manifest["relaxation"] == "none" and "label" not in read_manifest(folders.bare)
    for entry, shard in zip(manifest["shards"], read_shards(folders.labels), strict=True):
        assert entry["generated"] == shard.tokens and entry["forced"] > 0


def test_a_folder_is_continued_with_the_same_labels_only(folders, capsys):
    words = ["gather", "--out", folders.labels, "--prompts", "16", "--samples", "1", "--unit", "8", "--max_new_tokens", "40"]
    words += ["--sampling.temperature", "0", "--label", "suffix"]
    assert cli.main([*words, "--label_threshold", "0.4"]) == 2
    assert "was begun with label.threshold 0.5, now it is 0.4" in capsys.readouterr().err
    assert cli.main([*words, "--label_threshold", "0.5", "--relaxation", "coin:0.4"]) == 2
    assert "`label` is of the target's own texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"label": None}, "`label` and `alternative` must stand together"),
        ({"alternative": -1}, "`alternative` lies outside the vocabulary"),
        ({"label": math.inf}, "`label` has numbers that are not finite"),
    ],
)
def test_labels_that_are_no_labels_are_refused(folders, tmp_path, change, sentence):
    manifest = read_manifest(folders.labels)
    shard = read_shard(folders.labels, manifest["shards"][0], manifest)
    for name, value in change.items():
        if value is None:
            del shard.columns[name]
        else:
            shard.columns[name] = torch.full_like(shard.columns[name], value)
    with pytest.raises(ValueError, match=sentence):
        write_shard(tmp_path, 0, shard)


def test_labels_that_were_killed_end_with_the_same_bytes(tmp_path):
    assert series("labels", tmp_path / "labels", 1, random.Random(6))["kills"] == 1
