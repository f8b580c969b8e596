"""`diversed reinforce`: a head is trained on its own texts."""

from __future__ import annotations

from pathlib import Path

from ..data.selection import SplitPrompts
from ..runtime.groups import Models, Run
from ..train.module import HeadOptions
from ..train.on_policy import Updates, reinforce_head


def reinforce(
    run: Run,
    models: Models = Models(),
    prompts: SplitPrompts = SplitPrompts(prompts=400),
    updates: Updates = Updates(),
    *,
    model: HeadOptions = HeadOptions(acceptance="sum"),
) -> Path:
    """Train a head by REINFORCE as published: new texts from the head at every update. Run it again
    to continue an interrupted run; `diversed export --train OUT` makes a bundle.

    Args:
        model: the head and its optimiser; the objective is reinforce.
    """
    return reinforce_head(run, models, prompts, updates, model)
