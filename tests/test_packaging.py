"""The shape of the package: what is in the wheel, who imports whom, and which names are banned."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS = [package.removeprefix("diversed").removeprefix(".").replace(".", "/") or "." for package in PACKAGES]
PACKAGED = [
    path
    for pattern in PROJECT["tool"]["setuptools"]["package-data"]["diversed"]
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and "__pycache__" not in path.parts
]
SKIPPED = {"tests", "experiments", "build", "dist", "runs", "lightning_logs", "examples"}

# Whom the modules of a folder may import, also inside a function: arrows point downwards only.
TRAINED = {"verifier", "runtime", "data", "train"}
BELOW = {
    "verifier": {"verifier"},
    "runtime": {"verifier", "runtime"},
    "data": {"verifier", "runtime", "data"},
    "train": TRAINED,
    "selector": TRAINED | {"selector"},
    "eval": TRAINED | {"selector", "eval"},
    "export": TRAINED | {"selector", "eval", "export"},
    "benchmarks": TRAINED | {"selector", "eval", "export", "benchmarks"},
}
LEAVES = {"assets", "configs", "__init__", "errors", "files", "fields"}


def python_files(folder):
    return sorted(path for path in (ROOT / folder).glob("*.py"))


def test_every_folder_with_python_files_is_listed_as_a_package():
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    found = {
        str(path.parent) for path in files if path.parts[0] not in SKIPPED and not path.parts[0].startswith((".", "_"))
    }
    assert found == set(FOLDERS)


def test_every_package_has_an_init_file():
    assert [folder for folder in FOLDERS if not (ROOT / folder / "__init__.py").is_file()] == []


def test_no_module_is_called_like_one_of_the_standard_library():
    names = {path.stem for folder in FOLDERS for path in python_files(folder)} - {"__init__", "__main__"}
    assert names & set(sys.stdlib_module_names) == set()


def test_no_two_files_have_one_name():
    names = [path.stem for folder in FOLDERS for path in python_files(folder) if path.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def imported(path):
    """Names that a file imports, as dotted paths from the package's root, or as they are when they are foreign."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = []
    here = path.relative_to(ROOT).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name.removeprefix("diversed.") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            for alias in node.names:
                inside = not base or ROOT.joinpath(*base, f"{alias.name}.py").is_file()
                names.append(".".join([*base, alias.name] if inside else base))
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module.removeprefix("diversed."))
    return names


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_what_lies_below_it(layer):
    own = {folder.split("/")[0] for folder in FOLDERS if folder != "."} | {"cli"}
    wrong = []
    for path in sorted((ROOT / layer).rglob("*.py")):
        for name in imported(path):
            top = name.split(".")[0]
            if top in own and top not in BELOW[layer] | LEAVES:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_files_import_each_other_in_a_circle():
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in FOLDERS
        for path in python_files(folder)
    }
    ties = {name: {other for other in imported(path) if other in files} - {name} for name, path in files.items()}
    while ties:
        used = set().union(*ties.values())
        free = [name for name, others in ties.items() if not others & ties.keys() or name not in used]
        if not free:
            break
        for name in free:
            del ties[name]
    assert sorted(ties) == []


def test_the_verifier_needs_only_torch():
    names = {name.split(".")[0] for path in (ROOT / "verifier").rglob("*.py") for name in imported(path)}
    assert names - set(sys.stdlib_module_names) - {"verifier", "torch", "triton", "files", "__future__", "__init__"} == set()


@pytest.mark.parametrize("line", ["import train", "from verifier import law", "import data.traces"])
def test_ruff_bans_the_folders_by_their_bare_names(line):
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache"]
    command = [*ruff, "--stdin-filename", str(ROOT / "tests/probe.py"), "-"]
    answer = subprocess.run(command, input=f"{line}\n", capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 1 and "TID251" in answer.stdout, answer.stdout + answer.stderr


def test_the_public_names_exist():
    import diversed

    files = {name: ROOT / f"{module.replace('.', '/')}.py" for name, module in diversed.PUBLIC.items()}
    assert [name for name, path in files.items() if path.exists() and not hasattr(diversed, name)] == []
    with pytest.raises(AttributeError, match="has no `draught`"):
        _ = diversed.draught


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves build/ and egg-info behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    named = [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    for path in [*named, *PACKAGED, *(path for package in FOLDERS for path in python_files(package))]:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", str(source), *options], check=True, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel):
    """A folder with what the wheel installs, and how to run Python so that it wins over the editable install."""
    target = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def python(installed, *args):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=installed.parent, env=environment)


def test_the_only_name_in_the_wheel_is_diversed(installed):
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"diversed"}


def test_the_wheel_holds_every_module_and_every_packaged_file(installed):
    for folder in FOLDERS:
        for path in python_files(folder):
            assert (installed / "diversed" / path.relative_to(ROOT)).is_file(), path
    for path in PACKAGED:
        assert (installed / "diversed" / path.relative_to(ROOT)).is_file(), path


def test_the_wheel_is_under_fifteen_megabytes(wheel):
    # The embedded pair may take 12 MB; what is above is a stray file.
    assert wheel.stat().st_size < 15e6


def test_every_module_of_the_wheel_imports(installed):
    modules = [path.relative_to(ROOT).with_suffix("").parts for folder in FOLDERS for path in python_files(folder)]
    names = [".".join(("diversed", *parts)).removesuffix(".__init__") for parts in modules if parts[-1] != "__main__"]
    if find_spec("lm_eval") is None:  # an extra, whose class that module's derives from
        names.remove("diversed.export.lm_eval")
    answer = python(installed, "-c", f"""
import importlib, diversed
assert diversed.__file__.startswith({str(installed)!r}), diversed.__file__
for name in {names}:
    importlib.import_module(name)
""")
    assert answer.returncode == 0, answer.stderr


def test_the_command_line_of_the_wheel_answers(installed):
    answer = python(installed, "-m", "diversed", "--help")
    assert answer.returncode == 0 and "gather" in answer.stdout, answer.stderr


def test_the_command_line_sampling_and_traces_hold_in_the_wheel(installed):
    """A fast subset of the tests, run against the wheel instead of the checkout."""
    chosen = [ROOT / "tests" / name for name in ("test_cli.py", "test_sampling.py", "test_traces.py")]
    probe = installed.parent / "probe.py"
    probe.write_text(
        "import diversed\n"
        "def pytest_report_header(config):\n"
        "    return f'diversed from {diversed.__file__}'\n"
    )
    tests = [str(path) for path in chosen]
    # Those that load the real commands would load every library once more.
    chosen_by_name = ["-k", "not (every_command or quickstart or late_stage or another_section)"]
    options = [*chosen_by_name, "-p", "probe", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-v"]
    environment = os.environ | {"PYTHONPATH": f"{installed}{os.pathsep}{installed.parent}"}
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *options, *tests]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=installed.parent, env=environment)
    assert f"diversed from {installed}" in answer.stdout, answer.stdout + answer.stderr
    assert answer.returncode == 0, answer.stdout + answer.stderr
