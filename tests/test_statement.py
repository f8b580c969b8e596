"""The statement about a learned point: the static line it is read from, its interval, and how often it errs."""

import math

import numpy
import pytest
from diversed.eval.comparison import (
    Least,
    compared_with,
    every_statement,
    line_of,
    line_speed,
    statements,
)
from diversed.eval.results import static_place
from scipy.stats import binom, norm

from .support.nominal import allowed, rates

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
                "target_calls": calls / (1 + bonus), "acceptance": 10 + 8 * weight + 4 * bonus, "positions": 20,
            }
        )  # fmt: skip
    return records


def world(prompts, seed, weight=0.3, bonus=0.0):
    generator = numpy.random.default_rng(seed)
    records = [record for w in WEIGHTS for record in made(f"ensemble:{w}" if w else "none", w, prompts, generator)]
    return records + made("runs/x/bundle", weight, prompts, generator, bonus)


def test_the_speed_of_the_line_is_the_largest_on_it_at_this_quality_or_better():
    quality = numpy.array([0.9, 0.55, 0.95, 1.1, 0.1])
    qualities, speeds = (numpy.tile(row, (5, 1)) for row in ([1.0, 0.8, 0.9, 0.2], [1.0, 2.0, 3.0, 4.0]))
    assert line_speed(quality, qualities, speeds, [[0, 1, 2, 3]]).tolist() == pytest.approx([3.0, 3.5, 1.25, 1.0, 4.0])


def test_the_line_joins_blends_in_the_order_of_w_and_every_other_rule_to_exact_decoding_alone():
    names = ["lenient:0.5", "ensemble:0.2", "none", "ensemble:0.4;blend=logits", "ensemble:0.2;budget=1"]
    assert line_of(names) == [[3, 2, 1], [2, 0], [2, 4]]
    assert line_of(names[:1]) == [[0]] and line_of(["ensemble:0.2"]) == [[0]]
    quality = numpy.array([0.9, 0.8, 0.7])
    qualities, speeds = (numpy.tile(row, (3, 1)) for row in ([0.8, 0.8, 1.0], [5.0, 2.0, 1.0]))
    # half way to the rule, at the rule, below every point; two rules are not joined to each other
    assert line_speed(quality, qualities, speeds, [[2, 1], [2, 0]]).tolist() == pytest.approx([3.0, 5.0, 5.0])
    assert line_speed(quality, qualities[:, :2], speeds[:, :2], [[0], [1]]).tolist() == [5.0, 5.0, 5.0]


def test_a_faster_point_is_better_a_slower_one_worse_and_a_static_one_neither():
    for bonus, verdict in ((0.2, "better"), (-0.2, "worse"), (0.0, "equal or not shown")):
        for statement in statements(world(200, 0, weight=0.4, bonus=bonus), "token", "runs/x/bundle", resamples=500):
            assert statement.verdict in verdict and statement.low <= statement.difference <= statement.high
            assert statement.prompts_needed is None or statement.verdict == "not shown"
    calls = statements(world(200, 0, weight=0.4, bonus=0.2), "token", "runs/x/bundle", resamples=500)[0]
    assert "better than what needs no training and has the same quality" in str(calls)
    assert "(static blending)" in str(calls) and calls.least == pytest.approx(0.02 * calls.line)
    # a static point's speed 2 (1 + w), a fifth more
    assert calls.learned == pytest.approx(2.8 * 1.2, rel=0.02) and calls.line == pytest.approx(2.8, rel=0.03)


def test_a_gate_that_is_all_but_closed_is_not_better_by_what_no_digit_shows():
    records = world(50, 0)
    closed = [r | {"relaxation": "runs/x/closed", "acceptance": r["acceptance"] + 1e-6} for r in records[:50]]
    for one in statements(records + closed, "token", "runs/x/closed", resamples=200):
        assert one.verdict == "equal" and "equal to what needs no training" in str(one)
        assert max(abs(one.corrected_low), abs(one.corrected_high)) < one.least
    few = world(4, 0, weight=0.4)
    for one in statements(few, "token", "runs/x/bundle", resamples=200, least=Least(1e-6, 1e-6)):
        assert one.verdict == "not shown" and one.prompts_needed >= 2
        assert "prompts would show" in str(one) and "to differ from what needs no training" in str(one)


