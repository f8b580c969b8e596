"""A key-value cache whose rows accept different numbers of tokens.

The slot of a committed token is its position in the text, in every row. A call writes its tokens
into slots [start, start + Q) of all rows, or into slots [B, Q] of each row's own; a mask hides what
a row must not see. After verification the accepted path is copied down behind the committed tokens,
which is a few entries a layer: nothing else moves and nothing is recomputed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

Slots = int | Tensor  # the first of consecutive slots, the same in all rows, or [B, Q] slots


class PackedLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, capacity, head size], allocated when the first token
    arrives.

    slots: where the next call writes; end: how many slots it sees.
    """

    is_croppable = False
    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.slots: Slots = 0
        self.end = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def empty(states: Tensor) -> Tensor:
            return states.new_zeros(*states.shape[:2], self.capacity, states.shape[-1])

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(self.slots, int):
                buffer[:, :, self.slots : self.slots + states.shape[2]] = states
            else:
                rows = torch.arange(len(states), device=states.device).unsqueeze(1)
                buffer[rows, :, self.slots.to(states.device)] = states.transpose(1, 2)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]

    def get_seq_length(self) -> int:
        return self.end

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return self.end, 0


class PackedCache(Cache):
    """The cache of one model for one batch."""

    def __init__(self, layers: int, capacity: int):
        super().__init__(layers=[PackedLayer(capacity) for _ in range(layers)])
        self.capacity = capacity
        self.positions: Tensor | None = None  # [B, capacity] of the token in every slot, if noted

    def note(self, start: int, positions: Tensor) -> Tensor:
        """Note positions [B, Q] of the tokens in the slots from `start` on; those of all slots up
        to there.
        """
        end = start + positions.shape[1]
        if self.positions is None:
            self.positions = positions.new_zeros(len(positions), self.capacity)
        self.positions[:, start:end] = positions
        return self.positions[:, :end]

    def write_at(self, slots: Slots, end: int) -> None:
        """The next call writes into these slots and sees the first `end`."""
        assert end <= self.capacity, f"cache of {self.capacity} slots was asked for {end}"
        for layer in self.layers:
            layer.slots, layer.end = slots, end

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy slots `source` [B, X] to `destination` [B, X]; a destination named twice must get
        one source.
        """
        if self.positions is not None:
            self.positions.scatter_(1, destination, self.positions.gather(1, source))
        for layer in self._filled():
            for buffer in (layer.keys, layer.values):
                shape = (-1, buffer.shape[1], -1, buffer.shape[3])
                take = source.to(buffer.device)[:, None, :, None].expand(shape)
                put = destination.to(buffer.device)[:, None, :, None].expand(shape)
                buffer.scatter_(2, put, buffer.gather(2, take))

    def resize(self, capacity: int) -> None:
        """Room for `capacity` slots a row; slots beyond them are lost."""
        if self.positions is not None:
            self.positions = pad(self.positions, (0, capacity - self.capacity))
        for layer in self._filled():
            grow = (0, 0, 0, capacity - self.capacity)
            layer.keys, layer.values = pad(layer.keys, grow), pad(layer.values, grow)
        for layer in self.layers:
            layer.capacity = capacity
        self.capacity = capacity

    def replace(self, rows: Tensor, fresh: PackedCache, filled: int) -> None:
        """Put the batch rows of `fresh`, of which `filled` slots are written, in the place of
        `rows` [B'] int64.
        """
        if fresh.positions is not None:
            self.positions[rows, :filled] = fresh.positions[:, :filled]
        # A fresh cache is empty if its prompts are one token each, with nothing before the root.
        for layer, new in zip(self.layers, fresh._filled(), strict=False):
            here = rows.to(layer.keys.device)
            layer.keys[here, :, :filled] = new.keys[:, :, :filled]
            layer.values[here, :, :filled] = new.values[:, :, :filled]

    def select(self, rows: Tensor) -> None:
        """Keep only the batch rows `rows` [B'] int64."""
        if self.positions is not None:
            self.positions = self.positions.index_select(0, rows.to(self.positions.device))
        for layer in self._filled():
            layer.keys = layer.keys.index_select(0, rows.to(layer.keys.device))
            layer.values = layer.values.index_select(0, rows.to(layer.values.device))

    def _filled(self) -> list[PackedLayer]:
        """The layers, none before the first call."""
        return [layer for layer in self.layers if layer.is_initialized]


def attention_layers(config) -> tuple[int, set[str], int | None]:
    """(number of layers, kinds of attention, window in tokens or None); layers without keys and
    values are refused.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(
        getattr(config, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"]
    )
    odd = kinds - {"full_attention", "sliding_attention"}
    if odd:
        raise ValueError(
            f"{config.model_type} has layers of kind {', '.join(sorted(odd))}, whose state cannot"
            " be rolled back after a rejection; use a pair whose layers all keep keys and values"
        )
    return config.num_hidden_layers, kinds, window if "sliding_attention" in kinds else None
