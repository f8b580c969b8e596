"""What a run finds out about the CPU when it starts. Seconds are given: nothing here is timed."""

import pytest
import torch
from diversed.runtime import autotune as measured
from diversed.runtime.autotune import fastest_threads, slower_than_float32, suited

from .support.models import module, tiny_pair


@pytest.fixture
def seconds(monkeypatch):
    """Set the seconds that works take; threads are as before afterwards."""
    before = torch.get_num_threads()
    slower_than_float32.cache_clear()

    def settle(*taken: float) -> None:
        def given(works):
            for work in works:
                work()
            return list(taken)

        monkeypatch.setattr(measured, "_seconds", given)

    yield settle
    torch.set_num_threads(before)
    slower_than_float32.cache_clear()


@pytest.mark.parametrize("half, dtype", [(3.0, torch.float32), (1.0, torch.bfloat16), (1.05, torch.bfloat16)])
def test_a_stored_half_is_kept_unless_this_cpu_is_clearly_slower_in_it(seconds, half, dtype):
    seconds(half, 1.0)
    stored = module(0, 7).bfloat16()
    assert suited(stored).dtype is dtype


def test_what_would_take_too_much_memory_stays_as_it_is_stored(seconds, monkeypatch):
    seconds(3.0, 1.0)
    monkeypatch.setattr("os.sysconf", lambda name: 64)
    assert suited(module(0, 7).bfloat16()).dtype is torch.bfloat16


def test_weights_in_float32_are_not_measured(monkeypatch):
    monkeypatch.setattr(measured, "_seconds", lambda works: pytest.fail("nothing to choose"))
    assert suited(module(0, 7)).dtype is torch.float32


@pytest.mark.parametrize(
    "taken, threads", [((1.0, 0.6, 0.4, 0.39), 4), ((1.0, 1.1, 1.2, 1.3), 1), ((1.0, 0.95, 0.5, 0.4), 6)]
)
def test_more_threads_are_taken_where_they_are_clearly_faster(seconds, monkeypatch, taken, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    seconds(*taken)
    assert fastest_threads(tiny_pair(7).target, rows=2, tokens=3) == threads
    assert chosen == [1, 2, 4, 6, threads]


def test_seconds_are_measured_in_turns():
    calls = []
    found = measured._seconds([lambda: calls.append("a"), lambda: calls.append("b")])
    assert calls == ["a", "b"] * (measured.TURNS + 1) and all(value > 0 for value in found)