def test_a_rule_without_training_is_a_rival_like_a_blend():
    """A learned point that beats every blend and not a lenient rule is not better; it is told which rule that is."""
    records = world(200, 0, weight=0.4, bonus=0.1)
    rule = made("lenient:0.5", 0.4, 200, numpy.random.default_rng(1), bonus=0.3)
    oracle = [record | {"relaxation": "a.b:oracle"} for record in rule]
    for rivals, verdict, rival in ((rule, "worse", "lenient:0.5"), (oracle, "better", "static blending")):
        one = statements(records + rivals, "token", "runs/x/bundle", resamples=500)[0]
        assert (one.verdict, one.rival) == (verdict, rival) and f"({rival}), difference" in str(one)
    budget = [record | {"relaxation": "ensemble:0.4;budget=9"} for record in rule]
    assert statements(records + budget, "token", "runs/x/bundle", resamples=500)[0].rival == "ensemble:0.4;budget=9"
    alone = [r for r in records if r["relaxation"] in ("none", "runs/x/bundle")] + rule
    assert statements(alone, "token", "runs/x/bundle", resamples=500)[0].rival == "lenient:0.5"


def test_a_rule_that_may_be_as_good_forbids_better():
    """Beside its own twin of slightly lower quality a point is fast for its quality, on a line that falls steeply."""
    records = world(200, 0, weight=0.4, bonus=0.5)
    head = [record for record in records if record["relaxation"] == "runs/x/bundle"]
    for drop, verdict in ((0.008, "not shown"), (0.2, "better")):
        noise = numpy.random.default_rng(5).normal(0, 0.1, 200)
        noise += drop - noise.mean()
        rule = [r | {"relaxation": "lenient:0.5", "score": r["score"] - n} for r, n in zip(head, noise, strict=True)]
        one = statements(records + rule, "token", "runs/x/bundle", resamples=500)[0]
        assert one.verdict == verdict and one.difference > one.least
        assert one.unbeaten == (("lenient:0.5",) if verdict == "not shown" else ())
        assert ("(lenient:0.5 may be as good)" in str(one)) == (verdict == "not shown")


def test_a_difference_that_is_sure_but_small_is_not_called_better():
    """The interval lies above 0; whether that counts is for the reader to say."""
    records = world(200, 0, weight=0.4, bonus=0.03)
    free = statements(records, "token", "runs/x/bundle", resamples=500, least=Least(0, 0))[0]
    assert free.verdict == "better" and free.low > 0
    strict = statements(records, "token", "runs/x/bundle", resamples=500, least=Least(tokens_per_call=0.05))[0]
    assert (strict.low, strict.difference) == (free.low, free.difference) and strict.difference < strict.least
    assert strict.verdict == "equal"
    between = statements(records, "token", "runs/x/bundle", resamples=500, least=Least(tokens_per_call=0.03))[0]
    assert between.low < between.least < between.high and between.verdict == "not shown"
    assert between.prompts_needed is None, "as many prompts would have shown it"
    equal = statements(records, "token", "runs/x/bundle", resamples=500, least=Least(tokens_per_call=0.2))[0]
    assert (equal.verdict, equal.prompts_needed) == ("equal", None) and "equal to what needs no training" in str(equal)
    assert equal.corrected_high < equal.least
    slower = world(200, 0, weight=0.4, bonus=-0.03)
    verdicts = [
        statements(slower, "token", "runs/x/bundle", resamples=500, least=Least(tokens_per_call=least))[0].verdict
        for least in (0, 0.2)
    ]
    assert verdicts == ["worse", "equal"]
    for wrong in ({"tokens_per_call": -0.1}, {"step_acceptance": math.inf}, {"step_acceptance": "0"}):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            Least(**wrong)


