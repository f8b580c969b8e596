"""Random numbers that are a pure function of (seed, position, lane).

The mixing function is SplitMix64 (Steele, Lea, Flood 2014), as int64 tensor operations.

A request draws the same numbers whatever batch it is in, whatever device it is on and wherever a
run was resumed; ranks that hold the same request agree without talking to each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def uniforms(seed: Tensor, position: Tensor | int, lanes: int) -> Tensor:
    """[B, lanes] float64 in [0, 1).

    seed:     [B] int64, one seed a request.
    position: [B] int64 or one int, the number of tokens committed before this draw.
    lanes:    how many independent numbers the draw needs.
    """
    lane = torch.arange(lanes, device=seed.device)
    key = _mix(seed.unsqueeze(-1) * _GOLDEN + 1)
    key = _mix(key + torch.as_tensor(position, device=seed.device).reshape(-1, 1) * _GOLDEN)
    bits = _mix(key + (lane + 1) * _GOLDEN)
    return _shift(bits, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 shifts carry the sign, so the copies of it are masked off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
