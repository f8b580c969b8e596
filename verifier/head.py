"""The learned weight of DIVERSED (arXiv 2604.07622, section 3): features of one context -> the
draft's share there.

The paper's head is one linear map of concat(draft last hidden, target last hidden) to two numbers
and a softmax. Only the difference of its two rows matters, so it is a logistic head: weight =
sigmoid(w . x + b). It starts at weight 1/2 everywhere. `weight` is the DRAFT's share of the blend;
the paper writes the target's, one minus ours.

`features` says what the head sees, one part or several:
    hidden  the last hidden states (after the final norm) of draft and target at the context, as in
            the paper
    logits  `FEATURES`, numbers computed from the two rows of probabilities: no hidden state is
            needed, so the head moves between engines
    tokens  the classes of the most likely tokens and of the token before, see `token_features`;
            no hidden state is needed either

With an `offset` the head starts from a rule without training and learns a correction of its margin,
see `offsets`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .features import FEATURES, logit_features
from .offsets import offset as offset_of
from .token_features import COUNT, TokenTable

LARGEST_SIZE = 1 << 20  # of a hidden state or a layer of the head: far above every model
LARGEST_BIAS = 1e30  # added to a logit; float32 ends at 3e38
# What a head reads, in the order of its inputs. `both` is how hidden+logits has always been called.
KINDS = {
    "hidden": ("hidden",),
    "logits": ("logits",),
    "tokens": ("tokens",),
    "both": ("hidden", "logits"),
    "logits+tokens": ("logits", "tokens"),
    "tokens+hidden": ("hidden", "tokens"),
    "logits+tokens+hidden": ("hidden", "logits", "tokens"),
}


class WeightHead(nn.Module):
    """A logistic head on the features of a context.

    features:    a key of KINDS.
    draft_hidden, target_hidden: hidden sizes of the two models; unused without hidden states.
    width:       size of one hidden layer (GELU), 0 for the paper's linear head.
    offset:      the rule that the head starts from, "" for none.

    The buffers `mean` and `std` [F] standardise the inputs; `standardise` fits them to data before
    training.
    """

    def __init__(
        self,
        features: str = "hidden",
        draft_hidden: int = 0,
        target_hidden: int = 0,
        width: int = 0,
        offset: str = "",
    ):
        super().__init__()
        if features not in KINDS:
            raise ValueError(f"`features` must be one of {', '.join(KINDS)}, got {features!r}")
        self.features, self.parts = features, KINDS[features]
        if self.needs_hidden and (draft_hidden < 1 or target_hidden < 1):
            raise ValueError(
                f"`features` {features!r} needs the hidden sizes of both models, got"
                f" draft_hidden={draft_hidden} and target_hidden={target_hidden}; use"
                " features='logits' where hidden states are not available"
            )
        self.offset = offset
        self.margin = offset_of(offset) if offset else None
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
        sizes = {
            "hidden": self.draft_hidden + self.target_hidden,
            "logits": len(FEATURES),
            "tokens": COUNT,
        }
        return sum(sizes[part] for part in self.parts)

    @property
    def needs_hidden(self) -> bool:
        """Whether it reads hidden states."""
        return "hidden" in self.parts

    @property
    def needs_logits(self) -> bool:
        """Whether it reads FEATURES, for its input or its offset."""
        return "logits" in self.parts or self.margin is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether it reads the classes of tokens."""
        return "tokens" in self.parts

    def forward(
        self,
        logits: Tensor | None = None,
        hidden: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """The head's logit [...]; its sigmoid is the draft's share. What it reads must be given.

        logits: [..., 12] from `logit_features`.
        hidden: [..., H_draft + H_target] last hidden states, draft first.
        tokens: [..., COUNT] from `TokenTable.features`.
        """
        given = {"hidden": hidden, "logits": logits, "tokens": tokens}
        parts = [given[part] for part in self.parts]
        if any(part is None for part in parts) or (self.margin and logits is None):
            raise ValueError(
                f"a head with features {self.features!r} was called without them; give it all"
            )
        inputs = torch.cat([part.to(self.mean.dtype) for part in parts], dim=-1)
        logit = self.net((inputs - self.mean) / self.std).squeeze(-1)
        return logit + self.margin(logits) if self.margin else logit

    def weight(
        self,
        draft: Tensor,
        target: Tensor,
        hidden: Tensor | None = None,
        bias: float = 0.0,
        before: Tensor | None = None,
        table: TokenTable | None = None,
    ) -> Tensor:
        """The draft's share [...] at each context; `bias` is added to the head's logit, one knob
        without retraining.

        draft, target: [..., V] rows; hidden: [..., H_draft + H_target], if it reads them.
        before: [...] the token before the context; table: of the vocabulary. Both for `tokens`.
        """
        logits = logit_features(draft, target) if self.needs_logits else None
        tokens = None
        if self.needs_tokens:
            if table is None or before is None:
                raise ValueError(
                    f"a head with features {self.features!r} needs the tokenizer's table and the"
                    " token before each context"
                )
            tokens = table.features(draft, target, before)
        return torch.sigmoid(self(logits, hidden, tokens) + bias)

    @torch.no_grad()
    def standardise(self, logits: Tensor | None, hidden: Tensor | None) -> None:
        """Fit `mean` and `std` to the given inputs, [X, 12] and [X, H_draft + H_target] (either may
        be unused). Classes of tokens are 0 or 1 and stay so: a class that was not seen yet would
        else be a huge number.
        """
        given = {"hidden": hidden, "logits": logits}
        place = 0
        for part in self.parts:
            if part == "tokens":
                continue
            inputs = given[part].float()
            span = slice(place, place + inputs.shape[-1])
            self.mean[span] = inputs.mean(0)
            self.std[span] = inputs.std(0, unbiased=False).clamp_min(1e-3)
            place = span.stop
