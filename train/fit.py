"""`diversed train`: traces become a head. The same command again continues from the last finished
epoch.

    OUT/settings.json     what this run was started with; a run is continued with the same settings only
    OUT/last.ckpt         head, optimiser, schedule and loop state after the last finished epoch; tensors and plain data
    OUT/metrics.csv       figures of every epoch, see `figures` in module.py
    OUT/head.safetensors  the trained head, written at the end
    OUT/train.json        its kind and sizes, settings, figures and where its traces came from, written last

Every file is renamed into place whole, and everything random is a function of (seed, epoch): a run
that was killed at any moment and continued ends with the same head as one that was not (same
machine, same number of threads).

Several processes (`--trainer.devices 2 --trainer.strategy ddp`, or a launcher's) share the texts of
every batch out and give the head of one process up to rounding. To the byte they differ, so a run
is continued with as many as it began.
"""

from __future__ import annotations

import csv
import hashlib
import inspect
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import make_dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint, RichProgressBar
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from safetensors.torch import save

from ..data.batches import TraceModule, TraceOptions
from ..files import MOST_THREADS, exclusive, read_settings, sha256, within, write_whole
from .module import HeadOptions, VerifierModule

CHECKPOINT = "last.ckpt"
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
FEW_TEXTS = 10  # an importance-weighted mean of fewer effective texts says nothing
# What changes the result of a run besides the settings of the model and the data.
TRAINER_SETTINGS = (
    "max_epochs",
    "max_steps",
    "gradient_clip_val",
    "accumulate_grad_batches",
    "precision",
    "world_size",
)


def train(
    data: TraceOptions,
    out: str,
    model: HeadOptions = HeadOptions(),  # noqa: B008  frozen
    trainer: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
    threads: int = 1,
) -> Path:
    """Train a head on traces; the folder it is in.

    data:    the traces, the size of a batch and what is held out.
    out:     folder to write to; a run that was interrupted there is continued.
    model:   the head, its objective and its optimiser.
    trainer: options of Lightning's Trainer over DEFAULTS, such as max_epochs, devices, strategy and
             plugins.
    seed:    decides held-out prompts, order of texts and the start of a head with a hidden layer.
    threads: CPU threads; the same number gives the same head.
    """
    with quiet(), _sentences():
        texts = TraceModule(data, seed, model.features != "logits", model.blend == "logits")
        seed_everything(seed, verbose=False)
        module = VerifierModule(model, texts.draft_hidden, texts.target_hidden)
        return _fit(_trainer(out, trainer), module, texts, out, seed, threads)


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


def _trainer(out: str, options: Mapping[str, Any]) -> Trainer:
    """`build_trainer` from options that may name a cluster's parts among those of the Trainer."""
    cluster = {
        name: options[name] for name in ("strategy", "plugins", "callbacks") if name in options
    }
    rest = {name: value for name, value in options.items() if name not in cluster}
    return build_trainer({**rest, "out": out}, **cluster)


def build_trainer(
    config: Mapping[str, Any],
    strategy: Any = "auto",
    plugins: Any = None,
    callbacks: Any = None,
    line: Callable[[dict, int | None], str] | None = None,
) -> Trainer:
    """The Trainer of every training here: its files lie in one folder, and it talks in one line an
    epoch.

    config:    `out`, the folder, and options of pytorch_lightning.Trainer over DEFAULTS.
    strategy, plugins, callbacks: Lightning's, one or a list: what a launcher or a cluster needs,
        see docs/scaling.md.
    line:      (figures, epochs) -> the line of an epoch.
    """
    options = {**DEFAULTS, **config}
    out = options.pop("out")
    within(1, accumulate_grad_batches=options.get("accumulate_grad_batches"))
    if options["use_distributed_sampler"]:
        raise ValueError(
            "`trainer.use_distributed_sampler` must be false: the texts of a batch are shared out"
            " already"
        )
    plugins, callbacks = (
        given if isinstance(given, list) else [given] if given else []
        for given in (plugins, callbacks)
    )
    if sys.stdout.isatty() and options.get("enable_progress_bar") is not False:
        callbacks = [*callbacks, RichProgressBar(leave=False)]
    else:
        options["enable_progress_bar"] = False
    return Trainer(
        **{**options, "default_root_dir": options.get("default_root_dir") or str(out)},
        strategy=strategy,
        callbacks=[*callbacks, _EpochEnd(Path(out), line or _line)],
        plugins=[*plugins, _WholeFiles()],
    )


