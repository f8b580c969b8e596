"""Gather traces: prompts -> sampled texts under a relaxation, their rewards, and the scalars a head
is trained on.

Work is cut into fixed units of prompts, one shard file each, decoded with a fixed batch and thread
count, so that
floating point repeats: a run that was killed and started again ends with the same bytes. Several
processes may share a folder (`num_shards`, `shard_index`, by default from the launcher's
environment); the last to finish writes the manifest, which equals that of a single process.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ..files import exclusive, sha256, versions, within
from ..runtime.completion import cut
from ..runtime.groups import Models, SharedRun
from ..runtime.model import Model, Pair
from ..runtime.relaxer import load_relaxer
from ..runtime.rollouts import Sample, Sampler
from ..runtime.sampling import Sampling
from ..verifier.relax import parse
from .columns import bytes_per_token
from .scores import mean_log_probability
from .selection import SplitPrompts
from .tasks import Task
from .traces import MANIFEST, Shard, read_manifest, read_shard, write_manifest, write_shard

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
    """Sample texts under a relaxation and store what a head needs to learn from them; the folder."""
    within(0, MOST_SEED, seed=prompts.seed)
    num_shards, shard_index = run.share()
    relaxation, sampling = rollouts.relaxation, rollouts.sampling
    parsed = parse(relaxation)
    run.use_threads()
    pair = models.load()
    relaxer = load_relaxer(parsed, pair, sampling)
    if relaxer.rule.blend == "logits":  # which a bundle's card says, and training must know
        relaxation = str(relaxer.rule)
    task = prompts.load()
    new_tokens = prompts.max_new_tokens or task.max_new_tokens
    settings = {
        "target": _described(pair.target),
        "draft": _described(pair.draft),
        "tokenizer": pair.tokenizer_hash,
        "vocab": pair.vocab,
        "sampling": vars(sampling),
        "relaxation": relaxation,
        "task": prompts.task,
        "source": task.source,
        "split": prompts.split,
        "metric": task.metric,
        "seed": prompts.seed,
        "prompts": len(task.examples),
        "samples": rollouts.samples,
        "first_sample": rollouts.first_sample,
        "unit": stored.unit,
        "max_prompt_tokens": prompts.max_prompt_tokens,
        "max_new_tokens": new_tokens,
        "hidden": stored.hidden,
        "store_logits": stored.store_logits,
        "dtype": str(pair.target.dtype),
        "device": str(pair.target.device),
        "threads": run.threads,
        "versions": versions(),
    }
    if parsed.folder and (head := parsed.folder / "head.safetensors").is_file():
        settings["gate"] = sha256(head)  # texts of two heads must not be mixed under one name
    sampler = Sampler(
        pair, relaxer, sampling, new_tokens, task.stop, stored.hidden, stored.store_logits
    )
    out = Path(run.out)
    lock = out if num_shards == 1 else out / f".worker-{shard_index}-of-{num_shards}"
    with exclusive(lock):
        return _Gathering(out, settings, sampler, task, num_shards, shard_index).run()


def _described(model: Model) -> dict:
    return {"name": model.name, "hash": model.hash, "hidden_size": model.hidden_size}


class _Gathering:
    """One process's part of a folder of traces."""

    def __init__(
        self,
        out: Path,
        settings: dict,
        sampler: Sampler,
        task: Task,
        num_shards: int,
        shard_index: int,
    ):
        self.out, self.settings, self.sampler, self.task = out, settings, sampler, task
        self.num_shards = num_shards
        units = -(-len(task.examples) // settings["unit"])
        self.units = range(shard_index, units, num_shards)
        self.name = MANIFEST if num_shards == 1 else f"manifest.{shard_index}-of-{num_shards}.json"
        self.entries: dict[int, dict] = {}

    def run(self) -> Path:
        self._resume()
        missing = [unit for unit in self.units if unit not in self.entries]
        if not missing:
            print(f"{self.out}: traces are complete, nothing to gather")
        else:
            print(self._estimate(len(missing)))
            self._gather(missing)
        self._write(complete=True)
        self._merge()
        return self.out

    def _resume(self) -> None:
        """Keep the shards of an earlier run with the same settings; refuse other settings, name
        damaged shards.
        """
        if not (self.out / self.name).is_file():
            return
        manifest = read_manifest(self.out, incomplete=True, name=self.name)
        for key, value in self.settings.items():
            if manifest.get(key) != value:
                raise ValueError(
                    f"{self.out} was gathered with {key} {manifest.get(key)!r}, now it is"
                    f" {value!r}; choose another --out or delete the folder"
                )
        for entry in manifest["shards"]:
            try:
                read_shard(self.out, entry, manifest)
            except (ValueError, OSError) as error:
                print(f"gathering anew: {error}")
                continue
            self.entries[int(entry["file"].removeprefix("shard-").split(".")[0])] = entry

    def _estimate(self, units: int) -> str:
        s = self.settings
        texts = min(units * s["unit"], s["prompts"]) * s["samples"]
        numbers = s["hidden"] * (s["target"]["hidden_size"] + s["draft"]["hidden_size"])
        each = bytes_per_token(numbers, s["store_logits"])
        most = texts * s["max_new_tokens"] * each
        self.out.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.out).free
        warning = "" if most < free else f"; only {free / 1e6:,.0f} MB are free there"
        return (
            f"{s['task']}: {texts} texts of at most {s['max_new_tokens']} tokens at {each} bytes a"
            f" token: at most {most / 1e6:,.1f} MB in {self.out}{warning}"
        )

    def _gather(self, missing: list[int]) -> None:
        from ..runtime.progress import bar

        began, tokens = time.perf_counter(), 0
        with bar() as progress:
            step = progress.add_task("gather", total=len(self.units), completed=len(self.entries))
            for unit in missing:
                shard = self._unit(unit)
                self.entries[unit] = write_shard(self.out, unit, shard)
                self._write(complete=False)
                tokens += shard.tokens
                rate = f"{tokens / (time.perf_counter() - began):,.0f} tokens/s"
                progress.update(step, advance=1, description=f"gather {rate}")
                if progress.disable:
                    print(
                        f"shard {unit}: {len(self.entries)}/{len(self.units)}, {rate}", flush=True
                    )
        seconds = time.perf_counter() - began
        print(
            f"gathered {tokens} tokens in {seconds:.1f} s, {rate} (sampled tokens, the end token"
            " included)"
        )

    def _unit(self, unit: int) -> Shard:
        """Sample and score one unit of prompts."""
        size, samples, sampler = self.settings["unit"], self.settings["samples"], self.sampler
        first = unit * size
        examples = self.task.examples[first : first + size]
        limit = min(self.settings["max_prompt_tokens"], room(sampler.pair, sampler.max_new_tokens))
        prompts = {
            first + i: self.task.encode(e, sampler.pair.tokenizer, limit)
            for i, e in enumerate(examples)
        }
        seed, begin = self.settings["seed"], self.settings["first_sample"]
        texts = sampler.run(
            prompts,
            samples,
            lambda prompt, sample: (seed << 44) ^ (prompt << 16) ^ (begin + sample),
        )
        rewards = [self._reward(text, examples[i // samples]) for i, text in enumerate(texts)]
        names = [name for name in prompts for _ in range(samples)]
        return as_shard(texts, names, [begin + i % samples for i in range(len(texts))], rewards)

    def _reward(self, text: Sample, example) -> float:
        if not self.task.scores_text:
            return mean_log_probability(text.columns["target_prob"].tolist())
        answer = self.sampler.pair.tokenizer.decode(text.tokens, skip_special_tokens=True)
        return self.task.score(cut(answer, self.task.stop), example)

    def _write(self, complete: bool) -> None:
        shards = [self.entries[unit] for unit in sorted(self.entries)]
        write_manifest(
            self.out, {"complete": complete, **self.settings, "shards": shards}, self.name
        )

    def _merge(self) -> None:
        """Where every process has finished, write the manifest of the whole."""
        if self.num_shards == 1:
            return
        parts = [f"manifest.{i}-of-{self.num_shards}.json" for i in range(self.num_shards)]
        if not all((self.out / part).is_file() for part in parts):
            return
        manifests = [read_manifest(self.out, incomplete=True, name=part) for part in parts]
        if all(manifest["complete"] for manifest in manifests):
            shards = sorted(
                (entry for m in manifests for entry in m["shards"]), key=lambda entry: entry["file"]
            )
            # Two processes may end at the same moment: each writes a file of its own, and either
            # may come last.
            whole = {"complete": True, **self.settings, "shards": shards}
            os.replace(write_manifest(self.out, whole, f"{self.name}.whole"), self.out / MANIFEST)


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
