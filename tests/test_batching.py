"""Rows that come and go: a text is the same whoever shares its batch, and the caches stay as large as they must be."""

import random
from dataclasses import replace

import pytest
import torch
from diversed.benchmarks import bench_memory as memory
from diversed.runtime import batch as batches
from diversed.runtime.batch import SLOTS, Batch
from diversed.runtime.completion import Request
from diversed.runtime.engine import Engine, decode
from diversed.runtime.groups import Models
from diversed.runtime.model import make_pair
from diversed.verifier.methods import METHODS
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from .support.models import tiny_pair, tokenizer

VOCAB = 11


def mixed_requests(count: int, longest: int = 40, most: int = 20, seed: int = 0) -> dict[int, Request]:
    """Prompts of 1 to `longest` tokens, the first of one token, and texts of at most 1 to `most`; some have a stop."""
    draw = random.Random(seed)
    lengths = [1, *(draw.randint(1, longest) for _ in range(count - 1))]
    prompts = [[draw.randrange(2, VOCAB) for _ in range(length)] for length in lengths]
    stop = [("w3 w4", "w9") if i % 4 == 3 else () for i in range(count)]
    return {10 * i: Request(prompts[i], i, draw.randint(1, most), stop[i]) for i in range(count)}


def counts(completion) -> tuple:
    c = completion
    return c.tokens, c.text, c.finished, c.accepted, c.drafted, c.drafted_by_depth, c.accepted_by_depth, c.target_calls


@pytest.mark.parametrize("method", [*METHODS, "plain"])
def test_texts_do_not_depend_on_who_came_before_in_their_row(method):
    """Prompts of one token and of forty, in any order of arrival, against each alone."""
    requests = mixed_requests(14)
    relaxation = "none" if method == "plain" else "ensemble:0.5"
    engine = Engine(tiny_pair(VOCAB), method, relaxation, draft_length=3)
    alone = engine.run(requests, 1)
    backwards = dict(reversed(requests.items()))
    for other in (engine.run(requests, 4), engine.run(backwards, 3)):
        assert {key: counts(c) for key, c in other.items()} == {key: counts(c) for key, c in alone.items()}
        for key, c in other.items():  # sums of float32 rows, which other batches round otherwise
            assert c.substitutions == pytest.approx(alone[key].substitutions, abs=1e-5)
            assert c.mean_weight == pytest.approx(alone[key].mean_weight, nan_ok=True)


def test_the_number_of_paths_is_chosen_from_the_rows_own_past():
    requests = mixed_requests(12)
    engine = Engine(tiny_pair(VOCAB), "gbv", draft_length=2, branches="auto", trunk=1)
    alone, together = engine.run(requests, 1), engine.run(requests, 3)
    assert {key: counts(c) for key, c in together.items()} == {key: counts(c) for key, c in alone.items()}


@pytest.mark.parametrize("budget", [0.0, 2.0])
def test_a_budget_is_spent_by_its_own_request_alone(budget):
    requests = mixed_requests(12)
    engine = Engine(tiny_pair(VOCAB), "traversal", f"ensemble:0.6;budget={budget}", draft_length=3)
    together = engine.run(requests, 3)
    assert [counts(c) for c in together.values()] == [counts(c) for c in engine.run(requests, 1).values()]
    assert all(c.substitutions <= budget for c in together.values())
    assert max(c.substitutions for c in together.values()) > budget / 2 or budget == 0


def test_prompts_are_prefilled_in_chunks_of_any_size(monkeypatch):
    requests = mixed_requests(12)
    engine = Engine(tiny_pair(VOCAB), "block", draft_length=3)
    whole = engine.run(requests, 3)
    monkeypatch.setattr(batches, "PREFILL", 7)
    assert [counts(c) for c in engine.run(requests, 3).values()] == [counts(c) for c in whole.values()]


def learned_positions(seed: int, layers: int):
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": 48, "initializer_range": 0.4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, **sizes)).float()


def sliding_window(seed: int, layers: int):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "sliding_window": 5, "initializer_range": 0.4, "max_position_embeddings": 48}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return MistralForCausalLM(MistralConfig(vocab_size=VOCAB, **sizes, **ends)).float()


@pytest.mark.parametrize("kind", [learned_positions, sliding_window])
def test_texts_that_fill_the_context_to_its_last_position_end_in_peace(kind):
    """An ended row stays in the batch for a while: it must not walk out of a table of 48 positions."""
    pair = make_pair(kind(0, 2), kind(1, 1), tokenizer(VOCAB, end=False))
    depth, draw = 4, random.Random(0)
    requests = {}
    for i in range(6):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 30))]
        requests[i] = Request(prompt, i, 48 - depth - len(prompt))
    engine = Engine(pair, "univer", draft_length=depth, branches=[2, 1, 1, 1], relax_leaf=True)
    for i, request in requests.items():
        engine.check(i, request)
    together, alone = engine.run(requests, 3), engine.run(requests, 1)
    assert [c.tokens for c in together.values()] == [c.tokens for c in alone.values()]
    assert all(len(c.tokens) == requests[i].new_tokens for i, c in together.items())
    with pytest.raises(ValueError, match="prompt 7 is longer than the context: 30 tokens and 19 new ones exceed 48"):
        engine.check(7, Request([2] * 30, 0, 15))


