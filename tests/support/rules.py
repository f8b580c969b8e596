"""Every rule written straight from its formula, in plain Python, one token at a time."""

import math

from .laws import norm, residual

ROWS = [  # relaxations without a head whose rows are checked
    "none",
    "ensemble:0.3",
    "ensemble:0.3;bias=0.7",
    "ensemble:0.3;blend=logits",
    "lenient:0.5",
    "mentored:1.5",
    "cascade-opt:0.2",
    "cascade-diff:0.1",
    "cascade-chow:0.5",
    "divergence:0.3",
    "divergence:3,0.4",
    "cascade-token:0.4",
    "typical:0.3,0.9",
    "regret:0.7",
    "min-p:0.4",
    "top-p:0.6",
]


def row_by_hand(text: str, p: list[float], q: list[float], weight: float) -> list[float]:
    """The relaxed row of target p and draft q; weight: the draft's share, of a blend."""
    name, numbers = _read(text)
    pairs = list(zip(p, q, strict=True))
    if name in ("none", "min-p", "top-p"):
        return norm([x * kept for x, kept in zip(p, _kept(name, numbers, p), strict=True)])
    if text.endswith("blend=logits"):
        return norm([max(x, 1e-30) ** (1 - weight) * max(y, 1e-30) ** weight for x, y in pairs])
    if name in ("ensemble", "learned"):
        return [(1 - weight) * x + weight * y for x, y in pairs]
    if name == "lenient":
        kept = [min(y, x / numbers[0]) for x, y in pairs]
        return [m + (1 - sum(kept)) * r for m, r in zip(kept, norm(residual(p, q)), strict=True)]
    if name == "mentored":
        return _mentored(pairs, *numbers)
    if name in ("cascade-opt", "cascade-diff", "cascade-chow", "divergence"):
        return q if _takes_draft(name, numbers, p, q) else p
    on = [_accepts(name, numbers, p, q, token) for token in range(len(p))]
    if name == "regret":
        excess, deficit = residual(q, p), residual(p, q)
        taken = sum(e for e, kept in zip(excess, on, strict=True) if kept)
        share = taken / sum(excess) if sum(excess) else 0
        moves = zip(p, excess, deficit, on, strict=True)
        return [x + e * kept - share * d for x, e, d, kept in moves]
    others = sum(y for y, kept in zip(q, on, strict=True) if not kept)
    return [y * kept + x * others for x, y, kept in zip(p, q, on, strict=True)]


def token_by_hand(text: str, p: list[float], q: list[float], weight: float) -> int:
    """The token at temperature 0 by the believed rows p of the target and q of the draft."""
    name, numbers = _read(text)
    mine, drafted = p.index(max(p)), q.index(max(q))
    if name in ("none", "min-p", "top-p"):
        return mine
    if name in ("ensemble", "learned"):
        row = row_by_hand(text, p, q, weight)
        return row.index(max(row))
    if name in ("cascade-opt", "cascade-diff", "cascade-chow", "divergence"):
        return drafted if _takes_draft(name, numbers, p, q) else mine
    return drafted if _accepts(name, numbers, p, q, drafted) else mine


def _read(text: str) -> tuple[str, list[float]]:
    name, _, numbers = text.split(";")[0].partition(":")
    return name, [float(number) for number in numbers.split(",") if number]


def _kept(name: str, numbers: list[float], p: list[float]) -> list[bool]:
    if name == "none":
        return [True] * len(p)
    if name == "min-p":
        return [x >= numbers[0] * max(p) for x in p]
    order = sorted(range(len(p)), key=lambda token: -p[token])  # stable: ties by token id
    before = {token: sum(p[other] for other in order[:rank]) for rank, token in enumerate(order)}
    return [before[token] < numbers[0] for token in range(len(p))]


def _takes_draft(name: str, numbers: list[float], p: list[float], q: list[float]) -> bool:
    if name == "divergence":
        most = numbers[1] if len(numbers) > 1 else 0.9
        pairs = zip(p, q, strict=True)
        kl = sum(x * math.log(max(x, 1e-30) / max(y, 1e-30)) for x, y in pairs)
        return kl <= numbers[0] and max(p) <= most
    edges = {"opt": max(p) - numbers[0] * sum(residual(p, q)), "diff": max(p) - numbers[0]}
    edges["chow"] = 1 - numbers[0]
    return max(q) >= edges[name.removeprefix("cascade-")]


def _accepts(name: str, numbers: list[float], p: list[float], q: list[float], token: int) -> bool:
    entropy = -sum(x * math.log(x) for x in p if x)
    edges = {
        "lenient": numbers[0] * max(p),
        "cascade-token": (1 - numbers[0]) * max(p),
        "regret": math.exp(-numbers[0]) * max(p),
        "mentored": q[token] / numbers[0] if numbers[0] else 0,
        "typical": min(numbers[0], numbers[-1] * math.exp(-entropy)),
    }
    return p[token] >= edges[name]


def _mentored(pairs: list[tuple[float, float]], cap: float) -> list[float]:
    """The floor by bisection: the sum of the row does not fall with it."""

    def row(floor: float) -> list[float]:
        return [max(min(y, cap * x), floor * x) for x, y in pairs]

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(row(middle)) < 1 else (low, middle)
    return row(high)
