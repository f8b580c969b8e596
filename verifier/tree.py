"""Facts about the shape of a tree, computed once for each tuple of parents.

A shape is a tuple of N ints: the parent of every node. Node 0 is the root, its parent is -1, and a
parent comes before its children. Example: (-1, 0, 0, 1) is a root with the children 1 and 2, and
node 3 below node 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

Nodes = tuple[int, ...]


def _fact() -> Any:
    """A field that follows from the parents."""
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Topology:
    """The shape of a tree; `topology(parents)` gives the same object for the same parents.

    depths:       depth of every node; the root has depth 0.
    paths:        nodes from the root to each node, the node itself last.
    padded_paths: `paths`, all of `depth` + 1 nodes: a shorter one repeats its last node.
    children:     the children of every node, in drawing order.
    levels:       the nodes of every depth.
    leaves:       nodes without children.
    families:     nodes with children by depth, and within a depth by their number of children.
    is_chain:     whether no node has two children.
    split_paths:  (trunk, paths) if the tree is K >= 2 chains of equal length below one node, else
                  None. The trunk ends with the node that the paths hang from. A single chain is
                  all trunk and has no paths.
    """

    parents: Nodes
    depths: Nodes = _fact()
    paths: tuple[Nodes, ...] = _fact()
    padded_paths: tuple[Nodes, ...] = _fact()
    children: tuple[Nodes, ...] = _fact()
    levels: tuple[Nodes, ...] = _fact()
    leaves: Nodes = _fact()
    families: tuple[Nodes, ...] = _fact()
    is_chain: bool = _fact()
    split_paths: tuple[Nodes, tuple[Nodes, ...]] | None = _fact()

    def __post_init__(self):
        paths, children = [(0,)], [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            paths.append((*paths[parent], node))
            children[parent].append(node)
        depths = tuple(len(path) - 1 for path in paths)
        levels: list[list[int]] = [[] for _ in range(max(depths) + 1)]
        families: dict[tuple[int, int], list[int]] = {}
        for node, depth in enumerate(depths):
            levels[depth].append(node)
            if children[node]:
                families.setdefault((depth, len(children[node])), []).append(node)
        facts = {
            "depths": depths,
            "paths": tuple(paths),
            "padded_paths": tuple(path + path[-1:] * (len(levels) - len(path)) for path in paths),
            "children": tuple(map(tuple, children)),
            "levels": tuple(map(tuple, levels)),
            "leaves": tuple(node for node, below in enumerate(children) if not below),
            "families": tuple(tuple(families[key]) for key in sorted(families)),
            "is_chain": self.parents == chain(self.nodes - 1),
            "split_paths": _split(children),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.levels) - 1

    @cached_property
    def ancestors(self) -> Tensor:
        """[N, N] bool: entry (i, j) says whether j is i itself or one of its ancestors."""
        mask = torch.zeros(self.nodes, self.nodes, dtype=torch.bool)
        for node, path in enumerate(self.paths):
            mask[node, list(path)] = True
        return mask


def _split(children: list[list[int]]) -> tuple[Nodes, tuple[Nodes, ...]] | None:
    """`Topology.split_paths`."""

    def single_file(node: int) -> Nodes:
        nodes = [node]
        while len(children[nodes[-1]]) == 1:
            nodes += children[nodes[-1]]
        return tuple(nodes)

    trunk = single_file(0)
    paths = tuple(single_file(node) for node in children[trunk[-1]])
    if any(children[path[-1]] for path in paths) or len(set(map(len, paths))) > 1:
        return None
    return trunk, paths


# A dictionary and no `lru_cache`, which torch.compile would trace.
_KNOWN: dict[Nodes, Topology] = {}


def topology(parents: Nodes) -> Topology:
    """The facts about a tree with these parents."""
    if parents not in _KNOWN:
        _KNOWN[parents] = Topology(parents)
    return _KNOWN[parents]


def in_order(parents: Nodes) -> bool:
    """Whether these are the parents of a tree whose nodes come after their parents."""
    below = enumerate(parents[1:], 1)
    return parents[0] == -1 and all(0 <= parent < node for node, parent in below)


def chain(length: int) -> Nodes:
    """Parents of a single file of `length` nodes below the root."""
    return tuple(range(-1, length))


def on_device(numbers: tuple, device: torch.device) -> Tensor:
    """The numbers as an int64 tensor, sent to the device once; a compiled program holds its own."""
    if torch.compiler.is_compiling():
        return torch.tensor(numbers, device=device)
    return _sent(numbers, device)


@lru_cache(maxsize=4096)
def _sent(numbers: tuple, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # gradients may later go through what it indexes
        return torch.tensor(numbers, device=device)
