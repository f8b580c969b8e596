"""lm-evaluation-harness: its tasks on a pair decoded by our loop, as the model `diversed`.

    python -m diversed.export.lm_eval run --model diversed --tasks gsm8k \\ --model_args
        '{"pretrained": "TARGET", "draft": "DRAFT", "relaxation": "BUNDLE", "method": "block"}'

Texts (generate_until) are decoded as `diversed decode` would, with one BOS if the tokenizer adds
it. Likelihoods of given texts are the target's, by the harness's own code. This module registers
the model when it is imported; run as above it is the harness's command.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from ..errors import USER_ERRORS, sentence
from ..files import within
from ..runtime.completion import Request
from ..runtime.drafting import MAX_NODES
from ..runtime.engine import Engine, run_grouped
from ..runtime.model import load_pair
from ..runtime.prompt import prompt_tokens
from ..runtime.sampling import Sampling

# All mean the first.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments:
    """What `--model_args` may say: options of `diversed decode`, but the target is `pretrained`.

    seed:           text i of a task, counted from 0, has seed * 2^32 + i.
    batch_size:     texts decoded together, and texts whose likelihood is computed together.
    max_batch_size: the harness names it always; there is nothing to find out here.
    """

    pretrained: str = "sums-target"
    draft: str = "sums-draft"
    relaxation: str = "none"
    method: str = "token"
    draft_length: int = 5
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0
    batch_size: int = 1
    trust_remote_code: bool = False
    max_length: int | None = None
    max_batch_size: int | None = None

    def __post_init__(self):
        if not str(self.batch_size).isdecimal() or not int(self.batch_size):
            raise ValueError(
                f"`batch_size` must be a whole number from 1 on, got {self.batch_size!r}; give one"
            )
        for name in ("pretrained", "draft", "relaxation", "method", "dtype"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"`{name}` must be a text, got {value!r}")
        if None in (self.draft_length, self.seed) or not isinstance(self.trust_remote_code, bool):
            raise TypeError(
                "`draft_length` and `seed` must be whole numbers and `trust_remote_code` true or"
                " false"
            )
        within(1, MAX_NODES, draft_length=self.draft_length)
        within(-(1 << 31), (1 << 31) - 1, seed=self.seed)


@register_model("diversed")
class Diversed(HFLM):
    """A target and a draft, see `Arguments`."""

    def __init__(self, **arguments):
        asked = Arguments(**arguments)
        self.pair = load_pair(
            asked.pretrained,
            asked.draft,
            asked.dtype,
            asked.device or "cpu",
            asked.trust_remote_code,
        )
        within(1, self.pair.target.max_positions, max_length=asked.max_length)
        super().__init__(
            self.pair.target.module,
            tokenizer=self.pair.tokenizer,
            backend="causal",
            batch_size=int(asked.batch_size),
            max_length=asked.max_length,
        )
        self.asked = asked
        self.engines: dict[Sampling, Engine] = {}
        self.engine(Sampling(temperature=0))  # an unsound option is told before the task is read

    def engine(self, sampling: Sampling) -> Engine:
        if sampling not in self.engines:
            asked = self.asked
            self.engines[sampling] = Engine(
                self.pair, asked.method, asked.relaxation, asked.draft_length, sampling=sampling
            )
        return self.engines[sampling]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        engines, asked = {}, {}
        for index, request in enumerate(requests):
            context, given = request.args
            sampling, until, new_tokens = _settings(given, self.max_gen_toks)
            engines[index] = self.engine(sampling)
            tokens = self._fitting(context, new_tokens, engines[index])
            asked[index] = Request(tokens, (self.asked.seed << 32) + index, new_tokens, until)
            engines[index].check(index, asked[index])
        done = run_grouped(engines, asked, self.batch_size)
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, done[index].text)
        return [done[index].text for index in range(len(requests))]

    def _fitting(self, context: str, new_tokens: int, engine: Engine) -> list[int]:
        """The context's last tokens that leave room for a text, as the harness's other models read
        it.
        """
        tokens = prompt_tokens(context, self.pair.tokenizer)
        room = min(self.max_length, self.pair.draft.max_positions) - new_tokens - engine.shape.depth
        if room < 1:
            raise ValueError(
                f"`max_gen_toks` {new_tokens} leaves no room for a prompt in the context; lower it"
            )
        if len(tokens) > room:
            logger.warning("a context of %d tokens is cut on the left to %d", len(tokens), room)
        return tokens[-room:]


def _settings(given: dict[str, Any], new_tokens: int) -> tuple[Sampling, tuple[str, ...], int]:
    """Sampling, stop strings and number of new tokens that a task asks for; ValueError for what is
    not known here.
    """
    within(1, **{name: given.get(name) for name in LENGTHS})
    if given.get("do_sample") not in (None, True, False):
        raise TypeError(
            f"generation_kwargs do_sample must be true or false, got {given['do_sample']!r}"
        )
    until = given.get("until") or []
    if not all(isinstance(text, str) for text in (until if isinstance(until, list) else [until])):
        raise TypeError(f"generation_kwargs until must be a text or a list of texts, got {until!r}")
    asked = Sampling(**{name: given[name] for name in SAMPLING if given.get(name) is not None})
    options = dict(normalize_gen_kwargs(given, new_tokens))
    known = (*SAMPLING, "until", "max_gen_toks", "do_sample")
    if unknown := [name for name in options if name not in known]:
        raise ValueError(
            f"generation_kwargs {', '.join(unknown)} cannot be honoured; leave them out of the task"
        )
    sampling = asked if options["do_sample"] else Sampling(temperature=0)
    return sampling, tuple(text for text in options["until"] if text), options["max_gen_toks"]


if __name__ == "__main__":
    try:
        cli_evaluate()
    except USER_ERRORS as error:
        if os.environ.get("DIVERSED_DEBUG"):
            raise
        print(f"diversed.export.lm_eval: {sentence(error)}", file=sys.stderr)
        sys.exit(2)
