"""FLy: loose verification of a chain at temperature 0 that looks ahead (arXiv 2511.22972).

A drafted token that is not the target's most likely one is a mismatch. FLy accepts it if two things
hold. The target is unsure there: the entropy of its three most likely tokens, in nats, is at least
`entropy`. And the next `window` drafted tokens all match: the target goes on as if nothing had
happened. A chain without room for the whole window behind a mismatch ends at it.

What happens at a node depends on tokens that were drafted behind it. So FLy is no relaxed row, and
its texts have not the law of any rows: it is lossy, and stands beside METHODS.

The entropy of three tokens and the default numbers are those of vLLM's `rejection_sample_method`
fly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .law import DraftTree, Law
from .tree import topology

WINDOW, ENTROPY = 6, 0.3
LIKELIEST = 3  # tokens whose entropy counts


def fly(window: int = WINDOW, entropy: float = ENTROPY):
    """The law of a chain whose target rows are what the target believes, softmax(logits).

    window: drafted tokens behind a mismatch that must match, at least 1; entropy: in nats.
    """

    def law(tree: DraftTree) -> Law:
        if not topology(tree.parents).is_chain:
            raise ValueError("fly verifies a chain; got a tree with branches")
        chosen, matches = tree.target.argmax(-1), matching(tree)
        following = functional.pad(matches, (0, window)).unfold(1, window, 1)[:, 1:]
        top = tree.target.topk(min(LIKELIEST, tree.target.shape[-1]), -1).values[:, :-1]
        unsure = torch.special.entr(top).sum(-1) >= entropy
        wanted = tree.tokens[:, 1:].clamp_min(0).unsqueeze(-1)
        likely = tree.target[:, :-1].gather(-1, wanted).squeeze(-1)
        possible = (likely > 0) & (tree.tokens[:, 1:] >= 0)
        accepted = matches | unsure & following.all(-1) & possible
        node = accepted.long().cumprod(1).sum(1, keepdim=True)
        stop = torch.zeros_like(tree.target[..., 0]).scatter_(1, node, 1)
        bonus = torch.zeros_like(tree.target).scatter_(-1, chosen.unsqueeze(-1), 1)
        return Law(stop, bonus)

    return law


def matching(tree: DraftTree) -> Tensor:
    """[B, L] whether each drafted token of a chain is the target's most likely one."""
    return tree.target[:, :-1].argmax(-1) == tree.tokens[:, 1:]


def taken(tree: DraftTree, node: Tensor) -> Tensor:
    """[B, N] float64: 1 where a mismatch was accepted, given the node [B] where the path ends."""
    depth = torch.arange(tree.tokens.shape[1] - 1, device=node.device)
    mismatch = ~matching(tree) & (depth < node.unsqueeze(1))
    return functional.pad(mismatch.double(), (0, 1))
