"""Options that say which prompts of which task a command takes; see `runtime.groups`."""

from __future__ import annotations

from dataclasses import dataclass

from ..files import within
from .tasks import DataOptions, Task, load_task

MOST_PROMPTS = (1 << 28) - 1  # the seed of a text holds the number of its prompt; see gathering


@dataclass(frozen=True)
class Prompts:
    """Prompts of a task.

    Args:
        task: sums, gsm8k, cnndm, xsum, wmt, mbpp, humaneval, or jsonl for any file with named
            fields.
        data: where the task's rows come from.
        prompts: how many prompts of the split.
        max_new_tokens: tokens a text may have; by default the task's own number.
        seed: of the choice and order of prompts, and of all that is random here and has no seed of
            its own.
    """

    task: str = "sums"
    data: DataOptions = DataOptions()
    prompts: int = 200
    max_new_tokens: int | None = None
    seed: int = 0

    def __post_init__(self):
        within(1, MOST_PROMPTS, prompts=self.prompts)
        within(1, max_new_tokens=self.max_new_tokens)

    def load(self, split: str = "train") -> Task:
        """The task with these examples of a split."""
        return load_task(self.task, split=split, limit=self.prompts, seed=self.seed, data=self.data)


@dataclass(frozen=True)
class LongPrompts(Prompts):
    """Prompts of a task that may be shortened.

    Args:
        max_prompt_tokens: longer prompts lose the end of their article, never the instruction or
            the question.
    """

    max_prompt_tokens: int = 384

    def __post_init__(self):
        super().__post_init__()
        within(1, max_prompt_tokens=self.max_prompt_tokens)


@dataclass(frozen=True)
class SplitPrompts(LongPrompts):
    """Prompts of one split of a task.

    Args:
        split: train, validation or test.
    """

    split: str = "train"

    def load(self, split: str | None = None) -> Task:
        """The task with these examples of the split."""
        return super().load(split or self.split)


@dataclass(frozen=True)
class BundlePrompts(SplitPrompts):
    """Prompts of the task that a bundle is for.

    Args:
        task: sums, gsm8k, cnndm, xsum, wmt, mbpp, humaneval or jsonl; by default the bundle's. Its
            score is in [0, 1].
    """

    task: str | None = None


@dataclass(frozen=True)
class TextPrompts(Prompts):
    """Prompts of a task, or one text again and again.

    Args:
        prompt: continue this text with different seeds, instead of a task's prompts.
    """

    prompt: str | None = None

    def __post_init__(self):
        super().__post_init__()
        default = (self.task, self.data) == (Prompts.task, Prompts.data)
        if self.prompt is not None and not default:
            raise ValueError(
                "`task` and `data` would change nothing beside `prompt`, which is the text to"
                " continue; leave one of them out"
            )
