"""Tokens per step without sampling the verification, against sums over all drafts and all coins."""

import pytest
import torch
from diversed.runtime.shapes import parse_shape
from diversed.selector.tokens_per_step import chain_tokens, tree_tokens
from diversed.verifier import METHODS, draw
from diversed.verifier.enumerate_laws import KINDS, drafts, mean_length, random_pair
from diversed.verifier.tree import chain

EXACT = 1e-12  # float64 sums of a few thousand terms below 1
SHAPES = ["2x2", "2x1+1", "3x1+1"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["token", "block"])
def test_all_lengths_of_a_chain_come_from_one_pass_without_its_last_token(name, kind):
    pair = random_pair(3, 4, kind, torch.Generator().manual_seed(2))
    every = drafts(pair, "chain", chain(3))
    found = every.probability @ chain_tokens(every.tree, name == "block")
    wanted = [1 + mean_length(METHODS[name].law, pair, "chain", chain(length)) for length in (1, 2, 3)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["token", "block"])
def test_averaging_out_the_last_token_leaves_less_to_sample(name):
    pair = random_pair(3, 4, "random", torch.Generator().manual_seed(2))
    every = drafts(pair, "chain", chain(3))

    def variance(values):
        mean = every.probability @ values
        return every.probability @ (values - mean) ** 2

    assert variance(chain_tokens(every.tree, name == "block")[:, -1]) < variance(
        tree_tokens(METHODS[name].law, every.tree)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["specinfer", "kseq", "traversal", "gbv", "univer"])
def test_the_mean_over_drawn_trees_is_the_tokens_per_step_of_the_shape(name, shape):
    """A grid of 300 coins misplaces at most 1/600 of the mass at each of N edges between verdicts, by a depth each."""
    drafting = METHODS[name].drafting
    tree = parse_shape(shape).grow(drafting)
    pair = random_pair(3, tree.depth + 1, "random", torch.Generator().manual_seed(4))
    every = drafts(pair, drafting, tree.parents)
    found = every.probability @ tree_tokens(METHODS[name].law, every.tree)
    law, grid = METHODS[name].law(every.tree), (torch.arange(300) + 0.5) / 300
    depths, counted = torch.tensor(tree.depths).double(), 0.0
    for coin in grid.double():
        verdict = draw(law, coin.expand(len(every.probability), 2))
        counted += every.probability @ (1 + depths[verdict.node]) / 300
    assert found.item() == pytest.approx(counted.item(), abs=tree.nodes * tree.depth / 600)
