"""What the first texts of a gathering say of all of it, and the weight that they ask for.

A head learns from texts that fail and from texts that succeed. Texts that are cut at the token
limit, or a task that nearly every text fails, teach next to nothing, and a gathering may take a
day. So its first units are looked at, until they hold LOOKED_AT texts.

The share of exact texts' successes that is kept at weight w is taken as exp(-c w): each position
is substituted with probability w TV, and each substitution does harm with the same probability.
A trial at one weight gives c, and exp(-c w) = 1/2 gives the weight at which both kinds of text are
plenty.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from ..verifier.head import FEATURES
from .traces import Shard

LEAST_FINISHED = 0.5
LEAST_OF_A_KIND = 0.1  # of the texts succeed, and as many fail
ENOUGH = 32  # texts: of fewer a share below half may be chance, so the test decides
LOOKED_AT = 128  # texts: after so many units nothing more is learned about the share of a kind
LEVEL = 0.05  # of the exact binomial tests
NUMBERS = len(FEATURES) + 1  # of a linear head on the features of the rows
EVENTS = 10  # failed and succeeded texts for each number that is learned, a rule of thumb
FIRST_WEIGHT = 0.3
KEPT = (0.25, 0.75)  # a trial in between tells c well enough
FACTOR = 3.0  # between the weights that are tried
SMALLEST, LARGEST = 0.01, 1.0


@dataclass(frozen=True)
class FirstLook:
    """Figures of one unit of texts.

    texts:         number of texts.
    finished:      of them end with an end token or a stop string.
    rewards:       [texts] the task's scores.
    substitutions: mean number of substituted tokens in a text.
    untouched:     rewards of the texts without a substitution.
    """

    texts: int
    finished: int
    rewards: list[float]
    substitutions: float
    untouched: list[float]

    @classmethod
    def of(cls, *shards: Shard) -> FirstLook:
        """The figures of one shard or several."""
        counts, rewards, finished = [], [], 0
        for shard in shards:
            spans = pairwise(shard.start.tolist())
            counts += [int(shard.substituted[start:end].sum()) for start, end in spans]
            rewards += shard.reward.tolist()
            finished += int(shard.finished.sum())
        alone = [reward for reward, count in zip(rewards, counts, strict=True) if not count]
        return cls(len(rewards), finished, rewards, sum(counts) / len(rewards), alone)

    @property
    def reward(self) -> float:
        """The mean reward."""
        return fmean(self.rewards)

    @property
    def successes(self) -> int | None:
        """Texts of reward 1 if every reward is 0 or 1, else None."""
        return int(sum(self.rewards)) if set(self.rewards) <= {0.0, 1.0} else None

    def __str__(self) -> str:
        alone = "none is without a substitution"
        if self.untouched:
            count = len(self.untouched)
            alone = f"{fmean(self.untouched):.3f} in the {count} without a substitution"
        return (
            f"first {self.texts} texts: {self.finished / self.texts:.0%} finished, mean"
            f" reward {self.reward:.3f} ({alone}), {self.substitutions:.1f} substitutions a text"
        )

    def said(self) -> str:
        """The figures, and how many texts of this kind a linear head wants."""
        needed = self.needed(NUMBERS)
        return f"{self}; a linear head wants about {needed:,} such texts" if needed else str(self)

    def objection(self, limit: int) -> str | None:
        """Why more texts of this kind would teach little, None if nothing speaks against them.

        limit: most new tokens of a text.
        """
        return self.cut(limit) or self.failing() or self.spotless() or self._equal()

    def cut(self, limit: int) -> str | None:
        """The sentence for texts that mostly end at the limit of new tokens."""
        enough = self.texts >= ENOUGH or rare(self.finished, self.texts, LEAST_FINISHED)
        if self.finished >= LEAST_FINISHED * self.texts or not enough:
            return None
        return (
            f"only {self.finished} of the first {self.texts} texts ended before `max_new_tokens`"
            f" {limit}, and a cut text has no answer: raise it, or show the models short answers"
            " first (--data.shots 2)"
        )

    def failing(self) -> str | None:
        """The sentence for texts that hardly ever succeed."""
        if self.successes is None or not rare(self.successes, self.texts, LEAST_OF_A_KIND):
            return None
        return f"only {self.successes} of the first {self.texts} texts succeed{self._cause()}"

    def spotless(self) -> str | None:
        """The sentence for texts that hardly ever fail."""
        if self.successes is None:
            return None
        failures = self.texts - self.successes
        if not rare(failures, self.texts, LEAST_OF_A_KIND):
            return None
        return (
            f"only {failures} of the first {self.texts} texts fail, so nothing shows which"
            " substitutions do harm: choose a larger weight (--relaxation auto does)"
        )

    def _equal(self) -> str | None:
        if self.successes is not None or len(set(self.rewards)) > 1 or self.texts == 1:
            return None
        return f"all {self.texts} rewards are {self.reward:g}, so there is nothing to learn from"

    def _cause(self) -> str:
        if not self.untouched:
            return (
                ", and none is without a substitution to tell whether the target succeeds: choose a"
                " smaller weight (--relaxation auto finds one, and looks at the target alone)"
            )
        if fmean(self.untouched) > self.reward:
            return (
                f", but {fmean(self.untouched):.0%} of those without a substitution do: choose a"
                " smaller weight (--relaxation auto does)"
            )
        return (
            ", those without a substitution no more often: the target may need worked examples"
            " (--data.shots 2), a chat template, a lower temperature or another task"
        )

    def needed(self, numbers: int) -> int | None:
        """Texts that hold `EVENTS` successes and failures for each of `numbers` learned numbers, at
        this unit's share of both; None if a kind is missing or rewards are not 0 and 1.
        """
        if not self.successes or self.successes == self.texts:
            return None
        rarer = min(self.successes, self.texts - self.successes) / self.texts
        return math.ceil(EVENTS * numbers / rarer)


def choose_weight(trial: Callable[[float], FirstLook]) -> tuple[float, float]:
    """(the draft's share at which about half of the target's successes are kept, the share of them
    that was kept at the last weight that was tried).

    trial: the figures of one unit sampled at a weight; weight 0 is exact decoding.
    """
    exact = trial(0.0)
    if exact.reward <= 0:
        raise ValueError(
            f"no text of the target alone succeeds in the first {exact.texts}, so no weight can be"
            " chosen by what a substitution spoils; the target may need worked examples"
            " (--data.shots 2), a chat template or another task"
        )
    weight, direction = FIRST_WEIGHT, 0
    while True:
        kept = trial(weight).reward / exact.reward
        towards = (kept > KEPT[1]) - (kept < KEPT[0])
        another = min(float(f"{weight * FACTOR**towards:.2g}"), LARGEST)
        if not towards or towards == -direction or another == weight or another < SMALLEST:
            break
        weight, direction = another, towards
    # A share of 0 or 1 says no more than that half a text was kept or lost.
    margin = 0.5 / exact.texts
    rate = -math.log(min(max(kept, margin), 1 - margin)) / weight
    chosen = min(max(math.log(2) / rate, SMALLEST), LARGEST)
    return float(f"{chosen:.2g}"), kept


def rare(count: int, texts: int, share: float) -> bool:
    """Whether `count` of `texts` or fewer would come with a probability below LEVEL if each came
    with probability `share` or more (exact binomial test).
    """
    terms = (math.comb(texts, k) * share**k * (1 - share) ** (texts - k) for k in range(count + 1))
    return sum(terms) < LEVEL
