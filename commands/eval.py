"""`diversed eval`: methods x relaxations x temperatures x draft lengths x seeds on the same
held-out prompts.

OUT/results.jsonl holds one line a text with everything the figures are computed from; see `sweep`.
Under the table stands what the comparison ends in, for every learned point; see `eval.comparison`.
"""

from __future__ import annotations

from ..data.selection import SplitPrompts
from ..eval import dry_run as dry
from ..eval.comparison import Least, every_statement
from ..eval.grid import Grid, prepare
from ..eval.results import read_results
from ..eval.results_table import report
from ..eval.sweep import Sweep
from ..files import exclusive
from ..runtime.groups import Models, SharedRun


def evaluate(
    run: SharedRun,
    models: Models = Models(),
    prompts: SplitPrompts = SplitPrompts(split="test"),
    grid: Grid = Grid(),
    *,
    batch: int = 64,
    dry_run: bool = False,
) -> None:
    """Decode the same held-out prompts in every way that is listed; a table and a figure of quality
    against speed.

    Args:
        batch: prompts decoded together; tokens/s depends on it. Several processes share out whole
            batches.
        dry_run: decode nothing; print what would be decoded, what it costs, and what each point is
            compared with.
    """
    sweep = prepare(run, models, prompts, grid, batch)
    if dry_run:
        dry.tell(sweep)
        return
    alone = sweep.folder.num_shards == 1
    with sweep.folder.held():
        sweep.begin()
        sweep.decode()
        if alone:
            if not sweep.complete():
                raise FileNotFoundError(
                    f"results in {sweep.folder.path} were deleted while it was written; run the"
                    " same command again"
                )
            sweep.merge()
            _tell(sweep)
    if not alone:
        _finish(sweep)


def _finish(sweep: Sweep) -> None:
    """The last of several processes to finish writes the whole and tells of it."""
    if not sweep.complete():
        print(
            f"{sweep.file}: this part is complete; the last process to finish writes"
            f" {sweep.results}"
        )
        return
    try:
        with exclusive(sweep.folder.path):
            sweep.merge()
            _tell(sweep)
    except BlockingIOError:
        # Two ended at the same moment: whoever holds the folder has seen the same results and
        # writes them.
        print(f"{sweep.file}: this part is complete; another process is writing {sweep.results}")


def _tell(sweep: Sweep) -> None:
    report(sweep.folder.path)
    settings = sweep.settings
    least = Least(**settings["least"])
    for statement in every_statement(read_results(sweep.results), settings["chosen"], least=least):
        print(statement)
