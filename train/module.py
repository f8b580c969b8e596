"""A head under Lightning: its options, its loss, and the figures of an epoch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ..files import read_object, within
from ..runtime.bundle import CARD, HEAD, HeadCard, read_head
from ..verifier.head import KINDS, LARGEST_SIZE, WeightHead
from ..verifier.offsets import offset
from .fit import Mean, Sum, Training
from .losses import OBJECTIVES, at_least_0, own_options
from .objectives import BLENDS, over_positions
from .record import RECORD

BINS = 20  # of the weight histogram, equal widths over [0, 1]
FINE = 1000  # bins from which the quantiles of the weight are read
FEW_TEXTS = 10  # an importance-weighted mean of fewer effective texts says nothing
SUMMARIES = ", ".join(f"{name} ({each.summary})" for name, each in OBJECTIVES.items())


@dataclass(frozen=True)
class HeadOptions(*own_options()):
    __doc__ = f"""A head and how it is trained. The options of one objective stand with it.

    Args:
        features: what the head sees: hidden (last hidden states), logits (twelve numbers of the two
            rows), both, tokens (the classes of the most likely tokens and of the one before), or
            tokens with others.
        offset: rule without training that the head starts from and corrects: divergence:0.3 or
            regret:0.5; null for a constant.
        width: size of one hidden layer, 0 for the paper's linear head.
        lr: highest learning rate of AdamW.
        warmup_steps: steps of linear warm-up (at most half of all steps), then a cosine to 0 at the
            last step.
        weight_decay: of AdamW.
        objective: {SUMMARIES}.
        start: folder of a trained head (of `diversed train` or a bundle) to start from, for
            refitting on few texts of another task or pair; null starts from a constant.
        patience: stop after this many epochs without a lower loss on the held-out prompts, and keep
            the head of the best epoch; 0 trains all epochs and keeps the last.
    """

    features: Literal[tuple(KINDS)] = "logits"
    offset: str | None = None
    width: int = 0
    lr: float = 5e-4
    warmup_steps: int = 10
    weight_decay: float = 0.01
    objective: Literal[tuple(OBJECTIVES)] = "reinforce"
    start: str | None = None
    patience: int = 0

    def check(self) -> None:
        """ValueError with a sentence for an option that no training can use."""
        at_least_0(lr=self.lr, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps)
        at_least_0(width=self.width)
        within(0, LARGEST_SIZE, width=self.width)
        within(0, patience=self.patience)
        for name, hint in get_type_hints(HeadOptions).items():
            value, known = getattr(self, name), get_args(hint)
            if get_origin(hint) is Literal and value not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {value!r}")
        if self.offset:
            offset(self.offset)
        for objective in OBJECTIVES.values():
            objective.check(self)
        if self.blend not in OBJECTIVES[self.objective].blends:
            raise ValueError(
                f"`objective` {self.objective} is for `blend` probabilities; train logits by"
                " reinforce"
            )
        own = OBJECTIVES[self.objective].Options
        for name, objective in OBJECTIVES.items():
            for option in fields(objective.Options) if objective.Options else ():
                idle = not own or not hasattr(own, option.name)
                if idle and getattr(self, option.name) != option.default:
                    raise ValueError(
                        f"`{option.name}` is of the objective {name}, {self.objective} does not"
                        " read it; leave it out"
                    )

    @property
    def needs_hidden(self) -> bool:
        """Whether the head sees hidden states."""
        return "hidden" in KINDS[self.features]


class HeadModule(Training):
    """A head and an objective for it.

    options: see HeadOptions.
    draft_hidden, target_hidden: hidden sizes of the two models, 0 for a head on logits alone.
    """

    def __init__(self, options: HeadOptions, draft_hidden: int = 0, target_hidden: int = 0):
        options.check()
        super().__init__(options.lr, options.weight_decay, options.warmup_steps, options.patience)
        self.options = options
        self.settings = asdict(options) | {
            "draft_hidden": draft_hidden,
            "target_hidden": target_hidden,
        }
        sizes = (draft_hidden, target_hidden) if options.needs_hidden else (0, 0)
        self.head = WeightHead(options.features, *sizes, options.width, options.offset or "")
        self.objective = OBJECTIVES[options.objective](options)
        self.trained_on, self.held_out = HeadFigures(), HeadFigures()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The head's logit [B, T] at every position of a batch."""
        return logit_of(self.head, batch)

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.trainer.ckpt_path is None:
            self.start_from(*self.trainer.datamodule.sample_inputs())

    def started(self) -> dict[str, Tensor] | None:
        """The tensors of the head in `start`, checked; None without one."""
        return _started(Path(self.options.start), self.head) if self.options.start else None

    def start_from(self, features: Tensor | None, hidden: Tensor | None, weight: Tensor) -> None:
        """Standardise the head's inputs and choose its first constant output; or take over the head
        in `start`.

        features: [X, 12] or None, hidden: [X, H] or None, weight: [X]; at positions of the training
            texts.
        """
        if started := self.started():
            self.head.load_state_dict(started)
            return
        self.head.standardise(features, hidden)
        last = self.head.net[-1] if self.head.width else self.head.net
        with torch.no_grad():
            # With an offset it starts as the rule itself.
            last.bias.fill_(0.0 if self.options.offset else self.objective.first_logit(weight))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss, accepted = self._judge(batch, self.trained_on)
        self.log("step_acceptance", over_positions(accepted, batch["mask"]), prog_bar=True)
        return loss * self._factor(batch)

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self._judge(batch, self.held_out)

    def on_train_epoch_start(self) -> None:
        self.trained_on.reset()
        self.held_out.reset()  # an epoch may have no validation

    def on_validation_epoch_start(self) -> None:
        self.held_out.reset()

    def figures(self) -> dict:
        row = {f"train_{name}": value for name, value in self.trained_on.compute().items()}
        if self.held_out.any:
            row |= {f"held_out_{name}": value for name, value in self.held_out.compute().items()}
        return row

    def score(self, row: dict) -> float | None:
        """Minus the held-out loss if epochs are to be compared, with `patience`."""
        loss = row.get("held_out_loss")
        return -loss if self.patience and loss is not None else None

    def line(self, row: dict, epochs: int | None) -> str:
        part = "held_out" if "held_out_loss" in row else "train"
        figure = {name.removeprefix(f"{part}_"): value for name, value in row.items()}
        worth = figure["effective_texts"]
        reward = (
            f"reward {figure['reward_estimate']:.4f} (estimate from {worth:.0f} effective texts)"
        )
        if worth < FEW_TEXTS:
            reward = f"no estimate of the reward ({worth:.0f} effective texts are too few)"
        return (
            f"epoch {row['epoch']}/{epochs}  {part.replace('_', ' ')}: loss {figure['loss']:.4f},"
            f" step acceptance {figure['step_acceptance']:.4f}, {reward}, draft's weight"
            f" {figure['weight_p10']:.2f} / {figure['weight_p50']:.2f} /"
            f" {figure['weight_p90']:.2f} (10 / 50 / 90 %)"
        )

    def _judge(self, batch: dict[str, Tensor], figures: HeadFigures) -> tuple[Tensor, Tensor]:
        """(loss [], step acceptance [B, T]) of a batch, which is added to `figures`."""
        logit = self(batch)
        loss = self.objective(logit, batch, lambda own: self._mean(own, batch))
        weight = torch.sigmoid(logit.detach())
        accepted = figures.update(batch, weight, loss.detach(), self.options.blend)
        return loss, accepted

    def _factor(self, batch: dict[str, Tensor]) -> Tensor:
        """[] factor that makes the mean over processes of their losses the mean over the texts of
        all of them.
        """
        own = batch["counts"].float().sum()
        return self.trainer.world_size * own / self._total(own)

    def _mean(self, own: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The mean over the texts of all processes; `own` is the mean over this one's."""
        return self._total(own * self._factor(batch)) / self.trainer.world_size

    def _total(self, value: Tensor) -> Tensor:
        """The sum of `value` over all processes."""
        return self.trainer.strategy.reduce(value.clone(), reduce_op="sum")


def logit_of(head: WeightHead, batch: dict[str, Tensor]) -> Tensor:
    """[B, T] what a head says at every position of a batch."""
    return head(batch["features"], batch.get("hidden"), batch.get("token_features"))


class Histogram(Metric):
    """[bins] how many values lie in each of `bins` equal parts of [0, 1], over all processes."""

    def __init__(self, bins: int):
        super().__init__()
        self.add_state("counts", torch.zeros(bins, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        bins = len(self.counts)
        place = (value * bins).long().clamp(0, bins - 1)
        self.counts += torch.bincount(place, minlength=bins)

    def compute(self) -> Tensor:
        return self.counts


class HeadFigures(nn.Module):
    """What a user reads about an epoch, over its texts in all processes.

    step_acceptance  mean over positions of 1 - TV(draft, blend)
    substitutions    expected tokens a text that are not the target's own, on the texts of the
                     traces
    reward           mean reward of the texts as they were sampled: it does not move with the head
    reward_estimate  reward under the head as it is now: texts weighted by v_new / v_old
    effective_texts  how many texts that estimate is worth,
                     (sum of ratios)^2 / (sum of squared ratios)
    weight           the draft's share over positions; weight_p10, weight_p50, weight_p90,
                     weight_histogram (20 bins over [0, 1])
    """

    def __init__(self):
        super().__init__()
        self.loss, self.reward, self.reward_estimate = Mean(), Mean(), Mean()
        self.step_acceptance, self.substitutions, self.weight = Mean(), Mean(), Mean()
        self.ratio, self.squared = Sum(), Sum()
        self.histogram = Histogram(FINE)

    @property
    def any(self) -> bool:
        """Whether a batch was added."""
        return self.loss.update_called

    def reset(self) -> None:
        for metric in self.children():
            metric.reset()

    @torch.no_grad()
    def update(self, batch: dict[str, Tensor], weight: Tensor, loss: Tensor, blend: str) -> Tensor:
        """Add a batch; [B, T] its step acceptance.

        weight: [B, T] the draft's share; loss: [] mean over the texts of the batch.
        """
        counts, reward = batch["counts"], batch["reward"]
        mask = batch["mask"] & counts[:, None]
        old, _, _ = BLENDS[blend](batch["weight"], batch)
        new, accepted, substituted = BLENDS[blend](weight, batch)
        ratio = torch.where(mask, new - old, 0).double().sum(1).clamp(-20, 20).exp() * counts
        self.loss.update(loss, counts.sum())
        self.step_acceptance.update(accepted, mask)
        self.substitutions.update(torch.where(mask, substituted, 0).double().sum(1), counts)
        self.reward.update(reward, counts)
        self.reward_estimate.update(reward, ratio)
        self.ratio.update(ratio)
        self.squared.update(ratio.square())
        self.weight.update(weight, mask)
        self.histogram.update(weight[mask])
        return accepted

    def compute(self) -> dict:
        """The figures by name, rounded to six decimals."""
        means = ("loss", "step_acceptance", "substitutions", "reward", "reward_estimate")
        values = {name: getattr(self, name).compute() for name in means}
        values["effective_texts"] = self.ratio.compute().square() / self.squared.compute()
        values["weight"] = self.weight.compute()
        histogram = self.histogram.compute()
        cumulative = histogram.cumsum(0) / histogram.sum()
        for percent in (10, 50, 90):
            values[f"weight_p{percent}"] = ((cumulative < percent / 100).sum() + 0.5) / FINE
        values = {name: round(float(value), 6) for name, value in values.items()}
        return values | {"weight_histogram": histogram.view(BINS, -1).sum(1).tolist()}


def _started(folder: Path, head: WeightHead) -> dict[str, Tensor]:
    """The tensors of the head in `folder`, which must be of the same kind as `head`."""
    if not (folder / HEAD).is_file():
        raise FileNotFoundError(
            f"`start` {folder} holds no {HEAD}; give a folder of `diversed train` or a bundle"
        )
    for name in (RECORD, CARD):
        if (folder / name).is_file():
            theirs = read_object(folder / name, "train it again").get("head", {}).get("offset", "")
            if theirs != head.offset:
                raise ValueError(
                    f"`start` {folder} is a head with offset {theirs or 'none'}, the head to train"
                    f" has {head.offset or 'none'}; give the same"
                )
    try:
        found = read_head(folder, HeadCard.of(head), "the head to train has", "train it again")
    except ValueError as error:
        raise ValueError(f"`start`: {error}") from None
    return found.state_dict()
