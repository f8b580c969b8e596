"""Rows of files that other projects made, as rows of a task.

A function takes (row, place) and gives the row with the fields that the task reads; a row that has
them already is given back as it is, and of another task's row there is None.

spec_bench   Spec-Bench (arXiv 2401.07851): `category`, `turns` with the instruction, `reference`.
helm_xsum    HELM's few-shot prompts: the last article is the row's own, the five before it are
             shots and left out.
mbpp         Austin 2021, arXiv 2108.07732, the prompt of section 3 without examples: the task, its
             tests, then [BEGIN]; an answer ends at [DONE]. Rows of the full or the sanitized set.
humaneval    Chen 2021, arXiv 2107.03374: the prompt is the function's head, the test
             check(entry_point); an answer ends where the next thing begins at the margin.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .code_answers import HERE
from .sources import Blank, text_of

Row = dict[str, Any]
Layout = Callable[[Row, str], Row | None]
HELM_ARTICLE = re.compile(
    r"(?s)(?:.*###\nArticle: )?(.*?)(?:\s*Summarize the above article in 1 sentence\.\s*)?$"
)


def as_it_is(row: Row, place: str) -> Row:
    """The row itself."""
    return row


def spec_bench(category: str, text: str, reference: str, instruction: str = "") -> Layout:
    """The layout of one of Spec-Bench's categories.

    text, reference: the task's own fields. instruction: what stands before the text of a turn.
    """

    def read(row: Row, place: str) -> Row | None:
        if text in row or not {"category", "turns"} <= row.keys():
            return row
        if row["category"] != category:
            return None
        answers = row.get("reference")
        return {
            **row,
            text: text_of(row, "turns.0", place).removeprefix(instruction),
            reference: answers[0] if isinstance(answers, list) and answers else answers,
        }

    return read


def helm_xsum(row: Row, place: str) -> Row:
    """A row of HELM's XSum."""
    if "document" in row or "summary_gt" not in row:
        return row
    article = HELM_ARTICLE.match(text_of(row, "article", place)).group(1)
    return {**row, "document": article, "summary": row["summary_gt"]}


def mbpp(row: Row, place: str) -> Row:
    """The row with the task in `text`, its tests as they are shown in `tests`, and with their
    set-up in `test_list`.
    """
    task = text_of(row, "prompt" if "prompt" in row and "text" not in row else "text", place)
    if not task.strip():
        raise Blank(f"{place} has an empty task (field text); fill it or delete the row")
    tests = _lines(row, "test_list", place)
    setup = [
        _lines(row, field, place) for field in ("test_imports", "test_setup_code") if row.get(field)
    ]
    return {
        **row,
        "text": task,
        "tests": tests,
        "test_list": "\n".join([*setup, tests]) if tests.strip() else "",
    }


def humaneval(row: Row, place: str) -> Row:
    """The row with head, tests and their call as one text in `test`."""
    head, test, name = (text_of(row, field, place) for field in ("prompt", "test", "entry_point"))
    if "def check(" not in test:
        raise Blank(f"{place} must define check(candidate) in the field test, got {test[:60]!r}")
    return {**row, "test": f"{head}{HERE}{test}\n\ncheck({name})\n"}


def _lines(row: Row, field: str, place: str) -> str:
    """A field's text, or its list of texts as lines."""
    listed = row.get(field)
    if not isinstance(listed, list):
        return text_of(row, field, place)
    return "\n".join(text_of(row, f"{field}.{i}", place) for i in range(len(listed)))
