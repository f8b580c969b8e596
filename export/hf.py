"""A bundle as a repository for `model.generate(..., custom_generate=FOLDER)` of transformers, and
what runs there.

The repository is the bundle with a folder custom_generate/ in it. transformers copies the Python
files of that folder into a cache of its own and runs them there, away from the bundle; so the gate
travels in one of them, gate.py. They wrap the two modules and call the loop of this package, which
must be installed: requirements.txt says so, and transformers looks.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..files import SEEDS, within, write_whole
from ..runtime.bundle import FILES, read_card
from ..runtime.completion import Completion, Request
from ..runtime.drafting import MAX_NODES
from ..runtime.engine import Engine
from ..runtime.model import Pair, make_pair
from ..runtime.sampling import Sampling
from ..verifier.head import LARGEST_BIAS
from ..verifier.relax import Relaxation

HONOURED = (
    "max_new_tokens",
    "max_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "eos_token_id",
)
HONOURED += (
    "pad_token_id",
    "stop_strings",
    "num_return_sequences",
    "num_assistant_tokens",
    "return_dict_in_generate",
)
COUNTS = ("max_new_tokens", "max_length", "num_return_sequences", "num_assistant_tokens")
SWITCHES = ("do_sample", "return_dict_in_generate")
# Arguments of `generate` that ask for nothing where they are an empty list or False.
EMPTY = ("logits_processor", "stopping_criteria", "synced_gpus")
# Nothing in the loop reads these, with or without custom_generate.
NEUTRAL = ("bos_token_id", "transformers_version", "_from_model_config", "disable_compile")
# transformers gives the loop what says where the repository is to be had, too.
PLACE = ("revision", "token", "cache_dir", "force_download", "local_files_only")

UNPACKING = Lock()
CARRIED = tuple(name for name in FILES if name != "README.md")
GENERATE = '''"""Speculative decoding with the learned verifier in gate.py; needs the package `diversed`."""

from diversed.export.hf import generate as _generate

from .gate import FILES


def generate(model, **arguments):
    return _generate(model, FILES, **arguments)
'''


def add_custom_generate(bundle: str | Path) -> None:
    """Make the folder of a bundle a repository that transformers can decode from."""
    bundle = Path(bundle)
    files = {name: base64.b64encode((bundle / name).read_bytes()).decode() for name in CARRIED}
    folder = bundle / "custom_generate"
    folder.mkdir(exist_ok=True)
    lines = "".join(f'    "{name}": "{content}",\n' for name, content in files.items())
    write_whole(
        folder / "gate.py", f'"""The bundle\'s files, in base64."""\n\nFILES = {{\n{lines}}}\n'
    )
    write_whole(folder / "generate.py", GENERATE)
    write_whole(folder / "requirements.txt", f"diversed>={__version__}\ntransformers>=5.19\n")


