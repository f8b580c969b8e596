"""Training a head with options written flat."""

from diversed import cli
from diversed.train import head_training
from diversed.train.datamodule import TraceOptions
from diversed.train.module import HeadOptions


def train(*, traces, out, epochs=4, data=None, trainer=None, seed=0, **model):
    """Call `head_training.train`; `model` are options of the head."""
    trainer = {"max_epochs": epochs, **(trainer or {})}
    return head_training.train(TraceOptions(traces, **(data or {})), out, HeadOptions(**model), trainer, seed)


def command(words):
    """Run `diversed train` with these words; errors are raised as the command raises them."""
    assert cli.dispatch(["train", *words]) == 0
