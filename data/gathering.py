"""Gather traces: prompts -> sampled texts under a relaxation, their rewards, and the scalars from
which a head is trained.

Work is cut into fixed units of prompts, one shard file each, and decoded with a fixed batch and
thread count, so that floating point repeats: a run that was killed and started again ends with the
same bytes, and so does one that several processes share.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ..files import SCORING, Progress, versions, within
from ..runtime.bundle import head_sha256
from ..runtime.engine import check_prompts
from ..runtime.forward import Pair
from ..runtime.groups import Models, SharedRun, check_filters
from ..runtime.relaxer import contents, load_relaxer
from ..runtime.rollouts import Sample, Sampler
from ..runtime.sampling import Sampling
from ..verifier.relax import parse
from .columns import bytes_per_token
from .prompts import checksum
from .scores import mean_log_probability
from .selection import SplitPrompts
from .shards import ShardFolder
from .tasks import Example, Task
from .traces import MANIFEST, Shard, read_shard, write_shard

# A text's random numbers are those of (seed << 44) ^ (prompt << 16) ^ sample, an int64.
MOST_SEED, MOST_SAMPLES = (1 << 19) - 1, 1 << 16


@dataclass(frozen=True)
class Rollouts:
    """The texts that are sampled.

    Args:
        samples: texts for each prompt; the policy gradient needs several.
        first_sample: number of a prompt's first text; texts of other numbers are other texts of the
            same prompts.
        relaxation: what texts are sampled from, such as none, ensemble:0.3 (w is the DRAFT's share)
            or a bundle folder.
        sampling: temperature, top_k, top_p, min_p of both models.
    """

    samples: int = 4
    first_sample: int = 0
    relaxation: str = "ensemble:0.3"
    sampling: Sampling = Sampling()

    def __post_init__(self):
        within(1, MOST_SAMPLES, samples=self.samples)
        within(0, MOST_SAMPLES - self.samples, first_sample=self.first_sample)
        check_filters(self.sampling)
        if self.sampling.greedy and self.samples > 1 and parse(self.relaxation).name != "coin":
            raise ValueError(
                f"the {self.samples} `samples` of a prompt would be the same text at temperature 0,"
                " where nothing is drawn; give --samples 1, or a relaxation coin:0.3, which draws"
            )


@dataclass(frozen=True)
class Stored:
    """What is stored of a text, and how many texts a file holds.

    Args:
        hidden: also store the last hidden states of both models, float16.
        store_logits: also store the log-probabilities of this many tokens, for training with
            `blend: logits`.
        unit: prompts per shard; unit x samples texts are decoded together.
    """

    hidden: bool = False
    store_logits: int = 0
    unit: int = 32

    def __post_init__(self):
        within(1, unit=self.unit)
        within(0, store_logits=self.store_logits)


def gather_traces(
    run: SharedRun, models: Models, prompts: SplitPrompts, rollouts: Rollouts, stored: Stored
) -> Path:
    """Sample texts under a relaxation and store what a head needs to learn from them; a folder that
    was begun with the same options is continued.
    """
    within(0, MOST_SEED, seed=prompts.seed)
    folder = run.folder(MANIFEST)
    parse(rollouts.relaxation)
    run.use_threads()
    pair = models.load()
    relaxer = load_relaxer(rollouts.relaxation, pair, rollouts.sampling)
    task = prompts.load()
    new_tokens = prompts.max_new_tokens or task.max_new_tokens
    most = room(pair, new_tokens)
    encoded = task.encode_all(pair.tokenizer, prompts.max_prompt_tokens, most)
    check_prompts(pair, dict(enumerate(encoded)), new_tokens)
    settings = {
        **pair.settings,
        "sampling": vars(rollouts.sampling),
        "relaxation": rollouts.relaxation,
        "seed": prompts.seed,
        "prompts": len(encoded),
        "samples": rollouts.samples,
        "first_sample": rollouts.first_sample,
        "unit": stored.unit,
        "max_prompt_tokens": prompts.max_prompt_tokens,
        "max_new_tokens": new_tokens,
        "hidden": stored.hidden,
        "store_logits": stored.store_logits,
        **task.settings,
        "prompts_sha256": checksum(encoded),
        "dtype": str(pair.target.dtype),
        "device": str(pair.target.device),
        "threads": run.threads,
        "versions": versions(SCORING),
    }
    rule = relaxer.rule
    if rule.blend == "logits":  # a bundle's card says so, and training must know
        settings["relaxation"] = str(rule)
    if head := head_sha256(rule.folder):
        settings["gate"] = head  # texts of two heads must not be mixed under one name
    settings["contents"] = contents([rule])
    sampler = Sampler(
        pair, relaxer, rollouts.sampling, new_tokens, task.stop, stored.hidden, stored.store_logits
    )
    return _Gathering(ShardFolder(folder, settings), sampler, task, encoded).run()


class _Gathering:
    """One process's part of a folder of traces."""

    def __init__(self, shards: ShardFolder, sampler: Sampler, task: Task, prompts: list[list[int]]):
        self.shards, self.settings, self.sampler = shards, shards.settings, sampler
        self.task, self.prompts = task, prompts

    def run(self) -> Path:
        shards, folder = self.shards, self.shards.folder
        with folder.held():
            missing = shards.begin(lambda entry, whole: read_shard(folder.path, entry, whole))
            if missing:
                print(self._estimate(len(missing)))
                self._gather(missing)
            else:
                print(f"{folder.path}: traces are complete, nothing to gather")
            shards.finish()
        return folder.path

    def _estimate(self, units: int) -> str:
        s, out = self.settings, self.shards.folder.path
        texts = min(units * s["unit"], s["prompts"]) * s["samples"]
        numbers = s["hidden"] * (s["target"]["hidden_size"] + s["draft"]["hidden_size"])
        each = bytes_per_token(numbers, s["store_logits"])
        most = texts * s["max_new_tokens"] * each
        free = shutil.disk_usage(out).free
        warning = "" if most < free else f"; only {free / 1e6:,.0f} MB are free there"
        return (
            f"{s['task']}: {texts} texts of at most {s['max_new_tokens']} tokens at {each} bytes a"
            f" token: at most {most / 1e6:,.1f} MB in {out}{warning}"
        )

    def _gather(self, missing: list[range]) -> None:
        shards, share = self.shards, len(self.shards.share)
        with Progress("gather", share, share - len(missing)) as progress:
            for unit in missing:
                shard = self._unit(unit)
                shards.add(write_shard(shards.folder.path, shards.number(unit), shard))
                progress.add(tokens=shard.tokens)
        print(
            f"gathered {progress.tokens} tokens in {progress.seconds:.1f} s, {progress.rate}"
            " (sampled tokens, the end token included)"
        )

    def _unit(self, unit: range) -> Shard:
        """Sample and score one unit of prompts."""
        samples, seed = self.settings["samples"], self.settings["seed"]
        begin = self.settings["first_sample"]
        texts = self.sampler.run(
            {number: self.prompts[number] for number in unit},
            samples,
            lambda prompt, sample: (seed << 44) ^ (prompt << 16) ^ (begin + sample),
        )
        owners = [number for number in unit for _ in range(samples)]
        examples = self.task.examples
        rewards = [
            self._reward(text, examples[owner]) for text, owner in zip(texts, owners, strict=True)
        ]
        return as_shard(texts, owners, [begin + i % samples for i in range(len(texts))], rewards)

    def _reward(self, text: Sample, example: Example) -> float:
        if not self.task.scores_text:
            return mean_log_probability(text.columns["target_prob"].tolist())
        return self.task.score(self.sampler.stops.cut(text.tokens), example)


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
