"""What training maximises, as pure functions of the scalars a trace stores (DIVERSED, arXiv
2604.07622, section 3).

    E over texts drawn from the blend of [reward]  +  lambda * mean over positions of (1 - TV(draft,
    blend))

For the blend v = (1 - w) p + w q all of it is known from p(token), q(token) and TV(p, q) at each
position:

    log v(token) = log((1 - w) p(token) + w q(token)),      1 - TV(q, v) = 1 - (1 - w) TV(p, q),

so no row over the vocabulary is needed and the cost of a step does not depend on V. The first term
is REINFORCE with the mean reward of the prompt's texts as baseline; for texts of an older head the
ratio v_new / v_old of every token is clipped as in PPO (arXiv 1707.06347). The second term is
differentiated directly, with the texts held fixed.

`attribution` (ours) needs no policy gradient. Texts are sampled from the maximal coupling of target
and blend, so each is the target's own but for a recorded list of *substitutions*, and its reward
says what they cost. The head's logit is
read as minus the logarithm of a harm h: a 0/1 reward is fitted as P(success) = base exp(-sum of h
over substitutions), a graded one as base minus that sum. Relaxing a position by w gains w TV
acceptance and costs w TV h in expectation, so under any exchange rate the best head is a threshold
on h; sigmoid(logit + bias) is one, softened, and `bias` moves it.

Labels of importance (`data.importance`) say the same thing directly, position by position. If the
traces hold some, `attribution` adds their log-likelihood under the same harm: a substitution spoils
with probability 1 - exp(-h). `judge` (AutoJudge, arXiv 2504.20039) fits labels alone by logistic
regression: the logit is minus the log odds of harm.

`bounded` (ours) needs no rewards: most step acceptance for a bound on the nats of the target's
log-likelihood that a text is expected to lose. A step relaxed by w loses w (E_q[-log p] - E_p[-log
p]), which the stored features hold, and gains w TV acceptance; so the best head is a threshold on
nats lost a substitution. A bound on substitutions themselves
could not choose between steps: each gains w TV acceptance for w TV substitutions.

With `blend: logits` (the paper's code) v is proportional to p^(1-w) q^w, whose scalars need a sum
over the vocabulary: it is taken over the tokens that a trace stores, the rest counting as one
token, which bounds its share from above.

An objective is a function (output of the head, trace, settings) -> loss. `trace` is a batch of B
texts padded to T positions, with `mask` [B, T] bool, True at the text's positions. The position
that chose the end-of-text token is one of them: ending a text is a decision like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..verifier.head import FEATURES

COLUMN = {name: index for index, name in enumerate(FEATURES)}
TINY = 1e-30  # a probability below this is a rounding to zero; its logarithm must stay finite


def blend_logprob(weight: Tensor, target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """Log-probability of the token under the blend; weight, target_prob, draft_prob and the result
    are [...].
    """
    return ((1 - weight) * target_prob + weight * draft_prob).clamp_min(TINY).log()


def acceptance(weight: Tensor, tv: Tensor) -> Tensor:
    """Step acceptance 1 - TV(draft, blend), in [0, 1]; weight, tv and the result are [...]."""
    return 1 - (1 - weight) * tv


def substitution(weight: Tensor, tv: Tensor) -> Tensor:
    """Probability that a token is not the target's own, TV(target, blend); weight, tv and the
    result are [...].
    """
    return weight * tv


def probability_blend(weight: Tensor, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(log v(token), 1 - TV(q, v), TV(p, v)) at every position for v = (1 - w) p + w q; weight and
    results [B, T].
    """
    logprob = blend_logprob(weight, trace["target_prob"], trace["draft_prob"])
    return logprob, acceptance(weight, trace["tv"]), substitution(weight, trace["tv"])


