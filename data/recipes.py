"""What each task is made of. Adding a task is one entry of TASKS."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..files import close_to
from .layouts import Layout
from .programs import humaneval_row, mbpp_row
from .prompts import PLACES, check_template
from .scores import SCORES
from .sources import SPLITS


@dataclass(frozen=True)
class DataOptions:
    """Where a task's rows come from and how they are read; None means the task's own choice.

    Args:
        path: a .jsonl or .json file (also .gz), or a folder with train, validation and test files;
            None loads from the hub. A split without a file of its own is carved from the training
            (or only) file, a tenth each, by a hash of the row's text: training and evaluation never
            share a row.
        whole: take all rows of the split's file (of the only file) for any split; training and
            evaluating on the same file then share rows.
        prompt_field: field with the part of the prompt that is never shortened; dots reach inside:
            "turns.0".
        article_field: field with the part that may lose its end to fit the context.
        reference_field: field with the expected answer.
        template: the text around the fields, such as "Article: {article} Summary:"; other braces
            are {{ and }}.
        score: exact, final_number, rouge1, rouge2, rougeL, bleu, pass_at_1, which runs the
            reference as tests of the text's program, or target_logprob, which needs no reference.
        stop: strings that end a text.
        max_new_tokens: tokens a text may have, the end-of-text included.
        chat: send the prompt through the tokenizer's chat template.
    """

    path: str | None = None
    whole: bool = False
    prompt_field: str | None = None
    article_field: str | None = None
    reference_field: str | None = None
    template: str | None = None
    score: str | None = None
    stop: tuple[str, ...] | None = None
    max_new_tokens: int | None = None
    chat: bool = False


@dataclass(frozen=True)
class Recipe:
    """What load_task turns into a Task.

    hub:     (repository, configuration); hub_splits: the splits the hub has.
    prepare: (row, place) -> the row as the layouts read it, where a text is made of several fields.
    """

    template: str
    layouts: tuple[Layout, ...]
    score: str
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128
    hub: tuple[str, str | None] | None = None
    hub_splits: tuple[str, ...] = SPLITS
    prepare: Callable[[dict, str], dict] | None = None


def _spec_bench(category: str, prefix: str = "", **part: str) -> Layout:
    return Layout(
        **part,
        reference="reference.0",
        where=("category", category),
        inside=rf"(?s)(?:{re.escape(prefix)})?(.*)",
    )


TASKS = {
    "sums": Recipe(
        "{prompt}", (Layout("prompt", None, "reference"),), "final_number", max_new_tokens=96
    ),
    "gsm8k": Recipe(
        'Solve the problem step by step and end with "#### " and the number.\n\nQuestion:'
        " {prompt}\nAnswer:",
        (Layout("question", None, "answer"), _spec_bench("math_reasoning", prompt="turns.0")),
        "final_number",
        stop=("\nQuestion:", "\n\nQuestion"),
        hub=("openai/gsm8k", "main"),
        hub_splits=("train", "test"),
    ),
    "cnndm": Recipe(
        "Article: {article}\n\nSummarize the above article in three sentences.\nSummary:",
        (
            Layout(None, "article", "highlights"),
            _spec_bench("summarization", "Summarize: ", article="turns.0"),
        ),
        "rouge2",
        stop=("###", "\nArticle:"),
        hub=("abisee/cnn_dailymail", "3.0.0"),
    ),
    "xsum": Recipe(
        "Article: {article}\n\nSummarize the above article in 1 sentence.\nSummary:",
        (
            Layout(None, "document", "summary"),
            # HELM's few-shot prompts: the last article is the row's own, the five before it are
            # shots and left out.
            Layout(
                None,
                "article",
                "summary_gt",
                inside=(
                    r"(?s)(?:.*###\nArticle: )?(.*?)(?:\s*Summarize the above article in 1"
                    r" sentence\.\s*)?$"
                ),
            ),
        ),
        "rouge2",
        stop=("###", "\nArticle:"),
        max_new_tokens=64,
        hub=("EdinburghNLP/xsum", None),
    ),
    "wmt": Recipe(
        "Translate German to English.\nGerman: {prompt}\nEnglish:",
        (
            Layout("translation.de", None, "translation.en"),
            _spec_bench("translation", "Translate German to English: ", prompt="turns.0"),
        ),
        "bleu",
        stop=("\nGerman:", "\n\n"),
        hub=("wmt/wmt14", "de-en"),
    ),
    "mbpp": Recipe(
        "You are an expert Python programmer, and here is your task: {prompt} Your code should pass"
        " these tests:\n\n{article}\n[BEGIN]\n",
        (Layout("text", "tests", "test_list"),),
        "pass_at_1",
        stop=("[DONE]", "\n```", "\nassert ", "\nprint(", "\nif __name__"),
        max_new_tokens=512,
        hub=("google-research-datasets/mbpp", "full"),
        prepare=mbpp_row,
    ),
    "humaneval": Recipe(
        "{prompt}",
        (Layout("prompt", None, "test"),),
        "pass_at_1",
        stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"),
        max_new_tokens=512,
        hub=("openai/openai_humaneval", None),
        hub_splits=("test",),
        prepare=humaneval_row,
    ),
    "jsonl": Recipe("{prompt}", (Layout("prompt"),), "target_logprob"),
}


def recipe_for(name: str, options: DataOptions) -> Recipe:
    """The task's recipe with the options put in."""
    if name not in TASKS:
        raise ValueError(
            f"the task must be one of {', '.join(TASKS)}, got {name!r}{close_to(name, TASKS)}"
        )
    recipe = TASKS[name]
    layouts = _layouts(name, options)
    needed = tuple(place for place in PLACES if getattr(layouts[0], place))
    template = options.template
    if template is None:
        template = (
            "\n\n".join(f"{{{place}}}" for place in reversed(needed))
            if name == "jsonl"
            else recipe.template
        )
    check_template(template, needed)
    score = _score(name, options)
    if score == "target_logprob":
        layouts = tuple(replace(layout, reference=None) for layout in layouts)
    # A chat answer holds a block of code, which the stop strings of a bare continuation would cut.
    usual = () if options.chat and recipe.prepare else recipe.stop
    stop = usual if options.stop is None else options.stop
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"`data.stop` must be a list of texts, none empty, got {stop!r}")
    tokens = recipe.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    if tokens < 1:
        raise ValueError(f"`data.max_new_tokens` must be at least 1, got {tokens}")
    return replace(
        recipe,
        layouts=layouts,
        template=template,
        score=score,
        stop=tuple(stop),
        max_new_tokens=tokens,
    )


