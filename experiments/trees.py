"""What the choice of a tree is worth: every method with its best constant shape and with what
chooses before each step.

From labels alone, on the contexts of held-out prompts: tokens per second that latencies predict for
the best constant shape, for an entropy threshold, for the network of `diversed select` and for a
choice that knows the labels. The constant shape, and the threshold with its two shapes, are the
best on the training contexts. Intervals are 95 % bootstrap intervals over prompts.

Where chains are drafted, `confidence` is one of at most eight tokens that ends behind the first
that the draft gave less than some probability. That is decided while the chain is drawn, so that
labels of shapes say nothing of it.

From decoding test prompts, unless `prompts` is 0: block efficiency, tokens per second as latencies
predict them for the very steps that were taken, and as measured, where the latencies are this
machine's.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diversed.benchmarks.bench_decode import check_confidences
from diversed.benchmarks.bench_latency import clock_of
from diversed.benchmarks.workload import Workload
from diversed.commands.bench import measure
from diversed.data.tasks import DataOptions
from diversed.eval.intervals import ratio_of_sums
from diversed.runtime.choosers import SCALARS, load_network, parse_shape, read_selector_card
from diversed.runtime.completion import Request
from diversed.runtime.engine import Engine
from diversed.runtime.sampling import Sampling
from diversed.selector.latency import Latencies, read_latencies, simulated
from diversed.selector.training import GPU, Contexts, SelectorModule, contexts, settled
from diversed.verifier.methods import METHODS
from rich.console import Console
from rich.progress import track
from torch import Tensor

RESAMPLES = 2000
QUANTILES = torch.arange(1, 10, dtype=torch.float64) / 10


def run(
    *,
    selectors: str,
    latencies: str,
    labels: str | None = None,
    target: str = "sums-target",
    draft: str = "sums-draft",
    dtype: str = "auto",
    device: str = "cpu",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    prompt: str | None = None,
    prompts: int = 8,
    methods: list[str] = [  # noqa: B006
        "token",
        "block",
        "specinfer",
        "kseq",
        "traversal",
        "gbv",
        "univer",
    ],  # noqa: B006
    temperatures: list[float] = [0.3, 0.7, 1.0],  # noqa: B006
    confidences: list[float] = [0.5, 0.95],  # noqa: B006
    max_new_tokens: int = 48,
    seed: int = 0,
    threads: int = 1,
) -> list[dict]:
    """Rows of a method and temperature: predicted on held-out contexts, then measured.

    Args:
        selectors: folder that `diversed select` wrote.
        latencies: what it was given: a file of `diversed bench latency --json`, or gpu for an
            assumed pair.
        labels: folder of its labels, by default SELECTORS/labels.
        target: folder, hub name or .gguf file of the model being served.
        draft: folder, hub name or .gguf file of the cheap model.
        dtype: auto, float32, bfloat16 or float16.
        device: where both run.
        task: where test prompts come from.
        data: where the task's rows come from.
        prompt: continue this text with different seeds, instead of a task's prompts.
        prompts: test texts of every case, decoded one at a time; 0 leaves decoding out.
        methods: of the selectors there.
        temperatures: of the labels there.
        confidences: each a case of the methods that draft chains.
        max_new_tokens: tokens of a test text.
        seed: of test prompts and texts.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    check_confidences(confidences)
    costs = simulated() if latencies == GPU else read_latencies(latencies)
    folders = [Path(labels or f"{selectors}/labels") / f"T={t:g}" for t in temperatures]
    rows, shapes = [], {}
    for method in methods:
        card = read_selector_card(Path(selectors) / method)
        settings = card["settings"]
        known = contexts(folders, method, costs, settings["validation"], settings["seed"])
        module = SelectorModule(known, 0.0, 0.0, settings["width"])
        load_network(Path(selectors) / method, module.network)
        rows += _predicted(method, known, *settled(known, module.choice(), card), seed)
        for temperature in temperatures:
            base = known.base[known.temperature == temperature][0]
            shapes[method, temperature] = str(known.shapes[int(base)])
    if not prompts:
        return rows
    work = Workload(
        target, draft, dtype, device, task, data, prompt, max_new_tokens, seed, threads
    )
    pair, clock = work.pair(), clock_of(work)
    requests = work.requests(work.prompts(pair, prompts + 1)).values()
    cases = [
        _Case(
            method,
            temperature,
            name,
            Engine(
                pair,
                method,
                draft_length=parse_shape(base).depth,
                branches=branches,
                sampling=Sampling(temperature),
            ),
        )
        for (method, temperature), base in shapes.items()
        for name, branches in _choices(method, base, selectors, confidences)
    ]
    for number, request in enumerate(track(list(requests), "trees", console=Console(stderr=True))):
        for case in cases:
            case.decode(request, clock, keep=number > 0)
    for case in cases:
        rows += case.rows(cases, costs, measured=latencies != GPU)
    return rows


