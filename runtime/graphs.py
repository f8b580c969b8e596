"""One step of speculative decoding whose shapes never change and which never waits for the host: a
pair of CUDA graphs.

Between steps everything stands in buffers of fixed size. In a row of a cache the slot of a
committed token is its position, and node n of the tree stands in slot length + n; every token sees
the whole capacity through a mask that is computed from `length` on the device. After verification
the accepted path is copied down to consecutive slots (nothing moves for a chain). The draft always
runs the token before the root beside the root: after full acceptance its cache lacks that token,
otherwise the same keys and values are written again.

The host reads one small tensor a step, and only after the next step has been launched. So what ends
a text (an end token, a stop string) is seen one step late: the step that was then under way is
thrown away. A row stands still on the device where its text has all the tokens it may have, which
bounds the slots it can come to need. A row with numbers that are not finite stands still too and is
named when its step is read.

graph 1, the draft: random numbers, one call of the draft a depth, children.
graph 2, the target: one call on the tree, weights, verification, commit, and what the host will
    read.

Where a selector has several shapes, each that is chosen has such a step, and all share the state of
the rows and their caches. What the choice reads is computed at the end of the step before, from the
draft at the new root, which the next tree then begins with. So the host reads a step before it
launches the next one, and nothing is one step late.

Shapes that never change can also be compiled: an engine that is `compiled` has both stages made
into one program each by torch.compile before they are captured, and the whole step into a single
one on a CPU, where a program of this size takes as long to be entered as a tenth of it to run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..verifier.kernels.cuts import cut
from ..verifier.law import DraftTree, Verdict, draw
from ..verifier.methods import METHODS
from ..verifier.relax import relax, substitutions
from ..verifier.tree import on_device
from .batch import Batch, not_finite
from .cache import PackedCache
from .choosers import StepContext
from .completion import Completion
from .drafting import ROOT, DraftShape, children
from .model import Model, Output
from .sampling import Sampling, probabilities
from .uniforms import uniforms

if TYPE_CHECKING:
    from .engine import Engine

BUCKET = (
    256  # capacities are multiples of so many slots, so that few graphs serve texts of all lengths
)
KEPT = 2  # steps that an engine keeps; each has caches of its own
STATE = ("length", "seed", "spent", "limit", "recent")


def obstacle(engine: Engine) -> str:
    """Why the static step cannot stand in for `Batch.step`, empty where it can."""
    pair = engine.pair
    for model in (pair.target, pair.draft):
        if not model.lean:
            return f"{model.name} goes through transformers: {model.obstacle}"
        if model.window:
            return f"layers of {model.name} see a window of tokens"
    if pair.target.device != pair.draft.device:
        return "the two models are on different devices"
    if engine.selector.confidence:
        return "the host must see where the draft is not confident"
    if engine.method not in METHODS.values():
        return "a method of your own may wait for the device"
    if engine.gate and engine.gate.checked:
        return "the answers of a gate of your own are looked at"
    return ""


class StaticBatch(Batch):
    """A batch whose rows are decoded by static steps; it never changes its size.

    A step of the only shape is read one step late, one that was chosen at once.
    """

    def __init__(self, fresh: Batch):
        """Takes over the requests of `fresh`, prefilled and not decoded yet."""
        vars(self).update(vars(fresh))
        self.pending: tuple[_Read, list[int]] | None = (
            None  # a step under way, and the request of each of its rows
        )
        self.static = _state(self.engine, len(self.indices), self.capacity())
        self._load(list(range(len(self.indices))), fresh)
        del self.target_cache, self.draft_cache

    def select(self, rows: list[int]) -> None:
        """Rows without a request stay: another size would be another graph."""

    def replace(self, rows: list[int], fresh: Batch) -> None:
        self._rename(rows, fresh)
        if (capacity := self.capacity()) > self.static.capacity:
            before, self.static = self.static, _state(self.engine, len(self.indices), capacity)
            self.static.load(list(range(len(self.indices))), before, before.capacity)
        self._load(rows, fresh)

    def _load(self, rows: list[int], fresh: Batch) -> None:
        ends = [len(request.tokens) - 1 + request.new_tokens for request in fresh.requests]
        fresh.limit = torch.tensor(ends, device=self.device)
        self.static.load(rows, fresh, fresh.prefilled)
        if self.static.root:
            self.numbers = self.static.numbers.tolist()

    def step(self, done: dict[int, Completion]) -> list[list[int]]:
        """Launch one block for every row; then read, record and return those of the step before, or
        of this one where the next choice waits for it.
        """
        if self.static.root:
            chosen = self.engine.selector.select(self.numbers, self.active)
            self.shape = self.engine.shapes[chosen]
            return self._read(done, self.static.step(chosen)(), self.indices)
        before, self.pending = self.pending, (self.static.step(0)(), list(self.indices))
        return self._read(done, *before) if before else [[] for _ in self.indices]

    def _read(
        self, done: dict[int, Completion], found: _Read, launched: list[int]
    ) -> list[list[int]]:
        begun = [row for row, index in enumerate(launched) if index != self.indices[row]]
        for row in begun:  # its request came after this step was launched
            self.active[row] = False
        depth, nodes = self.shape.depth + 1, self.shape.nodes
        tokens, blocks, cost, share, self.numbers = [], [], [], [], []
        for row, (fault, node, extra, *rest) in enumerate(found.wait()):
            if fault and self.active[row]:
                self.engine.steps.clear()  # their caches hold what is not finite
                raise not_finite("draft" if fault == 1 else "target", self.indices[row])
            tokens.append([int(token) for token in rest[:nodes]])
            path = self.shape.paths[int(node)]
            blocks.append([*(tokens[-1][node] for node in path), int(extra)])
            cost.append(rest[nodes : nodes + depth])
            share.append(rest[nodes + depth : nodes + 2 * depth])
            self.numbers.append(rest[nodes + 2 * depth :])
        emitted = self._record(done, tokens, blocks, cost, share)
        for row in begun:
            self.active[row] = True
        return emitted


def _state(engine: Engine, size: int, capacity: int) -> StaticState:
    """The engine's steps for `size` rows and at least `capacity` slots, new ones where it has none."""
    capacity = -(-capacity // BUCKET) * BUCKET
    # a module that was moved or cast has other weights than those a graph reads
    models = engine.pair.target, engine.pair.draft
    weights = tuple(model.module.get_input_embeddings().weight.data_ptr() for model in models)
    key = size, capacity, *weights
    state = engine.steps.pop(key, None) or StaticState(engine, size, capacity)
    engine.steps[key] = state
    for old in list(engine.steps)[:-KEPT]:
        engine.steps.pop(old).steps.clear()  # which know it: its caches are free at once
    return state


@dataclass
class _Read:
    """What the host reads of a step, [B, 3 + N + 2 (L + 1) + X] float64: 0 if the row is sound, 1
    or 2 if draft or target are not; stopping node, extra token; tokens of all nodes; substitutions
    and share of the draft along the path; the numbers of `StaticState`.
    """

    values: Tensor
    event: torch.cuda.Event | None

    def copy(self, values: Tensor) -> _Read:
        self.values.copy_(values, non_blocking=True)
        if self.event:
            self.event.record()
        return self

    def wait(self) -> list[list[float]]:
        if self.event:
            self.event.synchronize()
        return self.values.tolist()


@dataclass
class _Drafted:
    """tokens [B, N] int64, coins [B, 2 + lanes], the draft's logits [B, D, V], rows [B, N, V] and
    hidden states [B, N, H], each None where nothing asks for it, and fault [B] bool, whether its
    rows are not finite.
    """

    tokens: Tensor
    coins: Tensor
    logits: Tensor | None
    rows: Tensor | None
    hidden: Tensor | None
    fault: Tensor


class StaticState:
    """`size` rows between two steps, their caches of `capacity` slots, and the steps that advance
    them.

    length [B], recent [B, 2], seed [B], spent [B] float64, before: as in `Batch`.
    limit [B]: the length from which on a row stands still; all do until `load` gives them a
        request.
    steps: by shape, made when the shape is first chosen.

    Where there are several shapes:
    root: the draft's logits [B, 1, V] and hidden states [B, 1, H] at the root, else None.
    numbers: [B, X] what the next choice reads.
    """

    def __init__(self, engine: Engine, size: int, capacity: int):
        self.engine, self.capacity, pair = engine, capacity, engine.pair
        self.device, self.steps = pair.target.device, {}
        self.length, self.seed, self.limit = torch.zeros(
            3, size, dtype=torch.long, device=self.device
        )
        self.recent = torch.zeros(size, 2, dtype=torch.long, device=self.device)
        self.spent = torch.zeros(size, dtype=torch.float64, device=self.device)
        self.before = engine.selector.init_state(size, pair, self.device)
        self.target_cache, self.draft_cache = (
            model.cache(capacity) for model in (pair.target, pair.draft)
        )
        self.draft = _Side(pair.draft, self.draft_cache, ROOT, size)
        for side in [_Side(pair.target, self.target_cache, ROOT, size)] + [self.draft] * (
            engine.depth > 0
        ):
            side(self.recent, self.length, -1)  # which allocates its cache
        self.root, self.numbers = None, torch.zeros(size, 0, device=self.device)
        if len(engine.shapes) > 1:
            self.root, self.numbers = self._seen()

    def step(self, index: int) -> StaticStep:
        """The step of the shape with this index."""
        if index not in self.steps:
            self.steps[index] = StaticStep(self, self.engine.shapes[index])
        return self.steps[index]

    def load(self, rows: list[int], source: Batch | StaticState, filled: int) -> None:
        """Put the rows of `source`, of whose caches `filled` slots are written, in the place of
        these rows.
        """
        index = torch.tensor(rows, device=self.device)
        for name in STATE:
            getattr(self, name).index_copy_(0, index, getattr(source, name))
        for here, new in zip(self.before, source.before, strict=True):
            here.index_copy_(0, index, new)
        self.target_cache.replace(index, source.target_cache, filled)
        self.draft_cache.replace(index, source.draft_cache, filled)
        if self.root:
            self.look()

    def look(self) -> None:
        """Run the draft on the root and the token before it, for the choice and for the tree that
        is chosen.
        """
        root, numbers = self._seen()
        self.root.logits.copy_(root.logits)
        self.root.hidden.copy_(root.hidden)
        self.numbers.copy_(numbers)

    def _seen(self) -> tuple[Output, Tensor]:
        """`root` and `numbers` as they now are."""
        selector, kept = self.engine.selector, slice(-1 - self.engine.selector.looks_back, None)
        out = self.draft(self.recent, self.length, -1)
        rows = probabilities(out.logits[:, kept], self.engine.sampling)
        numbers = selector.features(
            StepContext(self.before, rows, out.hidden[:, kept], self.length)
        )
        return Output(out.logits[:, -1:].clone(), out.hidden[:, -1:].clone()), numbers


class StaticStep:
    """The step of one shape for the rows of a state.

    coins: random numbers of a row, two for the verdict and those of the children.
    drafted_depths: depths on which the draft is run.
    kernel: of the method, None where its law verifies; `kernels` chooses, by default a kernel runs
        where it can.
    by_rows: whether rows of probabilities are kept, for the law, the gate, a filter's cut, or the
        next choice.
    stages: what draws the tree and what verifies it, or both at once, by the name that their time
        is kept under.
    """

    def __init__(self, state: StaticState, shape: DraftShape, kernels: bool | None = None):
        self.state, self.shape, self.engine, self.device = state, shape, state.engine, state.device
        engine, pair, size = state.engine, state.engine.pair, len(state.length)
        self.depths = on_device(shape.depths, self.device)
        self.paths = on_device(shape.padded_paths, self.device)
        self.constant = engine.relaxation.constant
        self.coins, self.drafted_depths = 2 + shape.lanes, shape.depth + engine.leaf
        self.kernel = _kernel(engine, shape, kernels)
        self.by_rows = bool(
            not self.kernel or engine.gate or _filtered(engine.sampling) or state.root
        )
        self.target = _Side(pair.target, state.target_cache, shape, size)
        self.draft = _Side(pair.draft, state.draft_cache, shape, size)
        cuda, width = (
            self.device.type == "cuda",
            3 + shape.nodes + 2 * (shape.depth + 1) + state.numbers.shape[1],
        )
        self.found = torch.zeros(size, width, dtype=torch.float64, device=self.device)
        host = [torch.zeros(size, width, dtype=torch.float64, pin_memory=cuda) for _ in range(2)]
        self.reads = [_Read(values, torch.cuda.Event() if cuda else None) for values in host]
        limit = state.limit.clone()
        with torch.cuda.device_of(limit):
            state.limit.zero_()
            self.stages = {"draft": self.draw_tree, "target": self.verify}
            self._warm()
            if engine.compiled:
                stages = self.stages if cuda else {"step": self.whole}
                self.stages = {
                    name: _compiled(work, cpp_wrapper=not cuda) for name, work in stages.items()
                }
                self._warm()
            if cuda:
                self._capture()
            state.limit.copy_(limit)

    def __call__(self) -> _Read:
        """Launch one step."""
        with torch.cuda.device_of(self.found):
            for stage, work in self.stages.items():
                work()
                self.engine.lap(stage)
            self.reads.reverse()
            return self.reads[0].copy(self.found)

    def _warm(self) -> None:
        """One step of rows that stand still: it compiles, and fills what is computed once."""
        for work in self.stages.values():
            work()

    def _capture(self) -> None:
        """Replace the stages by CUDA graphs of them."""
        side, pool = _shared(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._warm()
        torch.cuda.current_stream().wait_stream(side)
        # What these graphs read and others may replace.
        self.angles = [side.model.angles for side in (self.target, self.draft)]
        for stage, work in self.stages.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                work()
            self.stages[stage] = graph.replay

    def whole(self) -> None:
        """Both stages."""
        self.draw_tree()
        self.verify()

    def draw_tree(self) -> None:
        """Stage 1: draw the tree of every row."""
        engine, shape, state = self.engine, self.shape, self.state
        coins = uniforms(state.seed, state.length + 1, self.coins)
        tokens, logits, rows, hidden = state.recent[:, 1:], [], [], []
        for depth in range(self.drafted_depths):
            first, last = shape.bounds[depth : depth + 2]
            here = tokens[:, first:last]
            if depth:
                out = self.draft(here, state.length, first)
            else:
                out = state.root or self.draft(state.recent, state.length, -1)
            logits.append(out.logits[:, first - last :])
            hidden.append(out.hidden[:, first - last :].float())
            present = (here >= 0).unsqueeze(-1)
            rows.append(probabilities(logits[-1], engine.sampling) * present)
            if depth < shape.depth:
                below, end = shape.bounds[depth + 1 : depth + 3]
                coin = (
                    coins[:, 2:]
                    .narrow(1, shape.first_lane(depth + 1), end - below)
                    .reshape(len(here), last - first, -1)
                )
                drawn = children(shape.drafting, rows[-1], coin.shape[-1], coin)
                drawn = torch.where(present, drawn, -1).flatten(1)
                if engine.selector.by_request and depth == engine.trunk:
                    path = torch.arange(drawn.shape[1], device=self.device)
                    drawn = torch.where(path < state.numbers[:, :1], drawn, -1)
                tokens = torch.cat([tokens, drawn], 1)
        faults = torch.stack([level[..., 0].isnan().any(1) for level in rows] or [state.length < 0])
        self.drafted = _Drafted(
            tokens,
            coins,
            torch.cat(logits, 1) if self.kernel else None,
            self._padded(rows, engine.pair.vocab) if self.by_rows else None,
            self._padded(hidden, engine.pair.draft.hidden_size) if engine.hidden else None,
            faults.any(0),
        )

    def _padded(self, levels: list[Tensor], width: int) -> Tensor:
        """[B, N, width] of the levels [B, P, width] where the draft was run, 0 at the other nodes."""
        rest = self.shape.nodes - sum(level.shape[1] for level in levels)
        return torch.cat(
            [*levels, torch.zeros(len(self.found), rest, width, device=self.device)], 1
        )

    def verify(self) -> None:
        """Stage 2: run the target on the tree, verify, commit."""
        engine, tree = self.engine, self.drafted
        out = self.target(tree.tokens, self.state.length, 0)
        target = probabilities(out.logits, engine.sampling) if self.by_rows else None
        constant = torch.nan if self.constant is None else self.constant
        weight = torch.full_like(tree.tokens, constant, dtype=torch.float32)
        if engine.gate:
            hidden = (
                torch.cat([tree.hidden, out.hidden.float()], -1)
                if engine.gate.needs_hidden
                else None
            )
            weight = engine.gate(tree.rows, target, hidden)
        if self.kernel:
            verdict, cost = self._from_logits(out.logits, target, weight)
            fault = verdict.node < 0
        else:
            verdict, cost = self._from_rows(target, weight)
            fault = target[..., 0].isnan().any(1)
        fault = torch.where(tree.fault, 1, torch.where(fault, 2, 0))
        verdict, before = Verdict(verdict.node.clamp_min(0), verdict.token), ()
        if self.state.root:
            read = DraftTree(tree.tokens, self.shape.parents, tree.rows, target)
            states = tree.hidden, out.hidden.float()
            before = engine.selector.update(read, states, verdict.node, self.paths)
        self._commit(verdict, cost, self._share(weight, cost), fault, before)

    def _from_logits(
        self, logits: Tensor, target: Tensor | None, weight: Tensor
    ) -> tuple[Verdict, Tensor]:
        """Verdict and substitutions [B, N] of the method's kernel; nothing but what it read was
        computed for it.
        """
        tree, sampling, cuts = self.drafted, self.engine.sampling, ()
        if _filtered(sampling):
            ran = tree.rows[:, : tree.logits.shape[1]]
            cuts = cut(logits, target > 0), cut(tree.logits, ran > 0)
        found = self.kernel(
            logits,
            tree.logits,
            tree.tokens,
            self.shape.parents,
            weight,
            tree.coins[:, :2],
            sampling.temperature,
            *cuts,
        )
        return found.verdict, found.substitutions

    def _from_rows(self, target: Tensor, weight: Tensor) -> tuple[Verdict, Tensor]:
        """Verdict and substitutions [B, N] of the method's law."""
        engine, drafted = self.engine, self.drafted
        tree = DraftTree(drafted.tokens, self.shape.parents, drafted.rows, target)
        relaxed = relax(
            tree, engine.relaxation, weight if engine.gate else None, spent=self.state.spent
        )
        return draw(engine.method.unchecked(relaxed), drafted.coins[:, :2]), substitutions(
            tree, relaxed
        )

    def _share(self, weight: Tensor, cost: Tensor) -> Tensor:
        """[B, N] the draft's share at each node, as `Batch` has it."""
        if self.engine.relaxation.budget is not None:
            weight = torch.where(cost > 0, weight, 0)
        ran = (self.drafted.tokens >= 0) & (self.depths < self.drafted_depths)
        return torch.where(ran, weight.float(), torch.nan)

    def _commit(
        self,
        verdict: Verdict,
        cost: Tensor,
        share: Tensor,
        fault: Tensor,
        before: tuple[Tensor, ...],
    ) -> None:
        """Move the caches, advance every row that does not stand still, and write what the host
        will read.
        """
        tokens, node, state = self.drafted.tokens, verdict.node, self.state
        path, accepted = self.paths[node], self.depths[node]
        cost, share = cost.double().gather(1, path), share.double().gather(1, path)
        if not self.shape.is_chain:
            self.target.keep(state.length, path, accepted)
            self.draft.keep(state.length, path, accepted.clamp_max(self.drafted_depths - 1))
        moving = (state.length < state.limit) & (fault == 0)
        recent = torch.stack([tokens.gather(1, node.unsqueeze(1)).squeeze(1), verdict.token], 1)
        state.recent.copy_(torch.where(moving.unsqueeze(1), recent, state.recent))
        paid = moving.unsqueeze(1) & (
            torch.arange(path.shape[1], device=self.device) <= accepted.unsqueeze(1)
        )
        state.spent.add_(torch.where(paid, cost, 0).sum(1))
        state.length.add_(torch.where(moving, 1 + accepted, 0))
        for old, new in zip(state.before, before, strict=True):
            old.copy_(torch.where(moving.view(-1, *[1] * (new.ndim - 1)), new, old))
        if state.root:
            state.look()
        verdicts = torch.stack([fault, node, verdict.token], 1)
        found = [verdicts.double(), tokens.double(), cost, share, state.numbers.double()]
        self.found.copy_(torch.cat(found, 1))


def _compiled(stage: Callable[[], None], cpp_wrapper: bool) -> Callable[[], None]:
    """The stage as torch.compile makes it when it is first run, its operations called from Python
    or from C++.

    What is asked before every later run, whether the program still fits, is left out: nothing of a
    step changes but the numbers in its buffers.
    """
    program, known = (
        torch.compile(stage, fullgraph=True, dynamic=False, options={"cpp_wrapper": cpp_wrapper}),
        False,
    )

    def run() -> None:
        nonlocal known
        if known:
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                return program()
        # Every step has programs of its own, however many there are.
        limits = torch._dynamo.config.patch(
            recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20
        )
        with limits, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is computed once a process
            try:
                program()
            except (
                torch._dynamo.exc.TorchDynamoException,
                torch._inductor.exc.InvalidCxxCompiler,
            ) as error:
                raise ValueError(
                    f"`compile` does not work here: {str(error).strip().splitlines()[0]}; on a CPU"
                    " it needs a C++ compiler such as g++: install one, or leave `compile` out"
                ) from error
        known = True

    return run


class _Side:
    """One model and its cache, every row of which is written at slots of its own and seen whole
    through a mask.

    Node -1 is the token before the root.
    """

    def __init__(self, model: Model, cache: PackedCache, shape: DraftShape, size: int):
        self.model, self.cache, device = model, cache, model.device
        if cache.positions is None:
            cache.positions = torch.zeros(size, cache.capacity, dtype=torch.long, device=device)
        self.slots, self.last = torch.arange(cache.capacity, device=device), shape.nodes
        self.nodes = torch.arange(-1, shape.nodes, device=device)
        self.depths = on_device((-1, *shape.depths), device)
        # What node -1 and the nodes of the tree see: the committed tokens, each node of the tree,
        # slots after it.
        seen = pad(pad(shape.ancestors, (1, 0), value=True), (0, 1, 1, 0), value=False)
        seen[0, 0] = True
        mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill_(
            ~seen, torch.finfo(model.dtype).min
        )
        self.mask = mask.to(device)

    def __call__(self, tokens: Tensor, length: Tensor, first: int) -> Output:
        """Run the model on the nodes from `first` on.

        tokens: [B, Q], -1 where a row lacks the node.
        """
        nodes = slice(1 + first, 1 + first + tokens.shape[1])
        length = length.unsqueeze(1)
        positions = (length + self.depths[nodes]).clamp_min(0)
        # A prompt of one token has none before its root: what is computed for it goes into a slot
        # that nothing sees.
        slots = (length + self.nodes[nodes]) % len(self.slots)
        column = (self.slots - length).clamp(-1, self.last) + 1
        mask = (
            self.mask[nodes]
            .index_select(1, column.flatten())
            .view(-1, *column.shape)
            .transpose(0, 1)
        )
        return self.model.at_slots(
            tokens.clamp_min(0), positions, slots, mask.contiguous().unsqueeze(1), self.cache
        )

    def keep(self, length: Tensor, path: Tensor, reach: Tensor) -> None:
        """Copy the nodes on `path` [B, L + 1] down to the positions after the root, as far as
        `reach` [B].
        """
        step = torch.arange(1, path.shape[1], device=path.device)
        to = length.unsqueeze(1) + step
        self.cache.move(
            torch.where(step <= reach.unsqueeze(1), length.unsqueeze(1) + path[:, 1:], to), to
        )


def _kernel(engine: Engine, shape: DraftShape, wanted: bool | None) -> Callable | None:
    """The method's kernel, None where the law must verify.

    A budget changes weights from node to node and other rules are no blends: both need rows.
    Kernels do not merge equal prefixes of i.i.d. paths, as laws do, and would accept less.
    """
    rule, device = engine.relaxation, engine.pair.target.device.type
    blend = (
        rule.budget is None
        and rule.blend == "probabilities"
        and (engine.gate or rule.constant is not None)
    )
    if wanted is None:
        wanted = (device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and find_spec(
            "triton"
        ) is not None
    fits = (
        blend
        and shape.depth
        and shape.drafting != "paths"
        and engine.pair.target.dtype.itemsize < 8
    )
    return engine.method.kernel if wanted and fits else None


def _filtered(sampling: Sampling) -> bool:
    """Whether tokens are left out other than by a temperature of 0."""
    return sampling.temperature > 0 and sampling != Sampling(sampling.temperature)


@cache
def _shared(device: torch.device) -> tuple:
    """The stream on which steps are captured, and the memory that all graphs of a device share:
    what one needs between its two stages it holds, so that no other is given that memory.
    """
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
