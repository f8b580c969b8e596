"""Labelled contexts as a chooser sees them: features, tokens per step and seconds of every
shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.batches import held_out
from ..runtime.shape_network import setting_scalars
from ..runtime.shapes import Shape, parse_shape
from ..verifier.methods import METHODS
from .labels import read_labels
from .latencies import ROLES, Latencies

LATENCY_STEP = 64  # tokens of context between the latencies that a chooser is told


@dataclass(frozen=True)
class Contexts:
    """What the chooser of one method learns from and is judged by: S contexts and A shapes.

    hidden:      three of [S, H]; scalars: [S, 11], see `shape_network.ShapeNetwork`.
    tokens:      [S, A] new tokens of a step; seconds: [S, A] of that step.
    temperature: [S]
    prompt:      [S] number of the prompt; held: [S] bool, whether that prompt is held out.
    base:        [S] index of the best constant shape on the training contexts of the temperature.
    manifest:    of the labels.
    """

    shapes: list[Shape]
    hidden: list[Tensor]
    scalars: Tensor
    tokens: Tensor
    seconds: Tensor
    temperature: Tensor
    prompt: Tensor
    held: Tensor
    base: Tensor
    manifest: dict

    @property
    def cost(self) -> Tensor:
        """[S, A] seconds for a token."""
        return (self.seconds / self.tokens).double()

    def rate(self, choice: Tensor, chosen: Tensor, choosing: float = 0.0) -> float:
        """Tokens per second over the contexts `chosen` [S] bool with the shapes `choice` [S].

        Labelled contexts are evenly spaced tokens, but decoding starts a step only at about every
        n-th token if a step gives n tokens. Weighting each context by 1/n therefore gives the rate
        of whole texts: tokens over the sum of seconds/n.

        choosing: seconds that each step takes in addition.
        """
        cost = self.cost[chosen] + choosing / self.tokens[chosen].double()
        return 1 / float(cost.gather(1, choice[chosen].unsqueeze(1)).mean())


def read_contexts(
    folders: list[Path], method: str, latencies: Latencies, validation: float = 0.25, seed: int = 0
) -> Contexts:
    """The labels in these folders, one for each temperature, for one method."""
    parts, temperatures, settings = [], [], []
    for folder in folders:
        labels, manifest = read_labels(folder)
        count, sampling = len(labels["prompt"]), manifest["sampling"]
        parts.append(labels)
        temperatures.append(torch.full((count,), sampling["temperature"], dtype=torch.float64))
        settings.append(_setting(labels["length"], sampling, latencies))
    labels = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    every = [parse_shape(shape) for shape in manifest["shapes"]]
    branches = METHODS[method].drafting != "chain"
    usable = [a for a, shape in enumerate(every) if shape.paths == 1 or branches]
    shapes = [every[a] for a in usable]
    tokens = labels["efficiency"][:, manifest["methods"].index(method), usable]
    length = labels["length"].double().numpy()
    times = [torch.from_numpy(latencies.step(method, shape, length)) for shape in shapes]
    seconds = torch.stack(times, 1).float() / 1e3
    held = torch.isin(labels["prompt"], held_out(manifest["prompts"], validation, seed))
    temperature = torch.cat(temperatures)
    return Contexts(
        shapes=shapes,
        hidden=[labels[name].float() for name in ("target_before", "draft_before", "draft_root")],
        scalars=torch.cat([labels["scalars"], torch.cat(settings)], 1),
        tokens=tokens,
        seconds=seconds,
        temperature=temperature,
        prompt=labels["prompt"],
        held=held,
        base=_best_constant((seconds / tokens).double(), temperature, held),
        manifest=manifest,
    )


def _setting(length: Tensor, sampling: dict[str, Any], latencies: Latencies) -> Tensor:
    """[S, 5] SETTING_SCALARS of contexts, rounded as a chooser has them while it decodes."""
    middle = ((length // LATENCY_STEP).double() + 0.5) * LATENCY_STEP
    calls = [torch.from_numpy(latencies.call(role, 1, middle.numpy())) for role in ROLES]
    return setting_scalars(middle, sampling["temperature"], sampling["top_p"], *calls)


def _best_constant(cost: Tensor, temperature: Tensor, held: Tensor) -> Tensor:
    """[S] the shape with the least cost [S, A] on the training contexts of each temperature."""
    base = torch.zeros(len(cost), dtype=torch.long)
    for value in temperature.unique():
        here = temperature == value
        base[here] = cost[here & ~held].sum(0).argmin()
    return base


def compare(known: Contexts, choice: Tensor, choosing: float = 0.0) -> list[dict]:
    """Tokens per second on held-out prompts, one row for each temperature: of the base shape, of
    the choice [S], and of the best shape at each context. The last knows the labels, so no choice
    could reach it.

    `constant` says that the choice is not faster. Then the base shape stays, and its rate is the
    chooser's.

    choosing: seconds that a choice takes.
    """
    ideal, rows = known.cost.argmin(1), []
    for value in known.temperature.unique():
        here = known.held & (known.temperature == value)
        base, chosen = known.rate(known.base, here), known.rate(choice, here, choosing)
        row = {
            "temperature": float(value),
            "base_shape": str(known.shapes[int(known.base[here][0])]),
            "contexts": int(here.sum()),
            "base": base,
            "selector": max(base, chosen),
            "ideal": known.rate(ideal, here),
            "constant": chosen <= base,
        }
        rows.append(row)
    return rows


def summary(method: str, rows: list[dict]) -> str:
    """The figures of a chooser in words."""
    lines = []
    for row in rows:
        text = (
            f"{method} at T={row['temperature']:g}: {row['selector']:.1f} tokens/s predicted on"
            f" held-out prompts, {row['base']:.1f} with {row['base_shape']} always,"
            f" {row['ideal']:.1f} with the labels known"
        )
        if row.get("constant", False):
            text += f"; choosing is not faster, so {row['base_shape']} stays"
        lines.append(text)
    return "\n".join(lines)
