"""`diversed decode`: one prompt, streamed, or a file of prompts; and what the texts cost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..data.requests import Line, Results, read_lines
from ..files import MOST_THREADS, SEEDS, Progress, within
from ..runtime.completion import Completion, Request, Stream, check_stop
from ..runtime.drafting import Branches
from ..runtime.prompt import check_text, prompt_tokens
from ..runtime.sampling import Sampling

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.model import Pair

# Options of an `Engine` besides the relaxation.
TREE = (
    "method",
    "draft_length",
    "branches",
    "trunk",
    "drafting",
    "relax_leaf",
    "sampling",
    "compile",
)


def decode_command(
    *,
    prompt: str | None = None,
    input: str | None = None,
    output: str | None = None,
    target: str | None = None,
    draft: str | None = None,
    method: str = "token",
    relaxation: str = "none",
    draft_length: int = 5,
    branches: Branches = None,
    trunk: int = 0,
    drafting: str | None = None,
    relax_leaf: bool = False,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    max_new_tokens: int = 128,
    stop: tuple[str, ...] = (),
    chat: bool = False,
    seed: int = 0,
    batch: int = 32,
    unit: int = 256,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int | Literal["auto"] = "auto",
    compile: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Continue a prompt and stream the text, or continue every prompt of a file; end with
    statistics.

    Args:
        prompt: the text to continue; `-` reads it from standard input.
        input: file of prompts, one JSON object a line with `prompt` and, optional, `id`, `seed`,
            `max_new_tokens`, `stop` and `relaxation`; lines of one relaxation are decoded together.
        output: file of results, one JSON object for each line of the input, in its order; one that
            was begun with the same options is continued, and ends with the same bytes.
        target: folder, hub name or .gguf file of the model being served; by default the bundle's,
            else `sums-target`.
        draft: folder, hub name or .gguf file of the cheap model; by default the bundle's, else
            `sums-draft`.
        method: token, block, gbv, specinfer, kseq, rrsw, traversal, greedy_tree, univer,
            package.module:NAME, or plain (the target alone).
        relaxation: none, ensemble:0.3 (w is the DRAFT's share), lenient:0.5, cascade-opt:0.2,
            typical:0.09,0.3 or a bundle folder; after it `;bias=0.5` and `;budget=3`.
        draft_length: tokens on a drafted path.
        branches: number of paths, or children of a node (one number, or one for each depth), where
            a tree is verified; a shape PATHSxLENGTH+TRUNK such as 3x4+2; or what chooses one at
            each step: auto (gbv's number of paths), entropy:NATS,SHAPE,SHAPE,
            confidence:PROBABILITY,TOKENS (a chain that ends behind a token the draft gave less), or
            a folder of `diversed select` or a bundle that holds its network.
        trunk: single drafted tokens before a tree's first branching.
        drafting: chain, paths, with_replacement, without_replacement or greedy, where a method is
            exact for several.
        relax_leaf: run the draft on the last drafted token too and relax there.
        sampling: temperature, top_k, top_p, min_p of both models.
        max_new_tokens: tokens the text may have.
        stop: strings that end the text.
        chat: send the prompt through the tokenizer's chat template.
        seed: of the request's random numbers; in a file, line i (from 0) has seed * 2^32 + i unless
            it names its own.
        batch: prompts of a file decoded together; where one ends the next begins.
        unit: lines of a file that are decoded and written together; what a kill cut off is decoded
            again.
        dtype: float32, bfloat16, float16, or auto: as stored, and on a CPU that computes a stored
            half slower, float32.
        device: cpu, cuda, ..., or auto to spread the models.
        threads: CPU threads; auto takes the number with which a call of the target is fastest, at
            most OMP_NUM_THREADS.
        compile: compile the steps with torch.compile: faster, after a minute for every batch size
            and tree; Llama family only, on a CPU with a C++ compiler.
        trust_remote_code: run model code that comes with a checkpoint.
    """
    options = dict(locals())
    import torch

    within(1, MOST_THREADS, threads=None if threads == "auto" else threads)
    within(1, max_new_tokens=max_new_tokens, batch=batch, unit=unit)
    within(*SEEDS, seed=seed)
    check_stop(stop)
    if (prompt is None) == (input is None) or (input is None) != (output is None):
        raise ValueError(
            "`diversed decode` needs --prompt, or --input and --output for a file of prompts"
        )
    if threads != "auto":
        torch.set_num_threads(threads)
    if input is None:
        _decode_prompt(options)
    else:
        _decode_file(options)


def _decode_prompt(options: dict[str, Any]) -> None:
    from ..runtime.engine import decode

    text = sys.stdin.read() if options["prompt"] == "-" else options["prompt"]
    check_text(text)
    pair, stop = _load(options), tuple(options["stop"])
    _settle_threads(options, pair, 1)
    tokens = _encode(pair.tokenizer, text, options["chat"])
    stream = Stream(pair.tokenizer, stop)

    def show(index: int, new: list[int], ended: bool) -> None:
        print(stream.add(new, ended), end="\n" if ended else "", flush=True)

    (completion,) = decode(
        pair,
        [tokens],
        **{name: options[name] for name in ("relaxation", "max_new_tokens", *TREE)},
        stop=stop,
        seeds=[options["seed"]],
        on_step=show,
    )
    print(statistics(completion), file=sys.stderr)


