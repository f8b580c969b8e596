"""The statement about a learned point: the static line it is read from, its interval, and how often it errs."""

import numpy
import pytest
from diversed.eval.statement import static_speed, statements

WEIGHTS = (0.0, 0.2, 0.4, 0.6)


def made(relaxation, weight, prompts, generator, bonus=0.0, method="token"):
    """Texts of a world where a static weight w earns 1 - w^2 and takes 10 / (1 + w) calls for 20 tokens."""
    hard = numpy.random.default_rng(7).normal(0, 0.1, prompts)  # a prompt's difficulty, the same for every point
    records = []
    for prompt in range(prompts):
        calls = 10 / (1 + weight) * (1 + generator.normal(0, 0.05))
        records.append(
            {
                "method": method, "relaxation": relaxation, "seed": 0, "prompt": prompt, "tokens": [0] * 20,
                "score": 1 - weight**2 + hard[prompt] + generator.normal(0, 0.02),
                "target_calls": calls / (1 + bonus), "acceptance": 20 * (0.5 + 0.4 * weight + bonus / 5), "positions": 20,
            }
        )  # fmt: skip
    return records


def world(prompts, seed, weight=0.3, bonus=0.0):
    generator = numpy.random.default_rng(seed)
    records = [record for w in WEIGHTS for record in made(f"ensemble:{w}" if w else "none", w, prompts, generator)]
    return records + made("runs/x/bundle", weight, prompts, generator, bonus)


def test_static_speed_is_the_largest_on_the_line_at_this_quality_or_better():
    qualities, speeds = numpy.array([1.0, 0.8, 0.9, 0.2]), numpy.array([1.0, 2.0, 3.0, 4.0])
    assert static_speed(0.9, qualities, speeds) == 3.0
    assert static_speed(0.55, qualities, speeds) == pytest.approx(3.5)
    assert static_speed(0.95, qualities, speeds) == pytest.approx(1.25)
    assert static_speed(1.1, qualities, speeds) == 1.0
    assert static_speed(0.1, qualities, speeds) == 4.0


def test_a_faster_point_is_better_a_slower_one_worse_and_a_static_one_is_not_shown():
    for bonus, verdict in ((0.2, "better"), (-0.2, "worse"), (0.0, "not shown")):
        for statement in statements(world(200, 0, weight=0.4, bonus=bonus), "token", "runs/x/bundle", resamples=500):
            assert statement.verdict == verdict and statement.low <= statement.difference <= statement.high
            assert (statement.prompts_needed is None) == (verdict != "not shown")
    calls = statements(world(200, 0, weight=0.4, bonus=0.2), "token", "runs/x/bundle", resamples=500)[0]
    assert "better than static blending of the same quality" in str(calls)
    # a static point's speed 2 (1 + w), a fifth more
    assert calls.learned == pytest.approx(2.8 * 1.2, rel=0.02) and calls.static == pytest.approx(2.8, rel=0.03)


def test_a_static_weight_is_called_better_no_more_often_than_its_interval_allows():
    """The line of this world is concave between grid points, so a grid weight is the fair trial: 2.5 % of 200 is 5.

    A binomial of 200 trials at 2.5 % passes 14 with probability 2e-4.
    """
    found = [
        statement.verdict
        for seed in range(200)
        for statement in statements(world(60, seed, weight=0.4), "token", "runs/x/bundle", resamples=200)
        if statement.speed == "tokens per target call"
    ]
    assert found.count("better") <= 14 and found.count("worse") > 0


def test_seeds_of_a_prompt_are_pooled_and_prompts_that_a_point_lacks_are_left_out():
    records = world(50, 0)
    again = [record | {"seed": 1} for record in records]
    once, twice = (statements(lines, "token", "runs/x/bundle", resamples=100) for lines in (records, records + again))
    assert [(s.difference, s.low, s.high) for s in once] == [(s.difference, s.low, s.high) for s in twice]
    fewer = [r for r in records if r["prompt"] >= 10 or r["relaxation"] != "none"]
    assert statements(fewer, "token", "runs/x/bundle", resamples=100)[0].prompts == 40


def test_what_cannot_be_compared_is_refused():
    records = world(5, 0)
    with pytest.raises(ValueError, match="no results of block with runs/x/bundle"):
        statements(records, "block", "runs/x/bundle")
    few = [record for record in records if record["relaxation"] in ("none", "runs/x/bundle")]
    with pytest.raises(ValueError, match="token has 1 static points; measure none and several"):
        statements(few, "token", "runs/x/bundle")
