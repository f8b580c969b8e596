"""The report page: one HTML file that shows what was measured, and from which files.

The page needs no network and no other file; it is a function of the files in the run folders alone,
the same bytes twice. The numbers of single tokens need the models once; they stay in
RUN/tokens.json.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files as packaged
from typing import Any

from .comparison import Statement
from .frontiers import batches, depths, frontiers
from .markup import Markup, tag
from .provenance import operating_point, provenance
from .run_data import Run
from .sections import all_cells, number, section, settings_words, signed, single_tokens

CONTENTS = {
    "measured": "What was measured",
    "frontier": "Quality against speed",
    "depth": "Acceptance by depth",
    "tokens": "Where the draft's words went",
    "cells": "All cells",
    "provenance": "Provenance",
}


def page(runs: list[Run], numbers: list[dict[str, Any] | str]) -> str:
    """The whole page; numbers: what `token_numbers` says of each run."""
    rows = [row for run in runs for row in run.rows]
    style, script = (
        packaged(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Nothing is fetched, and no script runs but this one, whatever stands in the texts.
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src"
        f" 'sha256-{digest}'"
    )
    title = _title(runs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style)),
    )
    contents = tag(
        "nav",
        tag(
            "ul", [tag("li", tag("a", words, href=f"#{name}")) for name, words in CONTENTS.items()]
        ),
    )
    tokens = [
        single_tokens(run, found, len(runs) > 1) for run, found in zip(runs, numbers, strict=True)
    ]
    main = tag(
        "main",
        _measured(runs),
        frontiers(rows),
        depths(rows),
        section("tokens", CONTENTS["tokens"], tokens),
        all_cells(rows, batches(runs, rows)),
        provenance(runs),
    )
    body = tag(
        "body", tag("header", tag("h1", title), contents), main, tag("script", Markup(script))
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _title(runs: list[Run]) -> str:
    names = [[run.settings[role].get("name") for role in ("target", "draft")] for run in runs]
    words = [
        f"{run.settings['task']}: {one} with draft {two}"
        for run, (one, two) in zip(runs, names, strict=True)
    ]
    return "; ".join(dict.fromkeys(words))


def _measured(runs: list[Run]) -> Markup:
    parts: list[object] = []
    for run in runs:
        parts += [tag("h3", run.name) if len(runs) > 1 else None, tag("p", _in_two_sentences(run))]
        parts.append(tag("ul", [_verdicts(run, row) for row in _compared(run)], class_="verdicts"))
        if not run.statements:
            parts.append(tag("p", "No learned point stands beside two or more static ones."))
        parts += [
            operating_point(source, card.get("calibration")) for source, card in run.cards.items()
        ]
    parts.append(
        tag(
            "p",
            "A learned point is compared with the line through exact decoding and the static"
            " blends, of probabilities and of logits where both were measured, at the learned"
            " point's quality: better is an interval of the difference above 0, worse one below 0."
            " Where several learned points are looked at on the same prompts, the interval that"
            " decides is corrected for their number (Bonferroni); those chosen on other prompts, as"
            " by calibration, count apart from those that were not.",
        )
    )
    return section("measured", CONTENTS["measured"], parts)


def _in_two_sentences(run: Run) -> str:
    settings, methods = run.settings, dict.fromkeys(row["method"] for row in run.rows)
    metric = run.rows[0]["metric"] or "score"
    return (
        f"{settings['prompts']:,} held-out prompts ({settings['task']}, {settings['split']}) were"
        f" continued by {settings['target'].get('name')} with the draft"
        f" {settings['draft'].get('name')} in {len(run.rows)} ways ({', '.join(methods)};"
        f" {'; '.join(dict.fromkeys(settings_words(row) for row in run.rows))}),"
        f" {len(run.records):,} texts in all. Quality is {metric}; speed is tokens per target call"
        " and step acceptance, which do not depend on the machine; tokens/s does"
        f" ({settings['device']}, {settings['dtype']}, {settings['threads']} CPU thread(s), batch"
        f" {settings['batch']})."
    )


def _compared(run: Run) -> list[list[Statement]]:
    """The statements, those of one point together."""
    found: dict[tuple, list[Statement]] = {}
    for one in run.statements:
        found.setdefault(
            (one.method, one.relaxation, one.temperature, one.draft_length), []
        ).append(one)
    return list(found.values())


def _verdicts(run: Run, statements: list[Statement]) -> Markup:
    first = statements[0]
    name = tag("b", f"{first.method}, {first.relaxation}")
    at = (
        f", {settings_words(vars(first))}: {run.rows[0]['metric'] or 'score'}"
        f" {number(first.quality, 3)}, "
    )
    return tag("li", name, at, f"{first.prompts:,} prompts", [_verdict(one) for one in statements])


def _verdict(one: Statement) -> Markup:
    low, high = (one.corrected_low, one.corrected_high) if one.looked > 1 else (one.low, one.high)
    corrected = f", corrected for {one.looked} learned points" if one.looked > 1 else ""
    needed = (
        ""
        if one.prompts_needed is None
        else f"; about {one.prompts_needed:,} prompts would show it"
    )
    against = (
        f" than static blending of this quality in {one.speed}: "
        if one.verdict != "not shown"
        else (f" to differ from static blending of this quality in {one.speed}: ")
    )
    return tag(
        "div",
        tag("span", one.verdict, class_=f"verdict {one.verdict.replace(' ', '-')}"),
        against,
        f"{number(one.learned, 3)} against {number(one.static, 3)}, difference"
        f" {signed(one.difference, 3)} [{number(low, 3)}, {number(high, 3)}]{corrected}{needed}.",
        [_of_gate(one, *gate) for gate in one.gates],
    )


def _of_gate(one: Statement, gate: str, quality: float, gain: float) -> str:
    share = (
        f", of which this is {100 * one.difference / gain:.0f} %"
        if min(gain, one.difference) > 0
        else ""
    )
    return (
        f" The gate {gate}, of quality {number(quality, 3)}, gains {signed(gain, 3)} over the"
        f" same{share}."
    )
