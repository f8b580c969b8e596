"""The loop: draft a tree, run the target on it once, relax its rows, verify, commit.

A step costs the draft one call a depth and the target one call; `Batch.step` is one step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import torch

from ..files import SEEDS, within
from ..verifier import methods
from ..verifier.relax import Relaxation, parse
from .batch import Batch
from .choosers import Selector, make_selector
from .completion import Completion, Request, check_stop
from .drafting import MAX_NODES, ROOT, Branches, default_branches, topology
from .graphs import StaticBatch, StaticState, obstacle
from .model import Pair
from .relaxer import load_relaxer
from .sampling import Sampling

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
    relaxation:     none, ensemble:0.3, ..., a bundle folder; see `verifier.relax.parse`. A list has one for each
                    prompt; those of one relaxation are decoded together, one relaxation after the other.
    draft_length:   tokens on a drafted path.
    branches, trunk: shape of the tree, see `drafting.topology` and `default_branches`; a text such
                    as `auto` or `3x4+2` names what chooses the shape at each step, see `selector`.
    drafting:       how the tree is drawn, where a method is exact for several laws; by default its own.
    relax_leaf:     run the draft on the leaves too and relax there.
    stop:           strings that end a text; they are cut off.
    seeds:          one for each prompt; a request's random numbers depend on its seed and position alone.
    batch:          prompts decoded together; where one ends the next begins.
    compile:        compile the steps with torch.compile, which takes a minute for every batch size and tree.
    on_step:        called with (index of the prompt, its new tokens, whether they end its text) as they are committed;
                    `completion.Stream` makes text of them.
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


class Engine:
    """One method, relaxation and tree shape over one pair; checks all of it once, then runs
    batches.
    """

    def __init__(
        self,
        pair: Pair,
        method: str = "token",
        relaxation: str | Relaxation = "none",
        draft_length: int = 5,
        branches: Branches = None,
        trunk: int = 0,
        drafting: str | None = None,
        relax_leaf: bool = False,
        sampling: Sampling | None = None,
        compile: bool = False,
    ):
        self.pair, self.sampling = pair, sampling or Sampling()
        self.relaxation = parse(relaxation) if isinstance(relaxation, str) else relaxation
        if method == "plain":
            if self.relaxation.name != "none":
                raise ValueError(
                    f"method `plain` has no draft to relax towards, got relaxation {relaxation!r};"
                    " use `none`"
                )
            self.method = methods.method("token")
            self.selector = Selector([ROOT])
        else:
            chosen = methods.method(method)
            drafting = drafting or chosen.drafting
            chosen.require(drafting)
            self.method = chosen
            within(0, MAX_NODES, draft_length=max(draft_length, 0), trunk=trunk)
            if isinstance(branches, str):
                self.selector = make_selector(
                    branches, method, drafting, draft_length, trunk, pair, self.sampling
                )
            else:
                branches = (
                    default_branches(drafting, draft_length) if branches is None else branches
                )
                self.selector = Selector([topology(drafting, draft_length, branches, trunk)])
        self.shapes, self.trunk = self.selector.shapes, trunk
        self.shape = max(self.shapes, key=lambda shape: shape.nodes)
        self.depth = max(shape.depth for shape in self.shapes)
        self.relaxer = load_relaxer(self.relaxation, pair, self.sampling)
        self.relaxation, self.gate = self.relaxer.rule, self.relaxer.gate
        self.hidden = bool(self.gate and self.gate.needs_hidden) or self.selector.looks_back
        self.leaf = int(relax_leaf and self.depth > 0)
        if self.leaf and self.selector.confidence:
            raise ValueError(
                "`relax_leaf` needs leaves that are known before the tree is drawn, got branches"
                f" {branches!r}; leave one of the two out"
            )
        self.steps: dict[tuple, StaticState] = {}  # of graphs.py, the last used last
        self.seconds: dict[str, float] | None = (
            None  # of every stage of STAGES, where a run is to be timed
        )
        self.compiled = compile
        if compile and (reason := obstacle(self)):
            raise ValueError(
                f"`compile` needs a step whose shapes never change: {reason}; leave `compile` out"
            )

    def check(self, index: int, request: Request) -> None:
        """Refuse a request whose prompt, text and a tree beyond it do not fit; see `check_prompts`."""
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
        wanted = (
            self.compiled or self.pair.target.device.type == "cuda" if static is None else static
        )
        reason = obstacle(self) if wanted else ""
        if static and reason:
            raise ValueError(f"`static` asks for a step that cannot be had here: {reason}")
        done = {index: Completion() for index in requests}
        waiting = deque(requests.items())
        size = min(batch or len(requests), len(requests))
        self._mark = time.perf_counter()
        state = self._begin(waiting, size) if requests else None
        state = StaticBatch(state) if state and wanted and not reason else state
        while state and any(state.active):
            emitted = state.step(done)
            for index, new, active in zip(state.indices, emitted, state.active, strict=True):
                if on_step and new:
                    on_step(index, new, not active)
            self.lap("commit")
            busy, idle = (
                [row for row, active in enumerate(state.active) if active == want]
                for want in (True, False)
            )
            if waiting and len(idle) >= min(math.ceil(REFILL * size), len(waiting)):
                rows = idle[: len(waiting)]
                state.replace(rows, self._begin(waiting, len(rows)))
                self.lap("prefill")
            elif not waiting and len(busy) <= 0.75 * len(state.active):
                state.select(busy)
        return done

    def _begin(self, waiting: deque[tuple[int, Request]], count: int) -> Batch:
        """A batch of the first `count` waiting requests, their prompts in its caches."""
        batch = Batch(self, dict(waiting.popleft() for _ in range(count)))
        self.lap("prefill")
        return batch

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to a stage of `seconds`, where it is kept: a GPU then
        waits at each stage.
        """
        if self.seconds is None:
            return
        if self.pair.target.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[stage] += now - self._mark
        self._mark = now


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
