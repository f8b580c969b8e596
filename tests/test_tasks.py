"""Tasks: every row in one split, the article alone gives way, and a user's mistake is one sentence."""

import gzip
import json
import os
import re
import sys
from pathlib import Path

import datasets
import pytest
from diversed.commands.eval import evaluate
from diversed.commands.gather import gather
from diversed.commands.options import call
from diversed.data import sources
from diversed.data.prompts import Example
from diversed.data.sources import read_rows
from diversed.data.tasks import TASKS, DataOptions, load_task
from diversed.data.traces import read_manifest, read_shards
from diversed.eval.summary import summarise
from diversed.runtime import chat
from diversed.runtime.prompt import prompt_tokens
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
SPLITS = ("train", "validation", "test")
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(specials: str = "<s> $A", chat: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, and the special tokens that `specials` puts around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(specials, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat)


BYTES = byte_tokenizer()


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(count: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"What is {i}?", "answer": f"#### {i}"} for i in range(start, start + count)]


ANSWERS = {"reference_field": "answer", "score": "final_number"}


# Splits


def test_a_lone_file_is_split_into_three_disjoint_parts_that_are_all_of_it(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(2000))
    parts = [{e.id for e in load_task("jsonl", path, split).examples} for split in SPLITS]
    assert [len(part) for part in parts] == pytest.approx([1600, 200, 200], abs=60)  # four standard deviations
    assert len(set.union(*parts)) == sum(map(len, parts)) == 2000


@given(st.lists(st.text("ab \u00e9", min_size=1, max_size=3).filter(str.strip), min_size=1, max_size=40))
def test_equal_prompts_never_straddle_two_splits(tmp_path_factory, prompts):
    path = write(tmp_path_factory.mktemp("rows") / "rows.jsonl", [{"prompt": prompt} for prompt in prompts])
    seen = {}
    for split in SPLITS:
        try:
            examples = load_task("jsonl", path, split).examples
        except ValueError as error:
            assert "is empty: it is carved from" in str(error)
            continue
        for example in examples:
            assert seen.setdefault(example.prompt, split) == split


def test_membership_depends_on_no_limit_no_seed_and_no_other_row(tmp_path):
    small = write(tmp_path / "small.jsonl", numbered(300))
    large = write(tmp_path / "large.jsonl", numbered(300) + numbered(300, 300))
    for split in SPLITS:
        whole = {e.prompt for e in load_task("jsonl", small, split).examples}
        assert {e.prompt for e in load_task("jsonl", small, split, limit=10, seed=7).examples} <= whole
        assert whole <= {e.prompt for e in load_task("jsonl", large, split, seed=3).examples}


def test_a_smaller_limit_is_the_beginning_of_a_larger_one(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(100))
    all_of_them = load_task("jsonl", path).examples
    assert load_task("jsonl", path, limit=5).examples == all_of_them[:5]
    assert load_task("jsonl", path, seed=1).examples != all_of_them


def test_a_split_with_its_own_file_is_that_file_and_only_the_missing_one_is_carved(tmp_path):
    write(tmp_path / "train.jsonl", numbered(500))
    write(tmp_path / "test.jsonl", numbered(50, 1000))
    train, validation, test = (load_task("jsonl", str(tmp_path), split).examples for split in SPLITS)
    assert len(test) == 50 and len(train) + len(validation) == 500
    assert 20 <= len(validation) <= 80  # Binomial(500, .1): 50 +- 4.5 standard deviations of 6.7
    write(tmp_path / "dev.jsonl", numbered(7, 2000))
    assert len(load_task("jsonl", str(tmp_path), "validation").examples) == 7
    assert len(load_task("jsonl", str(tmp_path), "train").examples) == 500


def test_whole_takes_every_row_for_any_split_and_says_so(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(30))
    task = load_task("jsonl", path, "test", data=DataOptions(whole=True))
    assert len(task.examples) == 30
    assert task.source == f"30 of 30 rows of {path}"
    assert "carved out as train" in load_task("jsonl", path).source


def test_json_arrays_and_gzip_hold_the_same_rows_as_lines(tmp_path):
    rows = numbered(40) + [{"prompt": "line\u2028separator \u00e9"}]
    expected = [e.prompt for e in load_task("jsonl", write(tmp_path / "a.jsonl", rows)).examples]
    text = json.dumps(rows, indent=1, ensure_ascii=False)
    (tmp_path / "b.json").write_text("\ufeff" + text, encoding="utf-8")
    lines = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("b.json", "c.jsonl.gz", "d.json.gz"):
        assert [e.prompt for e in load_task("jsonl", str(tmp_path / name)).examples] == expected


# Schemas


HUB = {
    "gsm8k": ({"question": "What is 3+4?", "answer": "3+4=<<3+4=7>>7\n#### 7"}, "What is 3+4?", ""),
    "cnndm": ({"article": "Long news.", "highlights": "News .\nLong .", "id": "f00"}, "", "Long news."),
    "xsum": ({"document": "Long news.", "summary": "News today.", "id": "1"}, "", "Long news."),
    "wmt": ({"translation": {"de": "Guten Tag.", "en": "Good day."}}, "Guten Tag.", ""),
}


