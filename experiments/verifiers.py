"""What a head is worth by how it was trained: objective x features x number of texts.

    python experiments/verifiers.py --features logits
    python experiments/verifiers.py --likelihood --max_drop 0.1 --target T --draft D ...

Every stage is a command of the product; options that this script does not know go to `gather` and
`eval`. The last command evaluates all heads on test prompts, each at the bias that validation
prompts allow, beside exact decoding, static blends and the oracle. What came out stands in
results/learning.csv.

    attribution   harms by maximum likelihood from one batch of texts at `relaxation`
    rounds        the same number of texts in three rounds, the later two at the head so far
    reinforce     the paper's objective on the batch of attribution
    likelihood    attribution with the target's log-probability of a text as reward: no labels
    bounded       most step acceptance for a bound on the log-likelihood a text loses: no rewards
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

from diversed.train.rounds import Stages, run_rounds
from stages import SAMPLES, Place

ROUNDS = 3
FIT = ["--model.objective", "attribution", "--model.lr", 3e-3, "--model.patience", 4]
OBJECTIVES = {
    "attribution": FIT,
    "rounds": FIT,
    "reinforce": ["--model.objective", "reinforce", "--model.lr", 3e-3],
    "likelihood": FIT,
    "bounded": ["--model.objective", "bounded", "--model.bound", 30, "--model.lr", 3e-3],
}
# Linear on hidden states overfits (held-out loss .082 against .041 with one hidden layer and decay,
# 4,096 texts).
HEADS = {
    "logits": ["--model.width", 32],
    "hidden": ["--model.width", 32, "--model.weight_decay", 1.0],
    "both": ["--model.width", 32, "--model.weight_decay", 1.0],
}
STATIC = [f"ensemble:{weight}" for weight in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)]


def main(words: list[str] | None = None) -> None:
    parser = options(__doc__, "runs/verifiers")
    add = parser.add_argument
    add("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    add("--features", nargs="+", default=list(HEADS), choices=HEADS, help="what the heads see")
    add("--rollouts", nargs="+", type=int, default=[1024, 4096, 9984], help="texts to learn from")
    add("--seeds", nargs="+", type=int, default=[0], help="of prompts, texts and training")
    add("--static", nargs="+", default=STATIC, help="static points that heads are compared with")
    add("--also", nargs="*", default=["diversed.assets.sums:oracle"], help="other relaxations")
    given, rest = parser.parse_known_args(words)
    place = place_of(given, rest)
    points = []
    for seed, texts, kind, objective in product(
        given.seeds, given.rollouts, given.features, given.objectives
    ):
        head = place.out / f"{objective}-{kind}-{texts}-seed-{seed}"
        trained = [*OBJECTIVES[objective], *HEADS[kind], "--model.features", kind]
        trained += ["--trainer.max_epochs", given.epochs]
        if objective == "rounds":
            bundle = rounds(place, head, texts, given.relaxation, seed, trained)
        else:
            by_score = place
            if objective == "likelihood":
                by_score = replace(place, likelihood=True)
            by_score.train([place.traces(texts, given.relaxation, seed)], head, seed, trained)
            bundle = place.bundle(head, head / "bundle")
        points.append(place.chosen(bundle))
    place.report([*given.static, *given.also], points)


def options(doc: str, out: str) -> argparse.ArgumentParser:
    """The options of this script and of transfer.py."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--out", default=out, help="folder for everything; what is finished is not done again")
    add("--relaxation", default="ensemble:0.2", help="what the first texts are sampled from")
    add("--max_drop", type=float, default=0.02, help="mean score that a head may cost")
    add("--likelihood", action="store_true", help="score texts by the target's log-probability")
    add("--validation_prompts", type=int, default=500)
    add("--test_prompts", type=int, default=1000)
    add("--epochs", type=int, default=12, help="most passes over the texts")
    return parser


def place_of(given: argparse.Namespace, rest: list[str]) -> Place:
    return Place(
        Path(given.out),
        rest,
        given.validation_prompts,
        given.test_prompts,
        given.max_drop,
        given.likelihood,
    )


def rounds(
    place: Place, out: Path, texts: int, relaxation: str, seed: int, words: list[object]
) -> Path:
    """The bundle of the last of three rounds, each of a third of the texts."""

    def gather(folder: str, rule: str, first: int) -> None:
        numbers = ["--first_sample", first, "--seed", seed]
        place.gather(Path(folder), texts // ROUNDS, rule, *numbers)

    def train(traces: list[str], folder: str) -> None:
        place.train(traces, Path(folder), seed, words)

    def export(trained: str, folder: str, bias: float) -> None:
        place.bundle(Path(trained), Path(folder), bias)

    stages = Stages(gather, train, export)
    trained, _ = run_rounds(
        out, stages, ROUNDS, place.max_drop, relaxation, SAMPLES, all_rounds=True
    )
    return place.bundle(trained, out / "bundle")


if __name__ == "__main__":
    main()
