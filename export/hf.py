"""A bundle as a repository for `model.generate(..., custom_generate=FOLDER)` of transformers, and what runs there.

The repository is the bundle with a folder custom_generate/ in it. transformers copies the Python files of that folder
into a cache of its own and runs them there, away from the bundle; so the gate travels in one of them, gate.py. They
wrap the two modules and call the loop of this package, which must be installed: requirements.txt says so, and
transformers looks.
"""

from __future__ import annotations

import base64
import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import __version__
from ..runtime.completion import Completion, Request, check_stop
from ..runtime.decode import Engine
from ..runtime.limits import SEEDS
from ..runtime.model import Pair, make_pair
from ..runtime.sampling import Sampling
from ..verifier.relax import Relaxation
from .bundle import FILES

HONOURED = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id")
HONOURED += ("pad_token_id", "stop_strings", "num_return_sequences", "num_assistant_tokens", "return_dict_in_generate")
# Nothing in the loop reads these, with or without custom_generate.
NEUTRAL = ("bos_token_id", "transformers_version", "_from_model_config", "disable_compile")
# transformers gives the loop what says where the repository is to be had, too.
PLACE = ("revision", "token", "cache_dir", "force_download", "local_files_only")

GENERATE = '''"""Speculative decoding with the learned verifier in gate.py; needs `pip install diversed`."""

from diversed.export.hf import generate as _generate

from .gate import FILES


def generate(model, **arguments):
    return _generate(model, FILES, **arguments)
'''