@pytest.mark.parametrize("name", HUB)
def test_hub_schema_reads_like_the_same_rows_from_a_file(name, monkeypatch, tmp_path):
    row, prompt, article = HUB[name]
    asked = []

    def load_dataset(repository, configuration, split):
        asked.append((repository, configuration, split))
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (hub,) = load_task(name, split="test").examples
    assert asked == [(*TASKS[name].hub, "test")]
    (local,) = load_task(name, write(tmp_path / "r.jsonl", [row]), "test", data=DataOptions(whole=True)).examples
    assert (hub.before, hub.article, hub.after, hub.reference) == (
        local.before,
        local.article,
        local.after,
        local.reference,
    )
    assert hub.article == article and prompt in hub.prompt
    assert hub.id == f"row 0 of {TASKS[name].hub[0]} test"


def test_gsm8k_validation_is_carved_from_the_hub_s_train_split(monkeypatch):
    rows = [{"question": f"What is {i}?", "answer": f"#### {i}"} for i in range(400)]
    stored = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:9])}
    monkeypatch.setattr(datasets, "load_dataset", lambda repository, configuration, split: stored[split])
    train, validation, test = ({e.prompt for e in load_task("gsm8k", split=split).examples} for split in SPLITS)
    assert not train & validation and len(train | validation) == 400 and len(test) == 9


