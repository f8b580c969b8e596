"""From a row to the tokens of a prompt. What must be shortened is the article, from its end, never
anything else.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from string import Formatter

from ..runtime.prompt import prompt_tokens

PLACES = ("prompt", "article")


@dataclass(frozen=True)
class Example:
    """One prompt, `before + article + after`, and what a good answer is.

    before, after: instruction and question, which are never shortened.
    article: the one part that may lose its end, "" if nothing may.
    reference: the expected answer, None if the data has none.
    id: its place, such as "line 7 of test.jsonl"; unique within a task and split.
    """

    before: str
    article: str
    after: str
    reference: str | None
    id: str

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


def encode(example: Example, tokenizer, max_prompt_tokens: int, chat: bool = False) -> list[int]:
    """Token ids of the prompt, at most `max_prompt_tokens`.

    Raw prompts get the tokenizer's own special tokens in front and none behind. With `chat` the
    prompt is one user turn of the tokenizer's chat template, up to the assistant's turn. The
    longest beginning of the article that fits is kept; ValueError if the prompt without any article
    is too long.
    """
    if chat and not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this one"
        raise ValueError(
            f"`data.chat` needs a tokenizer with a chat template, {name} has none; leave"
            " data.chat out"
        )

    def tokens(kept: int) -> list[int]:
        return prompt_tokens(
            example.before + example.article[:kept] + example.after, tokenizer, chat
        )

    ids = tokens(len(example.article))
    if len(ids) <= max_prompt_tokens:
        return ids
    ids, fits, too_long = tokens(0), 0, len(example.article)
    if len(ids) > max_prompt_tokens:
        what = "prompt without its article" if example.article else "prompt"
        raise ValueError(
            f"prompt longer than the context: the {what} of {example.id} has {len(ids)} tokens, the"
            f" limit is {max_prompt_tokens}; raise the limit or leave this row out"
        )
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        trial = tokens(middle)
        if len(trial) <= max_prompt_tokens:
            ids, fits = trial, middle
        else:
            too_long = middle
    return ids


def checksum(prompts: list[list[int]]) -> str:
    """Of encoded prompts: it changes with rows, template, chat template, tokenizer and limit."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
