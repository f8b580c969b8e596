"""Every method's law, by enumeration in float64: all drafts, all verdicts, no sampling."""

import itertools
from dataclasses import replace

import pytest
import torch
from diversed.runtime import chain_twin
from diversed.verifier import METHODS, DraftTree, Law, Method, draw, expected_length, method
from diversed.verifier.enumerate_laws import (
    KINDS,
    Pair,
    delayed,
    drafts,
    full_tree,
    law_error,
    mean_length,
    model_law,
    paths,
    random_pair,
    text_law,
)
from diversed.verifier.multipath import choose_paths, selected_rows
from diversed.verifier.tree import chain, topology

from .support.laws import (
    block_by_hand,
    drafts_by_hand,
    gbv_by_hand,
    shapes,
    token_by_hand,
    tree_by_hand,
    walk_by_hand,
)

EXACT = 1e-12  # float64 sums of a few thousand terms below 1
PAIRS = [(name, drafting) for name, entry in METHODS.items() for drafting in entry.exact_for]
TREES = ["specinfer", "kseq", "rrsw", "traversal", "greedy_tree", "univer"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tree(parents, batch=32, vocabulary=5, dtype=torch.float64, sharp=1.0, seed=0) -> DraftTree:
    """A tree with distinct children whose rows do not depend on the path; leaves have no draft row."""
    generator = seeded(seed)
    rows = torch.randn(2, batch, len(parents), vocabulary, generator=generator, dtype=torch.float64)
    draft, target = (rows * sharp).softmax(-1).to(dtype)
    tokens = torch.zeros(batch, len(parents), dtype=torch.int64)
    for parent in set(parents[1:]):
        children = [node for node, above in enumerate(parents) if above == parent]
        tokens[:, children] = torch.rand(batch, vocabulary, generator=generator).argsort(-1)[:, : len(children)]
    inner = torch.tensor([node in parents for node in range(len(parents))])
    return DraftTree(tokens, parents, draft * inner[:, None], target)


def assert_same_law(one: Law, other: Law):
    """Equal stops, and equal mass of every verdict."""
    torch.testing.assert_close(one.stop, other.stop, rtol=0, atol=EXACT)
    one_mass, other_mass = one.stop.unsqueeze(-1) * one.next, other.stop.unsqueeze(-1) * other.next
    torch.testing.assert_close(one_mass, other_mass, rtol=0, atol=EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, drafting", PAIRS)
def test_the_text_has_the_law_of_the_target(name, drafting, kind):
    for vocabulary in (2, 3, 4):
        for parents in shapes(drafting, vocabulary):
            pair = random_pair(vocabulary, topology(parents).depth + 1, kind, seeded(len(parents)))
            assert law_error(METHODS[name].law, pair, drafting, parents) < EXACT, (vocabulary, parents)


@pytest.mark.parametrize("name, drafting", PAIRS)
def test_the_text_beyond_the_tree_has_the_law_of_the_target(name, drafting):
    pair = random_pair(3, 3, "random", seeded())
    assert law_error(METHODS[name].law, pair, drafting, chain(1) if drafting == "chain" else paths(2, 1)) < EXACT


@pytest.mark.parametrize("name", METHODS)
def test_a_law_is_a_distribution_over_nodes_and_tokens(name):
    drafting = METHODS[name].drafting
    for kind, parents in itertools.product(KINDS, shapes(drafting, 3)):
        every = drafts(random_pair(3, topology(parents).depth + 1, kind, seeded(1)), drafting, parents)
        law = METHODS[name].law(every.tree)
        assert law.stop.min() >= 0 and law.next.min() >= 0 and law.next.isfinite().all()
        torch.testing.assert_close(law.stop.sum(-1), torch.ones(len(law.stop), dtype=torch.float64))
        reached = law.stop > 0
        torch.testing.assert_close(law.next.sum(-1)[reached], torch.ones(int(reached.sum()), dtype=torch.float64))
        assert (law.stop[every.tree.tokens < 0] == 0).all(), "an absent node never stops"


@pytest.mark.parametrize("name", ["specinfer", "rrsw", "greedy_tree", "kseq"])
def test_a_top_down_tree_method_with_one_child_a_node_is_token_verification(name):
    tree = random_tree(chain(4))
    assert_same_law(METHODS["token"].law(tree), METHODS[name].law(tree))


@pytest.mark.parametrize("name", ["traversal", "univer", "gbv"])
def test_a_coupled_tree_method_with_one_child_a_node_is_block_verification(name):
    tree = random_tree(chain(4))
    assert_same_law(METHODS["block"].law(tree), METHODS[name].law(tree))


def test_block_with_one_token_is_token_verification():
    tree = random_tree(chain(1))
    assert_same_law(METHODS["token"].law(tree), METHODS["block"].law(tree))


@pytest.mark.parametrize("top_down, coupled", [("rrsw", "traversal"), ("greedy_tree", "univer")])
def test_at_depth_one_coupling_changes_nothing(top_down, coupled):
    tree = random_tree(full_tree(3, 1))
    assert_same_law(METHODS[top_down].law(tree), METHODS[coupled].law(tree))


@pytest.mark.parametrize("sharp", [0.5, 3.0])
@pytest.mark.parametrize(
    "low, high, vocabulary, parents",
    [
        ("token", "block", 3, chain(4)),
        ("rrsw", "traversal", 2, full_tree(2, 3)),
        ("rrsw", "traversal", 4, full_tree(2, 2)),
        ("greedy_tree", "univer", 3, full_tree(2, 3)),
        ("greedy_tree", "univer", 4, full_tree(3, 2)),
    ],
)
def test_coupling_levels_never_shortens_the_accepted_path(low, high, vocabulary, parents, sharp):
    for seed in range(5):
        pair = random_pair(vocabulary, topology(parents).depth + 1, "random", seeded(seed))
        pair = replace(pair, draft=(pair.draft.log() * sharp).softmax(-1))
        drafting = METHODS[high].drafting
        shorter = mean_length(METHODS[low].law, pair, drafting, parents)
        assert mean_length(METHODS[high].law, pair, drafting, parents) >= shorter - EXACT


def test_token_verification_is_the_walk_of_the_paper():
    pair = random_pair(3, 4, "random", seeded())
    every = drafts(pair, "chain", chain(3))
    law = METHODS["token"].law(every.tree)
    for index, tokens in enumerate(every.tree.tokens[:, 1:].tolist()):
        for (depth, token), chance in token_by_hand(pair, tuple(tokens)).items():
            assert abs(law.stop[index, depth] * law.next[index, depth, token] - chance) < EXACT


def test_block_verification_accepts_up_to_the_last_success_of_its_coins():
    pair = random_pair(3, 4, "zeros", seeded(3))
    every = drafts(pair, "chain", chain(3))
    law = METHODS["block"].law(every.tree)
    for index, tokens in enumerate(every.tree.tokens[:, 1:].tolist()):
        for (depth, token), chance in block_by_hand(pair, tuple(tokens)).items():
            assert abs(law.stop[index, depth] * law.next[index, depth, token] - chance) < EXACT


@pytest.mark.parametrize("kind", ["random", "tied", "zeros"])
def test_gbv_is_block_verification_on_the_greedily_selected_path(kind):
    pair = random_pair(3, 3, kind, seeded(5))
    every = drafts(pair, "paths", paths(3, 2))
    law = METHODS["gbv"].law(every.tree)
    for index in range(0, len(every.probability), 7):
        tokens = every.tree.tokens[index].tolist()
        drawn = [(tokens[1 + path], tokens[4 + path]) for path in range(3)]
        selected, verdicts = gbv_by_hand(pair, drawn)
        first = next(path for path in range(3) if drawn[path][0] == selected[0])
        last = drawn.index(selected)
        # where the first token is shared, the node of the second selected token may hang from an equal twin
        nodes = {0: [0], 1: [1 + first, 1 + last], 2: [4 + last]}
        for (depth, token), chance in verdicts.items():
            found = sum((law.stop[index, node] * law.next[index, node, token]).item() for node in set(nodes[depth]))
            assert abs(found - chance) < EXACT


@pytest.mark.parametrize("name, shrink", [("specinfer", False), ("rrsw", True)])
def test_recursive_rejection_is_the_public_walk_over_children(name, shrink):
    drafting, parents = ("paths", paths(3, 2)) if name == "specinfer" else ("without_replacement", full_tree(2, 2))
    pair = random_pair(3, 3, "random", seeded(7))
    every = drafts(pair, drafting, parents)
    law = METHODS[name].law(every.tree)
    contexts = every.contexts.tolist()
    for index in range(0, len(every.probability), 5):
        tokens = every.tree.tokens[index].tolist()
        names = {0: ()}
        children = {}
        for node in range(1, len(parents)):
            names[node] = (*names[parents[node]], tokens[node])
            children.setdefault(names[parents[node]], []).append(tokens[node])
        by_hand = walk_by_hand(pair, children, shrink)
        found = {}
        for node in range(len(parents)):
            for token in range(3):
                key = (contexts[index][node], token)
                found[key] = found.get(key, 0.0) + (law.stop[index, node] * law.next[index, node, token]).item()
        number = {context: contexts[index][node] for node, context in names.items()}
        for (context, token), chance in by_hand.items():
            assert abs(found[number[context], token] - chance) < EXACT


@pytest.mark.parametrize("kind", ["random", "zeros"])
@pytest.mark.parametrize(
    "drafting, parents",
    [
        ("chain", chain(3)),
        ("paths", paths(2, 2)),
        ("with_replacement", (-1, 0, 0, 1, 1)),
        ("without_replacement", (-1, 0, 0, 0, 1, 1)),
        ("greedy", (-1, 0, 0, 0, 1, 2, 2)),
    ],
)
def test_every_draft_has_the_probability_of_its_drafting_law(drafting, parents, kind):
    pair = random_pair(3, 3, kind, seeded(41)) if drafting != "chain" else random_pair(3, 4, kind, seeded(41))
    by_hand = drafts_by_hand(pair, drafting, parents)
    every = drafts(pair, drafting, parents)
    found = {}
    for tokens, chance in zip(every.tree.tokens[:, 1:].tolist(), every.probability.tolist(), strict=True):
        found[tuple(tokens)] = found.get(tuple(tokens), 0.0) + chance
    assert found.keys() == by_hand.keys()
    assert all(abs(found[tokens] - chance) < EXACT for tokens, chance in by_hand.items())


@pytest.mark.parametrize("kind", ["random", "zeros", "tied"])
@pytest.mark.parametrize(
    "name, plan, coupled, parents",
    [
        ("specinfer", "with", False, (-1, 0, 0, 1, 1)),
        ("kseq", "kseq", False, (-1, 0, 0, 1, 1)),
        ("rrsw", "without", False, (-1, 0, 0, 0, 1, 1, 3)),
        ("traversal", "without", True, (-1, 0, 0, 0, 1, 1, 3)),
        ("greedy_tree", "greedy", False, full_tree(2, 3)),
        ("univer", "greedy", True, full_tree(2, 3)),
        ("univer", "greedy", True, (-1, 0, 0, 0, 1, 1, 3, 3)),
    ],
)
def test_a_tree_method_is_its_plan_and_composition_written_out(name, plan, coupled, parents, kind):
    pair = random_pair(3, topology(parents).depth + 1, kind, seeded(43))
    drafting = "with_replacement" if plan in ("with", "kseq") else METHODS[name].drafting
    every = drafts(pair, drafting, parents)
    law = METHODS[name].law(every.tree)
    for index in range(0, len(every.probability), 1 + len(every.probability) // 50):
        by_hand = tree_by_hand(pair, parents, every.tree.tokens[index].tolist(), plan, coupled)
        for (node, token), chance in by_hand.items():
            assert abs(law.stop[index, node] * law.next[index, node, token] - chance) < EXACT
        assert abs(sum(by_hand.values()) - 1) < EXACT


def test_the_mean_length_of_block_verification_is_the_sum_over_prefixes_of_what_both_models_grant():
    for kind in KINDS:
        pair = random_pair(3, 4, kind, seeded(11))
        granted, drawn, expected = {(): 1.0}, {(): 1.0}, 0.0
        index = {(): 0}
        for depth in range(1, 4):
            for prefix in itertools.product(range(3), repeat=depth):
                above, token = prefix[:-1], prefix[-1]
                index[prefix] = index[above] * 3 + 1 + token
                drawn[prefix] = drawn[above] * pair.draft[index[above], token].item()
                granted[prefix] = min(drawn[prefix], granted[above] * pair.target[index[above], token].item())
                expected += granted[prefix]
        assert abs(mean_length(METHODS["block"].law, pair, "chain", chain(3)) - expected) < EXACT


def test_expected_length_counts_accepted_tokens_without_the_extra_one():
    law = Law(stop=torch.tensor([[0.25, 0.25, 0.5]]), next=torch.zeros(1, 3, 2))
    assert expected_length(law, (-1, 0, 1)).tolist() == [1.25]


def test_gbv_can_be_worse_than_block_verification():
    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    pair = Pair(half, half, 2)
    assert mean_length(METHODS["block"].law, pair, "chain", chain(1)) == 1
    assert abs(mean_length(METHODS["gbv"].law, pair, "paths", paths(2, 1)) - 0.75) < EXACT


@pytest.mark.parametrize("kind", ["random", "tied", "zeros"])
def test_the_path_that_gbv_selects_has_the_law_it_is_verified_with(kind):
    pair = random_pair(3, 3, kind, seeded(2))
    every = drafts(pair, "paths", paths(3, 2))
    selected = {}
    for index in range(len(every.probability)):
        tokens = every.tree.tokens[index].tolist()
        path, _ = gbv_by_hand(pair, [(tokens[1 + k], tokens[4 + k]) for k in range(3)])
        selected[path] = selected.get(path, 0.0) + every.probability[index].item()
    for path, chance in selected.items():
        contexts = torch.tensor([0, 1 + path[0], 0])
        rows = selected_rows(
            pair.target[contexts][None], pair.draft[contexts][None], torch.tensor([path]), torch.tensor([3]), 3
        )[0]
        assert abs((rows[0, path[0]] * rows[1, path[1]]).item() - chance) < EXACT


def test_the_selected_rows_stay_distributions_in_single_precision_for_many_paths():
    generator = seeded()
    logits = torch.randn(2, 4, 7, 1000, generator=generator) * 4
    tokens = logits[0, :, :-1].argmax(-1)
    rows = selected_rows(logits[1].softmax(-1), logits[0].softmax(-1), tokens, torch.full((4,), 8), 8)
    assert (rows.sum(-1) - 1).abs().max() < 1e-5  # a float32 cumulative sum over V = 1000, times K = 8


@pytest.mark.parametrize("name", ["specinfer", "kseq", "rrsw", "traversal", "gbv"])
def test_paths_behind_a_trunk_are_exact(name):
    pair = random_pair(3, 4, "random", seeded(13))
    assert law_error(METHODS[name].law, pair, "paths", delayed(1, paths(2, 2))) < EXACT
    assert law_error(METHODS[name].law, pair, "paths", delayed(2, paths(2, 1))) < EXACT


@pytest.mark.parametrize("name", ["specinfer", "kseq", "rrsw", "traversal", "gbv"])
@pytest.mark.parametrize("lost", [[1], [0, 2], [0, 1]])
def test_a_request_may_have_fewer_paths_than_the_tree_has_chains(name, lost):
    """How many it has must be settled before they are drawn; here it is the same for all drafts."""
    parents = paths(3, 2)
    pair = random_pair(3, 3, "random", seeded(37))
    every = drafts(pair, "paths", parents)
    tokens = every.tree.tokens.clone()
    tokens[:, [1 + path + 3 * level for path in lost for level in (0, 1)]] = -1
    tree = replace(every.tree, tokens=tokens)
    law = METHODS[name].law(tree)
    assert (law.stop[tokens < 0] == 0).all()
    assert (text_law(every, law, pair.target, 3) - model_law(pair.target, 3)).abs().max() < EXACT


def test_the_order_in_which_nodes_are_numbered_does_not_matter():
    by_level, by_path = paths(2, 3), (-1, 0, 1, 2, 0, 4, 5)
    order = [0, 1, 3, 5, 2, 4, 6]
    pair = random_pair(3, 4, "random", seeded(17))
    every = drafts(pair, "paths", by_level)
    moved = DraftTree(every.tree.tokens[:, order], by_path, every.tree.draft[:, order], every.tree.target[:, order])
    for name in ("specinfer", "kseq", "rrsw", "traversal", "gbv"):
        one, other = METHODS[name].law(every.tree), METHODS[name].law(moved)
        torch.testing.assert_close(one.stop[:, order], other.stop)


@pytest.mark.parametrize("name", TREES)
def test_children_may_be_pruned_after_they_were_drawn(name):
    """What goes depends on what was drawn down to its own depth, the sampled child included."""
    drafting = METHODS[name].drafting
    parents = paths(2, 2) if drafting == "paths" else full_tree(2, 2)
    pair = random_pair(3, 3, "random", seeded(19))
    every = drafts(pair, drafting, parents)
    tokens = every.tree.tokens
    gone = torch.zeros_like(tokens, dtype=torch.bool)
    for node in range(1, len(parents)):
        seen = [other for other in range(len(parents)) if topology(parents).depths[other] <= topology(parents).depths[node]]
        gone[:, node] = (tokens[:, seen].sum(-1) + tokens[:, node]) % 3 == 0
        gone[:, node] |= gone[:, parents[node]]
    assert 0.1 < gone[:, 1:].double().mean() < 0.9
    tree = replace(every.tree, target=every.tree.target.masked_fill(gone.unsqueeze(-1), 0))
    law = METHODS[name].law(tree)
    assert (law.stop[gone] == 0).all()
    assert (text_law(every, law, pair.target, 3) - model_law(pair.target, 3)).abs().max() < EXACT


@pytest.mark.parametrize("name", ["token", "block", "gbv"])
def test_a_chain_may_be_pruned_after_it_was_drawn(name):
    pair = random_pair(3, 4, "random", seeded(23))
    every = drafts(pair, "chain", chain(3))
    gone = torch.zeros_like(every.tree.tokens, dtype=torch.bool)
    gone[:, 2:] = (every.tree.tokens[:, 2:3] + every.tree.tokens[:, 1:2]) % 2 == 0
    tree = replace(every.tree, target=every.tree.target.masked_fill(gone.unsqueeze(-1), 0))
    law = METHODS[name].law(tree)
    assert (text_law(every, law, pair.target, 4) - model_law(pair.target, 4)).abs().max() < EXACT


def test_more_children_than_tokens_leave_some_absent_and_the_law_exact():
    for name in ("rrsw", "traversal", "greedy_tree", "univer"):
        pair = random_pair(2, 3, "random", seeded(29))
        every = drafts(pair, METHODS[name].drafting, full_tree(3, 2))
        assert (every.tree.tokens < 0).any()
        assert law_error(METHODS[name].law, pair, METHODS[name].drafting, full_tree(3, 2)) < EXACT


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)])
def test_the_dtype_of_the_rows_is_kept_and_its_rounding_is_the_only_error(name, dtype, bound):
    """Half rows round by 2^-11 and 2^-8; a text of three tokens multiplies three of them."""
    drafting = METHODS[name].drafting
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(drafting, full_tree(2, 2))
    pair = random_pair(3, 3, "zeros", seeded(31))
    rounded = [getattr(pair, side).to(dtype).double() for side in ("draft", "target")]
    pair = Pair(*(rows / rows.sum(-1, keepdim=True) for rows in rounded), 3)
    every = drafts(pair, drafting, parents)
    tree = replace(every.tree, draft=every.tree.draft.to(dtype), target=every.tree.target.to(dtype))
    law = METHODS[name].law(tree)
    assert law.stop.dtype == law.next.dtype == dtype
    found = text_law(every, Law(law.stop.double(), law.next.double()), pair.target, 3)
    assert (found - model_law(pair.target, 3)).abs().max() < bound


