"""Traces as batches for training: whole texts, padded to the longest of the batch.

The scalars of all texts stay in memory (about 80 bytes a token); hidden states (2 bytes a number,
the bulk of a trace) stay on disk and are read text by text. The order of an epoch is a pure
function of (seed, epoch), so a resumed run sees the same batches. Held-out prompts are a pure
function of the seed alone, the same in every folder of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from ..verifier.relax import parse
from .columns import COLUMNS, batched
from .importance import harm
from .traces import Shard, read_manifest, read_shard

SCALARS, LOGITS, TOKENS = batched(), batched("logits"), batched("tokens")
HARM = "harm"  # what the labels say of it
PADDED = {name: COLUMNS[name].padding for name in (*SCALARS, *batched("hidden"), *LOGITS, *TOKENS)}
PADDED[HARM] = torch.nan


class Texts(Dataset):
    """The texts of one or several folders of traces, S in number.

    Item i is a dict of the columns that training reads [T, ...], hidden states and stored
    log-probabilities among them if asked for, of the numbers in `per_text` [], and of `counts` [].
    Under DDP a rank may have no text left for the last batch. It gets a padding item, index ~i,
    which is a copy of text i with counts=False; the loss leaves it out.

    reward: shard -> [S] what its texts earned. labels: whether labels of importance are not read,
        read where there are some (as `harm`, [X] in [0, 1] or NaN), or needed in every folder.
    tokens: whether the classes of tokens are read.

    prompt, folder, length, reward: [S] int64, float32 the reward. group: [S] int64, equal for the
    texts of one prompt in one folder. start: [S] first position of a text. substituted: [X] bool.
    per_text: {name: [S]}, numbers that belong into the items.
    """

    def __init__(
        self,
        folders: list[str],
        reward: Callable[[Shard], Tensor],
        hidden: bool = False,
        logits: bool = False,
        labels: Literal["no", "some", "all"] = "no",
        tokens: bool = False,
    ):
        self._reward, self._hidden, self._logits = reward, hidden, logits
        self._kept = (*SCALARS, *LOGITS * logits, *TOKENS * tokens)
        self._tokens = tokens
        manifests = [read_manifest(folder) for folder in folders]
        bare = [
            folder for folder, each in zip(folders, manifests, strict=True) if not each.get("label")
        ]
        if labels == "all" and bare:
            raise ValueError(
                f"{bare[0]} holds no labels of importance, which this objective learns from; gather"
                " with --label counterfactual, or train by attribution"
            )
        self._labels = labels != "no" and len(bare) < len(folders)
        # The file of every text and its first position there, for hidden states.
        self._where: list[tuple[Path, int]] = []
        self._files: dict[Path, object] = {}
        parts = [
            part
            for number, folder in enumerate(folders)
            for part in self._read(number, folder, manifests[number])
        ]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self._labels:
            self._kept = (*self._kept, HARM)
        self._columns = {name: columns[name] for name in self._kept}
        self.prompt, self.folder, self.length = (
            columns[name] for name in ("prompt", "folder", "length")
        )
        self.reward, self.substituted = columns["reward"], columns["substituted"]
        self.start = self.length.cumsum(0) - self.length
        self.group = self.prompt + (self.folder << 40)
        self.per_text: dict[str, Tensor] = {}

    def _read(self, number: int, folder: str, manifest: dict) -> Iterator[dict[str, Tensor]]:
        """The columns of every shard of folder `number`, and what is known of its texts."""
        for entry in manifest["shards"]:
            file = Path(folder) / entry["file"]
            shard = read_shard(folder, entry, manifest)
            _refuse_unusable(file, shard, manifest, self._hidden, self._logits, self._tokens)
            harmful = {HARM: _harm(shard, manifest)} if self._labels else {}
            self._where += [(file, start) for start in shard.start[:-1].tolist()]
            yield {
                **{name: getattr(shard, name) for name in self._kept},
                "length": shard.start.diff(),
                "reward": self._reward(shard),
                "prompt": shard.prompt,
                "folder": torch.full_like(shard.prompt, number),
                **harmful,
            }

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        counts = index >= 0
        index = index if counts else ~index
        start, length = int(self.start[index]), int(self.length[index])
        item = {name: self._columns[name][start : start + length] for name in self._kept}
        if self._hidden:
            file, first = self._where[index]
            item["hidden"] = self._open(file).get_slice("hidden")[first : first + length]
        item |= {name: column[index] for name, column in self.per_text.items()}
        return item | {"counts": torch.tensor(counts)}

    @property
    def harm(self) -> Tensor:
        """[X] what the labels say of harm, in [0, 1] or NaN."""
        return self._columns[HARM]

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
    """A batch of B texts padded to T positions: what an item holds as [B, T, ...] or [B], and mask
    [B, T] bool.
    """
    length = torch.tensor([len(item["tv"]) for item in items])
    batch = {
        name: pad_sequence(
            [item[name] for item in items], batch_first=True, padding_value=PADDED[name]
        )
        for name in PADDED
        if name in items[0]
    }
    batch["mask"] = torch.arange(int(length.max())) < length[:, None]
    numbers = [name for name in items[0] if name not in PADDED]
    return batch | {name: torch.stack([item[name] for item in items]) for name in numbers}


class Order(Sampler):
    """The texts of one process, out of `index` [S], in an order that is a pure function of (seed,
    epoch).

    A batch is `batch` texts over all processes. Rank r of w takes texts r, r + w, r + 2w, ... of
    the epoch's order. A rank without a text for the last batch gets a padding item (see `Texts`),
    because processes step together. With seed=None the order is not shuffled. Lightning calls
    `set_epoch`.
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


def _harm(shard: Shard, manifest: dict) -> Tensor:
    """[X] the harm that a shard's labels say, NaN where there is none."""
    if shard.label is None:
        return torch.full_like(shard.tv, torch.nan)
    return harm(shard.label, manifest["label"])


def held_out(prompts: int, share: float, seed: int) -> Tensor:
    """The prompts [R] that are never trained on: `share` of `prompts`, at least one unless share is
    0, never all.
    """
    count = min(max(round(prompts * share), 1 if share else 0), prompts - 1)
    return torch.randperm(prompts, generator=torch.Generator().manual_seed(seed))[:count]


def check_share(validation: float) -> None:
    """ValueError unless there is something to train on and something held out."""
    if not 0 < validation < 1:
        raise ValueError(
            f"`validation` must be in (0, 1), the share of prompts held out, got {validation}"
        )


def parted(prompt: Tensor, prompts: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """(indices of the texts to train on, of those held out); prompt: [S] of every text."""
    held = torch.isin(prompt, held_out(prompts, share, seed))
    return (~held).nonzero().squeeze(1), held.nonzero().squeeze(1)


def _refuse_unusable(
    file: Path, shard: Shard, manifest: dict, hidden: bool, logits: bool, tokens: bool
) -> None:
    if shard.weight.isnan().any():
        raise ValueError(
            f"{file} was gathered with the relaxation {manifest['relaxation']!r}, which is not a"
            " blend of both rows there, so it has no weight to learn from; gather with"
            " --relaxation ensemble:0.3, at temperature 0 with coin:0.3, or with none"
        )
    if hidden and shard.hidden is None:
        raise ValueError(
            f"{file} holds no hidden states, which this head reads; gather with --hidden true, or"
            " train one with --model.features logits"
        )
    if tokens and shard.token_features is None:
        raise ValueError(
            f"{file} holds no classes of tokens, which this head reads: an earlier version wrote"
            " it; gather again, or train one with --model.features logits"
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
