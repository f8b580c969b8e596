"""A model call with a packed cache equals transformers' own; pairs that cannot work are refused before any work."""

import pytest
import torch
from diversed.runtime.engine import decode
from diversed.runtime.forward import Model, fingerprint
from diversed.runtime.model import load_pair, make_pair
from diversed.runtime.sampling import Sampling
from transformers import AutoConfig, AutoModelForCausalLM

from .support.models import module, tiny_pair, tokenizer

SMALL = {
    "vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ARCHITECTURES = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": {"sliding_window": 6},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
}


def small(kind: str, seed: int = 0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind,
        **(
            {**SMALL, **ARCHITECTURES[kind]}
            if kind != "gpt2"
            else {"vocab_size": 23, **ARCHITECTURES[kind], "eos_token_id": None, "bos_token_id": None}
        ),
    )
    return AutoModelForCausalLM.from_config(config).float()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_tree_decoding_is_greedy_generation_for_every_architecture(kind):
    """Greedy text through trees, packed caches and, for some, a window of 6 tokens equals a full run at every token."""
    pair = make_pair(small(kind), small(kind, 1), tokenizer(23, end=False))
    prompts = [[2, 3, 4, 5, 6, 7, 8], [9, 1]]
    for completion, prompt in zip(
        decode(pair, prompts, method="univer", sampling=Sampling(temperature=0), draft_length=3, max_new_tokens=16),
        prompts,
        strict=True,
    ):
        with torch.no_grad():
            text = prompt + completion.tokens
            rows = pair.target.module(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
        top = rows.topk(2).values
        clear = top[:, 0] - top[:, 1] > 1e-4  # nearer than that, rounding may choose either
        assert torch.equal(rows.argmax(-1)[clear], torch.tensor(completion.tokens)[clear]) and clear.sum() > 10


def test_the_fingerprint_is_the_weights_whatever_dtype_they_are_loaded_in():
    one = Model(module(0, 7).bfloat16(), "one")
    assert one.hash == Model(module(0, 7).bfloat16().float(), "two").hash
    assert one.hash != Model(module(1, 7).bfloat16(), "three").hash


def test_vocabularies_padded_to_different_lengths_are_cropped_to_the_shared_size():
    pair = make_pair(module(0, 9), module(1, 7), tokenizer(7))
    assert pair.vocab == 7
    assert all(token < 7 for c in decode(pair, [[2, 3]], max_new_tokens=20) for token in c.tokens)


def test_a_model_that_does_not_score_every_token_is_refused():
    with pytest.raises(ValueError, match="tokenizer has 9 tokens, the target's rows have 9 and the draft's 7"):
        make_pair(module(0, 9), module(1, 7), tokenizer(9))


def save(folder, vocab, words=None):
    module(0, vocab).save_pretrained(folder)
    (words or tokenizer(vocab)).save_pretrained(folder)
    return str(folder)


def test_a_pair_is_loaded_from_folders_and_equals_itself(tmp_path):
    path = save(tmp_path / "a", 7)
    pair = load_pair(path, path)
    assert (
        pair.target.hash == pair.draft.hash and pair.eos == (1,) and pair.tokenizer_hash == tiny_pair(7).tokenizer_hash
    )


def test_pairs_that_cannot_work_are_refused_with_the_reason(tmp_path):
    seven, nine = save(tmp_path / "a", 7), save(tmp_path / "b", 9)
    empty = tmp_path / "empty"
    empty.mkdir()
    cut, listed = save(tmp_path / "cut", 7), save(tmp_path / "listed", 7)
    (tmp_path / "cut/model.safetensors").write_bytes((tmp_path / "cut/model.safetensors").read_bytes()[:100])
    (tmp_path / "listed/config.json").write_text("[]")
    for target, draft, options, sentence in (
        (
            seven,
            nine,
            {},
            "do not share a tokenizer: 2 tokens differ, for example 'w7' is absent in the target's and 7",
        ),
        (seven, str(tmp_path / "none"), {}, "the folder does not exist"),
        (seven, str(empty), {}, "no tokenizer could be loaded from"),
        (cut, seven, {}, "no model could be loaded from '.*cut': Error while deserializing header"),
        (seven, listed, {}, "no tokenizer could be loaded from '.*listed'"),
        (str(tmp_path / "x.gguf"), seven, {}, "the file does not exist"),
        (seven, seven, {"dtype": "int3"}, "`dtype` must be one of auto, float32"),
        (cut, cut, {"device": "cuda:77"}, "`device` 'cuda:77' cannot be used on this machine"),
    ):
        with pytest.raises((ValueError, OSError), match=sentence) as refused:
            load_pair(target, draft, **options)
        assert "\n" not in str(refused.value)


def test_a_single_weight_that_the_fingerprint_does_not_sample_changes_what_a_folder_is_continued_by():
    first, second = (Model(module(0, 7), "one") for _ in range(2))
    for model in (first, second):
        model.module.register_parameter("big", torch.nn.Parameter(torch.zeros(101, 101)))
    assert first.computed == second.computed
    second.module.big.data[0, 1] = 1e-3
    assert fingerprint(first.module) == fingerprint(second.module)
    assert first.computed["weights"] != second.computed["weights"]
