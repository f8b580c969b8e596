"""Verification of a chain on a CPU: `verdict(law, tree, uniform) == draw(law(tree), uniform)`.

The laws of `verifier` serve every tree and device and cost some 250 small operations, which on a CPU is more than a
small draft model costs. For a chain the formulas are short (ALGORITHMS 4), and numpy's operations on small arrays take
a third of torch's. With ratio_i = target(X_i) / draft(X_i) at the i-th drafted token:

    token   h_i = min(1, ratio_1) ... : the path ends at the first i whose next token is refused
    block   w_i = min(1, w_{i-1} ratio_i),  h_i = Z_i / (Z_i + 1 - w_i) with Z_i = sum max(w_i target - draft, 0), and
            h_L = w_L: the path ends at the last i that fires with probability h_i

The two agree unless a uniform lies within rounding of a step of the law's cumulative sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..verifier.law import DraftTree, Verdict
from ..verifier.methods import METHODS


def serves(law: Callable, parents: tuple[int, ...], device: torch.device) -> bool:
    """Whether `verdict` knows this law and this tree."""
    return law in _LEFT and device.type == "cpu" and parents == tuple(range(-1, len(parents) - 1))


def verdict(law: Callable, tree: DraftTree, uniform: torch.Tensor) -> Verdict:
    """One draw from the law; every drafted token was drawn from its row, or is absent (-1) behind the chain's end.

    The row of a chain's end is zero.

    uniform: [B, 2] in [0, 1): for the stopping node and for the extra token.
    """
    target, draft = tree.target.numpy(), tree.draft[:, :-1].numpy()
    coins, rows = uniform.numpy(), np.arange(len(target))
    depth = draft.shape[1]
    if depth == 0:
        return Verdict(torch.zeros(len(target), dtype=torch.long), _drawn(target[:, 0], coins[:, 1]))
    tokens = tree.tokens[:, 1:].numpy()
    drafted = rows[:, None], np.arange(depth), tokens
    ratio = np.divide(target[drafted], draft[drafted], out=np.zeros(tokens.shape, target.dtype), where=tokens >= 0)
    stop, left = _LEFT[law](target[:, :-1], draft, ratio)
    node = _index(stop, coins[:, 0])
    at = np.minimum(node, depth - 1)
    # as in `verifier.plans`: where rounding left nothing to emit, the target's row is
    residual = left[rows, at]
    whole = (node == depth) | ~residual.any(-1)
    extra = np.where(whole[:, None], target[rows, node], residual)
    return Verdict(torch.from_numpy(node), _drawn(extra, coins[:, 1]))


def sample(rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens [B, 1] that `uniform` [B] in [0, 1) selects from rows [B, 1, V]."""
    return _drawn(rows[:, 0].numpy(), uniform.numpy()).unsqueeze(1)


def _token(target, draft, ratio):
    """(probability that the path ends at each node [B, L + 1], residual rows [B, L, V])."""
    accept = np.minimum(ratio, 1)
    reach = np.cumprod(accept, 1)
    stop = np.concatenate([1 - accept, np.ones_like(accept[:, :1])], 1)
    stop[:, 1:] *= reach
    return stop, np.maximum(target - draft, 0)


def _block(target, draft, ratio):
    """The same for block verification."""
    weight = np.ones((len(ratio), ratio.shape[1] + 1), ratio.dtype)
    for level in range(ratio.shape[1]):
        weight[:, level + 1] = np.minimum(weight[:, level] * ratio[:, level], 1)
    left = target * weight[:, :-1, None]
    left -= draft
    np.maximum(left, 0, out=left)
    size, null = left.sum(-1), 1 - weight
    # A node without residual and without null fires with what its child does not have, which only rounding can refuse.
    total = size + null[:, :-1]
    refused = (null[:, 1:] > 0).astype(size.dtype)
    silent = np.divide(null[:, :-1], total, out=1 - refused, where=total > 0)
    fire = np.divide(size, total, out=refused, where=total > 0)
    later = np.cumprod(np.concatenate([null[:, -1:], silent[:, :0:-1]], 1), 1)[:, ::-1]
    return np.concatenate([fire * later, weight[:, -1:]], 1), left


def _index(rows, uniform):
    """[B] int64, the entry of rows [B, X] that `uniform` [B] selects, computed as `verifier.law.inverse_cdf` does."""
    cumulative = rows.cumsum(-1, dtype=np.float64)
    total = cumulative[:, -1]
    threshold = np.minimum(uniform * total, np.nextafter(total, 0))
    found = [sums.searchsorted(value, "right") for sums, value in zip(cumulative, threshold, strict=True)]
    return np.minimum(found, rows.shape[-1] - 1)


def _drawn(rows, uniform) -> torch.Tensor:
    return torch.from_numpy(_index(rows, uniform))


# On a chain every method is one of the two (tests/test_delayed.py): trees of a selector may be chains.
_LEFT = {METHODS[name].unchecked: _token for name in ("token", "specinfer", "kseq", "rrsw", "greedy_tree")}
_LEFT |= {METHODS[name].unchecked: _block for name in ("block", "gbv", "traversal", "univer")}
