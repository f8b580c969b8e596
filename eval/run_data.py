"""What the files of a run folder say, for the report page. Nothing here looks outside the folder or
loads a model.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy

from ..data.scores import SCORES
from ..files import machine, read_settings, sha256, versions, write_whole
from ..runtime.bundle import Card, head_sha256, read_card
from .comparison import SPEEDS, Least, Statement, every_statement
from .intervals import percentiles, ratio, resample
from .results import RESULTS, SETTINGS, kind_of, point_of, read_results
from .summary import summarise

COMMANDS = "commands.json"
LIKELIHOOD = SCORES["target_logprob"].metric
NEEDED = {
    "target": dict,
    "draft": dict,
    "task": str,
    "data": dict,
    "split": str,
    "prompts": int,
    "seed": int,
    "sampling": dict,
    "max_prompt_tokens": int,
    "batch": int,
    "dtype": str,
    "device": str,
    "threads": int,
}
LISTED = ("*.json", "*.jsonl", "*.png", "bundle*/*", "train/train.json", "train/head.safetensors")
LISTED += ("traces/manifest.json", "round-*/t*/train.json", "round-*/t*/head.safetensors")
LISTED += ("round-*/t*/manifest.json",)


@dataclass(frozen=True)
class Run:
    """One folder of results.

    name:     distinguishes it from the other runs of a page.
    rows:     those of `summarise` with `run`, and a 95 % interval by prompt of tokens_per_call and
              step_acceptance.
    cards:    relaxation source -> card of its bundle, if the folder holds that very head; folders:
              their places.
    commands: entries of COMMANDS, [] if no one wrote any down. manifest, training: of traces and
        head, or None.
    """

    name: str
    folder: Path
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    statements: list[Statement]
    folders: dict[str, Path]
    cards: dict[str, Card]
    commands: list[dict[str, Any]]
    manifest: dict[str, Any] | None
    training: dict[str, Any] | None


def read_runs(folders: Sequence[str | Path], quality: str = "score") -> list[Run]:
    """Every folder's facts; ValueError or OSError with one sentence if one is no run.

    quality: score, the task's, or likelihood, the target's mean log-probability of a token in its
        place.
    """
    paths = [Path(folder) for folder in folders]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(
            f"`runs` names a folder twice: {', '.join(map(str, paths))}; name each once"
        )
    return [_read(path, name, quality) for path, name in zip(paths, _names(paths), strict=True)]


def remember(folder: Path) -> None:
    """Add the command that runs now, with machine and versions, to COMMANDS, unless it is there."""
    program = Path(sys.argv[0]).name
    words = ["diversed" if program == "__main__.py" else program, *sys.argv[1:]]
    entry = {"command": shlex.join(words), "machine": machine(), "versions": versions()}
    known = _listed(folder / COMMANDS)
    if entry not in [{name: old.get(name) for name in entry} for old in known]:
        known.append({**entry, "date": f"{datetime.now(UTC):%Y-%m-%d}"})
        write_whole(folder / COMMANDS, json.dumps(known, indent=1) + "\n")


def _read(folder: Path, name: str, quality: str) -> Run:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; name one that `diversed eval` or `diversed run` wrote"
        )
    records = read_results(folder / RESULTS)
    if not records:
        raise ValueError(
            f"{folder / RESULTS} holds no result yet; run `diversed eval` to its end first"
        )
    if quality == "likelihood":
        records = list(map(_by_likelihood, records))
    settings = _settings(folder / SETTINGS)
    intervals = _speed_intervals(records)
    rows = [row | {"run": name} | intervals[point_of(row)] for row in summarise(records)]
    heads = settings.get("heads")
    heads = heads if isinstance(heads, dict) else {}
    places = {source: folder / Path(source).name for source in heads}
    held = {
        source: place for source, place in places.items() if head_sha256(place) == heads[source]
    }
    return Run(
        name=name,
        folder=folder,
        settings=settings,
        records=records,
        rows=rows,
        statements=every_statement(
            records, settings.get("chosen") or (), least=_least(folder / SETTINGS, settings)
        ),
        folders=held,
        cards={source: read_card(place) for source, place in held.items()},
        commands=_listed(folder / COMMANDS),
        manifest=_object(folder / "traces" / "manifest.json"),
        training=_object(folder / "train" / "train.json"),
    )


def _by_likelihood(record: dict[str, Any]) -> dict[str, Any]:
    """A record whose score is the target's mean log-probability of a token."""
    score = record["target_logprob"] / max(1, record["positions"])
    return record | {"score": score, "metric": LIKELIHOOD}


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `diversed eval` writes it")
    settings = read_settings(path, "folder")
    if bad := [key for key, kind in NEEDED.items() if not isinstance(settings.get(key), kind)]:
        raise ValueError(
            f"{path} lacks {', '.join(bad)}; run `diversed eval` again, to another folder"
        )
    return settings


