"""Rounds: gather with the head so far and refit on all rounds, until the texts earn what the fit
predicted.

    OUT/round-1/traces, train, bundle  each round's texts, the head fitted on all rounds so far, and
                                       its bundle
    OUT/rounds.json                    each round's figures

A fit by `attribution` says what a substitution costs, and so what texts at any threshold will earn.
The bias of a round's bundle is the largest whose predicted loss of reward is at most `max_drop`;
the next round gathers there. If its mean reward agrees with the prediction, the fit holds at the
operating point and more rounds add little. Other objectives choose no threshold: their bias is 0,
their prediction is the mean reward reweighted by v_new / v_old.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..files import write_whole
from .datamodule import TraceModule, TraceOptions
from .losses import OBJECTIVES
from .module import logit_of
from .objectives import harm_of
from .record import read_trained

BIASES = [step / 4 for step in range(-40, 17)]


@dataclass(frozen=True)
class Stages:
    """The commands that a round consists of.

    gather: (out, relaxation, first_sample); train: (folders of traces, out); export: (train, out,
        bias).
    """

    gather: Callable[[str, str, int], object]
    train: Callable[[list[str], str], object]
    export: Callable[[str, str, float], object]


def run_rounds(
    out: Path,
    stages: Stages,
    most: int,
    max_drop: float,
    relaxation: str,
    samples: int,
    all_rounds: bool = False,
) -> tuple[Path, float]:
    """Up to `most` rounds; (folder of the last trained head, its bias). Finished stages are skipped
    when run again.

    max_drop:   loss of mean reward that the operating point may cost, in the reward's own unit.
    relaxation: what the first round's texts are sampled from; samples: texts a prompt and round.
    all_rounds: go on after agreement, for comparisons at an equal number of texts.
    """
    rows: list[dict] = []
    predicted = None
    for number in range(1, most + 1):
        here = out / f"round-{number}"
        traces = [str(out / f"round-{earlier}" / "traces") for earlier in range(1, number + 1)]
        print(f"\nround {number} of at most {most}, texts from {relaxation}", flush=True)
        stages.gather(traces[-1], relaxation, (number - 1) * samples)
        stages.train(traces, str(here / "train"))
        data = _held_out(traces, here / "train")
        row = {"round": number, "relaxation": relaxation, **_realised(data, predicted)}
        bias, predicted, base = operating_point(here / "train", data, max_drop)
        row |= {"bias": bias, "predicted_next": predicted, "predicted_drop_next": base - predicted}
        rows.append(row)
        write_whole(out / "rounds.json", json.dumps(rows, indent=2) + "\n")
        print(_line(row), flush=True)
        stages.export(str(here / "train"), str(here / "bundle"), bias)
        relaxation = str(here / "bundle")
        if row["agrees"] and not all_rounds:
            break
    return here / "train", bias


def operating_point(train: Path, data: TraceModule, max_drop: float) -> tuple[float, float, float]:
    """(bias, mean reward predicted there, mean reward of the target's own texts) on the held-out
    texts of `data`.

    Every position of a text is substituted by itself with probability w TV; a substitution costs
    its harm.
    """
    record, head = read_trained(train)
    if not OBJECTIVES[record["settings"]["objective"]].harms:
        kept = _kept_epoch(record)
        part = "held_out" if "held_out_reward_estimate" in kept else "train"
        return 0.0, kept[f"{part}_reward_estimate"], kept[f"{part}_reward"]
    earned = torch.zeros(len(BIASES), dtype=torch.float64)
    base, texts = 0.0, 0
    with torch.no_grad():
        for batch in data.val_dataloader():
            logit, graded = logit_of(head, batch), batch["graded"].any()
            expected = [predicted_rewards(logit, bias, batch, graded) for bias in BIASES]
            earned += torch.stack(expected).double().sum(1)
            base, texts = base + float(batch["base"].sum()), texts + len(logit)
    kept = [index for index, value in enumerate(earned / texts) if base / texts - value <= max_drop]
    best = max(kept, default=0)
    return BIASES[best], float(earned[best] / texts), base / texts


def _kept_epoch(training: dict) -> dict:
    """The figures of the epoch whose head a run kept: the best with `patience`, else the last."""
    figures = training["figures"]
    if not figures:
        raise ValueError(
            "`rounds` need a trained head, and --train.trainer.max_epochs 0 trains none"
        )
    watched = [row for row in figures if "held_out_loss" in row]
    if training["settings"]["patience"] and watched:
        return min(watched, key=lambda row: row["held_out_loss"])
    return figures[-1]


def predicted_rewards(logit: Tensor, bias: float, trace: dict[str, Tensor], graded: bool) -> Tensor:
    """[B] expected reward of a text at these contexts if the head were sigmoid(logit + bias).

    logit: [B, T], whose exp(-logit) is the harm of a substitution there; trace: tv, mask [B, T] and
        base [B].
    graded: harms are lost from the reward; else a harm h multiplies the probability of success by
        exp(-h).
    """
    substituted = torch.where(trace["mask"], torch.sigmoid(logit + bias) * trace["tv"], 0)
    harm = harm_of(logit)
    if graded:
        return trace["base"] - (substituted * harm).sum(1)
    return trace["base"] * torch.log1p(substituted * torch.expm1(-harm)).sum(1).exp()


def _held_out(traces: list[str], train: Path) -> TraceModule:
    """The data as the training saw it; its held-out texts are those of the newest round alone."""
    settings = json.loads((train / "train.json").read_text())["settings"]
    options = TraceOptions(traces, 64, settings["validation"], settings["reward"])
    kind = (settings[name] for name in ("seed", "features", "blend", "objective"))
    data = TraceModule.of(options, *kind)
    data.setup()
    if not len(data.held_index):
        raise ValueError(
            "`rounds` compare a fit with texts of held-out prompts, and 1 prompt leaves none;"
            " gather more"
        )
    newest = data.texts.folder[data.held_index] == len(traces) - 1
    data.held_index = data.held_index[newest]
    return data


def _realised(data: TraceModule, predicted: float | None) -> dict:
    """The newest round's texts: mean reward with a 95 % interval over prompts, and whether it holds
    the prediction.
    """
    texts = data.texts
    mine = texts.folder == int(texts.folder.max())
    _, prompt = torch.unique(texts.prompt[mine], return_inverse=True)
    means = torch.bincount(prompt, texts.reward[mine].double()) / torch.bincount(prompt)
    mean, error = float(means.mean()), float(means.std()) / math.sqrt(len(means))
    low, high = mean - 1.96 * error, mean + 1.96 * error
    acceptance, substituted = texts.speed(mine)
    return {
        "texts": int(mine.sum()),
        "reward": mean,
        "low": low,
        "high": high,
        "predicted": predicted,
        "agrees": predicted is not None and low <= predicted <= high,
        "step_acceptance": acceptance,
        "substitutions": substituted,
    }


def _line(row: dict) -> str:
    expected = ""
    if row["predicted"] is not None:
        holds = "the fit holds here" if row["agrees"] else "the fit does not hold yet"
        expected = f", predicted {row['predicted']:.4f}: {holds}"
    return (
        f"round {row['round']}: reward {row['reward']:.4f} [{row['low']:.4f},"
        f" {row['high']:.4f}]{expected}; step acceptance {row['step_acceptance']:.4f},"
        f" {row['substitutions']:.2f} substitutions a text; next at bias {row['bias']:g}, where the"
        f" fit predicts {row['predicted_next']:.4f}"
    )
