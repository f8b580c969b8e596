"""What is asked for one prompt, and what became of it: its text and what the text cost."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

# Tokens that are looked at for a stop string beyond one for each of its characters.
MARGIN = 8
# What a decoder writes for bytes that are no character, or not yet.
BROKEN = "\ufffd"
# Characters at the end of a text that a decoder that tidies spaces may still change: " 've".
TIDIED = 4
# Tokens at the end that may belong to one character: three of its bytes, and an end token.
PARTS = 4
BYTE = re.compile("<0x[0-9A-F]{2}>")


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
    """ValueError for a stop string that would end every text or is no text, and for one text in
    place of a list.
    """
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"`stop` must be a list of texts, none empty, got {stop!r}")
    for text in stop:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"`stop` must be UTF-8, got other bytes in {text!r}") from None


@dataclass
class Completion:
    """What became of one prompt. Counts leave out everything after the end of the text.

    tokens:        new tokens, the end token included where the text is `finished`.
    text:          decoded, without special tokens, cut before the stop string.
    finished:      ended by an end token or a stop string, not by `max_new_tokens`.
    drafted:       drafted tokens that the target checked.
    accepted:      drafted tokens that were kept; the bonus token of a step is not one of them.
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
        """New tokens per target call, the bonus token counted, nothing after the end of the
        text.
        """
        return len(self.tokens) / self.target_calls if self.target_calls else 0.0


class Stops:
    """The stop strings of a text, and what they leave of it.

    A stop string is looked for in the text as it is decoded without special tokens; one that holds
    the name of a special token, such as `<|im_end|>`, also in the text with them. The first token
    that completes a stop string ends the text, which is cut where a stop string first begins. A
    space that a tokenizer drops at the beginning of a text counts as there.
    """

    def __init__(self, tokenizer, strings: Sequence[str] = ()):
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        self.longest = max(map(len, strings), default=0)
        self.special: dict[int, str] = {}
        if strings:
            added = tokenizer.added_tokens_decoder.items()
            self.special = {token: str(name) for token, name in added if name.special}
        named = [text for text in strings if any(name in text for name in self.special.values())]
        self.named = tuple(named)

    def ended(self, tokens: list[int]) -> bool:
        """Whether the last of these tokens completes a stop string; the others did not."""
        for strings, whole in ((self.strings, False), (self.named, True)):
            if strings and _first(self._tail(tokens, whole), strings) is not None:
                # The end of a text may be decoded otherwise than in the whole, which is cut.
                if _first(self._text(tokens, whole), strings) is not None:
                    return True
        return False

    def cut(self, tokens: list[int]) -> str:
        """The text before the first stop string, without special tokens."""
        text = self._text(tokens)
        spaced = text[: _first(text, self.strings)]
        if self.named:
            whole = self._text(tokens, True)
            if (end := _first(whole, self.named)) is not None:
                spaced = min(spaced, self._shown(tokens, whole, end), key=len)
        return spaced[self._dropped(tokens) :]

    def certain(self, tokens: list[int]) -> str:
        """What of the text no later token can change, if no stop string stands in it."""
        while tokens and self._is_part(tokens[-1]):
            tokens = tokens[:-1]
        text = self._text(tokens).rstrip(BROKEN)
        if getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            text = text[:-TIDIED]
        spaced = text[: len(text) - beginning(text, self.strings)]
        if self.named:
            whole = self._text(tokens, True)
            if begun := beginning(whole, self.named):
                spaced = min(spaced, self._shown(tokens, whole, len(whole) - begun), key=len)
        return spaced[self._dropped(tokens) :]

    def _text(self, tokens: list[int], whole: bool = False) -> str:
        """The text as decoded. A tokenizer with bytes as tokens loses a run of them for one broken
        character at its end; here only that character is lost.
        """
        text, shorter = self._decoded(tokens, whole), tokens
        while text.endswith(BROKEN) and len(tokens) - len(shorter) < PARTS:
            if not shorter or not self._is_part(shorter[-1]):
                break
            shorter = shorter[:-1]
            before = self._decoded(shorter, whole)
            if not before.endswith(BROKEN):
                return before + BROKEN
        return text

    def _decoded(self, tokens: list[int], whole: bool) -> str:
        """With special tokens if `whole`, and with the spaces that were dropped."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=not whole)
        return " " * self._dropped(tokens) + text

    def _tail(self, tokens: list[int], whole: bool) -> str:
        """The text from before every stop string that the last token could complete."""
        count = self.longest + MARGIN
        last = len(self._decoded(tokens[-1:], whole))
        while True:
            text = self._text(tokens[-count:], whole)
            enough = len(text) - last > self.longest and not text.startswith(BROKEN)
            if enough or count >= len(tokens):
                return text
            count *= 2

    def _shown(self, tokens: list[int], whole: str, end: int) -> str:
        """The text without special tokens of the first `end` characters of the `whole` one."""
        count = len(tokens)
        while len(self._decoded(tokens[:count], True)) > end:
            count -= 1
        kept = len(self._decoded(tokens[:count], True))
        begun = tokens[count : count + 1]  # the token in which a stop string begins
        rest = "" if self.special.keys() & begun else whole[kept:end]
        return self._decoded(tokens[:count], False) + rest

    def _dropped(self, tokens: list[int]) -> int:
        """How many spaces of the first word decoding drops; asked only for stop strings."""
        if not self.strings or not tokens:
            return 0
        piece, text = self._piece(tokens[0]), self.tokenizer.decode(tokens[:1])
        spaces = len(piece) - len(piece.lstrip("\u2581"))
        return max(0, spaces - len(text) + len(text.lstrip(" ")))

    def _is_part(self, token: int) -> bool:
        """Whether it is a byte of a character, or a special token, which may stand between two."""
        shown = self.tokenizer.decode([token], skip_special_tokens=True)
        return not shown or bool(BYTE.fullmatch(self._piece(token)))

    def _piece(self, token: int) -> str:
        return self.tokenizer.convert_ids_to_tokens(token) or ""


class Stream:
    """A text as its tokens are committed: every character once, and none that a stop string or the
    rest of a character may still take back.
    """

    def __init__(self, tokenizer, stop: Sequence[str] = ()):
        self.stops = Stops(tokenizer, stop)
        self.tokens: list[int] = []
        self.given = 0

    def add(self, new: list[int], ended: bool) -> str:
        """The characters that these tokens make certain; all that are left if they end the text."""
        self.tokens += new
        text = self.stops.cut(self.tokens) if ended else self.stops.certain(self.tokens)
        piece, self.given = text[self.given :], max(self.given, len(text))
        return piece


def beginning(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text with which a stop string begins."""
    ends = (
        length
        for string in stop
        for length in range(1, min(len(string), len(text) + 1))
        if text.endswith(string[:length])
    )
    return max(ends, default=0)


def _first(text: str, strings: Sequence[str]) -> int | None:
    """Where the first of these strings begins, None if there is none; bytes at the end of the text
    may still become a character.
    """
    text = text.rstrip(BROKEN)
    return min((text.find(string) for string in strings if string in text), default=None)
