"""The expected new tokens of one step on a drawn tree, without sampling the verification.

A law says where the accepted path of one drawn tree ends, so its mean over the uniforms is a sum.
On a chain the last token is averaged out too, and all lengths come from one pass. With q and p the
rows of draft and target after the chain's first i tokens:

    token   reach_i = product of min(1, p/q) over the tokens before
            accepted = sum over i of reach_i sum_x min(q, p)
    block   w_i = min(1, w_{i-1} p/q) at the i-th token
            accepted = sum over i of sum_x min(q, w_i p)

The second is the closed form of ALGORITHMS 4, G(c) = q(c) w(c). The mean of either over chains is
what verification accepts; tests enumerate both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..verifier.law import DraftTree, Law, expected_length
from ..verifier.plans import chain_masses


def tree_tokens(law: Callable[[DraftTree], Law], tree: DraftTree) -> Tensor:
    """[B] expected new tokens of a step on this tree, the bonus token included."""
    return 1 + expected_length(law(tree), tree.parents)


def chain_tokens(tree: DraftTree, coupled: bool) -> Tensor:
    """[B, L] the same for the first 1 .. L tokens of a chain, their last one averaged out.

    coupled: under block verification, else token verification. The draft's row at the leaf is not
        read.
    """
    target, draft = tree.target[:, :-1], tree.draft[:, :-1]
    if coupled:
        mass = chain_masses(tree)[:, :-1, None]
        kept = torch.minimum(draft, mass * target).sum(-1)
    else:
        token = tree.tokens[:, 1:, None]
        ratio = (target.gather(-1, token) / draft.gather(-1, token))[..., 0].clamp_max(1)
        reach = torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1].cumprod(-1)], -1)
        kept = reach * torch.minimum(draft, target).sum(-1)
    return 1 + kept.cumsum(-1)
