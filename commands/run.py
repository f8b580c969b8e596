"""`diversed run`: the whole pipeline, gather -> train -> export -> eval, with one configuration and
one folder.

    OUT/traces/        what `diversed gather` wrote
    OUT/train/         what `diversed train` wrote
    OUT/bundle/        what `diversed export` wrote
    OUT/results.jsonl  and frontier.png, by `diversed eval`
    OUT/report.html    what `diversed report` makes of all of them

With --rounds 2 or more, OUT/round-1/, round-2/, ... and rounds.json take the place of traces/ and
train/.

Every stage notices by itself what it has already done, so the same command again continues where it
stopped. All options of all stages are read before the first one starts: a typo in the last does not
cost the first.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionParser, ArgumentParser, get_loader

from ..eval.results import RESULTS, read_results
from ..eval.results import SETTINGS as EVAL_SETTINGS
from ..eval.summary import summarise
from ..eval.sweep import cell_of
from ..export.bundle_writer import add_frontier
from ..files import Folder, duration, read_settings, within, worker
from ..runtime.bundle import add_bias, sha256_of_head
from ..runtime.model import check_device, load_tokenizer
from ..train.fit import build_trainer, quiet, sentences
from ..train.record import read_trained
from ..train.rounds import Stages as RoundStages
from ..train.rounds import run_rounds
from ..verifier.relax import Relaxation
from . import settings
from .export import calibrated_from
from .options import (
    add_options,
    call,
    check,
    check_sections,
    filled,
    grouped,
    make_parser,
    option_names,
    take_configs,
)
from .report import write_page
from .table import command

# What the pipeline decides itself: where the stages find each other's results.
DECIDED = {
    "gather": {"out"},
    "export": {"out", "train", "results"},
    "eval": {"out", "dry_run"},
    "train": set(),
}
SETTINGS = "run.json"  # what decides the bundle besides the options that the stages look after
LATER = {"out": "", "data": {"traces": ""}}  # for training, which cannot do without these

WRITTEN = {
    "results.jsonl": "one line a text",
    "report.html": "everything that was measured, for a browser",
    "frontier.png": "quality against tokens per target call",
    "bundle": "the head; diversed decode --relaxation",
}
Stages = dict[str, dict[str, Any]]  # the options of every stage


def run(args: list[str]) -> None:
    """Run every stage; `args` are the words of the command line."""
    args, files = take_configs(args)
    parser = _parser()
    names = option_names(parser)
    words = [word for word in _for_every_stage(args, names) if word != "--print_config"]
    stem = "-".join(file.stem for file in files) or "run"
    parsed = check(parser, words, {"out": f"runs/{stem}"} | _from_files(files, names), "run")
    parsed["train.out"] = str(Path(parsed.out) / "train")
    parsed["train.data.traces"] = str(Path(parsed.out) / "traces")
    plan = vars(parser.instantiate(parsed))
    stages = {stage: vars(plan.pop(stage)) for stage in DECIDED}
    own = {name: value for name, value in plan.items() if name != "config"}
    _refuse_bad(stages, **own)
    if "--print_config" in args:
        whole = get_loader("yaml")(parser.dump(parsed))
        sections = {stage: whole.pop(stage) for stage in DECIDED}
        print(yaml.safe_dump({"run": whole, **sections}, sort_keys=False), end="")
    else:
        pipeline(stages, **own)


def pipeline(
    stages: Stages,
    *,
    out: str | None = None,
    biases: list[float] = [0.0],  # noqa: B006  never written to
    rounds: int = 1,
    max_drop: float = 0.02,
) -> None:
    """Gather, train, export and evaluate with one configuration; complete stages are skipped.

    Options of a stage are written --STAGE.option, such as --train.model.lr; what several stages
    share may be written once, as in --seed 1.

    Args:
        stages: the options of every stage.
        out: folder for everything; by default runs/ and the name of the settings file.
        biases: the trained head is evaluated with each of these added to its logit; larger is
            faster and less exact.
        rounds: gather and train up to this often, each time with the head so far, until the texts
            earn what the fit predicted; then bias 0 is the point that `max_drop` asks for.
        max_drop: mean reward that the head of a round may cost by the fit's prediction, in the
            reward's unit.
    """
    _read_prompts(stages)
    folder = Path(out)
    place = Folder(folder, SETTINGS)
    exported = {name: value for name, value in stages["export"].items() if name != "overwrite"}
    deciding = {"export": exported, "rounds": rounds, "max_drop": max_drop}
    if begun := place.begun():  # else a bundle would be replaced before `eval` refuses it
        place.refuse_others(begun, deciding)

    def gather(**decided: Any) -> None:
        _stage(stages, "gather", **decided)
        place.begin(deciding)

    learned = [str(Relaxation.of_bundle(folder / "bundle", bias or None)) for bias in biases]
    relaxations = [*stages["eval"]["relaxations"], *learned]
    if rounds > 1:
        work = {"rounds": lambda: _rounds(folder, stages, rounds, max_drop, gather)}
    else:
        work = {
            "gather": lambda: gather(out=str(folder / "traces")),
            "train": lambda: _stage(stages, "train"),
            "export": lambda: _export(stages, str(folder / "train"), str(folder / "bundle")),
        }
    work["eval"] = lambda: _evaluate(stages, folder, relaxations)
    began = time.monotonic()
    for number, (stage, do) in enumerate(work.items(), 1):
        print(f"\n[{number}/{len(work)}] {stage}", flush=True)
        start = time.monotonic()
        do()
        print(f"{stage}: {duration(time.monotonic() - start)}", flush=True)
    if not _measured_before(folder):
        add_frontier(folder / "bundle", summarise(folder / RESULTS))
    write_page(runs=[str(folder)], trust_remote_code=stages["eval"]["trust_remote_code"])
    print(f"\ndone in {duration(time.monotonic() - began)}")
    for name, meaning in WRITTEN.items():
        print(f"  {folder / name}  ({meaning})")


def _stage(stages: Stages, stage: str, **decided: Any) -> Any:
    return call(command(stage), **stages[stage] | decided)


def _export(stages: Stages, train: str, bundle: str, bias: float = 0.0) -> None:
    """Write a bundle; its bias is added to the one that was asked for. One that was calibrated
    since stays as it is.
    """
    bias += stages["export"]["bias"]
    if calibrated := calibrated_from(bundle):
        _, head = read_trained(train)
        add_bias(head, bias)
        if calibrated["head_sha256"] == sha256_of_head(head):
            print(f"bundle {bundle} was calibrated and stays as it is (bias {calibrated['bias']})")
            return
    _stage(stages, "export", train=train, out=bundle, bias=bias)


def _rounds(
    folder: Path, stages: Stages, most: int, max_drop: float, gather: Callable[..., None]
) -> None:
    """Gather and train in rounds; the last head becomes the bundle."""
    options, data = stages["gather"], stages["train"]["data"]

    def gather_more(out: str, relaxation: str, first: int) -> None:
        # A head so far is to lose little, so its texts seldom fail.
        go_on = options["go_on"] or relaxation != options["relaxation"]
        first += options["first_sample"]
        gather(out=out, relaxation=relaxation, first_sample=first, go_on=go_on)

    def fit(traces: list[str], out: str) -> None:
        _stage(stages, "train", out=out, data=replace(data, traces=traces))

    def write(train: str, bundle: str, bias: float) -> None:
        # The bias that was asked for is for the last bundle alone.
        _stage(stages, "export", train=train, out=bundle, bias=bias)

    made = RoundStages(gather_more, fit, write)
    first = options["relaxation"]
    train, bias = run_rounds(folder, made, most, max_drop, first, options["samples"])
    _export(stages, str(train), str(folder / "bundle"), bias)


def _evaluate(stages: Stages, folder: Path, relaxations: list[str]) -> None:
    if _measured_before(folder):
        _refuse_other_texts(stages, folder, relaxations)
        print(
            f"{folder / RESULTS} is of the bundle before it was calibrated and stays; measure it as"
            f" it is now with: diversed eval --relaxations none {folder / 'bundle'} --out OTHER"
        )
    else:
        _stage(stages, "eval", out=str(folder), relaxations=relaxations)


def _refuse_other_texts(stages: Stages, folder: Path, relaxations: list[str]) -> None:
    """Refuse results of a bundle as it was that are not the texts which are asked for."""
    options = stages["eval"] | {"out": str(folder), "relaxations": relaxations}
    asked = filled(command("eval"), options)
    prompts, begun = asked["prompts"], read_settings(folder / EVAL_SETTINGS)
    wanted = {"prompts": prompts.prompts, "seed": prompts.seed, "split": prompts.split}
    other = [name for name, value in wanted.items() if begun.get(name) != value]
    texts = Counter(map(cell_of, read_results(folder / RESULTS)))
    lacking = [cell for cell in asked["grid"].cells() if texts[cell] < begun.get("prompts", 0)]
    if other or lacking:
        what = f"other {other[0]}" if other else f"no whole {lacking[0].relaxation}"
        raise ValueError(
            f"{folder / RESULTS} holds {what} and is of the bundle before it was calibrated, so"
            f" nothing can be added to it; measure the bundle as it is now with: diversed eval"
            f" --relaxations none {folder / 'bundle'} --out OTHER"
        )


def _measured_before(folder: Path) -> bool:
    """Whether the results in the folder are of the bundle as it was before its calibration."""
    return bool(calibrated_from(folder / "bundle")) and (folder / RESULTS).is_file()


def _parser() -> ArgumentParser:
    """Options of `pipeline`, and those of every stage under the stage's name."""
    parser = make_parser(pipeline, "run", skip={"stages"})
    for stage, decided in DECIDED.items():
        inner = ArgumentParser(exit_on_error=False)
        add_options(inner, command(stage), decided)
        parser.add_argument(f"--{stage}", action=ActionParser(parser=inner))
    return parser


