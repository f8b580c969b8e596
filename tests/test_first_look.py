"""The look at a gathering's first unit, and the weight that trials on it choose."""

import json
import math

import pytest
from diversed import cli
from diversed.data.first_look import LARGEST, SMALLEST, FirstLook, choose_weight, rare
from diversed.data.traces import read_manifest
from diversed.files import read_object, write_object


def look(texts=128, finished=128, successes=64, untouched=()):
    rewards = [1.0] * successes + [0.0] * (texts - successes)
    return FirstLook(texts, finished, rewards, 3.0, list(untouched))


@pytest.mark.parametrize("count, texts, share", [(0, 5, 0.5), (1, 8, 0.5), (6, 128, 0.1), (7, 128, 0.1), (0, 28, 0.1), (0, 29, 0.1)])
def test_rare_is_the_exact_binomial_test(count, texts, share):
    outcomes = range(count + 1)
    tail = sum(math.comb(texts, k) * share**k * (1 - share) ** (texts - k) for k in outcomes)
    assert rare(count, texts, share) == (tail < 0.05)


def test_its_thresholds_are_where_the_page_says():
    assert rare(6, 128, 0.1) and not rare(7, 128, 0.1)
    assert rare(0, 29, 0.1) and not rare(0, 28, 0.1)
    assert rare(54, 128, 0.5) and not rare(55, 128, 0.5)


def test_half_of_the_texts_must_finish_and_few_texts_must_show_it():
    assert look(128, 63, 60).cut(96) and not look(128, 64, 60).cut(96)
    assert look(32, 15, 10).cut(96) and not look(31, 15, 10).cut(96) and look(31, 9, 9).cut(96)


def test_good_texts_raise_no_objection():
    assert look().objection(96) is None
    assert look(finished=64, successes=20).objection(96) is None
    assert FirstLook(4, 4, [0.0, 1.0, 1.0, 1.0], 1.0, []).objection(96) is None


def test_graded_rewards_are_objected_to_only_if_all_are_equal():
    assert FirstLook(3, 3, [0.25, 0.5, 0.3], 1.0, []).objection(9) is None
    assert "all 3 rewards are 0.25" in FirstLook(3, 3, [0.25] * 3, 1.0, []).objection(9)


@pytest.mark.parametrize(
    "given, sentence",
    [
        (look(finished=40), "only 40 of the first 128 texts ended before `max_new_tokens` 96"),
        (look(successes=5), "none is without a substitution to tell whether the target succeeds"),
        (look(successes=5, untouched=[0.0]), "those without a substitution no more often"),
        (look(successes=5, untouched=[1.0, 0.0]), "but 50% of those without a substitution do: choose a smaller weight"),
        (look(successes=125), "only 3 of the first 128 texts fail"),
    ],
)
def test_each_objection_says_what_to_change(given, sentence):
    assert sentence in given.objection(96)


def test_texts_needed_hold_ten_of_the_rarer_kind_for_each_number():
    assert look(successes=32).needed(13) == 4 * 130 == look(successes=96).needed(13)
    assert look(successes=0).needed(13) is None and look(successes=128).needed(13) is None


@pytest.mark.parametrize("rate", [0.3, 0.7, 2.0, 8.0, 40.0])
@pytest.mark.parametrize("exact", [1.0, 0.5])
def test_half_of_the_successes_are_kept_at_the_chosen_weight(rate, exact):
    """Survival exp(-c w) is met exactly by trials without noise, up to two digits of the weight."""
    calls = []

    def trial(weight):
        calls.append(weight)
        return FirstLook(1000, 1000, [exact * math.exp(-rate * weight)] * 1000, 1.0, [])

    weight, _ = choose_weight(trial)
    right = min(max(math.log(2) / rate, SMALLEST), LARGEST)
    assert weight == pytest.approx(right, rel=0.06)
    assert calls[0] == 0 and len(calls) <= 6


def test_a_pair_that_no_weight_hurts_is_sampled_from_the_draft_and_one_that_all_hurt_almost_exactly():
    assert choose_weight(lambda weight: look(successes=100))[0] == LARGEST
    weight, kept = choose_weight(lambda weight: look(successes=0 if weight else 100))
    assert weight < 0.02 and kept == 0


