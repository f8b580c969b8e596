"""Every causal language model of transformers that a tiny configuration can make: decoded right or refused.

Right means: the greedy text of a row in a batch of rows of different lengths, through trees and caches, is the arg max
of the model's own logits at every token. Each is a model of random weights, so a wrong mask, a wrong position or a wrong
slot changes nearly every token.
"""

import pytest
import torch
from diversed.runtime.engine import decode
from diversed.runtime.forward import Model, known_positions
from diversed.runtime.model import make_pair
from diversed.runtime.probe import probe
from diversed.runtime.sampling import Sampling
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from .support.models import tokenizer

V = 29
SMALL = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 128, "d_model": 32, "n_layers": 2, "n_heads": 4, "num_layers": 2, "ffn_dim": 48, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "word_embed_proj_dim": 32, "sliding_window": 6, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "max_seq_len": 128, "hidden_dim": 48, "vocab_size_per_layer_input": V,
    "hidden_size_per_layer_input": 8, "rotary_dim": 8, "d_kv": 8, "d_ff": 48,
}  # fmt: skip
PARTICULAR = {
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4, "window_size": 256,
                "hidden_size": 32, "intermediate_size": 48, "vocab_size": V, "max_position_embeddings": 2048,
                "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
# Families that people serve most; all of them must decode.
SERVED = ["llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text",
          "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt", "falcon", "starcoder2", "cohere", "olmo2", "granite",
          "stablelm", "smollm3", "deepseek_v3", "glm4", "gpt_oss"]  # fmt: skip
PROMPTS = [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [9, 1]]


def configuration(kind):
    """A tiny configuration, or the reason why there is none."""
    known = PARTICULAR.get(kind)
    try:
        names = AutoConfig.for_model(kind).to_dict() | AutoConfig.for_model(kind).attribute_map
    except Exception as error:  # each family refuses numbers in its own way
        pytest.skip(f"no tiny {kind}: {str(error)[:80]}")
    known = known or {name: value for name, value in SMALL.items() if name in names}
    for without in ((), ("sliding_window",), ("head_dim",), ("num_key_value_heads",), ("bos_token_id", "eos_token_id", "pad_token_id")):
        try:
            config = AutoConfig.for_model(kind, **{name: value for name, value in known.items() if name not in without})
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
            if size < 3e6:
                return config
            reason = f"{size / 1e6:.0f} million parameters"
        except Exception as error:  # each family refuses numbers in its own way
            reason = f"{type(error).__name__}: {str(error)[:80]}"
    pytest.skip(f"no tiny {kind}: {reason}")


def tiny(kind, seed):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configuration(kind)).float().eval()


@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_an_architecture_is_decoded_right_in_a_batch_or_refused_in_a_sentence(kind):
    logging.set_verbosity_error()
    target, draft = tiny(kind, 0), tiny(kind, 1)
    try:
        pair = make_pair(target, draft, tokenizer(V, end=False))
    except ValueError as error:
        assert kind not in SERVED, error
        assert "\n" not in str(error) and len(str(error)) > 40
        return
    clear_tokens = 0
    for method in ("token", "univer"):
        done = decode(pair, PROMPTS, method=method, sampling=Sampling(temperature=0), draft_length=3, max_new_tokens=10)
        for completion, prompt in zip(done, PROMPTS, strict=True):
            with torch.no_grad():
                text = torch.tensor([prompt + completion.tokens])
                rows = target(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1, :V]
            top = rows.topk(2).values
            clear = top[:, 0] - top[:, 1] > 1e-4  # nearer than that, rounding may choose either
            assert torch.equal(rows.argmax(-1)[clear], torch.tensor(completion.tokens)[clear])
            clear_tokens += int(clear.sum())
    assert clear_tokens > 20


@pytest.mark.parametrize("kind", ["mpt", "gpt_neo", "bert", "rwkv", "bloom"])
def test_attention_that_counts_slots_or_looks_ahead_is_refused(kind):
    with pytest.raises(ValueError, match="cannot be decoded here"):
        make_pair(tiny(kind, 0), tiny(kind, 1), tokenizer(V, end=False))


def test_the_probe_refuses_a_model_that_ignores_its_mask():
    module = tiny("gpt2", 0)
    forward = module.forward
    module.forward = lambda *words, attention_mask=None, **named: forward(*words, attention_mask=None, **named)
    with pytest.raises(ValueError, match="ignores the mask"):
        probe(Model(module, "deaf"))


@pytest.mark.parametrize(
    ("scaling", "most"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 64),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}, 32),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        (None, 128),
    ],
)
def test_rotation_that_depends_on_the_longest_row_ends_the_context_where_it_begins(scaling, most):
    class Config:
        max_position_embeddings = 128
        rope_parameters = scaling

    assert known_positions(Config()) == most
