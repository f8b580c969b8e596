"""What a benchmark decodes: a pair, and the prompts that it continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.tasks import DataOptions, load_task
from ..runtime.completion import Request
from ..runtime.drafting import DraftShape, children
from ..runtime.forward import Model, Pair
from ..runtime.groups import Models
from ..runtime.prompt import prompt_tokens

MOST_PROMPT_TOKENS = 384


@dataclass(frozen=True)
class Workload(Models):
    """A pair, where its prompts come from, and how they are continued.

    Args:
        task: where prompts come from.
        data: where the task's rows come from.
        prompt: continue this text with different seeds, instead of a task's prompts.
        max_new_tokens: tokens a text may have.
        seed: of prompts and texts.
        threads: CPU threads.
    """

    task: str = "sums"
    data: DataOptions = DataOptions()
    prompt: str | None = None
    max_new_tokens: int = 48
    seed: int = 0
    threads: int = 1

    def pair(self) -> Pair:
        """Both models; torch uses `threads` from here on."""
        torch.set_num_threads(self.threads)
        return self.load()

    def prompts(self, pair: Pair, count: int) -> list[list[int]]:
        """Token ids of `count` prompts of the task's test split, or `count` times `prompt`."""
        if self.prompt is not None:
            return [prompt_tokens(self.prompt, pair.tokenizer)] * count
        task = load_task(self.task, split="test", limit=count, seed=self.seed, data=self.data)
        return [
            task.encode(example, pair.tokenizer, MOST_PROMPT_TOKENS) for example in task.examples
        ]

    def requests(self, prompts: list[list[int]], turn: int = 0) -> dict[int, Request]:
        """A request for every prompt; another `turn` gives other texts."""
        first = (self.seed + turn) << 20
        return {
            number: Request(prompt, first + number, self.max_new_tokens)
            for number, prompt in enumerate(prompts)
        }


def call_after(model: Model, prompt: list[int], count: int) -> Callable[[], object]:
    """A call of the model on `count` tokens after a prompt; the next one writes over its cache."""
    cache, device, length = model.cache(len(prompt) + count), model.device, len(prompt)
    tokens = torch.tensor([prompt + [0] * count], device=device)
    positions = torch.arange(length + count, device=device).unsqueeze(0)
    model(tokens[:, :length], positions[:, :length], None, cache, 0)

    def call() -> float:
        out = model(tokens[:, length:], positions[:, length:], None, cache, length)
        return out.logits[0, 0, 0].item()  # waits for the device

    return call


def drawn(rows: Tensor, shape: DraftShape, generator: torch.Generator) -> Tensor:
    """[B, N] the tokens of a tree whose children are drawn from rows [B, N, V] of probabilities."""
    tokens = torch.zeros(rows.shape[:2], dtype=torch.int64, device=rows.device)
    double = {"dtype": torch.float64, "device": rows.device, "generator": generator}
    for parents, level in zip(shape.levels, shape.levels[1:], strict=False):
        count = len(level) // len(parents)
        uniform = torch.rand(len(rows), len(parents), count, **double)
        found = children(shape.drafting, rows[:, list(parents)], count, uniform)
        tokens[:, list(level)] = found.flatten(1)
    return tokens
