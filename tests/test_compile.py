"""Steps that torch.compile makes into programs: the loop's texts, or a sentence."""

import pytest
import torch
from diversed.runtime.decode import Engine
from diversed.runtime.graphs import StaticStep
from diversed.verifier.methods import METHODS

from .support.models import tiny_pair
from .test_graphs import VOCAB, make_engine, requests, same


@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_one_program(method, monkeypatch):
    """Traced whole and run as traced, without a compiler: nothing in a step needs Python, and it computes the same."""
    compiled = torch.compile

    def traced(stage, options, **keywords):
        return compiled(stage, **keywords, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    pair = tiny_pair(VOCAB)
    engine, loop = (make_engine(pair, method, "learned;bias=0.7", draft_length=2) for _ in range(2))
    engine.compiled = True
    same(engine.run(requests(), 3), loop.run(requests(), 3))
    assert len(engine.steps) == 1 and not loop.steps


def test_a_compiled_step_gives_the_texts_and_statistics_of_the_loop(tmp_path, monkeypatch):
    """Requests come and go, and nothing is compiled again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pair = tiny_pair(VOCAB, layers=1)
    engine, loop = (Engine(pair, "token", "ensemble:0.3", draft_length=1, compile=each) for each in (True, False))
    same(engine.run(requests(), 3), loop.run(requests(), 3))
    assert len(engine.steps) == 1 and not loop.steps


def test_a_step_that_cannot_be_compiled_says_why(monkeypatch):
    def broken(*args, **keywords):
        def program():
            raise torch._inductor.exc.InvalidCxxCompiler()

        return program

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ValueError, match="`compile` does not work here: No working C.. compiler .* install one"):
        with torch.no_grad():
            StaticStep(Engine(tiny_pair(VOCAB), "token", compile=True), 1, 64)


def test_a_pair_without_static_steps_is_not_compiled(monkeypatch):
    pair = tiny_pair(VOCAB)
    monkeypatch.setattr(pair.target, "lean", False)
    with pytest.raises(ValueError, match="`compile` needs a step whose shapes never change: .* leave `compile` out"):
        Engine(pair, "token", compile=True)
