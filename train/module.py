"""The Lightning shell around the head and its objective: what is optimised, how, and what is
written down about it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from pytorch_lightning import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..files import within
from ..verifier.head import LARGEST_SIZE, WeightHead
from .objectives import BLENDS, attribution, bounded, over_positions, reinforce

BINS = 20  # of the weight histogram, equal widths over [0, 1]
FINE = 1000  # bins from which the quantiles of the weight are read
PRICE_STEP = 0.05  # of the dual ascent
CHOICES = {
    "objective": ("reinforce", "attribution", "bounded"),
    "acceptance": ("mean", "sum"),
    "blend": tuple(BLENDS),
}


@dataclass(frozen=True)
class HeadOptions:
    """A head and how it is trained.

    Args:
        features: what the head sees: hidden (last hidden states), logits (twelve numbers of the two
            rows) or both.
        width: size of one hidden layer, 0 for the paper's linear head.
        lr: highest learning rate of AdamW.
        warmup_steps: steps of linear warm-up (at most half of all steps), then a cosine to 0 at the
            last step.
        weight_decay: of AdamW.
        lambda_: weight of the acceptance term beside the reward; larger is faster and further from
            the target.
        ratio_clip: a token's v_new / v_old counts within [1 - ratio_clip, 1 + ratio_clip].
        acceptance: mean of step acceptance over a text's positions, or the paper's sum, which
            rewards long texts.
        objective: reinforce (the paper's), attribution (ours: what a substitution costs, by maximum
            likelihood), or bounded (ours: without rewards, most acceptance for a bound on the
            log-likelihood lost).
        blend: probabilities, or logits as in the paper's code: v proportional to p^(1-w) q^w.
        bound: nats of the target's log-likelihood that a text may be expected to lose, for the
            objective `bounded`.
        start: folder of a trained head (of `diversed train` or a bundle) to start from, for
            refitting on few texts of another task or pair; null starts from a constant.
        patience: stop after this many epochs without a lower loss on the held-out prompts, and keep
            the head of the best epoch; 0 trains all epochs and keeps the last.
    """

    features: Literal["hidden", "logits", "both"] = "logits"
    width: int = 0
    lr: float = 5e-4
    warmup_steps: int = 10
    weight_decay: float = 0.01
    lambda_: float = 1.0
    ratio_clip: float = 0.2
    acceptance: Literal["mean", "sum"] = "mean"
    objective: Literal["reinforce", "attribution", "bounded"] = "reinforce"
    blend: Literal["probabilities", "logits"] = "probabilities"
    bound: float = 10.0
    start: str | None = None
    patience: int = 0


class VerifierModule(LightningModule):
    """A head and an objective for it.

    options: see HeadOptions.
    draft_hidden, target_hidden: hidden sizes of the two models, 0 for a head on logits alone.
    """

    def __init__(self, options: HeadOptions, draft_hidden: int = 0, target_hidden: int = 0):
        settings = asdict(options) | {"draft_hidden": draft_hidden, "target_hidden": target_hidden}
        _refuse_bad(settings)
        super().__init__()
        self.settings = settings
        sizes = (draft_hidden, target_hidden) if options.features != "logits" else (0, 0)
        self.head = WeightHead(options.features, *sizes, options.width)
        self.register_buffer(
            "price", torch.ones(()), persistent=False
        )  # for the objective `bounded`
        self.history: list[
            dict
        ] = []  # figures of every finished epoch; travels with the checkpoint, as `best` does
        self.best: dict = {}  # epoch, held-out loss and head of the best epoch, with `patience`
        self._sums: dict[str, dict[str, Tensor]] = {}

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The gate's logit [B, T] at every position of a batch."""
        return self.head(batch["features"], batch.get("hidden"))

    def start_from(self, features: Tensor | None, hidden: Tensor | None, weight: Tensor) -> None:
        """Standardise the gate's inputs and choose its first constant output; or take over the gate
        in `start`.

        A weight starts at the traces' own mean, where the ratios v_new / v_old are 1; attribution
        at a harm of exp(-1), from where a few substitutions a text explain some failures.

        features: [X, 12] or None, hidden: [X, H] or None, weight: [X]; at positions of the training
            texts.
        """
        if self.settings["start"]:
            self.head.load_state_dict(_started(Path(self.settings["start"]), self.head))
            return
        self.head.standardise(features, hidden)
        last = self.head.net[-1] if self.head.width else self.head.net
        with torch.no_grad():
            fitted = self.settings["objective"] == "attribution"
            last.bias.fill_(1.0 if fitted else torch.logit(weight.mean().clamp(0.01, 0.99)))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        logit = self(batch)
        weight, loss = torch.sigmoid(logit.detach()), self._loss(logit, batch)
        accepted = self._count("train", batch, weight, loss.detach())
        self.log("step_acceptance", over_positions(accepted, batch["mask"]), prog_bar=True)
        return loss * self._share(batch)

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        logit = self(batch)
        self._count("held_out", batch, torch.sigmoid(logit), self._loss(logit, batch))

    def on_train_epoch_start(self) -> None:
        self._sums = {}

    def on_validation_epoch_start(self) -> None:
        self._sums.pop("held_out", None)

    def on_train_epoch_end(self) -> None:
        if self.history and self.history[-1]["epoch"] > self.current_epoch:
            return  # resumed at the end of an epoch that is written down already
        row = {
            "epoch": self.current_epoch + 1,
            "step": self.global_step,
            "lr": self.optimizers().param_groups[0]["lr"],
        }
        for part, sums in self._sums.items():
            whole = {name: self._over_processes(value) for name, value in sums.items()}
            row |= {f"{part}_{name}": value for name, value in figures(whole).items()}
        self.history.append(row)
        self.log_dict(
            {name: float(value) for name, value in row.items() if isinstance(value, float)}
        )
        self._keep_best(row)

    def on_train_start(self) -> None:
        self._stop_early()  # a run that was killed between its last epoch and the end of training

    def _keep_best(self, row: dict) -> None:
        loss = row.get("held_out_loss")
        if (
            self.settings["patience"]
            and loss is not None
            and loss < self.best.get("loss", math.inf)
        ):
            head = {
                name: tensor.detach().clone() for name, tensor in self.head.state_dict().items()
            }
            self.best = {"epoch": row["epoch"], "loss": loss, "head": head}
        self._stop_early()

    def _stop_early(self) -> None:
        if (
            self.best
            and self.history[-1]["epoch"] - self.best["epoch"] >= self.settings["patience"]
        ):
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint |= {"history": self.history, "best": self.best, "price": float(self.price)}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.history, self.best = checkpoint["history"], checkpoint["best"]
        self.price.fill_(checkpoint["price"])

    def restore_best(self) -> None:
        """Put the head of the best epoch in place, where `patience` asked for it."""
        if self.best:
            self.head.load_state_dict(self.best["head"])

    def configure_optimizers(self) -> dict:
        total = self.trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise ValueError(
                "training needs an end for its schedule; set `trainer.max_epochs` or"
                " `trainer.max_steps`"
            )
        lr, weight_decay, warmup = (
            self.settings[name] for name in ("lr", "weight_decay", "warmup_steps")
        )
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr, weight_decay=weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, total, warmup)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _loss(self, logit: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The objective; another one is another function of (logit, batch) in objectives.py, chosen
        here.
        """
        settings = self.settings
        if settings["objective"] == "attribution":
            return attribution(logit, batch)
        if settings["objective"] == "bounded":
            loss, excess = bounded(
                torch.sigmoid(logit),
                batch,
                self.price.clone(),
                bound=settings["bound"],
                over_all=lambda own: self._mean(own, batch),
            )
            if self.training:  # dual ascent: what exceeds the bound raises the price
                self.price.add_(PRICE_STEP * excess).clamp_(min=0)
            return loss
        return reinforce(
            torch.sigmoid(logit),
            batch,
            lambda_=settings["lambda_"],
            ratio_clip=settings["ratio_clip"],
            acceptance_term=settings["acceptance"],
            blend=settings["blend"],
        )

    def _share(self, batch: dict[str, Tensor]) -> Tensor:
        """[] factor that makes the mean over processes of their losses the mean over the texts of
        all of them.
        """
        own = batch["counts"].float().sum()
        return self.trainer.world_size * own / self._over_processes(own)

    def _mean(self, own: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The mean over the texts of all processes, of which `own` is the mean over this one's."""
        return self._over_processes(own * self._share(batch)) / self.trainer.world_size

    def _over_processes(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes."""
        return self.trainer.strategy.reduce(value.clone(), reduce_op="sum")

    @torch.no_grad()
    def _count(self, part: str, batch: dict[str, Tensor], weight: Tensor, loss: Tensor) -> Tensor:
        """Add a batch to the sums of `part`, "train" or "held_out"; [B, T] step acceptance."""
        mask, texts, counts = batch["mask"], len(batch["reward"]), batch["counts"].all()
        blend = BLENDS[self.settings["blend"]]
        old, _, _ = blend(batch["weight"], batch)
        new, accepted, substituted = blend(weight, batch)
        ratio = torch.where(mask, new - old, 0).double().sum(1).clamp(-20, 20).exp()
        reward = batch["reward"].double()
        values = {
            "texts": texts,
            "positions": mask.sum(),
            "loss": loss.double() * texts,
            "acceptance": accepted[mask].double().sum(),
            "substitutions": substituted[mask].double().sum(),
            "weight": weight[mask].double().sum(),
            "reward": reward.sum(),
            "ratio": ratio.sum(),
            "ratio_squared": ratio.square().sum(),
            "ratio_reward": (ratio * reward).sum(),
            "histogram": torch.bincount(
                (weight[mask] * FINE).long().clamp(0, FINE - 1), minlength=FINE
            ),
        }
        sums = self._sums.setdefault(part, {})
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value * counts
        return accepted


def _started(folder: Path, head: WeightHead) -> dict[str, Tensor]:
    """The tensors of the gate in `folder`; ValueError where it is none of this kind."""
    path = folder / "head.safetensors"
    if not path.is_file():
        raise FileNotFoundError(
            f"`start` {folder} holds no head.safetensors; give a folder of `diversed train` or a"
            " bundle"
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"`start`: {path} is damaged ({error}); train it again") from None
    wanted = {name: tensor.shape for name, tensor in head.state_dict().items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != wanted:
        raise ValueError(
            f"`start`: the gate in {folder} has other features or another width than the one to"
            " train"
        )
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError(f"`start`: {path} holds values that are not finite; train it again")
    return tensors


def schedule(step: int, total: int, warmup: int) -> float:
    """Factor of the learning rate at `step` of `total`: linear warm-up, then a cosine that reaches
    0 at `total`.
    """
    warmup = min(warmup, total // 2)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def figures(sums: dict[str, Tensor]) -> dict:
    """What a user reads about an epoch.

    step_acceptance   mean over positions of 1 - TV(draft, blend)
    substitutions     expected tokens a text that are not the target's own, on the texts of the traces
    weight, weight_p10, weight_p50, weight_p90, weight_histogram: the draft's share over positions; 20 bins over [0, 1]
    reward            mean reward of the texts as they were sampled: it does not move with the gate
    reward_estimate   reward under the gate as it is now: texts weighted by v_new / v_old, normalised
    effective_texts   how many texts that estimate is worth, (sum of ratios)^2 / (sum of squared ratios)
    """
    sums = {name: torch.as_tensor(value).cpu() for name, value in sums.items()}
    histogram, positions, texts = sums["histogram"], sums["positions"], sums["texts"]
    cumulative = histogram.cumsum(0) / positions
    result = {
        "loss": sums["loss"] / texts,
        "step_acceptance": sums["acceptance"] / positions,
        "substitutions": sums["substitutions"] / texts,
        "reward": sums["reward"] / texts,
        "reward_estimate": sums["ratio_reward"] / sums["ratio"],
        "effective_texts": sums["ratio"].square() / sums["ratio_squared"],
        "weight": sums["weight"] / positions,
    }
    for percent in (10, 50, 90):
        result[f"weight_p{percent}"] = ((cumulative < percent / 100).sum() + 0.5) / FINE
    result = {name: round(float(value), 6) for name, value in result.items()}
    return result | {"weight_histogram": histogram.view(BINS, -1).sum(1).tolist()}


def _refuse_bad(settings: dict) -> None:
    """ValueError with a sentence for a setting no training can use."""
    for name, low in (
        ("lr", 0),
        ("weight_decay", 0),
        ("warmup_steps", 0),
        ("width", 0),
        ("ratio_clip", 0),
    ):
        if settings[name] < low or not math.isfinite(settings[name]):
            raise ValueError(f"`{name}` must be a number of at least {low}, got {settings[name]}")
    within(0, LARGEST_SIZE, width=settings["width"])
    if not math.isfinite(settings["lambda_"]):
        raise ValueError(f"`lambda_` must be a finite number, got {settings['lambda_']}")
    if not 0 < settings["bound"] < math.inf:
        raise ValueError(
            f"`bound` must be a positive number of nats a text, got {settings['bound']}"
        )
    within(0, patience=settings["patience"])
    for name, known in CHOICES.items():
        if settings[name] not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {settings[name]!r}")
    if settings["blend"] == "logits" and settings["objective"] != "reinforce":
        raise ValueError(
            f"`objective` {settings['objective']} is for `blend` probabilities; train logits by"
            " reinforce"
        )