def test_blends_of_logits_stand_beyond_exact_decoding_on_the_same_line():
    """A learned point that beats static blends of probabilities and not those of logits is not better."""
    generator = numpy.random.default_rng(1)
    records = world(200, 0, weight=0.4, bonus=0.1)
    assert statements(records, "token", "runs/x/bundle", resamples=500)[0].verdict == "better"
    for weight in WEIGHTS[1:]:
        records += made(f"ensemble:{weight};blend=logits", weight, 200, generator, bonus=0.3)
    calls = statements(records, "token", "runs/x/bundle", resamples=500)[0]
    assert calls.verdict == "worse" and calls.line == pytest.approx(2.8 * 1.3, rel=0.03)
    assert [static_place(name) for name in ("none", "ensemble:0.2", "ensemble:0.2;blend=logits")] == [0, 0.2, -0.2]
    assert all(static_place(name) is None for name in ("lenient:0.5", "ensemble:0.2;budget=3", "runs/x/bundle"))


def test_where_a_difference_is_not_shown_the_prompts_are_told_that_show_the_least_one():
    """A true difference of just that much then has an interval above 0 in 80 % of trials."""
    worlds = [world(12, seed, weight=0.4, bonus=0.03) for seed in range(20)]
    found = [one for records in worlds for one in statements(records, "token", "runs/x/bundle", resamples=200)]
    open_ones = [one for one in found if one.prompts_needed]
    assert len(open_ones) > 10 and all(one.verdict == "not shown" and one.prompts_needed > 12 for one in open_ones)
    for one in open_ones:
        side = (one.difference - one.corrected_low) / math.sqrt(one.prompts_needed / 12)  # of the interval, then
        power = norm.cdf(norm.ppf(0.975) * (one.least / side - 1))
        assert power == pytest.approx(0.8, abs=0.05 if one.prompts_needed < 30 else 0.01)


def twins(prompts):
    """Two seeds of three static points of one world, whose scores are 0 or 1."""
    generator, found = numpy.random.default_rng(3), []
    for seed in (0, 1):
        for weight in WEIGHTS[:3]:
            texts = made(f"ensemble:{weight}" if weight else "none", weight, prompts, generator)
            right = generator.random(prompts) < 0.9 - weight**2
            found += [text | {"seed": seed, "score": float(one)} for text, one in zip(texts, right, strict=True)]
        rule = made("lenient:0.5", 0.3, prompts, generator, bonus=0.1)  # beyond the line of the blends
        found += [text | {"seed": seed, "score": float(generator.random() < 0.85)} for text in rule]
    return found


def test_over_a_thousand_resamplings_a_point_without_training_is_called_better_no_more_often_than_nominal():
    """Nor does the interval of a drop that is none leave out 0 more often; both by the 99 % bound of a binomial."""
    found = rates(twins(60), trials=1000, resamples=500)
    assert len(found) == 2 * 4 + 1
    assert all(rate.found <= rate.allowed for rate in found), [str(rate) for rate in found]
    drop = next(rate for rate in found if rate.what == "quality drop")
    assert drop.allowed == 67 and drop.found >= 20  # an interval that never misses would be too wide
    with pytest.raises(ValueError, match="no two seeds of several points without training"):
        rates(world(10, 0))


@pytest.mark.parametrize(("trials", "rate"), [(1000, 0.025), (1000, 0.05), (200, 0.025), (7, 0.3)])
def test_the_bound_is_the_binomials_quantile(trials, rate):
    assert allowed(trials, rate) == binom.ppf(0.99, trials, rate)


def test_points_are_compared_at_their_own_temperature_and_draft_length():
    """Static points of another temperature, here twice as fast, do not enter the line."""
    slow, fast = ([r | {"temperature": t, "draft_length": 5} for r in world(100, 0, bonus=0.2)] for t in (1.0, 0.5))
    for record in fast:
        record["target_calls"] /= 2
    options = {"resamples": 200}
    alone, both = every_statement(slow, **options), every_statement(slow + fast, **options)
    assert [(s.difference, s.low, s.high) for s in both[:2]] == [(s.difference, s.low, s.high) for s in alone]
    assert len(both) == 4 and {statement.looked for statement in both} == {2}  # of whatever temperature
    assert "at temperature 0.5, draft length 5" in str(both[2]) and both[2].line == pytest.approx(2 * alone[0].line)
    assert statements(slow + fast, "token", "runs/x/bundle", temperature=0.5, draft_length=5, looked=2, **options) == both[2:]
    with pytest.raises(ValueError, match="no results of token with runs/x/bundle; measured are none"):
        statements(slow + fast, "token", "runs/x/bundle")


