"""The price of a law: its time over the time of one softmax of the same rows, in the same run.

A draft step computes at least one softmax over [B, N, V]; a law that costs a small multiple of it costs little beside
the models. The root search of K-SEQ and the sort of GBV are reported with the rest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ..verifier.enumerate_laws import chain, full_tree, paths
from ..verifier.law import DraftTree
from ..verifier.methods import METHODS
from .command import record, table

# what is drafted for every drafting law: a chain of 8, eight tokens as 2 paths, or a binary tree of 31 nodes
SHAPES = {
    "chain": ("chain of 8", chain(8)),
    "paths": ("2 paths of 4", paths(2, 4)),
    "with_replacement": ("tree of 31", full_tree(2, 4)),
    "without_replacement": ("tree of 31", full_tree(2, 4)),
    "greedy": ("tree of 31", full_tree(2, 4)),
}


def run(
    *, batch: int = 8, vocabulary: int = 32_000, repeats: int = 9, device: str = "cpu", seed: int = 0
) -> list[dict]:
    """One row a method: median milliseconds of its law, and how many softmaxes of the same rows that is."""
    rows = []
    for name, method in METHODS.items():
        shape, parents = SHAPES[method.drafting]
        tree, logits = _drafted(batch, parents, vocabulary, method.drafting, device, seed)
        # taken in turns, so that a busy machine slows both alike
        softmax, law = [], []
        for _ in range(repeats + 1):
            softmax.append(_seconds(logits.softmax, -1, device))
            law.append(_seconds(method.law, tree, device))
        softmax, law = softmax[1:], law[1:]
        rows.append(
            {
                "case": f"{name}, {shape}",
                "value": 1e3 * statistics.median(law),
                "unit": "ms",
                "low": 1e3 * min(law),
                "high": 1e3 * max(law),
                "vs": {"softmax": statistics.median(law) / statistics.median(softmax)},
            }
        )
    return rows


def _drafted(batch: int, parents: tuple[int, ...], vocabulary: int, drafting: str, device: str, seed: int):
    """A tree with peaked rows, children drawn from the draft; distinct where the drafting law asks for it."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, len(parents), vocabulary, generator=generator)
    draft = (logits + torch.randn(logits.shape, generator=generator)).softmax(-1)
    tokens = torch.zeros(batch, len(parents), dtype=torch.int64)
    for parent in set(parents[1:]):
        children = [node for node, above in enumerate(parents) if above == parent]
        drawn = torch.multinomial(draft[:, parent], len(children), drafting == "paths", generator=generator)
        tokens[:, children] = drawn
    tree = DraftTree(tokens.to(device), parents, draft.to(device), logits.softmax(-1).to(device))
    return tree, logits.to(device)


def _seconds(work: Callable, argument, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work(argument)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(table(record(run())))
