"""The row layout: where the nodes of a tree lie in a cache, and what each of them sees.

A row whose root stands behind `length` committed tokens writes node n of its tree into slot
length + n. Example: length 5 and a root with two children: slots 5, 6 and 7, at positions 5, 6
and 6. Node -1 is the token before the root; the draft runs it again if its cache lacks it.

A token sees the committed slots, its ancestors and itself. That depends on the slot's distance to
the root's alone, so one table a shape, nodes by distances, holds the masks of all calls: a view of
it serves rows of one length, and a row of it for every slot serves rows of many lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cache import PackedCache
from .drafting import DraftShape
from .forward import Model, Output


class Place:
    """Where the rows of a batch stand.

    common: committed tokens before the root, if the host knows that all rows share that number.
    end:    the largest of these numbers; a call sees no slot behind its last node. None if the host
            does not know them: every call then sees the whole cache, and its shapes never change.
    """

    def __init__(self, lengths: list[int] | Tensor, device: torch.device):
        self._lengths, self._device, self.common, self.end = lengths, device, None, None
        if isinstance(lengths, list):
            self.common = lengths[0] if len(set(lengths)) == 1 else None
            self.end = max(lengths)

    @property
    def length(self) -> Tensor:
        """[B] int64 committed tokens before the root; sent to the device when first asked for."""
        if isinstance(self._lengths, list):
            self._lengths = torch.tensor(self._lengths, device=self._device)
        return self._lengths


class Layout:
    """One shape in the caches of one model."""

    def __init__(self, model: Model, shape: DraftShape):
        self.model, self.shape, device = model, shape, model.device
        self.nodes = torch.arange(-1, shape.nodes, device=device)
        self.depths = torch.tensor((-1, *shape.depths), device=device)
        self.back = 1 + (model.window or 0)
        self.tables = self._tables()

    def _tables(self) -> dict[str, Tensor]:
        """[N + 1, back + N + 1] by kind of attention, to add to the scores: of node -1 and every
        node, what it sees of the slots at distance -back .. N from the root's.

        Slots that are farther back are seen as the first of these, slots behind it as the last.
        """
        model, shape = self.model, self.shape
        before = torch.arange(-self.back, 0)
        tree = pad(shape.ancestors, (0, 1, 1, 0), value=False)
        seen = torch.cat([torch.ones(len(tree), self.back, dtype=torch.bool), tree], 1)
        place = torch.cat([before, torch.tensor([*shape.depths, 0])])
        near = torch.tensor([[-1], *([depth] for depth in shape.depths)]) - place < (
            model.window or 0
        )
        found = {"full_attention": seen, "sliding_attention": seen & near}
        return {kind: model.additive(found[kind].to(model.device))[:, 0] for kind in model.kinds}

    def masks(self, place: Place, first: int, count: int, end: int) -> dict[str, Tensor | None]:
        """[B or 1, 1, Q, end] by kind of attention, of `count` nodes from `first` on."""
        rows = slice(1 + first, 1 + first + count)
        if place.common is not None:
            if count == 1 and self.straight(first) and self.model.lean and not self.model.window:
                return dict.fromkeys(self.model.kinds)  # it sees every slot up to its own
            if place.common > self.back:
                self.back = 2 * place.common
                self.tables = self._tables()
            at = self.back - place.common
            return {
                kind: table[None, None, rows, at : at + end] for kind, table in self.tables.items()
            }
        slot = torch.arange(end, device=self.nodes.device)
        column = (slot + self.back - place.length.unsqueeze(1)).clamp(
            0, self.back + self.shape.nodes
        )
        shape = (count, *column.shape)
        return {
            kind: table[rows]
            .index_select(1, column.flatten())
            .view(shape)
            .transpose(0, 1)
            .contiguous()
            .unsqueeze(1)
            for kind, table in self.tables.items()
        }

    def straight(self, node: int) -> bool:
        """Whether all nodes up to this one are its ancestors, so that its slot is its position."""
        return node <= 0 or self.shape.depths[node] == node


@dataclass
class Side:
    """One model and its cache for the rows of a batch; device: where its outputs are wanted."""

    model: Model
    cache: PackedCache
    device: torch.device

    def __call__(
        self, layout: Layout, place: Place, tokens: Tensor, first: int, hidden: bool
    ) -> Output:
        """Run the model on tokens [B, Q] of the nodes from `first` on, -1 where a row lacks one."""
        count = tokens.shape[1]
        nodes = slice(1 + first, 1 + first + count)
        end = self.cache.capacity if place.end is None else place.end + first + count
        if place.common is None:
            # A prompt of one token has none before its root: what is computed for it goes into a
            # slot that nothing sees.
            slots = (place.length.unsqueeze(1) + layout.nodes[nodes]) % self.cache.capacity
            positions = (place.length.unsqueeze(1) + layout.depths[nodes]).clamp_min(0)
        else:
            slots, positions = place.common + first, None
            if not layout.straight(first + count - 1):
                positions = (layout.depths[nodes] + place.common).expand(len(tokens), -1)
        masks = layout.masks(place, first, count, end)
        out = self.model.run(tokens.clamp_min(0), positions, slots, masks, self.cache, end, hidden)
        states = out.hidden.to(self.device) if hidden else None
        return Output(out.logits.to(self.device), states)

    def keep(self, place: Place, path: Tensor, reach: Tensor) -> None:
        """Copy the nodes on `path` [B, L + 1] to the slots behind the root, as far as `reach`
        [B].
        """
        step = torch.arange(1, path.shape[1], device=path.device)
        to = place.length.unsqueeze(1) + step
        source = torch.where(
            step <= reach.unsqueeze(1), place.length.unsqueeze(1) + path[:, 1:], to
        )
        self.cache.move(source, to)
