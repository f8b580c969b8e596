"""The loop: draft a tree, run the target on it once, relax its rows, verify, commit.

A step costs the draft one call a depth and the target one call; step.py is one step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import torch

from ..files import SEEDS, within
from ..verifier.relax import Relaxation
from .batch import Batch
from .completion import Completion, Request, check_stop
from .drafting import Branches
from .forward import Pair
from .graphs import StaticBatch, obstacle
from .sampling import Sampling
from .setup import Setup

# Ended rows stand idle until this share of the batch can be prefilled together: one call of the
# target for all of them.
REFILL = 0.125
STAGES = (
    "prefill",
    "draft",
    "target",
    "verify",
    "step",
    "commit",
)  # step: draft, target and verify as one program
OnStep = Callable[[int, list[int], bool], None]


def decode(
    pair: Pair,
    prompts: list[list[int]],
    *,
    method: str = "token",
    relaxation: str | Relaxation | list[str | Relaxation] = "none",
    draft_length: int = 5,
    branches: Branches = None,
    trunk: int = 0,
    drafting: str | None = None,
    relax_leaf: bool = False,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    max_new_tokens: int = 128,
    stop: tuple[str, ...] = (),
    seeds: list[int] | None = None,
    batch: int = 32,
    compile: bool = False,
    on_step: OnStep | None = None,
) -> list[Completion]:
    """Continue every prompt by speculative decoding.

    Every call makes its engines anew. Where calls repeat and steps are captured (a GPU) or
    compiled, make an `Engine` once and give requests to its `run`.

    prompts:        token ids, at least one each.
    method:         a key of METHODS, `package.module:NAME`, or `plain`: the target alone.
    relaxation:     none, ensemble:0.3, ..., a bundle folder; see `verifier.relax.parse`. A list has
                    one for each prompt; those of one relaxation are decoded together, one
                    relaxation after the other.
    draft_length:   tokens on a drafted path.
    branches, trunk: shape of the tree, see `drafting.topology` and `default_branches`; a text such
                    as `auto` or `3x4+2` names what chooses the shape at each step, see `choosers`.
    drafting:       how the tree is drawn, where a method is exact for several laws; by default its
                    own.
    relax_leaf:     run the draft on the leaves too and relax there.
    stop:           strings that end a text; they are cut off.
    seeds:          one for each prompt; a request's random numbers depend on its seed and position
                    alone.
    batch:          prompts decoded together; where one ends the next begins.
    compile:        compile the steps with torch.compile, which takes a minute for every batch size
                    and tree.
    on_step:        called with (index of the prompt, its new tokens, whether they end its text) as
                    they are committed; `completion.Stream` makes text of them.
    """
    seeds = list(range(len(prompts))) if seeds is None else seeds
    within(1, max_new_tokens=max_new_tokens, batch=batch)
    for seed in seeds:
        within(*SEEDS, seeds=seed)
    check_stop(stop)
    relaxations = relaxation if isinstance(relaxation, list) else [relaxation] * len(prompts)
    for name, values in (("seeds", seeds), ("relaxation", relaxations)):
        if len(values) != len(prompts):
            one = name.removesuffix("s")
            raise ValueError(
                f"`{name}` must hold one {one} for each of {len(prompts)} prompts, got"
                f" {len(values)}"
            )
    pairs = enumerate(zip(prompts, seeds, strict=True))
    requests = {
        i: Request(prompt, seed, max_new_tokens, tuple(stop)) for i, (prompt, seed) in pairs
    }
    made = {
        each: Engine(
            pair,
            method,
            each,
            draft_length,
            branches,
            trunk,
            drafting,
            relax_leaf,
            sampling,
            compile,
        )
        for each in dict.fromkeys(relaxations)
    }
    engines = {i: made[each] for i, each in enumerate(relaxations)}
    for i, request in requests.items():
        engines[i].check(i, request)
    return list(run_grouped(engines, requests, batch, on_step).values())


def run_grouped(
    engines: dict[int, Engine],
    requests: dict[int, Request],
    batch: int,
    on_step: OnStep | None = None,
) -> dict[int, Completion]:
    """Decode every request with the engine of the same key, those of one engine together."""
    done: dict[int, Completion] = {}
    for engine in dict.fromkeys(engines[i] for i in requests):
        done |= engine.run(
            {i: request for i, request in requests.items() if engines[i] is engine}, batch, on_step
        )
    return {i: done[i] for i in requests}


class Engine(Setup):
    """A setup that runs batches of requests."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        reason = obstacle(self) if self.compiled else ""
        on_cpu = self.pair.target.device.type == "cpu"
        if self.compiled and on_cpu and not reason and self.shape.drafting == "paths":
            # torch 2.13.0 writes beyond its memory there (LOG.md, 2026-12-01).
            reason = "on a CPU a compiled step of gbv, specinfer or kseq ends the process"
        if reason:
            raise ValueError(
                f"`compile` needs a step whose shapes never change: {reason}; leave `compile` out"
            )

    def check(self, index: int, request: Request) -> None:
        """Refuse a request whose prompt, text and a tree beyond it do not fit; see
        `check_prompts`.
        """
        check_prompts(self.pair, {index: request.tokens}, request.new_tokens + self.depth)

    @torch.inference_mode()  # a seventh less time at batch 1 on a CPU than without gradients alone
    def run(
        self,
        requests: dict[int, Request],
        batch: int | None = None,
        on_step: OnStep | None = None,
        static: bool | None = None,
    ) -> dict[int, Completion]:
        """Decode checked requests, `batch` of them (by default all) together; where one ends the
        next begins.

        Their keys are used in messages and `on_step`, and are the result's.
        static: whether the static step of graphs.py decodes them; by default on a GPU, where it
            can, and compiled.
        """
        wanted = static
        if static is None:
            wanted = self.compiled or self.pair.target.device.type == "cuda"
        reason = obstacle(self) if wanted else ""
        if static and reason:
            raise ValueError(f"`static` asks for a step that cannot be had here: {reason}")
        waiting, done = deque(requests.items()), dict.fromkeys(requests)
        size = min(batch or len(requests), len(requests))
        self.mark = time.perf_counter()
        state = self._begin(waiting, size, done) if requests else None
        if state and wanted and not reason:
            state = StaticBatch(state)
        while state and any(row.active for row in state.rows):
            emitted = state.step()
            for row, new in zip(state.rows, emitted, strict=True):
                if on_step and new:
                    on_step(row.index, new, not row.active)
            self.lap("commit")
            busy = [place for place, row in enumerate(state.rows) if row.active]
            idle = [place for place, row in enumerate(state.rows) if not row.active]
            if waiting and len(idle) >= min(math.ceil(REFILL * size), len(waiting)):
                places = idle[: len(waiting)]
                state.replace(places, self._begin(waiting, len(places), done))
                self.lap("prefill")
            elif busy and not waiting and len(busy) <= 0.75 * len(state.rows):
                state.select(busy)
        return done

    def _begin(self, waiting: deque[tuple[int, Request]], count: int, done: dict) -> Batch:
        """A batch of the first `count` waiting requests, their prompts in its caches; their
        completions stand in `done` from now on.
        """
        batch = Batch(self, dict(waiting.popleft() for _ in range(count)))
        done |= {row.index: row.completion for row in batch.rows}
        self.lap("prefill")
        return batch


def check_prompts(pair: Pair, prompts: dict[int, list[int]], new_tokens: int) -> None:
    """Refuse prompts without tokens, with unknown tokens, or that leave no room for `new_tokens` in
    either context.
    """
    room = min(pair.target.max_positions, pair.draft.max_positions)
    for index, tokens in prompts.items():
        if not tokens:
            raise ValueError(
                f"prompt {index} has no tokens; an empty text cannot be continued by this tokenizer"
            )
        if not 0 <= min(tokens) <= max(tokens) < pair.vocab:
            raise ValueError(
                f"prompt {index} has a token outside 0..{pair.vocab - 1}; was it encoded by another"
                " tokenizer?"
            )
        if len(tokens) + new_tokens > room:
            raise ValueError(
                f"prompt {index} is longer than the context: {len(tokens)} tokens and {new_tokens}"
                f" new ones exceed {room}; lower `max_new_tokens` or shorten the prompt"
            )
