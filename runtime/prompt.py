"""From the text of a prompt to the tokens that both models continue."""

from __future__ import annotations


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


def prompt_tokens(text: str, tokenizer, chat: bool = False) -> list[int]:
    """Token ids with the tokenizer's own special tokens in front and none behind.

    chat: the text is one user turn of the tokenizer's chat template, up to where the assistant
        speaks.
    """
    if chat:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself. verbose=False: too long is no news here.
    ids = list(tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])
    if not chat and ids and ids[-1] == tokenizer.eos_token_id:
        # An end-of-text that the tokenizer adds would end the text before it begins; one in the
        # text itself stays.
        plain = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return ids[:-1] if ids[len(ids) - 1 - len(plain) : -1] == plain else ids
    return ids
