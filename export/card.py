"""The card of a bundle: what its head was trained on and for, and README.md, which says it to
people.

The README is a Hugging Face model card and a pure function of card.json.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from .. import __version__
from ..runtime.bundle import ROLES, Card, HeadCard
from ..verifier.head import KINDS, WeightHead

# Columns of `eval.summary.summarise` that go on a card.
MEASURED = (
    "method relaxation temperature draft_length requests score score_low score_high difference"
    " difference_low difference_high step_acceptance accepted_share tokens_per_call"
    " tokens_per_second mean_weight mean_bias substitutions"
).split()


def make_card(head: WeightHead, training: dict[str, Any], draft_length: int, bias: float) -> Card:
    """The card of a head that was just trained. training: train.json; its figures are not measured
    yet.
    """
    manifest = training["manifest"]
    settings = training.get("settings", {})
    return Card(
        models={role: manifest[role] for role in ROLES},
        tokenizer=manifest["tokenizer"],
        vocab=manifest["vocab"],
        token_table=manifest.get("token_table", "") if head.needs_tokens else "",
        head=HeadCard.of(head, settings.get("blend", "probabilities")),
        bias=bias,
        sampling=manifest["sampling"],
        draft_length=draft_length,
        task=manifest["task"],
        metric=manifest.get("metric", "score"),
        training={
            "traces_sha256": training["traces_sha256"],
            "relaxation": manifest["relaxation"],
            "settings": settings,
            "figures": training.get("figures", []),
        },
        versions={
            "diversed": __version__,
            "torch": version("torch"),
            "safetensors": version("safetensors"),
        },
    )


def with_frontier(card: Card, rows: list[dict[str, Any]]) -> Card:
    """The card with measured figures; rows are those of `eval.summary.summarise`."""
    return replace(card, frontier=[{name: row[name] for name in MEASURED} for row in rows])


def with_calibration(card: Card, evidence: dict[str, Any]) -> Card:
    """The card of a bundle whose bias `diversed calibrate` chose; evidence["bias"] is None if it
    closed the head.

    Figures measured before are dropped: their biases were counted from another head.
    """
    bias = card.bias + (evidence["bias"] or 0)
    return replace(card, bias=bias, calibration=evidence, frontier=[])


def model_card(card: Card) -> str:
    """README.md of a bundle: a Hugging Face model card made from card.json alone."""
    target, draft = card.models["target"], card.models["draft"]
    return _CARD.format(
        header=_header(card),
        target=_code(target["name"]),
        draft=_code(draft["name"]),
        target_hash=target["hash"],
        draft_hash=draft["hash"],
        task=card.task,
        features=_reads(card),
        net=f"one hidden layer of {card.head.width}" if card.head.width else "linear",
        sampling=", ".join(
            f"{name.replace('_', '-')} {value:g}" for name, value in card.sampling.items()
        ),
        draft_length=card.draft_length,
        bias=f"{card.bias:g}",
        traces=str(card.training["traces_sha256"])[:16],
        transformers=_TRANSFORMERS if card.custom_generate else "",
        calibration=_calibration(card.calibration, card.metric),
        cost=_cost(card.frontier, card.metric),
        portable=_BOUND if "hidden" in KINDS[card.head.features] else _PORTABLE,
        versions=", ".join(f"{name} {number}" for name, number in card.versions.items()),
    )


_READS = {
    "hidden": "the last hidden states of both models",
    "logits": "numbers computed from both rows",
    "tokens": "the classes of the most likely tokens and of the token before",
}


def _reads(card: Card) -> str:
    """What the head reads, and the rule that it starts from."""
    parts = " and ".join(_READS[part] for part in KINDS[card.head.features])
    return f"{parts}; it corrects the rule {_code(card.head.offset)}" if card.head.offset else parts


_PORTABLE = "It reads no hidden states: `any_pair=True` lets it be tried on another pair, untested."
_BOUND = "It reads hidden states, so it works with these two models only."


_CARD = """{header}
# Learned verifier for speculative decoding