def _fit(
    trainer: Trainer, model: VerifierModule, data: TraceModule, out: str, seed: int, threads: int
) -> Path:
    """Train, or continue, or notice that there is nothing left to do; then write the head."""
    within(1, MOST_THREADS, threads=threads)
    torch.set_num_threads(threads)
    batch = data.options.batch
    if batch % trainer.world_size:
        raise ValueError(
            f"`batch` must be a multiple of the {trainer.world_size} processes that share its"
            f" texts, got {batch}"
        )
    if trainer.world_size > 1:
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(threads)
        )  # else Lightning chooses a number by the machine
    folder = Path(out)
    first = trainer.global_rank == 0
    with exclusive(folder) if first else nullcontext():
        settings = _settings(trainer, model, data, seed, threads)
        refuse_other_settings(folder, settings)
        say = print if first else lambda *_: None
        if (folder / "train.json").is_file() and (folder / "head.safetensors").is_file():
            _refuse_damaged_result(folder)
            say(f"{folder} is already trained; choose another --out to train again")
            return folder
        data.setup()
        _refuse_single(model, data)
        if model.settings["patience"] and not (len(data.held_index) and trainer.limit_val_batches):
            raise ValueError(
                "`patience` waits for the loss on held-out prompts, and none are held out; give"
                " --data.validation 0.1 and two prompts or more, or --model.patience 0"
            )
        if first:
            write_json(folder / "settings.json", settings)
            _announce(model, data)
        checkpoint = folder / CHECKPOINT if (folder / CHECKPOINT).is_file() else None
        if checkpoint:
            refuse_damaged(checkpoint)
            say(f"continuing from {checkpoint}")
        else:
            model.start_from(*data.sample_inputs())
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        model.restore_best()
        if first:
            _write_head(folder, model, data, settings)
    return folder


def _settings(
    trainer: Trainer, model: VerifierModule, data: TraceModule, seed: int, threads: int
) -> dict:
    """Everything the result depends on, as plain data."""
    return {
        **model.settings,
        "batch": data.options.batch,
        "validation": data.options.validation,
        "reward": data.options.reward,
        **{name: getattr(trainer, name) for name in TRAINER_SETTINGS},
        "seed": seed,
        "threads": threads,
        "traces_sha256": _traces_sha256(data),
    }


def _traces_sha256(data: TraceModule) -> str:
    """The manifest's checksum, for several folders that of their checksums; it names every shard by
    checksum.
    """
    if len(data.checksums) == 1:
        return data.checksums[0]
    return hashlib.sha256("".join(data.checksums).encode()).hexdigest()


def refuse_other_settings(folder: Path, settings: dict) -> None:
    """A run is continued as it was started; one that did not finish an epoch may be started
    otherwise.
    """
    path = folder / "settings.json"
    if not path.is_file() or not any((folder / name).is_file() for name in (CHECKPOINT, *DONE)):
        return
    before = read_settings(path)
    for name, value in settings.items():
        if before.get(name) != value:
            raise ValueError(
                f"{folder} was started with {name} = {before.get(name)}, now it is {value}; "
                "give the same settings to continue it, or choose another --out"
            )


def refuse_damaged(checkpoint: Path) -> None:
    try:
        found = torch.load(checkpoint, weights_only=True, map_location="cpu")
        if lacking := {"state_dict", "optimizer_states", "loops"} - found.keys():
            raise ValueError(f"it has no {min(lacking)}")
    except Exception as error:
        # Damage shows as any of a dozen exceptions, from the archive, the pickle inside it or a
        # tensor.
        reason = " ".join(str(error).split())[:100]
        if type(error).__name__ == "UnpicklingError":
            reason = "it is no checkpoint, or holds more than tensors and plain data"
        raise ValueError(
            f"{checkpoint} cannot be read ({reason}); delete it to train from the start"
        ) from error


def _refuse_damaged_result(folder: Path) -> None:
    if read_settings(folder / "train.json").get("head_sha256") != sha256(
        folder / "head.safetensors"
    ):
        raise ValueError(
            f"{folder / 'head.safetensors'} is not the head that train.json describes; delete both"
            " files and the same command writes them again"
        )


