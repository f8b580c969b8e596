"""A causal language model with a cache: (tokens, positions, visible slots) -> logits and last
hidden states.

The only file that knows how transformers is called.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from ..files import code_sha256
from .cache import PackedCache, Slots, attention_layers
from .lean import LeanForward, obstacle


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
        self.max_positions: int = known_positions(self.config)
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

    @property
    def computed(self) -> dict[str, object]:
        """What decides the rows of this model, for the settings of a folder."""
        named = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
        config = {k: v for k, v in self.module.config.to_dict().items() if k not in named}
        return {
            "weights": checksum(self.module),
            "config": _digest(json.dumps(config, sort_keys=True, default=str)),
            "code": code_sha256(type(self.module)),
            "dtype": str(self.dtype),
            "device": str(self.device),
            "lean": self.lean,
        }

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
        visible:   [B, Q, start + Q] bool, the slots that each token sees, itself included; None
                   where these are its own slot and all before it.
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
        seen: [B, start + Q] position of the token in each slot, where layers see only a window of
              tokens back.
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
            "reading": _reading(self.tokenizer),
            "eos": list(self.eos),
            "computed": {"target": self.target.computed, "draft": self.draft.computed},
        }


def known_positions(config) -> int:
    """Positions up to which rotation does not depend on the longest row of a batch.

    With longrope and dynamic scaling the factors of all rows change when one row grows beyond the
    length of the original training.
    """
    most = getattr(config, "max_position_embeddings", None) or 1 << 30
    scaling = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    kinds = scaling.values() if all(isinstance(v, dict) for v in scaling.values()) else [scaling]
    for each in kinds:
        if each.get("rope_type", each.get("type")) in ("longrope", "dynamic"):
            original = each.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            most = min(most, original or most)
    return most


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


def checksum(module) -> str:
    """Hash of all bytes of the weights, by a sum for each tensor: what `fingerprint` does not
    sample counts too. It depends on the dtype.
    """
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = len(data) // 8 * 8  # a sum of 8 bytes at a time, which may wrap
        total = data[:whole].view(torch.int64).sum() + data[whole:].sum()
        digest.update(f"{name}{int(total)}".encode())
    return digest.hexdigest()[:16]


def _tokenizer_hash(tokenizer) -> str:
    return _digest(json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True))


def _reading(tokenizer) -> dict[str, str]:
    """What of a tokenizer decides tokens and texts, besides the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend else tokenizer.init_kwargs
    # What a call may have set, and where the files lay.
    passing = ("truncation", "padding", "name_or_path", "vocab_file", "merges_file")
    rules = {name: value for name, value in rules.items() if name not in passing}
    rules["special"] = tokenizer.special_tokens_map
    rules["cleans"] = getattr(tokenizer, "clean_up_tokenization_spaces", None)
    return {
        "tokenizer": _digest(json.dumps(rules, sort_keys=True, default=str)),
        "chat_template": _digest(json.dumps(tokenizer.chat_template)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
