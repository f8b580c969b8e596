"""Rules without training as the logit that a head starts from.

A rule of one threshold t compares a criterion of the two believed rows with it. The offset is
t - criterion, nats: it is above 0 where the rule takes the draft's side. A head adds a correction
to it, which is 0 before training, so with `blend=choice` it is the rule itself:

    divergence:t,s  the smaller of t - KL(target || draft) and log s - log max target; the rule,
                    at every temperature, but for the clip of log ratios in FEATURES
    regret:t        t - (log max target - log target at the draft's most likely token); the rule at
                    temperature 0, where it looks at that token alone. Above it the rule decides
                    token by token, and the offset for the whole context

The criterion is read off `FEATURES`, so an offset needs nothing that a trace does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from .features import FEATURES
from .relax import parse

TINY = 1e-30
SURE = 0.9  # of divergence, if it is not given
INDEX = {name: index for index, name in enumerate(FEATURES)}


def _divergence(features: Tensor, threshold: float, sure: float = SURE) -> Tensor:
    top = features[..., INDEX["target_top"]].clamp_min(TINY).log()
    kl = features[..., INDEX["reverse_kl"]]
    return (threshold - kl).minimum(math.log(max(sure, TINY)) - top)


def _regret(features: Tensor, threshold: float) -> Tensor:
    top, at_draft = (
        features[..., INDEX[name]].clamp_min(TINY).log()
        for name in ("target_top", "target_at_draft_top")
    )
    return threshold - (top - at_draft)


OFFSETS: dict[str, Callable[..., Tensor]] = {"divergence": _divergence, "regret": _regret}


def offset(rule: str) -> Callable[[Tensor], Tensor]:
    """features [..., 12] -> the rule's margin [...], nats; ValueError for a rule that has none."""
    parsed = parse(rule)
    if parsed.name not in OFFSETS or parsed.options:
        raise ValueError(
            f"`offset` must be a rule with one criterion, {' or '.join(OFFSETS)}, such as"
            f" divergence:0.3, got {rule!r}"
        )
    margin = OFFSETS[parsed.name]
    return lambda features: margin(features, *parsed.parameters)
