"""Token and block verification of a chain, from logits (laws: plans.rejection, top-down and
conditional).

    token    2 passes over V: `normalise` of all nodes, `residual` of the stopping node alone, for
                              acceptance is a ratio
             of gathered entries. Nodes of the accepted path with a share of the draft are read too,
             for what they cost.
    block    2 passes over V of all nodes but the last: the mass of every node is known from
             gathers, so that all residual masses are one parallel pass.
"""

from __future__ import annotations

import triton.language as tl

from .launch import Call
from .rows import (
    ACCEPT,
    COUNT,
    EMIT,
    MASS,
    NULL,
    STEP,
    TINY,
    WANTED,
    absent,
    kernel,
    quotient,
    read_node,
)


def token(call: Call) -> None:
    call.normalise(left_off=0)
    call.start(start)
    call.walk(coupled=False)
    call.residual(call.nodes, path=True)
    call.select()


def block(call: Call) -> None:
    call.normalise(left_off=0)
    call.start(start)
    masses[(len(call.tokens),)](call.state, *call.sizes, num_warps=1)
    call.residual(call.nodes)
    call.finish(finish, call.nodes)
    call.walk(coupled=True)
    call.select()


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
):
    """ACCEPT of the child, in WANTED the ratio target / draft unclamped; EMIT and MASS of the node
    once reached.
    """
    node = tl.program_id(0)
    if absent(tokens, node, node % N):
        return
    child, token, wanted, proposal, left = read_node(
        models, tokens, weight, shape, parts, state, scale, size, N, D, V, T, node, M, CUT, TILES
    )
    # a child of draft probability zero was not drawn from this row
    drawn = (token >= 0) & (proposal > 0)
    ratio = tl.where(drawn, wanted / proposal, 0.0)
    accept = tl.minimum(ratio, 1.0)
    column = state + node // N * N + child
    tl.store(column + WANTED * size, ratio, child >= 0)
    tl.store(column + ACCEPT * size, accept, child >= 0)
    tl.store(state + STEP * size + node, tl.sum(drawn.to(tl.float32), 0))
    tl.store(state + EMIT * size + node, 1 - tl.sum(accept, 0))
    tl.store(state + MASS * size + node, 1.0)


@kernel
def masses(state, size, N):
    """MASS of every node of a chain, min(1, mass ratio) from the root down (plans.chain_masses)."""
    column = state + tl.program_id(0) * N
    mass = 1.0
    for n in range(N):
        tl.store(column + MASS * size + n, mass)
        mass = tl.minimum(mass * tl.load(column + WANTED * size + n + 1, n + 1 < N, 0.0), 1.0)


@kernel
def finish(
    tokens, shape, state, sums, nodes, size, N, T, count, TILES: tl.constexpr, M: tl.constexpr
):
    """EMIT and NULL of a node from its residual mass Z: in proportion Z : 1 - mass; all is emitted
    where both are 0.
    """
    place = tl.program_id(0)
    n = tl.load(nodes + place % count)
    node = place // count * N + n
    if tl.load(shape + COUNT * N + n) == 0:
        return
    lane = tl.arange(0, TILES)
    total = tl.sum(tl.load(sums + node * T + lane, lane < T, 0.0), 0)
    null = 1 - tl.load(state + MASS * size + node)
    refused = 1 - tl.load(state + MASS * size + node + 1)
    left = quotient(refused, total + null)
    tl.store(state + EMIT * size + node, tl.where(total + null < TINY, refused, left * total))
    tl.store(state + NULL * size + node, left * null)
