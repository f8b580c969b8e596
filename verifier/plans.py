"""Local plans: what happens among the children of one node.

A plan is given n nodes of B requests with the mass `a` that arrives at each node, and says how much
of it goes to each drafted child (P), how much is emitted right there as the bonus token (r), and
how much says "this node is not accepted after all" (null). It is valid when, averaged over the
drafting law of the children,

    E[P(x) + r(x)] = a * target(x)   for every token x, and   E[null] = 1 - a.

`compose.py` turns any valid plan into the law of a whole tree. Residuals are kept as unnormalised
rows with a scalar beside them, so that a child costs three passes over V (multiply-add, clamp, sum)
and one buffer.

Rounding can refuse a child where no token has anything left, such as target (1, 0) and draft (1,
3e-8) in float32. What was refused is then emitted by the target's own row, which is where the
residual tends to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .law import DraftTree


@dataclass(frozen=True)
class Share:
    """How a plan divides the mass of n nodes.

    accept: [B, n, M] mass given to each child; 0 for an absent child.
    emit:   [B, n] mass emitted at the node itself.
    null:   [B, n] mass of "not accepted after all".
    rest:   [B, n, V] what is emitted, as rows of any scale; a zero row stands for the target's own.
            A new tensor, never an input.
    total:  [B, n] sums of `rest`.
    """

    accept: Tensor
    emit: Tensor
    null: Tensor
    rest: Tensor
    total: Tensor


# (target [B, n, V], draft [B, n, V], mass [B, n], tokens [B, n, M] int64, -1 where absent) -> Share
Plan = Callable[[Tensor, Tensor, Tensor, Tensor], Share]


def rejection(target: Tensor, draft: Tensor, mass: Tensor, tokens: Tensor) -> Share:
    """One child sampled from the draft: Leviathan 2023 and Chen 2023 top-down, Sun 2025 (arXiv
    2403.10444) coupled.
    """
    if tokens.shape[-1] != 1:
        raise ValueError(
            f"this method verifies a chain, one child a node; got a node with {tokens.shape[-1]}"
            " children; use a method for trees or paths"
        )
    return _recursive(target, draft, mass, tokens, shrink=False)


def chain_masses(tree: DraftTree) -> Tensor:
    """[B, N] mass of every node of a chain under `rejection`, from gathers alone: w = min(1, w
    target/draft).
    """
    tokens = tree.tokens[:, 1:].unsqueeze(-1)
    wanted, proposal = _at(tree.target[:, :-1], tokens), _at(tree.draft[:, :-1], tokens)
    drawn = (tokens >= 0) & (proposal > 0)
    if tree.pruned is not None:
        drawn = drawn & ~tree.pruned[:, 1:].unsqueeze(-1)
    ratio = torch.where(drawn, wanted / proposal, 0)
    masses = [torch.ones_like(tree.target[:, 0, 0])]
    for level in range(ratio.shape[1]):
        masses.append((masses[-1] * ratio[:, level, 0]).clamp(max=1))
    return torch.stack(masses, 1)


def with_replacement(target: Tensor, draft: Tensor, mass: Tensor, tokens: Tensor) -> Share:
    """Recursive rejection of i.i.d. children (SpecInfer, Miao 2024): the draft's row stays what it
    is.
    """
    return _recursive(target, draft, mass, tokens, shrink=False)


def without_replacement(target: Tensor, draft: Tensor, mass: Tensor, tokens: Tensor) -> Share:
    """Recursive rejection of distinct children (Sequoia, Jeon 2024, Yang 2024): the draft's row
    loses every child seen.

    A child that repeats an earlier one is no draw from the shrunken row and is skipped; so i.i.d.
    children with their duplicates merged are exact too.
    """
    return _recursive(target, draft, mass, tokens, shrink=True)


def greedy_transport(target: Tensor, draft: Tensor, mass: Tensor, tokens: Tensor) -> Share:
    """The greedy coupling for fixed children and one sampled last child (Hu 2025; UniVer, Weng
    2026, arXiv 2605.04543).

    With s the draft's row without the fixed children, renormalised, and R = max(a target - s, 0):
    the sampled child gets min(1, a target/s); everything else gets R in proportion. Without a
    sampled child s is zero, and every token simply gets its own mass. The mass of s is summed, not
    taken as 1 - q(fixed): a confident draft leaves so little that the difference would be rounding
    noise, and the ratio target/s with it. Where it leaves less than a float can
    invert, s counts as zero: a rule that only looks at the row is exact whatever was sampled.
    """
    fixed, sampled = tokens[..., :-1], tokens[..., -1:]
    residual = draft.clone()
    _clear(residual, fixed)
    left = residual.sum(-1)
    drawn = (sampled[..., 0] >= 0) & (left >= _tiny(left))
    accept = _acceptance(
        mass * _at(target, sampled)[..., 0] * left, _at(residual, sampled)[..., 0], sampled[..., 0]
    )
    accept = torch.where(drawn, accept, 0)
    residual *= torch.where(drawn, -1 / left, 0).unsqueeze(-1)
    residual.addcmul_(target, mass.unsqueeze(-1)).clamp_min_(0)
    tokens = torch.cat([fixed, torch.where(drawn.unsqueeze(-1), sampled, -1)], -1)
    children = _at(residual, tokens) * first_of_equals(tokens)
    _clear(residual, tokens)
    rest = residual.sum(-1)
    size = 1 - mass + rest + children.sum(-1)
    scale = quotient(1 - accept, size)
    return Share(
        accept=torch.cat([children[..., :-1] * scale.unsqueeze(-1), accept.unsqueeze(-1)], -1),
        emit=torch.where(size < _tiny(size), 1 - accept, scale * rest),
        null=(1 - mass) * scale,
        rest=residual,
        total=rest,
    )


def k_seq(target: Tensor, draft: Tensor, mass: Tensor, tokens: Tensor) -> Share:
    """K-SEQ of SpecTr (Sun 2023) for M i.i.d. children: accept x with min(1, target/(rho draft));
    top-down only.

    With b = sum min(target/rho, draft) and c = 1 - (1-b)^M, rho in [1, M] solves c = rho b. Any rho
    at or above the root is exact, so the upper end of the bisection is taken and rounding costs
    length, never the law. Both sides are compared as what they leave of 1, sum max(target - rho
    draft, 0) and (1-b)^M: for close rows the rest is all that differs.
    """
    count = (tokens >= 0).sum(-1).to(draft.dtype)
    low, high = torch.ones_like(mass), count.clamp(min=1)
    for _ in range(torch.finfo(draft.dtype).bits * 3 // 4):
        rho = (low + high) / 2
        left, missed = _leftovers(target, draft, rho)
        enough = left <= missed**count
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    _, missed = _leftovers(target, draft, high)
    accept = _acceptance(_at(target, tokens), _at(draft, tokens) * high.unsqueeze(-1), tokens)
    refused = (1 - accept).cumprod(-1)
    before = torch.cat([torch.ones_like(refused[..., :1]), refused[..., :-1]], -1)
    scale = torch.minimum(quotient(1 - missed**count, 1 - missed), high).unsqueeze(-1)
    residual = (
        torch.minimum(target / high.unsqueeze(-1), draft).mul_(-scale).add_(target).clamp_min_(0)
    )
    total = residual.sum(-1)
    return Share(
        accept=before * accept,
        emit=refused[..., -1],
        null=torch.zeros_like(mass),
        rest=residual,
        total=total,
    )


def _recursive(target: Tensor, draft: Tensor, mass: Tensor, tokens: Tensor, shrink: bool) -> Share:
    """ALGORITHMS 3.1. The wanted row t is `alpha * residual` off the children and `alpha * wanted`
    at them.

    The children are kept apart, [B, n, M], because only there does the shrinking draft row differ
    from the given one by more than a factor; in `residual` they are zero and stay zero, whatever is
    subtracted. What remains of the draft's row is added up from its parts, never subtracted from 1,
    so that it keeps its relative accuracy.
    """
    wanted = _at(target, tokens) * mass.unsqueeze(-1)
    proposal = _at(draft, tokens)
    firsts = first_of_equals(tokens)
    residual = target * mass.unsqueeze(-1)
    _clear(residual, tokens)
    left = _without(draft, tokens) if shrink and tokens.shape[-1] > 1 else None
    reach, alpha, null = torch.ones_like(mass), torch.ones_like(mass), 1 - mass
    total = torch.ones_like(mass)
    accepted = []
    for child in range(tokens.shape[-1]):
        token = tokens[..., child : child + 1]
        # a child of draft probability zero was not drawn from this row: absent, or a duplicate of
        # one that was removed
        present = (token[..., 0] >= 0) & (proposal[..., child] > 0)
        size = torch.ones_like(mass) if left is None else left + (proposal * firsts).sum(-1)
        accept = _acceptance(alpha * wanted[..., child] * size, proposal[..., child], token[..., 0])
        accepted.append(reach * accept)
        reach = reach * (1 - accept)
        step = torch.where(present, quotient(torch.ones_like(mass), size * alpha), 0)
        residual.addcmul_(draft, step.unsqueeze(-1), value=-1).clamp_min_(0)
        wanted = (wanted - proposal * step.unsqueeze(-1)).clamp_min(0)
        total = residual.sum(-1) + (wanted * firsts).sum(-1)
        size = alpha * total + null
        alpha, null = quotient(alpha, size), quotient(null, size)
        if shrink:
            proposal = torch.where(tokens == token, 0, proposal)
    residual.scatter_add_(-1, tokens.clamp(min=0), wanted * firsts)
    return Share(
        accept=torch.stack(accepted, -1),
        emit=torch.where(size < _tiny(size), reach, reach * alpha * total),
        null=reach * null,
        rest=residual,
        total=total,
    )


def first_of_equals(tokens: Tensor) -> Tensor:
    """[..., M] bool: True where a present token is the first of its kind among `tokens` [...,
    M].
    """
    earlier = torch.ones(
        tokens.shape[-1], tokens.shape[-1], dtype=torch.bool, device=tokens.device
    ).tril(-1)
    repeated = ((tokens.unsqueeze(-1) == tokens.unsqueeze(-2)) & earlier).any(-1)
    return ~repeated & (tokens >= 0)


def _acceptance(wanted: Tensor, proposal: Tensor, tokens: Tensor) -> Tensor:
    """min(1, wanted / proposal); 0 where the child is absent or could not have been drawn."""
    drawn = (tokens >= 0) & (proposal > 0)
    return torch.where(
        drawn, wanted / torch.where(drawn, proposal, torch.ones_like(proposal)), 0
    ).clamp(max=1)


def _leftovers(target: Tensor, draft: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """[B, n] sums of max(target - rho draft, 0) and of max(draft - target/rho, 0), neither as a
    difference of sums.
    """
    excess = torch.addcmul(target, draft, rho.unsqueeze(-1), value=-1)
    left = excess.clamp(min=0).sum(-1)
    return left, -excess.clamp_max_(0).sum(-1) / rho


def _without(rows: Tensor, tokens: Tensor) -> Tensor:
    """[B, n] sum of `rows` off `tokens`."""
    rows = rows.clone()
    _clear(rows, tokens)
    return rows.sum(-1)


def _at(rows: Tensor, tokens: Tensor) -> Tensor:
    """[B, n, M] entries of `rows` [B, n, V] at `tokens`; an absent token reads entry 0."""
    return rows.gather(-1, tokens.clamp(min=0))


def _clear(rows: Tensor, tokens: Tensor) -> None:
    """Set our own buffer `rows` to 0 at `tokens`; absent tokens change nothing."""
    rows.scatter_reduce_(-1, tokens.clamp(min=0), (tokens < 0).to(rows.dtype), "prod")


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is 0 or so small that the quotient could
    overflow.
    """
    return torch.where(denominator >= _tiny(denominator), numerator / denominator, 0)


def _tiny(values: Tensor) -> float:
    """The least number whose inverse is finite."""
    return torch.finfo(values.dtype).tiny
