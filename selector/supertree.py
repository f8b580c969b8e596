"""The supertree of several shapes: the smallest tree of which every shape is a part.

It has a trunk. At every trunk node from which a shape may branch it has as many rollouts as the
shapes need there. One call of the target on the supertree covers all shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..runtime.drafting import DraftShape, children
from ..runtime.shapes import Shape
from ..verifier.law import DraftTree, inverse_cdf

Key = tuple[int, int, int]


@dataclass(frozen=True)
class Supertree:
    """The supertree of `shapes` under one drafting law.

    A node's key is (-1, -1, depth) on the trunk and (trunk, column, step) on a rollout: the rollout
    number `column` of the trunk node at depth `trunk`, its `step`-th token, counted from 1.
    """

    drafting: str
    shapes: tuple[Shape, ...]

    @property
    def most(self) -> int:
        """The largest number of paths."""
        return max(shape.paths for shape in self.shapes)

    def columns(self, paths: int) -> list[int]:
        """The rollouts of a branching node that make up `paths` paths.

        A greedy node has the most likely tokens and one that is sampled from the rest. That rest
        differs for every number of paths, so each has a sampled rollout of its own.
        """
        if self.drafting == "greedy":
            return [*range(paths - 1), self.most - 2 + paths]
        return list(range(paths))

    @cached_property
    def keys(self) -> list[Key]:
        """Of every node, in order of depth."""
        reach: dict[tuple[int, int], int] = {}
        for shape in self.shapes:
            for column in self.columns(shape.paths):
                rollout = shape.trunk, column
                reach[rollout] = max(reach.get(rollout, 0), shape.length)
        longest = max(trunk for trunk, _ in reach)
        keys = [(-1, -1, depth) for depth in range(longest + 1)]
        for (trunk, column), length in reach.items():
            keys += [(trunk, column, step) for step in range(1, length + 1)]
        return sorted(keys, key=lambda key: (max(key[0], 0) + key[2], key))

    @cached_property
    def node(self) -> dict[Key, int]:
        """The node of every key."""
        return {key: node for node, key in enumerate(self.keys)}

    @cached_property
    def topology(self) -> DraftShape:
        return DraftShape(tuple(self._parent(key) for key in self.keys), self.drafting)

    def _parent(self, key: Key) -> int:
        trunk, column, step = key
        if step == 0:
            return -1
        if trunk < 0 or step > 1:
            return self.node[trunk, column, step - 1]
        return self.node[-1, -1, trunk]

    def part(self, shape: Shape, first: int = 0) -> list[int]:
        """The nodes of a shape in the order of its own topology; a chain is rollout `first`."""
        nodes = [self.node[-1, -1, depth] for depth in range(shape.trunk + 1)]
        for step in range(1, shape.length + 1):
            for column in self.columns(shape.paths):
                nodes.append(self.node[shape.trunk, column + first, step])
        return nodes

    def draw(self, rows: Tensor, depth: int, uniform: Tensor) -> Tensor:
        """Tokens [R, n] of the nodes of a depth; rows: [R, N, V] of the draft, uniform: [R, N]."""
        tokens = []
        for node in self.topology.levels[depth]:
            trunk, column, step = self.keys[node]
            row = rows[:, self.topology.parents[node]]
            if trunk >= 0 and step == 1 and self.drafting != "paths":
                begin = self.node.get((trunk, 0, 1), node)
                token = self._sibling(row, column, uniform[:, begin : begin + self.most])
            else:
                token = inverse_cdf(row, uniform[:, node : node + 1])
            tokens.append(torch.where(row.sum(-1, keepdim=True) > 0, token, -1))
        return torch.cat(tokens, 1)

    def _sibling(self, row: Tensor, column: int, uniform: Tensor) -> Tensor:
        """[R, 1] the first token of a rollout; it differs from those of the rollouts beside it."""
        if self.drafting == "greedy" and column < self.most - 1:
            return row.topk(column + 1, dim=-1).indices[:, -1:]
        count = column + 1
        if self.drafting == "greedy":
            count = column - self.most + 2
        drawn = children(self.drafting, row.unsqueeze(1), count, uniform[:, None, :count])
        return drawn[:, 0, -1:]


def take_part(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of these nodes, whose leaves the draft was not run on."""
    parents = tuple(nodes.index(tree.parents[node]) if node else -1 for node in nodes)
    inner = [place in parents for place in range(len(nodes))]
    ran = torch.tensor(inner, device=tree.tokens.device).unsqueeze(1)
    draft, target = tree.draft[:, nodes] * ran, tree.target[:, nodes]
    return DraftTree(tree.tokens[:, nodes], parents, draft, target)