def _choices(
    method: str, base: str, selectors: str, confidences: list[float]
) -> list[tuple[str, str]]:
    found = [(base, base), ("selector", f"{selectors}/{method}")]
    if METHODS[method].drafting == "chain":
        found += [(f"confidence {least:g}", f"confidence:{least},8") for least in confidences]
    return [*found, ("auto", "auto")] if method == "gbv" else found


def entropy_choice(known: Contexts, temperature: float) -> Tensor:
    """[S] a shape for every context of a temperature: of two, by the draft's entropy at the root,
    as they are best on the training contexts.
    """
    here = (known.temperature == temperature) & ~known.held
    entropy = known.scalars[:, SCALARS.index("root_entropy")].double()
    least, choice = float("inf"), known.base
    for threshold in torch.quantile(entropy[here], QUANTILES):
        low, high = here & (entropy <= threshold), here & (entropy > threshold)
        (below, first), (above, second) = (known.cost[part].sum(0).min(0) for part in (low, high))
        if below + above < least:
            least, choice = below + above, torch.where(entropy <= threshold, first, second)
    return choice


def _predicted(
    method: str, known: Contexts, learned: Tensor, choosing: Tensor, seed: int
) -> list[dict]:
    """One row a choice and temperature on held-out prompts; choosing: [S] seconds that the learned
    one takes.
    """
    rows = []
    for temperature in known.temperature.unique().tolist():
        here = known.held & (known.temperature == temperature)
        shape = str(known.shapes[int(known.base[here][0])])
        choices = {
            shape: (known.base, 0.0),
            "entropy": (entropy_choice(known, temperature), 0.0),
            "selector": (learned, choosing[here]),
            "ideal": (known.cost.argmin(1), 0.0),
        }
        rates, per_call = _resampled(known, choices, here, seed)
        for name, values in rates.items():
            gain = values / rates[shape]
            row = {
                "case": f"T={temperature:g} {method} {name}, held out",
                "value": float(values[0]),
                "unit": "tokens/s predicted",
                "low": _quantile(values, 0.025),
                "high": _quantile(values, 0.975),
                "tokens_per_call": float(per_call[name][0]),
            }
            if name != shape:
                row |= {
                    "vs": {shape: float(gain[0])},
                    "vs_low": _quantile(gain, 0.025),
                    "vs_high": _quantile(gain, 0.975),
                }
            rows.append(row)
    return rows


def _resampled(
    known: Contexts, choices: dict[str, tuple[Tensor, Tensor | float]], here: Tensor, seed: int
):
    """name -> [1 + RESAMPLES] tokens per second, and per call: of all held-out prompts, then of
    resampled ones.

    choices: name -> (shapes [S], seconds that choosing takes at the contexts `here`).
    """
    prompts, owner = known.prompt[here].unique(return_inverse=True)
    weights = torch.ones(1 + RESAMPLES, len(prompts), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(prompts), (RESAMPLES, len(prompts)), generator=generator)
    weights[1:] = torch.zeros(RESAMPLES, len(prompts), dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )

    def sums(values: Tensor) -> Tensor:
        return weights @ torch.zeros(len(prompts), dtype=torch.float64).index_add(
            0, owner, values.double()
        )

    rates, per_call = {}, {}
    for name, (choice, choosing) in choices.items():
        at = choice[here].unsqueeze(1)
        tokens, steps = (
            sums(torch.ones(len(at))),
            1 / known.efficiency[here].double().gather(1, at)[:, 0],
        )
        rates[name] = tokens / sums(known.cost[here].gather(1, at)[:, 0] + steps * choosing)
        per_call[name] = tokens / sums(steps)
    return rates, per_call


def _quantile(values: Tensor, share: float) -> float:
    return float(torch.quantile(values[1:], share))