def _from_files(files: list[settings.File], names: list[str]) -> dict[str, Any]:
    """What the settings files say: the section `run`, and what every stage takes, under its
    name.
    """
    own = [name for name in names if name.split(".")[0] not in DECIDED]
    sections = [replace(file, values={"run": file.values.get("run")}) for file in files]
    values = settings.chosen(sections, "run", own)
    # A section `run` tells a file of several commands from one of training alone.
    whole = [replace(file, values={"run": None, **file.values}) for file in files]
    for stage in DECIDED:
        inner = [name.partition(".")[2] for name in names if name.startswith(f"{stage}.")]
        values[stage] = settings.chosen(whole, stage, inner)
    values["train"] = settings.merge(LATER, values["train"])
    check_sections(files, ["run", *DECIDED])
    return values


def _for_every_stage(args: list[str], names: list[str]) -> list[str]:
    """The words, with an option that stages share written out for each of them."""
    words = []
    for option, values in grouped(args):
        name, equals, value = option.removeprefix("--").partition("=")
        users = []
        if name not in names and name.split(".")[0] in settings.SHARED:
            users = [f"{stage}.{name}" for stage in DECIDED if stage != "train"]
            users += ["train.seed_everything"] if name == "seed" else []
        users = [user for user in users if user in names]
        for user in users:
            words += [f"--{user}{equals}{value}", *values]
        if not users:
            words += [option, *values]
    return words