def test_hub_rows_without_a_text_are_left_out(monkeypatch):
    rows = [{"document": text, "summary": "s t"} for text in ("", "a", " ", "b")] + [{"document": "c", "summary": None}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    assert {e.article for e in load_task("xsum").examples} == {"a", "b"}
    assert len(load_task("xsum", limit=2).examples) == 2


def test_unreachable_hub_is_one_sentence_that_offers_local_files(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nTraceback")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        OSError, match="cannot load openai/gsm8k from the hub .* local files with `data.path`"
    ) as caught:
        load_task("gsm8k")
    assert "\n" not in str(caught.value)


def test_sums_makes_its_own_problems_and_scores_them():
    task = load_task("sums", split="test", limit=20, seed=3)
    assert len(task.examples) == 20 and task.examples[:5] == load_task("sums", split="test", limit=5, seed=3).examples
    for example in task.examples:
        assert task.score(example.reference, example) == 1.0
        assert task.score("#### 1000", example) == 0.0
    assert not {e.prompt for e in task.examples} & {e.prompt for e in load_task("sums", limit=20, seed=3).examples}


@needs_shared
@pytest.mark.parametrize(
    ("name", "path", "count"),
    [
        ("gsm8k", "gsm8k", 1319),
        ("gsm8k", "spec_bench/question.jsonl", 80),
        ("cnndm", "spec_bench", 80),
        ("xsum", "xsum", 100),
        ("wmt", "wmt/wmt22.de-en.json", 1984),
        ("wmt", "spec_bench", 80),
    ],
)
def test_real_files_give_prompts_without_their_answers(name, path, count):
    task = load_task(name, str(SHARED / path), "test", data=DataOptions(whole=True))
    assert len(task.examples) == count == len({e.id for e in task.examples})
    before, article, after = TASKS[name].template.partition("{article}")
    for example in task.examples:
        assert example.reference.strip()
        if article:
            assert (example.before, example.after) == (before, after)
            assert not re.search(r"^Summarize|###|Summarize the above", example.article)
        else:
            assert example.prompt.count("Translate") <= 1 and example.after == ""
    for example in task.examples[:10]:
        assert task.score(example.reference, example) == pytest.approx(1.0, abs=1e-12)
        assert task.score("", example) == 0.0


# Code


needs_sandbox = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
HEAD = 'from typing import List\n\n\ndef double(x: int) -> int:\n    """ Twice x. """\n'
HUMANEVAL = {
    "task_id": "HumanEval/0", "prompt": HEAD, "entry_point": "double", "canonical_solution": "    return 2 * x\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(3) == 6\n",
}  # fmt: skip
MBPP = {
    "task_id": 1, "text": "Write a function to double a number.", "code": "def double(x):\r\n\treturn 2 * x",
    "test_list": ["assert double(3) == n", "assert double(0) == 0"], "test_setup_code": "n = 6",
    "challenge_test_list": [],
}  # fmt: skip
SANITIZED = {
    "source_file": "f", "task_id": 1, "prompt": MBPP["text"], "code": MBPP["code"], "test_imports": ["n = 6"],
    "test_list": MBPP["test_list"],
}  # fmt: skip


def cut(text, stop):
    """The text before the first stop string."""
    return min([text, *(text.partition(string)[0] for string in stop)], key=len)


def code_task(name: str, path: Path, row: dict, **options):
    task = load_task(name, write(path / "r.jsonl", [row]), "test", data=DataOptions(whole=True, **options))
    return task, task.examples[0]


@needs_sandbox
@pytest.mark.parametrize("row", [MBPP, SANITIZED], ids=["full", "sanitized"])
def test_mbpp_shows_task_and_tests_and_runs_all_of_them(row, tmp_path):
    task, example = code_task("mbpp", tmp_path, row)
    assert example.prompt == (
        "You are an expert Python programmer, and here is your task: Write a function to double a number. Your code"
        " should pass these tests:\n\nassert double(3) == n\nassert double(0) == 0\n[BEGIN]\n"
    )
    assert example.article == "assert double(3) == n\nassert double(0) == 0"  # the part that may lose its end
    assert task.metric == "pass@1" and row["code"] not in example.prompt
    assert task.score(row["code"], example) == 1.0
    assert task.score("", example) == task.score("def double(x): return 6", example) == 0.0
    assert task.score("def double(x): return x", example) == 0.0


@needs_sandbox
@pytest.mark.parametrize(
    "answer",
    [
        "def double(x):\n    return 2 * x\n\n[DONE]\n\nNonsense!",
        "[BEGIN]\ndef double(x):\n    return 2 * x\n[DONE]",
        "Sure!\n\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles:\n\n```python\ndouble = 5\n```\n",
        "```\ndef double(x):\n    return 2 * x",
        "```py\r\ndef double(x):\r\n    return 2 * x\r\n```",
        "def double(x):\n    return 2 * x\n```\nThis works.",
    ],
)
def test_an_answer_s_program_is_the_block_that_defines_what_the_tests_call(answer, tmp_path):
    task, example = code_task("mbpp", tmp_path, MBPP)
    assert task.score(cut(answer, task.stop) if "```py" not in answer else answer, example) == 1.0


@needs_sandbox
def test_humaneval_continues_the_head_and_its_check_is_called(tmp_path):
    task, example = code_task("humaneval", tmp_path, HUMANEVAL)
    assert example.prompt == HEAD
    assert task.score("    return 2 * x\n", example) == 1.0
    assert task.score("   return 2 * x\n", example) == 1.0  # a tokenizer has swallowed the first space
    assert task.score("    y: List[int] = [x]\n    return 2 * y[0]\n", example) == 1.0  # the head's import is there
    assert task.score("", example) == task.score("    return x", example) == 0.0
    assert task.score("return 2 * x", example) == 1.0  # and here all of its spaces
    rambling = "    return 2 * x\n\n\ndef other(x):\n    return (\n"
    assert task.score(rambling, example) == task.score(cut(rambling, task.stop), example) == 1.0


@needs_sandbox
@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
def test_a_chat_answer_is_not_cut_by_the_stop_strings_of_a_continuation(name, tmp_path):
    task, example = code_task(name, tmp_path, MBPP if name == "mbpp" else HUMANEVAL, chat=True)
    answer = "Here:\n```python\ndef double(x):\n    return 2 * x\n\nprint(double(1))\n```\nDone."
    assert task.stop == () and task.score(answer, example) == 1.0
    assert code_task(name, tmp_path, MBPP if name == "mbpp" else HUMANEVAL, chat=True, stop=("#",))[0].stop == ("#",)


@needs_sandbox
def test_a_template_around_humaneval_s_head_stays_out_of_the_program(tmp_path):
    task, example = code_task("humaneval", tmp_path, HUMANEVAL, template="Complete this:\n{prompt}")
    assert example.prompt == f"Complete this:\n{HEAD}" and task.score("    return 2 * x", example) == 1.0


@needs_sandbox
def test_any_file_with_tests_is_a_code_task(tmp_path):
    row = {"question": "Double.", "tests": "assert double(3) == 6"}
    options = {"prompt_field": "question", "reference_field": "tests", "score": "pass_at_1"}
    task, example = code_task("jsonl", tmp_path, row, **options)
    assert task.score("double = lambda x: 2 * x", example) == 1.0 and task.score("double = 3", example) == 0.0


@needs_sandbox
def test_the_hub_s_only_split_of_humaneval_is_carved_like_a_lone_file(monkeypatch):
    rows = datasets.Dataset.from_list([{**HUMANEVAL, "prompt": f"{HEAD}    # {i}\n"} for i in range(200)])
    asked = set()

    def load_dataset(repository, configuration, split):
        asked.add((repository, configuration, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    parts = [{e.prompt for e in load_task("humaneval", split=split).examples} for split in SPLITS]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 200 and min(map(len, parts)) >= 5
    assert asked == {("openai/openai_humaneval", None, "test")}
    assert len(load_task("humaneval", split="test", data=DataOptions(whole=True)).examples) == 200


@needs_sandbox
@needs_shared
@pytest.mark.parametrize(
    ("name", "path", "answer", "count"),
    [("mbpp", "mbpp/mbpp.jsonl", "code", 974), ("humaneval", "humaneval", "canonical_solution", 164)],
)
def test_reference_solutions_of_real_rows_pass_their_tests(name, path, answer, count):
    """Every fortieth row; all 974 and 164 passed on 2026-11-29."""
    task = load_task(name, str(SHARED / path), "test", data=DataOptions(whole=True))
    assert len(task.examples) == count
    (file,) = [SHARED / path] if path.endswith("jsonl") else (SHARED / path).iterdir()
    rows = dict(read_rows(file))
    for example in task.examples[::40]:
        row = rows[example.id]
        assert task.score(row[answer], example) == 1.0
        assert task.score("", example) == 0.0
        assert row[answer] not in example.prompt


@needs_sandbox
@pytest.mark.parametrize("name", ["mbpp", "humaneval"])
def test_code_is_gathered_and_evaluated_on_the_packaged_pair(name, tmp_path):
    """It only knows sums: every score is 0."""
    data = DataOptions(path=write(tmp_path / "r.jsonl", [MBPP if name == "mbpp" else HUMANEVAL] * 2), whole=True)
    small = {"task": name, "data": data, "prompts": 2, "max_new_tokens": 8}
    call(gather, out=str(tmp_path / "traces"), **small, samples=1, unit=2)
    manifest = read_manifest(tmp_path / "traces")
    assert manifest["metric"] == "pass@1"
    assert [shard.reward.tolist() for shard in read_shards(tmp_path / "traces")] == [[0.0, 0.0]]
    call(evaluate, out=str(tmp_path / "eval"), **small, relaxations=["none"])
    (cell,) = summarise(tmp_path / "eval" / "results.jsonl")
    assert (cell["metric"], cell["score"]) == ("pass@1", 0.0)


# Files of other projects


def test_of_a_spec_bench_file_a_task_takes_the_rows_of_its_category(tmp_path):
    rows = [
        {"category": "summarization", "turns": ["Summarize: Long news."], "reference": ["News today ."]},
        {"category": "math_reasoning", "turns": ["What is 3+4?"], "reference": ["7"]},
        {"category": "translation", "turns": ["Translate German to English: Guten Tag."], "reference": ["Good day."]},
    ]
    path = write(tmp_path / "question.jsonl", rows)
    found = {name: load_task(name, path, data=DataOptions(whole=True)) for name in ("cnndm", "gsm8k", "wmt")}
    assert [len(task.examples) for task in found.values()] == [1, 1, 1]
    assert found["cnndm"].examples[0].article == "Long news." and found["cnndm"].examples[0].reference == "News today ."
    assert "Question: What is 3+4?\n" in found["gsm8k"].examples[0].prompt
    assert found["wmt"].examples[0].prompt == "Translate German to English.\nGerman: Guten Tag.\nEnglish:"
    taken = load_task("gsm8k", path, data=DataOptions(whole=True, prompt_field="turns.0", reference_field="reference.0",
                                                      score="exact"))  # fmt: skip
    assert len(taken.examples) == 3 and any("Summarize: Long" in example.prompt for example in taken.examples)


def test_of_helm_s_few_shot_prompts_the_last_article_counts(tmp_path):
    shots = "Article: Old.\nSummary: O.\n\n###\nArticle: New.\n\nSummarize the above article in 1 sentence.\n"
    task = load_task("xsum", write(tmp_path / "r.jsonl", [{"article": shots, "summary_gt": "N. n."}]),
                     data=DataOptions(whole=True))  # fmt: skip
    assert (task.examples[0].article, task.examples[0].reference) == ("New.", "N. n.")


# Options


def test_named_fields_make_a_task_of_any_file(tmp_path):
    row = {"q": "Who won?", "text": "A {long} story.", "gold": {"short": "Ada"}}
    data = DataOptions(
        path=write(tmp_path / "r.jsonl", [row]), whole=True, prompt_field="q", article_field="text", score="exact",
        reference_field="gold.short", template="{article}\n{{Q}} {prompt}\nA:", stop=("\n",), max_new_tokens=9,
    )  # fmt: skip
    task = load_task("jsonl", data=data)
    (example,) = task.examples
    assert (example.before, example.article, example.after) == ("", "A {long} story.", "\n{Q} Who won?\nA:")
    assert (task.stop, task.max_new_tokens, task.metric) == (("\n",), 9, "exact match")
    assert task.score(" Ada\n", example) == 1.0


def test_a_task_takes_other_field_names_and_keeps_its_instruction(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"aufgabe": "3+4?", "answer": "#### 7"}])
    task = load_task("gsm8k", path, data=DataOptions(prompt_field="aufgabe", whole=True))
    assert task.examples[0].prompt == TASKS["gsm8k"].template.replace("{prompt}", "3+4?")
    assert task.examples[0].reference == "#### 7"


def test_target_log_probability_needs_no_reference_for_any_task(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"question": "3+4?"}])
    task = load_task("gsm8k", path, data=DataOptions(score="target_logprob", whole=True))
    assert task.examples[0].reference is None and not task.scores_text
    with pytest.raises(ValueError, match="read off the target's rows"):
        task.score("7", task.examples[0])
    assert load_task("jsonl", write(tmp_path / "p.jsonl", numbered(9))).metric == "target log-probability"