A head that says, token by token, how much of the draft's distribution may replace the target's: text comes faster
than with exact speculative decoding, and it is no longer exactly the target's. The table below is the price that was
measured. Method: DIVERSED ([arXiv 2604.07622](https://arxiv.org/abs/2604.07622)); code: `diversed`.

| | |
|---|---|
| target | {target} (hash `{target_hash}`) |
| draft | {draft} (hash `{draft_hash}`) |
| task it was trained on | {task} |
| sampling | {sampling} |
| draft length | {draft_length} tokens |
| head | {net}, on {features} |
| bias | {bias}, part of the head's weights |
| traces | sha256 `{traces}` |

## Use

```
diversed decode --target TARGET --draft DRAFT --relaxation THIS_FOLDER --prompt "..."
```

```python
from diversed import load_bundle
bundle = load_bundle("THIS_FOLDER", target, draft)  # refuses models it was not trained for
```
{transformers}
One knob needs no retraining: `--relaxation "THIS_FOLDER;bias=-1"` is closer to the target, `bias=1` is faster.

{calibration}## What it costs

{cost}

## Limits

- The text is NOT distributed like the target's. Where exactness matters use `--relaxation none`.
- The figures hold for the task, the models and the sampling settings above; elsewhere measure first (`diversed eval`).
- The head reads what both models believe, softmax(logits), so its weights are the same at every temperature. What they
  cost is not. At temperature 0 the most likely token of the blend is taken; `;blend=choice` takes the draft's most likely
  token where the weight is above 1/2.
- {portable}

Made with {versions}.
"""

_TRANSFORMERS = """
In transformers, where `diversed` is installed:

```python
target.generate(**inputs, assistant_model=draft, custom_generate="THIS_FOLDER", trust_remote_code=True)
```
"""

_COST_NOTE = """
`{metric}` is the task's score with a 95 % bootstrap interval over prompts, then its difference to exact decoding,
paired by prompt. Step acceptance: mean over positions of 1 - TV(draft, relaxed target). Tokens per target call count
the bonus token. Bias: mean over positions of TV(target, relaxed target). Substitutions: expected number of tokens per
text that differ from the target's own."""


def _calibration(evidence: dict[str, Any] | None, metric: str) -> str:
    """The section on how the bias was chosen, "" where it was not."""
    if evidence is None:
        return ""
    limit, level = f"{evidence['max_quality_drop']:g}", f"{evidence['level']:g}"
    if evidence["bias"] is None:
        outcome = (
            f"No bias is shown to stay within {limit}: the head is CLOSED, decoding with it is"
            " exact decoding."
        )
    else:
        outcome = (
            f"The head holds a bias of {evidence['bias']:g}, the largest that is shown to lose at"
            f" most {limit}; the probability that it loses more is at most {level}. `;bias=` counts"
            " from there and is not covered."
        )
    lines = [
        (
            f"Chosen on {evidence['prompts']} prompts of {evidence['task']}, {evidence['split']},"
            f" with method {evidence['method']}, by fixed sequence testing (arXiv 2110.01052) of"
            f" the drop of {metric} against exact decoding. {outcome}"
        ),
        "",
        "| bias | drop | upper bound | p | |",
        "|---|---|---|---|---|",
    ]
    for found in evidence["tried"]:
        verdict = "within" if found["passed"] else "not shown"
        lines.append(
            f"| {found['bias']:g} | {found['drop']:+.4f} | {found['upper_bound']:.4f} |"
            f" {found['p']:.2g} | {verdict} |"
        )
    return "## How the bias was chosen\n\n" + "\n".join(lines) + "\n\n"


def _cost(frontier: list[dict[str, Any]], metric: str) -> str:
    if not frontier:
        return (
            "Not measured yet. `diversed eval` measures it; until then expect nothing from this"
            " bundle."
        )
    lines = [
        (
            f"| method | relaxation | {metric} | difference to exact | step acceptance | tokens per"
            " target call | bias | substitutions |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    points = {(row.get("temperature"), row.get("draft_length")) for row in frontier}
    for row in frontier:
        at = f" T {row['temperature']:g}, L {row['draft_length']}" if len(points) > 1 else ""
        difference = "-"
        if row["difference"] is not None:
            difference = (
                f"{row['difference']:+.3f} [{row['difference_low']:+.3f},"
                f" {row['difference_high']:+.3f}]"
            )
        lines.append(
            f"| {row['method']}{at} | {_code(row['relaxation'])} | {row['score']:.3f}"
            f" [{row['score_low']:.3f}, {row['score_high']:.3f}] | {difference} |"
            f" {row['step_acceptance']:.3f} | {row['tokens_per_call']:.2f} | {row['mean_bias']:.3f}"
            f" | {row['substitutions']:.2f} |"
        )
    where = " T: temperature, L: draft length." if len(points) > 1 else ""
    return (
        "\n".join(lines)
        + f"\n\n{frontier[0]['requests']} texts a row.{where}"
        + _COST_NOTE.format(metric=metric)
    )


def _header(card: Card) -> str:
    """YAML front matter; a json string is a YAML string."""
    names = [card.name(role) for role in ROLES]
    hub = [
        name
        for name in names
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name)
    ]
    lines = [
        "library_name: diversed",
        "pipeline_tag: text-generation",
        "tags:",
        "- speculative-decoding",
        "- diversed",
    ]
    lines += ["- custom_generate"] if card.custom_generate else []
    if hub:
        lines += ["base_model:", *(f"- {json.dumps(name)}" for name in hub)]
    return "\n".join(["---", *lines, "---"])


def _code(name: str) -> str:
    """A name as inline code in a table cell, whatever characters it has."""
    return "`" + re.sub(r"[`|\r\n]", "_", name) + "`"
