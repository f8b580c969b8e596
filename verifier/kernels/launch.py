"""One call of a kernel: inputs, scratch and sizes, and the launches that all methods share.

Everything is sized by (B, N, D, V) and the tree's shape alone, nothing is read back and nothing is
tuned at run time; so a call can be captured in a CUDA graph, after one call outside it that
compiles and sends the shape to the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import rows, walk


class Call:
    """One verification; the inputs are those of `kernels.verify`, float32 cuts and weights, float64
    uniforms.

    state: [FIELDS, B, N] float32, zero at first: an absent node takes no part.
    parts: [5, B, N, T] float32, what `normalise` leaves.
    sums:  [B, N, T] float32, residual mass of every tile.
    costs: [B, N, T] float32, substitutions of every tile.
    stop, token, accepted: [B] int64, the verdict and its depth.
    """

    def __init__(
        self,
        target: Tensor,
        draft: Tensor,
        tokens: Tensor,
        parents: tuple[int, ...],
        weight: Tensor,
        uniform: Tensor,
        temperature: float,
        cuts: tuple[Tensor, Tensor] | None,
    ):
        (batch, nodes, vocabulary), device = target.shape, target.device
        self.tokens, self.parents, self.weight, self.uniform = tokens, parents, weight, uniform
        self.tile = tile_size(vocabulary)
        self.tiles = -(-vocabulary // self.tile)
        self.shape = walk.described(parents, device)
        self.nodes = torch.arange(nodes, dtype=torch.int32, device=device)
        self.state = torch.zeros(rows.FIELDS, batch, nodes, device=device)
        self.parts = torch.empty(5, batch, nodes, self.tiles, device=device)
        # two tensors: where the second half of one began, triton would compile for its alignment
        self.sums = torch.empty(batch, nodes, self.tiles, device=device)
        self.costs = torch.empty_like(self.sums)
        # three tensors: outputs of an operation may not share memory
        verdict = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(3))
        self.stop, self.token, self.accepted = verdict
        strides = *target.stride()[:2], *draft.stride()[:2]
        self.models = target, draft, *(cuts or (weight, weight)), *strides
        # exp2 is what the hardware has
        scale = math.log2(math.e) / temperature
        self.sizes = batch * nodes, nodes
        self.layout = scale, *self.sizes, draft.shape[1], vocabulary, self.tiles
        self.cut = {"CUT": cuts is not None}
        self.lanes = {"TILES": _power(self.tiles)}
        self.children = {"M": _power(len(self.shape) - rows.CHILDREN.value)}
        self.tiled = {"TILE": self.tile, "num_warps": self.tile // 256}

    def normalise(self, left_off: int) -> None:
        grid = (self.sizes[0] * self.tiles,)
        rows.normalise[grid](
            self.models,
            self.tokens,
            self.shape,
            self.parts,
            *self.layout,
            LEFT_OFF=left_off,
            **self.cut,
            **self.tiled,
        )

    def start(self, kernel: Any, **constants: bool) -> None:
        """One program a request and node; `kernel` begins with `read_node`."""
        constants |= self.cut | self.lanes | self.children
        scratch = self.tokens, self.weight, self.shape, self.parts, self.state
        kernel[self.sizes[:1]](self.models, *scratch, *self.layout, **constants, num_warps=1)

    def residual(self, nodes: Tensor, turn: int = 0, marked: int = 0, path: bool = False) -> None:
        rows.residual[(len(self.tokens) * len(nodes) * self.tiles,)](
            self.models,
            self.shape,
            self.state,
            self.sums,
            self.costs,
            nodes,
            self.stop,
            *self.layout,
            len(nodes),
            turn,
            MARKED=marked > 0,
            PATH=path,
            **self.cut,
            **self.tiled,
        )

    def finish(self, kernel: Any, nodes: Tensor, *numbers: int, **constants: bool) -> None:
        """One program a request and node of `nodes`, after their residual pass."""
        grid = (len(self.tokens) * len(nodes),)
        scratch = self.tokens, self.shape, self.state, self.sums, nodes
        constants |= self.lanes | self.children
        sizes = *self.sizes, self.tiles, len(nodes)
        kernel[grid](*scratch, *sizes, *numbers, **constants, num_warps=1)

    def walk(self, coupled: bool) -> None:
        nodes = _power(self.sizes[1])
        walk.walk[(len(self.tokens),)](
            self.state,
            self.tokens,
            self.weight,
            self.shape,
            self.uniform,
            self.stop,
            self.accepted,
            *self.sizes,
            self.layout[-2],
            COUPLED=coupled,
            NODES=nodes,
            num_warps=1 if nodes <= 64 else 4,
        )

    def select(self, marked: int = 0) -> None:
        rows.select[(len(self.tokens),)](
            self.models,
            self.shape,
            self.parts,
            self.state,
            self.sums,
            self.uniform,
            self.stop,
            self.token,
            *self.layout,
            MARKED=marked,
            **self.cut,
            **self.lanes,
            **self.tiled,
        )


def tile_size(vocabulary: int) -> int:
    """Tokens a program reads, 8 a thread: 32 programs a row or more, so that a few rows fill a GPU.

    At most 2048: with 4096 the pass that leaves children out runs short of registers.
    """
    return min(max(_power(-(-vocabulary // 32)), 512), 2048)


def _power(count: int) -> int:
    """The least power of two that holds `count`."""
    return 1 << (count - 1).bit_length()
