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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from rich.console import Console
from rich.progress import track

from ..data.tasks import DataOptions
from ..runtime.completion import Request
from ..runtime.engine import Engine
from ..runtime.model import Model, Pair, load_pair
from ..runtime.sampling import Sampling
from .efficiency import encoded_prompts

# Ratios that are printed beside a case, where the other one is in the run too.
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
# Trees are drawn with two children at the root and single file below: the smallest tree that is
# one.
TREES = {
    "traversal": 2,
    "univer": 2,
    "gbv": 2,
    "rrsw": 2,
    "greedy_tree": 2,
    "specinfer": 2,
    "kseq": 2,
}

TURNS = 5  # in which a case finds how long its drafts are
NO_DRAFT = (0, 0.0)
Draft = tuple[int, float]  # tokens at most, and the confidence below which it ends or 0
Counts = tuple[int, int, int]  # tokens, target calls, draft calls


@dataclass
class _Case:
    """One way of decoding.

    run:        (prompts, draft, seed) -> what it took; calls are 0 where they are not known.
    drafts:     to choose from.
    rates:      tokens per second of every repetition.
    counts:     summed over the repetitions.
    """

    run: Callable[[list[list[int]], Draft, int], Counts]
    drafts: list[Draft]
    draft: Draft = NO_DRAFT
    rates: list[float] = field(default_factory=list)
    counts: Counts = (0, 0, 0)

    def timed(self, prompts: list[list[int]], draft: Draft, seed: int) -> tuple[float, Counts]:
        start = time.perf_counter()
        counts = self.run(prompts, draft, seed)
        return counts[0] / (time.perf_counter() - start), counts


