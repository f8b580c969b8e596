"""What is fastest on this CPU, found by measuring when a run starts: the type of the weights and
the number of threads.

Many CPUs read bfloat16 and compute with it several times slower than with float32 (3.5 times for
SmolLM2-135M on an EPYC without AMX), others twice as fast; a small model is slower on two threads
than on one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import lru_cache

import torch

ROWS = 8  # of the product that is timed: what a step of a few requests gives a layer
TURNS = 7
# another choice must take at most this share of the time: measurements on a busy machine vary
GAIN = 0.9


def suited(module):
    """The Hugging Face module, its weights in float32 where they are stored in a half and computed
    slower in it.

    Left as it is where twice the memory would be more than a quarter of the machine's: a pair has
    two models.
    """
    stored = module.dtype
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4
    half = stored in (torch.bfloat16, torch.float16)
    if (
        not half
        or size > room
        or not slower_than_float32(stored, module.config.get_text_config().hidden_size)
    ):
        return module
    return module.float()


@lru_cache
def slower_than_float32(dtype: torch.dtype, width: int) -> bool:
    """Whether products of rows with a [width, 4 width] matrix are."""

    def product(dtype: torch.dtype) -> Callable[[], object]:
        rows, weight = (
            torch.ones(ROWS, width, dtype=dtype),
            torch.ones(4 * width, width, dtype=dtype).t(),
        )
        return lambda: torch.mm(rows, weight)

    half, single = _seconds([product(dtype), product(torch.float32)])
    return single <= GAIN * half


def fastest_threads(model, rows: int, tokens: int) -> int:
    """The number of threads, of 1, 2, 4, ... and torch's own number, with which a call is fastest;
    torch keeps it.

    model:        a `runtime.forward.Model`.
    rows, tokens: of the call that is timed, a step's.
    """
    most = torch.get_num_threads()
    counts = sorted({1 << power for power in range(most.bit_length())} | {most})
    cache, shape = model.cache(tokens), (rows, tokens)
    positions = torch.arange(tokens).expand(shape)

    def call(count: int) -> Callable[[], object]:
        def run() -> None:
            torch.set_num_threads(count)
            model(torch.zeros(shape, dtype=torch.long), positions, None, cache)

        return run

    taken = dict(zip(counts, _seconds([call(count) for count in counts]), strict=True))
    best = counts[0]
    for count in counts[1:]:
        best = count if taken[count] <= GAIN * taken[best] else best
    torch.set_num_threads(best)
    return best


def _seconds(works: list[Callable[[], object]]) -> list[float]:
    """Median seconds of each, in turns, so that a busy machine slows all alike."""
    taken: list[list[float]] = [[] for _ in works]
    for turn in range(TURNS + 1):
        for work, found in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            if turn:  # the first computes what is computed once
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in taken]
