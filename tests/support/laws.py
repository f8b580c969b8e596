"""What the law tests share: shapes to enumerate, and slow methods written straight from the papers.

The enumeration itself is `verifier/enumerate_laws.py`, which users run too. The references below share no line with the
library: plain Python, one draft at a time, tokens and contexts as tuples, coins enumerated one by one.
"""

import itertools
from collections import defaultdict

import torch
from diversed.verifier.enumerate_laws import Pair, delayed, full_tree, paths
from diversed.verifier.tree import chain

# topologies that stay below some thousand drafts for V = 4, up to depth 3 and 3 children or paths
SHAPES = {
    "chain": [chain(1), chain(2), chain(3)],
    "paths": [paths(2, 1), paths(3, 1), paths(2, 2), delayed(1, paths(2, 1)), delayed(1, paths(2, 2))],
    "with_replacement": [full_tree(2, 1), full_tree(3, 1), (-1, 0, 0, 1, 1, 2), delayed(1, full_tree(2, 1))],
    "without_replacement": [full_tree(2, 1), full_tree(3, 1), full_tree(2, 2), (-1, 0, 0, 1, 1, 2, 3)],
    "greedy": [full_tree(2, 1), full_tree(3, 1), full_tree(2, 3), full_tree(3, 2), (-1, 0, 0, 0, 1, 1, 2, 5)],
}
# deeper and wider ones, for a vocabulary of 2 or 3
DEEP = {
    "paths": [paths(3, 2), paths(2, 3)],
    "with_replacement": [full_tree(2, 2)],
    "without_replacement": [(-1, 0, 0, 0, 1, 1, 2, 4)],
}


def shapes(drafting: str, vocabulary: int) -> list[tuple[int, ...]]:
    """Topologies to enumerate for a drafting law."""
    return SHAPES[drafting] + (DEEP.get(drafting, []) if vocabulary < 4 else [])


def row(rows: torch.Tensor, context: tuple[int, ...]) -> list[float]:
    """The row of a context given as tokens."""
    index = 0
    for token in context:
        index = index * rows.shape[1] + 1 + token
    return rows[index].tolist()


def residual(target: list[float], draft: list[float], mass: float = 1.0) -> list[float]:
    """max(mass target - draft, 0), not normalised."""
    return [max(mass * p - q, 0.0) for p, q in zip(target, draft, strict=True)]


def norm(values: list[float]) -> list[float]:
    """The values over their sum, or unchanged where that is 0."""
    total = sum(values)
    return [value / total for value in values] if total else values


def token_by_hand(pair: Pair, path: tuple[int, ...]) -> dict:
    """{(accepted, token): probability} of Leviathan's walk: accept while the coin is below target/draft."""
    out, reach = defaultdict(float), 1.0
    for depth, token in enumerate(path):
        p, q = row(pair.target, path[:depth]), row(pair.draft, path[:depth])
        accept = min(1.0, p[token] / q[token])
        for extra, share in enumerate(norm(residual(p, q))):
            out[depth, extra] += reach * (1 - accept) * share
        reach *= accept
    for extra, share in enumerate(row(pair.target, path)):
        out[len(path), extra] += reach * share
    return out


def block_by_hand(pair: Pair, path: tuple[int, ...], draft_rows=None) -> dict:
    """The same for block verification (Sun 2025): all 2^L coins, the LAST success counts."""
    rows = draft_rows or [row(pair.draft, path[:depth]) for depth in range(len(path))]
    weights, heads = [1.0], []
    for depth, token in enumerate(path):
        p = row(pair.target, path[:depth])[token]
        weights.append(min(1.0, weights[-1] * p / rows[depth][token]))
    for depth in range(1, len(path)):
        size = sum(residual(row(pair.target, path[:depth]), rows[depth], weights[depth]))
        below = size + 1 - weights[depth]
        heads.append(size / below if below else 1.0)
    heads.append(weights[-1])
    out = defaultdict(float)
    for coins in itertools.product((False, True), repeat=len(path)):
        chance = 1.0
        for coin, head in zip(coins, heads, strict=True):
            chance *= head if coin else 1 - head
        accepted = max((depth for depth, coin in enumerate(coins, 1) if coin), default=0)
        p = row(pair.target, path[:accepted])
        last = p if accepted == len(path) else norm(residual(p, rows[accepted], weights[accepted]))
        for extra, share in enumerate(last):
            out[accepted, extra] += chance * share
    return out


def gbv_by_hand(pair: Pair, drawn: list[tuple[int, ...]]) -> tuple[tuple[int, ...], dict]:
    """(selected path, verdicts) of GBV for K drawn paths, with the textbook ratio of K-th powers in exact float64."""
    count, path, rows, theta = len(drawn), (), [], 0.0
    for depth in range(len(drawn[0])):
        p, q = row(pair.target, path), row(pair.draft, path)

        def rank(token, p=p, q=q):
            return (p[token] / q[token] if q[token] else (float("inf") if p[token] else 0.0), token)

        edges = []
        for token, mass in enumerate(q):
            below = sum(q[other] for other in range(len(q)) if rank(other) < rank(token))
            edges.append((theta + (1 - theta) * below, theta + (1 - theta) * (below + mass)))
        rows.append([(high**count - low**count) / (1 - theta**count) for low, high in edges])
        token = max({other[depth] for other in drawn if other[:depth] == path}, key=rank)
        theta = edges[token][0] / edges[token][1]
        path += (token,)
    return path, block_by_hand(pair, path, rows)


