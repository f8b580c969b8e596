"""The lean forward pass against the module whose weights it uses, and the modules that it must leave alone."""

import copy
import subprocess
import sys

import pytest
import torch
from diversed.runtime import lean
from diversed.runtime.engine import decode
from diversed.runtime.forward import Model, Pair
from diversed.runtime.lean import SWITCH, obstacle
from diversed.verifier.law import DraftTree
from diversed.verifier.relax import parse, relax
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from .support.models import module, tiny_pair

SMALL = {
    "vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CASES = {
    "llama": ("llama", {"num_key_value_heads": 4, "mlp_bias": True, "attention_bias": True}),
    "llama 3, positions scaled": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "smollm": ("llama", {"tie_word_embeddings": True}),
    "mistral, a window of 6": ("mistral", {"sliding_window": 6}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN | {"original_max_position_embeddings": 32}}),
    "qwen2, two kinds of layers": ("qwen2", MIXED),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
}


def build(kind, changes, dtype=torch.float32):
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **changes})).to(dtype)
    for name, parameter in built.named_parameters():
        if name.endswith("bias") or "norm" in name:  # these start as zeros and ones, which would hide them
            parameter.data.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    return built


def both(monkeypatch, built):
    """The same module as a lean model and as one that goes through transformers."""
    lean = Model(built, "lean")
    monkeypatch.setenv(SWITCH, "0")
    plain = Model(built, "plain")
    monkeypatch.delenv(SWITCH)
    assert lean.lean and not plain.lean and plain.obstacle == "DIVERSED_LEAN=0"
    return lean, plain


