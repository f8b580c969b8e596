"""How well a harmful token is told from a harmless one: AUC of features, rules and heads on labels.

    python experiments/judges.py LABELS --csv results/learning-judges.csv

LABELS is a folder of `diversed gather --label counterfactual --hidden true` at temperature 0. Every
figure is of held-out prompts: 5 folds of prompts, of which one at a time is judged by what was
fitted on the others. The AUC is that of "a right text becomes wrong"; its interval is a bootstrap
over prompts. The last columns are the difference to the divergence of the two rows, paired.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from diversed.data.importance import harm
from diversed.data.traces import read_manifest, read_shards
from diversed.runtime.model import load_tokenizer
from diversed.runtime.vocabulary import token_table
from diversed.train.objectives import judge
from diversed.verifier.features import FEATURES
from diversed.verifier.head import KINDS, WeightHead
from torch import Tensor
from torch.nn.functional import one_hot

FOLDS, STEPS = 5, 300
RESAMPLES = 2000
RULE = "reverse_kl"  # KL(target || draft), the criterion of the rule divergence
# Heads: (features, offset, weight decay of AdamW). Hidden states need a strong one.
HEADS = [(kind, "", 3.0 if "hidden" in parts else 0.1) for kind, parts in KINDS.items()]
HEADS += [("tokens", "divergence:0.3", 0.1), ("logits+tokens", "divergence:0.3", 0.1)]
HEADS += [("hidden", "divergence:0.3", 3.0), ("logits+tokens+hidden", "divergence:0.3", 3.0)]


@dataclass(frozen=True)
class Labelled:
    """L labelled positions.

    harm: [L] 0 or 1; prompt: [L]; logits, tokens, hidden: what heads read, [L, ...].
    """

    harm: Tensor
    prompt: Tensor
    logits: Tensor
    tokens: Tensor
    hidden: Tensor


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--csv", type=Path, help="file of the rows")
    given = parser.parse_args(words)
    torch.manual_seed(0)
    data = read(given.labels)
    prompts, rate = len(data.prompt.unique()), data.harm.mean()
    print(f"{len(data.harm)} labels of {prompts} prompts, {rate:.3f} of them harmful")
    scores = {f"feature {name}": data.logits[:, i] for i, name in enumerate(FEATURES)}
    scores = {name: signed(score, data.harm) for name, score in scores.items()}
    for features, offset, decay in HEADS:
        name = f"head {features}" + (f" from {offset}" if offset else "")
        scores[name] = cross_fitted(data, features, offset, decay)
    rows = table(scores, data)
    for row in rows:
        print(
            "  ".join(
                f"{value:>10}" if i else f"{value:<44}" for i, value in enumerate(row.values())
            )
        )
    if given.csv:
        with given.csv.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def read(folder: Path) -> Labelled:
    """The labelled positions of a folder, whole or still growing."""
    manifest = read_manifest(folder)
    table = token_table(load_tokenizer(manifest["target"]["name"]), manifest["vocab"])
    parts: dict[str, list[Tensor]] = {name: [] for name in Labelled.__dataclass_fields__}
    for shard in read_shards(folder):
        told = harm(shard.label, manifest["label"])
        text = torch.arange(shard.texts).repeat_interleave(shard.start.diff())
        before = torch.cat([torch.zeros(1, dtype=torch.int32), shard.token[:-1]]).long()
        before[shard.start[:-1]] = 0  # a prompt's last token is not stored
        # At temperature 0 the text's token and its alternative are the two most likely tokens.
        size = manifest["vocab"]
        known = ~told.isnan()
        ours, theirs = (
            one_hot(t[known].long(), size).half() for t in (shard.token, shard.alternative)
        )
        parts["tokens"].append(table.features(theirs, ours, before[known]))
        parts["harm"].append(told[known])
        parts["prompt"].append(shard.prompt[text][known])
        parts["logits"].append(shard.features[known])
        parts["hidden"].append(shard.hidden[known].float())
    return Labelled(**{name: torch.cat(part) for name, part in parts.items()})


def signed(score: Tensor, harmful: Tensor) -> Tensor:
    """A feature in the direction in which it tells harm; one sign for all folds."""
    return score if auc(score, harmful) >= 0.5 else -score


def cross_fitted(data: Labelled, features: str, offset: str, decay: float) -> Tensor:
    """[L] minus the logit of heads that did not see the prompt."""
    prompts = data.prompt.unique()
    fold = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)) % FOLDS
    of = fold[torch.searchsorted(prompts, data.prompt)]
    found = torch.zeros(len(data.harm))
    for held in range(FOLDS):
        head = fitted(data, of != held, features, offset, decay)
        with torch.no_grad():
            chosen = of == held
            found[chosen] = -head(data.logits[chosen], data.hidden[chosen], data.tokens[chosen])
    return found


def fitted(data: Labelled, rows: Tensor, features: str, offset: str, decay: float) -> WeightHead:
    """A linear head, by the objective judge on these rows."""
    sizes = (1, data.hidden.shape[1] - 1) if "hidden" in KINDS[features] else (0, 0)
    head = WeightHead(features, *sizes, offset=offset)
    head.standardise(data.logits[rows], data.hidden[rows])
    steps = torch.optim.AdamW(head.parameters(), lr=0.01, weight_decay=decay)
    harmful = data.harm[rows][None]
    batch = {"harm": harmful, "mask": torch.ones_like(harmful, dtype=torch.bool)}
    for _ in range(STEPS):
        steps.zero_grad()
        logit = head(data.logits[rows], data.hidden[rows], data.tokens[rows])
        (judge(logit[None], batch) / harmful.numel()).backward()
        steps.step()
    return head.eval()


def auc(score: Tensor, harmful: Tensor, weight: Tensor | None = None) -> float:
    """Probability that a harmful position has the larger score than a harmless one, ties half.

    weight: [L] how often each position counts.
    """
    weight = torch.ones(len(score), dtype=torch.float64) if weight is None else weight.double()
    values, place = score.double().unique(return_inverse=True)
    bad = torch.zeros(len(values), dtype=torch.float64).index_add(0, place, weight * harmful)
    good = torch.zeros(len(values), dtype=torch.float64).index_add(0, place, weight * (1 - harmful))
    below = good.cumsum(0) - good
    total = bad.sum() * good.sum()
    return float((bad * (below + good / 2)).sum() / total) if total else 0.5


def table(scores: dict[str, Tensor], data: Labelled) -> list[dict[str, str]]:
    """A row for each score, with intervals over prompts."""
    _, prompt = data.prompt.unique(return_inverse=True)
    count = int(prompt.max()) + 1
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.bincount(torch.randint(count, (count,), generator=generator), minlength=count)[prompt]
        for _ in range(RESAMPLES)
    ]
    harmful = data.harm.double()
    sampled = {
        name: torch.tensor([auc(score, harmful, weight) for weight in drawn])
        for name, score in scores.items()
    }
    base, rule = scores[f"feature {RULE}"], sampled[f"feature {RULE}"]
    rows = []
    for name, score in scores.items():
        difference = auc(score, harmful) - auc(base, harmful)
        row = {"judge": name, "AUC": f"{auc(score, harmful):.3f}"}
        row |= dict(zip(("low", "high"), interval(sampled[name], ".3f"), strict=True))
        row["minus divergence"] = f"{difference:+.3f}"
        ends = interval(sampled[name] - rule, "+.3f")
        rows.append(row | dict(zip(("difference low", "difference high"), ends, strict=True)))
    return rows


def interval(values: Tensor, form: str) -> tuple[str, str]:
    """The central 95 % of resampled values."""
    low, high = values.double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return format(low, form), format(high, form)


if __name__ == "__main__":
    main()
