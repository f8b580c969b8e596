"""Verification of a chain on a CPU: `verdict(method, tree, uniform)` is
`draw(method.law(tree), uniform)`.

The laws of `verifier` serve every tree and device and cost some 250 small operations, which on a
CPU is more than a small draft model costs. For a chain the formulas are short (ALGORITHMS 4): plain
numbers row by row, and numpy where a whole row of probabilities is needed. With ratio_i =
target(X_i) / draft(X_i) at the i-th drafted token:

    token   h_i = min(1, ratio_1) ... : the path ends at the first i whose next token is refused
    block   w_i = min(1, w_{i-1} ratio_i),  h_i = Z_i / (Z_i + 1 - w_i) with Z_i = sum max(w_i
            target - draft, 0), and h_L = w_L: the path ends at the last i that fires with
            probability h_i

The two agree unless a uniform lies within rounding of a step of the law's cumulative sum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from operator import mul

import numpy as np
import torch

from ..verifier.law import DraftTree, Verdict
from ..verifier.methods import Method
from ..verifier.tree import topology


def serves(method: Method, parents: tuple[int, ...], device: torch.device) -> bool:
    """Whether `verdict` knows what this method is on this tree."""
    return bool(method.on_chain) and device.type == "cpu" and topology(parents).is_chain


def verdict(method: Method, tree: DraftTree, uniform: torch.Tensor) -> Verdict:
    """One draw from the law; every drafted token was drawn from its row, or is absent (-1) behind
    the chain's end.

    The row of a chain's end is zero.

    uniform: [B, 2] in [0, 1): for the stopping node and for the bonus token.
    """
    law, nodes, extra = _STOP[method.on_chain], [], []
    coins = uniform[:, 0].tolist()
    rows = zip(
        tree.target.numpy(), tree.draft.numpy(), tree.tokens[:, 1:].tolist(), coins, strict=True
    )
    for target, draft, tokens, coin in rows:
        drafted = enumerate(tokens)
        ratio = [
            float(target[i, token]) / float(draft[i, token]) if token >= 0 else 0.0
            for i, token in drafted
        ]
        stop, weight = law(target, draft, ratio)
        sums = list(accumulate(stop))
        node = bisect_right(sums, _threshold(coin, sums[-1]))
        left = target[node]
        if node < len(tokens):
            residual = np.maximum(left * weight[node] - draft[node], 0)
            left = (
                residual if residual.any() else left
            )  # nothing to emit: rounding, as in `verifier.plans`
        nodes.append(node)
        extra.append(left)
    return Verdict(torch.tensor(nodes), torch.tensor(_selected(np.stack(extra), uniform[:, 1])))


def sample(rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens [B, 1, 1] that `uniform` [B, 1] in [0, 1) selects from rows [B, 1, V]."""
    return torch.tensor(_selected(rows[:, 0].numpy(), uniform[:, 0])).view(-1, 1, 1)


def chances(rows: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Probabilities of tokens [B, 1] in rows [B, 1, V]; of an absent token, which follows a row of
    zeros, 0.
    """
    picked = zip(rows[:, 0].numpy(), tokens[:, 0].tolist(), strict=True)
    return [float(row[token]) for row, token in picked]


def _token(target, draft, ratio: list[float]) -> tuple[list[float], list[float]]:
    """(probability that the path ends at each node, weight of the target in each residual), L + 1
    of each.
    """
    accept = [min(each, 1.0) for each in ratio]
    reach = [1.0, *accumulate(accept, mul)]
    return [here * (1 - each) for here, each in zip(reach, accept, strict=False)] + reach[-1:], [
        1.0
    ] * len(reach)


def _block(target, draft, ratio: list[float]) -> tuple[list[float], list[float]]:
    """The same for block verification."""
    weight = [1.0]
    for each in ratio:
        weight.append(min(weight[-1] * each, 1.0))
    depth = len(ratio)
    left = target[:depth] * np.asarray(weight[:-1], target.dtype)[:, None]
    left -= draft[:depth]
    size = np.maximum(left, 0, out=left).sum(-1).tolist()
    # From the leaf up: the share of texts that end at a node, of those that end at none below it.
    later, stop = 1 - weight[-1], [weight[-1]]
    for node in range(depth - 1, -1, -1):
        null = 1 - weight[node]
        total = size[node] + null
        # Without residual and null a node fires with what its child does not have, which only
        # rounding can refuse.
        fire = size[node] / total if total > 0 else float(weight[node + 1] < 1)
        stop.append(fire * later)
        later *= 1 - fire
    return stop[::-1], weight


def _selected(rows, uniform: torch.Tensor) -> list[int]:
    """The entries of rows [B, V] that `uniform` [B] selects, computed as `verifier.law.inverse_cdf`
    does.
    """
    cumulative = rows.cumsum(-1, dtype=np.float64)
    last, found = rows.shape[-1] - 1, []
    for sums, total, coin in zip(
        cumulative, cumulative[:, -1].tolist(), uniform.tolist(), strict=True
    ):
        found.append(min(int(sums.searchsorted(_threshold(coin, total), "right")), last))
    return found


def _threshold(coin: float, total: float) -> float:
    """What a cumulative sum that ends at `total` must exceed: below it, so that what is selected
    has mass.
    """
    return min(coin * total, math.nextafter(total, 0))


_STOP = {"token": _token, "block": _block}
