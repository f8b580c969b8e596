"""Traces under Lightning: the texts to train on and those held out, with what they earn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.batches import Order, Texts, collate, parted
from ..data.traces import MANIFEST, read_manifest
from ..files import sha256
from ..verifier.head import KINDS
from .losses import OBJECTIVES
from .rewards import REWARDS, compared

COUNT = re.compile(r"^\d+ (of \d+ )?")  # how many rows a source gave
# What one head can be trained for: every folder must have the same.
SHARED = (
    "target",
    "draft",
    "tokenizer",
    "vocab",
    "sampling",
    "task",
    "source",
    "split",
    "seed",
)


@dataclass(frozen=True)
class TraceOptions:
    """What a head is trained on.

    Args:
        traces: folder that `diversed gather` wrote, or a list of them (rounds of one pair of models
            and one task).
        batch: texts in a step, shared out to the processes if there are several.
        validation: share of the prompts held out; their texts are never trained on.
        reward: task, the task's score; or likelihood, which needs no references: the mean
            log-probability of a text's tokens under the target, nats.
    """

    traces: str | list[str]
    batch: int = 8
    validation: float = 0.1
    reward: Literal["task", "likelihood"] = "task"


class TraceModule(LightningDataModule):
    """Training and held-out texts from folders of traces.

    options: where the traces lie, how many texts a step has and how many are held out.
    seed:    decides the held-out prompts and the order of the texts.
    hidden:  read the hidden states, for a head that sees them.
    logits:  read the stored log-probabilities, for the blend of logits.
    labels:  whether labels of importance are not read, read where there are some, or needed.
    tokens:  read the classes of tokens, for a head that sees them.
    """

    def __init__(
        self,
        options: TraceOptions,
        seed: int = 0,
        hidden: bool = False,
        logits: bool = False,
        labels: Literal["no", "some", "all"] = "no",
        tokens: bool = False,
    ):
        super().__init__()
        if options.batch < 1:
            raise ValueError(f"`batch` must be at least 1 text, got {options.batch}")
        if not 0 <= options.validation < 1:
            raise ValueError(
                "`validation` must be in [0, 1), the share of prompts held out, got"
                f" {options.validation}"
            )
        traces = options.traces
        self.folders = [traces] if isinstance(traces, str | Path) else list(traces)
        if not self.folders:
            raise ValueError("`traces` must name at least one folder of traces, got none")
        if options.reward not in REWARDS:
            raise ValueError(f"`reward` must be {' or '.join(REWARDS)}, got {options.reward!r}")
        self.options, self.seed, self.hidden, self.logits = options, seed, hidden, logits
        self.labels, self.tokens = labels, tokens
        self.manifests = [read_manifest(folder) for folder in self.folders]
        self.checksums = [sha256(Path(folder) / MANIFEST) for folder in self.folders]
        _refuse_mixture(self.folders, self.manifests)
        counts = {manifest.get("store_logits", 0) for manifest in self.manifests} - {0}
        if logits and len(counts) > 1:
            raise ValueError(
                f"the folders of `traces` store {sorted(counts)} log-probabilities a token,"
                " expected one number; gather all with the same --store_logits"
            )
        self.texts: Texts | None = None

    @classmethod
    def of(
        cls, options: TraceOptions, seed: int, features: str, blend: str, objective: str
    ) -> TraceModule:
        """With what a head of these features reads, trained for this blend by this objective."""
        reads, labels = KINDS[features], OBJECTIVES[objective].labels
        return cls(options, seed, "hidden" in reads, blend == "logits", labels, "tokens" in reads)

    @property
    def manifest(self) -> dict:
        """The manifest of the newest folder; models, tokenizer and task are the same in all."""
        return self.manifests[-1]

    @property
    def draft_hidden(self) -> int:
        return self.manifest["draft"]["hidden_size"]

    @property
    def target_hidden(self) -> int:
        return self.manifest["target"]["hidden_size"]

    def setup(self, stage: str | None = None) -> None:
        if self.texts is not None:
            return
        reward = REWARDS[self.options.reward]
        self.texts = Texts(self.folders, reward, self.hidden, self.logits, self.labels, self.tokens)
        self.texts.per_text = compared(self.texts)
        validation = self.options.validation
        prompts = max(manifest["prompts"] for manifest in self.manifests)
        parts = parted(self.texts.prompt, prompts, validation, self.seed)
        self.train_index, self.held_index = parts
        if not len(self.train_index):
            raise ValueError(
                f"`validation` {validation} holds out every prompt of {self.folders[0]};"
                " choose a smaller one"
            )

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train_index, self.seed)

    def val_dataloader(self) -> DataLoader | list:
        return self._loader(self.held_index) if len(self.held_index) else []

    def _loader(self, index: Tensor, seed: int | None = None) -> DataLoader:
        world, rank = (
            (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        )
        order = Order(index, seed, self.options.batch, world, rank)
        return DataLoader(self.texts, order.each, sampler=order, collate_fn=collate)

    def sample_inputs(self, most: int = 16384) -> tuple[Tensor, Tensor | None, Tensor]:
        """Inputs of the head at up to about `most` evenly spaced training positions, to fit its
        standardisation.

        Returns features [X, 12], hidden [X, H] or None, weight [X] (the draft's share they were
        sampled with).
        """
        stride = max(1, int(self.texts.length[self.train_index].sum()) // most)
        parts: dict[str, list[Tensor]] = {"features": [], "hidden": [], "weight": []}
        skip = 0
        for index in self.train_index.tolist():
            item = self.texts[index]
            for name in parts:
                if name in item:
                    parts[name].append(item[name][skip::stride].clone())
            skip = (skip - len(item["tv"])) % stride
        features, hidden, weight = (torch.cat(part) if part else None for part in parts.values())
        return features, hidden, weight


def _same(key: str, manifest: dict) -> object:
    """What must be the same in all folders. A source may have given more prompts: fewer are the
    first of them.
    """
    value = manifest.get(key)
    return COUNT.sub("", value) if key == "source" and isinstance(value, str) else value


def _refuse_mixture(folders: list[str], manifests: list[dict]) -> None:
    """Traces of different models, tokenizers or tasks do not train one head."""
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        for key in SHARED:
            if _same(key, manifest) != _same(key, first):
                raise ValueError(
                    f"{folder} and {folders[0]} differ in `{key}` ({manifest.get(key)} and"
                    f" {first.get(key)}); train on traces of one pair of models, one task and one"
                    " order of its prompts"
                )
