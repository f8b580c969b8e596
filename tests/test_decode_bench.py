"""The decoding benchmarks: which cases they compare, with whom, and what they leave out. Nothing here is timed."""

import pytest
from diversed.benchmarks import bench_agreement as agreement
from diversed.benchmarks import bench_decode as decode
from diversed.benchmarks import bench_step as step
from diversed.commands.options import call
from diversed.runtime import chain_twin

from .support.models import module, tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft on disk."""
    found = []
    for seed, name in enumerate(("target", "draft")):
        folder = tmp_path_factory.mktemp(name)
        module(seed, 7, layers=2 - seed).save_pretrained(folder)
        tokenizer(7).save_pretrained(folder)
        found.append(str(folder))
    return dict(zip(("target", "draft"), found, strict=True))


def cases(folders, **options):
    small = {"prompt": "w2 w3 w4", "prompts": 2, "tuning_prompts": 1, "repetitions": 2, "max_new_tokens": 6}
    methods = ["plain", "block", "gbv", "univer"]
    rows = call(decode.run, **folders, **small, methods=methods, draft_lengths=[1, 2], **options)
    return {row["case"]: row for row in rows}


def test_every_case_is_compared_with_its_rivals_of_the_same_run(folders, capsys):
    found = cases(folders)
    rivals = {case: set(row["vs"]) for case, row in found.items() if row["unit"] == "tokens/s"}
    assert rivals == {
        "plain": {"transformers plain"},
        "block": {"plain", "transformers assisted"},
        "gbv": {"plain", "block"},
        "univer": {"plain", "block"},
        "static+block": {"block", "transformers static"},
        "transformers plain": {"plain", "block"},
        "transformers assisted": {"transformers plain"},
        "transformers static": {"plain", "block"},
    }
    assert all(row["low"] <= row["value"] <= row["high"] for row in found.values() if row["unit"] == "tokens/s")
    assert found["plain, per call"]["value"] == 1 < found["block, per call"]["value"] <= 3
    assert found["univer, draft length"]["value"] in (1, 2) and "plain, draft length" not in found
    assert "the learned cases are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "confidences, compile, message",
    [
        ([0.5, 0.0], False, "`confidences` must be probabilities above 0 and at most 1, got 0.0"),
        ([float("nan")], False, "`confidences` must be probabilities above 0 and at most 1, got nan"),
        ([0.5], True, "`confidences` or `compile` out"),
    ],
)
def test_confidences_that_no_chain_can_end_by_are_refused_at_once(folders, confidences, compile, message):
    with pytest.raises(ValueError, match=message):
        cases(folders, confidences=confidences, compile=compile)


def test_batches_are_measured_without_transformers_which_takes_one_prompt(folders, capsys):
    found = cases(folders, batch=2, static=0.0)
    assert not [case for case in found if case.startswith(("transformers", "static"))]
    assert "takes one prompt at a time" in capsys.readouterr().err


def test_a_prediction_counts_tokens_for_the_cost_of_the_models_alone():
    assert decode.per_cost((30, 10, 20), relative=0.25) == pytest.approx(30 / 10 / 1.5)


def test_chains_and_the_assistant_may_end_where_the_draft_is_not_confident(folders, monkeypatch):
    """The turns that choose are replaced: every case takes what it lists last."""
    monkeypatch.setattr(decode, "tune", lambda cases, *_: [setattr(c, "draft", c.drafts[-1]) for c in cases.values()])
    found = cases(folders, confidences=[0.2, 0.6])
    sure = {case for case, row in found.items() if (row["value"], row["unit"]) == (0.6, "probability")}
    assistants = "transformers assisted", "transformers static"
    assert sure == {f"{case}, confidence" for case in ("block+confidence", *assistants)}
    assert found["block, draft length"]["value"] == found["block+confidence, draft length"]["value"] == 2
    assert set(found["block+confidence"]["vs"]) == {"plain", "block", "transformers assisted"}
    assert 1 <= found["block+confidence, per call"]["value"] <= 3


def test_the_share_outside_the_models_is_a_share(folders):
    rows = call(step.run, **folders, prompt="w2 w3", methods=["plain", "block"], batches=[1, 2], repetitions=1)
    shares = {row["case"]: row["value"] for row in rows if row["unit"].startswith("%")}
    assert set(shares) == {f"{method}, batch {batch}" for method in ("plain", "block") for batch in (1, 2)}
    assert all(0 < share < 100 for share in shares.values())


def test_the_prefill_is_no_part_of_a_step(folders):
    class Model:
        device = step.torch.device("cpu")

        def __call__(self, tokens, last_only):
            return tokens

        def run(self, tokens):
            return tokens

    timed = step._Timed(Model())
    assert timed(1, last_only=True) == 1 and timed.seconds == 0
    assert timed.run(2) == 2 and timed.seconds > 0


def agreements(folders):
    small = {"prompt": "w2 w3 w4", "prompts": 12, "batch": 5, "max_new_tokens": 8, "draft_length": 2}
    rows = call(agreement.run, **folders, **small, methods=["plain", "token", "univer"], relaxations=["none", "lenient:0.5"])
    return {row["case"]: row["value"] for row in rows}


def test_both_loops_agree_in_float64(folders):
    found = agreements(folders)
    assert [case for case in found if "float64" in case] == [
        f"{case}: differ in float64 too"
        for case in ("plain", "token", "token, lenient:0.5", "univer", "univer, lenient:0.5")
    ]
    assert not any(value for case, value in found.items() if "float64" in case)


def test_a_fault_of_the_fast_loop_is_no_rounding_tie(folders, monkeypatch):
    monkeypatch.setitem(chain_twin._STOP, "token", chain_twin._block)
    found = agreements(folders)
    assert found["token: differ in float64 too"] > 0 == found["univer: differ in float64 too"]
