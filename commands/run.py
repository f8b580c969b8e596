"""`diversed run`: the whole story, gather -> train -> export -> eval, with one settings file and
one folder.

    OUT/traces/   what `diversed gather` wrote          OUT/bundle/        what `diversed export` wrote
    OUT/train/    what `diversed train` wrote           OUT/results.jsonl  and frontier.png, by `diversed eval`
    OUT/report.html   what `diversed report` makes of all of them
    OUT/round-1/, round-2/, ... and rounds.json in place of traces/ and train/, with --rounds 2 or more

Every stage notices by itself what it has already done, so the same command again continues where it
stopped. All options of all stages are read before the first one starts: a typo in the last does not
cost the first.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from ..cli import command
from ..files import within
from . import options, settings

# What this story decides: where the stages find each other's results.
DECIDED = {"gather": {"out"}, "export": {"out", "train", "results"}, "eval": {"out", "dry_run"}}


def story(
    *,
    out: str | None = None,
    biases: list[float] = [0.0],  # noqa: B006  never written to
    rounds: int = 1,
    max_drop: float = 0.02,
) -> None:
    """Gather, train, export and evaluate with one settings file; complete stages are skipped.

    Options of a stage are written --STAGE.option; what several stages share may be written once, as
    in --seed 1. Those of training are listed by `diversed train --help` and written
    --train.model.lr and so on.

    Args:
        out: folder for everything; by default runs/ and the name of the settings file.
        biases: the trained gate is evaluated with each of these added to its logit; larger is
            faster and less exact.
        rounds: gather and train up to this often, each time at the gate so far, until the texts
            earn what the fit predicted; then bias 0 is the point that `max_drop` asks for.
        max_drop: mean reward that the gate of a round may cost by the fit's prediction, in the
            reward's unit.
    """


def run(args: list[str]) -> None:
    """Run every stage; `args` are the words of the command line."""
    args, file = options.take_config(args)
    values, where = (settings.load(file), file.name) if file else ({}, "")
    printing = "--print_config" in args
    stages = {stage: command(stage) for stage in DECIDED}
    parser = options.make_parser({"": story, **stages}, "run", skip=DECIDED)
    words, train_words = _share(
        [word for word in args if word != "--print_config"], options.option_names(parser)
    )
    default = {"out": f"runs/{file.stem if file else 'run'}"}
    parsed = options.check(parser, words, default | _chosen(values, parser, where), "run")
    plan = vars(parser.instantiate(parsed))
    _refuse_bad_names(plan["gather"], plan["eval"])
    out = Path(plan["out"])
    if ";" in str(out):
        raise ValueError(
            "`out` must have no `;` in it, as the trained gate is called by this folder's name,"
            f" got {out}"
        )
    trained = _check_training([*train_words, *_places(out)], values, where)
    if printing:
        print(_as_file(parser.dump(parsed), trained), end="")
        return
    _refuse_bad_rounds(plan, trained)
    _tell(
        out, plan, stages, [*([f"--config={file}"] if file else []), *train_words], _blend(trained)
    )


def _places(out: Path, traces: list[str] | None = None) -> list[str]:
    """The words that tell training where it reads and writes."""
    return [
        f"--data.traces={json.dumps(traces) if traces else out / 'traces'}",
        f"--out={out / 'train'}",
    ]


def _blend(trained: str) -> str:
    """What a relaxation of the trained gate ends in; `trained` is YAML of the options of training."""
    return ";blend=logits" if yaml.safe_load(trained)["model"]["blend"] == "logits" else ""


def _refuse_bad_rounds(plan: dict[str, Any], trained: str) -> None:
    within(1, rounds=plan["rounds"])
    if not 0 <= plan["max_drop"] < float("inf"):
        raise ValueError(
            f"`max_drop` must be a reward of at least 0 that may be lost, got {plan['max_drop']}"
        )
    if plan["rounds"] > 1 and not yaml.safe_load(trained)["data"]["validation"]:
        raise ValueError(
            "`rounds` compare a fit with texts of held-out prompts; give"
            " --train.data.validation 0.1"
        )


def _refuse_bad_names(gather: Any, evaluate: Any) -> None:
    """A relaxation or method that does not exist is found before the first stage, not by the stage
    that needs it.
    """
    from ..verifier.relax import parse
    from .eval import every_cell

    parse(gather.relaxation)
    at = evaluate.temperatures or [1.0], evaluate.draft_lengths or [evaluate.draft_length]
    every_cell(evaluate.methods, evaluate.relaxations, evaluate.seeds, *at)


def _tell(
    out: Path, plan: dict[str, Any], stages: dict, train_words: list[str], blend: str
) -> None:
    """The stages in order, a heading and the elapsed time for each."""
    bundle = str(out / "bundle")
    gather, export, evaluate = (vars(plan[stage]) for stage in stages)
    learned = [f"{bundle}{blend}" + (f";bias={bias:g}" if bias else "") for bias in plan["biases"]]
    evaluate["relaxations"] = [*evaluate["relaxations"], *learned]
    if plan["rounds"] > 1:
        chapters = {
            "rounds": lambda: _rounds(out, plan, stages, gather, export, train_words, blend)
        }
    else:
        chapters = {
            "gather": lambda: stages["gather"](out=str(out / "traces"), **gather),
            "train": lambda: _train([*train_words, *_places(out)]),
            "export": lambda: stages["export"](train=str(out / "train"), out=bundle, **export),
        }
    chapters["eval"] = lambda: stages["eval"](out=str(out), **evaluate)
    began = time.monotonic()
    for number, (stage, chapter) in enumerate(chapters.items(), 1):
        print(f"\n[{number}/{len(chapters)}] {stage}", flush=True)
        start = time.monotonic()
        chapter()
        print(f"{stage}: {_clock(time.monotonic() - start)}", flush=True)
    _publish(bundle, out, evaluate.get("trust_remote_code", False))
    print(f"\ndone in {_clock(time.monotonic() - began)}")
    for name, meaning in (
        ("results.jsonl", "one line a text"),
        ("report.html", "everything that was measured, for a browser"),
        ("frontier.png", "quality against tokens per target call"),
        ("bundle", "the gate; diversed decode --relaxation"),
    ):
        print(f"  {out / name}  ({meaning})")


def _rounds(
    out: Path,
    plan: dict[str, Any],
    stages: dict,
    gather: dict,
    export: dict,
    train_words: list[str],
    blend: str,
) -> None:
    """Gather and train in rounds; the last head becomes the bundle."""
    from ..train.rounds import Stages, run_rounds

    asked = export.pop("bias")

    def write(train: str, bundle: str, bias: float) -> None:
        stages["export"](**{**export, "train": train, "out": bundle, "bias": bias})

    commands = Stages(
        gather=lambda to, relaxation, first: stages["gather"](
            **{
                **gather,
                "out": to,
                "relaxation": relaxation,
                "first_sample": gather["first_sample"] + first,
            }
        ),
        train=lambda traces, to: _train([*train_words, *_places(Path(to).parent, traces)]),
        export=write,
    )
    first, samples = gather["relaxation"], gather["samples"]
    train, bias = run_rounds(out, commands, plan["rounds"], plan["max_drop"], first, samples, blend)
    write(str(train), str(out / "bundle"), bias + asked)


def _publish(bundle: str, out: Path, trust_remote_code: bool) -> None:
    """The measured figures go on the bundle's card and, with all else that was measured, on a page."""
    from ..eval.speed import summarise
    from ..export.bundle_writer import add_frontier
    from .report import write_page

    add_frontier(bundle, summarise(out / "results.jsonl"))
    write_page(runs=[str(out)], trust_remote_code=trust_remote_code)


