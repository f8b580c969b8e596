"""`diversed reinforce`: REINFORCE as published (DIVERSED, arXiv 2604.07622), with new texts from
the head at every update.

An epoch of the Trainer is one update: `prompts_per_update` prompts are decoded with the head as it
is, and one step is made on the loss of objectives.py, whose ratios are 1 then. Advantages are
rewards minus their mean over the batch, over their standard deviation. The acceptance term is the
paper's sum over a text, unless `acceptance` says mean.

    OUT/settings.json, last.ckpt, metrics.csv   see fit.py; figures also count `generated` tokens
    OUT/head.safetensors, OUT/train.json        as of `diversed train`

An update is a function of the seed, its number and the head before it, so a run that was killed
ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pytorch_lightning import LightningDataModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..data.batches import PADDED, collate
from ..data.gathering import MOST_SAMPLES, MOST_SEED
from ..data.selection import SplitPrompts
from ..data.traces import FORMAT
from ..data.writing import Asked, Writer
from ..files import SCORING, exclusive, read_settings, versions, within
from ..runtime.bundle import HEAD, head_sha256
from ..runtime.groups import Models, Run, check_filters
from ..runtime.relaxer import Relaxer, head_relaxer
from ..runtime.rollouts import Sample
from ..runtime.sampling import Sampling
from ..verifier.relax import parse
from .fit import build_trainer, fit, on_device, quiet, refuse_spread, sentences, settle
from .head_training import write_head_of
from .module import HeadModule, HeadOptions
from .record import RECORD, refuse_other_head


@dataclass(frozen=True)
class Updates:
    """How often, and on what, the head is updated.

    Args:
        updates: steps, each on new texts.
        prompts_per_update: prompts of an update, taken in turns.
        samples: texts of each of them.
        first_weight: the draft's share that the head starts from everywhere.
        sampling: temperature, top_k, top_p, min_p of both models.
    """

    updates: int = 100
    prompts_per_update: int = 8
    samples: int = 4
    first_weight: float = 0.5
    sampling: Sampling = Sampling()

    def __post_init__(self):
        within(1, updates=self.updates, prompts_per_update=self.prompts_per_update)
        within(1, MOST_SAMPLES, samples=self.samples)
        check_filters(self.sampling)
        if not 0 < self.first_weight < 1:
            raise ValueError(f"`first_weight` must lie between 0 and 1, got {self.first_weight}")
        if self.sampling.greedy:
            raise ValueError(
                "REINFORCE needs texts that are drawn, and nothing is drawn at temperature 0; give"
                " --sampling.temperature 1, or train on labels (gather --label counterfactual)"
            )


def reinforce_head(
    run: Run, models: Models, prompts: SplitPrompts, updates: Updates, options: HeadOptions
) -> Path:
    """Train a head on-policy, or continue; the folder it is in."""
    _refuse_other_objectives(options)
    options.check()
    refuse_spread(models.device)
    within(0, MOST_SEED, seed=prompts.seed)
    folder = Path(run.out)
    with quiet(), sentences(), exclusive(folder):
        run.use_threads()
        asked = Asked.load(models, prompts)
        manifest = {
            "format": FORMAT,
            **asked.settings,
            "sampling": vars(updates.sampling),
            "relaxation": f"ensemble:{updates.first_weight}",
        }
        settings = {
            "on_policy": vars(updates) | {"sampling": vars(updates.sampling)},
            **vars(options),
            **manifest,
            "traces_sha256": "",
            "start_sha256": head_sha256(Path(options.start)) if options.start else None,
            "threads": run.threads,
            "versions": versions(("diversed", "torch", "pytorch-lightning", *SCORING)),
        }
        settle(folder, settings, write=False)
        if (folder / RECORD).is_file() and (folder / HEAD).is_file():
            refuse_other_head(folder, read_settings(folder / RECORD))
            print(f"{folder} is already trained; choose another --out to train again")
            return folder
        settle(folder, settings)
        seed_everything(prompts.seed, verbose=False)
        start = manifest["relaxation"]
        stored = {"hidden": options.needs_hidden}
        writer = asked.writer(start, updates.sampling, updates.samples, **stored)
        module = OnPolicyHead(options, writer, updates)
        place = on_device(models.device)
        trainer = build_trainer(folder, max_epochs=updates.updates, log_every_n_steps=1, **place)
        fit(trainer, module, FreshTexts(module), folder)
        write_head_of(folder, module, [], settings, manifest)
    return folder


def _refuse_other_objectives(options: HeadOptions) -> None:
    if options.objective != "reinforce" or options.blend != "probabilities" or options.patience:
        raise ValueError(
            "`diversed reinforce` trains by the objective reinforce for the blend of probabilities"
            f" and without patience, got {options.objective}, {options.blend} and"
            f" {options.patience}; for others gather texts and use `diversed train`"
        )


class OnPolicyHead(HeadModule):
    """A head whose texts are its own.

    writer: decodes and scores texts. updates: how many of them an update has.
    """

    def __init__(self, options: HeadOptions, writer: Writer, updates: Updates):
        pair = writer.sampler.pair
        super().__init__(options, pair.draft.hidden_size, pair.target.hidden_size)
        self.writer, self.updates = writer, updates
        self.spent = 0  # tokens that were generated before the first update
        self.told: dict[str, float] = {}

    def setup(self, stage: str) -> None:
        if self.trainer.ckpt_path is None:
            texts, _ = self._texts(0, self.writer)
            names = texts[0].columns
            columns = {name: torch.cat([text.columns[name] for text in texts]) for name in names}
            self.start_from(columns["features"], columns.get("hidden"), columns["weight"])
            self.spent = sum(len(text.tokens) for text in texts)

    def fresh(self, update: int) -> list[dict[str, Tensor]]:
        """The texts of an update, as items of a batch."""
        sampler = replace(self.writer.sampler, relaxer=self._relaxer())
        writer = replace(self.writer, sampler=sampler)
        texts, owners = self._texts(update, writer)
        rewards = [writer.reward(text, owner) for text, owner in zip(texts, owners, strict=True)]
        self.told = {
            "generated": float(sum(len(text.tokens) for text in texts)),
            "finished": sum(text.finished for text in texts) / len(texts),
        }
        reward = torch.tensor(rewards)
        numbers = {"reward": reward, "advantage": normalised(reward)}
        numbers["counts"] = torch.ones(len(texts), dtype=torch.bool)
        return [
            {name: column for name, column in text.columns.items() if name in PADDED}
            | {name: column[number] for name, column in numbers.items()}
            for number, text in enumerate(texts)
        ]

    def figures(self) -> dict:
        before = self.history[-1]["generated"] if self.history else float(self.spent)
        told = {"generated": before + self.told["generated"], "finished": self.told["finished"]}
        return super().figures() | told

    def line(self, row: dict, epochs: int | None) -> str:
        return (
            f"update {row['epoch']}/{epochs}: reward {row['train_reward']:.4f}, step acceptance"
            f" {row['train_step_acceptance']:.4f}, {row['finished']:.0%} finished, draft's weight"
            f" {row['train_weight_p10']:.2f} / {row['train_weight_p50']:.2f} /"
            f" {row['train_weight_p90']:.2f} (10 / 50 / 90 %), {row['generated']:,.0f} tokens"
            " generated so far"
        )

    def _relaxer(self) -> Relaxer:
        """The relaxation by the head as it is now."""
        sampler = self.writer.sampler
        table = sampler.table if self.head.needs_tokens else None
        return head_relaxer(parse("learned"), self.head, sampler.sampling, table)

    def _prompts(self, update: int) -> dict[int, list[int]]:
        """turn -> the prompts of an update: all prompts in turns, each turn in an order of its own,
        so that an update may end one and begin the next.
        """
        count, taken = len(self.writer.prompts), self.updates.prompts_per_update
        first, chosen = update * taken, {}
        for turn in range(first // count, (first + taken - 1) // count + 1):
            generator = torch.Generator().manual_seed((self.writer.seed << 20) + turn)
            order = torch.randperm(count, generator=generator).tolist()
            begin = first - turn * count
            chosen[turn] = order[max(begin, 0) : begin + taken]
        return chosen

    def _texts(self, update: int, writer: Writer) -> tuple[list[Sample], list[int]]:
        """(the texts of an update, the prompt of each)."""
        samples, texts, owners = writer.samples, [], []
        for turn, prompts in self._prompts(update).items():
            within(0, MOST_SAMPLES - 1, **{"texts of a prompt": (turn + 1) * samples})
            found = replace(writer, first_sample=turn * samples).texts(prompts)
            texts += found[0]
            owners += found[1]
        return texts, owners


def normalised(reward: Tensor) -> Tensor:
    """[S] rewards minus their mean, over their standard deviation; 0 if all are equal."""
    return (reward - reward.mean()) / reward.std(unbiased=False).clamp_min(1e-6)


class FreshTexts(LightningDataModule):
    """One batch an epoch, decoded with the head as it is when the epoch begins."""

    def __init__(self, module: OnPolicyHead):
        super().__init__()
        self.stream = _Stream(module)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.stream, len(self.stream), collate_fn=collate)


class _Stream(IterableDataset):
    def __init__(self, module: OnPolicyHead):
        self.module = module

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from self.module.fresh(self.module.current_epoch)

    def __len__(self) -> int:
        return self.module.updates.prompts_per_update * self.module.writer.samples
