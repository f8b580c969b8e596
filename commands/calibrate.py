"""`diversed calibrate`: the largest bias whose quality drop is shown, on validation prompts, to
stay within a limit.

The biases are tried from the safest up; see `eval.calibration` for the test and its proof.

BUNDLE-calibration/ holds the bundle as it was, `bundle`, from which biases are counted, and the
decoded texts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from ..data.tasks import DataOptions
from ..eval.calibration import choose
from ..eval.results import read_results
from ..eval.sweep import Cell, Sweep, cell_of
from ..export.bundle_writer import FILES, add_bias, write_bundle
from ..export.card import with_calibration
from ..files import exclusive, sha256, write_whole
from ..runtime.bundle import load_bundle
from ..runtime.sampling import Sampling
from ..verifier.relax import Relaxation
from .eval import prepare

CLOSED = -1e4  # added to a logit: a weight of exactly 0 in float32
BIASES = [-8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0]


def calibrate(
    *,
    bundle: str,
    max_quality_drop: float,
    level: float = 0.05,
    biases: list[float] = BIASES,  # noqa: B006  never written to
    out: str | None = None,
    target: str | None = None,
    draft: str | None = None,
    task: str | None = None,
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    split: str = "validation",
    prompts: int = 500,
    method: str = "token",
    seeds: list[int] = [0],  # noqa: B006
    draft_length: int | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    max_prompt_tokens: int = 384,
    max_new_tokens: int | None = None,
    batch: int = 64,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int = 1,
    trust_remote_code: bool = False,
) -> bool:
    """Choose a bundle's bias on validation prompts and write it, with the evidence, into the
    bundle.

    Where no bias is shown to stay within the limit the gate is closed, its weight 0 everywhere, and
    the exit code is 1.

    Args:
        bundle: folder that `diversed export` wrote; it is changed.
        max_quality_drop: mean score that may be lost against exact decoding, such as 0.01 for one
            point of exact match.
        level: probability with which the chosen bias may lose more.
        biases: added to the gate's logit, counted from the bundle before it was ever calibrated.
        out: folder for the texts and for the bundle as it was; by default BUNDLE-calibration.
        target: folder, hub name or .gguf file of the model being served; by default the bundle's.
        draft: folder, hub name or .gguf file of the cheap model; by default the bundle's.
        task: sums, gsm8k, cnndm, xsum, wmt, mbpp, humaneval or jsonl; by default the bundle's. Its
            score is in [0, 1].
        data: where the task's rows come from.
        split: train, validation or test; figures on the split that the bias was chosen on are no
            evidence.
        prompts: how many prompts of the split; more prompts justify a larger bias.
        method: such as token or block.
        seeds: of the sampled texts; a prompt's texts are averaged, which makes differences smaller.
        draft_length: tokens drafted per target call; by default the bundle's.
        sampling: temperature, top_k, top_p, min_p of both models.
        max_prompt_tokens: longer prompts lose the end of their article, never the instruction or
            the question.
        max_new_tokens: tokens a text may have; by default the task's own number.
        batch: prompts decoded together.
        seed: of the choice and order of prompts.
        dtype: auto, float32, bfloat16 or float16.
        device: cpu, cuda, ..., or auto to spread the models.
        threads: CPU threads.
        trust_remote_code: run model code that comes with a checkpoint.
    """
    options = dict(locals())
    biases = _check(max_quality_drop, level, biases)
    folder = Path(out or f"{Path(bundle)}-calibration")
    with exclusive(folder):
        before = _before(Path(bundle), folder)
        card = load_bundle(before).card
        models = {
            role: options[role] or card["models"][role]["name"] for role in ("target", "draft")
        }
        names = {bias: str(Relaxation.of_bundle(before, bias)) for bias in biases}
        given = {name: value for name, value in options.items() if name not in OWN}
        sweep = prepare(
            **given | models,
            out=str(folder),
            methods=[method],
            relaxations=["none", *names.values()],
            temperatures=None,
            draft_lengths=None,
            chosen=[],
            num_shards=1,
            shard_index=0,
            task=task or card["task"],
            draft_length=draft_length or card["draft_length"],
        )
        if not sweep.task.scores_text:
            raise ValueError(
                f"the score {sweep.task.metric} has no bounds; calibrate on a task whose score is"
                " in [0, 1]"
            )
        tried = choose(_measured(sweep, names), max_quality_drop, level)
        _tell(tried, max_quality_drop, level)
        exact = _exact_score(sweep)
        if exact <= max_quality_drop:
            print(
                f"note: exact decoding itself scores {exact:.3f} on these prompts, so nothing could"
                f" lose more than {max_quality_drop:g} and this shows nothing about quality; give a"
                " smaller --max_quality_drop, or a task that the target can do"
            )
        evidence = {
            "max_quality_drop": max_quality_drop,
            "level": level,
            "test": "betting, arXiv 2010.09686, fixed sequence",
            "tried": tried,
            "method": method,
            "seeds": seeds,
            "head_sha256": sha256(before / "head.safetensors"),
            **{name: sweep.settings[name] for name in SETTINGS_STATED},
        }
        return _write(Path(bundle), before, evidence)


OWN = (
    "bundle",
    "max_quality_drop",
    "level",
    "biases",
    "method",
    "out",
    "target",
    "draft",
    "task",
    "draft_length",
)
SETTINGS_STATED = (
    "task",
    "split",
    "source",
    "prompts",
    "draft_length",
    "sampling",
    "target",
    "draft",
)


def _check(max_quality_drop: float, level: float, biases: list[float]) -> list[float]:
    """The biases from the safest up."""
    for name, value in (("max_quality_drop", max_quality_drop), ("level", level)):
        if not 0 < value < 1:
            raise ValueError(f"`{name}` must lie between 0 and 1, both excluded, got {value}")
    if not biases or not all(abs(bias) < -CLOSED for bias in biases):
        raise ValueError(
            f"`biases` must be numbers between {CLOSED:g} and {-CLOSED:g}, at least one, got"
            f" {biases}"
        )
    return sorted(set(biases))


def _before(bundle: Path, folder: Path) -> Path:
    """The bundle as it was before it was calibrated, kept in the folder; refuses one that is of
    another head.
    """
    kept = folder / "bundle"
    card = load_bundle(bundle).card
    if not kept.exists():
        if "calibration" in card:
            raise ValueError(
                f"bundle {bundle} was calibrated before, and {kept}, which holds it as it was, is"
                " not there; export it again with `diversed export`, then calibrate"
            )
        new = folder / ".bundle"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        for name in FILES:
            write_whole(new / name, (bundle / name).read_bytes())
        new.rename(kept)
    head = (
        card["calibration"]["head_sha256"]
        if "calibration" in card
        else sha256(bundle / "head.safetensors")
    )
    if head != sha256(kept / "head.safetensors"):
        raise ValueError(
            f"{folder} holds the calibration of another head; choose another --out or delete the"
            " folder"
        )
    return kept


def _measured(sweep: Sweep, names: dict[float, str]) -> Iterator[tuple[float, numpy.ndarray]]:
    """(bias, drops) of every bias, decoded when it is asked for."""
    sweep.begin()
    for bias, name in names.items():
        sweep.decode([cell for cell in sweep.cells if cell.relaxation in ("none", name)])
        yield bias, _drops(sweep, name)


def _drops(sweep: Sweep, name: str) -> numpy.ndarray:
    """[P] score of exact decoding minus that of the gate, means over a prompt's seeds, in the order
    of the prompts.
    """
    cells: dict[Cell, dict[int, float]] = {
        cell: {} for cell in sweep.cells if cell.relaxation in ("none", name)
    }
    for record in read_results(sweep.file):
        if cell_of(record) in cells:
            cells[cell_of(record)][record["prompt"]] = record["score"]
    signed = [
        numpy.array([scores[prompt] for prompt in range(len(sweep.prompts))])
        * (1 if cell.relaxation == "none" else -1)
        for cell, scores in cells.items()
    ]
    if not all(((side >= -1) & (side <= 1)).all() for side in signed):
        raise ValueError(
            f"the scores of {sweep.task.name} must lie in [0, 1]; calibrate on a task whose score"
            " does"
        )
    return 2 * numpy.mean(signed, axis=0)


def _exact_score(sweep: Sweep) -> float:
    scores = [
        record["score"] for record in read_results(sweep.file) if record["relaxation"] == "none"
    ]
    return sum(scores) / len(scores)


def _tell(tried: list[dict[str, Any]], limit: float, level: float) -> None:
    for found in tried:
        verdict = "within" if found["passed"] else "not shown to be within"
        print(
            f"bias {found['bias']:g}: quality drop {found['drop']:+.4f}, at most"
            f" {found['upper_bound']:.4f} at level {level:g}; {verdict} {limit:g} (p"
            f" {found['p']:.2g})"
        )


def _write(bundle: Path, before: Path, evidence: dict[str, Any]) -> bool:
    """Write the bundle with the largest bias that passed, or closed; whether one passed."""
    passed = [found["bias"] for found in evidence["tried"] if found["passed"]]
    bias = passed[-1] if passed else None
    loaded = load_bundle(before)
    add_bias(loaded.head, CLOSED if bias is None else bias)
    write_bundle(bundle, loaded.head, with_calibration(loaded.card, evidence | {"bias": bias}))
    if bias is None:
        print(
            f"no bias of {bundle} is shown to lose at most {evidence['max_quality_drop']:g} of the"
            f" score on {evidence['prompts']} prompts: its gate is closed now, which is exact"
            " decoding; give more --prompts, lower --biases or a larger --max_quality_drop"
        )
        return False
    print(
        f"bundle {bundle} now has bias {bias:g} in its gate; --relaxation '{bundle};bias=...'"
        " counts from there"
    )
    return True
