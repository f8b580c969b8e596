"""What all kernels share: the passes over the vocabulary, and the draw of the bonus token.

A row is cut into T tiles of TILE tokens and every tile of every row is one program: a few rows fill
a GPU, each program has all its loads in flight at once, and the partial results (20 bytes a tile)
fit in one vector. Passes:

    normalise   reads both rows of every node once; per tile the largest logit and the sum of exp
                below it
    residual    reads both rows again; per tile the sum of max(mass v - step q, 0), with v = (1 -
                share) p + share q
    select      reads one tile of the one node that the verdict names

Numbers of a node live in `state` [FIELDS, B, N] float32, those of a child in the column of the
child. `shape` [CHILDREN + M, N] int32 describes the tree (`walk.py`). `size` is B N. What is needed
to read logits is one tuple:

    models      the logits of target and draft, the cuts of both, and the strides of the logits: of
                a request and of a node, the target's first
"""

from __future__ import annotations

import triton
import triton.language as tl

# the rows' largest logit and 1 / (sum of exp); the draft's share; the draft's mass that siblings
# leave
TOP_P, INV_P, TOP_Q, INV_Q, SHARE, LEFT = (tl.constexpr(field) for field in range(6))
# of a node: arriving mass, what is subtracted of the draft's row, what the plan emits and gives
# back; for recursive.py
MASS, STEP, EMIT, NULL, ALPHA, REACH, LAST = (tl.constexpr(field) for field in range(6, 13))
# of a child, in its parent's rows: what is wanted, what the draft proposed, the plan's share, the
# token taken out or -1
WANTED, PROPOSAL, ACCEPT, MARK = (tl.constexpr(field) for field in range(13, 17))
FIELDS = 17

# rows of `shape`; below them come the children of each node, -1 where it has fewer than M
COUNT, DEPTH, PRE, END, POST, CHILDREN = (tl.constexpr(row) for row in range(6))

TINY = tl.constexpr(1.1754943508222875e-38)  # the least float32 whose inverse is finite
NONE = tl.constexpr(float("-inf"))

# what is launched; sizes are numbers at run time, else triton would compile again where one of them
# happens to be 1. They stand alone, because triton does that to every number in a tuple.
kernel = triton.jit(do_not_specialize=["size", "N", "D", "V", "T", "count", "turn"])


