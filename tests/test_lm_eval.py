"""lm-evaluation-harness runs a task of its user's through our loop; likelihoods are the target's."""

import json
import os
import subprocess
import sys

import pytest
import torch
from diversed.assets.sums import problems
from diversed.runtime.engine import decode
from diversed.runtime.sampling import Sampling

pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'diversed[lm-eval]'")

from diversed.export import lm_eval as plugin  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASK = """
task: my_sums
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\nQ:"], max_gen_toks: 60, do_sample: true, temperature: 0.8}
filter_list:
  - name: number
    filter: [{function: regex, regex_pattern: "#### (-?[0-9]+)"}, {function: take_first}]
metric_list: [{metric: exact_match}]
"""
QUESTIONS = 12


@pytest.fixture
def rows():
    return [
        {"prompt": row["prompt"], "answer": row["reference"].rpartition("#### ")[2].strip()}
        for row in problems("test", QUESTIONS, 0)
    ]


@pytest.fixture
def model():
    return plugin.Diversed(relaxation="ensemble:0.4", method="block", seed=3, batch_size=5)


def asked(context, **options):
    return Instance("generate_until", {}, (context, options), 0)


def test_a_task_of_ones_own_is_scored_on_the_texts_of_our_loop(rows, tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_sums.yaml").write_text(TASK.replace("FILE", str(tmp_path / "sums.jsonl")))
    arguments = {"relaxation": "ensemble:0.4", "method": "block", "seed": 3}
    found = simple_evaluate(
        "diversed", arguments, ["my_sums"], batch_size=5, bootstrap_iters=0, cache_requests=False,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    score = found["results"]["my_sums"]["exact_match,number"]
    pair = plugin.load_pair()
    texts = decode(
        pair, [pair.tokenizer(row["prompt"])["input_ids"] for row in rows], method="block", relaxation="ensemble:0.4",
        sampling=Sampling(0.8), max_new_tokens=60, stop=("\nQ:",), seeds=[(3 << 32) + i for i in range(QUESTIONS)],
    )  # fmt: skip
    assert [sample["resps"][0][0] for sample in found["samples"]["my_sums"]] == [text.text for text in texts]
    numbers = [text.text.partition("#### ")[2].split()[:1] for text in texts]
    right = [number == [row["answer"]] for number, row in zip(numbers, rows, strict=True)]
    assert 0 < sum(right) < QUESTIONS and score == pytest.approx(sum(right) / QUESTIONS)


def test_requests_of_several_samplings_keep_their_places_and_their_ends(model, rows):
    contexts = [row["prompt"] for row in rows[:4]]
    cold, warm = {"until": [], "max_gen_toks": 9}, {"until": ["."], "max_gen_toks": 40, "temperature": 1}
    texts = model.generate_until([asked(context, **(warm if i % 2 else cold)) for i, context in enumerate(contexts)])
    for i, context in enumerate(contexts):
        (ours,) = decode(
            model.pair, [model.tok_encode(context)], method="block", relaxation="ensemble:0.4", seeds=[(3 << 32) + i],
            sampling=Sampling(i % 2), max_new_tokens=40 if i % 2 else 9, stop=(".",) if i % 2 else (),
        )  # fmt: skip
        assert texts[i] == ours.text != ""


def test_likelihoods_are_the_targets(model, rows):
    context, answer = rows[0]["prompt"].rstrip(), "\nWell"  # the harness counts white space at the end to the answer
    ((value, greedy),) = model.loglikelihood([Instance("loglikelihood", {}, (context, answer), 0)])
    tokens = model.tok_encode(context + answer)
    count = len(tokens) - len(model.tok_encode(context))
    with torch.no_grad():
        rows = model.pair.target.module(torch.tensor([tokens])).logits[0].log_softmax(-1)
    own = rows[-count - 1 : -1]
    # 1e-4: float32 and another order of summation
    assert value == pytest.approx(float(own.gather(1, torch.tensor(tokens[-count:])[:, None]).sum()), abs=1e-4)
    assert greedy == (own.argmax(-1).tolist() == tokens[-count:])


def test_a_context_that_is_too_long_is_cut_on_the_left(model, rows, caplog):
    room = model.max_length - 8 - 5
    long = rows[0]["prompt"] * 40
    (text,) = model.generate_until([asked(long, max_gen_toks=8)])
    assert "is cut on the left to" in caplog.text
    (ours,) = decode(
        model.pair, [model.tok_encode(long)[-room:]], method="block", relaxation="ensemble:0.4", seeds=[3 << 32],
        sampling=Sampling(0), max_new_tokens=8,
    )  # fmt: skip
    assert text == ours.text


def test_what_cannot_be_had_is_refused_with_a_sentence(model):
    with pytest.raises(ValueError, match="generation_kwargs num_beams cannot be honoured"):
        model.generate_until([asked("1 + 1", num_beams=4)])
    with pytest.raises(ValueError, match="`max_gen_toks` 100000 leaves no room"):
        model.generate_until([asked("1 + 1", max_gen_toks=100_000)])
    for options, sentence in (
        ({"max_gen_toks": 0}, "`max_gen_toks` must be at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "`max_new_tokens` must be a whole number, got 2.5"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        ({"until": [3]}, r"until must be a text or a list of texts, got \[3\]"),
        ({"temperature": -1}, "`sampling.temperature` must be 0 or a finite number"),
        ({"temperature": 1, "top_k": 2.5}, "`sampling.top_k` must be a whole number, got 2.5"),
        ({"do_sample": False, "top_p": 7}, r"`sampling.top_p` must be in \(0, 1\], got 7"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            model.generate_until([asked("1 + 1", **options)])
    assert model.generate_until([]) == []


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"batch_size": "auto"}, "`batch_size` must be a whole number from 1 on, got 'auto'"),
        ({"batch_size": 0}, "`batch_size` must be a whole number from 1 on, got 0"),
        ({"relaxation": "ensembl:0.3"}, "unknown relaxation 'ensembl:0.3'; did you mean `ensemble"),
        ({"relaxation": None}, "`relaxation` must be a text, got None"),
        ({"method": 3}, "`method` must be a text, got 3"),
        ({"draft_length": 0}, "`draft_length` must be at least 1, got 0"),
        ({"draft_length": "3"}, "`draft_length` must be a whole number, got '3'"),
        ({"seed": 1.5}, "`seed` must be a whole number, got 1.5"),
        ({"seed": None}, "`draft_length` and `seed` must be whole numbers"),
        ({"trust_remote_code": "no"}, "`trust_remote_code` true or false"),
        ({"max_length": 0}, "`max_length` must be at least 1, got 0"),
        ({"max_length": 4096}, "`max_length` must be at most 512, got 4096"),
        ({"drafts": "sums-draft"}, "unexpected keyword argument 'drafts'"),
    ],
)
def test_arguments_of_the_model_are_checked_before_it_is_used(arguments, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        plugin.Diversed(**arguments)


def test_the_command_ends_with_a_sentence_and_not_with_a_traceback(tmp_path):
    command = [sys.executable, "-m", "diversed.export.lm_eval", "run", "--model", "diversed", "--tasks", "my_sums"]
    (tmp_path / "my_sums.yaml").write_text(TASK)
    command += ["--include_path", str(tmp_path), "--device", "cpu", "--model_args", '{"relaxation": "ensemble:7"}']
    answer = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DIVERSED_DEBUG": ""})
    assert answer.returncode == 2 and "Traceback" not in answer.stderr
    assert answer.stderr.splitlines()[-1].startswith("diversed.export.lm_eval: relaxation 'ensemble:7': weight must")