def test_every_bias_that_is_looked_at_widens_the_interval_that_decides():
    """Bonferroni: the corrected interval of k points is the plain one at level 5 % / k; chosen points do not count."""
    records = world(60, 0, weight=0.3, bonus=0.015)
    again = [r | {"relaxation": "runs/x/bundle;bias=1"} for r in records if r["relaxation"] == "runs/x/bundle"]
    least = {"least": Least(0, 0)}
    (one, _), many = every_statement(records, **least), every_statement(records + again, **least)
    assert one.looked == 1 and (one.corrected_low, one.corrected_high) == (one.low, one.high)
    assert len(many) == 4 and {statement.looked for statement in many} == {2}
    for statement in many:
        assert statement.corrected_low < statement.low and statement.high < statement.corrected_high
    assert (many[0].low, many[0].high) == (one.low, one.high)
    assert one.low > 0 > many[0].corrected_low and (one.verdict, many[0].verdict) == ("better", "not shown")
    assert "corrected for 2 learned points" in str(many[0])
    chosen = every_statement(records + again, chosen=["runs/x/bundle"])
    assert [statement.looked for statement in chosen] == [1, 1, 1, 1]


def test_what_a_gate_given_as_code_gains_stands_beside_what_a_head_gains():
    """A head with the same texts as the gate has the same difference; a gate that lacks prompts is left out."""
    records = world(100, 0, weight=0.4, bonus=0.2)
    gate = [r | {"relaxation": "package.module:oracle"} for r in records if r["relaxation"] == "runs/x/bundle"]
    for one, plain in zip(every_statement(records + gate), every_statement(records), strict=True):
        assert one.codes == (("package.module:oracle", one.quality, one.difference),) and plain.codes == ()
        assert str(one) == f"{plain}; the weight function package.module:oracle ({one.quality:.4f}) gains {one.difference:+.3f}"
    assert not any(one.codes for one in every_statement(records + gate[1:]))


def test_a_plan_says_what_each_point_is_compared_with():
    names = ("none", "ensemble:0.2", "a/b", "a/b;bias=1", "diversed.assets.sums:oracle")
    points = [*(("token", name, 1.0, 5) for name in names), ("token", "a/b", 0.5, 5)]
    words = [compared_with(points, point) for point in points]
    assert words[0] == "nothing, the others are compared with it"
    assert words[1] == words[4] == "none, paired by prompt"
    assert words[2] == words[3] == "none, paired by prompt; the line of 2 points without training, one of 3 learned points"
    assert words[5] == "nothing; add the relaxation none; nothing without training; add ensemble:w and other rules"
    assert compared_with(points, points[2], chosen=["a/b;bias=1"]).endswith("one of 2 learned points")


def test_a_point_below_the_lowest_static_quality_is_not_called_better():
    """At w = .8 no static point was measured; the same point is slower than the end of the line where it is worse."""
    fast, slow = (
        statements(world(100, 0, weight=0.8, bonus=bonus), "token", "runs/x/bundle", resamples=200)[0]
        for bonus in (0.0, -0.3)
    )
    assert fast.low > 0 and fast.below == 1 and (fast.verdict, fast.prompts_needed) == ("not shown", None)
    assert "not shown (no point without training has so low a quality; measure stronger ones)" in str(fast)
    assert slow.verdict == "worse" and "measure stronger ones" not in str(slow)


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
    with pytest.raises(ValueError, match="token has 1 points without training; measure none, several"):
        statements(few, "token", "runs/x/bundle")
