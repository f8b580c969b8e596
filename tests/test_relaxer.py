"""A relaxer gives what the rule gives by hand, and knows what a kernel can do for it."""

import pytest
import torch
from diversed.runtime.bundle import load_bundle
from diversed.runtime.relaxer import Relaxer, bundle_relaxer, load_relaxer
from diversed.runtime.sampling import Sampling
from diversed.verifier.enumerate_laws import drafts, random_pair
from diversed.verifier.relax import parse, relax, substitutions
from diversed.verifier.tree import chain

from .support.models import tiny_pair
from .test_bundle import change, trained

RULES = [
    "none",
    "ensemble:0.4",
    "ensemble:0.4;blend=logits",
    "lenient:0.5",
    "ensemble:0.4;budget=0.2;bias=1",
]


def trees(branching: int = 2):
    pair = random_pair(3, 3, "random", torch.Generator().manual_seed(0))
    return drafts(pair, "chain", chain(branching)).tree


def own(draft, target, hidden=None):
    """A weight that differs from node to node."""
    return draft.amax(-1) * target.amax(-1)


@pytest.mark.parametrize("text", RULES)
def test_a_rule_is_applied_and_its_price_is_told(text):
    rule, tree = parse(text), trees()
    relaxed = Relaxer(rule)(tree)
    expected = relax(tree, rule)
    assert torch.equal(relaxed.tree.target, expected.target)
    assert torch.equal(Relaxer(rule).tree(tree).target, expected.target)
    assert torch.equal(relaxed.cost, substitutions(tree, expected))
    ran = tree.draft.sum(-1) > 0
    assert relaxed.weight.isnan()[~ran].all() and (~ran).any()
    if not rule.is_blend:
        assert relaxed.weight.isnan().all()
    elif rule.budget is None:
        assert relaxed.weight[ran] == pytest.approx(rule.constant)
    else:
        granted = relaxed.cost[ran] > 0
        assert relaxed.weight[ran] == pytest.approx(granted * rule.constant) and not granted.all()


def test_a_tree_that_is_not_relaxed_is_the_very_same():
    tree = trees()
    assert Relaxer(parse("none"))(tree).tree is tree


@pytest.mark.parametrize("text", ["learned", "learned;blend=logits", "learned;budget=0.1"])
def test_a_learned_weight_is_that_of_each_node(text):
    tree, rule = trees(), parse(text)
    relaxed = Relaxer(rule, own)(tree)
    weight = own(tree.draft, tree.target)
    assert torch.equal(relaxed.tree.target, relax(tree, rule, weight).target)
    assert torch.equal(Relaxer(rule, own).weight(tree), weight)
    ran = tree.draft.sum(-1) > 0
    kept = relaxed.cost > 0 if rule.budget is not None else ran
    torch.testing.assert_close(relaxed.weight[ran], torch.where(kept, weight, 0)[ran].float())


def test_what_was_spent_before_counts_for_the_budget():
    tree, rule = trees(), parse("ensemble:0.5;budget=1")
    spent = torch.full((len(tree.tokens),), 1.0, dtype=torch.float64)
    assert (Relaxer(rule)(tree).cost > 0).any() and not (
        Relaxer(rule)(tree, spent=spent).cost > 0
    ).any()


def test_hidden_states_reach_the_head_draft_first_and_only_where_they_are_read():
    tree, seen = trees(), []

    def weigh(draft, target, hidden):
        seen.append(hidden)
        return own(draft, target)

    hidden = torch.zeros(*tree.tokens.shape, 2), torch.ones(*tree.tokens.shape, 3)
    for needs_hidden in (False, True):
        Relaxer(parse("learned"), weigh, needs_hidden)(tree, hidden)
    assert seen[0] is None and torch.equal(seen[1], torch.cat(hidden, -1))


def test_a_constant_weight_reads_no_rows():
    """A kernel takes the weight, and then no rows of probabilities need to exist."""
    tree = trees()
    weight = Relaxer(parse("ensemble:0.4")).weight(
        type(tree)(tree.tokens, tree.parents, None, None)
    )
    assert weight.shape == tree.tokens.shape and (weight == torch.tensor(0.4)).all()


@pytest.mark.parametrize(
    "text, fusible",
    [("none", True), ("ensemble:0.4", True), ("learned;bias=1", True), ("lenient:0.5", False),
     ("ensemble:0.4;blend=logits", False), ("learned;budget=1", False)],
)  # fmt: skip
def test_a_kernel_can_take_over_blends_of_probabilities_without_a_budget(text, fusible):
    rule = parse(text)
    assert Relaxer(rule, own if rule.name == "learned" else None).fusible == fusible


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("weigh", [None, own])
def test_a_compiled_step_can_hold_a_relaxer(weigh):
    """No branch on a tensor, no wait for the host: the graph breaks nowhere."""
    tree = trees()
    rule = parse("learned;budget=1" if weigh else "ensemble:0.4;budget=1")
    relaxer = Relaxer(rule, weigh)
    spent = torch.zeros(len(tree.tokens), dtype=torch.float64)

    def step(tokens, draft, target, spent):
        relaxed = relaxer(type(tree)(tokens, tree.parents, draft, target), spent=spent)
        return relaxed.tree.target, relaxed.weight, relaxed.cost

    rows = tree.tokens, tree.draft, tree.target, spent
    for eager, compiled in zip(
        step(*rows), torch.compile(step, fullgraph=True, backend="eager")(*rows), strict=True
    ):
        torch.testing.assert_close(compiled, eager, equal_nan=True)


def test_a_bundles_card_says_the_blend_and_the_string_may_agree(tmp_path):
    from diversed.commands.export import export

    trained(tmp_path / "train", "logits")
    export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"))
    folder, cpu = tmp_path / "bundle", torch.device("cpu")
    for blend, other in (("probabilities", "logits"), ("logits", "probabilities")):
        change(folder, head=load_bundle(folder).card.to_json()["head"] | {"blend": blend})
        bundle = load_bundle(folder)
        for text in (f"{folder}", f"{folder};blend={blend}"):
            assert bundle_relaxer(parse(text), bundle, cpu).rule.blend == blend
        with pytest.raises(
            ValueError, match=f"was trained for the blend of {blend}, got .*; leave `blend` out"
        ):
            bundle_relaxer(parse(f"{folder};blend={other}"), bundle, cpu)


def test_the_source_of_a_learned_relaxation_is_asked_for():
    with pytest.raises(ValueError, match="needs to know which head"):
        load_relaxer("learned", tiny_pair(7), Sampling())
