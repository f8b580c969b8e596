"""`diversed train`: batches, the head that comes out, resuming, and the sentences for what cannot be trained on."""

import errno
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal

import pytest
import torch
from diversed.data.batches import Order, held_out
from diversed.data.traces import read_shards
from diversed.files import exclusive
from diversed.train import fit, head_training
from diversed.train.datamodule import TraceModule, TraceOptions
from diversed.train.fit import Mean, Sum, build_trainer, schedule
from diversed.train.module import HeadModule, HeadOptions
from diversed.train.objectives import attribution, nats_lost
from diversed.verifier.head import WeightHead
from pytorch_lightning import Callback, Trainer, seed_everything
from pytorch_lightning.plugins.environments import LightningEnvironment
from pytorch_lightning.strategies import SingleDeviceStrategy
from safetensors.torch import load_file, save_file

from .support.traces import synthetic_traces
from .support.training import command, train

SETTINGS = dict(features="both", width=4, epochs=3, data=dict(batch=4, validation=0.25), lr=0.01)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return str(synthetic_traces(tmp_path_factory.mktemp("traces"), prompts=8, samples=4, shards=2, hidden=(3, 5)))


@pytest.fixture(scope="module")
def finished(traces, tmp_path_factory):
    """A run that nobody interrupted."""
    return train(traces=traces, out=str(tmp_path_factory.mktemp("run") / "train"), **SETTINGS)


def test_a_batch_holds_whole_texts_and_the_end_of_text_decision_is_inside(traces):
    data = TraceModule(TraceOptions(traces, 32, validation=0.0), hidden=True)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    shards = list(read_shards(traces))
    order = list(Order(data.train_index, 0))
    assert sorted(order) == list(range(32))
    start = [(shard, int(a), int(b)) for shard in shards for a, b in zip(shard.start, shard.start[1:], strict=False)]
    for row, (shard, a, b) in enumerate(start[index] for index in order):
        assert batch["mask"][row].sum() == b - a and batch["mask"][row, : b - a].all()
        for name in ("target_prob", "draft_prob", "tv", "weight", "features", "hidden"):
            assert torch.equal(batch[name][row, : b - a], getattr(shard, name)[a:b])
    assert batch["hidden"].dtype == torch.float16


def test_advantages_compare_texts_of_one_prompt_and_one_folder(traces, tmp_path):
    other = str(synthetic_traces(tmp_path, prompts=8, samples=4, shards=2, hidden=(3, 5), seed=1))
    data = TraceModule(TraceOptions([traces, other], validation=0.0))
    data.setup()
    reward = data.texts.reward.view(16, 4)
    torch.testing.assert_close(data.texts.per_text["advantage"].view(16, 4), reward - reward.mean(1, keepdim=True))


def test_held_out_prompts_are_never_trained_on_and_are_the_same_in_every_folder(traces, tmp_path):
    other = str(synthetic_traces(tmp_path, prompts=8, samples=2, shards=2, hidden=(3, 5), seed=1))
    data = TraceModule(TraceOptions([traces, other], validation=0.25))
    data.setup()
    held = set(data.texts.prompt[data.held_index].tolist())
    assert len(held) == 2 and not held & set(data.texts.prompt[data.train_index].tolist())
    assert len(data.held_index) == 2 * 4 + 2 * 2