@pytest.mark.parametrize("name", METHODS)
def test_single_precision_agrees_with_double_on_a_large_vocabulary_of_peaked_rows(name):
    """Rows this peaked leave 1e-6 of the draft's mass: a method that took it as 1 - sum would be off by percents."""
    drafting = METHODS[name].drafting
    parents = {"chain": chain(4), "paths": paths(3, 2)}.get(drafting, full_tree(3, 2))
    tree = random_tree(parents, batch=4, vocabulary=4001, sharp=6.0)
    single = DraftTree(tree.tokens, parents, tree.draft.float(), tree.target.float())
    double = DraftTree(tree.tokens, parents, single.draft.double(), single.target.double())
    one, other = METHODS[name].unchecked(single), METHODS[name].unchecked(double)
    assert (one.stop - other.stop).abs().max() < 1e-4  # float32 sums over 4,001 entries, through two levels


@pytest.mark.parametrize("name", ["specinfer", "kseq", "rrsw", "traversal"])
def test_equal_rows_are_accepted_whole_in_single_precision(name):
    """K-SEQ compared 1 - (1-b)^M with rho b here, both 1 to the last bit, and lost up to 1 % of its length."""
    tree = random_tree(full_tree(3, 1), vocabulary=1000, dtype=torch.float32)
    tree = replace(tree, target=tree.target.where(tree.draft.sum(-1, keepdim=True) == 0, tree.draft))
    assert METHODS[name].law(tree).stop[:, 0].max() < 1e-6