HOLES = [{"prompt": ""}, {"answer": "#### 1"}, {"prompt": None, "answer": "#### 1"}, {"prompt": "q"}]
HOLES += [{"prompt": "q", "answer": wrong} for wrong in (None, "", " ", [1, 2], {"a": 1}, True, 1e400, "no number")]
HOLES += [{"prompt": wrong, "answer": "#### 1"} for wrong in (False, [], {}, ["a"], [{"from": "human"}], "\ud800")]
HOLES += [{"prompt": [{"role": "user", "content": ""}], "answer": "#### 1"}]


@pytest.mark.parametrize("hole", HOLES)
def test_a_row_with_a_hole_is_refused_or_left_out_and_counted(tmp_path, hole):
    text = "".join(json.dumps(row) + "\n" for row in [*numbered(2), hole, *numbered(3, 5)])
    (tmp_path / "r.jsonl").write_text(text.replace("Infinity", "1e400"))
    path = str(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="line 3 of r.jsonl.*; `data.skip_incomplete` leaves such rows out"):
        load_task("jsonl", path, data=DataOptions(whole=True, **ANSWERS))
    with pytest.warns(UserWarning, match="1 incomplete rows of .*r.jsonl are left out, the first: line 3 of r.jsonl"):
        task = load_task("jsonl", path, data=DataOptions(whole=True, skip_incomplete=True, **ANSWERS))
    assert {example.id for example in task.examples} == {f"line {i} of r.jsonl" for i in (1, 2, 4, 5, 6)}


