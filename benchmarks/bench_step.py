"""Where a step goes: the share of it outside the two models, its stages, and what capturing saves.

A step is everything after the prefill. Time inside the models is the time of their calls, as the
loop makes them. With DIVERSED_LEAN=0 in the environment the calls go through transformers' modules.
With `captured` the same steps are also taken at fixed shapes, as CUDA graphs on a GPU. A CPU takes
them uncaptured and uncompiled, which only shows that they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..runtime.completion import Request
from ..runtime.engine import STAGES, Engine
from ..runtime.forward import Model, Pair
from ..runtime.sampling import Sampling
from .timing import in_turns, row
from .workload import Workload


def run(
    work: Workload = Workload(),  # noqa: B008  frozen
    *,
    methods: list[str] = ["plain", "token", "block", "traversal"],  # noqa: B006
    relaxation: str = "none",
    draft_length: int = 3,
    batches: list[int] = [1, 16],  # noqa: B006
    captured: bool = False,
    repetitions: int = 5,
    temperature: float = 1.0,
) -> list[dict]:
    """For every method and batch: the share outside the models, and the milliseconds of a step and
    of its stages.

    Args:
        methods: `plain` and verification methods.
        relaxation: of all methods but plain: none, ensemble:0.3, a bundle folder, ...
        draft_length: tokens on a drafted path.
        batches: prompts decoded together.
        captured: also time the same steps at fixed shapes, which a GPU captures.
        repetitions: of every case, in turns; a row is the median, its interval the lowest and the
            highest.
        temperature: of both models.
    """
    pair = work.pair()
    rules = [(method, "none" if method == "plain" else relaxation) for method in methods]
    sampling = Sampling(temperature)
    requests = work.requests(work.prompts(pair, max(batches)))
    rows = []
    for batch in batches:
        first = {number: requests[number] for number in range(batch)}
        timed = replace(pair, target=_Timed(pair.target), draft=_Timed(pair.draft))
        rows += shares(engines(timed, rules, draft_length, sampling), first, repetitions)
        if captured:
            rows += gains(engines(pair, rules, draft_length, sampling), first, repetitions)
    return rows


def engines(
    pair: Pair, rules: list[tuple[str, str]], draft_length: int, sampling: Sampling
) -> dict[str, Engine]:
    """name -> the engine of every (method, relaxation)."""
    made = {}
    for method, rule in rules:
        name = method if rule == "none" else f"{rule}+{method}"
        made[name] = Engine(pair, method, rule, draft_length, sampling=sampling)
    return made


def shares(made: dict[str, Engine], requests: dict[int, Request], repetitions: int) -> list[dict]:
    """Rows of every engine of a pair of `_Timed` models: the share outside them, and the stages."""
    rows = []
    turns = in_turns(made, lambda engine, _: _measure(engine, requests), repetitions, "shares")
    for name, found in turns.items():
        case = f"{name}, batch {len(requests)}"
        rows += [row(case, [one[unit] for one in found], unit) for unit in found[0]]
    return rows


def gains(made: dict[str, Engine], requests: dict[int, Request], repetitions: int) -> list[dict]:
    """Two rows of every engine: milliseconds of a step of the loop, and of the captured one."""
    cases = {}
    for name, engine in made.items():
        for way, static in (("loop", False), ("captured", True)):
            cases[f"{name}, batch {len(requests)}, {way}"] = engine, static
    found = in_turns(
        cases,
        lambda case, _: milliseconds(case[0], requests, time.perf_counter, static=case[1]),
        repetitions,
        "captured steps",
    )
    rows = [row(case, values, "ms/step", vs={}) for case, values in found.items()]
    for loop, captured in zip(rows[::2], rows[1::2], strict=True):
        captured["vs"] = {"loop": captured["value"] / loop["value"]}
    return rows


def milliseconds(
    engine: Engine,
    requests: dict[int, Request],
    clock: Callable[[], float],
    static: bool = False,
) -> float:
    """Mean milliseconds of a step; the prefill and the first step are left out."""
    ends: list[float] = []
    done = engine.run(requests, on_step=lambda *_: ends.append(clock()), static=static)
    steps = max(completion.target_calls for completion in done.values())
    return 1e3 * (ends[-1] - ends[0]) / max(steps - 1, 1)


@dataclass
class _Timed:
    """A model that adds up the seconds of a step's calls, `run`; a prefill is a plain call."""

    model: Model
    seconds: float = 0.0

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, *args, **keywords):
        return self.model(*args, **keywords)

    def run(self, *args, **keywords):
        start = time.perf_counter()
        out = self.model.run(*args, **keywords)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        return out


def _measure(engine: Engine, requests: dict[int, Request]) -> dict[str, float]:
    """Figures of one batch: the percentage of its steps' time outside the models, and the
    milliseconds of a step and of each stage.
    """
    models = (engine.pair.target, engine.pair.draft)
    before = sum(model.seconds for model in models)
    engine.seconds = dict.fromkeys(STAGES, 0.0)
    done = engine.run(requests, static=False)  # captured calls could not be timed
    del engine.seconds["prefill"]
    total = sum(engine.seconds.values())
    steps = max(completion.target_calls for completion in done.values())
    inside = sum(model.seconds for model in models) - before
    found = {
        "% of a step outside the models": 100 * (1 - inside / total),
        "ms a step": 1e3 * total / steps,
    }
    for stage, took in engine.seconds.items():
        if took:
            found[f"ms a step, {stage}"] = 1e3 * took / steps
    return found
