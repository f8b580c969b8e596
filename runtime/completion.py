"""What is asked for one prompt, and what became of it: its text and what the text cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# A stop string is looked for in this many more tokens than it has characters: a token may hold part
# of a character.
MARGIN = 8


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    tokens:     of the prompt, at least one.
    seed:       of its random numbers, which depend on it and on the position in the text alone.
    new_tokens: tokens the text may have.
    stop:       strings that end the text and are cut off.
    """

    tokens: list[int]
    seed: int
    new_tokens: int
    stop: tuple[str, ...] = ()


def check_stop(stop: Sequence[str]) -> None:
    """ValueError for a stop string that would end every text, or one text given for a list of
    them.
    """
    if isinstance(stop, str) or not all(stop):
        raise ValueError(f"`stop` must be a list of texts, none empty, got {stop!r}")


@dataclass
class Completion:
    """What became of one prompt. Counts leave out everything after the end of the text.

    tokens:        new tokens, the end token included where the text is `finished`.
    text:          decoded, without special tokens, cut before the stop string.
    finished:      ended by an end token or a stop string, not by `max_new_tokens`.
    drafted:       drafted tokens that the target checked.
    accepted:      drafted tokens that were kept; the extra token of a step is not one of them.
    target_calls, draft_calls: calls in which this request took part; the prefill is not counted.
    drafted_by_depth, accepted_by_depth: steps that drafted to a depth, and that accepted at least
        so far.
    substitutions: expected number of tokens that differ from the target's own choice, sum of
        TV(target, relaxed row).
    weight_sum, weight_count: over committed positions where the draft was run; their ratio is
        `mean_weight`.
    seconds:       wall time from the prefill of its prompt to its end.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    drafted: int = 0
    accepted: int = 0
    target_calls: int = 0
    draft_calls: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    substitutions: float = 0.0
    weight_sum: float = 0.0
    weight_count: int = 0
    seconds: float = 0.0

    def add_step(
        self,
        new: list[int],
        accepted: int,
        drafted: list[int],
        depth: int,
        cost: list[float],
        share: list[float],
    ) -> None:
        """Add one target call.

        new:         tokens it committed, up to the end of the text.
        accepted:    how many of them were drafted.
        drafted:     depth of every drafted token that the target checked and that does not lie
                     after the end.
        depth:       of the deepest tree that a step may grow.
        cost, share: substitutions and the draft's share at the positions from the root on; share is
                     nan where the draft was not run.
        """
        reached = max(drafted, default=0)
        for counts, deepest in (
            (self.drafted_by_depth, reached),
            (self.accepted_by_depth, accepted),
        ):
            counts += [0] * (depth - len(counts))
            counts[:deepest] = [count + 1 for count in counts[:deepest]]
        self.tokens += new
        self.drafted += len(drafted)
        self.accepted += accepted
        self.target_calls += 1
        self.substitutions += sum(cost[: len(new)])
        weights = [weight for weight in share[: len(new)] if not math.isnan(weight)]
        self.weight_sum += sum(weights)
        self.weight_count += len(weights)

    @property
    def mean_weight(self) -> float:
        """Mean share of the draft; nan where the draft was never run."""
        return self.weight_sum / self.weight_count if self.weight_count else float("nan")

    @property
    def tokens_per_target_call(self) -> float:
        """New tokens per target call, the extra token counted, nothing after the end of the
        text.
        """
        return len(self.tokens) / self.target_calls if self.target_calls else 0.0


class Stream:
    """A text as its tokens are committed: every character once, and none that a stop string may
    still take back.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.given = 0

    def add(self, new: list[int], ended: bool) -> str:
        """The characters that these tokens make certain; all that are left where they end the
        text.
        """
        self.tokens += new
        text = cut(self.tokenizer.decode(self.tokens, skip_special_tokens=True), self.stop)
        if not ended:
            text = text.rstrip("\ufffd")  # bytes of a character whose others are still to come
            text = text[: len(text) - beginning(text, self.stop)]
        piece, self.given = text[self.given :], max(self.given, len(text))
        return piece


def beginning(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of the text with which a stop string begins."""
    ends = (
        length
        for string in stop
        for length in range(1, len(string))
        if text.endswith(string[:length])
    )
    return max(ends, default=0)


def stopped(tokenizer, tokens: list[int], stop: tuple[str, ...]) -> bool:
    """Whether a stop string stands at the end of the text; looks at its last tokens only."""
    if not stop:
        return False
    tail = tokenizer.decode(tokens[-max(map(len, stop)) - MARGIN :], skip_special_tokens=True)
    return any(string in tail for string in stop)


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    return text[: min((text.find(string) for string in stop if string in text), default=len(text))]
