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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import read_settings, sha256, write_whole
from ..runtime.batch import padded
from ..runtime.model import Pair, load_pair
from ..runtime.relaxer import load_relaxer
from ..runtime.sampling import Sampling
from ..verifier.relax import Relaxation, parse
from .facts import RESULTS, TOKENS, Run, best_point, head_checksum
from .speed import CHUNK_BYTES, POINT, passes, rows

SHOWN, WRONG, AT_ONCE = 3, 2, 16  # AT_ONCE: texts a pass
BEFORE = 8  # tokens that are decoded with one, because how it reads hangs on its neighbours
CLASSES = ("digits", "words", "punctuation", "white space", "end of text")
FIELDS = ("piece", "target", "draft", "weight", "best", "best_target", "distance", "cost")


def token_numbers(run: Run, texts: int, trust_remote_code: bool = False) -> dict[str, Any] | str:
    """What TOKENS holds, computed where it does not yet; or the sentence that says why it cannot
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
    from ..data.tasks import DataOptions, load_task

    settings = run.settings
    dtype = str(settings["dtype"]).removeprefix("torch.")
    pair = load_pair(
        settings["target"]["name"],
        settings["draft"]["name"],
        dtype,
        settings["device"],
        trust_remote_code,
    )
    for role in ("target", "draft"):
        if (found := getattr(pair, role).hash) != settings[role]["hash"]:
            raise ValueError(f"the {role} {settings[role]['name']} is another model now ({found})")
    data = DataOptions(**settings["data"])
    task = load_task(
        settings["task"],
        split=settings["split"],
        limit=settings["prompts"],
        seed=settings["seed"],
        data=data,
    )
    mine = [record for record in run.records if all(record[name] == point[name] for name in POINT)]
    shown = _shown(mine, run.records, point)
    chosen = {id(record): record for record in (*mine[:texts], *shown)}
    rule = _rule(run, point["relaxation"])
    sampling = replace(Sampling(**settings["sampling"]), temperature=point["temperature"])
    encode = {
        record["prompt"]: task.encode(
            task.examples[record["prompt"]], pair.tokenizer, settings["max_prompt_tokens"]
        )
        for record in chosen.values()
    }
    numbers = {}
    everyone = list(chosen.values())
    for start in range(0, len(everyone), AT_ONCE):
        part = everyone[start : start + AT_ONCE]
        found = numbers_of(
            pair, [encode[r["prompt"]] for r in part], [r["tokens"] for r in part], rule, sampling
        )
        numbers |= dict(zip(map(id, part), found, strict=True))
    described = {
        place: _described(pair, record["tokens"], numbers[place])
        for place, record in chosen.items()
    }
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
        "classes": _by_class([token for record in mine[:texts] for token in described[id(record)]]),
        "counted": len(mine[:texts]),
    }


def numbers_of(
    pair: Pair,
    prompts: list[list[int]],
    completions: list[list[int]],
    rule: Relaxation,
    sampling: Sampling,
) -> list[Tensor]:
    """For every text [T, 7] float64: p and q of its token, the draft's share there, the target's
    most likely token and its p, TV(p, q), and TV(p, v), what the share costs."""
    relaxer = load_relaxer(rule, pair, sampling)
    texts = [
        [*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)
    ]
    first = torch.tensor([len(prompt) - 1 for prompt in prompts])
    tokens, count = padded(texts)
    parts, spent = [], torch.zeros(len(texts), dtype=torch.float64)
    skip = int(first.min())
    for start, draft, target in passes(
        pair, tokens[:, :-1], skip, relaxer.needs_hidden, CHUNK_BYTES
    ):
        position = start + torch.arange(draft.logits.shape[1])
        scored = (position >= first[:, None]) & (position < (count - 1)[:, None])
        following = tokens[:, start + 1 : start + 1 + len(position)]
        p, q, v, weight = rows(draft, target, scored, following, relaxer, sampling, spent)
        taken = following.to(p.device).unsqueeze(-1)
        best, likely = p.max(-1)
        values = [p.gather(-1, taken)[..., 0], q.gather(-1, taken)[..., 0], weight, likely, best]
        values += [0.5 * (p - q).abs().sum(-1), 0.5 * (p - v).abs().sum(-1)]
        parts.append(torch.stack([value.double() for value in values], -1).cpu())
        spent += torch.where(scored, parts[-1][..., 6], 0).sum(-1)
    table = torch.cat(parts, 1)
    return [table[i, first[i] - skip : count[i] - 1 - skip] for i in range(len(texts))]


def _described(pair: Pair, tokens: list[int], numbers: Tensor) -> list[tuple[str, list]]:
    """(class, values of FIELDS) of every token of a text."""
    found = []
    for index, (token, (p, q, weight, likely, best, distance, cost)) in enumerate(
        zip(tokens, numbers.tolist(), strict=True)
    ):
        before = tokens[max(0, index - BEFORE) : index]
        piece, other = (_piece(pair.tokenizer, before, one) for one in (token, int(likely)))
        kind = "end of text" if token in pair.eos else _class(piece)
        values = [
            piece,
            p,
            q,
            weight,
            None if int(likely) == token else other,
            best,
            distance,
            cost,
        ]
        found.append(
            (
                kind,
                [float(f"{value:.4g}") if isinstance(value, float) else value for value in values],
            )
        )
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
    """For every class: how many tokens, and the means of weight, TV(p, q) and cost; `other`: not
    the target's first.
    """
    found = []
    for kind in CLASSES:
        members = [dict(zip(FIELDS, values, strict=True)) for one, values in tokens if one == kind]
        if members:
            means = {
                name: sum(token[name] for token in members) / len(members)
                for name in ("weight", "distance")
            }
            cost, other = (
                sum(token["cost"] for token in members),
                sum(token["best"] is not None for token in members),
            )
            found.append(
                {"class": kind, "tokens": len(members), **means, "cost": cost, "other": other}
            )
    return found


def _shown(mine: list[dict], records: list[dict], point: dict[str, Any]) -> list[dict]:
    """The first texts, then the first of those that exact decoding of the same prompt scored
    higher.
    """
    exact: dict[int, list[float]] = {}
    for record in records:
        if all(record[name] == (point | {"relaxation": "none"})[name] for name in POINT):
            exact.setdefault(record["prompt"], []).append(record["score"])
    mean = {prompt: sum(scores) / len(scores) for prompt, scores in exact.items()}
    worse = [
        record
        for record in mine[SHOWN:]
        if record["score"] < mean.get(record["prompt"], record["score"])
    ]
    return mine[:SHOWN] + worse[:WRONG]


def _rule(run: Run, relaxation: str) -> Relaxation:
    """The relaxation, with the very head that was measured: out of the run folder where that holds
    it.
    """
    source, *options = relaxation.split(";")
    place = run.folders.get(source, Path(source))
    wanted = run.settings["heads"].get(source)
    if wanted and head_checksum(place) != wanted:
        raise ValueError(
            f"the bundle {source} is not there any more with the head that was measured"
        )
    return parse(";".join([str(place), *options]))
