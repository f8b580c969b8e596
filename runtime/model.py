"""Loading a pair: from folders, the hub, .gguf files, peft adapters, or the packaged models.

A pair is refused here, before any work, when its two models do not read the same tokens.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from .autotune import suited
from .forward import Model, Pair, fingerprint
from .probe import probe

PACKAGED = {"sums-target": "target", "sums-draft": "draft"}
# Architectures of drafts that are no language model of their own.
HEAD_OF_A_TARGET = re.compile("eagle|medusa|hydra|mtp|speculator", re.IGNORECASE)
DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_pair(
    target: str = "sums-target",
    draft: str = "sums-draft",
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Pair:
    """Load a draft and a target; refuse them, saying why, unless they share a tokenizer and
    vocabulary.

    Args:
        target: folder, hub name or .gguf file of the model being served; `sums-target` is the
            packaged one.
        draft: folder, hub name or .gguf file of the cheap model; `sums-draft` is the packaged one.
        dtype: float32, bfloat16, float16, or auto: as stored, and on a CPU that computes a stored
            half slower, float32.
        device: where both run, e.g. cpu, cuda, cuda:1; `auto` spreads them with device_map.
        trust_remote_code: run model code that comes with the checkpoint.
    """
    check_dtype(dtype)
    tokenizers = [load_tokenizer(name, trust_remote_code) for name in (target, draft)]
    _same_tokenizer(*tokenizers, target, draft)
    modules = [load_module(name, dtype, device, trust_remote_code) for name in (target, draft)]
    if dtype == "auto" and device == "cpu":
        modules = [suited(module) for module in modules]
    return make_pair(*modules, tokenizers[0], names=(target, draft))


def check_dtype(dtype: str) -> None:
    """ValueError for a type that no model is loaded in."""
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")


def check_device(device: str) -> None:
    """ValueError for a device that this machine does not have."""
    if device != "auto":
        with _usable(device):
            if torch.empty(0, device=device).is_meta:
                raise RuntimeError("it holds no numbers")


@contextmanager
def _usable(device: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"`device` {device!r} cannot be used on this machine: {str(error).splitlines()[0]}"
        ) from error


def quiet() -> None:
    """Leave the terminal to our own progress: no bars and no warnings from transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # What peft calls of transformers and should not any more is theirs to settle.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def make_pair(target, draft, tokenizer, names: tuple[str, str] = ("target", "draft")) -> Pair:
    """A pair from two Hugging Face modules already in memory and the tokenizer that they share."""
    sizes = [module.config.get_text_config().vocab_size for module in (target, draft)]
    vocab = min(sizes)
    if len(tokenizer) > vocab:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's rows have {sizes[0]} and the"
            f" draft's {sizes[1]}; both models must score every token: choose a draft of the same"
            " family"
        )
    models = [
        _model(module, name, vocab) for module, name in zip((target, draft), names, strict=True)
    ]
    return Pair(*models, tokenizer, vocab, _end_tokens(target, tokenizer))


def _model(module, name: str, vocab: int) -> Model:
    """The model of a module; one that is not decoded right in a batch is refused.

    Lean models are ours, and tests compare them. All others are looked at.
    """
    try:
        model = Model(module, name, vocab)
    except AttributeError as error:
        raise ValueError(
            f"{name} ({module.config.model_type}) cannot be decoded here: {error}; use a"
            " decoder-only model of another family"
        ) from error
    if not model.lean:
        probe(model)
    return model


