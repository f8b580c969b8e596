"""The experiments of experiments/ at a size at which they say nothing: that they run, and which rows they give."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from diversed import cli
from diversed.commands.options import call
from diversed.runtime.model import load_module
from diversed.verifier.methods import METHODS

from .support.scripts import script

ROOT = Path(__file__).parents[1]
TEXTS = {"prompts": 2, "max_new_tokens": 6}


def test_block_efficiency_has_a_row_for_every_method_shape_relaxation_and_temperature():
    rows = call(
        script("efficiency").run, **TEXTS, methods=["block", "rrsw"], relaxations=["none", "ensemble:0.3"], temperatures=[0.7], draft_length=2,
        branches=[2],
    )  # fmt: skip
    assert [row["case"] for row in rows] == [
        "T=0.7 block 2", "T=0.7 rrsw 2x2", "T=0.7 block 2 ensemble:0.3", "T=0.7 rrsw 2x2 ensemble:0.3",
    ]  # fmt: skip
    assert all(1 <= row["low"] <= row["value"] <= row["high"] <= 3 for row in rows)
    assert [set(row["vs"]) for row in rows] == [set(), set(), {"exact"}, {"exact"}]


def test_the_ratio_of_sums_is_that_of_the_file_and_lies_in_its_interval():
    value, low, high = script("efficiency").ratio_of_sums([10, 30, 20], [5, 10, 5])
    assert value == 3 and 2 <= low < value < high <= 4


def test_training_is_timed_at_two_vocabularies_that_enter_no_step():
    rows = {row["case"]: row for row in script("training").run(texts=8, tokens=4, batch=4, vocabulary=2000, repeats=1)}
    assert rows["logits, V = 2,000"]["vs"].keys() == {"logits, V = 1,000"}
    assert rows["scalars"]["value"] + 2 * (2048 + 4096) == rows["scalars and hidden states of 8B and 1B"]["value"]
    assert all(row["value"] > 0 for row in rows.values())


TINY = ["--validation_prompts", "4", "--test_prompts", "4", "--epochs", "1", "--max_new_tokens", "8"]


def measured(out):
    """relaxation -> how many texts the test figures of a folder are of."""
    lines = (out / "test" / "results.jsonl").read_text().splitlines()
    names = [json.loads(line)["relaxation"] for line in lines]
    return {name.removeprefix(f"{out}/").split(";")[0]: names.count(name) for name in names}


def test_every_way_of_training_ends_in_test_figures_and_its_head_can_be_taken_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(script("stages"), "BIASES", (-2, 0))
    here, there = tmp_path / "here", tmp_path / "there"
    script("verifiers").main(
        ["--out", str(here), "--objectives", "rounds", "bounded", "--features", "logits", "--rollouts", "96",
         "--static", "ensemble:0.2", "--also", *TINY]
    )  # fmt: skip
    heads = [f"{objective}-logits-96-seed-0/bundle" for objective in ("rounds", "bounded")]
    assert measured(here) == dict.fromkeys(["none", "ensemble:0.2", *heads], 4)
    assert len(json.loads((here / "rounds-logits-96-seed-0" / "rounds.json").read_text())) == 3
    script("transfer").main(
        ["--out", str(there), "--elsewhere", str(here / "bounded-logits-96-seed-0"), "--rollouts", "64",
         "--refit", "32", *TINY]
    )  # fmt: skip
    names = ["elsewhere", "refitted-32-slowly", "refitted-32", "here-32", "here-64"]
    assert measured(there) == dict.fromkeys(["none", *(f"{name}/bundle" for name in names)], 4)


def test_a_pair_is_trained_saved_and_measured_from_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(script("make_pair"), "LONGEST", 8)
    script("make_pair").main(["--out", str(tmp_path), "--steps", "1", "--test", "2"])
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    shipped = json.loads((ROOT / "assets" / "pair" / "numbers.json").read_text())
    assert numbers["definitions"] == shipped["definitions"] and list(numbers["cases"]) == list(shipped["cases"])
    assert numbers["pair"]["target"]["shape"] == shipped["pair"]["target"]["shape"]
    assert numbers["cases"]["draft"]["step_acceptance"] == 1 and numbers["cases"]["target"]["substitutions"] == 0


def numbers(line):
    return [cell for cell in re.split(r"[^-+.\d]+", line.replace("**", "")) if "." in cell and cell.strip(".")]


@pytest.mark.parametrize("page", ["learning", "trees", "efficiency", "evidence", "sums"])
def test_every_row_of_a_table_in_the_docs_stands_in_a_file_of_results(page):
    """The figures of a row stand together in one line of a file: the docs quote, and nothing lives in them alone."""
    files = [path.read_text().splitlines() for path in sorted((ROOT / "experiments" / "results").glob(f"{page}*.csv"))]
    known = [set(numbers(line.replace(",", " "))) for file in files for line in file]
    rows = [line for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines() if line.startswith("| ")]
    wrong = [row for row in rows if not any(set(numbers(row)) <= file for file in known)]
    assert len(rows) > 8 and wrong == []


def test_the_tables_of_laws_have_a_row_for_every_method():
    rows = call(script("laws").run, vocabulary=5, depth=2, trees=4, noises=[1.0])
    assert [row["case"].split(",")[0] for row in rows] == list(METHODS)

def test_heads_are_told_different_things_for_the_same_number_of_tokens(tmp_path, monkeypatch):
    telling = script("equal_tokens")
    monkeypatch.setattr(telling, "FIT", ("--model.width", 4, "--trainer.max_epochs", 1))
    monkeypatch.setattr(telling, "BIASES", (-2, 0))
    usual = ["--out", str(tmp_path), "--tokens", "2000", "--seeds", "0", "--validation_prompts", "3", "--test_prompts", "3"]
    for temperature, told in (("1", ["reinforce", "attribution", "suffix"]), ("0", ["both"])):
        rows = tmp_path / f"{temperature}.csv"
        telling.main([*usual, "--temperature", temperature, "--told", *told, "--csv", str(rows)])
        found = list(csv.DictReader(rows.open()))
        assert [row["told"] for row in found] == ["exact", "oracle", *told]
        assert found[0]["of the gap"] == "0%" and found[1]["of the gap"] == "100%"
        assert all(0 < int(row["tokens"]) < 12_000 for row in found[2:])


def test_labels_are_held_against_what_matters_on_sums(tmp_path, monkeypatch):
    truth = script("label_truth")
    monkeypatch.setattr(truth, "KINDS", {"suffix, T = 0": truth.KINDS["suffix, T = 0"]})
    truth.main(["--out", str(tmp_path / "labels"), "--prompts", "6", "--csv", str(tmp_path / "rows.csv")])
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert len(rows) == len(truth.THRESHOLDS)
    recall = [float(row["recall"]) for row in rows]
    assert recall == sorted(recall, reverse=True) and float(rows[0]["precision"]) > 0.5
    found = truth.shares(torch.tensor([6.0, 2.0, 4.0]))
    assert found.tolist() == pytest.approx([0.75, 0.6])


def test_judges_are_ranked_by_what_they_did_not_see(tmp_path, monkeypatch):
    judges = script("judges")
    monkeypatch.setattr(judges, "HEADS", [("logits", "", 0.1), ("logits+tokens+hidden", "divergence:0.3", 3.0)])
    monkeypatch.setattr(judges, "STEPS", 5)
    monkeypatch.setattr(judges, "RESAMPLES", 20)
    words = ["gather", "--out", str(tmp_path / "labels"), "--prompts", "10", "--samples", "1", "--sampling.temperature", "0"]
    words += ["--label", "counterfactual", "--hidden", "--max_new_tokens", "60", "--go_on"]
    assert cli.main(words) == 0
    judges.main([str(tmp_path / "labels"), "--csv", str(tmp_path / "rows.csv")])
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert len(rows) == 14 and all(0 <= float(row["low"]) <= float(row["high"]) <= 1 for row in rows)


def test_an_auc_is_the_share_of_pairs_in_order():
    auc = script("judges").auc
    generator = torch.Generator().manual_seed(0)
    score, harmful = torch.randint(5, (40,), generator=generator).float(), torch.rand(40, generator=generator).lt(0.4).float()
    weight = torch.randint(3, (40,), generator=generator)
    pairs = [(float(s > t) + 0.5 * float(s == t), int(w * v)) for s, h, w in zip(score, harmful, weight, strict=True)
             for t, g, v in zip(score, harmful, weight, strict=True) if h and not g]  # fmt: skip
    expected = sum(value * count for value, count in pairs) / sum(count for _, count in pairs)
    assert auc(score, harmful, weight) == pytest.approx(expected)


def test_a_weak_draft_is_the_packaged_one_with_noise(tmp_path):
    weak = script("weak_draft")
    weak.main([str(tmp_path / "same"), "--noise", "0"])
    weak.main([str(tmp_path / "weak"), "--noise", "0.6"])
    same, noisy, packaged = (load_module(name) for name in (str(tmp_path / "same"), str(tmp_path / "weak"), "sums-draft"))
    for one, other in zip(same.parameters(), packaged.parameters(), strict=True):
        assert torch.equal(one, other)
    assert any(not torch.equal(one, other) for one, other in zip(noisy.parameters(), packaged.parameters(), strict=True))
