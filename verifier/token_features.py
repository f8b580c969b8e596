"""What a head may know of the tokens themselves: their classes, and how two of them are related.

Three tokens say what a context is about to do: the draft's and the target's most likely ones, and
the one before. They are functions of the rows and of the path, so every method stays exact. The
classes come from a table over the vocabulary that is made once from the tokenizer's strings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

CLASSES = {
    "number": "digits, perhaps with separators",
    "operator": "signs of arithmetic and comparison",
    "punctuation": "signs of a sentence",
    "space": "white space alone",
    "word": "letters behind a space: the beginning of a word",
    "piece": "other letters: the inside of a word",
    "symbol": "anything else, such as brackets of code",
    "special": "ends a text or steers a chat",
}
NAMES = tuple(CLASSES)
OPERATORS, SENTENCE = set("+-*/=<>%^×÷"), set(".,;:!?'\"…’“”")
LETTERS = 16  # of a token that are compared
WHO = ("target's most likely token", "draft's most likely token", "token before")
RELATIONS = (
    "both most likely tokens are the same",
    "they differ in case or a space alone",
    "both are numbers",
    "one is the beginning of the other",
)
COUNT = len(WHO) * len(NAMES) + len(RELATIONS)


@dataclass(frozen=True)
class TokenTable:
    """Of every token of a vocabulary, and in a last row of all ids beyond it: engines pad rows.

    kind:    [V + 1] int64, its class, an index of NAMES.
    folded:  [V + 1] int64, the same number for strings that differ in case or outer spaces alone.
    letters: [V + 1, LETTERS] int32, code points of its first letters, no outer spaces, 0 behind.
    """

    kind: Tensor
    folded: Tensor
    letters: Tensor

    @classmethod
    def of(cls, strings: Sequence[str], special: Sequence[int] = ()) -> TokenTable:
        """The table of strings, the token's own each; special: ids of special tokens."""
        steering, numbers = {*special, len(strings)}, {}
        kinds, folded, letters = [], [], []
        for token, text in enumerate([*strings, ""]):
            bare = text.strip()
            kinds.append(NAMES.index("special" if token in steering else _class(text)))
            folded.append(numbers.setdefault(bare.casefold(), len(numbers)))
            codes = [ord(letter) for letter in bare[:LETTERS]]
            letters.append(codes + [0] * (LETTERS - len(codes)))
        letters = torch.tensor(letters, dtype=torch.int32).view(-1, LETTERS)
        return cls(torch.tensor(kinds), torch.tensor(folded), letters)

    def to(self, device: torch.device | str) -> TokenTable:
        """The same on another device."""
        return TokenTable(*(part.to(device) for part in vars(self).values()))

    @property
    def sha256(self) -> str:
        """Checksum of its numbers."""
        parts = b"".join(part.cpu().numpy().tobytes() for part in vars(self).values())
        return hashlib.sha256(parts).hexdigest()

    def features(self, draft: Tensor, target: Tensor, before: Tensor) -> Tensor:
        """[..., COUNT] 0 or 1, float32: the class of each of WHO, then RELATIONS.

        draft, target: rows [..., V]; before: [...] the token that precedes them, int64.
        """
        last = len(self.kind) - 1
        ids = target.argmax(-1), draft.argmax(-1), before.clamp_min(0)
        ours, theirs, before = (token.clamp_max(last) for token in ids)
        kinds = [self.kind[token] for token in (ours, theirs, before)]
        same = ours == theirs
        number = NAMES.index("number")
        one, other = self.letters[ours], self.letters[theirs]
        begins = ((one == other) | (one == 0)).all(-1) | ((one == other) | (other == 0)).all(-1)
        related = (
            same,
            ~same & (self.folded[ours] == self.folded[theirs]),
            (kinds[0] == number) & (kinds[1] == number),
            ~same & begins & (one[..., 0] != 0) & (other[..., 0] != 0),
        )
        classes = [one_hot(kind, len(NAMES)) for kind in kinds]
        return torch.cat([*classes, torch.stack(related, -1)], -1).float()


def _class(text: str) -> str:
    bare = text.strip()
    if not bare:
        return "space"
    if any(letter.isdigit() for letter in bare) and all(c.isdigit() or c in ".," for c in bare):
        return "number"
    if set(bare) <= OPERATORS:
        return "operator"
    if set(bare) <= SENTENCE:
        return "punctuation"
    if any(letter.isalpha() for letter in bare):
        return "word" if text[0].isspace() else "piece"
    return "symbol"
