"""How the children of a node are drawn: the drafting laws of ALGORITHMS section 2, random numbers
as arguments.

    chain                one child, sampled from the draft's row
    paths                K i.i.d. chains from one node; equal prefixes stay separate nodes, laws merge them
    with_replacement     M i.i.d. samples at every node
    without_replacement  M distinct tokens: sample, zero it, renormalise, again (Sequoia; Jeon 2024)
    greedy               the M-1 most likely tokens, plus one sampled from the rest (Hu 2025, arXiv 2502.18779)

Any of them may hang from a trunk of single sampled children (delayed trees, arXiv 2602.16994).
Trunk nodes have exactly
one child: a duplicated trunk child would make the methods for paths biased.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..verifier.law import depths, inverse_cdf

MAX_NODES = 512
Branches = int | list[int] | str | None  # a text is for `selector.make_selector`
MAX_PATHS = 64


@dataclass(frozen=True)
class Topology:
    """Shape of a draft tree, shared by the batch, nodes in order of depth.

    parents: N ints, the root's is -1.
    levels:  first node of every depth and, last, N: nodes levels[d] .. levels[d+1]-1 have depth d.
    """

    drafting: str
    parents: tuple[int, ...]
    levels: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return len(self.levels) - 2

    @cached_property
    def depths(self) -> Tensor:
        """[N] int64 depth of every node."""
        return torch.tensor(depths(self.parents))

    @cached_property
    def ancestors(self) -> Tensor:
        """[N, N] bool: entry (i, j) says that j is i itself or one of its ancestors."""
        mask = torch.eye(self.nodes, dtype=torch.bool)
        for node in range(1, self.nodes):
            mask[node] |= mask[self.parents[node]]
        return mask

    @cached_property
    def paths(self) -> Tensor:
        """[N, depth + 1] int64 nodes from the root to each node; entries below a node repeat the
        node.
        """
        paths = torch.arange(self.nodes).unsqueeze(1).repeat(1, self.depth + 1)
        for node in range(1, self.nodes):
            above = int(self.depths[node])
            paths[node, :above] = paths[self.parents[node], :above]
        return paths

    @cached_property
    def path_lists(self) -> list[list[int]]:
        """Nodes from the root to each node, the node itself last."""
        return [
            path[: depth + 1]
            for path, depth in zip(self.paths.tolist(), self.depth_list, strict=True)
        ]

    @cached_property
    def depth_list(self) -> list[int]:
        return self.depths.tolist()

    @cached_property
    def chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(-1, self.nodes - 1))

    @cached_property
    def lane_list(self) -> list[int]:
        return self.lanes.tolist()

    @cached_property
    def lanes(self) -> Tensor:
        """[N] int64 which of a request's random numbers draws each node; the root needs none and
        has -1.

        A path has the same lanes whether or not others are drafted beside it.
        """
        if self.drafting != "paths":
            return torch.arange(self.nodes) - 1
        levels = enumerate(pairwise(self.levels))
        return torch.tensor(
            [-1] + [(d - 1) * MAX_PATHS + i for d, (a, b) in levels if d for i in range(b - a)]
        )


def topology(
    drafting: str, draft_length: int, branches: int | list[int] = 1, trunk: int = 0
) -> Topology:
    """The tree that a method's drafting law grows.

    drafting:     one of the laws above.
    draft_length: tokens on a path below the trunk.
    branches:     K for paths; for trees M, the children of every node, or a list with one M for each depth.
    trunk:        single tokens before the first branching.
    """
    counts = [1] * trunk + _branching(drafting, draft_length, branches)
    parents, levels, frontier = [-1], [0, 1], [0]
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
        levels.append(len(parents))
    return Topology(drafting, tuple(parents), tuple(levels))


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
