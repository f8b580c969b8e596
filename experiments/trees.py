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
from diversed.runtime.choosers import Selector
from diversed.runtime.completion import Request
from diversed.runtime.engine import Engine
from diversed.runtime.sampling import Sampling
from diversed.runtime.shape_network import read_selector_card
from diversed.runtime.shapes import Shape, parse_shape
from diversed.selector.latencies import Latencies, read_latencies
from diversed.verifier.methods import METHODS
from diversed.verifier.tree import topology
from rich.console import Console
from rich.progress import track

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
            cases.append(Case(f"T={temperature:g} {method} {name}", method, engine, costs, rival))
            rival = rival or cases[-1]
    # The first text is for what is computed once in a process.
    for number in track(requests, "trees", console=Console(stderr=True)):
        for case in cases:
            case.decode(requests[number], clock, keep=number > 0)
    for case in cases:
        rows += case.rows()
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
    """The rates that `diversed select` found on held-out prompts."""
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
    seconds: of all calls.
    """

    def __init__(self, selector: Selector, clock: Callable[[], float]):
        self.selector, self.clock = selector, clock
        self.forget()

    def forget(self) -> None:
        self.grown: list[tuple[int, ...]] = []
        self.seconds = 0.0

    def __getattr__(self, name: str):
        return getattr(self.selector, name)

    def features(self, *context):
        return self._timed(self.selector.features, *context)

    def select(self, *features):
        return self._timed(self.selector.select, *features)

    def update(self, tree, *rest):
        self.grown.append(tree.parents)
        return self._timed(self.selector.update, tree, *rest)

    def _timed(self, function: Callable, *arguments):
        began = self.clock()
        found = function(*arguments)
        self.seconds += self.clock() - began
        return found


@dataclass
class Case:
    """One way of decoding, and what was counted, one entry a text.

    engine:  its selector is `Watched`.
    rival:   the case of the same method and temperature with the constant shape; None for that case
        itself.
    texts:   (tokens, steps, seconds, seconds as latencies predict them), without the prefill and
        the first step.
    choosing: seconds that the selector took.
    """

    name: str
    method: str
    engine: Engine
    costs: Latencies
    rival: Case | None
    texts: list[tuple[float, ...]] = field(default_factory=list)
    choosing: float = 0.0

    def decode(self, request: Request, clock: Callable[[], float], keep: bool) -> None:
        watched, ends, counts = self.engine.selector, [], []

        def on_step(_: int, new: list[int], ended: bool) -> None:
            if not ends:
                watched.forget()
            ends.append(clock())
            counts.append(len(new))

        (done,) = self.engine.run({0: request}, static=False, on_step=on_step).values()
        steps = len(ends) - 1
        if steps < 1 or not keep:
            return
        grown = Counter(watched.grown or [self.engine.shapes[0].parents] * steps)
        context = np.array([len(request.tokens) + len(done.tokens) / 2])
        spent = 0.0
        for parents, count in grown.items():
            spent += count * self.costs.step(self.method, _shape(parents), context)[0] / 1e3
        self.texts.append((sum(counts[1:]), steps, ends[-1] - ends[0], spent))
        self.choosing += watched.seconds

    def rows(self) -> list[dict]:
        """Tokens per call and per second, and the selector's part of a step."""
        rows = [rate_row(self.name, "tokens/call", self._per(1))]
        rows.append(self._rate(f"{self.name}, predicted", 3))
        if self.costs.assumed:
            return rows
        *_, seconds, predicted = np.sum(self.texts, 0)
        rows[1]["vs"] = rows[1].get("vs", {}) | {"measured": seconds / predicted}
        rows.append(self._rate(self.name, 2))
        if self.name.endswith("selector"):
            part = 100 * self.choosing / seconds
            rows.append({"case": f"{self.name}, choosing", "unit": "% of a step", "value": part})
        return rows

    def _rate(self, case: str, column: int) -> dict:
        if not self.rival:
            return rate_row(case, "tokens/s", self._per(column))
        rival = self.rival.name.rsplit(" ", 1)[1]
        return rate_row(case, "tokens/s", self._per(column), self.rival._per(column), rival)

    def _per(self, column: int) -> np.ndarray:
        """[P, 2] tokens of every text, and what they are divided by."""
        return np.array(self.texts, dtype=np.float64)[:, [0, column]]


def _shape(parents: tuple[int, ...]) -> Shape:
    """The shape of the tree with these parents."""
    tree = topology(parents)
    widths = [len(level) for level in tree.levels]
    if widths[-1] == 1:
        return Shape(1, tree.depth)
    trunk = widths.count(1) - 1
    return Shape(widths[-1], tree.depth - trunk, trunk)


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/trees.py")
