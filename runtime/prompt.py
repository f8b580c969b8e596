"""From the text of a prompt, or a conversation, to the tokens that both models continue."""

from __future__ import annotations

from .chat import Turns, rendered


def check_text(text: str) -> None:
    """ValueError unless it can be tokenized: a tokenizer crashes on bytes that are no UTF-8."""
    if not text:
        raise ValueError("`prompt` must not be empty; give the text to continue")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "`prompt` must be UTF-8, got other bytes; convert it, for example with iconv"
        ) from None


def prompt_tokens(prompt: str | Turns, tokenizer, chat: bool = False) -> list[int]:
    """Token ids with the tokenizer's own special tokens once in front and none behind.

    prompt: a text, or a conversation. That goes through the tokenizer's chat template, up to where
        the assistant speaks; if the last turn is the assistant's, its text is what is continued.
    chat: a text is a conversation of one turn, the user's.
    """
    if chat and isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    if not isinstance(prompt, str):
        # The template writes the special tokens itself. verbose=False: too long is no news here.
        text = rendered(prompt, tokenizer)
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    plain = list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
    ids = list(tokenizer(prompt, verbose=False)["input_ids"])
    if not plain:
        return [token for token in ids if token != tokenizer.eos_token_id]
    added = range(len(ids) - len(plain) + 1)
    front = next((at for at in added if ids[at : at + len(plain)] == plain), 0)
    # A text that went through a template begins with these tokens; an end-of-text that the
    # tokenizer adds would end the text before it begins.
    return plain if plain[:front] == ids[:front] else ids[:front] + plain