def test_some_prompts_are_always_left_to_train_on():
    counts = [len(held_out(prompts, share, 0)) for prompts, share in ((10, 0.0), (10, 0.01), (2, 0.9), (1, 0.5))]
    assert counts == [0, 1, 1, 0]


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = Order(torch.arange(50), seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_learning_rate_warms_up_and_ends_at_zero_over_the_true_number_of_steps():
    factors = [schedule(step, 100, 10) for step in range(101)]
    assert factors[:10] == [(step + 1) / 10 for step in range(10)]
    assert factors[10] == 1.0 and factors[100] == 0.0 and max(factors) == 1.0
    assert all(a > b for a, b in zip(factors[10:], factors[11:], strict=False))
    assert schedule(0, 1, 10) == 1.0 and schedule(3, 8, 10) == 1.0


def test_means_are_weighted_in_float64_also_when_moved_and_a_nan_stays():
    """What torchmetrics 1.9 forgets: its dtype when it is moved, its weights with nan_strategy="disable"."""
    mean, total = Mean().to("cpu"), Sum().to("cpu")
    value, weight = torch.tensor([0.1, 0.7], dtype=torch.float64), torch.tensor([1, 2])
    for metric in (mean, total):
        metric.reset()
    mean.update(value, weight)
    total.update(value)
    # float64 sums of two terms; float32 would be off by 1e-8
    assert float(mean.compute()) == pytest.approx(0.5, abs=1e-15) and float(total.compute()) == pytest.approx(0.8, abs=1e-15)
    mean.update(torch.tensor(math.nan))
    assert mean.compute().isnan()


def test_training_starts_at_the_weight_of_the_traces_and_at_one_half_without_any(traces, tmp_path):
    folder = synthetic_traces(tmp_path, prompts=4, samples=2, shards=1, weight=0.2)
    data = TraceModule(TraceOptions(str(folder), validation=0.0))
    data.setup()
    model = HeadModule(HeadOptions())
    batch = next(iter(data.train_dataloader()))
    assert torch.equal(torch.sigmoid(model(batch)), torch.full_like(batch["tv"], 0.5))
    model.start_from(*data.sample_inputs())
    # float32 logit and sigmoid of 0.2
    torch.testing.assert_close(torch.sigmoid(model(batch)), torch.full_like(batch["tv"], 0.2), rtol=0, atol=1e-6)


def test_inputs_are_standardised_by_the_training_texts(traces):
    data = TraceModule(TraceOptions(traces, validation=0.25), hidden=True)
    data.setup()
    features, hidden, weight = data.sample_inputs()
    tokens = int(data.texts.length[data.train_index].sum())
    assert features.shape == (tokens, 12) and hidden.shape == (tokens, 8) and weight.shape == (tokens,)
    few = data.sample_inputs(most=tokens // 3)[0]
    assert torch.equal(few, features[::3])


@pytest.mark.parametrize("lambda_", [1.0, -1.0])
def test_with_zero_rewards_lambda_alone_moves_step_acceptance_in_its_own_direction(tmp_path, lambda_):
    """The public reference code has this sign wrong: there a positive lambda lowers acceptance."""
    folder = synthetic_traces(tmp_path / "traces", prompts=4, samples=2, shards=1, weight=0.3, reward=0.0)
    settings = dict(epochs=3, lr=0.05, lambda_=lambda_, data=dict(batch=2, validation=0.0))
    out = train(traces=str(folder), out=str(tmp_path / "train"), **settings)
    rows = json.loads((out / "train.json").read_text())["figures"]
    assert lambda_ * (rows[2]["train_step_acceptance"] - rows[0]["train_step_acceptance"]) > 0.01


def test_training_finds_where_a_substitution_costs_reward(tmp_path):
    """In the made-up task only substitutions at TV > 0.5 cost: with a small lambda the gate must hold back there."""
    folder = synthetic_traces(tmp_path / "traces", prompts=64, samples=4, shards=1, weight=0.5)
    out = train(traces=str(folder), out=str(tmp_path / "train"), epochs=6, lr=0.02, lambda_=0.05, data=dict(batch=16))
    training = json.loads((out / "train.json").read_text())
    head = WeightHead(**training["head"])
    head.load_state_dict(load_file(out / "head.safetensors"))
    shard = next(read_shards(folder))
    weight = head(shard.features).sigmoid()
    assert weight[shard.tv > 0.6].mean() < weight[shard.tv < 0.4].mean() - 0.05
    assert training["figures"][-1]["held_out_reward_estimate"] > training["figures"][0]["held_out_reward"]


def head_of(out):
    training = json.loads((out / "train.json").read_text())
    head = WeightHead(**training["head"])
    head.load_state_dict(load_file(out / "head.safetensors"))
    return head, training


def test_patience_stops_after_the_best_held_out_loss_and_keeps_that_head(tmp_path):
    folder = synthetic_traces(tmp_path / "traces", prompts=16, samples=4, shards=1, hidden=(3, 5))
    settings = dict(features="both", width=16, epochs=40, lr=0.1, patience=3, objective="attribution", weight_decay=0.0)
    out = train(traces=str(folder), out=str(tmp_path / "train"), data=dict(batch=4, validation=0.25), **settings)
    head, training = head_of(out)
    losses = [row["held_out_loss"] for row in training["figures"]]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 3 < 40
    data = TraceModule(TraceOptions(str(folder), 64, validation=0.25), hidden=True)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    loss = attribution(head(batch["features"], batch["hidden"]).detach(), batch)
    assert float(loss) == pytest.approx(losses[best], abs=2e-6)  # figures are rounded to six decimals


def test_an_epoch_without_validation_has_no_held_out_figures_and_is_not_the_best(traces, tmp_path):
    settings = {**SETTINGS, "epochs": 4, "patience": 3, "trainer": {"check_val_every_n_epoch": 2}}
    training = json.loads((train(traces=traces, out=str(tmp_path), **settings) / "train.json").read_text())
    assert ["held_out_loss" in row for row in training["figures"]] == [False, True, False, True]


@pytest.mark.parametrize("name, sentence", [("head.safetensors", "is not the head that"), ("train.json", "is damaged")])
def test_a_damaged_result_is_not_taken_for_a_finished_run(traces, tmp_path, name, sentence):
    out = train(traces=traces, out=str(tmp_path / "train"), epochs=1)
    whole = (out / name).read_bytes()
    (out / name).write_bytes(whole[:50])
    with pytest.raises(ValueError, match=f"{name} {sentence}"):
        train(traces=traces, out=str(out), epochs=1)
    (out / name).unlink()
    train(traces=traces, out=str(out), epochs=1)
    assert (out / name).read_bytes() == whole


def test_patience_without_held_out_texts_is_refused(traces, tmp_path):
    with pytest.raises(ValueError, match="`patience` waits for the loss on held-out prompts, and none are held out"):
        train(traces=traces, out=str(tmp_path / "train"), patience=2, data=dict(validation=0.0))


def test_a_gate_starts_from_another_one_of_its_kind(finished, traces, tmp_path):
    settings = {**SETTINGS, "epochs": 1, "lr": 0.0, "weight_decay": 0.0, "start": str(finished)}
    out = train(traces=traces, out=str(tmp_path / "train"), **settings)
    assert (out / "head.safetensors").read_bytes() == (finished / "head.safetensors").read_bytes()
    with pytest.raises(ValueError, match="`start`: .* holds float32 tensors .*, but the head to train has"):
        train(traces=traces, out=str(tmp_path / "other"), **{**settings, "width": 8})
    with pytest.raises(FileNotFoundError, match="`start` .* holds no head.safetensors; give a folder of"):
        train(traces=traces, out=str(tmp_path / "other"), **{**settings, "start": str(tmp_path)})
    broken = {name: tensor * math.nan for name, tensor in load_file(finished / "head.safetensors").items()}
    save_file(broken, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="`start`: .*head.safetensors: .* holds values that are not finite"):
        train(traces=traces, out=str(tmp_path / "other"), **{**settings, "start": str(tmp_path)})


def test_a_bounded_gate_spends_its_bound_and_looks_at_no_reward(tmp_path):
    heads = []
    for number, reward in enumerate((None, 0.0)):
        folder = synthetic_traces(tmp_path / f"t{number}", prompts=64, samples=4, shards=1, weight=0.3, reward=reward)
        settings = dict(epochs=20, lr=0.02, objective="bounded", bound=2.0)
        out = train(traces=str(folder), out=str(tmp_path / f"h{number}"), data=dict(batch=16), **settings)
        heads.append((out / "head.safetensors").read_bytes())
        data = TraceModule(TraceOptions(str(folder), 256))
        data.setup()
        batch = next(iter(data.train_dataloader()))
        weight = head_of(out)[0](batch["features"]).sigmoid()
        lost = torch.where(batch["mask"], weight * nats_lost(batch), 0).sum(1).mean()
        assert abs(float(lost.detach()) - 2.0) < 0.2  # dual ascent ends near its constraint, here within a tenth of it
    assert heads[0] == heads[1]


def test_a_gate_for_the_logit_blend_learns_from_stored_log_probabilities(tmp_path):
    folder = synthetic_traces(tmp_path / "traces", prompts=256, samples=4, shards=1, weight=0.5, blend="logits")
    settings = dict(epochs=4, lr=0.02, lambda_=0.0, ratio_clip=5.0, data=dict(batch=16), blend="logits")
    head, training = head_of(train(traces=str(folder), out=str(tmp_path / "train"), **settings))
    shard = next(read_shards(folder))
    weight = head(shard.features).sigmoid()
    assert weight[shard.tv > 0.6].mean() < weight[shard.tv < 0.4].mean() - 0.03
    assert training["settings"]["blend"] == "logits"
    with pytest.raises(ValueError, match="tell nothing about `blend` probabilities; gather with a relaxation that"):
        train(traces=str(folder), out=str(tmp_path / "other"))
    plain = synthetic_traces(tmp_path / "plain")
    with pytest.raises(ValueError, match="holds no log-probabilities, .*gather with --store_logits 64"):
        train(traces=str(plain), out=str(tmp_path / "other"), blend="logits")
    for traces, stored in ((folder, 3), (plain, 5)):
        described = json.loads((traces / "manifest.json").read_text()) | {"store_logits": stored}
        (traces / "manifest.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"store \[3, 5\] log-probabilities a token, expected one number"):
        train(traces=[str(folder), str(plain)], out=str(tmp_path / "other"), blend="logits")


def test_the_likelihood_reward_is_the_targets_mean_log_probability_and_needs_no_score(tmp_path):
    folder = str(synthetic_traces(tmp_path, prompts=4, samples=2, shards=2, reward=0.0))
    data = TraceModule(TraceOptions(folder, validation=0.0, reward="likelihood"))
    data.setup()
    rewards = []
    for shard in read_shards(folder):
        for a, b in zip(shard.start, shard.start[1:], strict=False):
            rewards.append(shard.target_prob[a:b].log().mean())
    torch.testing.assert_close(data.texts.reward, torch.stack(rewards))
    assert data.texts.per_text["advantage"].any()


def test_a_finished_run_says_what_the_head_is_and_where_it_came_from(finished, traces):
    training = json.loads((finished / "train.json").read_text())
    assert training["head"] == {"features": "both", "offset": "", "draft_hidden": 3, "target_hidden": 5, "width": 4}
    assert training["manifest"]["task"] == "made-up" and training["settings"]["lr"] == 0.01
    assert [row["epoch"] for row in training["figures"]] == [1, 2, 3]
    row = training["figures"][-1]
    assert sum(row["train_weight_histogram"]) + sum(row["held_out_weight_histogram"]) == sum(
        shard.tokens for shard in read_shards(traces)
    )
    assert row["train_weight_p10"] <= row["train_weight_p50"] <= row["train_weight_p90"]
    lines = (finished / "metrics.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[0].startswith("epoch,step,lr,train_loss,train_step_acceptance")
    assert not list(finished.glob(".*.part")) and not list(finished.glob("*.part"))


def test_a_checkpoint_holds_the_head_alone_and_loads_without_code(finished):
    checkpoint = torch.load(finished / "last.ckpt", weights_only=True)
    head = load_file(finished / "head.safetensors")
    assert {f"head.{name}" for name in head} == set(checkpoint["state_dict"])
    assert all(torch.equal(checkpoint["state_dict"][f"head.{name}"], tensor) for name, tensor in head.items())


def test_the_command_and_the_function_end_with_the_same_head(finished, traces, tmp_path, capsys):
    words = "--model.features both --model.width 4 --trainer.max_epochs 3 --data.batch 4 --data.validation 0.25"
    command([*words.split(), "--model.lr", "0.01", "--data.traces", traces, "--out", str(tmp_path / "train")])
    assert (tmp_path / "train/head.safetensors").read_bytes() == (finished / "head.safetensors").read_bytes()
    assert re.search(r"epoch 3/3  held out: loss -?\d\.\d+, step acceptance 0\.\d+, ", capsys.readouterr().out)


def test_a_cluster_brings_its_own_strategy_plugins_and_callbacks(finished, traces, tmp_path):
    """And the head is the one of the plain command."""

    class Cluster(LightningEnvironment):
        pass

    class Counter(Callback):
        batches = 0

        def on_train_batch_end(self, trainer, *_):
            self.batches += 1
            self.seen = trainer.strategy

    strategy, counter = SingleDeviceStrategy(torch.device("cpu")), Counter()
    trainer = {"strategy": strategy, "plugins": Cluster(), "callbacks": counter}
    folder = train(traces=traces, out=str(tmp_path / "train"), trainer=trainer, **SETTINGS)
    assert counter.seen is strategy and counter.batches == 3 * math.ceil(24 / 4)
    assert (folder / "head.safetensors").read_bytes() == (finished / "head.safetensors").read_bytes()


def test_a_trainer_of_ones_own_trains_the_same_head(finished, traces):
    data = TraceModule(TraceOptions(traces, 4, validation=0.25), hidden=True)
    seed_everything(0, verbose=False)
    model = HeadModule(HeadOptions(features="both", width=4, lr=0.01), data.draft_hidden, data.target_hidden)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=3, accelerator="cpu", gradient_clip_val=5.0, num_sanity_val_steps=0, **quiet).fit(model, data)
    assert [row["epoch"] for row in model.history] == [1, 2, 3]
    expected = load_file(finished / "head.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.head.state_dict().items())


def test_a_finished_run_is_left_alone_and_other_settings_are_refused_by_name(finished, traces, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.iterdir() if path.name != ".lock"}
    train(traces=traces, out=str(finished), **SETTINGS)
    assert "is already trained; choose another --out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="was begun with lr 0.01, now it is 0.02; .*choose another --out"):
        train(traces=traces, out=str(finished), **{**SETTINGS, "lr": 0.02})
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_run_without_a_finished_epoch_may_be_started_otherwise(traces, tmp_path):
    (tmp_path / "settings.json").write_text('{"lr": 1.0}')
    assert (train(traces=traces, out=str(tmp_path), **SETTINGS) / "train.json").is_file()


# --- kill -9 --------------------------------------------------------------------------------------------------------


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_step(count):
    original, seen = HeadModule.training_step, []

    def step(self, *args):
        seen.append(1)
        return original(self, *args) if len(seen) <= count else _die()

    HeadModule.training_step = step


def _die_in_checkpoint(number):
    """Half of a checkpoint's bytes are written when the process dies."""
    original, seen = os.replace, []

    def replace(source, path):
        seen.append(str(path))
        if sum(name.endswith("last.ckpt") for name in seen) == number and seen[-1].endswith("last.ckpt"):
            os.truncate(source, os.path.getsize(source) // 2)
            _die()
        original(source, path)

    os.replace = replace


def _die_at(module, name, call=1):
    original, seen = getattr(module, name), []

    def dies(*arguments):
        seen.append(1)
        return original(*arguments) if len(seen) < call else _die()

    setattr(module, name, dies)


KILLS = {
    "before the first epoch ends": lambda: _die_at_step(2),
    "in the middle of the second epoch": lambda: _die_at_step(9),
    "while the first checkpoint is written": lambda: _die_in_checkpoint(1),
    "while the second checkpoint replaces the first": lambda: _die_in_checkpoint(2),
    "between a checkpoint and its figures": lambda: _die_at(fit, "_write_metrics"),
    "between the last checkpoint and its figures": lambda: _die_at(fit, "_write_metrics", 3),
    "between the last epoch and the head": lambda: _die_at(head_training, "write_head_of"),
    "between the head and train.json": lambda: _die_at(head_training, "sha256"),
}


def _train_and_die(kill, traces, out):
    KILLS[kill]()
    train(traces=traces, out=out, **SETTINGS)


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_ends_with_the_same_head_when_it_is_run_again(kill, finished, traces, tmp_path, capsys):
    out = tmp_path / "train"
    child = multiprocessing.get_context("fork").Process(target=_train_and_die, args=(kill, traces, str(out)))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL and not (out / "train.json").exists()
    train(traces=traces, out=str(out), **SETTINGS)
    assert (out / "head.safetensors").read_bytes() == (finished / "head.safetensors").read_bytes()
    assert (out / "metrics.csv").read_text() == (finished / "metrics.csv").read_text()


# --- what cannot be trained on --------------------------------------------------------------------------------------


def test_a_second_process_on_one_folder_is_refused(traces, tmp_path):
    with exclusive(tmp_path):
        with pytest.raises(OSError, match="is writing to .*; wait until it ends or choose another --out"):
            train(traces=traces, out=str(tmp_path), **SETTINGS)


@pytest.mark.parametrize("damage", ["", "[]", "\x00"])
def test_damaged_settings_are_named_with_the_way_out(finished, traces, tmp_path, damage):
    shutil.copytree(finished, tmp_path / "train")
    (tmp_path / "train/settings.json").write_text(damage)
    with pytest.raises(ValueError, match="settings.json is damaged .*choose another --out or delete the folder"):
        command(["--data.traces", traces, "--out", str(tmp_path / "train")])


@pytest.fixture
def unfinished(finished, tmp_path):
    """A run that was killed between its last epoch and the head."""
    out = shutil.copytree(finished, tmp_path / "train")
    for name in ("train.json", "head.safetensors"):
        (out / name).unlink()
    return out


def refused_checkpoint(traces, out, why):
    before = {path.name: path.read_bytes() for path in out.glob("[!.]*")}
    with pytest.raises(ValueError, match=rf"last\.ckpt cannot be read \({why}.*\); delete it to train from the start"):
        train(traces=traces, out=str(out), **SETTINGS)
    assert {path.name: path.read_bytes() for path in out.glob("[!.]*")} == before


def test_a_damaged_checkpoint_is_named_with_the_way_out(finished, traces, unfinished):
    (unfinished / "last.ckpt").write_bytes(b"PK\x03\x04 not a checkpoint")
    refused_checkpoint(traces, unfinished, "")
    torch.save({"state_dict": {}, "loops": {}}, unfinished / "last.ckpt")
    refused_checkpoint(traces, unfinished, "it has no optimizer_states")
    (unfinished / "last.ckpt").unlink()
    train(traces=traces, out=str(unfinished), **SETTINGS)  # the remedy
    assert (unfinished / "head.safetensors").read_bytes() == (finished / "head.safetensors").read_bytes()


def test_a_bit_flipped_anywhere_in_a_checkpoint_is_found(traces, unfinished):
    whole, draw = (unfinished / "last.ckpt").read_bytes(), random.Random(0)
    places = [draw.randrange(8 * len(whole)) for _ in range(60)] + [8 * len(whole) - bit for bit in (1, 8 * 65, 8 * 66)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        (unfinished / "last.ckpt").write_bytes(flipped)
        refused_checkpoint(traces, unfinished, "")
    (unfinished / "last.ckpt").write_bytes(whole + b"0")
    refused_checkpoint(traces, unfinished, "")


def test_the_checkpoint_of_another_run_or_of_an_earlier_epoch_is_refused(traces, unfinished, tmp_path):
    other = tmp_path / "other"
    train(traces=traces, out=str(other), **SETTINGS, seed=1)
    early = tmp_path / "early"
    process = multiprocessing.get_context("fork").Process(
        target=_train_and_die, args=("while the second checkpoint replaces the first", traces, str(early))
    )
    process.start()
    process.join(60)
    for folder, why in ((other, "it is of another run"), (early, "it is of an earlier epoch than metrics.csv")):
        shutil.copy(folder / "last.ckpt", unfinished / "last.ckpt")
        refused_checkpoint(traces, unfinished, why)


def test_results_without_their_settings_are_not_taken_for_those_of_others(finished, traces, tmp_path):
    out = shutil.copytree(finished, tmp_path / "train")
    (out / "settings.json").unlink()
    for name in ("train.json", "last.ckpt"):
        with pytest.raises(ValueError, match=f"holds {name} but no settings.json; choose another --out or delete"):
            train(traces=traces, out=str(out), **SETTINGS, seed=1)
        (out / name).unlink()


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_code_in_a_checkpoint_is_not_run(traces, unfinished, tmp_path):
    out = unfinished
    torch.save({"state_dict": {}, "loops": {}, "optimizer_states": [Payload(tmp_path / "ran")]}, out / "last.ckpt")
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read \(it .* holds more than tensors and plain data\)"):
        train(traces=traces, out=str(out), **SETTINGS)
    assert not (tmp_path / "ran").exists()
    torch.load(out / "last.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the payload would have run"


def test_a_full_disk_is_an_os_error_that_the_command_line_explains(traces, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "last.ckpt")

    monkeypatch.setattr(fit, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        train(traces=traces, out=str(tmp_path), **SETTINGS)


def test_a_head_on_hidden_states_refuses_traces_without_them(tmp_path):
    folder = synthetic_traces(tmp_path / "traces", prompts=2, samples=2, shards=1)
    with pytest.raises(ValueError, match="holds no hidden states, .* gather with --hidden true"):
        train(traces=str(folder), out=str(tmp_path / "train"), features="hidden")


def test_a_relaxation_that_is_not_a_blend_is_refused(tmp_path):
    folder = synthetic_traces(tmp_path / "traces", prompts=2, samples=2, shards=1, weight=math.nan)
    with pytest.raises(ValueError, match="not a blend of both rows"):
        train(traces=str(folder), out=str(tmp_path / "train"))


def test_one_text_a_prompt_is_refused_where_texts_of_a_prompt_are_compared(tmp_path):
    folder = synthetic_traces(tmp_path / "traces", prompts=8, samples=1, shards=1)
    with pytest.raises(ValueError, match="one text a prompt, .* gather with --samples 4, or train with"):
        train(traces=str(folder), out=str(tmp_path / "train"))
    for objective in ("attribution", "bounded"):
        out = train(traces=str(folder), out=str(tmp_path / objective), epochs=1, objective=objective)
        assert (out / "head.safetensors").is_file()


def test_traces_of_two_pairs_are_refused(traces, tmp_path):
    other = synthetic_traces(tmp_path / "other", prompts=2, samples=2, shards=1)
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace("made-up target", "another target"))
    with pytest.raises(ValueError, match="differ in `target` .* one pair of models, one task and one order"):
        train(traces=[traces, str(other)], out=str(tmp_path / "train"))


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--model.widht", "4"], "did you mean `--model.width`"),
        (["--model.features", "foo"], "`model.features` must be one of hidden, logits, tokens, both, logits\\+tokens, tokens\\+hidden, logits\\+tokens\\+hidden, got foo"),
        (["--model.lr", "-1"], "`lr` must be a number of at least 0, got -1"),
        (["--data.validation", "1"], r"`validation` must be in \[0, 1\)"),
        (["--data.batch", "0"], "`batch` must be at least 1 text"),
        (["--trainer.max_epochs", "-1"], "training needs an end for its schedule; set `trainer.max_epochs`"),
        (["--trainer.max_epochs", "-2"], "training refuses these options: .*`max_epochs` must be"),
        (["--trainer.max_time", "x"], "training refuses these options: .*not a valid duration"),
        (["--trainer.accumulate_grad_batches", "0"], "`accumulate_grad_batches` must be at least 1"),
        (["--model.width", "1000000000"], "`width` must be at most 1048576"),
        (["--threads", "0"], "`threads` must be at least 1"),
        (["--seed_everything", "true"], "`seed_everything` must be a whole number"),
    ],
)
def test_bad_options_are_answered_with_a_sentence(traces, tmp_path, words, sentence):
    with pytest.raises(ValueError, match=sentence):
        command(["--data.traces", traces, "--out", str(tmp_path / "train"), *words])


def test_a_settings_file_gives_its_train_section_and_the_shared_seed(traces, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 7\ntarget: sums-target\ngather: {samples: 4}\ntrain:\n  model: {lr: 1e-3}\n")
    words = ["--config", str(file), "--data.traces", traces, "--out", "x"]
    with pytest.raises(SystemExit) as stop:
        command([*words, "--print_config"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and "lr: 0.001" in printed and "seed_everything: 7" in printed
    file.write_text("train:\n  model: {widht: 3}\n")
    with pytest.raises(ValueError, match=r"`model.widht` in section `train` of run.yaml .* did you mean `model.width`"):
        command(words)


@pytest.mark.parametrize(
    "options", [{"check_val_every_n_epoch": 0}, {"val_check_interval": 0}, {"val_check_interval": 0.0},
                {"max_steps": 0}, {"limit_train_batches": 0}]
)  # fmt: skip
def test_a_trainer_that_would_train_nothing_is_refused(options, tmp_path):
    with pytest.raises(ValueError, match="must be at least 1|must be above 0"):
        build_trainer(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
