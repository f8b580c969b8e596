"""Rules that relax a target row without training: what each makes of the two rows of a context.

A rule is two pure functions. `rows` is the relaxed row, for sampling. `token` is its greedy form,
for temperature 0: the token that the rule chooses. The *believed* rows are softmax(logits), without
temperature and filters. Whatever a rule decides it decides by the believed rows, so that it decides
the same at every temperature; what is relaxed are the rows as sampled.

    ensemble:w        (1-w) target + w draft; w is the DRAFT's share (the paper and transformers
                      write 1 - w)
    coin:w            ensemble:w; at temperature 0 the draft's most likely token with probability w,
                      else the target's
    lenient:l         m + (1 - sum m) norm(max(target - draft, 0)), m = min(draft, target/l)
                      (Leviathan 2023)
    mentored:a        target clip(draft/target, b, a): most acceptance for its KL from the target
    cascade-opt:a     the draft's row unless it is too unsure, then the target's; also
                      cascade-diff:a, cascade-chow:a  (Narasimhan 2024, arXiv 2405.19261)
    divergence:t,s    the draft's row where KL(target || draft) <= t and the target's largest
                      probability is at most s, .9 if not given; else the target's  (Sun 2026,
                      arXiv 2601.04766)
    cascade-token:a   the draft's mass kept where target >= (1-a) max target, the rest spread by the
                      target
    typical:e,d       the draft's mass kept where target >= min(e, d exp(-entropy)), the rest spread
                      by the target  (Medusa, arXiv 2401.10774)
    regret:t          the draft's excess taken where log max target - log target <= t
    min-p:m, top-p:m  the target's own row, truncated; the draft has no part in it

The greedy form of a rule that makes one row out of two is the most likely token of that row. That
of a rule that accepts single tokens is the draft's most likely token if the rule accepts it, else
the target's. Ties go to the lowest token id, because `argmax` returns the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = Callable[..., Tensor]
TINY = 1e-30  # a smaller probability counts as this one where its logarithm is taken


@dataclass(frozen=True)
class Rule:
    """One rule.

    rows:     (target, draft, *parameters, believed_target, believed_draft) -> relaxed rows, all
        rows [..., V].
    token:    (believed_target, believed_draft, *parameters) -> [...] the token at temperature 0;
        None for coin, which draws one of two.
    ranges:   (name, low, high, whether low is allowed) of each parameter.
    optional: how many of the last parameters may be left out.
    """

    rows: Rows
    token: Rows | None
    ranges: tuple[tuple[str, float, float, bool], ...] = ()
    optional: int = 0


def ensemble_rows(target: Tensor, draft: Tensor, weight: float, **believed: Tensor) -> Tensor:
    """(1-w) target + w draft."""
    return torch.lerp(target, draft, weight)


def ensemble_token(target: Tensor, draft: Tensor, weight: float | Tensor) -> Tensor:
    """[...] the most likely token of the blend of probabilities; weight: a number or [..., 1]."""
    return torch.lerp(target, draft, weight).argmax(-1)


def geometric_rows(
    target: Tensor, draft: Tensor, weight: Tensor, temperature: float = 1.0
) -> Tensor:
    """(target^(1-w) draft^w)^(1/temperature), normalised; weight [..., 1]."""
    logs = torch.lerp(target.clamp_min(TINY).log(), draft.clamp_min(TINY).log(), weight)
    return (logs / temperature).softmax(-1)


def geometric_token(target: Tensor, draft: Tensor, weight: float | Tensor) -> Tensor:
    """[...] the most likely token of the blend of logarithms; weight: a number or [..., 1]."""
    logs = torch.lerp(target.clamp_min(TINY).log(), draft.clamp_min(TINY).log(), weight)
    return logs.argmax(-1)


def lenient_rows(target: Tensor, draft: Tensor, leniency: float, **believed: Tensor) -> Tensor:
    """m + (1 - sum m) norm(max(target - draft, 0)) with m = min(draft, target / leniency): the
    lossy rule as a row.
    """
    kept = torch.minimum(draft, target / leniency)
    missing = (target - draft).clamp_min_(0)
    total = missing.sum(-1, keepdim=True)
    share = torch.where(total > 0, (1 - kept.sum(-1, keepdim=True)).clamp_min(0) / total, 0)
    # where the rows agree to the last bit nothing is missing, and what is kept sums to 1
    return kept + share * missing


def mentored_rows(target: Tensor, draft: Tensor, cap: float, **believed: Tensor) -> Tensor:
    """target clip(draft/target, b, cap) with b in [0, 1] such that the row sums to 1.

    Of all rows v whose KL(v || target) is at most that of this one, none accepts more. (Mentored
    decoding; Tran-Thien 2023.)

    Proof. A drafted token is accepted with probability A(v) = sum over x of min(draft(x), v(x)).
    This is concave in v, KL(v || target) is convex, and sum v = 1 is linear, so a row at which the
    Lagrangian

        A(v) - lambda KL(v || target) - mu (sum v - 1),    lambda > 0

    is stationary is a maximum among the rows of at most its KL. Where v(x) < draft(x) the
    derivative of A is 1, hence 1 - lambda (log(v/target) + 1) = mu, so v = a target with one a for
    all such x. Where v(x) > draft(x) it is 0, hence v = b target with log a - log b = 1 / lambda,
    so b < a. At v(x) = draft(x) A has a kink, whose derivatives are all of [0, 1]: then
    log(draft/target) lies between log b and log a. All three cases are v = target
    clip(draft/target, b, a), and sum v = 1 fixes b.

    The cap a stands for the bound. a = 1 gives the target's row. From the largest ratio
    draft/target on it gives the draft's. No token exceeds a times its probability.

    b. The sum s(b) of clip(draft, b target, a target) is continuous and does not fall with b; s(0)
    <= 1 because min(draft, a target) <= draft, and s(1) >= 1 because a >= 1. Sort the tokens by
    draft/target. If k tokens have a ratio below b, s(b) = b T + U with T the target's mass of these
    k and U the sum of min(draft, a target) over the others. k is the number of ratios r with
    s(r) < 1, and then b = (1 - U) / T.
    """
    most = torch.minimum(draft, cap * target)
    ratio = torch.where(draft > 0, draft / target, 0)
    ratio, order = ratio.sort(-1)
    mass = target.gather(-1, order).double()
    below = mass.cumsum(-1) - mass  # of the tokens before each
    above = most.gather(-1, order).double().flip(-1).cumsum(-1).flip(-1)  # of it and those behind
    count = (ratio * below + above < 1).sum(-1, keepdim=True)
    last = (count - 1).clamp_min(0)
    mass, above = (below + mass).gather(-1, last), above.gather(-1, last)
    rest = most.gather(-1, order.gather(-1, last)).double()
    floor = torch.where(count > 0, (1 - above + rest).clamp_min(0) / mass, 0).to(target.dtype)
    return torch.maximum(most, floor * target)


def regret_rows(
    target: Tensor, draft: Tensor, threshold: float, *, believed_target: Tensor, **believed: Tensor
) -> Tensor:
    """target + the draft's excess on the tokens of small regret - the same mass of its deficits.

    The regret of x is log max target - log target(x), in nats. The excess max(draft - target, 0) is
    taken whole where the regret is at most the threshold; the deficits max(target - draft, 0) all
    shrink by the same share, so that the row sums to 1. (Ours, after the regret bounds of arXiv
    2608.03447.)

    Why a threshold. Let e(x) in [0, max(draft - target, 0)] be what is added to x, E its sum and D
    the mean regret of the deficits. Acceptance grows by E. The expected log-likelihood lost is
    sum of e(x) (regret(x) - D). Most E for a bound on the sum of e(x) regret(x), in one context or
    over many, is a knapsack whose pieces may be cut: take the pieces of smallest regret first, and
    each as a whole. D is the constant up to which this is the optimum: it differs between contexts,
    and a rule that took it into account would take tokens of regret at most t + D.
    """
    excess = (draft - target).clamp_min_(0)
    taken = excess * _small_regret(believed_target, draft, threshold)
    total = excess.sum(-1, keepdim=True)
    share = torch.where(total > 0, taken.sum(-1, keepdim=True) / total, 0)
    return target + taken - share * (target - draft).clamp_min_(0)


def min_p_rows(target: Tensor, draft: Tensor, least: float, **believed: Tensor) -> Tensor:
    """The target's tokens of at least `least` of its largest probability, renormalised."""
    kept = target * (target >= least * target.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)


