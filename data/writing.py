"""Texts of a task, sampled, scored and laid out as a shard."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from ..runtime.rollouts import Sample, Sampler
from .first_look import FirstLook
from .scores import mean_log_probability
from .tasks import Task
from .traces import Shard

STEPS = (1, 5)  # new tokens of the two timings whose difference is that of decoding steps


@dataclass(frozen=True)
class Writer:
    """Samples and scores texts.

    prompts:      token ids of each, with the task's examples.
    samples:      texts for each prompt; first_sample: number of a prompt's first one.
    seed:         of all texts.
    """

    sampler: Sampler
    task: Task
    prompts: list[list[int]]
    samples: int
    first_sample: int
    seed: int

    def texts(self, unit: range) -> tuple[list[Sample], list[int]]:
        """(texts of some of the prompts, the prompt of each)."""
        prompts = {number: self.prompts[number] for number in unit}
        texts = self.sampler.run(prompts, self.samples, self.seed_of)
        return texts, [number for number in unit for _ in range(self.samples)]

    def shard(self, texts: list[Sample], owners: list[int], rewards: list[float]) -> Shard:
        """The shard that stores these texts in this order."""
        numbers = [self.first_sample + i % self.samples for i in range(len(texts))]
        return as_shard(texts, owners, numbers, rewards)

    def unit(self, unit: range) -> tuple[Shard, dict[str, int]]:
        """(the texts of some of the prompts, nothing that is counted besides)."""
        texts, owners = self.texts(unit)
        rewards = [self.reward(text, owner) for text, owner in zip(texts, owners, strict=True)]
        return self.shard(texts, owners, rewards), {}

    def look(self, shards: list[Shard]) -> tuple[str, str | None]:
        """What the first texts say, and why more of their kind would teach little."""
        look = FirstLook.of(*shards)
        return look.said(), look.objection(self.sampler.max_new_tokens)

    def seconds_a_step(self, rows: int) -> float:
        """Of a decoding step with so many texts, timed on the first prompt."""
        seconds = []
        for steps in STEPS:
            began = time.monotonic()
            short = replace(self.sampler, max_new_tokens=steps)
            short.run({0: self.prompts[0]}, rows, self.seed_of)
            seconds.append(time.monotonic() - began)
        return max(seconds[1] - seconds[0], 0.0) / (STEPS[1] - STEPS[0])

    def reward(self, text: Sample, prompt: int) -> float:
        """What a text of a prompt earns."""
        if not self.task.scores_text:
            return mean_log_probability(text.columns["target_prob"].tolist())
        return self.task.score(self.sampler.stops.cut(text.tokens), self.task.examples[prompt])

    def seed_of(self, prompt: int, sample: int) -> int:
        """Of the random numbers of a prompt's text."""
        return (self.seed << 44) ^ (prompt << 16) ^ (self.first_sample + sample)


def as_shard(
    texts: list[Sample], prompts: list[int], samples: list[int], rewards: list[float]
) -> Shard:
    """The shard that stores these texts in this order."""
    lengths = torch.tensor([0] + [len(text.tokens) for text in texts])
    columns = {name: torch.cat([text.columns[name] for text in texts]) for name in texts[0].columns}
    return Shard(
        start=lengths.cumsum(0),
        prompt=torch.tensor(prompts),
        sample=torch.tensor(samples),
        reward=torch.tensor(rewards, dtype=torch.float32),
        finished=torch.tensor([text.finished for text in texts]),
        **columns,
    )
