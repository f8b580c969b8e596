"""The sections of the report page in words and numbers: single tokens, the table of all cells and
what it counts.
"""

from __future__ import annotations

import math
from typing import Any

from .markup import Markup, tag
from .run_data import Run

Row = dict[str, Any]
COLUMNS = {  # key of a row: head, digits
    "score": ("score", 3),
    "difference": ("minus exact", 3),
    "mcnemar": ("score p", 3),
    "text_p": ("texts p", 3),
    "step_acceptance": ("step acceptance", 3),
    "accepted_share": ("accepted share", 3),
    "tokens_per_call": ("tokens per call", 2),
    "tokens_per_second": ("tokens/s", 0),
    "mean_weight": ("mean weight", 3),
    "mean_bias": ("mean bias", 4),
    "substitutions": ("substitutions per text", 2),
    "target_logprob": ("log-likelihood", 3),
    "tokens_per_text": ("tokens per text", 1),
}
DEFINITIONS = {
    "score": (
        "The task's score, mean over prompts (a prompt's seeds averaged first), with its 95 %"
        " interval."
    ),
    "minus exact": (
        "Score minus that of exact decoding with all else equal, paired by prompt, with its 95 %"
        " interval."
    ),
    "score p": (
        "Exact two-sided test of McNemar on prompts scored differently than by exact decoding; 0/1"
        " scores only."
    ),
    "texts p": (
        "Test of the hypothesis that the first 32 tokens of the texts have the law of exact"
        " decoding's: counts of tokens and of neighbours, the two texts of a prompt exchanged at"
        " random. Small: they can be told apart."
    ),
    "step acceptance": (
        "Mean over all positions of the finished texts of 1 - TV(draft, relaxed target): how often"
        " one drafted token is kept. Every token of a text is a position, extra tokens and the end"
        " of text too, nothing after it; no draft length is in it, and no drafted token is counted."
    ),
    "accepted share": (
        "Accepted / drafted tokens. The extra token is in neither, nor is what lies after the end"
        " of the text; tokens drafted after the first refused one count as drafted. It falls with"
        " the draft length."
    ),
    "tokens per call": (
        "Tokens of the texts / target calls. The extra token that every call gives is counted, so"
        " is the end of text, nothing after it; drafted tokens that were not used are not counted;"
        " the prefill is no call."
    ),
    "tokens/s": (
        "The same tokens / seconds of decoding: both models and the prefill of the whole batch"
        " together, the warm-up left out. It depends on machine, batch and implementation, the"
        " other rates do not."
    ),
    "mean weight": "Mean over positions of the draft's share w in (1 - w) target + w draft.",
    "mean bias": "Mean over positions of TV(target, relaxed target).",
    "substitutions per text": (
        "Expected tokens of a text that are not the target's own: the sum of TV(target, relaxed"
        " row) as decoded. The extra token after a draft that was accepted to its end is the"
        " target's own and costs 0."
    ),
    "log-likelihood": (
        "Mean log-likelihood of a token under the target, nats, each at least log 1e-30."
    ),
    "tokens per text": "Mean length, the end of text counted.",
    "intervals": (
        "Percentiles of 10,000 bootstrap resamples of prompts; a prompt's texts (its seeds) stay"
        " together."
    ),
}


def section(name: str, title: str, *children: object) -> Markup:
    return tag("section", tag("h2", title, id=name), *children)


def wide(table: Markup, words: str) -> Markup:
    """A table that scrolls by itself where the page is narrower."""
    return tag("div", table, class_="wide", tabindex="0", role="region", aria_label=words)


def number(value: float | None, digits: int) -> str:
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def signed(value: float | None, digits: int) -> str:
    return number(value, digits) if value is None or not value > 0 else f"+{number(value, digits)}"


def p_value(value: float | None, digits: int) -> str:
    return (
        f"<{10**-digits:g}" if value is not None and value < 10**-digits else number(value, digits)
    )


SHOWN_AS = {"difference": signed, "mcnemar": p_value, "text_p": p_value}


def interval(low: float | None, high: float | None, digits: int) -> str:
    return (
        "" if low is None or high is None else f" [{number(low, digits)}, {number(high, digits)}]"
    )


def settings_words(row: Row) -> str:
    temperature = "unknown" if row["temperature"] is None else f"{row['temperature']:g}"
    return f"temperature {temperature}, draft length {row['draft_length']}"