@pytest.fixture
def steps(monkeypatch):
    """(requests in the rows, rows at work, slots of the caches) at every step of the loop."""
    seen, step = [], Batch.step

    def spy(state):
        caches = state.target.cache, state.draft.cache
        slots = {layer.keys.shape[2] for layer in caches[0].layers if layer.is_initialized}
        slots |= {cache.capacity for cache in caches}
        seen.append(([row.request for row in state.rows], sum(row.active for row in state.rows), slots))
        return step(state)

    monkeypatch.setattr(Batch, "step", spy)
    return seen


def test_caches_have_room_for_the_longest_request_in_flight_and_no_more(steps):
    engine = Engine(tiny_pair(VOCAB), "token", draft_length=3)
    requests = {i: Request([2] * (1 + i % 5), i, 1 + i % 10) for i in range(60)} | {20: Request([2] * 60, 20, 50)}
    engine.run(requests, 4)
    tree = engine.shape.depth + engine.shape.nodes + 3
    for present, _, slots in steps:
        longest = max(len(request.tokens) + request.new_tokens for request in present)
        assert len(slots) == 1 and longest + tree <= max(slots) < longest + tree + SLOTS
    sizes = [max(slots) for _, _, slots in steps]
    assert max(sizes) > sizes[0] == sizes[-1], "caches grew for one request and shrank behind it"


def test_the_batch_is_full_while_prompts_wait(steps):
    requests = mixed_requests(40)
    Engine(tiny_pair(VOCAB), "block", draft_length=3).run(requests, 8)
    full = next(i for i, (present, _, _) in enumerate(steps) if requests[390] in present)
    busy = [active for _, active, _ in steps[:full]]
    assert full > 20 and min(busy) == 8, "an eighth of eight rows is one: it is replaced before the next step"


def test_prompts_of_several_relaxations_are_as_if_each_were_alone():
    pair, prompts = tiny_pair(VOCAB), [[2, 3, 4], [5], [6, 2, 3], [3, 3], [7]]
    relaxations = ["none", "ensemble:0.6", "none", "ensemble:0.6;budget=1", "lenient:0.5"]
    options = {"method": "block", "max_new_tokens": 20}
    together = decode(pair, prompts, relaxation=relaxations, **options)
    for i, prompt in enumerate(prompts):
        (alone,) = decode(pair, [prompt], relaxation=relaxations[i], seeds=[i], **options)
        assert counts(alone) == counts(together[i])
    with pytest.raises(ValueError, match="`relaxation` must hold one relaxation for each of 2 prompts, got 1"):
        decode(pair, prompts[:2], relaxation=["none"])


def test_tokens_are_handed_out_as_they_are_committed_and_the_end_is_said_once():
    given: dict[int, list] = {}
    prompts = [[2, 3, 4], [5], [6, 2, 3], [3, 3]] * 3

    def on_step(index, new, ended):
        given.setdefault(index, []).append((new, ended))

    texts = decode(tiny_pair(VOCAB), prompts, method="block", max_new_tokens=20, batch=3, on_step=on_step)
    for i, completion in enumerate(texts):
        assert [token for new, _ in given[i] for token in new] == completion.tokens
        assert [ended for _, ended in given[i]] == [False] * (completion.target_calls - 1) + [True]
    assert decode(tiny_pair(VOCAB), []) == []


def test_the_soak_reports_growth_and_speed_and_stops_at_statistics_that_do_not_add_up(monkeypatch):
    monkeypatch.setattr(memory, "ROUND", 6)
    growth, speed = memory.soak(Models(), memory.Soaks(tokens=150, soak_batch=4), "traversal")
    assert growth["case"] == "soak traversal, growth" and growth["value"] < 20 and growth["unit"] == "MB"
    assert speed["case"] == "soak traversal" and speed["value"] > 0
    engine, request = Engine(tiny_pair(VOCAB), "block", "ensemble:0.5", draft_length=3), Request([2, 3], 0, 20)
    completion = engine.run({0: request})[0]
    memory.check_statistics(completion, request, engine)
    for name, wrong in (("accepted", 1), ("target_calls", 1), ("draft_calls", 1), ("substitutions", float("nan"))):
        with pytest.raises(AssertionError):
            memory.check_statistics(replace(completion, **{name: getattr(completion, name) + wrong}), request, engine)
