"""How long calls of both models and whole steps take on this machine: what a tree costs, for
`diversed select`.

`--json FILE` keeps the rows, and `runtime.latency` reads them. Cases take turns, so that a busy
machine slows all alike; a value is the median, its interval the quartiles. With one thread on a CPU
the clock is the time that the process ran, which is wall time where nothing else wants the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track

from ..data.tasks import DataOptions
from ..runtime.completion import Request
from ..runtime.engine import Engine
from ..runtime.model import Model, load_pair
from ..runtime.sampling import Sampling
from ..selector.labels import CHAINS
from .efficiency import encoded_prompts


def run(
    *,
    target: str = "sums-target",
    draft: str = "sums-draft",
    dtype: str = "auto",
    device: str = "cpu",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    prompt: str | None = None,
    methods: list[str] = [  # noqa: B006
        "token",
        "block",
        "specinfer",
        "kseq",
        "traversal",
        "gbv",
        "univer",
    ],  # noqa: B006
    relaxation: str = "none",
    shapes: list[str] = ["1", "3", "6", "2x1", "2x4", "4x1+2", "4x4", "3x2+2"],  # noqa: B006
    contexts: list[int] = [32, 128, 256],  # noqa: B006
    tokens: list[int] = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33],  # noqa: B006
    repetitions: int = 30,
    step_repetitions: int = 5,
    max_new_tokens: int = 48,
    temperature: float = 1.0,
    seed: int = 0,
    threads: int = 1,
) -> list[dict]:
    """Rows of calls (context, tokens) and of steps (method, shape), milliseconds at batch 1.

    Args:
        target: folder, hub name or .gguf file of the model being served.
        draft: folder, hub name or .gguf file of the cheap model.
        dtype: auto, float32, bfloat16 or float16.
        device: where both run.
        task: where the prompts of timed steps come from.
        data: where the task's rows come from.
        prompt: continue this text instead of a task's prompts.
        methods: whose steps are timed.
        relaxation: of these steps: none, ensemble:0.3, a bundle folder, ...
        shapes: of these steps, PATHSxLENGTH+TRUNK; those that branch are left out for token and
            block.
        contexts: tokens before a timed call.
        tokens: tokens of a timed call.
        repetitions: of every call, in turns.
        step_repetitions: texts of every step's case, in turns.
        max_new_tokens: tokens of these texts.
        temperature: of both models.
        seed: of prompts and texts.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    pair = load_pair(target, draft, dtype, device)
    clock = clock_of(device, threads)
    rows = _calls(
        {"draft": pair.draft, "target": pair.target}, contexts, tokens, repetitions, clock
    )
    encoded = encoded_prompts(pair, task, data, prompt, step_repetitions + 1, seed)
    cases = [
        (
            method,
            shape,
            Engine(pair, method, relaxation, branches=shape, sampling=Sampling(temperature)),
        )
        for method in methods
        for shape in shapes
        if method not in CHAINS or "x" not in shape
    ]
    taken: dict[int, list[float]] = {place: [] for place in range(len(cases))}
    for turn in track(range(len(encoded)), "steps", console=Console(stderr=True)):
        for place, (_, _, engine) in enumerate(cases):
            request = Request(encoded[turn], (seed << 20) + turn, max_new_tokens)
            taken[place].append(_step(engine, request, clock))
    middle = statistics.mean(map(len, encoded)) + max_new_tokens / 2
    for place, (method, shape, _) in enumerate(cases):
        row = _row(f"step, {method} {shape}", taken[place][1:])
        rows.append(row | {"role": "step", "method": method, "shape": shape, "context": middle})
    return rows


def clock_of(device: str, threads: int) -> Callable[[], float]:
    """Seconds: of the process with one thread on a CPU, else of the wall."""
    return time.process_time if device == "cpu" and threads == 1 else time.perf_counter


def _calls(
    models: dict[str, Model], contexts, tokens, repetitions: int, clock: Callable[[], float]
) -> list[dict]:
    cases = [(role, context, count) for role in models for context in contexts for count in tokens]
    calls = [_call(models[role], context, count) for role, context, count in cases]
    taken: list[list[float]] = [[] for _ in cases]
    for _ in track(range(repetitions + 1), "calls", console=Console(stderr=True)):
        for call, seconds in zip(calls, taken, strict=True):
            began = clock()
            call()
            seconds.append(1e3 * (clock() - began))
    return [
        _row(f"{role}, {count} tokens after {context}", seconds[1:])
        | {
            "role": role,
            "context": context,
            "tokens": count,
        }
        for (role, context, count), seconds in zip(cases, taken, strict=True)
    ]


def _call(model: Model, context: int, count: int) -> Callable[[], object]:
    """One call on `count` tokens after `context` others; each writes over what the one before
    wrote.
    """
    cache, device = model.cache(context + count), model.device
    tokens = torch.zeros(1, context + count, dtype=torch.long, device=device)
    positions = torch.arange(context + count, device=device).unsqueeze(0)
    model(tokens[:, :context], positions[:, :context], None, cache, 0)
    return lambda: (
        model(tokens[:, context:], positions[:, context:], None, cache, context)
        .logits[0, 0, 0]
        .item()
    )


def _step(engine: Engine, request: Request, clock: Callable[[], float]) -> float:
    """Milliseconds of a step of one text, its prefill and its first step left out."""
    ends: list[float] = []
    engine.run({0: request}, static=False, on_step=lambda *_: ends.append(clock()))
    return 1e3 * (ends[-1] - ends[0]) / max(len(ends) - 1, 1)


def _row(case: str, milliseconds: list[float]) -> dict:
    low, middle, high = (
        statistics.quantiles(milliseconds, n=4) if len(milliseconds) > 1 else milliseconds * 3
    )
    return {"case": case, "value": middle, "unit": "ms", "low": low, "high": high}
