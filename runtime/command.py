"""`diversed decode`: one prompt, streamed, and what its text cost."""

from __future__ import annotations

import sys

from .completion import Completion, cut
from .drafting import Branches
from .limits import MOST_THREADS, SEEDS, within
from .prompt import prompt_tokens
from .sampling import Sampling


def decode_command(
    *,
    prompt: str,
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
    dtype: str = "auto",
    device: str = "cpu",
    threads: int = 1,
    trust_remote_code: bool = False,
) -> None:
    """Continue a prompt, stream the text, and end with statistics.

    Args:
        prompt: the text to continue; `-` reads it from standard input.
        target: folder, hub name or .gguf file of the model being served; by default the bundle's, else `sums-target`.
        draft: folder, hub name or .gguf file of the cheap model; by default the bundle's, else `sums-draft`.
        method: token, block, gbv, specinfer, kseq, rrsw, traversal, greedy_tree, univer, package.module:NAME, or plain
            (the target alone).
        relaxation: none, ensemble:0.3 (w is the DRAFT's share), lenient:0.5, cascade-opt:0.2, typical:0.09,0.3 or a
            bundle folder; after it `;bias=0.5` and `;budget=3`.
        draft_length: tokens on a drafted path.
        branches: number of paths, or children of a node (one number, or one for each depth), where a tree is verified;
            auto lets gbv choose before each step.
        trunk: single drafted tokens before a tree's first branching.
        drafting: chain, paths, with_replacement, without_replacement or greedy, where a method is exact for several.
        relax_leaf: run the draft on the last drafted token too and relax there.
        sampling: temperature, top_k, top_p, min_p of both models.
        max_new_tokens: tokens the text may have.
        stop: strings that end the text.
        chat: send the prompt through the tokenizer's chat template.
        seed: of this request's random numbers.
        dtype: auto, float32, bfloat16 or float16.
        device: cpu, cuda, ..., or auto to spread the models.
        threads: CPU threads.
        trust_remote_code: run model code that comes with a checkpoint.
    """
    import torch

    from .decode import decode
    from .model import load_pair

    within(1, MOST_THREADS, threads=threads)
    within(1, max_new_tokens=max_new_tokens)
    within(*SEEDS, seed=seed)
    torch.set_num_threads(threads)
    target, draft = _models(target, draft, relaxation)
    pair = load_pair(target, draft, dtype, device, trust_remote_code)
    tokens = _encode(pair.tokenizer, sys.stdin.read() if prompt == "-" else prompt, chat)
    stream = _Stream(pair.tokenizer, tuple(stop))
    (completion,) = decode(
        pair, [tokens], method=method, relaxation=relaxation, draft_length=draft_length, branches=branches, trunk=trunk,
        drafting=drafting, relax_leaf=relax_leaf, sampling=sampling, max_new_tokens=max_new_tokens, stop=tuple(stop),
        seeds=[seed], on_step=stream,
    )  # fmt: skip
    stream.finish(completion)
    print(statistics(completion), file=sys.stderr)


def statistics(completion: Completion) -> str:
    """What the text cost, one figure a line, each with what it counts."""
    c, count = completion, len(completion.tokens)
    share = f"{c.accepted / c.drafted:.2f} ({c.accepted} of {c.drafted} drafted)" if c.drafted else "no draft"
    weight = "" if c.mean_weight != c.mean_weight else f", mean weight of the draft {c.mean_weight:.2f}"
    return "\n".join((
        f"tokens: {count}, the end token included, in {c.seconds:.2f} s, {count / c.seconds:.1f} tokens/s",
        f"tokens per target call: {c.tokens_per_target_call:.2f} ({c.target_calls} calls; the extra token counts)",
        f"accepted share: {share}",
        f"expected substitutions: {c.substitutions:.2f}, {100 * c.substitutions / count:.2f} per 100 tokens{weight}",
    ))  # fmt: skip


def _models(target: str | None, draft: str | None, relaxation: str) -> tuple[str, str]:
    """The pair to load: what the user named, else the bundle's own, else the packaged one."""
    from ..verifier.relax import parse

    parsed = parse(relaxation)
    if (target is None or draft is None) and parsed.name == "learned" and parsed.source and ":" not in parsed.source:
        from ..export.bundle import read_card

        models = read_card(parsed.source)["models"]
        return target or models["target"]["name"], draft or models["draft"]["name"]
    return target or "sums-target", draft or "sums-draft"


def _encode(tokenizer, text: str, chat: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("`prompt` must be UTF-8, got other bytes; convert it, for example with iconv") from None
    if chat and not tokenizer.chat_template:
        raise ValueError("`chat` needs a tokenizer with a chat template, and this one has none; leave `chat` out")
    return prompt_tokens(text, tokenizer, chat)


class _Stream:
    """Prints text as it is committed; holds back what may still become part of a stop string or of a character."""

    def __init__(self, tokenizer, stop: tuple[str, ...]):
        self.tokenizer, self.stop = tokenizer, stop
        self.hold = max(map(len, stop), default=1) - 1
        self.tokens: list[int] = []
        self.printed = 0

    def __call__(self, index: int, new: list[int]) -> None:
        self.tokens += new
        text = cut(self.tokenizer.decode(self.tokens, skip_special_tokens=True), self.stop).rstrip("\ufffd")
        self._print(text[: len(text) - self.hold])

    def finish(self, completion: Completion) -> None:
        self._print(completion.text)
        print()

    def _print(self, text: str) -> None:
        print(text[self.printed :], end="", flush=True)
        self.printed = max(self.printed, len(text))
