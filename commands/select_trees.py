"""`diversed select`: what chooses the tree before each step is trained."""

from __future__ import annotations

from ..data.selection import TextPrompts
from ..runtime.groups import Models, Run
from ..selector.training import Fitting, Labelling, train_selectors


def select(
    run: Run,
    models: Models = Models(),
    prompts: TextPrompts = TextPrompts(),
    labelling: Labelling = Labelling(),
    fitting: Fitting = Fitting(),
    *,
    latencies: str,
) -> None:
    """Label contexts of a task's training prompts, then train a selector for every method; `out` is
    the folder for the selectors, one for each method.

    Args:
        latencies: file of `diversed bench latency --json`, or gpu for an assumed pair of 25 and 3
            ms a call.
    """
    train_selectors(run, latencies, models, prompts, labelling, fitting)
