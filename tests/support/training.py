"""Training a head with options written flat."""

from diversed import cli
from diversed.data.batches import TraceOptions
from diversed.train import fit
from diversed.train.module import HeadOptions


def train(*, traces, out, epochs=4, data=None, trainer=None, seed=0, **model):
    """Call `fit.train`; `model` are options of the head."""
    trainer = {"max_epochs": epochs, **(trainer or {})}
    return fit.train(TraceOptions(traces, **(data or {})), out, HeadOptions(**model), trainer, seed)


def command(words):
    """Run `diversed train` with these words; errors are raised as the command raises them."""
    assert cli.dispatch(["train", *words]) == 0
