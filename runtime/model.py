"""A causal language model with a cache: (tokens, positions, visible slots) -> logits and last
hidden states.

The only file that knows how transformers is called. A pair is refused here, before any work, when
its two models do not read the same tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from .autotune import suited
from .cache import PackedCache, Slots, attention_layers
from .lean import LeanForward, obstacle

PACKAGED = {"sums-target": "target", "sums-draft": "draft"}
DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Output:
    """logits: [B, Q, V] over the pair's shared vocabulary; hidden: [B, Q, H] after the final norm,
    or None.
    """

    logits: Tensor
    hidden: Tensor | None


class Model:
    """One Hugging Face causal model, frozen.

    lean:     its calls are computed by `lean.LeanForward`, from the module's own weights.
    obstacle: why they go through transformers instead; the choice is made here, once. Hooks that
              are registered on the module afterwards are not called by a lean model: set
              DIVERSED_LEAN=0 for them.
    """

    def __init__(self, module, name: str, vocab: int | None = None):
        self.module = module.eval().requires_grad_(False)
        self.obstacle = obstacle(module)
        self.lean = not self.obstacle
        self.name = name
        self.config = module.config.get_text_config()
        self.vocab = vocab or self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        self.layers, self.kinds, self.window = attention_layers(self.config)
        names = inspect.signature(module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._can_slice = "logits_to_keep" in names
        self._lean = LeanForward(module) if self.lean else None
        self._embedding = module.get_input_embeddings()
        self._hash: str | None = None

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def hash(self) -> str:
        """`fingerprint` of the module, computed once."""
        if self._hash is None:
            self._hash = fingerprint(self.module)
        return self._hash

    @property
    def described(self) -> dict[str, object]:
        """What tells this model from others, for the settings of a folder."""
        return {"name": self.name, "hash": self.hash, "hidden_size": self.hidden_size}

    def cache(self, capacity: int) -> PackedCache:
        """An empty cache with room for `capacity` tokens a row."""
        return PackedCache(1 if self.lean else self.layers, capacity)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        visible: Tensor | None,
        cache: PackedCache | None,
        start: int = 0,
        hidden: bool = False,
        last_only: bool = False,
    ) -> Output:
        """Run the model once, without gradients.

        tokens:    [B, Q] int64.
        positions: [B, Q] int64, position of each token in its text; None where it is the number of
            its slot.
        visible:   [B, Q, start + Q] bool, the slots that each token sees, itself included; None where these are its
                   own slot and all before it.
        start:     first slot written.
        hidden:    also return the last hidden states.
        last_only: logits of the last token alone, [B, 1, V]: a prefill needs none. Hidden states of
                   the others are then not to be relied on.
        """
        count, device = tokens.shape[1], self.device
        if positions is not None:
            positions = positions.to(device)
        elif self.window or cache is None:
            positions = torch.arange(start, start + count, device=device).expand_as(tokens)
        seen = positions
        if cache is not None and self.window:
            seen = cache.note(start, positions)
        masks = self._masks(visible, positions, seen, start, count)
        return self.run(tokens, positions, start, masks, cache, start + count, hidden, last_only)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        slots: Slots,
        masks: dict[str, Tensor | None],
        cache: PackedCache | None,
        end: int,
        hidden: bool = False,
        last_only: bool = False,
    ) -> Output:
        """The same, told where to write and what to add to the scores.

        slots: the first of consecutive slots, or [B, Q] slots of each row's own.
        masks: by kind of attention [B or 1, 1, Q, end]; None if every slot is seen.
        end:   how many slots are looked at.
        """
        tokens = tokens.to(self.device)
        if cache is not None:
            cache.write_at(slots, end)
        if self._lean:
            if not torch.compiler.is_compiling():
                self._lean.refresh()
            logits, states = self._lean(tokens, positions, masks, cache, last_only)
            logits = logits if logits.shape[-1] == self.vocab else logits[..., : self.vocab]
            return Output(logits, states if hidden else None)
        if positions is None:
            positions = torch.arange(slots, slots + tokens.shape[1], device=self.device)
            positions = positions.expand_as(tokens)
        extra = {"logits_to_keep": 1} if last_only and self._can_slice else {}
        if cache is not None:
            extra |= {self._cache_name: cache, "use_cache": True}
        with torch.no_grad():
            out = self.module(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks if len(self.kinds) > 1 else masks[next(iter(self.kinds))],
                output_hidden_states=hidden,
                return_dict=True,
                **extra,
            )
        logits = out.logits[:, -1:] if last_only else out.logits
        return Output(logits[..., : self.vocab], out.hidden_states[-1] if hidden else None)

    @property
    def angles(self) -> Tensor:
        """The table of positions that lean calls read; a longer text replaces it, so who captures a
        call keeps it.
        """
        return self._lean.angles

    def _masks(
        self,
        visible: Tensor | None,
        positions: Tensor | None,
        seen: Tensor | None,
        start: int,
        count: int,
    ) -> dict[str, Tensor | None]:
        """What to add to the scores, by kind of attention: [B or 1, 1, Q, slots] of 0 and the most
        negative number.

        A bool mask is silently wrong with eager attention.
        seen: [B, start + Q] position of the token in each slot, where layers see only a window of tokens back.
        """
        if visible is None and count == 1 and self.lean and not self.window:
            return dict.fromkeys(self.kinds)  # a single token that sees every slot needs no mask
        if visible is None:
            slot = torch.arange(start + count, device=self.device)
            visible = (slot <= slot[start:].unsqueeze(1)).unsqueeze(0)
        visible = visible.to(self.device)
        masks = {"full_attention": self.additive(visible)} if "full_attention" in self.kinds else {}
        if self.window:
            near = positions.unsqueeze(-1) - seen.unsqueeze(1) < self.window
            masks["sliding_attention"] = self.additive(visible & near)
        return masks

    def additive(self, visible: Tensor) -> Tensor:
        """[B, 1, Q, slots] to add to the scores for `visible` [B, Q, slots] bool."""
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(self.dtype).min).unsqueeze(1)


@dataclass(frozen=True)
class Pair:
    """A draft and a target that read the same tokens.

    vocab: size of the vocabulary that both share; padded entries beyond it are cropped from every
        row.
    eos:   ids that end a text.
    """

    target: Model
    draft: Model
    tokenizer: object
    vocab: int
    eos: tuple[int, ...]

    @property
    def tokenizer_hash(self) -> str:
        return _tokenizer_hash(self.tokenizer)

    @property
    def settings(self) -> dict[str, object]:
        """What of the pair decides texts and traces, for the settings of a folder."""
        return {
            "target": self.target.described,
            "draft": self.draft.described,
            "tokenizer": self.tokenizer_hash,
            "vocab": self.vocab,
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
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    tokenizers = [load_tokenizer(name, trust_remote_code) for name in (target, draft)]
    _same_tokenizer(*tokenizers, target, draft)
    modules = [load_module(name, dtype, device, trust_remote_code) for name in (target, draft)]
    if dtype == "auto" and device == "cpu":
        modules = [suited(module) for module in modules]
    return make_pair(*modules, tokenizers[0], names=(target, draft))


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
    target, draft = (
        Model(module, name, vocab) for module, name in zip((target, draft), names, strict=True)
    )
    return Pair(target, draft, tokenizer, vocab, _end_tokens(target.module, tokenizer))


def _end_tokens(module, tokenizer) -> tuple[int, ...]:
    """Every id that ends a text, by the model's generation config and the tokenizer."""
    found: set[int] = set()
    for value in (getattr(module.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found |= set(value) if isinstance(value, list | tuple) else {value} - {None}
    return tuple(sorted(found))


def split_name(name: str) -> tuple[str, dict]:
    """A model's name -> (folder or hub name, keyword arguments that transformers needs to read it)."""
    if name in PACKAGED:
        return str(Path(__file__).parent.parent / "assets" / "pair" / PACKAGED[name]), {}
    if name.endswith(".gguf"):
        return str(Path(name).parent), {"gguf_file": Path(name).name}
    return name, {}


def fingerprint(module) -> str:
    """Hash of architecture and weights: up to 256 evenly spaced entries of every tensor, in
    bfloat16.

    Equal for the same checkpoint loaded in float32 or bfloat16; cheap for models of any size.
    """
    digest = hashlib.sha256(type(module).__name__.encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(value.shape)}".encode())
        flat = value.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)][:256].to("cpu", torch.float32).bfloat16()
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


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
    try:
        torch.empty(0, device=device)  # before gigabytes are fetched for it
        module = _loaded(
            name, "model", AutoModelForCausalLM, trust_remote_code=trust_remote_code, **keywords
        )
        return module.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"`device` {device!r} cannot be used on this machine: {str(error).splitlines()[0]}"
        ) from error


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
        return auto.from_pretrained(where, **keywords, **extra)
    except ImportError as error:
        raise ValueError(
            f"{name} needs a package that is not installed: {str(error).strip().splitlines()[0]}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        # Damaged folders end in any of these: JSON, a config of the wrong shape, tensors of the
        # wrong size or cut off.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"no {kind} could be loaded from {name!r}: {first}") from error


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
        adapted = get_peft_model(module, PeftConfig.from_pretrained(folder))
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


def _tokenizer_hash(tokenizer) -> str:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
