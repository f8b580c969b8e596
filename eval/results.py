"""The file of results: one line a text, with everything that figures are computed from.

A point is a way of decoding: method, relaxation, temperature, draft length. A cell is a point and a
seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..files import read_settings, unsealed
from ..verifier.methods import is_lossy
from ..verifier.relax import Relaxation, parse

RESULTS = "results.jsonl"
SETTINGS = "eval.json"  # what the results beside it were decoded with
POINT = ("method", "relaxation", "temperature", "draft_length")
NUMBER = int | float
FIELDS = {
    "method": str,
    "relaxation": str,
    "temperature": NUMBER | None,
    "draft_length": int | None,
    "seed": int,
    "prompt": int,
    "score": NUMBER,
    "tokens": list,
    "drafted": NUMBER,
    "accepted": NUMBER,
    "target_calls": NUMBER,
    "positions": NUMBER,
    "acceptance": NUMBER,
    "bias": NUMBER,
    "weight": NUMBER | None,
    "target_logprob": NUMBER,
    "substitutions": NUMBER,
    "seconds": NUMBER,
}


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """The complete lines of a results.jsonl; a last line that a killed run left half written is
    dropped.

    A line without `temperature` and `draft_length` is of an older version; it gets those of the
    settings beside the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `diversed eval` writes it")
    settings = path.parent / SETTINGS
    older = read_settings(settings) if settings.is_file() else {}
    sampling = older.get("sampling")
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
    run, records, seen = run_of(older), [], {}
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        record = unsealed(line, run)
        if "method" in record:
            plain = record["method"] == "plain"
            record.setdefault("temperature", temperature)
            record.setdefault("draft_length", 0 if plain else older.get("draft_length"))
        bad = [name for name, kind in FIELDS.items() if not isinstance(record.get(name, ...), kind)]
        if bad:
            what = f"{', '.join(bad)} is missing or no figure"
            if not record:
                what = "it is damaged, was changed after it was written, or is of another run"
            raise ValueError(f"{path}, line {number} is no result: {what}; delete that line")
        text = (*point_of(record), record["seed"], record["prompt"])
        if text in seen:
            raise ValueError(
                f"{path}, line {number} holds the text of line {seen[text]} once more; delete that"
                " line"
            )
        seen[text] = number
        records.append(record)
    return records


def run_of(settings: dict[str, Any]) -> str:
    """What ties lines of results to the settings beside them: the prompts and the models."""
    models = [settings.get(role) for role in ("target", "draft")]
    hashes = [model.get("hash") if isinstance(model, dict) else None for model in models]
    return json.dumps([settings.get("prompts_sha256"), *hashes]) if any(hashes) else ""


def point_of(record: dict[str, Any]) -> tuple[str, str, float | None, int | None]:
    """The point that a record or a row of figures belongs to."""
    return tuple(record.get(name) for name in POINT)


def rule_of(relaxation: str) -> Relaxation:
    """The relaxation of a record, perhaps of an older version."""
    return parse(relaxation, recorded=True)


def kind_of(row: dict[str, Any]) -> str:
    """exact, static, learned, code or other, of a record or a row of figures."""
    return "other" if is_lossy(row["method"]) else rule_of(row["relaxation"]).kind


def exact_beside(point: tuple) -> tuple:
    """The point of exact decoding that a point is compared with: a lossy method is compared with
    token verification.
    """
    return "token" if is_lossy(point[0]) else point[0], "none", *point[2:]


def static_place(relaxation: str) -> float | None:
    """Where a static point stands on the line: at its share of the draft, at minus that if it
    blends logarithms.

    0 for exact decoding, None for learned points, budgets and rules that are no blend.
    """
    rule = rule_of(relaxation)
    if rule.budget is not None or rule.kind not in ("exact", "static"):
        return None
    return rule.constant if rule.blend == "probabilities" else -rule.constant
