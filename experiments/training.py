"""What a trace costs on disk and how fast a head trains: bytes a token, and tokens per second by
what the head sees.

The traces are made up, at the hidden sizes of an 8B target and a 1B draft (4096 + 2048). A trace
stores scalars, so the
vocabulary enters a step of training nowhere: the same head is timed at two vocabularies, whose
    ratio should be 1.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from diversed.commands.bench import measure
from diversed.data.columns import bytes_per_token
from diversed.data.traces import Shard, write_manifest, write_shard
from diversed.train.datamodule import TraceModule, TraceOptions
from diversed.train.fit import DEFAULTS, quiet
from diversed.train.module import HeadOptions, VerifierModule
from diversed.verifier.head import FEATURES
from pytorch_lightning import Callback, Trainer

DRAFT, TARGET = 2048, 4096  # hidden sizes of Llama 3.2 1B and Llama 3.1 8B
TINY = (64, 128)  # of the packaged pair


def run(
    *,
    texts: int = 96,
    tokens: int = 128,
    batch: int = 8,
    vocabulary: int = 128_000,
    repeats: int = 5,
    threads: int = 1,
) -> list[dict]:
    """Bytes a token, and training tokens per second: median, slowest and fastest epoch."""
    torch.set_num_threads(threads)
    rows = _storage()
    with tempfile.TemporaryDirectory() as room:
        for features, size in (
            ("logits", 1000),
            ("logits", vocabulary),
            ("hidden", vocabulary),
            ("both", vocabulary),
        ):
            folder = Path(room) / f"{features}-{size}"
            _write_traces(folder, texts, tokens, size, hidden=features != "logits")
            rows.append(_throughput(folder, features, size, batch, repeats, texts * tokens))
    slow, fast = rows[-4:-2]
    fast["vs"] = {slow["case"]: fast["value"] / slow["value"]}
    return rows


def _storage() -> list[dict]:
    """Bytes a token: of a file for the tiny pair, computed from the layout for the large one."""
    with tempfile.TemporaryDirectory() as room:
        rows = []
        for name, hidden in (
            ("tiny pair, written", False),
            ("tiny pair with hidden states, written", True),
        ):
            shard = _shard(64, 128, 512, sum(TINY) if hidden else 0)
            entry = write_shard(room, 0, shard)
            size = (Path(room) / entry["file"]).stat().st_size
            rows.append({"case": name, "value": size / shard.tokens, "unit": "bytes a token"})
    for name, hidden, stored in (
        ("8B and 1B, computed", 0, 0),
        ("8B and 1B with hidden states, computed", DRAFT + TARGET, 0),
        ("8B and 1B with 64 logits of both rows, computed", 0, 64),
    ):
        rows.append(
            {"case": name, "value": bytes_per_token(hidden, stored), "unit": "bytes a token"}
        )
    both_rows = 2 * 2 * 128_000
    rows.append(
        {
            "case": "for comparison: both rows, V = 128,000, float16",
            "value": both_rows,
            "unit": "bytes a token",
        }
    )
    return rows


def _throughput(
    folder: Path, features: str, vocabulary: int, batch: int, repeats: int, tokens: int
) -> dict:
    """One head trained for `repeats` epochs after one to warm up."""
    clock = _Clock()
    data = TraceModule(
        TraceOptions(str(folder), batch, validation=0.0), hidden=features != "logits"
    )
    model = VerifierModule(HeadOptions(features), DRAFT, TARGET)
    with quiet():
        options = {
            **DEFAULTS,
            "max_epochs": repeats + 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        data.setup()
        model.start_from(*data.sample_inputs())
        Trainer(**options, callbacks=[clock], default_root_dir=str(folder)).fit(
            model, datamodule=data
        )
    rates = [tokens / seconds for seconds in clock.epochs[1:]]
    return {
        "case": f"{features}, V = {vocabulary:,}",
        "value": statistics.median(rates),
        "unit": "tokens/s",
        "low": min(rates),
        "high": max(rates),
        "vs": {},
    }


class _Clock(Callback):
    """Seconds of every epoch's steps: reading, forward, backward, optimiser and the figures."""

    def __init__(self):
        self.epochs: list[float] = []

    def on_train_epoch_start(self, *_) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, *_) -> None:
        self.epochs.append(time.perf_counter() - self.start)


def _shard(texts: int, tokens: int, vocabulary: int, hidden: int) -> Shard:
    """Random numbers of the right kind: what is timed does not depend on their values."""
    generator = torch.Generator().manual_seed(0)
    size = texts * tokens

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    return Shard(
        start=torch.arange(texts + 1) * tokens,
        prompt=torch.arange(texts) // 4,
        sample=torch.arange(texts) % 4,
        reward=uniform(texts),
        finished=torch.ones(texts, dtype=torch.bool),
        token=torch.randint(vocabulary, (size,), generator=generator, dtype=torch.int32),
        target_prob=uniform(size),
        draft_prob=uniform(size),
        tv=uniform(size),
        weight=torch.full((size,), 0.5),
        substituted=uniform(size) < 0.1,
        features=uniform(size, len(FEATURES)),
        hidden=torch.randn(size, hidden, generator=generator).half() if hidden else None,
    )


def _write_traces(folder: Path, texts: int, tokens: int, vocabulary: int, hidden: bool) -> None:
    entry = write_shard(
        folder, 0, _shard(texts, tokens, vocabulary, DRAFT + TARGET if hidden else 0)
    )
    write_manifest(
        folder,
        {
            "complete": True,
            "target": {"name": "made-up 8B", "hash": "", "hidden_size": TARGET},
            "draft": {"name": "made-up 1B", "hash": "", "hidden_size": DRAFT},
            "tokenizer": "",
            "vocab": vocabulary,
            "sampling": {},
            "relaxation": "ensemble:0.5",
            "task": "made-up",
            "seed": 0,
            "prompts": -(-texts // 4),
            "samples": 4,
            "shards": [entry],
        },
    )


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/training.py")