@kernel
def normalise(
    models,
    tokens,
    shape,
    parts,
    scale,
    size,
    N,
    D,
    V,
    T,
    LEFT_OFF: tl.constexpr,
    CUT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One pass over both rows: parts [5, B, N, T] = top and sum of each row, and the draft's sum
    off its children.

    LEFT_OFF: 0 that sum is not needed, 1 off all children but the last, 2 off all children.
    """
    tile, node = tl.program_id(0) % T, tl.program_id(0) // T
    b, n = node // N, node % N
    if absent(tokens, node, n):
        return
    ids = tile * TILE + tl.arange(0, TILE)
    out = parts + node * T + tile
    x, y = logits_pair(models, N, D, node, ids, ids < V, CUT)
    top = tl.max(x, 0)
    tl.store(out, top)
    tl.store(out + size * T, tl.sum(tl.exp2((x - finite(top)) * scale), 0))
    top = tl.max(y, 0)
    e = tl.exp2((y - finite(top)) * scale)
    tl.store(out + 2 * size * T, top)
    tl.store(out + 3 * size * T, tl.sum(e, 0))
    if LEFT_OFF > 0:
        count = tl.load(shape + COUNT * N + n)
        for j in range(count - 2 + LEFT_OFF):
            token = tl.load(tokens + b * N + tl.load(shape + (CHILDREN + j) * N + n))
            if token // TILE == tile:
                e = tl.where(ids == token, 0.0, e)
        tl.store(out + 4 * size * T, tl.sum(e, 0))


@triton.jit
def read_node(
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
    node,
    M: tl.constexpr,
    CUT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Combine the tiles of a node into its state, and read the logits of its children.

    Gives children's ids, tokens (-1 where absent), blended target and draft probabilities [M
    lanes], and what the children leave of the draft's row. No pass over V. A NaN or +inf logit
    makes INV_P or INV_Q NaN, which `walk` finds.
    """
    b, n = node // N, node % N
    lane = tl.arange(0, TILES)
    part = parts + node * T + lane
    tops_p, sums_p = tl.load(part, lane < T, NONE), tl.load(part + size * T, lane < T, 0.0)
    tops_q, sums_q = (
        tl.load(part + 2 * size * T, lane < T, NONE),
        tl.load(part + 3 * size * T, lane < T, 0.0),
    )
    top_p, top_q = finite(tl.max(tops_p, 0)), finite(tl.max(tops_q, 0))
    sum_p = tl.sum(sums_p * tl.exp2((tops_p - top_p) * scale), 0)
    rise = tl.exp2((tops_q - top_q) * scale)
    sum_q = tl.sum(sums_q * rise, 0)
    inv_p, inv_q = tl.where(sum_p == 0, 0.0, 1 / sum_p), tl.where(sum_q == 0, 0.0, 1 / sum_q)
    left = tl.sum(tl.load(part + 4 * size * T, lane < T, 0.0) * rise, 0) * inv_q
    share = tl.where(sum_q == 0, 0.0, tl.load(weight + node))
    tl.store(state + TOP_P * size + node, top_p)
    tl.store(state + INV_P * size + node, inv_p)
    tl.store(state + TOP_Q * size + node, top_q)
    tl.store(state + INV_Q * size + node, inv_q)
    tl.store(state + SHARE * size + node, share)
    tl.store(state + LEFT * size + node, left)

    j = tl.arange(0, M)
    child = tl.load(shape + (CHILDREN + j) * N + n, j < tl.load(shape + COUNT * N + n), -1)
    token = tl.load(tokens + b * N + child, child >= 0, -1).to(tl.int32)
    token = tl.where(token < V, token, -1)
    # from registers: what this program has just stored need not be visible to its other threads
    x, y = logits_pair(models, N, D, node, token, token >= 0, CUT)
    p, q = tl.exp2((x - top_p) * scale) * inv_p, tl.exp2((y - top_q) * scale) * inv_q
    return child, token, (1 - share) * p + share * q, q, left


@kernel
def residual(
    models,
    shape,
    state,
    sums,
    costs,
    nodes,
    stop,
    scale,
    size,
    N,
    D,
    V,
    T,
    count,
    turn,
    MARKED: tl.constexpr,
    PATH: tl.constexpr,
    CUT: tl.constexpr,
    TILE: tl.constexpr,
):
    """One pass over both rows of `nodes` [count]: sums [B, N, T] of max(MASS v - STEP q, 0), marked
    tokens left out.

    turn:  0, or which child's pass this is; nodes with no more children than that are not read.
    costs: [B, N, T] share |p - q| / 2, written in turn 0 (it needs no further pass); only nodes
        with a share cost.
    PATH:  a chain whose path ends at `stop` [B]: that node is read, those before it if they have a
           share, no others.
    """
    tile, place = tl.program_id(0) % T, tl.program_id(0) // T
    b, n = place // count, tl.load(nodes + place % count)
    node = b * N + n
    share = tl.load(state + SHARE * size + node)
    children = tl.load(shape + COUNT * N + n)
    wanted = turn < children
    costly = (turn == 0) & (share > 0)
    if PATH:
        end = tl.load(stop + b)
        wanted = wanted & (n == end)
        costly = costly & (n <= end)
    if turn == 0:
        tl.store(costs + node * T + tile, 0.0)
    # an absent node was never normalised
    if (tl.load(state + INV_P * size + node) == 0) | ((not wanted) & (not costly)):
        return
    ids = tile * TILE + tl.arange(0, TILE)
    p, q, v = rows(models, state, scale, size, N, D, node, ids, ids < V, CUT)
    if costly:
        tl.store(costs + node * T + tile, tl.sum(tl.abs(p - q), 0) * 0.5 * share)
    if wanted:
        mass, step = tl.load(state + MASS * size + node), tl.load(state + STEP * size + node)
        r = tl.maximum(mass * v - step * q, 0.0)
        if MARKED:
            for j in range(children):
                column, mark = marked_child(state, shape, size, N, b, n, j)
                if (mark >= 0) & (mark // TILE == tile):
                    r = tl.where(ids == mark, 0.0, r)
        tl.store(sums + node * T + tile, tl.sum(r, 0))


@kernel
def select(
    models,
    shape,
    parts,
    state,
    sums,
    uniform,
    stop,
    token,
    scale,
    size,
    N,
    D,
    V,
    T,
    MARKED: tl.constexpr,
    CUT: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """token [B]: inverts the residual's cumulative sum at node `stop` [B]; first over its tiles,
    then in one of them.

    MARKED: 0 no token is marked, 1 the row is zero at the marked tokens, 2 it is their WANTED
    there. A leaf emits its blended row, whose tile sums are known from `normalise`. So does a node
    whose residual is zero in
    every entry: it stops with the probability that rounding left there. Sums run in float64: a
    float32 sum over a vocabulary is off by more than its rarest tokens' probability.
    """
    b = tl.program_id(0)
    n = tl.load(stop + b).to(tl.int32)
    if n < 0:
        tl.store(token + b, n.to(tl.int64))
        return
    node = b * N + n
    lane = tl.arange(0, TILES)
    children = tl.load(shape + COUNT * N + n)
    mass = tl.load(sums + node * T + lane, (lane < T) & (children > 0), 0.0)
    if MARKED == 2:
        for j in range(children):
            column, mark = marked_child(state, shape, size, N, b, n, j)
            mass += tl.where(
                (mark >= 0) & (lane == mark // TILE), tl.load(column + WANTED * size), 0.0
            )
    whole = tl.sum(mass, 0) <= 0
    share = tl.load(state + SHARE * size + node)
    part = parts + node * T + lane
    top, inverse = tl.load(state + TOP_P * size + node), tl.load(state + INV_P * size + node)
    p = tile_masses(part, top, inverse, scale, size, T, lane < T)
    top, inverse = tl.load(state + TOP_Q * size + node), tl.load(state + INV_Q * size + node)
    q = tile_masses(part + 2 * size * T, top, inverse, scale, size, T, lane < T)
    mass = tl.where(whole, (1 - share) * p + share * q, mass)

    cumulative = tl.cumsum(mass.to(tl.float64), 0)
    threshold = tl.load(uniform + 2 * b + 1) * tl.max(cumulative, 0)
    tile = first_above(cumulative, mass, threshold, lane)
    threshold -= tl.max(tl.where(lane < tile, cumulative, 0.0), 0)

    ids = tile * TILE + tl.arange(0, TILE)
    p, q, v = rows(models, state, scale, size, N, D, node, ids, ids < V, CUT)
    scaled = tl.load(state + MASS * size + node) * v - tl.load(state + STEP * size + node) * q
    r = tl.where(whole, v, tl.maximum(scaled, 0.0))
    if MARKED:
        for j in range(children):
            column, mark = marked_child(state, shape, size, N, b, n, j)
            extra = tl.load(column + WANTED * size) if MARKED == 2 else 0.0
            r = tl.where((ids == mark) & (not whole), extra, r)
    cumulative = tl.cumsum(r.to(tl.float64), 0)
    tl.store(token + b, first_above(cumulative, r, threshold, ids).to(tl.int64))


@triton.jit
def absent(tokens, node, n):
    """Whether a request lacks its node n; it never lacks the root."""
    return (n > 0) & (tl.load(tokens + node) < 0)


@triton.jit
def marked_child(state, shape, size, N, b, n, j):
    """The column of child j of node n of a request, and the token it takes out of the row or -1."""
    column = state + b * N + tl.load(shape + (CHILDREN + j) * N + n)
    return column, tl.load(column + MARK * size).to(tl.int32)


@triton.jit
def tile_masses(part, top, inverse, scale, size, T, here):
    """A model's probability of every tile, from what `normalise` left of its row at `part`."""
    rise = tl.exp2((tl.load(part, here, NONE) - top) * scale)
    return tl.load(part + size * T, here, 0.0) * rise * inverse


@triton.jit
def rows(models, state, scale, size, N, D, node, ids, here, CUT: tl.constexpr):
    """Probabilities of the target, the draft and their blend at `ids`; 0 where not `here`."""
    x, y = logits_pair(models, N, D, node, ids, here, CUT)
    p = tl.exp2((x - tl.load(state + TOP_P * size + node)) * scale) * tl.load(
        state + INV_P * size + node
    )
    q = tl.exp2((y - tl.load(state + TOP_Q * size + node)) * scale) * tl.load(
        state + INV_Q * size + node
    )
    share = tl.load(state + SHARE * size + node)
    return p, q, (1 - share) * p + share * q


@triton.jit
def logits_pair(models, N, D, node, ids, here, CUT: tl.constexpr):
    """float32 logits of the target and of the draft at `ids` of one node; the draft's are -inf from
    node D on.
    """
    target, draft, target_cut, draft_cut, target_b, target_n, draft_b, draft_n = models
    b, n = node // N, node % N
    x = logits(
        target + b.to(tl.int64) * target_b + n.to(tl.int64) * target_n,
        target_cut + 3 * node,
        ids,
        here,
        CUT,
    )
    y_row = draft + b.to(tl.int64) * draft_b + n.to(tl.int64) * draft_n
    y = logits(y_row, draft_cut + 3 * (b * D + tl.minimum(n, D - 1)), ids, here & (n < D), CUT)
    return x, y


@triton.jit
def logits(row, cut, ids, here, CUT: tl.constexpr):
    """float32 logits of one row at `ids`, -inf where not `here` or cut away (see cuts.py); a NaN is
    never cut.
    """
    x = tl.load(row + ids, here, NONE).to(tl.float32)
    if CUT:
        edge, low, last = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
        x = tl.where((x <= edge) & ((x < low) | (ids.to(tl.float32) > last)), NONE, x)
    return x


@triton.jit
def first_above(cumulative, values, threshold, lane):
    """The first lane of positive value whose cumulative sum exceeds the threshold; the last if
    rounding leaves none.
    """
    last = tl.max(tl.where(values > 0, lane, 0), 0)
    return tl.min(tl.where((values > 0) & (cumulative > threshold), lane, last), 0)


@triton.jit
def first_of_equals(token, M: tl.constexpr):
    """True where a present token is the first of its kind among M lanes (plans.first_of_equals)."""
    lane = tl.arange(0, M)
    repeated = (token[:, None] == token[None, :]) & (lane[None, :] < lane[:, None])
    return (token >= 0) & (tl.max(repeated.to(tl.int32), 1) == 0)


@triton.jit
def finite(top):
    """The largest logit, and 0 for a row without any: its differences to -inf are then -inf and not
    NaN.
    """
    return tl.where(top == NONE, 0.0, top)


@triton.jit
def quotient(numerator, denominator):
    """plans.quotient: 0 where the inverse could overflow."""
    return tl.where(denominator >= TINY, numerator / denominator, 0.0)