def test_a_name_that_fits_no_row_is_no_hole(tmp_path):
    path = write(tmp_path / "r.jsonl", numbered(3))
    with pytest.raises(ValueError, match="it has none: line 1 of r.jsonl has no field promt, .*did you mean `prompt`?"):
        load_task("jsonl", path, data=DataOptions(whole=True, skip_incomplete=True, prompt_field="promt"))


def test_a_number_is_a_text_as_it_stands_there(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"prompt": 12, "gold": 0.5}])
    data = DataOptions(whole=True, reference_field="gold", score="exact")
    (example,) = load_task("jsonl", path, data=data).examples
    assert (example.prompt, example.reference) == ("12", "0.5")


PAIR = {"translation": {"de": "Das Haus ist alt.", "en": "The house is old.", "fr": "La maison."}, "de": "Ja.", "src": "x"}


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({}, True),
        ({"prompt_field": "de"}, True),
        ({"prompt_field": "translation.de", "reference_field": "translation.en"}, True),
        ({"prompt_field": "translation.en", "reference_field": "translation.de"}, False),
        ({"reference_field": "translation.fr"}, False),
        ({"prompt_field": "translation.fr"}, False),
        ({"prompt_field": "src"}, False),
        ({"prompt_field": "translation.en", "score": "target_logprob"}, False),
    ],
)
def test_wmt_asks_for_the_languages_that_its_fields_hold(tmp_path, fields, right):
    path = write(tmp_path / "r.jsonl", [PAIR])
    if right:
        (example,) = load_task("wmt", path, data=DataOptions(whole=True, **fields)).examples
        assert re.fullmatch(r"Translate German to English.\nGerman: (Ja|Das Haus ist alt).\nEnglish:", example.prompt)
        return
    with pytest.raises(ValueError, match="the task wmt translates translation.de into .*say with `data.template`"):
        load_task("wmt", path, data=DataOptions(whole=True, **fields))
    data = DataOptions(whole=True, template="Translate English to German: {prompt}", **fields)
    assert load_task("wmt", path, data=data).examples[0].prompt.startswith("Translate English to German: ")


# Prompts


@given(
    st.text("ab\u00e9\U0001f600 ", max_size=60),
    st.text("xy\u00fc", max_size=8),
    st.text("xy\u00fc", max_size=8),
    st.integers(0, 90),
)
def test_only_the_end_of_the_article_gives_way(article, before, after, limit):
    example = Example(before, article, after, None, "line 1")
    task = load_task("sums", limit=1)
    fixed = 1 + len((before + after).encode())
    if fixed > limit:
        with pytest.raises(ValueError, match=f"of line 1 has {fixed} tokens, the limit is {limit}$"):
            task.encode(example, BYTES, limit)
        return
    ids = task.encode(example, BYTES, limit)
    assert ids[0] == BYTES.bos_token_id and len(ids) <= limit
    text = BYTES.decode(ids[1:])
    kept = text[len(before) : len(text) - len(after)]
    assert text == before + kept + after and article.startswith(kept)
    assert kept == article or len(ids) + len(article[len(kept)].encode()) > limit  # one more letter would not fit


@pytest.mark.parametrize("specials", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_special_tokens_stand_in_front_and_never_behind(specials):
    tokenizer = byte_tokenizer(specials)
    example = Example("Hi ", "long article", "?", None, "line 1")
    for limit in (100, 10):
        ids = load_task("sums", limit=1).encode(example, tokenizer, limit)
        assert (ids[0] == tokenizer.bos_token_id) == specials.startswith("<s>")
        assert tokenizer.eos_token_id not in ids
        assert len(ids) == min(limit, 16 + specials.startswith("<s>"))


@pytest.mark.parametrize("specials", ["<s> $A", "<s> $A </s>"])
def test_an_end_of_text_that_the_prompt_itself_holds_stays(specials):
    tokenizer = byte_tokenizer(specials)
    ids = load_task("sums", limit=1).encode(Example("Hi</s>", "", "", None, "line 1"), tokenizer, 100)
    assert ids[-1] == tokenizer.eos_token_id and len(ids) == 4


def test_chat_wraps_the_shortened_prompt_in_one_user_turn(tmp_path):
    tokenizer = byte_tokenizer(chat=CHAT)
    data = DataOptions(article_field="text", template="Read {article} End", chat=True, whole=True)
    task = load_task("jsonl", write(tmp_path / "r.jsonl", [{"text": "a" * 99}]), data=data)
    ids = task.encode(task.examples[0], tokenizer, 60)
    assert ids.count(tokenizer.bos_token_id) == 1 and len(ids) == 60
    assert re.fullmatch(r"<user>Read a+ End\n<assistant>", tokenizer.decode(ids[1:]))


def test_chat_without_a_template_is_refused():
    with pytest.raises(ValueError, match="`chat` and conversations need a tokenizer with a chat template"):
        task = load_task("sums", limit=1, data=DataOptions(chat=True))
        task.encode(task.examples[0], BYTES, 500)


@pytest.mark.parametrize("specials", ["$A", "<s> $A", "<s> $A </s>", "$A </s>"])
@pytest.mark.parametrize("text", ["<s>[system] Be kind. [user] Hello [assistant]", "<s>", "<s>Hi</s>"])
def test_a_prompt_that_was_templated_by_its_user_gets_no_second_bos(specials, text):
    ids = prompt_tokens(text, byte_tokenizer(specials))
    assert ids.count(0) == 1 and ids[0] == 0
    assert ids == byte_tokenizer("$A")(text)["input_ids"]


@pytest.mark.parametrize("text", ["<s>Hi", "Hi"])
def test_a_chat_template_with_bos_gives_one_and_a_templated_prompt_is_refused_there(text):
    tokenizer = byte_tokenizer(chat=CHAT)
    if text == "Hi":
        assert prompt_tokens(text, tokenizer, chat=True).count(0) == 1
        return
    with pytest.raises(ValueError, match="begins with <s>, it went through a chat template already; leave `chat` out"):
        prompt_tokens(text, tokenizer, chat=True)


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TURNS += [{"role": "assistant", "content": "Once"}]


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (TURNS[1:2], "<user>Hi\n<assistant>"),
        (TURNS[:2], "<system>Be brief.\n<user>Hi\n<assistant>"),
        (TURNS, "<system>Be brief.\n<user>Hi\n<assistant>Once"),
        ([*TURNS, TURNS[1]], "<system>Be brief.\n<user>Hi\n<assistant>Once\n<user>Hi\n<assistant>"),
        ([{**TURNS[1], "name": "Ada"}], "<user>Hi\n<assistant>"),
    ],
)
def test_a_field_with_a_conversation_goes_through_the_chat_template(tmp_path, turns, text):
    path = write(tmp_path / "r.jsonl", [{"messages": turns, "answer": "7"}])
    task = load_task("jsonl", path, data=DataOptions(prompt_field="messages", whole=True, **ANSWERS))
    tokenizer = byte_tokenizer(chat=CHAT)
    (ids,) = task.encode_all(tokenizer, 200)
    assert ids[0] == 0 and ids.count(0) == 1 and tokenizer.decode(ids[1:]) == text
    assert task.examples[0].reference == "7"


