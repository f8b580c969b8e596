"""Memory of decoding: its peak against batch and context, and whether it grows while a batch serves
many prompts.

A peak is the resident memory of a process of its own, above what it held with both models loaded
and warm. The soak decodes texts of mixed lengths, one in the place of another, until it has its
number of tokens; it stops at a NaN or at statistics that do not add up, and its growth is what
stays resident at the end, after freed memory was given back, above what stayed after the first
quarter of the tokens. (Peaks do not tell growth: fragments raise them by 6 to 14 MB.)
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from ..data.tasks import load_task
from ..runtime.completion import Completion, Request
from ..runtime.engine import Engine
from ..runtime.forward import Model, Pair
from ..runtime.groups import Models
from ..verifier.methods import METHODS

STATUS = Path("/proc/self/status")
ROUND = 128  # requests of a soak between two looks at the memory


@dataclass(frozen=True)
class Peaks:
    """What peaks are measured of.

    Args:
        method: whose peak is measured.
        batches: prompts decoded together.
        contexts: tokens of a prompt.
        shared: tokens at the beginning that all prompts have in common.
        new_tokens: tokens of each text where a peak is measured.
    """

    method: str = "token"
    batches: list[int] = field(default_factory=lambda: [1, 8, 32])
    contexts: list[int] = field(default_factory=lambda: [64, 256, 480])
    shared: int = 0
    new_tokens: int = 16


@dataclass(frozen=True)
class Soaks:
    """What is soaked.

    Args:
        soak: methods that are soaked.
        tokens: new tokens of a soak, at least.
        soak_batch: prompts a soak decodes together.
        seed: of the lengths and texts of a soak.
    """

    soak: list[str] = field(default_factory=lambda: list(METHODS))
    tokens: int = 20_000
    soak_batch: int = 16
    seed: int = 0


def run(
    models: Models = Models(),  # noqa: B008  frozen
    peaks: Peaks = Peaks(),  # noqa: B008
    soaks: Soaks = Soaks(),  # noqa: B008
    *,
    threads: int = 1,
) -> list[dict]:
    """One row a batch and context, and two a method that is soaked: growth and speed.

    Args:
        threads: CPU threads.
    """
    if not STATUS.exists():
        raise OSError(
            f"`diversed bench memory` reads {STATUS}, which this system does not have; run it on"
            " Linux"
        )
    jobs = [(peak, peaks, size) for size in product(peaks.batches, peaks.contexts)]
    jobs += [(soak, soaks, method) for method in soaks.soak]
    rows = []
    for job, *options in track(jobs, "memory", console=Console(stderr=True)):
        # A process of its own: memory that the allocator keeps from an earlier cell would hide what
        # this one needs.
        spawn = get_context("spawn")
        with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (threads,)) as apart:
            rows += apart.submit(job, models, *options).result()
    return rows


def peak(models: Models, peaks: Peaks, size: tuple[int, int]) -> list[dict]:
    """Rows of one batch and context."""
    batch, context = size
    pair = models.load()
    engine = Engine(pair, peaks.method)
    draw = random.Random(0)
    requests = {}
    front = [draw.randrange(3, pair.vocab) for _ in range(min(peaks.shared, context))]
    for number in range(batch):
        own = [draw.randrange(3, pair.vocab) for _ in range(context - len(front))]
        prompt = front + own
        requests[number] = Request(prompt, number, peaks.new_tokens)
        engine.check(number, requests[number])
    engine.run({0: Request(requests[0].tokens[:8], 0, 8)})
    before = _forget_peak()
    engine.run(requests)
    resident = _megabytes("VmHWM") - before
    slots = context + peaks.new_tokens + engine.shape.depth + engine.shape.nodes
    caches = batch * slots * sum(map(_cache_bytes, (pair.target, pair.draft))) / 1e6
    name = f"batch {batch}, context {context}"
    needed = {"case": f"keys and values, {name}", "value": caches, "unit": "MB"}
    ratio = {needed["case"]: resident / caches}
    return [needed, {"case": f"peak, {name}", "value": resident, "unit": "MB", "vs": ratio}]


def _cache_bytes(model: Model) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize


def soak(models: Models, soaks: Soaks, method: str) -> list[dict]:
    """Growth and speed of one method."""
    pair = models.load()
    engine, draw, source = Engine(pair, method), random.Random(soaks.seed), _text(pair)
    room = min(pair.target.max_positions, pair.draft.max_positions, 512) - engine.shape.depth
    bounds = len(source) - room, room // 4, room // 8
    starts, sizes, limits = ([draw.randint(1, most) for _ in range(ROUND)] for most in bounds)
    resident, written, began = [], 0, time.perf_counter()
    while written < soaks.tokens:
        # The same prompts and limits in every round, so that what differs is not what had to be
        # decoded.
        requests = {
            i: Request(source[start : start + size], draw.randrange(1 << 40), limit)
            for i, (start, size, limit) in enumerate(zip(starts, sizes, limits, strict=True))
        }
        for i, completion in engine.run(requests, soaks.soak_batch).items():
            check_statistics(completion, requests[i], engine)
            written += len(completion.tokens)
        resident.append((written, _megabytes("VmRSS", give_back=True)))
    seconds = time.perf_counter() - began
    early = next(size for count, size in resident if count >= soaks.tokens / 4)
    return [
        {"case": f"soak {method}, growth", "value": resident[-1][1] - early, "unit": "MB"},
        {"case": f"soak {method}", "value": written / seconds, "unit": "tokens/s"},
    ]


def _text(pair: Pair) -> list[int]:
    """Tokens of many questions in a row, for prompts that begin and end anywhere."""
    task = load_task("sums", split="test", limit=100)
    return [
        token for example in task.examples for token in task.encode(example, pair.tokenizer, 384)
    ]


def check_statistics(completion: Completion, request: Request, engine: Engine) -> None:
    """AssertionError if what a text says of itself does not add up."""
    c, bonus = completion, len(completion.tokens) - completion.accepted
    ended = c.finished or len(c.tokens) == request.new_tokens
    assert (
        ended
        and 0 < len(c.tokens) <= request.new_tokens
        and 0 <= min(c.tokens) <= max(c.tokens) < engine.pair.vocab
    )
    # a step adds its accepted tokens and one bonus token; only the last may end before its bonus
    # token
    assert c.target_calls - 1 <= bonus <= c.target_calls, (
        f"{bonus} bonus tokens of {c.target_calls} steps"
    )
    assert c.accepted == sum(c.accepted_by_depth) <= c.drafted
    assert all(a <= d for a, d in zip(c.accepted_by_depth, c.drafted_by_depth, strict=True))
    assert c.draft_calls == c.target_calls * (engine.depth + engine.leaf)
    assert math.isfinite(c.substitutions) and 0 <= c.substitutions <= len(c.tokens)
    assert 0 <= c.weight_count <= len(c.tokens) and 0 <= c.weight_sum <= c.weight_count


def _forget_peak() -> float:
    """Let the peak begin at what is resident now; that, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _megabytes("VmHWM")


def _megabytes(field: str, give_back: bool = False) -> float:
    """A field of this process' status; give_back: return freed memory to the system first, where
    glibc can.
    """
    if give_back:
        gc.collect()
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6
