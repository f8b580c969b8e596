"""The last section of the report page: which models, data, seeds, commands and files the numbers
come from.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from .markup import Markup, tag
from .run_data import Run, files
from .sections import section, wide


def provenance(runs: list[Run]) -> Markup:
    parts = [_differences(runs) if len(runs) > 1 else None]
    for run in runs:
        listed = [
            tag(
                "tr",
                tag("th", name, scope="row"),
                tag("td", f"{size:,}"),
                tag("td", tag("code", checksum)),
            )
            for name, size, checksum in files(run)
        ]
        head = tag(
            "thead",
            tag("tr", [tag("th", words, scope="col") for words in ("file", "bytes", "sha256")]),
        )
        parts += [
            tag("h3", run.name) if len(runs) > 1 else None,
            described(_origins(run)),
            _commands(run),
            wide(
                tag(
                    "table",
                    tag("caption", "Files this page is made from, and those beside them"),
                    head,
                    tag("tbody", listed),
                ),
                "Files",
            ),
        ]
    return section("provenance", "Provenance", parts)


TRIED = {
    "bias": "bias",
    "drop": "quality drop",
    "upper_bound": "at most",
    "p": "p",
    "passed": "within the limit",
}


def operating_point(source: str, calibration: Any) -> Markup | None:
    """How a bundle's bias was chosen, from what `diversed calibrate` wrote on its card; None where
    it wrote nothing.
    """
    if not isinstance(calibration, dict):
        return None
    known = {name: in_words(value) for name, value in calibration.items()}
    if calibration.get("bias") is None:
        words = (
            "No bias was shown to keep the loss within the limit: this gate is closed, it decodes"
            " exactly."
        )
    else:
        words = (
            f"Bias {known['bias']}, the largest shown to lose at most"
            f" {known.get('max_quality_drop')} of the score, on {known.get('prompts')} prompts"
            f" ({known.get('split')}) at level {known.get('level')}."
        )
    tried = calibration.get("tried")
    rows = [
        tag("tr", [tag("td", in_words(entry.get(name))) for name in TRIED])
        for entry in (tried if isinstance(tried, list) else [])
        if isinstance(entry, dict)
    ]
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in TRIED.values()]))
    table = wide(tag("table", head, tag("tbody", rows)), "Biases tried") if rows else None
    rest = described({name: value for name, value in calibration.items() if name != "tried"})
    details = tag("details", tag("summary", "The whole calibration"), rest)
    return tag(
        "div",
        tag("h3", f"Operating point of {source}, chosen by calibration"),
        tag("p", words),
        table,
        details,
    )


def described(values: dict[str, Any]) -> Markup:
    """Names and values; what is None is left out."""
    known = {
        name.replace("_", " "): in_words(value)
        for name, value in values.items()
        if value is not None
    }
    return tag("dl", [[tag("dt", name), tag("dd", words)] for name, words in known.items()])


def in_words(value: Any) -> str:
    """A value of a JSON file for people: what is inside it with commas between, None left out."""
    if isinstance(value, dict):
        return (
            ", ".join(
                f"{name} {in_words(inner)}" for name, inner in value.items() if inner is not None
            )
            or "none"
        )
    if isinstance(value, list):
        return ", ".join(map(in_words, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _differences(runs: list[Run]) -> Markup:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [json.dumps(run.settings.get(name)) for run in runs] for name in names}
    body = [
        tag("tr", tag("th", name, scope="row"), [tag("td", value) for value in found])
        for name, found in values.items()
        if len(set(found)) > 1
    ]
    head = tag(
        "tr", tag("th", "setting", scope="col"), [tag("th", run.name, scope="col") for run in runs]
    )
    caption = tag(
        "caption", "Settings in which the runs differ" if body else "The runs differ in no setting"
    )
    return wide(
        tag("table", caption, tag("thead", head), tag("tbody", body)),
        "Settings in which the runs differ",
    )


def _origins(run: Run) -> dict[str, Any]:
    """Models, data, seeds and checksums, from the settings and what gathering and training wrote."""
    settings = run.settings
    models = {
        role: f"{settings[role].get('name')} (hash {settings[role].get('hash')})"
        for role in ("target", "draft")
    }
    found = models | {
        name: settings.get(name)
        for name in ("source", "split", "data", "sampling", "dtype", "heads")
    }
    found |= {
        "seed of prompts": settings["seed"],
        "seeds of texts": sorted({record["seed"] for record in run.records}),
    }
    for source, card in run.cards.items():
        training = card.get("training") if isinstance(card.get("training"), dict) else {}
        found |= {
            f"{source}: {name}": training.get(name)
            for name in ("traces_sha256", "relaxation", "settings")
        }
    if run.manifest:
        names = (
            "source",
            "seed",
            "prompts",
            "samples",
            "relaxation",
            "versions",
            "device",
            "threads",
        )
        found["traces"] = {name: run.manifest.get(name) for name in names}
    if run.training:
        found["trained head"] = run.training.get("head_sha256")
    return found


def _commands(run: Run) -> list[Markup]:
    """What was run, as it was written down; and a command that measures the same."""
    known = [
        [
            tag("pre", str(entry.get("command"))),
            tag(
                "p",
                f"{entry.get('date')}; ",
                in_words(entry.get("machine")),
                "; ",
                in_words(entry.get("versions")),
            ),
        ]
        for entry in run.commands
    ] or tag("p", "Not written down: this run was made by a version that did not.")
    return [
        tag("h4", "Commands, machine and versions"),
        known,
        tag("h4", "The same again"),
        tag("pre", _again(run)),
    ]


def _again(run: Run) -> str:
    """`diversed eval` with the options of this run."""
    settings = run.settings
    names = {"seeds": "seed", "temperatures": "temperature", "draft_lengths": "draft_length"}
    drafting = [record for record in run.records if record["method"] != "plain"] or run.records
    several = {
        name: list(dict.fromkeys(record[key] for record in drafting)) for name, key in names.items()
    }
    options = {
        "out": "OUT",
        "target": settings["target"].get("name"),
        "draft": settings["draft"].get("name"),
    }
    options |= {name: settings.get(name) for name in ("task", "split", "prompts")}
    options |= {"methods": list(dict.fromkeys(row["method"] for row in run.rows))}
    options |= {"relaxations": list(dict.fromkeys(row["relaxation"] for row in run.rows))} | several
    for group in ("data", "sampling"):
        options |= {
            f"{group}.{name}": value
            for name, value in settings[group].items()
            if value or group == "sampling"
        }
    names = ("max_prompt_tokens", "max_new_tokens", "batch", "seed", "dtype", "device", "threads")
    options |= {name: settings.get(name) for name in names}
    options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    return "diversed eval " + " ".join(
        f"--{name} {_spelled(value)}" for name, value in options.items()
    )


def _spelled(value: Any) -> str:
    return (
        " ".join(shlex.quote(str(item)) for item in value)
        if isinstance(value, list)
        else shlex.quote(str(value))
    )