def _refuse_bad(
    stages: Stages, out: str, biases: list[float], rounds: int, max_drop: float
) -> None:
    """What a late stage would refuse is refused before the first one starts."""
    places = {stage: dict.fromkeys(decided, out) for stage, decided in DECIDED.items()}
    asked = {stage: filled(command(stage), stages[stage] | places[stage]) for stage in DECIDED}
    train = stages["train"]
    asked["eval"]["grid"].cells()
    if ";" in out:
        raise ValueError(
            "`out` must have no `;` in it, as the trained head is called by this folder's name,"
            f" got {out}"
        )
    train["model"].check()
    _refuse_several_processes(vars(train["trainer"]))
    with quiet(), sentences():
        build_trainer(out, **vars(train["trainer"]))
    within(1, rounds=rounds)
    if not 0 <= max_drop < float("inf"):
        raise ValueError(
            f"`max_drop` must be a reward of at least 0 that may be lost, got {max_drop}"
        )
    if rounds > 1 and not train["data"].validation:
        raise ValueError(
            "`rounds` compare a fit with texts of held-out prompts; give"
            " --train.data.validation 0.1"
        )


def _read_prompts(stages: Stages) -> None:
    """Prompts and devices that a late stage would refuse are refused before the first starts."""
    for stage in ("gather", "eval"):
        asked = filled(command(stage), stages[stage] | dict.fromkeys(DECIDED[stage], ""))
        models, prompts = asked["models"], asked["prompts"]
        check_device(models.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the stage says it again
            task = prompts.load()
        tokenizer = load_tokenizer(models.target, models.trust_remote_code)
        task.encode_all(tokenizer, prompts.max_prompt_tokens)


def _refuse_several_processes(trainer: dict[str, Any]) -> None:
    """Each would run the whole pipeline, and all of them write what the last stages write."""
    launched, _ = worker(None, None)
    if launched > 1 or str(trainer["devices"]) != "1" or trainer["num_nodes"] != 1:
        raise ValueError(
            f"`diversed run` is for one process, got {launched} with train.trainer.devices"
            f" {trainer['devices']} and num_nodes {trainer['num_nodes']}; run the stages one by"
            " one, of which gather and train share their work"
        )
