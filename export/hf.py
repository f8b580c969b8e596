"""The code that runs if `custom_generate` of transformers' `generate` names a bundle's folder.

It takes the arguments of transformers and calls the loop of this package. A field of
GenerationConfig is honoured, means nothing here, or must be left at its default; FIELDS says which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ..files import SEEDS, within
from ..runtime.bundle import read_card
from ..runtime.completion import Completion, Request
from ..runtime.drafting import MAX_NODES
from ..runtime.engine import Engine
from ..runtime.forward import Pair
from ..runtime.model import make_pair
from ..runtime.sampling import Sampling
from ..verifier.head import LARGEST_BIAS
from ..verifier.relax import Relaxation
from .repository import unpacked


def _count(name: str, value: Any) -> None:
    within(1, **{name: value})


def _token(name: str, value: Any) -> None:
    within(-1, **{name: value})  # -1 is some models' word for none


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, bool | None):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")


def _read_later(name: str, value: Any) -> None:
    """Checked where it is read: by `Sampling`, `_ends` and `_stop`."""


def _neutral(name: str, value: Any) -> None:
    """Nothing in the loop reads it, with or without custom_generate."""


# Field of GenerationConfig -> check of its kind. Every other field must be at its default.
FIELDS: dict[str, Callable[[str, Any], None]] = {
    "max_new_tokens": _count,
    "max_length": _count,
    "num_return_sequences": _count,
    "num_assistant_tokens": _count,
    "do_sample": _switch,
    "return_dict_in_generate": _switch,
    "pad_token_id": _token,
    "eos_token_id": _read_later,
    "stop_strings": _read_later,
    "temperature": _read_later,
    "top_k": _read_later,
    "top_p": _read_later,
    "min_p": _read_later,
    "bos_token_id": _neutral,
    "transformers_version": _neutral,
    "_from_model_config": _neutral,
    "disable_compile": _neutral,
}
SAMPLED = ("temperature", "top_k", "top_p", "min_p")
# Arguments of `generate` that ask for nothing if they are an empty list or False.
EMPTY = ("logits_processor", "stopping_criteria", "synced_gpus")
# transformers gives the loop what says where the repository is to be had, too.
PLACE = ("revision", "token", "cache_dir", "force_download", "local_files_only")


def generate(
    model,
    files: dict[str, str],
    *,
    assistant_model=None,
    tokenizer=None,
    streamer=None,
    method: str = "token",
    bias: float = 0.0,
    **options,
):
    """Token ids [B * num_return_sequences, T + new], as `model.generate` returns them: prompts,
    texts, padding.

    model, assistant_model: target and draft. `num_assistant_tokens` are drafted a step, by default
        as on the card.
    files:        name of a file of the bundle -> its bytes in base64.
    tokenizer:    needed with `stop_strings` only.
    method:       a key of METHODS.
    bias:         added to the head's logit: larger is faster and further from the target.
    options:      `input_ids` or `inputs` [B, T] int64, prompts, padded on the left if
                  `attention_mask` is 0 there; `generation_config`, and its fields. What is neither
                  honoured nor at its default is refused.

    The seeds of the texts come from torch's global generator.
    """
    config, rest = _asked(model, options)
    prompts, ids = _prompts(rest, config.pad_token_id)
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


def _asked(model, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What the caller asked for, filled up from the model's own settings; and the options that are
    no field of these.

    transformers' defaults are not filled in: its 20 `num_assistant_tokens` are nobody's wish.
    """
    from transformers import GenerationConfig

    given = options.pop("generation_config", None)
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
    """Refuse fields of GenerationConfig whose kind is wrong."""
    for name, check in FIELDS.items():
        check(name, fields.get(name))


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
    if streamer is None:
        return
    if count > 1:
        raise ValueError(
            f"`streamer` shows one text, got {count}; leave it out or decode them one by one"
        )
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(
            f"`streamer` must have the methods put and end, got {streamer!r}; see TextStreamer"
        )