def logit_blend(weight: Tensor, trace: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The same for v proportional to p^(1-w) q^w.

    trace: target_top, draft_top [B, T, K], log-probabilities of the stored tokens, and target_rest,
    draft_rest [B, T], the probability of all others.
    """
    share = weight.unsqueeze(-1)
    target, draft = (
        torch.cat(
            [
                trace[f"{name}_top"].float(),
                trace[f"{name}_rest"].clamp_min(TINY).log().unsqueeze(-1),
            ],
            -1,
        )
        for name in ("target", "draft")
    )
    mixed = (1 - share) * target + share * draft
    total = mixed.logsumexp(-1)
    row = (mixed - total.unsqueeze(-1)).exp()
    own = (1 - weight) * trace["target_prob"].clamp_min(TINY).log() + weight * trace[
        "draft_prob"
    ].clamp_min(TINY).log()
    accepted = 1 - 0.5 * (draft.exp() - row).abs().sum(-1)
    return own - total, accepted, 0.5 * (target.exp() - row).abs().sum(-1)


BLENDS = {"probabilities": probability_blend, "logits": logit_blend}


def nats_lost(trace: dict[str, Tensor]) -> Tensor:
    """[B, T] what the target's log-likelihood of a token is expected to lose under the draft's row,
    nats, at least 0.

    E_q[-log p] - E_p[-log p] = KL(draft || target) + entropy of the draft - entropy of the target,
    out of `features`.
    """
    kl, draft, target = (
        trace["features"][..., COLUMN[name]] for name in ("kl", "draft_entropy", "target_entropy")
    )
    return (kl + draft - target).clamp_min(0)


def policy_gradient(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor, clip: float
) -> Tensor:
    """Loss whose gradient is minus that of E[reward] at logprob == old_logprob: sum over positions,
    mean over texts.

    logprob, old_logprob: [B, T] of the tokens under the head now and under the head that sampled
        them.
    advantage: [B]; mask: [B, T] bool.
    clip: a ratio outside [1 - clip, 1 + clip] gives no gradient in the direction it already went.
    """
    # Beyond e^20 a ratio is clipped anyway; the bound keeps exp finite.
    ratio = (logprob - old_logprob.detach()).clamp(-20, 20).exp()
    gain = torch.minimum(
        ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None]
    )
    return -torch.where(mask, gain, 0).sum(1).mean()


def over_positions(value: Tensor, mask: Tensor, how: str = "mean") -> Tensor:
    """Mean over the texts of a text's mean or sum over its positions; value [B, T], mask [B, T]
    bool. Returns a scalar.

    "sum" is the paper's; it also rewards long texts, "mean" does not.
    """
    total = torch.where(mask, value, 0).sum(1)
    return (total / mask.sum(1) if how == "mean" else total).mean()


def attribution(logit: Tensor, trace: dict[str, Tensor]) -> Tensor:
    """Minus the mean log-likelihood of the rewards where all of the traces are 0 or 1, else their
    mean squared error; and of the labels, if there are any.

    logit: [B, T] of the head; exp(-logit) is the harm of a substitution there.
    trace: substituted and mask [B, T]; reward and base [B], base being what the target's own text
        of that prompt earns; graded [B] bool, whether any reward of the traces, not of this batch
        alone, is neither 0 nor 1; perhaps harm [B, T], see `labelled`.
    """
    told = labelled_harm(logit, trace) if "harm" in trace else 0
    harm = torch.where(trace["mask"] & trace["substituted"], harm_of(logit), 0).sum(1)
    reward, base = trace["reward"], trace["base"]
    if trace["graded"].any():
        return (reward - base + harm).square().mean() + told
    success = base.clamp(TINY, 1 - 1e-6).log() - harm
    return told - torch.where(reward == 1, success, torch.log(-torch.expm1(success))).mean()


def harm_of(logit: Tensor) -> Tensor:
    """[...] exp(-logit), the harm of a substitution; the bounds keep it above 0 and finite."""
    return (-logit).clamp(-20, 5).exp()


def labelled(trace: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(harm [B, T] in [0, 1], 0 where there is no label; labelled [B, T] bool).

    trace: harm [B, T], NaN where there is no label; mask [B, T].
    """
    known = trace["mask"] & ~trace["harm"].isnan()
    return torch.where(known, trace["harm"], 0), known


def labelled_harm(logit: Tensor, trace: dict[str, Tensor]) -> Tensor:
    """[] minus the log-likelihood of the labels, sum over a text's and mean over texts, with
    P(harm) = 1 - exp(-h) and h = exp(-logit); the squared error of h itself for graded rewards.
    """
    harm, known = labelled(trace)
    rate = harm_of(logit)
    if trace["graded"].any():
        error = (rate - harm).square()
    else:
        error = (1 - harm) * rate - harm * torch.log(-torch.expm1(-rate))
    return torch.where(known, error, 0).sum(1).mean()


def judge(logit: Tensor, trace: dict[str, Tensor]) -> Tensor:
    """[] cross-entropy of the labels, sum over a text's and mean over texts; P(harm) =
    sigmoid(-logit).
    """
    harm, known = labelled(trace)
    error = (1 - harm) * functional.softplus(-logit) + harm * functional.softplus(logit)
    return torch.where(known, error, 0).sum(1).mean()


def bounded(
    weight: Tensor,
    trace: dict[str, Tensor],
    price: Tensor,
    *,
    bound: float,
    over_all: Callable[[Tensor], Tensor] = lambda own: own,
) -> tuple[Tensor, Tensor]:
    """(augmented Lagrangian of step acceptance under the bound, excess); rewards are not looked at.

    excess = nats lost a text / bound - 1; the Lagrangian is price * excess + excess^2 / 2 - step
    acceptance, whose quadratic term keeps a linear problem from swinging between its ends.
    weight: [B, T]; price: [] of an excess of 1; dual ascent finds it.
    over_all: the excess of these texts -> that of all the processes' texts.
    """
    own = over_positions(weight * nats_lost(trace), trace["mask"], "sum") / bound - 1
    excess = over_all(own.detach())
    gain = over_positions(acceptance(weight, trace["tv"]), trace["mask"])
    # With excess held fixed the gradient of the square's half is excess times that of this
    # process's part.
    return (price + excess) * own - excess.square() / 2 - gain, excess


def reinforce(
    weight: Tensor,
    trace: dict[str, Tensor],
    *,
    lambda_: float,
    ratio_clip: float,
    acceptance_term: str,
    blend: str = "probabilities",
) -> Tensor:
    """The loss of DIVERSED: minus (reward term + lambda * acceptance term).

    weight: [B, T], the draft's share that the head gives now.
    trace: target_prob, draft_prob, tv, weight (when sampled) and mask [B, T]; advantage [B].
    """
    logprob, accepted, _ = BLENDS[blend](weight, trace)
    old, _, _ = BLENDS[blend](trace["weight"], trace)
    gain = over_positions(accepted, trace["mask"], acceptance_term)
    return (
        policy_gradient(logprob, old, trace["advantage"], trace["mask"], ratio_clip)
        - lambda_ * gain
    )
