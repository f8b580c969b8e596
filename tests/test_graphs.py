"""The static step on a CPU: the loop's own texts and statistics, from stages that a CUDA graph can hold."""

import copy
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from diversed.runtime import graphs
from diversed.runtime.batch import Batch
from diversed.runtime.completion import Request
from diversed.runtime.engine import Engine
from diversed.runtime.graphs import StaticBatch, StaticState, StaticStep, obstacle
from diversed.runtime.model import load_pair, make_pair
from diversed.runtime.relaxer import Relaxer
from diversed.runtime.sampling import Sampling
from diversed.verifier.head import WeightHead
from diversed.verifier.kernels import NAMES
from diversed.verifier.methods import METHODS, Method
from diversed.verifier.relax import parse
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from .support.models import module, tiny_pair, tokenizer
from .test_selector import write_selector

VOCAB = 11
BLENDS = ["none", "ensemble:0.3", "learned;bias=0.7"]
RULES = ["ensemble:0.4;blend=logits", "lenient:0.5", "cascade-opt:0.2", "cascade-token:0.2", "typical:0.3,0.5;budget=2"]
# Rules change rows and methods read them: each method meets every kind of weight, every other rule one method.
CASES = [("plain", "none"), *product(METHODS, [*BLENDS, "learned;budget=1"]), *(("univer", rule) for rule in RULES)]


def make_engine(pair, method="block", relaxation="none", device="cpu", draft_length=3, **options) -> Engine:
    """An engine whose gate, where the relaxation is learned, is a random head on everything a head can see."""
    rule = parse(relaxation)
    engine = Engine(pair, method, "none" if rule.name == "learned" else rule, draft_length, **options)
    if rule.name == "learned":
        torch.manual_seed(0)
        head = WeightHead("both", pair.draft.hidden_size, pair.target.hidden_size, width=3)
        head.net[2].weight.data.normal_()
        head = head.to(device)
        bias = rule.bias or 0.0
        weigh = lambda draft, target, hidden: head.weight(draft, target, hidden, bias)  # noqa: E731
        engine.relaxer = Relaxer(rule, weigh, True, sampling=engine.sampling)
        engine.hidden = True
    return engine


def requests(count: int = 8, longest: int = 40, most: int = 16, vocab: int = VOCAB) -> dict[int, Request]:
    """Prompts of one and of up to `longest` tokens, texts of up to `most`, some with stop strings."""
    draw = random.Random(1)
    prompts = [[draw.randrange(2, vocab) for _ in range(draw.randint(1, longest) if i else 1)] for i in range(count)]
    stops = [("w3 w4", "w9") if i % 4 == 3 else () for i in range(count)]
    return {5 * i: Request(prompts[i], i, draw.randint(1, most), stops[i]) for i in range(count)}


def statistics(completion) -> tuple:
    c = completion
    counts = c.drafted, c.accepted, c.drafted_by_depth, c.accepted_by_depth, c.target_calls, c.draft_calls
    return c.tokens, c.text, c.finished, counts, c.weight_count


def same(ours: dict, theirs: dict) -> None:
    assert {key: statistics(c) for key, c in ours.items()} == {key: statistics(c) for key, c in theirs.items()}
    for key, c in ours.items():  # sums over float32 rows, which masks of another width round otherwise
        assert c.substitutions == pytest.approx(theirs[key].substitutions, abs=1e-4)
        assert c.weight_sum == pytest.approx(theirs[key].weight_sum, abs=1e-4)


@pytest.mark.parametrize("method, relaxation", CASES)
def test_the_static_step_gives_the_texts_and_statistics_of_the_loop(method, relaxation):
    """Eight prompts through three rows, one in the place of another; no text differs by a rounding tie."""
    engine = make_engine(tiny_pair(VOCAB), method, relaxation)
    same(engine.run(requests(), 3, static=True), engine.run(requests(), 3))
    assert len(engine.static) == 1, "requests came and went without another shape"


