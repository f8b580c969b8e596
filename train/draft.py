"""How a draft is trained on its target's texts: rows of both models at the same positions, a loss,
the module under Lightning.

    kl   KL(target || draft) = sum of target * log(target / draft), nats
    tv   TV(target, draft) = 1/2 sum of |target - draft|, one minus the probability that a drafted
         token is accepted

Both models run over whole texts. Rows over the vocabulary exist for a limited number of positions
at a time, and are computed again where the gradient needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from ..data.batches import Order, check_share, parted
from ..data.tasks import DataOptions, load_task
from ..data.traces import read_manifest, read_shards
from ..data.writing import room
from ..files import Progress, within
from ..runtime.forward import Pair
from ..runtime.sampling import Sampling, probabilities
from .fit import Mean, Training

NUMBERS = 1 << 25  # of one model's rows that exist at once, 128 MiB in float32
WARMUP_STEPS, WEIGHT_DECAY = 10, 0.01


class Texts:
    """The texts of a folder of traces with their prompts in front.

    Item i is (tokens [L] int64, number of tokens of the prompt).
    """

    def __init__(self, folder: Path, pair: Pair, data: DataOptions):
        manifest = read_manifest(folder)
        task = load_task(
            manifest["task"],
            split=manifest["split"],
            limit=manifest["prompts"],
            seed=manifest["seed"],
            data=data,
        )
        most = room(pair, manifest["max_new_tokens"])
        self.prompts = task.encode_all(pair.tokenizer, manifest["max_prompt_tokens"], most)
        self.items, owners = [], []
        for shard in read_shards(folder):
            for text, prompt in zip(
                shard.token.long().split(shard.start.diff().tolist()), shard.prompt, strict=True
            ):
                before = self.prompts[prompt]
                self.items.append((torch.cat([torch.tensor(before), text]), len(before)))
            owners.append(shard.prompt)
        self.owner = torch.cat(owners)  # [S] the prompt of every text

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index]

    def loader(self, index: Tensor, batch: int, seed: int | None = None) -> DataLoader:
        """Batches of the texts `index` [S], in an order that is a function of (seed, epoch)."""
        return DataLoader(self, batch, sampler=Order(index, seed), collate_fn=collate)


def collate(items: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """tokens [B, L] int64, and mask [B, L - 1] bool, True at the positions that chose a token of
    the text.

    Texts are padded behind their end, which no position before it sees: they need no mask of
    attention.
    """
    tokens = pad_sequence([tokens for tokens, _ in items], batch_first=True)
    position = torch.arange(tokens.shape[1] - 1)
    first, last = torch.tensor([(before - 1, len(tokens) - 1) for tokens, before in items]).T
    return {"tokens": tokens, "mask": (position >= first[:, None]) & (position < last[:, None])}


def divergence(target: Tensor, draft: Tensor) -> Tensor:
    """[X] KL(target || draft), nats, of logits [X, V]."""
    target, draft = target.log_softmax(-1), draft.log_softmax(-1)
    return (target.exp() * (target - draft)).sum(-1)


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """[X] TV(target, draft) of logits [X, V]."""
    return 0.5 * (target.softmax(-1) - draft.softmax(-1)).abs().sum(-1)


LOSSES = {"kl": divergence, "tv": total_variation}


def compare(
    target, draft, batch: dict[str, Tensor], vocab: int, loss: str, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """(loss, 1 - TV of the rows that sampling makes), sums over the masked positions of a batch;
    see `collate`.

    target, draft: Hugging Face modules; the first loss has a gradient for the weights of the draft
        that train.
    vocab: size of the vocabulary that both share.
    """
    with torch.no_grad():
        theirs = _hidden(target, batch["tokens"])[:, :-1][batch["mask"]]
    ours = _hidden(draft, batch["tokens"])[:, :-1][batch["mask"]]
    temperature = sampling.temperature or 1.0

    def part(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            there = logits(target, theirs, vocab)
        here = logits(draft, ours, vocab)
        with torch.no_grad():
            accepted = 1 - 0.5 * (
                probabilities(there, sampling) - probabilities(here, sampling)
            ).abs().sum(-1)
        return LOSSES[loss](there / temperature, here / temperature).sum(), accepted.sum()

    size = max(1, NUMBERS // vocab)
    parts = [
        checkpoint(part, *hidden, use_reentrant=False, preserve_rng_state=False)
        for hidden in zip(theirs.split(size), ours.split(size), strict=True)
    ]
    losses, accepted = zip(*parts, strict=True)
    return torch.stack(losses).sum(), torch.stack(accepted).sum()


def _hidden(module, tokens: Tensor) -> Tensor:
    """[B, L, H] after the final norm."""
    return module.base_model(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state


def logits(module, hidden: Tensor, vocab: int) -> Tensor:
    """[X, V] float32 of hidden states [X, H]."""
    rows = module.get_output_embeddings()(hidden)[..., :vocab].float()
    cap = getattr(module.config.get_text_config(), "final_logit_softcapping", None)
    return torch.tanh(rows / cap) * cap if cap else rows


@torch.no_grad()
def refuse_other_output(module, name: str, tokens: Tensor) -> None:
    """Some families scale their rows in a way of their own, which `logits` would miss."""
    expected = module(input_ids=tokens).logits.float()
    found = logits(module, _hidden(module, tokens), expected.shape[-1])
    # In bfloat16 the same product may be rounded twice in different ways.
    if not torch.allclose(found, expected, rtol=0, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"{name} computes its rows from hidden states by more than its output layer; it is not"
            " supported"
        )


@dataclass(frozen=True)
class Fitting:
    """How a draft is trained.

    Args:
        loss: kl, KL(target || draft); or tv, total variation, which is what verification rejects
            by.
        epochs: most passes over the texts.
        batch: texts in a step.
        lr: highest learning rate of AdamW, after a warm-up; then a cosine to 0 at the last step.
        validation: share of the prompts held out; acceptance on them decides which epoch's weights
            are kept.
        patience: stop after this many epochs without a higher acceptance; 0 trains all epochs.
    """

    loss: Literal["kl", "tv"] = "kl"
    epochs: int = 8
    batch: int = 8
    lr: float = 1e-3
    validation: float = 0.1
    patience: int = 2

    def __post_init__(self):
        within(1, epochs=self.epochs, batch=self.batch)
        within(0, patience=self.patience)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"`lr` must be a positive number, got {self.lr}")
        check_share(self.validation)
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(LOSSES)}, got {self.loss!r}")


class DraftModule(Training):
    """Trains those weights of a draft that require a gradient; the best epoch has the highest
    acceptance on held-out texts.

    sampling: of the rows whose acceptance is measured. seed: decides what is held out, and the
    order of the texts.
    """

    def __init__(self, pair: Pair, texts: Texts, fitting: Fitting, sampling: Sampling, seed: int):
        super().__init__(fitting.lr, WEIGHT_DECAY, WARMUP_STEPS, fitting.patience)
        self.draft, self.texts, self.fitting = pair.draft.module, texts, fitting
        self.sampling, self.seed = sampling, seed
        self.strict_loading = False  # checkpoints hold what trains
        # In a list the target is neither stored nor moved with us.
        self._target, self._vocab = [pair.target.module], pair.vocab
        parts = parted(texts.owner, len(texts.prompts), fitting.validation, seed)
        self.train_index, self.held_index = parts
        self.means = _means()

    def loader(self) -> DataLoader:
        """Batches of the texts to train on."""
        return self.texts.loader(self.train_index, self.fitting.batch, self.seed)

    def announcement(self) -> str:
        """What is said before training."""
        train, held = len(self.train_index), len(self.held_index)
        tokens = sum(len(tokens) - before for tokens, before in self.texts.items)
        trained = sum(tensor.numel() for tensor in self.state_dict().values())
        weights = sum(tensor.numel() for tensor in self.draft.parameters())
        steps = -(-train // self.fitting.batch) * self.fitting.epochs
        return (
            f"{train} texts to train on and {held} held out, {tokens} tokens; {trained:,} weights"
            f" of {weights:,} are trained; at most {steps} steps"
        )

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss, acceptance = self._compare(batch, self.means)
        self.log("step_acceptance", acceptance, prog_bar=True)
        return loss

    def _compare(self, batch: dict[str, Tensor], means: nn.ModuleDict) -> tuple[Tensor, Tensor]:
        """Mean loss and step acceptance of a batch, which are added to `means`."""
        sums = compare(
            self._target[0], self.draft, batch, self._vocab, self.fitting.loss, self.sampling
        )
        count = batch["mask"].sum()
        loss, acceptance = sums[0] / count, sums[1] / count
        for name, total in zip(means, sums, strict=True):
            means[name].update(total.detach().double() / count, count)
        return loss, acceptance

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Mean loss and step acceptance over the positions of the held-out texts."""
        where = next(self.draft.parameters()).device
        means = _means().to(where)
        for batch in self.texts.loader(self.held_index, self.fitting.batch):
            self._compare({name: tensor.to(where) for name, tensor in batch.items()}, means)
        return _taken("held_out", means)

    def figures(self) -> dict:
        return _taken("train", self.means) | self.measure()

    def score(self, row: dict) -> float:
        return row["held_out_acceptance"]

    def line(self, row: dict, epochs: int | None) -> str:
        held = (
            f"held out: step acceptance {row['held_out_acceptance']:.4f}, loss"
            f" {row['held_out_loss']:.4f}"
        )
        if not row["epoch"]:
            return f"before training  {held}"
        return (
            f"epoch {row['epoch']}/{epochs}  {held}; trained on: {row['train_acceptance']:.4f},"
            f" {row['train_loss']:.4f}"
        )

    def on_train_start(self) -> None:
        if not self.history:
            untrained = {"epoch": 0, "step": 0, "lr": 0.0, "train_loss": None}
            self.record({**untrained, "train_acceptance": None, **self.measure()})
            print(self.line(self.history[0], self.trainer.max_epochs), flush=True)
        super().on_train_start()

    def on_train_epoch_start(self) -> None:
        self.draft.eval()  # dropout would draw from a generator that a resumed run does not have
        for mean in self.means.values():
            mean.reset()

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        """The weights that train."""
        return {name: tensor for name, tensor in self.named_parameters() if tensor.requires_grad}


def _means() -> nn.ModuleDict:
    """Means over positions, in the order of what `compare` returns."""
    return nn.ModuleDict({"loss": Mean(), "acceptance": Mean()})


def _taken(part: str, means: nn.ModuleDict) -> dict[str, float]:
    return {f"{part}_{name}": round(float(mean.compute()), 6) for name, mean in means.items()}


class Pace(Callback):
    """How far training is, if there is no terminal for a bar."""

    def on_train_start(self, trainer: Trainer, pl_module: Training) -> None:
        total = trainer.estimated_stepping_batches
        self.progress = Progress("training, step", total, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.progress_bar_callback:
            self.progress.add()
