"""Which tree to grow next: a choice made once a step, before the tree is drawn (delayed trees, arXiv 2602.16994).

A choice may use whatever does not depend on the tree: the committed text, both models at the token before the root,
the draft at the root. Every method stays exact for the tree that it is then handed. A shape is written KxL2+L1: a trunk
of L1 single tokens, then K paths of L2; `5` is a chain. What `--branches` may name, all in one interface:

    3x4+2                 constant
    auto                  GBV's number of paths, 1 to 4, for each request of the batch
    entropy:1.2,6,3x2     the first shape where the draft's row at the root has at most 1.2 nats, else the second
    a folder              the network that `diversed select` trained, or a bundle that holds one

A batch grows one topology a step. `auto` leaves the paths that a request did not ask for absent, so that a text does
not depend on its batch; the others choose for the whole batch, which changes texts and not their law.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..verifier.law import DraftTree
from ..verifier.multipath import choose_paths
from .drafting import Topology, topology

if TYPE_CHECKING:
    from .model import Pair
    from .sampling import Sampling

MOST_PATHS = 4
_SHAPE = re.compile(r"(?:(\d+)x)?(\d+)(?:\+(\d+))?")


@dataclass(frozen=True)
class Shape:
    """A trunk of `trunk` single tokens, then `paths` paths of `length` tokens; one path is written without a trunk."""

    paths: int
    length: int
    trunk: int = 0

    def __str__(self) -> str:
        return (f"{self.paths}x" if self.paths > 1 else "") + str(self.length) + (f"+{self.trunk}" * (self.trunk > 0))

    @property
    def depth(self) -> int:
        return self.trunk + self.length

    @property
    def widths(self) -> list[int]:
        """Nodes of every depth, the root's first."""
        return [1] * (1 + self.trunk) + [self.paths] * self.length

    def grow(self, drafting: str) -> Topology:
        branches = self.paths if drafting in ("paths", "chain") else [self.paths] + [1] * (self.length - 1)
        return topology(drafting, self.length, branches, self.trunk)


def parse_shape(text: str) -> Shape:
    """The shape that is written KxL2+L1."""
    found = _SHAPE.fullmatch(text.strip())
    if not found or not int(found[2]) or found[1] == "0":
        raise ValueError(
            f"a shape is written PATHSxLENGTH+TRUNK, such as 3x4+2, or one number for a chain, got {text!r}"
        )
    paths, length, trunk = int(found[1] or 1), int(found[2]), int(found[3] or 0)
    return Shape(paths, length, trunk) if paths > 1 else Shape(1, length + trunk)


@dataclass(frozen=True)
class Known:
    """What a step knows before it draws its tree.

    before: what the selector's `remember` kept of the step before, zeros for a request that had none.
    rows:   [B, W, V] the draft's rows, the root's last; W is 2 where the selector looks back, else 1.
    hidden: [B, W, H] the draft's hidden states there, where the selector looks back.
    length: [B] int64 committed tokens before the root; lengths: the same as a list.
    active: for each request whether it is still being decoded.
    """

    before: tuple[Tensor, ...]
    rows: Tensor
    hidden: Tensor | None
    length: Tensor
    lengths: list[int]
    active: list[bool]


class Selector:
    """shapes: the trees it chooses from, as topologies.

    looks_back: it needs hidden states of both models, and the draft at the token before the root.
    """

    looks_back = False

    def __init__(self, shapes: list[Topology]):
        self.shapes = shapes

    def nothing(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        """`before` of requests that had no step yet."""
        return ()

    def remember(self, tree: DraftTree, hidden: Tensor | None, path: Tensor, accepted: Tensor) -> tuple[Tensor, ...]:
        """What the next choice needs of this step.

        hidden: [B, N, H_target]; path: [B, L + 1] nodes to the stopping node, which is repeated; accepted: [B].
        """
        return ()

    def choose(self, known: Known) -> tuple[int, Tensor | None]:
        """Index of the shape that the batch grows, and how many of its paths [B] each request wants (None: all)."""
        raise NotImplementedError


class PathsSelector(Selector):
    """GBV's number of paths from the rows of the block before (ALGORITHMS 5); shape i has i + 1 paths."""

    def nothing(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(2, size, 1, pair.vocab, device=device))

    def remember(self, tree, hidden, path, accepted) -> tuple[Tensor, ...]:
        on_path = torch.arange(path.shape[1], device=path.device) <= accepted.unsqueeze(1)
        at = path.unsqueeze(-1).expand(-1, -1, tree.target.shape[-1])
        return tree.target.gather(1, at), tree.draft.gather(1, at) * on_path.unsqueeze(-1)

    def choose(self, known: Known) -> tuple[int, Tensor | None]:
        paths = choose_paths(*known.before, known.rows[:, -1], len(self.shapes))
        return int(paths.max()) - 1, paths


class EntropySelector(Selector):
    """The first of two shapes where the draft's mean entropy at the roots is at most `threshold` nats."""

    def __init__(self, shapes: list[Topology], threshold: float):
        super().__init__(shapes)
        self.threshold = threshold

    def choose(self, known: Known) -> tuple[int, Tensor | None]:
        entropy = -torch.special.xlogy(known.rows[:, -1], known.rows[:, -1]).sum(-1)
        wanted = [one for one, active in zip(entropy.tolist(), known.active, strict=True) if active]
        return int(sum(wanted) > self.threshold * len(wanted)), None


def make_selector(
    text: str, method: str, drafting: str, draft_length: int, trunk: int, pair: Pair, sampling: Sampling
) -> Selector:
    """The selector that `branches` names; ValueError with one sentence for anything else."""
    if text == "auto":
        if method != "gbv":
            raise ValueError(
                f"`branches` auto chooses the number of paths of gbv before each step, got method {method!r}"
            )
        return PathsSelector([topology(drafting, draft_length, paths, trunk) for paths in range(1, MOST_PATHS + 1)])
    if text.startswith("entropy:"):
        threshold, *shapes = text.removeprefix("entropy:").split(",")
        try:
            limit = float(threshold)
        except ValueError:
            limit = float("nan")
        if not limit >= 0 or len(shapes) != 2:
            raise ValueError(
                f"`branches` entropy is written entropy:NATS,SHAPE,SHAPE, such as entropy:1.2,6,3x2, got {text!r}"
            )
        return EntropySelector([parse_shape(shape).grow(drafting) for shape in shapes], limit)
    return Selector([parse_shape(text).grow(drafting)])
