"""What holds for every entry of OBJECTIVES: a new one is tested by being there."""

import dataclasses
import json
import math

import pytest
import torch
from diversed import cli
from diversed.train.datamodule import TraceModule, TraceOptions
from diversed.train.losses import OBJECTIVES
from diversed.train.module import HeadOptions
from safetensors.torch import load_file

from .support.traces import synthetic_traces
from .support.training import train


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return str(synthetic_traces(tmp_path_factory.mktemp("traces"), prompts=8, samples=4, shards=1, labels=True))


def batch_of(traces):
    data = TraceModule(TraceOptions(traces, 32, validation=0.0), labels="some")
    data.setup()
    return next(iter(data.train_dataloader()))


def loss_of(name, logit, batch):
    return OBJECTIVES[name](HeadOptions(objective=name)).double().eval()(logit, batch, lambda own: own)


def own_options(name):
    options = OBJECTIVES[name].Options
    return dataclasses.fields(options) if options else ()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_loss_and_padding_has_none(name, traces):
    batch = batch_of(traces)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    generator = torch.Generator().manual_seed(0)
    # Near the logit of the traces' weight, 1/2, no ratio is clipped, where the derivative jumps.
    logit = 0.02 * torch.randn(batch["mask"].shape, generator=generator, dtype=torch.float64)
    logit.requires_grad_(True)
    gradient = torch.autograd.grad(loss_of(name, logit, batch), logit)[0]
    assert gradient[batch["mask"]].abs().max() > 0 and (gradient[~batch["mask"]] == 0).all()
    moved, step = torch.randn(logit.shape, generator=generator, dtype=torch.float64), 1e-6
    up, down = (loss_of(name, logit.detach() + sign * step * moved, batch) for sign in (1, -1))
    # Central differences: an error of step^2, and of 1e-16 / step by rounding.
    assert float((up - down) / (2 * step)) == pytest.approx(float((gradient * moved).sum()), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_head_is_trained_for_it_and_its_options_are_settings(name, traces, tmp_path):
    out = train(traces=traces, out=str(tmp_path / "train"), objective=name, epochs=2, lr=0.02, data={"validation": 0.25})
    training = json.loads((out / "train.json").read_text())
    for field in own_options(name):
        assert training["settings"][field.name] == field.default
    row = training["figures"][-1]
    assert math.isfinite(row["train_loss"]) and math.isfinite(row["held_out_loss"])
    weights = load_file(out / "head.safetensors")["net.weight"]
    assert weights.abs().max() > 1e-3  # it starts from zeros


def test_the_help_says_what_each_is(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for name, objective in OBJECTIVES.items():
        assert f"{name} ({objective.summary})" in printed
        for field in own_options(name):
            assert f"--model.{field.name} " in printed


def test_a_blend_that_an_objective_cannot_train_for_is_refused():
    for name, objective in OBJECTIVES.items():
        options = HeadOptions(objective=name, blend="logits")
        if "logits" in objective.blends:
            options.check()
        else:
            with pytest.raises(ValueError, match=f"`objective` {name} is for `blend` probabilities"):
                options.check()
