"""What decoding gained and what it cost, token by token: acceptance, bias, tokens per target call.

`score_positions` runs both models over finished texts. With p the target's row, q the draft's and v
the relaxed target row at a position (all after temperature, top-k, top-p, min-p):

    step acceptance   mean over positions of 1 - TV(q, v): how often one drafted token is kept; no draft length in it
    bias              mean over positions of TV(p, v): how often one token is not the target's own

Positions are those of the text, its end-of-text token included and nothing after it. `summarise`
turns the file of results into one row of figures per (method, relaxation, temperature, draft
length); everything printed or drawn comes from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import read_settings
from ..runtime.batch import padded, prefill
from ..runtime.model import Output, Pair
from ..runtime.relaxer import Relaxer, load_relaxer
from ..runtime.sampling import Sampling, probabilities
from ..verifier.law import DraftTree
from ..verifier.relax import Relaxation
from .quality import bootstrap, mcnemar, paired_bootstrap, same_texts

SETTINGS = "eval.json"  # what the results beside it were decoded with
CHUNK_BYTES = 256 << 20  # of one model's float32 rows in memory at a time
FIELDS = (
    "method",
    "relaxation",
    "seed",
    "prompt",
    "score",
    "tokens",
    "drafted",
    "accepted",
    "target_calls",
)
FIELDS += (
    "positions",
    "acceptance",
    "bias",
    "weight",
    "target_logprob",
    "substitutions",
    "seconds",
)
FIELDS += ("temperature", "draft_length")
KINDS = {
    "method": str,
    "relaxation": str,
    "tokens": list,
    "weight": int | float | None,
    "prompt": int,
    "seed": int,
}
KINDS |= {"temperature": int | float | None, "draft_length": int | None}
SUMMED = tuple(name for name in FIELDS[6:-2] if name != "weight")
POINT = (
    "method",
    "relaxation",
    "temperature",
    "draft_length",
)  # a row of figures; a cell is one and a seed


@dataclass(frozen=True)
class PositionSums:
    """Sums over the positions of one text.

    positions:      tokens of the text, the end-of-text token included.
    acceptance:     sum of 1 - TV(q, v).
    bias:           sum of TV(p, v), also the expected number of substitutions under the maximal coupling.
    weight:         sum of the draft's share, None where the relaxation is not a blend.
    target_logprob: log-likelihood of the text under the target, nats; a token that it excludes
        counts as 1e-30.
    """

    positions: int
    acceptance: float
    bias: float
    weight: float | None
    target_logprob: float


def score_positions(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    relaxation: str | Relaxation | Relaxer,
    sampling: Sampling,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[PositionSums]:
    """The sums of every text, from one teacher-forced pass of both models.

    prompts, completions: token ids; a completion ends with its end-of-text token where it has one.
    chunk_bytes: bounds the memory for rows; positions are cut accordingly, the figures stay the
        same.
    """
    relaxer = relaxation
    if not isinstance(relaxation, Relaxer):
        relaxer = load_relaxer(relaxation, pair, sampling)
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"prompts {empty} are empty; a text needs at least one token before it")
    if not any(completions):
        return [PositionSums(0, 0.0, 0.0, 0.0, 0.0) for _ in prompts]
    texts = [
        [*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)
    ]
    first = torch.tensor([len(prompt) - 1 for prompt in prompts])
    tokens, count = padded(texts)
    end = count - 1
    sums = torch.zeros(4, len(texts), dtype=torch.float64)
    for start, draft, target in passes(
        pair, tokens[:, :-1], int(first.min()), relaxer.needs_hidden, chunk_bytes
    ):
        position = start + torch.arange(draft.logits.shape[1])
        scored = (position >= first[:, None]) & (position < end[:, None])
        following = tokens[:, start + 1 : start + 1 + len(position)]
        sums += _chunk(draft, target, scored, following, relaxer, sampling, spent=sums[1])
    return [
        PositionSums(int(n), acceptance, bias, weight if relaxer.rule.is_blend else None, logprob)
        for n, (acceptance, bias, weight, logprob) in zip(end - first, sums.T.tolist(), strict=True)
    ]


def _chunk(
    draft: Output,
    target: Output,
    scored: Tensor,
    following: Tensor,
    relaxer: Relaxer,
    sampling: Sampling,
    spent: Tensor,
) -> Tensor:
    """[4, B] float64: acceptance, bias, weight and log-likelihood summed over a chunk's scored
    positions [B, Q].

    spent: [B] bias of the earlier positions, which a budget counts.
    """
    p, q, v, weight = rows(draft, target, scored, following, relaxer, sampling, spent)
    likelihood = (
        p.gather(-1, following.to(p.device).unsqueeze(-1)).squeeze(-1).clamp_min(1e-30).log()
    )
    values = torch.stack(
        [1 - _total_variation(q, v), _total_variation(p, v), weight.to(p), likelihood]
    ).double()
    return torch.where(scored.to(p.device), values, 0).sum(-1).cpu()


def rows(
    draft: Output,
    target: Output,
    scored: Tensor,
    following: Tensor,
    relaxer: Relaxer,
    sampling: Sampling,
    spent: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(p, q, v) [B, Q, V] and the draft's share [B, Q] at a chunk's positions; see `_chunk`."""
    device = target.logits.device
    scored, following = scored.to(device), following.to(device)
    p, q = probabilities(target.logits, sampling), probabilities(draft.logits.to(device), sampling)
    # A text is a chain; positions outside it look like places where the draft was not run, so they
    # cost nothing.
    chain = DraftTree(
        following, tuple(range(-1, following.shape[1] - 1)), q * scored.unsqueeze(-1), p
    )
    relaxed = relaxer(chain, (draft.hidden, target.hidden), spent.to(device))
    return p, q, relaxed.tree.target, relaxed.weight


