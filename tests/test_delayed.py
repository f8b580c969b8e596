"""Delayed trees: a trunk of single sampled tokens, then K children that go on in single file, exact by enumeration."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from diversed.runtime.drafting import topology
from diversed.verifier import METHODS
from diversed.verifier.enumerate_laws import (
    delayed,
    drafts,
    law_error,
    mean_length,
    model_law,
    random_pair,
    text_law,
)
from diversed.verifier.tree import chain

EXACT = 1e-12  # float64 sums of a few thousand terms below 1
TREES = ["specinfer", "kseq", "rrsw", "traversal", "gbv", "greedy_tree", "univer"]
PAIRS = [(name, drafting) for name in TREES for drafting in METHODS[name].exact_for if drafting != "chain"]
SHAPES = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1), (3, 2, 1)]  # paths, trunk, length below it


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grown(drafting: str, paths: int, trunk: int, length: int):
    branches = paths if drafting == "paths" else [paths] + [1] * (length - 1)
    return topology(drafting, length, branches, trunk)


@pytest.mark.parametrize("kind", ["random", "tied", "zeros"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name, drafting", PAIRS)
def test_every_method_is_exact_behind_a_trunk(name, drafting, shape, kind):
    tree = grown(drafting, *shape)
    pair = random_pair(3, tree.depth + 1, kind, seeded(5))
    assert law_error(METHODS[name].law, pair, drafting, tree.parents) < EXACT


@pytest.mark.parametrize("name, drafting", PAIRS)
def test_a_trunk_node_has_one_child_and_its_end_has_all(name, drafting):
    for paths, trunk, length in product((1, 2, 4), (0, 1, 3), (1, 2)):
        parents = grown(drafting, paths, trunk, length).parents
        children = [parents.count(node) for node in range(len(parents))]
        assert children == [1] * trunk + [paths] + [1] * (paths * (length - 1)) + [0] * paths
        assert parents == delayed(trunk, grown(drafting, paths, 0, length).parents)


@pytest.mark.parametrize("name", ["specinfer", "kseq"])
def test_a_duplicated_trunk_child_is_biased(name):
    """Paths that share their first token by construction are not i.i.d., which is why a trunk is drawn once."""
    pair = random_pair(3, 3, "random", seeded(3))
    parents = (-1, 0, 0, 1, 2)
    every = drafts(pair, "paths", parents)
    same = every.tree.tokens[:, 1] == every.tree.tokens[:, 2]
    # the law of a trunk drawn once and listed twice: both first tokens are one draw
    chance = torch.where(same, every.probability / pair.draft[0][every.tree.tokens[:, 1]], 0)
    assert chance.sum() == pytest.approx(1)
    found = text_law(replace(every, probability=chance), METHODS[name].law(every.tree), pair.target, 3)
    assert 0.5 * (found - model_law(pair.target, 3)).abs().sum() > 0.02


@pytest.mark.parametrize("name, one", [("specinfer", "token"), ("kseq", "token"), ("rrsw", "token"),
                                       ("greedy_tree", "token"), ("traversal", "block"), ("gbv", "block"),
                                       ("univer", "block")])  # fmt: skip
def test_a_trunk_that_never_branches_is_verified_as_a_chain(name, one):
    pair = random_pair(3, 4, "random", seeded(9))
    every = drafts(pair, "chain", chain(3))
    ours, theirs = METHODS[name].law(every.tree), METHODS[one].law(every.tree)
    torch.testing.assert_close(ours.stop, theirs.stop, rtol=0, atol=1e-9)  # K-SEQ's root is bisected
    drafting = METHODS[name].drafting
    assert mean_length(METHODS[name].law, pair, drafting, chain(3)) == pytest.approx(
        mean_length(METHODS[one].law, pair, "chain", chain(3)), abs=1e-9
    )
