"""How good the methods are, by linear programs over all rules that keep the target's law."""

import pytest
import torch
from diversed.verifier import METHODS
from diversed.verifier.enumerate_laws import KINDS, full_tree, mean_length, paths, random_pair
from diversed.verifier.plans import greedy_transport
from diversed.verifier.tree import chain
from scipy.optimize import linprog

from .support.optimum import optimum
from .support.scripts import script

laws = script("laws")
SOLVED = 1e-8  # the solver's own tolerance on its constraints


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary, length", [(2, 2), (2, 3), (3, 2)])
def test_no_lossless_rule_accepts_more_of_a_chain_than_block_verification(kind, vocabulary, length):
    pair = random_pair(vocabulary, length + 1, kind, seeded(vocabulary + length))
    best = optimum(pair, "chain", chain(length))
    assert abs(mean_length(METHODS["block"].law, pair, "chain", chain(length)) - best) < SOLVED


@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("children", [1, 2, 3])
def test_greedy_transport_gives_its_children_as_much_as_any_valid_plan(mass, children):
    for seed in range(5):
        pair = random_pair(4, 1, "zeros" if seed == 4 else "random", seeded(seed))
        target, draft = pair.target[0], pair.draft[0]
        fixed = draft.argsort(descending=True, stable=True)[: children - 1].tolist()
        rest = draft.clone()
        rest[fixed] = 0
        if rest.sum() == 0:
            continue
        rest = rest / rest.sum()
        sampled = rest.nonzero().flatten().tolist()
        tokens = torch.tensor([[*fixed, last] for last in sampled])[:, None]
        rows = [row.expand(len(sampled), 1, 4) for row in (target, draft)]
        share = greedy_transport(*rows, torch.full((len(sampled), 1), mass, dtype=torch.float64), tokens)
        found = (rest[sampled] @ share.accept.sum(-1)[:, 0]).item()
        assert abs(found - best_plan(target, rest, fixed, sampled, mass)) < SOLVED


def best_plan(target, rest, fixed, sampled, mass) -> float:
    """Most mass that a valid plan gives to the children: per sampled token the variables P [M], r [V], null."""
    vocabulary, width = len(target), len(fixed) + 1 + len(target) + 1
    gain, equations, wanted = [], [], []
    for index, last in enumerate(sampled):
        chance = rest[last].item()
        gain += [-chance] * (len(fixed) + 1) + [0.0] * (vocabulary + 1)
        one = [0.0] * (width * len(sampled))
        one[index * width : (index + 1) * width] = [1.0] * width
        equations.append(one)
        wanted.append(1.0)
    for token in range(vocabulary):
        line = []
        for last in sampled:
            chance = rest[last].item()
            line += [chance * (child == token) for child in (*fixed, last)]
            line += [chance * (other == token) for other in range(vocabulary)] + [0.0]
        equations.append(line)
        wanted.append(mass * target[token].item())
    return -linprog(gain, A_eq=equations, b_eq=wanted, bounds=(0, 1), method="highs").fun


@pytest.mark.parametrize("name", METHODS)
def test_no_method_exceeds_the_optimum_for_its_drafting_law(name):
    for drafting in METHODS[name].exact_for:
        for seed, kind in enumerate(("random", "tied", "zeros")):
            vocabulary = 2 if drafting in ("paths", "with_replacement") else 3
            parents = {"chain": chain(2), "paths": paths(2, 2)}.get(drafting, full_tree(2, 2))
            parents = full_tree(2, 1) if drafting == "with_replacement" else parents
            pair = random_pair(vocabulary, 3, kind, seeded(seed))
            assert mean_length(METHODS[name].law, pair, drafting, parents) <= optimum(pair, drafting, parents) + SOLVED


def test_the_table_of_lengths_says_where_gbv_helps_and_where_it_hurts():
    ratios = {
        noise: {row["case"].split(",")[0]: row["vs"] for row in laws.accepted((512, 3, 16), 2, noise, 0)} for noise in (0, 4)
    }
    assert ratios[0.0]["gbv"]["block"] < 1 < ratios[4.0]["gbv"]["block"]
    assert all(ratio["block"]["token"] >= 1 - 1e-9 for ratio in ratios.values())