def top_p_rows(target: Tensor, draft: Tensor, mass: float, **believed: Tensor) -> Tensor:
    """The target's most likely tokens that have this mass together, renormalised."""
    ordered, order = target.sort(dim=-1, descending=True, stable=True)
    inside = ordered.cumsum(-1) - ordered < mass
    kept = target * torch.zeros_like(inside).scatter_(-1, order, inside)
    return kept / kept.sum(-1, keepdim=True)


def _opt(target: Tensor, draft: Tensor, alpha: float) -> Tensor:
    return draft.amax(-1) >= target.amax(-1) - alpha * 0.5 * (target - draft).abs_().sum(-1)


def _diff(target: Tensor, draft: Tensor, alpha: float) -> Tensor:
    return draft.amax(-1) >= target.amax(-1) - alpha


def _chow(target: Tensor, draft: Tensor, alpha: float) -> Tensor:
    return draft.amax(-1) >= 1 - alpha


def _close(target: Tensor, draft: Tensor, threshold: float, sure: float = 0.9) -> Tensor:
    # The direction is that of the paper's proof and of its authors' code.
    logs = target.clamp_min(TINY).log() - draft.clamp_min(TINY).log()
    return ((target * logs).sum(-1) <= threshold) & (target.amax(-1) <= sure)


