"""The objective of DIVERSED against a world small enough to write down every text.

Two tokens, 0 ends the text; at most three tokens. A text's probability, the expected reward and its gradient follow by
enumeration in float64, where sums of a dozen terms are exact to about 1e-16: 1e-12 leaves room and hides no error.
"""

import itertools

import pytest
import torch
from diversed.train.objectives import (
    acceptance,
    attribution,
    blend_logprob,
    bounded,
    logit_blend,
    nats_lost,
    over_positions,
    policy_gradient,
    reinforce,
)
from diversed.train.rewards import advantage, base, untouched
from diversed.verifier.head import logit_features

EXACT = dict(rtol=0, atol=1e-12)
TEXTS = [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]
REWARD = torch.tensor([0.3, 1.0, -0.2, 0.55], dtype=torch.float64)
# The context after t tokens is unique: t ones. Rows over the two tokens, one a context.
DRAFT = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.15, 0.85]], dtype=torch.float64)
TARGET = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.7, 0.3]], dtype=torch.float64)
TV = 0.5 * (DRAFT - TARGET).abs().sum(-1)


@pytest.fixture
def gate():
    return torch.tensor([0.4, -1.1, 0.7], dtype=torch.float64, requires_grad=True)


def trace_of(texts, weight, reward=None):
    """A padded batch of the given texts, sampled with `weight` [3] per context."""
    mask = torch.zeros(len(texts), 3, dtype=torch.bool)
    target_prob, draft_prob = torch.ones(2, len(texts), 3, dtype=torch.float64)
    for row, text in enumerate(texts):
        for position, token in enumerate(text):
            mask[row, position] = True
            target_prob[row, position], draft_prob[row, position] = TARGET[position, token], DRAFT[position, token]
    shape = (len(texts), 3)
    trace = dict(target_prob=target_prob, draft_prob=draft_prob, mask=mask, tv=TV.expand(shape))
    trace["weight"] = weight.detach().expand(shape)
    return trace if reward is None else trace | {"advantage": reward}


def text_probabilities(weight):
    """[4] probability of every text under the blend with `weight` [3] per context."""
    trace = trace_of(TEXTS, weight)
    logprob = blend_logprob(weight.expand(4, 3), trace["target_prob"], trace["draft_prob"])
    return torch.where(trace["mask"], logprob, 0).sum(1).exp()


def gradient(value, gate):
    return torch.autograd.grad(value, gate, retain_graph=True)[0]


def test_the_enumerated_texts_are_all_texts(gate):
    torch.testing.assert_close(text_probabilities(gate.sigmoid()).sum().item(), 1.0, **EXACT)


@pytest.mark.parametrize("baseline", [0.0, 0.37, -2.0])
def test_expected_reinforce_gradient_is_the_gradient_of_the_expected_reward(gate, baseline):
    weight = gate.sigmoid()
    probability = text_probabilities(weight)
    truth = gradient((probability * REWARD).sum(), gate)
    expected = torch.zeros_like(truth)
    for text, share, reward in zip(TEXTS, probability.detach(), REWARD, strict=True):
        trace = trace_of([text], weight, (reward - baseline)[None])
        loss = reinforce(weight.expand(1, 3), trace, lambda_=0.0, ratio_clip=0.2, acceptance_term="mean")
        expected -= share * gradient(loss, gate)
    torch.testing.assert_close(expected, truth, **EXACT)


@pytest.mark.parametrize("samples", [2, 3])
def test_group_mean_baseline_keeps_the_direction_and_scales_it_by_k_minus_one_over_k(gate, samples):
    weight = gate.sigmoid()
    probability = text_probabilities(weight)
    truth = gradient((probability * REWARD).sum(), gate)
    expected = torch.zeros_like(truth)
    for group in itertools.product(range(4), repeat=samples):
        index = torch.tensor(group)
        gain = advantage(REWARD[index], torch.zeros(samples, dtype=torch.int64))
        trace = trace_of([TEXTS[i] for i in group], weight, gain)
        loss = reinforce(weight.expand(samples, 3), trace, lambda_=0.0, ratio_clip=0.2, acceptance_term="mean")
        expected -= probability.detach()[index].prod() * gradient(loss, gate)
    torch.testing.assert_close(expected, truth * (samples - 1) / samples, **EXACT)


def test_importance_ratio_makes_one_token_texts_of_an_old_gate_unbiased(gate):
    """With one decision a text the token's ratio is the text's; clip is set wide so that it does not act."""
    old = torch.tensor([0.8], dtype=torch.float64)
    weight = gate[:1].sigmoid()
    reward = torch.tensor([0.3, 1.0], dtype=torch.float64)
    truth = gradient((((1 - weight) * TARGET[0] + weight * DRAFT[0]) * reward).sum(), gate)
    loss = 0
    for token in (0, 1):
        logprob, old_logprob = (blend_logprob(w, TARGET[0, token], DRAFT[0, token])[None] for w in (weight, old))
        mask = torch.ones(1, 1, dtype=torch.bool)
        loss = loss + old_logprob.exp() * policy_gradient(logprob, old_logprob, reward[token : token + 1], mask, 50.0)
    torch.testing.assert_close(-gradient(loss.squeeze(), gate), truth, **EXACT)


