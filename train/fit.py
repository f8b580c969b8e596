"""The shell of every training here: the head, the draft and the network that chooses trees.

    OUT/settings.json   what a run was started with; it is continued with the same settings only
    OUT/last.ckpt       weights, optimiser, schedule and loop state after the last finished epoch;
                        tensors and plain data, with the run they are of and a checksum
    OUT/metrics.csv     the figures of every epoch

Every file is renamed into place whole, and everything random is a function of (seed, epoch): a run
that was killed at any moment and continued ends with the same weights as one that was not (same
machine, same number of threads).
"""

from __future__ import annotations

import csv
import hashlib
import inspect
import io
import logging
import math
import signal
import sys
import threading
import warnings
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torchmetrics import MeanMetric, SumMetric

from ..files import Folder, sha256, within, write_whole

CHECKPOINT, METRICS = "last.ckpt", "metrics.csv"
SIGNATURE = 64  # bytes of a checkpoint's checksum
DONE = ("train.json", "distill.json")  # written last, by `diversed train` and by `diversed distill`
DEFAULTS = {
    "max_epochs": 4,
    "gradient_clip_val": 5.0,
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


def _trainer_options() -> type:
    """Lightning's options, with its types and our defaults, as the frozen dataclass that the
    command line reads.
    """
    hints = get_type_hints(Trainer.__init__)
    options = [
        (name, hints[name], DEFAULTS.get(name, parameter.default))
        for name, parameter in inspect.signature(Trainer).parameters.items()
    ]
    made = make_dataclass("TrainerOptions", options, frozen=True)
    made.__doc__ = Trainer.__init__.__doc__
    return made


TrainerOptions = _trainer_options()


class Training(LightningModule):
    """What is trained, with the memory of its epochs: figures, the best epoch, early stop.

    lr, weight_decay, warmup_steps: of AdamW and its schedule.
    patience: epochs without a better score after which training stops, 0 for never.

    history: figures of every finished epoch. best: epoch, score and weights of the best one, empty
    if epochs are not compared. Both travel with checkpoints. At the end of training the best
    weights are put in place.
    """

    def __init__(self, lr: float, weight_decay: float, warmup_steps: int, patience: int):
        super().__init__()
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps
        self.patience = patience
        self.history: list[dict] = []
        self.best: dict = {}

    def figures(self) -> dict:
        """What is written down about the epoch that ends."""
        return {}

    def score(self, row: dict) -> float | None:
        """What epochs are compared by, larger is better; None if they are not compared."""
        return None

    def line(self, row: dict, epochs: int | None) -> str:
        """What is said about an epoch; epochs: how many there are at most."""
        return f"epoch {row['epoch']}/{epochs}"

    def record(self, row: dict) -> None:
        """Write an epoch down; keep its weights if it is the best so far, else perhaps stop."""
        self.history.append(row)
        score = self.score(row)
        if score is not None and score > self.best.get("score", -math.inf):
            weights = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
            self.best = {"epoch": row["epoch"], "score": score, "weights": weights}
        self._stop_early()

    def on_train_start(self) -> None:
        self._stop_early()  # a run that was killed between its last epoch and the end of training

    def on_train_epoch_end(self) -> None:
        if self.history and self.history[-1]["epoch"] > self.current_epoch:
            return  # resumed at the end of an epoch that is written down already
        row = {
            "epoch": self.current_epoch + 1,
            "step": self.global_step,
            "lr": self.optimizers().param_groups[0]["lr"],
            **self.figures(),
        }
        self.log_dict({name: value for name, value in row.items() if isinstance(value, float)})
        self.record(row)

    def on_fit_end(self) -> None:
        if self.best:
            self.load_state_dict(self.best["weights"], strict=False)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint |= {"history": self.history, "best": self.best}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.history, self.best = checkpoint["history"], checkpoint["best"]

    def configure_optimizers(self) -> dict:
        total = self.trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise ValueError(
                "training needs an end for its schedule; set `trainer.max_epochs` or"
                " `trainer.max_steps`"
            )
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: schedule(step, total, self.warmup_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _stop_early(self) -> None:
        if self.patience and self.best:
            waited = self.history[-1]["epoch"] - self.best["epoch"]
            self.trainer.should_stop |= waited >= self.patience


def schedule(step: int, total: int, warmup: int) -> float:
    """Factor of the learning rate at `step` of `total`: linear warm-up, then a cosine that reaches
    0 at `total`.
    """
    warmup = min(warmup, total // 2)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


class Mean(MeanMetric):
    """A weighted mean in float64 over the batches of an epoch and over all processes; NaN stays.

    torchmetrics 1.9 forgets `set_dtype` when a metric is moved, and the weights with
    nan_strategy="disable".
    """

    dtype = torch.float64

    def __init__(self):
        super().__init__(nan_strategy=math.nan)
        self.set_dtype(self.dtype)


class Sum(SumMetric):
    """A sum in float64, likewise."""

    dtype = torch.float64

    def __init__(self):
        super().__init__(nan_strategy=math.nan)
        self.set_dtype(self.dtype)


def build_trainer(out: str | Path, *, plugins: Any = None, callbacks: Any = None, **options: Any):
    """The Trainer of every training here: its files lie in one folder, and it says one line an
    epoch.

    out:     the folder.
    plugins, callbacks: Lightning's, one or a list.
    options: others of pytorch_lightning.Trainer over DEFAULTS. With strategy and plugins they hold
             what a launcher or a cluster needs, see docs/scaling.md.
    """
    options = {**DEFAULTS, **options}
    for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        within(1, **{name: options.get(name)})
    for name in ("max_steps", "limit_train_batches", "val_check_interval"):
        if options.get(name) == 0:
            raise ValueError(f"`trainer.{name}` must be above 0, got 0: nothing would be trained")
    if options["use_distributed_sampler"]:
        raise ValueError(
            "`trainer.use_distributed_sampler` must be false: the texts of a batch are shared out"
            " already"
        )
    callbacks = [*_listed(callbacks), _EpochEnd(Path(out))]
    if sys.stdout.isatty() and options.get("enable_progress_bar") is not False:
        callbacks.append(RichProgressBar(leave=False))
    else:
        options["enable_progress_bar"] = False
    options["default_root_dir"] = options.get("default_root_dir") or str(out)
    return Trainer(**options, callbacks=callbacks, plugins=[*_listed(plugins), _WholeFiles()])


def on_device(device: str) -> dict[str, Any]:
    """The options of a Trainer that trains on one device, such as cpu or cuda:1."""
    kind, _, number = device.partition(":")
    return {"accelerator": kind, "devices": 1 if kind == "cpu" else [int(number or 0)]}


def refuse_spread(device: str) -> None:
    """ValueError for a device that is several."""
    if device == "auto":
        raise ValueError(
            "`device` must be one device such as cpu or cuda:0; training does not spread a model,"
            " got auto"
        )


def fit(trainer: Trainer, module: Training, data: Any, folder: Path) -> None:
    """Train, or continue after the last finished epoch.

    data: a LightningDataModule, or the loader of an epoch.
    """
    checkpoint = folder / CHECKPOINT if (folder / CHECKPOINT).is_file() else None
    if checkpoint:
        refuse_damaged(checkpoint)
        if trainer.is_global_zero:
            print(f"continuing from {checkpoint}")
    try:
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    except Exception:
        if trainer.is_global_zero and not (folder / CHECKPOINT).is_file():
            (folder / Folder(folder).name).unlink(missing_ok=True)  # nothing was begun
        raise
    if trainer.is_global_zero and module.history:
        # A kill behind the last epoch's checkpoint had left its line out.
        _write_metrics(folder / METRICS, module.history)


def settle(folder: Path, settings: dict[str, Any], write: bool = True) -> None:
    """Refuse a folder in which an epoch was finished with other settings, else write these down."""
    place = Folder(folder)
    there = [name for name in (*DONE, CHECKPOINT) if (folder / name).is_file()]
    if there and not place.begun():
        raise ValueError(
            f"{folder} holds {there[0]} but no {place.name}; choose another --out or delete the"
            " folder"
        )
    if write:
        place.begin(settings, anew=not there)
    elif there:
        place.refuse_others(place.begun(), settings)


def refuse_damaged(checkpoint: Path) -> None:
    """ValueError with the way out unless a checkpoint is as it was written, of this run, and of its
    last epoch.
    """
    try:
        data = checkpoint.read_bytes()
        found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        if lacking := {"state_dict", "optimizer_states", "loops"} - found.keys():
            raise ValueError(f"it has no {min(lacking)}")
        if _signed(data[: -SIGNATURE - 2]) != data:
            raise ValueError("its checksum is not that of its contents")
        if found.get("run") != _run(checkpoint.parent):
            raise ValueError("it is of another run")
        if len(found["history"]) < _epochs(checkpoint.parent / METRICS):
            raise ValueError(f"it is of an earlier epoch than {METRICS}")
    except Exception as error:
        # Damage shows as any of a dozen exceptions, from the archive, the pickle inside it or a
        # tensor.
        reason = " ".join(str(error).split())[:100]
        if type(error).__name__ == "UnpicklingError":
            reason = "it is no checkpoint, or holds more than tensors and plain data"
        raise ValueError(
            f"{checkpoint} cannot be read ({reason}); delete it to train from the start"
        ) from error


def _run(folder: Path) -> str:
    """What tells the run in a folder from others: the checksum of its settings."""
    path = folder / Folder.name
    return sha256(path) if path.is_file() else ""


def _epochs(metrics: Path) -> int:
    """How many lines of figures a run has written."""
    return max(0, metrics.read_bytes().count(b"\n") - 1) if metrics.is_file() else 0


def _signed(archive: bytes) -> bytes:
    """A zip archive, without the two bytes that count its comment, with its checksum as comment."""
    archive += SIGNATURE.to_bytes(2, "little")
    return archive + hashlib.sha256(archive).hexdigest().encode()


class _WholeFiles(TorchCheckpointIO):
    """Checkpoints appear whole, with a checksum: Lightning's own writer moves them from the
    system's temporary folder, which copies.
    """

    def save_checkpoint(self, checkpoint: dict, path: str, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(path, _signed(buffer.getvalue()[:-2]))


class _EpochEnd(ModelCheckpoint):
    """After every epoch: a checkpoint in place of the last one, metrics.csv, a line for the
    reader.
    """

    def __init__(self, out: Path):
        super().__init__(
            dirpath=str(out),
            filename=Path(CHECKPOINT).stem,
            save_top_k=1,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.out = out
        self.sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: Training) -> None:
        super().on_train_start(trainer, pl_module)
        # Lightning's own handler ends the process as if all were done.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.sigterm)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Training, checkpoint: dict) -> None:
        checkpoint["run"] = _run(self.out)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Training) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.is_global_zero:
            _write_metrics(self.out / METRICS, pl_module.history)
            print(pl_module.line(pl_module.history[-1], trainer.max_epochs), flush=True)


def _write_metrics(path: Path, history: list[dict]) -> None:
    """All epochs so far, also those before the run was continued; Lightning's CSVLogger would lose
    them.
    """
    text = io.StringIO()
    writer = csv.DictWriter(
        text, fieldnames=list(history[0]), extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(history)
    write_whole(path, text.getvalue())


def _listed(given: Any) -> list:
    if isinstance(given, list):
        return given
    return [] if given is None else [given]


@contextmanager
def sentences():
    """Lightning's refusals of its own options are for users: ValueError, one sentence."""
    try:
        yield
    except MisconfigurationException as error:
        raise ValueError(
            f"training refuses these options: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def quiet():
    """Lightning's tips and advice are not for the person who trains; errors still come through."""
    loggers = [
        logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module=r"(pytorch_lightning|lightning_fabric|torch\.utils|transformers)\."
        )
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
