"""What a step takes on one machine, from calls that were timed there by `diversed bench latency
--json FILE`.

    step = draft calls, one a depth + one target call on the whole tree + the rest

A call takes what was measured for its tokens and context, by linear interpolation between the
measured ones. The rest, drawing and verifying and committing, is linear in the depth and the nodes
of a tree and in whether it branches, fitted for each method to whole steps that were timed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..runtime.choosers import Shape, parse_shape

ROLES = ("draft", "target")


@dataclass(frozen=True)
class Latencies:
    """Milliseconds.

    tokens, contexts: of the timed calls, rising; calls: role -> [X, Y], X contexts and Y tokens.
    rest: method -> coefficients of `_terms`; a method without them costs nothing beside its calls.
    """

    tokens: np.ndarray
    contexts: np.ndarray
    calls: dict[str, np.ndarray]
    rest: dict[str, np.ndarray] = field(default_factory=dict)

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
        spent = self.rest.get(method, np.zeros(4)) @ _terms(shape)
        return self.models(shape, context) + max(spent, 0.0)


def _terms(shape: Shape) -> np.ndarray:
    return np.array([1.0, shape.depth, sum(shape.widths), shape.paths > 1])


def read_latencies(path: str | Path) -> Latencies:
    """The latencies in a file of `diversed bench latency --json`."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        calls = {
            (row["role"], row["context"], row["tokens"]): row["value"]
            for row in rows
            if row["role"] in ROLES
        }
        steps = [
            (row["method"], parse_shape(row["shape"]), row["context"], row["value"])
            for row in rows
            if row["role"] == "step"
        ]
        contexts, tokens = (np.array(sorted({key[place] for key in calls})) for place in (1, 2))
        grid = {
            role: np.array([[calls[role, x, y] for y in tokens] for x in contexts], float)
            for role in ROLES
        }
        if not calls or not all(
            (0 <= times).all() and (times < np.inf).all() for times in grid.values()
        ):
            raise ValueError("a call took no time")
        return with_rest(Latencies(tokens, contexts, grid), steps)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError(
            f"{path} holds no latencies ({error!r}); write it with `diversed bench latency --json"
            f" {path}`"
        ) from None


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
    return Latencies(found.tokens, found.contexts, found.calls, rest)


def simulated(target: float = 25.0, draft: float = 3.0) -> Latencies:
    """A pair on a GPU, assumed and not measured: milliseconds of a call on one token; a call on 128
    tokens takes twice that of one, and 4,096 tokens of context add a tenth. Nothing is spent
    outside the models.
    """
    tokens, contexts = np.array([1, 129]), np.array([0, 4096])
    grid = np.array([[1.0, 2.0], [1.1, 2.1]])
    return Latencies(tokens, contexts, {"draft": draft * grid, "target": target * grid})
