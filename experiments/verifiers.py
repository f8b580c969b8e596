"""What a gate is worth by how it was trained: objective x features x number of rollouts, thresholds
chosen apart.

A rollout is one sampled text of a training prompt. Of every head the bias is chosen on validation
prompts, the largest of `biases` whose mean score there is at most `max_drop` / 2 below exact
decoding's, and reported on test prompts; these texts are not counted as rollouts, and every head
spends the same. Texts are sampled from the blend token by token, the law of speculative decoding
under it, so step acceptance, the mean over positions of 1 - TV(draft, blend), is exact at every
position. `gap` is the share of the step acceptance between exact decoding and the oracle gate.

    attribution   harms by maximum likelihood from one batch of texts at `relaxation`
    rounds        the same number of texts in three rounds, the later two at the gate so far
    reinforce     the paper's objective on the batch of attribution
    likelihood    attribution with the target's log-probability of a text as reward: no labels
    bounded       most step acceptance for a bound on the log-likelihood that a text loses: no rewards at all
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from diversed.commands.bench import measure
from diversed.commands.export import export
from diversed.data.batches import TraceOptions
from diversed.data.batches import likelihood as likelihood_of
from diversed.data.gathering import gather
from diversed.data.tasks import DataOptions
from diversed.data.traces import read_manifest, read_shards, write_manifest
from diversed.eval.quality import bootstrap, paired_bootstrap
from diversed.eval.statement import statements
from diversed.train.fit import train
from diversed.train.module import HeadOptions
from diversed.train.objectives import acceptance, substitution
from diversed.train.rounds import Stages, run_rounds

ROUNDS = 3
FIT = dict(objective="attribution", lr=3e-3, patience=4)
OBJECTIVES = {
    "attribution": FIT,
    "rounds": FIT,
    "reinforce": dict(objective="reinforce", lr=3e-3),
    "likelihood": FIT,
    "bounded": dict(objective="bounded", bound=30.0, lr=3e-3),
}
# Linear on hidden states overfits (held-out loss .082 against .041 with one hidden layer and decay,
# 4,096 texts).
HEADS = {
    "logits": dict(width=32),
    "hidden": dict(width=32, weight_decay=1.0),
    "both": dict(width=32, weight_decay=1.0),
}


def run(
    *,
    out: str = "runs/verifiers",
    target: str = "sums-target",
    draft: str = "sums-draft",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    objectives: list[str] = list(OBJECTIVES),  # noqa: B006, B008
    features: list[str] = list(HEADS),  # noqa: B006, B008
    rollouts: list[int] = [1024, 4096, 9984],  # noqa: B006
    gathered: int = 9984,
    seeds: list[int] = [0],  # noqa: B006
    relaxation: str = "ensemble:0.2",
    static: list[str] = [f"ensemble:{weight}" for weight in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8)],  # noqa: B006
    also: list[str] = [],  # noqa: B006
    oracle: str | None = "diversed.assets.sums:oracle",
    biases: list[float] = [-8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0],  # noqa: B006
    max_drop: float = 0.02,
    likelihood: bool = False,
    validation_prompts: int = 500,
    test_prompts: int = 1000,
    max_prompt_tokens: int = 384,
    max_new_tokens: int | None = None,
    unit: int = 32,
    epochs: int = 12,
    threads: int = 1,
) -> list[dict]:
    """Rows of score and step acceptance on test prompts.

    Args:
        out: folder for everything; what is finished there is not done again.
        target: folder, hub name or .gguf file of the model being served.
        draft: folder, hub name or .gguf file of the cheap model.
        task: where prompts come from.
        data: where the task's rows come from.
        objectives: attribution, rounds, reinforce, likelihood, bounded.
        features: what the gates see: logits, hidden, both.
        rollouts: texts to learn from, four a prompt; multiples of 128 are whole shards.
        gathered: texts of the one batch whose beginnings the heads learn from; four a prompt.
        seeds: of the gathered prompts and texts and of training.
        relaxation: what the first texts are sampled from.
        static: static points; every head is compared with their line at its own score, see
            eval/statement.py.
        also: other relaxations to measure on the test prompts.
        oracle: relaxation whose step acceptance is the other end of the gap; none leaves the gap
            out.
        biases: thresholds to choose from.
        max_drop: loss of mean score that a head may cost.
        likelihood: score texts by the target's mean log-probability, for tasks without references.
        validation_prompts: prompts on which a threshold is chosen.
        test_prompts: prompts of the figures.
        max_prompt_tokens: longer prompts lose the end of their article, never the instruction or
            the question.
        max_new_tokens: tokens a text may have; by default the task's own number.
        unit: prompts a shard of training texts.
        epochs: most passes over the texts.
        threads: CPU threads.
    """
    prompts = {"train": gathered // 4, "validation": validation_prompts, "test": test_prompts}
    world = World(
        out,
        prompts,
        likelihood,
        target=target,
        draft=draft,
        task=task,
        data=data,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        threads=threads,
    )
    exact, ceiling = (
        world.measure("test", "none"),
        world.measure("test", oracle) if oracle else None,
    )
    rows = rows_of("exact", exact, exact, None)
    rows += rows_of("oracle", ceiling, exact, ceiling) if oracle else []
    points = {rule: world.measure("test", rule) for rule in [*static, *also]}
    for rule, cell in points.items():
        rows += rows_of(rule, cell, exact, ceiling)
    line = {"none": exact} | {rule: points[rule] for rule in static}
    baseline = world.measure("validation", "none")
    for seed, count, kind, objective in product(seeds, rollouts, features, objectives):
        name = f"{objective} {kind} {count} seed {seed}"
        settings = {**OBJECTIVES[objective], **HEADS[kind], "features": kind}
        bundle = world.head(
            name, objective, settings, count, seed, relaxation, unit, epochs, max_drop
        )
        bias = choose(world, bundle, biases, baseline, max_drop / 2)
        print(f"{name}: bias {bias:g}", flush=True)
        case, cell = f"{name}, bias {bias:g}", world.measure("test", f"{bundle};bias={bias:g}")
        rows += [*rows_of(case, cell, exact, ceiling), *against_static(case, cell, line)]
    return rows


class World:
    """One pair and task: gathers, trains and measures into one folder, and never twice; `common`
    goes to `gather`.
    """

    def __init__(self, out: str, prompts: dict[str, int], likelihood: bool, **common: Any):
        self.out, self.common, self.prompts, self.likelihood = (
            Path(out),
            common,
            prompts,
            likelihood,
        )

    def measure(self, split: str, relaxation: str) -> dict[str, list[float]]:
        """Per prompt: score, sums of step acceptance and substitutions over positions, number of
        positions.
        """
        count = self.prompts[split]
        folder = self.out / split / relaxation.replace("/", "_").replace(":", "_")
        gather(
            out=str(folder),
            prompts=count,
            samples=1,
            unit=min(count, 250),
            split=split,
            relaxation=relaxation,
            **self.common,
        )
        found: dict[str, list[float]] = {
            "score": [],
            "acceptance": [],
            "substitutions": [],
            "positions": [],
        }
        for shard in read_shards(folder):
            length = shard.start.diff()
            text = torch.repeat_interleave(torch.arange(shard.texts), length)
            weight, tv = shard.weight.double(), shard.tv.double()
            for name, value in (
                ("acceptance", acceptance(weight, tv)),
                ("substitutions", substitution(weight, tv)),
            ):
                found[name] += torch.zeros(shard.texts).double().index_add(0, text, value).tolist()
            found["score"] += (likelihood_of(shard) if self.likelihood else shard.reward).tolist()
            found["positions"] += length.tolist()
        return found

    def head(
        self,
        name: str,
        objective: str,
        settings: dict,
        count: int,
        seed: int,
        relaxation: str,
        unit: int,
        epochs: int,
        max_drop: float,
    ) -> str:
        """The bundle of a head trained on `count` texts."""
        folder = self.out / name.replace(" ", "-")
        reward = "likelihood" if self.likelihood or objective == "likelihood" else "task"
        hidden = settings["features"] != "logits"

        def fit(traces: list[str], out: str) -> None:
            data = TraceOptions(traces, 32, reward=reward)
            train(data, out, HeadOptions(**settings), {"max_epochs": epochs}, seed)

        def bundle(train: str, out: str, bias: float) -> None:
            if not Path(out).exists():
                export(train=train, out=out, bias=bias)

        if objective == "rounds":
            prompts = count // (4 * ROUNDS)
            stages = Stages(
                lambda out, rule, first: self.gather(out, rule, first, prompts, unit, seed, hidden),
                fit,
                bundle,
            )
            trained, _ = run_rounds(
                folder, stages, ROUNDS, max_drop, relaxation, 4, all_rounds=True
            )
        else:
            fit([self.traces(seed, relaxation, unit, count)], str(folder))
            trained = folder
        bundle(str(trained), str(folder / "bundle"), 0.0)
        return str(folder / "bundle")

    def traces(self, seed: int, relaxation: str, unit: int, count: int) -> str:
        """Folder of `count` texts, four a prompt: the beginning of one large batch, so that fewer
        are part of more.
        """
        folder = self.out / f"traces-{seed}"
        self.gather(str(folder), relaxation, 0, self.prompts["train"], unit, seed, hidden=True)
        return _first(folder, count // 4)

    def gather(
        self,
        out: str,
        relaxation: str,
        first: int,
        prompts: int,
        unit: int,
        seed: int,
        hidden: bool,
    ) -> None:
        gather(
            out=out,
            prompts=prompts,
            samples=4,
            first_sample=first,
            relaxation=relaxation,
            unit=unit,
            seed=seed,
            hidden=hidden,
            **self.common,
        )


def choose(
    world: World, bundle: str, biases: list[float], exact: dict[str, list[float]], most: float
) -> float:
    """The largest bias whose mean validation score is at most `most` below exact decoding's; by
    bisection.
    """
    low, high = 0, len(biases)  # biases[: low + 1] are taken to be good, biases[high:] to be bad
    limit = sum(exact["score"]) / len(exact["score"]) - most
    while high - low > 1:
        middle = (low + high) // 2
        score = world.measure("validation", f"{bundle};bias={biases[middle]:g}")["score"]
        low, high = (middle, high) if sum(score) / len(score) >= limit else (low, middle)
    return biases[low]


def _first(folder: Path, prompts: int) -> str:
    """The traces of the first `prompts` prompts of a folder, as a folder of links."""
    out = folder.with_name(f"{folder.name}-first-{prompts}")
    manifest = read_manifest(folder)
    shards = manifest["shards"][: -(-prompts // manifest["unit"])]
    out.mkdir(parents=True, exist_ok=True)
    for entry in shards:
        if not (out / entry["file"]).exists():
            os.link(folder / entry["file"], out / entry["file"])
    write_manifest(out, {**manifest, "prompts": len(shards) * manifest["unit"], "shards": shards})
    return str(out)


def rows_of(case: str, cell: dict, exact: dict, ceiling: dict | None) -> list[dict]:
    """Score, its paired difference to exact decoding, step acceptance and the share of the gap,
    with 95 % intervals.
    """
    mean, low, high = bootstrap(cell["score"])
    rows = [{"case": case, "value": mean, "unit": "score", "low": low, "high": high}]
    if cell is exact:
        return rows + [{"case": case, "value": _acceptance(cell), "unit": "step acceptance"}]
    mean, low, high = paired_bootstrap(cell["score"], exact["score"])
    rows.append({"case": case, "value": mean, "unit": "score - exact", "low": low, "high": high})
    rows.append({"case": case, "value": _acceptance(cell), "unit": "step acceptance"})
    substituted = sum(cell["substitutions"]) / len(cell["score"])
    rows.append({"case": case, "value": substituted, "unit": "substitutions a text"})
    if ceiling and ceiling is not cell:
        gap = _acceptance(ceiling) - _acceptance(exact)
        rows.append(
            {
                "case": case,
                "value": (_acceptance(cell) - _acceptance(exact)) / gap,
                "unit": "of the gap",
            }
        )
    return rows


def against_static(case: str, cell: dict, line: dict[str, dict]) -> list[dict]:
    """Step acceptance minus that of static blending at the same score, with its interval; without a
    line, nothing.
    """
    if len(line) < 2:
        return []
    records = [
        {
            "method": "token",
            "relaxation": name,
            "prompt": prompt,
            "tokens": [0],
            "target_calls": 1,
            **{column: values[column][prompt] for column in ("score", "acceptance", "positions")},
        }
        for name, values in (*line.items(), ("./head", cell))
        for prompt in range(len(values["score"]))
    ]
    found = next(s for s in statements(records, "token", "./head") if s.speed == "step acceptance")
    return [
        {
            "case": case,
            "value": found.difference,
            "unit": "step acceptance - static",
            "low": found.low,
            "high": found.high,
        }
    ]


def _acceptance(cell: dict[str, list[float]]) -> float:
    return sum(cell["acceptance"]) / sum(cell["positions"])


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/verifiers.py")
