"""How many tokens the best lossless rule for a drafting law accepts, by a linear program over all rules."""

import torch
from diversed.verifier.enumerate_laws import Pair, drafts
from diversed.verifier.tree import topology
from scipy.optimize import linprog
from scipy.sparse import coo_array


def optimum(pair: Pair, drafting: str, parents: tuple[int, ...]) -> float:
    """Most accepted tokens that any lossless rule reaches for this drafting law.

    The variables are the probabilities of every verdict (node, token) after every draft, so the
    rule may use all rows of both models, on and off the drafted paths. The constraints: a draft's
    verdicts sum to 1, and the text's law, continued by the target after the verdict, is the
    target's.
    """
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
