"""Checkpoints that are not what they seem are refused with the names of their tensors; adapters are merged exactly."""

import json
import shutil

import pytest
import torch
from diversed.runtime.forward import Model
from diversed.runtime.model import load_module, load_pair
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

from .support.models import tokenizer

V = 13


def llama(seed=0, kind=LlamaForCausalLM, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
           "max_position_embeddings": 64, "initializer_range": 0.4, "bos_token_id": None, "eos_token_id": 1} | options
    )  # fmt: skip
    return kind(config)


def saved(folder, module):
    module.save_pretrained(folder)
    tokenizer(V).save_pretrained(folder)
    return str(folder)


def changed(folder, change, **config):
    """A saved Llama whose tensors and configuration were changed afterwards."""
    saved(folder, llama())
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)


def drop(part):
    return lambda weights: [weights.pop(name) for name in list(weights) if part in name]


CHANGES = {
    "one tensor is missing": (drop("layers.1.mlp.up_proj"), {}, "lacks 1 tensors, such as model.layers.1.mlp.up_proj.weight"),
    "a layer is missing": (drop("layers.1."), {}, "lacks 9 tensors, such as model.layers.1."),
    "the output layer is missing": (drop("lm_head"), {}, "lacks 1 tensors, such as lm_head.weight"),
    "the embedding is missing": (drop("embed_tokens"), {}, "lacks 1 tensors, such as model.embed_tokens.weight"),
    "the last norm is missing": (drop("model.norm"), {}, "lacks 1 tensors, such as model.norm.weight"),
    "everything is missing": (dict.clear, {}, "lacks|no model could be loaded"),
    "a tensor is unknown": (lambda w: w.update(extra=torch.ones(2)), {}, "has beside those of LlamaForCausalLM 1 tensors, such as extra"),
    "biases are unknown": (
        lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}), {}, "has beside .*q_proj.bias"),
    "more layers are stored than are described": (lambda w: None, {"num_hidden_layers": 1}, "has beside .* model.layers.1"),
    "more layers are described than are stored": (lambda w: None, {"num_hidden_layers": 3}, "lacks 9 tensors, such as model.layers.2"),
    "names have a prefix": (
        lambda w: [w.update({f"base.{n}": w.pop(n)}) for n in list(w)], {}, "lacks .* and has beside"),
    "a shape differs": (lambda w: w.update({"model.norm.weight": torch.ones(7)}), {}, "another shape|no model could be loaded"),
    "an EAGLE head": (
        lambda w: (drop("layers.1.")(w), w.update({"fc.weight": torch.ones(16, 48)})),
        {"architectures": ["LlamaForCausalLMEagle3"]}, "this is a draft head that reads its target's hidden states"),
    "a Medusa head": (
        lambda w: (w.clear(), w.update({"medusa_head.0.weight": torch.ones(4, 4)})),
        {"architectures": ["MedusaModel"]}, "draft head"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_checkpoint_with_other_tensors_than_its_architecture_is_refused_by_name(kind, role, tmp_path):
    change, config, sentence = CHANGES[kind]
    whole = saved(tmp_path / "whole", llama())
    broken = changed(tmp_path / "broken", change, **config)
    with pytest.raises(ValueError, match=sentence) as error:
        load_pair(**{"target": whole, "draft": whole, role: broken})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "module",
    [
        lambda: llama(kind=LlamaForSequenceClassification, num_labels=1),
        lambda: llama(kind=LlamaForTokenClassification, num_labels=2),
        lambda: llama(kind=LlamaModel),
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=V, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)),
        lambda: BertLMHeadModel(BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                           intermediate_size=16, max_position_embeddings=64, initializer_range=0.4, is_decoder=False)),
    ],
    ids=["reward model", "token classifier", "no output layer", "encoder and decoder", "sees what comes after"],
)  # fmt: skip
def test_what_is_no_causal_language_model_is_refused(module, tmp_path):
    whole, other = saved(tmp_path / "whole", llama()), saved(tmp_path / "other", module())
    with pytest.raises(ValueError, match="lacks|cannot be decoded here|no model could be loaded"):
        load_pair(other, whole)


def test_a_shard_that_is_missing_is_refused(tmp_path):
    llama().save_pretrained(tmp_path / "a", max_shard_size="4KB")
    tokenizer(V).save_pretrained(tmp_path / "a")
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    with pytest.raises(ValueError, match="no model could be loaded"):
        load_pair(str(tmp_path / "a"), str(tmp_path / "a"))


@pytest.mark.parametrize("tied", [True, False])
def test_whole_checkpoints_load_with_tied_and_with_separate_output_layers(tied, tmp_path):
    path = saved(tmp_path / "a", llama(tie_word_embeddings=tied))
    assert load_pair(path, path).target.hash == Model(llama(tie_word_embeddings=tied), "a").hash


ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all linear layers": {"target_modules": "all-linear"},
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "output layer alone": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "saved output layer": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved both": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "dora": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True},
    "bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_is_merged_as_peft_runs_it(kind, tied, tmp_path):
    base, folder = saved(tmp_path / "base", llama(tie_word_embeddings=tied)), tmp_path / "adapter"
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **ADAPTERS[kind])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    adapted.save_pretrained(folder)
    shutil.copy(tmp_path / "base/tokenizer.json", folder)
    tokens = torch.tensor([[2, 3, 4, 5, 6, 7]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(base)(tokens).logits
    found = Model(load_module(str(folder)), "adapted")(tokens, None, None, None).logits
    assert (expected - plain).abs().max() > 0.05
    assert (found - expected).abs().max() < 1e-4  # sums in another order
