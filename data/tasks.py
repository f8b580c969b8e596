"""Tasks: prompts, references, stop strings and a score.

Rows come from the Hugging Face hub (`datasets.load_dataset`) or, with `data.path`, from local files
with the same fields; `sums` makes its own problems. A layout says which fields of a row are what; a
task takes its first that fits. Splits are disjoint (`data.rows`); the order is a shuffle by `seed`:
a smaller `limit` is the beginning of a larger one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..files import close_to, within
from . import sandbox
from .layouts import Blank, Layout, choose
from .prompts import Example, encode, fill
from .recipes import TASKS, DataOptions, Recipe, recipe_for
from .scores import SCORES, missing
from .sources import SPLITS, Source, hub_source, local_source

__all__ = ["TASKS", "DataOptions", "Example", "Task", "load_task"]
SUMS_PROBLEMS = 1000  # without a limit


@dataclass(frozen=True)
class Task:
    """Prompts and how an answer to them is scored.

    score_name:     a key of SCORES; metric: its name in tables.
    max_new_tokens: tokens a text may have, the end-of-text included.
    split:          of its rows. source: one line: which rows these are, out of which file.
    options:        how the rows were read.
    """

    name: str
    examples: list[Example]
    stop: tuple[str, ...]
    max_new_tokens: int
    score_name: str
    split: str
    source: str
    options: DataOptions

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides prompts, stops and scores, for the settings of a folder."""
        rows = json.dumps([astuple(example) for example in self.examples])
        return {
            "task": self.name,
            "source": self.source,
            "split": self.split,
            "metric": self.metric,
            "data": asdict(self.options),
            "rows_sha256": hashlib.sha256(rows.encode()).hexdigest(),
        }

    @property
    def metric(self) -> str:
        return SCORES[self.score_name].metric

    @property
    def scores_text(self) -> bool:
        """False where the score comes from the target's rows: `data.scores.mean_log_probability`."""
        return SCORES[self.score_name].function is not None

    def score(self, text: str, example: Example) -> float:
        """The score of one text, larger is better."""
        function = SCORES[self.score_name].function
        if function is None:
            raise ValueError(
                f"the score {self.score_name} is read off the target's rows, `text` does not"
                " hold it"
            )
        return function(text, example.reference)

    def encode(self, example: Example, tokenizer, max_prompt_tokens: int) -> list[int]:
        """Token ids of the prompt, at most `max_prompt_tokens`; see `data.prompts.encode`."""
        return encode(example, tokenizer, max_prompt_tokens, self.options.chat)


def load_task(
    name: str,
    path: str | None = None,
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
    data: DataOptions | None = None,
) -> Task:
    """The examples of one split of a task.

    name:  a key of TASKS. path: overrides data.path.
    limit: at most this many examples, None for all; where the split holds fewer, a warning says how
        many there are.
    seed:  of the order; never of the membership in a split.
    """
    options = replace(data or DataOptions(), **({} if path is None else {"path": str(path)}))
    recipe = recipe_for(name, options)
    if split not in SPLITS:
        raise ValueError(
            f"`split` must be one of {', '.join(SPLITS)}, got {split!r}{close_to(split, SPLITS)}"
        )
    within(1, limit=limit)
    within(0, seed=seed)
    if recipe.score == "pass_at_1":
        sandbox.check()
    load = _sums if name == "sums" else partial(_rows, name)
    examples, source = load(recipe, options, split, limit, seed)
    return Task(
        name,
        examples,
        recipe.stop,
        recipe.max_new_tokens,
        recipe.score,
        split,
        source,
        options,
    )


def _sums(
    recipe: Recipe, options: DataOptions, split: str, limit: int | None, seed: int
) -> tuple[list[Example], str]:
    from ..assets.sums import problems

    for option in ("path", "whole", "prompt_field", "article_field", "reference_field"):
        if getattr(options, option):
            raise ValueError(
                f"the task sums makes its own problems, leave out `data.{option}`; or use the task"
                " jsonl"
            )
    examples = [
        Example(
            *fill(recipe.template, row["prompt"], ""),
            row["reference"],
            f"problem {i} of {split}, seed {seed}",
        )
        for i, row in enumerate(problems(split, limit or SUMS_PROBLEMS, seed))
    ]
    return examples, f"{len(examples)} problems of sums, {split}, seed {seed}"


def _rows(
    name: str, recipe: Recipe, options: DataOptions, split: str, limit: int | None, seed: int
) -> tuple[list[Example], str]:
    """The examples in their order, and which they are."""
    import numpy

    if options.path is None and recipe.hub is None:
        raise ValueError(
            f"the task {name} needs `data.path`, a .jsonl or .json file or a folder of them"
        )
    if options.path is None:
        source = hub_source(*recipe.hub, recipe.hub_splits, split, options.whole)
    else:
        source = local_source(Path(options.path), split, options.whole)
    if recipe.prepare:
        source = replace(
            source, rows=[recipe.prepare(row, source.place(i)) for i, row in enumerate(source.rows)]
        )
    layout = choose(recipe.layouts, source)
    read = _reader(recipe, layout, source)
    members = _members(layout, source, split, read)
    order = (members[i] for i in numpy.random.default_rng(seed).permutation(len(members)))
    usable = (found[1] for found in map(read, order) if found)
    examples = list(islice(usable, limit))
    what = f"the {split} split of {source.name}"
    if not examples:
        raise ValueError(f"{what} must hold rows with a text and a reference, it has none")
    if limit is not None and len(examples) < limit:
        warnings.warn(
            f"`limit` is {limit}, {what} holds {len(examples)} examples: all are used", stacklevel=4
        )
    carved = f" carved out as {split}" if source.carved else ""
    return examples, f"{len(examples)} of {len(members)} rows{carved} of {source.name}"


def _reader(
    recipe: Recipe, layout: Layout, source: Source
) -> Callable[[int], tuple[str, Example] | None]:
    """Row index -> (its text without the template, its example); None for a row of the hub that
    lacks one of them.
    """

    @cache
    def read(index: int) -> tuple[str, Example] | None:
        place = source.place(index)
        try:
            prompt, article, reference = layout.read(source.rows[index], place)
            if lacking := missing(recipe.score, reference):
                raise Blank(
                    f"{place} must hold {lacking} in {layout.reference} for the score"
                    f" {recipe.score}, got {reference[:60]!r}"
                )
        except Blank:
            if source.local:
                raise
            return None
        return prompt + article, Example(*fill(recipe.template, prompt, article), reference, place)

    return read


def _members(layout: Layout, source: Source, split: str, read: Callable) -> Sequence[int]:
    """Indices of the split's rows. Local rows are all read, so that an error hangs on no limit."""
    members = range(len(source.rows))
    if layout.where:
        members = [i for i in members if layout.holds(source.rows[i])]
    if source.local or source.carved:
        members = [i for i in members if read(i)]
    if not source.carved:
        return members
    kept = [i for i in members if source.split_of(read(i)[0]) == split]
    if not kept:
        raise ValueError(
            f"the {split} split of {source.name} is empty: it is carved from {len(members)} rows;"
            " give it a file of its own, or set `data.whole` to take all rows for any split"
        )
    return kept
