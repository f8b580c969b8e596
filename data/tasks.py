"""Tasks: prompts, references, stop strings and a score. A new task is one entry of TASKS.

Rows come from the Hugging Face hub (`datasets.load_dataset`) or, with `data.path`, from local files
with the same fields; `sums` makes its own problems. Splits are disjoint (`sources`). The order is a
shuffle by `seed`: a smaller `limit` is the beginning of a larger one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..assets.sums import problems
from ..files import close_to, within
from ..runtime.chat import Turns
from . import layouts, sandbox, shots
from .prompts import PLACES, Example, check_template, encode, encode_all, fill
from .scores import SCORES, missing
from .shots import MOST_SHOTS, Shot
from .sources import SPLITS, Blank, Hole, Source, hub_source, local_source, prompt_of, text_of

SUMS_PROBLEMS = 1000  # without a limit


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
        chat: send the prompt through the tokenizer's chat template. A field with a conversation, a
            list of turns with `role` and `content`, goes there anyway; if its last turn is the
            assistant's, that turn is continued.
        shots: worked examples in front of every prompt: rows of the training split with their
            answers, in a chat as earlier turns. Which they are depends on the rows alone, and none
            of them is asked.
        skip_incomplete: leave out rows that lack a text, or whose text or reference is empty or of
            another kind, and say how many there are.
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
    shots: int = 0
    skip_incomplete: bool = False

    def __post_init__(self):
        within(0, MOST_SHOTS, **{"data.shots": self.shots})


@dataclass(frozen=True)
class Kind:
    """What a task is made of, before its rows are read.

    template: the text around the fields.
    prompt, article, reference: the fields of the part that is never shortened, of the part that may
        lose its end, and of the expected answer; None if the task has no such part.
    score: a key of SCORES. stop: strings that end a text.
    max_new_tokens: tokens a text may have, the end token included.
    hub: (repository, configuration). hub_splits: the splits that the hub has.
    layout: gives the row with these fields, if a file has others; see `layouts`.
    answer: the field with a worked answer; by default the reference. shown: what an example shows
        of it.
    code: an answer is a program. Its fields are made by the layout, so no option names others.
    languages: the template names the languages of the fields, whose names end in their codes.
    """

    template: str
    prompt: str | None = None
    article: str | None = None
    reference: str | None = None
    score: str = "target_logprob"
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 128
    hub: tuple[str, str | None] | None = None
    hub_splits: tuple[str, ...] = SPLITS
    layout: layouts.Layout = layouts.as_it_is
    answer: str | None = None
    shown: Callable[[str], str] = str.strip
    code: bool = False
    languages: bool = False

    def texts(self, row: dict, place: str) -> tuple[str | Turns, str, str | None]:
        """(prompt, article, reference) of a row; "" and None for what the task does not have."""
        found = {}
        for name in (*PLACES, "reference"):
            if field := getattr(self, name):
                read = prompt_of if name == "prompt" else text_of
                found[name] = read(row, field, place, "" if self.code else f"data.{name}_field")
        prompt, article = found.get("prompt", ""), found.get("article", "")
        if not isinstance(prompt, str):
            self._check_turns(prompt, place)
        elif not (prompt + article).strip():
            raise Blank(
                f"{place} has an empty prompt (field {self.prompt or self.article}); fill it or"
                " delete the row"
            )
        reference = found.get("reference")
        if reference is not None and not reference.strip():
            raise Blank(
                f"{place} has an empty reference (field {self.reference}); fill it or delete"
                " the row"
            )
        if lacking := missing(self.score, reference):
            raise Blank(
                f"{place} must hold {lacking} in {self.reference} for the score {self.score}, got"
                f" {reference[:60]!r}"
            )
        return prompt, article, reference

    def _check_turns(self, turns: Turns, place: str) -> None:
        if self.template != "{prompt}" or self.code:
            raise ValueError(
                f"{place} holds a conversation in the field {self.prompt}, and a template is for"
                " texts; use the task jsonl without `data.template`"
            )
        if not turns[-1]["content"].strip():
            raise Blank(f"{place} has an empty last turn (field {self.prompt})")


TASKS = {
    "sums": Kind(
        "{prompt}",
        prompt="prompt",
        reference="reference",
        score="final_number",
        max_new_tokens=96,
    ),
    "gsm8k": Kind(
        'Solve the problem step by step and end with "#### " and the number.\n\nQuestion:'
        " {prompt}\nAnswer:",
        prompt="question",
        reference="answer",
        score="final_number",
        stop=("\nQuestion:", "\n\nQuestion"),
        hub=("openai/gsm8k", "main"),
        hub_splits=("train", "test"),
        layout=layouts.spec_bench("math_reasoning", "question", "answer"),
        shown=shots.without_calculator,
    ),
    "cnndm": Kind(
        "Article: {article}\n\nSummarize the above article in three sentences.\nSummary:",
        article="article",
        reference="highlights",
        score="rouge2",
        stop=("###", "\nArticle:"),
        hub=("abisee/cnn_dailymail", "3.0.0"),
        layout=layouts.spec_bench("summarization", "article", "highlights", "Summarize: "),
    ),
    "xsum": Kind(
        "Article: {article}\n\nSummarize the above article in 1 sentence.\nSummary:",
        article="document",
        reference="summary",
        score="rouge2",
        stop=("###", "\nArticle:"),
        max_new_tokens=64,
        hub=("EdinburghNLP/xsum", None),
        layout=layouts.helm_xsum,
    ),
    "wmt": Kind(
        "Translate German to English.\nGerman: {prompt}\nEnglish:",
        prompt="translation.de",
        reference="translation.en",
        score="bleu",
        stop=("\nGerman:", "\n\n"),
        hub=("wmt/wmt14", "de-en"),
        layout=layouts.spec_bench(
            "translation", "translation.de", "translation.en", "Translate German to English: "
        ),
        languages=True,
    ),
    "mbpp": Kind(
        "You are an expert Python programmer, and here is your task: {prompt} Your code should pass"
        " these tests:\n\n{article}\n[BEGIN]\n",
        prompt="text",
        article="tests",
        reference="test_list",
        score="pass_at_1",
        stop=("[DONE]", "\n```", "\nassert ", "\nprint(", "\nif __name__"),
        max_new_tokens=512,
        hub=("google-research-datasets/mbpp", "full"),
        layout=layouts.mbpp,
        answer="code",
        shown=shots.until_done,
        code=True,
    ),
    "humaneval": Kind(
        "{prompt}",
        prompt="prompt",
        reference="test",
        score="pass_at_1",
        stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"),
        max_new_tokens=512,
        hub=("openai/openai_humaneval", None),
        hub_splits=("test",),
        layout=layouts.humaneval,
        code=True,
    ),
    "jsonl": Kind("{prompt}", prompt="prompt"),
}


def with_options(name: str, options: DataOptions) -> Kind:
    """The task of this name with the options put in."""
    if name not in TASKS:
        raise ValueError(
            f"the task must be one of {', '.join(TASKS)}, got {name!r}{close_to(name, TASKS)}"
        )
    kind = _with_fields(name, options)
    needed = tuple(place for place in PLACES if getattr(kind, place))
    template = options.template
    if template is None and name == "jsonl":
        template = "\n\n".join(f"{{{place}}}" for place in reversed(needed))
    template = kind.template if template is None else template
    check_template(template, needed)
    score = _score(name, options)
    # A chat answer holds a block of code, which the stop strings of a bare continuation would cut.
    usual = () if options.chat and kind.code else kind.stop
    stop = usual if options.stop is None else options.stop
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"`data.stop` must be a list of texts, none empty, got {stop!r}")
    tokens = kind.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    if tokens < 1:
        raise ValueError(f"`data.max_new_tokens` must be at least 1, got {tokens}")
    return replace(
        kind,
        template=template,
        reference=None if score == "target_logprob" else kind.reference,
        score=score,
        stop=tuple(stop),
        max_new_tokens=tokens,
    )


def _with_fields(name: str, options: DataOptions) -> Kind:
    """The task with the fields that the options name; rows are then read as they are."""
    kind = TASKS[name]
    fields = {place: getattr(options, f"{place}_field") for place in (*PLACES, "reference")}
    given = {place: field for place, field in fields.items() if field}
    if not given:
        return kind
    if kind.code:
        raise ValueError(
            f"the task {name} reads fields of its own, leave out `data.{next(iter(given))}_field`;"
            " or use the task jsonl with the score pass_at_1"
        )
    for place, field in given.items():
        own = getattr(kind, place) or ""
        other = field.split(".")[-1] != own.split(".")[-1]
        if kind.languages and other and options.template is None:
            raise ValueError(
                f"the task {name} translates {kind.prompt} into {kind.reference}, but"
                f" `data.{place}_field` is {field}; say with `data.template` what to do, such as"
                " 'Translate English to German: {prompt}', and with `data.stop` where a text ends"
            )
    if name == "jsonl" and "article" in given:
        kind = replace(kind, prompt=None)
    return replace(kind, layout=layouts.as_it_is, **given)


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


@dataclass(frozen=True)
class Task:
    """Prompts and how an answer to them is scored.

    score_name:     a key of SCORES; metric: its name in tables.
    max_new_tokens: tokens a text may have, the end-of-text included.
    split:          of its rows. source: one line: which rows these are, out of which file.
    options:        how the rows were read.
    shots:          the worked examples in front of every prompt.
    """

    name: str
    examples: list[Example]
    stop: tuple[str, ...]
    max_new_tokens: int
    score_name: str
    split: str
    source: str
    options: DataOptions
    shots: tuple[Shot, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides prompts, stops and scores, for the settings of a folder."""
        rows = json.dumps([astuple(example) for example in self.examples])
        shown = {"shots": [shot.id for shot in self.shots]} if self.shots else {}
        return {
            "task": self.name,
            "source": self.source,
            "split": self.split,
            "metric": self.metric,
            "data": asdict(self.options),
            "rows_sha256": hashlib.sha256(rows.encode()).hexdigest(),
            **shown,
        }

    @property
    def metric(self) -> str:
        return SCORES[self.score_name].metric

    @property
    def scores_text(self) -> bool:
        """False if the score comes from the target's rows, see `scores.mean_log_probability`."""
        return SCORES[self.score_name].function is not None

    def score(self, text: str, example: Example) -> float:
        """The score of one text, larger is better."""
        function = SCORES[self.score_name].function
        if function is None:
            raise ValueError(
                f"the score {self.score_name} is read off the target's rows, `text` does not"
                " hold it"
            )
        return function(text, example.reference)

    def encode(self, example: Example, tokenizer, max_prompt_tokens: int) -> list[int]:
        """Token ids of the prompt, at most `max_prompt_tokens`; see `data.prompts.encode`."""
        return encode(example, tokenizer, max_prompt_tokens, self.options.chat, self._turns())

    def encode_all(self, tokenizer, most: int | None, room: int | None = None) -> list[list[int]]:
        """Token ids of every prompt; see `data.prompts.encode_all`."""
        chat, turns = self.options.chat, self._turns()
        return encode_all(self.examples, tokenizer, most, room, chat, turns)

    def _turns(self) -> Turns:
        """The turns before every prompt; a plain prompt holds the worked examples itself."""
        return shots.as_turns(self.shots) if self.options.chat else ()


