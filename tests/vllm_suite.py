"""vLLM's own classes with the plugin in them; run by test_vllm.py in a process of its own."""

import copy
import json
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch
from diversed.commands.export import export
from diversed.export import vllm as plugin
from diversed.files import sha256
from diversed.runtime.model import make_pair
from diversed.runtime.sampling import Sampling, beliefs, probabilities
from diversed.runtime.uniforms import uniforms
from diversed.runtime.vocabulary import token_table
from diversed.verifier.head import WeightHead
from diversed.verifier.law import DraftTree, draw
from diversed.verifier.methods import METHODS
from diversed.verifier.relax import Believed, relax
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu import model_states
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

# isort: split
from .support.kernels import DEVICE, quickened
from .support.models import module, rows_after, text_law, tokenizer
from .test_decode import LENGTH, VOCAB, chi_squared

DRAFTED = 2
PROMPT = [2, 3]
# An engine in this process keeps its share of a GPU's memory, and there are several.
SHARE = {} if DEVICE == "cpu" else {"gpu_memory_utilization": 0.2}
TEXTS = 300 if DEVICE == "cpu" else 20_000
if DEVICE == "cpu":
    import vllm.v1.worker.cpu.shm  # noqa: F401  buffers that need no pinned memory


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Two tiny models as folders that vLLM can load, and the same as a pair; no token ends a text."""
    folder, words = tmp_path_factory.mktemp("models"), tokenizer(VOCAB, end=False)
    modules = [module(seed, VOCAB, layers, hidden=64) for seed, layers in ((0, 2), (1, 1))]
    for name, each in zip(("target", "draft"), modules, strict=True):
        each.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    names = (str(folder / "target"), str(folder / "draft"))
    return make_pair(*modules, words, names)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if DEVICE == "cpu":
        quickened(monkeypatch)
        # vLLM has a kernel for top-k that cannot be interpreted, and the same in torch.
        monkeypatch.setattr("vllm.v1.sample.ops.topk_topp_sampler.HAS_TRITON", False)


@pytest.fixture(scope="session")
def bundle(pair, tmp_path_factory):
    return gate(pair, tmp_path_factory.mktemp("gate"))


def gate(pair, folder, features="logits", offset="", **card):
    """A gate of random weights as a bundle; its weights lie far apart."""
    torch.manual_seed(0)
    sizes = {"draft_hidden": 64, "target_hidden": 64, "width": 0}
    head = WeightHead(features, **sizes, offset=offset)
    torch.nn.init.normal_(head.net.weight, std=2)
    models = {
        role: {"name": model.name, "hash": model.hash, "hidden_size": 64}
        for role, model in (("target", pair.target), ("draft", pair.draft))
    }
    manifest = models | {"tokenizer": "c", "vocab": VOCAB, "sampling": vars(Sampling()), "task": "sums"} | card
    record = {"head": {"features": features, "offset": offset} | sizes, "manifest": manifest | {"relaxation": "none"}}
    (folder / "train").mkdir()
    save_file(head.state_dict(), folder / "train" / "head.safetensors")
    record |= {"traces_sha256": "d" * 64, "head_sha256": sha256(folder / "train" / "head.safetensors")}
    (folder / "train" / "train.json").write_text(json.dumps(record))
    export(train=str(folder / "train"), out=str(folder / "bundle"))
    return str(folder / "bundle")


def arguments(pair, relaxation, drafting=(), **options):
    drafting = {
        "method": "draft_model", "model": pair.draft.name, "num_speculative_tokens": DRAFTED,
        "draft_sample_method": "probabilistic",
    } | dict(drafting)  # fmt: skip
    return {
        "model": pair.target.name, "speculative_config": drafting, "additional_config": {"diversed": relaxation},
        "dtype": "float32", "max_model_len": 64, "max_num_seqs": 128, "max_num_batched_tokens": 1024,
        "enforce_eager": True,
    } | SHARE | options  # fmt: skip


def chosen(relaxation):
    """The rule, and the head if there is one, on the CPU."""
    rule, bundle = plugin.chosen(relaxation)
    return rule, copy.deepcopy(bundle.head).cpu() if bundle else None


def law(pair, rule, head):
    """[V ** LENGTH] the law of vLLM's texts: the first token comes from the prefill and is the target's own, all
    others of a text not longer than the draft by more than one are relaxed.
    """
    draft = rows_after(pair.draft, PROMPT, LENGTH, VOCAB)
    rows = {}
    for text, target in rows_after(pair.target, PROMPT, LENGTH, VOCAB).items():
        tree = DraftTree(torch.zeros(1, 1, dtype=torch.long), (-1,), draft[text][None, None], target[None, None])
        weight = None if head is None else head.weight(tree.draft, tree.target)
        rows[text] = relax(tree, rule, weight).target[0, 0] if text else target
    return text_law(rows, LENGTH, VOCAB)


def configured(pair, relaxation, drafting=(), **options):
    return EngineArgs(**arguments(pair, relaxation, drafting, **options)).create_engine_config()


def test_vllm_finds_the_plugin_by_its_entry_point():
    (found,) = entry_points(group="vllm.general_plugins", name="diversed")
    assert found.load() is plugin.register


@pytest.mark.parametrize("method", ["standard", "block"])
def test_texts_of_the_engine_follow_the_relaxed_law(pair, bundle, method):
    """Chi-squared over all 64 texts of three tokens at a level of 1e-5; the seeds are fixed."""
    engine = LLM(**arguments(pair, bundle, {"rejection_sample_method": method}))
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True) for seed in range(TEXTS)]
    made = engine.generate([{"prompt_token_ids": PROMPT}] * TEXTS, params, use_tqdm=False)
    texts = [SimpleNamespace(tokens=list(text.outputs[0].token_ids)) for text in made]
    relaxed = chi_squared(texts, law(pair, *chosen(bundle)))
    exact = chi_squared(texts, law(pair, *chosen("none")))
    print(f"{method}: p under the relaxed law {relaxed:.3g}, under the exact one {exact:.3g}")
    assert relaxed > 1e-5 > exact, "the test sees a wrong law"


# What requests ask for, and how many tokens were drafted for each; seven of them, in a batch of vLLM's own making.
ASKED = [
    ({"temperature": 1.0, "seed": 1}, 2),
    ({"temperature": 0.7, "seed": 2}, 2),
    ({"temperature": 0.0, "seed": 3}, 2),
    ({"temperature": 1.3, "seed": 4, "top_k": 3}, 2),
    ({"temperature": 1.0, "seed": 5}, 1),
    ({"temperature": 0.0, "seed": 6}, 1),
    ({"temperature": 1.0, "seed": 7}, 0),
]
SIZE = 6  # of the vocabulary


@pytest.fixture(params=["ensemble:0.6", "learned", "learned;bias=2", "tokens", "lenient:0.5", "none"])
def relaxation(request, pair, bundle, tmp_path):
    if request.param == "tokens":
        return gate(pair, tmp_path, "logits+tokens", "divergence:0.5")
    return request.param.replace("learned", bundle)


def sampler(pair, relaxation, method):
    """The rejection sampler that the plugin gives vLLM, with vLLM's own sampler and states, for the requests ASKED."""
    config = configured(pair, relaxation, {"rejection_sample_method": method})
    states = RequestState(8, 64, 64, DRAFTED, SIZE, torch.device(DEVICE))
    base = Sampler(config, 8, SIZE, torch.device(DEVICE), states)
    for slot, (asked, _) in enumerate(ASKED):
        base.add_request(7 - slot, SamplingParams(**asked))
    base.apply_staged_writes()
    state = model_states.resolve_model_state_cls(config, torch.nn.Linear(1, 1))
    assert issubclass(state, DefaultModelState)
    runner = SimpleNamespace(vllm_config=config, device=torch.device(DEVICE))
    kept, found = state.custom_sampler(runner, base)
    assert kept is base and isinstance(found, RejectionSampler)
    return found


