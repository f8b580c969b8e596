"""Traces as batches for training: whole texts, padded to the longest of the batch.

The scalars of all texts stay in memory (about 80 bytes a token); hidden states (2 bytes a number,
the bulk of a trace) stay on disk and are read text by text. The order of an epoch is a pure
function of (seed, epoch), so a resumed run sees the same batches. Held-out prompts are a pure
function of the seed alone, the same in every folder of traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pytorch_lightning import LightningDataModule
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from ..files import sha256
from ..verifier.relax import parse
from .columns import COLUMNS, batched
from .traces import MANIFEST, Shard, read_manifest, read_shard

PER_TEXT = ("reward", "advantage", "base", "graded", "counts")
SCALARS, LOGITS = batched(), batched("logits")
PADDED = (*SCALARS, *batched("hidden"), *LOGITS)


class Texts(Dataset):
    """The texts of one or several folders of traces.

    Item i is a dict of target_prob, draft_prob, tv, weight, substituted [T], features [T, 12],
    hidden [T, H] float16 and the log-probabilities of `LOGITS` (if asked for), reward, advantage,
    base, graded and counts []. The advantage is the reward minus the mean reward of the prompt's
    texts in the same folder; the base is what the target's own text of that prompt is expected to
    earn; graded says whether any reward is neither 0 nor 1; counts is False for the item ~i, which
    is text i in the hands of a process that has none.
    """

    def __init__(
        self, folders: list[str], hidden: bool = False, logits: bool = False, reward: str = "task"
    ):
        self._files: dict[Path, object] = {}
        self._kept = (*SCALARS, *(LOGITS if logits else ()))
        columns: dict[str, list[Tensor]] = {
            name: [] for name in (*self._kept, "start", "length", "reward", "prompt", "group")
        }
        self._where: list[
            tuple[Path, int]
        ] = []  # of every text: its file and first position there, for hidden states
        self._hidden, offset = hidden, 0
        for number, folder in enumerate(folders):
            manifest = read_manifest(folder)
            for entry in manifest["shards"]:
                shard = read_shard(folder, entry, manifest)
                _refuse_unusable(Path(folder) / entry["file"], shard, manifest, hidden, logits)
                for name in self._kept:
                    columns[name].append(getattr(shard, name))
                columns["start"].append(shard.start[:-1] + offset)
                columns["length"].append(shard.start.diff())
                columns["reward"].append(shard.reward if reward == "task" else likelihood(shard))
                columns["prompt"].append(shard.prompt)
                columns["group"].append(shard.prompt + (number << 40))
                self._where += [
                    (Path(folder) / entry["file"], int(start)) for start in shard.start[:-1]
                ]
                offset += shard.tokens
        self._columns = {name: torch.cat(parts) for name, parts in columns.items()}
        self.prompt, self.length, self.reward = (
            self._columns[name] for name in ("prompt", "length", "reward")
        )
        self.folder = self._columns["group"] >> 40  # which of the folders a text is from
        self.advantage = advantage(self.reward, self._columns["group"])
        starts = self._columns["start"]
        self.base = base(
            self.reward, self.prompt, untouched(self._columns["substituted"], starts, self.length)
        )
        self.graded = ((self.reward != 0) & (self.reward != 1)).any().expand(len(self.reward))

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index, counts = (index, True) if index >= 0 else (~index, False)
        start, length = int(self._columns["start"][index]), int(self.length[index])
        item = {name: self._columns[name][start : start + length] for name in self._kept}
        if self._hidden:
            file, first = self._where[index]
            item["hidden"] = self._open(file).get_slice("hidden")[first : first + length]
        item |= {name: getattr(self, name)[index] for name in PER_TEXT if name != "counts"}
        return item | {"counts": torch.tensor(counts)}

    def speed(self, chosen: Tensor) -> tuple[float, float]:
        """(step acceptance, expected substitutions a text) of the texts `chosen` [S] bool under
        their own weights.
        """
        at = torch.repeat_interleave(chosen, self.length)
        weight, tv = (self._columns[name][at].double() for name in ("weight", "tv"))
        return float((1 - (1 - weight) * tv).mean()), float((weight * tv).sum() / chosen.sum())

    def _open(self, file: Path):
        """A shard's file, opened once and mapped into memory."""
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        return self._files[file]


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of B texts padded to T positions: what an item holds with axes [B, T, ...], and mask
    [B, T] bool.
    """
    length = torch.tensor([len(item["tv"]) for item in items])
    batch = {
        name: pad_sequence(
            [item[name] for item in items], batch_first=True, padding_value=COLUMNS[name].padding
        )
        for name in PADDED
        if name in items[0]
    }
    batch["mask"] = torch.arange(int(length.max())) < length[:, None]
    return batch | {name: torch.stack([item[name] for item in items]) for name in PER_TEXT}


class Order(Sampler):
    """This process's texts out of `index` [S] in an order that is a pure function of (seed, epoch).

    A batch is `batch` texts over all processes; of each, process `rank` of `world` has every
    world-th from the rank-th on. Where the last batch has none for it, it gets a text that does not
    count (the complement of an index): processes step together. No seed leaves the order as it is.
    Lightning calls `set_epoch`.
    """

    def __init__(
        self, index: Tensor, seed: int | None = None, batch: int = 1, world: int = 1, rank: int = 0
    ):
        assert batch % world == 0, f"{world} processes cannot share {batch} texts"
        self.index, self.seed, self.epoch = index, seed, 0
        self.each, self.world, self.rank = batch // world, world, rank
        self.lacks = len(index[rank::world]) <= (-(-len(index) // batch) - 1) * self.each

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.index[self.rank :: self.world]) + self.lacks

    def __iter__(self):
        order = self.index
        if self.seed is not None:
            generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
            order = order[torch.randperm(len(order), generator=generator)]
        mine = order[self.rank :: self.world].tolist()
        return iter([*mine, ~int(order[0])] if self.lacks else mine)


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
    """

    def __init__(
        self, options: TraceOptions, seed: int = 0, hidden: bool = False, logits: bool = False
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
        if options.reward not in ("task", "likelihood"):
            raise ValueError(f"`reward` must be task or likelihood, got {options.reward!r}")
        self.options, self.seed, self.hidden, self.logits = options, seed, hidden, logits
        self.manifests = [read_manifest(folder) for folder in self.folders]
        self.checksums = [sha256(Path(folder) / MANIFEST) for folder in self.folders]
        _refuse_mixture(self.folders, self.manifests)
        if (
            logits
            and len(
                counts := {manifest.get("store_logits", 0) for manifest in self.manifests} - {0}
            )
            > 1
        ):
            raise ValueError(
                f"the folders of `traces` store {sorted(counts)} log-probabilities a token,"
                " expected one number; gather all with the same --store_logits"
            )
        self.texts: Texts | None = None

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
        self.texts = Texts(self.folders, self.hidden, self.logits, self.options.reward)
        validation = self.options.validation
        prompts = max(manifest["prompts"] for manifest in self.manifests)
        held = held_out(prompts, validation, self.seed)
        mine = torch.isin(self.texts.prompt, held)
        self.train_index, self.held_index = (~mine).nonzero().squeeze(1), mine.nonzero().squeeze(1)
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
        """Inputs of the gate at up to about `most` evenly spaced training positions, to fit its
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


def advantage(reward: Tensor, group: Tensor) -> Tensor:
    """Reward minus the mean reward of its group.

    reward: [S]; group: [S] int64, equal for the texts of one prompt and one gate. Returns [S]. With
    K texts a group the own reward is in the mean, so the expected gradient is (K - 1) / K of the
    true one.
    """
    _, index = torch.unique(group, return_inverse=True)
    count = torch.bincount(index).to(reward.dtype)
    mean = torch.zeros_like(count).index_add(0, index, reward) / count
    return reward - mean[index]


def likelihood(shard: Shard) -> Tensor:
    """[S] float32, the mean log-probability of every text's tokens under the target, nats."""
    logprob = shard.target_prob.double().clamp_min(1e-30).log()
    total = torch.cat([torch.zeros(1, dtype=torch.float64), logprob.cumsum(0)])
    return (total[shard.start].diff() / shard.start.diff()).float()


def untouched(substituted: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """[S] bool: the texts without a substitution, which are the target's own; substituted [X],
    start and length [S].
    """
    total = torch.cat([torch.zeros(1, dtype=torch.int64), substituted.long().cumsum(0)])
    return total[start + length] == total[start]


def base(reward: Tensor, prompt: Tensor, own: Tensor, prior: float = 2.0) -> Tensor:
    """[S] mean reward of the prompt's `own` texts, drawn towards the mean of all such texts as if
    by `prior` of them.

    reward, prompt, own: [S]. Where no text is the target's own, the best reward stands for the
        mean.
    """
    overall = reward[own].mean() if own.any() else reward.max()
    _, index = torch.unique(prompt, return_inverse=True)
    count = torch.full((int(index.max()) + 1,), prior).index_add(0, index, own.to(reward.dtype))
    total = torch.full_like(count, prior * float(overall)).index_add(0, index, reward * own)
    return (total / count)[index]


def held_out(prompts: int, share: float, seed: int) -> Tensor:
    """The prompts [R] that are never trained on: `share` of `prompts`, at least one unless share is
    0, never all.
    """
    count = min(max(round(prompts * share), 1 if share else 0), prompts - 1)
    return torch.randperm(prompts, generator=torch.Generator().manual_seed(seed))[:count]


def _refuse_unusable(file: Path, shard: Shard, manifest: dict, hidden: bool, logits: bool) -> None:
    if shard.weight.isnan().any():
        raise ValueError(
            f"{file} was gathered with the relaxation {manifest['relaxation']!r}, which is not a"
            " blend of both rows, so it has no weight to learn from; gather with --relaxation"
            " ensemble:0.3, or with none"
        )
    if hidden and shard.hidden is None:
        raise ValueError(
            f"{file} holds no hidden states, which this head reads; gather with --hidden true, or"
            " train one with --model.features logits"
        )
    if logits and shard.target_top is None:
        raise ValueError(
            f"{file} holds no log-probabilities, which training for `blend` logits reads; gather"
            " with --store_logits 64"
        )
    if logits != (parse(manifest["relaxation"], recorded=True).blend == "logits"):
        raise ValueError(
            f"{file} was sampled from {manifest['relaxation']!r}, so its texts tell nothing about"
            f" `blend` {'logits' if logits else 'probabilities'}; gather with a relaxation that"
            f" {'ends' if logits else 'does not end'} in ;blend=logits"
        )


def _refuse_mixture(folders: list[str], manifests: list[dict]) -> None:
    """Traces of different models, tokenizers or tasks do not train one head."""
    first = manifests[0]
    for folder, manifest in zip(folders, manifests, strict=True):
        for key in (
            "target",
            "draft",
            "tokenizer",
            "vocab",
            "sampling",
            "task",
            "source",
            "split",
            "seed",
        ):
            if manifest.get(key) != first.get(key):
                raise ValueError(
                    f"{folder} and {folders[0]} differ in `{key}` ({manifest.get(key)} and"
                    f" {first.get(key)}); train on traces of one pair of models, one task and one"
                    " order of its prompts"
                )
