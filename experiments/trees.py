"""What the choice of a tree is worth: every method with its best constant shape and with what
chooses before each step.

    python experiments/trees.py --selectors S --latencies L.json

First what `diversed select` found on the contexts of held-out prompts: tokens per second that
latencies predict for the best constant shape, for the network, and for a choice that knows the
labels. Then, unless `prompts` is 0, from decoding test prompts: tokens per call, tokens per second
as latencies predict them for the very steps that were taken, and as measured if the latencies are
this machine's. Intervals are 95 % bootstrap intervals over prompts.

Of methods that draft chains, `confidence` is a chain of at most eight tokens that ends behind the
first one that the draft gave less than some probability.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diversed.benchmarks.bench_decode import check_confidences
from diversed.benchmarks.bench_latency import clock_of
from diversed.benchmarks.workload import Workload
from diversed.commands.bench import measure
from diversed.eval.intervals import percentiles, ratio, resample
from diversed.runtime.completion import Request
from diversed.runtime.drafting import DraftShape
from diversed.runtime.engine import Engine
from diversed.runtime.sampling import Sampling
from diversed.runtime.shape_network import read_selector_card
from diversed.runtime.shapes import Shape, parse_shape
from diversed.selector.latencies import Latencies, read_latencies
from diversed.verifier.methods import METHODS
from rich.console import Console
from rich.progress import track
from torch import Tensor

RESAMPLES = 2000
QUANTILES = torch.arange(1, 10, dtype=torch.float64) / 10


def run(
    work: Workload = Workload(),  # noqa: B008  frozen
    *,
    selectors: str,
    latencies: str,
    prompts: int = 8,
    methods: list[str] = ["token", "block", "specinfer", "kseq", "traversal", "gbv", "univer"],  # noqa: B006
    temperatures: list[float] = [0.3, 0.7, 1.0],  # noqa: B006
    confidences: list[float] = [0.5, 0.95],  # noqa: B006
) -> list[dict]:
    """Rows of a method and temperature: predicted on held-out prompts, then measured.

    Args:
        selectors: folder that `diversed select` wrote.
        latencies: what it was given: a file of `diversed bench latency --json`, or gpu for an
            assumed pair.
        prompts: test texts of every case, decoded one at a time; 0 leaves decoding out.
        methods: of the selectors there.
        temperatures: of the texts that were labelled.
        confidences: each a case of the methods that draft chains.
    """
    check_confidences(confidences)
    costs = read_latencies(latencies)
    rows, shapes = [], {}
    for method in methods:
        for figure in read_selector_card(Path(selectors) / method)["figures"]:
            temperature, base = figure["temperature"], figure["base_shape"]
            if temperature in temperatures:
                shapes[method, temperature] = base
                rows += held_out(f"T={temperature:g} {method}", figure)
    if not prompts:
        return rows
    pair, clock = work.pair(), clock_of(work)
    requests = work.requests(work.prompts(pair, prompts + 1))
    cases = []
    for (method, temperature), base in shapes.items():
        rival = None
        for name, branches in _choices(method, base, selectors, confidences):
            length = parse_shape(base).depth
            sampling = Sampling(temperature)
            engine = Engine(pair, method, "none", length, branches, sampling=sampling)
            engine.selector = Watched(engine.selector, clock)
            cases.append(Case(f"T={temperature:g} {method}", name, method, engine, rival))
            rival = rival or cases[-1]
    # The first text is for what is computed once in a process.
    for number in track(requests, "trees", console=Console(stderr=True)):
        for case in cases:
            case.decode(requests[number], clock, keep=number > 0)
    for case in cases:
        rows += case.rows(costs, measured=not costs.assumed)
    return rows


def _choices(
    method: str, base: str, selectors: str, confidences: list[float]
) -> list[tuple[str, str]]:
    """(name, `branches`) of every case of a method, the best constant shape first."""
    found = [(base, base), ("selector", f"{selectors}/{method}")]
    if METHODS[method].drafting == "chain":
        found += [(f"confidence {least:g}", f"confidence:{least},8") for least in confidences]
    return [*found, ("auto", "auto")] if method == "gbv" else found


def held_out(group: str, figure: dict) -> list[dict]:
    """The rates that `diversed select` found on held-out prompts, beside that of the constant shape."""
    base, rows = figure["base_shape"], []
    for name, rate in ((base, "base"), ("selector", "selector"), ("ideal", "ideal")):
        row = {"case": f"{group} {name}, held out", "unit": "tokens/s predicted"}
        row |= {"value": figure[rate], "vs": {base: figure[rate] / figure["base"]}}
        rows.append(row)
    rows[0]["vs"] = {}
    return rows


def rate_row(
    case: str, unit: str, mine: np.ndarray, rival: np.ndarray | None = None, name: str = ""
) -> dict:
    """A row of tokens per second or call, and its ratio to a rival's on the same prompts.

    mine, rival: [P, 2] what each prompt adds to tokens and to what they are divided by.
    """
    low, high = percentiles(resample(mine, ratio, RESAMPLES))
    row = {"case": case, "unit": unit, "value": float(ratio(mine.sum(0)))}
    row |= {"low": float(low), "high": float(high)}
    if rival is None:
        return row
    both = np.concatenate([mine, rival], 1)
    low, high = percentiles(resample(both, _gain, RESAMPLES))
    gain = {"vs": {name: float(_gain(both.sum(0)))}}
    return row | gain | {"vs_low": float(low), "vs_high": float(high)}


def _gain(sums: np.ndarray) -> np.ndarray:
    """[...] one rate over another, of four sums [..., 4]."""
    return ratio(sums[..., :2]) / ratio(sums[..., 2:])


class Watched:
    """A selector's stand-in: it does what the selector does, and notes what was grown and how long
    the choices took.

    grown:   parents of the tree of every step, if the loop tells the selector.
    seconds: of every call, by what was called.
    """

    def __init__(self, selector, clock: Callable[[], float]):
        self.selector, self.clock = selector, clock
        self.forget()

    def forget(self) -> None:
        self.grown: list[tuple[int, ...]] = []
        self.seconds: dict[str, list[float]] = {"features": [], "select": [], "update": []}

    def __getattr__(self, name: str):
        return getattr(self.selector, name)

    def features(self, context) -> Tensor:
        return self._timed("features", context)

    def select(self, numbers: list[list[float]], active: list[bool]) -> int:
        return self._timed("select", numbers, active)

    def update(self, tree, *rest) -> tuple[Tensor, ...]:
        self.grown.append(tree.parents)
        return self._timed("update", tree, *rest)

    def _timed(self, name: str, *arguments):
        began = self.clock()
        found = getattr(self.selector, name)(*arguments)
        self.seconds[name].append(self.clock() - began)
        return found


@dataclass
class Case:
    """One way of decoding, and what was counted, one entry a text.

    group, name: which method and temperature, and which choice of trees.
    engine:      its selector is `Watched`.
    rival:       the case of the same group with the constant shape; None for that case itself.
    context:     mean tokens before a step.
    grown:       how often each of the engine's shapes was grown.
    choosing:    seconds that the selector took, of all texts.
    """

    group: str
    name: str
    method: str
    engine: Engine
    rival: Case | None
    tokens: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    context: list[float] = field(default_factory=list)
    grown: list[Counter] = field(default_factory=list)
    choosing: float = 0.0

    def decode(self, request: Request, clock: Callable[[], float], keep: bool) -> None:
        """Decode one text; the prefill and the first step are not counted."""
        watched = self.engine.selector
        watched.forget()
        ends, counts = [], []

        def on_step(_: int, new: list[int], ended: bool) -> None:
            ends.append(clock())
            counts.append(len(new))

        (done,) = self.engine.run({0: request}, static=False, on_step=on_step).values()
        if len(ends) < 2 or not keep:
            return
        self.tokens.append(sum(counts[1:]))
        self.calls.append(len(ends) - 1)
        self.seconds.append(ends[-1] - ends[0])
        self.context.append(len(request.tokens) + len(done.tokens) / 2)
        places = {shape.parents: place for place, shape in enumerate(self.engine.shapes)}
        grown = [places[parents] for parents in watched.grown[1:]]
        self.grown.append(Counter(grown or [0] * (len(ends) - 1)))
        self.choosing += sum(sum(taken[1:]) for taken in watched.seconds.values())

    def predicted(self, costs: Latencies) -> list[float]:
        """Seconds of every text if each step took what latencies say of its shape."""
        found = []
        for grown, context in zip(self.grown, self.context, strict=True):
            milliseconds = 0.0
            for index, count in grown.items():
                shape, at = _shape(self.engine.shapes[index]), np.array([context])
                milliseconds += count * costs.step(self.method, shape, at)[0]
            found.append(milliseconds / 1e3)
        return found

    def rows(self, costs: Latencies, measured: bool) -> list[dict]:
        """Tokens per call and per second, against the constant shape; a selector's share of a step."""
        case = f"{self.group} {self.name}"
        predicted = self.predicted(costs)
        rows = [rate_row(case, "tokens/call", self._of(self.calls))]
        theirs = self.rival and self.rival._of(self.rival.predicted(costs))
        rows.append(self._rate(f"{case}, predicted", predicted, theirs))
        if not measured:
            return rows
        slower = sum(self.seconds) / sum(predicted)
        rows[1]["vs"] = rows[1].get("vs", {}) | {"measured": slower}
        theirs = self.rival and self.rival._of(self.rival.seconds)
        rows.append(self._rate(case, self.seconds, theirs))
        if self.name == "selector":
            share = 100 * self.choosing / sum(self.seconds)
            rows.append({"case": f"{case}, choosing", "unit": "% of a step", "value": share})
        return rows

    def _rate(self, case: str, seconds: list[float], theirs: np.ndarray | None) -> dict:
        name = self.rival.name if self.rival else ""
        return rate_row(case, "tokens/s", self._of(seconds), theirs, name)

    def _of(self, spent: list[float]) -> np.ndarray:
        """[P, 2] tokens of every text and what they took."""
        return np.array([self.tokens, spent], dtype=np.float64).T


def _shape(topology: DraftShape) -> Shape:
    """The shape that a topology has."""
    widths = [len(level) for level in topology.levels]
    if widths[-1] == 1:
        return Shape(1, topology.depth)
    trunk = widths.count(1) - 1
    return Shape(widths[-1], topology.depth - trunk, trunk)


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/trees.py")
