"""How long a step takes on one machine, from calls that were timed there by `diversed bench latency
--json FILE`.

    step = one draft call for every depth + one target call on the whole tree + the rest

The time of a call is interpolated linearly between the timed numbers of tokens and contexts. The
rest is drawing, verifying and committing. It is linear in the depth of the tree, in its number of
nodes and in whether it branches, fitted for each method to whole steps that were timed.

A file may also hold times that nobody measured (`"assumed": true`). `gpu` names the packaged file
of that kind: a pair on a GPU with calls of 25 and 3 ms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..files import check_regular
from ..runtime.shapes import Shape, parse_shape

ROLES = ("draft", "target")
PACKAGED = {"gpu": Path(__file__).parents[1] / "configs" / "gpu-latencies.json"}
UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


@dataclass(frozen=True)
class Latencies:
    """Milliseconds.

    tokens, contexts: of the timed calls, rising.
    calls:   role -> [X, Y] for X contexts and Y numbers of tokens.
    rest:    method -> coefficients of `_terms`; a method without them costs nothing beside its
             calls.
    assumed: whether nobody measured them, so that a choice is not timed either.
    """

    tokens: np.ndarray
    contexts: np.ndarray
    calls: dict[str, np.ndarray]
    rest: dict[str, np.ndarray] = field(default_factory=dict)
    assumed: bool = False

    def call(self, role: str, tokens: int, context: np.ndarray) -> np.ndarray:
        """[B] of a call on so many tokens after contexts [B]."""
        column = [np.interp(tokens, self.tokens, row) for row in self.calls[role]]
        return np.interp(context, self.contexts, column)

    def models(self, shape: Shape, context: np.ndarray) -> np.ndarray:
        """[B] of all calls of a step."""
        drafted = sum(self.call("draft", width, context) for width in shape.widths[:-1])
        return drafted + self.call("target", sum(shape.widths), context)

    def step(self, method: str, shape: Shape, context: np.ndarray) -> np.ndarray:
        """[B] of a step that grows this shape after contexts [B]."""
        rest = self.rest.get(method, np.zeros(4)) @ _terms(shape)
        return self.models(shape, context) + max(rest, 0.0)


def _terms(shape: Shape) -> np.ndarray:
    return np.array([1.0, shape.depth, sum(shape.widths), shape.paths > 1])


def read_latencies(path: str | Path) -> Latencies:
    """The latencies in a file of `diversed bench latency --json`, or in a packaged one."""
    path = PACKAGED.get(str(path), path)
    check_regular(Path(path))
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        found, steps = _calls(document["rows"]), _steps(document["rows"])
        return replace(with_rest(found, steps), assumed=document.get("assumed") is True)
    except UNREADABLE as error:
        raise ValueError(
            f"{path} holds no latencies ({error!r}); write it with `diversed bench latency --json"
            f" {path}`"
        ) from None


def _calls(rows: list[dict]) -> Latencies:
    """The timed calls, which must be a whole grid of contexts and tokens for both models."""
    timed = {
        (row["role"], row["context"], row["tokens"]): row["value"]
        for row in rows
        if row["role"] in ROLES
    }
    places = sorted(timed)
    contexts, tokens = (np.unique([place[axis] for place in places]) for axis in (1, 2))
    values = np.array([timed[place] for place in places], float)
    if not places or not ((values >= 0) & (values < np.inf)).all():
        raise ValueError("a call took no time")
    draft, target = values.reshape(len(ROLES), len(contexts), len(tokens))
    return Latencies(tokens, contexts, {"draft": draft, "target": target})


def _steps(rows: list[dict]) -> list[tuple[str, Shape, float, float]]:
    """The timed steps: (method, shape, context, milliseconds)."""
    return [
        (row["method"], parse_shape(row["shape"]), row["context"], row["value"])
        for row in rows
        if row["role"] == "step"
    ]


def with_rest(found: Latencies, steps: list[tuple[str, Shape, float, float]]) -> Latencies:
    """The latencies with the rest fitted to timed steps: (method, shape, context, milliseconds)."""
    rest = {}
    for method in dict.fromkeys(step[0] for step in steps):
        mine = [step[1:] for step in steps if step[0] == method]
        terms = np.stack([_terms(shape) for shape, _, _ in mine])
        over = [
            taken - found.models(shape, np.array([context]))[0] for shape, context, taken in mine
        ]
        rest[method] = np.linalg.lstsq(terms, np.array(over), rcond=None)[0]
    return replace(found, rest=rest)
