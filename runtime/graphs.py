"""The step with state on the device, whose shapes never change and which never waits for the host:
compiled, or captured as a pair of CUDA graphs.

Between steps everything stands in buffers of fixed size; every token sees the whole capacity
through a mask that is computed from `length` on the device. The draft always runs the token before
the root beside the root: after full acceptance its cache lacks that token, otherwise the same keys
and values are written again.

If there is one shape, the host reads one small tensor a step, and only after it has launched the
next step. So it sees one step late what ends a text (an end token, a stop string), and it throws
the step away that was under way. A row stands still on the device if its text has all the tokens
that it may have; this bounds the slots that it can need. A row with numbers that are not finite
stands still too. It is named when its step is read.

graph 1, the draft: random numbers, one call of the draft a depth, children.
graph 2, the target: one call on the tree, weights, verification, commit, and what the host will
    read.

A selector may have several shapes. Every shape that is chosen gets a step; all steps share rows and
caches. A step ends by running the draft at the new root. The next choice reads this, and the next
tree starts from it. In this case the host reads each step before it launches the next.

Shapes that never change can also be compiled: an engine that is `compiled` has both stages made
into one program each by torch.compile before they are captured. On a CPU both stages are compiled
into one program: entering a compiled program costs about 10 % of running it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..verifier.methods import METHODS
from .batch import Batch, Row, Said, capacity, features, not_finite
from .drafting import ROOT, DraftShape
from .forward import Output
from .setup import Setup
from .slots import Place, Side
from .step import Outcome, Rows, Step
from .uniforms import uniforms

# Capacities are multiples of so many slots, so that few graphs serve texts of all lengths.
BUCKET = 256
KEPT = 2  # states that an engine keeps; each has caches of its own


def obstacle(setup: Setup) -> str:
    """Why no step with state on the device can stand in for `Batch.step`, empty if one can."""
    pair = setup.pair
    for model in (pair.target, pair.draft):
        if not model.lean:
            return f"{model.name} goes through transformers: {model.obstacle}"
        if model.window:
            return f"layers of {model.name} see a window of tokens"
    if pair.target.device != pair.draft.device:
        return "the two models are on different devices"
    if setup.selector.confidence:
        return "the host must see where the draft is not confident"
    if setup.method not in METHODS.values():
        return "a method of your own may wait for the device"
    if setup.relaxer.checked:
        return "the answers of a weight function of your own are looked at"
    return ""


class StaticBatch:
    """A batch whose rows are decoded by static steps; it never changes its size.

    A step of the only shape is read one step late, one that was chosen at once.
    """

    def __init__(self, fresh: Batch):
        """Takes over the requests of `fresh`, prefilled and not decoded yet."""
        self.setup, self.rows = fresh.setup, list(fresh.rows)
        # A step under way, and the rows that it was launched for.
        self.pending: tuple[_Read, list[Row]] | None = None
        self.static = _state(self.setup, len(self.rows), capacity(self.setup, self.rows))
        self._load(list(range(len(self.rows))), fresh)

    def select(self, rows: list[int]) -> None:
        """Rows without a request stay: another size would be another graph."""

    def replace(self, rows: list[int], fresh: Batch) -> None:
        for row, new in zip(rows, fresh.rows, strict=True):
            self.rows[row] = new
        room = capacity(self.setup, self.rows)
        if room > self.static.capacity:
            before, self.static = self.static, _state(self.setup, len(self.rows), room)
            self.static.grow(before)
        self._load(rows, fresh)

    def _load(self, rows: list[int], fresh: Batch) -> None:
        self.static.load(rows, fresh)
        if self.static.root:
            self.numbers = self.static.numbers.tolist()

    def step(self) -> list[list[int]]:
        """Launch one block for every row; then read, record and return those of the step before, or
        of this one if the next choice waits for it.
        """
        if self.static.root:
            active = [row.active for row in self.rows]
            chosen = self.setup.shapes[self.setup.selector.select(self.numbers, active)]
            return self._recorded(self.static.step(chosen)(), self.rows)
        before = self.pending
        self.pending = self.static.step(self.setup.shape)(), list(self.rows)
        return self._recorded(*before) if before else [[] for _ in self.rows]

    def _recorded(self, read: _Read, launched: list[Row]) -> list[list[int]]:
        emitted, self.numbers = [], []
        for row, was, values in zip(self.rows, launched, read.wait(), strict=True):
            fault, said, numbers = read.said(values)
            self.numbers.append(numbers)
            # A request that came after this step was launched has no part in it.
            if row is was and row.active and fault:
                self.setup.static.clear()  # their caches hold what is not finite
                raise not_finite("draft" if fault == 1 else "target", row.index)
            emitted.append(row.commit(self.setup, read.shape, said) if row is was else [])
        return emitted


def _state(setup: Setup, size: int, room: int) -> StaticState:
    """The engine's state of `size` rows and at least `room` slots, a new one if it has none."""
    room = -(-room // BUCKET) * BUCKET
    # a module that was moved or cast has other weights than those a graph reads
    models = setup.pair.target, setup.pair.draft
    weights = tuple(model.module.get_input_embeddings().weight.data_ptr() for model in models)
    key = size, room, *weights
    state = setup.static.pop(key, None) or StaticState(setup, size, room)
    setup.static[key] = state
    for old in list(setup.static)[:-KEPT]:
        setup.static.pop(old).steps.clear()  # which know it: its caches are free at once
    return state


@dataclass
class _Read:
    """What the host reads of a step.

    values: [B, 3 + N + 2 (L + 1) + X] float64: 0 if the row is sound, 1 or 2 if draft or target are
        not; stopping node, bonus token; tokens of all nodes; substitutions and the draft's share
        along the path; the numbers of `StaticState`.
    """

    shape: DraftShape
    ran: int
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

    def said(self, values: list[float]) -> tuple[int, Said, list[float]]:
        """(fault, what is said, the numbers for the next choice) of one row."""
        fault, node, bonus, *rest = values
        nodes, depths = self.shape.nodes, self.shape.depth + 1
        tokens = [int(token) for token in rest[:nodes]]
        cost, weight = rest[nodes : nodes + depths], rest[nodes + depths : nodes + 2 * depths]
        said = Said(tokens, self.ran, int(node), int(bonus), cost, weight)
        return int(fault), said, rest[nodes + 2 * depths :]


class StaticState:
    """`size` rows between two steps, their caches of `capacity` slots, and the steps that advance
    them.

    rows:   as a step sees them.
    length, seed: [B] int64; limit: the length from which on a row stands still; all do until `load`
        gives them a request.
    faults: what the step under way found unsound, [B] bool each, with 1 for draft and 2 for target.
    memory: what the selector keeps.
    steps:  by shape, made when the shape is first chosen.
    root:   if there are several shapes, the draft's output at the root, else None.
    numbers: [B, X] what the next choice reads.
    """

    def __init__(self, setup: Setup, size: int, room: int):
        self.setup, self.capacity, pair = setup, room, setup.pair
        self.device, self.steps = pair.target.device, {}
        shape = 3, size
        self.length, self.seed, self.limit = torch.zeros(
            shape, dtype=torch.long, device=self.device
        )
        recent = torch.zeros(size, 2, dtype=torch.long, device=self.device)
        spent = torch.zeros(size, dtype=torch.float64, device=self.device)
        self.memory = setup.selector.init_state(size, pair, self.device)
        sides = (Side(model, model.cache(room), self.device) for model in (pair.target, pair.draft))
        place = Place(self.length, self.device)
        self.rows = Rows(place, recent, True, spent, *sides, self._note)
        self.faults: list[tuple[int, Tensor]] = []
        # One call each allocates the caches.
        self.rooted = Step(setup, ROOT, "law")
        self.rows.target(self.rooted.target, place, recent, -1, False)
        self.root, self.numbers = None, torch.zeros(size, 0, device=self.device)
        if setup.depth:
            self.rooted.draft_root(self.rows)
        if len(setup.shapes) > 1:
            self.root, self.numbers = self._seen()

    def step(self, shape: DraftShape) -> StaticStep:
        """The step of this shape."""
        if shape not in self.steps:
            self.steps[shape] = StaticStep(self, shape)
        return self.steps[shape]

    def load(self, rows: list[int], fresh: Batch) -> None:
        """Put the requests of `fresh`, prefilled and not decoded yet, in the place of these
        rows.
        """
        requests = [row.request for row in fresh.rows]
        values = {
            self.length: [row.length for row in fresh.rows],
            self.seed: [request.seed for request in requests],
            self.limit: [len(request.tokens) - 1 + request.new_tokens for request in requests],
            self.rows.recent: [row.recent for row in fresh.rows],
            self.rows.spent: [0.0] * len(requests),
        }
        index = torch.tensor(rows, device=self.device)
        for buffer, new in values.items():
            buffer.index_copy_(0, index, torch.tensor(new, dtype=buffer.dtype, device=self.device))
        self._take(index, fresh.memory, fresh.target, fresh.draft, fresh.prefilled)

    def grow(self, before: StaticState) -> None:
        """Take over all rows of a state with less room."""
        self.length.copy_(before.length)
        self.seed.copy_(before.seed)
        self.limit.copy_(before.limit)
        self.rows.recent.copy_(before.rows.recent)
        self.rows.spent.copy_(before.rows.spent)
        index = torch.arange(len(self.length), device=self.device)
        self._take(index, before.memory, before.rows.target, before.rows.draft, before.capacity)

    def _take(self, index: Tensor, memory, target: Side, draft: Side, filled: int) -> None:
        for here, new in zip(self.memory, memory, strict=True):
            here.index_copy_(0, index, new)
        self.rows.target.cache.replace(index, target.cache, filled)
        self.rows.draft.cache.replace(index, draft.cache, filled)
        if self.root:
            self.look()

    def look(self) -> None:
        """Run the draft on the root and the token before it, for the choice and for the tree that
        is chosen.
        """
        root, numbers = self._seen()
        self.root.logits.copy_(root.logits)
        if self.setup.hidden:
            self.root.hidden.copy_(root.hidden)
        self.numbers.copy_(numbers)

    def _seen(self) -> tuple[Output, Tensor]:
        """`root` and `numbers` as they now are."""
        out = self.rooted.draft_root(self.rows)
        hidden = out.hidden[:, -1:].clone() if self.setup.hidden else None
        root = Output(out.logits[:, -1:].clone(), hidden)
        return root, features(self.setup, self.memory, out, self.length)

    def _note(self, numbers: Tensor, which: str) -> None:
        self.faults.append((1 if which == "draft" else 2, numbers.isnan().any(1)))

    def commit(self, step: Step, outcome: Outcome) -> Tensor:
        """Move the caches, advance every row that does not stand still; what the host will read."""
        rows, node, drafted = self.rows, outcome.node, outcome.drafted
        step.keep(rows, node, drafted.ran)
        fault = torch.zeros_like(node)
        for number, found in self.faults:
            fault = torch.where(found & (fault == 0), number, fault)
        self.faults = []
        moving = (self.length < self.limit) & (fault == 0)
        accepted = step.depths[node]
        cost, weight = step.spending(outcome)
        paid = torch.arange(cost.shape[1], device=self.device) <= accepted.unsqueeze(1)
        rows.spent.add_(torch.where(moving.unsqueeze(1) & paid, cost, 0).sum(1))
        last = drafted.tokens.gather(1, node.unsqueeze(1)).squeeze(1)
        _advance(rows.recent, torch.stack([last, outcome.bonus], 1), moving)
        for old, new in zip(self.memory, outcome.memory, strict=True):
            _advance(old, new, moving)
        self.length.add_(torch.where(moving, 1 + accepted, 0))
        if self.root:
            self.look()
        verdicts = torch.stack([fault, node, outcome.bonus], 1)
        found = verdicts, drafted.tokens, cost, weight, self.numbers
        return torch.cat([part.double() for part in found], 1)


def _advance(old: Tensor, new: Tensor, moving: Tensor) -> None:
    """Put `new` [B, ...] into the buffer `old` in the rows that are `moving` [B]."""
    old.copy_(torch.where(moving.view(-1, *[1] * (new.ndim - 1)), new, old))


class StaticStep:
    """The step of one shape for the rows of a state.

    kernels: whether the method's kernel verifies; by default it does where it can.
    stages:  {"draft": function, "target": function}, or {"step": function} if both are compiled
        together. The key is the name under which the time is reported.
    """

    def __init__(self, state: StaticState, shape: DraftShape, kernels: bool | None = None):
        self.state, self.setup, self.device = state, state.setup, state.device
        way = "kernel" if _has_kernel(state.setup, shape, kernels) else "law"
        self.step = Step(state.setup, shape, way)
        size, cuda = len(state.length), self.device.type == "cuda"
        width = 3 + shape.nodes + 2 * (shape.depth + 1) + state.numbers.shape[1]
        self.found = torch.zeros(size, width, dtype=torch.float64, device=self.device)
        host = [torch.zeros(size, width, dtype=torch.float64, pin_memory=cuda) for _ in range(2)]
        events = [torch.cuda.Event() if cuda else None for _ in host]
        self.reads = [
            _Read(shape, self.step.runs, values, event)
            for values, event in zip(host, events, strict=True)
        ]
        limit = state.limit.clone()
        with torch.cuda.device_of(limit):
            state.limit.zero_()
            self.stages = {"draft": self.draw_tree, "target": self.verify}
            self._warm()
            if state.setup.compiled:
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
                self.setup.lap(stage)
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
        self.angles = [model.angles for model in (self.setup.pair.target, self.setup.pair.draft)]
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
        state = self.state
        state.faults = []
        numbers = uniforms(state.seed, state.length + 1, 2 + self.step.shape.lanes)
        paths = state.numbers[:, 0] if self.setup.selector.by_request else None
        self.drafted = self.step.draft_tree(state.rows, numbers, state.root, paths)

    def verify(self) -> None:
        """Stage 2: run the target on the tree, verify, commit."""
        outcome = self.step.verify_tree(self.state.rows, self.drafted)
        self.found.copy_(self.state.commit(self.step, outcome))


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


def _has_kernel(setup: Setup, shape: DraftShape, wanted: bool | None) -> bool:
    """Whether the method's kernel verifies, else the law must.

    Kernels read logits in single precision or less. They do not merge equal prefixes of i.i.d.
    paths, as laws do, and would accept less.
    """
    device = setup.pair.target.device.type
    if wanted is None:
        wanted = (device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and find_spec(
            "triton"
        ) is not None
    fits = shape.depth and shape.drafting != "paths" and setup.pair.target.dtype.itemsize < 8
    return bool(wanted and fits and setup.method.kernel and setup.relaxer.fusible)


@cache
def _shared(device: torch.device) -> tuple:
    """The stream on which steps are captured, and one memory pool for all graphs of a device.

    A step keeps references to the tensors that its second stage needs, so that the pool cannot hand
    their memory to another graph.
    """
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