def run(
    *,
    target: str = "sums-target",
    draft: str = "sums-draft",
    dtype: str = "auto",
    device: str = "cpu",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    prompt: str | None = None,
    prompts: int = 6,
    methods: list[str] = ["plain", "token", "block", "traversal", "univer", "gbv"],  # noqa: B006
    static: float = 0.3,
    learned: str | None = None,
    transformers: bool = True,
    draft_lengths: list[int] = [1, 2, 3, 4, 6, 8],  # noqa: B006
    confidences: list[float] = [],  # noqa: B006
    tuning_prompts: int = 3,
    repetitions: int = 7,
    batch: int = 1,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    compile: bool = False,
    seed: int = 0,
    threads: int = 1,
) -> list[dict]:
    """One row a case: tokens per second where its drafts are as long as is best for it.

    Args:
        target: folder, hub name or .gguf file of the model being served.
        draft: folder, hub name or .gguf file of the cheap model.
        dtype: auto, float32, bfloat16 or float16.
        device: where both run.
        task: where prompts come from.
        data: where the task's rows come from.
        prompt: continue this text with different seeds, instead of a task's prompts.
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
        max_new_tokens: tokens a text may have.
        temperature: of both models.
        compile: compile the steps of our own loop; every case takes a minute more for each draft
            length.
        seed: of prompts and texts.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    pair = load_pair(target, draft, dtype, device)
    encoded = encoded_prompts(pair, task, data, prompt, tuning_prompts + prompts, seed)
    return compare(
        pair,
        encoded,
        methods=methods,
        static=static,
        learned=learned,
        transformers=transformers,
        draft_lengths=draft_lengths,
        confidences=confidences,
        tuning_prompts=tuning_prompts,
        repetitions=repetitions,
        batch=batch,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        compile=compile,
    )


def compare(
    pair: Pair,
    encoded: list[list[int]],
    *,
    methods: list[str],
    static: float,
    learned: str | None,
    transformers: bool,
    draft_lengths: list[int],
    tuning_prompts: int,
    repetitions: int,
    batch: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    confidences: list[float] = [],  # noqa: B006
    compile: bool = False,
) -> list[dict]:
    """`run` for a pair and encoded prompts that are there already."""
    check_confidences(confidences)
    if confidences and compile:
        raise ValueError(
            "`confidences` end chains where the host must look, which compiled steps do not wait"
            " for; leave `confidences` or `compile` out"
        )
    plans = {name: (name, "none") for name in methods}
    if static:
        plans["static+block"] = ("block", f"ensemble:{static}")
    if learned:
        plans |= {f"learned+{method}": (method, learned) for method in ("token", "block")}
    engine = partial(Engine, pair, sampling=Sampling(temperature), compile=compile)
    constant = [(length, 0.0) for length in draft_lengths]
    ended = [(max(draft_lengths), confidence) for confidence in confidences]
    cases = {
        name: _case(engine, *plan, constant, max_new_tokens, batch) for name, plan in plans.items()
    }
    for name in ("token", "block") if ended else ():
        if name in cases:
            cases[f"{name}+confidence"] = _case(engine, name, "none", ended, max_new_tokens, batch)
    if transformers and batch == 1:
        cases |= _transformers(pair, static, constant + ended, temperature, max_new_tokens)
    _note(learned, transformers, batch)
    _tune(cases, encoded[:tuning_prompts], seed)
    console = Console(stderr=True)
    for repetition in track(range(repetitions), "decode", console=console):
        for case in cases.values():
            rate, counts = case.timed(encoded[tuning_prompts:], case.draft, seed + repetition)
            case.rates.append(rate)
            case.counts = tuple(map(sum, zip(case.counts, counts, strict=True)))
    relative = _relative_cost(pair, encoded[0])
    return [row for name in cases for row in _rows(name, cases, relative)]


def check_confidences(values: list[float]) -> None:
    """Refuse what no chain can end by."""
    if bad := [value for value in values if not 0 < value <= 1]:
        raise ValueError(f"`confidences` must be probabilities above 0 and at most 1, got {bad[0]}")


def _note(learned: str | None, transformers: bool, batch: int) -> None:
    """Say what is left out."""
    if learned is None:
        print("the learned cases are left out: name a bundle with --learned", file=sys.stderr)
    if transformers and batch > 1:
        print(
            "transformers is left out: its assisted generation takes one prompt at a time",
            file=sys.stderr,
        )


def _case(
    make: Callable[..., Engine],
    method: str,
    rule: str,
    drafts: list[Draft],
    new_tokens: int,
    batch: int,
) -> _Case:
    """Our own loop; an engine for each kind of draft is kept, and with it what was captured or
    compiled for it.
    """

    @cache
    def engine(draft: Draft) -> Engine:
        length, confidence = draft
        branches = f"confidence:{confidence},{length}" if confidence else TREES.get(method)
        if method in TREES and method not in ("gbv", "specinfer", "kseq"):
            branches = [branches] + [1] * (length - 1)
        return make(method, rule, length, branches)

    def run(prompts, draft, seed):
        requests = {
            i: Request(prompt, (seed << 20) + i, new_tokens) for i, prompt in enumerate(prompts)
        }
        for i, request in requests.items():
            engine(draft).check(i, request)
        done = engine(draft).run(requests, batch).values()
        return (
            sum(len(c.tokens) for c in done),
            sum(c.target_calls for c in done),
            sum(c.draft_calls for c in done),
        )

    return _Case(run, [NO_DRAFT] if method == "plain" else drafts)


def _transformers(
    pair: Pair, static: float, drafts: list[Draft], temperature: float, new_tokens: int
):
    """`generate` on modules as transformers loads them; our own loop lays out the weights anew."""
    from transformers import GenerationConfig

    common = {
        "do_sample": temperature > 0,
        "max_new_tokens": new_tokens,
        "eos_token_id": list(pair.eos),
        "pad_token_id": 0,
    }
    if temperature > 0:
        common |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    target, assistant = (_by_rows(model.module) for model in (pair.target, pair.draft))

    def case(drafts: list[Draft], **extra) -> _Case:
        def run(prompts, draft, seed):
            torch.manual_seed(seed)
            total = 0
            for prompt in prompts:
                if draft[
                    0
                ]:  # the assistant's own settings decide how much it drafts; it may change the confidence
                    assistant.generation_config.num_assistant_tokens = draft[0]
                    assistant.generation_config.num_assistant_tokens_schedule = "constant"
                    assistant.generation_config.assistant_confidence_threshold = draft[1]
                ids = torch.tensor([prompt], device=pair.target.device)
                text = target.generate(ids, attention_mask=torch.ones_like(ids), **common, **extra)
                total += text.shape[1] - len(prompt)
            return total, 0, 0

        return _Case(run, drafts)

    cases = {
        "transformers plain": case([NO_DRAFT]),
        "transformers assisted": case(drafts, assistant_model=assistant),
    }
    if static and hasattr(GenerationConfig(), "assistant_ensemble_weight"):
        # transformers states the target's share
        cases["transformers static"] = case(
            drafts, assistant_model=assistant, assistant_ensemble_weight=1 - static
        )
    return cases


def _by_rows(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose weights lie as they were loaded."""
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        parameter.data = parameter.data.contiguous()
    return copied