@dataclass
class _Case:
    """One way of decoding; of every text tokens, calls, seconds, mean context and how often each
    shape was grown. The first text is for what is computed once a process.
    """

    method: str
    temperature: float
    name: str
    engine: Engine
    tokens: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    context: list[float] = field(default_factory=list)
    grown: list[Counter] = field(default_factory=list)
    choosing: float = 0.0

    def decode(self, request: Request, clock, keep: bool) -> None:
        """Decode one text; the prefill and the first step are not counted."""
        ends, counts, looked, chosen, remembered, grown = [], [], [], [], [], []
        selector = self.engine.selector
        selector.features = _watched(selector.features, looked, clock)
        selector.select = _watched(selector.select, chosen, clock)
        watched = _watched(selector.update, remembered, clock)

        def remember(tree, *rest):
            grown.append(tree.parents)
            return watched(tree, *rest)

        selector.update = remember
        (done,) = self.engine.run(
            {0: request},
            static=False,
            on_step=lambda _, new, __: (ends.append(clock()), counts.append(len(new))),
        ).values()
        del selector.features, selector.select, selector.update
        if len(ends) < 2 or not keep:
            return
        self.tokens.append(sum(counts[1:]))
        self.calls.append(len(ends) - 1)
        self.seconds.append(ends[-1] - ends[0])
        self.context.append(len(request.tokens) + len(done.tokens) / 2)
        places = {shape.parents: place for place, shape in enumerate(self.engine.shapes)}
        self.grown.append(Counter([places[tree] for tree in grown[1:]] or [0] * (len(ends) - 1)))
        self.choosing += sum(taken for _, taken in looked[1:] + chosen[1:] + remembered[1:])

    def predicted(self, costs: Latencies) -> list[float]:
        """Seconds of every text if its steps took what latencies say of their shapes at its mean
        context.
        """
        return [
            sum(
                count
                * costs.step(self.method, _shape(self.engine, index), np.array([context]))[0]
                / 1e3
                for index, count in grown.items()
            )
            for grown, context in zip(self.grown, self.context, strict=True)
        ]

    def rows(self, cases: list[_Case], costs: Latencies, measured: bool) -> list[dict]:
        """Tokens per call and per second, against the constant shape; a selector's share of a step."""
        case = f"T={self.temperature:g} {self.method} {self.name}"
        rival = next(
            c for c in cases if (c.method, c.temperature) == (self.method, self.temperature)
        )
        predicted = self.predicted(costs)
        rows = [{"case": case, "unit": "tokens/call", **_interval(self.tokens, self.calls)}]
        row = {
            "case": f"{case}, predicted",
            "unit": "tokens/s",
            **_interval(self.tokens, predicted),
        }
        rows.append(row | _versus(self.tokens, predicted, rival, rival.predicted(costs)))
        if measured:
            rows[1]["vs"] = rows[1].get("vs", {}) | {"measured": sum(self.seconds) / sum(predicted)}
            row = {"case": case, "unit": "tokens/s", **_interval(self.tokens, self.seconds)}
            rows.append(row | _versus(self.tokens, self.seconds, rival, rival.seconds))
        if self.name == "selector" and measured:
            share = 100 * self.choosing / sum(self.seconds)
            rows.append({"case": f"{case}, choosing", "unit": "% of a step", "value": share})
        return rows


def _interval(tokens: list[int], spent: list[float]) -> dict[str, float]:
    return dict(zip(("value", "low", "high"), ratio_of_sums(tokens, spent, RESAMPLES), strict=True))


def _versus(tokens: list[int], seconds: list[float], rival: _Case, its: list[float]) -> dict:
    """The ratio of two rates with its 95 % interval, over the same texts' prompts; nothing for the
    rival itself.
    """
    if tokens is rival.tokens:
        return {}
    drawn = torch.randint(
        len(tokens), (RESAMPLES, len(tokens)), generator=torch.Generator().manual_seed(0)
    )
    sums = [
        torch.tensor(column, dtype=torch.float64)[drawn].sum(1)
        for column in (tokens, seconds, rival.tokens, its)
    ]
    ratios = sums[0] / sums[1] * sums[3] / sums[2]
    value = sum(tokens) / sum(seconds) * sum(its) / sum(rival.tokens)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"vs": {rival.name: value}, "vs_low": low, "vs_high": high}


def _watched(function, kept: list, clock):
    """The function, whose results and seconds are added to `kept`."""

    def call(*arguments):
        began = clock()
        found = function(*arguments)
        kept.append((found, clock() - began))
        return found

    return call


def _shape(engine: Engine, index: int):
    """The shape that a topology has."""
    topology = engine.shapes[index]
    widths = [
        last - first for first, last in zip(topology.bounds, topology.bounds[1:], strict=False)
    ]
    paths = widths[-1]
    trunk = widths.count(1) - 1 if paths > 1 else 0
    return parse_shape(f"{paths}x{len(widths) - 1 - trunk}+{trunk}")


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/trees.py")
