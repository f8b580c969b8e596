"""The draft tree on the device, and the stopping node that the first uniform selects.

Both compositions of `compose.py` in closed form, one program a request and one lane a node:

    top-down      stop[v] = emit[v] * product of ACCEPT over the path to v
    conditional   stop[v] = fire[v] * product of silence over all nodes before v in post-order,
                  fire = emit / (emit + null), silence = null / (emit + null)
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from ..tree import topology
from .rows import (
    ACCEPT,
    COUNT,
    DEPTH,
    EMIT,
    END,
    INV_P,
    INV_Q,
    MASS,
    NULL,
    POST,
    PRE,
    first_above,
    kernel,
)


@kernel
def walk(
    state,
    tokens,
    weight,
    shape,
    uniform,
    node,
    accepted,
    size,
    N,
    V,
    COUPLED: tl.constexpr,
    NODES: tl.constexpr,
):
    """node [B] int64 that `uniform` [B, 2] selects, and its depth; -1 and -1 where the request's
    numbers are unsound.

    Unsound is a NaN or +inf logit at the root or at a present node, a target row of -inf alone, a
    share outside [0, 1], a token that the vocabulary lacks. Reads no vocabulary.
    """
    b = tl.program_id(0)
    lane = tl.arange(0, NODES)
    here = lane < N
    at = state + b * N + lane
    token = tl.load(tokens + b * N + lane, here & (lane > 0), 0)
    present = here & (token >= 0)
    # comparisons with a NaN are false
    inv_p, inv_q = tl.load(at + INV_P * size, here, 1.0), tl.load(at + INV_Q * size, here, 1.0)
    share = tl.load(weight + b * N + lane, here, 0.0)
    sound = (inv_p > 0) & (inv_q >= 0) & (share >= 0) & (share <= 1) & (token < V)
    unsound = tl.max((present & ~sound).to(tl.int32), 0)

    leaf = tl.load(shape + COUNT * N + lane, here, 0) == 0
    stop = tl.where(present, 1.0, 0.0)
    if COUPLED:
        given = tl.load(at + MASS * size, here, 0.0)
        emit = tl.where(leaf, given, tl.load(at + EMIT * size, here, 0.0))
        null = tl.where(leaf, 1 - given, tl.load(at + NULL * size, here, 0.0))
        stop *= tl.where(emit + null > 0, emit / (emit + null), 0.0)
        place = tl.load(shape + POST * N + lane, here, 0)
        for other in range(N):
            column = state + b * N + other
            inner = tl.load(shape + COUNT * N + other) > 0
            mine = tl.load(column + MASS * size)
            says = tl.where(inner, tl.load(column + EMIT * size), mine)
            holds = tl.where(inner, tl.load(column + NULL * size), 1 - mine)
            silence = tl.where(says + holds > 0, holds / (says + holds), 1.0)
            stop = tl.where(tl.load(shape + POST * N + other) < place, stop * silence, stop)
    else:
        stop *= tl.where(leaf, 1.0, tl.load(at + EMIT * size, here, 0.0))
        place = tl.load(shape + PRE * N + lane, here, 0)
        for other in range(1, N):
            below = (tl.load(shape + PRE * N + other) <= place) & (
                place < tl.load(shape + END * N + other)
            )
            stop = tl.where(below, stop * tl.load(state + ACCEPT * size + b * N + other), stop)

    cumulative = tl.cumsum(stop.to(tl.float64), 0)
    threshold = tl.load(uniform + 2 * b) * tl.max(cumulative, 0)
    found = tl.where(unsound > 0, -1, first_above(cumulative, stop, threshold, lane))
    tl.store(node + b, found.to(tl.int64))
    tl.store(accepted + b, tl.load(shape + DEPTH * N + found, found >= 0, -1).to(tl.int64))


@lru_cache(maxsize=256)
def described(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """[CHILDREN + M, N] int32, rows as rows.py names them; sent to the device once, so not during a
    capture.
    """
    shape = topology(parents)
    pre, end, post = [0] * shape.nodes, [0] * shape.nodes, [0] * shape.nodes
    started = finished = 0
    stack = [(0, False)]
    while stack:
        node, done = stack.pop()
        if done:
            end[node], post[node] = started, finished
            finished += 1
            continue
        pre[node] = started
        started += 1
        stack += [(node, True), *((child, False) for child in reversed(shape.children[node]))]
    count = [len(each) for each in shape.children]
    columns = [
        [each[j] if j < len(each) else -1 for each in shape.children] for j in range(max(1, *count))
    ]
    rows = [count, shape.depths, pre, end, post, *columns]
    return torch.tensor(rows, dtype=torch.int32).to(device)


@lru_cache(maxsize=256)
def levels(parents: tuple[int, ...], device: torch.device) -> list[tuple[tuple[int, ...], Tensor]]:
    """The nodes of each depth, as numbers and as int32 on the device; like `described`, sent there
    once.
    """
    return [
        (nodes, torch.tensor(nodes, dtype=torch.int32).to(device))
        for nodes in topology(parents).levels
    ]
