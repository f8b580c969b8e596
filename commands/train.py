"""`diversed train`: traces become a head."""

from __future__ import annotations

from pathlib import Path

from ..train import head_training
from ..train.datamodule import TraceOptions
from ..train.fit import TrainerOptions
from ..train.module import HeadOptions


def train(
    *,
    data: TraceOptions,
    out: str,
    model: HeadOptions = HeadOptions(),
    trainer: TrainerOptions = TrainerOptions(),
    seed_everything: int = 0,
    threads: int = 1,
) -> Path:
    """Train a head on traces. Run it again to continue an interrupted run.

    Args:
        data: the traces, the size of a batch and what is held out.
        out: folder to write to; an interrupted run is continued.
        model: the head, its objective and its optimiser.
        trainer: options of Lightning's Trainer.
        seed_everything: decides held-out prompts, order of texts and the start of a head with a
            hidden layer.
        threads: CPU threads; the same number gives the same head.
    """
    return head_training.train(data, out, model, vars(trainer), seed_everything, threads)
