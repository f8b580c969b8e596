"""Steps that torch.compile makes into programs: the loop's texts, or a sentence."""

import pytest
import torch
from diversed.runtime.drafting import ROOT
from diversed.runtime.engine import Engine
from diversed.runtime.graphs import StaticState
from diversed.verifier.methods import METHODS

from .support.models import tiny_pair
from .test_graphs import VOCAB, choosing, make_engine, requests, same


@pytest.fixture
def traced(monkeypatch):
    """Programs are traced whole and run as traced, without a compiler: nothing in a step needs Python."""
    compiled = torch.compile

    def trace(stage, options, **keywords):
        return compiled(stage, **keywords, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", trace)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_one_program(method, traced):
    pair = tiny_pair(VOCAB)
    engine, loop = (make_engine(pair, method, "learned;bias=0.7", draft_length=2) for _ in range(2))
    engine.compiled = True
    same(engine.run(requests(), 3), loop.run(requests(), 3))
    assert len(engine.static) == 1 and not loop.static


@pytest.mark.parametrize("method, way", [("block", "network"), ("traversal", "network"), ("gbv", "auto")])
def test_every_shape_that_is_chosen_is_one_program(method, way, traced, tmp_path):
    engine, loop = (choosing(tmp_path, tiny_pair(VOCAB), method, way, "learned;bias=0.7") for _ in range(2))
    engine.compiled = True
    same(engine.run(requests(), 3), loop.run(requests(), 3))
    (state,) = engine.static.values()
    assert len(state.steps) > 1 and all(list(step.stages) == ["step"] for step in state.steps.values())


def test_a_compiled_step_gives_the_texts_and_statistics_of_the_loop(tmp_path, monkeypatch):
    """Requests come and go, and nothing is compiled again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    pair = tiny_pair(VOCAB, layers=1)
    engine, loop = (Engine(pair, "token", "ensemble:0.3", draft_length=1, compile=each) for each in (True, False))
    same(engine.run(requests(), 3), loop.run(requests(), 3))
    assert len(engine.static) == 1 and not loop.static


@pytest.mark.parametrize("method", ["gbv", "specinfer", "kseq"])
def test_a_step_that_would_end_the_process_is_refused(method):
    with pytest.raises(ValueError, match="`compile` needs .* a compiled step of gbv, specinfer or kseq ends the process"):
        Engine(tiny_pair(VOCAB), method, compile=True)


def test_a_step_that_cannot_be_compiled_says_why(monkeypatch):
    def broken(*args, **keywords):
        def program():
            raise torch._inductor.exc.InvalidCxxCompiler()

        return program

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ValueError, match="`compile` does not work here: No working C.. compiler .* install one"):
        with torch.no_grad():
            StaticState(Engine(tiny_pair(VOCAB), "token", compile=True), 1, 64).step(ROOT)


def test_a_pair_without_static_steps_is_not_compiled(monkeypatch):
    pair = tiny_pair(VOCAB)
    monkeypatch.setattr(pair.target, "lean", False)
    with pytest.raises(ValueError, match="`compile` needs a step whose shapes never change: .* leave `compile` out"):
        Engine(pair, "token", compile=True)
