"""Where the draft's words went: p, q and the draft's share at every token of some texts of one
learned point.

Both models are run over the finished texts once, teacher-forced, and OUT/tokens.json keeps the
numbers, so that the page is made again without models. Texts are not chosen by eye: the first SHOWN
of the file, and the first WRONG that exact decoding of the same prompt scored higher; the means are
over the first `texts`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..data.tasks import DataOptions, Task, load_task
from ..files import read_settings, sha256, write_whole
from ..runtime.bundle import head_sha256
from ..runtime.forward import Pair
from ..runtime.model import load_pair
from ..runtime.relaxer import load_relaxer
from ..runtime.sampling import Sampling
from ..verifier.relax import Relaxation
from .results import POINT, RESULTS, exact_beside, point_of, rule_of
from .run_data import Run, best_point
from .scoring import scored_rows, total_variation

TOKENS = "tokens.json"
SHOWN, WRONG = 3, 2  # texts
AT_ONCE = 16  # texts a pass
BEFORE = 8  # tokens that are decoded with one, because how it reads depends on its neighbours
CLASSES = ("digits", "words", "punctuation", "white space", "end of text")
FIELDS = ("piece", "target", "draft", "weight", "best", "best_target", "distance", "cost")


def token_numbers(run: Run, texts: int, trust_remote_code: bool = False) -> dict[str, Any] | str:
    """What TOKENS holds, computed if it is not there; or the sentence that says why it cannot
    be.
    """
    if not texts:
        return "The numbers of single tokens were not asked for (--texts 0)."
    row = best_point(run)
    if row is None:
        return "No learned point was measured."
    point = {name: row[name] for name in POINT}
    key = {"point": point, "results": sha256(run.folder / RESULTS), "texts": texts}
    path = run.folder / TOKENS
    kept = read_settings(path, "folder") if path.is_file() else {}
    if kept.get("key") == key:
        return kept
    try:
        found = {"key": key, **_measured(run, point, texts, trust_remote_code)}
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        return f"The numbers of single tokens need both models, which could not be loaded: {error}."
    write_whole(path, json.dumps(found, ensure_ascii=True) + "\n")
    return found


def _measured(
    run: Run, point: dict[str, Any], texts: int, trust_remote_code: bool
) -> dict[str, Any]:
    pair, task = _loaded(run, trust_remote_code)
    mine = [record for record in run.records if point_of(record) == point_of(point)]
    shown = _shown(mine, run.records, point)
    counted = mine[:texts]
    chosen = list({id(record): record for record in (*counted, *shown)}.values())
    rule = _rule(run, point["relaxation"])
    sampling = replace(Sampling(**run.settings["sampling"]), temperature=point["temperature"])
    longest = run.settings["max_prompt_tokens"]
    described: dict[int, list[tuple[str, list]]] = {}
    for start in range(0, len(chosen), AT_ONCE):
        part = chosen[start : start + AT_ONCE]
        examples = [task.examples[record["prompt"]] for record in part]
        prompts = [task.encode(example, pair.tokenizer, longest) for example in examples]
        found = numbers_of(pair, prompts, [record["tokens"] for record in part], rule, sampling)
        for record, numbers in zip(part, found, strict=True):
            described[id(record)] = _described(pair, record["tokens"], numbers)
    return {
        "fields": FIELDS,
        "shown": [
            {
                "id": record["id"],
                "score": record["score"],
                "before": task.examples[record["prompt"]].prompt[-600:],
                "tokens": [token for _, token in described[id(record)]],
            }
            for record in shown
        ],
        "classes": _by_class([token for record in counted for token in described[id(record)]]),
        "counted": len(counted),
    }


def _loaded(run: Run, trust_remote_code: bool) -> tuple[Pair, Task]:
    """The models and the task of a run; ValueError if a model is another one now."""
    settings = run.settings
    names = [settings[role]["name"] for role in ("target", "draft")]
    dtype = str(settings["dtype"]).removeprefix("torch.")
    pair = load_pair(*names, dtype, settings["device"], trust_remote_code)
    for role in ("target", "draft"):
        if (found := getattr(pair, role).hash) != settings[role]["hash"]:
            raise ValueError(f"the {role} {settings[role]['name']} is another model now ({found})")
    task = load_task(
        settings["task"],
        split=settings["split"],
        limit=settings["prompts"],
        seed=settings["seed"],
        data=DataOptions(**settings["data"]),
    )
    return pair, task


def numbers_of(
    pair: Pair,
    prompts: list[list[int]],
    completions: list[list[int]],
    rule: Relaxation,
    sampling: Sampling,
) -> list[Tensor]:
    """For every text [T, 7] float64: p and q of its token, the draft's share there, the target's
    most likely token and its p, TV(p, q), and TV(p, v), what the share costs."""
    parts, scored = [], []
    relaxer = load_relaxer(rule, pair, sampling)
    for rows in scored_rows(pair, prompts, completions, relaxer, sampling):
        best, likely = rows.target.max(-1)
        drafted = rows.draft.gather(-1, rows.tokens.unsqueeze(-1)).squeeze(-1)
        distance = total_variation(rows.target, rows.draft)
        values = (rows.likelihood, drafted, rows.weight, likely, best, distance, rows.bias)
        parts.append(torch.stack([value.double() for value in values], -1).cpu())
        scored.append(rows.scored.cpu())
    inside = torch.cat(scored, 1)
    return [text[kept] for text, kept in zip(torch.cat(parts, 1), inside, strict=True)]


def _described(pair: Pair, tokens: list[int], numbers: Tensor) -> list[tuple[str, list]]:
    """(class, values of FIELDS) of every token of a text."""
    found = []
    for index, (token, row) in enumerate(zip(tokens, numbers.tolist(), strict=True)):
        before = tokens[max(0, index - BEFORE) : index]
        piece = _piece(pair.tokenizer, before, token)
        kind = "end of text" if token in pair.eos else _class(piece)
        likely = int(row.pop(3))
        p, q, weight, best, distance, cost = (float(f"{value:.4g}") for value in row)
        other = None if likely == token else _piece(pair.tokenizer, before, likely)
        found.append((kind, [piece, p, q, weight, other, best, distance, cost]))
    return found


def _piece(tokenizer, before: list[int], token: int) -> str:
    """What a token adds to the text after `before`."""
    without, whole = (
        tokenizer.decode(part, skip_special_tokens=False) for part in (before, [*before, token])
    )
    return whole[len(os.path.commonprefix([without, whole])) :]


def _class(piece: str) -> str:
    if any(letter.isdigit() for letter in piece):
        return "digits"
    if any(letter.isalpha() for letter in piece):
        return "words"
    return "punctuation" if piece.strip() else "white space"


def _by_class(tokens: list[tuple[str, list]]) -> list[dict[str, Any]]:
    """For every class: how many tokens, the means of weight and TV(p, q), the sum of cost, and how
    many are not the target's most likely.
    """
    found = []
    for kind in CLASSES:
        members = [dict(zip(FIELDS, values, strict=True)) for one, values in tokens if one == kind]
        if not members:
            continue
        total = {
            name: sum(token[name] for token in members) for name in ("weight", "distance", "cost")
        }
        found.append(
            {
                "class": kind,
                "tokens": len(members),
                "weight": total["weight"] / len(members),
                "distance": total["distance"] / len(members),
                "cost": total["cost"],
                "other": sum(token["best"] is not None for token in members),
            }
        )
    return found


def _shown(mine: list[dict], records: list[dict], point: dict[str, Any]) -> list[dict]:
    """The first texts, then the first of those that exact decoding of the same prompt scored
    higher.
    """
    exact: dict[int, list[float]] = {}
    for record in records:
        if point_of(record) == exact_beside(point_of(point)):
            exact.setdefault(record["prompt"], []).append(record["score"])
    mean = {prompt: sum(scores) / len(scores) for prompt, scores in exact.items()}
    worse = [
        record
        for record in mine[SHOWN:]
        if record["score"] < mean.get(record["prompt"], record["score"])
    ]
    return mine[:SHOWN] + worse[:WRONG]


def _rule(run: Run, relaxation: str) -> Relaxation:
    """The relaxation, with the very head that was measured: out of the run folder if that holds
    it.
    """
    rule = rule_of(relaxation)
    place = run.folders.get(rule.source, rule.folder)
    wanted = run.settings["heads"].get(rule.source)
    if wanted and head_sha256(place) != wanted:
        raise ValueError(
            f"the bundle {rule.source} is not there any more with the head that was measured"
        )
    return replace(rule, source=str(place)) if rule.folder else rule
