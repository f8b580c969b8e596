"""The command line: what is lazy, what a settings file may say, and every sentence that bad input is answered with."""

import errno
import importlib
import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from diversed import cli
from diversed.commands import options, settings

HEAVY = ("torch", "transformers", "pytorch_lightning", "datasets", "matplotlib", "jsonargparse")


@dataclass(frozen=True)
class Sampling:
    """How rows become probabilities.

    Args:
        temperature: divides the logits.
        top_k: tokens kept, 0 for all.
    """

    temperature: float = 1.0
    top_k: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"`temperature` must not be negative, got {self.temperature}")


def probe(
    *,
    target: str,
    draft_length: int = 5,
    features: Literal["hidden", "logits"] = "logits",
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    other: Sampling | None = None,
    methods: list[str] = ["token"],  # noqa: B006  never written to
    seeds: list[int] = [0],  # noqa: B006
    stop: tuple[str, ...] = (),
    limit: int | None = None,
    stops: tuple[str, ...] | None = None,
    branches: int | list[int] | None = None,
    lr: float = 0.1,
    hidden: bool = False,
    seed: int = 0,
):
    """Answer with the options.

    Args:
        target: the model being served.
    """
    calls.append(locals())


calls: list[dict] = []
REAL_GATHER = cli.COMMANDS["gather"]


@pytest.fixture(autouse=True)
def commands(monkeypatch):
    """The command `gather` stands in for all: it takes typed options and keeps what it was given."""
    module = ModuleType("diversed.probe_command")
    module.probe = probe
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "gather", ("probe_command", "probe", "keep the options"))
    calls.clear()