def test_rows_with_conversations_say_how_they_are_read(tmp_path):
    path = write(tmp_path / "r.jsonl", [{"messages": TURNS[1:2], "answer": "7"}])
    with pytest.raises(ValueError, match="the conversation is the prompt with `data.prompt_field` messages"):
        load_task("jsonl", path, data=DataOptions(whole=True, **ANSWERS))


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, "was stopped: it ran for more than 0.5 s"),
        ("{{ 10 ** (10 ** 9) }}", "was stopped: it ran for more than 0.5 s"),
        ("{{ 'x' * 10 ** 10 }}", "it took more than 1024 MiB"),
        ("{{ 'x'.center(10 ** 10) }}", "it took more than 1024 MiB"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "it made 99980001 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ a.b.c }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_a_chat_template_has_little_time_and_memory(monkeypatch, template, words):
    monkeypatch.setattr(chat, "SECONDS", 0.5 if "0.5" in words else 60.0)
    tokenizer = byte_tokenizer(chat=template)
    with pytest.raises(ValueError, match="the tokenizer's chat template .*without `chat`") as caught:
        prompt_tokens("Hi", tokenizer, chat=True)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    tokenizer.chat_template = CHAT  # what was stopped does not stand in the way of the next
    assert tokenizer.decode(prompt_tokens("Hi", tokenizer, chat=True)) == "<s><user>Hi\n<assistant>"


def test_all_long_prompts_are_named_and_each_remedy_works(tmp_path):
    rows = [{"prompt": "a" * length} for length in (5, 50, 7, 60)]
    task = load_task("jsonl", write(tmp_path / "r.jsonl", rows), data=DataOptions(whole=True))
    for most, room, remedy in (
        (20, 100, "raise `max_prompt_tokens` to 61 or leave such rows out"),
        (20, None, "raise `max_prompt_tokens` to 61 or leave such rows out"),
        (99, 40, "the new tokens leave room for 40 in the models' context: leave such rows out"),
        (None, 40, "the limit is 40; leave such rows out"),
    ):
        with pytest.raises(ValueError) as caught:
            task.encode_all(BYTES, most, room)
        assert str(caught.value).endswith(remedy) and str(caught.value).count(" of r.jsonl has ") == 2
    assert len(task.encode_all(BYTES, 61, 100)) == 4
    left = load_task("jsonl", write(tmp_path / "r.jsonl", [rows[0], rows[2]]), data=DataOptions(whole=True))
    assert len(left.encode_all(BYTES, 20, 100)) == 2


@needs_shared
def test_a_real_tokenizer_keeps_instruction_and_end_of_real_articles():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHARED.parent / "models" / "stories260K")
    task = load_task("cnndm", str(SHARED / "spec_bench"), limit=5)
    for example in task.examples:
        ids = task.encode(example, tokenizer, 256)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        # A cut can change how neighbouring letters merge, so the budget may be missed by a few tokens.
        assert 246 <= len(ids) <= 256
        assert example.after.strip() in text and text.lstrip().startswith("Article:")


# Mistakes


def mistake(tmp_path, name="jsonl", content: bytes | None = b'{"prompt": "p"}\n', file="r.jsonl", **options):
    """The one sentence that loading a file with this content ends in."""
    path = tmp_path / file
    if content is not None:
        path.write_bytes(content)
    split = options.pop("split", "train")
    limit, seed = options.pop("limit", None), options.pop("seed", 0)
    with pytest.raises((ValueError, OSError)) as caught:
        load_task(name, str(path), split, limit, seed, data=DataOptions(**{"whole": True} | options))
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 400
    return sentence


