"""Labels of importance against the truth: on `sums` a token matters exactly if it is a working one.

    python experiments/label_truth.py --out runs/label-truth --csv results/learning-label-truth.csv

precision: of the positions that are labelled harmful, the share at which the target's token or the
draft's is a digit, a sign or the end. recall: of those positions, the share labelled harmful. Every
row has a 95 % bootstrap interval over prompts. A label of suffix is harmful beyond a threshold,
nats a token.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from diversed.assets.sums import is_working
from diversed.data.traces import read_manifest, read_shards
from diversed.runtime.model import load_tokenizer
from stages import diversed
from torch import Tensor

RESAMPLES = 2000
THRESHOLDS = (0.05, 0.1, 0.2, 0.5, 1.0)
KINDS = {
    "counterfactual, T = 0": (0, "--label", "counterfactual"),
    "counterfactual in sequence, T = 0": (
        0,
        "--label",
        "counterfactual",
        "--label_order",
        "sequential",
    ),
    "counterfactual, T = 1": (1, "--label", "counterfactual"),
    "suffix, T = 0": (0, "--label", "suffix"),
    "suffix, T = 1": (1, "--label", "suffix"),
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/label-truth"), help="folder of the labels")
    add("--prompts", type=int, default=96)
    add("--csv", type=Path, help="file of the rows")
    given = parser.parse_args(words)
    working = is_working(load_tokenizer("sums-target"))
    rows = []
    for name, (temperature, *told) in KINDS.items():
        out = given.out / name.replace(" ", "").replace(",", "-").replace("=", "")
        words = ("--prompts", given.prompts, "--samples", 1, "--sampling.temperature", temperature)
        diversed("gather", "--out", out, "--go_on", *words, "--max_new_tokens", 96, *told)
        kind = read_manifest(out)["label"]["kind"]
        for threshold in THRESHOLDS if kind == "suffix" else (0.5,):
            shown = f"{name}, beyond {threshold:g} nats" if kind == "suffix" else name
            rows.append(row_of(shown, out, threshold, working))
            print(rows[-1], flush=True)
    if given.csv:
        with given.csv.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, rows[0], lineterminator="\n")
            table.writeheader()
            table.writerows(rows)


def row_of(name: str, folder: Path, threshold: float, working: Tensor) -> dict[str, str]:
    """Precision and recall of the labels in a folder, and what a label cost."""
    counts, labels = [], 0
    manifest = read_manifest(folder)
    for shard in read_shards(folder):
        text = torch.arange(shard.texts).repeat_interleave(shard.start.diff())
        known = ~shard.label.isnan()
        true = working[shard.token.long()] | working[shard.alternative.long()]
        said = shard.label >= threshold if "suffix" not in name else shard.label > threshold
        both = torch.stack([said & true, said & ~true, ~said & true], -1) & known.unsqueeze(-1)
        counts.append(torch.zeros(shard.texts, 3).index_add(0, text, both.float()))
        labels += int(known.sum())
    of_prompt = torch.cat(counts)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(of_prompt), (RESAMPLES, len(of_prompt)), generator=generator)
    row = {"labels": name, "number": str(labels)}
    found, sampled = shares(of_prompt.sum(0)), shares(of_prompt[drawn].sum(1))
    for index, figure in enumerate(("precision", "recall")):
        low, high = sampled[:, index].nanquantile(torch.tensor([0.025, 0.975])).tolist()
        row |= {
            figure: f"{found[index]:.3f}",
            f"{figure} low": f"{low:.3f}",
            f"{figure} high": f"{high:.3f}",
        }
    spent = [sum(entry[cost] for entry in manifest["shards"]) for cost in ("generated", "forced")]
    return row | {
        "generated a label": f"{spent[0] / labels:.1f}",
        "read a label": f"{spent[1] / labels:.1f}",
    }


def shares(counts: Tensor) -> Tensor:
    """[..., 2] precision and recall of counts [..., 3]: right, wrong and missing harm."""
    right, wrong, missed = counts.unbind(-1)
    return torch.stack([right / (right + wrong), right / (right + missed)], -1)


if __name__ == "__main__":
    main()
