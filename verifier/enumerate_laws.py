"""Exact laws by enumeration: every draft of a tiny vocabulary, its probability, and the text law a
method makes of it.

A context is a number: 0 is empty, and context c followed by token x is c V + 1 + x (a V-ary heap).
A `Pair` has one row of draft and target per context, so rows depend on the whole past. All drafts
of one topology form one batch, which the method verifies in a single call; the law of the text then
is a sum, with no sampling anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .law import DraftTree, Law, unit
from .tree import topology

KINDS = ("random", "tied", "equal", "disjoint", "zeros", "one-hot")


@dataclass(frozen=True)
class Pair:
    """Rows of two models in every context shorter than `length` tokens.

    draft, target: [C, V] float64, C the number of contexts.
    length:        tokens of a whole text.
    """

    draft: Tensor
    target: Tensor
    length: int


@dataclass(frozen=True)
class Drafts:
    """All drafts of one topology under one drafting law.

    tree:        DraftTree with B the number of drafts.
    probability: [B] of each draft; sums to 1.
    contexts:    [B, N] int64 context at each node; 0 at absent nodes.
    """

    tree: DraftTree
    probability: Tensor
    contexts: Tensor


def random_pair(vocabulary: int, length: int, kind: str, generator: torch.Generator) -> Pair:
    """Rows of one of KINDS; `tied` rows have few distinct entries, `zeros` rows lose tokens at
    random.
    """
    count = sum(vocabulary**depth for depth in range(length))

    def rows() -> Tensor:
        draws = torch.rand(count, vocabulary, generator=generator, dtype=torch.float64)
        if kind == "tied":
            draws = (draws * 2).floor() + 1
        if kind == "zeros":
            draws = draws * (torch.rand(count, vocabulary, generator=generator) < 0.6)
        if kind == "one-hot":
            draws = torch.nn.functional.one_hot(draws.argmax(-1), vocabulary).double()
        empty = draws.sum(-1, keepdim=True) == 0
        draws = torch.where(empty, torch.ones_like(draws), draws)
        return draws / draws.sum(-1, keepdim=True)

    draft, target = rows(), rows()
    if kind == "equal":
        target = draft.clone()
    if kind == "disjoint":
        side = torch.arange(vocabulary) < (vocabulary + 1) // 2
        draft, target = draft * side, target * ~side
        draft, target = draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    return Pair(draft, target, length)


def paths(count: int, length: int) -> tuple[int, ...]:
    """Parents of `count` chains that hang from the root, level by level."""
    return (-1, *[0] * count, *range(1, count * (length - 1) + 1))


def full_tree(children: int, depth: int) -> tuple[int, ...]:
    """Parents of a tree where every node above `depth` has `children`."""
    parents, level = [-1], [0]
    for _ in range(depth):
        parents += [node for node in level for _ in range(children)]
        level = list(range(len(parents) - len(level) * children, len(parents)))
    return tuple(parents)


def delayed(trunk: int, parents: tuple[int, ...]) -> tuple[int, ...]:
    """The given tree behind a trunk of single children."""
    return (*range(-1, trunk), *(parent + trunk for parent in parents[1:]))


def drafts(pair: Pair, drafting: str, parents: tuple[int, ...], leaf_rows: bool = False) -> Drafts:
    """Every draft of `parents` that `drafting` can produce; `leaf_rows` runs the draft on the
    leaves too.

    Nodes are drawn in order. A row whose support is smaller than its number of children leaves the
    last ones absent.
    """
    vocabulary = pair.draft.shape[1]
    children = topology(parents).children
    tokens, contexts = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
    probability = torch.ones(1, dtype=torch.float64)
    for node in range(1, len(parents)):
        parent = parents[node]
        siblings = children[parent]
        place = siblings.index(node)
        alive = (tokens[parent] >= 0) if parent else torch.ones_like(tokens[0], dtype=torch.bool)
        earlier = [tokens[child] for child in siblings[:place]]
        rows = _CHILD[drafting](
            pair.draft[contexts[parent]], earlier, place == len(siblings) - 1
        ) * alive.unsqueeze(-1)
        # column V is "absent", taken when the row has nothing left to draw
        rows = torch.cat([rows, (rows.sum(-1, keepdim=True) == 0).double()], -1)
        draft, token = rows.nonzero(as_tuple=True)
        probability = probability[draft] * rows[draft, token]
        tokens, contexts = (
            [column[draft] for column in tokens],
            [column[draft] for column in contexts],
        )
        absent = token == vocabulary
        contexts.append(torch.where(absent, 0, contexts[parent] * vocabulary + 1 + token))
        tokens.append(torch.where(absent, -1, token))
    tokens, contexts = torch.stack(tokens, 1), torch.stack(contexts, 1)
    inner = torch.tensor([bool(branch) or leaf_rows for branch in children])
    draft_rows = pair.draft[contexts] * inner[:, None]
    return Drafts(
        DraftTree(tokens, parents, draft_rows, pair.target[contexts]), probability, contexts
    )


def text_law(drafts: Drafts, law: Law, after: Tensor, length: int) -> Tensor:
    """[V^length] law of the text: draft, verify, emit, then continue by the rows `after` [C, V]."""
    vocabulary = after.shape[1]
    mass = after.new_zeros(sum(vocabulary**depth for depth in range(length + 1)))
    emitted = drafts.probability[:, None, None] * law.stop.unsqueeze(-1) * law.next
    index = drafts.contexts.unsqueeze(-1) * vocabulary + 1 + torch.arange(vocabulary)
    mass.index_add_(0, index.flatten(), emitted.flatten())
    return _continued(mass, after, length)


def model_law(rows: Tensor, length: int) -> Tensor:
    """[V^length] law of a text drawn token by token from `rows` [C, V]."""
    vocabulary = rows.shape[1]
    mass = rows.new_zeros(sum(vocabulary**depth for depth in range(length + 1)))
    mass[0] = 1
    return _continued(mass, rows, length)


def law_error(
    law: Callable[[DraftTree], Law], pair: Pair, drafting: str, parents: tuple[int, ...]
) -> float:
    """Largest difference between a text's probability under the method and under the target."""
    every = drafts(pair, drafting, parents)
    found = text_law(every, law(every.tree), pair.target, pair.length)
    return (found - model_law(pair.target, pair.length)).abs().max().item()


