"""`diversed decode`: what is streamed is never taken back, and a file of prompts survives any kill."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from diversed import cli, files
from diversed.files import exclusive
from diversed.runtime import autotune as measured
from diversed.runtime import groups
from diversed.runtime.engine import decode

from .support.models import tiny_pair

VOCAB = 11


@pytest.fixture
def pair(monkeypatch):
    found = tiny_pair(VOCAB)
    monkeypatch.setattr(groups, "load_pair", lambda *args: found)
    return found


@pytest.fixture
def unloaded(monkeypatch):
    """A bad file must be answered before any model is loaded."""
    monkeypatch.setattr(groups, "load_pair", lambda *args: pytest.fail("a model was loaded"))


def requests(path, count: int = 16):
    """A file of prompts of 1 to 20 words; some lines name their own limit, relaxation, seed, stop or id."""
    draw, rows = random.Random(0), []
    for i in range(count):
        row = {"prompt": " ".join(f"w{draw.randrange(2, VOCAB)}" for _ in range(draw.randint(1, 20)))}
        row |= {"max_new_tokens": draw.randint(1, 12)} if i % 3 == 1 else {}
        row |= {"relaxation": "ensemble:0.6;budget=1.5"} if i % 4 == 2 else {}
        row |= {"id": f"row {i}", "seed": 7 * i, "stop": ["w3 w4", "w9", "w5", "w6"]} if i % 5 == 4 else {"id": None}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return rows


def words(folder, out: str, *more) -> list[str]:
    given = ["decode", "--input", folder / "in.jsonl", "--output", folder / out, "--method", "block", "--batch", 4]
    return [str(word) for word in (*given, "--unit", 4, "--max_new_tokens", 12, *more)]


def test_every_line_of_a_file_becomes_a_line_with_its_text_and_what_it_cost(tmp_path, pair, capsys):
    rows = requests(tmp_path / "in.jsonl")
    assert cli.main(words(tmp_path, "out.jsonl", "--seed", 3)) == 0
    out = capsys.readouterr().out
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["id"] for r in results] == [row["id"] or i for i, row in enumerate(rows)]
    for i, (row, result) in enumerate(zip(rows, results, strict=True)):
        (c,) = decode(
            pair, [pair.tokenizer(row["prompt"])["input_ids"]], method="block", stop=tuple(row.get("stop", ())),
            relaxation=row.get("relaxation", "none"), seeds=[row.get("seed", (3 << 32) + i)],
            max_new_tokens=row.get("max_new_tokens", 12),
        )  # fmt: skip
        for name in ("text", "tokens", "drafted", "accepted", "drafted_by_depth", "accepted_by_depth", "target_calls"):
            assert result[name] == getattr(c, name), name
        assert result["substitutions"] == pytest.approx(c.substitutions, abs=1e-5)
        assert result["budget"] == (1.5 if "relaxation" in row else None)
        ended = "end" if c.tokens[-1] == 1 else "stop" if c.finished else "length"
        assert result["reason"] == ended
    assert {result["reason"] for result in results} == {"end", "stop", "length"}
    tokens, calls = (
        sum(values) for values in zip(*((len(r["tokens"]), r["target_calls"]) for r in results), strict=True)
    )
    assert f"16 texts, {tokens} tokens in " in out and f"({calls} calls; the bonus token counts)" in out
    assert [line.split()[0] for line in out.splitlines()[-6:]] == [
        "prefill", "draft", "target", "verify", "commit", "total"
    ]  # fmt: skip


def test_the_bytes_of_the_results_do_not_tell_how_often_the_run_was_killed(tmp_path, pair, capsys):
    """SIGKILL at random moments, each followed by the same command in a new process, until one comes through."""
    requests(tmp_path / "in.jsonl")
    began = time.monotonic()
    assert cli.main(words(tmp_path, "whole.jsonl")) == 0
    duration, whole = time.monotonic() - began, (tmp_path / "whole.jsonl").read_bytes()
    draw, kills, status = random.Random(1), 0, None
    while status != 0:
        child = os.fork()
        if child == 0:
            os._exit(cli.main(words(tmp_path, "killed.jsonl")))
        if kills < 6:
            time.sleep(draw.uniform(0, duration))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL)
        kills += status != 0
    assert kills and (tmp_path / "killed.jsonl").read_bytes() == whole


def test_a_file_cut_off_anywhere_is_completed_to_the_same_bytes(tmp_path, pair, capsys):
    requests(tmp_path / "in.jsonl", 9)
    assert cli.main(words(tmp_path, "out.jsonl")) == 0
    whole, draw = (tmp_path / "out.jsonl").read_bytes(), random.Random(2)
    lines = whole.splitlines(keepends=True)
    for size in [len(b"".join(lines[:4])), len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(2))]:
        os.truncate(tmp_path / "out.jsonl", size)
        assert cli.main(words(tmp_path, "out.jsonl")) == 0
        assert (tmp_path / "out.jsonl").read_bytes() == whole
    (tmp_path / "out.jsonl").unlink()
    assert cli.main(words(tmp_path, "out.jsonl")) == 0 and (tmp_path / "out.jsonl").read_bytes() == whole
    capsys.readouterr()
    assert cli.main(words(tmp_path, "out.jsonl")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.jsonl'}: complete, nothing to decode\n"


def test_what_was_measured_when_a_file_was_begun_is_not_measured_again(tmp_path, pair, monkeypatch):
    """A run that goes on with another number of threads could end with other bytes."""
    requests(tmp_path / "in.jsonl", 9)
    monkeypatch.setattr(measured, "fastest_threads", lambda model, rows, tokens: rows + tokens)
    assert cli.main(words(tmp_path, "out.jsonl")) == 0
    settings = json.loads((tmp_path / "out.jsonl.run" / "settings.json").read_text())
    assert settings["threads"] == 4 + 6 and settings["dtype"] == "float32"
    os.truncate(tmp_path / "out.jsonl", 0)
    monkeypatch.setattr(measured, "fastest_threads", lambda *given: pytest.fail("measured again"))
    taken = []
    monkeypatch.setattr("torch.set_num_threads", taken.append)
    assert cli.main(words(tmp_path, "out.jsonl")) == 0 and taken == [4 + 6]


@pytest.fixture
def refused(capsys):
    """The sentence that a command line is answered with."""

    def sentence(args: list[str]) -> str:
        capsys.readouterr()
        assert cli.main(args) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err.strip()

    return sentence


def test_another_process_and_other_settings_are_refused(tmp_path, pair, refused):
    requests(tmp_path / "in.jsonl", 7)
    out, run = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run"
    with exclusive(run):
        assert refused(words(tmp_path, "out.jsonl")) == (
            f"diversed decode: another process (pid {os.getpid()}) is writing to {run}; wait until it ends or choose "
            "another --output"
        )
    assert cli.main(words(tmp_path, "out.jsonl")) == 0
    before = out.read_bytes()
    assert refused(words(tmp_path, "out.jsonl", "--seed", 5)) == (
        f"diversed decode: {out} was begun with seed 0, now it is 5; give the same again to continue it, choose another "
        f"--output or delete {out} and {run}"
    )
    assert "was begun with relaxation 'none', now it is 'ensemble:0.3'" in refused(
        words(tmp_path, "out.jsonl", "--relaxation", "ensemble:0.3")
    )
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write('{"prompt": "w2"}\n')
    assert "was begun with input '" in refused(words(tmp_path, "out.jsonl"))
    assert out.read_bytes() == before


def test_files_that_are_no_results_are_kept_and_refused(tmp_path, pair, refused):
    requests(tmp_path / "in.jsonl", 7)
    (tmp_path / "mine.txt").write_text("a diary")
    assert "mine.txt exists and " in refused(words(tmp_path, "mine.txt"))
    assert (tmp_path / "mine.txt").read_text() == "a diary"
    assert cli.main(words(tmp_path, "out.jsonl")) == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    for damaged, sentence in (
        ([lines[1], lines[0]], "line 1 of .* is not the result of line 1 of in.jsonl"),
        ([lines[0], "{}\n"], "line 2 of .* is not the result of line 3 of in.jsonl"),
        ([*lines, lines[0]], "line 8 of .* is not a result, there are no more requests"),
    ):
        (tmp_path / "out.jsonl").write_text("".join(damaged))
        assert re.search(sentence, refused(words(tmp_path, "out.jsonl")))
        assert (tmp_path / "out.jsonl").read_text() == "".join(damaged)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 of .*in.jsonl must be JSON: "),
        ("[1]", "line 2 of in.jsonl must be an object with named fields, got [1]"),
        ('{"id": 3}', "line 2 of in.jsonl: `prompt` is missing, a text"),
        ('{"prompt": ""}', "line 2 of in.jsonl: `prompt` must not be empty; give the text to continue"),
        ('{"prompt": "\\ud800"}', "line 2 of in.jsonl: `prompt` must be UTF-8, got other bytes"),
        (
            '{"prompt": "w2", "promt": 1}',
            "line 2 of in.jsonl: `promt` is not a field; did you mean `prompt`?",
        ),
        ('{"prompt": "w2", "seed": 1.5}', "line 2 of in.jsonl: `seed` must be a whole number in -9223372036854775808..9223372036854775807, got 1.5"),
        ('{"prompt": "w2", "seed": true}', "`seed` must be a whole number in -9223372036854775808..9223372036854775807, got true"),
        ('{"prompt": "w2", "max_new_tokens": 0}', "`max_new_tokens` must be a whole number, at least 1, got 0"),
        ('{"prompt": "w2", "stop": "a"}', '`stop` must be a list of texts, none empty, got "a"'),
        ('{"prompt": "w2", "stop": [""]}', '`stop` must be a list of texts, none empty, got [""]'),
        (
            '{"prompt": "w2", "relaxation": "ensemble:3"}',
            "line 2 of in.jsonl: relaxation 'ensemble:3': weight must lie",
        ),
        ('{"prompt": "w2", "relaxation": "no/bundle"}', "line 2 of in.jsonl: bundle no/bundle is not a folder"),
        (
            '{"prompt": "w2", "id": 0}',
            "line 2 of in.jsonl has the id 0 of line 1 of in.jsonl; give every request its own",
        ),
    ],
)
def test_a_bad_line_is_named_before_any_model_is_loaded(tmp_path, unloaded, refused, line, sentence):
    (tmp_path / "in.jsonl").write_text('{"prompt": "w2"}\n' + line + "\n")
    answer = refused(words(tmp_path, "out.jsonl"))
    assert sentence in answer or re.search(sentence.replace("[", r"\["), answer), answer
    assert list(tmp_path.iterdir()) == [tmp_path / "in.jsonl"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "`diversed decode` needs --prompt, or --input and --output for a file of prompts"),
        (["--prompt", "w2", "--input", "f", "--output", "g"], "needs --prompt, or --input and --output"),
        (["--input", "f"], "needs --prompt, or --input and --output"),
        (["--prompt", "w2", "--batch", "3"], "`batch` is for a file of prompts, --input; leave it out"),
        (["--prompt", "w2", "--branches", "3x4", "--trunk", "2"], "`trunk` means nothing beside `branches` 3x4"),
        (["--prompt", "w2", "--branches", "3x4", "--draft_length", "7"], "`draft_length` would change nothing beside branches 3x4"),
        (["--prompt", "w2", "--method", "plain", "--trunk", "2"], "`trunk` would change nothing beside method plain"),
        (["--prompt", "w2", "--relax_leaf"], "`relax_leaf` would change nothing beside relaxation none"),
        (["--prompt", "w2", "--relaxation", "lenient:0.5;bias=1"], "lenient has no weight for a bias to shift"),
        (["--prompt", "w2", "--draft_length", "513"], "`draft_length` must be at most 512, got 513"),
        (["--prompt", "w2", "--drafting", ""], "`drafting` must not be empty; give a value or leave it out"),
        (["--prompt", "w2", "--stop", "\ud800"], "`stop` must be"),
        (["--prompt", "w2", "--stop", ""], "`stop` must be a list of texts, none empty, got ('',)"),
        (["--prompt", ""], "`prompt` must not be empty; give a value or leave it out"),
        (["--input", "nowhere.jsonl", "--output", "g"], "nowhere.jsonl: No such file or directory"),
        (["--input", "f", "--output", "g", "--seed", str(1 << 31)], "`seed` must be at most 2147483647"),
        (["--input", "f", "--output", "g", "--relaxation", "ensemble:3"], "weight must lie in [0, 1], got 3"),
        (["--input", "f", "--output", "g", "--unit", "0"], "`unit` must be at least 1, got 0"),
        (["--input", "f", "--output", "g", "--batch", "0"], "`batch` must be at least 1, got 0"),
    ],
)
def test_what_the_options_must_be_is_said_before_any_model_is_loaded(unloaded, refused, args, sentence):
    assert sentence in refused(["decode", *args])


def test_a_prompt_longer_than_the_context_is_named_by_its_line(tmp_path, pair, refused):
    (tmp_path / "in.jsonl").write_text('{"prompt": "w2"}\n{"prompt": "' + "w3 " * 120 + '"}\n')
    assert refused(words(tmp_path, "out.jsonl")) == (
        "diversed decode: line 2 of in.jsonl: prompt 1 is longer than the context: 120 tokens and 17 new ones exceed "
        "128; lower `max_new_tokens` or shorten the prompt; --skip_bad leaves such lines out"
    )
    (tmp_path / "in.jsonl").write_text('{"prompt": "w2", "relaxation": "ensemble:0.3"}\n')
    assert "line 1 of in.jsonl relaxes towards the draft, and method plain has none" in refused(
        words(tmp_path, "out.jsonl", "--method", "plain")
    )


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(tmp_path, pair, capsys, monkeypatch):
    requests(tmp_path / "in.jsonl", 8)
    monkeypatch.setattr(files, "EVERY", 0.0)
    assert cli.main(words(tmp_path, "out.jsonl")) == 0
    lines = capsys.readouterr().err.splitlines()
    ends = [line for line in lines if re.fullmatch(r"decode [1-8]/8, [\d,]+ tokens/s, [\d,]+ s left", line)]
    assert {line.split(",")[0] for line in ends} == {f"decode {i}/8" for i in range(1, 9)} and ends[-1] == lines[-1]


def test_every_bad_line_is_named_at_once_and_skip_bad_keeps_the_rest(tmp_path, pair, capsys):
    """A text depends on its line's own number: what is left out changes no other."""
    rows = requests(tmp_path / "in.jsonl", 9)
    assert cli.main(words(tmp_path, "whole.jsonl")) == 0
    whole = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    lines = [json.dumps(row) for row in rows]
    for at, bad in ((1, '{"prompt": true}'), (4, '{"prompt": NaN}'), (6, "{}")):
        lines[at] = bad
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert cli.main(words(tmp_path, "out.jsonl")) == 2
    err = capsys.readouterr().err.splitlines()
    assert [line.split(" of ")[0] for line in err[:3]] == ["line 2", "line 5", "line 7"]
    assert err[3].endswith("in.jsonl cannot be decoded; mend them, or leave them out with --skip_bad") and len(err) == 4
    assert not (tmp_path / "out.jsonl.run").exists()
    assert cli.main(words(tmp_path, "out.jsonl", "--skip_bad")) == 0
    assert f"3 of 9 lines of {tmp_path / 'in.jsonl'} are left out" in capsys.readouterr().err
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for name in ("id", "seed"):
        assert [row[name] for row in kept] == [row[name] for i, row in enumerate(whole) if i not in (1, 4, 6)]