def _least(path: Path, settings: dict[str, Any]) -> Least:
    """The least differences of a run; those of a run before there were any are the default."""
    try:
        return Least(**settings.get("least", {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; run `diversed eval` again") from error


def _speed_intervals(records: list[dict[str, Any]]) -> dict[tuple, dict[str, float]]:
    """point -> the ends of the 95 % intervals of both speeds, prompts resampled with their
    seeds.
    """
    sums: dict[tuple, dict[int, numpy.ndarray]] = {}
    for record in records:
        values = [[len(record["tokens"]), record["target_calls"]]]
        values += [[record["acceptance"], record["positions"]]]
        mine = sums.setdefault(point_of(record), {})
        mine[record["prompt"]] = mine.get(record["prompt"], 0) + numpy.array(values, float)
    found: dict[tuple, dict[str, float]] = {}
    for count in set(map(len, sums.values())):  # these share their resamples
        points = [point for point, prompts in sums.items() if len(prompts) == count]
        columns = numpy.stack([list(sums[point].values()) for point in points], 1)
        drawn = resample(columns.reshape(count, -1), lambda total: total)
        low, high = percentiles(ratio(drawn.reshape(-1, *columns.shape[1:])))
        for index, point in enumerate(points):
            found[point] = {
                "tokens_per_call_low": float(low[index, 0]),
                "tokens_per_call_high": float(high[index, 0]),
                "step_acceptance_low": float(low[index, 1]),
                "step_acceptance_high": float(high[index, 1]),
            }
    return found


def best_point(run: Run) -> dict[str, Any] | None:
    """The row of the learned point that gains most over what needs no training and has its
    quality, by its interval's lower end.

    The operating point of a calibrated bundle comes first; without any statement the first learned
    point.
    """
    learned = [row for row in run.rows if kind_of(row) == "learned" and row["method"] != "plain"]
    calibrated = [
        row for row in learned if getattr(run.cards.get(row["relaxation"]), "calibration", None)
    ]
    speed = next(iter(SPEEDS))
    gains = {point_of(vars(one)): one.low for one in run.statements if one.speed == speed}
    ranked = sorted(calibrated or learned, key=lambda row: -gains.get(point_of(row), -numpy.inf))
    return ranked[0] if ranked else None


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart."""
    parts = [path.resolve().parts for path in folders]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def files(run: Run) -> list[tuple[str, int, str]]:
    """(path, bytes, sha256) of what the folder holds: not traces, which the manifest lists, nor
    pages.
    """
    found = sorted(
        {path for pattern in LISTED for path in run.folder.glob(pattern) if path.is_file()}
    )
    shown = [path for path in found if not path.name.startswith(".")]
    return [
        (path.relative_to(run.folder).as_posix(), path.stat().st_size, sha256(path))
        for path in shown
    ]


def _object(path: Path) -> dict[str, Any] | None:
    return read_settings(path, "folder") if path.is_file() else None


def _listed(path: Path) -> list[dict[str, Any]]:
    """The entries of COMMANDS."""
    if not path.is_file():
        return []
    fault: object = "it holds no list of objects"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        entries = None
        fault = error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} is damaged ({fault}); delete it, the commands so far are lost")
    return entries