def _chosen(values: dict, parser, file: str) -> dict:
    """What every stage takes from the settings file, under the stage's name; and the story's own
    section.
    """
    names = options.option_names(parser)
    own = [name for name in names if name.split(".")[0] not in DECIDED]
    chosen = settings.select({"run": values.get("run")}, "run", own, file)
    for stage in DECIDED:
        chosen[stage] = settings.select(values, stage, _under(names, stage), file)
    options.check_sections(values, ["run", *DECIDED], file)
    return chosen


def _share(args: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """Words for the parser of `run`, with shared options written out for every stage; and those for
    training.
    """
    words, train = [], []
    for option, values in _grouped(args):
        name = option.removeprefix("--").partition("=")[0]
        shared = name.split(".")[0] in settings.SHARED
        users = [stage for stage in DECIDED if shared and f"{stage}.{name}" in names]
        if name.startswith("train."):
            train += [f"--{option.removeprefix('--train.')}", *values]
        elif name in names or not users:
            words += [option, *values]
        else:
            for stage in users:
                words += [f"--{stage}.{option.removeprefix('--')}", *values]
            if name == "seed":
                train += [option.replace("--seed", "--seed_everything"), *values]
    return words, train


def _grouped(args: list[str]) -> list[tuple[str, list[str]]]:
    """Every option with the words after it that are its values."""
    groups = []
    for word in args:
        if word.startswith("--") or not groups:
            groups.append((word, []))
        else:
            groups[-1][1].append(word)
    return groups


def _check_training(words: list[str], values: dict, file: str) -> str:
    """Read the options of training before the first stage starts; as YAML, what training will run
    with.
    """
    parser = options.make_parser({"": command("train")}, "train")
    names = options.option_names(parser)
    shared = settings.shared({"run": None, **values}, "train")
    parsed = options.check(parser, words, settings.select(shared, "train", names, file), "train")
    _refuse_several_processes(parsed["trainer"])
    return parser.dump(parsed)


def _train(words: list[str]) -> Path:
    function = command("train")
    return function(**options.parse(function, words, "train"))


def _refuse_several_processes(trainer: Any) -> None:
    """Each would run the whole story, and all of them write what the last stages write."""
    from ..files import worker

    launched, _ = worker(None, None)
    if launched > 1 or str(trainer["devices"]) != "1" or trainer["num_nodes"] != 1:
        raise ValueError(
            f"`diversed run` is for one process, got {launched} with train.trainer.devices"
            f" {trainer['devices']} and num_nodes {trainer['num_nodes']}; run the stages one by"
            " one, of which gather and train share their work"
        )


def _as_file(parsed: str, trained: str) -> str:
    """What `--print_config` prints: a settings file with one section a stage."""
    from jsonargparse import get_loader

    plan = get_loader("yaml")(parsed)
    stages = {stage: plan.pop(stage) for stage in DECIDED}
    return yaml.safe_dump(
        {"run": plan, **stages, "train": get_loader("yaml")(trained)}, sort_keys=False
    )


def _under(names: list[str], stage: str) -> list[str]:
    return [name.removeprefix(f"{stage}.") for name in names if name.startswith(f"{stage}.")]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
