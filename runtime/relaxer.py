"""Where a blend's weight comes from: a bundle's head, or any callable that a user names.

A gate is `gate(draft, target, hidden) -> weight`: rows [..., V] of both models at a context and,
where it asks for them, their last hidden states [..., H_draft + H_target], draft first; the result
[...] is the draft's share, in [0, 1]. It sees one context at a time, so the weight of a node never
depends on which siblings were drawn.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..verifier.relax import Relaxation
from .model import Pair
from .sampling import Sampling


@dataclass(frozen=True)
class Gate:
    """weight: the callable; needs_hidden: whether both models must return hidden states; checked:
    whether its answers are looked at, which waits for the device.
    """

    weight: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    needs_hidden: bool = False
    checked: bool = False

    def __call__(self, draft: Tensor, target: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.weight(draft, target, hidden)


def load_gate(relaxation: Relaxation, pair: Pair, sampling: Sampling) -> Gate | None:
    """The gate of a learned relaxation, None for those that need none.

    A source `package.module:NAME` names a factory that is called with the tokenizer and returns the
    gate.
    """
    if relaxation.name != "learned":
        return None
    if not relaxation.source:
        raise ValueError(
            "`learned` needs to know which head: give the bundle's folder, or package.module:NAME"
        )
    if ":" in relaxation.source and "/" not in relaxation.source:
        if relaxation.bias:
            raise ValueError(
                f"`bias` moves the logit of a head; the gate {relaxation.source} has none, leave"
                " it out"
            )
        return Gate(
            _checked(_made(relaxation.source, pair.tokenizer), relaxation.source), checked=True
        )
    from .bundle import load_bundle

    bundle = load_bundle(relaxation.source, pair.target, pair.draft, sampling)
    if (blend := bundle.card["head"].get("blend", "probabilities")) != relaxation.blend:
        raise ValueError(
            f"bundle {relaxation.source} was trained for the blend of {blend}; write"
            f" {relaxation.source};blend={blend}"
        )
    head = bundle.head.to(pair.target.device)
    bias = relaxation.bias or 0.0
    return Gate(
        lambda draft, target, hidden: head.weight(draft, target, hidden, bias), head.needs_hidden
    )


def _checked(gate: Callable, source: str) -> Callable:
    """The user's gate, its answers checked: a law is only a law for weights in [0, 1]."""

    def weight(draft: Tensor, target: Tensor, hidden: Tensor | None) -> Tensor:
        found = gate(draft, target, hidden)
        shape = draft.shape[:-1]
        if (
            not isinstance(found, Tensor)
            or found.shape != shape
            or not bool(((found >= 0) & (found <= 1)).all())
        ):
            got = (
                f"{list(found.shape)}, {found.min():.3g} to {found.max():.3g}"
                if isinstance(found, Tensor)
                else found
            )
            raise ValueError(
                f"the gate {source} must return weights {list(shape)} in [0, 1], got {got}"
            )
        return found

    return weight


def _made(source: str, tokenizer) -> Callable:
    module, name = source.split(":", 1)
    try:
        gate = getattr(importlib.import_module(module), name)(tokenizer)
        if not callable(gate):
            raise TypeError(f"it returned a {type(gate).__name__}")
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"no gate at {source!r}: {error}; give package.module:NAME of a factory that takes the"
            " tokenizer and returns gate(draft, target, hidden)"
        ) from error
    return gate
