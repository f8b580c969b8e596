"""Worked examples: rows of the training split with their answers, in front of every prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..runtime.chat import Turns
from .prompts import Example, fill

MOST_SHOTS = 64
CALCULATOR = re.compile(r"<<[^<>]*>>")
BLANK_LINE = "\n\n"


@dataclass(frozen=True)
class Shot:
    """One worked example.

    prompt: the row in the task's template. answer: what the model should say. id: the row's place.
    """

    prompt: str
    answer: str
    id: str


def without_calculator(answer: str) -> str:
    """An answer of GSM8K without its notes for a calculator, such as <<48/2=24>>."""
    return CALCULATOR.sub("", answer).strip()


def until_done(answer: str) -> str:
    """An answer of MBPP, which ends where its prompt says (arXiv 2108.07732, section 3)."""
    return f"{answer.strip()}\n[DONE]"


def as_turns(shots: Sequence[Shot]) -> Turns:
    """The turns of user and assistant that stand before a prompt in a chat."""
    turns = []
    for shot in shots:
        turns.append({"role": "user", "content": shot.prompt})
        turns.append({"role": "assistant", "content": shot.answer})
    return tuple(turns)


def in_front(template: str, shots: Sequence[Shot], examples: list[Example]) -> list[Example]:
    """The examples with the shots in front of each, as one text.

    An instruction stands once: it is what a template holds up to its last blank line before its
    first field.
    """
    if not shots:
        return examples
    head = fill(template, "\0", "\0")[0].partition("\0")[0]
    end = head.rfind(BLANK_LINE)
    instruction = head[: end + len(BLANK_LINE)] if end >= 0 else ""
    shown = [_as_text(shot, instruction) + BLANK_LINE for shot in shots]
    before = instruction + "".join(shown)
    return [
        replace(example, before=before + example.before.removeprefix(instruction))
        for example in examples
    ]


def _as_text(shot: Shot, instruction: str) -> str:
    prompt = shot.prompt.removeprefix(instruction)
    gap = "" if prompt[-1:].isspace() else " "
    return prompt + gap + shot.answer
