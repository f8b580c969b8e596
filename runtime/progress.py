"""How far a file of prompts is: a bar with an estimate on a terminal, a line now and then
elsewhere.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

EVERY = 20.0  # seconds between lines where there is no terminal


def bar() -> Bar:
    """What is done, how much of it, and the time that the rest will take; silent without a
    terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Bar(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


class Progress:
    """Counts what `decode` reports as `on_step`; a context manager, on standard error.

    total, done: requests in all, and those that were finished before.
    """

    def __init__(self, total: int, done: int):
        self.total, self.before, self.done, self.tokens = total, done, done, 0
        self.bar = bar()
        self.task = self.bar.add_task("decode", total=total, completed=done)
        self.began = self.said = time.monotonic()

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        self.bar.stop()

    def __call__(self, index: int, new: list[int], ended: bool) -> None:
        self.tokens += len(new)
        self.done += ended
        if not ended:
            return
        now = time.monotonic()
        rate = f"{self.tokens / max(now - self.began, 1e-9):,.0f} tokens/s"
        self.bar.update(self.task, completed=self.done, description=f"decode {rate}")
        if self.bar.disable and now - self.said >= EVERY:
            self.said = now
            left = (self.total - self.done) * (now - self.began) / (self.done - self.before)
            print(
                f"{self.done}/{self.total}, {rate}, {left:,.0f} s left", file=sys.stderr, flush=True
            )