@pytest.mark.parametrize("name", ["greedy_tree", "univer"])
def test_a_sampled_child_from_less_than_a_float_can_invert_costs_no_mass(name):
    draft = torch.tensor([[[1, 1e-39, 1e-40], [0, 0, 0], [0, 0, 0]]])
    target = torch.tensor([[[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]])
    law = METHODS[name].law(DraftTree(torch.tensor([[0, 0, 1]]), (-1, 0, 0), draft, target))
    text = (
        (law.stop.unsqueeze(-1) * law.next)[0, 0] + torch.eye(3)[0] * law.stop[0, 1] + torch.eye(3)[1] * law.stop[0, 2]
    )
    torch.testing.assert_close(text, target[0, 0])


def test_a_sampled_child_from_a_sliver_of_the_draft_is_weighed_by_that_sliver():
    draft = torch.tensor([[[1 - 3e-8, 2e-8, 1e-8], [0, 0, 0], [0, 0, 0]]])
    target = torch.tensor([[[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]])
    law = METHODS["greedy_tree"].unchecked(DraftTree(torch.tensor([[0, 0, 1]]), (-1, 0, 0), draft, target))
    assert abs(law.stop[0, 2].item() - 0.75) < 1e-5  # target 1/2 over the sliver's 2/3


@pytest.mark.parametrize("name", METHODS)
def test_a_child_that_rounding_alone_refuses_is_refused_and_the_target_emits(name):
    """The rows agree in all that a float holds but for the child, so that no token has a residual."""
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(METHODS[name].drafting, full_tree(2, 2))
    row, almost = torch.tensor([[1.0, 0.0], [1.0, 3e-8]])
    target = row.expand(1, len(parents), 2)
    draft = almost.expand(1, len(parents), 2) * torch.tensor([[float(node in parents)] for node in range(len(parents))])
    for tokens in ([1] * len(parents), [1 if parent == node - 1 else -1 for node, parent in enumerate(parents)]):
        tree = DraftTree(torch.tensor([[0, *tokens[1:]]]), parents, draft, target)
        law = METHODS[name].law(tree)
        assert law.stop[0].tolist() == [1.0] + [0.0] * (len(parents) - 1) and law.next[0, 0].tolist() == [1.0, 0.0]
        assert fast_or_law(name, tree, torch.rand(1, 2)) == (0, 0)


def fast_or_law(name: str, tree: DraftTree, uniform: torch.Tensor) -> tuple[int, int]:
    """Node and token of the verdict, by the formulas for chains where they serve."""
    method = METHODS[name]
    known = chain_twin.serves(method, tree.parents, tree.tokens.device) and (tree.tokens >= 0).all()
    verdict = chain_twin.verdict(method, tree, uniform) if known else draw(method.unchecked(tree), uniform)
    return int(verdict.node), int(verdict.token)


@pytest.mark.parametrize("name", METHODS)
def test_rows_with_numbers_too_small_to_invert_give_finite_laws(name):
    """softmax in float32 leaves 1e-40 where logits differ by 92; its inverse is infinite, and 0 times that is nan."""
    drafting = METHODS[name].drafting
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(drafting, full_tree(3, 1))
    row = torch.tensor([1.0, 1e-40, 1e-42, 0.0])
    rows = torch.stack([row.roll(shift) for shift in range(4)])
    draft, target = (
        part.unsqueeze(1).expand(-1, len(parents), -1) for part in (rows.repeat(4, 1), rows.repeat_interleave(4, 0))
    )
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 3, 0)):
        tokens = torch.tensor([0, *(order[node % 3] for node in range(len(parents) - 1))]).expand(16, -1)
        law = METHODS[name].law(DraftTree(tokens, parents, draft, target))
        assert law.stop.isfinite().all() and law.next.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("vocabulary", [1, 7, 257])
