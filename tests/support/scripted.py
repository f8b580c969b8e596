"""Models that say a script, and tokenizers of every kind whose texts they say."""

from __future__ import annotations

import torch
from diversed.runtime.forward import Pair
from diversed.runtime.model import make_pair
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

SPECIAL = ["<|im_end|>", "<|x|>"]


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Words with the space before them, and bytes for all that is no word, as SentencePiece has them."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581\u2581",
    ]
    pieces += ["\u2581the", "\u2581cat", "the", "cat", "at", "t", "s", ".", "End", "END", "é"]
    words = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    words.decoder = decoders.Sequence(steps)
    return _with_special(words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_pairs() -> PreTrainedTokenizerFast:
    """Bytes and groups of bytes, some of which begin or end inside a character."""
    whole = [" the", " cat", "é", "日本", "本\n", "end", "\n\n", "st", "op"]
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    groups = [shown.pre_tokenize_str(text)[0][0] for text in whole]
    groups += [group[1:] for group in groups[2:4]] + [group[:-2] for group in groups[3:5]]
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *groups])
    words = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    words.pre_tokenizer, words.decoder = shown, decoders.ByteLevel()
    return _with_special(words, eos_token="</s>")


def word_pieces() -> PreTrainedTokenizerFast:
    """Words that are joined by spaces, which are tidied up behind."""
    pieces = [
        "[UNK]",
        "the",
        "cat",
        "##s",
        "##sat",
        "do",
        "n",
        "'",
        "t",
        "n't",
        ".",
        ",",
        "!",
        "'s",
        "##日",
        "本",
    ]
    words = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    words.decoder = decoders.WordPiece()
    return _with_special(words, clean_up_tokenization_spaces=True)


def _with_special(words: Tokenizer, **options) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **options)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


def pieces(tokenizer, text: str) -> list[int]:
    """The text as bytes, one token each, special tokens by their names."""
    found: list[int] = []
    for part in text.split("|~|"):
        if part in tokenizer.get_vocab():
            found.append(tokenizer.get_vocab()[part])
        else:
            found += [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def speaker(tokenizer, script: list[int], prompt: int = 1) -> GPT2LMHeadModel:
    """A model that says `script` after a prompt of `prompt` tokens, whatever the tokens are."""
    positions, vocab = prompt + len(script) + 48, len(tokenizer)
    sizes = {"n_embd": positions, "n_positions": positions, "n_layer": 1, "n_head": 1, "n_inner": 4}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab, tie_word_embeddings=False, **sizes, **ends)
    ).eval()
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(10 * torch.eye(positions))
        for block in model.transformer.h:
            for layer in (block.attn.c_proj, block.mlp.c_proj):
                layer.weight.zero_()
                layer.bias.zero_()
        model.lm_head.weight.zero_()
        for place, token in enumerate(script):
            model.lm_head.weight[token, prompt - 1 + place] = 40.0
    return model


def scripted_pair(tokenizer, script: list[int], wrong: int = 5) -> Pair:
    """A target that says the script, and a draft that gets every `wrong`th token wrong."""
    guesses = [0 if place % wrong == wrong - 1 else token for place, token in enumerate(script)]
    return make_pair(speaker(tokenizer, script), speaker(tokenizer, guesses), tokenizer)