def mean_length(
    law: Callable[[DraftTree], Law], pair: Pair, drafting: str, parents: tuple[int, ...]
) -> float:
    """Expected accepted tokens, without the extra one, exactly."""
    every = drafts(pair, drafting, parents)
    depth = torch.tensor(topology(parents).depths, dtype=torch.float64)
    return (every.probability @ (law(every.tree).stop.double() @ depth)).item()


def _continued(mass: Tensor, rows: Tensor, length: int) -> Tensor:
    """Push the mass of every context down to the texts of `length` tokens."""
    vocabulary, start = rows.shape[1], 0
    for depth in range(length):
        stop = start + vocabulary**depth
        mass[stop : stop + vocabulary ** (depth + 1)] += (
            mass[start:stop, None] * rows[start:stop]
        ).flatten()
        start = stop
    return mass[start:]


def _sampled(row: Tensor, earlier: list[Tensor], last: bool) -> Tensor:
    return row


def _distinct(row: Tensor, earlier: list[Tensor], last: bool) -> Tensor:
    row = row.clone()
    for token in earlier:
        row.scatter_(1, token.clamp(min=0).unsqueeze(1), 0)
    return unit(row)


def _greedy(row: Tensor, earlier: list[Tensor], last: bool) -> Tensor:
    """The tokens of largest probability, then one sample of the rest; a fixed child of probability
    0 is absent.
    """
    left = _distinct(row, earlier, last)
    if last:
        return left
    return torch.nn.functional.one_hot(left.argmax(-1), row.shape[1]).double() * (
        left.sum(-1, keepdim=True) > 0
    )


# the rows that the next child is drawn from: (draft rows [B, V], earlier siblings' tokens, is it
# the last child)
_CHILD = {
    "chain": _sampled,
    "paths": _sampled,
    "with_replacement": _sampled,
    "without_replacement": _distinct,
    "greedy": _greedy,
}
