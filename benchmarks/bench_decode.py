"""Tokens per second of decoding: our own loop, method by method, beside transformers' `generate` in
the same run.

Every case continues the same prompts with the same weights, temperature, lengths and threads; plain
decoding and transformers are cases like any other. First each speculative case finds on prompts of
its own how long its drafts are: a number of tokens or, in cases called `+confidence`, as many or
fewer, up to a token that the draft gave less than some probability; transformers' assisted
generation may choose among all of these. Then the cases take turns, one repetition each, so that a
busy machine slows all alike: a value is the median of the repetitions, its interval the lowest and
the highest, and a ratio the median of the ratios of one repetition.

A learned verifier's gain over exact verification has a second row, `predicted`: what the tokens per
target call allow if a step costs one target call and its draft calls and nothing else.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from ..runtime.engine import Engine
from ..runtime.forward import Pair
from ..runtime.sampling import Sampling
from ..verifier.methods import METHODS
from .timing import in_turns, row, seconds
from .workload import Workload, call_after

# Ratios that are printed beside a case, if the other one is in the run too.
RIVALS = {
    "token": ("plain", "transformers assisted"),
    "block": ("plain", "token", "transformers assisted"),
    "token+confidence": ("plain", "token", "transformers assisted"),
    "block+confidence": ("plain", "block", "transformers assisted"),
    "plain": ("transformers plain",),
    "static+block": ("block", "transformers static"),
    "learned+block": ("block", "plain", "static+block", "transformers assisted"),
    "learned+token": ("token",),
    "transformers assisted": ("transformers plain",),
}
SHOWN = ("plain", "token", "block", "traversal", "univer", "gbv")
TURNS = 5  # in which a case finds how long its drafts are
Draft = tuple[int, float]  # tokens at most, and the confidence below which it ends or 0
NO_DRAFT: Draft = (0, 0.0)
Counts = tuple[int, int, int]  # tokens, target calls, draft calls; calls are 0 if not known


@dataclass(frozen=True)
class Comparison:
    """What is compared, and on how many texts.

    Args:
        prompts: texts a repetition.
        methods: `plain` and verification methods.
        static: the draft's share of the static blend, with block verification and in transformers;
            0 leaves both out.
        learned: a bundle's folder, `;bias=-4` after it; without one the learned cases are left out.
        transformers: time `generate` too; it takes one prompt at a time, so only at batch 1.
        draft_lengths: to choose from.
        confidences: of token and block verification whose chains have the longest of the lengths or
            end behind a token that the draft gave less; not for compiled steps.
        tuning_prompts: on which each case finds how long its drafts are; the others are measured
            on.
        repetitions: of every case, in turns.
        batch: prompts decoded together.
        temperature: of both models.
        compile: compile the steps of our own loop; every case takes a minute more for each draft
            length.
    """

    prompts: int = 6
    methods: list[str] = field(default_factory=lambda: list(SHOWN))
    static: float = 0.3
    learned: str | None = None
    transformers: bool = True
    draft_lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 6, 8])
    confidences: list[float] = field(default_factory=list)
    tuning_prompts: int = 3
    repetitions: int = 7
    batch: int = 1
    temperature: float = 1.0
    compile: bool = False


@dataclass
class Case:
    """One way of decoding.

    run:    (prompts, draft, turn) -> what it took; another turn gives other texts.
    drafts: to choose from.
    draft:  the one that was chosen.
    """

    run: Callable[[list[list[int]], Draft, int], Counts]
    drafts: list[Draft]
    draft: Draft = NO_DRAFT

    def timed(self, prompts: list[list[int]], draft: Draft, turn: int) -> tuple[float, Counts]:
        """Tokens per second, and what was counted."""
        start = time.perf_counter()
        counts = self.run(prompts, draft, turn)
        return counts[0] / (time.perf_counter() - start), counts


def run(
    work: Workload = Workload(max_new_tokens=64),  # noqa: B008  frozen
    wanted: Comparison = Comparison(),  # noqa: B008  frozen
) -> list[dict]:
    """One row a case: tokens per second where its drafts are as long as is best for it."""
    pair = work.pair()
    return compare(pair, work.prompts(pair, wanted.tuning_prompts + wanted.prompts), wanted, work)


def compare(pair: Pair, prompts: list[list[int]], wanted: Comparison, work: Workload) -> list[dict]:
    """`run` for a pair and encoded prompts that are there already."""
    check_confidences(wanted.confidences)
    if wanted.confidences and wanted.compile:
        raise ValueError(
            "`confidences` end chains where the host must look, which compiled steps do not wait"
            " for; leave `confidences` or `compile` out"
        )
    _note(wanted)
    cases = _ours(pair, wanted, work)
    if wanted.transformers and wanted.batch == 1:
        cases |= _transformers(pair, wanted, work)
    tuning, measured = prompts[: wanted.tuning_prompts], prompts[wanted.tuning_prompts :]
    tune(cases, tuning)
    found = in_turns(
        cases,
        lambda case, turn: case.timed(measured, case.draft, turn),
        wanted.repetitions,
        "decode",
    )
    relative = _relative_cost(pair, prompts[0])
    return [row for name in cases for row in _rows(name, cases[name].draft, found, relative)]


def check_confidences(values: Sequence[float]) -> None:
    """Refuse what no chain can end by."""
    if bad := [value for value in values if not 0 < value <= 1]:
        raise ValueError(f"`confidences` must be probabilities above 0 and at most 1, got {bad[0]}")


def _note(wanted: Comparison) -> None:
    """Say what is left out."""
    if wanted.learned is None:
        print("the learned cases are left out: name a bundle with --learned", file=sys.stderr)
    if wanted.transformers and wanted.batch > 1:
        print(
            "transformers is left out: its assisted generation takes one prompt at a time",
            file=sys.stderr,
        )


def _drafts(wanted: Comparison) -> tuple[list[Draft], list[Draft]]:
    """Drafts of a constant length, and those that end by confidence."""
    constant = [(length, 0.0) for length in wanted.draft_lengths]
    longest = max(wanted.draft_lengths)
    return constant, [(longest, confidence) for confidence in wanted.confidences]


def _ours(pair: Pair, wanted: Comparison, work: Workload) -> dict[str, Case]:
    """name -> a case of our own loop."""
    plans = {name: (name, "none") for name in wanted.methods}
    if wanted.static:
        plans["static+block"] = ("block", f"ensemble:{wanted.static}")
    if wanted.learned:
        plans |= {f"learned+{method}": (method, wanted.learned) for method in ("token", "block")}
    constant, ended = _drafts(wanted)
    cases = {}
    for name, (method, rule) in plans.items():
        drafts = [NO_DRAFT] if method == "plain" else constant
        cases[name] = Case(_loop(pair, method, rule, wanted, work), drafts)
    for method in ("token", "block"):
        if ended and method in cases:
            run = _loop(pair, method, "none", wanted, work)
            cases[f"{method}+confidence"] = Case(run, ended)
    return cases


def _loop(pair: Pair, method: str, rule: str, wanted: Comparison, work: Workload) -> Callable:
    """The `run` of a case of our own loop.

    An engine for each kind of draft is kept, and with it what was captured or compiled for it.
    """

    @cache
    def engine(draft: Draft) -> Engine:
        length, confidence = draft
        branches = f"confidence:{confidence},{length}" if confidence else _branches(method, length)
        return Engine(
            pair,
            method,
            rule,
            length,
            branches,
            sampling=Sampling(wanted.temperature),
            compile=wanted.compile,
        )

    def run(prompts: list[list[int]], draft: Draft, turn: int) -> Counts:
        requests = work.requests(prompts, turn)
        for number, request in requests.items():
            engine(draft).check(number, request)
        done = engine(draft).run(requests, wanted.batch).values()
        tokens = sum(len(completion.tokens) for completion in done)
        target_calls = sum(completion.target_calls for completion in done)
        return tokens, target_calls, sum(completion.draft_calls for completion in done)

    return run


def _branches(method: str, length: int) -> int | list[int] | None:
    """Two children at the root and single file below: the smallest tree that is one."""
    drafting = METHODS[method].drafting if method in METHODS else "chain"
    return {"chain": None, "paths": 2}.get(drafting, [2] + [1] * (length - 1))


def _transformers(pair: Pair, wanted: Comparison, work: Workload) -> dict[str, Case]:
    """`generate` on modules as transformers loads them; our own loop lays out the weights anew."""
    from transformers import GenerationConfig

    options = {
        "do_sample": wanted.temperature > 0,
        "max_new_tokens": work.max_new_tokens,
        "eos_token_id": list(pair.eos),
        "pad_token_id": 0,
    }
    if wanted.temperature > 0:
        options |= {"temperature": wanted.temperature, "top_k": 0, "top_p": 1.0}
    target, assistant = (_by_rows(model.module) for model in (pair.target, pair.draft))

    def case(drafts: list[Draft], **extra) -> Case:
        def run(prompts: list[list[int]], draft: Draft, turn: int) -> Counts:
            torch.manual_seed(work.seed + turn)
            if draft[0]:
                # The assistant's own settings say how much it drafts; a run may change them.
                settings = assistant.generation_config
                settings.num_assistant_tokens, settings.assistant_confidence_threshold = draft
                settings.num_assistant_tokens_schedule = "constant"
            total = 0
            for prompt in prompts:
                ids = torch.tensor([prompt], device=pair.target.device)
                mask = torch.ones_like(ids)
                text = target.generate(ids, attention_mask=mask, **options, **extra)
                total += text.shape[1] - len(prompt)
            return total, 0, 0

        return Case(run, drafts)

    drafts = sum(_drafts(wanted), [])
    cases = {
        "transformers plain": case([NO_DRAFT]),
        "transformers assisted": case(drafts, assistant_model=assistant),
    }
    if wanted.static and hasattr(GenerationConfig(), "assistant_ensemble_weight"):
        share = 1 - wanted.static  # transformers states the target's share
        extra = {"assistant_model": assistant, "assistant_ensemble_weight": share}
        cases["transformers static"] = case(drafts, **extra)
    return cases


def _by_rows(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose weights lie as they were loaded."""
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        parameter.data = parameter.data.contiguous()
    return copied


