"""What `--model.objective` chooses: the objectives, each with its options.

The mathematics stands in objectives.py. A new objective is a file with a class like those below,
and an entry in OBJECTIVES: its options appear on the command line, and the tests of OBJECTIVES run
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .objectives import BLENDS, attribution, bounded, judge, reinforce

PRICE_STEP = 0.05  # of the dual ascent


class Objective(nn.Module):
    """The loss of a head. What it learns besides the head, it holds in buffers.

    summary:  what the help of `--model.objective` says about it.
    Options:  a frozen dataclass of options that are its own; all of them have defaults.
    blends:   the blends that it can train for.
    compares: whether it compares the texts of a prompt, so that one text a prompt teaches nothing.
    harms:    whether exp(-logit) is the harm of a substitution, so that the reward at every
              threshold can be predicted.
    labels:   whether it reads labels of importance: no, some if there are any, all it reads.
    """

    summary: ClassVar[str]
    Options: ClassVar[type | None] = None
    blends: ClassVar[tuple[str, ...]] = ("probabilities",)
    compares: ClassVar[bool] = False
    harms: ClassVar[bool] = False
    labels: ClassVar[Literal["no", "some", "all"]] = "no"

    def __init__(self, options: Any):
        super().__init__()
        self.options = options

    @staticmethod
    def check(options: Any) -> None:
        """ValueError with a sentence if an option of its own cannot be used."""

    def first_logit(self, weight: Tensor) -> Tensor:
        """[] the constant that the head starts from; weight [X] of the traces.

        At the traces' own mean weight the ratios v_new / v_old are 1.
        """
        return torch.logit(weight.mean().clamp(0.01, 0.99))

    def forward(
        self, logit: Tensor, batch: dict[str, Tensor], over_all: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """[] the loss of a batch.

        logit:    [B, T] the head's output.
        over_all: the mean over these texts -> the mean over the texts of all processes.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ReinforceOptions:
    """Options of the policy gradient.

    Args:
        lambda_: weight of the acceptance term beside the reward; larger is faster and further from
            the target.
        ratio_clip: a token's v_new / v_old counts within [1 - ratio_clip, 1 + ratio_clip].
        acceptance: mean of step acceptance over a text's positions, or the paper's sum, which
            rewards long texts.
        blend: probabilities, or logits as in the paper's code: v proportional to p^(1-w) q^w.
    """

    lambda_: float = 1.0
    ratio_clip: float = 0.2
    acceptance: Literal["mean", "sum"] = "mean"
    blend: Literal["probabilities", "logits"] = "probabilities"


class Reinforce(Objective):
    """The paper's policy gradient with an acceptance term, on texts of an older head."""

    summary = "the paper's loss off-policy, with a clipped ratio; on-policy: diversed reinforce"
    Options = ReinforceOptions
    blends = tuple(BLENDS)
    compares = True

    @staticmethod
    def check(options: ReinforceOptions) -> None:
        at_least_0(ratio_clip=options.ratio_clip)
        if not math.isfinite(options.lambda_):
            raise ValueError(f"`lambda_` must be a finite number, got {options.lambda_}")

    def forward(self, logit: Tensor, batch: dict[str, Tensor], over_all: Callable) -> Tensor:
        return reinforce(
            torch.sigmoid(logit),
            batch,
            lambda_=self.options.lambda_,
            ratio_clip=self.options.ratio_clip,
            acceptance_term=self.options.acceptance,
            blend=self.options.blend,
        )


class Attribution(Objective):
    """The harm of a substitution, by maximum likelihood of the rewards and of the labels."""

    summary = "ours: what a substitution costs, by maximum likelihood of rewards and labels"
    harms = True
    labels = "some"

    def first_logit(self, weight: Tensor) -> Tensor:
        """A harm of exp(-1), from where a few substitutions a text explain some failures."""
        return torch.ones(())

    def forward(self, logit: Tensor, batch: dict[str, Tensor], over_all: Callable) -> Tensor:
        return attribution(logit, batch)


class Judge(Objective):
    """The odds of harm, by logistic regression on labels of importance."""

    summary = "AutoJudge's: the odds of harm, from labels that `gather --label` wrote"
    labels = "all"

    def first_logit(self, weight: Tensor) -> Tensor:
        """Even odds; nothing is known yet."""
        return torch.zeros(())

    def forward(self, logit: Tensor, batch: dict[str, Tensor], over_all: Callable) -> Tensor:
        return judge(logit, batch)


@dataclass(frozen=True)
class BoundedOptions:
    """Options of the bounded objective.

    Args:
        bound: nats of the target's log-likelihood that a text may be expected to lose, for the
            objective `bounded`.
    """

    bound: float = 10.0


class Bounded(Objective):
    """Most acceptance under a bound; dual ascent finds the price of exceeding it."""

    summary = "ours: without rewards, most acceptance for a bound on the log-likelihood lost"
    Options = BoundedOptions

    def __init__(self, options: BoundedOptions):
        super().__init__(options)
        self.register_buffer("price", torch.ones(()))

    @staticmethod
    def check(options: BoundedOptions) -> None:
        if not 0 < options.bound < math.inf:
            raise ValueError(
                f"`bound` must be a positive number of nats a text, got {options.bound}"
            )

    def forward(self, logit: Tensor, batch: dict[str, Tensor], over_all: Callable) -> Tensor:
        weight, bound = torch.sigmoid(logit), self.options.bound
        loss, excess = bounded(weight, batch, self.price.clone(), bound=bound, over_all=over_all)
        if self.training:  # what exceeds the bound raises the price
            self.price.add_(PRICE_STEP * excess).clamp_(min=0)
        return loss


OBJECTIVES: dict[str, type[Objective]] = {
    "reinforce": Reinforce,
    "attribution": Attribution,
    "bounded": Bounded,
    "judge": Judge,
}


def own_options() -> tuple[type, ...]:
    """The options of all objectives, which the options of a head consist of in part."""
    return tuple(objective.Options for objective in OBJECTIVES.values() if objective.Options)


def at_least_0(**numbers: float) -> None:
    """ValueError for a number that is negative or not finite."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"`{name}` must be a number of at least 0, got {number}")