def steps(model):
    """Logits and hidden states of a prefill in two calls, a tree, a rollback to one of its paths, and what follows."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(23, (2, 30), generator=generator)
    cache = model.cache(40)
    position = torch.arange(12).expand(2, -1)
    seen = [model(tokens[:, :7], position[:, :7], None, cache, 0, hidden=True)]
    seen.append(model(tokens[:, 7:12], position[:, 7:], None, cache, 7, hidden=True, last_only=True))
    # The second row has only 9 committed tokens; root, two children of the root, one child of the second.
    length = torch.tensor([12, 9])
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    committed = torch.arange(12) < length[:, None, None]
    visible = torch.cat([committed.expand(2, 4, 12), ancestors.expand(2, 4, 4)], -1)
    where = length.unsqueeze(1) + torch.tensor([0, 1, 1, 2])
    seen.append(model(tokens[:, 12:16], where, visible, cache, 12, hidden=True))
    # Keep the path of nodes 0, 2, 3 in the first row and the root alone in the second.
    cache.move(torch.tensor([[12, 14, 15], [12, 12, 12]]), torch.tensor([[12, 13, 14], [9, 9, 9]]))
    length = torch.tensor([15, 10])
    visible = torch.arange(16) < length[:, None, None]
    visible[..., 15] = True
    seen.append(model(tokens[:, 16:17], length.unsqueeze(1), visible, cache, 15, hidden=True))
    cache.move(torch.tensor([[15], [15]]), torch.tensor([[15], [10]]))
    cache.select(torch.tensor([0]))
    seen.append(model(tokens[:1, 17:18], torch.tensor([[16]]), None, cache, 16, hidden=True))
    seen.append(model(tokens[:1, 17:20], torch.tensor([[16, 17, 18]]), None, cache, 16, hidden=True))
    return seen + [model(tokens, torch.arange(30).expand(2, -1), None, None, hidden=True)]


@pytest.mark.parametrize("case", CASES)
def test_a_lean_model_computes_what_its_module_computes(monkeypatch, case):
    lean, plain = both(monkeypatch, build(*CASES[case]))
    for ours, theirs in zip(steps(lean), steps(plain), strict=True):
        assert ours.logits.shape == theirs.logits.shape
        # of a prefill the lean pass returns the last hidden state alone: nobody asks for the others
        states = theirs.hidden[:, -ours.hidden.shape[1] :]
        assert theirs.logits.abs().max() > 1 and states.abs().max() > 1
        # float32 sums of at most 48 terms in another order, through three layers
        assert torch.allclose(ours.logits, theirs.logits, rtol=0, atol=1e-4)
        assert torch.allclose(ours.hidden, states, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_positions_that_are_left_out_are_the_numbers_of_the_slots(monkeypatch, case):
    tokens, position = torch.arange(18).view(2, 9), torch.arange(9).expand(2, -1)
    for model in both(monkeypatch, build(*CASES[case])):
        given, left_out = model.cache(12), model.cache(12)
        for part in (slice(0, 5), slice(5, 6), slice(6, 9)):
            expected = model(tokens[:, part], position[:, part], None, given, part.start, hidden=True)
            found = model(tokens[:, part], None, None, left_out, part.start, hidden=True)
            assert torch.equal(found.logits, expected.logits) and torch.equal(found.hidden, expected.hidden)
        assert torch.equal(model(tokens, None, None, None).logits, model(tokens, position, None, None).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_in_half_precision_a_lean_model_is_as_near_to_float32_as_its_module(monkeypatch, case, dtype):
    built = build(*CASES[case], dtype)
    lean, plain = both(monkeypatch, built)
    ours, theirs = ([output.logits for output in steps(model)] for model in (lean, plain))
    exact = [output.logits for output in steps(Model(built.float(), "float32"))]
    assert {logits.dtype for logits in ours} == {dtype}

    def error(found):
        return torch.stack([(a - b).square().mean() for a, b in zip(found, exact, strict=True)]).mean().sqrt()

    # Both round some hundred times in other places; were they one error, its size would differ by a few percent.
    assert error(ours) < 1.3 * error(theirs) < 0.5


@pytest.mark.parametrize("limit", [0, lean.BY_COLUMNS], ids=["by rows", "by columns"])
@pytest.mark.parametrize("case", ["qwen2, yarn", "qwen3"])
def test_weights_are_stored_once_and_the_module_computes_what_it_did_before(monkeypatch, tmp_path, case, limit):
    monkeypatch.setattr(lean, "BY_COLUMNS", limit)
    built = build(*CASES[case])
    tokens = torch.arange(20).unsqueeze(0)
    before, values = built(tokens).logits, copy.deepcopy(built.state_dict())
    Model(built, "first")
    Model(built, "second")  # a module may serve as target and draft at once
    assert built.model.layers[0].mlp.down_proj.weight.is_contiguous() is (limit == 0)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in built.parameters()}
    assert sum(storages.values()) == sum(parameter.nbytes for parameter in built.parameters())
    assert all(torch.equal(value, values[name]) for name, value in built.state_dict().items())

    def unchanged(module):
        # the same sums of at most 48 terms, in another order
        return torch.allclose(module(tokens).logits, before, rtol=0, atol=1e-4)

    assert unchanged(built) and unchanged(copy.deepcopy(built))
    built.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, before)


def test_weights_by_columns_can_be_trained_and_written():
    built = build(*CASES["smollm"])
    Model(built, "lean")
    state = built.state_dict()
    assert all(value.is_contiguous() for value in state.values())
    tied = state["lm_head.weight"], state["model.embed_tokens.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    kept = built.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in built.named_parameters())
    tokens = torch.arange(20).unsqueeze(0)
    built.requires_grad_()(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(built.parameters(), 0.1).step()
    assert torch.allclose(Model(built, "trained")(tokens, tokens, None, None).logits, built(tokens).logits, atol=1e-4)


def test_a_module_that_was_cast_and_decoded_with_can_be_trained():
    """Decoding runs in torch's inference mode, and what it lays out anew must not be of it."""
    built = build(*CASES["smollm"])
    model = Model(built, "lean")
    built.double()
    pair = Pair(model, model, tiny_pair(11).tokenizer, model.vocab, (1,))
    relaxed = decode(pair, [[2, 3]], draft_length=3, relaxation="ensemble:0.3;budget=2", max_new_tokens=9)
    assert relaxed[0].target_calls > 1
    rows = torch.full((1, 4, 5), 0.2, dtype=torch.float64, requires_grad=True)
    tree = DraftTree(torch.arange(4).unsqueeze(0), (-1, 0, 1, 2), torch.eye(5)[None, :4].double(), rows)
    relax(tree, parse("ensemble:0.3;budget=2")).target.square().sum().backward()
    assert rows.grad.abs().sum() > 0
    tokens = torch.arange(20).unsqueeze(0)
    built.requires_grad_()(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in built.parameters())


