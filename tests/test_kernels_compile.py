"""Kernels compile for the GPUs they are meant for, on a machine without one; and without triton nothing imports it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "support" / "compile_kernels.py"


def python(*arguments, **environment):
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=given)


def test_every_kernel_compiles_for_three_generations_without_spilling_a_register(tmp_path):
    answer = python(SCRIPT, TRITON_CACHE_DIR=str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    assert {row["sm"] for row in rows} == {80, 90, 100}
    assert {row["kernel"] for row in rows} >= {"rows.normalise", "rows.residual", "rows.select", "tree.walk"}
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
