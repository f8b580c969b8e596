"""What holds of the whole package for hard times: no file can run code, no clock decides anything, kills cost nothing.

docs/faults.md lists the faults that were tried, this file what keeps them away from code that is not yet written.
"""

import ast
import random
import signal
from pathlib import Path

import diversed
import pytest
from diversed import cli

from .support.kills import series

ROOT = Path(diversed.__file__).parent
FOLDERS = ("assets", "benchmarks", "commands", "configs", "data", "eval", "experiments", "export", "runtime", "selector",
           "train", "verifier")  # fmt: skip
FILES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
# name of a call -> what it must be called with
GUARDED = {"torch.load": "weights_only", "trainer.fit": "weights_only", "np.load": None, "numpy.load": None,
           "yaml.load": None, "yaml.full_load": None, "yaml.unsafe_load": None}  # fmt: skip
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def calls(path: Path):
    """(name as it is written, call) of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def given(call: ast.Call, name: str) -> object:
    return next((ast.unparse(word.value) for word in call.keywords if word.arg == name), None)


def unguarded(path: Path) -> list[str]:
    """Calls and imports in a file by which what is read could run code."""
    found = []
    for name, call in calls(path):
        resumes = name != "trainer.fit" or given(call, "ckpt_path") not in (None, "None")
        if name in GUARDED and resumes and (not GUARDED[name] or given(call, GUARDED[name]) != "True"):
            found.append(f"{name}, line {call.lineno}")
        if given(call, "trust_remote_code") == "True" or given(call, "allow_pickle") == "True":
            found.append(f"{name}, line {call.lineno}")
        if name in ("eval", "exec") and path.parent.name != "sandbox":
            found.append(f"{name}, line {call.lineno}")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found += [f"import {name}" for name in names if name.split(".")[0] in RUNS_CODE]
    return found


def test_no_file_that_is_read_can_run_code():
    assert len(FILES) > 60
    assert {path.name: found for path in FILES if (found := unguarded(path))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)", "torch.load(path, weights_only=False)", "import pickle", "from pickle import loads",
        "trainer.fit(model, ckpt_path=path)", "yaml.load(text, Loader)", "np.load(path)", "f(path, allow_pickle=True)",
        "from_pretrained(name, trust_remote_code=True)", "eval(text)",
    ],
)  # fmt: skip
def test_an_unguarded_read_would_be_found(tmp_path, line):
    (tmp_path / "module.py").write_text(line)
    assert unguarded(tmp_path / "module.py")


def test_no_decision_reads_a_clock_that_can_jump():
    """Durations are monotonic; the wall clock stands in figures' dates only, and no file's time of change is read."""
    wall = {path.name for path in FILES for name, _ in calls(path) if name in ("time.time", "datetime.now", "os.utime")}
    assert wall == {"run_data.py", "timing.py"}
    assert not [path for path in FILES if "st_mtime" in path.read_text(encoding="utf-8")]


def test_a_command_killed_at_random_moments_ends_with_the_bytes_of_an_undisturbed_run(tmp_path):
    """The short form of `python tests/support/kills.py`, which kills five commands."""
    assert series("train", tmp_path / "train", 2, random.Random(3))["kills"] == 2


@pytest.mark.parametrize(("name", "how"), [("train", "TERM"), ("gather", "INT")])
def test_a_signal_ends_a_command_as_a_signal_does_and_says_how_to_resume(tmp_path, name, how):
    """By hand: python tests/support/kills.py FOLDER --signal TERM, and with --fresh, which meets the imports too."""
    found = series(name, tmp_path / name, 1, random.Random(4), how)
    assert found["kills"] == found["told"] == 1


def test_only_signals_that_would_end_the_process_are_answered_and_only_meanwhile():
    usual = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli._told(["gather"]):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup stays what it is
            assert signal.getsignal(signal.SIGTERM) != usual[0]
        assert signal.getsignal(signal.SIGTERM) == usual[0]
    finally:
        signal.signal(signal.SIGHUP, usual[1])