@pytest.fixture
def refused(capsys):
    """The sentence that a command line is answered with; it exits 2 and prints nothing else."""

    def sentence(*args):
        assert cli.main([str(arg) for arg in args]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "Traceback" not in err
        return err.strip()

    return sentence


def given(*args):
    assert cli.main([str(arg) for arg in args]) == 0
    return calls[-1]


def config(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


# What is lazy


@pytest.mark.parametrize("args", [["--help"], ["--version"], []])
def test_the_overview_loads_no_heavy_library(args):
    code = f"import sys, diversed.cli; diversed.cli.main({args}); print([m for m in {HEAVY} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"


def test_importing_the_package_loads_no_heavy_library():
    code = f"import sys, diversed; dir(diversed); print([m for m in {HEAVY} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_module_runs_like_the_command():
    answer = subprocess.run([sys.executable, "-m", "diversed", "gathr"], capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr == "diversed: `gathr` is not a command; did you mean `gather`?\n"


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


# Odd values


@pytest.mark.parametrize("words", [["--draft_length", "9" * 25], ["--seeds", "1", "-" + "9" * 25], ["--limit=" + "9" * 25],
                                   ["--other.top_k", "9" * 25]])  # fmt: skip
def test_whole_numbers_beyond_any_machine_are_refused(refused, words):
    assert "must lie within -9223372036854775807..9223372036854775807, got " in refused("gather", "--target", "a", *words)


def test_an_empty_text_is_refused(refused, tmp_path):
    sentence = "diversed gather: `target` must not be empty; give a value or leave it out"
    assert refused("gather", "--target", "") == sentence
    assert refused("gather", "--config", config(tmp_path, "target: ''")) == sentence


def test_a_sentence_about_a_million_characters_is_short(refused):
    answer = refused("gather", "--target", "a", "--draft_length", "x" * 1_000_000)
    assert answer.startswith("diversed gather: `draft_length` must be a whole number, got xxx") and len(answer) < 1500
    assert answer.endswith(" characters)")


@pytest.mark.parametrize("text", ["😀", "\\ud83d\\ude00", "a😀é日\u2028", "["])
def test_texts_of_any_characters_arrive(text, tmp_path):
    assert given("gather", "--target", "a", "--stop", text, "b")["stop"] == (text, "b")
    path = config(tmp_path, "target: a\nstop: " + options.written([text, "b"]))
    assert given("gather", "--config", path)["stop"] == (text, "b")


# What the command line may say


def test_options_come_from_the_signature():
    chosen = given("gather", "--target", "a", "--draft_length", 7, "--lr", "1e-3", "--limit", "null")
    assert chosen["target"] == "a" and chosen["draft_length"] == 7 and chosen["lr"] == 1e-3 and chosen["limit"] is None


def test_options_of_a_dataclass_are_dotted():
    chosen = given("gather", "--target", "a", "--sampling.temperature", 0.5, "--other.top_k", 3)
    assert chosen["sampling"] == Sampling(0.5) and chosen["other"] == Sampling(top_k=3)


@dataclass(frozen=True)
class Place:
    """Where results go.

    Args:
        out: folder to write to.
        sampling: how rows become probabilities.
        threads: CPU threads.
    """

    out: str
    sampling: Sampling = Sampling()  # noqa: RUF009  frozen
    threads: int = 1


def grouped(place: Place, sizes: Sampling = Sampling(0.5), *, lr: float = 0.1):  # noqa: B008  frozen
    calls.append(locals())


def test_a_group_of_options_has_no_prefix_and_the_defaults_of_the_signature(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["diversed.probe_command"], "probe", grouped)
    chosen = given("gather", "--out", "o", "--top_k", 3, "--sampling.top_k", 4)
    assert chosen == {"place": Place("o", Sampling(top_k=4)), "sizes": Sampling(0.5, 3), "lr": 0.1}
    assert options.call(grouped, out="o", top_k=3, sampling=Sampling(top_k=4)) is None and calls[-1] == chosen
    with pytest.raises(TypeError, match="top"):
        options.call(grouped, out="o", top=3)
    with pytest.raises(SystemExit):
        cli.main(["gather", "--help"])
    assert "folder to write to. (required" in capsys.readouterr().out


def test_a_flag_needs_no_value():
    assert given("gather", "--hidden", "--target", "a")["hidden"] is True
    assert given("gather", "--hidden", "false", "--target", "a")["hidden"] is False


def test_a_list_needs_no_brackets():
    chosen = given("gather", "--methods", "token", "block", "--seeds", 1, 2, "--target", "a", "--stop", "\n\n")
    assert chosen["methods"] == ["token", "block"] and chosen["seeds"] == [1, 2] and chosen["stop"] == ("\n\n",)
    assert given("gather", "--target", "a", "--methods", "[gbv, univer]")["methods"] == ["gbv", "univer"]


@pytest.mark.parametrize(
    "option, words, value",
    [
        ("stops", ["a"], ("a",)),
        ("stops", ["1", "b"], ("1", "b")),
        ("stops", ["null"], None),
        ("branches", ["3"], 3),
        ("branches", ["3", "2"], [3, 2]),
        ("branches", ["null"], None),
    ],
)
def test_an_optional_list_needs_no_brackets_and_stays_optional(option, words, value):
    assert given("gather", "--target", "a", f"--{option}", *words)[option] == value


def test_a_value_may_begin_with_a_minus():
    assert given("gather", "--target", "-a", "--lr", "-1e-3", "--seeds", "-1")["lr"] == -1e-3
    assert calls[-1]["target"] == "-a" and calls[-1]["seeds"] == [-1]


def test_a_command_that_returns_false_exits_with_one(monkeypatch):
    monkeypatch.setattr(sys.modules["diversed.probe_command"], "probe", lambda: False)
    assert cli.main(["gather"]) == 1


# What a settings file may say


SHARED = """
target: ours
task: sums
seed: 3
lr: 1e-4
sampling: {temperature: 0.5}
gather:
  sampling: {top_k: 2}
  methods: [block]
train:
"""


def test_a_command_takes_what_is_shared_and_its_own_section(tmp_path):
    chosen = given("gather", "--config", config(tmp_path, SHARED))
    assert chosen["target"] == "ours" and chosen["seed"] == 3 and chosen["lr"] == 1e-4
    assert chosen["sampling"] == Sampling(0.5, 2) and chosen["methods"] == ["block"]


def test_a_group_of_options_may_be_empty(tmp_path):
    assert given("gather", "--config", config(tmp_path, "target: a\nsampling: {}"))["sampling"] == Sampling()


def test_the_command_line_wins_over_the_file_wherever_it_stands(tmp_path):
    path = config(tmp_path, SHARED)
    assert given("gather", "--seed", 4, "--config", path)["seed"] == 4
    assert given("gather", f"--config={path}", "--seed", 4)["seed"] == 4


def test_the_printed_configuration_is_a_settings_file(tmp_path, capsys):
    first = given("gather", "--config", config(tmp_path, SHARED), "--draft_length", 9)
    with pytest.raises(SystemExit) as stop:
        cli.main(["gather", "--config", str(tmp_path / "mine.yaml"), "--draft_length", "9", "--print_config"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert given("gather", "--config", config(tmp_path, printed)) == first


def test_packaged_settings_are_found_by_name():
    assert settings.find("quickstart") == settings.FOLDER / "quickstart.yaml"


def test_a_file_without_a_suffix_is_found_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("target: a\n")
    assert given("gather", "--config", "mine")["target"] == "a"


def test_several_files_are_laid_over_each_other_and_a_file_over_those_that_it_names(tmp_path):
    (tmp_path / "below.yaml").write_text("target: below\nseed: 1\ngather: {lr: 0.5, methods: [block]}\n")
    above = config(tmp_path, f"configs: [{tmp_path}/below.yaml]\nseed: 2\ngather: {{lr: 0.25}}\n")
    (tmp_path / "last.yaml").write_text("sampling: {top_k: 3}\nseed: 3\n")
    one = given("gather", "--config", above)
    assert (one["target"], one["seed"], one["lr"], one["methods"]) == ("below", 2, 0.25, ["block"])
    both = given("gather", "--config", above, f"--config={tmp_path / 'last.yaml'}")
    assert both == one | {"seed": 3, "sampling": Sampling(top_k=3)}


def test_training_takes_the_seed_of_a_file_without_sections_beside_the_quickstart(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "gather", REAL_GATHER)
    path = config(tmp_path, "seed: 7\ntask: gsm8k\n")
    words = ["train", "--config", "quickstart", "--config", str(path), "--data.traces", "t", "--out", "o"]
    with pytest.raises(SystemExit):
        cli.main([*words, "--print_config"])
    printed = capsys.readouterr().out
    assert "seed_everything: 7" in printed and "max_epochs: 8" in printed


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("configs: mine.yaml", "must be a list of settings files, got 'mine.yaml'"),
        ("configs: [{folder}/mine.yaml]", "mine.yaml leads back to {folder}/mine.yaml; name other files"),
        ("configs: [quikstart]", "quikstart is neither a file nor a packaged configuration; did you mean"),
    ],
)
def test_bad_names_of_other_files_get_one_sentence(refused, tmp_path, text, sentence):
    answer = refused("gather", "--config", config(tmp_path, text.format(folder=tmp_path)))
    assert sentence.format(folder=tmp_path) in answer


# What bad input is answered with


@pytest.mark.parametrize(
    "args, sentence",
    [
        ([], "`diversed gather` needs --target"),
        (["--tarjet", "a"], "`--tarjet` is not an option of `diversed gather`; did you mean `--target`?"),
        (
            ["--draft_lenght=3"],
            "`--draft_lenght` is not an option of `diversed gather`; did you mean `--draft_length`?",
        ),
        (
            ["--sampling.temprature", 1],
            "`--sampling.temprature` is not an option of `diversed gather`; did you mean `--sampling.temperature`?",
        ),
        (
            ["--other.topk", 1],
            "`other.topk` is not an option of `diversed gather`; did you mean `other.top_k`?",
        ),
        (["a"], "`a` is not understood by `diversed gather`; options are written --name value"),
        (["--target"], "`--target` needs a value"),
        (["--draft_length", "long"], "`draft_length` must be a whole number, got long"),
        (["--limit", "few"], "`limit` must be a whole number or null, got few"),
        (["--features", "all"], "`features` must be one of hidden, logits, got all"),
        (["--sampling.temperature", "warm"], "`sampling.temperature` must be a number, got warm"),
        (["--sampling.temperature", -1], "`temperature` must not be negative, got -1.0"),
        (["--sampling", "3"], "`sampling` is a group of options, written --sampling.NAME value; --help lists them"),
        (["--lr", ""], "`lr` must be a number, got nothing"),
        (["--hidden", "maybe"], "`hidden` must be true or false, got maybe"),
    ],
)
def test_a_bad_option_gets_one_sentence(refused, args, sentence):
    need = [] if not args or args[0] == "--target" else ["--target", "a"]
    assert refused("gather", *args, *need) == f"diversed gather: {sentence}"


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("tarjet: a", "`tarjet` at the top of mine.yaml is not an option; did you mean `target`?"),
        ("gathr: {seed: 1}", "`gathr` at the top of mine.yaml is not an option; did you mean `gather`?"),
        (
            "gather: {draft_lenght: 3}",
            "`draft_lenght` in section `gather` of mine.yaml is not an option of `diversed gather`; "
            "did you mean `draft_length`?",
        ),
        (
            "gather: {sampling: {temp: 3}}",
            "`sampling.temp` in section `gather` of mine.yaml is not an option of `diversed gather`; "
            "did you mean `sampling.temperature`?",
        ),
        ("target: a\ngather: {limit: few}", "`limit` must be a whole number or null, got few"),
        ("3: 4", "mine.yaml must have words as keys, got 3"),
        ("train: [1]", "section `train` of mine.yaml must hold options, one a line, got [1]"),
        ("gather: 3", "section `gather` of mine.yaml must hold options, one a line, got 3"),
        ("sampling: 3", "`sampling` in mine.yaml must hold options such as sampling.temperature, one a line"),
        ("gather: {sampling: [1]}", "`sampling` in section `gather` of mine.yaml must hold options such as"),
        ("- a", "mine.yaml must hold `key: value` lines, got list"),
        ("a: [", "mine.yaml is not YAML: while parsing a flow node"),
    ],
)
def test_a_bad_settings_file_gets_one_sentence(refused, tmp_path, text, sentence):
    assert sentence in refused("gather", "--config", config(tmp_path, text))


def test_a_typo_in_another_section_is_found_too(refused, tmp_path):
    path = config(tmp_path, "target: a\nexport: {draft_lenght: 3}")
    assert "`draft_lenght` in section `export` of mine.yaml" in refused("gather", "--config", path)


def test_far_from_any_of_many_names_points_at_the_help():
    assert settings.nearest("x", map(str, range(99))) == "; --help lists them all"
    assert settings.nearest("x", ["token", "block"]) == "; it is one of block, token"


def test_config_needs_a_value(refused):
    assert "`--config` needs a value" in refused("gather", "--config")


def test_an_unknown_configuration_is_answered_with_the_nearest(refused):
    assert refused("gather", "--config", "quikstart") == (
        "diversed gather: `--config` quikstart is neither a file nor a packaged configuration; "
        "did you mean `quickstart`?"
    )
    assert refused("gather", "--config", "no/such.yaml") == (
        "diversed gather: `--config` no/such.yaml: there is no such file"
    )


@pytest.mark.parametrize(
    "error, sentence",
    [
        (ValueError("`draft` must be\n  [B, N, V]"), "`draft` must be [B, N, V]"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.json"), "x.json: No such file or directory"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), "/root/x: Permission denied"),
        (
            OSError(errno.ENOSPC, "No space left on device", "shard.safetensors"),
            "disk full at shard.safetensors; nothing finished is lost: free some space and run the same command again",
        ),
        (ModuleNotFoundError("no TPU here"), "no TPU here"),
        (ModuleNotFoundError("gone", name="gguf"), "the package `gguf` is not installed; pip install 'diversed[gguf]'"),
    ],
)
def test_an_error_of_the_user_is_one_sentence(refused, monkeypatch, error, sentence):
    monkeypatch.setattr(sys.modules["diversed.probe_command"], "probe", _raising(error))
    assert refused("gather") == f"diversed gather: {sentence}"


@pytest.mark.parametrize("command", ["['--help']", "['selfcheck', '--method', 'token']"])
def test_a_command_whose_reader_has_left_is_quiet_and_not_done(command):
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); sys.stdout = open(1, 'w', buffering=1); "
        "from diversed.commands import selfcheck; selfcheck.TEXTS = 100; selfcheck.enumerated = lambda *_: (1, 0.0); "
        f"from diversed import cli; os._exit(cli.main({command}))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (141, "")


def test_a_warning_is_one_line_without_the_code_that_gave_it(monkeypatch, capsys):
    monkeypatch.setattr(
        sys.modules["diversed.probe_command"],
        "probe",
        lambda: sys.stderr.write(warnings.formatwarning("3 rows\nare used", UserWarning, __file__, 1)) and None,
    )
    before = warnings.formatwarning
    assert cli.main(["gather"]) == 0 and capsys.readouterr().err == "note: 3 rows are used\n"
    assert warnings.formatwarning is before


def test_a_traceback_is_there_for_who_asks(monkeypatch):
    monkeypatch.setattr(sys.modules["diversed.probe_command"], "probe", _raising(ValueError("ours")))
    monkeypatch.setenv("DIVERSED_DEBUG", "1")
    with pytest.raises(ValueError, match="ours"):
        cli.main(["gather"])


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys.modules["diversed.probe_command"], "probe", _raising(KeyError("ours")))
    with pytest.raises(KeyError):
        cli.main(["gather"])


