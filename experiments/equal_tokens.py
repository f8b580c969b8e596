"""What a head is worth by what it is told, at equal numbers of generated tokens.

    python experiments/equal_tokens.py --temperature 1
    python experiments/equal_tokens.py --temperature 0

    reinforce       the paper's objective on-policy: 32 fresh texts an update; not at temperature 0
    attribution     texts under a static weight, and their rewards
    counterfactual  labels of importance, each by continuing the text; objective judge
    suffix          labels by teacher forcing, which generates nothing; objective judge
    both            half of the tokens for attribution, half for counterfactual labels; one fit

Every stage is a command of the product. A head is used at the largest bias of a grid whose mean
score on validation prompts is at most half of `max_drop` below exact decoding's. What came out
stands in results/learning-equal-tokens.csv, which --csv writes: one row a head, on test prompts.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

from diversed.data.traces import read_manifest
from diversed.eval.summary import summarise
from diversed.verifier.relax import Relaxation
from stages import BIASES, diversed

NEW = ("--max_new_tokens", 96)
LENGTH = 48  # tokens of a text of sums
LABELLED = {0: 631, 1: 775}  # tokens of a text with its counterfactual labels, by temperature
FIT = ("--model.width", 32, "--model.lr", 5e-3, "--trainer.max_epochs", 40, "--model.patience", 8)
ORACLE = "diversed.assets.sums:oracle"
COLUMNS = ("temperature", "told", "tokens", "seed", "bias", "score", "score low", "score high")
COLUMNS += ("minus exact", "minus exact low", "minus exact high", "step acceptance")
COLUMNS += ("tokens per call", "of the gap")


@dataclass(frozen=True)
class Plan:
    """What is the same for all heads."""

    out: Path
    temperature: float
    validation: int
    test: int
    max_drop: float
    weight: float
    weight_of_acceptance: float

    @property
    def cold(self) -> tuple:
        """The option of `gather` that says the temperature."""
        return "--sampling.temperature", self.temperature

    def head(self, told: str, tokens: int, seed: int) -> Path:
        """The bundle of a head that was told this, for so many generated tokens."""
        place = self.out / f"{told}-{tokens}-{seed}"
        if told == "reinforce":
            updates = max(1, tokens // (32 * LENGTH))
            given = ("--updates", updates, "--seed", seed, "--prompts", 8 * updates, *NEW)
            fit = ("--model.width", 32, "--model.lr", 2e-2)
            fit += ("--model.lambda_", self.weight_of_acceptance)
            diversed("reinforce", "--out", place / "train", *given, *fit)
        else:
            traces = getattr(self, f"_{told}")(place, tokens, seed)
            objective = "judge" if told in ("counterfactual", "suffix") else "attribution"
            words = ("--model.objective", objective, "--seed_everything", seed, "--data.batch", 32)
            diversed("train", "--data.traces", *traces, "--out", place / "train", *words, *FIT)
        bundle = place / "bundle"
        if not bundle.exists():
            diversed("export", "--train", place / "train", "--out", bundle)
        return bundle

    def _attribution(self, place: Path, tokens: int, seed: int) -> list[Path]:
        rule = f"ensemble:{self.weight}" if self.temperature else f"coin:{self.weight}"
        texts = ("--prompts", max(8, tokens // (4 * LENGTH)), "--samples", 4)
        return [self._gather(place / "texts", seed, *texts, "--relaxation", rule)]

    def _counterfactual(self, place: Path, tokens: int, seed: int) -> list[Path]:
        prompts = max(8, tokens // LABELLED[bool(self.temperature)])
        words = ("--prompts", prompts, "--samples", 1, "--label", "counterfactual")
        return [self._gather(place / "labels", seed, *words)]

    def _suffix(self, place: Path, tokens: int, seed: int) -> list[Path]:
        words = ("--prompts", max(8, tokens // LENGTH), "--samples", 1, "--label", "suffix")
        return [self._gather(place / "suffix", seed, *words)]

    def _both(self, place: Path, tokens: int, seed: int) -> list[Path]:
        half = tokens // 2
        texts = self._attribution(place, half, seed)
        return texts + self._counterfactual(place, half, seed)

    def _gather(self, out: Path, seed: int, *words: object) -> Path:
        diversed("gather", "--out", out, "--seed", seed, "--go_on", *words, *NEW, *self.cold)
        return out

    def point(self, bundle: Path, bias: float) -> str:
        """The relaxation by a head at a bias."""
        blend = "" if self.temperature else "choice"
        return str(replace(Relaxation.of_bundle(bundle, bias), blend=blend))

    def evaluate(self, out: Path, split: str, prompts: int, relaxations: list[str]) -> list[dict]:
        """A row of figures for each relaxation."""
        told = ("--split", split, "--prompts", prompts, "--batch", 64, "--methods", "token")
        told += ("--draft_lengths", 10, "--temperatures", self.temperature)
        diversed("eval", "--out", out, *told, "--relaxations", "none", *relaxations, *NEW)
        return summarise(out / "results.jsonl")

    def chosen(self, bundle: Path) -> float:
        """The largest bias that validation prompts allow."""
        points = {self.point(bundle, bias): bias for bias in BIASES}
        out = bundle.with_name("validation")
        rows = self.evaluate(out, "validation", self.validation, list(points))
        limit = rows[0]["score"] - self.max_drop / 2
        found = [
            points[key] for key, row in zip(points, rows[1:], strict=True) if row["score"] >= limit
        ]
        return max(found, default=BIASES[0])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/equal-tokens"), help="folder for everything")
    add("--temperature", type=float, default=1.0, choices=(0.0, 1.0))
    add(
        "--told",
        nargs="+",
        default=["reinforce", "attribution", "counterfactual", "suffix", "both"],
    )
    add("--tokens", nargs="+", type=int, default=[50_000, 150_000, 450_000])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of prompts, texts and training")
    add("--weight", type=float, default=0.4, help="static weight of the texts of attribution")
    add("--lambda_", type=float, default=1.0, help="weight of REINFORCE's acceptance term")
    add("--max_drop", type=float, default=0.02, help="mean score that a head may cost")
    add("--validation_prompts", type=int, default=300)
    add("--test_prompts", type=int, default=1000)
    add("--csv", type=Path, help="file of the rows, written again after each head")
    given = parser.parse_args(words)
    numbers = (
        given.validation_prompts,
        given.test_prompts,
        given.max_drop,
        given.weight,
        given.lambda_,
    )
    plan = Plan(given.out / f"T{given.temperature:g}", given.temperature, *numbers)
    exact, oracle = plan.evaluate(plan.out / "oracle", "test", plan.test, [ORACLE])
    rows = [
        row_of(plan, name, found, exact, oracle)
        for name, found in (("exact", exact), ("oracle", oracle))
    ]
    for seed in given.seeds:
        for tokens in given.tokens:
            for told in given.told:
                if told == "reinforce" and not plan.temperature:
                    continue
                bundle = plan.head(told, tokens, seed)
                bias = plan.chosen(bundle)
                point = plan.point(bundle, bias)
                found = plan.evaluate(bundle.with_name("test"), "test", plan.test, [point])[1]
                row = row_of(plan, told, found, exact, oracle)
                rows.append(row | {"tokens": spent(bundle.parent), "seed": seed, "bias": bias})
                print(rows[-1], flush=True)
                write(rows, given.csv)


def spent(place: Path) -> int:
    """Tokens that were generated for a head."""
    if not list(place.glob("*/manifest.json")):
        figures = json.loads((place / "train" / "train.json").read_text())["figures"]
        return int(figures[-1]["generated"])
    total = 0
    for manifest in map(read_manifest, (path.parent for path in place.glob("*/manifest.json"))):
        total += sum(entry.get("generated", entry["tokens"]) for entry in manifest["shards"])
    return total


def row_of(plan: Plan, told: str, found: dict, exact: dict, oracle: dict) -> dict:
    """The row of a head on test prompts; of the gap: of the tokens per call between exact decoding
    and the oracle.
    """
    least, most = (each["tokens_per_call"] for each in (exact, oracle))
    row = {"temperature": f"{plan.temperature:g}", "told": told}
    row |= {"step acceptance": f"{found['step_acceptance']:.3f}"}
    row |= {"tokens per call": f"{found['tokens_per_call']:.2f}"}
    row |= {"score": f"{found['score']:.3f}"}
    row |= {f"score {end}": f"{found[f'score_{end}']:.3f}" for end in ("low", "high")}
    if found["difference"] is not None:
        row["minus exact"] = f"{found['difference']:+.3f}"
        row |= {
            f"minus exact {end}": f"{found[f'difference_{end}']:+.3f}" for end in ("low", "high")
        }
    row["of the gap"] = f"{(found['tokens_per_call'] - least) / (most - least):.0%}"
    return row


def write(rows: list[dict], file: Path | None) -> None:
    if file:
        with file.open("w", newline="", encoding="utf-8") as out:
            table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)


if __name__ == "__main__":
    main()