def inputs(seed):
    """Arguments of `_verify`: random rows, drafts drawn from the draft's rows, as vLLM lays them out."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor([drafted + 1 for _, drafted in ASKED])
    first = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    slots = 7 - torch.arange(len(ASKED))
    logits = 2 * torch.randn(int(first[-1]), SIZE, generator=generator)
    draft = 2 * torch.randn(8, DRAFTED, SIZE, generator=generator)
    tokens = torch.zeros(len(logits), dtype=torch.int32)
    for index, (asked, drafted) in enumerate(ASKED):
        rows = probabilities(draft[slots[index], :drafted], Sampling(temperature=asked["temperature"]))
        if drafted:
            tokens[first[index] + 1 : first[index + 1]] = rows.multinomial(1, generator=generator)[:, 0].int()
    local = torch.cat([torch.arange(count) for count in counts])
    expanded = slots.repeat_interleave(counts)
    given = {
        "logits": logits, "draft_logits": draft, "draft_sampled": tokens, "pos": 10 * (1 + expanded) + local,
        "cu_num_logits": first, "idx_mapping": slots, "idx_mapping_np": slots.numpy(), "expanded_idx_mapping": expanded,
        "expanded_local_pos": local, "seq_lens_upper_bound_np": (60 * torch.ones(len(slots))).int().numpy(),
        "verify_draft_sampled": tokens,
    }  # fmt: skip
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def texts(answer):
    """What each request was given."""
    _, sampled, count = answer
    assert sampled.dtype == torch.int64 and count.dtype == torch.int32 and sampled.shape == (len(ASKED), DRAFTED + 1)
    return [row[:number] for row, number in zip(sampled.tolist(), count.tolist(), strict=True)]


def alone(found, given, index, relaxation, method, pair):
    """What our loop gives a request: its own chain, rows by `probabilities`, the law of the relaxed tree, one draw; and
    vLLM's plain sampler where nothing was drafted, so that a seed gives one text whatever batch it is in.
    """
    if ASKED[index][1] == 0:
        at, slot = given["cu_num_logits"][index : index + 1].long(), given["idx_mapping"][index : index + 1]
        pos, local = given["pos"][at], given["expanded_local_pos"][at]
        numbers = slot.cpu().numpy()
        return found.sampler.sample(
            given["logits"][at], slot, slot, numbers, pos, given["draft_sampled"][at], local, numbers + 60
        )[0].tolist()
    given = {name: value.cpu() for name, value in given.items() if isinstance(value, torch.Tensor)}
    (asked, drafted), slot = ASKED[index], int(given["idx_mapping"][index])
    first = int(given["cu_num_logits"][index])
    sampling = Sampling(temperature=asked["temperature"], top_k=asked.get("top_k", 0))
    target = probabilities(given["logits"][first : first + drafted + 1], sampling)[None]
    leaf = torch.zeros(1, 1, SIZE)
    draft = torch.cat(
        [probabilities(given["draft_logits"][slot, :drafted], Sampling(sampling.temperature))[None], leaf], 1
    )
    tokens = given["draft_sampled"][first : first + drafted + 1].long()[None]
    rule, head = chosen(relaxation)
    parents = tuple(range(-1, drafted))
    raw = given["logits"][first : first + drafted + 1], given["draft_logits"][slot, :drafted]
    p, q = beliefs(raw[0])[None], torch.cat([beliefs(raw[1])[None], leaf], 1)
    table = token_table(pair.tokenizer, VOCAB)
    weight = head.weight(q, p, bias=rule.bias or 0.0, before=tokens, table=table) if head else None
    options = {"believed": Believed(p, q), "greedy": sampling.greedy, "filtered": sampling.filters}
    relaxed = relax(DraftTree(tokens, parents, draft, target), rule, weight, **options).target
    coins = uniforms(torch.tensor([asked["seed"]]), given["pos"][first : first + 1] + 1, 2)
    name = {"standard": "token", "block": "block"}[method]
    verdict = draw(METHODS[name].law(DraftTree(tokens, parents, draft, relaxed)), coins)
    return [*tokens[0, 1 : int(verdict.node) + 1].tolist(), int(verdict.token)]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_batch_of_vllm_gets_the_verdicts_of_each_request_alone(pair, relaxation, method, monkeypatch):
    """By the law, by our kernels, and in blocks of one request: the same texts as one request at a time."""
    found = sampler(pair, relaxation, method)
    lengths = set()
    for seed in range(4):
        given = inputs(seed)
        expected = [alone(found, given, index, relaxation, method, pair) for index in range(len(ASKED))]
        assert texts(found._verify(**given)) == expected
        with monkeypatch.context() as patch:
            patch.setattr(found, "kernel", METHODS[plugin.METHOD[method]].kernel)
            assert texts(found._verify(**given)) == expected
        with monkeypatch.context() as patch:
            patch.setattr(plugin, "AT_ONCE", 1)
            assert texts(found._verify(**given)) == expected
        lengths |= {len(text) for text in expected}
    assert lengths == {1, 2, 3}


def test_the_log_says_that_the_relaxation_is_in_place(pair, caplog):
    sampler(pair, "ensemble:0.9", "block")
    assert "diversed: drafts are verified with the relaxation ensemble:0.9" in caplog.text


def test_a_draft_that_is_not_to_be_taken_ends_the_text_before_it(pair):
    """As in vLLM: such drafts come from a grammar or stand in for some that were never made."""
    found, given = sampler(pair, "ensemble:0.9", "standard"), inputs(0)
    given["verify_draft_sampled"] = given["draft_sampled"].masked_fill(given["expanded_local_pos"] == 1, -1)
    assert [len(text) for text in texts(found._verify(**given))] == [1] * len(ASKED)


def test_tokens_that_are_taken_from_the_target_do_not_come_back_by_the_draft(pair):
    found = sampler(pair, "ensemble:0.9", "standard")
    for seed in range(10):
        given = inputs(seed)
        forbidden = torch.rand(given["logits"].shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        forbidden = (forbidden & (torch.arange(SIZE) > 0)).to(DEVICE)
        given["logits"] = given["logits"].masked_fill(forbidden, -torch.inf)
        answer = found._verify(**given)
        for index, text in enumerate(texts(answer)):
            rows = answer[0][given["cu_num_logits"][index] :]
            assert all(rows[node, token] > -torch.inf for node, token in enumerate(text))


def test_logits_that_are_not_numbers_cost_their_own_request_alone(pair, monkeypatch):
    found, given = sampler(pair, "ensemble:0.5", "standard"), inputs(0)
    monkeypatch.setattr(found, "kernel", METHODS["token"].kernel)
    before = texts(found._verify(**given))
    given["logits"][0, 2] = torch.nan
    after = texts(found._verify(**given))
    assert after[1:] == before[1:] and after[0] == [int(given["logits"][0].nan_to_num(-1e9).argmax())]


def test_ranks_that_hold_the_same_logits_agree(pair, bundle):
    """Nothing is drawn from a global generator, whatever state it is in."""
    found = []
    for rank in range(2):
        torch.manual_seed(rank)
        found.append([texts(sampler(pair, bundle, "block")._verify(**inputs(seed))) for seed in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "relaxation, drafting, sentence",
    [
        ("ensemble:0.3", {"draft_sample_method": "greedy"}, "set `draft_sample_method` probabilistic, got greedy"),
        ("ensemble:0.3", {"method": "ngram", "model": None, "prompt_lookup_max": 2}, "got speculative method ngram"),
        ("ensemble:0.3", {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}, "got synthetic"),
        ("ensemble:0.3;budget=2", {}, "there is no budget"),
        ("ensemble:3", {}, "weight must lie in"),
        ("runs/nowhere", {}, "bundle runs/nowhere is not a folder"),
        (3, {}, "must be a relaxation, such as a bundle's folder, got 3"),
        ("", {}, "unknown relaxation ''"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_a_model_is_loaded(pair, relaxation, drafting, sentence):
    with pytest.raises((ValueError, OSError), match=sentence):
        configured(pair, relaxation, drafting)


def test_bundles_that_do_not_fit_are_refused(pair, tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    with pytest.raises(ValueError, match="reads hidden states, and vLLM keeps none of the draft"):
        configured(pair, gate(pair, tmp_path / "hidden", "hidden"))
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="is for a vocabulary of 9, these models share 4"):
        configured(pair, gate(pair, tmp_path / "other", vocab=9))
    with pytest.raises(ValueError, match="relaxes towards a draft model, got speculative method none"):
        EngineArgs(**arguments(pair, "none") | {"speculative_config": None}).create_engine_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="needs the V2 model runner"):
        configured(pair, "ensemble:0.3")


def test_a_configuration_without_a_relaxation_gets_what_vllm_gives(pair):
    plugin.register()
    plugin.register()
    config = EngineArgs(**arguments(pair, "none") | {"additional_config": {}}).create_engine_config()
    assert config.use_v2_model_runner
    assert model_states.resolve_model_state_cls(config, torch.nn.Linear(1, 1)) is DefaultModelState


def test_a_state_with_a_sampler_of_its_own_and_another_vllm_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="Own brings a sampler of its own"):
        plugin.relaxed_state(type("Own", (DefaultModelState,), {"custom_sampler": lambda self, sampler: None}))
    monkeypatch.setattr(RejectionSampler, "_verify", lambda self, logits: None)
    with pytest.raises(ValueError, match=r"this vLLM verifies \['self', 'logits'\]"):
        plugin.relaxed_sampler()
