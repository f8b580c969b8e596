"""`diversed calibrate`: the largest bias whose quality drop is shown, on validation prompts, to
stay within a limit.

The biases are tried from the safest up; see `eval.calibration` for the test and its proof.

BUNDLE-calibration/ holds the bundle as it was, `bundle`, from which biases are counted, and the
decoded texts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy

from ..data.selection import BundlePrompts
from ..eval.calibration import choose
from ..eval.grid import Grid, prepare
from ..eval.results import RESULTS, SETTINGS, read_results
from ..eval.sweep import Sweep, cell_of
from ..export.bundle_writer import write_bundle
from ..export.card import with_calibration
from ..files import exclusive, write_whole
from ..runtime.bundle import FILES, add_bias, head_sha256, load_bundle
from ..runtime.groups import BundleModels, SharedRun, check_filters
from ..runtime.sampling import Sampling
from ..runtime.shape_network import FILES as SELECTOR
from ..verifier.methods import is_lossy
from ..verifier.relax import Relaxation

CLOSED = -1e4  # added to a logit: a weight of exactly 0 in float32
# What the evidence says of the sweep.
STATED = ("task", "split", "source", "prompts", "draft_length", "sampling", "target", "draft")
BIASES = [-8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0]


@dataclass(frozen=True)
class Limit:
    """A bundle, and how much quality it may cost.

    Args:
        bundle: folder that `diversed export` wrote; it is changed.
        max_quality_drop: mean score that may be lost against exact decoding, such as 0.01 for one
            point of exact match.
        level: probability with which the chosen bias may lose more.
        biases: added to the head's logit, counted from the bundle before it was ever calibrated.
    """

    bundle: str
    max_quality_drop: float
    level: float = 0.05
    biases: list[float] = field(default_factory=lambda: BIASES)

    def __post_init__(self):
        for name in ("max_quality_drop", "level"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"`{name}` must lie between 0 and 1, both excluded, got {value}")
        if not self.biases or not all(abs(bias) < -CLOSED for bias in self.biases):
            raise ValueError(
                f"`biases` must be numbers between {CLOSED:g} and {-CLOSED:g}, at least one, got"
                f" {self.biases}"
            )


@dataclass(frozen=True)
class Decoding:
    """How the prompts are decoded.

    Args:
        method: such as token or block.
        seeds: of the sampled texts; a prompt's texts are averaged, which makes differences smaller.
        draft_length: tokens drafted per target call; by default the bundle's.
        sampling: temperature, top_k, top_p, min_p of both models.
        batch: prompts decoded together.
    """

    method: str = "token"
    seeds: list[int] = field(default_factory=lambda: [0])
    draft_length: int | None = None
    sampling: Sampling = Sampling()
    batch: int = 64

    def __post_init__(self):
        check_filters(self.sampling)
        if self.sampling.greedy and len(self.seeds) > 1:
            raise ValueError(
                "several `seeds` would give the same texts at temperature 0, which draws nothing;"
                " give one"
            )
        if self.method == "plain" or is_lossy(self.method):
            raise ValueError(
                f"`method` {self.method} takes no head, so no bias changes its texts; calibrate"
                " token or another method"
            )


def calibrate(
    limit: Limit,
    models: BundleModels = BundleModels(),
    prompts: BundlePrompts = BundlePrompts(prompts=500, split="validation"),
    decoding: Decoding = Decoding(),
    *,
    out: str | None = None,
    threads: int = 1,
) -> bool:
    """Choose a bundle's bias on validation prompts and write it, with the evidence, into the
    bundle. Figures on the split that the bias was chosen on are no evidence.

    If no bias is shown to stay within the limit, the head is closed, its weight 0 everywhere, and
    the exit code is 1. More prompts justify a larger bias.

    Args:
        out: folder for the texts and for the bundle as it was; by default BUNDLE-calibration.
        threads: CPU threads.
    """
    bundle = Path(limit.bundle)
    folder = Path(out or f"{bundle}-calibration")
    run = SharedRun(str(folder), threads, 1, 0)
    with exclusive(folder), _tidied(folder / "bundle"):
        before = _before(bundle, folder)
        card = load_bundle(before).card
        biases = sorted(set(limit.biases))
        names = {bias: str(Relaxation.of_bundle(before, bias)) for bias in biases}
        grid = Grid(
            methods=[decoding.method],
            relaxations=["none", *names.values()],
            seeds=decoding.seeds,
            draft_length=decoding.draft_length or card.draft_length,
            sampling=decoding.sampling,
        )
        prompts = replace(prompts, task=prompts.task or card.task)
        sweep = prepare(run, models.of_bundle(before), prompts, grid, decoding.batch)
        if not sweep.task.scores_text:
            raise ValueError(
                f"the score {sweep.task.metric} has no bounds; calibrate on a task whose score is"
                " in [0, 1]"
            )
        most = limit.max_quality_drop
        tried = choose(_measured(sweep, names), most, limit.level)
        _tell(tried, most, limit.level)
        exact = _scores(sweep, "none").mean()
        if exact <= most:
            print(
                f"note: exact decoding itself scores {exact:.3f} on these prompts, so nothing could"
                f" lose more than {most:g} and this shows nothing about quality; give a smaller"
                " --max_quality_drop, or a task that the target can do"
            )
        evidence = {
            "max_quality_drop": most,
            "level": limit.level,
            "test": "betting, arXiv 2010.09686, fixed sequence",
            "tried": tried,
            "method": decoding.method,
            "seeds": decoding.seeds,
            "head_sha256": head_sha256(before),
            **{name: sweep.settings[name] for name in STATED},
        }
        return _write(bundle, before, evidence)


@contextmanager
def _tidied(kept: Path) -> Iterator[None]:
    """Take the copy of the bundle away again if the command is refused before it decodes."""
    new = not kept.exists()
    try:
        yield
    except BaseException:
        if new and not (kept.parent / RESULTS).exists() and not (kept.parent / SETTINGS).exists():
            shutil.rmtree(kept, ignore_errors=True)
        raise


def _before(bundle: Path, folder: Path) -> Path:
    """The bundle as it was before it was calibrated, kept in the folder; refuses one that is of
    another head.
    """
    kept = folder / "bundle"
    card = load_bundle(bundle).card
    if not kept.exists():
        if card.calibration:
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
    head = card.calibration["head_sha256"] if card.calibration else head_sha256(bundle)
    if head != head_sha256(kept):
        raise ValueError(
            f"{folder} holds the calibration of another head; choose another --out or delete the"
            " folder"
        )
    return kept


def _measured(sweep: Sweep, names: dict[float, str]) -> Iterator[tuple[float, numpy.ndarray]]:
    """(bias, drops [P]) of every bias, decoded when it is asked for. A drop is the score of exact
    decoding minus that of the head, each a mean over the seeds of a prompt.
    """
    sweep.begin()
    for bias, name in names.items():
        sweep.decode([cell for cell in sweep.cells if cell.relaxation in ("none", name)])
        yield bias, _scores(sweep, "none").mean(0) - _scores(sweep, name).mean(0)


def _scores(sweep: Sweep, relaxation: str) -> numpy.ndarray:
    """[seeds, P] the scores under one relaxation, in the order of the prompts."""
    cells = [cell for cell in sweep.cells if cell.relaxation == relaxation]
    scores = numpy.full((len(cells), len(sweep.prompts)), numpy.nan)
    for record in read_results(sweep.file):
        if cell_of(record) in cells:
            scores[cells.index(cell_of(record)), record["prompt"]] = record["score"]
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError(
            f"the scores of {sweep.task.name} must lie in [0, 1]; calibrate on a task whose score"
            " does"
        )
    return scores


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
    card = with_calibration(loaded.card, evidence | {"bias": bias})
    selector = bundle if (bundle / SELECTOR[0]).is_file() else None
    write_bundle(bundle, loaded.head, card, selector)
    if bias is None:
        print(
            f"no bias of {bundle} is shown to lose at most {evidence['max_quality_drop']:g} of the"
            f" score on {evidence['prompts']} prompts: its head is closed now, which is exact"
            " decoding; give more --prompts, lower --biases or a larger --max_quality_drop"
        )
        return False
    print(
        f"bundle {bundle} now has bias {bias:g} in its head; --relaxation '{bundle};bias=...'"
        " counts from there"
    )
    return True