OPTIONS = {
    "delayed paths": ("gbv", {"branches": 3, "trunk": 1, "draft_length": 2}),
    "relaxed leaves": ("univer", {"relax_leaf": True}),
    "relaxed leaf of a chain": ("block", {"relax_leaf": True}),
    "paths for a tree's method": ("traversal", {"drafting": "paths", "branches": 3}),
    "cold": ("greedy_tree", {"sampling": Sampling(0)}),
    "cold with a head": ("univer", {"sampling": Sampling(0), "relaxation": "learned;bias=0.7"}),
    "cold with a choice": ("block", {"sampling": Sampling(0), "relaxation": "learned;blend=choice"}),
    "cold with a budget": ("traversal", {"sampling": Sampling(0), "relaxation": "lenient:0.1;budget=2"}),
    "a coin": ("gbv", {"sampling": Sampling(0), "relaxation": "coin:0.4"}),
    "cool with a head": ("traversal", {"sampling": Sampling(0.7), "relaxation": "learned;bias=0.7"}),
    "filtered": ("rrsw", {"sampling": Sampling(0.8, top_k=5, top_p=0.9)}),
    "filtered with a head": ("univer", {"sampling": Sampling(0.8, top_k=5), "relaxation": "learned;bias=0.7"}),
    "filtered with a rule": ("block", {"sampling": Sampling(1, top_p=0.9), "relaxation": "typical:0.3,0.5"}),
    "one token": ("token", {"draft_length": 1}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_of_a_tree_is_honoured(case):
    method, options = OPTIONS[case]
    engine = make_engine(tiny_pair(VOCAB), method, **({"relaxation": "ensemble:0.3"} | options))
    same(engine.run(requests(), 4, static=True), engine.run(requests(), 4))


CHOSEN = [(method, "network") for method in METHODS] + [("gbv", "auto")]


def choosing(path: Path, pair, method: str, way: str, relaxation="none", device="cpu", **options) -> Engine:
    """An engine whose selector has several shapes and grows more than one of them."""
    branches = "auto" if way == "auto" else write_selector(path, pair, method)
    return make_engine(pair, method, relaxation, device, branches=branches, draft_length=2, **options)


def grown(engine: Engine) -> list[int]:
    """How many shapes each of the engine's states has a step for."""
    return [len(state.steps) for state in engine.static.values()]


@pytest.mark.parametrize("method, way", CHOSEN)
def test_a_tree_that_is_chosen_before_each_step_is_the_loops(tmp_path, method, way):
    """One request at a time and three, that come and go; shapes that were not chosen have no step."""
    engine = choosing(tmp_path, tiny_pair(VOCAB), method, way, "learned;bias=0.7")
    for batch in (1, 3):
        same(engine.run(requests(), batch, static=True), engine.run(requests(), batch))
    assert all(1 < count <= len(engine.shapes) for count in grown(engine))


@pytest.mark.parametrize("relaxation", ["none", "learned;budget=1", "lenient:0.5"])
@pytest.mark.parametrize("way", ["auto", "network"])
def test_a_chosen_tree_is_relaxed_as_the_loops(tmp_path, way, relaxation):
    engine = choosing(tmp_path, tiny_pair(VOCAB), "gbv", way, relaxation, trunk=1)
    same(engine.run(requests(), 3, static=True), engine.run(requests(), 3))


@pytest.mark.parametrize("way", ["auto", "network"])
def test_a_gate_is_not_shown_the_hidden_states_that_a_choice_needs(tmp_path, way):
    engine = choosing(tmp_path, tiny_pair(VOCAB), "gbv", way, "learned")
    shown = []
    weigh = lambda draft, target, hidden: shown.append(hidden) or 0.9 * draft[..., 2]  # noqa: E731
    engine.relaxer = Relaxer(engine.relaxer.rule, weigh)  # at the sampling of the engine, which is neutral
    engine.hidden = engine.selector.looks_back
    same(engine.run(requests(), 3, static=True), engine.run(requests(), 3))
    assert shown and all(hidden is None for hidden in shown)


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(0.8, top_k=5, top_p=0.9)])
@pytest.mark.parametrize("method, way", [("gbv", "auto"), ("univer", "network"), ("block", "network")])
def test_a_tree_is_chosen_at_every_sampling(tmp_path, method, way, sampling):
    engine = choosing(tmp_path, tiny_pair(VOCAB), method, way, "ensemble:0.3", sampling=sampling, relax_leaf=True)
    same(engine.run(requests(), 3, static=True), engine.run(requests(), 3))


def test_a_chosen_step_is_read_at_once():
    given = []
    engine = make_engine(tiny_pair(VOCAB), "gbv", branches="auto")
    (done,) = engine.run({7: Request([2, 3], 0, 12)}, 1, lambda *news: given.append(news[1]), static=True).values()
    assert sum(given, []) == done.tokens and len(given) == done.target_calls