def load_task(
    name: str,
    path: str | None = None,
    split: str = "train",
    limit: int | None = None,
    seed: int = 0,
    data: DataOptions | None = None,
) -> Task:
    """The examples of one split of a task.

    name:  a key of TASKS. path: overrides data.path.
    limit: at most this many examples, None for all; if the split holds fewer, a warning says how
        many there are.
    seed:  of the order; never of the membership in a split.
    """
    options = replace(data or DataOptions(), **({} if path is None else {"path": str(path)}))
    kind = with_options(name, options)
    if split not in SPLITS:
        raise ValueError(
            f"`split` must be one of {', '.join(SPLITS)}, got {split!r}{close_to(split, SPLITS)}"
        )
    within(1, limit=limit)
    within(0, seed=seed)
    if kind.score == "pass_at_1":
        sandbox.check()
    shown: list[Shot] = []
    if name == "sums":
        examples, source = _sums(kind, options, split, limit, seed)
    else:
        if options.shots:
            shown = _shots(kind, options)
        examples, source = _rows(kind, options, split, limit, seed, shown)
        if not options.chat:
            examples = shots.in_front(kind.template, shown, examples)
    return Task(
        name,
        examples,
        kind.stop,
        kind.max_new_tokens,
        kind.score,
        split,
        source,
        options,
        tuple(shown),
    )


