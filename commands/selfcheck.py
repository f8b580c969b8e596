"""`diversed selfcheck`: are the laws exact on this device? By enumeration, then by sampling.

Enumeration needs no luck: for tiny vocabularies every draft is listed, the method states its law on
the device, and the law of the text is compared with the target's. Sampling then covers what
enumeration cannot see, the draw itself in
single precision: texts are drafted, verified, drawn and counted, and the counts are compared with
the target's law by Pearson's chi-square.

Power of the sampling test. With n texts and a law that is off by TV d, the statistic is noncentral
chi-square with noncentrality n sum(difference^2 / p) >= 4 n d^2, by Cauchy and Schwarz. For n =
400,000, d = 0.01 and the 26 degrees of freedom of three tokens of V = 3 that is 160, against a
threshold of 61.7 for a false alarm of 1e-4: an error of 0.01 is missed less than once in 100
million runs. Smaller ones are left to the enumeration.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..verifier.enumerate_laws import (
    KINDS,
    Drafts,
    Pair,
    delayed,
    drafts,
    full_tree,
    model_law,
    paths,
    random_pair,
    text_law,
)
from ..verifier.law import Law, draw
from ..verifier.methods import METHODS, Method, method
from ..verifier.tree import chain, topology

TEXTS = 400_000
FALSE_ALARM = 1e-4
# float64 sums of a few thousand terms, or float32 ones if a device has no float64
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
SHAPES = {
    "chain": (chain(1), chain(2), chain(3)),
    "paths": (paths(2, 1), paths(2, 2), delayed(1, paths(2, 1))),
    "with_replacement": (full_tree(2, 1), full_tree(3, 1)),
    "without_replacement": (full_tree(2, 1), full_tree(2, 2)),
    "greedy": (full_tree(2, 1), full_tree(2, 2), full_tree(3, 2)),
}


def selfcheck(*, method: str = "all", device: str = "cpu", seed: int = 0) -> bool:
    """Check one method or all of them, print a table, and say whether every law holds.

    Args:
        method: a verification method, or all.
        device: where laws and texts are computed, such as cpu or cuda.
        seed: of the random models and texts.
    """
    from rich.console import Console
    from rich.table import Table

    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"`device` {device!r} cannot be used on this machine: {reason}") from error
    dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
    table = Table(
        "method",
        "drafting",
        "laws",
        "largest error",
        "p of sampling",
        "",
        title=f"laws on {device}, {dtype}, seed {seed}",
    )
    sound = True
    for name, entry in _chosen(method).items():
        for drafting in entry.exact_for:
            count, error = enumerated(entry, drafting, device, dtype, seed)
            chance = sampled(entry, drafting, device, seed)
            holds = error < BOUNDS[dtype] and chance > FALSE_ALARM
            sound &= holds
            verdict = "[green]exact" if holds else "[red]WRONG"
            table.add_row(name, drafting, str(count), f"{error:.1e}", f"{chance:.3f}", verdict)
    Console().print(table)
    Console().print(
        f"laws: every draft enumerated, bound {BOUNDS[dtype]:g}. sampling: {TEXTS:,} texts in"
        " float32; an error of 0.01 in total variation is missed with probability below 1e-8, a"
        f" sound law refused with {FALSE_ALARM:g}."
    )
    return sound


def enumerated(
    entry: Method, drafting: str, device: str, dtype: torch.dtype, seed: int
) -> tuple[int, float]:
    """(laws compared, largest difference of a text's probability from the target's)."""
    count, worst = 0, 0.0
    for kind in KINDS:
        for vocabulary in (2, 3):
            for parents in SHAPES[drafting]:
                generator = torch.Generator().manual_seed(seed + count)
                pair = random_pair(vocabulary, topology(parents).depth + 1, kind, generator)
                every = drafts(pair, drafting, parents)
                found = text_law(
                    every, _law_on(entry, every, device, dtype), pair.target, pair.length
                )
                worst = max(worst, (found - model_law(pair.target, pair.length)).abs().max().item())
                count += 1
    return count, worst


def sampled(entry: Method, drafting: str, device: str, seed: int, texts: int = TEXTS) -> float:
    """p-value of the counts of `texts` drawn texts of three tokens, V = 3, under the target's
    law.
    """
    generator = torch.Generator().manual_seed(seed)
    pair = random_pair(3, 3, "random", generator)
    parents = {"chain": chain(2), "paths": paths(2, 2), "with_replacement": full_tree(2, 1)}.get(
        drafting, full_tree(2, 2)
    )
    every = drafts(pair, drafting, parents)
    law = _law_on(entry, every, device, torch.float32, back=False)
    which = torch.multinomial(every.probability, texts, replacement=True, generator=generator)
    uniform = torch.rand(texts, 2, generator=generator, dtype=torch.float64)
    here = which.to(device)
    verdict = draw(Law(law.stop[here], law.next[here]), uniform.to(device))
    context = every.contexts[which, verdict.node.cpu()] * 3 + 1 + verdict.token.cpu()
    return _chi_square(_continued(pair, context, generator), model_law(pair.target, pair.length))


def _chosen(name: str) -> dict[str, Method]:
    return METHODS if name == "all" else {name: method(name)}


def _law_on(
    entry: Method, every: Drafts, device: str, dtype: torch.dtype, back: bool = True
) -> Law:
    """The method's law of all drafts, computed on the device, as float64 on the CPU if `back`."""
    tree = every.tree
    moved = replace(
        tree,
        tokens=tree.tokens.to(device),
        draft=tree.draft.to(dtype).to(device),
        target=tree.target.to(dtype).to(device),
    )
    law = entry.law(moved)
    return Law(law.stop.cpu().double(), law.next.cpu().double()) if back else law


def _continued(pair: Pair, context: Tensor, generator: torch.Generator) -> Tensor:
    """[3^3] how often each text came out, after the target has completed the short ones."""
    first = (3**pair.length - 1) // 2
    for _ in range(pair.length - 1):
        short = (context < first).nonzero().flatten()
        token = torch.multinomial(pair.target[context[short]], 1, generator=generator).squeeze(1)
        context[short] = context[short] * 3 + 1 + token
    return torch.bincount(context - first, minlength=3**pair.length)


def _chi_square(counts: Tensor, law: Tensor) -> float:
    """p-value by the Wilson-Hilferty cube root, which is within 1e-4 at 26 degrees of freedom."""
    expected = law * counts.sum()
    possible = expected > 0
    if counts[~possible].any():
        return 0.0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    return 0.5 * math.erfc(z / 2**0.5)
