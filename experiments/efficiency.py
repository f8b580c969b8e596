"""Block efficiency of every method on a real pair: new tokens per target call, as measured by the
decode loop.

    python experiments/efficiency.py

The bonus token of a step counts; the prefill and what lies after the end of a text do not.
Intervals are 95 % bootstrap intervals over prompts. Every method is run at every shape of
`branches` and under every relaxation.
"""

from __future__ import annotations

import sys
from itertools import product

from diversed.benchmarks.workload import Workload
from diversed.commands.bench import measure
from diversed.eval.intervals import ratio_of_sums
from diversed.runtime.drafting import topology
from diversed.runtime.engine import decode
from diversed.runtime.sampling import Sampling
from diversed.verifier.methods import METHODS
from rich.progress import track

RIVALS = {
    "block": "token",
    "gbv": "block",
    "traversal": "rrsw",
    "univer": "rrsw",
    "greedy_tree": "rrsw",
}


def run(
    work: Workload = Workload(max_new_tokens=64),  # noqa: B008  frozen
    *,
    prompts: int = 40,
    methods: list[str] = list(METHODS),  # noqa: B006, B008
    relaxations: list[str] = ["none"],  # noqa: B006
    temperatures: list[float] = [0.3, 0.7, 1.0],  # noqa: B006
    draft_length: int = 4,
    branches: list[int] = [2, 3, 4],  # noqa: B006
    batch: int = 40,
) -> list[dict]:
    """One row a method, shape, relaxation and temperature.

    Args:
        prompts: texts a row.
        methods: verification methods.
        relaxations: none, ensemble:0.3, a bundle folder, ...
        temperatures: of both models.
        draft_length: tokens on a drafted path.
        branches: paths K, or children M at every node, of methods that draft several; trees of more
            than 512 nodes are left out.
        batch: prompts decoded together.
    """
    pair = work.pair()
    encoded = work.prompts(pair, prompts)
    shapes = [
        (method, count)
        for method in methods
        for count in ([1] if METHODS[method].drafting == "chain" else branches)
        if _fits(method, draft_length, count)
    ]
    rows, found = [], {}
    for cell in track(list(product(temperatures, relaxations, shapes)), "efficiency"):
        temperature, relaxation, (method, count) = cell
        completions = decode(
            pair,
            encoded,
            method=method,
            relaxation=relaxation,
            draft_length=draft_length,
            branches=count,
            sampling=Sampling(temperature),
            max_new_tokens=work.max_new_tokens,
            batch=batch,
            seeds=[(work.seed << 32) + number for number in range(len(encoded))],
        )
        tokens = [len(completion.tokens) for completion in completions]
        calls = [completion.target_calls for completion in completions]
        where = temperature, relaxation
        found[*where, method, count] = per_call = ratio_of_sums(tokens, calls)
        shape = f"{count}x{draft_length}" if count > 1 else draft_length
        case = f"T={temperature:g} {method} {shape}"
        if relaxation != "none":
            case += f" {relaxation}"
        row = {"case": case, "unit": "tokens/call", "vs": _rivals(found, where, method, count)}
        rows.append(row | dict(zip(("value", "low", "high"), per_call, strict=True)))
    return rows


def _rivals(found: dict, where: tuple, method: str, count: int) -> dict[str, float]:
    """Ratios to the rival at the same temperature and relaxation, and to the method itself without
    relaxation.
    """
    ratios = {}
    rival = RIVALS.get(method)
    value = found[*where, method, count][0]
    other = found.get((*where, rival, count)) or found.get((*where, rival, 1))
    if other:
        ratios[rival] = value / other[0]
    exact = found.get((where[0], "none", method, count))
    if where[1] != "none" and exact:
        ratios["exact"] = value / exact[0]
    return ratios


def _fits(method: str, draft_length: int, count: int) -> bool:
    try:
        topology(METHODS[method].drafting, draft_length, count)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/efficiency.py")