def test_any_vocabulary_and_a_lone_root_will_do(name, vocabulary):
    lone = random_tree((-1,), vocabulary=vocabulary)
    law = METHODS[name].law(lone)
    torch.testing.assert_close(law.stop, torch.ones_like(law.stop))
    torch.testing.assert_close(law.next, lone.target)
    longer = random_tree(chain(3), vocabulary=vocabulary)
    torch.testing.assert_close(METHODS[name].law(longer).stop.sum(-1), torch.ones(32, dtype=torch.float64))


@pytest.mark.parametrize("name", METHODS)
def test_five_hundred_and_twelve_nodes_are_verified(name):
    parents = paths(73, 7) if METHODS[name].drafting == "paths" else full_tree(2, 8)
    parents = chain(511) if METHODS[name].drafting == "chain" else parents
    law = METHODS[name].law(random_tree(parents, batch=2, vocabulary=80))
    torch.testing.assert_close(law.stop.sum(-1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("name", METHODS)
def test_a_law_does_not_write_into_its_tree(name):
    tree = random_tree(paths(2, 2) if METHODS[name].drafting == "paths" else chain(3))
    before = [tree.tokens.clone(), tree.draft.clone(), tree.target.clone()]
    METHODS[name].law(tree)
    assert all(torch.equal(*both) for both in zip(before, (tree.tokens, tree.draft, tree.target), strict=True))


def test_a_verdict_is_never_a_token_of_probability_zero():
    tree = random_tree(chain(3), vocabulary=6)
    law = METHODS["block"].law(tree)
    for corner in (0.0, 1 - 2**-53):
        verdict = draw(law, torch.full((32, 2), corner, dtype=torch.float64))
        assert (law.stop.gather(1, verdict.node[:, None]) > 0).all()
        assert (law.next[torch.arange(32), verdict.node].gather(1, verdict.token[:, None]) > 0).all()


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda tree: replace(tree, target=tree.target * float("nan")), "`target` must hold probabilities, got NaN"),
        (lambda tree: replace(tree, draft=tree.draft * float("nan")), "`draft` must hold probabilities, got NaN"),
        (lambda tree: replace(tree, target=tree.target - 0.4), "`target` must hold probabilities, got negative"),
        (lambda tree: replace(tree, draft=tree.draft * 2), "`draft` must hold rows that sum to 1"),
        (lambda tree: replace(tree, draft=tree.draft[..., :4]), "do both models share a tokenizer?"),
        (lambda tree: replace(tree, draft=tree.draft.float()), "must share one float dtype"),
        (lambda tree: replace(tree, tokens=tree.tokens[:, :2]), "one token a node"),
        (lambda tree: replace(tree, tokens=tree.tokens + 9), "`tokens` must lie in 0..V-1"),
        (lambda tree: replace(tree, parents=(-1, 2, 1)), "number the nodes so that parents come first"),
        (lambda tree: replace(tree, target=tree.target * 0), "the target model runs on the root always"),
    ],
)
def test_an_unsound_tree_is_refused_with_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        METHODS["token"].law(change(random_tree(chain(2))))