def _refuse_single(model: VerifierModule, data: TraceModule) -> None:
    """The policy gradient compares the texts of a prompt; the other objectives do not."""
    prompt = data.texts.prompt
    if model.settings["objective"] == "reinforce" and len(prompt) == len(prompt.unique()):
        raise ValueError(
            f"the traces in {data.folders[0]} have one text a prompt, so a reward cannot be"
            " compared with the mean of its prompt; gather with --samples 4, or train with"
            " --model.objective attribution"
        )


def _announce(model: VerifierModule, data: TraceModule) -> None:
    texts = data.texts
    tokens, prompts = int(texts.length.sum()), len(texts.prompt.unique())
    print(
        f"{len(texts)} texts of {prompts} prompts, {tokens} tokens; {len(data.held_index)} texts"
        f" are held out; mean reward {texts.reward.mean():.3f}",
        flush=True,
    )
    if model.settings["objective"] == "reinforce" and not texts.advantage[data.train_index].any():
        print(
            "note: the texts of every prompt have equal rewards, so only the acceptance term can"
            " teach anything"
        )


def _write_head(folder: Path, model: VerifierModule, data: TraceModule, settings: dict) -> None:
    """Write head.safetensors, then train.json: its presence says that the run is done."""
    head = model.head.cpu()
    if not all(torch.isfinite(tensor).all() for tensor in head.state_dict().values()):
        raise ValueError(
            f"training in {folder} ended in numbers that are not finite; lower lr and choose"
            " another --out"
        )
    described = {
        name: getattr(head, name) for name in ("features", "draft_hidden", "target_hidden", "width")
    }
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    path = write_whole(
        folder / "head.safetensors", save(tensors, metadata={"head": json.dumps(described)})
    )
    write_json(
        folder / "train.json",
        {
            "format": 1,
            "head": described,
            "head_sha256": sha256(path),
            "settings": settings,
            "traces": [str(traces) for traces in data.folders],
            "traces_sha256": settings["traces_sha256"],
            "manifest": {key: value for key, value in data.manifest.items() if key != "shards"},
            "figures": model.history,
            "versions": {
                name: version(name) for name in ("torch", "pytorch-lightning", "safetensors")
            },
        },
    )
    print(f"head: {path}\nfigures: {folder / 'metrics.csv'} and {folder / 'train.json'}")


def write_json(path: Path, values: dict) -> None:
    write_whole(path, json.dumps(values, indent=2) + "\n")


class _WholeFiles(TorchCheckpointIO):
    """Checkpoints appear whole: Lightning's own writer moves them from the system's temporary
    folder, which copies.
    """

    def save_checkpoint(self, checkpoint: dict, path: str, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(path, buffer.getvalue())


class _EpochEnd(ModelCheckpoint):
    """After every epoch: one checkpoint in place of the last, metrics.csv, one line for the reader."""

    def __init__(self, out: Path, line: Callable[[dict, int | None], str]):
        super().__init__(
            dirpath=str(out),
            filename=Path(CHECKPOINT).stem,
            save_top_k=1,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.out, self.line = out, line

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.is_global_zero:
            _write_metrics(self.out / "metrics.csv", pl_module.history)
            print(self.line(pl_module.history[-1], trainer.max_epochs), flush=True)


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


def _line(row: dict, epochs: int | None) -> str:
    part = "held_out" if "held_out_loss" in row else "train"
    figure = {name.removeprefix(f"{part}_"): value for name, value in row.items()}
    worth = figure["effective_texts"]
    reward = f"reward {figure['reward_estimate']:.4f} (estimate from {worth:.0f} effective texts)"
    if worth < FEW_TEXTS:
        reward = f"no estimate of the reward ({worth:.0f} effective texts are too few)"
    return (
        f"epoch {row['epoch']}/{epochs}  {part.replace('_', ' ')}: loss {figure['loss']:.4f}, step"
        f" acceptance {figure['step_acceptance']:.4f}, {reward}, draft's weight"
        f" {figure['weight_p10']:.2f} / {figure['weight_p50']:.2f} / {figure['weight_p90']:.2f} (10"
        " / 50 / 90 %)"
    )


@contextmanager
def _sentences():
    """Lightning's refusals of its own options are for users: ValueError, one sentence."""
    try:
        yield
    except MisconfigurationException as error:
        raise ValueError(
            f"training refuses these options: {' '.join(str(error).split())}"
        ) from error


@contextmanager
def quiet():
    """Lightning's tips and advice are not for the person who trains a gate; errors still come
    through.
    """
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
