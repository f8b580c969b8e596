"""Recursive rejection of distinct children, from logits (law: plans.without_replacement).

After some children the residual off the children is max(mass v - step q, 0) with one number `step`
that each of them made larger; so a turn costs one pass and writes no row. At the children, where
the shrinking row differs from q by more than a factor, the wanted mass is kept as numbers (WANTED).

    rrsw         1 + M passes over V of a node with M children, 1 of a leaf: `normalise`, which also
                 sums the draft's row off the children, and `residual` once a child, for all nodes
                 at once.
    traversal    the same passes, level by level, because the mass of a child is known once its
                 parent is done.

Siblings are taken as they are: equal prefixes of K i.i.d. paths are not merged as the laws merge
them, a sibling that repeats an earlier one is skipped. That is exact for the target too, and
accepts no more than the law does; on distinct siblings, which drawing without replacement gives,
kernel and law are the same.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from ..tree import topology
from . import walk
from .greedy import begin, give_back
from .launch import Call
from .rows import (
    ACCEPT,
    ALPHA,
    CHILDREN,
    COUNT,
    LAST,
    LEFT,
    MARK,
    MASS,
    NULL,
    PROPOSAL,
    REACH,
    STEP,
    TINY,
    WANTED,
    absent,
    kernel,
    quotient,
    read_node,
)


def rrsw(call: Call) -> None:
    call.normalise(left_off=2)
    call.start(start, COUPLED=False)
    _turns(call, call.nodes, max(map(len, topology(call.parents).children)), coupled=False)
    call.walk(coupled=False)
    call.select(marked=2)


def traversal(call: Call) -> None:
    call.normalise(left_off=2)
    call.start(start, COUPLED=True)
    children = topology(call.parents).children
    for ids, nodes in walk.levels(call.parents, call.nodes.device):
        _turns(call, nodes, max(len(children[node]) for node in ids), coupled=True)
    call.walk(coupled=True)
    call.select(marked=2)


def _turns(call: Call, nodes: Tensor, most: int, coupled: bool) -> None:
    """`most` children one after the other; the first pass also sees what leaves cost."""
    call.finish(turn, nodes, 0, COUPLED=coupled)
    for child in range(max(most, 1)):
        call.residual(nodes, turn=child, marked=2)
        call.finish(turn, nodes, child + 1, COUPLED=coupled)


@kernel
def start(
    models,
    tokens,
    weight,
    shape,
    parts,
    state,
    scale,
    size,
    N,
    D,
    V,
    T,
    CUT: tl.constexpr,
    TILES: tl.constexpr,
    M: tl.constexpr,
    COUPLED: tl.constexpr,
):
    """WANTED, PROPOSAL and MARK of the children; MASS of the node, which all but the root wait for
    if COUPLED.
    """
    node = tl.program_id(0)
    if absent(tokens, node, node % N):
        return
    child, token, wanted, proposal, left = read_node(
        models, tokens, weight, shape, parts, state, scale, size, N, D, V, T, node, M, CUT, TILES
    )
    begin(state, child, wanted, proposal, token, size, N, node, M, COUPLED)


@kernel
def turn(
    tokens,
    shape,
    state,
    sums,
    nodes,
    size,
    N,
    T,
    count,
    turn,
    TILES: tl.constexpr,
    M: tl.constexpr,
    COUPLED: tl.constexpr,
):
    """Settles child turn - 1 of a node with the residual mass of its pass, then tries child `turn`
    or gives back.
    """
    place = tl.program_id(0)
    b, n = place // count, tl.load(nodes + place % count)
    node = b * N + n
    children = tl.load(shape + COUNT * N + n)
    if (children == 0) | (turn > children) | absent(tokens, node, n):
        return
    lane, tile, at = tl.arange(0, M), tl.arange(0, TILES), state + node
    here, begun = lane < children, turn > 0
    child = tl.load(shape + (CHILDREN + lane) * N + n, here, 0)
    column = state + b * N + child
    token = tl.load(tokens + b * N + child, here, -1).to(tl.int32)
    proposal = tl.load(column + PROPOSAL * size, here, 0.0)
    distinct = tl.load(column + MARK * size, here, -1.0) >= 0
    mass = tl.load(at + MASS * size)
    alpha, reach = (
        tl.where(begun, tl.load(at + ALPHA * size), 1.0),
        tl.where(begun, tl.load(at + REACH * size), 1.0),
    )
    null = tl.where(begun, tl.load(at + NULL * size), 1 - mass)

    wanted = tl.load(column + WANTED * size, here, 0.0) * tl.where(begun, 1.0, mass)
    wanted = tl.maximum(wanted - proposal * tl.load(at + LAST * size), 0.0)
    rest = tl.sum(tl.load(sums + node * T + tile, (tile < T) & begun, 0.0), 0)
    total = rest + tl.sum(tl.where(distinct, wanted, 0.0), 0)
    whole = tl.where(begun, alpha * total + null, 1.0)
    alpha, null = quotient(alpha, whole), quotient(null, whole)
    before = tl.max(tl.where(lane == turn - 1, token, -1), 0)
    proposal = tl.where((token >= 0) & (token == before), 0.0, proposal)
    # threads share lanes: all have read before any writes
    tl.debug_barrier()
    tl.store(column + WANTED * size, wanted, here)
    tl.store(column + PROPOSAL * size, proposal, here)
    if turn == children:
        share = tl.load(column + ACCEPT * size, here, 0.0)
        emit = tl.where(whole < TINY, reach, reach * alpha * total)
        give_back(state, column, here, share, emit, reach * null, size, node, COUPLED)
    else:
        # a child of draft probability zero is absent, or a duplicate of one that was removed
        mine = lane == turn
        offered = tl.sum(tl.where(mine & (token >= 0), proposal, 0.0), 0)
        left = tl.load(at + LEFT * size) + tl.sum(tl.where(distinct, proposal, 0.0), 0)
        left = tl.where(children == 1, 1.0, left)
        accept = tl.where(
            offered > 0, alpha * tl.sum(tl.where(mine, wanted, 0.0), 0) * left / offered, 0.0
        )
        accept = tl.minimum(accept, 1.0)
        last = tl.where(offered > 0, quotient(1.0, left * alpha), 0.0)
        tl.store(column + ACCEPT * size, tl.where(mine, reach * accept, 0.0), mine)
        tl.store(at + STEP * size, tl.where(begun, tl.load(at + STEP * size), 0.0) + last)
        tl.store(at + LAST * size, last)
        tl.store(at + ALPHA * size, alpha)
        tl.store(at + REACH * size, reach * (1 - accept))
        tl.store(at + NULL * size, null)