def generate(
    model,
    files: dict[str, str],
    *,
    inputs: Tensor | None = None,
    assistant_model=None,
    tokenizer=None,
    streamer=None,
    generation_config=None,
    method: str = "token",
    bias: float = 0.0,
    **options,
):
    """Token ids [B * num_return_sequences, T + new], as `model.generate` returns them: prompts,
    texts, padding.

    model, assistant_model: target and draft. `num_assistant_tokens` are drafted a step, by default
        as on the card.
    files:        name of a file of the bundle -> its bytes in base64.
    inputs:       [B, T] int64 prompts, padded on the left where `attention_mask` is 0; also given as `input_ids`.
    tokenizer:    needed with `stop_strings` only.
    method:       a key of METHODS.
    bias:         added to the gate's logit: larger is faster and further from the target.
    options:      fields of GenerationConfig; what is neither honoured nor at its default is refused. The seeds of the
                  texts come from torch's global generator.
    """
    config, rest = _asked(model, generation_config, options)
    prompts, ids = _prompts(inputs, rest, config.pad_token_id)
    _refuse(model, assistant_model, config, rest)
    _check_own(method, bias)
    stop, copies = _stop(config.stop_strings, tokenizer), config.num_return_sequences or 1
    count = len(prompts) * copies
    _check_streamer(streamer, count)
    seeds = torch.randint(*SEEDS, (count,)).tolist()
    room = _new_tokens(config, ids.shape[1])
    requests = {i: Request(prompts[i // copies], seed, room, stop) for i, seed in enumerate(seeds)}
    with _frozen(model, assistant_model):
        pair = _pair(model, assistant_model, tokenizer, _ends(config))
        engine = _engine(pair, files, method, bias, config)
        for index, request in requests.items():
            engine.check(index, request)
        done = engine.run(requests, on_step=_shown(streamer, ids))
    sequences = _joined(ids.repeat_interleave(copies, 0), list(done.values()), _padding(config))
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)


def _asked(model, given, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What the caller asked for, filled up from the model's own settings; and the options that are
    no field of these.

    transformers' defaults are not filled in: its 20 `num_assistant_tokens` are nobody's wish.
    """
    from transformers import GenerationConfig

    if given is not None and not isinstance(given, GenerationConfig):
        raise TypeError(
            f"`generation_config` must be a GenerationConfig, got {type(given).__name__}; make one"
            " of it"
        )
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    options = {name: value for name, value in options.items() if value is not None}
    _check_kinds(options)  # before transformers compares them
    rest = config.update(**options)
    _check_kinds(config.to_dict())
    empty = {name for name in rest if name in EMPTY and rest[name] in ([], False)}
    return config, {name: value for name, value in rest.items() if name not in empty.union(PLACE)}


def _check_kinds(fields: dict[str, Any]) -> None:
    """Refuse fields of GenerationConfig whose kind is wrong; the numbers of sampling are checked by
    `Sampling`.
    """
    within(1, **{name: fields.get(name) for name in COUNTS})
    within(-1, pad_token_id=fields.get("pad_token_id"))  # -1 is some models' word for none
    for name in SWITCHES:
        if not isinstance(fields.get(name), bool | None):
            raise TypeError(f"`{name}` must be True or False, got {fields[name]!r}")


def _check_own(method: str, bias: float) -> None:
    if not isinstance(method, str) or method == "plain":
        raise ValueError(
            f"`method` must name a verification method, such as token or block, got {method!r}"
        )
    if isinstance(bias, bool) or not isinstance(bias, Real) or not abs(bias) < LARGEST_BIAS:
        raise ValueError(f"`bias` must be a finite number, added to a logit, got {bias!r}")


def _stop(given: str | list[str] | None, tokenizer) -> tuple[str, ...]:
    """The strings that end a text; whatever they are looked for with must be a tokenizer."""
    from transformers import PreTrainedTokenizerBase

    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"`tokenizer` must be the models' tokenizer, got {tokenizer!r}")
    stop = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(stop, list | tuple) or not all(
        isinstance(text, str) and text for text in stop
    ):
        raise ValueError(
            f"`stop_strings` must be a text or a list of texts, none empty, got {given!r}"
        )
    if stop and tokenizer is None:
        raise ValueError("`stop_strings` are looked for in decoded text; give `tokenizer` too")
    return tuple(stop)


def _check_streamer(streamer, count: int) -> None:
    if streamer is not None and count > 1:
        raise ValueError(
            f"`streamer` shows one text, got {count}; leave it out or decode them one by one"
        )
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"`streamer` must have the methods put and end, got {streamer!r}; see TextStreamer"
        )


def _refuse(model, assistant_model, config, rest: dict[str, Any]) -> None:
    """ValueError for whatever the loop cannot do."""
    if assistant_model is None:
        raise ValueError(
            "`assistant_model` is missing: give the draft model that the gate was trained with"
        )
    if not isinstance(assistant_model, nn.Module):
        raise TypeError(
            f"`assistant_model` must be a model of transformers, got {assistant_model!r}; load it"
            " first"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise ValueError(
            "torch.autocast changes rows that are being verified; leave it, load both models in its"
            " dtype"
        )
    if model.config.is_encoder_decoder or assistant_model.config.is_encoder_decoder:
        raise ValueError(
            "`custom_generate` of diversed continues a text; give models without an encoder"
        )
    if rest:
        names = ", ".join(f"`{name}`" for name in rest)
        raise ValueError(
            f"`custom_generate` of diversed cannot honour {names}; leave out what it cannot do"
        )
    standard = type(config)().to_dict() | config._get_default_generation_params()
    for name, value in config.to_dict().items():
        if (
            value is None
            or name in HONOURED + NEUTRAL
            or (value or None) == (standard.get(name) or None)
        ):
            continue
        raise ValueError(
            f"`{name}` must be left at its default {standard.get(name)!r}, got {value!r}:"
            " `custom_generate` of diversed cannot honour it; pass the default, or set it in"
            " model.generation_config"
        )


def _prompts(
    inputs: Tensor | None, rest: dict[str, Any], pad: int | None
) -> tuple[list[list[int]], Tensor]:
    """Token ids of every prompt without its padding, and all [B, T]; takes what it reads out of
    `rest`.
    """
    ids, mask = (
        rest.pop("input_ids", None) if inputs is None else inputs,
        rest.pop("attention_mask", None),
    )
    whole = isinstance(ids, Tensor) and not (
        ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool
    )
    if not whole or ids.dim() != 2 or not ids.numel():
        came = (
            f"{list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        )
        raise ValueError(
            f"`input_ids` must be a tensor [B, T] of token ids, got {came}; encode the prompts"
            " first"
        )
    if mask is None and pad is not None and (ids == pad).any():
        raise ValueError(
            "`input_ids` hold `pad_token_id`; give `attention_mask`, which says where it is padding"
        )
    mask = torch.ones_like(ids) if mask is None else mask
    keep = mask == 1 if isinstance(mask, Tensor) and mask.shape == ids.shape else None
    if (
        keep is None
        or not (keep | (mask == 0)).all()
        or not keep[:, -1].all()
        or (keep[:, :-1] > keep[:, 1:]).any()
    ):
        came = (
            type(mask).__name__
            if not isinstance(mask, Tensor)
            else list(mask.shape)
            if keep is None
            else "others"
        )
        raise ValueError(
            f"`attention_mask` must be a tensor {list(ids.shape)} like `input_ids`, zeros and then"
            f" ones in every row, got {came}; pad prompts on the left (tokenizer.padding_side ="
            " 'left')"
        )
    return [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)], ids


def _new_tokens(config, length: int) -> int:
    """Tokens that every text may have; `max_length` counts the prompt and its padding, as in
    transformers.
    """
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is None:
        return config._get_default_generation_params()["max_length"]
    if config.max_length <= length:
        raise ValueError(
            f"`max_length` {config.max_length} leaves no room after {length} prompt tokens;"
            " raise it"
        )
    return config.max_length - length


def _ends(config) -> tuple[int, ...]:
    """The end tokens, however they were given."""
    given = config.eos_token_id
    given = given.tolist() if isinstance(given, Tensor) else given
    ends = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for token in ends:
        within(-1, eos_token_id=token)
    return ends


def _pair(model, assistant_model, tokenizer, eos: tuple[int, ...]) -> Pair:
    names = (str(module.name_or_path) for module in (model, assistant_model))
    pair = make_pair(
        model, assistant_model, _Silent() if tokenizer is None else tokenizer, tuple(names)
    )
    return replace(pair, eos=eos)


def _engine(pair: Pair, files: dict[str, str], method: str, bias: float, config) -> Engine:
    folder = _unpacked(files)
    card = read_card(folder)
    length = config.num_assistant_tokens or card.get("draft_length", 0)
    within(1, MAX_NODES, num_assistant_tokens=length)
    blend = card["head"].get("blend", "probabilities")
    relaxation = Relaxation("learned", bias=bias or None, source=str(folder), blend=blend)
    return Engine(pair, method, relaxation, length, sampling=_sampling(config))


def _unpacked(files: dict[str, str]) -> Path:
    """The bundle in a folder of this process: one for all calls, because Python gives a note once
    for every text.
    """
    contents = {name: _content(files, name) for name in CARRIED}
    digest = hashlib.sha256(b"".join(contents.values())).hexdigest()
    with UNPACKING:
        folder = Path(_room(os.getpid()).name, f"custom_generate-{digest[:8]}")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            if not (folder / name).is_file():  # in a long life the machine may have tidied it away
                (folder / name).write_bytes(content)
    return folder


@cache
def _room(process: int) -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="diversed-")


def _content(files: dict[str, str], name: str) -> bytes:
    try:
        return base64.b64decode(files[name], validate=True)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"custom_generate/gate.py does not hold {name}; export the bundle again"
        ) from None


def _sampling(config) -> Sampling:
    """Without do_sample the most likely token. Where nothing else is asked for transformers takes
    the first 50.
    """
    if not config.do_sample:
        return Sampling(temperature=0)
    values = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    standard = config._get_default_generation_params()
    return Sampling(
        **{
            name: standard.get(name, 0) if value is None else value
            for name, value in values.items()
        }
    )


@contextmanager
def _frozen(*modules: nn.Module) -> Iterator[None]:
    """A pair's modules are frozen and in evaluation mode; afterwards they are as their owner left
    them.
    """
    parts = [(part, part.training) for module in modules for part in module.modules()]
    parameters = [
        (tensor, tensor.requires_grad) for module in modules for tensor in module.parameters()
    ]
    try:
        yield
    finally:
        for part, training in parts:
            part.training = training
        for tensor, wanted in parameters:
            tensor.requires_grad_(wanted)


def _shown(streamer, ids: Tensor) -> Callable[[int, list[int], bool], None] | None:
    if streamer is None:
        return None
    streamer.put(ids.cpu())

    def show(index: int, new: list[int], ended: bool) -> None:
        streamer.put(torch.tensor(new))
        if ended:
            streamer.end()

    return show


def _padding(config) -> int | None:
    """The token after the end of a shorter text; where none is named, the end token, as in
    transformers.
    """
    return (
        config.pad_token_id if config.pad_token_id is not None else next(iter(_ends(config)), None)
    )


def _joined(ids: Tensor, done: list[Completion], pad: int | None) -> Tensor:
    longest = max(len(completion.tokens) for completion in done)
    if pad is None and any(len(completion.tokens) < longest for completion in done):
        raise ValueError(
            "`pad_token_id` must be given: texts of several lengths are returned in one tensor"
        )
    new = [completion.tokens + [pad] * (longest - len(completion.tokens)) for completion in done]
    return torch.cat([ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)], 1)


class _Silent:
    """In place of a tokenizer where nothing is decoded."""

    eos_token_id = None

    def __len__(self) -> int:
        return 0

    def decode(self, tokens: list[int], **options) -> str:
        return ""
