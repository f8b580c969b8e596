"""The batch between steps: committed lengths, both caches, and one block of speculative decoding
for every row.

Rows accept different lengths; each keeps its own length in both caches. The draft's cache is never
recomputed: after a rejection it is rolled back, and after full acceptance the one token it lacks
rides along with the next root.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..verifier.law import DraftTree, Verdict, draw
from ..verifier.relax import relax, substitutions
from ..verifier.tree import on_device
from .chain_twin import sample, serves
from .chain_twin import verdict as chain_verdict
from .choosers import StepContext
from .completion import Completion, Request, cut, stopped
from .drafting import children
from .model import Model, Output
from .sampling import probabilities
from .uniforms import uniforms

if TYPE_CHECKING:
    from .engine import Engine

PREFILL = 512
SLOTS = 64  # caches grow and shrink by so many slots, so that most changes of requests move nothing
AHEAD = 8  # steps whose random numbers are computed together, where a step needs at most MOST_LANES of them
MOST_LANES = 32
LISTS = ("indices", "requests", "active", "began", "lengths", "draft_lengths", "ends")
PER_ROW = ("seed", "spent")


class Batch:
    """`lengths` count the committed tokens before the root; the target's cache holds exactly those.

    `ends` holds the last committed token of every row, which is the root, behind the one before it.
    `length` [B], `draft_length` [B] and `recent` [B, 2] are the same numbers on the device, put
    there when they are first asked for.
    A row whose text has ended is not `active`: it stands still until another takes its place or it
        is dropped.
    """

    def __init__(self, engine: Engine, requests: dict[int, Request]):
        self.engine, self.shape, pair = engine, engine.shape, engine.pair
        self.indices, self.requests = list(requests), list(requests.values())
        self.active, self.began = [True] * len(requests), [time.perf_counter()] * len(requests)
        self.device = pair.target.device
        texts = [request.tokens for request in self.requests]
        tokens, _ = padded(texts, self.device)
        self.lengths, self.draft_lengths = ([len(text) - 1 for text in texts] for _ in range(2))
        self.ends = [[*text[:1], *text][-2:] for text in texts]
        self.tensors: dict[str, Tensor] = {}
        self.serial = serves(engine.method, engine.shape.parents, self.device)
        self.lanes = 2 + max(shape.lanes for shape in engine.shapes)
        self.stock = 0  # steps that `table` still has random numbers for
        self.seed = torch.tensor([request.seed for request in self.requests], device=self.device)
        self.spent = torch.zeros(len(requests), dtype=torch.float64, device=self.device)
        self.before = engine.selector.init_state(len(requests), pair, self.device)
        self.prefilled = tokens.shape[1] - 1
        capacity = self.capacity()
        self.target_cache, self.draft_cache = (
            pair.target.cache(capacity),
            pair.draft.cache(capacity),
        )
        prefill(pair.target, tokens[:, :-1], self.target_cache)
        if engine.depth:
            prefill(pair.draft, tokens[:, :-1], self.draft_cache)

    @property
    def length(self) -> Tensor:
        return self._tensor("lengths")

    @property
    def draft_length(self) -> Tensor:
        return self._tensor("draft_lengths")

    @property
    def recent(self) -> Tensor:
        return self._tensor("ends")

    def _tensor(self, name: str) -> Tensor:
        """One of the lists on the device; whoever changes one of them clears `tensors`."""
        if name not in self.tensors:
            self.tensors[name] = torch.tensor(getattr(self, name), device=self.device)
        return self.tensors[name]

    def capacity(self) -> int:
        """Slots that the longest request here can come to need: its text and a tree, rounded up to
        SLOTS.
        """
        longest = max(len(request.tokens) + request.new_tokens for request in self.requests)
        return -(-(longest + self.engine.depth + self.engine.shape.nodes + 3) // SLOTS) * SLOTS

    def select(self, rows: list[int]) -> None:
        """Keep only these batch rows."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        for name in LISTS:
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        self.tensors = {}
        for name in PER_ROW:
            setattr(self, name, getattr(self, name)[index])
        self.before, self.stock = tuple(rows[index] for rows in self.before), 0
        self.target_cache.select(index)
        self.draft_cache.select(index)

    def replace(self, rows: list[int], fresh: Batch) -> None:
        """Put the rows of `fresh`, not decoded yet, in the place of these rows, which have ended."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self._rename(rows, fresh)
        for name in PER_ROW:
            setattr(self, name, getattr(self, name).index_copy(0, index, getattr(fresh, name)))
        self.before, self.stock = tuple(rows.index_fill(0, index, 0) for rows in self.before), 0
        capacity = self.capacity()
        for cache, new in (
            (self.target_cache, fresh.target_cache),
            (self.draft_cache, fresh.draft_cache),
        ):
            if cache.capacity != capacity:
                cache.resize(capacity)
            cache.replace(index, new, fresh.prefilled)

    def _rename(self, rows: list[int], fresh: Batch) -> None:
        """`replace` what is kept in lists."""
        for name in LISTS:
            values = dict(zip(rows, getattr(fresh, name), strict=True))
            setattr(
                self, name, [values.get(row, old) for row, old in enumerate(getattr(self, name))]
            )
        self.tensors = {}

    def step(self, done: dict[int, Completion]) -> list[list[int]]:
        """One block for every active row; returns the tokens that each row committed and adds them
        to `done`.

        A row whose text ends here is not active afterwards.
        """
        engine = self.engine
        coins = self._coins()
        root, paths = self._begin() if engine.depth else ((None, None), None)
        if self.serial:
            tokens, draft, draft_hidden = self._draft_chain(root, coins[:, 2:])
        else:
            tokens, draft, draft_hidden = self._draft(root, paths, coins[:, 2:])
        engine.lap("draft")
        target, target_hidden = self._target(tokens)
        engine.lap("target")
        tree = DraftTree(tokens, self.shape.parents, draft, target)
        weight = None
        if engine.gate:
            hidden = (
                torch.cat([draft_hidden, target_hidden], -1) if engine.gate.needs_hidden else None
            )
            weight = engine.gate(draft, target, hidden)
        relaxed = relax(tree, engine.relaxation, weight, spent=self.spent)
        if self.serial:
            verdict = chain_verdict(engine.method, relaxed, coins[:, :2])
        else:
            verdict = draw(engine.method.unchecked(relaxed), coins[:, :2])
        cost, share = self._price(tree, relaxed, weight, verdict)
        engine.lap("verify")
        # Here the device is read.
        rows, nodes, extra = tokens.tolist(), verdict.node.tolist(), verdict.token.tolist()
        paths = [self.shape.paths[node] for node in nodes]
        blocks = [
            [row[node] for node in path] + [end]
            for row, path, end in zip(rows, paths, extra, strict=True)
        ]
        emitted = self._record(done, rows, blocks, cost, share)
        if engine.relaxation.budget is not None:
            spent = [done[i].substitutions for i in self.indices]
            self.spent = torch.tensor(spent, dtype=torch.float64, device=self.device)
        if len(engine.shapes) > 1:
            paths = on_device(self.shape.padded_paths, self.device)
            states = draft_hidden, target_hidden
            self.before = engine.selector.update(tree, states, verdict.node, paths)
        if not self.even:
            self._compact(verdict)
        self._advance(blocks)
        return emitted

    def _coins(self) -> Tensor:
        """[B, 2 + lanes] this step's random numbers, from a table that reaches as far as the next
        steps can go.
        """
        steps, reach = AHEAD if self.lanes <= MOST_LANES else 1, self.engine.depth + 1
        if not self.stock:
            ahead = 1 + (steps - 1) * reach
            position = self.length.unsqueeze(1) + torch.arange(1, ahead + 1, device=self.device)
            table = uniforms(self.seed.repeat_interleave(ahead), position.flatten(), self.lanes)
            self.table, self.since = table.view(len(position), ahead, -1), list(self.lengths)
            self.stock = steps
        self.stock -= 1
        if self.aligned and len(set(self.since)) == 1:
            return self.table[:, self.lengths[0] - self.since[0]]
        gone = [now - then for now, then in zip(self.lengths, self.since, strict=True)]
        return self.table[
            torch.arange(len(gone), device=self.device), torch.tensor(gone, device=self.device)
        ]

    @property
    def even(self) -> bool:
        """Whether a chain's slot is its position in every row, so that nothing needs a mask of its
        own or moves.
        """
        return self.serial and self.aligned

    @property
    def aligned(self) -> bool:
        """Whether all rows have the same lengths."""
        return len(set(self.lengths)) == 1 == len(set(self.draft_lengths))

    @property
    def drafted_depths(self) -> int:
        """Depths of this step's tree on which the draft is run."""
        return self.shape.depth + self.engine.leaf

    def _begin(self) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
        """Run the draft on the root and choose this step's tree: ((rows [B, 1, V], hidden states
        [B, 1, H]) of the root, number of paths [B] where requests differ in it).
        """
        engine = self.engine
        out, kept = self._draft_root(), slice(-1 - engine.selector.looks_back, None)
        rows = probabilities(out.logits[:, kept].to(self.device), engine.sampling)
        hidden = out.hidden[:, kept].to(self.device) if engine.hidden else None
        paths = None
        if len(engine.shapes) > 1:
            numbers = engine.selector.features(StepContext(self.before, rows, hidden, self.length))
            self.shape = engine.shapes[engine.selector.select(numbers.tolist(), self.active)]
            paths = numbers[:, 0] if engine.selector.by_request else None
            self.serial = serves(engine.method, self.shape.parents, self.device)
        return (rows[:, -1:], hidden[:, -1:] if engine.hidden else None), paths

    def _draft_chain(self, root: tuple, coins: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`_draft` for a chain: no token is absent but behind its end."""
        engine, ran, lanes = self.engine, [root] if self.shape.depth else [], self.shape.first_lane
        tokens, chances, ended = [self.recent[:, 1:]], [], None
        least = engine.selector.confidence
        for depth in range(self.drafted_depths):
            if depth:
                if least:
                    # A row of zeros gives 0: a chain that has ended does not go on.
                    ended = [chance < least for chance in chances]
                    if all(ended):
                        self.shape = engine.shapes[depth - 1]
                        break
                    ended = (
                        torch.tensor(ended, device=self.device).unsqueeze(1) if any(ended) else None
                    )
                out = self._draft_level(tokens[-1], depth)
                rows = probabilities(out.logits.to(self.device), engine.sampling)
                ran.append(
                    (rows if ended is None else rows.masked_fill(ended.unsqueeze(1), 0), out.hidden)
                )
            if depth < self.shape.depth:
                drawn, chances = sample(ran[-1][0], coins[:, lanes(depth + 1)])
                token = torch.tensor(drawn, device=self.device).unsqueeze(1)
                tokens.append(token if ended is None else token.masked_fill(ended, -1))
        rows, hidden = self._padded(ran)
        refuse_nan(rows, "draft", self.indices)
        return torch.cat(tokens, 1), rows, hidden

    def _draft(
        self, root: tuple, paths: Tensor | None, coins: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draw the tree: tokens [B, N], draft rows [B, N, V] (zero where it was not run), hidden
        states [B, N, H].

        root, paths: see `_begin`; coins: [B, lanes] in [0, 1), see `DraftShape.first_lane`.
        """
        engine, size, ran = self.engine, len(self.length), []
        tokens, (level, hidden), going = self.recent[:, 1:], root, None
        for depth in range(self.drafted_depths):
            if depth:
                if engine.selector.confidence:
                    # No zero row gives a chance: a chain that has ended does not go on.
                    going = (
                        level[:, 0].gather(1, tokens[:, -1:].clamp_min(0))
                        >= engine.selector.confidence
                    )
                    if not going.any():
                        self.shape = engine.shapes[depth - 1]
                        break
                out = self._draft_level(tokens[:, self.shape.bounds[depth] :], depth)
                level = probabilities(out.logits.to(self.device), engine.sampling)
                hidden = out.hidden.to(self.device) if engine.hidden else None
            refuse_nan(level, "draft", self.indices)
            present = (
                tokens[:, self.shape.bounds[depth] :] >= 0 if going is None else going
            ).unsqueeze(-1)
            level = level * present
            ran.append((level, hidden))
            if depth < self.shape.depth:
                first, last = self.shape.bounds[depth + 1 : depth + 3]
                coin = coins.narrow(1, self.shape.first_lane(depth + 1), last - first).reshape(
                    size, level.shape[1], -1
                )
                drawn = children(self.shape.drafting, level, coin.shape[-1], coin)
                drawn = torch.where(present, drawn, -1).flatten(1)
                if paths is not None and depth == engine.trunk:
                    drawn = drawn.where(
                        torch.arange(last - first, device=self.device) < paths.unsqueeze(1), -1
                    )
                tokens = torch.cat([tokens, drawn], 1)
        return tokens, *self._padded(ran)

    def _padded(self, ran: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        """Rows and hidden states of every node, zero at those where the draft was not run."""
        size, rest = len(self.length), self.shape.nodes - sum(level.shape[1] for level, _ in ran)
        missing = torch.zeros(size, rest, self.engine.pair.vocab, device=self.device)
        rows = torch.cat([*(level for level, _ in ran), missing], 1)
        if not self.engine.hidden:
            return rows, None
        missing = torch.zeros(size, rest, self.engine.pair.draft.hidden_size, device=self.device)
        return rows, torch.cat([*(states.float() for _, states in ran), missing], 1)

    def _path(self, verdict: Verdict) -> Tensor:
        """[B, L + 1] nodes from the root to the stopping node, which is repeated after it."""
        return on_device(self.shape.padded_paths, self.device)[verdict.node]

    def _accepted(self, verdict: Verdict) -> Tensor:
        """[B] accepted tokens."""
        return on_device(self.shape.depths, self.device)[verdict.node]

    def _draft_level(self, tokens: Tensor, depth: int) -> Output:
        """Run the draft on the nodes of one depth, tokens [B, X] of all of them."""
        found = tokens.clamp_min(0)
        if self.even:
            start = self.lengths[0] + depth
            return self.engine.pair.draft(
                found, None, None, self.draft_cache, start, self.engine.hidden
            )
        first, last = self.shape.bounds[depth], self.shape.bounds[depth + 1]
        base = max(self.lengths) + 1
        visible = self._tree_visible(self.length + 1, base, first, last, root=1)
        positions = (self.length + depth).unsqueeze(1).expand(-1, last - first)
        start = base + first - 1
        return self.engine.pair.draft(
            found, positions, visible, self.draft_cache, start, self.engine.hidden
        )

    def _draft_root(self) -> Output:
        """Run the draft on the root and, where the last block was accepted whole, on the token
        before it: outputs of the root, or of both tokens.
        """
        model, start = self.engine.pair.draft, max(self.draft_lengths)
        width = 1 + max(
            all_ - here for all_, here in zip(self.lengths, self.draft_lengths, strict=True)
        )
        if self.aligned:
            return model(
                self.recent[:, -width:], None, None, self.draft_cache, start, self.engine.hidden
            )
        lacking = self.length - self.draft_length
        slot = torch.arange(start + width, device=self.device)
        offset = torch.arange(width, device=self.device)
        first = start + width - 1 - lacking
        causal = slot <= (start + offset).unsqueeze(1)
        visible = (slot < self.draft_length[:, None, None]) | (
            (slot >= first[:, None, None]) & causal
        )
        visible = visible | (slot == (start + offset).unsqueeze(1))
        positions = (self.length.unsqueeze(1) - (width - 1) + offset).clamp_min(0)
        out = model(
            self.recent[:, -width:], positions, visible, self.draft_cache, start, self.engine.hidden
        )
        real = offset <= lacking.unsqueeze(1)
        source = torch.where(real, first.unsqueeze(1) + offset, start + width - 1)
        self._move(
            self.draft_cache,
            source,
            torch.where(real, self.draft_length.unsqueeze(1) + offset, start + width - 1),
        )
        return out

    def _tree_visible(self, length: Tensor, base: int, first: int, last: int, root: int) -> Tensor:
        """[B, Q, slots]: nodes first .. last-1 see `length` [B] committed slots, their ancestors
        and themselves.

        root: the node that stands in slot `base`; 0 for the target, 1 for the draft, whose root is
            committed already.
        """
        seen = self.shape.ancestors.to(self.device)[first:last, root:last]
        committed = torch.arange(base, device=self.device) < length[:, None, None]
        rows = (len(length), last - first)
        return torch.cat([committed.expand(*rows, base), seen.expand(*rows, last - root)], -1)

    def _target(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Target rows [B, N, V] and hidden states of the whole tree in one call."""
        engine = self.engine
        base, count = max(self.lengths), self.shape.nodes
        if self.even:
            visible, positions = None, None
        else:
            visible = self._tree_visible(self.length, base, 0, count, root=0)
            positions = self.length.unsqueeze(1) + on_device(self.shape.depths, self.device)
        out = engine.pair.target(
            tokens.clamp_min(0), positions, visible, self.target_cache, base, engine.hidden
        )
        rows = probabilities(out.logits, engine.sampling)
        refuse_nan(rows, "target", self.indices)
        return rows, out.hidden.float() if out.hidden is not None else None

    def _price(self, tree: DraftTree, relaxed: DraftTree, weight: Tensor | None, verdict: Verdict):
        """Lists, one a row: substitutions and the draft's share along its path, see
        `Completion.add_step`.
        """
        if relaxed is tree:  # every row is the target's own
            ran, depths = [self.drafted_depths] * len(tree.tokens), self.shape.depth + 1
            if (
                self.engine.selector.confidence
            ):  # some ended before others; the draft is not run on a chain's end
                ran = (tree.tokens[:, 1:] >= 0).sum(1).tolist()
            return [[0.0] * depths] * len(ran), [
                [0.0] * run + [math.nan] * (depths - run) for run in ran
            ]
        cost, path = substitutions(tree, relaxed), self._path(verdict)
        share = self._share(tree, cost, weight)
        return cost.double().gather(1, path).tolist(), share.gather(1, path).tolist()

    def _share(self, tree: DraftTree, cost: Tensor, weight: Tensor | None) -> Tensor:
        """[B, N] the draft's share at each node; nan where the draft was not run or the relaxation
        is not a blend.

        cost: [B, N] substitutions; a node that a budget left unrelaxed costs nothing.
        """
        if weight is None:
            constant = self.engine.relaxation.constant
            weight = torch.full_like(
                tree.target[..., 0], torch.nan if constant is None else constant
            )
        if self.engine.relaxation.budget is not None:
            weight = torch.where(cost > 0, weight, 0)
        return torch.where(tree.draft.sum(-1) > 0, weight.float(), torch.nan)

    def _record(self, done, tokens, blocks, cost, share) -> list[list[int]]:
        """Add every active row's block to its completion.

        tokens:      of all nodes, a list for each row.
        blocks:      the root, the accepted tokens and the extra one.
        cost, share: see `_price`.
        """
        shape, emitted = self.shape, []
        for row, (_, *block) in enumerate(blocks):
            emitted.append([])
            if not self.active[row]:
                continue
            completion, request = done[self.indices[row]], self.requests[row]
            room = request.new_tokens - len(completion.tokens)
            new, completion.finished = self._until_end(
                completion.tokens, block[:room], request.stop
            )
            # A row that has ended stays where it is, so that its next positions lie in the context
            # as these do.
            self.active[row] = not completion.finished and len(new) < room
            reach = shape.depth if self.active[row] else len(new)
            nodes = zip(shape.depths, tokens[row], strict=True)
            drafted = [depth for depth, token in nodes if 0 < depth <= reach and token >= 0]
            accepted = min(len(block) - 1, len(new))
            completion.add_step(new, accepted, drafted, self.engine.depth, cost[row], share[row])
            completion.draft_calls += self.drafted_depths
            if not self.active[row]:
                text = self.engine.pair.tokenizer.decode(
                    completion.tokens, skip_special_tokens=True
                )
                completion.text, completion.seconds = (
                    cut(text, request.stop),
                    time.perf_counter() - self.began[row],
                )
            emitted[row] = new
        return emitted

    def _until_end(
        self, before: list[int], new: list[int], stop: tuple[str, ...]
    ) -> tuple[list[int], bool]:
        """The new tokens up to the end of the text, and whether an end token or a stop string ends
        it.
        """
        for count, token in enumerate(new, 1):
            if token in self.engine.pair.eos or stopped(
                self.engine.pair.tokenizer, before + new[:count], stop
            ):
                return new[:count], True
        return new, False

    def _compact(self, verdict: Verdict) -> None:
        """Move the accepted path of every row down to its own length, in both caches."""
        shape, accepted, path = self.shape, self._accepted(verdict), self._path(verdict)
        step = torch.arange(path.shape[1], device=self.device)
        base, to = max(self.lengths), self.length.unsqueeze(1) + step
        real = step <= accepted.unsqueeze(1)
        self._keep(self.target_cache, base + path, to, real, base + shape.nodes - 1)
        if run := self._drafted_below_root():
            real = (step >= 1) & (step <= accepted.clamp_max(run).unsqueeze(1))
            self._keep(self.draft_cache, base + path, to, real, base + shape.bounds[run + 1] - 1)

    def _advance(self, blocks: list[list[int]]) -> None:
        """Commit the blocks of the active rows."""
        run = self._drafted_below_root()
        for row, block in enumerate(blocks):
            if self.active[row]:
                self.draft_lengths[row] = self.lengths[row] + 1 + min(len(block) - 2, run)
                self.lengths[row] += len(block) - 1
                self.ends[row] = block[-2:]
        self.tensors = {}

    def _drafted_below_root(self) -> int:
        """Depths below the root whose keys and values the draft's cache holds."""
        return max(self.drafted_depths - 1, 0)

    def _keep(self, cache, source: Tensor, destination: Tensor, real: Tensor, idle: int) -> None:
        """Move the real entries; the others copy the slot `idle`, which no real entry names, onto
        itself.
        """
        self._move(cache, torch.where(real, source, idle), torch.where(real, destination, idle))

    @staticmethod
    def _move(cache, source: Tensor, destination: Tensor) -> None:
        if not torch.equal(source, destination):
            cache.move(source, destination)


def padded(rows: list[list[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens [B, T] of the rows, padded on the right with 0, and their number [B]."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    return tokens, torch.tensor([len(row) for row in rows], device=device)


def prefill(model: Model, tokens: Tensor, cache) -> None:
    """Fill the cache with tokens [B, X], right-padded, in chunks of PREFILL; nothing later sees the
    padding.
    """
    for start in range(0, tokens.shape[1], PREFILL):
        chunk = tokens[:, start : start + PREFILL]
        slot = torch.arange(start + chunk.shape[1], device=tokens.device)
        positions = slot[start:].expand(len(tokens), -1)
        visible = (slot <= slot[start:].unsqueeze(1)).expand(len(tokens), -1, -1)
        model(chunk, positions, visible, cache, start, last_only=True)


def refuse_nan(rows: Tensor, which: str, prompts: list[int]) -> None:
    """ValueError naming the prompt where a model gave a row [B, ..., V] that is not a distribution."""
    seen = rows.numpy() if rows.is_cpu else rows  # whose small sums take a third of the time
    if math.isnan(seen[..., 0].sum()):
        bad = rows[..., 0].isnan().reshape(len(rows), -1).any(-1)
        raise not_finite(which, prompts[int(bad.int().argmax())])


def not_finite(which: str, prompt: int) -> ValueError:
    return ValueError(
        f"the {which} model gave logits that are not finite for prompt {prompt}; "
        "try another dtype, or check the weights"
    )