def tune(cases: dict[str, Case], prompts: list[list[int]]) -> None:
    """Set every case's draft to its fastest, by the median of the turns."""
    choices, fastest = {}, {}
    for name, case in cases.items():
        case.draft = case.drafts[0]
        if len(case.drafts) > 1:
            choices |= {(name, draft): (case, draft) for draft in case.drafts}

    def rate(choice: tuple[Case, Draft], turn: int) -> float:
        case, draft = choice
        return case.timed(prompts, draft, turn)[0]

    for (name, draft), rates in in_turns(choices, rate, TURNS).items():
        middle = statistics.median(rates)
        if middle > fastest.get(name, 0.0):
            fastest[name], cases[name].draft = middle, draft


def _relative_cost(pair: Pair, prompt: list[int]) -> float:
    """Time of a draft call on one token over that of a target call on three, medians of 50."""
    calls = {
        "draft": call_after(pair.draft, prompt, 1),
        "target": call_after(pair.target, prompt, 3),
    }
    found = in_turns(calls, lambda call, _: seconds(call), 50)
    return statistics.median(found["draft"]) / statistics.median(found["target"])


def _rows(
    name: str, draft: Draft, found: dict[str, list[tuple[float, Counts]]], relative: float
) -> list[dict]:
    rates = {case: [rate for rate, _ in turns] for case, turns in found.items()}
    ratios = {}
    for rival in RIVALS.get(name, ("plain", "block")):
        if rival in rates and rival != name:
            beside = zip(rates[name], rates[rival], strict=True)
            ratios[rival] = statistics.median(ours / theirs for ours, theirs in beside)
    rows = [row(name, rates[name], "tokens/s", vs=ratios)]
    length, confidence = draft
    if length:
        rows.append({"case": f"{name}, draft length", "value": length, "unit": "tokens"})
    if confidence:
        rows.append({"case": f"{name}, confidence", "value": confidence, "unit": "probability"})
    tokens, calls, _ = _summed(found[name])
    if calls:
        rows.append({"case": f"{name}, per call", "value": tokens / calls, "unit": "tokens/call"})
    exact = name.removeprefix("learned+")
    if exact != name and exact in found:
        ours, theirs = (per_cost(_summed(found[case]), relative) for case in (name, exact))
        case = f"{name} over exact, predicted"
        rows.append({"case": case, "value": ours / theirs, "unit": "ratio"})
    return rows


def _summed(turns: list[tuple[float, Counts]]) -> Counts:
    return tuple(map(sum, zip(*(counts for _, counts in turns), strict=True)))


def per_cost(counts: Counts, relative: float) -> float:
    """Tokens for the cost of one target call, if a draft call costs `relative` of one."""
    tokens, target_calls, draft_calls = counts
    return tokens / (target_calls + draft_calls * relative)