def _tune(cases: dict[str, _Case], prompts: list[list[int]], seed: int) -> None:
    """Set every case's draft to its fastest, by the median of the turns."""
    for case in cases.values():
        for draft in case.drafts:
            case.run(prompts[:1], draft, seed)  # what is computed once is no one's time
    rates = {name: {draft: [] for draft in case.drafts} for name, case in cases.items()}
    for turn in range(TURNS):
        for name, case in cases.items():
            for draft in case.drafts if len(case.drafts) > 1 else ():
                rates[name][draft].append(case.timed(prompts, draft, seed + 1 + turn)[0])
    for name, case in cases.items():
        case.draft = max(
            case.drafts, key=lambda draft: statistics.median(rates[name][draft] or [0.0])
        )


def _relative_cost(pair: Pair, prompt: list[int]) -> float:
    """Seconds of a draft call on one token over those of a target call on three, medians of 50 in
    turns.
    """
    calls = [_call(model, prompt, count) for model, count in ((pair.draft, 1), (pair.target, 3))]
    seconds = [[], []]
    for _ in range(50):
        for call, taken in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    draft, target = map(statistics.median, seconds)
    return draft / target


def _call(model: Model, prompt: list[int], count: int) -> Callable[[], object]:
    """One call on `count` tokens after a prompt; what it writes into the cache is written over by
    the next.
    """
    cache, device = model.cache(len(prompt) + count), model.device
    tokens = torch.tensor([prompt + [0] * count], device=device)
    positions = torch.arange(tokens.shape[1], device=device).unsqueeze(0)
    model(tokens[:, :-count], positions[:, :-count], None, cache, 0)
    return lambda: (
        model(tokens[:, -count:], positions[:, -count:], None, cache, len(prompt))
        .logits.sum()
        .item()
    )


def _rows(name: str, cases: dict[str, _Case], relative: float) -> list[dict]:
    case = cases[name]
    ratios = {
        rival: statistics.median(
            ours / theirs for ours, theirs in zip(case.rates, cases[rival].rates, strict=True)
        )
        for rival in RIVALS.get(name, ("plain", "block"))
        if rival in cases and rival != name
    }
    span = {"low": min(case.rates), "high": max(case.rates)}
    rows = [
        {
            "case": name,
            "value": statistics.median(case.rates),
            "unit": "tokens/s",
            **span,
            "vs": ratios,
        }
    ]
    (length, confidence), (tokens, calls, _) = case.draft, case.counts
    if length:
        rows.append({"case": f"{name}, draft length", "value": length, "unit": "tokens"})
    if confidence:
        rows.append({"case": f"{name}, confidence", "value": confidence, "unit": "probability"})
    if calls:
        rows.append({"case": f"{name}, per call", "value": tokens / calls, "unit": "tokens/call"})
    exact = cases.get(name.removeprefix("learned+"))
    if name.startswith("learned+") and exact:
        allowed = _per_cost(case, relative) / _per_cost(exact, relative)
        rows.append({"case": f"{name} over exact, predicted", "value": allowed, "unit": "ratio"})
    return rows


def _per_cost(case: _Case, relative: float) -> float:
    """Tokens for the cost of one target call, where a draft call costs `relative` of one."""
    tokens, target_calls, draft_calls = case.counts
    return tokens / (target_calls + draft_calls * relative)
