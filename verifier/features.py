"""Twelve numbers of the two rows of a context, which a head may read."""

from __future__ import annotations

import torch
from torch import Tensor

FEATURES = {
    "tv": "total variation between the two rows, in [0, 1]",
    "draft_entropy": "entropy of the draft's row, nats",
    "target_entropy": "entropy of the target's row, nats",
    "draft_top": "largest probability of the draft's row",
    "target_top": "largest probability of the target's row",
    "draft_margin": "largest minus second largest probability of the draft's row",
    "target_margin": "largest minus second largest probability of the target's row",
    "kl": "KL(draft || target), nats, every log ratio clipped to [-20, 20]",
    "reverse_kl": "KL(target || draft), nats, every log ratio clipped to [-20, 20]",
    "agreement": "1 where both rows have the same most likely token, else 0",
    "target_at_draft_top": "the target's probability of the draft's most likely token",
    "draft_at_target_top": "the draft's probability of the target's most likely token",
}


def logit_features(draft: Tensor, target: Tensor) -> Tensor:
    """The numbers named in `FEATURES`, in that order.

    draft, target: [..., V] rows of probabilities at one context. Returns [..., 12] float32.
    """
    draft, target = draft.float(), target.float()
    log_draft, log_target = draft.clamp_min(1e-30).log(), target.clamp_min(1e-30).log()
    ratio = (log_draft - log_target).clamp(-20, 20)
    k = min(2, draft.shape[-1])
    draft_top, draft_index = draft.topk(k, dim=-1)
    target_top, target_index = target.topk(k, dim=-1)
    values = (
        0.5 * (draft - target).abs().sum(-1),
        -(draft * log_draft).sum(-1),
        -(target * log_target).sum(-1),
        draft_top[..., 0],
        target_top[..., 0],
        draft_top[..., 0] - (draft_top[..., 1] if k == 2 else 0),
        target_top[..., 0] - (target_top[..., 1] if k == 2 else 0),
        (draft * ratio).sum(-1),
        -(target * ratio).sum(-1),
        (draft_index[..., 0] == target_index[..., 0]).float(),
        target.gather(-1, draft_index[..., :1]).squeeze(-1),
        draft.gather(-1, target_index[..., :1]).squeeze(-1),
    )
    return torch.stack(values, dim=-1)