class Capturable(TorchDispatchMode):
    """Notes every operation with the shapes it is given, and stops at those that take a tensor from the host."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = [x for x in tree_flatten((args, kwargs or {}))[0] if isinstance(x, torch.Tensor)]
        on_host = [x for x in given if x.device.type == "cpu"]
        if len(on_host) < len(given):
            assert not on_host, f"{operation} reads {on_host} from the host"
        elif on_host and "device" in (kwargs or {}):
            assert torch.device(kwargs["device"]).type == "cpu", f"{operation} sends {on_host} to the device"
        self.seen.append((str(operation), *(tuple(x.shape) for x in given)))
        return operation(*args, **(kwargs or {}))


class NoLists(TorchFunctionMode):
    """Stops where a list of Python becomes a tensor on the device, which no operation shows."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(each, list) for each in index), f"{args[1]} goes to the device"
        if function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            assert torch.device((kwargs or {}).get("device") or "cpu").type == "cpu", f"{args[0]} goes to the device"
        return function(*args, **(kwargs or {}))


FORBIDDEN = {
    "a list as an index": lambda rows: rows[:, [0, 2]],
    "a list": lambda rows: torch.tensor([1, 2], device=rows.device),
    "a number": lambda rows: torch.as_tensor(1, device=rows.device),
    "a copy there": lambda rows: torch.zeros(2).to(rows.device),
    "a copy into": lambda rows: rows.copy_(torch.zeros(2, 3)),
    "a copy back": lambda rows: rows.cpu(),
    "one value": lambda rows: rows[0, 0].item(),
    "a condition": lambda rows: bool((rows > 0).any()),
    "a mask as an index": lambda rows: rows[rows > 0],
    "equality": lambda rows: torch.equal(rows, rows),
    "all values": lambda rows: rows.tolist(),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_graph_cannot_hold_is_noticed(what):
    rows = torch.zeros(2, 3, device="meta")
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), Capturable(), NoLists():
        FORBIDDEN[what](rows)
    with Capturable(), NoLists():
        assert torch.where(rows > 0, rows, 0.5).sum().mul(2.0).is_meta and torch.tensor(2.0).is_cpu


@pytest.fixture(scope="module")
def shadow():
    """The tiny pair without its weights: a device that computes shapes and from which nothing can be read."""
    modules = [copy.deepcopy(model.module).to("meta") for model in (tiny_pair(VOCAB).target, tiny_pair(VOCAB).draft)]
    return make_pair(*modules, tokenizer(VOCAB))


@torch.no_grad()
@pytest.mark.parametrize("method, relaxation", CASES)
def test_no_step_waits_for_the_host_or_depends_on_data(shadow, method, relaxation):
    """On a device without data: an operation that needs a value, or takes one from the host, fails there."""
    engine = make_engine(shadow, method, relaxation, "meta", draft_length=2)
    assert obstacle(engine) == ""
    ways = {False, method in NAMES and relaxation in BLENDS}
    for wanted in ways:
        step = StaticStep(StaticState(engine, 3, 64), engine.shape, kernels=wanted)
        assert (step.step.way == "kernel") == wanted
        with Capturable() as mode, NoLists():
            step.draw_tree()
            step.verify()
        used = any("diversed.verify" in operation for operation, *_ in mode.seen)
        assert used == wanted and len(mode.seen) > 100


@torch.no_grad()
@pytest.mark.parametrize("method, way", CHOSEN)
def test_no_chosen_step_waits(tmp_path, shadow, method, way):
    """Neither do the numbers that the choice reads."""
    relaxation = "ensemble:0.3"
    if way == "network":  # whose weights cannot be read into a device without data
        engine = choosing(tmp_path, tiny_pair(VOCAB), method, way, relaxation)
        engine.pair, selector = shadow, engine.selector
        selector.network, selector.setting = selector.network.to("meta"), selector.setting.to("meta")
    else:
        engine = choosing(tmp_path, shadow, method, way, relaxation)
    for wanted in {False, method in NAMES and METHODS[method].drafting != "paths"}:
        state = StaticState(engine, 2, 64)
        for shape in engine.shapes:
            step = StaticStep(state, shape, kernels=wanted)
            assert (step.step.way == "kernel") == wanted
            with Capturable(), NoLists():
                step.draw_tree()
                step.verify()