def _sums(
    kind: Kind, options: DataOptions, split: str, limit: int | None, seed: int
) -> tuple[list[Example], str]:
    own = ("path", "whole", "prompt_field", "article_field", "reference_field", "shots")
    for option in own:
        if getattr(options, option):
            raise ValueError(
                f"the task sums makes its own problems, leave out `data.{option}`; or use the task"
                " jsonl"
            )
    examples = [
        Example(
            *fill(kind.template, row["prompt"], ""),
            row["reference"],
            f"problem {i} of {split}, seed {seed}",
        )
        for i, row in enumerate(problems(split, limit or SUMS_PROBLEMS, seed))
    ]
    return examples, f"{len(examples)} problems of sums, {split}, seed {seed}"


def _shots(kind: Kind, options: DataOptions) -> list[Shot]:
    """The worked examples: rows of the training split in an order that nothing but the rows
    decides.
    """
    if not kind.reference:
        raise ValueError(
            "`data.shots` shows rows with their answers, and the score target_logprob reads none;"
            " name `data.score` and `data.reference_field`"
        )
    if not kind.stop and not options.chat:
        warnings.warn(
            "with `data.shots` a text goes on behind its answer as the examples do; say with"
            " `data.stop` where it ends",
            stacklevel=4,
        )
    source = _source(kind, options, "train")
    _, usable = _shuffled(kind, source, "train", options.skip_incomplete, 0, {})
    chosen = islice(usable, options.shots)
    found = [_shot(kind, source, index, example) for index, example in chosen]
    if len(found) < options.shots:
        raise ValueError(
            f"`data.shots` is {options.shots}, the training split of {source.name} holds"
            f" {len(found)} rows"
        )
    return found