ROW = b'{"prompt": "p", "gold": "7"}\n'


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"content": None}, ["r.jsonl does not exist"]),
        ({"content": b"", "file": "r.csv"}, ["must end in one of .jsonl, .json, .jsonl.gz, .json.gz", "r.csv"]),
        ({"content": b""}, ["r.jsonl is empty"]),
        ({"content": b"\n \n"}, ["r.jsonl is empty"]),
        ({"content": b"[]"}, ["r.jsonl is empty"]),
        ({"content": ROW + b"{oops\n"}, ["line 2 of", "must be JSON", "{oops"]),
        ({"content": b'[{"prompt": "p"},\n{"prompt" "q"}]', "file": "r.json"}, ["line 2 of", "must be JSON"]),
        ({"content": b"[" * 100_000}, ["must be JSON"]),
        ({"content": ROW + b"3\n"}, ["line 2 of r.jsonl must be an object with named fields, got 3"]),
        ({"content": ROW * 2 + b'{"prompt": "\xff"}\n'}, ["must be UTF-8, line 3 is not"]),
        ({"content": b"plain", "file": "r.jsonl.gz"}, ["must be a whole gzip file"]),
        ({"content": gzip.compress(ROW * 99)[:-9], "file": "r.jsonl.gz"}, ["must be a whole gzip file"]),
        ({"content": ROW + b'{"prompt": " "}\n'}, ["line 2 of r.jsonl has an empty prompt (field prompt)"]),
        ({"content": ROW + b'{"prompt": null}\n'}, ["line 2 of r.jsonl", "got null"]),
        ({"content": ROW + b'{"other": "q"}\n'}, ["line 2 of r.jsonl has no field prompt, it has other"]),
        ({"content": b'{"prompt": "\\ud800"}\n'}, ["line 1 of r.jsonl must hold valid Unicode"]),
        ({"content": b'{"prompt": ["p"]}\n'}, ["got a list", "name what is inside, such as prompt.0"]),
        ({"content": b'{"prompt": {"de": "p"}}\n'}, ["got a dict", "such as prompt.de"]),
        ({"content": b'{"prompt": []}\n'}, ["got a list"]),
        ({"content": b'{"prompt": true}\n'}, ["line 1 of r.jsonl must hold text in the field prompt, got true"]),
        ({"content": b'{"prompt": NaN}\n'}, ["line 1 of", "must be JSON: NaN is no number of JSON"]),
        ({"content": b'{"prompt": -Infinity}\n'}, ["must be JSON: -Infinity is no number of JSON"]),
        ({"content": b'{"prompt": 1e999}\n'}, ["text in the field prompt, got a number beyond all bounds"]),
        ({"content": b'{"prompt": "a", "prompt": "b"}\n'}, ["must be JSON: the field prompt stands there twice"]),
        ({"content": b'{"prompt": "a"}\r{"prompt": "b"}\n'}, ["must be JSON: Extra data"]),
        ({"content": '{"prompt": "a"}'.encode("utf-16")}, ["must be UTF-8, line 1 is not"]),
        ({"content": b'{"prompt": [{"from": "human", "value": "a"}]}\n'}, ["`prompt` 0: `role` is missing"]),
        (
            {"content": b'{"prompt": [{"role": "user", "content": "a"}]}\n', "template": "Q: {prompt}"},
            ["line 1 of r.jsonl holds a conversation in the field prompt, and a template is for texts"],
        ),
        ({"content": ROW, "prompt_field": "promt"}, ["no field promt, it has prompt, gold; did you mean `prompt`?"]),
        ({"content": ROW, "reference_field": "goold", "score": "exact"}, ["no field goold", "did you mean `gold`?"]),
        ({"content": ROW, "reference_field": "gold"}, ["`data.score` must say how", "rougeL"]),
        ({"content": ROW, "score": "exact"}, ["the score exact needs `data.reference_field`"]),
        ({"content": ROW, "score": "rougel", "reference_field": "gold"}, ["'rougel'; did you mean `rougeL`?"]),
        ({"content": b'{"prompt": "p", "answer": ""}\n', **ANSWERS}, ["line 1 of r.jsonl has an empty reference"]),
        (
            {"content": b'{"prompt": "p", "answer": "x"}\n', **ANSWERS},
            ["line 1 of r.jsonl must hold a number that can be read in full", "in answer"],
        ),
        ({"content": ROW, "template": "no place"}, ["`data.template` must hold {prompt} once, got neither"]),
        ({"content": ROW, "template": "{prompt} {article}"}, ["must hold {prompt} once, got {prompt}, {article}"]),
        ({"content": ROW, "template": "{prompt} {"}, ["`data.template` must be text around {prompt} or {article}"]),
        ({"content": ROW, "stop": ("",)}, ["`data.stop` must be a list of texts, none empty"]),
        ({"content": ROW, "stop": "###"}, ["`data.stop` must be a list of texts"]),
        ({"content": ROW, "max_new_tokens": 0}, ["`data.max_new_tokens` must be at least 1, got 0"]),
        ({"content": ROW + b'{"prompt": ' + b"9" * 5000 + b"}"}, ["line 2 of", "must be JSON: Exceeds the limit"]),
        ({"content": ROW, "seed": -1}, ["`seed` must be at least 0, got -1"]),
        ({"content": ROW, "limit": 0}, ["`limit` must be at least 1, got 0"]),
        ({"content": ROW, "split": "valdation"}, ["'valdation'; did you mean `validation`?"]),
        (
            {"content": ROW, "whole": False, "split": "validation"},
            ["the validation split of", "is empty: it is carved from 1 rows"],
        ),
        (
            {"content": ROW, "name": "gsm8k"},
            ["line 1 of r.jsonl has no field question, it has prompt, gold; name another with `data.prompt_field`"],
        ),
        ({"content": b'{"article": "a", "gold": "b"}\n', "name": "cnndm"}, ["name another with `data.reference_field`"]),
        ({"content": ROW, "name": "sums"}, ["the task sums makes its own problems, leave out `data.path`"]),
        ({"content": ROW, "name": "gsm8"}, ["'gsm8'; did you mean `gsm8k`?"]),
        ({"content": ROW, "name": "mbpp"}, ["line 1 of r.jsonl has no field test_list, it has prompt, gold"]),
        ({"content": b'{"text": "t", "test_list": []}\n', "name": "mbpp"}, ["an empty reference (field test_list)"]),
        ({"content": b'{"text": "t", "test_list": [["a"]]}\n', "name": "mbpp"}, ["text in the field test_list.0"]),
        ({"content": b'{"text": "t", "test_list": [""]}\n', "name": "mbpp"}, ["an empty reference (field test_list)"]),
        (
            {"content": b'{"text": "t", "test_list": ["1"], "test_imports": [[]]}\n', "name": "mbpp"},
            ["text in the field test_imports.0, got a list"],
        ),
        ({"content": b'{"text": "t", "test_list": ["' + b"(" * 9999 + b'"]}\n', "name": "mbpp"}, ["tests in Python"]),
        ({"content": b'{"text": " ", "test_list": ["1"]}\n', "name": "mbpp"}, ["an empty task (field text)"]),
        ({"content": b'{"task": "t", "test_list": ["1"]}\n', "name": "mbpp"}, ["has no field text, it has task"]),
        (
            {"content": b'{"text": "t", "test_list": ["assert f("]}\n', "name": "mbpp"},
            ["line 1 of r.jsonl must hold tests in Python in test_list for the score pass_at_1, got"],
        ),
        ({"content": ROW, "name": "mbpp", "prompt_field": "gold"}, ["the task mbpp reads fields of its own"]),
        ({"content": ROW, "name": "humaneval"}, ["line 1 of r.jsonl has no field test, it has prompt, gold"]),
        (
            {"content": b'{"prompt": "p", "test": "t", "entry_point": "f"}\n', "name": "humaneval"},
            ["line 1 of r.jsonl must define check(candidate) in the field test, got 't'"],
        ),
        (
            {"content": b'{"prompt": "p", "test": "def check(f): f()", "entry_point": "1+"}\n', "name": "humaneval"},
            ["line 1 of r.jsonl must hold tests in Python in test"],
        ),
    ],
)
def test_a_mistake_is_one_sentence_that_says_where_and_what_instead(tmp_path, given, words):
    sentence = mistake(tmp_path, **given)
    for word in words:
        assert word in sentence


