"""Accepted tokens of every method, exact over the randomness of verification.

    python experiments/laws.py

Means over trees that are drawn by each method's own drafting law, for drafts closer to the target
and farther from it. In the mean over all drafts block is never below token, traversal never below
rrsw, univer never below greedy_tree. gbv against block and univer against rrsw have no order: the
table shows both signs.
How far each method is from the best rule for its drafting law: tests/test_optimality.py.
"""

from __future__ import annotations

import sys

import torch
from diversed.benchmarks.workload import drawn
from diversed.commands.bench import measure
from diversed.runtime.drafting import DraftShape, topology
from diversed.verifier.law import DraftTree, expected_length
from diversed.verifier.methods import DRAFTINGS, METHODS
from torch import Tensor

# the rival that a method is set against in the table of accepted tokens
RIVALS = {
    "block": "token",
    "gbv": "block",
    "traversal": "rrsw",
    "univer": "rrsw",
    "greedy_tree": "rrsw",
    "specinfer": "token",
    "kseq": "specinfer",
    "rrsw": "specinfer",
}


def run(
    *,
    vocabulary: int = 64,
    depth: int = 4,
    width: int = 2,
    trees: int = 256,
    noises: list[float] = [0, 0.25, 0.5, 1, 2, 4],  # noqa: B006
    seed: int = 0,
) -> list[dict]:
    """One row a method and noise.

    Args:
        vocabulary: of the trees whose accepted tokens are counted.
        depth: tokens on a drafted path.
        width: paths, or children of every node.
        trees: drawn for every method.
        noises: standard deviations of what is added to the target's logits to make the draft's.
        seed: of all random numbers.
    """
    rows = []
    for noise in noises:
        rows += accepted((trees, depth, vocabulary), width, noise, seed)
    return rows


def accepted(size: tuple[int, int, int], width: int, noise: float, seed: int) -> list[dict]:
    """Mean accepted tokens of every method; size: trees, depth, vocabulary."""
    trees, depth, vocabulary = size
    generator = torch.Generator().manual_seed(seed)
    double = {"generator": generator, "dtype": torch.float64}
    logits = 2 * torch.randn(trees, depth + 1, vocabulary, **double)
    target = logits.softmax(-1)
    draft = (logits + noise * torch.randn(logits.shape, **double)).softmax(-1)
    divergence = 0.5 * (target - draft).abs().sum(-1).mean().item()
    made = {}
    for drafting in DRAFTINGS:
        shape = topology(drafting, depth, 1 if drafting == "chain" else width)
        made[drafting] = _tree(draft, target, shape, generator)
    lengths = {}
    for name, method in METHODS.items():
        tree = made[method.drafting]
        lengths[name] = expected_length(method.law(tree), tree.parents)
    rows = []
    for name, length in lengths.items():
        mean, error = length.mean().item(), 1.96 * length.std().item() / trees**0.5
        row = {"case": f"{name}, TV {divergence:.2f}", "value": mean, "unit": "accepted tokens"}
        row |= {"low": mean - error, "high": mean + error, "vs": {}}
        if rival := RIVALS.get(name):
            row["vs"] = {rival: mean / lengths[rival].mean().item()}
        rows.append(row)
    return rows


def _tree(draft: Tensor, target: Tensor, shape: DraftShape, generator) -> DraftTree:
    """One tree per request, whose rows [B, depth + 1, V] depend on the depth alone."""
    depths = torch.tensor(shape.depths)
    rows = draft[:, depths]
    tokens = drawn(rows, shape, generator)
    inner = torch.tensor([node in shape.parents for node in range(shape.nodes)])
    return DraftTree(tokens, shape.parents, rows * inner[:, None], target[:, depths])


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/laws.py")
