"""Logits to probabilities: temperature, top-k, top-p, min-p, in that order, in one place, for both
models; and what the models believe: their rows without any of it.

Verification is exact for the rows it is given, so whatever changes a row must change it here,
before the draft is drawn and before the target checks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

COLDEST = 1e-6  # below it logits of a size that models give would overflow


@dataclass(frozen=True)
class Sampling:
    """How both models sample.

    Args:
        temperature: divides the logits; 0 puts all mass on the most likely token (the lowest id of
            a tie).
        top_k: keep the k most likely tokens, and all that tie with the last of them; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass; 1 keeps all.
        min_p: drop tokens below this share of the most likely token's probability; 0 drops none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        """Whether tokens are left out other than by a temperature of 0."""
        return self.temperature > 0 and (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one; filters mean nothing then."""
        return self.temperature == 0

    @property
    def neutral(self) -> bool:
        """Whether rows as sampled are what the models believe."""
        return self.temperature == 1 and not self.filters

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(
                value, Integral if name == "top_k" else Real
            ):
                raise TypeError(
                    f"`sampling.{name}` must be a {'whole ' * (name == 'top_k')}number, got"
                    f" {value!r}"
                )
        t = self.temperature
        for name, good, expected in (
            (
                "temperature",
                t == 0 or COLDEST <= t < float("inf"),
                f"0 or a finite number of at least {COLDEST:g}",
            ),
            ("top_k", self.top_k >= 0, "0 (all tokens) or a positive count"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
        ):
            if not good:
                raise ValueError(f"`sampling.{name}` must be {expected}, got {getattr(self, name)}")


def probabilities(logits: Tensor, sampling: Sampling = Sampling()) -> Tensor:  # noqa: B008  frozen
    """Rows [..., V] that sum to 1, float64 from logits [..., V] in float64, float32 from any other
    floating dtype.

    A row with a NaN or +inf logit comes out as NaN, so that one look at any of its entries tells.
    """
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if sampling.temperature == 0:
        top, index = logits.max(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, index, 1) + torch.where(
            top.isfinite(), 0.0, torch.nan
        )
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(
            logits < logits.topk(sampling.top_k, dim=-1).values[..., -1:], -torch.inf
        )
    rows = logits.softmax(-1)
    if sampling.top_p < 1:
        rows = _renormalise(rows.masked_fill(~_nucleus(rows, sampling.top_p), 0))
    if sampling.min_p > 0:
        rows = _renormalise(
            rows.masked_fill(rows < sampling.min_p * rows.amax(-1, keepdim=True), 0)
        )
    return rows


def is_neutral(settings: dict[str, Any]) -> bool:
    """Whether fields of a `Sampling`, out of a file, leave rows as the models believe them."""
    neutral = vars(Sampling())
    return neutral | settings == neutral


def beliefs(logits: Tensor) -> Tensor:
    """What a model believes: softmax(logits) [..., V], whatever the temperature and the filters."""
    return probabilities(logits)


def _nucleus(rows: Tensor, top_p: float) -> Tensor:
    """[..., V] bool: the tokens before which less than `top_p` of the mass lies; ties are ordered
    by token id.
    """
    ordered, index = rows.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, index, before < top_p)


def _renormalise(rows: Tensor) -> Tensor:
    return rows / rows.sum(-1, keepdim=True)
