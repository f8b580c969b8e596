"""`diversed gather`: a pair writes texts, and their traces are kept."""

from __future__ import annotations

from pathlib import Path

from ..data.gathering import Rollouts, Stored, gather_traces
from ..data.importance import Labels
from ..data.selection import SplitPrompts
from ..runtime.groups import Models, SharedRun


def gather(
    run: SharedRun,
    models: Models = Models(),
    prompts: SplitPrompts = SplitPrompts(prompts=400),
    rollouts: Rollouts = Rollouts(),
    stored: Stored = Stored(),
    labels: Labels = Labels(),
) -> Path:
    """Sample texts under a relaxation and store what a head needs to learn from them."""
    return gather_traces(run, models, prompts, rollouts, stored, labels)
