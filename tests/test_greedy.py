"""Temperature 0, filters and low temperatures: the relaxed row as the table of rules writes it, from what the models
believe and rows as sampled.
"""

from functools import partial

import pytest
import torch
from diversed.export.vllm import GREEDY, SAMPLED, RelaxedVerify
from diversed.runtime.engine import decode
from diversed.runtime.relaxer import Relaxer
from diversed.runtime.sampling import Sampling, beliefs, probabilities
from diversed.verifier import METHODS, DraftTree
from diversed.verifier.enumerate_laws import (
    KINDS,
    Pair,
    drafts,
    full_tree,
    model_law,
    paths,
    random_pair,
    text_law,
)
from diversed.verifier.relax import Believed, parse, relax, substitutions
from diversed.verifier.tree import chain

from .support.believed import (
    ONE_ROW,
    RULES,
    each_row,
    filtered_pair,
    greedy_pair,
    greedy_row,
    sampled_row,
)
from .support.models import tiny_pair

EXACT = 1e-12  # float64 sums of a few thousand terms below 1


def shaped(name):
    """(drafting law, tree) of a method, two tokens deep."""
    drafting = METHODS[name].drafting
    return drafting, {"chain": chain(2), "paths": paths(2, 2)}.get(drafting, full_tree(2, 2))


def error(name, text, believed: Pair, sampled: Pair, weight, rows, **options) -> float:
    """How far the law of three tokens, decoded from rows as sampled and relaxed by what is believed, is from that of
    `rows`.
    """
    every = drafts(sampled, *shaped(name), leaf_rows=True)
    judged = Believed(believed.target[every.contexts], believed.draft[every.contexts])
    share = weight[every.contexts] if text.startswith("learned") else None
    tree = relax(every.tree, text, share, believed=judged, **options)
    found = text_law(every, METHODS[name].law(tree), rows, 3)
    return (found - model_law(rows, 3)).abs().max().item()


