"""Task `sums`: two-step word problems, their worked answers in two house styles, and the oracle's
labelling.

A problem names a start a and two events, +/- b and +/- d. Its answer is three sentences of wording
around two equations
and the final line GSM8K uses:

    Well, we can calmly settle ... part: 23+4=27. Next, given ... ahead: 27-5=22. Hence matters look
    fully solved. #### 22

Wording is neutral: every phrase stands in a slot that is drawn independently of the numbers, the
operations and every other slot, so replacing one phrase by another can never change what is right.
A *house style* is only the frequency of the phrases in a slot, Zipf with exponent SKEW over the
listed order ("target") or the reverse order ("draft"): same support, other habits, as a real draft
that was trained on other data. The tiny target and draft of `assets/pair` are trained each in its
own style, so they disagree on wording, where it costs nothing, and on arithmetic, where it costs
the score.

Validation and test questions use sentence frames and names that training never sees; their words
all occur in training.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from functools import cache

import torch

SKEW = 0.9
STYLES = ("target", "draft")
SPLITS = ("train", "validation", "test")

OPENER = (
    "Well Okay Right Sure Fine Good Alright Certainly Yes Great",
    "we I you they people students readers friends children teachers",
    "can may should will could must might shall would did",
    "calmly quickly gently slowly simply surely neatly safely quietly plainly",
    "compute settle handle solve tackle treat study manage finish describe",
    "the this that our your my their every some another",
    "opening initial early starting leading primary basic easy simple small",
    "part piece stage portion step phase half section bit move",
)
CONNECTOR = (
    "Next Afterwards Then Thereafter Now Onward Later Subsequently Continuing Presently",
    "with given using keeping taking holding having knowing seeing trusting",
    "such said fresh clean clear exact recent current new proper",
    "results figures facts values numbers details data findings outcomes notes",
    "noted ready known written stored secured recorded confirmed checked available",
    "arithmetic calculation reasoning work story chain process logic thought path",
    "continues proceeds goes moves runs flows advances leads turns carries",
    "onward forward along ahead smoothly naturally easily directly nicely steadily",
)
CLOSER = (
    "Hence Thus So Therefore Consequently Accordingly Overall Finally Altogether Indeed",
    "matters things questions problems exercises puzzles riddles tasks lessons doubts",
    "look seem appear become stand stay are remain feel get",
    "fully wholly totally completely entirely quite truly perfectly rather really",
    "resolved settled finished done complete closed answered concluded ended solved",
)
SENTENCES = tuple(
    tuple(tuple(slot.split()) for slot in sentence) for sentence in (OPENER, CONNECTOR, CLOSER)
)
COMMAS = ((0,), (0, 4), ())  # the slots of each sentence that a comma follows

ITEMS = (
    "apples coins books cards pens shells stones stamps marbles cups keys toys eggs nuts balls"
    " beads".split()
)
FIRST = {
    "+": "bought found got picked won collected received made".split(),
    "-": "lost sold gave dropped broke lent used donated".split(),
}
SECOND = {
    "+": "buys finds gets picks wins collects receives makes".split(),
    "-": "loses sells gives drops breaks lends uses donates".split(),
}
HEADS = "Ba Da Fe Ga Ja Ka Li Mo Na Pe Ro Su Ti Vo Wi Ze".split()
TAILS = "ba di fo ka la mi no pu ra si ta vu".split()


def _frames(before: str, core: str, after: str) -> tuple[str, ...]:
    """Every sentence of one phrase from each of three lists, separated by |; the first letter
    becomes a capital.
    """
    parts = itertools.product(before.split("|"), core.split("|"), after.split("|"))
    sentences = (" ".join(filter(None, part)) + "." for part in parts)
    return tuple(sentence[0].upper() + sentence[1:] for sentence in sentences)


# Frames of the start, the first event, the second event and the question itself. Many lengths, so
# that no number can be found by its distance; every word of a held-out frame occurs in training, no
# held-out sentence does.
TRAIN_FRAMES = (
    _frames(
        "|in the morning|at first|on Monday morning",
        "{n} had {a} {i}|{n} owned {a} {i}|{n} kept {a} {i}|{n} started with {a} {i}|a box of {n}"
        " held {a} {i}",
        "|at home|in a bag|on the table",
    ),
    _frames(
        "yesterday|on Monday|at school|in the garden|with a friend|after lunch|first|last week|on"
        " the way home",
        "{p} {v} {b}|{p} {v} {b} {i}|{p} {v} {b} of the {i}",
        "|in town|at the market",
    ),
    _frames(
        "today|now|at night|before dinner|then|later|this evening|next|the next morning|in the end",
        "{p} {v} {d}|{p} {v} {d} {i}",
        "|at home|in the park|with a friend",
    ),
    (
        "How many {i} does {n} have now?",
        "How many {i} are there at the end?",
        "How many {i} does {p} have in the end?",
        "How many {i} are on the table of {n} now?",
        "How many {i} is that?",
        "What is the number of {i} now?",
        "What is the number of {i} at the end of the evening?",
        "What is the number of {i} that {p} has?",
        "Count the {i} of {n}.",
        "Count the {i} that {n} has now.",
        "Count the {i}.",
        "Find the number of {i} that {p} has.",
        "Find the number of {i} of {n} at the end.",
    ),
)
HELD_OUT_FRAMES = (
    _frames(
        "|at home|last morning",
        "{n} held {a} {i}|{n} kept {a} {i}|{n} owned {a} {i}",
        "in the garden",
    )
    + _frames("at home|last morning|in town", "{n} had {a} {i}|{n} started with {a} {i}", ""),
    _frames(
        "after school|at the market|last Monday|in town|on Monday evening",
        "{p} {v} {b}|{p} {v} {b} {i}|{p} {v} {b} of the {i}",
        "|with a friend",
    ),
    _frames(
        "this night|today at night|later in the evening|at the end|next week",
        "{p} {v} {d}|{p} {v} {d} {i}",
        "|at the market|on the way",
    ),
    (
        "How many {i} does {n} have at the end?",
        "How many {i} are there now?",
        "What is the number of {i} that {n} has now?",
        "Count the {i} that {p} has at home.",
        "Find the number of {i}.",
    ),
)


def problems(split: str, count: int, seed: int = 0, style: str = "target") -> list[dict]:
    """The first `count` problems of a split; the i-th depends on (split, seed, i) alone, its
    wording on `style` too.

    Returns dicts of `prompt` (a question, one line) and `reference` (a worked answer that ends in
    `#### n`).
    """
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(SPLITS)}, got {split!r}")
    if style not in STYLES:
        raise ValueError(f"`style` must be one of {', '.join(STYLES)}, got {style!r}")
    return [_problem(split, seed, index, style) for index in range(count)]


@cache
def names(split: str) -> tuple[str, ...]:
    """The names a split may use: a quarter of the syllable pairs is held out from training."""
    pairs = [(i, j) for i in range(len(HEADS)) for j in range(len(TAILS))]
    return tuple(HEADS[i] + TAILS[j] for i, j in pairs if ((i + j) % 4 == 0) != (split == "train"))


def frames(split: str) -> tuple[tuple[str, ...], ...]:
    """The sentence frames a split may use, by part of the question."""
    return TRAIN_FRAMES if split == "train" else HELD_OUT_FRAMES


@cache
def frequencies(size: int, style: str, skew: float = SKEW) -> tuple[float, ...]:
    """How often a style uses each of the `size` phrases of a slot, in the listed order; sums to
    1.
    """
    weights = [(rank + 1) ** -skew for rank in range(size)]
    total = sum(weights)
    ordered = weights if style == "target" else weights[::-1]
    return tuple(weight / total for weight in ordered)


def is_working(tokenizer) -> torch.Tensor:
    """[V] bool: tokens that can change the score (digits, operators, `=`, `#`, special tokens,
    bytes outside ASCII).

    V is len(tokenizer); everything else (words, spaces, commas, full stops) is wording.
    """
    special = set(tokenizer.all_special_ids)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    flags = [token in special or _can_change_score(text) for token, text in enumerate(texts)]
    return torch.tensor(flags)


@dataclass
class OracleGate:
    """The best weight function for this task: relax wording wholly, working not at all.

    A position is wording where the larger of the two rows' mass on working tokens is below
    `threshold`. It uses the task's own labels, so it is a bound to compare learned heads with,
    never a method.
    """

    working: torch.Tensor  # [V] bool
    threshold: float = 0.01

    def __call__(
        self, draft: torch.Tensor, target: torch.Tensor, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """draft, target [..., V] probabilities -> [...] the draft's weight, 1.0 on wording and 0.0
        on working.

        `hidden` is ignored: every weight function is offered the models' hidden states.
        """
        size = target.shape[-1]
        mask = self.working.to(device=target.device, dtype=target.dtype)[:size]
        mask = torch.nn.functional.pad(mask, (0, size - mask.shape[0]), value=1.0)
        mass = torch.maximum(draft @ mask, target @ mask)
        return (mass < self.threshold).to(target.dtype)


def oracle(tokenizer, threshold: float = 0.01) -> OracleGate:
    """The oracle for a tokenizer: `oracle(tokenizer)(draft, target) -> weight`."""
    return OracleGate(is_working(tokenizer), threshold)


def vocabulary() -> list[str]:
    """Every word of questions and answers, sorted, without names: what the tokenizer holds as whole
    words.
    """
    text = " ".join(frame for part in TRAIN_FRAMES + HELD_OUT_FRAMES for frame in part)
    words = set(re.findall(r"[A-Za-z]+", re.sub(r"{\w}", " ", text)))
    words |= {"she", "he", *ITEMS, *sum([*FIRST.values(), *SECOND.values()], [])}
    return sorted(
        words | {phrase for sentence in SENTENCES for slot in sentence for phrase in slot}
    )


def _problem(split: str, seed: int, index: int, style: str) -> dict:
    rng = random.Random(f"{split}/{seed}/{index}")
    numbers = _numbers(rng)
    prompt = _question(rng, split, numbers)
    return {"prompt": prompt, "reference": _answer(rng, numbers, style)}


def _numbers(rng: random.Random) -> tuple[int, str, int, int, str, int, int]:
    """a op b = c, c op d = e, with a, c, e of two digits and b, d of one."""
    while True:
        a, b, d = rng.randint(11, 98), rng.randint(2, 9), rng.randint(2, 9)
        first, second = rng.choice("+-"), rng.choice("+-")
        c = a + b if first == "+" else a - b
        e = c + d if second == "+" else c - d
        if 10 <= c <= 99 and 10 <= e <= 99:
            return a, first, b, c, second, d, e


def _question(rng: random.Random, split: str, numbers: tuple) -> str:
    a, first, b, _, second, d, _ = numbers
    words = {"n": rng.choice(names(split)), "p": rng.choice(("she", "he")), "i": rng.choice(ITEMS)}
    verbs = ("", rng.choice(FIRST[first]), rng.choice(SECOND[second]), "")
    parts = [rng.choice(options) for options in frames(split)]
    return (
        " ".join(
            part.format(v=verb, a=a, b=b, d=d, **words)
            for part, verb in zip(parts, verbs, strict=True)
        )
        + "\n"
    )


def _answer(rng: random.Random, numbers: tuple, style: str) -> str:
    a, first, b, c, second, d, e = numbers
    opener, connector, closer = (_wording(rng, which, style) for which in range(3))
    return f"{opener}: {a}{first}{b}={c}. {connector}: {c}{second}{d}={e}. {closer}.\n#### {e}"


def _wording(rng: random.Random, which: int, style: str) -> str:
    phrases = [rng.choices(slot, frequencies(len(slot), style))[0] for slot in SENTENCES[which]]
    return " ".join(phrase + "," * (place in COMMAS[which]) for place, phrase in enumerate(phrases))


def _can_change_score(text: str) -> bool:
    return not text.isascii() or any(char.isdigit() or char in "+-*/=#%$<>" for char in text)