def _shot(kind: Kind, source: Source, index: int, example: Example) -> Shot:
    if example.turns:
        raise ValueError(
            f"{example.id} holds a conversation; put worked examples into the conversations as"
            " turns, without `data.shots`"
        )
    row = kind.layout(source.rows[index], example.id)
    answer = text_of(row, kind.answer or kind.reference, example.id)
    return Shot(example.prompt, kind.shown(answer), example.id)


def _source(kind: Kind, options: DataOptions, split: str) -> Source:
    """The rows of a split."""
    if options.path is not None:
        return local_source(Path(options.path), split, options.whole)
    if kind.hub is None:
        raise ValueError(
            "the task jsonl needs `data.path`, a .jsonl or .json file or a folder of them"
        )
    return hub_source(*kind.hub, kind.hub_splits, split, options.whole)


def _rows(
    kind: Kind, options: DataOptions, split: str, limit: int | None, seed: int, shown: list[Shot]
) -> tuple[list[Example], str]:
    """The examples in their order, and which they are; those that are shown are not asked."""
    source = _source(kind, options, split)
    holes: dict[int, str] = {}
    members, usable = _shuffled(kind, source, split, options.skip_incomplete, seed, holes)
    prompts = {shot.prompt for shot in shown}
    asked = (example for _, example in usable if example.prompt not in prompts)
    examples = list(islice(asked, limit))
    what = f"the {split} split of {source.name}"
    first = holes[min(holes)] if holes else ""
    if not examples:
        why = f": {first}" if first else ""
        raise ValueError(f"{what} must hold rows with a text and a reference, it has none{why}")
    if holes:
        warnings.warn(
            f"{len(holes)} incomplete rows of {source.name} are left out, the first: {first}",
            stacklevel=4,
        )
    if limit is not None and len(examples) < limit:
        warnings.warn(
            f"`limit` is {limit}, {what} holds {len(examples)} examples: all are used", stacklevel=4
        )
    carved = f" carved out as {split}" if source.carved else ""
    return examples, f"{len(examples)} of {members} rows{carved} of {source.name}"


def _shuffled(
    kind: Kind, source: Source, split: str, skip: bool, seed: int, holes: dict[int, str]
) -> tuple[int, Iterator[tuple[int, Example]]]:
    """(number of the split's rows, index and example of each that can be used, shuffled by `seed`).

    skip, holes: see `_read`.
    """
    import numpy

    read = cache(partial(_read, kind, source, skip, holes))
    members = _members(source, split, read)
    order = numpy.random.default_rng(seed).permutation(len(members))
    found = ((members[i], read(members[i])) for i in order)
    return len(members), ((index, known[1]) for index, known in found if known)


def _read(
    kind: Kind, source: Source, skip: bool, holes: dict[int, str], index: int
) -> tuple[str, Example] | None:
    """(text without the template, example) of a row; None for a row of another task, and for one
    that is left out.

    skip: whether incomplete rows are left out; of the hub's rows those without a text always are.
    holes: gets why a row was left out.
    """
    place = source.place(index)
    try:
        row = kind.layout(source.rows[index], place)
        if row is None:
            return None
        prompt, article, reference = kind.texts(row, place)
    except Hole as error:
        if not skip and (source.local or not isinstance(error, Blank)):
            raise ValueError(f"{error}; `data.skip_incomplete` leaves such rows out") from None
        holes[index] = str(error)
        return None
    if isinstance(prompt, str):
        return prompt + article, Example(*fill(kind.template, prompt, article), reference, place)
    return json.dumps(prompt), Example("", "", "", reference, place, prompt)


def _members(source: Source, split: str, read: Callable) -> Sequence[int]:
    """Indices of the split's rows. Local rows are all read, so that an error hangs on no limit."""
    members = range(len(source.rows))
    if source.local or source.carved:
        members = [i for i in members if read(i)]
    if not source.carved:
        return members
    kept = [i for i in members if source.split_of(read(i)[0]) == split]
    if not kept:
        raise ValueError(
            f"the {split} split of {source.name} is empty: it is carved from {len(members)} rows;"
            " give it a file of its own, or set `data.whole` to take all rows for any split"
        )
    return kept