def test_a_mistyped_file_name_brings_the_nearest_one(tmp_path):
    write(tmp_path / "question.jsonl", numbered(1))
    assert mistake(tmp_path, content=None, file="questions.jsonl").endswith("did you mean `question.jsonl`?")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / "r.jsonl")
    assert mistake(tmp_path, content=None).endswith("r.jsonl must be a file, it is a pipe or a device; name a file")


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.json"])
def test_no_more_is_read_than_a_row_may_hold(tmp_path, monkeypatch, name):
    for limit in ("LONGEST_ROW", "LARGEST_ARRAY"):
        monkeypatch.setattr(sources, limit, 1000)
    row = json.dumps({"prompt": "x" * 5000}).encode()
    data = b"[" + row + b"]" if name == "r.json" else ROW + row + b"\n" + ROW
    sentence = mistake(tmp_path, content=gzip.compress(data) if name.endswith("gz") else data, file=name)
    assert "more than 1000 bytes" in sentence


def test_a_folder_with_unclear_files_is_refused_by_their_names(tmp_path):
    with pytest.raises(ValueError, match="holds nothing of the kind; name one file"):
        load_task("jsonl", str(tmp_path))
    write(tmp_path / "a.jsonl", numbered(1))
    write(tmp_path / "b.jsonl", numbered(1))
    with pytest.raises(ValueError, match="holds a.jsonl, b.jsonl; name one file"):
        load_task("jsonl", str(tmp_path))
    write(tmp_path / "test.jsonl", numbered(1))
    with pytest.raises(FileNotFoundError, match="must hold a train file, .* it holds test.jsonl"):
        load_task("jsonl", str(tmp_path))


def test_jsonl_without_a_file_says_what_it_needs():
    with pytest.raises(ValueError, match="the task jsonl needs `data.path`"):
        load_task("jsonl")


def test_a_limit_beyond_the_data_warns_how_many_there_are(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(3))
    with pytest.warns(UserWarning, match="`limit` is 400, the train split of .* holds 3 examples: all are used"):
        assert len(load_task("jsonl", path, limit=400, data=DataOptions(whole=True)).examples) == 3