def _layouts(name: str, options: DataOptions) -> tuple[Layout, ...]:
    fields = {place: getattr(options, f"{place}_field") for place in (*PLACES, "reference")}
    given = {place: field for place, field in fields.items() if field}
    if not given:
        return TASKS[name].layouts
    if TASKS[name].prepare:
        raise ValueError(
            f"the task {name} reads fields of its own, leave out `data.{next(iter(given))}_field`;"
            " or use the task jsonl with the score pass_at_1"
        )
    if name == "jsonl" and not options.prompt_field and not options.article_field:
        given["prompt"] = "prompt"
    own = Layout() if name == "jsonl" else replace(TASKS[name].layouts[0], inside=Layout.inside)
    return (replace(own, **given),)


def _score(name: str, options: DataOptions) -> str:
    score = options.score or TASKS[name].score
    listing = ", ".join(SCORES)
    if score not in SCORES:
        raise ValueError(
            f"`data.score` must be one of {listing}, got {score!r}{close_to(score, SCORES)}"
        )
    if name == "jsonl" and options.reference_field and not options.score:
        raise ValueError(
            f"`data.score` must say how a text is compared with {options.reference_field}: one of"
            f" {listing}"
        )
    if name == "jsonl" and score != "target_logprob" and not options.reference_field:
        raise ValueError(
            f"the score {score} needs `data.reference_field`, the field with the expected answer"
        )
    return score
