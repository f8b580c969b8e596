"""What stays the same for every step of a run: checked once, then read by all."""

from __future__ import annotations

import time
from typing import Any

import torch

from ..files import within
from ..verifier import methods
from ..verifier.relax import Relaxation
from .choosers import Selector, make_selector
from .drafting import MAX_NODES, ROOT, Branches, default_branches, topology
from .forward import Pair
from .relaxer import load_relaxer
from .sampling import Sampling


class Setup:
    """One method, relaxation and tree shape over one pair.

    method, relaxer, selector: who verifies, relaxes and chooses the shape of the next tree.
    shapes, shape: the trees that may be grown, and the one with the most nodes.
    depth:   of the deepest of them.
    hidden:  whether anyone reads last hidden states.
    leaf:    1 if the draft is run on the leaves too, else 0.
    static:  state and steps of graphs.py, the last used last; eager: steps of batch.py.
    seconds: of every stage of engine.STAGES, if a run is to be timed.
    """

    def __init__(
        self,
        pair: Pair,
        method: str = "token",
        relaxation: str | Relaxation = "none",
        draft_length: int = 5,
        branches: Branches = None,
        trunk: int = 0,
        drafting: str | None = None,
        relax_leaf: bool = False,
        sampling: Sampling | None = None,
        compile: bool = False,
    ):
        self.pair, self.sampling, self.trunk, self.compiled = (
            pair,
            sampling or Sampling(),
            trunk,
            compile,
        )
        self.relaxer = load_relaxer(relaxation, pair, self.sampling)
        self.method = methods.method("token" if method == "plain" else method)
        if method == "plain":
            if self.relaxer.rule.name != "none":
                raise ValueError(
                    f"method `plain` has no draft to relax towards, got relaxation {relaxation!r};"
                    " use `none`"
                )
            self.selector = Selector([ROOT])
        else:
            drafting = drafting or self.method.drafting
            self.method.require(drafting)
            within(0, MAX_NODES, draft_length=max(draft_length, 0), trunk=trunk)
            if isinstance(branches, str):
                self.selector = make_selector(
                    branches, method, drafting, draft_length, trunk, pair, self.sampling
                )
            else:
                if branches is None:
                    branches = default_branches(drafting, draft_length)
                self.selector = Selector([topology(drafting, draft_length, branches, trunk)])
        self.shapes = self.selector.shapes
        self.shape = max(self.shapes, key=lambda shape: shape.nodes)
        self.depth = max(shape.depth for shape in self.shapes)
        self.hidden = self.relaxer.needs_hidden or self.selector.looks_back
        self.leaf = int(relax_leaf and self.depth > 0)
        if self.leaf and self.selector.confidence:
            raise ValueError(
                "`relax_leaf` needs leaves that are known before the tree is drawn, got branches"
                f" {branches!r}; leave one of the two out"
            )
        if self.method.ahead:
            self._check_lossy(method)
        self.static: dict[tuple, Any] = {}
        self.eager: dict[tuple, Any] = {}
        self.seconds: dict[str, float] | None = None
        self.mark = 0.0

    def _check_lossy(self, method: str) -> None:
        """Refuse what a method that looks ahead cannot be run with."""
        ahead, rule = self.method.ahead, self.relaxer.rule.name
        why = ""
        if not self.sampling.greedy:
            why = f"is for temperature 0 alone, got {self.sampling.temperature:g}"
        elif rule != "none":
            why = f"is a relaxation itself, got {rule} beside it"
        elif self.depth <= ahead:
            why = (
                f"looks {ahead} tokens ahead, got a draft of {self.depth}; raise `draft_length` to"
                f" more than {ahead}, or give fly:WINDOW"
            )
        if why:
            raise ValueError(f"method {method} {why}")

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to a stage of `seconds`, if it is kept: a GPU then waits
        at each stage.
        """
        if self.seconds is None:
            return
        if self.pair.target.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[stage] += now - self.mark
        self.mark = now
