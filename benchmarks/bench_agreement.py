"""Whether the fast loop gives the texts of the reference loop: the same prompts and seeds, every
method and relaxation.

The reference goes through transformers' own modules and the laws of `verifier`, all prompts side by
side; the fast loop through the lean forward and the short formulas for chains, a few rows at a
time, one prompt in place of another (on a GPU or with `compile` through steps of fixed shapes).
Both round their sums in another order, so a uniform number that falls within rounding of a step of
a law's sum selects another token. Such ties are counted: a text that differs is decoded again by
both in float64, where it must not differ any more.
"""

from __future__ import annotations

import copy
import os
from itertools import product
from unittest.mock import patch

from rich.console import Console
from rich.progress import track

from ..runtime.completion import Request
from ..runtime.engine import Engine
from ..runtime.forward import Pair
from ..runtime.lean import SWITCH
from ..runtime.model import make_pair
from ..verifier.methods import METHODS, Method
from .workload import Workload

RULES = [
    "none",
    "ensemble:0.3",
    "ensemble:0.3;blend=logits",
    "lenient:0.5",
    "cascade-opt:0.2",
    "typical:0.3,0.5",
    "mentored:2",
    "divergence:0.5",
    "regret:1",
]
RULES += ["ensemble:0.3;budget=2"]


def run(
    work: Workload = Workload(dtype="float32", max_new_tokens=32),  # noqa: B008  frozen
    *,
    prompts: int = 200,
    methods: list[str] = ["plain", *METHODS],  # noqa: B006, B008
    relaxations: list[str] = RULES,  # noqa: B006
    draft_length: int = 3,
    batch: int = 16,
    compile: bool = False,
) -> list[dict]:
    """Two rows a method and relaxation: texts that differ as the pair is run, and those of them
    that differ in float64 too.

    Args:
        prompts: texts a row.
        methods: `plain`, which is not relaxed, and verification methods.
        relaxations: none, ensemble:0.3, a bundle folder, ...
        draft_length: tokens on a drafted path.
        batch: prompts that the fast loop decodes together.
        compile: compile the fast loop's steps.
    """
    pair = work.pair()
    wide = _pair_of(pair, lambda module: copy.deepcopy(module).double())
    requests = work.requests(work.prompts(pair, prompts))
    cells = [
        (method, rule)
        for method, rule in product(methods, relaxations)
        if method != "plain" or rule == "none"
    ]
    rows = []
    for method, rule in track(cells, "agreement", console=Console(stderr=True)):
        options = {"method": method, "relaxation": rule, "draft_length": draft_length}
        ties = _differing(pair, requests, batch, options, compile)
        wrong = _differing(wide, {i: requests[i] for i in ties}, batch, options)
        case = method if rule == "none" else f"{method}, {rule}"
        unit = f"of {prompts} texts"
        rows += [
            {"case": f"{case}: differ in {work.dtype}", "value": len(ties), "unit": unit},
            {"case": f"{case}: differ in float64 too", "value": len(wrong), "unit": "texts"},
        ]
    return rows


def _differing(
    pair: Pair, requests: dict[int, Request], batch: int, options: dict, compile: bool = False
) -> list[int]:
    """Requests whose texts the two loops give differently."""
    if not requests:
        return []
    fast = Engine(pair, **options, compile=compile)
    for i, request in requests.items():
        fast.check(i, request)
    ours, theirs = fast.run(requests, batch), _reference(pair, options).run(requests)
    return [i for i in requests if ours[i].tokens != theirs[i].tokens]


def _reference(pair: Pair, options: dict) -> Engine:
    with patch.dict(os.environ, {SWITCH: "0"}):
        engine = Engine(_pair_of(pair, lambda module: module), **options)
    # a method without short formulas or kernels
    engine.method = Method(engine.method.unchecked, engine.method.drafting)
    return engine


def _pair_of(pair: Pair, change) -> Pair:
    """A pair of the changed modules; how they are run is chosen again."""
    return make_pair(change(pair.target.module), change(pair.draft.module), pair.tokenizer)
