"""What holds between the methods and what does not, and how far each is from the best rule for its
drafting law.

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
from diversed.commands.bench import measure
from diversed.verifier.enumerate_laws import (
    Pair,
    drafts,
    full_tree,
    mean_length,
    paths,
    random_pair,
)
from diversed.verifier.law import DraftTree, expected_length
from diversed.verifier.methods import DRAFTINGS, METHODS
from diversed.verifier.tree import chain, topology
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
    children: int = 2,
    trees: int = 256,
    noises: str = "0,0.25,0.5,1,2,4",
    gaps: int = 5,
    seed: int = 0,
) -> list[dict]:
    """Both tables as rows.

    noises: standard deviations of what is added to the target's logits to make the draft's.
    gaps:   pairs of tiny models that the gaps are averaged over; 0 leaves them out (they need scipy).
    """
    rows = []
    for noise in map(float, noises.split(",")):
        rows += accepted(vocabulary, depth, children, trees, noise, seed)
    return rows + (optimality_gaps(gaps, seed) if gaps else [])


def accepted(
    vocabulary: int, depth: int, children: int, trees: int, noise: float, seed: int
) -> list[dict]:
    """Mean accepted tokens of every method: chains of `depth`, `children` paths of `depth`, or
    trees of that width.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(trees, depth + 1, vocabulary, generator=generator, dtype=torch.float64)
    target = logits.softmax(-1)
    draft = (
        logits + noise * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    ).softmax(-1)
    divergence = 0.5 * (target - draft).abs().sum(-1).mean().item()
    shapes = {drafting: _shape(drafting, depth, children) for drafting in DRAFTINGS}
    trees_of = {
        drafting: _sampled(draft, target, shapes[drafting], drafting, generator)
        for drafting in DRAFTINGS
    }
    lengths = {
        name: expected_length(method.law(trees_of[method.drafting]), shapes[method.drafting])
        for name, method in METHODS.items()
    }
    rows = []
    for name, length in lengths.items():
        mean, error = length.mean().item(), 1.96 * length.std().item() / trees**0.5
        rival = RIVALS.get(name)
        rows.append(
            {
                "case": f"{name}, TV {divergence:.2f}",
                "value": mean,
                "unit": "accepted tokens",
                "low": mean - error,
                "high": mean + error,
                "vs": {rival: mean / lengths[rival].mean().item()} if rival else {},
            }
        )
    return rows


def optimality_gaps(pairs: int, seed: int = 0) -> list[dict]:
    """For every method on a tiny vocabulary: what the best rule accepts more, and the shares of it
    reached.
    """
    rows = []
    for name, method in METHODS.items():
        vocabulary = 2 if method.drafting == "paths" else 3
        parents = _shape(method.drafting, 2, 2)
        lost, share = [], []
        for index in range(pairs):
            pair = random_pair(vocabulary, 3, "random", torch.Generator().manual_seed(seed + index))
            best = optimum(pair, method.drafting, parents)
            found = mean_length(method.law, pair, method.drafting, parents)
            lost.append(best - found)
            share.append(found / best)
        rows.append(
            {
                "case": f"{name}, {method.drafting}, V = {vocabulary}",
                "value": sum(lost) / pairs,
                "unit": "tokens below the optimum",
                "low": min(lost),
                "high": max(lost),
                "vs": {"optimum": sum(share) / pairs},
            }
        )
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
    depth = torch.tensor(topology(parents).depths, dtype=torch.float64)
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


def _shape(drafting: str, depth: int, children: int) -> tuple[int, ...]:
    if drafting == "chain":
        return chain(depth)
    return paths(children, depth) if drafting == "paths" else full_tree(children, depth)


def _sampled(
    draft: Tensor, target: Tensor, parents: tuple[int, ...], drafting: str, generator
) -> DraftTree:
    """One tree per request, whose rows [B, depth + 1, V] depend on the depth alone."""
    level = torch.tensor(topology(parents).depths)
    tokens = torch.zeros(len(draft), len(parents), dtype=torch.int64)
    for parent in sorted(set(parents[1:])):
        children = [node for node, above in enumerate(parents) if above == parent]
        rows = draft[:, level[parent]].clone()
        if drafting == "greedy":
            fixed = rows.topk(len(children) - 1).indices
            rows.scatter_(1, fixed, 0)
            drawn = torch.cat([fixed, torch.multinomial(rows, 1, generator=generator)], 1)
        else:
            replaced = drafting in ("paths", "with_replacement")
            drawn = torch.multinomial(
                rows, len(children), replacement=replaced, generator=generator
            )
        tokens[:, children] = drawn
    inner = torch.tensor([node in parents for node in range(len(parents))])
    return DraftTree(tokens, parents, draft[:, level] * inner[:, None], target[:, level])


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/laws.py")