def weights(pair: Pair, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(pair.target), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_at_temperature_0_the_text_is_the_one_that_the_rule_chooses(name, text):
    for seed, kind in enumerate(KINDS):
        believed = random_pair(3, 3, kind, torch.Generator().manual_seed(seed))
        weight, sampled = weights(believed, seed), greedy_pair(believed)
        rows = each_row(partial(greedy_row, text), believed.target, believed.draft, weight)
        assert error(name, text, believed, sampled, weight, rows, greedy=True) < EXACT, kind


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_with_filters_the_text_has_the_law_of_the_rows_as_sampled_and_the_criterion_of_the_believed(name, text):
    """At temperature 1/2, a filter of each model's own; at a third of the contexts it may leave the draft nothing that
    the target can say.
    """
    for seed, kind in enumerate(("random", "tied", "zeros")):
        believed = random_pair(3, 3, kind, torch.Generator().manual_seed(seed))
        weight, sampled = weights(believed, seed), filtered_pair(believed)
        both = sampled.target, sampled.draft, believed.target, believed.draft
        rows = each_row(partial(sampled_row, text, filtered=True), *both, weight)
        assert not (rows[sampled.target == 0]).any()
        assert error(name, text, believed, sampled, weight, rows, filtered=True) < EXACT, kind
    apart = ((sampled.draft * (sampled.target > 0)).sum(-1) == 0).any()
    assert apart, "no context where the filters leave the models nothing in common"


def test_ties_go_to_the_lowest_id():
    believed = Believed(torch.tensor([[[0.75, 0.25, 0.0]]]), torch.tensor([[[0.25, 0.75, 0.0]]]))
    tree = DraftTree(torch.zeros(1, 1, dtype=torch.long), (-1,), *torch.eye(3)[[1, 0]].view(2, 1, 1, 3))
    assert relax(tree, "ensemble:0.5", believed=believed, greedy=True).target.argmax() == 0
    flat = Believed(torch.full((1, 1, 3), 1 / 3), torch.full((1, 1, 3), 1 / 3))
    for text in RULES[:-3]:
        target = tree.target if text in ("none", "coin:0.3") else torch.eye(3)[0].view(1, 1, 3)
        chosen = relax(tree, text, believed=flat, greedy=True).target
        assert chosen.argmax() == target.argmax(), text


def test_a_near_tie_and_a_fatal_mismatch_are_told_apart():
    """What the features and the rules see at temperature 0 are not one-hot rows."""
    near, fatal = [0.51, 0.49, 0.0], [0.99, 0.01, 0.0]
    believed = Believed(torch.tensor([[near, fatal]]), torch.tensor([[[0.4, 0.6, 0.0]] * 2]))
    tree = DraftTree(torch.zeros(1, 2, dtype=torch.long), (-1, 0), *torch.eye(3)[[1, 1, 0, 0]].view(2, 1, 2, 3))
    for text in ("ensemble:0.3", "lenient:0.5", "typical:0.3,0.9", "regret:0.7", "divergence:0.3", "mentored:1.3"):
        chosen = relax(tree, text, believed=believed, greedy=True).target.argmax(-1).tolist()
        assert chosen == [[1, 0]], text


@pytest.mark.parametrize("text", ["ensemble:0.6", "lenient:0.2", "learned;blend=choice"])
@pytest.mark.parametrize("budget", [0, 1, 2])
def test_a_budget_counts_the_mismatches_that_are_taken(text, budget):
    size, nodes = 64, 4
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2, size, nodes, 5, generator=generator).pow(2)
    rows = rows / rows.sum(-1, keepdim=True)
    sampled = torch.nn.functional.one_hot(rows.argmax(-1), 5).float()
    tree = DraftTree(torch.zeros(size, nodes, dtype=torch.long), chain(nodes - 1), sampled[1], sampled[0])
    weight = torch.rand(size, nodes, generator=generator) if text.startswith("learned") else None
    options = dict(weight=weight, believed=Believed(*rows), greedy=True)
    free = substitutions(tree, relax(tree, text, **options))
    paid = substitutions(tree, relax(tree, f"{text};budget={budget}", **options))
    assert set(free.unique().tolist()) == {0, 1} and free.sum(-1).max() > 2
    assert torch.equal(paid.sum(-1), free.sum(-1).clamp_max(budget))
    assert torch.equal(paid, free * (free.cumsum(-1) <= budget))


def test_a_request_never_spends_more_regret_than_its_threshold_times_its_budget():
    """The texts of the loop, each mismatch looked up in what the target believes before it."""
    pair, prompts = tiny_pair(11, end=False), [[2, 3], [4, 5, 6], [1, 7, 8, 9]]
    options = {"sampling": Sampling(0), "draft_length": 4, "max_new_tokens": 30}
    most = 0.0
    for budget in (0, 2):
        for prompt, text in zip(prompts, decode(pair, prompts, relaxation=f"regret:1.5;budget={budget}", **options), strict=True):
            ids = torch.tensor([prompt + text.tokens])
            slots = torch.arange(ids.shape[1])
            out = pair.target(ids, slots[None], (slots <= slots[:, None])[None], pair.target.cache(len(slots)), 0)
            logs = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            regret = logs.amax(-1) - logs.gather(-1, torch.tensor(text.tokens).unsqueeze(-1)).squeeze(-1)
            regret = regret[regret > 1e-5]
            assert len(regret) == text.substitutions <= budget and regret.sum() <= 1.5 * budget
            most = max(most, float(regret.sum()))
    assert most > 0


def logits(count: int, seed: int = 0):
    """[2, count, 1, 12] of target and draft, a third of them close to each other."""
    target, draft = 2 * torch.randn(2, count, 1, 12, generator=torch.Generator().manual_seed(seed))
    draft[::3] = target[::3] + 0.1 * draft[::3]
    return torch.stack([target, draft])


