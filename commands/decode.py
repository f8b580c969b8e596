"""`diversed decode`: one prompt, streamed, or a file of prompts; and what the texts cost."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..data.prompts import NAMED, more
from ..data.requests import Line, Results, read_lines
from ..files import MOST_THREADS, SEEDS, Progress, sha256, versions, within
from ..runtime import autotune
from ..runtime.chat import LONGEST, check_chat
from ..runtime.completion import Completion, Request, Stream, check_stop
from ..runtime.engine import STAGES, Engine, decode, run_grouped
from ..runtime.forward import Pair
from ..runtime.groups import BundleModels, Tree, check_filters
from ..runtime.prompt import check_text, prompt_tokens
from ..runtime.relaxer import contents
from ..runtime.sampling import Sampling
from ..runtime.shape_network import FILES as SELECTOR
from ..verifier.relax import Relaxation, parse


@dataclass(frozen=True)
class Text:
    """A prompt, and how its text goes on.

    Args:
        prompt: the text to continue; `-` reads it from standard input.
        max_new_tokens: tokens the text may have.
        stop: strings that end the text.
        chat: send the prompt through the tokenizer's chat template.
        seed: of the request's random numbers; in a file, line i (from 0) has seed * 2^32 + i unless
            it names its own.
    """

    prompt: str | None = None
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    chat: bool = False
    seed: int = 0

    def __post_init__(self):
        within(1, max_new_tokens=self.max_new_tokens)
        within(*SEEDS, seed=self.seed)
        check_stop(self.stop)


@dataclass(frozen=True)
class PromptFile:
    """A file of prompts in place of one.

    Args:
        input: file of prompts, one JSON object a line with `prompt`, or a conversation as
            `messages`, and, optional, `id`, `seed`, `max_new_tokens`, `stop` and `relaxation` (a
            rule or a bundle); lines of one relaxation are decoded together.
        output: file of results, one JSON object for each line of the input, in its order; one that
            was begun with the same options is continued, and ends with the same bytes.
        batch: prompts of a file decoded together; when one ends, the next begins.
        unit: lines of a file that are decoded and written together; what a kill cut off is decoded
            again.
        skip_bad: leave out lines that cannot be decoded, and say which; by default they are all
            named and nothing is decoded.
    """

    input: str | None = None
    output: str | None = None
    batch: int = 32
    unit: int = 256
    skip_bad: bool = False

    def __post_init__(self):
        within(1, batch=self.batch, unit=self.unit)


@dataclass(frozen=True)
class Way:
    """How texts are decoded: all that was asked for but the prompts."""

    models: BundleModels
    tree: Tree
    text: Text
    relaxation: str
    sampling: Sampling
    threads: int | Literal["auto"]
    compile: bool

    def load(self) -> Pair:
        return self.models.of_bundle(parse(self.relaxation).folder).load()

    def options(self) -> dict[str, Any]:
        """Those of an engine besides the relaxation."""
        return vars(self.tree) | {"sampling": self.sampling, "compile": self.compile}

    def settle_threads(self, pair: Pair, rows: int) -> int:
        """The number of threads, which torch has from here on; `auto` is measured for steps of this
        many rows, and on other devices it is 1.
        """
        if self.threads != "auto":
            torch.set_num_threads(self.threads)
            return self.threads
        if pair.target.device.type != "cpu":
            return 1
        return autotune.fastest_threads(pair.target, rows, self.tree.draft_length + 1)


def decode_command(
    models: BundleModels = BundleModels(),
    tree: Tree = Tree(),
    text: Text = Text(),
    file: PromptFile = PromptFile(),
    *,
    relaxation: str = "none",
    sampling: Sampling = Sampling(),
    threads: int | Literal["auto"] = "auto",
    compile: bool = False,
) -> None:
    """Continue a prompt and stream the text, or continue every prompt of a file; end with
    statistics.

    Args:
        relaxation: none; a bundle folder; or a rule without training: ensemble:0.3 (w is the
            DRAFT's share), lenient:0.5, mentored:2, cascade-opt:0.2, cascade-diff:0.1,
            cascade-chow:0.5, cascade-token:0.4, divergence:0.5, typical:0.09,0.3, regret:1,
            min-p:0.05, top-p:0.9. After any of them `;bias=0.5` and `;budget=3`.
        sampling: temperature, top_k, top_p, min_p of both models.
        threads: CPU threads; auto takes the number with which a call of the target is fastest, at
            most OMP_NUM_THREADS.
        compile: compile the steps with torch.compile: faster, after a minute for every batch size
            and tree; Llama family only, on a CPU with a C++ compiler.
    """
    within(1, MOST_THREADS, threads=None if threads == "auto" else threads)
    one, several = text.prompt is not None, file.input is not None
    if one == several or several != (file.output is not None):
        raise ValueError(
            "`diversed decode` needs --prompt, or --input and --output for a file of prompts"
        )
    check_filters(sampling)
    if one:
        tree.check_alone(relaxation)
        given = [name for name, value in vars(file).items() if value != getattr(PromptFile, name)]
        if given:
            raise ValueError(f"`{given[0]}` is for a file of prompts, --input; leave it out")
    way = Way(models, tree, text, relaxation, sampling, threads, compile)
    if one:
        _decode_prompt(way)
    else:
        _decode_file(way, file)


def _decode_prompt(way: Way) -> None:
    text = way.text
    prompt = _standard_input() if text.prompt == "-" else text.prompt
    check_text(prompt)
    pair = way.load()
    way.settle_threads(pair, 1)
    stream = Stream(pair.tokenizer, text.stop)

    def show(index: int, new: list[int], ended: bool) -> None:
        print(stream.add(new, ended), end="\n" if ended else "", flush=True)

    (completion,) = decode(
        pair,
        [prompt_tokens(prompt, pair.tokenizer, text.chat)],
        relaxation=way.relaxation,
        max_new_tokens=text.max_new_tokens,
        stop=text.stop,
        seeds=[text.seed],
        on_step=show,
        **way.options(),
    )
    print(statistics(completion), file=sys.stderr)


def _decode_file(way: Way, file: PromptFile) -> None:
    shared = vars(way.text) | {"relaxation": way.relaxation, "method": way.tree.method}
    lines, bad = read_lines(file.input, shared)
    _tell(bad, len(lines), file)
    results = Results(file.output)
    way = _as_begun(way, results.folder.begun())
    pair = way.load()
    if way.text.chat:
        check_chat(pair.tokenizer)
    made = _engines(way, pair, lines)
    lines, requests, bad = _requests(lines, made, way.text.chat)
    _tell(bad, len(lines), file)
    engines = {i: made[line.relaxation] for i, line in enumerate(lines)}
    made = {line.relaxation: made[line.relaxation] for line in lines}
    with results.folder.held():
        way = replace(way, threads=way.settle_threads(pair, min(file.batch, len(lines))))
        rules = [engine.relaxer.rule for engine in made.values()]
        settings = _settings(way, file, pair, rules)
        first = results.begin(settings, lines, file.unit)
        done: list[Completion] = []
        seconds = dict.fromkeys(STAGES, 0.0)
        for engine in made.values():
            engine.seconds = seconds
        with Progress("decode", len(lines), first) as progress:

            def count(index: int, new: list[int], ended: bool) -> None:
                progress.add(int(ended), len(new))

            for numbers in results.units:
                if numbers.start < first:
                    continue
                unit = {i: requests[i] for i in numbers}
                completions = run_grouped(engines, unit, file.batch, count)
                results.append(completions, pair.eos)
                done += completions.values()
    if done:
        print(summary(done, seconds))
    else:
        print(f"{file.output}: complete, nothing to decode")


def _as_begun(way: Way, begun: dict[str, Any]) -> Way:
    """What was measured when the file was begun is not measured again: bytes could come to
    differ.
    """
    if way.threads == "auto" and "threads" in begun:
        way = replace(way, threads=begun["threads"])
    if way.models.dtype == "auto" and "dtype" in begun:
        way = replace(way, models=replace(way.models, dtype=begun["dtype"]))
    return way


def _engines(way: Way, pair: Pair, lines: list[Line]) -> dict[str, Engine | ValueError]:
    """An engine for every relaxation, or what is wrong with one that a line of the file names."""
    made: dict[str, Engine | ValueError] = {}
    for each in dict.fromkeys(line.relaxation for line in lines):
        try:
            made[each] = Engine(pair, relaxation=each, **way.options())
        except ValueError as error:
            if each == way.relaxation:
                raise
            made[each] = error
    return made


def _requests(
    lines: list[Line], made: dict[str, Engine | ValueError], chat: bool
) -> tuple[list[Line], dict[int, Request], list[str]]:
    """The lines that can be decoded with their requests, and what is wrong with the others."""
    kept: list[Line] = []
    requests: dict[int, Request] = {}
    bad: list[str] = []
    for line in lines:
        engine = made[line.relaxation]
        try:
            if isinstance(engine, ValueError):
                raise engine
            tokens = prompt_tokens(line.prompt, engine.pair.tokenizer, chat)
            request = Request(tokens, line.seed, line.max_new_tokens, line.stop)
            engine.check(len(kept), request)
        except ValueError as error:
            bad.append(f"{line.place}: {error}")
            continue
        requests[len(kept)] = request
        kept.append(line)
    return kept, requests, bad


def _tell(bad: list[str], left: int, file: PromptFile) -> None:
    """Name bad lines; ValueError unless they are to be skipped and some are left."""
    if not bad:
        return
    if len(bad) == 1 and not file.skip_bad:
        raise ValueError(f"{bad[0]}; --skip_bad leaves such lines out")
    print("\n".join(bad[:NAMED]) + more(len(bad)), file=sys.stderr)
    count = f"{len(bad)} of {len(bad) + left} lines of {file.input}"
    if not file.skip_bad:
        raise ValueError(f"{count} cannot be decoded; mend them, or leave them out with --skip_bad")
    if not left:
        raise ValueError(f"{count} cannot be decoded, which leaves none; mend them")
    print(f"{count} are left out", file=sys.stderr)


def _standard_input() -> str:
    """The text on standard input, which may have no end."""
    text = sys.stdin.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise ValueError(f"`prompt` on standard input has more than {LONGEST} characters; cut it")
    return text


def _settings(
    way: Way, file: PromptFile, pair: Pair, rules: Iterable[Relaxation]
) -> dict[str, Any]:
    """All that decides the bytes of the results."""
    settings = {
        "input": sha256(file.input),
        "batch": file.batch,
        "unit": file.unit,
        **vars(way.tree),
        **vars(way.text),
        "relaxation": way.relaxation,
        "sampling": vars(way.sampling),
        "threads": way.threads,
        "compile": way.compile,
        "device": way.models.device,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        **pair.settings,
        "contents": contents(rules, [way.tree.method]),
        "versions": versions(),
    }
    del settings["prompt"]
    chooser = [Path(str(way.tree.branches)) / name for name in SELECTOR]
    settings["selector"] = [sha256(path) for path in chooser if path.is_file()]
    return settings


def statistics(completion: Completion) -> str:
    """What the text cost, one figure a line, each with what it counts."""
    c, count = completion, len(completion.tokens)
    share, weight = "no draft", ""
    if c.drafted:
        share = f"{c.accepted / c.drafted:.2f} ({c.accepted} of {c.drafted} drafted)"
    if not math.isnan(c.mean_weight):
        weight = f", mean weight of the draft {c.mean_weight:.2f}"
    return (
        f"tokens: {count}, the end token included, in {c.seconds:.2f} s,"
        f" {count / c.seconds:.1f} tokens/s\n"
        f"tokens per target call: {c.tokens_per_target_call:.2f} ({c.target_calls} calls; the extra"
        " token counts)\n"
        f"accepted share: {share}\n"
        f"expected substitutions: {c.substitutions:.2f}, {100 * c.substitutions / count:.2f} per"
        f" 100 tokens{weight}"
    )


def summary(done: list[Completion], seconds: dict[str, float]) -> str:
    """What the texts of this run cost together, and the time that each stage took."""
    tokens = sum(len(completion.tokens) for completion in done)
    calls = sum(completion.target_calls for completion in done)
    spent = sum(completion.substitutions for completion in done)
    total = sum(seconds.values())
    stages = {name: took for name, took in seconds.items() if took} | {"total": total}
    lines = [
        f"{len(done)} texts, {tokens} tokens in {total:.2f} s, {tokens / total:,.1f} tokens/s",
        f"tokens per target call: {tokens / calls:.2f} ({calls} calls; the bonus token counts)",
        f"expected substitutions: {spent:.2f}, {100 * spent / tokens:.2f} per 100 tokens",
        "",
        "stage      seconds  share",
    ]
    lines += [f"{name:<9} {took:>8.2f} {took / total:>6.1%}" for name, took in stages.items()]
    return "\n".join(lines)
