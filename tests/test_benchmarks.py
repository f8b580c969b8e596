"""What all benchmarks share: turns, rows, workloads. That each of them runs is tested beside what it measures."""

import pytest
import torch
from diversed.benchmarks import bench_prefill, bench_verify
from diversed.benchmarks.timing import in_turns, row, seconds
from diversed.benchmarks.workload import Workload, call_after, drawn
from diversed.runtime.drafting import topology
from diversed.verifier.methods import METHODS


def test_cases_take_turns_and_the_turn_that_warms_up_is_not_kept():
    seen = []

    def measure(case, turn):
        seen.append((case, turn))
        return 10 * case + turn

    found = in_turns({"a": 1, "b": 2}, measure, 2)
    assert seen == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]
    assert found == {"a": [11, 12], "b": [21, 22]}


def test_a_row_is_a_median_with_its_lowest_and_highest():
    assert row("case", [3.0, 1.0, 2.0], "ms", vs={"other": 2.0}) == {
        "case": "case", "value": 2.0, "unit": "ms", "low": 1.0, "high": 3.0, "vs": {"other": 2.0},
    }  # fmt: skip


def test_seconds_are_those_of_the_clock_that_is_given():
    ticks = iter([5.0, 7.5])
    assert seconds(lambda: None, clock=lambda: next(ticks)) == 2.5


def test_another_turn_gives_other_texts_of_the_same_prompts():
    work = Workload(max_new_tokens=4, seed=3)
    first, second = (work.requests([[1, 2], [3]], turn) for turn in (0, 1))
    assert [request.tokens for request in first.values()] == [request.tokens for request in second.values()]
    assert {request.seed for request in first.values()} & {request.seed for request in second.values()} == set()


def test_a_prompt_is_repeated_and_a_task_gives_different_ones():
    pair = Workload().pair()
    same, different = (Workload(prompt=prompt).prompts(pair, 3) for prompt in ("Next with", None))
    assert same[0] == same[1] == same[2] and len({tuple(tokens) for tokens in different}) == 3
    call = call_after(pair.draft, same[0], 2)
    assert call() == call(), "a call must not see what the one before wrote"


@pytest.mark.parametrize("drafting", ["chain", "paths", "with_replacement", "without_replacement", "greedy"])
def test_children_are_drawn_from_the_rows_of_their_parents(drafting):
    """Row n allows the tokens 3n, 3n + 1 and 3n + 2 alone, so a token tells whose child it is."""
    shape = topology(drafting, 2, 1 if drafting == "chain" else 2)
    rows = torch.zeros(40, shape.nodes, 3 * shape.nodes)
    for node in range(shape.nodes):
        rows[:, node, 3 * node : 3 * node + 3] = torch.tensor([0.5, 0.3, 0.2])
    tokens = drawn(rows, shape, torch.Generator().manual_seed(0))
    for node in range(1, shape.nodes):
        assert set((tokens[:, node] // 3).tolist()) == {shape.parents[node]}


def test_verification_is_timed_beside_a_softmax_and_what_does_not_fit_is_named(capsys):
    rows = bench_verify.run(batches=[1], vocabularies=[40], repeats=1)
    assert [found["case"].split(",")[0] for found in rows] == list(METHODS)
    assert all(found["value"] > 0 and "softmax" in found["vs"] for found in rows)
    assert {found["case"].split(",")[0] for found in rows if "transformers" in found["vs"]} == {"token", "block"}
    assert bench_verify.run(methods=["token"], batches=[1], vocabularies=[40], most_gb=1e-9) == []
    assert "left out, they need more than 1e-09 GB: token, chain of 8, B = 1, V = 40" in capsys.readouterr().out


def test_the_prefill_is_timed_with_the_beginning_computed_once_and_by_each_row():
    rows = {found["case"]: found for found in bench_prefill.run(context=40, shared=36, batch=4, new_tokens=4, repetitions=1)}
    assert rows.keys() == {f"{what}, {how}" for what in ("prefill and a step", "texts") for how in ("once", "by each")}
    once, each = rows["prefill and a step, once"], rows["prefill and a step, by each"]
    assert once["vs"] == {each["case"]: once["value"] / each["value"]} and "vs" not in each
