"""What a pair is asked; texts of a task, sampled, scored and laid out as a shard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..runtime.engine import check_prompts
from ..runtime.forward import Pair
from ..runtime.groups import Models
from ..runtime.relaxer import load_relaxer
from ..runtime.rollouts import Sample, Sampler
from ..runtime.sampling import Sampling
from ..runtime.vocabulary import token_table
from .first_look import FirstLook
from .prompts import checksum
from .scores import mean_log_probability
from .selection import SplitPrompts
from .tasks import Task
from .traces import Shard

STEPS = (1, 5)  # new tokens of the two timings whose difference is that of decoding steps


@dataclass(frozen=True)
class Asked:
    """A pair and the prompts of a task that it continues.

    prompts: token ids of each. new_tokens: that a text may have. options: which prompts they are.
    """

    pair: Pair
    task: Task
    prompts: list[list[int]]
    new_tokens: int
    options: SplitPrompts

    @classmethod
    def load(cls, models: Models, options: SplitPrompts) -> Asked:
        """Load both models and the prompts; those that leave no room for a text are refused."""
        pair, task = models.load(), options.load()
        new_tokens = options.max_new_tokens or task.max_new_tokens
        most = room(pair, new_tokens)
        prompts = task.encode_all(pair.tokenizer, options.max_prompt_tokens, most)
        check_prompts(pair, dict(enumerate(prompts)), new_tokens)
        return cls(pair, task, prompts, new_tokens, options)

    @property
    def settings(self) -> dict[str, Any]:
        """All of it that decides a text, for the settings of a folder."""
        return {
            **self.pair.settings,
            "seed": self.options.seed,
            "prompts": len(self.prompts),
            "max_prompt_tokens": self.options.max_prompt_tokens,
            "max_new_tokens": self.new_tokens,
            **self.task.settings,
            "prompts_sha256": checksum(self.prompts),
            "dtype": str(self.pair.target.dtype),
            "device": str(self.pair.target.device),
            "token_table": token_table(self.pair.tokenizer, self.pair.vocab).sha256,
        }

    def writer(
        self,
        relaxation: str,
        sampling: Sampling,
        samples: int,
        first_sample: int = 0,
        **stored: Any,
    ) -> Writer:
        """What writes `samples` texts for each prompt under a relaxation.

        stored: fields of `Sampler` that say what is stored of a text.
        """
        relaxer = load_relaxer(relaxation, self.pair, sampling)
        stop = self.task.stop
        sampler = Sampler(self.pair, relaxer, sampling, self.new_tokens, stop, **stored)
        seed = self.options.seed
        return Writer(sampler, self.task, self.prompts, samples, first_sample, seed)


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

    def texts(self, unit: Sequence[int]) -> tuple[list[Sample], list[int]]:
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


def room(pair: Pair, new_tokens: int) -> int:
    """Prompt tokens that fit both contexts beside `new_tokens` new ones."""
    room = min(pair.target.max_positions, pair.draft.max_positions) - new_tokens
    if room < 1:
        raise ValueError(
            f"`max_new_tokens` {new_tokens} leaves no room for a prompt in a context of"
            f" {room + new_tokens}; lower it"
        )
    return room
