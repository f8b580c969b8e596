"""Tiny random pairs over a vocabulary of words w0, w1, ...: real transformers models and a real tokenizer."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from diversed.runtime.forward import Pair
from diversed.runtime.model import make_pair
from diversed.runtime.sampling import Sampling, probabilities
from diversed.verifier.law import DraftTree
from diversed.verifier.relax import Believed, relax
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tokenizer(vocab: int, end: bool = True) -> PreTrainedTokenizerFast:
    """Words w0 .. w{vocab-1} split at spaces; w1 ends a text where `end` is true."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **({"eos_token": "w1"} if end else {}))


def module(seed: int, vocab: int, layers: int = 1, hidden: int = 16, positions: int = 128) -> LlamaForCausalLM:
    """A Llama of random weights, large enough that its rows are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=positions, initializer_range=0.4,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).float()


@cache
def tiny_pair(vocab: int = 7, end: bool = True, seed: int = 0, layers: int = 2) -> Pair:
    """A target of `layers` layers and a draft of one, which share a tokenizer."""
    return make_pair(module(seed, vocab, layers), module(seed + 1, vocab, 1), tokenizer(vocab, end))


def rows_after(model, prompt: list[int], length: int, vocab: int, sampling: Sampling = Sampling()) -> dict:  # noqa: B008
    """text (tuple of at most length - 1 tokens) -> the model's row [V] after prompt + text."""
    rows: dict[tuple[int, ...], Tensor] = {}
    for size in range(length):
        texts = list(product(range(vocab), repeat=size))
        tokens = torch.tensor([prompt + list(text) for text in texts])
        with torch.no_grad():
            logits = model.module(tokens).logits[:, -1]
        rows |= dict(zip(texts, probabilities(logits, sampling).double(), strict=True))
    return rows


def text_law(rows: dict, length: int, vocab: int) -> Tensor:
    """[V ** length] probability of every text of `length` tokens, given a row for every beginning."""
    law = []
    for text in product(range(vocab), repeat=length):
        probability = torch.tensor(1.0, dtype=torch.float64)
        for i, token in enumerate(text):
            probability = probability * rows[text[:i]][token]
        law.append(probability)
    return torch.stack(law)


def relaxed_law(
    pair: Pair,
    prompt: list[int],
    relaxation: str,
    length: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    gate=None,
) -> Tensor:
    """[V ** length] law of the texts where every row is the relaxed one; gate: the weight of a learned one."""
    models = pair.target, pair.draft
    sampled = [rows_after(model, prompt, length, pair.vocab, sampling) for model in models]
    believed = [rows_after(model, prompt, length, pair.vocab) for model in models]
    rows = {}
    for text in sampled[0]:
        target, draft, p, q = (each[text][None, None] for each in (*sampled, *believed))
        tree = DraftTree(torch.zeros(1, 1, dtype=torch.long), (-1,), draft, target)
        weight = gate(q, p, None) if gate else None
        options = {"greedy": sampling.greedy, "filtered": sampling.filters, "believed": Believed(p, q)}
        rows[text] = relax(tree, relaxation, weight, **options).target[0, 0]
    return text_law(rows, length, pair.vocab)
