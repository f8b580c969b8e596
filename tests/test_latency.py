"""The cost of a step: timed calls between which time is linear, and what surrounds them."""

import json

import numpy as np
import pytest
from diversed.benchmarks import bench_latency as latency
from diversed.benchmarks.timing import record, write
from diversed.commands.options import call
from diversed.runtime.shapes import parse_shape
from diversed.selector.latencies import Latencies, read_latencies, with_rest

CALLS = Latencies(
    np.array([1, 5]), np.array([0, 100]),
    {"draft": np.array([[1.0, 3.0], [2.0, 4.0]]), "target": np.array([[10.0, 18.0], [20.0, 28.0]])},
)  # fmt: skip


def test_a_step_is_a_draft_call_a_depth_and_one_target_call_on_the_tree():
    context = np.array([0.0, 50.0])
    chain, tree = parse_shape("3"), parse_shape("2x2+1")
    np.testing.assert_allclose(CALLS.models(chain, context), 3 * np.array([1, 1.5]) + np.array([16, 21]))
    # widths 1 1 2 2: the draft runs on all but the last depth, the target on six nodes, held at the last timed five
    np.testing.assert_allclose(CALLS.models(tree, context), np.array([1, 1.5]) * 2 + [1.5, 2.0] + np.array([18, 23]))


def test_what_surrounds_the_calls_is_found_again_from_whole_steps():
    shapes = [parse_shape(text) for text in ("1", "4", "8", "2x1", "2x4", "4x2+3")]
    wanted = {shape: 0.5 + 0.2 * shape.depth + 0.1 * sum(shape.widths) + 2 * (shape.paths > 1) for shape in shapes}
    steps = [("gbv", s, 50.0, CALLS.models(s, np.array([50.0]))[0] + rest) for s, rest in wanted.items()]
    found = with_rest(CALLS, steps)
    for shape in (*shapes, parse_shape("3x3+1")):
        rest = 0.5 + 0.2 * shape.depth + 0.1 * sum(shape.widths) + 2 * (shape.paths > 1)
        assert found.step("gbv", shape, np.array([7.0]))[0] == pytest.approx(
            CALLS.models(shape, np.array([7.0]))[0] + rest
        )


def test_the_benchmarks_file_is_what_is_read(tmp_path):
    rows = call(
        latency.run,
        methods=["block", "gbv"], shapes=["1", "2", "3", "2x1", "2x2+1"], contexts=[8, 16], tokens=[1, 2, 4],
        repetitions=2, step_repetitions=1, max_new_tokens=6,
    )  # fmt: skip
    write(record(rows), tmp_path / "F.json")
    found = read_latencies(tmp_path / "F.json")
    assert found.tokens.tolist() == [1, 2, 4] and found.contexts.tolist() == [8, 16]
    assert set(found.rest) == {"block", "gbv"} and all(grid.shape == (2, 3) for grid in found.calls.values())
    timed = {(row["role"], row["context"], row.get("tokens")): row["value"] for row in rows}
    assert found.call("target", 4, np.array([16]))[0] == timed["target", 16, 4] > 0


def test_a_file_without_latencies_is_refused_with_the_command_that_writes_one(tmp_path):
    for text in ("no json", json.dumps({"rows": [{"case": "plain", "value": 1}]}), "[]"):
        (tmp_path / "F.json").write_text(text)
        with pytest.raises(ValueError, match="holds no latencies .*`diversed bench latency --json"):
            read_latencies(tmp_path / "F.json")


@pytest.mark.parametrize("change", [[], [0.0, None], [1.0, float("nan")], [1.0, -1.0]])
def test_calls_that_are_no_whole_grid_of_times_are_refused(tmp_path, change):
    rows = [
        {"role": role, "context": 0, "tokens": 1, "value": value}
        for role, value in zip(("draft", "target"), change, strict=False)
        if value is not None
    ]
    (tmp_path / "F.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(ValueError, match="holds no latencies"):
        read_latencies(tmp_path / "F.json")


def test_the_assumed_pair_costs_what_it_says():
    found = read_latencies("gpu")
    assert found.assumed and not CALLS.assumed
    assert found.call("target", 1, np.array([0]))[0] == 25 and found.call("draft", 129, np.array([0]))[0] == 6
    assert found.step("gbv", parse_shape("1"), np.array([0]))[0] == pytest.approx(3 + 25 * (1 + 1 / 128))