def single_tokens(run: Run, numbers: dict[str, Any] | str, several: bool) -> Markup:
    """Texts of one learned point, every token with its weight; and means by class of token."""
    head = tag("h3", run.name) if several else None
    if isinstance(numbers, str):
        return tag("div", head, tag("p", numbers))
    point = numbers["key"]["point"]
    about = (
        "The learned point that gains most over static blending of its quality (its interval's"
        f" lower end): {point['method']}, {point['relaxation']}, {settings_words(point)}. The first"
        " texts of the file, then the first that exact decoding of the same prompt scored higher."
        " Background: the draft's share w. Underlined: not the target's most likely token. Hover"
        " or tap a token for its numbers; probabilities are after temperature and the other"
        " sampling settings, both models run once over the finished text."
    )
    scale = tag("p", "w = 0 ", tag("span", class_="ramp"), " 1", class_="scale")
    texts = [
        tag(
            "article",
            tag("p", f"{text['id']}, score {text['score']:g}", class_="id"),
            tag("p", text["before"], class_="before"),
            tag("p", map_tokens(text["tokens"]), class_="text"),
        )
        for text in numbers["shown"]
    ]
    return tag("div", head, tag("p", about), scale, texts, _classes(numbers))


def map_tokens(tokens: list[list]) -> list[Markup]:
    """One span a token; what hovering shows stands in data-i."""
    spans = []
    for piece, target, draft, weight, best, best_target, *_ in tokens:
        hint = (
            f"{piece.strip() or repr(piece)}   target p {target:.3g}   draft q {draft:.3g}   w"
            f" {weight:.2f}"
        )
        hint += (
            "   the target's most likely"
            if best is None
            else f"   target preferred {best!r} ({best_target:.3g})"
        )
        shown = (
            piece.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n") or "\N{MIDDLE DOT}"
        )
        style = f"--w:{weight:.2f}"
        spans.append(
            tag(
                "span",
                shown,
                class_="t" if best is None else "t o",
                style=style,
                tabindex="0",
                data_i=hint,
            )
        )
    return spans


def _classes(numbers: dict[str, Any]) -> Markup:
    heads = (
        "class",
        "tokens",
        "mean weight",
        "mean TV(target, draft)",
        "substitutions per text",
        "not target's first",
    )
    body = [
        tag(
            "tr",
            tag("th", one["class"], scope="row"),
            tag("td", f"{one['tokens']:,}"),
            tag("td", number(one["weight"], 3)),
            tag("td", number(one["distance"], 3)),
            tag("td", number(one["cost"] / numbers["counted"], 2)),
            tag("td", f"{100 * one['other'] / one['tokens']:.1f} %"),
        )
        for one in numbers["classes"]
    ]
    caption = tag(
        "caption", f"By class of token, over the first {numbers['counted']} texts of this point"
    )
    head = tag("thead", tag("tr", [tag("th", words, scope="col") for words in heads]))
    return wide(tag("table", caption, head, tag("tbody", body)), "Weight by class of token")


def all_cells(rows: list[Row], extra: Markup | None) -> Markup:
    """Every row, sorted by a click on a head; and what the words mean."""
    several = [
        name
        for name in ("run", "task", "temperature", "draft_length")
        if len({row[name] for row in rows}) > 1
    ]
    named = [*several, "method", "relaxation"]
    heads = [*named, "texts", *(words for words, _ in COLUMNS.values())]
    buttons = [
        tag(
            "th",
            tag("button", words.replace("_", " "), type="button"),
            scope="col",
            class_=words in named and "word",
        )
        for words in heads
    ]
    body = [tag("tr", _cells(row, named)) for row in rows]
    table = tag("table", tag("thead", tag("tr", buttons)), tag("tbody", body), class_="sort")
    metrics = ", ".join(dict.fromkeys(row["metric"] or "score" for row in rows))
    words = [[tag("dt", name), tag("dd", meaning)] for name, meaning in DEFINITIONS.items()]
    about = tag("p", f"Score: {metrics}. A head sorts the table by its column.")
    table = wide(table, "All cells")
    return section(
        "cells", "All cells", about, table, extra, tag("h3", "What is counted"), tag("dl", words)
    )


def _cells(row: Row, named: list[str]) -> list[Markup]:
    cells = [
        tag(
            "td",
            row[name],
            class_="word",
            data_v=row[name] if isinstance(row[name], int | float) else None,
        )
        for name in named
    ]
    cells.append(tag("td", f"{row['requests']:,}", data_v=row["requests"]))
    for name, (_, digits) in COLUMNS.items():
        value = row[name]
        ends = interval(row.get(f"{name}_low"), row.get(f"{name}_high"), digits)
        known = value is not None and not math.isnan(value)
        shown = SHOWN_AS.get(name, number)(value, digits)
        sorted_by = f"{value:.8g}" if known else ""
        cells.append(tag("td", shown, tag("small", ends) if ends else None, data_v=sorted_by))
    return cells