@pytest.mark.parametrize("shift, sign, moves", [(0.5, 1, False), (0.5, -1, True), (-0.5, 1, True), (-0.5, -1, False)])
def test_a_clipped_ratio_stops_the_gradient_only_in_the_direction_it_already_went(shift, sign, moves):
    logprob = torch.tensor([[-1.0 + shift]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.tensor([[-1.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    loss = policy_gradient(logprob, old, torch.tensor([float(sign)], dtype=torch.float64), mask, 0.2)
    assert (gradient(loss, logprob).abs().item() > 0) == moves


def test_acceptance_is_one_minus_the_distance_of_draft_and_blend(gate):
    weight = gate.sigmoid()
    blend = (1 - weight[:, None]) * TARGET + weight[:, None] * DRAFT
    torch.testing.assert_close(acceptance(weight, TV), torch.minimum(DRAFT, blend).sum(-1), **EXACT)
    torch.testing.assert_close(1 - acceptance(weight, TV) + weight * TV, TV, **EXACT)


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_with_no_reward_a_positive_lambda_raises_acceptance(gate, how):
    weight = gate.sigmoid()
    trace = trace_of(TEXTS, weight, torch.zeros(4, dtype=torch.float64))
    loss = reinforce(weight.expand(4, 3), trace, lambda_=0.1, ratio_clip=0.2, acceptance_term=how)
    slope = gradient(loss, gate)
    assert (slope < 0).all()
    after = (gate - 0.1 * slope).sigmoid()
    assert (acceptance(after, TV) > acceptance(weight, TV)).all()


def test_mean_over_positions_does_not_reward_length_and_sum_does():
    mask = torch.tensor([[True, False, False], [True, True, True]])
    value = torch.full((2, 3), 0.5, dtype=torch.float64)
    assert over_positions(value, mask).item() == 0.5
    assert over_positions(value, mask, "sum").item() == 1.0


def test_padding_changes_neither_loss_nor_gradient(gate):
    weight = gate.sigmoid()
    short = trace_of([(1, 0)], weight, torch.tensor([0.7], dtype=torch.float64))
    padded = {name: tensor.clone() for name, tensor in short.items()}
    for name in ("target_prob", "draft_prob"):
        padded[name][:, 2] = 0.0
    padded["tv"][:, 2] = 0.9
    settings = dict(lambda_=0.3, ratio_clip=0.2, acceptance_term="mean")
    losses = [reinforce(weight.expand(1, 3), trace, **settings) for trace in (short, padded)]
    torch.testing.assert_close(*losses, **EXACT)
    torch.testing.assert_close(*(gradient(loss, gate) for loss in losses), **EXACT)


def test_the_choice_to_end_the_text_is_trained(gate):
    """Only the end-of-text decision of text (1, 0) differs from its neighbours: its context must get a gradient."""
    weight = gate.sigmoid()
    trace = trace_of([(1, 0)], weight, torch.tensor([1.0], dtype=torch.float64))
    loss = reinforce(weight.expand(1, 3), trace, lambda_=0.0, ratio_clip=0.2, acceptance_term="mean")
    assert gradient(loss, gate)[1].abs() > 1e-3


def test_advantages_of_a_group_sum_to_zero_and_groups_do_not_mix():
    reward = torch.tensor([1.0, 5.0, 0.0, 7.0], dtype=torch.float64)
    result = advantage(reward, torch.tensor([4, 9, 4, 9]))
    torch.testing.assert_close(result, torch.tensor([0.5, -1.0, -0.5, 1.0], dtype=torch.float64), **EXACT)


def test_attribution_finds_the_harm_of_each_kind_of_substitution():
    """With every text's expected reward in place of its draw the likelihood is greatest at the true harms, to 1e-6.

    Two kinds of position, harms .02 and 1.5; texts with every combination of up to three substitutions of each kind.
    """
    counts = torch.cartesian_prod(torch.arange(4), torch.arange(4)).double()
    base = torch.full((16,), 0.9, dtype=torch.float64)
    truth = torch.tensor([0.02, 1.5], dtype=torch.float64)
    success = base * torch.exp(-counts @ truth)
    logit = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    kind = torch.arange(6) % 2
    substituted = torch.arange(6) // 2 < counts.long()[:, kind]
    trace = {"mask": torch.ones(16, 6, dtype=torch.bool), "substituted": substituted, "base": base}
    trace["graded"] = torch.zeros(16, dtype=torch.bool)
    optimiser = torch.optim.LBFGS([logit], max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16)

    def closure():
        optimiser.zero_grad()
        # the mean over texts of the likelihood is linear in each text's reward: one text of each outcome, weighted
        terms = []
        for text in range(16):
            one = {name: value[text : text + 1] for name, value in trace.items()}
            for reward, share in ((1.0, success[text]), (0.0, 1 - success[text])):
                outcome = {**one, "reward": torch.tensor([reward], dtype=torch.float64)}
                terms.append(share * attribution(logit[kind][None], outcome))
        loss = torch.stack(terms).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    torch.testing.assert_close(torch.exp(-logit.detach()), truth, atol=1e-6, rtol=1e-5)


def test_attribution_of_a_graded_reward_is_least_squares_on_what_was_lost():
    trace = {
        "mask": torch.tensor([[True, True, False]]), "substituted": torch.tensor([[True, False, True]]),
        "base": torch.tensor([-1.0]), "reward": torch.tensor([-1.5]), "graded": torch.tensor([True]),
    }  # fmt: skip
    logit = torch.tensor([[0.5, 3.0, 3.0]])
    expected = (-1.5 + 1.0 + torch.exp(torch.tensor(-0.5))) ** 2
    torch.testing.assert_close(attribution(logit, trace), expected)
    assert attribution(logit, {**trace, "substituted": torch.zeros(1, 3, dtype=torch.bool)}) == 0.25


def test_the_base_of_a_prompt_is_its_own_untouched_texts_drawn_towards_all_of_them():
    substituted = torch.tensor([0, 0, 1, 0, 0, 1, 0], dtype=torch.bool)
    own = untouched(substituted, torch.tensor([0, 2, 4, 5]), torch.tensor([2, 2, 1, 2]))
    assert own.tolist() == [True, False, True, False]
    reward, prompt = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([3, 3, 5, 5])
    # all untouched texts: mean 1/2, which counts as two texts beside the prompt's own one
    torch.testing.assert_close(base(reward, prompt, own), torch.tensor([2 / 3, 2 / 3, 1 / 3, 1 / 3]))
    assert base(reward, prompt, torch.zeros(4, dtype=torch.bool)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kept", [2, 3, 5])
def test_the_scalars_of_a_logit_blend_are_those_of_its_row_where_every_token_is_stored(kept):
    """With fewer stored, their rest counts as one token: its share is at most that of its tokens together (Hoelder)."""
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 1, 7, 5, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    weight = torch.rand(1, 7, generator=generator, dtype=torch.float64)
    row = target ** (1 - weight[..., None]) * draft ** weight[..., None]
    row = row / row.sum(-1, keepdim=True)
    top = (target + draft).topk(kept).indices
    token = top[..., :1]
    trace = {
        "target_prob": target.gather(-1, token)[..., 0], "draft_prob": draft.gather(-1, token)[..., 0],
        "target_top": target.gather(-1, top).log(), "draft_top": draft.gather(-1, top).log(),
        "target_rest": 1 - target.gather(-1, top).sum(-1), "draft_rest": 1 - draft.gather(-1, top).sum(-1),
    }  # fmt: skip
    if kept == 5:
        trace |= {"target_rest": torch.zeros(1, 7).double(), "draft_rest": torch.zeros(1, 7).double()}
    found = logit_blend(weight, trace)
    accepted, substituted = (0.5 * (rows - row).abs().sum(-1) for rows in (draft, target))
    expected = row.gather(-1, token)[..., 0].log(), 1 - accepted, substituted
    for got, want in zip(found, expected, strict=True):
        if kept == 5:  # stored log-probabilities are read as float32
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert (found[0] <= expected[0] + 1e-6).all()
    assert all(((0 <= value) & (value <= 1)).all() for value in found[1:])


def test_a_bounded_gate_prices_the_log_likelihood_that_a_substitution_loses():
    """The gradient opens the gate exactly where a substitution loses fewer nats than its acceptance is worth."""
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(2, 1, 6, 5, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    tv = 0.5 * (target - draft).abs().sum(-1)
    trace = {"tv": tv, "mask": torch.ones(1, 6, dtype=torch.bool), "features": logit_features(draft, target)}
    lost = ((target - draft) * target.log()).sum(-1)
    torch.testing.assert_close(nats_lost(trace).double(), lost.clamp_min(0), rtol=0, atol=1e-5)  # features are float32
    weight = torch.full((1, 6), 0.3, dtype=torch.float64, requires_grad=True)
    loss, excess = bounded(weight, trace, torch.tensor(0.7), bound=2.0)
    torch.testing.assert_close(excess.detach(), 0.3 * lost.clamp_min(0).sum() / 2 - 1, rtol=0, atol=1e-5)
    price = (0.7 + excess.detach()) / 2
    torch.testing.assert_close(gradient(loss, weight), price * nats_lost(trace) - tv / 6, rtol=0, atol=1e-6)
