"""The experiments of experiments/ at a size at which they say nothing: that they run, and which rows they give."""

from .support.scripts import script

TEXTS = {"prompts": 2, "max_new_tokens": 6}


def test_block_efficiency_has_a_row_for_every_method_shape_relaxation_and_temperature():
    rows = script("efficiency").run(
        **TEXTS, methods=["block", "rrsw"], relaxations=["none", "ensemble:0.3"], temperatures=[0.7], draft_length=2,
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
    assert rows["tiny pair, written"]["value"] < rows["tiny pair with hidden states, written"]["value"]
    assert all(row["value"] > 0 for row in rows.values())