def add_custom_generate(bundle: str | Path) -> None:
    """Make the folder of a bundle a repository that transformers can decode from."""
    bundle = Path(bundle)
    files = {name: base64.b64encode((bundle / name).read_bytes()).decode() for name in FILES if name != "README.md"}
    folder = bundle / "custom_generate"
    folder.mkdir()
    lines = "".join(f'    "{name}": "{content}",\n' for name, content in files.items())
    (folder / "gate.py").write_text(f'"""The bundle\'s files, in base64."""\n\nFILES = {{\n{lines}}}\n')
    (folder / "generate.py").write_text(GENERATE)
    (folder / "requirements.txt").write_text(f"diversed>={__version__}\ntransformers>=5.19\n")


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
    """Token ids [B * num_return_sequences, T + new], as `model.generate` returns them: prompts, texts, padding.

    model, assistant_model: target and draft. `num_assistant_tokens` are drafted a step, by default as on the card.
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
    stop = (config.stop_strings,) if isinstance(config.stop_strings, str) else tuple(config.stop_strings or ())
    check_stop(stop)
    if stop and tokenizer is None:
        raise ValueError("`stop_strings` are looked for in decoded text; give `tokenizer` too")
    copies = config.num_return_sequences or 1
    count = len(prompts) * copies
    if streamer is not None and count > 1:
        raise ValueError(f"`streamer` shows one text, got {count}; leave it out or decode them one by one")
    seeds = torch.randint(*SEEDS, (count,)).tolist()
    room = _new_tokens(config, ids.shape[1])
    requests = {i: Request(prompts[i // copies], seed, room, stop) for i, seed in enumerate(seeds)}
    with _frozen(model, assistant_model):
        pair = _pair(model, assistant_model, tokenizer, config.eos_token_id)
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
    """What the caller asked for, filled up from the model's own settings; and the options that are no field of these.

    transformers' defaults are not filled in: its 20 `num_assistant_tokens` are nobody's wish.
    """
    from transformers import GenerationConfig

    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**model.generation_config.to_dict(), defaults_only=True)
    rest = config.update(**{name: value for name, value in options.items() if value is not None})
    # An empty list of processors and a switch that is off ask for nothing.
    empty = {name for name, value in rest.items() if isinstance(value, list | bool) and not value}
    return config, {name: value for name, value in rest.items() if name not in empty.union(PLACE)}


def _refuse(model, assistant_model, config, rest: dict[str, Any]) -> None:
    """ValueError for whatever the loop cannot do."""
    if assistant_model is None:
        raise ValueError("`assistant_model` is missing: give the draft model that the gate was trained with")
    if model.config.is_encoder_decoder or assistant_model.config.is_encoder_decoder:
        raise ValueError("`custom_generate` of diversed continues a text; give models without an encoder")
    if rest:
        names = ", ".join(f"`{name}`" for name in rest)
        raise ValueError(f"`custom_generate` of diversed cannot honour {names}; leave out what it cannot do")
    standard = type(config)().to_dict() | config._get_default_generation_params()
    for name, value in config.to_dict().items():
        if value is None or name in HONOURED + NEUTRAL or (value or None) == (standard.get(name) or None):
            continue
        raise ValueError(
            f"`{name}` must be left at its default {standard.get(name)!r}, got {value!r}: `custom_generate` of "
            "diversed cannot honour it; pass the default, or set it in model.generation_config"
        )


def _prompts(inputs: Tensor | None, rest: dict[str, Any], pad: int | None) -> tuple[list[list[int]], Tensor]:
    """Token ids of every prompt without its padding, and all [B, T]; takes what it reads out of `rest`."""
    ids, mask = rest.pop("input_ids", None) if inputs is None else inputs, rest.pop("attention_mask", None)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise ValueError("`input_ids` must be a tensor [B, T] of token ids; encode the prompts first")
    if mask is None and pad is not None and (ids == pad).any():
        raise ValueError("`input_ids` hold `pad_token_id`; give `attention_mask`, which says where it is padding")
    mask = torch.ones_like(ids) if mask is None else mask
    if mask.shape != ids.shape or (mask.diff(dim=1) < 0).any() or not mask[:, -1].all():
        raise ValueError(
            f"`attention_mask` must be {list(ids.shape)} like `input_ids`, zeros and then ones in every row, got "
            f"{list(mask.shape)}; pad prompts on the left (tokenizer.padding_side = 'left')"
        )
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)], ids


def _new_tokens(config, length: int) -> int:
    """Tokens that every text may have; `max_length` counts the prompt and its padding, as in transformers."""
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    if config.max_length is None:
        return config._get_default_generation_params()["max_length"]
    if config.max_length <= length:
        raise ValueError(f"`max_length` {config.max_length} leaves no room after {length} prompt tokens; raise it")
    return config.max_length - length


def _pair(model, assistant_model, tokenizer, eos: int | list[int] | None) -> Pair:
    names = (str(module.name_or_path) for module in (model, assistant_model))
    pair = make_pair(model, assistant_model, _Silent() if tokenizer is None else tokenizer, tuple(names))
    return replace(pair, eos=tuple(torch.as_tensor([] if eos is None else eos).reshape(-1).tolist()))


def _engine(pair: Pair, files: dict[str, str], method: str, bias: float, config) -> Engine:
    card = json.loads(base64.b64decode(files["card.json"]))
    length = config.num_assistant_tokens or card["draft_length"]
    with tempfile.TemporaryDirectory(prefix="diversed-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(base64.b64decode(content))
        blend = card["head"].get("blend", "probabilities")
        relaxation = Relaxation("learned", bias=bias or None, source=folder, blend=blend)
        return Engine(pair, method, relaxation, length, sampling=_sampling(config))


def _sampling(config) -> Sampling:
    """Without do_sample the most likely token. Where nothing else is asked for transformers takes the first 50."""
    if not config.do_sample:
        return Sampling(temperature=0)
    values = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    standard = config._get_default_generation_params()
    return Sampling(**{name: standard.get(name, 0) if value is None else value for name, value in values.items()})


@contextmanager
def _frozen(*modules: nn.Module) -> Iterator[None]:
    """A pair's modules are frozen and in evaluation mode; afterwards they are as their owner left them."""
    parts = [(part, part.training) for module in modules for part in module.modules()]
    parameters = [(tensor, tensor.requires_grad) for module in modules for tensor in module.parameters()]
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
    """The token after the end of a shorter text; where none is named, the end token, as in transformers."""
    eos = config.eos_token_id
    return config.pad_token_id if config.pad_token_id is not None else eos[0] if isinstance(eos, list) else eos


def _joined(ids: Tensor, done: list[Completion], pad: int | None) -> Tensor:
    longest = max(len(completion.tokens) for completion in done)
    if pad is None and any(len(completion.tokens) < longest for completion in done):
        raise ValueError("`pad_token_id` must be given: texts of several lengths are returned in one tensor")
    new = [completion.tokens + [pad] * (longest - len(completion.tokens)) for completion in done]
    return torch.cat([ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)], 1)


class _Silent:
    """In place of a tokenizer where nothing is decoded."""

    eos_token_id = None

    def __len__(self) -> int:
        return 0

    def decode(self, tokens: list[int], **options) -> str:
        return ""
