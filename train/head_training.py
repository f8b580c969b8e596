"""`diversed train`: traces become a head. The same command again continues from the last finished
epoch.

    OUT/settings.json, last.ckpt, metrics.csv   see fit.py; figures: see `HeadFigures` in module.py
    OUT/head.safetensors  the trained head, written at the end
    OUT/train.json        its kind and sizes, settings, figures and where its traces came from,
                          written last

Several processes (`--trainer.devices 2 --trainer.strategy ddp`, or a launcher's) share the texts of
every batch and give the head of one process up to rounding. To the byte they differ, so a run is
continued with as many as it began.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pytorch_lightning import Trainer, seed_everything

from ..files import MOST_THREADS, exclusive, read_settings, sha256, versions, within, write_object
from ..runtime.bundle import HEAD, SIZES, head_sha256, write_head
from .datamodule import TraceModule, TraceOptions
from .fit import TrainerOptions, build_trainer, fit, quiet, sentences, settle
from .module import HeadModule, HeadOptions
from .record import RECORD, refuse_other_head

# What changes the result of a run besides the settings of the model and the data; other options of
# the Trainer stand under `trainer`.
TRAINER_SETTINGS = (
    "max_epochs",
    "max_steps",
    "gradient_clip_val",
    "accumulate_grad_batches",
    "precision",
    "world_size",
)
# Options of the Trainer that change nothing about the head, or whose effect is written down
# otherwise: as the number of processes, and as the device.
NOT_DECIDING = (
    *("accelerator", "strategy", "devices", "num_nodes", "plugins", "use_distributed_sampler"),
    *("logger", "log_every_n_steps", "enable_autolog_hparams", "profiler", "callbacks"),
    *("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "model_registry"),
    *("num_sanity_val_steps", "limit_test_batches", "limit_predict_batches", "inference_mode"),
    *("detect_anomaly", "barebones", "default_root_dir"),
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
    trainer: options of Lightning's Trainer over fit.DEFAULTS, such as max_epochs, devices, strategy
             and plugins.
    seed:    decides held-out prompts, order of texts and the start of a head with a hidden layer.
    threads: CPU threads; the same number gives the same head.
    """
    model.check()
    with quiet(), sentences():
        texts = TraceModule.of(data, seed, model.features, model.blend, model.objective)
        seed_everything(seed, verbose=False)
        module = HeadModule(model, texts.draft_hidden, texts.target_hidden)
        within(1, MOST_THREADS, threads=threads)
        deciding = {
            "threads": threads,
            "start_sha256": head_sha256(Path(model.start)) if model.start else None,
            "trainer": _deciding({**vars(TrainerOptions()), **trainer}),
        }
        return _train(build_trainer(out, **trainer), module, texts, Path(out), deciding)