def test_a_method_refuses_trees_that_its_drafting_law_cannot_draw():
    with pytest.raises(ValueError, match="one child a node"):
        METHODS["block"].law(random_tree(full_tree(2, 1)))
    with pytest.raises(ValueError, match="K chains of equal length"):
        METHODS["gbv"].law(random_tree(full_tree(2, 2)))
    with pytest.raises(ValueError, match="exact for"):
        METHODS["univer"].require("with_replacement")
    with pytest.raises(ValueError, match="did you mean `without_replacement"):
        METHODS["rrsw"].require("without-replacement")


MINE = Method(METHODS["token"].unchecked, "chain")


def test_a_method_may_be_named_by_its_module():
    assert method(f"{__name__}:MINE") is MINE
    assert method("greedy-tree") is METHODS["greedy_tree"]
    with pytest.raises(ValueError, match="did you mean `traversal"):
        method("traversl")
    with pytest.raises(ValueError, match="must name a verifier.Method"):
        method("math:pi")
    with pytest.raises(ValueError, match="package.module:NAME"):
        method("no.such:THING")


def test_paths_auto_drafts_one_path_for_close_models_and_several_for_distant_ones():
    generator = seeded()
    draft = torch.randn(1, 8, 50, generator=generator).mul(2).softmax(-1)
    distant = torch.randn(1, 8, 50, generator=generator).mul(2).softmax(-1)
    root = draft[:, 0]
    assert choose_paths(draft, draft, root, 4).tolist() == [1]
    assert choose_paths(distant, draft, root, 4).item() > 1
    assert choose_paths(distant, draft, torch.eye(50)[:1], 4).tolist() == [1]
    assert choose_paths(distant[:, :0], draft[:, :0], root, 4).tolist() == [1]


