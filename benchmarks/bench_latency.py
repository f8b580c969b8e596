"""How long calls of both models and whole steps take on this machine: what a tree costs, for
`diversed select`.

`--json FILE` keeps the rows, and `selector.latencies` reads them. A value is the median of the
turns, its interval the quartiles. With one thread on a CPU the clock is the time that the process
ran, which is wall time if nothing else wants the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from ..runtime.engine import Engine
from ..runtime.forward import Pair
from ..runtime.sampling import Sampling
from ..verifier.methods import METHODS
from .bench_step import milliseconds
from .timing import in_turns, seconds
from .workload import Workload, call_after

SHAPES = ("1", "3", "6", "2x1", "2x4", "4x1+2", "4x4", "3x2+2")


@dataclass(frozen=True)
class Steps:
    """Whose steps are timed.

    Args:
        methods: whose steps are timed.
        relaxation: of these steps: none, ensemble:0.3, a bundle folder, ...
        shapes: of these steps, PATHSxLENGTH+TRUNK; those that branch are left out for token and
            block.
        step_repetitions: texts of every step's case, in turns.
        temperature: of both models, in these steps.
    """

    methods: list[str] = field(
        default_factory=lambda: "token block specinfer kseq traversal gbv univer".split()
    )
    relaxation: str = "none"
    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    step_repetitions: int = 5
    temperature: float = 1.0


def run(
    work: Workload = Workload(),  # noqa: B008  frozen
    steps: Steps = Steps(),  # noqa: B008  frozen
    *,
    contexts: list[int] = [32, 128, 256],  # noqa: B006
    tokens: list[int] = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33],  # noqa: B006
    repetitions: int = 30,
) -> list[dict]:
    """Rows of calls (context, tokens) and of steps (method, shape), milliseconds at batch 1.

    Args:
        contexts: tokens before a timed call.
        tokens: tokens of a timed call.
        repetitions: of every call, in turns.
    """
    pair, clock = work.pair(), clock_of(work)
    calls = {}
    for role, model in (("draft", pair.draft), ("target", pair.target)):
        for context, count in product(contexts, tokens):
            calls[role, context, count] = call_after(model, [0] * context, count)
    taken = in_turns(calls, lambda call, _: 1e3 * seconds(call, clock=clock), repetitions, "calls")
    rows = []
    for (role, context, count), found in taken.items():
        about = {"role": role, "context": context, "tokens": count}
        rows.append(_row(f"{role}, {count} tokens after {context}", found) | about)
    return rows + timed_steps(pair, steps, work)


def timed_steps(pair: Pair, steps: Steps, work: Workload) -> list[dict]:
    """Rows of steps (method, shape)."""
    engines, sampling = {}, Sampling(steps.temperature)
    for method, shape in product(steps.methods, steps.shapes):
        if METHODS[method].drafting != "chain" or "x" not in shape:
            way = method, steps.relaxation
            engines[method, shape] = Engine(pair, *way, branches=shape, sampling=sampling)
    prompts = work.prompts(pair, steps.step_repetitions + 1)
    clock = clock_of(work)

    def step(engine: Engine, turn: int) -> float:
        return milliseconds(engine, work.requests(prompts[turn : turn + 1], turn), clock)

    middle = statistics.mean(map(len, prompts)) + work.max_new_tokens / 2
    rows = []
    for (method, shape), found in in_turns(engines, step, steps.step_repetitions, "steps").items():
        about = {"role": "step", "method": method, "shape": shape, "context": middle}
        rows.append(_row(f"step, {method} {shape}", found) | about)
    return rows


def clock_of(work: Workload) -> Callable[[], float]:
    """Seconds: of the process with one thread on a CPU, else of the wall."""
    alone = work.device == "cpu" and work.threads == 1
    return time.process_time if alone else time.perf_counter


def _row(case: str, found: list[float]) -> dict:
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return {"case": case, "value": middle, "unit": "ms", "low": low, "high": high}
