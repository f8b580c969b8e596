"""Relaxed rows as the table of rules writes them, one token at a time, from what the models believe and rows as
sampled.
"""

import math

import torch
from diversed.verifier.enumerate_laws import Pair
from diversed.verifier.relax import parse

from .laws import norm, residual

RULES = [
    "none",
    "ensemble:0.3",
    "ensemble:0.3;bias=0.7",
    "ensemble:0.3;blend=logits",
    "coin:0.3",
    "lenient:0.5",
    "cascade-opt:0.2",
    "cascade-diff:0.1",
    "cascade-chow:0.5",
    "cascade-token:0.4",
    "typical:0.3,0.9",
    "divergence:0.1",
    "mentored:1.3",
    "regret:0.7",
    "min-p:0.5",
    "top-p:0.7",
    "learned",
    "learned;blend=logits",
    "learned;blend=choice",
]


def share(text: str, weight: float) -> float:
    """The draft's share at a node: the rule's own if it has one, else `weight`."""
    rule = parse(text)
    if not rule.parameters:
        return weight
    return 1 / (1 + math.exp(-math.log(0.3 / 0.7) - (rule.bias or 0)))


def accepted(text: str, p: list[float], q: list[float]) -> list[bool]:
    """The tokens at which a rule that looks at tokens takes the draft's word."""
    highest, entropy, name = max(p), -sum(x * math.log(x) for x in p if x), parse(text).name
    if name == "mentored":
        return [y <= 1.3 * x for x, y in zip(p, q, strict=True)]
    edge = {
        "lenient": 0.5 * highest,
        "cascade-token": (1 - 0.4) * highest,
        "typical": min(0.3, 0.9 * math.exp(-entropy)),
        "regret": math.exp(-0.7) * highest,
    }
    return [x >= edge[name] for x in p]


def deferred(text: str, p: list[float], q: list[float]) -> bool:
    """Whether a rule that takes one row or the other keeps the target's."""
    name = parse(text).name
    if name == "divergence":
        logs = [math.log(max(x, 1e-30)) - math.log(max(y, 1e-30)) for x, y in zip(p, q, strict=True)]
        return sum(x * log for x, log in zip(p, logs, strict=True)) > 0.1 or max(p) > 0.9
    edges = {"opt": max(p) - 0.2 * sum(residual(p, q)), "diff": max(p) - 0.1, "chow": 1 - 0.5}
    return max(q) < edges[name.removeprefix("cascade-")]


def clipped(p: list[float], q: list[float], cap: float) -> list[float]:
    """p clip(q/p, b, cap), b by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        b = (low + high) / 2
        row = [max(min(y, cap * x), b * x) for x, y in zip(p, q, strict=True)]
        low, high = (low, b) if sum(row) > 1 else (b, high)
    return row


def truncated(text: str, p: list[float]) -> list[float]:
    if text.startswith("min-p"):
        return norm([x * (x >= 0.5 * max(p)) for x in p])
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = [i for place, i in enumerate(order) if sum(p[j] for j in order[:place]) < 0.7]
    return norm([x * (i in kept) for i, x in enumerate(p)])


ONE_ROW = ("cascade-opt", "cascade-diff", "cascade-chow", "divergence")
TRUNCATED = ("min-p", "top-p")


def blended(text: str, p: list[float], q: list[float], w: float) -> list[float]:
    if parse(text).blend == "logits":
        return norm([max(x, 1e-30) ** (1 - w) * max(y, 1e-30) ** w for x, y in zip(p, q, strict=True)])
    return [(1 - w) * x + w * y for x, y in zip(p, q, strict=True)]


def sampled_row(
    text: str,
    p: list[float],
    q: list[float],
    p_believed: list[float],
    q_believed: list[float],
    weight: float,
    filtered: bool = False,
) -> list[float]:
    """The relaxed row at a temperature above 0; p, q: rows as sampled, tokens with p = 0 filtered out or not."""
    if filtered:
        q = norm([y * (x > 0) for x, y in zip(p, q, strict=True)])
    if text == "none" or not sum(q):
        return p
    rule, w = parse(text), share(text, weight)
    if rule.blend == "choice":
        return q if w > 0.5 else p
    if rule.name in ("ensemble", "coin", "learned"):
        return norm([v * (x > 0 or not filtered) for v, x in zip(blended(text, p, q, w), p, strict=True)])
    if rule.name == "lenient":
        kept = [min(y, x / 0.5) for x, y in zip(p, q, strict=True)]
        left = residual(p, q)
        return [m + (1 - sum(kept)) * r for m, r in zip(kept, norm(left) if sum(left) else left, strict=True)]
    if rule.name in ONE_ROW:
        return p if deferred(text, p_believed, q_believed) else q
    if rule.name in TRUNCATED:
        return truncated(text, p)
    if rule.name == "mentored":
        return clipped(p, q, 1.3)
    on = accepted(text, p_believed, q_believed)
    if rule.name == "regret":
        taken = [x * kept for x, kept in zip(residual(q, p), on, strict=True)]
        left = norm(residual(p, q))
        return [x + more - sum(taken) * less for x, more, less in zip(p, taken, left, strict=True)]
    others = sum(y for y, kept in zip(q, on, strict=True) if not kept)
    return [y * kept + x * others for x, y, kept in zip(p, q, on, strict=True)]


def greedy_row(text: str, p: list[float], q: list[float], weight: float) -> list[float]:
    """The relaxed row at temperature 0; p, q: what the models believe."""
    rule, w = parse(text), share(text, weight)
    if rule.name == "coin":
        return [(1 - w) * x + w * y for x, y in zip(top(p), top(q), strict=True)]
    if rule.name == "none":
        return top(p)
    if rule.blend == "choice":
        return top(q if w > 0.5 else p)
    if rule.name in ("ensemble", "learned"):
        return top(blended(text, p, q, w))
    if rule.name in ONE_ROW:
        return top(p if deferred(text, p, q) else q)
    if rule.name in TRUNCATED:
        return top(p)
    return top(q if accepted(text, p, q)[q.index(max(q))] else p)


def top(row: list[float]) -> list[float]:
    """One-hot at the most likely token, the lowest id of a tie."""
    return [float(i == row.index(max(row))) for i in range(len(row))]


def each_row(row, *columns: torch.Tensor) -> torch.Tensor:
    """[C, V] float64 of a function of the rows of every context."""
    values = zip(*(column.tolist() for column in columns), strict=True)
    return torch.tensor([row(*each) for each in values], dtype=torch.float64)


def greedy_pair(believed: Pair) -> Pair:
    """Rows as sampled at temperature 0."""
    return Pair(each_row(top, believed.draft), each_row(top, believed.target), believed.length)


def filtered_pair(believed: Pair) -> Pair:
    """Rows as sampled at temperature 1/2 with a filter that leaves the two most likely tokens of a row; of a few of
    the draft's rows one token, so that the target may have removed all that the draft can say.
    """

    def row(values: list[float], most: int) -> list[float]:
        kept = sorted(range(len(values)), key=lambda i: -values[i])[:most]
        return norm([value**2 * (i in kept) for i, value in enumerate(values)])

    most = [2 - (context % 3 == 0) for context in range(len(believed.draft))]
    draft = [row(values, count) for values, count in zip(believed.draft.tolist(), most, strict=True)]
    target = [row(values, 2) for values in believed.target.tolist()]
    draft, target = (torch.tensor(rows, dtype=torch.float64) for rows in (draft, target))
    return Pair(draft, target, believed.length)