def test_more_bad_lines_than_can_be_read_are_counted(tmp_path, pair, capsys):
    (tmp_path / "in.jsonl").write_text("{}\n" * 25)
    assert cli.main(words(tmp_path, "out.jsonl", "--skip_bad")) == 2
    err = capsys.readouterr().err
    assert err.count("`prompt` is missing") == 20 and "and 5 more" in err and "which leaves none" in err


def test_long_prompts_and_relaxations_that_fail_are_named_together_before_the_first_unit(tmp_path, pair, capsys):
    rows = [{"prompt": "w2"}] * 9
    rows[3] = rows[7] = {"prompt": "w3 " * 120}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(words(tmp_path, "out.jsonl")) == 2
    err = capsys.readouterr().err
    assert "line 4 of in.jsonl" in err and "line 8 of in.jsonl" in err and "2 of 9 lines" in err
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "out.jsonl.run").exists()
    assert cli.main(words(tmp_path, "out.jsonl", "--skip_bad")) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 7


@pytest.mark.parametrize("name", ["mark_of_a_file:make", "mark_of_a_file:make;budget=2", "os:system"])
def test_a_line_of_a_file_names_no_code(tmp_path, unloaded, refused, monkeypatch, name):
    (tmp_path / "mark_of_a_file.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "w2", "relaxation": name}) + "\n")
    assert "line 1 of in.jsonl: a file cannot name code to run" in refused(words(tmp_path, "out.jsonl"))
    assert not (tmp_path / "MARK").exists()


def test_python_looks_for_code_in_the_current_folder_only_if_it_is_told_to(tmp_path):
    (tmp_path / "beside.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\nRULE = 1\n")
    command = [sys.executable, "-m", "diversed", "decode", "--prompt", "w2", "--method", "beside:RULE"]
    package = str(Path(cli.__file__).parents[1])
    for path, ran in ((package, False), (os.pathsep.join([package, str(tmp_path)]), True)):
        env = os.environ | {"PYTHONPATH": path}
        assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True).returncode == 2
        assert (tmp_path / "MARK").exists() == ran


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, unloaded, refused, make):
    make(tmp_path / "in.jsonl")
    assert "in.jsonl must be a file, it is a" in refused(words(tmp_path, "out.jsonl"))


CHAT = "{% for m in messages %}w{{ 3 + loop.index }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def test_lines_of_messages_go_through_the_chat_template(tmp_path, monkeypatch, capsys):
    pair = tiny_pair(VOCAB, seed=4)
    monkeypatch.setattr(groups, "load_pair", lambda *args: pair)
    monkeypatch.setattr(pair.tokenizer, "chat_template", CHAT)
    turns = [{"role": "system", "content": "w2"}, {"role": "user", "content": "w3"}]
    prefill = [*turns, {"role": "assistant", "content": "w5"}]
    rows = [{"messages": turns}, {"messages": prefill}, {"prompt": "w4 w2 w5 w3 w9"}, {"prompt": "w4 w2 w5 w3 w6 w5"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row | {"seed": 1}) + "\n" for row in rows))
    assert cli.main(words(tmp_path, "out.jsonl")) == 0
    tokens = [json.loads(line)["tokens"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert tokens[:2] == tokens[2:] and tokens[0] != tokens[1]
