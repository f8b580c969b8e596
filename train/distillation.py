"""`diversed distill`: a draft is fine-tuned to its target. A learned head has to beat this
                       baseline.

The target samples texts of the task (`gather` with relaxation none), and the draft's rows are drawn
towards the target's on them: DistillSpec (Zhou 2023, arXiv 2310.08461) on the target's texts. The
losses are in draft.py. Training stops when step acceptance, 1 - TV, on held-out prompts no longer
rises, and the weights of the best epoch are kept.

    OUT/traces/         the texts, as `diversed gather` stores them
    OUT/cut-0-4/        the draft before training, if it is made of layers of the target; it lies
                        beside traces/
    OUT/settings.json, metrics.csv   see fit.py; row 0 of the figures is the draft before training.
                        last.ckpt is there until the draft is written
    OUT/adapter_model.safetensors, adapter_config.json   a LoRA adapter that peft and transformers
                        read; or a model, config.json, model.safetensors, ..., after training all
                        weights or layers of the target
    OUT/distill.json    figures and where everything came from, written last

Either is a draft for every command: `--draft OUT`. A run that was killed and continued ends with
the same bytes.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pytorch_lightning import seed_everything

from ..data.gathering import Rollouts, Stored, gather_traces
from ..data.selection import LongPrompts, SplitPrompts
from ..data.traces import MANIFEST, read_manifest
from ..files import DECIDING, exclusive, sha256, versions, within, write_object
from ..runtime.forward import fingerprint
from ..runtime.groups import Models, Run, SharedRun, check_filters
from ..runtime.model import adapter_base
from ..runtime.sampling import Sampling
from .draft import DraftModule, Fitting, Pace, Texts, refuse_other_output
from .draft_weights import DraftWeights, Trained, cut_draft
from .fit import CHECKPOINT, build_trainer, fit, on_device, quiet, refuse_spread, settle

DONE = "distill.json"
UNIT = 32  # prompts per shard of the texts
TRAINING = ("peft", "pytorch-lightning")  # whose versions decide the draft too
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
        check_filters(self.sampling)
        if self.sampling.greedy and self.samples > 1:
            raise ValueError(
                f"the {self.samples} `samples` of a prompt would be the same text at temperature 0,"
                " where nothing is drawn; give --samples 1"
            )


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
    settings = {"threads": run.threads, "versions": versions((*DECIDING, *TRAINING))}
    for group in (models, prompts, material, trained, fitting):
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
            models = replace(models, draft=cut_draft(traces.parent, models, trained.layers))
        sampling = material.sampling
        texts = Rollouts(material.samples, relaxation="none", sampling=sampling, go_on=True)
        split = SplitPrompts(**vars(prompts))
        alone = SharedRun(str(traces), run.threads, 1, 0)
        gather_traces(alone, models, split, texts, Stored(unit=UNIT))
        settings["traces_sha256"] = sha256(traces / MANIFEST)
        settle(folder, settings)
        pair = models.load()
        known = Texts(traces, pair, prompts.data)
        for model in (pair.target, pair.draft):
            refuse_other_output(model.module, model.name, known[0][0][None, :8].to(model.device))
        seed_everything(prompts.seed, verbose=False)
        weights = DraftWeights(pair.draft, trained)
        module = DraftModule(pair, known, fitting, material.sampling, prompts.seed)
        began = time.monotonic()
        _train(folder, module, models.device)
        names = weights.write(folder, settings["draft"], pair.tokenizer)
        origin = {
            "kind": weights.kind,
            "target": {"name": models.target, "hash": pair.target.hash},
            "base": {"name": settings["draft"], "hash": read_manifest(traces)["draft"]["hash"]},
            "files_sha256": {name: sha256(folder / name) for name in names},
            "settings": settings,
        }
        _report(folder, module, origin)
        seconds = time.monotonic() - began
        print(f"{seconds:.0f} s of training; use it with --draft {folder}", flush=True)
    return folder


def _train(folder: Path, module: DraftModule, device: str) -> None:
    """Train in the folder, or continue; the module has the weights of the best epoch then."""
    print(module.announcement(), flush=True)
    trainer = build_trainer(
        folder,
        callbacks=Pace(),
        max_epochs=module.fitting.epochs,
        gradient_clip_val=CLIP,
        **on_device(device),
    )
    fit(trainer, module, module.loader(), folder)


def _report(folder: Path, module: DraftModule, origin: dict) -> None:
    """Write distill.json, which says that the run is done; then no checkpoint is needed."""
    best, before, after = module.best["epoch"], module.history[0], module.measure()
    report = origin | {
        "format": 1,
        "hash": fingerprint(module.draft),
        "best_epoch": best,
        "before": {name: before[name] for name in after},
        "after": after,
        "figures": module.history,
        "versions": versions((*DECIDING, *TRAINING)),
    }
    write_object(folder / DONE, report)
    (folder / CHECKPOINT).unlink()  # several times the draft with its optimiser
    print(
        f"held out: step acceptance {before['held_out_acceptance']:.4f} before,"
        f" {after['held_out_acceptance']:.4f} after epoch {best}, as it is loaded"
    )
    if not best:
        print(
            "note: no epoch raised the acceptance on held-out prompts, so the draft is what it was"
        )


def _refuse_bad(models: Models, prompts: LongPrompts, trained: Trained) -> None:
    """ValueError with a sentence for options that do not fit together, before a model is loaded."""
    within(2, prompts=prompts.prompts)  # one to train on, one held out
    refuse_spread(models.device)
    if not (trained.layers or trained.full) and adapter_base(models.draft):
        raise ValueError(
            f"`draft` {models.draft} is an adapter already; give its base, or --full true"
        )