@torch.no_grad()
@pytest.mark.parametrize("case", OPTIONS)
def test_no_option_makes_a_step_wait(shadow, case):
    method, options = OPTIONS[case]
    engine = make_engine(shadow, method, device="meta", **({"relaxation": "ensemble:0.3"} | options))
    for wanted in {False, method in NAMES and options.get("drafting") != "paths" and engine.relaxer.fusible}:
        step = StaticStep(StaticState(engine, 2, 64), engine.shape, kernels=wanted)
        assert (step.step.way == "kernel") == wanted
        with Capturable(), NoLists():
            step.draw_tree()
            step.verify()


@torch.no_grad()
@pytest.mark.parametrize("method, branches", [("traversal", None), ("gbv", None), ("gbv", "auto")])
def test_what_is_computed_does_not_depend_on_the_texts(method, branches):
    """The same operations on the same shapes for two batches and two steps of each, which accept different numbers."""
    engine, noted, lengths = make_engine(tiny_pair(VOCAB), method, "ensemble:0.6;budget=2", branches=branches), [], []
    for drawn in (requests(3), requests(3, longest=3)):
        state = StaticBatch(Batch(engine, drawn)).static
        step = state.step(engine.shapes[-1])
        for _ in range(2):
            with Capturable() as mode, NoLists():
                step.draw_tree()
                step.verify()
            noted.append(mode.seen)
            lengths.append(state.length.tolist())
    assert noted[0] == noted[1] == noted[2] == noted[3] and len(set(map(tuple, lengths))) == 4


FUSED = [("block", "none", 1), ("univer", "learned;bias=0.7", 0.7), *product(NAMES, ["learned;bias=0.7"], [1])]


