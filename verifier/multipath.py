"""Greedy multi-path block verification (Thomas and Pal 2026, arXiv 2602.16961): K i.i.d. paths, one
block verification.

1. At each node tokens are ranked by ascending target/draft, ties by token id; draft = 0 counts as
+inf, 0/0 as 0. 2. From the branch, step to the drafted child of highest rank and keep the paths
that share it, down to full depth. 3. The selected path has a law of its own. With theta = 0 at the
branch and F the draft's cumulative sum in rank order,
       u = theta + (1 - theta) F(<t),  v = theta + (1 - theta) F(<=t),  S(a, b) = sum over i < K of
       a^i b^(K-1-i),
       selected(t) = draft(t) S(v, u) / S(1, theta),   theta of the child = u / v at the token
       taken.
   No difference of K-th powers appears, so float32 keeps 5e-7 at K = 8.
4. Block verification on that path with `selected` in place of `draft`.

Any strict order fixed by the two rows would be exact; this one selects the tokens that the target
wants more. The
order must be the same in 2 and 3: ranks there, a stable sort of the same ratios here. It does not
always pay: target = draft = (1/2, 1/2), L = 1, K = 2 accepts 0.75 where block verification of one
path accepts 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compose import conditional
from .law import DraftTree, Law
from .plans import chain_masses, rejection
from .tree import chain, on_device, topology

_block = conditional(rejection, ahead=chain_masses)


def greedy_multipath_block(tree: DraftTree) -> Law:
    """The law of GBV on K chains of equal length that hang from the root or from the end of a
    trunk.

    A request may have fewer paths than the tree has chains: a chain whose first token is absent is
    none of its paths. Below that a path may be cut only where all paths of the request are. The
    trunk keeps the draft's own rows.
    """
    found = topology(tree.parents).split_paths
    if found is None:
        raise ValueError(
            "`parents` must be K chains of equal length below one node, as `paths` drafting draws"
            f" them, got {tree.parents}; use traversal or specinfer for other trees"
        )
    trunk, paths = found
    if not paths:
        return _block(tree)
    branch = len(trunk) - 1
    selected = _select(tree, trunk, paths)
    index = torch.arange(len(tree.tokens), device=selected.device)[:, None], selected
    draft, target, tokens = tree.draft[index], tree.target[index], tree.tokens[index]
    counts = (tree.tokens[:, on_device(paths, tree.tokens.device)[:, 0]] >= 0).sum(-1)
    below = selected_rows(
        target[:, branch:], draft[:, branch:], tokens[:, branch + 1 :], counts, len(paths)
    )
    draft = torch.cat([draft[:, :branch], below], 1)
    pruned = None if tree.pruned is None else tree.pruned[index]
    law = _block(DraftTree(tokens, chain(selected.shape[1] - 1), draft, target, pruned))
    stop = torch.zeros_like(tree.target[..., 0]).scatter(1, selected, law.stop)
    rows = torch.zeros_like(tree.target)
    rows[index] = law.next
    return Law(stop=stop, next=rows)


def selected_rows(
    target: Tensor, draft: Tensor, tokens: Tensor, paths: Tensor, most: int
) -> Tensor:
    """[B, L + 1, V] the law of the selected path, row by row; the last row is given back as it is.

    target, draft: [B, L + 1, V] rows on the selected path, from the branch on.
    tokens:        [B, L] int64 tokens taken on it.
    paths, most:   [B] int64 number of paths of each request, and its largest value.
    """
    paths = paths[:, None, None]
    order = ratios(target, draft)[:, :-1].argsort(dim=-1, stable=True)
    ranked = draft[:, :-1].gather(-1, order)
    upper = ranked.cumsum(-1)
    lower = upper - ranked
    taken = (order == tokens.unsqueeze(-1)).to(torch.uint8).argmax(-1, keepdim=True)
    below, above = lower.gather(-1, taken)[..., 0], upper.gather(-1, taken)[..., 0]
    theta, thetas = torch.zeros_like(below[:, 0]), []
    for level in range(tokens.shape[1]):
        thetas.append(theta)
        u, v = (theta + (1 - theta) * edge[:, level] for edge in (below, above))
        theta = torch.where(v > 0, u / v, 0)
    theta = torch.stack(thetas, 1).unsqueeze(-1)
    u, v = theta + (1 - theta) * lower, theta + (1 - theta) * upper
    rows = (
        ranked
        * _power_sum(v, u, paths, most)
        / _power_sum(torch.ones_like(theta), theta, paths, most)
    )
    return torch.cat([torch.empty_like(rows).scatter_(-1, order, rows), draft[:, -1:]], 1)


def ratios(target: Tensor, draft: Tensor) -> Tensor:
    """target / draft, with x/0 = inf and 0/0 = 0; the rank of a token is its place in a stable sort
    of these.
    """
    return torch.where(target > 0, target / draft, 0)


def choose_paths(
    target: Tensor, draft: Tensor, root: Tensor, most: int, certain: float = 0.9
) -> Tensor:
    """[B] int64, how many paths to draft, from what is known before drafting; so the choice keeps
    exactness.

    target, draft: [B, T, V] rows of positions before the root, draft all-zero where it was not run;
        T may be 0.
    root:          [B, V] the draft's row at the root; the target's is not known yet.

    For one token, GBV accepts 1 - TV(target, selected row of K). The K in 1..most with the largest
    mean of it over the given rows wins, the smaller one on a tie; 1 where the draft is nearly
    certain at the root, as K paths would begin with the same token.
    """
    order = ratios(target, draft).argsort(dim=-1, stable=True)
    wanted, ranked = target.gather(-1, order), draft.gather(-1, order)
    upper = ranked.cumsum(-1)
    lower = upper - ranked
    accepted = [
        torch.minimum(ranked * _power_sum(upper, lower, paths, paths), wanted).sum((-2, -1))
        for paths in range(1, most + 1)
    ]
    # float32 sums over a vocabulary are off by about 1e-6; a tie must not be decided by that
    gain = torch.stack(accepted, -1) - 1e-5 * torch.arange(most, device=root.device)
    return torch.where(root.amax(-1) >= certain, 1, gain.argmax(-1) + 1)


def _select(tree: DraftTree, trunk: tuple[int, ...], paths: tuple[tuple[int, ...], ...]) -> Tensor:
    """[B, trunk + L] int64 nodes of the trunk and of the selected path; of equal prefixes the first
    node.
    """
    device = tree.tokens.device
    grid = on_device(paths, device)
    batch = torch.arange(len(tree.tokens), device=device)
    alive = torch.ones(len(batch), len(paths), dtype=torch.bool, device=device)
    node = torch.full_like(batch, trunk[-1])
    nodes = [torch.full_like(batch, step) for step in trunk]
    for level in grid.T:
        tokens = tree.tokens[:, level]
        rows = batch[:, None], node[:, None], tokens.clamp(min=0)
        ratio = ratios(tree.target[rows], tree.draft[rows])
        ratio = torch.where(alive & (tokens >= 0), ratio, -1)
        best = alive & (ratio == ratio.amax(-1, keepdim=True))
        token = torch.where(best, tokens, -2).amax(-1, keepdim=True)
        alive = alive & (tokens == token)
        node = level[alive.to(torch.uint8).argmax(-1)]
        nodes.append(node)
    return torch.stack(nodes, 1)


def _power_sum(a: Tensor, b: Tensor, count: Tensor | int, most: int) -> Tensor:
    """Sum over i < count of a^i b^(count-1-i), by Horner; `count` broadcasts and is at most
    `most`.
    """
    total = torch.ones_like(a)
    power = torch.ones_like(b)
    for step in range(1, most):
        power = power * b
        longer = total * a + power
        total = longer if isinstance(count, int) else torch.where(step < count, longer, total)
    return total
