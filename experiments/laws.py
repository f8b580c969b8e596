"""What holds between the methods and what does not, and how far each is from the best rule for its
drafting law.

    python experiments/laws.py

Two tables in one run. *Accepted tokens*: means over trees drawn by each method's own drafting law,
    exact over the
randomness of verification, for drafts closer to and farther from the target. block is never below
token, traversal never below rrsw, univer never below greedy_tree; gbv against block and univer
against rrsw have no order, and the
table shows both signs. *Gap to the optimum*: accepted tokens that the best lossless rule for the
    same drafting law has
over the method, by linear programming on all drafts of a tiny vocabulary.
"""

from __future__ import annotations

import sys

import torch
from diversed.benchmarks.workload import drawn
from diversed.commands.bench import measure
from diversed.runtime.drafting import DraftShape, topology
from diversed.verifier.enumerate_laws import Pair, drafts, mean_length, random_pair
from diversed.verifier.law import DraftTree, expected_length
from diversed.verifier.methods import DRAFTINGS, METHODS
from diversed.verifier.tree import topology as topology_of
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
    gaps: int = 5,
    seed: int = 0,
) -> list[dict]:
    """Both tables as rows.

    Args:
        vocabulary: of the trees whose accepted tokens are counted.
        depth: tokens on a drafted path.
        width: paths, or children of every node.
        trees: drawn for every method.
        noises: standard deviations of what is added to the target's logits to make the draft's.
        gaps: pairs of tiny models that the gaps are averaged over; 0 leaves them out (they need
            scipy).
        seed: of all random numbers.
    """
    rows = []
    for noise in noises:
        rows += accepted((trees, depth, vocabulary), width, noise, seed)
    return rows + (optimality_gaps(gaps, seed) if gaps else [])


def accepted(size: tuple[int, int, int], width: int, noise: float, seed: int) -> list[dict]:
    """Mean accepted tokens of every method; size: trees, depth, vocabulary."""
    trees, depth, vocabulary = size
    generator = torch.Generator().manual_seed(seed)
    double = {"generator": generator, "dtype": torch.float64}
    logits = 2 * torch.randn(trees, depth + 1, vocabulary, **double)
    target = logits.softmax(-1)
    draft = (logits + noise * torch.randn(logits.shape, **double)).softmax(-1)
    divergence = 0.5 * (target - draft).abs().sum(-1).mean().item()
    drawn = {}
    for drafting in DRAFTINGS:
        drawn[drafting] = _tree(draft, target, _shape(drafting, depth, width), generator)
    lengths = {}
    for name, method in METHODS.items():
        tree = drawn[method.drafting]
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


def optimality_gaps(pairs: int, seed: int = 0) -> list[dict]:
    """For every method on a tiny vocabulary: what the best rule accepts more, and the shares of it
    reached.
    """
    rows = []
    for name, method in METHODS.items():
        vocabulary = 2 if method.drafting == "paths" else 3
        parents = _shape(method.drafting, 2, 2).parents
        lost, share = [], []
        for index in range(pairs):
            pair = random_pair(vocabulary, 3, "random", torch.Generator().manual_seed(seed + index))
            best = optimum(pair, method.drafting, parents)
            found = mean_length(method.law, pair, method.drafting, parents)
            lost.append(best - found)
            share.append(found / best)
        row = {"case": f"{name}, {method.drafting}, V = {vocabulary}", "value": sum(lost) / pairs}
        row |= {"unit": "tokens below the optimum", "low": min(lost), "high": max(lost)}
        rows.append(row | {"vs": {"optimum": sum(share) / pairs}})
    return rows


def optimum(pair: Pair, drafting: str, parents: tuple[int, ...]) -> float:
    """Most accepted tokens that any lossless rule reaches for this drafting law.

    The variables are the probabilities of every verdict (node, token) after every draft, so the
    rule may use all rows of both models, on and off the drafted paths. The constraints: a draft's
    verdicts sum to 1, and the text's law, continued by the target after the verdict, is the
    target's.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    every = drafts(pair, drafting, parents)
    count, nodes = every.contexts.shape
    vocabulary = pair.target.shape[1]
    size = nodes * vocabulary
    depth = torch.tensor(topology_of(parents).depths, dtype=torch.float64)
    gain = (every.probability[:, None] * depth).repeat_interleave(vocabulary, 1).flatten()
    child = (every.contexts.unsqueeze(-1) * vocabulary + 1 + torch.arange(vocabulary)).flatten()
    contexts = sum(vocabulary**level for level in range(pair.length + 1))
    # reach[c, a]: the target's probability of coming from context a to context c
    reach = torch.eye(contexts, dtype=torch.float64)
    for context in range(1, contexts):
        above, token = (context - 1) // vocabulary, (context - 1) % vocabulary
        reach[context] += reach[above] * pair.target[above, token]
    first = contexts - vocabulary**pair.length
    continued = reach[first:, child] * every.probability.repeat_interleave(size)
    text, verdict = continued.nonzero(as_tuple=True)
    draft = torch.arange(count).repeat_interleave(size)
    equations = coo_array(
        (
            torch.cat(
                [continued[text, verdict], torch.ones(count * size, dtype=torch.float64)]
            ).numpy(),
            (
                torch.cat([text, draft + len(continued)]).numpy(),
                torch.cat([verdict, torch.arange(count * size)]).numpy(),
            ),
        ),
        shape=(len(continued) + count, count * size),
    )
    wanted = torch.cat([reach[first:, 0], torch.ones(count, dtype=torch.float64)])
    absent = (every.tree.tokens < 0).repeat_interleave(vocabulary, 1).flatten()
    absent &= torch.arange(count * size) % size >= vocabulary
    bounds = [(0, 0 if gone else 1) for gone in absent.tolist()]
    found = linprog(
        -gain.numpy(), A_eq=equations.tocsr(), b_eq=wanted.numpy(), bounds=bounds, method="highs"
    )
    if found.status != 0:
        raise RuntimeError(
            f"the linear program of {drafting} {parents} was not solved: {found.message}"
        )
    return -found.fun


def _shape(drafting: str, depth: int, width: int) -> DraftShape:
    return topology(drafting, depth, 1 if drafting == "chain" else width)


def _tree(draft: Tensor, target: Tensor, shape: DraftShape, generator) -> DraftTree:
    """One tree per request, whose rows [B, depth + 1, V] depend on the depth alone."""
    depths = torch.tensor(shape.depths)
    rows = draft[:, depths]
    tokens = drawn(rows, shape, generator)
    inner = torch.tensor([node in shape.parents for node in range(shape.nodes)])
    return DraftTree(tokens, shape.parents, rows * inner[:, None], target[:, depths])


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/laws.py")
