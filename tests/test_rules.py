"""Rules without training: rows by hand, the greedy form of each, and what two of them are the optimum of."""

import itertools
import math

import pytest
import torch
from diversed.runtime.sampling import Sampling, probabilities
from diversed.verifier.enumerate_laws import KINDS, random_pair
from diversed.verifier.relax import parse
from diversed.verifier.rules import RULES, geometric_token

from .support.rules import ROWS, row_by_hand, token_by_hand

EXACT = 1e-12
PLAIN = [text for text in ROWS if ";" not in text]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_rows(vocabulary: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(target, draft) [count, V] of every kind, zeros and equal rows among them."""
    pairs = [random_pair(vocabulary, 2, kind, seeded(seed + turn)) for turn in range(count) for kind in KINDS]
    return torch.cat([pair.target for pair in pairs]), torch.cat([pair.draft for pair in pairs])


def coarse(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of five tokens in eighths, so that most have ties and no sum is rounded."""
    drawn = torch.randint(5, (2, count, 8), generator=seeded())
    return tuple(torch.nn.functional.one_hot(drawn, 5).sum(-2).double() / 8)


def relaxed(text: str, target: torch.Tensor, draft: torch.Tensor, **believed: torch.Tensor) -> torch.Tensor:
    rule = parse(text)
    believed = {"believed_target": target, "believed_draft": draft} | believed
    return RULES[rule.name].rows(target, draft, *rule.parameters, **believed)


def chosen(text: str, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    rule = parse(text)
    return RULES[rule.name].token(target, draft, *rule.parameters)


def acceptance(row: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    return torch.minimum(row, draft).sum(-1)


def divergence(row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(row || target)."""
    return (torch.xlogy(row, row) - torch.xlogy(row, target)).sum(-1)


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize("vocabulary", [2, 5, 17])
def test_a_row_is_the_one_that_the_formula_gives_by_hand(text, vocabulary):
    target, draft = some_rows(vocabulary, 4, 3)
    rows = relaxed(text, target, draft)
    weight = parse(text).constant
    pairs = zip(target.tolist(), draft.tolist(), strict=True)
    expected = [row_by_hand(text, p, q, weight) for p, q in pairs]
    assert (rows - torch.tensor(expected, dtype=torch.float64)).abs().max() < EXACT
    assert (rows.sum(-1) - 1).abs().max() < EXACT and rows.min() >= 0


@pytest.mark.parametrize("text", [*PLAIN, "mentored:1", "mentored:1e9", "regret:0", "divergence:0", "lenient:0.01"])
def test_a_row_in_float32_sums_to_one_over_a_large_vocabulary(text):
    """To 1e-5: the rows themselves sum to 1 within some 1e-7, and a quotient of small masses magnifies it."""
    target, draft = torch.randn(2, 8, 32_000, generator=seeded()).mul(4).softmax(-1)
    for pair in ((target, draft), (target, target), (target, torch.lerp(target, draft, 1e-4))):
        rows = relaxed(text, *pair)
        assert rows.min() >= 0 and (rows.double().sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("text", PLAIN)
def test_the_greedy_form_is_the_token_by_hand_and_ties_go_to_the_lowest_id(text):
    for target, draft in (coarse(2000), some_rows(5, 40, 11)):
        weight = parse(text).constant
        pairs = zip(target.tolist(), draft.tolist(), strict=True)
        assert chosen(text, target, draft).tolist() == [token_by_hand(text, p, q, weight) for p, q in pairs]


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_greedy_form_of_a_blend_of_logits_is_the_token_by_hand(weight):
    text = f"ensemble:{weight};blend=logits"
    target, draft = some_rows(5, 40, 11)
    pairs = zip(target.tolist(), draft.tolist(), strict=True)
    assert geometric_token(target, draft, weight).tolist() == [token_by_hand(text, p, q, weight) for p, q in pairs]
    tied = torch.full((1, 3), 1 / 3)
    assert geometric_token(tied, tied, weight).tolist() == [0]
    each = torch.full((len(target), 1), weight, dtype=torch.float64)
    assert torch.equal(geometric_token(target, draft, each), geometric_token(target, draft, weight))


@pytest.mark.parametrize("text", PLAIN)
def test_both_rows_of_one_mass_give_its_token(text):
    """Where the models agree on a token there is nothing to choose, at any temperature."""
    row = torch.tensor([[0.0, 1.0, 0.0]])
    assert chosen(text, row, row).tolist() == [1]
    torch.testing.assert_close(relaxed(text, row, row), row, rtol=0, atol=1e-7)


def test_three_rules_are_one_at_temperature_0():
    """lenient:l, cascade-token:1-l and regret:-log l accept the draft's token from the same share of the target's."""
    target, draft = some_rows(7, 60, 5)
    for share in (0.15, 0.4, 0.85):
        found = [f"lenient:{share}", f"cascade-token:{1 - share}", f"regret:{-math.log(share)}"]
        one, *others = (chosen(text, target, draft) for text in found)
        assert all(torch.equal(one, other) for other in others)
        assert (one != target.argmax(-1)).any() and (one != draft.argmax(-1)).any()


def test_divergence_is_measured_from_the_target_to_the_draft():
    """As in the paper's proof and its authors' code; the other direction of these rows is 2.07 and 1.33."""
    target = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]], dtype=torch.float64)
    draft = torch.tensor([[0.4, 0.4, 0.2], [0.98, 0.01, 0.01]], dtype=torch.float64)
    measured = [math.log(1.25), 0.5 * math.log(0.5 / 0.98) + 0.5 * math.log(25)]
    for row, kl in enumerate(measured):
        pair = target[row], draft[row]
        assert torch.equal(relaxed(f"divergence:{kl + 1e-9}", *pair), draft[row])
        assert torch.equal(relaxed(f"divergence:{kl - 1e-9}", *pair), target[row])
    assert torch.equal(relaxed("divergence:9,0.49", *pair), target[row])


@pytest.mark.parametrize("text", ["divergence:0.3", "cascade-opt:0.2", "cascade-token:0.4", "typical:0.3,0.9", "regret:0.7"])
def test_a_rule_decides_by_the_believed_rows_and_relaxes_the_rows_as_sampled(text):
    """Believed rows that agree accept every token, whatever was sampled; a target that is sure accepts one alone."""
    target, draft = some_rows(4, 10, 2)
    flat, last = torch.full_like(target, 0.25), torch.tensor([0.0, 0, 0, 1], dtype=torch.float64).expand_as(target)
    taken = relaxed(text, target, draft, believed_target=flat, believed_draft=flat)
    assert (taken - draft).abs().max() < EXACT
    refused = relaxed(text, target, draft, believed_target=last, believed_draft=flat)
    if text.startswith(("cascade-opt", "divergence")):
        assert torch.equal(refused, target)
    else:
        assert (refused[:, :3] <= target[:, :3] + EXACT).all() and (refused[:, 3] >= draft[:, 3] - EXACT).all()


@pytest.mark.parametrize("text, sampling", [("min-p:0.4", Sampling(min_p=0.4)), ("top-p:0.6", Sampling(top_p=0.6))])
def test_truncation_is_that_of_sampling_from_the_target_alone(text, sampling):
    target, draft = (random_pair(9, 3, "random", seeded(seed)).target for seed in (4, 5))
    assert torch.equal(relaxed(text, target, draft), relaxed(text, target, target))
    assert (relaxed(text, target, draft) - probabilities(target.log(), sampling)).abs().max() < EXACT


def test_the_ends_of_the_parameters_are_the_target_and_the_draft():
    target, draft = some_rows(5, 10, 6)
    for text in ("mentored:1", "divergence:9,0", "min-p:0", "top-p:1"):
        assert (relaxed(text, target, draft) - target).abs().max() < EXACT, text
    target, draft = (rows[target.min(-1).values > 0] for rows in (target, draft))
    for text in ("mentored:1e9", "regret:99", "divergence:99,1"):
        assert (relaxed(text, target, draft) - draft).abs().max() < EXACT, text


def simplex(steps: int) -> torch.Tensor:
    """[R, 3] every row of three tokens in whole shares of 1 / steps."""
    counts = [(a, b, steps - a - b) for a in range(steps + 1) for b in range(steps + 1 - a)]
    return torch.tensor(counts, dtype=torch.float64) / steps


@pytest.mark.parametrize("cap", [1.1, 1.5, 3.0])
def test_no_row_of_the_same_divergence_from_the_target_accepts_more_than_mentored(cap):
    """Against all 45,451 rows in steps of 1/300; the best of them comes within a step, so the bound is tight."""
    every = simplex(300)
    for seed in range(6):
        target, draft = (rows[0] for rows in some_rows(3, 1, 40 + seed))
        row = relaxed(f"mentored:{cap}", target, draft)
        assert (row <= cap * target + EXACT).all()
        within = every[divergence(every, target) <= divergence(row, target) + EXACT]
        best = acceptance(within, draft).max()
        assert best <= acceptance(row, draft) + EXACT
        assert best >= acceptance(row, draft) - 3 / 300


@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.5])
def test_no_excess_of_the_same_regret_accepts_more_than_the_regret_rule(threshold):
    """Two contexts together, with every excess on a grid of tenths; the deficits shrink in proportion in all of them."""
    steps = torch.linspace(0, 1, 11, dtype=torch.float64)
    checked = 0
    for seed in range(12):
        targets, drafts = random_pair(3, 2, "random", seeded(seed)).target[:2], random_pair(3, 2, "random", seeded(90 + seed)).draft[:2]
        rows = relaxed(f"regret:{threshold}", targets, drafts)
        regret = targets.amax(-1, keepdim=True).log() - targets.log()
        excess = (drafts - targets).clamp_min(0)
        shares = torch.cartesian_prod(*[steps] * 3)
        gained, lost = [], []
        for context in range(2):
            some = shares * excess[context]
            gained.append(some.sum(-1))
            lost.append((some * regret[context]).sum(-1))
        gained, lost = (one[:, None] + other for one, other in (gained, lost))
        taken = excess * (regret <= threshold)
        ours, bound = taken.sum(), (taken * regret).sum()
        assert gained[lost <= bound + EXACT].max() <= ours + EXACT
        more = acceptance(rows, drafts).sum() - acceptance(targets, drafts).sum()
        assert abs(more - ours) < EXACT
        checked += bool((0 < ours) & (ours < excess.sum()))
    assert checked > 0 or threshold == 0.0


def test_what_the_regret_rule_loses_is_the_regret_it_takes_but_for_that_of_the_deficits():
    target, draft = random_pair(6, 2, "random", seeded(3)).target, random_pair(6, 2, "random", seeded(4)).draft
    rows, logs = relaxed("regret:0.7", target, draft), target.log()
    regret = logs.amax(-1, keepdim=True) - logs
    taken = (draft - target).clamp_min(0) * (regret <= 0.7)
    deficit = (target - draft).clamp_min(0)
    constant = (deficit * regret).sum(-1, keepdim=True) / deficit.sum(-1, keepdim=True)
    lost = ((target - rows) * logs).sum(-1)
    assert (lost - (taken * (regret - constant)).sum(-1)).abs().max() < EXACT


def test_every_rule_is_in_the_table_of_rows():
    assert {parse(text).name for text in ROWS} == set(RULES) - {"coin"}  # which is ensemble but for its token
    assert all(rule.optional <= len(rule.ranges) for rule in RULES.values())
    assert len(set(itertools.chain(ROWS, PLAIN))) == len(ROWS)
