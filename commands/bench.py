"""`diversed bench NAME --json FILE`: run benchmarks/bench_NAME.py, print its table, and keep it.

What a benchmark is and what the file holds: benchmarks/timing.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ..benchmarks.timing import record, table, write
from ..files import nearest
from .options import call, make_parser, read

# Benchmarks of earlier versions, and where they are now.
MOVED = {"overhead": "`diversed bench step`"}
for _name in ("efficiency", "laws", "training", "transfer", "trees", "verifiers"):
    MOVED[_name] = f"`python experiments/{_name}.py`, in the repository"


def bench(args: list[str]) -> None:
    """Run one benchmark; `args` are its name and its options."""
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: diversed bench NAME [--json FILE] [--option value ...]\n\nNAME:"
            f" {', '.join(names())}"
        )
        return
    name = args[0]
    if name in MOVED:
        raise ValueError(f"the benchmark `{name}` is now {MOVED[name]}")
    if name not in names():
        raise ValueError(f"`{name}` is not a benchmark{nearest(name, names())}")
    run = import_module(f"...benchmarks.bench_{name}", __name__).run
    measure(run, args[1:], f"bench {name}")


def measure(run: Callable[..., list[dict]], args: list[str], name: str) -> None:
    """Call `run` with the options in `args`, print the table of its rows, keep it in `--json`."""
    parser = make_parser(run, name)
    parser.add_argument(
        "--json", type=str | None, default=None, help="File for rows, machine and versions."
    )
    options = read(parser, args, name)
    file = options.pop("json")
    if file is not None:
        _check(file)
    document = record(call(run, **options))
    print(table(document))
    if file is not None:
        write(document, file)


def names() -> list[str]:
    """Every benchmark's name."""
    files = (Path(__file__).parents[1] / "benchmarks").glob("bench_*.py")
    return sorted(path.stem.removeprefix("bench_") for path in files)


def _check(file: str) -> None:
    """Refuse a file that could not be written before anything is measured."""
    folder = Path(file).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"`--json` {file}: its folder does not exist")
    if Path(file).is_dir():
        raise IsADirectoryError(f"`--json` {file or 'nothing'}: give the name of a file")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"`--json` {file}: its folder cannot be written to")