@pytest.mark.parametrize("method, relaxation, temperature", FUSED)
def test_from_logits_the_kernels_give_the_same_texts(monkeypatch, method, relaxation, temperature):
    """Triton's interpreter runs them; no text differs by a uniform near a step."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the process below runs it")
    from .support import kernels

    kernels.quickened(monkeypatch)
    options = {"draft_length": 2, "sampling": Sampling(temperature)}
    engine, drawn = make_engine(tiny_pair(VOCAB), method, relaxation, **options), requests(3, most=3)
    same(engine.run(drawn, 2, static=True), engine.run(drawn, 2))
    (state,) = engine.static.values()
    assert state.step(engine.shape).step.way == "kernel"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled on this machine")
def test_kernels_are_interpreted_in_a_process_of_their_own():
    """Triton decides when it is first imported, and here others have imported it."""
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider", "-k", "from_logits"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[1])
    assert answer.returncode == 0 and f"{len(FUSED)} passed" in answer.stdout, answer.stdout[-2000:]


def qwen3(seed: int, layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.4, "max_position_embeddings": 128}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, **sizes)).float()


@pytest.mark.parametrize("method", ["block", "traversal"])
def test_other_families_decode_as_the_loop_does(method):
    engine = make_engine(make_pair(qwen3(0, 2), qwen3(1, 1), tokenizer(VOCAB)), method, "learned;bias=0.7")
    same(engine.run(requests(), 3, static=True), engine.run(requests(), 3))


@pytest.mark.parametrize("method", ["block", "univer"])
def test_the_packaged_pair_decodes_as_the_loop_does(method):
    pair = load_pair()
    prompts = [pair.tokenizer.encode(text) for text in ("12+30=", "7", "99+1=100\n5+", "3+4=7\n10+20=30\n8+")]
    drawn = {i: Request(tokens, i, 12 + 4 * i) for i, tokens in enumerate(prompts)}
    engine = make_engine(pair, method, "ensemble:0.3")
    same(engine.run(drawn, 2, static=True), engine.run(drawn, 2))


def test_a_longer_request_takes_every_row_to_larger_caches(monkeypatch):
    monkeypatch.setattr(graphs, "BUCKET", 16)
    engine = make_engine(tiny_pair(VOCAB), "univer", "ensemble:0.5")
    drawn = requests(6) | {99: Request([2, 3] * 45, 3, 20)} | {key + 100: each for key, each in requests(4).items()}
    same(engine.run(drawn, 3, static=True), engine.run(drawn, 3))
    small, large = (state.capacity for state in engine.static.values())
    assert small < large
    engine.run(drawn, 4, static=True)
    assert len(engine.static) == graphs.KEPT


def test_tokens_are_handed_out_one_step_late_and_the_end_is_said_once():
    given: dict[int, list] = {}

    def on_step(index, new, ended):
        given.setdefault(index, []).append((new, ended))

    done = make_engine(tiny_pair(VOCAB)).run(requests(), 3, on_step, static=True)
    for index, completion in done.items():
        assert [token for new, _ in given[index] for token in new] == completion.tokens
        assert [ended for _, ended in given[index]] == [False] * (completion.target_calls - 1) + [True]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("branches", [2, "auto"])
def test_logits_that_are_not_finite_are_refused_with_the_loops_sentence(which, static, branches):
    modules = {name: module(seed, VOCAB) for seed, name in enumerate(("target", "draft"))}
    modules[which].lm_head.weight.data[3] = torch.nan
    engine = make_engine(make_pair(modules["target"], modules["draft"], tokenizer(VOCAB)), "gbv", branches=branches)
    with pytest.raises(
        ValueError, match=f"the {which} model gave logits that are not finite for prompt 5; try another"
    ):
        engine.run({5: Request([2, 3], 0, 8), 6: Request([4], 0, 8)}, static=static)
    assert not engine.static, "their caches hold what is not finite"


def windowed() -> MistralForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MistralForCausalLM(MistralConfig(vocab_size=VOCAB, num_key_value_heads=1, sliding_window=5, **sizes))


def test_what_the_static_step_cannot_do_stays_with_the_loop(monkeypatch):
    pair = tiny_pair(VOCAB)
    engine = make_engine(pair, relaxation="learned")
    engine.relaxer = replace(engine.relaxer, checked=True)
    assert obstacle(engine) == "the answers of a weight function of your own are looked at"
    engine = make_engine(make_pair(windowed(), windowed(), tokenizer(VOCAB)))
    assert obstacle(engine) == "layers of target see a window of tokens"
    with pytest.raises(ValueError, match="a step that cannot be had here: layers of target see a window"):
        engine.run(requests(), static=True)
    engine = make_engine(pair)
    engine.method = Method(lambda tree: None, "chain")
    assert obstacle(engine) == "a method of your own may wait for the device"
    monkeypatch.setenv("DIVERSED_LEAN", "0")
    engine = make_engine(make_pair(module(0, VOCAB), module(1, VOCAB), tokenizer(VOCAB)))
    assert obstacle(engine) == "target goes through transformers: DIVERSED_LEAN=0"
    engine.run(requests(2))
    assert not engine.static


@pytest.fixture(scope="module")
def on_gpu():
    modules = [copy.deepcopy(model.module).to("cuda") for model in (tiny_pair(VOCAB).target, tiny_pair(VOCAB).draft)]
    return make_pair(*modules, tokenizer(VOCAB))


@pytest.mark.gpu
@pytest.mark.parametrize("method, relaxation", CASES)
def test_captured_steps_give_the_loops_texts_on_a_gpu(on_gpu, method, relaxation):
    engine = make_engine(on_gpu, method, relaxation, "cuda")
    captured, loop = engine.run(requests(), 3), engine.run(requests(), 3, static=False)
    (state,) = engine.static.values()
    assert all(isinstance(work.__self__, torch.cuda.CUDAGraph) for work in state.step(engine.shape).stages.values())
    # kernel and law may part where a uniform is within 1e-6 of a step: once in some thousand texts of 16 tokens
    assert sum(statistics(captured[key]) != statistics(loop[key]) for key in loop) <= 1
    same(engine.run(requests(), 3), captured)


@pytest.mark.gpu
@pytest.mark.parametrize("method, way", [("block", "network"), ("traversal", "network"), ("gbv", "auto")])
def test_every_shape_that_is_chosen_is_captured_and_gives_the_loops_texts(on_gpu, tmp_path, method, way):
    engine = choosing(tmp_path, on_gpu, method, way, "learned;bias=0.7", "cuda")
    captured, loop = engine.run(requests(), 3), engine.run(requests(), 3, static=False)
    (state,) = engine.static.values()
    stages = [work for step in state.steps.values() for work in step.stages.values()]
    assert len(stages) > 2 and all(isinstance(work.__self__, torch.cuda.CUDAGraph) for work in stages)
    # as above, and a choice may part where two shapes are within rounding
    assert sum(statistics(captured[key]) != statistics(loop[key]) for key in loop) <= 1


@pytest.mark.gpu
def test_graphs_of_several_shapes_share_their_memory_and_do_not_disturb_each_other(on_gpu):
    engines = [make_engine(on_gpu, method, "ensemble:0.3", "cuda") for method in ("block", "traversal", "univer")]
    alone = [engine.run(requests(), 3) for engine in engines]
    for engine, before in zip(engines, alone, strict=True):
        same(engine.run(requests(), 3), before)
        engine.run(requests(), 4)
