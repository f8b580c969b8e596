"""`diversed eval`: methods x relaxations x seeds on the same held-out prompts, one line a text, a table and a figure.

OUT/results.jsonl holds one line per (method, relaxation, seed, prompt) with everything the figures are computed from.
Prompts are decoded in fixed units, and a text depends on its seed and prompt alone, so a run that was killed continues
where it stopped: whole units are kept, a half-written one is done again and gives the same texts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..data.files import read_settings, write_whole
from ..data.lock import exclusive
from ..data.tasks import DataOptions, Task, load_task
from ..data.traces import sha256
from ..runtime.completion import Request
from ..runtime.decode import Engine, check_prompts
from ..runtime.limits import MOST_THREADS, within
from ..runtime.model import load_pair
from ..runtime.sampling import Sampling
from ..verifier.methods import method as find_method
from ..verifier.relax import parse
from .report import RESULTS, SETTINGS, report
from .speed import PositionSums, read_results, score_positions

STATIC = [f"ensemble:0.{tenth}" for tenth in range(1, 10)]
Cell = tuple[str, str, int]  # method, relaxation, seed


def evaluate(
    *,
    out: str,
    target: str = "sums-target",
    draft: str = "sums-draft",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    split: str = "test",
    prompts: int = 200,
    methods: list[str] = ["token"],  # noqa: B006  never written to
    relaxations: list[str] = ["none", *STATIC],  # noqa: B006
    seeds: list[int] = [0],  # noqa: B006
    draft_length: int = 5,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    max_prompt_tokens: int = 384,
    max_new_tokens: int | None = None,
    batch: int = 64,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int = 1,
    trust_remote_code: bool = False,
) -> None:
    """Decode the same held-out prompts in every way that is listed; a table and a figure of quality against speed.

    Args:
        out: folder for results.jsonl and frontier.png; one begun with the same options is continued.
        target: folder, hub name or .gguf file of the model being served; `sums-target` is the packaged one.
        draft: folder, hub name or .gguf file of the cheap model; `sums-draft` is the packaged one.
        task: sums, gsm8k, cnndm, xsum, wmt, mbpp, humaneval, or jsonl for any file with named fields.
        data: where the task's rows come from.
        split: train, validation or test.
        prompts: how many prompts of the split.
        methods: such as token or block; `plain`, the target alone, is run with relaxation none only.
        relaxations: none, ensemble:0.3, a bundle folder, package.module:NAME; after any `;bias=0.5` or `;budget=3`.
        seeds: of the sampled texts; every seed decodes every prompt once.
        draft_length: tokens drafted per target call.
        sampling: temperature, top_k, top_p, min_p of both models.
        max_prompt_tokens: longer prompts lose the end of their article, never the instruction or the question.
        max_new_tokens: tokens a text may have; by default the task's own number.
        batch: prompts decoded together; tokens/s depends on it.
        seed: of the choice and order of prompts.
        dtype: auto, float32, bfloat16 or float16.
        device: cpu, cuda, ..., or auto to spread the models.
        threads: CPU threads; tokens/s depends on it.
        trust_remote_code: run model code that comes with a checkpoint.
    """
    within(1, prompts=prompts, draft_length=draft_length, batch=batch, max_new_tokens=max_new_tokens)
    within(1, max_prompt_tokens=max_prompt_tokens)
    within(1, MOST_THREADS, threads=threads)
    cells = every_cell(methods, relaxations, seeds)
    torch.set_num_threads(threads)
    pair = load_pair(target, draft, dtype, device, trust_remote_code)
    engines = {
        (method, relaxation): Engine(pair, method, relaxation, draft_length, sampling=sampling)
        for method, relaxation, _ in cells
    }
    loaded = load_task(task, split=split, limit=prompts, seed=seed, data=data)
    encoded = [loaded.encode(example, pair.tokenizer, max_prompt_tokens) for example in loaded.examples]
    new_tokens = max_new_tokens or loaded.max_new_tokens
    for engine in engines.values():
        check_prompts(pair, dict(enumerate(encoded)), new_tokens + engine.shape.depth + 1)
    settings = {
        "target": {"name": target, "hash": pair.target.hash}, "draft": {"name": draft, "hash": pair.draft.hash},
        "task": task, "data": asdict(data), "source": loaded.source, "split": split, "prompts": len(encoded),
        "draft_length": draft_length, "sampling": asdict(sampling), "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": new_tokens, "batch": batch, "seed": seed, "dtype": str(pair.target.dtype), "device": device,
        "threads": threads, "heads": _heads(engines.values()),
    }  # fmt: skip
    with exclusive(out) as folder:
        _check_settings(folder, settings)
        _decode_missing(folder, cells, engines, loaded, encoded, new_tokens, batch)
        report(folder)


def every_cell(methods: list[str], relaxations: list[str], seeds: list[int]) -> list[Cell]:
    """Every combination once, in the order given; what is wrong with them is said before any model is loaded."""
    for name, values in (("methods", methods), ("relaxations", relaxations), ("seeds", seeds)):
        if not values:
            raise ValueError(f"`{name}` is empty; name at least one")
    for relaxation in relaxations:
        parse(relaxation)
    for method in methods:
        if method != "plain":
            find_method(method)
    if bad := [seed for seed in seeds if not 0 <= seed < 2**31]:
        raise ValueError(f"`seeds` must lie in 0..{2**31 - 1}, got {bad[0]}")
    cells = [
        (method, relaxation, seed)
        for method in methods
        for relaxation in (relaxations if method != "plain" else ["none"])
        for seed in seeds
    ]
    return list(dict.fromkeys(cells))


def _heads(engines: Any) -> dict[str, str]:
    """Checksum of every bundle's head: results of two heads must not be mixed under one name."""
    folders = {engine.relaxation.source for engine in engines if engine.relaxation.source}
    paths = {folder: Path(folder) / "head.safetensors" for folder in sorted(folders)}
    return {folder: sha256(path) for folder, path in paths.items() if path.is_file()}


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder that was begun with other settings, naming the first; else write them down."""
    path = folder / SETTINGS
    settings = json.loads(json.dumps(settings))
    if path.is_file():
        before = read_settings(path)
        if not isinstance(before.get("heads"), dict):
            raise ValueError(f"{path} is damaged (it lists no heads); choose another --out or delete the folder")
        heads = before["heads"] | settings["heads"]
        for name, value in settings.items():
            old = before.get(name)
            if name == "heads":
                changed = [head for head in value if head in old and old[head] != value[head]]
                if changed:
                    raise ValueError(
                        f"{folder} holds results of another head under the name {changed[0]}; choose another --out or "
                        "delete the folder"
                    )
            elif old != value:
                raise ValueError(
                    f"{folder} was begun with `{name}` {old}, now it is {value}; choose another --out or delete it"
                )
        settings["heads"] = heads
    elif (folder / RESULTS).exists():
        raise ValueError(f"{folder} holds {RESULTS} but no {SETTINGS}; choose another --out, or delete the folder")
    write_whole(path, json.dumps(settings, indent=2) + "\n")


def _decode_missing(
    folder: Path, cells: list[Cell], engines: dict[tuple[str, str], Engine], task: Task, encoded: list[list[int]],
    new_tokens: int, batch: int,
) -> None:  # fmt: skip
    """Append the lines of every unit of prompts that results.jsonl lacks."""
    path = folder / RESULTS
    units = [range(start, min(start + batch, len(encoded))) for start in range(0, len(encoded), batch)]
    done = _keep_whole_units(path, units)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("texts"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(cells) * len(encoded), completed=0)
        for cell in cells:
            method, relaxation, seed = cell
            progress.update(bar, description=f"{method} {relaxation}" + (f" seed {seed}" if seed else ""))
            engine = engines[method, relaxation]
            warm = False
            for unit in units:
                if (cell, unit.start) not in done:
                    if not warm:  # the first call allocates and compiles; it belongs to no text's time
                        engine.run({unit.start: Request(encoded[unit.start], 0, 2, task.stop)})
                        warm = True
                    lines = [json.dumps(r) + "\n" for r in _records(cell, engine, task, encoded, unit, new_tokens)]
                    with open(path, "a", encoding="utf-8") as file:
                        file.write("".join(lines))
                progress.advance(bar, len(unit))


def _keep_whole_units(path: Path, units: list[range]) -> set[tuple[Cell, int]]:
    """(cell, first prompt) of the units that are there as a whole; lines of half-written ones are dropped."""
    if not path.is_file():
        return set()
    records = read_results(path)
    start = {index: unit.start for unit in units for index in unit}
    keys = [((r["method"], r["relaxation"], r["seed"]), start.get(r["prompt"])) for r in records]
    found: dict[Any, set[int]] = {}
    for key, record in zip(keys, records, strict=True):
        found.setdefault(key, set()).add(record["prompt"])
    sizes = {unit.start: len(unit) for unit in units}
    whole = {key for key, prompts in found.items() if key[1] is not None and len(prompts) == sizes[key[1]]}
    text = "".join(json.dumps(record) + "\n" for key, record in zip(keys, records, strict=True) if key in whole)
    if text != path.read_text(encoding="utf-8"):
        write_whole(path, text)
    return whole


def _records(
    cell: Cell, engine: Engine, task: Task, encoded: list[list[int]], unit: range, new_tokens: int
) -> Iterator[dict[str, Any]]:
    """Decode one unit of prompts; one record a text."""
    method, relaxation, seed = cell
    requests = {index: Request(encoded[index], seed << 32 | index, new_tokens, task.stop) for index in unit}
    began = time.perf_counter()
    completions = engine.run(requests).values()
    seconds = (time.perf_counter() - began) / len(unit)
    tokens = [completion.tokens for completion in completions]
    prompts = [request.tokens for request in requests.values()]
    sums = score_positions(engine.pair, prompts, tokens, engine.relaxation, engine.sampling, engine.gate)
    for index, completion, total in zip(unit, completions, sums, strict=True):
        example = task.examples[index]
        yield {
            "method": method, "relaxation": relaxation, "seed": seed, "prompt": index, "id": example.id,
            "task": task.name, "metric": task.metric, "score": _score(task, example, completion.text, total),
            "text": completion.text, "tokens": completion.tokens, "finished": completion.finished,
            "drafted": completion.drafted, "accepted": completion.accepted,
            "target_calls": completion.target_calls, "draft_calls": completion.draft_calls,
            "drafted_by_depth": completion.drafted_by_depth, "accepted_by_depth": completion.accepted_by_depth,
            "substitutions": completion.substitutions, "positions": total.positions, "acceptance": total.acceptance,
            "bias": total.bias, "weight": total.weight, "target_logprob": total.target_logprob,
            "seconds": seconds, "batch": len(unit),
        }  # fmt: skip


def _score(task: Task, example: Any, text: str, total: PositionSums) -> float:
    if task.scores_text:
        return task.score(text, example)
    return total.target_logprob / max(1, total.positions)
