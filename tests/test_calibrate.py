"""A calibrated bias drops quality by more than the limit no more often than its level says; what is left behind."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace

import numpy
import pytest
import torch
from diversed import cli
from diversed.eval.calibration import choose, drop_test, upper_bound
from diversed.eval.sweep import Sweep
from diversed.export import bundle_writer
from diversed.export.bundle_writer import write_bundle
from diversed.export.card import make_card
from diversed.runtime.bundle import HeadCard, load_bundle
from diversed.runtime.model import load_pair
from diversed.runtime.relaxer import load_relaxer
from diversed.runtime.sampling import Sampling
from diversed.verifier.head import WeightHead

from .support.models import module, tokenizer
from .support.nominal import allowed

TRIALS, LEVEL = 1000, 0.05


def drawn(generator, shape, drop, different):
    """Drops of 0/1 scores: a share `different` of prompts is scored differently, and the mean is `drop`."""
    lost, won = (different + drop) / 2, (different - drop) / 2
    return generator.choice([1.0, -1.0, 0.0], p=[lost, won, 1 - different], size=shape)


@pytest.mark.parametrize(("prompts", "limit"), [(500, 0.01), (500, 0.02), (60, 0.1)])
@pytest.mark.parametrize("kind", ["losses only", "losses and gains", "graded"])
def test_a_drop_at_the_limit_passes_no_more_often_than_the_level(kind, prompts, limit):
    """The worst case of the hypothesis; the t test fails it for losses only, where 12 % of 500 prompts pass."""
    generator = numpy.random.default_rng(prompts)
    if kind == "graded":  # a uniform score against a better one: standard deviation .2
        drops = limit + generator.uniform(-0.35, 0.35, size=(TRIALS, prompts))
    else:
        drops = drawn(generator, (TRIALS, prompts), limit, limit if kind == "losses only" else 3 * limit)
    assert sum(drop_test(row, limit) <= LEVEL for row in drops) <= allowed(TRIALS, LEVEL)


def test_the_chosen_bias_drops_by_more_than_the_limit_no_more_often_than_the_level():
    """Five biases, the last three of which drop by more: all the chances together to choose one of those."""
    generator = numpy.random.default_rng(0)
    wrong = right = 0
    for _ in range(TRIALS):
        biases = ((bias, drawn(generator, 300, drop, 0.06)) for bias, drop in enumerate((0, 0, 0.051, 0.051, 0.051)))
        passed = [found["bias"] for found in choose(biases, 0.05, LEVEL) if found["passed"]]
        wrong, right = wrong + (max(passed, default=0) >= 2), right + (max(passed, default=0) >= 1)
    assert wrong <= allowed(TRIALS, LEVEL) and right > 0.4 * TRIALS


def test_five_hundred_prompts_show_a_head_that_loses_nothing():
    """A limit of two points and one prompt in fifty scored differently: 72 % in 4,000 trials, here of 300."""
    rows = drawn(numpy.random.default_rng(1), (300, 500), 0, 0.02)
    assert sum(drop_test(row, 0.02) <= LEVEL for row in rows) > 0.6 * 300


def test_the_upper_bound_is_the_smallest_limit_that_passes():
    drops = drawn(numpy.random.default_rng(2), 400, 0.01, 0.05)
    bound = upper_bound(drops, LEVEL)
    assert drops.mean() < bound < 0.1
    assert drop_test(drops, bound) <= LEVEL < drop_test(drops, bound - 1e-4)
    assert upper_bound(numpy.zeros(3), LEVEL) == 1.0 and upper_bound(-numpy.ones(100), LEVEL) < 1e-5


def test_no_difference_at_all_needs_the_prompts_of_the_rule_of_three():
    """The best stake of .9 earns log(1 + .9 limit) a prompt, and log 20 are needed."""
    needed = math.ceil(math.log(20) / math.log(1 + 0.9 * 0.05))
    assert drop_test(numpy.zeros(needed), 0.05) <= LEVEL < drop_test(numpy.zeros(needed - 1), 0.05)


def test_a_bias_is_measured_only_where_those_before_it_passed():
    asked = []

    def measured():
        for bias, drop in ((-2.0, 0.0), (-1.0, 1.0), (0.0, 0.0)):
            asked.append(bias)
            yield bias, numpy.full(100, drop)

    tried = choose(measured(), 0.1, LEVEL)
    assert asked == [-2.0, -1.0] and [found["passed"] for found in tried] == [True, False]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A tiny pair, a file of prompts, and what writes a bundle for the pair."""
    folder = tmp_path_factory.mktemp("calibrate")
    for name, seed in (("target", 0), ("draft", 1)):
        module(seed, 7, 2 - seed).save_pretrained(folder / name)
        tokenizer(7).save_pretrained(folder / name)
    lines = [json.dumps({"prompt": f"w2 w{2 + i % 5} w{2 + i // 5}", "reference": "w3"}) for i in range(12)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    pair = load_pair(str(folder / "target"), str(folder / "draft"))
    manifest = {
        role: {"name": model.name, "hash": model.hash, "hidden_size": model.hidden_size}
        for role, model in (("target", pair.target), ("draft", pair.draft))
    }
    manifest |= {"tokenizer": pair.tokenizer_hash, "vocab": 7, "sampling": vars(Sampling()), "task": "jsonl"}
    manifest |= {"relaxation": "ensemble:0.3", "metric": "exact match"}
    head = WeightHead("logits")
    return folder, pair, make_card(head, {"manifest": manifest, "traces_sha256": "d" * 64}, 3, 0.5)


@pytest.fixture
def bundle(workplace, tmp_path):
    return write_bundle(tmp_path / "bundle", WeightHead("logits"), workplace[2])


def run(bundle, workplace, limit, *more):
    words = ["--bundle", bundle, "--max_quality_drop", limit, "--prompts", 12, "--max_new_tokens", 6, "--batch", 6]
    words += ["--biases", -1, 1, "--data.path", workplace[0] / "data.jsonl", "--data.whole", "--data.score", "exact"]
    words += ["--data.reference_field", "reference", *more]
    return cli.main(["calibrate", *map(str, words)])


def logit(bundle):
    return float(load_bundle(bundle).head(torch.zeros(1, 12)))


def test_the_largest_justified_bias_is_written_into_the_bundle_with_its_evidence(
    workplace, bundle, capsys, monkeypatch
):
    """No text of this pair is right, so both biases lose nothing; 12 prompts show at most .33 of that."""
    assert run(bundle, workplace, 0.4) == 0
    printed = capsys.readouterr().out
    assert "bias 1: quality drop +0.0000, at most" in printed and "now has bias 1 in its head" in printed
    assert "note: exact decoding itself scores 0.000 on these prompts, so nothing could lose more than 0.4" in printed
    card = load_bundle(bundle).card
    assert logit(bundle) == 1.0 and card.bias == 1.5 and card.frontier == []
    evidence = card.calibration
    assert evidence["bias"] == 1 and [found["bias"] for found in evidence["tried"]] == [-1, 1]
    assert evidence["tried"][1]["upper_bound"] == pytest.approx((20 ** (1 / 12) - 1) / 0.9, abs=1e-5)
    assert (evidence["prompts"], evidence["split"], evidence["level"]) == (12, "validation", 0.05)
    assert evidence["target"]["hash"] == workplace[1].target.hash and len(evidence["head_sha256"]) == 64
    assert "| 1 | +0.0000 | 0.3" in (bundle / "README.md").read_text()

    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    monkeypatch.setattr(Sweep, "records", lambda *_: pytest.fail("decoded again"))
    assert run(bundle, workplace, 0.4) == 0
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    assert run(bundle, workplace, 0.2) == 1  # another limit: the same texts, counted from the bundle as it was
    assert run(bundle, workplace, 0.4) == 0 and logit(bundle) == 1.0
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


def test_where_no_bias_is_justified_the_head_is_closed_and_says_so(workplace, bundle, capsys):
    assert run(bundle, workplace, 0.1) == 1
    assert "no bias of" in (printed := capsys.readouterr().out) and "its head is closed now" in printed
    card = load_bundle(bundle).card
    assert card.calibration["bias"] is None and card.bias == 0.5
    assert [found["bias"] for found in card.calibration["tried"]] == [-1]
    assert "CLOSED, decoding with it is exact decoding" in (bundle / "README.md").read_text()
    with pytest.warns(UserWarning, match=r"is closed, decoding with it is exact: .* shown to lose at most 0.1"):
        relaxer = load_relaxer(f"{bundle};bias=2", workplace[1], Sampling())
    assert relaxer.weigh(*torch.rand(2, 5, 7).softmax(-1), None).tolist() == [0.0] * 5


def test_a_score_that_the_limit_could_not_exceed_is_told_and_no_other(workplace, bundle, capsys, monkeypatch):
    """Every second text of the same prompts is right: half a score can lose more than .4, and less than .6."""
    plain = Sweep.records

    def scored(*arguments):
        return (record | {"score": float(record["prompt"] % 2)} for record in plain(*arguments))

    monkeypatch.setattr(Sweep, "records", scored)
    assert run(bundle, workplace, 0.4) == 0 and "note: exact" not in capsys.readouterr().out
    assert run(bundle, workplace, 0.6) == 0 and "note: exact decoding itself scores 0.500" in capsys.readouterr().out


def test_a_bundle_of_another_head_is_not_calibrated_from_texts_of_the_old_one(workplace, bundle, capsys):
    assert run(bundle, workplace, 0.4) == 0
    (bundle.parent / "bundle-calibration" / "bundle").rename(bundle.parent / "elsewhere")
    assert run(bundle, workplace, 0.4) == 2
    assert "was calibrated before" in capsys.readouterr().err
    (bundle.parent / "elsewhere").rename(bundle.parent / "bundle-calibration" / "bundle")
    torch.manual_seed(0)
    head = WeightHead("logits", width=2)
    write_bundle(bundle, head, replace(workplace[2], head=HeadCard.of(head)))
    assert run(bundle, workplace, 0.4) == 2
    assert "holds the calibration of another head; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "more", "sentence"),
    [
        (0, [], "`max_quality_drop` must lie between 0 and 1, both excluded, got 0"),
        (0.1, ["--level", 1], "`level` must lie between 0 and 1"),
        (0.1, ["--biases", "1e5"], "`biases` must be numbers between -10000 and 10000"),
        (0.1, ["--prompts", 0], "`prompts` must be at least 1, got 0"),
        (0.1, ["--method", "plain"], "`method` plain takes no head, so no bias changes its texts"),
        (0.1, ["--method", "tokn"], "tokn"),
        (0.1, ["--data.reference_field", "answer"], "has no field answer"),
        (0.1, ["--target", "nowhere"], "nowhere"),
        (0.1, ["--data.score", "target_logprob"], "has no bounds; calibrate on a task whose score is in [0, 1]"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_a_sentence(workplace, bundle, capsys, limit, more, sentence):
    assert run(bundle, workplace, limit, *more) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_selector_and_custom_generate_stay_in_the_bundle(workplace, tmp_path, monkeypatch):
    card = replace(workplace[2], custom_generate=True)
    bundle = write_bundle(tmp_path / "bundle", WeightHead("logits"), card)
    chooser = {"selector.json": b"{}", "selector.safetensors": b"weights"}
    for name, content in chooser.items():
        (bundle / name).write_bytes(content)
    monkeypatch.setattr(bundle_writer, "read_selector_card", lambda folder: None)
    for limit, code in ((0.4, 0), (0.1, 1)):
        assert run(bundle, workplace, limit) == code
        assert {name: (bundle / name).read_bytes() for name in chooser} == chooser
        assert (bundle / "custom_generate/gate.py").is_file() and load_bundle(bundle).card.custom_generate


def killed(bundle, workplace, moment, after):
    """Calibrate, and die before or after the rename with this number; whether it came through."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    seen = []

    def dying(original):
        def rename(*arguments):
            seen.append(1)
            if len(seen) == moment and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            original(*arguments)
            if len(seen) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        return rename

    os.replace, os.rename = dying(os.replace), dying(os.rename)
    bundle_writer.exchange = dying(bundle_writer.exchange)
    os._exit(run(bundle, workplace, 0.4))


def test_killed_at_any_rename_a_bundle_is_there_and_the_next_run_ends_with_the_same_bytes(workplace, bundle, tmp_path):
    fresh = shutil.copytree(bundle, tmp_path / "fresh")
    assert run(bundle, workplace, 0.4) == 0
    expected = {path.name: path.read_bytes() for path in bundle.iterdir()}
    for moment in range(1, 100):
        for after in (False, True):
            for folder in (bundle, f"{bundle}-calibration"):
                shutil.rmtree(folder)
            shutil.copytree(fresh, bundle)
            if killed(bundle, workplace, moment, after):
                assert moment > 10
                return
            load_bundle(bundle)
            assert run(bundle, workplace, 0.4) == 0
            assert {path.name: path.read_bytes() for path in bundle.iterdir()} == expected
