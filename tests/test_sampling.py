"""Rows from logits, random numbers, drafting laws: what the verdicts rest on."""

from itertools import product

import pytest
import torch
from diversed.runtime.drafting import children, topology
from diversed.runtime.sampling import COLDEST, Sampling, probabilities
from diversed.runtime.uniforms import uniforms
from diversed.verifier.law import inverse_cdf
from hypothesis import given
from hypothesis import strategies as st


def test_rows_agree_with_the_warpers_of_transformers():
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits = 3 * torch.randn(200, 37)
    for temperature, top_k, top_p, min_p in product((1.0, 0.6, 1.7), (0, 5), (1.0, 0.8), (0.0, 0.1)):
        theirs = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
        theirs = TopKLogitsWarper(top_k)(None, theirs) if top_k else theirs
        theirs = TopPLogitsWarper(top_p)(None, theirs) if top_p < 1 else theirs
        theirs = MinPLogitsWarper(min_p)(None, theirs) if min_p else theirs
        ours = probabilities(logits, Sampling(temperature, top_k, top_p, min_p))
        torch.testing.assert_close(ours, theirs.softmax(-1), atol=1e-6, rtol=1e-5)


def test_temperature_zero_is_one_hot_at_the_lowest_of_the_most_likely_tokens():
    rows = probabilities(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), Sampling(temperature=0))
    assert rows.tolist() == [[0, 1, 0], [1, 0, 0]]


@given(st.just(0) | st.floats(COLDEST, 3), st.integers(0, 9), st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 1000))
def test_rows_sum_to_one_and_keep_the_most_likely_token(temperature, top_k, top_p, min_p, seed):
    logits = 5 * torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    rows = probabilities(logits, Sampling(temperature, top_k, top_p, min_p))
    torch.testing.assert_close(rows.sum(-1), torch.ones(3), atol=1e-5, rtol=0)
    assert (rows.gather(-1, logits.argmax(-1, keepdim=True)) > 0).all()


def test_the_coldest_temperature_is_finite_for_any_logits_of_models():
    rows = probabilities(torch.tensor([[1e4, -1e4, 0.0]]), Sampling(temperature=COLDEST))
    assert rows.tolist() == [[1, 0, 0]]


def test_forbidden_tokens_stay_forbidden_and_half_precision_is_computed_in_float32():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0]])
    assert probabilities(logits)[0, 0] == 0
    assert probabilities(logits.half()).dtype == torch.float32


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": 1e-45}, {"top_p": 0.0}, {"top_k": -2}, {"min_p": 1.5}]
)
def test_sampling_refuses_numbers_out_of_range(bad):
    with pytest.raises(ValueError, match=f"sampling.{next(iter(bad))}"):
        Sampling(**bad)


def test_uniforms_depend_on_seed_position_and_lane_alone_and_are_uniform():
    seeds = torch.arange(1000)
    numbers = uniforms(seeds, 7, 50)
    assert torch.equal(numbers[3:5], uniforms(seeds[3:5], torch.tensor([7, 7]), 50))
    assert torch.equal(numbers[:, :20], uniforms(seeds, 7, 20))
    assert 0 <= numbers.min() and numbers.max() < 1
    # 50,000 numbers: the mean of a bin of 1/20 is 2,500 with standard deviation 49
    assert (torch.histc(numbers, 20, 0, 1) - 2500).abs().max() < 5 * 49
    for other in (uniforms(seeds, 8, 50), uniforms(seeds + 1, 7, 50), numbers.roll(1, 1)):
        # independent columns of 50,000 have a correlation of standard deviation .0045
        assert abs(torch.corrcoef(torch.stack([numbers.flatten(), other.flatten()]))[0, 1]) < 0.0225


def test_inverse_cdf_never_returns_a_token_of_probability_zero():
    rows = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    edge = torch.tensor([[0.0, 0.3 - 1e-9, 0.3 + 1e-6, 1 - 2.0**-53]], dtype=torch.float64)
    assert inverse_cdf(rows, edge).tolist() == [[1, 1, 3, 3]]


