"""The learned weight of DIVERSED (arXiv 2604.07622, section 3): features of one context -> the
draft's share there.

The paper's head is one linear map of concat(draft last hidden, target last hidden) to two numbers
and a softmax. Only the difference of its two rows matters, so it is a logistic head: weight =
sigmoid(w . x + b). It starts at weight 1/2 everywhere. `weight` is the DRAFT's share of the blend;
the paper writes the target's, one minus ours.

`features` says what the head sees:
    hidden  the last hidden states (after the final norm) of draft and target at the context, as in
            the paper
    logits  `FEATURES`, numbers computed from the two rows of probabilities: no hidden state is
            needed, so the head moves between engines
    both    the two side by side
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

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

LARGEST_SIZE = 1 << 20  # of a hidden state or a layer of the head: far above every model
LARGEST_BIAS = 1e30  # added to a logit; float32 ends at 3e38
KINDS = ("hidden", "logits", "both")


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


class WeightHead(nn.Module):
    """A logistic head on the features of a context.

    features:    "hidden", "logits" or "both".
    draft_hidden, target_hidden: hidden sizes of the two models; unused with features="logits".
    width:       size of one hidden layer (GELU), 0 for the paper's linear head.

    The buffers `mean` and `std` [F] standardise the inputs; `standardise` fits them to data before
    training.
    """

    def __init__(
        self,
        features: str = "hidden",
        draft_hidden: int = 0,
        target_hidden: int = 0,
        width: int = 0,
    ):
        super().__init__()
        if features not in KINDS:
            raise ValueError(f"`features` must be one of {', '.join(KINDS)}, got {features!r}")
        if features != "logits" and (draft_hidden < 1 or target_hidden < 1):
            raise ValueError(
                f"`features` {features!r} needs the hidden sizes of both models, got"
                f" draft_hidden={draft_hidden} and target_hidden={target_hidden}; use"
                " features='logits' where hidden states are not available"
            )
        self.features = features
        self.draft_hidden, self.target_hidden, self.width = draft_hidden, target_hidden, width
        size = self.input_size
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        last = nn.Linear(width or size, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Linear(size, width), nn.GELU(), last) if width else last

    @property
    def input_size(self) -> int:
        """Number of inputs of the head."""
        hidden = self.draft_hidden + self.target_hidden if self.features != "logits" else 0
        return hidden + (len(FEATURES) if self.features != "hidden" else 0)

    @property
    def needs_hidden(self) -> bool:
        return self.features != "logits"

    @property
    def needs_logits(self) -> bool:
        return self.features != "hidden"

    def forward(self, logits: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """The head's logit [...]; its sigmoid is the draft's share.

        logits: [..., 12] from `logit_features`, needed unless features == "hidden".
        hidden: [..., H_draft + H_target] last hidden states, draft first, needed unless features ==
            "logits".
        """
        parts = ([hidden] if self.needs_hidden else []) + ([logits] if self.needs_logits else [])
        if any(part is None for part in parts):
            raise ValueError(
                f"a head with features {self.features!r} was called without them; give it both"
            )
        inputs = torch.cat([part.to(self.mean.dtype) for part in parts], dim=-1)
        return self.net((inputs - self.mean) / self.std).squeeze(-1)

    def weight(
        self, draft: Tensor, target: Tensor, hidden: Tensor | None = None, bias: float = 0.0
    ) -> Tensor:
        """The draft's share [...] at each context; `bias` is added to the head's logit, one knob
        without retraining.

        draft, target: [..., V] rows; hidden: [..., H_draft + H_target] or None for
            features="logits".
        """
        logits = logit_features(draft, target) if self.needs_logits else None
        return torch.sigmoid(self(logits, hidden) + bias)

    @torch.no_grad()
    def standardise(self, logits: Tensor | None, hidden: Tensor | None) -> None:
        """Fit `mean` and `std` to the given inputs, [X, 12] and [X, H_draft + H_target] (either may
        be unused).
        """
        parts = ([hidden] if self.needs_hidden else []) + ([logits] if self.needs_logits else [])
        inputs = torch.cat([part.float() for part in parts], dim=-1)
        self.mean.copy_(inputs.mean(0))
        self.std.copy_(inputs.std(0, unbiased=False).clamp_min(1e-3))
