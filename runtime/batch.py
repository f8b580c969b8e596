"""The batch between steps: the requests in its rows, both caches, and the eager step.

Rows accept different lengths; each keeps its own length in both caches. The draft's cache is never
recomputed: after a rejection it is rolled back, and after full acceptance the one token it lacks
rides along with the next root.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import chain_twin
from .cache import PackedCache
from .choosers import StepContext
from .completion import Completion, Request, Stops
from .drafting import DraftShape
from .forward import Model, Output
from .sampling import probabilities
from .setup import Setup
from .slots import Place, Side
from .step import Outcome, Rows, Step
from .uniforms import uniforms

PREFILL = 512
SHARED = 16  # tokens of a common beginning that pay for the second call of a model
SLOTS = 64  # caches grow and shrink by so many slots, so that most changes of requests move nothing
# Random numbers of so many steps are computed together if a step needs at most MOST_LANES of them.
AHEAD = 8
MOST_LANES = 32


@dataclass
class Row:
    """One request that is being decoded.

    index:  key of the request.
    length: committed tokens before the root.
    recent: the token before the root, and the root.
    behind: whether the draft's cache lacks the token before the root: all drafted were accepted.
    active: whether the text goes on; a row that has ended stands still until another request takes
            its place or it is dropped.
    """

    index: int
    request: Request
    stops: Stops
    completion: Completion = field(default_factory=Completion)
    behind: bool = False
    active: bool = True
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        tokens = self.request.tokens
        self.length, self.recent = len(tokens) - 1, [*tokens[:1], *tokens][-2:]

    def commit(self, setup: Setup, shape: DraftShape, said: Said) -> list[int]:
        """Add one step to the text; the tokens that it committed."""
        if not self.active:
            return []
        done, request, path = self.completion, self.request, shape.paths[said.node]
        block = [*(said.tokens[node] for node in path[1:]), said.bonus]
        room = request.new_tokens - len(done.tokens)
        new, done.finished = self._until_end(setup, block[:room])
        self.active = not done.finished and len(new) < room
        # What was drafted behind the end of the text is not counted.
        reach = shape.depth if self.active else len(new)
        nodes = zip(shape.depths, said.tokens, strict=False)
        drafted = [depth for depth, token in nodes if 0 < depth <= reach and token >= 0]
        accepted = min(len(path) - 1, len(new))
        done.add_step(new, accepted, drafted, setup.depth, said.cost, said.weight)
        done.draft_calls += said.ran
        if self.active:
            self.length += len(path)
            self.recent = [said.tokens[path[-1]], said.bonus]
            self.behind = len(path) > max(said.ran, 1)
        else:
            done.text = self.stops.cut(done.tokens)
            done.seconds = time.perf_counter() - self.began
        return new

    def _until_end(self, setup: Setup, new: list[int]) -> tuple[list[int], bool]:
        """The new tokens up to the end of the text, and whether an end token or a stop string ends
        it.
        """
        before = self.completion.tokens
        for count, token in enumerate(new, 1):
            if token in setup.pair.eos or self.stops.ended(before + new[:count]):
                return new[:count], True
        return new, False


@dataclass
class Said:
    """What a step says of one row, as the host reads it.

    tokens: of all nodes; ran: depths on which the draft was run.
    node, bonus: where the accepted path ends, and the token behind it.
    cost, weight: substitutions and the draft's share from the root to there, see
        `Completion.add_step`.
    """

    tokens: list[int]
    ran: int
    node: int
    bonus: int
    cost: list[float]
    weight: list[float]


class Batch:
    """Rows that are decoded together, their prompts in both caches."""

    def __init__(self, setup: Setup, requests: dict[int, Request]):
        pair = setup.pair
        self.setup, self.device = setup, pair.target.device
        self.rows = [
            Row(index, request, Stops(setup.pair.tokenizer, request.stop))
            for index, request in requests.items()
        ]
        lanes = 2 + max(shape.lanes for shape in setup.shapes)
        self.uniforms = _Uniforms(self.device, lanes, setup.depth + 1)
        self.memory = setup.selector.init_state(len(requests), pair, self.device)
        tokens, _ = padded([row.request.tokens for row in self.rows], self.device)
        self.prefilled = tokens.shape[1] - 1
        room = capacity(setup, self.rows)
        self.target, self.draft = (
            Side(model, model.cache(room), self.device) for model in (pair.target, pair.draft)
        )
        prefill(pair.target, tokens[:, :-1], self.target.cache)
        if setup.depth:
            prefill(pair.draft, tokens[:, :-1], self.draft.cache)
        # A module that was moved or cast has other masks.
        key = self.device, pair.target.dtype, pair.draft.device, pair.draft.dtype
        self.steps: dict[DraftShape, Step] = setup.eager.setdefault(key, {})

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows, device=self.device)
        self.rows = [self.rows[row] for row in rows]
        self.memory = tuple(values[index] for values in self.memory)
        self.uniforms.clear()
        for side in (self.target, self.draft):
            side.cache.select(index)

    def replace(self, rows: list[int], fresh: Batch) -> None:
        """Put the rows of `fresh`, not decoded yet, in the place of these rows, which have
        ended.
        """
        index = torch.tensor(rows, device=self.device)
        for row, new in zip(rows, fresh.rows, strict=True):
            self.rows[row] = new
        self.memory = tuple(values.index_fill(0, index, 0) for values in self.memory)
        self.uniforms.clear()
        room = capacity(self.setup, self.rows)
        for side, new in ((self.target, fresh.target), (self.draft, fresh.draft)):
            if side.cache.capacity != room:
                side.cache.resize(room)
            side.cache.replace(index, new.cache, fresh.prefilled)

    def step(self) -> list[list[int]]:
        """One block for every active row; the tokens that each row committed.

        A row whose text ends here is not active afterwards.
        """
        setup, rows = self.setup, self._state()
        step, root, paths = self._chosen(rows)
        outcome = step(rows, self.uniforms.next(self.rows), root, paths)
        self.memory, drafted = outcome.memory, outcome.drafted
        # Here the device is read.
        tokens, nodes, bonus = (x.tolist() for x in (drafted.tokens, outcome.node, outcome.bonus))
        costs, weights = self._spending(step, outcome)
        depths = step.shape.depths
        if any(depths[node] != node for node in nodes):  # other paths lie where they belong
            step.keep(rows, outcome.node, drafted.ran)
        found = zip(self.rows, tokens, nodes, bonus, costs, weights, strict=True)
        return [
            row.commit(setup, step.shape, Said(tokens, drafted.ran, node, end, cost, weight))
            for row, tokens, node, end, cost, weight in found
        ]

    def _state(self) -> Rows:
        """The rows as a step sees them."""
        lengths = [row.length for row in self.rows]
        place = Place(lengths, self.device)
        recent = torch.tensor([row.recent for row in self.rows], device=self.device)
        spent = None
        if self.setup.relaxer.rule.budget is not None:
            spent = [row.completion.substitutions for row in self.rows]
            spent = torch.tensor(spent, dtype=torch.float64, device=self.device)
        behind = any(row.behind for row in self.rows)
        sides = self.target, self.draft
        return Rows(place, recent, behind, spent, *sides, self._check, self.setup.lap)

    def _chosen(self, rows: Rows) -> tuple[Step, Output | None, Tensor | None]:
        """This step's tree: its step, the draft's output at the root if the choice asked for it,
        and how many paths each row wants if rows differ in it.
        """
        setup, selector = self.setup, self.setup.selector
        if len(setup.shapes) == 1:
            return self._step(setup.shape), None, None
        root = self._step(setup.shape).draft_root(rows)
        numbers = features(setup, self.memory, root, rows.place.length)
        active = [row.active for row in self.rows]
        shape = setup.shapes[selector.select(numbers.tolist(), active)]
        return self._step(shape), root, numbers[:, 0] if selector.by_request else None

    def _step(self, shape: DraftShape) -> Step:
        if shape not in self.steps:
            twin = chain_twin.serves(self.setup.method, shape.parents, self.device)
            self.steps[shape] = Step(self.setup, shape, "twin" if twin else "law")
        return self.steps[shape]

    def _spending(
        self, step: Step, outcome: Outcome
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Lists, one a row, of `Said.cost` and `Said.weight`."""
        if outcome.cost is not None:
            cost, weight = step.spending(outcome)
            return cost.tolist(), weight.tolist()
        # Every row is the target's own, which is known without asking the device.
        size, depths, ran = len(self.rows), step.shape.depth + 1, [outcome.drafted.ran]
        if self.setup.selector.confidence:  # some chains ended before others
            ran = (outcome.drafted.tokens[:, 1:] >= 0).sum(1).tolist()
        weights = [[0.0] * count + [math.nan] * (depths - count) for count in ran]
        return [[0.0] * depths] * size, weights * (size // len(ran))

    def _check(self, numbers: Tensor, which: str) -> None:
        refuse_nan_entries(numbers, which, [row.index for row in self.rows])


class _Uniforms:
    """The random numbers of every row, from a table that reaches as far as the next steps can go:
    to compute those of AHEAD steps costs as much as those of one.

    lanes: numbers that a step needs; reach: tokens that it can commit at most.
    """

    def __init__(self, device: torch.device, lanes: int, reach: int):
        self.device, self.lanes = device, lanes
        self.steps = AHEAD if lanes <= MOST_LANES else 1
        self.ahead = 1 + (self.steps - 1) * reach
        self.clear()

    def clear(self) -> None:
        """Forget the table: other requests stand in the rows."""
        self.left = 0

    def next(self, rows: list[Row]) -> Tensor:
        """[B, lanes] the numbers of this step, a function of each row's seed and length."""
        if not self.left:
            self.since, self.left = [row.length for row in rows], self.steps
            seed = torch.tensor([row.request.seed for row in rows], device=self.device)
            length = torch.tensor(self.since, device=self.device)
            position = length.unsqueeze(1) + torch.arange(1, self.ahead + 1, device=self.device)
            table = uniforms(seed.repeat_interleave(self.ahead), position.flatten(), self.lanes)
            self.table = table.view(len(rows), self.ahead, self.lanes)
        self.left -= 1
        gone = [row.length - since for row, since in zip(rows, self.since, strict=True)]
        if len(set(gone)) == 1:
            return self.table[:, gone[0]]
        index = torch.tensor(gone, device=self.device)
        return self.table[torch.arange(len(gone), device=self.device), index]


def features(setup: Setup, memory: tuple[Tensor, ...], root: Output, length: Tensor) -> Tensor:
    """[B, X] what the selector's choice reads, from the draft's output at the root."""
    kept = slice(-1 - setup.selector.looks_back, None)
    rows = probabilities(root.logits[:, kept], setup.sampling)
    hidden = root.hidden[:, kept] if setup.hidden else None
    return setup.selector.features(StepContext(memory, rows, hidden, length))


def capacity(setup: Setup, rows: list[Row]) -> int:
    """Slots that the longest request can come to need: its text and a tree, rounded up to SLOTS."""
    longest = max(len(row.request.tokens) + row.request.new_tokens for row in rows)
    return -(-(longest + setup.depth + setup.shape.nodes + 3) // SLOTS) * SLOTS


def padded(rows: list[list[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens [B, T] of the rows, padded on the right with 0, and their number [B]."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    return tokens, torch.tensor([len(row) for row in rows], device=device)


def prefill(model: Model, tokens: Tensor, cache: PackedCache) -> None:
    """Fill an empty cache with tokens [B, X], right-padded; nothing later sees the padding.

    Equal rows are computed once, and so is the beginning that all rows share; both are copied.
    """
    if not tokens.shape[1]:
        return
    rows, inverse = tokens.unique(dim=0, return_inverse=True)
    if len(rows) == len(tokens):
        rows = tokens
    shared = int((rows == rows[:1]).all(0).cumprod(0).sum())
    begin = shared if len(rows) > 1 and shared >= SHARED else 0
    write_prompts(model, rows[:1, :begin], cache, 0)
    if begin:
        cache.select(torch.zeros(len(rows), dtype=torch.long, device=tokens.device))
    write_prompts(model, rows, cache, begin)
    if len(rows) < len(tokens):
        cache.select(inverse)


def write_prompts(model: Model, tokens: Tensor, cache: PackedCache, begin: int) -> None:
    """Write the tokens [B, X] from position `begin` on, in chunks of PREFILL."""
    for start in range(begin, tokens.shape[1], PREFILL):
        chunk = tokens[:, start : start + PREFILL]
        slot = torch.arange(start + chunk.shape[1], device=tokens.device)
        positions = slot[start:].expand(len(tokens), -1)
        visible = (slot <= slot[start:].unsqueeze(1)).expand(len(tokens), -1, -1)
        model(chunk, positions, visible, cache, start, last_only=True)


def refuse_nan(rows: Tensor, which: str, prompts: list[int]) -> None:
    """ValueError naming the prompt where a model gave a row [B, ..., V] that is not a
    distribution.
    """
    refuse_nan_entries(rows[..., 0], which, prompts)


def refuse_nan_entries(entries: Tensor, which: str, prompts: list[int]) -> None:
    """The same for one entry [B, ...] of each row: a row is NaN throughout or nowhere."""
    seen = (
        entries.numpy() if entries.is_cpu else entries
    )  # whose small sums take a third of the time
    if math.isnan(seen.sum()):
        bad = entries.isnan().reshape(len(entries), -1).any(-1)
        raise not_finite(which, prompts[int(bad.int().argmax())])


def not_finite(which: str, prompt: int) -> ValueError:
    return ValueError(
        f"the {which} model gave logits that are not finite for prompt {prompt}; "
        "try another dtype, or check the weights"
    )
