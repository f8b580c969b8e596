"""`diversed distill`: a draft is fine-tuned to its target."""

from __future__ import annotations

from pathlib import Path

from ..data.selection import LongPrompts
from ..runtime.groups import Models, Run
from ..train.distillation import Material, distill_draft
from ..train.draft import Fitting
from ..train.draft_weights import Trained


def distill(
    run: Run,
    models: Models = Models(),
    prompts: LongPrompts = LongPrompts(prompts=400),
    material: Material = Material(),
    trained: Trained = Trained(),
    fitting: Fitting = Fitting(),
) -> Path:
    """Fine-tune a draft to its target on the target's own texts. Run it again to continue an
    interrupted run. The folder is a draft afterwards: `--draft OUT`.
    """
    return distill_draft(run, models, prompts, material, trained, fitting)