def walk_by_hand(pair: Pair, children: dict, shrink: bool) -> dict:
    """{(context, token): probability} of recursive rejection: `children` maps a context to its drawn tokens in order.

    Written as the public algorithms are: one child at a time, target row replaced by its residual after a refusal.
    """
    out = defaultdict(float)

    def visit(context, reach):
        p, q = row(pair.target, context), row(pair.draft, context)
        for token in children.get(context, ()):
            if q[token] == 0:
                continue
            accept = min(1.0, p[token] / q[token])
            if accept:
                visit((*context, token), reach * accept)
            reach *= 1 - accept
            p = norm(residual(p, q))
            if shrink:
                q = norm([0.0 if other == token else mass for other, mass in enumerate(q)])
        for extra, share in enumerate(p):
            out[context, extra] += reach * share

    visit((), 1.0)
    return out


def drafts_by_hand(pair: Pair, drafting: str, parents: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """{tokens of nodes 1..N-1: probability}, one draw after the other."""
    found = defaultdict(float)

    def extend(tokens, chance):
        node = len(tokens) + 1
        if node == len(parents):
            found[tokens] += chance
            return
        context, parent = (), parents[node]
        while parent > 0:
            context = (tokens[parent - 1], *context)
            parent = parents[parent]
        q = row(pair.draft, context) if -1 not in context else [0.0] * pair.draft.shape[1]
        siblings = [other for other in range(1, len(parents)) if parents[other] == parents[node]]
        if drafting in ("without_replacement", "greedy"):
            q = norm(
                [0.0 if x in [tokens[other - 1] for other in siblings if other < node] else m for x, m in enumerate(q)]
            )
        if drafting == "greedy" and node != siblings[-1] and sum(q):
            q = [float(x == q.index(max(q))) for x in range(len(q))]
        if not sum(q):
            extend((*tokens, -1), chance)
        for token, mass in enumerate(q):
            if mass:
                extend((*tokens, token), chance * mass)

    extend((), 1.0)
    return found


def plan_by_hand(kind: str, p: list[float], q: list[float], a: float, tokens: list[int]):
    """(P, r, null) of one node, as ALGORITHMS 3.1 to 3.3 write them."""
    if kind == "greedy":
        fixed, sampled = [token for token in tokens[:-1] if token >= 0], tokens[-1]
        s = norm([0.0 if x in fixed else m for x, m in enumerate(q)])
        if sampled < 0:
            return (
                [a * p[u] if u >= 0 else 0.0 for u in tokens],
                [0 if x in fixed else a * m for x, m in enumerate(p)],
                1 - a,
            )
        last = min(1.0, a * p[sampled] / s[sampled])
        rest = residual(p, s, a)
        size = 1 - a + sum(rest)
        c = (1 - last) / size if size else 0.0
        given = [rest[u] * c if u >= 0 else 0.0 for u in tokens[:-1]]
        return [*given, last], [0 if x in (*fixed, sampled) else m * c for x, m in enumerate(rest)], (1 - a) * c
    if kind == "kseq":
        count, low, high = len(tokens), 1.0, float(len(tokens))
        for _ in range(200):
            rho = (low + high) / 2
            # c <= rho b, both subtracted from 1: near the root of equal rows they round to the same number
            missed = sum(residual(q, [x / rho for x in p]))
            low, high = (low, rho) if sum(residual(p, [rho * y for y in q])) <= missed**count else (rho, high)
        beta = sum(min(x / high, y) for x, y in zip(p, q, strict=True))
        share = (1 - (1 - beta) ** count) / beta if beta else 0.0
        given, reach = [], 1.0
        for u in tokens:
            accept = min(1.0, p[u] / (high * q[u]))
            given.append(reach * accept)
            reach *= 1 - accept
        rest = norm([max(x - min(x / high, y) * share, 0.0) for x, y in zip(p, q, strict=True)])
        return given, [reach * m for m in rest], 0.0
    t, null, s, reach, given = [a * x for x in p], 1 - a, list(q), 1.0, []
    for u in tokens:
        if u < 0 or s[u] == 0:
            given.append(0.0)
            continue
        accept = min(1.0, t[u] / s[u])
        given.append(reach * accept)
        reach *= 1 - accept
        rest = residual(t, s)
        size = sum(rest) + null
        t, null = [m / size if size else 0.0 for m in rest], null / size if size else 0.0
        if kind == "without":
            s = norm([0.0 if x == u else m for x, m in enumerate(s)])
    return given, [reach * m for m in t], reach * null


def tree_by_hand(pair: Pair, parents: tuple[int, ...], tokens: list[int], kind: str, coupled: bool) -> dict:
    """{(node, token): probability}: down by P, or the first node to fire in post-order."""
    children = [[child for child in range(1, len(parents)) if parents[child] == node] for node in range(len(parents))]
    out, silence = defaultdict(float), [1.0]

    def visit(node, context, mass):
        p = row(pair.target, context)
        present = [child for child in children[node] if tokens[child] >= 0]
        if not present:
            emit(node, p, mass if coupled else 1.0, 1 - mass if coupled else 0.0, mass)
            return
        drawn = [tokens[child] for child in children[node]]
        given, rest, null = plan_by_hand(kind, p, row(pair.draft, context), mass if coupled else 1.0, drawn)
        before = 0.0
        for child, share in zip(children[node], given, strict=True):
            if share:
                visit(child, (*context, tokens[child]), share / (1 - before) if coupled else mass * share)
            before += share
        emit(node, rest, sum(rest), null, mass)

    def emit(node, rest, size, null, mass):
        fire = (size / (size + null) if size + null else 0.0) * silence[0] if coupled else mass * size
        for token, share in enumerate(norm(rest)):
            out[node, token] += fire * share
        silence[0] -= fire if coupled else 0.0

    visit(0, (), 1.0)
    return out
