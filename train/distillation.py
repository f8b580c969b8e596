"""`diversed distill`: a draft fine-tuned to its target, the baseline that a learned verifier has to
beat.

The target samples texts of the task itself (`gather` with relaxation none), and the draft's rows
are drawn towards the target's on them (Zhou 2023, DistillSpec, arXiv 2310.08461, on the target's
texts); the losses are in draft.py. Training stops when step acceptance, 1 - TV, on held-out prompts
no longer rises, and the weights of the best epoch are kept.

    OUT/traces/          the texts, as `diversed gather` stores them
    OUT/cut-0-4/         the draft before training, where it is made of layers of the target; it lies beside traces/
    OUT/settings.json, metrics.csv   as `diversed train` keeps them, last.ckpt until the draft is written; row 0 is the
                                     draft before training
    OUT/adapter_model.safetensors, adapter_config.json   a LoRA adapter that peft and transformers read; or, after
    OUT/config.json, model.safetensors, ...     training all weights or layers of the target, a model
    OUT/distill.json     figures and where everything came from, written last

Either is a draft for every command: `--draft OUT`. A run that was killed and continued ends with
    the same bytes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from pytorch_lightning import seed_everything
from safetensors.torch import save
from torch import nn

from ..data.batches import held_out
from ..data.gathering import Rollouts, Stored, gather_traces
from ..data.selection import LongPrompts, SplitPrompts
from ..data.tasks import DataOptions
from ..data.traces import MANIFEST, read_manifest
from ..files import DECIDING, exclusive, sha256, versions, within, write_whole
from ..runtime.groups import Models, Run, SharedRun
from ..runtime.model import Pair, adapter_base, fingerprint, load_module, load_tokenizer
from ..runtime.sampling import Sampling
from .draft import LOSSES, DraftModule, Pace, Texts, refuse_other_output
from .fit import CHECKPOINT, build_trainer, fit, quiet, settle

DONE = "distill.json"
UNIT = 32  # prompts per shard of the texts
CLIP = 1.0  # largest norm of the gradient


@dataclass(frozen=True)
class Material:
    """The texts that a draft learns from.

    Args:
        traces: folder for the target's texts, which runs that are compared may share; by default
            OUT/traces.
        samples: texts for each prompt.
        sampling: temperature, top_k, top_p, min_p of the texts and of acceptance; the loss knows
            the temperature alone.
    """

    traces: str | None = None
    samples: int = 1
    sampling: Sampling = Sampling()

    def __post_init__(self):
        within(1, samples=self.samples)


@dataclass(frozen=True)
class Trained:
    """What of a draft is trained.

    Args:
        layers: start from these layers of the target instead of a draft, with its embeddings, last
            norm and output layer; the result is a model, not an adapter.
        full: train all weights of the draft, in float32, instead of a low-rank adapter.
        rank: of the adapter's matrices.
        alpha: the adapter's product is scaled by alpha / rank.
        modules: linear layers that are adapted, such as q_proj v_proj; by default all but the
            output layer.
    """

    layers: list[int] | None = None
    full: bool = False
    rank: int = 16
    alpha: float = 32.0
    modules: list[str] = field(default_factory=list)

    def __post_init__(self):
        within(1, rank=self.rank)
        _refuse_no_positive("alpha", self.alpha)
        layers = self.layers
        if layers is not None and not (layers and layers[0] >= 0 and layers == sorted(set(layers))):
            raise ValueError(
                f"`layers` must be numbers of the target's layers, from 0 and rising, got {layers}"
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
        _refuse_no_positive("lr", self.lr)
        if not 0 < self.validation < 1:
            raise ValueError(
                "`validation` must be in (0, 1), the share of prompts held out, got"
                f" {self.validation}"
            )
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(LOSSES)}, got {self.loss!r}")


def _refuse_no_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a positive number, got {value}")


def distill_draft(
    run: Run,
    models: Models,
    prompts: LongPrompts,
    material: Material,
    trained: Trained,
    fitting: Fitting,
) -> Path:
    """Fine-tune a draft to its target on the target's own texts, or continue; the folder."""
    _refuse_bad(models, prompts, trained)
    groups = (models, prompts, material, trained, fitting)
    settings = {"threads": run.threads}
    for group in groups:
        settings |= asdict(group)
    del settings["traces"]
    if trained.layers:
        settings["draft"] = None  # none is looked at
    folder = Path(run.out)
    with quiet(), exclusive(folder):
        settle(folder, settings, write=False)
        if (folder / DONE).is_file():
            print(f"{folder} is already distilled; choose another --out to do it again")
            return folder
        run.use_threads()
        traces = Path(material.traces or folder / "traces")
        if trained.layers:
            models = replace(models, draft=_cut(traces.parent, models, trained.layers))
        texts = Rollouts(material.samples, relaxation="none", sampling=material.sampling)
        split = SplitPrompts(**vars(prompts))
        gather_traces(
            SharedRun(str(traces), run.threads, 1, 0), models, split, texts, Stored(unit=UNIT)
        )
        settings["traces_sha256"] = sha256(traces / MANIFEST)
        settle(folder, settings)
        return _Distilling(folder, settings, models.load(), prompts.data, traces).run()


