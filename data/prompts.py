"""From a row to the tokens of a prompt. What must be shortened is the article, from its end, never
anything else.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from string import Formatter

from ..runtime.chat import Turns
from ..runtime.prompt import prompt_tokens

PLACES = ("prompt", "article")
NAMED = 20  # rows in a sentence; the others are counted


@dataclass(frozen=True)
class Example:
    """One prompt, `before + article + after`, and what a good answer is.

    before, after: instruction and question, which are never shortened.
    article: the one part that may lose its end, "" if nothing may.
    reference: the expected answer, None if the data has none.
    id: its place, such as "line 7 of test.jsonl"; unique within a task and split.
    turns: a conversation in place of the three texts, which are empty then.
    """

    before: str
    article: str
    after: str
    reference: str | None
    id: str
    turns: Turns = ()

    @property
    def prompt(self) -> str:
        return self.before + self.article + self.after


def check_template(template: str, needed: tuple[str, ...]) -> None:
    """ValueError unless the template is well-formed and names exactly the `needed` places, once
    each.
    """
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"`data.template` must be text around {{prompt}} or {{article}} ({error}); write a"
            " brace as {{ or }}"
        ) from None
    if sorted(names) != sorted(needed):
        wanted = " and ".join(f"{{{name}}}" for name in needed)
        got = ", ".join(f"{{{name}}}" for name in names) or "neither"
        raise ValueError(
            f"`data.template` must hold {wanted} once, got {got}; write other braces as {{{{ or"
            " }}"
        )


def fill(template: str, prompt: str, article: str) -> tuple[str, str, str]:
    """(before, article, after) of a checked template; the values are put in as they are, braces
    included.
    """
    parts, place = ["", ""], 0
    for literal, name, _, _ in Formatter().parse(template):
        parts[place] += literal
        if name == "prompt":
            parts[place] += prompt
        elif name == "article":
            place = 1
    return parts[0], article, parts[1]


class TooLong(ValueError):
    """A prompt of `tokens` tokens, its article left out, where fewer are allowed."""

    def __init__(self, example: Example, tokens: int, most: int):
        what = "prompt without its article" if example.article else "prompt"
        super().__init__(f"the {what} of {example.id} has {tokens} tokens, the limit is {most}")
        self.tokens = tokens


def encode(
    example: Example, tokenizer, max_prompt_tokens: int, chat: bool = False, earlier: Turns = ()
) -> list[int]:
    """Token ids of the prompt, at most `max_prompt_tokens`; see `prompt_tokens`.

    earlier: turns of a chat that stand before the prompt.

    The longest beginning of the article that fits is kept; TooLong if the prompt without any
    article is too long.
    """

    def tokens(kept: int) -> list[int]:
        text = example.before + example.article[:kept] + example.after
        if earlier:
            asked = {"role": "user", "content": text}
            return prompt_tokens((*earlier, asked), tokenizer)
        return prompt_tokens(example.turns or text, tokenizer, chat)

    try:
        ids = tokens(len(example.article))
        if len(ids) <= max_prompt_tokens:
            return ids
        ids, fits, too_long = tokens(0), 0, len(example.article)
        if len(ids) > max_prompt_tokens:
            raise TooLong(example, len(ids), max_prompt_tokens)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            trial = tokens(middle)
            if len(trial) <= max_prompt_tokens:
                ids, fits = trial, middle
            else:
                too_long = middle
    except TooLong:
        raise
    except ValueError as error:
        raise ValueError(f"{example.id}: {error}") from None
    return ids


def encode_all(
    examples: list[Example],
    tokenizer,
    most: int | None,
    room: int | None,
    chat: bool,
    earlier: Turns = (),
) -> list[list[int]]:
    """Token ids of every prompt; ValueError that names those that are too long.

    chat, earlier: see `encode`.

    most: the option `max_prompt_tokens`, None if the command has none.
    room: tokens that can be read beside the new ones, None if the caller looks at that.
    """
    limit = min(bound for bound in (most, room) if bound is not None)
    found, refused = [], []
    for example in examples:
        try:
            found.append(encode(example, tokenizer, limit, chat, earlier))
        except TooLong as error:
            refused.append(error)
    if not refused:
        return found
    longest = max(error.tokens for error in refused)
    remedy = ""
    if most is not None and (room is None or longest <= room):
        remedy = f"raise `max_prompt_tokens` to {longest} or "
    elif most is not None:
        remedy = f"the new tokens leave room for {room} in the models' context: "
    raise ValueError(
        f"prompt longer than the context: {'; '.join(map(str, refused[:NAMED]))}"
        f"{more(len(refused))}; {remedy}leave such rows out"
    )


def more(count: int) -> str:
    """The end of a list of `count` things of which NAMED are named."""
    return f" and {count - NAMED} more" if count > NAMED else ""


def checksum(prompts: list[list[int]]) -> str:
    """Of encoded prompts: it changes with rows, template, chat template, tokenizer and limit."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