def _deciding(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Those options of a Trainer that decide the head, as plain data."""
    others = (*TRAINER_SETTINGS, *NOT_DECIDING)
    chosen = {name: value for name, value in trainer.items() if name not in others}
    return json.loads(json.dumps(chosen, default=str))


def _train(
    trainer: Trainer, model: HeadModule, data: TraceModule, folder: Path, deciding: dict
) -> Path:
    """Train, or continue, or notice that there is nothing left to do; then write the head."""
    threads = deciding["threads"]
    torch.set_num_threads(threads)
    batch = data.options.batch
    if batch % trainer.world_size:
        raise ValueError(
            f"`batch` must be a multiple of the {trainer.world_size} processes that share its"
            f" texts, got {batch}"
        )
    if trainer.world_size > 1:
        # Else Lightning chooses a number by the machine.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    first = trainer.is_global_zero
    with exclusive(folder) if first else nullcontext():
        settings = _settings(trainer, model, data) | deciding
        settle(folder, settings, write=False)
        if (folder / RECORD).is_file() and (folder / HEAD).is_file():
            refuse_other_head(folder, read_settings(folder / RECORD))
            if first:
                print(f"{folder} is already trained; choose another --out to train again")
            return folder
        model.started()  # a head to start from that does not fit is refused at once
        data.setup()
        _refuse_too_few(trainer, model, data)
        if first:
            settle(folder, settings)
            _announce(model, data)
        fit(trainer, model, data, folder)
        if first:
            write_head_of(folder, model, data.folders, settings, data.manifest)
    return folder


def _settings(trainer: Trainer, model: HeadModule, data: TraceModule) -> dict:
    """Everything the result depends on, as plain data."""
    return {
        **model.settings,
        "batch": data.options.batch,
        "validation": data.options.validation,
        "reward": data.options.reward,
        **{name: getattr(trainer, name) for name in TRAINER_SETTINGS},
        "seed": data.seed,
        "device": trainer.strategy.root_device.type,
        "traces_sha256": _traces_sha256(data),
        "versions": versions(("diversed", "torch", "pytorch-lightning")),
    }


def _traces_sha256(data: TraceModule) -> str:
    """The manifest's checksum, for several folders that of their checksums; it names every shard by
    checksum.
    """
    if len(data.checksums) == 1:
        return data.checksums[0]
    return hashlib.sha256("".join(data.checksums).encode()).hexdigest()


def _refuse_too_few(trainer: Trainer, model: HeadModule, data: TraceModule) -> None:
    """ValueError for an objective or a patience that these texts cannot serve."""
    prompt = data.texts.prompt
    if model.objective.compares and len(prompt) == len(prompt.unique()):
        raise ValueError(
            f"the traces in {data.folders[0]} have one text a prompt, so a reward cannot be"
            " compared with the mean of its prompt; gather with --samples 4, or train with"
            " --model.objective attribution"
        )
    if model.objective.labels == "all":
        told = data.texts.harm[~data.texts.harm.isnan()]
        what = None if len(told) else "no position is labelled"
        if len(told) and told.min() == told.max():
            what = f"all {len(told)} labels say {told[0]:g}"
        if what:
            raise ValueError(
                f"{what} in {', '.join(map(str, data.folders))}, so there is nothing to learn"
                " apart; gather more, or from another task"
            )
    if model.patience and not (len(data.held_index) and trainer.limit_val_batches):
        raise ValueError(
            "`patience` waits for the loss on held-out prompts, and none are held out; give"
            " --data.validation 0.1 and two prompts or more, or --model.patience 0"
        )


def _announce(model: HeadModule, data: TraceModule) -> None:
    texts = data.texts
    tokens, prompts = int(texts.length.sum()), len(texts.prompt.unique())
    print(
        f"{len(texts)} texts of {prompts} prompts, {tokens} tokens; {len(data.held_index)} texts"
        f" are held out; mean reward {texts.reward.mean():.3f}",
        flush=True,
    )
    if model.objective.compares and not texts.per_text["advantage"][data.train_index].any():
        print(
            "note: the texts of every prompt have equal rewards, so only the acceptance term can"
            " teach anything"
        )


def write_head_of(
    folder: Path, model: HeadModule, traces: list, settings: dict, manifest: dict
) -> None:
    """Write head.safetensors, then train.json: its presence says that the run is done.

    traces: folders of the texts; manifest: of the newest of them.
    """
    head = model.head.cpu()
    if not all(torch.isfinite(tensor).all() for tensor in head.state_dict().values()):
        raise ValueError(
            f"training in {folder} ended in numbers that are not finite; lower lr and choose"
            " another --out"
        )
    path = write_head(folder, head)
    trained = {
        "format": 1,
        "head": {name: getattr(head, name) for name in ("features", "offset", *SIZES)},
        "head_sha256": sha256(path),
        "settings": settings,
        "traces": [str(folder) for folder in traces],
        "traces_sha256": settings["traces_sha256"],
        "manifest": {key: value for key, value in manifest.items() if key != "shards"},
        "figures": model.history,
        "versions": versions(("torch", "pytorch-lightning", "safetensors")),
    }
    write_object(folder / RECORD, trained)
    print(f"head: {path}\nfigures: {folder / 'metrics.csv'} and {folder / 'train.json'}")