class _Distilling:
    """One run in its folder, from the texts to the draft."""

    def __init__(self, folder: Path, settings: dict, pair: Pair, data: DataOptions, traces: Path):
        self.folder, self.settings, self.pair, self.traces = folder, settings, pair, traces
        self.texts = Texts(traces, pair, data)
        self.dtype, self.adapted = pair.draft.dtype, None
        for model in (pair.target, pair.draft):
            refuse_other_output(
                model.module, model.name, self.texts[0][0][None, :8].to(pair.target.device)
            )
        seed_everything(settings["seed"], verbose=False)
        self.draft = self._trainable()

    def _trainable(self) -> nn.Module:
        module, settings = self.pair.draft.module, self.settings
        if settings["full"]:
            return module.float().requires_grad_(True)
        from peft import LoraConfig, get_peft_model

        names = _chosen(linear_layers(module), settings["modules"])
        config = LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            target_modules=names,
            task_type="CAUSAL_LM",
        )
        self.adapted = get_peft_model(module, config)
        return module

    def run(self) -> Path:
        folder, settings, texts = self.folder, self.settings, self.texts
        mine = torch.isin(
            texts.owner, held_out(len(texts.prompts), settings["validation"], settings["seed"])
        )
        train, held = (chosen.nonzero().squeeze(1) for chosen in (~mine, mine))
        module = DraftModule(
            self.pair,
            self.draft,
            texts.loader(held, settings["batch"]),
            settings["loss"],
            Sampling(**settings["sampling"]),
            settings["lr"],
            settings["patience"],
        )
        self._announce(len(train), len(held), module)
        trainer = build_trainer(folder, callbacks=Pace(), **self._trainer_options())
        began = time.monotonic()
        fit(trainer, module, texts.loader(train, settings["batch"], settings["seed"]), folder)
        self._write(module)
        (
            folder / CHECKPOINT
        ).unlink()  # several times the draft with its optimiser, and nothing is left to continue
        print(
            f"{time.monotonic() - began:.0f} s of training; use it with --draft {folder}",
            flush=True,
        )
        return folder

    def _trainer_options(self) -> dict:
        kind, _, number = self.settings["device"].partition(":")
        return {
            "max_epochs": self.settings["epochs"],
            "gradient_clip_val": CLIP,
            "accelerator": kind,
            "devices": 1 if kind == "cpu" else [int(number or 0)],
        }

    def _announce(self, train: int, held: int, module: DraftModule) -> None:
        trained = sum(tensor.numel() for tensor in module.state_dict().values())
        tokens = sum(len(tokens) - before for tokens, before in self.texts.items)
        steps = -(-train // self.settings["batch"]) * self.settings["epochs"]
        print(
            f"{train} texts to train on and {held} held out, {tokens} tokens; {trained:,} weights"
            f" of {sum(tensor.numel() for tensor in self.draft.parameters()):,} are trained; at"
            f" most {steps} steps",
            flush=True,
        )

    def _write(self, module: DraftModule) -> None:
        """Write the draft of the best epoch, then distill.json: its presence says that the run is
        done.
        """
        adapter = bool(self.adapted) and not self.settings["layers"]
        names = self._write_adapter() if adapter else []
        if self.adapted:
            self.adapted.merge_and_unload()
        self.draft.to(self.pair.target.device, self.dtype)
        if not adapter:
            names = _save_model(self.folder, self.draft, self.pair.tokenizer)
        after = module.measure()
        origin = read_manifest(self.traces)["draft"]["hash"]
        written = {
            "format": 1,
            "kind": "adapter" if adapter else "model",
            "target": {"name": self.settings["target"], "hash": self.pair.target.hash},
            "base": {"name": self.settings["draft"], "hash": origin},
            "hash": fingerprint(self.draft),
            "files_sha256": {name: sha256(self.folder / name) for name in names},
            "best_epoch": module.best["epoch"],
            "before": {name: module.history[0][name] for name in after},
            "after": after,
            "settings": self.settings,
            "figures": module.history,
            "versions": versions((*DECIDING, "peft", "pytorch-lightning")),
        }
        write_whole(self.folder / DONE, json.dumps(written, indent=2) + "\n")
        before = module.history[0]["held_out_acceptance"]
        print(
            f"held out: step acceptance {before:.4f} before, {after['held_out_acceptance']:.4f}"
            f" after epoch {module.best['epoch']}, as it is loaded"
        )
        if not module.best["epoch"]:
            print(
                "note: no epoch raised the acceptance on held-out prompts, so the draft is what"
                " it was"
            )

    def _write_adapter(self) -> list[str]:
        from peft import get_peft_model_state_dict

        config = self.adapted.peft_config["default"]
        base = self.settings["draft"]
        config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).exists() else base
        config.inference_mode = True
        tensors = {
            name: tensor.cpu().contiguous()
            for name, tensor in get_peft_model_state_dict(self.adapted).items()
        }
        files = {
            "adapter_model.safetensors": save(tensors, metadata={"format": "pt"}),
            # peft writes its sets in an order that changes from process to process.
            "adapter_config.json": (
                json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted) + "\n"
            ),
        }
        for name, content in files.items():
            write_whole(self.folder / name, content)
        return list(files)


