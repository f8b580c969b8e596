"""Code tasks: from a row to a prompt and its tests (`code_answers` reads a program out of an answer).

mbpp       Austin 2021, arXiv 2108.07732, the prompt of section 3 without examples: the task, its tests, then [BEGIN];
           an answer ends at [DONE]. Rows of the full or of the sanitized set.
humaneval  Chen 2021, arXiv 2107.03374: the prompt is the function's head, the test check(entry_point); an answer ends
           where the next thing begins at the margin.
"""

from __future__ import annotations

from .code_answers import HERE
from .layouts import Blank, text_of


def mbpp_row(row: dict, place: str) -> dict:
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


def humaneval_row(row: dict, place: str) -> dict:
    """The row with head, tests and their call as one text in `test`."""
    head, test, name = (text_of(row, field, place) for field in ("prompt", "test", "entry_point"))
    if "def check(" not in test:
        raise Blank(f"{place} must define check(candidate) in the field test, got {test[:60]!r}")
    return {**row, "test": f"{head}{HERE}{test}\n\ncheck({name})\n"}


def _lines(row: dict, field: str, place: str) -> str:
    """A field's text, or its list of texts as lines."""
    listed = row.get(field)
    if not isinstance(listed, list):
        return text_of(row, field, place)
    return "\n".join(text_of(row, f"{field}.{i}", place) for i in range(len(listed)))
