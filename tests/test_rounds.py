"""Rounds: what a fit predicts for a threshold, the threshold it chooses, and the loop on a pair of random models."""

import itertools
import json

import pytest
import torch
from diversed import cli
from diversed.train.datamodule import TraceModule, TraceOptions
from diversed.train.rounds import BIASES, operating_point, predicted_rewards

from .support.traces import synthetic_traces
from .support.training import train
from .test_story import quick  # noqa: F401  a fixture


@pytest.mark.parametrize("graded", [False, True])
def test_a_predicted_reward_is_the_expectation_over_every_pattern_of_substitutions(graded):
    tv = torch.tensor([[0.9, 0.2, 0.6, 0.7]], dtype=torch.float64)
    logit = torch.tensor([[0.3, -1.0, 2.0, 0.0]], dtype=torch.float64)
    trace = {"tv": tv, "mask": torch.tensor([[True, True, True, False]]), "base": torch.tensor([0.8]).double()}
    share, harm = torch.sigmoid(logit + 0.5) * tv, (-logit).exp()
    expected = 0.0
    for pattern in itertools.product((0, 1), repeat=3):
        chosen = torch.tensor(pattern, dtype=torch.float64)
        probability = torch.where(chosen == 1, share[0, :3], 1 - share[0, :3]).prod()
        lost = (chosen * harm[0, :3]).sum()
        expected += float(probability * (0.8 - lost if graded else 0.8 * torch.exp(-lost)))
    # float32 0.8 as base
    assert float(predicted_rewards(logit, 0.5, trace, graded)) == pytest.approx(expected, abs=1e-7)


def test_the_operating_point_is_the_largest_bias_that_costs_no_more_than_asked(tmp_path):
    """In the made-up task substitutions at TV > 0.5 halve the reward; more loss allowed never lowers the bias."""
    folder = str(synthetic_traces(tmp_path / "traces", prompts=64, samples=4, shards=1, weight=0.5))
    out = train(traces=folder, out=str(tmp_path / "train"), objective="attribution", lr=0.02, data=dict(batch=16))
    data = TraceModule(TraceOptions(folder, 64))
    data.setup()
    points = [operating_point(out, data, drop) for drop in (0.0, 0.05, 0.2, 0.4, 2.0)]
    assert [bias for bias, _, _ in points] == sorted(bias for bias, _, _ in points)
    assert points[0][0] < points[2][0] < points[-1][0] == BIASES[-1]
    for (_, predicted, base), drop in zip(points[1:], (0.05, 0.2, 0.4, 2.0), strict=True):
        assert base - predicted <= drop
    step = BIASES[BIASES.index(points[2][0]) + 1]
    assert operating_point(out, data, 0.2 + 1e-9)[0] < step


def test_rounds_run_to_agreement_and_the_second_time_only_read(quick, tmp_path, capfd):  # noqa: F811
    out = tmp_path / "story"
    words = ["run", "--config", str(quick), "--out", str(out), "--rounds", "3", "--train.data.validation", "0.3"]
    words += ["--train.model.objective", "attribution"]
    assert cli.main(words) == 0
    printed = capfd.readouterr().out
    rows = json.loads((out / "rounds.json").read_text())
    # random models solve nothing, so reward 0 is predicted, and found in the second round
    assert [row["agrees"] for row in rows] == [False, True] and rows[1]["predicted"] == rows[1]["reward"] == 0
    assert rows[1]["relaxation"] == str(out / "round-1/bundle") and "the fit holds here" in printed
    manifests = [json.loads((out / f"round-{number}/traces/manifest.json").read_text()) for number in (1, 2)]
    assert [manifest["first_sample"] for manifest in manifests] == [0, 2]
    training = json.loads((out / "round-2/train/train.json").read_text())
    assert len(training["traces"]) == 2 and not (out / "round-3").exists()
    names = ("rounds.json", "round-2/train/head.safetensors", "bundle/head.safetensors", "results.jsonl")
    first = {name: (out / name).read_bytes() for name in names}
    assert cli.main(words) == 0
    assert capfd.readouterr().out.count("already trained") == 2
    assert {name: (out / name).read_bytes() for name in names} == first
    bundle = str(out / "round-1/bundle")
    assert cli.main(["export", "--train", str(out / "round-1/train"), "--out", bundle, "--bias", "-1"]) == 0
    words = ["gather", "--config", str(quick), "--out", str(out / "round-2/traces"), "--relaxation", bundle]
    assert cli.main([*words, "--first_sample", "2"]) == 2
    assert "was begun with gate " in capfd.readouterr().err


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--rounds", "0"], "`rounds` must be at least 1, got 0"),
        (["--rounds", "2", "--max_drop", "-1"], "`max_drop` must be a reward of at least 0"),
        (["--rounds", "2", "--train.data.validation", "0"], "give --train.data.validation 0.1"),
        (["--rounds", "2", "--out", "one;two"], "`out` must have no `;` in it"),
    ],
)
def test_rounds_that_cannot_be_run_are_refused_before_anything_is_written(quick, tmp_path, capfd, words, sentence):  # noqa: F811
    assert cli.main(["run", "--config", str(quick), "--out", str(tmp_path / "story"), *words]) == 2
    assert sentence in capfd.readouterr().err
    assert not (tmp_path / "story").exists()


def test_the_first_round_begins_where_the_user_says_and_one_prompt_is_too_few(quick, tmp_path, capfd):  # noqa: F811
    out = tmp_path / "story"
    words = ["run", "--config", str(quick), "--out", str(out), "--rounds", "2", "--gather.prompts", "1"]
    assert cli.main([*words, "--gather.first_sample", "5"]) == 2
    assert "held-out prompts, and 1 prompt leaves none" in capfd.readouterr().err
    assert json.loads((out / "round-1/traces/manifest.json").read_text())["first_sample"] == 5


def test_the_prediction_of_a_patient_run_is_that_of_the_head_it_kept(tmp_path):
    folder = str(synthetic_traces(tmp_path / "traces", prompts=16, samples=4, shards=1))
    settings = dict(objective="reinforce", lr=0.5, width=8, epochs=30, patience=2)
    out = train(traces=folder, out=str(tmp_path / "train"), data=dict(batch=8, validation=0.25), **settings)
    figures = json.loads((out / "train.json").read_text())["figures"]
    best = min(figures, key=lambda row: row["held_out_loss"])
    assert best["epoch"] == figures[-1]["epoch"] - 2
    predicted = operating_point(out, TraceModule(TraceOptions(folder)), 0.0)[1]
    assert predicted == best["held_out_reward_estimate"] != figures[-1]["held_out_reward_estimate"]
    with pytest.raises(ValueError, match="need a trained head, and --train.trainer.max_epochs 0 trains none"):
        operating_point(train(traces=folder, out=str(tmp_path / "untrained"), epochs=0), TraceModule(TraceOptions(folder)), 0.0)
