"""`diversed report RUN [RUN...]`: one HTML page of a run, or of several compared; see
`eval.page`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from ..eval.page import page
from ..eval.run_data import read_runs
from ..eval.tokens import token_numbers
from ..files import within, write_whole
from .options import parse

PAGE = "report.html"


def report(args: list[str]) -> None:
    """`diversed report`; `args` are the folders and the options."""
    count = next((index for index, word in enumerate(args) if word.startswith("-")), len(args))
    if not args:
        raise ValueError("`diversed report` needs the folder of a run, or several to compare")
    named = [f"--runs={json.dumps(args[:count])}"] if count else []
    print(write_page(**parse(write_page, [*named, *args[count:]], "report")))


def write_page(
    *,
    runs: list[str],
    out: str | None = None,
    quality: Literal["score", "likelihood"] = "score",
    texts: int = 64,
    trust_remote_code: bool = False,
) -> Path:
    """Write one HTML page of one run, or of several compared; the folders may stand first:
    `diversed report RUN RUN`.

    Args:
        runs: folders that `diversed eval` or `diversed run` wrote.
        out: file to write; by default RUN/report.html, needed to compare several runs.
        quality: score, the task's; or likelihood, the target's mean log-probability of a token,
            for a target that can hardly do the task, so that scores tell nothing; the page is then
            RUN/report-likelihood.html.
        texts: texts of the learned point whose single tokens are looked at with both models; 0
            leaves that out.
        trust_remote_code: run model code that comes with a checkpoint.
    """
    within(0, texts=texts)
    if not runs:
        raise ValueError("`runs` is empty; name the folder of a run, or several to compare")
    if out is None and len(runs) > 1:
        raise ValueError(
            f"`out` must be given to compare {len(runs)} runs, such as --out comparison.html"
        )
    if out is not None and (Path(out).is_dir() or not Path(out).absolute().parent.is_dir()):
        raise FileNotFoundError(f"`out` must be a file in a folder that exists, got {out}")
    found = read_runs(runs, quality)
    if out is None:
        file = found[0].folder / (PAGE if quality == "score" else f"report-{quality}.html")
    else:
        file = Path(out)
    numbers = [token_numbers(run, texts, trust_remote_code) for run in found]
    return write_whole(file, page(found, numbers))