GRID = 40


def frequencies(drafting: str, row: torch.Tensor, count: int) -> dict[tuple[int, ...], float]:
    """Law of the children, by running the drafting on the midpoints of a grid: exact for rows on the grid."""
    coins = (torch.tensor(list(product(range(GRID), repeat=count)), dtype=torch.float64) + 0.5) / GRID
    tokens = children(drafting, row.expand(len(coins), 1, -1), count, coins.unsqueeze(1))[:, 0]
    law: dict[tuple[int, ...], float] = {}
    for drawn in map(tuple, tokens.tolist()):
        law[drawn] = law.get(drawn, 0) + 1 / len(coins)
    return law


def test_paths_and_samples_with_replacement_are_independent():
    row = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    for drafting in ("paths", "with_replacement"):
        law = frequencies(drafting, row, 2)
        for pair in product(range(3), repeat=2):
            assert law[pair] == pytest.approx(float(row[pair[0]] * row[pair[1]]), abs=1e-12)


def test_samples_without_replacement_are_distinct_and_follow_the_shrinking_row():
    row = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    law = frequencies("without_replacement", row, 2)
    # after 0 the rest is (1/2, 1/2); after 1 it is (2/3, 1/3): 1/GRID bounds what the grid misses of a third
    assert law[0, 1] == pytest.approx(0.25, abs=1e-12) and law[1, 0] == pytest.approx(0.25 * 2 / 3, abs=0.25 / GRID)
    assert all(first != second and 3 not in (first, second) for first, second in law)


def test_an_exhausted_support_leaves_absent_children():
    one_hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert set(frequencies("without_replacement", one_hot, 2)) == {(1, -1)}
    fixed, sampled = next(iter(frequencies("greedy", one_hot, 2)))
    assert fixed == 1 and sampled == -1
    assert set(frequencies("paths", torch.zeros(3, dtype=torch.float64), 2)) == {(-1, -1)}


def test_greedy_children_are_the_most_likely_tokens_and_one_sample_of_the_rest():
    row = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    law = frequencies("greedy", row, 3)
    assert {drawn[:2] for drawn in law} == {(1, 3)}
    assert law[1, 3, 0] == pytest.approx(1 / 3, abs=1 / GRID) and law[1, 3, 2] == pytest.approx(2 / 3, abs=1 / GRID)
    assert children("greedy", row[None, None, :2], 4, torch.rand(1, 1, 4)).tolist() == [[[1, 0, -1, -1]]]


def test_topologies_are_ordered_by_depth_and_trunk_nodes_have_one_child():
    assert topology("chain", 3).parents == (-1, 0, 1, 2)
    assert topology("paths", 2, 3).parents == (-1, 0, 0, 0, 1, 2, 3)
    assert topology("greedy", 2, [3, 2]).parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    delayed = topology("without_replacement", 1, 3, trunk=2)
    assert delayed.parents == (-1, 0, 1, 2, 2, 2) and delayed.depth == 3


def test_a_temperature_alone_filters_nothing():
    assert not any(sampling.filters for sampling in (Sampling(), Sampling(0.5), Sampling(0), Sampling(0, top_k=3)))
    assert all(sampling.filters for sampling in (Sampling(top_k=3), Sampling(0.5, top_p=0.9), Sampling(min_p=0.1)))


def test_the_lanes_of_a_path_do_not_depend_on_its_siblings():
    alone, together = topology("paths", 3, 1), topology("paths", 3, 4)
    assert [alone.first_lane(depth) for depth in (1, 2, 3)] == [together.first_lane(depth) for depth in (1, 2, 3)]
    tree = topology("with_replacement", 2, [3, 2])
    assert [tree.first_lane(depth) for depth in (1, 2)] == [0, 3] and tree.lanes == tree.nodes - 1
    assert together.lanes == together.first_lane(3) + 4 and topology("greedy", 2, [2, 1]).may_lack
    assert tree.bounds == [0, 1, 4, 10] and not topology("greedy", 2, [1, 1]).may_lack
