"""How the children of a node are drawn: the drafting laws of ALGORITHMS section 2, random numbers
as arguments.

    chain                one child, sampled from the draft's row
    paths                K i.i.d. chains from one node; equal prefixes stay separate nodes, laws
                         merge them
    with_replacement     M i.i.d. samples at every node
    without_replacement  M distinct tokens: sample, zero it, renormalise, again (Sequoia; Jeon 2024)
    greedy               the M-1 most likely tokens, plus one sampled from the rest (Hu 2025, arXiv
                         2502.18779)

Any of them may hang from a trunk of single sampled children (delayed trees, arXiv 2602.16994).
Trunk nodes have exactly
one child: a duplicated trunk child would make the methods for paths biased.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..verifier.law import inverse_cdf
from ..verifier.tree import Topology

MAX_NODES = 512
Branches = int | list[int] | str | None  # a text is for `choosers.make_selector`
MAX_PATHS = 64


@dataclass(frozen=True)
class DraftShape(Topology):
    """Shape of a draft tree, shared by the batch: parents in order of depth, and how children are
    drawn.
    """

    drafting: str = "chain"

    @property
    def bounds(self) -> list[int]:
        """First node of every depth and, last, N: nodes bounds[d] .. bounds[d+1]-1 have depth d."""
        return [*(level[0] for level in self.levels), self.nodes]

    def first_lane(self, depth: int) -> int:
        """Which of a request's random numbers draws the first node of a depth; its other nodes
        take the following ones.

        A path has the same lanes whether or not others are drafted beside it.
        """
        paths = self.drafting == "paths"
        return (depth - 1) * MAX_PATHS if paths else self.levels[depth][0] - 1

    @property
    def lanes(self) -> int:
        """How many random numbers draw the tree."""
        if not self.depth:
            return 0
        return self.first_lane(self.depth) + len(self.levels[-1])

    @property
    def may_lack(self) -> bool:
        """Whether a node may find no token: distinct siblings can exhaust a row's support."""
        return self.drafting in ("without_replacement", "greedy") and not self.is_chain


ROOT = DraftShape((-1,))  # of a step without a draft


def topology(
    drafting: str, draft_length: int, branches: int | list[int] = 1, trunk: int = 0
) -> DraftShape:
    """The tree that a method's drafting law grows.

    drafting:     one of the laws above.
    draft_length: tokens on a path below the trunk.
    branches:     K for paths; for trees M, the children of every node, or a list with one M for
                  each depth.
    trunk:        single tokens before the first branching.
    """
    counts = [1] * trunk + _branching(drafting, draft_length, branches)
    parents, frontier = [-1], [0]
    for count in counts:
        children = [node for node in frontier for _ in range(count)]
        if len(parents) + len(children) > MAX_NODES:
            raise ValueError(
                f"a draft tree of length {draft_length} with branches {branches} has more than"
                f" {MAX_NODES} nodes; give `branches` as a list with fewer children at greater"
                " depth, for example [3, 2, 1, 1]"
            )
        frontier = list(range(len(parents), len(parents) + len(children)))
        parents += children
    return DraftShape(tuple(parents), drafting)


def default_branches(drafting: str, draft_length: int) -> int | list[int]:
    """One chain, three paths, or a tree of three and then two children that goes on in single file:
    28 nodes for 5.
    """
    if drafting in ("chain", "paths"):
        return 1 if drafting == "chain" else 3
    return ([3, 2] + [1] * draft_length)[: max(draft_length, 0)]


def _branching(drafting: str, draft_length: int, branches: int | list[int]) -> list[int]:
    if draft_length < 1:
        raise ValueError(
            f"`draft_length` must be at least 1, got {draft_length}; method `plain` decodes without"
            " a draft"
        )
    several = branches if isinstance(branches, list) else [branches] * draft_length
    if len(several) != draft_length or min(several) < 1:
        raise ValueError(
            f"`branches` must be a positive int or one for each of {draft_length} depths, got"
            f" {branches}"
        )
    if drafting == "chain" and max(several) > 1:
        raise ValueError(
            f"this method verifies one chain, got branches={branches}; leave `branches` at 1 or"
            " choose gbv, univer, ..."
        )
    if drafting == "paths":
        if max(several[1:], default=1) > 1 and isinstance(branches, list):
            raise ValueError(
                "paths branch once, at the root or the end of the trunk; give `branches` as one"
                f" int, got {branches}"
            )
        if several[0] > MAX_PATHS:
            raise ValueError(f"`branches` may be at most {MAX_PATHS} paths, got {several[0]}")
        return [several[0]] + [1] * (draft_length - 1)
    return several


def children(drafting: str, rows: Tensor, count: int, uniform: Tensor) -> Tensor:
    """Tokens [B, P, M] drawn under P nodes of one depth; -1 where a row's support is exhausted.

    rows:    [B, P, V] the draft's rows at the P parents.
    count:   M.
    uniform: [B, P, M] in [0, 1).
    """
    if drafting == "without_replacement" and count > 1:
        return _without_replacement(rows, count, uniform)
    if drafting == "greedy" and count > 1:
        return _greedy(rows, count, uniform)
    return torch.where(rows.sum(-1, keepdim=True) > 0, inverse_cdf(rows, uniform), -1)


def _without_replacement(rows: Tensor, count: int, uniform: Tensor) -> Tensor:
    left, tokens = rows.clone(), []
    for child in range(count):
        token = inverse_cdf(left, uniform[..., child : child + 1])
        present = left.gather(-1, token) > 0
        left.scatter_(-1, token, 0)
        tokens.append(torch.where(present, token, -1))
    return torch.cat(tokens, dim=-1)


def _greedy(rows: Tensor, count: int, uniform: Tensor) -> Tensor:
    fixed = rows.topk(min(count - 1, rows.shape[-1]), dim=-1).indices
    left = rows.scatter(-1, fixed, 0)
    sampled = inverse_cdf(left, uniform[..., -1:])
    sampled = torch.where(left.gather(-1, sampled) > 0, sampled, -1)
    missing = sampled.new_full((*sampled.shape[:-1], count - 1 - fixed.shape[-1]), -1)
    return torch.cat([fixed, missing, sampled], dim=-1)