@pytest.mark.parametrize("name", METHODS)
def test_edge_of_batches_dtypes_and_memory(name):
    """An empty batch, half precision, rows that lie in memory in another order, and another default dtype."""
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(METHODS[name].drafting, full_tree(2, 2))
    tree, law = random_tree(parents, batch=3), METHODS[name].law
    wanted = law(tree)
    empty = law(DraftTree(tree.tokens[:0], parents, tree.draft[:0], tree.target[:0]))
    assert draw(empty, torch.rand(0, 2)).node.shape == expected_length(empty, parents).shape == (0,)
    turned = [rows.transpose(0, 2).contiguous().transpose(0, 2) for rows in (tree.draft, tree.target)]
    torch.testing.assert_close(law(DraftTree(tree.tokens.T.contiguous().T, parents, *turned)).stop, wanted.stop)
    torch.set_default_dtype(torch.float64)
    try:
        single = law(DraftTree(tree.tokens, parents, tree.draft.float(), tree.target.float()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert single.stop.dtype == single.next.dtype == expected_length(single, parents).dtype == torch.float32
    torch.testing.assert_close(single.stop.double(), wanted.stop, atol=1e-5, rtol=0)
    for dtype in (torch.float16, torch.bfloat16):
        half = law(DraftTree(tree.tokens, parents, tree.draft.to(dtype), tree.target.to(dtype)))
        torch.testing.assert_close(half.stop.double(), wanted.stop, atol=0.02, rtol=0)
        assert draw(half, torch.rand(3, 2)).token.shape == (3,)
    tree.target.requires_grad_()
    with pytest.raises(ValueError, match="must not require gradients, a law is computed in place and has none"):
        law(tree)
    with torch.no_grad():
        torch.testing.assert_close(law(tree).stop, wanted.stop)


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 2, 0), (2, 4)])
def test_edge_of_shapes(shape):
    rows = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"`target` must be \[B, N, V\], got"):
        METHODS["token"].law(DraftTree(torch.zeros(shape[:2], dtype=torch.int64), (-1, 0), rows, rows))


@pytest.mark.parametrize(
    "uniform, sentence",
    [*((torch.full((2, 2), number), r"must lie in \[0, 1\)") for number in (-1e-9, 1.0, 2.0, float("nan"))),
     *((torch.zeros(shape), r"must be \[B, 2\] floats, B = 2, got") for shape in ((2,), (3, 2), (2, 3), (2, 2, 1))),
     (torch.zeros(2, 2, dtype=torch.int64), "torch.int64; two random numbers a request")],
)  # fmt: skip
def test_edge_of_random_numbers(uniform, sentence):
    with pytest.raises(ValueError, match=sentence):
        draw(METHODS["token"].law(random_tree(chain(2), batch=2)), uniform)
