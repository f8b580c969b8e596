"""Top-k, top-p, min-p and greedy decoding as three numbers a row, so that a kernel keeps what the
sampler kept.

A filter keeps the most likely tokens; at its edge tokens may tie, and of a tie the nucleus keeps
the lowest ids. So

    kept  <=>  logit > edge  or  (logit >= low and id <= last).

edge is the largest logit that is dropped, low the smallest that is kept, last the largest id kept
among logits up to
edge. Ties are those of the probabilities: several logits may round to one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cut(logits: Tensor, kept: Tensor) -> Tensor:
    """[..., 3] float32 (edge, low, last) of rows; -inf thrice, which keeps all, where `kept` is
    False everywhere.

    logits: [..., V] as the kernel is given them.
    kept:   [..., V] bool; for a sampling, `probabilities(logits, sampling) > 0`: what that costs,
            and four passes.
    """
    logits = logits.float()
    edge = logits.masked_fill(kept, -torch.inf).amax(-1, keepdim=True)
    low = logits.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    last = torch.where(kept & (logits <= edge), ids, -1).amax(-1, keepdim=True)
    rows = torch.cat([edge, low, last.float()], -1)
    return rows.masked_fill(~kept.any(-1, keepdim=True), -torch.inf)


def greedy_cut(logits: Tensor) -> Tensor:
    """[..., 3] the cut that keeps the largest logit alone, the lowest id of a tie; -inf thrice for
    a row of -inf.
    """
    top, index = logits.max(-1)
    rows = torch.stack([top.float(), top.float(), index.float()], -1)
    return rows.masked_fill(~top.isfinite().unsqueeze(-1), -torch.inf)
