"""The code in the documentation runs and does what the page says."""

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_readme_s_python_decodes(capsys):
    (code,) = python_blocks("../README.md")
    exec(code, {})
    text, figures = capsys.readouterr().out.rsplit("\n", 2)[:2]
    calls, substitutions = map(float, figures.split())
    assert text and 1 <= calls <= 6 and substitutions > 0


def test_the_method_of_the_page_is_lossless_and_a_mistake_in_it_is_found():
    method, proof = python_blocks("adding-a-method.md")
    exec(method + proof, {})
    wrong = method.replace("target.masked_fill(drafted, 0)", "target.clone()")
    assert wrong != method
    try:
        exec(wrong + proof, {})
    except AssertionError:
        return
    raise AssertionError("the page's proof accepts a wrong method")


def test_the_method_of_the_page_decodes_by_its_name(tmp_path):
    (tmp_path / "naive.py").write_text(python_blocks("adding-a-method.md")[0])
    code = "import sys; sys.path.insert(0, '.'); from diversed.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["decode", "--method", "naive:NAIVE", "--branches", "2", "--prompt", "1 + 2 =", "--max_new_tokens", "8"]
    answer = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "tokens per target call" in answer.stderr


def test_the_notebook_runs_with_the_public_names_alone(tmp_path):
    script = DOCS.parent / "examples" / "notebook.py"
    imports = re.findall(r"^(?:from|import) (\S+)", script.read_text(), re.MULTILINE)
    assert set(imports) == {"sys", "tempfile", "pytorch_lightning", "diversed"}
    answer = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    rates = re.findall(r"(\d\.\d\d) tokens per target call", answer.stdout)
    assert len(rates) == 7 and all(1 <= float(rate) <= 6 for rate in rates)
    assert float(re.search(r"step acceptance (\S+)", answer.stdout).group(1)) > 0.8
    assert (tmp_path / "bundle/card.json").is_file()
