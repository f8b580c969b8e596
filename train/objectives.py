"""What training maximises, as pure functions of the scalars a trace stores (DIVERSED, arXiv 2604.07622, section 3).

    E over texts drawn from the blend of [reward]  +  lambda * mean over positions of (1 - TV(draft, blend))

For the blend v = (1 - w) p + w q all of it is known from p(token), q(token) and TV(p, q) at each position:

    log v(token) = log((1 - w) p(token) + w q(token)),      1 - TV(q, v) = 1 - (1 - w) TV(p, q),

so no row over the vocabulary is needed and the cost of a step does not depend on V. The first term is REINFORCE with
the mean reward of the prompt's texts as baseline; for texts of an older gate the ratio v_new / v_old of every token is
clipped as in PPO (arXiv 1707.06347). The second term is differentiated directly, with the texts held fixed.

`attribution` (ours) needs no policy gradient. Texts are sampled from the maximal coupling of target and blend, so each
is the target's own but for a recorded list of *substitutions*, and its reward says what they cost. The gate's logit is
read as minus the logarithm of a harm h: a 0/1 reward is fitted as P(success) = base exp(-sum of h over substitutions),
a graded one as base minus that sum. Relaxing a position by w gains w TV acceptance and costs w TV h in expectation, so
under any exchange rate the best gate is a threshold on h; sigmoid(logit + bias) is one, softened, and `bias` moves it.

An objective is a function (output of the gate, trace, settings) -> loss.
`trace` is a batch of B texts padded to T positions, with `mask` [B, T] bool, True at the text's positions. The position
that chose the end-of-text token is one of them: ending a text is a decision like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-30  # a probability below this is a rounding to zero; its logarithm must stay finite


def blend_logprob(weight: Tensor, target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """Log-probability of the token under the blend; weight, target_prob, draft_prob and the result are [...]."""
    return ((1 - weight) * target_prob + weight * draft_prob).clamp_min(TINY).log()


def acceptance(weight: Tensor, tv: Tensor) -> Tensor:
    """Step acceptance 1 - TV(draft, blend), in [0, 1]; weight, tv and the result are [...]."""
    return 1 - (1 - weight) * tv


def substitution(weight: Tensor, tv: Tensor) -> Tensor:
    """Probability that a token is not the target's own, TV(target, blend); weight, tv and the result are [...]."""
    return weight * tv


def policy_gradient(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Loss whose gradient is minus that of E[reward] at logprob == old_logprob: sum over positions, mean over texts.

    logprob, old_logprob: [B, T] of the tokens under the gate now and under the gate that sampled them.
    advantage: [B]; mask: [B, T] bool.
    clip: a ratio outside [1 - clip, 1 + clip] gives no gradient in the direction it already went.
    """
    # Beyond e^20 a ratio is clipped anyway; the bound keeps exp finite.
    ratio = (logprob - old_logprob.detach()).clamp(-20, 20).exp()
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    return -torch.where(mask, gain, 0).sum(1).mean()


def over_positions(value: Tensor, mask: Tensor, how: str = "mean") -> Tensor:
    """Mean over the texts of a text's mean or sum over its positions; value [B, T], mask [B, T] bool. Returns a scalar.

    "sum" is the paper's; it also rewards long texts, "mean" does not.
    """
    total = torch.where(mask, value, 0).sum(1)
    return (total / mask.sum(1) if how == "mean" else total).mean()


def attribution(logit: Tensor, trace: dict[str, Tensor]) -> Tensor:
    """Minus the mean log-likelihood of the rewards where all are 0 or 1, else their mean squared error.

    logit: [B, T] of the gate; exp(-logit) is the harm of a substitution there.
    trace: substituted and mask [B, T]; reward and base [B], base being what the target's own text of that prompt earns.
    """
    harm = torch.where(trace["mask"] & trace["substituted"], (-logit).clamp(-20, 5).exp(), 0).sum(1)
    reward, base = trace["reward"], trace["base"]
    if not ((reward == 0) | (reward == 1)).all():
        return (reward - base + harm).square().mean()
    success = base.clamp(TINY, 1 - 1e-6).log() - harm
    return -torch.where(reward == 1, success, torch.log(-torch.expm1(success))).mean()


def reinforce(
    weight: Tensor, trace: dict[str, Tensor], *, lambda_: float, ratio_clip: float, acceptance_term: str
) -> Tensor:
    """The loss of DIVERSED: minus (reward term + lambda * acceptance term).

    weight: [B, T], the draft's share the gate gives now.
    trace: target_prob, draft_prob, tv, weight (when sampled) and mask [B, T]; advantage [B].
    """
    logprob = blend_logprob(weight, trace["target_prob"], trace["draft_prob"])
    old = blend_logprob(trace["weight"], trace["target_prob"], trace["draft_prob"])
    gain = over_positions(acceptance(weight, trace["tv"]), trace["mask"], acceptance_term)
    return policy_gradient(logprob, old, trace["advantage"], trace["mask"], ratio_clip) - lambda_ * gain