def passes(
    pair: Pair, tokens: Tensor, skip: int, hidden: bool, chunk_bytes: int
) -> Iterator[tuple[int, Output, Output]]:
    """(first position, draft's output, target's output) over the positions from `skip` on, a chunk
    at a time.

    Texts are padded on the right, so nothing real sees the padding. The `skip` first tokens only
    fill the caches.
    """
    batch, length = tokens.shape
    step = max(1, chunk_bytes // (4 * batch * pair.vocab))
    models = (pair.draft, pair.target)
    caches = [model.cache(length) for model in models]
    for model, cache in zip(models, caches, strict=True):
        prefill(model, tokens[:, :skip].to(model.device), cache)
    for start in range(skip, length, step):
        position = torch.arange(start, min(start + step, length))
        chunk = tokens[:, start : start + step]
        visible = (torch.arange(start + len(position)) <= position[:, None]).expand(batch, -1, -1)
        draft, target = (
            model(chunk, position.expand_as(chunk), visible, cache, start, hidden=hidden)
            for model, cache in zip(models, caches, strict=True)
        )
        yield start, draft, target


def _total_variation(left: Tensor, right: Tensor) -> Tensor:
    return 0.5 * (left - right).abs().sum(-1)


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """The complete lines of a results.jsonl; a last line that a killed run left half written is
    dropped.

    Lines without `temperature` and `draft_length`, of an older version, have those of the settings
    beside the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `diversed eval` writes it")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records, older = [], _older(path.parent / SETTINGS)
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            record |= {name: value for name, value in older(record).items() if name not in record}
            missing = [
                field
                for field in FIELDS
                if not isinstance(record[field], KINDS.get(field, int | float))
            ]
        except KeyError:
            missing = [field for field in FIELDS if field not in record]
        except (ValueError, TypeError, AttributeError, RecursionError):
            record, missing = None, ["everything"]
        if missing:
            what = f"{', '.join(missing)} is missing or no figure"
            raise ValueError(f"{path}, line {number} is no result: {what}; delete that line")
        records.append(record)
    return records


def _older(path: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """record -> the fields that one of an older version lacks, from the settings at `path`; None
    where unknown.
    """
    settings = read_settings(path) if path.is_file() else {}
    sampling, length = settings.get("sampling"), settings.get("draft_length")
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
    return lambda record: {
        "temperature": temperature,
        "draft_length": 0 if record["method"] == "plain" else length,
    }


def summarise(results: str | Path | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of figures per (method, relaxation, temperature, draft_length), seeds pooled, as they
    first appear.

    results: path of results.jsonl, or its records.

    score, score_low, score_high:  mean and 95 % bootstrap interval over prompts (a prompt's seeds are averaged first)
    difference, ..._low, ..._high: score minus that of relaxation none, all else equal, paired by
        prompt; or None
    better, worse, mcnemar:        where scores are 0 or 1, how many prompts this point scores better and worse than
                                   relaxation none, and the p-value of `quality.mcnemar`; else None
    text_p:                        p-value of `quality.same_texts` against the texts of relaxation none; or None
    step_acceptance, mean_bias, mean_weight: means over all positions; mean_weight None where it is
        not a blend
    accepted_share:                accepted / drafted tokens, what lies after the end of a text left out
    tokens_per_call:               tokens per target call, the extra token and the end-of-text token counted
    tokens_per_second:             tokens / seconds of decoding, the texts of a batch together
    substitutions:                 expected tokens per text that are not the target's own
    target_logprob:                mean log-likelihood of a token under the target, nats, each at least log 1e-30
    acceptance_by_depth:           accepted / drafted at depth 1, 2, ...
    """
    records = read_results(results) if isinstance(results, str | Path) else list(results)
    cells: dict[tuple, list[dict[str, Any]]] = {}
    for record in records:
        cells.setdefault(tuple(record.get(name) for name in POINT), []).append(record)
    return [
        _row(cell, cells.get((method, "none", *rest))) for (method, _, *rest), cell in cells.items()
    ]


def _row(cell: list[dict[str, Any]], exact: list[dict[str, Any]] | None) -> dict[str, Any]:
    total = {field: sum(record[field] for record in cell) for field in SUMMED}
    tokens = sum(len(record["tokens"]) for record in cell)
    scores = _by_prompt(cell)
    row = {name: cell[0].get(name) for name in (*POINT, "task", "metric", "batch")}
    row |= {
        "requests": len(cell),
        "prompts": len(scores),
        "seeds": len({record["seed"] for record in cell}),
    }
    row |= dict(
        zip(("score", "score_low", "score_high"), bootstrap(list(scores.values())), strict=True)
    )
    row |= dict.fromkeys(COMPARED) | (
        _against(cell, exact) if exact is not None and exact is not cell else {}
    )
    blend = all(record["weight"] is not None for record in cell)
    drafted, accepted = (_by_depth(cell, f"{name}_by_depth") for name in ("drafted", "accepted"))
    return row | {
        "step_acceptance": _ratio(total["acceptance"], total["positions"]),
        "accepted_share": _ratio(total["accepted"], total["drafted"]),
        "tokens_per_call": _ratio(tokens, total["target_calls"]),
        "tokens_per_second": _ratio(tokens, total["seconds"]),
        "mean_weight": (
            _ratio(sum(record["weight"] for record in cell), total["positions"]) if blend else None
        ),
        "mean_bias": _ratio(total["bias"], total["positions"]),
        "substitutions": _ratio(total["substitutions"], len(cell)),
        "target_logprob": _ratio(total["target_logprob"], total["positions"]),
        "tokens_per_text": _ratio(tokens, len(cell)),
        "acceptance_by_depth": [
            _ratio(*counts) for counts in zip_longest(accepted, drafted, fillvalue=0)
        ],
    }


COMPARED = (
    "difference",
    "difference_low",
    "difference_high",
    "better",
    "worse",
    "mcnemar",
    "text_p",
)


def _against(cell: list[dict[str, Any]], exact: list[dict[str, Any]]) -> dict[str, Any]:
    """What a point is beside exact decoding of the prompts that both have: the COMPARED figures."""
    scores, baseline = _by_prompt(cell), _by_prompt(exact)
    both = [prompt for prompt in scores if prompt in baseline]
    if not both:
        return {}
    values, before = ([side[prompt] for prompt in both] for side in (scores, baseline))
    figures = list(paired_bootstrap(values, before))
    binary = all(record["score"] in (0, 1) for record in (*cell, *exact))
    figures += mcnemar(values, before) if binary else [None] * 3
    kept = set(both)
    texts = [
        [(r["prompt"], r["tokens"]) for r in side if r["prompt"] in kept] for side in (cell, exact)
    ]
    return dict(zip(COMPARED, [*figures, same_texts(*texts)], strict=True))


def _by_prompt(cell: list[dict[str, Any]]) -> dict[int, float]:
    scores: dict[int, list[float]] = {}
    for record in cell:
        scores.setdefault(record["prompt"], []).append(record["score"])
    return {prompt: sum(values) / len(values) for prompt, values in scores.items()}


def _by_depth(cell: list[dict[str, Any]], name: str) -> list[int]:
    counts = [record.get(name, []) for record in cell]
    return [sum(row) for row in zip_longest(*counts, fillvalue=0)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
