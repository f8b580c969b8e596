"""Worked examples in front of every prompt."""

import json

import pytest
from diversed import cli
from diversed.data.prompts import Example, fill
from diversed.data.shots import Shot, as_turns, in_front, until_done, without_calculator
from diversed.data.tasks import TASKS, DataOptions, load_task
from diversed.data.traces import read_manifest
from diversed.runtime.model import load_tokenizer

JSONL = {"prompt_field": "q", "reference_field": "a", "score": "exact"}


@pytest.fixture
def rows(tmp_path):
    """Files of questions without and with a test split."""

    def write(folder, **splits):
        folder = tmp_path / folder
        folder.mkdir()
        for split, count in splits.items():
            lines = [json.dumps({"q": f"{split} question {i}?", "a": f"answer {i}"}) for i in range(count)]
            (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        return str(folder)

    return write


def prompts(path, split="test", limit=4, seed=0, **options):
    task = load_task("jsonl", path, split, limit, seed, DataOptions(stop=("\n",), **JSONL, **options))
    return task, [example.prompt for example in task.examples]


def test_plain_prompts_hold_questions_with_answers_of_the_training_split(rows):
    path = rows("all", train=9, test=4)
    task, with_shots = prompts(path, shots=2)
    _, without = prompts(path)
    one, two = task.shots
    assert one.id.endswith("of train.jsonl") and one.id != two.id
    front = f"{one.prompt} {one.answer}\n\n{two.prompt} {two.answer}\n\n"
    assert one.prompt.startswith("train question") and one.answer == f"answer {one.prompt.split()[2][:-1]}"
    assert with_shots == [front + prompt for prompt in without]
    assert task.settings["shots"] == [one.id, two.id] and task.settings["data"]["shots"] == 2


def test_the_same_rows_are_shown_whatever_is_asked(rows):
    path = rows("all", train=30, test=9)
    shown = {prompts(path, split, limit, seed, shots=3)[0].shots for split in ("train", "test") for limit in (2, 9) for seed in (0, 5)}
    assert len(shown) == 1
    more, fewer = prompts(path, shots=5)[0].shots, prompts(path, shots=3)[0].shots
    assert more[:3] == fewer


def test_what_is_shown_is_never_asked(rows):
    path = rows("all", train=12, test=3)
    task, asked = prompts(path, "train", None, shots=4)
    assert len(asked) == len(prompts(path, "train", None)[1]) - 4 and not {shot.prompt for shot in task.shots} & {text.split("\n\n")[-1] for text in asked}
    task, asked = prompts(path, "test", None, whole=True, shots=1)  # the file of the split, for any split
    assert len(asked) + len([shot for shot in task.shots if shot.prompt.startswith("test")]) == 3


def test_splits_that_are_carved_from_one_file_show_its_training_part(rows):
    path = rows("one", train=200)
    _, train = prompts(path, "train", None)
    task, asked = prompts(path, "test", None, shots=3)
    assert {shot.prompt for shot in task.shots} < set(train)


def test_a_chat_shows_them_as_earlier_turns(rows, monkeypatch):
    path = rows("all", train=5, test=2)
    task, texts = prompts(path, chat=True, shots=2)
    assert texts == prompts(path)[1]
    seen = []
    monkeypatch.setattr("diversed.runtime.prompt.rendered", lambda turns, tokenizer: seen.append(turns) or "text")
    task.encode(task.examples[0], load_tokenizer("sums-target"), 99)
    assert seen == [(*as_turns(task.shots), {"role": "user", "content": texts[0]})]
    assert [turn["role"] for turn in seen[0]] == ["user", "assistant"] * 2 + ["user"]
    assert seen[0][1]["content"] == task.shots[0].answer


def test_an_instruction_stands_once():
    template = "Solve {{it}}.\n\nQuestion: {prompt}\nAnswer:"
    example = Example(*fill(template, "2+2?", ""), "4", "line 1")
    shot = Shot("".join(fill(template, "1+1?", "")), "2", "line 2")
    (found,) = in_front(template, [shot], [example])
    assert found.prompt == "Solve {it}.\n\nQuestion: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer:"


def test_an_article_behind_them_is_still_what_is_shortened(rows, tmp_path):
    template = "Article: {article}\n\nSummary:"
    example = Example(*fill(template, "", "x " * 300), "4", "line 1")
    (found,) = in_front(template, [Shot("Article: short\n\nSummary:", "s", "line 2")], [example])
    assert found.article == example.article and found.before == "Article: short\n\nSummary: s\n\nArticle: "


def test_answers_are_shown_as_the_task_wants_them():
    assert without_calculator("48/2 = <<48/2=24>>24 clips\n#### 24 ") == "48/2 = 24 clips\n#### 24"
    assert until_done("def f():\n    pass\n") == "def f():\n    pass\n[DONE]"
    assert TASKS["gsm8k"].shown is without_calculator and TASKS["mbpp"].answer == "code"


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"shots": 6}, "`data.shots` is 6, the training split of .* holds [345] rows"),
        ({"shots": -1}, "`data.shots` must be at least 0, got -1"),
        ({"shots": 65}, "`data.shots` must be at most 64, got 65"),
    ],
)
def test_more_shots_than_rows_are_refused(rows, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        prompts(rows("all", train=5, test=2), **options)


def test_rows_without_answers_and_conversations_are_refused(rows, tmp_path):
    path = rows("all", train=5, test=2)
    with pytest.raises(ValueError, match="the score target_logprob reads none"):
        load_task("jsonl", path, "test", 2, data=DataOptions(prompt_field="q", shots=1))
    with pytest.raises(ValueError, match="leave out `data.shots`"):
        load_task("sums", limit=2, data=DataOptions(shots=1))
    lines = [json.dumps({"q": [{"role": "user", "content": f"{i}?"}], "a": f"{i}"}) for i in range(5)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="holds a conversation; put worked examples into the conversations"):
        load_task("jsonl", str(tmp_path / "chats.jsonl"), "test", 2, data=DataOptions(whole=True, shots=1, **JSONL))


def test_texts_without_an_end_are_warned_about(rows):
    path = rows("all", train=5, test=2)
    with pytest.warns(UserWarning, match="say with `data.stop` where it ends"):
        load_task("jsonl", path, "test", 2, data=DataOptions(shots=1, **JSONL))


def test_a_folder_is_not_continued_with_other_shots(rows, tmp_path, capsys):
    path = rows("all", train=12, test=2)
    words = ["gather", "--out", str(tmp_path / "out"), "--task", "jsonl", "--data.path", path, "--prompts", "4", "--samples", "1",
             "--data.prompt_field", "q", "--data.reference_field", "a", "--data.score", "exact", "--data.stop", "\n",
             "--max_new_tokens", "4", "--max_prompt_tokens", "400"]  # fmt: skip
    assert cli.main([*words, "--data.shots", "1"]) == 0
    assert read_manifest(tmp_path / "out")["shots"] == [prompts(path, shots=1)[0].shots[0].id]
    assert cli.main([*words, "--data.shots", "2"]) == 2
    assert "was begun with data.shots 1, now it is 2" in capsys.readouterr().err