def _decode_file(options: dict[str, Any]) -> None:
    from ..runtime.engine import STAGES, Engine, run_grouped

    lines = read_lines(options["input"], options)
    results = Results(options["output"], lines, options["unit"])
    with results.folder.held():
        # what was measured when the file was begun is not measured again: bytes could come to
        # differ
        begun = results.folder.begun()
        options |= {
            name: begun[name]
            for name in ("threads", "dtype")
            if options[name] == "auto" and name in begun
        }
        pair = _load(options)
        _settle_threads(options, pair, min(options["batch"], len(lines)))
        tree = {name: options[name] for name in TREE}
        relaxations = list(dict.fromkeys(line.relaxation for line in lines))
        made = {each: Engine(pair, relaxation=each, **tree) for each in relaxations}
        engines = {i: made[line.relaxation] for i, line in enumerate(lines)}
        requests = {
            i: _request(line, i, engines[i], options["chat"]) for i, line in enumerate(lines)
        }
        first = results.begin(_settings(options, pair, relaxations))
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
                completions = run_grouped(engines, unit, options["batch"], count)
                results.append(completions, pair.eos)
                done += completions.values()
    print(summary(done, seconds) if done else f"{options['output']}: complete, nothing to decode")


def _load(options: dict[str, Any]) -> Pair:
    from ..runtime.model import load_pair

    target, draft = _models(options["target"], options["draft"], options["relaxation"])
    return load_pair(
        target, draft, options["dtype"], options["device"], options["trust_remote_code"]
    )


def _settle_threads(options: dict[str, Any], pair: Pair, rows: int) -> None:
    """Measure what `threads` auto stands for, for steps of this many rows; on other devices it is
    1.
    """
    from ..runtime.autotune import fastest_threads

    if options["threads"] == "auto":
        on_cpu = pair.target.device.type == "cpu"
        options["threads"] = (
            fastest_threads(pair.target, rows, options["draft_length"] + 1) if on_cpu else 1
        )


def _request(line: Line, index: int, engine: Engine, chat: bool) -> Request:
    """The request of a line; what is wrong with its prompt is said with the line's place."""
    try:
        tokens = _encode(engine.pair.tokenizer, line.prompt, chat)
        request = Request(tokens, line.seed, line.max_new_tokens, line.stop)
        engine.check(index, request)
    except ValueError as error:
        raise ValueError(f"{line.place}: {error}") from None
    return request


def _settings(options: dict[str, Any], pair: Pair, relaxations: list[str]) -> dict[str, Any]:
    """All that decides the bytes of the results."""
    from ..files import sha256, versions
    from ..verifier.relax import parse

    chosen = {
        name: value
        for name, value in options.items()
        if name not in ("prompt", "output", "trust_remote_code")
    }
    bundles = [parse(each).folder for each in relaxations]
    heads = [bundle / "head.safetensors" for bundle in bundles if bundle]
    network = Path(str(options["branches"])) / "selector.safetensors"
    return (
        chosen
        | {
            "input": sha256(options["input"]),
            "sampling": vars(options["sampling"]),
            "dtype": str(pair.target.dtype).removeprefix("torch."),
            "target": {"name": pair.target.name, "hash": pair.target.hash},
            "draft": {"name": pair.draft.name, "hash": pair.draft.hash},
            "heads": {str(head.parent): sha256(head) for head in heads if head.is_file()},
            "versions": versions(),
        }
        | ({"selector": sha256(network)} if network.is_file() else {})
    )


def statistics(completion: Completion) -> str:
    """What the text cost, one figure a line, each with what it counts."""
    c, count = completion, len(completion.tokens)
    share = (
        f"{c.accepted / c.drafted:.2f} ({c.accepted} of {c.drafted} drafted)"
        if c.drafted
        else "no draft"
    )
    weight = (
        "" if c.mean_weight != c.mean_weight else f", mean weight of the draft {c.mean_weight:.2f}"
    )
    return "\n".join(
        (
            (
                f"tokens: {count}, the end token included, in {c.seconds:.2f} s,"
                f" {count / c.seconds:.1f} tokens/s"
            ),
            (
                f"tokens per target call: {c.tokens_per_target_call:.2f} ({c.target_calls} calls;"
                " the extra token counts)"
            ),
            f"accepted share: {share}",
            (
                f"expected substitutions: {c.substitutions:.2f},"
                f" {100 * c.substitutions / count:.2f} per 100 tokens{weight}"
            ),
        )
    )


def summary(done: list[Completion], seconds: dict[str, float]) -> str:
    """What the texts of this run cost together, and a table of where the time went, by the stages
    there were.
    """
    tokens, calls = sum(len(c.tokens) for c in done), sum(c.target_calls for c in done)
    spent, total = sum(c.substitutions for c in done), sum(seconds.values())
    rows = [*((name, took) for name, took in seconds.items() if took), ("total", total)]
    return "\n".join(
        (
            f"{len(done)} texts, {tokens} tokens in {total:.2f} s, {tokens / total:,.1f} tokens/s",
            f"tokens per target call: {tokens / calls:.2f} ({calls} calls; the extra token counts)",
            f"expected substitutions: {spent:.2f}, {100 * spent / tokens:.2f} per 100 tokens",
            "",
            "stage      seconds  share",
            *(f"{name:<9} {took:>8.2f} {took / total:>6.1%}" for name, took in rows),
        )
    )


def _models(target: str | None, draft: str | None, relaxation: str) -> tuple[str, str]:
    """The pair to load: what the user named, else the bundle's own, else the packaged one."""
    from ..verifier.relax import parse

    bundle = parse(relaxation).folder
    if bundle and (target is None or draft is None):
        from ..runtime.bundle import read_card

        models = read_card(bundle)["models"]
        return target or models["target"]["name"], draft or models["draft"]["name"]
    return target or "sums-target", draft or "sums-draft"


def _encode(tokenizer, text: str, chat: bool) -> list[int]:
    if chat and not tokenizer.chat_template:
        raise ValueError(
            "`chat` needs a tokenizer with a chat template, and this one has none; leave `chat` out"
        )
    return prompt_tokens(text, tokenizer, chat)
