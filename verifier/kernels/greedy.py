"""Trees of fixed children and one sampled last child, from logits (law: plans.greedy_transport).

    greedy_tree   2 passes over V of every node with children, 1 of the leaves: `normalise`, which
                  also sums the draft's row off the fixed children, and `residual`, for all nodes at
                  once.
    univer        the same two passes; the second goes level by level, because the mass that arrives
                  at a child is known once its parent's residual is.

A leaf with a share of the draft is read twice too, for what it costs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import walk
from .launch import Call
from .rows import (
    ACCEPT,
    CHILDREN,
    COUNT,
    EMIT,
    LEFT,
    MARK,
    MASS,
    NULL,
    PROPOSAL,
    STEP,
    TINY,
    WANTED,
    absent,
    first_of_equals,
    kernel,
    quotient,
    read_node,
)


def greedy_tree(call: Call) -> None:
    call.normalise(left_off=1)
    call.start(start, COUPLED=False)
    call.residual(call.nodes, marked=1)
    call.finish(finish, call.nodes, COUPLED=False)
    call.walk(coupled=False)
    call.select(marked=1)


def univer(call: Call) -> None:
    call.normalise(left_off=1)
    call.start(start, COUPLED=True)
    for _, nodes in walk.levels(call.parents, call.nodes.device):
        call.residual(nodes, marked=1)
        call.finish(finish, nodes, COUPLED=True)
    call.walk(coupled=True)
    call.select(marked=1)


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
    """STEP of the node, WANTED, PROPOSAL and MARK of its children; MASS, which all but the root
    wait for if COUPLED.
    """
    node = tl.program_id(0)
    n = node % N
    if absent(tokens, node, n):
        return
    child, token, wanted, proposal, left = read_node(
        models, tokens, weight, shape, parts, state, scale, size, N, D, V, T, node, M, CUT, TILES
    )
    lane = tl.arange(0, M)
    last = tl.load(shape + COUNT * N + n) - 1
    fixed = (lane < last) & (token >= 0)
    sampled = tl.max(tl.where(lane == last, token, -1), 0)
    # whether there was anything to sample shows in the row, never in what was sampled
    drawn = (sampled >= 0) & (left >= TINY)
    apart = tl.max((fixed & (token == sampled)).to(tl.int32), 0) == 0
    taken = tl.where(fixed | ((lane == last) & drawn), token, -1)
    proposal = tl.where((lane == last) & apart, proposal, 0.0)
    begin(state, child, wanted, proposal, taken, size, N, node, M, COUPLED)
    tl.store(state + STEP * size + node, tl.where(drawn, 1 / left, 0.0))


@kernel
def finish(
    tokens,
    shape,
    state,
    sums,
    nodes,
    size,
    N,
    T,
    count,
    TILES: tl.constexpr,
    M: tl.constexpr,
    COUPLED: tl.constexpr,
):
    """ACCEPT of the children, EMIT and NULL of the node, from its residual off the children; MASS
    if COUPLED.
    """
    place = tl.program_id(0)
    b, n = place // count, tl.load(nodes + place % count)
    node = b * N + n
    children = tl.load(shape + COUNT * N + n)
    if (children == 0) | absent(tokens, node, n):
        return
    lane = tl.arange(0, M)
    child = tl.load(shape + (CHILDREN + lane) * N + n, lane < children, 0)
    column = state + b * N + child
    wanted = tl.load(column + WANTED * size, lane < children, 0.0)
    proposal = tl.load(column + PROPOSAL * size, lane < children, 0.0)
    mark = tl.load(column + MARK * size, lane < children, -1.0)
    mass, step = tl.load(state + MASS * size + node), tl.load(state + STEP * size + node)

    possible = tl.where(step > 0, proposal, 0.0) > 0
    accept = tl.where(possible, mass * wanted * tl.load(state + LEFT * size + node) / proposal, 0.0)
    accept = tl.minimum(tl.sum(accept, 0), 1.0)
    others = tl.where(mark >= 0, tl.maximum(mass * wanted - step * proposal, 0.0), 0.0)
    tile = tl.arange(0, TILES)
    rest = tl.sum(tl.load(sums + node * T + tile, tile < T, 0.0), 0)
    whole = 1 - mass + rest + tl.sum(others, 0)
    scale = quotient(1 - accept, whole)
    share = tl.where(lane == children - 1, accept, others * scale)
    emit = tl.where(whole < TINY, 1 - accept, scale * rest)
    give_back(state, column, lane < children, share, emit, (1 - mass) * scale, size, node, COUPLED)


@triton.jit
def begin(
    state, child, wanted, proposal, taken, size, N, node, M: tl.constexpr, COUPLED: tl.constexpr
):
    """Store WANTED, PROPOSAL and MARK of the children, and MASS of their node, which all but the
    root wait for if COUPLED. Of equal tokens in `taken` the first is marked.
    """
    column = state + node // N * N + child
    tl.store(column + WANTED * size, wanted, child >= 0)
    tl.store(column + PROPOSAL * size, proposal, child >= 0)
    mark = tl.where(first_of_equals(taken, M), taken, -1)
    tl.store(column + MARK * size, mark.to(tl.float32), child >= 0)
    tl.store(state + MASS * size + node, tl.where((node % N > 0) & COUPLED, 0.0, 1.0))


@triton.jit
def give_back(state, column, here, share, emit, null, size, node, COUPLED: tl.constexpr):
    """Store a node's plan: ACCEPT and, if COUPLED, MASS of its children; its own EMIT and NULL."""
    tl.store(column + ACCEPT * size, share, here)
    if COUPLED:
        # summed from the right: the share left to the later children is lost in 1 - sum over the
        # earlier ones
        later = tl.cumsum(share, 0, reverse=True) + (emit + null)
        tl.store(column + MASS * size, tl.where(later > 0, share / later, 0.0), here)
    tl.store(state + EMIT * size + node, emit)
    tl.store(state + NULL * size + node, null)
