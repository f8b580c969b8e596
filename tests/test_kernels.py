"""The suite of the kernels, interpreted and, where there is a GPU, compiled; and that they compile where there is none.

Each in a process of its own: triton decides when it is imported whether it interprets, and other libraries import it.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
HERE = Path(__file__).parent


def python(*arguments, **environment):
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=HERE.parent)


@pytest.mark.parametrize(
    "environment", [{"TRITON_INTERPRET": "1"}, pytest.param({}, marks=pytest.mark.gpu)], ids=["interpreted", "compiled"]
)
def test_kernels_give_the_verdicts_of_their_laws(environment):
    answer = python("-m", "pytest", HERE / "kernels_suite.py", "-p", "no:cacheprovider", "--tb=short", **environment)
    assert answer.returncode == 0, answer.stdout[-10_000:] + answer.stderr[-2_000:]
    assert "skipped" not in answer.stdout and re.search(r"\[100%\]", answer.stdout)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What support/compile_kernels.py prints."""
    answer = python(HERE / "support" / "compile_kernels.py", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_a_batch_of_another_size_compiles_nothing_again(launched):
    rows = [row for row in launched if "method" in row]
    assert len(rows) == 6 and [row for row in rows if row["compiled again"]] == []


def test_every_kernel_compiles_for_three_generations_without_spilling_a_register(launched):
    rows = [row for row in launched if "kernel" in row]
    assert {row["sm"] for row in rows} == {80, 90, 100}
    assert {row["kernel"] for row in rows} >= {"rows.normalise", "rows.residual", "rows.select", "walk.walk"}
    assert [row for row in rows if row["spilled"]] == []
    # of 65,536 registers of a multiprocessor: at least three programs run side by side on each
    assert max(row["registers"] * row["warps"] * 32 for row in rows) <= 65_536 // 3
    assert max(row["shared"] for row in rows) <= 49_152


def test_kernels_on_a_cpu_refuse_with_a_sentence_and_nothing_else_loads_them():
    answer = python(
        "-c",
        "import sys, torch, diversed\n"
        "from diversed.verifier import METHODS\n"
        "assert not any('diversed.verifier.kernels' in name for name in sys.modules)\n"
        "row = torch.zeros(1, 1, 4)\n"
        "try:\n"
        "    METHODS['token'].kernel(row, row, row[..., 0].long(), (-1,), row[..., 0], row[..., :2, 0].expand(1, 2))\n"
        "except ValueError as error:\n"
        "    print(error)\n",
    )
    assert answer.stdout == "kernels run on a CUDA device, got tensors on cpu; use the method's law there\n", answer
