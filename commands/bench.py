"""`diversed bench NAME --json FILE`: run benchmarks/NAME.py, print its table, keep it with the
machine and versions.

A benchmark is a module with a typed `run(*, option: type = default, ...) -> list of rows`. A row is
    case, value, unit     what was measured, and the number (a median), in `unit`
    low, high             the interval around it; optional
    vs                    {other case: ratio of this value to that case's}; optional
`record` and `table` need neither jsonargparse nor torch, for machines that lack the first.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from ..files import MEASURED, machine, nearest, versions, write_whole


def bench(args: list[str]) -> None:
    """Run one benchmark; `args` are its name and its options."""
    from .options import parse

    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: diversed bench NAME [--json FILE] [--option value ...]\n\nNAME:"
            f" {', '.join(names())}"
        )
        return
    name, rest = args[0], args[1:]
    if name not in names():
        raise ValueError(f"`{name}` is not a benchmark{nearest(name, names())}")
    run = import_module(f"...benchmarks.{_file(name)}", __name__).run
    options = parse(run, rest, f"bench {name}", extra=_json_option)
    file = options.pop("json")
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise FileNotFoundError(f"`--json` {file}: its folder does not exist")
    if file is not None and Path(file).is_dir():
        raise IsADirectoryError(f"`--json` {file or 'nothing'}: give the name of a file")
    if file is not None and not os.access(Path(file).absolute().parent, os.W_OK):
        raise PermissionError(f"`--json` {file}: its folder cannot be written to")
    document = record(run(**options))
    print(table(document))
    if file is not None:
        write(document, file)


def names() -> list[str]:
    """Every benchmark's name."""
    files = (Path(__file__).parents[1] / "benchmarks").glob("*.py")
    return sorted(path.stem.removeprefix("bench_") for path in files if path.stem != "__init__")


def _file(name: str) -> str:
    return "bench_decode" if name == "decode" else name


def record(rows: list[dict]) -> dict:
    """`rows` with where and when they were measured."""
    return {
        "machine": machine(),
        "versions": versions(MEASURED),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "rows": rows,
    }


def write(document: dict, file: str | Path) -> None:
    """Write the document whole or not at all."""
    write_whole(file, json.dumps(document, indent=1) + "\n")


def table(document: dict) -> str:
    """The document as text: one line a row, then machine and versions."""
    lines = [("case", "value", "unit", "interval", "compared")]
    for row in document["rows"]:
        interval = f"{row['low']:.4g} to {row['high']:.4g}" if row.get("low") is not None else ""
        ratios = ", ".join(f"{ratio:.2f}x {other}" for other, ratio in row.get("vs", {}).items())
        lines.append((row["case"], f"{row['value']:.4g}", row["unit"], interval, ratios))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    about = ", ".join(f"{key} {value}" for key, value in document["versions"].items())
    return "\n".join(
        [
            *text,
            "",
            ", ".join(map(str, document["machine"].values())),
            f"{about}; {document['date']}",
        ]
    )


def _json_option(parser) -> None:
    parser.add_argument(
        "--json", type=str | None, default=None, help="File for rows, machine and versions."
    )
