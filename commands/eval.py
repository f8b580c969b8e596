"""`diversed eval`: methods x relaxations x temperatures x draft lengths x seeds on the same
held-out prompts.

OUT/results.jsonl holds one line a text with everything the figures are computed from; see `sweep`.
Under the table stands what the comparison ends in, for every learned point; see `statement`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..data.tasks import DataOptions, load_task
from ..eval.comparison import every_statement
from ..eval.results import RESULTS, read_results
from ..eval.results_table import report
from ..eval.sweep import Sweep, every_cell
from ..files import MOST_THREADS, exclusive, sha256, within, worker
from ..runtime.engine import Engine, check_prompts
from ..runtime.model import load_pair
from ..runtime.sampling import Sampling

STATIC = [f"ensemble:0.{tenth}" for tenth in range(1, 10)]


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
    temperatures: list[float] | None = None,
    draft_lengths: list[int] | None = None,
    seeds: list[int] = [0],  # noqa: B006
    chosen: list[str] = [],  # noqa: B006
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
    dry_run: bool = False,
    num_shards: int | None = None,
    shard_index: int | None = None,
) -> None:
    """Decode the same held-out prompts in every way that is listed; a table and a figure of quality
    against speed.

    Args:
        out: folder for results.jsonl and frontier.png; one begun with the same options is
            continued.
        target: folder, hub name or .gguf file of the model being served; `sums-target` is the
            packaged one.
        draft: folder, hub name or .gguf file of the cheap model; `sums-draft` is the packaged one.
        task: sums, gsm8k, cnndm, xsum, wmt, mbpp, humaneval, or jsonl for any file with named
            fields.
        data: where the task's rows come from.
        split: train, validation or test.
        prompts: how many prompts of the split.
        methods: such as token or block; `plain`, the target alone, is run with relaxation none
            only.
        relaxations: none, ensemble:0.3, a bundle folder, package.module:NAME; after any `;bias=0.5`
            or `;budget=3`.
        temperatures: everything is decoded at each of these; by default at the sampling's one.
        draft_lengths: and with each of these; by default with `draft_length`.
        seeds: of the sampled texts; every seed decodes every prompt once.
        chosen: learned points that were chosen on other prompts; only the others' intervals are
            corrected for how many of them are looked at.
        draft_length: tokens drafted per target call.
        sampling: temperature, top_k, top_p, min_p of both models.
        max_prompt_tokens: longer prompts lose the end of their article, never the instruction or
            the question.
        max_new_tokens: tokens a text may have; by default the task's own number.
        batch: prompts decoded together; tokens/s depends on it. Several processes share out whole
            batches.
        seed: of the choice and order of prompts.
        dtype: auto, float32, bfloat16 or float16.
        device: cpu, cuda, ..., or auto to spread the models.
        threads: CPU threads; tokens/s depends on it.
        trust_remote_code: run model code that comes with a checkpoint.
        dry_run: decode nothing; print what would be decoded, what it costs, and what each point is
            compared with.
        num_shards: number of processes that share this work; by default from the launcher's
            environment, else 1.
        shard_index: which of them this one is.
    """
    sweep = prepare(**locals())
    if dry_run:
        from ..eval.dry_run import tell

        tell(sweep)
        return
    with exclusive(sweep.place):
        sweep.begin()
        sweep.decode()
        if sweep.num_shards == 1:
            sweep.merge()
            _tell(sweep)
    if sweep.num_shards > 1:
        _finish(sweep)


def prepare(
    *,
    out: str,
    target: str,
    draft: str,
    task: str,
    data: DataOptions,
    split: str,
    prompts: int,
    methods: list[str],
    relaxations: list[str],
    temperatures: list[float] | None,
    draft_lengths: list[int] | None,
    seeds: list[int],
    chosen: list[str],
    draft_length: int,
    sampling: Sampling,
    max_prompt_tokens: int,
    max_new_tokens: int | None,
    batch: int,
    seed: int,
    dtype: str,
    device: str,
    threads: int,
    trust_remote_code: bool,
    num_shards: int | None = None,
    shard_index: int | None = None,
    dry_run: bool = False,
) -> Sweep:
    """Check the options of `evaluate`, load the models and the prompts."""
    within(
        1, prompts=prompts, draft_length=draft_length, batch=batch, max_new_tokens=max_new_tokens
    )
    within(1, max_prompt_tokens=max_prompt_tokens)
    within(1, MOST_THREADS, threads=threads)
    num_shards, shard_index = worker(num_shards, shard_index)
    temperatures = [sampling.temperature] if temperatures is None else temperatures
    draft_lengths = [draft_length] if draft_lengths is None else draft_lengths
    cells = every_cell(methods, relaxations, seeds, temperatures, draft_lengths)
    torch.set_num_threads(threads)
    pair = load_pair(target, draft, dtype, device, trust_remote_code)
    engines = {
        cell: Engine(
            pair,
            cell.method,
            cell.relaxation,
            cell.draft_length,
            sampling=replace(sampling, temperature=cell.temperature),
        )
        for cell in dict.fromkeys(cell._replace(seed=0) for cell in cells)
    }
    loaded = load_task(task, split=split, limit=prompts, seed=seed, data=data)
    encoded = [
        loaded.encode(example, pair.tokenizer, max_prompt_tokens) for example in loaded.examples
    ]
    new_tokens = max_new_tokens or loaded.max_new_tokens
    for engine in engines.values():
        check_prompts(pair, dict(enumerate(encoded)), new_tokens + engine.shape.depth + 1)
    settings = {
        "target": {"name": target, "hash": pair.target.hash},
        "draft": {"name": draft, "hash": pair.draft.hash},
        "task": task,
        "data": asdict(data),
        "source": loaded.source,
        "split": split,
        "prompts": len(encoded),
        "draft_length": draft_lengths[0],
        "sampling": asdict(sampling) | {"temperature": temperatures[0]},
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": new_tokens,
        "batch": batch,
        "seed": seed,
        "dtype": str(pair.target.dtype),
        "device": device,
        "threads": threads,
        "chosen": chosen,
        "heads": _heads(engines.values()),
    }
    return Sweep(
        Path(out),
        cells,
        engines,
        loaded,
        encoded,
        new_tokens,
        batch,
        settings,
        num_shards,
        shard_index,
    )


def _heads(engines: Any) -> dict[str, str]:
    """Checksum of every bundle's head: results of two heads must not be mixed under one name."""
    folders = {engine.relaxation.source for engine in engines if engine.relaxation.source}
    paths = {folder: Path(folder) / "head.safetensors" for folder in sorted(folders)}
    return {folder: sha256(path) for folder, path in paths.items() if path.is_file()}


def _finish(sweep: Sweep) -> None:
    """The last of several processes to finish writes the whole and tells of it."""
    if not sweep.complete():
        print(
            f"{sweep.file}: this part is complete; the last process to finish writes"
            f" {sweep.folder / RESULTS}"
        )
        return
    try:
        with exclusive(sweep.folder):
            sweep.merge()
            _tell(sweep)
    except BlockingIOError:
        # Two ended at the same moment: whoever holds the folder has seen the same results and
        # writes them.
        print(
            f"{sweep.file}: this part is complete; another process is writing"
            f" {sweep.folder / RESULTS}"
        )


def _tell(sweep: Sweep) -> None:
    report(sweep.folder)
    for statement in every_statement(
        read_results(sweep.folder / RESULTS), sweep.settings["chosen"]
    ):
        print(statement)