def test_a_module_whose_weights_are_replaced_or_cast_is_collected_anew(monkeypatch):
    built = build(*CASES["qwen3"])
    lean, plain = both(monkeypatch, built)
    tokens, positions = torch.arange(20).unsqueeze(0), torch.arange(20).unsqueeze(0)
    built.load_state_dict({name: value * 1.1 for name, value in built.state_dict().items()})
    assert torch.allclose(*(m(tokens, positions, None, None).logits for m in (lean, plain)), atol=1e-4)
    built.to(torch.float64)
    ours, theirs = (model(tokens, positions, None, None).logits for model in (lean, plain))
    # the module's norms and its softmax are float32 whatever its type
    assert ours.dtype == torch.float64 and torch.allclose(ours, theirs, atol=1e-4)


class Scaled(nn.Linear):
    """Stands for a quantised or adapted layer."""


def replaced(built):
    built.model.layers[1].mlp.up_proj.__class__ = Scaled


def patched(built):
    built.model.layers[0].forward = built.model.layers[0].forward


def halved(built):
    built.lm_head.half()


CHANGES = {
    "it contains a Scaled: quantised, adapted or changed": replaced,
    "a hook on its LlamaModel": lambda built: built.model.register_forward_hook(lambda *_: None),
    "a hook on its LlamaDecoderLayer": patched,
    "its weights lie on several devices or have several types": halved,
}


@pytest.mark.parametrize("reason", CHANGES)
def test_changed_modules_go_through_transformers(reason):
    built = build("llama", {})
    CHANGES[reason](built)
    assert obstacle(built) == reason and not Model(built, "changed").lean


def test_a_module_that_was_asked_for_hidden_states_before_is_computed_here():
    built = build("llama", {})
    with torch.no_grad():
        built(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert built.model.layers[0]._forward_hooks and obstacle(built) == ""


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    "kind, changes, reason",
    [
        ("llama", {"rope_parameters": DYNAMIC}, "rope type dynamic"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("phi3", {}, "Phi3ForCausalLM is not of the Llama family"),
        ("gemma3_text", {}, "Gemma3ForCausalLM is not of the Llama family"),
    ],
)
def test_modules_that_compute_something_else_go_through_transformers(kind, changes, reason):
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **changes}))
    assert obstacle(built) == reason and not Model(built, "other").lean


def test_a_switch_sends_every_model_through_transformers(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    model = Model(module(0, 7), "switched off")
    assert not model.lean and model.obstacle == "DIVERSED_LEAN=0"
    assert len(model.cache(4).layers) == model.layers


BLOCKED = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("datasets", "jsonargparse", "pytorch_lightning", "lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import diversed

for folder in ("verifier", "runtime", "benchmarks"):
    package = importlib.import_module(f"diversed.{folder}")
    for found in pkgutil.walk_packages(package.__path__, f"diversed.{folder}."):
        importlib.import_module(found.name)
print("imported")
"""


def test_verifier_runtime_and_benchmarks_import_without_datasets_jsonargparse_and_lightning():
    answer = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd="/")
    assert answer.stdout == "imported\n", answer.stderr
