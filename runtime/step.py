"""One step of speculative decoding.

    draft_tree    the draft draws a tree of tokens below the last committed token, the root
    run_target    the target gives its row of probabilities at every node, in one call
    relax         these rows move towards the draft's, if a relaxation is asked for
    verify        the method accepts a path from the root and draws one bonus token behind it
    keep          the accepted path moves to its place in both caches

The same functions run eagerly (batch.py), as programs of torch.compile and in CUDA graphs
(graphs.py). What differs is where the state of the rows lies, which is an argument: `Rows`. Random
numbers are arguments too. Nothing here waits for the device but a chain that ends where the draft
is not confident (`Selector.confidence`), which only the eager loop has.

Axis letters are those of verifier/law.py: B rows, N nodes, V vocabulary, L depth, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..verifier.fly import taken
from ..verifier.kernels.cuts import cut
from ..verifier.law import DraftTree, Verdict, unchecked_draw
from ..verifier.relax import Believed
from ..verifier.tree import on_device
from . import chain_twin
from .drafting import DraftShape, children
from .forward import Output
from .sampling import beliefs, probabilities
from .setup import Setup
from .slots import Layout, Place, Side


@dataclass
class Rows:
    """The rows of a batch between two steps.

    place:  how many tokens each has committed before its root.
    recent: [B, 2] int64 the token before the root, and the root.
    behind: whether a row's draft cache may lack the token before the root: after full acceptance.
    spent:  [B] float64 substitutions charged so far, for a budget.
    target, draft: both models with their caches.
    check:  is called with numbers [B, X] of "draft" or "target" that are NaN if rows are unsound.
    lap:    is called with the name of every stage that ends.
    """

    place: Place
    recent: Tensor
    behind: bool
    spent: Tensor
    target: Side
    draft: Side
    check: Callable[[Tensor, str], None]
    lap: Callable[[str], None] = lambda stage: None


@dataclass
class Drafted:
    """What the draft drew.

    tokens:  [B, N] int64, -1 where a row lacks the node.
    uniform: [B, 2] float64 the random numbers for the verdict.
    rows:    [B, N, V] the draft's rows, zero where it was not run; None if nothing reads them.
    logits:  [B, D, V] at the D nodes where it was run; None unless a kernel verifies.
    hidden:  [B, N, H] last hidden states; None unless asked for.
    believed: [B, N, V] what the draft believes; None unless the relaxer reads it beside `rows`.
    ran:     depths on which the draft was run.
    """

    tokens: Tensor
    uniform: Tensor
    rows: Tensor | None
    logits: Tensor | None
    hidden: Tensor | None
    believed: Tensor | None
    ran: int


@dataclass
class Outcome:
    """What a step says.

    drafted: the tree, of which `tokens` and `ran` are read.
    node:    [B] int64 where the accepted path ends.
    bonus:   [B] int64 the token behind it.
    cost:    [B, N] expected substitutions of the token that follows each node; None if no row was
             relaxed.
    weight:  [B, N] the draft's share at each node; None if no row was relaxed.
    memory:  what the selector keeps for its next choice.
    """

    drafted: Drafted
    node: Tensor
    bonus: Tensor
    cost: Tensor | None
    weight: Tensor | None
    memory: tuple[Tensor, ...]


class Step:
    """The step of one shape.

    way:     who verifies: the method's "kernel", its "twin" for chains on a CPU, or its "law".
    ragged:  whether a node may be absent though its parent is there.
    by_rows: whether rows of probabilities are needed, or logits suffice for a kernel.
    runs:    depths on which the draft is run, if no chain ends before.

    A row of the batch is called a request's row; "rows" of a model are its probabilities.
    """

    def __init__(self, setup: Setup, shape: DraftShape, way: str):
        pair, device = setup.pair, setup.pair.target.device
        self.setup, self.shape, self.way = setup, shape, way
        self.bounds, self.runs = shape.bounds, shape.depth + setup.leaf
        self.paths, self.depths = (on_device(x, device) for x in (shape.padded_paths, shape.depths))
        self.target, self.draft = Layout(pair.target, shape), Layout(pair.draft, shape)
        selector, filtered = setup.selector, setup.sampling.filters
        self.ragged = shape.may_lack or selector.by_request
        learned = setup.relaxer.weigh is not None
        self.by_rows = way != "kernel" or learned or filtered or len(setup.shapes) > 1

    def __call__(
        self,
        rows: Rows,
        uniform: Tensor,
        root: Output | None = None,
        paths: Tensor | None = None,
    ) -> Outcome:
        """One step, but for what the host must read first: whether `keep` has paths to move."""
        return self.verify_tree(rows, self.draft_tree(rows, uniform, root, paths))

    def draft_root(self, rows: Rows) -> Output:
        """Run the draft on the root, and on the token before it if a row's cache may lack it."""
        width = 1 + rows.behind
        hidden = self.setup.hidden
        return rows.draft(self.draft, rows.place, rows.recent[:, -width:], 1 - width, hidden)

    def draft_tree(
        self,
        rows: Rows,
        uniform: Tensor,
        root: Output | None = None,
        paths: Tensor | None = None,
    ) -> Drafted:
        """Draw the tree of every row, one call of the draft a depth.

        uniform: [B, 2 + lanes] in [0, 1), two for the verdict and those of `DraftShape.first_lane`.
        root:    the draft's output at the root, if it is known.
        paths:   [B] how many of the tree's paths each row wants, if rows differ in it.
        """
        setup, confidence = self.setup, self.setup.selector.confidence
        tokens, by_depth, logits, hidden = rows.recent[:, 1:], [], [], []
        for depth in range(self.runs):
            first, last = self.bounds[depth : depth + 2]
            here, going = tokens[:, first:], None
            if self.ragged:
                going = here >= 0
            if confidence and depth:
                sure = [chance >= confidence for chance in self._chances(by_depth[-1], here)]
                if not any(sure):
                    break
                if not all(sure):
                    going = torch.tensor(sure, device=here.device).unsqueeze(1)
            if depth:
                out = rows.draft(self.draft, rows.place, here, first, setup.hidden)
            else:
                out = root or self.draft_root(rows)
            logits.append(out.logits[:, first - last :] if depth == 0 else out.logits)
            level = probabilities(logits[-1], setup.sampling)
            by_depth.append(level if going is None else level * going.unsqueeze(-1))
            if setup.hidden:
                hidden.append(out.hidden[:, first - last :].float())
            if depth < self.shape.depth:
                drawn = self._children(by_depth[-1], depth, uniform, going)
                if paths is not None and depth == setup.trunk:
                    path = torch.arange(drawn.shape[1], device=drawn.device)
                    drawn = torch.where(path < paths.unsqueeze(1), drawn, -1)
                tokens = torch.cat([tokens, drawn], 1)
        drafted = Drafted(tokens, uniform[:, :2], None, None, None, None, len(by_depth))
        if self.by_rows:
            drafted.rows = _padded(by_depth, tokens, setup.pair.vocab)
        if setup.relaxer.believes:
            believed = [beliefs(each) for each in logits]
            drafted.believed = _padded(believed, tokens, setup.pair.vocab)
        if self.way == "kernel":
            drafted.logits = torch.cat(logits, 1)
        if setup.hidden:
            drafted.hidden = _padded(hidden, tokens, setup.pair.draft.hidden_size)
        if by_depth and self.by_rows:
            rows.check(drafted.rows[..., 0], "draft")
        elif by_depth:
            rows.check(torch.cat([level[..., 0] for level in by_depth], 1), "draft")
        rows.lap("draft")
        return drafted

    def _chances(self, level: Tensor, tokens: Tensor) -> list[float]:
        """Probabilities of a chain's last tokens [B, 1] in the rows [B, 1, V] before them; 0 for a
        token that is absent, which follows a row of zeros.
        """
        if self.way == "twin":
            return chain_twin.chances(level, tokens)
        return level[:, 0].gather(1, tokens.clamp_min(0))[:, 0].tolist()

    def _children(self, level: Tensor, depth: int, uniform: Tensor, going: Tensor | None) -> Tensor:
        """[B, n] the tokens below the nodes of `depth`, drawn from their rows `level` [B, P, V];
        -1 below nodes that are not `going` [B, P].
        """
        count = len(self.shape.levels[depth + 1])
        coins = uniform.narrow(1, 2 + self.shape.first_lane(depth + 1), count)
        if self.way == "twin":
            drawn = chain_twin.sample(level, coins)
        else:
            coins = coins.reshape(*level.shape[:2], -1)
            drawn = children(self.shape.drafting, level, coins.shape[-1], coins)
        if going is not None:
            drawn = torch.where(going.unsqueeze(-1), drawn, -1)
        return drawn.flatten(1)

    def verify_tree(self, rows: Rows, drafted: Drafted) -> Outcome:
        """Run the target on the tree, relax its rows, verify."""
        setup = self.setup
        out = self.run_target(rows, drafted)
        target = None
        if self.by_rows:
            lossy = setup.method.ahead > 0
            target = beliefs(out.logits) if lossy else probabilities(out.logits, setup.sampling)
            rows.check(target[..., 0], "target")
        rows.lap("target")
        parents = self.shape.parents[: drafted.tokens.shape[1]]
        tree = DraftTree(drafted.tokens, parents, drafted.rows, target)
        hidden, believed = (drafted.hidden, out.hidden), None
        if setup.relaxer.believes:
            believed = Believed(beliefs(out.logits), drafted.believed)
        if self.way == "kernel":
            weight = setup.relaxer.weight(tree, hidden, believed)
            verdict, cost = self.from_logits(drafted, out.logits, target, weight)
            rows.check(verdict.node.double().log().unsqueeze(1), "target")  # unsound rows give -1
        else:
            relaxed, weight, cost = self.relax(tree, hidden, rows.spent, believed)
            verdict = self.verify(relaxed, drafted.uniform)
            if setup.method.ahead:
                cost = taken(tree, verdict.node)
                weight = torch.full_like(cost, torch.nan)
        node, memory = verdict.node.clamp_min(0), ()
        if len(setup.shapes) > 1:
            memory = setup.selector.update(tree, hidden, node, self.paths)
        rows.lap("verify")
        return Outcome(drafted, node, verdict.token, cost, weight, memory)

    def run_target(self, rows: Rows, drafted: Drafted) -> Output:
        """Logits [B, N, V] and hidden states of the whole tree in one call."""
        out = rows.target(self.target, rows.place, drafted.tokens, 0, self.setup.hidden)
        return Output(out.logits, out.hidden.float() if self.setup.hidden else None)

    def relax(self, tree: DraftTree, hidden, spent: Tensor, believed: Believed | None):
        """(the tree with relaxed rows, the draft's weight, substitutions), see `Relaxer`."""
        if self.setup.relaxer.rule.name == "none":
            return tree, None, None
        found = self.setup.relaxer(tree, hidden, spent, believed)
        return found.tree, found.weight, found.cost

    def verify(self, tree: DraftTree, uniform: Tensor) -> Verdict:
        """The verdict of the method's law on a relaxed tree, or of its twin, which is the same."""
        if self.way == "twin":
            return chain_twin.verdict(self.setup.method, tree, uniform)
        return unchecked_draw(self.setup.method.unchecked(tree), uniform)

    def from_logits(
        self, drafted: Drafted, logits: Tensor, target: Tensor | None, weight: Tensor
    ) -> tuple[Verdict, Tensor]:
        """Verdict and substitutions of the method's kernel, which relaxes and verifies at once.

        target: [B, N, V] rows that tell what a filter left out.
        """
        sampling, cuts = self.setup.sampling, ()
        if sampling.filters:
            ran = drafted.rows[:, : drafted.logits.shape[1]]
            cuts = cut(logits, target > 0), cut(drafted.logits, ran > 0)
        tree = drafted.tokens, self.shape.parents, weight, drafted.uniform
        found = self.setup.method.kernel(logits, drafted.logits, *tree, sampling.temperature, *cuts)
        return found.verdict, found.substitutions

    def keep(self, rows: Rows, node: Tensor, ran: int) -> None:
        """Move the accepted paths behind the roots, in both caches; the draft's holds nodes above
        depth `ran`. A chain lies there already.
        """
        if self.shape.is_chain:
            return
        path, accepted = self.paths[node], self.depths[node]
        rows.target.keep(rows.place, path, accepted)
        rows.draft.keep(rows.place, path, accepted.clamp_max(ran - 1))

    def spending(self, outcome: Outcome) -> tuple[Tensor, Tensor]:
        """[B, L + 1] float64 each, at the nodes from the root to the stopping node: expected
        substitutions, and the draft's share, NaN where the draft was not run.
        """
        path = self.paths[outcome.node]
        if outcome.cost is None:
            cost = weight = torch.zeros_like(path, dtype=torch.float64)
        else:
            cost = outcome.cost.double().gather(1, path)
            weight = outcome.weight.double().gather(1, path)
        if self.way == "kernel" or outcome.cost is None:  # a relaxer has left these out
            place = torch.arange(path.shape[1], device=path.device)
            weight = weight.masked_fill(place >= outcome.drafted.ran, torch.nan)
        return cost, weight


def _padded(by_depth: list[Tensor], tokens: Tensor, width: int) -> Tensor:
    """[B, N, width] of parts [B, n, width], one a depth; zero where the draft was not run."""
    size, nodes = tokens.shape
    ran = sum(level.shape[1] for level in by_depth)
    return torch.cat([*by_depth, torch.zeros(size, nodes - ran, width, device=tokens.device)], 1)