def linear_layers(module) -> list[str]:
    """Names of the linear layers, each once however often it is repeated, without the output layer."""
    from transformers.pytorch_utils import Conv1D

    output = module.get_output_embeddings()
    found = (
        name.rpartition(".")[2]
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and part is not output
    )
    return sorted(set(found))


def _chosen(known: list[str], asked: list[str]) -> list[str]:
    if unknown := sorted(set(asked) - set(known)):
        raise ValueError(
            f"`modules` must name linear layers of the draft, {', '.join(known)}; got"
            f" {unknown[0]!r}"
        )
    return sorted(set(asked)) or known


def _cut(folder: Path, models: Models, layers: list[int]) -> str:
    """The folder with the draft that has these layers of the target; made if missing."""
    cut = folder / f"cut-{'-'.join(map(str, layers))}"
    if not cut.is_dir():
        part = folder / f".{cut.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        module = load_module(models.target, models.dtype, "cpu", models.trust_remote_code)
        keep_layers(module, layers).save_pretrained(part)
        load_tokenizer(models.target, models.trust_remote_code).save_pretrained(part)
        os.replace(part, cut)
    return str(cut)


def keep_layers(module, layers: list[int]) -> nn.Module:
    """A copy of a Hugging Face causal model that has only these of its layers."""
    config = copy.deepcopy(module.config)
    text = config.get_text_config()
    count = text.num_hidden_layers
    if layers[-1] >= count:
        raise ValueError(
            f"`layers` must name some of the target's layers 0..{count - 1}, got {layers[-1]}"
        )
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in layers]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    where = next(
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count
    )
    kept = {f"{where}.{layer}.": f"{where}.{new}." for new, layer in enumerate(layers)}
    draft, weights = type(module)(config).to(module.dtype), {}
    for name, value in module.state_dict().items():
        if not name.startswith(f"{where}."):
            weights[name] = value
        for old, new in kept.items():
            if name.startswith(old):
                weights[new + name.removeprefix(old)] = value
    draft.load_state_dict(weights)
    draft.generation_config = module.generation_config
    return draft.eval()


def _save_model(folder: Path, module, tokenizer) -> list[str]:
    """Save a model and its tokenizer into the folder, each file whole; their names."""
    part = folder / ".model.part"
    shutil.rmtree(part, ignore_errors=True)
    for tensor in module.parameters():
        tensor.data = (
            tensor.data.clone()
        )  # a lean forward had laid some side by side, in one storage
    module.save_pretrained(part)
    tokenizer.save_pretrained(part)
    names = sorted(path.name for path in part.iterdir())
    for name in names:
        os.replace(part / name, folder / name)
    part.rmdir()
    return names


def _refuse_bad(models: Models, prompts: LongPrompts, trained: Trained) -> None:
    """ValueError with a sentence for options that do not fit together, before a model is loaded."""
    within(2, prompts=prompts.prompts)  # one to train on, one held out
    if models.device == "auto":
        raise ValueError(
            "`device` must be one device such as cpu or cuda:0; training does not spread a model,"
            " got auto"
        )
    if not (trained.layers or trained.full) and adapter_base(models.draft):
        raise ValueError(
            f"`draft` {models.draft} is an adapter already; give its base, or --full true"
        )