def _refuse(model, assistant_model, config, rest: dict[str, Any]) -> None:
    """ValueError for whatever the loop cannot do."""
    if assistant_model is None:
        raise ValueError(
            "`assistant_model` is missing: give the draft model that the head was trained with"
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
        free = value is None or name in FIELDS
        if not free and (value or None) != (standard.get(name) or None):
            raise ValueError(
                f"`{name}` must be left at its default {standard.get(name)!r}, got {value!r}:"
                " `custom_generate` of diversed cannot honour it; pass the default, or set it in"
                " model.generation_config"
            )


def _prompts(rest: dict[str, Any], pad: int | None) -> tuple[list[list[int]], Tensor]:
    """Token ids of every prompt without its padding, and all [B, T]; takes what it reads out of
    `rest`.
    """
    ids = rest.pop("inputs" if "inputs" in rest else "input_ids", None)
    mask = rest.pop("attention_mask", None)
    came = type(ids).__name__
    if isinstance(ids, Tensor):
        came = f"{list(ids.shape)} of {ids.dtype}"
    if not _are_ids(ids):
        raise ValueError(
            f"`input_ids` must be a tensor [B, T] of token ids, got {came}; encode the prompts"
            " first"
        )
    if mask is None and pad is not None and (ids == pad).any():
        raise ValueError(
            "`input_ids` hold `pad_token_id`; give `attention_mask`, which says where it is padding"
        )
    keep = _kept(torch.ones_like(ids) if mask is None else mask, ids)
    return [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)], ids


def _are_ids(ids: Any) -> bool:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        return False
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool)


def _kept(mask: Any, ids: Tensor) -> Tensor:
    """[B, T] bool, False at the padding on the left."""
    came = type(mask).__name__
    if isinstance(mask, Tensor):
        came = list(mask.shape)
        if mask.shape == ids.shape:
            came, keep = "others", mask == 1
            rises = (keep[:, :-1] <= keep[:, 1:]).all()
            if rises and keep[:, -1].all() and (keep | (mask == 0)).all():
                return keep
    raise ValueError(
        f"`attention_mask` must be a tensor {list(ids.shape)} like `input_ids`, zeros and then ones"
        f" in every row, got {came}; pad prompts on the left (tokenizer.padding_side = 'left')"
    )


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
    ends = config.eos_token_id
    if isinstance(ends, Tensor):
        ends = ends.tolist()
    if not isinstance(ends, list | tuple):
        ends = () if ends is None else (ends,)
    for token in ends:
        _token("eos_token_id", token)
    return tuple(ends)


def _pair(model, assistant_model, tokenizer, eos: tuple[int, ...]) -> Pair:
    names = str(model.name_or_path), str(assistant_model.name_or_path)
    reader = _Silent() if tokenizer is None else tokenizer
    return replace(make_pair(model, assistant_model, reader, names), eos=eos)


def _engine(pair: Pair, files: dict[str, str], method: str, bias: float, config) -> Engine:
    folder = unpacked(files)
    length = config.num_assistant_tokens or read_card(folder).draft_length
    within(1, MAX_NODES, num_assistant_tokens=length)
    relaxation = Relaxation.of_bundle(folder, bias or None)
    return Engine(pair, method, relaxation, length, sampling=_sampling(config))


def _sampling(config) -> Sampling:
    """Without do_sample the most likely token. If nothing else is asked for, transformers takes the
    50 most likely.
    """
    if not config.do_sample:
        return Sampling(temperature=0)
    values = config._get_default_generation_params()
    asked = {name: getattr(config, name) for name in SAMPLED}
    values |= {name: value for name, value in asked.items() if value is not None}
    return Sampling(**{name: values.get(name, 0) for name in SAMPLED})


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
    """The token after the end of a shorter text: by default the end token, as in transformers."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    return next(iter(_ends(config)), None)


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
