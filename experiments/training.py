"""What a trace costs on disk and how fast a head trains: bytes a token, and tokens per second by
what the head sees.

    python experiments/training.py

The traces are made up, at the hidden sizes of an 8B target and a 1B draft (4096 + 2048). A trace
stores scalars, so no step of training sees the vocabulary: the same head is timed at two
vocabularies, whose ratio should be 1.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from diversed.benchmarks.timing import row
from diversed.commands.bench import measure
from diversed.data.columns import bytes_per_token
from diversed.data.traces import Shard, write_manifest, write_shard
from diversed.train.datamodule import TraceModule, TraceOptions
from diversed.train.fit import DEFAULTS, quiet
from diversed.train.module import HeadModule, HeadOptions
from diversed.verifier.head import FEATURES
from pytorch_lightning import Callback, Trainer

DRAFT, TARGET = 2048, 4096  # hidden sizes of Llama 3.2 1B and Llama 3.1 8B
# Hidden numbers and stored logits of a position.
STORED = {
    "scalars": (0, 0),
    "scalars and hidden states of 8B and 1B": (DRAFT + TARGET, 0),
    "scalars and 64 logits of both rows": (0, 64),
}


def run(
    *,
    texts: int = 96,
    tokens: int = 128,
    batch: int = 8,
    vocabulary: int = 128_000,
    repeats: int = 5,
    threads: int = 1,
) -> list[dict]:
    """Bytes a token, and training tokens per second: median, slowest and fastest epoch.

    Args:
        texts: of the traces that are made up.
        tokens: of each of them.
        batch: texts in a step.
        vocabulary: of the models; the head is also timed at 1,000.
        repeats: epochs that are timed.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    sizes = {name: bytes_per_token(*stored) for name, stored in STORED.items()}
    sizes["for comparison: both rows, V = 128,000, float16"] = 2 * 2 * 128_000
    unit = "bytes a token"
    rows = [{"case": name, "value": size, "unit": unit} for name, size in sizes.items()]
    shapes = [("logits", 1000), *((kind, vocabulary) for kind in ("logits", "hidden", "both"))]
    for features, size in shapes:
        with tempfile.TemporaryDirectory() as room:
            _write_traces(Path(room), texts, tokens, size, hidden=features != "logits")
            epochs = _epochs(room, features, batch, repeats)
        rates = [texts * tokens / taken for taken in epochs]
        rows.append(row(f"{features}, V = {size:,}", rates, "tokens/s", vs={}))
    slow, fast = rows[-4:-2]
    fast["vs"] = {slow["case"]: fast["value"] / slow["value"]}
    return rows


def _epochs(folder: str, features: str, batch: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` epochs of training, after one that is not kept."""
    clock = _Clock()
    options = TraceOptions(folder, batch, validation=0.0)
    data = TraceModule(options, hidden=features != "logits")
    model = HeadModule(HeadOptions(features=features), DRAFT, TARGET)
    told = {"max_epochs": repeats + 1, "enable_checkpointing": False}
    told |= {"enable_progress_bar": False, "callbacks": [clock], "default_root_dir": folder}
    with quiet():
        data.setup()
        Trainer(**DEFAULTS | told).fit(model, datamodule=data)
    return clock.epochs[1:]


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