def test_no_weight_is_chosen_for_a_target_without_a_success():
    with pytest.raises(ValueError, match="no text of the target alone succeeds"):
        choose_weight(lambda weight: look(successes=0))


def gather(out, *words):
    return cli.main(["gather", "--out", str(out), "--prompts", "24", "--unit", "8", *words])


def test_a_gathering_of_cut_texts_stops_behind_its_first_unit_and_goes_on_if_told(tmp_path, capsys):
    words = (tmp_path / "cut", "--max_new_tokens", "8")
    for _ in range(2):  # the second time it is judged by the unit on disk
        assert gather(*words) == 2
        out, error = capsys.readouterr()
        assert "only 0 of the first 32 texts ended before `max_new_tokens` 8" in error and "--go_on true" in error
        assert "first 32 texts: 0% finished" in out
        assert len(list((tmp_path / "cut").glob("shard-*"))) == 1
    assert gather(*words, "--go_on", "true") == 0
    assert "note: only 0 of the first 32" in capsys.readouterr().out
    assert gather(tmp_path / "whole", "--max_new_tokens", "8", "--go_on", "true") == 0
    for shard in (tmp_path / "whole").iterdir():
        assert (tmp_path / "cut" / shard.name).read_bytes() == shard.read_bytes()


def test_auto_chooses_once_writes_it_down_and_gives_the_bytes_of_the_weight_that_it_chose(tmp_path, capsys):
    assert gather(tmp_path / "auto", "--relaxation", "auto") == 0
    choice = json.loads((tmp_path / "auto" / "auto.json").read_text())
    chosen = read_manifest(tmp_path / "auto")["relaxation"]
    assert choice["chosen"] == chosen and [trial["weight"] for trial in choice["tried"]][:2] == [0.0, 0.3]
    assert f"auto chose {chosen}" in capsys.readouterr().out
    assert gather(tmp_path / "named", "--relaxation", chosen) == 0
    for shard in (tmp_path / "named").iterdir():
        assert (tmp_path / "auto" / shard.name).read_bytes() == shard.read_bytes()
    assert gather(tmp_path / "auto", "--relaxation", "auto") == 0
    assert "auto, " not in capsys.readouterr().out  # nothing is tried again
    assert gather(tmp_path / "auto", "--relaxation", "auto", "--samples", "2") == 2
    assert "was begun with samples 4, now it is 2" in capsys.readouterr().err
    assert gather(tmp_path / "named", "--relaxation", "auto") == 2
    assert f"was begun with relaxation {chosen}" in capsys.readouterr().err


def test_trials_that_were_interrupted_are_not_made_again(tmp_path, capsys):
    assert gather(tmp_path, "--relaxation", "auto", "--sampling.temperature", "0") == 0
    chosen = read_manifest(tmp_path)["relaxation"]
    assert chosen.startswith("coin:")
    capsys.readouterr()
    state = read_object(tmp_path / "auto.json", "")
    last = state["tried"].pop()
    state["chosen"] = None
    write_object(tmp_path / "auto.json", state)
    assert gather(tmp_path, "--relaxation", "auto", "--sampling.temperature", "0") == 0
    out = capsys.readouterr().out
    assert out.count("auto, ") == 1 and f"coin:{last['weight']}" in out and f"auto chose {chosen}" in out


def test_auto_is_refused_for_a_task_without_scores(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + 1"}) + "\n" for i in range(24)))
    words = ("--data.task", "jsonl", "--data.path", str(rows), "--data.whole", "true", "--data.prompt_field", "prompt")
    words = [word.replace("--data.task", "--task") for word in words]
    assert gather(tmp_path / "out", "--relaxation", "auto", *words, "--data.score", "target_logprob") == 2
    assert "auto needs a task whose texts are right or wrong" in capsys.readouterr().err


def test_units_are_looked_at_until_their_texts_tell(tmp_path, capsys):
    """Units of four texts: no unit alone is enough to be sure of anything, five together are."""
    words = ("--unit", "1", "--max_new_tokens", "8")
    for _ in range(2):
        assert gather(tmp_path, *words) == 2
        out, error = capsys.readouterr()
        assert "only 0 of the first 8 texts ended" in error and "first 4 texts: 0% finished" in out
        assert len(list(tmp_path.glob("shard-*"))) == 2
