"""Training in several processes: the head, the figures and the files of one process, also after kill -9.

Processes are real and talk through gloo. All but one of the runs are forked from this process with the environment that
torchrun sets, which saves them the seconds of starting Python; the last is the command, which starts its own.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from diversed import cli
from diversed.data.batches import Order
from diversed.train import fit, head_training
from diversed.train.losses import OBJECTIVES
from diversed.train.module import HeadModule
from safetensors.torch import load_file

from .support.traces import synthetic_traces
from .support.training import command

# 21 texts to train on and 9 held out, in batches of 4: each time the last batch is one text, and one process has none.
COMMON = "--data.batch 4 --data.validation 0.3 --model.lr 0.01 --trainer.max_epochs 3".split()
HEADS = {name: f"--model.objective {name}" for name in OBJECTIVES} | {
    "reinforce": "--model.features both --model.width 4 --trainer.accumulate_grad_batches 2",
    "attribution": "--model.objective attribution --trainer.gradient_clip_val 0.05 --model.patience 1",
    "bounded": "--model.objective bounded --model.bound 2.0",
}
# Sums over the texts of a batch are taken in another order: after 18 steps weights of up to 1 differ by at most 3e-8
# between one process and two or four. A mean over the wrong number of texts moves them by 7e-3.
ROUNDING = dict(rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return str(synthetic_traces(tmp_path_factory.mktemp("traces"), prompts=10, samples=3, shards=2, hidden=(3, 5), labels=True))


def words(traces, out, head="reinforce", processes=1):
    several = ["--trainer.devices", str(processes), "--trainer.strategy", "ddp"] if processes > 1 else []
    return [*COMMON, *HEADS[head].split(), "--data.traces", traces, "--out", str(out), *several]


@pytest.fixture(scope="module")
def one(traces, tmp_path_factory):
    """Every head, trained in one process."""
    folder = tmp_path_factory.mktemp("one")
    for head in HEADS:
        command(words(traces, folder / head, head))
    return folder


@pytest.fixture(scope="module")
def two(traces, tmp_path_factory):
    """Every head, trained in two processes that nobody interrupted."""
    folder = tmp_path_factory.mktemp("two")
    assert launch([words(traces, folder / head, head, 2) for head in HEADS]) == [0, 0]
    return folder


def launch(commands, processes=2, before=lambda: None):
    """Exit codes of processes that run `commands` as torchrun would start them; `before` is called in each first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_work, args=(commands, processes, r, port, before)) for r in range(processes)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def _work(commands, processes, rank, port, before):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    before()
    for line in commands:
        command(line)


def figures(out):
    return json.loads((out / "train.json").read_text())["figures"]


def assert_equal_up_to_rounding(out, other):
    torch.testing.assert_close(load_file(out / "head.safetensors"), load_file(other / "head.safetensors"), **ROUNDING)
    for row, expected in zip(figures(out), figures(other), strict=True):
        for name, value in row.items():
            assert value == pytest.approx(expected[name], rel=0, abs=2e-6)  # figures are rounded to six decimals


@pytest.mark.parametrize("texts", [1, 3, 7, 8, 9])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_share_every_batch_out_and_step_together(texts, world):
    index, batch = torch.arange(100, 100 + texts), 4
    whole = Order(index, 3, batch)
    parts = [Order(index, 3, batch, world, rank) for rank in range(world)]
    for epoch in range(2):
        for order in (whole, *parts):
            order.set_epoch(epoch)
        texts_of, own = list(whole), [list(part) for part in parts]
        assert [len(part) for part in parts] == [len(part) for part in own]
        steps = -(-texts // batch)
        for step in range(steps):
            shares = [part[step * batch // world : (step + 1) * batch // world] for part in own]
            assert all(shares)
            counted = [i for share in shares for i in share if i >= 0]
            assert sorted(counted) == sorted(texts_of[step * batch : (step + 1) * batch])
            assert all(len(share) == 1 and ~share[0] in index for share in shares if share[0] < 0)
        assert all(len(part) <= steps * batch // world for part in own)


@pytest.mark.parametrize("head", HEADS)
def test_two_processes_train_the_head_of_one_and_report_its_figures(head, one, two):
    assert_equal_up_to_rounding(two / head, one / head)
    assert "held_out_loss" in figures(two / head)[-1]
    settings = [json.loads((folder / head / "settings.json").read_text()) for folder in (one, two)]
    assert [name for name in settings[0] if settings[0][name] != settings[1][name]] == ["world_size", "crc32"]


def _die_in_the_third_epoch():
    """An epoch has six steps, so there are two checkpoints by then."""
    original, seen = HeadModule.training_step, []

    def step(self, *args):
        seen.append(1)
        if len(seen) == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    HeadModule.training_step = step


def _only_the_first_may_write():
    if os.environ["RANK"] != "0":
        fit.write_whole = head_training.write_whole = None


def test_two_killed_processes_end_with_the_same_bytes_when_they_are_run_again(traces, two, tmp_path):
    again = words(traces, tmp_path / "train", processes=2)
    assert launch([again], before=_die_in_the_third_epoch) == [-signal.SIGKILL] * 2
    assert (tmp_path / "train/last.ckpt").is_file() and not (tmp_path / "train/train.json").exists()
    assert launch([again], before=_only_the_first_may_write) == [0, 0]
    for name in ("head.safetensors", "metrics.csv", "settings.json"):
        assert (tmp_path / "train" / name).read_bytes() == (two / "reinforce" / name).read_bytes()


def test_the_command_starts_its_own_processes(traces, two, tmp_path):
    line = [sys.executable, "-m", "diversed", "train", *words(traces, tmp_path / "train", processes=2)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("epoch 3/3") == 1 and not result.stderr
    head = (tmp_path / "train/head.safetensors").read_bytes()
    assert head == (two / "reinforce/head.safetensors").read_bytes()


def test_a_run_is_continued_with_as_many_processes_as_it_was_started_with(traces, one):
    with pytest.raises(ValueError, match="was begun with world_size 1, now it is 2; give the same again"):
        command(words(traces, one / "reinforce", processes=2))


def test_a_batch_that_processes_cannot_share_is_refused(traces, tmp_path):
    with pytest.raises(ValueError, match="`batch` must be a multiple of the 3 processes that share its texts, got 4"):
        command(words(traces, tmp_path, processes=3))
    with pytest.raises(ValueError, match="`trainer.use_distributed_sampler` must be false"):
        command([*words(traces, tmp_path), "--trainer.use_distributed_sampler", "true"])


def test_the_story_is_for_one_process(tmp_path, monkeypatch, capsys):
    story = ["run", "--config", "quickstart", "--out", str(tmp_path / "run")]
    assert cli.main([*story, "--train.trainer.devices", "2"]) == 2
    assert "`diversed run` is for one process, got 1 with train.trainer.devices 2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(story) == 2
    assert "got 2 with train.trainer.devices 1 and num_nodes 1; run the stages one by one," in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
