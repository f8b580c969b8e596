"""A head that reads the two rows alone, taken to another task or another pair.

    python experiments/transfer.py --elsewhere runs/verifiers/HEAD --target T ...

Compared on the test prompts of the new place: the head as it was trained elsewhere; the same
refitted on `refit` texts of the new place, at two learning rates; a head trained on those few texts
alone; a head trained there on `rollouts` texts. Each has the bias that validation prompts of the
new place allow. Options that this script does not know go to `gather` and `eval`.
"""

from __future__ import annotations

from pathlib import Path

from verifiers import FIT, HEADS, options, place_of


def main(words: list[str] | None = None) -> None:
    parser = options(__doc__, "runs/transfer")
    add = parser.add_argument
    add("--elsewhere", type=Path, required=True, help="folder of the head that is taken along")
    add("--rollouts", type=int, default=4096, help="texts of the head that is trained there")
    add("--refit", type=int, default=512, help="texts of the short refit")
    add("--also", nargs="*", default=[], help="other relaxations to measure")
    given, rest = parser.parse_known_args(words)
    place = place_of(given, rest)
    few, many = (
        place.traces(texts, given.relaxation, 0) for texts in (given.refit, given.rollouts)
    )
    fresh = [*FIT, *HEADS["logits"], "--trainer.max_epochs", given.epochs]
    start = ["--model.start", given.elsewhere]
    trained = {
        f"refitted-{given.refit}-slowly": (few, [*fresh, *start, "--model.lr", 3e-4]),
        f"refitted-{given.refit}": (few, [*fresh, *start]),
        f"here-{given.refit}": (few, fresh),
        f"here-{given.rollouts}": (many, fresh),
    }
    heads = {"elsewhere": given.elsewhere}
    for name, (traces, told) in trained.items():
        heads[name] = place.out / name
        place.train([traces], heads[name], 0, told)
    points = []
    for name, head in heads.items():
        points.append(place.chosen(place.bundle(head, place.out / name / "bundle")))
    place.report(given.also, points)


if __name__ == "__main__":
    main()