def _within_leniency(target: Tensor, draft: Tensor, leniency: float) -> Tensor:
    return target >= leniency * target.amax(-1, keepdim=True)


def _within_alpha(target: Tensor, draft: Tensor, alpha: float) -> Tensor:
    return target >= (1 - alpha) * target.amax(-1, keepdim=True)


def _small_regret(target: Tensor, draft: Tensor, threshold: float) -> Tensor:
    return target >= math.exp(-threshold) * target.amax(-1, keepdim=True)


def _within_cap(target: Tensor, draft: Tensor, cap: float) -> Tensor:
    return draft <= cap * target


def _typical(target: Tensor, draft: Tensor, epsilon: float, delta: float) -> Tensor:
    entropy = -torch.xlogy(target, target).sum(-1, keepdim=True)
    return target >= (delta * torch.exp(-entropy)).clamp(max=epsilon)


def _one_row(takes_draft: Rows) -> tuple[Rows, Rows]:
    """Rows and token of a rule that takes the draft's row where `takes_draft` [...], else the
    target's.
    """

    def rows(target, draft, *parameters, believed_target, believed_draft):
        taken = takes_draft(believed_target, believed_draft, *parameters)
        return torch.where(taken.unsqueeze(-1), draft, target)

    def token(target, draft, *parameters):
        taken = takes_draft(target, draft, *parameters)
        return torch.where(taken, draft.argmax(-1), target.argmax(-1))

    return rows, token


def _spread(accepts: Rows) -> Rows:
    """Rows of a rule that keeps the draft's mass on `accepts` [..., V]; the rest is spread by the
    target.
    """

    def rows(target, draft, *parameters, believed_target, believed_draft):
        accepted = accepts(believed_target, believed_draft, *parameters)
        return draft * accepted + target * (draft * ~accepted).sum(-1, keepdim=True)

    return rows


def _draft_if(accepts: Rows) -> Rows:
    """Token of a rule: the draft's most likely one where `accepts` [..., V] holds, else the
    target's.
    """

    def token(target, draft, *parameters):
        wanted = draft.argmax(-1)
        accepted = accepts(target, draft, *parameters).gather(-1, wanted.unsqueeze(-1))
        return torch.where(accepted.squeeze(-1), wanted, target.argmax(-1))

    return token


def _targets_token(target: Tensor, draft: Tensor, *parameters: float) -> Tensor:
    return target.argmax(-1)


_ALPHA = ("alpha", 0, 1, True)
RULES = {
    "none": Rule(lambda target, draft, **believed: target, _targets_token),
    "ensemble": Rule(ensemble_rows, ensemble_token, (("weight", 0, 1, True),)),
    "coin": Rule(ensemble_rows, None, (("weight", 0, 1, True),)),
    "lenient": Rule(lenient_rows, _draft_if(_within_leniency), (("leniency", 0, 1, False),)),
    "mentored": Rule(mentored_rows, _draft_if(_within_cap), (("cap", 1, math.inf, True),)),
    "cascade-opt": Rule(*_one_row(_opt), (_ALPHA,)),
    "cascade-diff": Rule(*_one_row(_diff), (_ALPHA,)),
    "cascade-chow": Rule(*_one_row(_chow), (_ALPHA,)),
    "divergence": Rule(
        *_one_row(_close), (("threshold", 0, math.inf, True), ("sure", 0, 1, True)), optional=1
    ),
    "cascade-token": Rule(_spread(_within_alpha), _draft_if(_within_alpha), (_ALPHA,)),
    "typical": Rule(
        _spread(_typical),
        _draft_if(_typical),
        (("epsilon", 0, 1, True), ("delta", 0, math.inf, True)),
    ),
    "regret": Rule(regret_rows, _draft_if(_small_regret), (("threshold", 0, math.inf, True),)),
    "min-p": Rule(min_p_rows, _targets_token, (("least", 0, 1, True),)),
    "top-p": Rule(top_p_rows, _targets_token, (("mass", 0, 1, False),)),
}