def _end_tokens(module, tokenizer) -> tuple[int, ...]:
    """Every id that ends a text, by the model's generation config and the tokenizer."""
    found: set[int] = set()
    for value in (getattr(module.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, list | tuple) else {value} - {None}
    return tuple(sorted(found))


def split_name(name: str) -> tuple[str, dict]:
    """A model's name -> (folder or hub name, keyword arguments that transformers needs to read
    it).
    """
    if name in PACKAGED:
        return str(Path(__file__).parent.parent / "assets" / "pair" / PACKAGED[name]), {}
    if name.endswith(".gguf"):
        return str(Path(name).parent), {"gguf_file": Path(name).name}
    return name, {}


def load_tokenizer(name: str, trust_remote_code: bool = False):
    """The tokenizer of a folder, hub name, .gguf file or packaged model; an adapter's is that of
    its base.
    """
    from transformers import AutoTokenizer

    name = adapter_base(name) or name
    return _loaded(name, "tokenizer", AutoTokenizer, trust_remote_code=trust_remote_code)


def load_module(
    name: str, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False
):
    """The Hugging Face module of a folder, hub name, .gguf file or packaged model.

    A folder with a peft adapter stands for its base with the adapter merged into it: a plain module
    again.
    """
    from transformers import AutoModelForCausalLM

    if base := adapter_base(name):
        return _merged(name, base, load_module(base, dtype, device, trust_remote_code))
    keywords = {"dtype": DTYPES["float32" if name in PACKAGED and dtype == "auto" else dtype]}
    if name.endswith(".gguf"):
        from transformers import GgufConfig

        keywords |= {"quantization_config": GgufConfig(dequantize=True)}
        if dtype == "auto":
            keywords["dtype"] = torch.bfloat16
    if device == "auto":
        return _loaded(
            name,
            "model",
            AutoModelForCausalLM,
            trust_remote_code=trust_remote_code,
            device_map="auto",
            **keywords,
        )
    check_device(device)  # before gigabytes are fetched for it
    with _usable(device):
        module = _loaded(
            name, "model", AutoModelForCausalLM, trust_remote_code=trust_remote_code, **keywords
        )
        return module.to(device)


def _loaded(name: str, kind: str, auto, **keywords):
    """`auto.from_pretrained(name)` with one sentence for everything that can be wrong with the
    name.
    """
    quiet()
    where, extra = split_name(name)
    looks_local = name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1
    if looks_local and not Path(where).exists():
        raise FileNotFoundError(f"no {kind} at {name}: the folder does not exist")
    if extra and not (Path(where) / extra["gguf_file"]).is_file():
        raise FileNotFoundError(f"no {kind} at {name}: the file does not exist")
    try:
        if kind == "tokenizer":
            return auto.from_pretrained(where, **keywords, **extra)
        module, report = auto.from_pretrained(where, output_loading_info=True, **keywords, **extra)
    except ImportError as error:
        raise ValueError(
            f"{name} needs a package that is not installed: {str(error).strip().splitlines()[0]}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        # Damaged folders end in any of these: JSON, a config of the wrong shape, tensors of the
        # wrong size or cut off.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"no {kind} could be loaded from {name!r}: {first}") from error
    _refuse_other_tensors(name, module, report)
    return module


def _refuse_other_tensors(name: str, module, report: dict) -> None:
    """ValueError unless the checkpoint has exactly the tensors of the architecture.

    transformers fills a missing tensor with random numbers and passes over one it does not know.
    """
    kind = ", ".join(getattr(module.config, "architectures", None) or []) or type(module).__name__
    lacks = sorted(report.get("missing_keys", ()))
    unknown = sorted(report.get("unexpected_keys", ()))
    other = sorted(str(each) for each in report.get("mismatched_keys", ()))
    faults = [
        f"{what} {len(names)} tensors, such as {', '.join(names[:3])}"
        for what, names in (
            ("lacks", lacks),
            (f"has beside those of {type(module).__name__}", unknown),
            ("has in another shape", other),
        )
        if names
    ]
    if faults:
        hint = "give a whole checkpoint of a causal language model"
        if HEAD_OF_A_TARGET.search(kind):
            hint = "this is a draft head that reads its target's hidden states; give a whole model"
        raise ValueError(f"the checkpoint {name} ({kind}) {' and '.join(faults)}; {hint}")


def adapter_base(name: str) -> str | None:
    """The base model that the peft adapter in the folder `name` names; None where there is no
    adapter.
    """
    path = Path(name) / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} does not say which model it adapts ({error!r}); give a folder that peft wrote"
        ) from None
    if not isinstance(base, str) or (Path(base) / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} must name a model as its base, got {base!r}; adapters of adapters are not read"
        )
    return base


def _merged(folder: str, base: str, module):
    """The module of `base` with the adapter in `folder` added to its weights; refuses an adapter
    that does not fit.
    """
    from peft import (
        PeftConfig,
        get_peft_model,
        get_peft_model_state_dict,
        set_peft_model_state_dict,
    )
    from safetensors.torch import load_file

    wrong = f"the adapter in {folder} does not fit its base {base}"
    origin = Path(folder) / "distill.json"
    made_for = (
        json.loads(origin.read_text()).get("base", {}).get("hash") if origin.is_file() else None
    )
    if made_for and made_for != (found := fingerprint(module)):
        raise ValueError(
            f"{wrong}: it was trained on the weights {made_for}, these are {found}; distil again"
        )
    try:
        weights = load_file(Path(folder) / "adapter_model.safetensors")
        settings = PeftConfig.from_pretrained(folder)
        # Tokens that were trained alone are rows of both layers, which stay tied.
        if not getattr(settings, "trainable_token_indices", None):
            _untie(module)
        adapted = get_peft_model(module, settings)
        shapes = {key: value.shape for key, value in get_peft_model_state_dict(adapted).items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{wrong}: {str(error).strip().splitlines()[0]}") from error
    # peft itself passes over tensors that are missing or too many.
    if differing := sorted(
        dict(shapes.items() ^ {key: value.shape for key, value in weights.items()}.items())
    ):
        raise ValueError(
            f"{wrong}: {len(differing)} tensors differ in name or shape, such as {differing[0]}"
        )
    set_peft_model_state_dict(adapted, weights)
    return adapted.merge_and_unload()


def _untie(module) -> None:
    """Give the output layer weights of its own, so that an adapter on it leaves the embedding
    alone.

    A merge into tied weights would change both layers, which the adapter was not trained for.
    """
    output, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if output is not None and output.weight is embedding.weight:
        output.weight = torch.nn.Parameter(embedding.weight.detach().clone())
        module.config.get_text_config().tie_word_embeddings = False
        module.config.tie_word_embeddings = False


def _same_tokenizer(target, draft, target_name: str, draft_name: str) -> None:
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    different = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=str,
    )
    example = different[0]
    raise ValueError(
        f"the target {target_name} and the draft {draft_name} do not share a tokenizer:"
        f" {len(different)} tokens differ, for example {example!r} is {ours.get(example, 'absent')}"
        f" in the target's and {theirs.get(example, 'absent')} in the draft's; choose a draft of"
        " the same family"
    )
