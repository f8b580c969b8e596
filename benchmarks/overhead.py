"""The share of a step that is spent outside the two models: drawing, verifying, committing, and
what surrounds a call.

A step is everything after the prefill. Time inside the models is the time of their calls, as the
loop makes them. With DIVERSED_LEAN=0 in the environment the calls go through transformers' modules.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import track

from ..data.tasks import DataOptions
from ..runtime.completion import Request
from ..runtime.engine import STAGES, Engine
from ..runtime.model import Model, load_pair
from ..runtime.sampling import Sampling
from .efficiency import encoded_prompts


@dataclass
class _Timed:
    """A model that adds up the seconds of its calls, those of the prefill left out."""

    model: Model
    seconds: float = 0.0

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, *args, last_only: bool = False, **keywords):
        start = time.perf_counter()
        out = self.model(*args, last_only=last_only, **keywords)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        if not last_only:
            self.seconds += time.perf_counter() - start
        return out


def run(
    *,
    target: str = "sums-target",
    draft: str = "sums-draft",
    dtype: str = "auto",
    device: str = "cpu",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    prompt: str | None = None,
    methods: list[str] = ["plain", "token", "block", "traversal"],  # noqa: B006
    relaxation: str = "none",
    draft_length: int = 3,
    batches: list[int] = [1, 16],  # noqa: B006
    max_new_tokens: int = 48,
    repetitions: int = 5,
    temperature: float = 1.0,
    seed: int = 0,
    threads: int = 1,
) -> list[dict]:
    """For every method and batch: the share outside the models, and the milliseconds of a step and
    of its stages.

    Args:
        target: folder, hub name or .gguf file of the model being served.
        draft: folder, hub name or .gguf file of the cheap model.
        dtype: auto, float32, bfloat16 or float16.
        device: where both run.
        task: where prompts come from.
        data: where the task's rows come from.
        prompt: continue this text with different seeds, instead of a task's prompts.
        methods: `plain` and verification methods.
        relaxation: of all methods but plain: none, ensemble:0.3, a bundle folder, ...
        draft_length: tokens on a drafted path.
        batches: prompts decoded together.
        max_new_tokens: tokens a text may have.
        repetitions: of every case, in turns; the figures are medians, the interval the lowest and
            the highest.
        temperature: of both models.
        seed: of prompts and texts.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    pair = load_pair(target, draft, dtype, device)
    encoded = encoded_prompts(pair, task, data, prompt, max(batches), seed)
    timed = replace(pair, target=_Timed(pair.target), draft=_Timed(pair.draft))
    cases = {(method, batch): [] for batch in batches for method in methods}
    for _ in track(range(repetitions + 1), "overhead", console=Console(stderr=True)):
        for (method, batch), found in cases.items():
            rule = "none" if method == "plain" else relaxation
            engine = Engine(timed, method, rule, draft_length, sampling=Sampling(temperature))
            requests = {
                i: Request(encoded[i], (seed << 20) + i, max_new_tokens) for i in range(batch)
            }
            found.append(_measure(engine, requests))
    return [
        row for (method, batch), found in cases.items() for row in _rows(method, batch, found[1:])
    ]


def _measure(engine: Engine, requests: dict[int, Request]) -> dict[str, float]:
    """Of one batch: the percentage of its steps' time outside the models, and milliseconds a step,
    stage by stage.
    """
    models = (engine.pair.target, engine.pair.draft)
    before = sum(model.seconds for model in models)
    engine.seconds = dict.fromkeys(STAGES, 0.0)
    done = engine.run(requests, static=False)  # captured calls could not be timed
    del engine.seconds["prefill"]
    total, steps = (
        sum(engine.seconds.values()),
        max(completion.target_calls for completion in done.values()),
    )
    inside = sum(model.seconds for model in models) - before
    found = {
        "% of a step outside the models": 100 * (1 - inside / total),
        "ms a step": 1e3 * total / steps,
    }
    return found | {
        f"ms a step, {stage}": 1e3 * took / steps for stage, took in engine.seconds.items() if took
    }


def _rows(method: str, batch: int, found: list[dict[str, float]]) -> list[dict]:
    columns = {unit: [row[unit] for row in found] for unit in found[0]}
    return [
        {
            "case": f"{method}, batch {batch}",
            "value": statistics.median(values),
            "unit": unit,
            "low": min(values),
            "high": max(values),
        }
        for unit, values in columns.items()
    ]
