"""What is saved by computing the common beginning of prompts once: the prefill of a batch, and the
texts with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import patch

import torch

from ..runtime import batch as batches
from ..runtime.completion import Request
from ..runtime.engine import Engine
from ..runtime.groups import Models
from .timing import in_turns, row, seconds


def run(
    models: Models = Models(),  # noqa: B008  frozen
    *,
    context: int = 450,
    shared: int = 430,
    batch: int = 32,
    new_tokens: int = 60,
    method: str = "token",
    repetitions: int = 5,
    threads: int = 1,
) -> list[dict]:
    """Milliseconds of the prefill and of whole texts, with the beginning computed once or by each.

    Args:
        context: tokens of a prompt.
        shared: of them that all prompts have in common.
        batch: prompts decoded together.
        new_tokens: tokens of each text.
        method: of verification.
        repetitions: of every case, in turns.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    pair = models.load()
    engine = Engine(pair, method)
    draw = random.Random(0)
    tokens = [draw.randrange(3, pair.vocab) for _ in range(shared + batch * (context - shared))]
    front, rest = tokens[:shared], tokens[shared:]
    requests = {}
    for number in range(batch):
        own = rest[number * (context - shared) :][: context - shared]
        requests[number] = Request([*front, *own], number, new_tokens)
        engine.check(number, requests[number])
    first = {number: Request(r.tokens, r.seed, 1) for number, r in requests.items()}
    cases = {
        f"{what}, {how}": (given, fill)
        for what, given in (("prefill and a step", first), ("texts", requests))
        for how, fill in (("once", batches.prefill), ("by each", _apart))
    }

    def measure(case: tuple[dict[int, Request], Callable], _: int) -> float:
        given, fill = case
        with patch.object(batches, "prefill", fill):
            return 1e3 * seconds(lambda: engine.run(given), pair.target.device.type)

    found = in_turns(cases, measure, repetitions, "prefill")
    rows = []
    for name, values in found.items():
        other = name.replace("once", "by each")
        pairs = zip(values, found[other], strict=True)
        ratios = sorted(mine / theirs for mine, theirs in pairs)
        vs = {} if other == name else {"vs": {other: ratios[len(ratios) // 2]}}
        rows.append(row(name, values, "ms", **vs))
    return rows


def _apart(model, tokens, cache) -> None:
    batches.write_prompts(model, tokens, cache, 0)
