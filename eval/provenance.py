"""Where the numbers of a run come from: models, data, seeds, and a command that measures the
same.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from .run_data import Run


def origins(run: Run) -> dict[str, Any]:
    """Models, data, seeds and checksums, from the settings and what gathering and training
    wrote.
    """
    settings = run.settings
    found = {
        role: f"{settings[role].get('name')} (hash {settings[role].get('hash')})"
        for role in ("target", "draft")
    }
    found |= _chosen(settings, "source split data sampling dtype heads")
    found["seed of prompts"] = settings["seed"]
    found["seeds of texts"] = sorted({record["seed"] for record in run.records})
    for source, card in run.cards.items():
        known = _chosen(card.training, "traces_sha256 relaxation settings")
        found |= {f"{source}: {name}": value for name, value in known.items()}
    if run.manifest:
        names = "source seed prompts samples relaxation versions device threads"
        found["traces"] = _chosen(run.manifest, names)
    if run.training:
        found["trained head"] = run.training.get("head_sha256")
    return found


def _chosen(values: dict[str, Any], names: str) -> dict[str, Any]:
    return {name: values.get(name) for name in names.split()}


def differing_settings(runs: list[Run]) -> dict[str, list[str]]:
    """name -> its value in every run, of the settings in which the runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [json.dumps(run.settings.get(name)) for run in runs] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def same_again(run: Run) -> str:
    """`diversed eval` with the options of this run."""
    settings = run.settings
    drafting = [record for record in run.records if record["method"] != "plain"] or run.records

    def every(name: str, records: list[dict[str, Any]] = drafting) -> list[Any]:
        return list(dict.fromkeys(record[name] for record in records))

    options = {
        "out": "OUT",
        "target": settings["target"].get("name"),
        "draft": settings["draft"].get("name"),
        **_chosen(settings, "task split prompts"),
        "methods": every("method", run.rows),
        "relaxations": every("relaxation", run.rows),
        "seeds": every("seed"),
        "temperatures": every("temperature"),
        "draft_lengths": every("draft_length"),
    }
    options |= {f"data.{name}": value for name, value in settings["data"].items() if value}
    options |= {f"sampling.{name}": value for name, value in settings["sampling"].items()}
    options |= _chosen(settings, "max_prompt_tokens max_new_tokens batch seed dtype device threads")
    options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    words = ["diversed eval"]
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(shlex.quote(str(one)) for one in values)]
    return " ".join(words)