def test_an_interrupt_says_how_to_resume(monkeypatch, capsys):
    def lightning():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    for function in (_raising(KeyboardInterrupt()), lightning):
        monkeypatch.setattr(sys.modules["diversed.probe_command"], "probe", function)
        assert cli.main(["gather"]) == 130
        err = capsys.readouterr().err
        assert err == "\ninterrupted; what was finished is kept, resume with: diversed gather\n"


def _raising(error):
    def function():
        raise error

    return function


# The commands themselves


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in ("bench", "run", "gather")])
def test_every_command_prints_its_configuration(name, capsys):
    needed = {"train": ["--data.traces", "t", "--out", "o"], "decode": ["--prompt", "p"], "eval": ["--out", "o"]}
    needed |= {"export": ["--train", "t", "--out", "o"], "distill": ["--out", "o"]}
    needed["calibrate"] = ["--bundle", "b", "--max_quality_drop", "0.01"]
    needed["select"] = ["--out", "o", "--latencies", "gpu"]
    with pytest.raises(SystemExit) as stop:
        cli.main([name, *needed.get(name, []), "--print_config"])
    assert stop.value.code == 0 and capsys.readouterr().out.count(": ") > 1


def test_the_quickstart_is_valid_for_every_stage(capsys, monkeypatch):
    """Reads every section with the real commands; one typo in the packaged file would end this."""
    monkeypatch.setitem(cli.COMMANDS, "gather", REAL_GATHER)
    assert cli.main(["run", "--config", "quickstart", "--seed", "5", "--train.data.batch", "3", "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("seed: 5") == 2 and "seed_everything: 5" in printed and "batch: 3" in printed


def test_run_refuses_a_typo_of_a_late_stage_before_the_first_starts(refused, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "gather", REAL_GATHER)
    assert refused("run", "--config", "quickstart", "--eval.promts", 3) == (
        "diversed run: `--eval.promts` is not an option of `diversed run`; did you mean `--eval.prompts`?"
    )
    assert refused("run", "--config", "quickstart", "--train.model.lrr", 3) == (
        "diversed run: `--train.model.lrr` is not an option of `diversed run`; did you mean `--train.model.lr`?"
    )
    for words, sentence in (
        (["--eval.relaxations", "ensemble:7"], "relaxation 'ensemble:7': weight must lie in [0, 1], got 7"),
        (["--eval.methods", "blok"], "unknown method 'blok'; did you mean `block`?"),
        (["--gather.relaxation", "nome"], "unknown relaxation 'nome'; did you mean `none`?"),
    ):
        assert refused("run", "--config", "quickstart", *words) == f"diversed run: {sentence}"


def test_run_refuses_the_prompts_of_a_late_stage_before_the_first_starts(refused, tmp_path, monkeypatch):
    """`eval` tests on a split that nothing was carved into, and so it would end after the training."""
    monkeypatch.setitem(cli.COMMANDS, "gather", REAL_GATHER)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "0 + 1 ="}\n')
    words = ["run", "--task", "jsonl", "--data.path", rows, "--out", tmp_path / "out"]
    assert "is empty: it is carved from 1 rows" in refused(*words) and not (tmp_path / "out").exists()


@pytest.fixture
def benchmark(monkeypatch):
    """A benchmark called `probe`."""
    from diversed.commands import bench as benchmarks

    def run(*, batch: int = 1):
        return [{"case": "block", "value": 2.0 * batch, "unit": "ms", "low": 1.0, "high": 3.0, "vs": {"token": 1.5}}]

    module = ModuleType("diversed.benchmarks.bench_probe")
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(benchmarks, "names", lambda: ["probe"])
    return run


def test_bench_prints_a_table_and_keeps_it(benchmark, tmp_path, capsys):
    assert cli.main(["bench", "probe", "--batch", "4", "--json", str(tmp_path / "a.json")]) == 0
    assert "block  8      ms    1 to 3    1.50x token" in capsys.readouterr().out
    document = json.loads((tmp_path / "a.json").read_text())
    assert set(document) == {"machine", "versions", "date", "rows"} and document["rows"] == benchmark(batch=4)
    assert document["versions"]["diversed"] and document["machine"]["processor"]


@pytest.mark.parametrize(
    "args, sentence",
    [
        (["prob"], "`prob` is not a benchmark; did you mean `probe`?"),
        (["trees"], "the benchmark `trees` is now `python experiments/trees.py`, in the repository"),
        (["overhead"], "the benchmark `overhead` is now `diversed bench step`"),
        (["probe", "--json", "."], "`--json` .: give the name of a file"),
        (["probe", "--json", ""], "`json` must not be empty; give a value or leave it out"),
        (["probe", "--json", "no/such/a.json"], "`--json` no/such/a.json: its folder does not exist"),
        (["probe", "--bach", "2"], "`--bach` is not an option of `diversed bench probe`; did you mean `--batch`?"),
    ],
)
def test_bench_refuses_what_it_does_not_know(refused, benchmark, args, sentence):
    assert refused("bench", *args) == f"diversed bench: {sentence}"


def test_every_benchmark_has_typed_options():
    from diversed.commands import bench as benchmarks

    for name in benchmarks.names():
        run = importlib.import_module(f"diversed.benchmarks.bench_{name}").run
        options.make_parser(run, f"bench {name}")


def test_a_type_is_described_in_words():
    described = [options.describe(kind) for kind in (int, str | None, list[float], Literal["a", "b"], Sampling)]
    assert described == [
        "a whole number", "text or null", "a list, each item a number", "one of a, b", "Sampling",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")])
def test_too_little_memory_is_a_sentence_and_other_errors_of_ours_are_not(error, monkeypatch, capsys):
    def fails(args):
        raise error

    monkeypatch.setattr(cli, "dispatch", fails)
    assert cli.main(["gather"]) == 2
    assert "there is not enough memory; nothing finished is lost" in capsys.readouterr().err
    error = RuntimeError("a mistake of ours")
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.main(["gather"])
