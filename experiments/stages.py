"""The commands of the product, called one after the other for one pair and task."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from diversed import cli
from diversed.verifier.relax import parse

BIASES = (-8, -6, -5, -4, -3, -2, -1, 0, 1, 2)
SAMPLES = 4  # texts of a training prompt


def diversed(*words: object) -> None:
    """Run `diversed WORDS` in this process, and stop where it stops."""
    line = [str(word) for word in words]
    print(f"\n$ diversed {shlex.join(line)}", flush=True)
    if code := cli.main(line):
        raise SystemExit(code)


@dataclass(frozen=True)
class Place:
    """A pair and a task, and the folder of all that is made there; a finished stage is kept.

    options:    what `gather` and `eval` are told of the pair and the task.
    validation: prompts on which a threshold is chosen.
    test:       prompts of the figures.
    max_drop:   mean score that a head may cost.
    likelihood: the score is the target's mean log-probability of a token, for tasks without
        references.
    """

    out: Path
    options: list[str]
    validation: int = 500
    test: int = 1000
    max_drop: float = 0.02
    likelihood: bool = False

    def gather(self, out: Path, texts: int, relaxation: str, *words: object) -> None:
        """Texts of training prompts, with hidden states."""
        prompts = ["--prompts", texts // SAMPLES, "--samples", SAMPLES, "--hidden"]
        relaxed = ["--relaxation", relaxation]
        diversed("gather", "--out", out, *prompts, *relaxed, *words, *self.options)

    def traces(self, texts: int, relaxation: str, seed: int) -> Path:
        """The folder of `texts` texts; those of fewer are the first of those of more."""
        out = self.out / f"traces-{texts}-{seed}"
        self.gather(out, texts, relaxation, "--seed", seed)
        return out

    def train(self, traces: list[Path], out: Path, seed: int, words: list[object]) -> None:
        """A head with its training folder `out`; `words` are other options of `diversed train`."""
        reward = ["--data.reward", "likelihood"] if self.likelihood else []
        given = ["--data.traces", *traces, "--data.batch", 32, "--seed_everything", seed]
        diversed("train", *given, "--out", out, *reward, *words)

    def bundle(self, head: Path, out: Path, bias: float = 0.0) -> Path:
        """The bundle `out` of a trained head."""
        if not out.exists():
            diversed("export", "--train", head, "--out", out, "--bias", bias, "--any_pair")
        return out

    def chosen(self, bundle: Path) -> str:
        """The bundle with the largest bias of a grid that validation prompts allow.

        Their mean score there is at most half of `max_drop` below that of exact decoding.
        """
        rule = parse(str(bundle))
        points = [str(rule.with_bias(bias)) for bias in BIASES]
        out = bundle.with_name("validation")
        scores = self.evaluate(out, "validation", self.validation, ["none", *points])
        limit = scores["none"] - self.max_drop / 2
        allowed = [point for point in points if scores[point] >= limit]
        return allowed[-1] if allowed else points[0]

    def evaluate(
        self, out: Path, split: str, prompts: int, relaxations: list[str], *words: object
    ) -> dict[str, float]:
        """relaxation -> mean score; `diversed eval` prints its table and its statements."""
        told = ["--split", split, "--prompts", prompts, "--relaxations", *relaxations, *words]
        diversed("eval", "--out", out, *told, *self.options)
        scores = defaultdict(list)
        for line in (out / "results.jsonl").read_text().splitlines():
            text = json.loads(line)
            score = text["score"]
            if self.likelihood:
                score = text["target_logprob"] / text["positions"]
            scores[text["relaxation"]].append(score)
        return {relaxation: mean(found) for relaxation, found in scores.items()}

    def report(self, others: list[str], chosen: list[str]) -> None:
        """The figures on test prompts, of `chosen` heads and of other relaxations."""
        points = ["none", *others, *chosen]
        self.evaluate(self.out / "test", "test", self.test, points, "--chosen", *chosen)
