"""The table of token classes of a tokenizer, see `verifier.token_features`."""

from __future__ import annotations

from functools import lru_cache

from ..verifier.token_features import TokenTable

# How tokenizers write white space at the beginning of a token.
MARKS = {"\u2581": " ", "\u0120": " ", "\u010a": "\n", "\u0109": "\t"}


@lru_cache(maxsize=8)
def token_table(tokenizer, vocab: int) -> TokenTable:
    """The table of the first `vocab` tokens; ids that the tokenizer does not know are special."""
    known = len(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(known, vocab))))
    strings = ["" if token is None else _text(token) for token in tokens]
    missing = range(len(strings), vocab)
    strings += [""] * len(missing)
    return TokenTable.of(strings, [*tokenizer.all_special_ids, *missing])


def _text(token: str) -> str:
    for mark, space in MARKS.items():
        token = token.replace(mark, space)
    return token