def relaxed_at(text: str, sampling: Sampling, both, own=None):
    """(tree, relaxed) of rows of logits [2, B, 1, V], target first, as a step makes them."""
    target, draft = (probabilities(each, sampling) for each in both)
    relaxer = Relaxer(parse(text), own, sampling=sampling)
    tree = DraftTree(torch.zeros(len(target), 1, dtype=torch.long), (-1,), draft, target)
    return tree, relaxer(tree, believed=relaxer.beliefs(both[1], both[0]))


def gate(draft, target, hidden=None):
    """A weight that reads the rows."""
    return (draft.amax(-1) * target.amax(-1)).sqrt()


@pytest.mark.parametrize("text", RULES)
def test_at_temperature_1_without_filters_nothing_changes(text):
    both = logits(200)
    own = gate if text.startswith("learned") else None
    tree, relaxed = relaxed_at(text, Sampling(), both, own)
    weight = None
    if own:
        weight = gate(*(beliefs(each) for each in both[[1, 0]]))
    assert torch.equal(relaxed.tree.target, relax(tree, text, weight).target)


@pytest.mark.parametrize("text", [text for text in RULES if text != "none"])
def test_a_rule_judges_the_same_at_every_temperature(text):
    """From 1 over .7, .3 and .1 down to .01 a weight stays the same number, and a cascade takes the same row."""
    both = logits(300, seed=3)
    own = gate if text.startswith("learned") else None
    taken = []
    for temperature in (1, 0.7, 0.3, 0.1, 0.01):
        tree, relaxed = relaxed_at(text, Sampling(temperature), both, own)
        kept, drafts = ((relaxed.tree.target == rows).all(-1) for rows in (tree.target, tree.draft))
        taken.append((kept, drafts))
        weight = relaxed.weight
        if parse(text).is_blend:
            taken[-1] = weight, weight
    (kept, drafts), *others = taken
    for now_kept, now_drafts in others:
        if parse(text).is_blend:
            assert torch.equal(now_kept, kept)
        elif parse(text).name in ONE_ROW:  # cold rows may be equal, and then it is both
            assert (now_kept >= kept).all() and (now_drafts >= drafts).all()
    assert parse(text).is_blend or parse(text).name not in ONE_ROW or (kept.any() and drafts.any())


# Cold rows: a coin between two tokens, and bounds on a ratio that is 0 or infinite where their tokens differ.
JUMPS = ("ensemble", "learned", "lenient", "mentored")


@pytest.mark.parametrize("text", [text for text in RULES if text != "none"])
def test_between_temperature_0_and_a_low_one_nothing_jumps_whose_criterion_is_believed(text):
    """At .01 rows as sampled are all but one-hot. A blend of such rows by a weight is a coin, and at 0 the most likely
    token of the believed blend; lenient and mentored compare rows as sampled, and at 0 the believed ones. Rules whose
    criterion is believed and blends of logits do not jump.
    """
    both = logits(300, seed=4)
    apart = (both.topk(2).values.diff().abs() > 0.3).all(0).all(-1).squeeze(-1)  # others are not one-hot yet
    own = gate if text.startswith("learned") else None
    _, cold = relaxed_at(text, Sampling(0.01), both[:, apart], own)
    tree, zero = relaxed_at(text, Sampling(0), both[:, apart], own)
    distance = 0.5 * (cold.tree.target - zero.tree.target).abs().sum(-1)
    assert apart.sum() > 100 and (tree.target != tree.draft).any(-1).sum() > 50
    if "logits" in text:  # but where the blend itself is nearly a tie
        assert (distance > 0.01).double().mean() < 0.05, distance
    elif parse(text).name in JUMPS and "choice" not in text:
        assert parse(text).name == "mentored" or distance.max() > 0.1
    else:
        assert distance.max() < 1e-6, (distance > 1e-6).sum()


