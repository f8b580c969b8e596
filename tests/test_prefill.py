"""The beginning that prompts share is computed once and copied."""

import pytest
import torch
from diversed import decode
from diversed.runtime import batch
from diversed.runtime.batch import SHARED, padded, prefill
from diversed.runtime.completion import Request
from diversed.runtime.engine import Engine
from diversed.runtime.model import make_pair
from diversed.runtime.relaxer import load_relaxer
from diversed.runtime.rollouts import Sampler
from diversed.runtime.sampling import Sampling

from .support.models import tiny_pair, tokenizer
from .test_architectures import V, tiny

FRONT = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
PROMPTS = [[*FRONT, 5, 9], [*FRONT, 3], [*FRONT, 5, 9], [*FRONT, 22, 23, 24, 25, 26], [*FRONT, 5, 9]]


class Counted:
    """A model that counts the tokens that it computes."""

    def __init__(self, model):
        self.model, self.computed = model, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, *words, **named):
        self.computed += tokens.numel()
        return self.model(tokens, *words, **named)


@pytest.fixture(params=["llama", "mistral", "gemma3_text", "gpt2", "gpt_oss"])
def pair(request):
    """Two random models of one architecture, with sliding windows shorter than the shared beginning."""
    return make_pair(tiny(request.param, 0), tiny(request.param, 1), tokenizer(V, end=False))


@pytest.fixture
def apart(monkeypatch):
    """A function that makes every row be computed from its beginning."""

    def plain(model, tokens, cache):
        batch.write_prompts(model, tokens, cache, 0)

    def switch():
        monkeypatch.setattr(batch, "prefill", plain)
        monkeypatch.setattr("diversed.runtime.rollouts.prefill", plain)

    return switch


def filled(pair, tokens):
    cache = pair.target.cache(64)
    model = Counted(pair.target)
    prefill(model, tokens, cache)
    return cache, model.computed


def test_the_cache_is_that_of_rows_computed_alone(pair):
    tokens, lengths = padded(PROMPTS)
    cache, _ = filled(pair, tokens)
    whole = pair.target.cache(64)
    batch.write_prompts(pair.target, tokens, whole, 0)
    for row, length in enumerate(lengths.tolist()):
        for layer, other in zip(cache.layers, whole.layers, strict=True):
            for found, right in ((layer.keys, other.keys), (layer.values, other.values)):
                torch.testing.assert_close(found[row, :, :length], right[row, :, :length])
        if whole.positions is not None:
            assert torch.equal(cache.positions[row, :length], whole.positions[row, :length])


def test_no_token_of_the_beginning_is_computed_twice():
    pair = tiny_pair(40, end=False)
    tokens, _ = padded(PROMPTS)
    assert filled(pair, tokens)[1] == len(FRONT) + 3 * 5  # three different rows, five tokens to the longest
    assert filled(pair, tokens[:1])[1] == tokens.shape[1]
    assert filled(pair, tokens[[0, 2, 4]])[1] == tokens.shape[1]  # equal rows are one row
    assert filled(pair, tokens[:, :0])[1] == 0
    short = torch.cat([tokens[:, : SHARED - 1], torch.arange(5).unsqueeze(1)], 1)
    assert filled(pair, short)[1] == short.numel()  # too short a beginning to pay


def test_texts_are_the_same_as_without(pair, apart):
    def texts():
        found = []
        for method, sampling in (("block", Sampling()), ("traversal", Sampling()), ("token", Sampling(0))):
            shape = {"draft_length": 3} if method != "traversal" else {"draft_length": 2, "branches": 2}
            found += [done.tokens for done in decode(pair, PROMPTS, method=method, sampling=sampling, max_new_tokens=12, **shape)]
        return found

    together = texts()
    apart()
    assert texts() == together
    assert len(set(map(tuple, together))) > 2


def test_requests_that_join_later_share_among_themselves(pair, apart):
    """Ten requests in three rows; each is one of two prompts, so those that join are equal in part."""

    def texts():
        engine = Engine(pair, method="block", sampling=Sampling(), draft_length=3)
        requests = {i: Request(PROMPTS[i % 4], seed=i, new_tokens=3 + i) for i in range(10)}
        return {index: done.tokens for index, done in engine.run(requests, batch=3).items()}

    together = texts()
    apart()
    assert texts() == together


def test_gathered_texts_are_the_same_as_without(pair, apart):
    def texts():
        relaxer = load_relaxer("ensemble:0.5", pair, Sampling())
        sampler = Sampler(pair, relaxer, Sampling(), 8)
        return [text.tokens for text in sampler.run(dict(enumerate(PROMPTS)), 2, lambda prompt, sample: 10 * prompt + sample)]

    together = texts()
    apart()
    assert texts() == together and len(together) == 10
