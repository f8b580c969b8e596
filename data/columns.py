"""The columns of a trace, one entry each: S texts and their X positions, one after the other.

Position i of a text is the context before its token i. For the probability blend
v = (1 - w) p + w q everything the objective needs at a position is p(token), q(token) and
TV(p, q) (arXiv 2604.07622); no row over the vocabulary is stored.

A new column is one entry here and the code that computes it, in `runtime.rollouts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ..verifier.features import FEATURES
from ..verifier.token_features import COUNT


@dataclass(frozen=True)
class Column:
    """One column.

    axes: S texts, S+1, X positions, K stored logits, F features, H hidden numbers of both models,
        C numbers of token classes.
    padding: value behind the end of a text in a batch; None if training does not read the column.
    group: "" if every trace has the column, else what it is stored with: hidden, logits,
        tokens, labels.
    probability: whether its numbers lie in [0, 1]. holes: whether some may be NaN.
    """

    dtype: torch.dtype
    axes: tuple[str, ...]
    meaning: str
    padding: float | None = None
    group: str = ""
    probability: bool = False
    holes: bool = False


TEXTS, POSITIONS = ("S",), ("X",)

# Padding is nothing that a formula trips over: probabilities of 1 have a finite logarithm, and the
# mask takes care of the rest.
COLUMNS = {
    "start": Column(
        torch.int64, ("S+1",), "text s owns the positions start[s] to start[s + 1]; none is empty"
    ),
    "prompt": Column(torch.int64, TEXTS, "index of the prompt, counted over the whole folder"),
    "sample": Column(torch.int64, TEXTS, "which of the prompt's samples"),
    "reward": Column(torch.float32, TEXTS, "the task's score of the text"),
    "finished": Column(torch.bool, TEXTS, "whether the text ends with an end token"),
    "token": Column(torch.int32, POSITIONS, "the token that was committed"),
    "target_prob": Column(
        torch.float32, POSITIONS, "the target's probability of it", padding=1.0, probability=True
    ),
    "draft_prob": Column(
        torch.float32, POSITIONS, "the draft's probability of it", padding=1.0, probability=True
    ),
    "tv": Column(
        torch.float32,
        POSITIONS,
        "total variation between the two rows",
        padding=0.0,
        probability=True,
    ),
    "weight": Column(
        torch.float32,
        POSITIONS,
        "the draft's share it was sampled with; NaN if the relaxation is not a blend",
        padding=0.5,
        probability=True,
    ),
    "substituted": Column(
        torch.bool,
        POSITIONS,
        "whether it replaced the target's own token (maximal coupling of target and blend)",
        padding=False,
    ),
    "features": Column(torch.float32, ("X", "F"), "`logit_features` of the two rows", padding=0.0),
    "hidden": Column(
        torch.float16,
        ("X", "H"),
        "last hidden states, draft then target",
        padding=0.0,
        group="hidden",
    ),
    "top_index": Column(
        torch.int32,
        ("X", "K"),
        "the K tokens with the largest sum of both probabilities",
        group="logits",
    ),
    "target_top": Column(
        torch.float16,
        ("X", "K"),
        "the target's log-probabilities of them, at least log 1e-30",
        padding=0.0,
        group="logits",
    ),
    "draft_top": Column(
        torch.float16, ("X", "K"), "the draft's log-probabilities", padding=0.0, group="logits"
    ),
    "target_rest": Column(
        torch.float32,
        POSITIONS,
        "the target's probability outside those K",
        padding=0.0,
        group="logits",
        probability=True,
    ),
    "draft_rest": Column(
        torch.float32,
        POSITIONS,
        "the draft's probability outside those K",
        padding=0.0,
        group="logits",
        probability=True,
    ),
    "token_features": Column(
        torch.uint8,
        ("X", "C"),
        "0 or 1, the classes of tokens before the position, see `verifier.token_features`",
        padding=0,
        group="tokens",
    ),
    "alternative": Column(
        torch.int32,
        POSITIONS,
        "the token that the draft would put there, by the maximal coupling of both rows",
        group="labels",
    ),
    "label": Column(
        torch.float32,
        POSITIONS,
        "what is lost with that token, see `data.importance`; NaN where nothing was asked",
        padding=torch.nan,
        group="labels",
        holes=True,
    ),
}
REQUIRED = tuple(name for name, column in COLUMNS.items() if not column.group)


def batched(group: str = "") -> tuple[str, ...]:
    """The columns of a group that training reads, in the order of the table."""
    return tuple(
        name
        for name, column in COLUMNS.items()
        if column.group == group and column.padding is not None
    )


def bytes_per_token(hidden_numbers: int = 0, store_logits: int = 0, labels: bool = False) -> int:
    """Bytes that a trace stores for one token; it does not depend on the vocabulary.

    hidden_numbers: H_draft + H_target if hidden states are stored, else 0.
    """
    sizes = {"X": 1, "F": len(FEATURES), "H": hidden_numbers, "K": store_logits, "C": COUNT}
    stored = {"": True, "tokens": True, "labels": labels}
    stored |= {"hidden": hidden_numbers > 0, "logits": store_logits > 0}
    return sum(
        column.dtype.itemsize * prod(sizes[axis] for axis in column.axes)
        for column in COLUMNS.values()
        if column.axes[0] == "X" and stored[column.group]
    )