@pytest.mark.parametrize("text", ["ensemble:0.3;blend=logits", "learned;blend=logits"])
@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.7, 1.5])
def test_a_blend_of_logits_is_that_of_the_logits_themselves_at_every_temperature(text, temperature):
    """Cold rows in float32 are 0 beside the most likely token; the blend must not be made of them."""
    both = logits(200, seed=6)
    own = gate if text.startswith("learned") else None
    _, relaxed = relaxed_at(text, Sampling(temperature), both, own)
    target, draft = both.double().log_softmax(-1)
    weight = relaxed.weight.double().unsqueeze(-1)
    expected = (torch.lerp(target, draft, weight) / temperature).softmax(-1)
    assert (relaxed.tree.target - expected).abs().max() < 1e-4


# The plugin for vLLM makes the same rows, whatever other requests of the batch ask for

ASKED = [
    Sampling(),
    Sampling(0),
    Sampling(top_p=0.7),
    Sampling(0.6, top_k=4),
    Sampling(0),
    Sampling(1.4, min_p=0.2),
]


def plugged(text: str, own, drafted: int):
    """The plugin's verifier of chains, without vLLM below it."""
    verifier = object.__new__(RelaxedVerify)
    verifier.greedy, verifier.sampled = (
        Relaxer(parse(text), own, sampling=sampling) for sampling in (GREEDY, SAMPLED)
    )
    verifier.parents = chain(drafted)
    return verifier


@pytest.mark.parametrize("text", RULES)
def test_the_plugin_for_vllm_relaxes_as_the_loop(text):
    """As vLLM does it the draft is drawn at the temperature alone, so the loop is given such rows too."""
    own, vocabulary, drafted = gate if text.startswith("learned") else None, 12, 3
    generator = torch.Generator().manual_seed(7)
    raw, draft = 2 * torch.randn(2, len(ASKED), drafted + 1, vocabulary, generator=generator)
    draft[1::2] = raw[1::2] + 0.4 * draft[1::2]
    draft, heat = draft[:, :drafted], torch.tensor([sampling.temperature for sampling in ASKED])
    own_rows = torch.stack([probabilities(each, sampling) for each, sampling in zip(raw, ASKED, strict=True)])
    cold = (heat == 0)[:, None, None]
    processed = torch.where(cold, raw, own_rows.log())
    rows = [probabilities(each, Sampling(sampling.temperature)) for each, sampling in zip(draft, ASKED, strict=True)]
    rows = torch.nn.functional.pad(torch.stack(rows), (0, 0, 0, 1))
    tokens = torch.nn.functional.pad(rows[:, :-1].argmax(-1), (1, 0))
    found, relaxed = plugged(text, own, drafted)._rows(processed, raw, draft, tokens, heat)
    torch.testing.assert_close(found, rows[:, :-1])
    moved = 0
    for i, sampling in enumerate(ASKED):
        tree = DraftTree(tokens[i : i + 1], chain(drafted), rows[i : i + 1], own_rows[i : i + 1])
        relaxer = Relaxer(parse(text), own, sampling=sampling)
        believed = Believed(beliefs(raw[i : i + 1]), torch.nn.functional.pad(beliefs(draft[i : i + 1]), (0, 0, 0, 1)))
        expected = relaxer.tree(tree, believed=believed).target[0]
        torch.testing.assert_close(relaxed[i], expected, atol=1e-6, rtol=1e-5)
        assert not relaxed[i][processed[i] == -torch.inf].any()
        moved += (relaxed[i] - own_rows[i]).abs().sum() > 0.01
    assert (moved > 0) == (text != "none")


def test_a_token_that_a_grammar_refuses_does_not_come_back_at_temperature_0():
    raw = torch.tensor([[[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    refused = raw.clone()
    refused[0, 0, 1] = -torch.inf
    draft, tokens, heat = torch.tensor([[[0.0, 9.0, 2.0]]]), torch.tensor([[0, 1]]), torch.zeros(1)
    verifier = plugged("ensemble:0.9", None, 1)
    assert verifier._rows(raw, raw, draft, tokens, heat)[1][0, 0].tolist() == [0, 1, 0]
    assert verifier._rows(refused, raw, draft, tokens, heat)[1][0, 0].tolist() == [1, 0, 0]
