"""A trace on disk: for every sampled text, the scalars per position from which a head is trained.

For the probability blend v = (1 - w) p + w q everything the objective needs at a position is
p(token), q(token) and TV(p, q) (arXiv 2604.07622; no row over the vocabulary is stored). A folder
of traces holds

    shard-00000.safetensors ...   flat tensors over the S texts of a shard, see `Shard`
    manifest.json                 what they were gathered with, and the sha256 of every shard

Files are written under a temporary name and renamed, so a folder never holds half a file under its
final name. Reading checks everything a damaged or foreign file could break: checksums, types,
shapes, finite numbers, probabilities.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..files import sha256, write_whole
from ..verifier.head import FEATURES

FORMAT = 1
MANIFEST = "manifest.json"
MOST_PROMPTS = 1 << 26  # held-out prompts are drawn by a permutation of all
SHARD = re.compile(r"shard-\d+\.safetensors")
AGAIN = (
    "delete it and run `diversed gather` again with the same options: only the missing shard is"
    " gathered anew"
)


@dataclass
class Shard:
    """S texts and their X positions, one after the other. Position i of a text is the context
    before its token i.

    start:        [S + 1] int64, text s owns the positions start[s] to start[s + 1]; no text is empty
    prompt:       [S] int64, index of the prompt, counted over the whole folder
    sample:       [S] int64, which of the prompt's samples
    reward:       [S] float32, the task's score of the text
    finished:     [S] bool, True where the text ends with the end-of-text token
    token:        [X] int32, the token that was committed
    target_prob:  [X] float32, the target's probability of it
    draft_prob:   [X] float32, the draft's probability of it
    tv:           [X] float32, total variation between the two rows
    weight:       [X] float32, the draft's share it was sampled with; NaN where the relaxation is not a blend
    substituted:  [X] bool, True where it replaced the target's own token (maximal coupling of target and blend)
    features:     [X, 12] float32, `logit_features` of the two rows
    hidden:       [X, H_draft + H_target] float16, last hidden states, or None
    top_index:              [X, K] int32, the K tokens with the largest sum of both probabilities, or None
    target_top, draft_top:  [X, K] float16, their log-probabilities, at least log 1e-30, or None
    target_rest, draft_rest: [X] float32, the probability outside those K, or None
    """

    start: Tensor
    prompt: Tensor
    sample: Tensor
    reward: Tensor
    finished: Tensor
    token: Tensor
    target_prob: Tensor
    draft_prob: Tensor
    tv: Tensor
    weight: Tensor
    substituted: Tensor
    features: Tensor
    hidden: Tensor | None = None
    top_index: Tensor | None = None
    target_top: Tensor | None = None
    draft_top: Tensor | None = None
    target_rest: Tensor | None = None
    draft_rest: Tensor | None = None

    @property
    def texts(self) -> int:
        return len(self.prompt)

    @property
    def tokens(self) -> int:
        return len(self.token)

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are there, by name."""
        return {name: tensor for name in LAYOUT if (tensor := getattr(self, name)) is not None}


# dtype and shape of every field: S texts, X positions, K stored logits, F features, H hidden
# numbers.
LAYOUT = {
    "start": (torch.int64, "S+1"),
    "prompt": (torch.int64, "S"),
    "sample": (torch.int64, "S"),
    "reward": (torch.float32, "S"),
    "finished": (torch.bool, "S"),
    "token": (torch.int32, "X"),
    "target_prob": (torch.float32, "X"),
    "draft_prob": (torch.float32, "X"),
    "tv": (torch.float32, "X"),
    "weight": (torch.float32, "X"),
    "substituted": (torch.bool, "X"),
    "features": (torch.float32, "XF"),
    "hidden": (torch.float16, "XH"),
    "top_index": (torch.int32, "XK"),
    "target_top": (torch.float16, "XK"),
    "draft_top": (torch.float16, "XK"),
    "target_rest": (torch.float32, "X"),
    "draft_rest": (torch.float32, "X"),
}
REQUIRED = tuple(name for name in LAYOUT if Shard.__dataclass_fields__[name].default is not None)
PROBABILITIES = ("target_prob", "draft_prob", "tv", "weight", "target_rest", "draft_rest")
MANIFEST_KEYS = (
    "complete",
    "target",
    "draft",
    "tokenizer",
    "vocab",
    "sampling",
    "relaxation",
    "task",
    "seed",
    "prompts",
    "samples",
    "shards",
)


def write_shard(folder: str | Path, index: int, shard: Shard) -> dict:
    """Write shard number `index`; its entry for the manifest: file, sha256, texts, tokens. Same
    shard, same bytes.
    """
    path = Path(folder) / f"shard-{index:05d}.safetensors"
    _check(shard.tensors(), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.touch()
    mode = temporary.stat().st_mode
    try:
        # No metadata: safetensors writes several entries in random order, and equal shards should
        # have equal checksums.
        save_file(
            {name: tensor.contiguous() for name, tensor in shard.tensors().items()}, temporary
        )
        temporary.chmod(mode)  # safetensors makes files that only their owner can read
        entry = {
            "file": path.name,
            "sha256": sha256(temporary),
            "texts": shard.texts,
            "tokens": shard.tokens,
        }
        os.replace(temporary, path)
    except SafetensorError as error:
        full = f"os error {errno.ENOSPC}" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
    return entry


def write_manifest(folder: str | Path, manifest: dict, name: str = MANIFEST) -> Path:
    """Write FOLDER/NAME in one step; `format` is added. One of several processes has a manifest of
    its own.
    """
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, json.dumps({"format": FORMAT, **manifest}, indent=2) + "\n")


def read_manifest(folder: str | Path, incomplete: bool = False, name: str = MANIFEST) -> dict:
    """The manifest of a folder of traces, checked; `incomplete=True` admits one that is still being
    gathered.
    """
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {name}, so it is not a folder of traces; run `diversed gather`"
        )
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise ValueError(
            f"{path} is not valid JSON; delete it and run `diversed gather` again"
        ) from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{path} has trace format {found!r}, this version reads format {FORMAT}; gather the"
            " traces anew"
        )
    missing = [key for key in MANIFEST_KEYS if key not in manifest]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; delete it and run `diversed gather` again"
        )
    if not _sound(manifest):
        raise ValueError(
            f"{path} is damaged (an entry has another type or size); gather the traces anew"
        )
    for entry in manifest["shards"]:
        if not SHARD.fullmatch(entry["file"]):
            raise ValueError(
                f"{path} names a shard {entry!r} that is not a file of this folder; gather the"
                " traces anew"
            )
    if not (incomplete or manifest["complete"]):
        raise ValueError(
            f"the traces in {folder} are incomplete ({len(manifest['shards'])} shards so far); "
            "run the same `diversed gather` again, it continues where it stopped"
        )
    return manifest


def _sound(manifest: dict) -> bool:
    """Whether the entries that are computed with have their types."""
    shards, models = manifest["shards"], (manifest["target"], manifest["draft"])
    return (
        isinstance(shards, list)
        and all(isinstance(entry, dict) for entry in shards)
        and all(isinstance(entry.get(name), str) for entry in shards for name in ("file", "sha256"))
        and all(type(entry.get(name)) is int for entry in shards for name in ("texts", "tokens"))
        and all(
            isinstance(model, dict) and type(model.get("hidden_size")) is int for model in models
        )
        and all(type(manifest[name]) is int for name in ("prompts", "vocab"))
        and bool(shards or not manifest["complete"])
        and manifest["prompts"] <= MOST_PROMPTS
    )


def read_shard(folder: str | Path, entry: dict, manifest: dict, verify: bool = True) -> Shard:
    """The shard of one manifest entry. `verify=False` leaves out the checksum, never the checks of
    the contents.
    """
    path = Path(folder) / entry["file"]
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; run `diversed gather` again with the same options"
        )
    if verify and sha256(path) != entry["sha256"]:
        raise ValueError(f"{path} is damaged (its sha256 is not the manifest's); {AGAIN}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}); {AGAIN}") from None
    _check(tensors, path, manifest)
    shard = Shard(**{field.name: tensors.get(field.name) for field in fields(Shard)})
    if (shard.texts, shard.tokens) != (entry["texts"], entry["tokens"]):
        raise ValueError(
            f"{path} holds {shard.texts} texts of {shard.tokens} tokens, the manifest says"
            f" {entry['texts']} of {entry['tokens']}; {AGAIN}"
        )
    return shard


def read_shards(folder: str | Path, verify: bool = True) -> Iterator[Shard]:
    """The shards of a folder in order, one in memory at a time; refuses incomplete and damaged ones
    in a sentence.
    """
    manifest = read_manifest(folder)
    for entry in manifest["shards"]:
        yield read_shard(folder, entry, manifest, verify)


def hidden_size(manifest: dict) -> int:
    """H_draft + H_target of the pair the traces come from."""
    return manifest["draft"]["hidden_size"] + manifest["target"]["hidden_size"]


def _check(tensors: dict[str, Tensor], path: Path, manifest: dict | None = None) -> None:
    """ValueError with one sentence unless the tensors are a whole, sane shard."""

    def refuse(what: str) -> None:
        raise ValueError(f"{path}: {what}; {AGAIN}")

    missing = [name for name in REQUIRED if name not in tensors]
    unknown = [name for name in tensors if name not in LAYOUT]
    if missing or unknown:
        refuse(
            f"fields {', '.join(missing) or 'none'} are missing and {', '.join(unknown) or 'none'}"
            " are unknown"
        )
    size = {"S": tensors["prompt"].numel(), "X": tensors["token"].numel(), "F": len(FEATURES)}
    size["S+1"] = size["S"] + 1
    if manifest and "hidden" in tensors:
        size["H"] = hidden_size(manifest)
    for name, tensor in tensors.items():
        dtype, axes = LAYOUT[name]
        axes = [axes] if axes == "S+1" else list(axes)
        expected = [size.setdefault(axis, tensor.shape[-1] if tensor.ndim else 0) for axis in axes]
        if tensor.dtype != dtype or list(tensor.shape) != expected:
            refuse(f"`{name}` must be {expected} {dtype}, got {list(tensor.shape)} {tensor.dtype}")
    start = tensors["start"]
    if size["S"] == 0 or start[0] != 0 or start[-1] != size["X"] or (start.diff() < 1).any():
        refuse(f"`start` must rise from 0 to {size['X']} with no empty text")
    if (tensors["prompt"] < 0).any() or (
        manifest and (tensors["prompt"] >= manifest["prompts"]).any()
    ):
        refuse(f"`prompt` must count the {manifest['prompts'] if manifest else ''} prompts from 0")
    if (tensors["token"] < 0).any() or (manifest and (tensors["token"] >= manifest["vocab"]).any()):
        refuse("`token` lies outside the vocabulary")
    _check_numbers(tensors, refuse)


def _check_numbers(tensors: dict[str, Tensor], refuse) -> None:
    """Finite everywhere, probabilities in [0, 1]; a weight is a number in all positions or NaN in
    all.
    """
    if (bare := tensors["weight"].isnan()).any() and not bare.all():
        refuse("`weight` is NaN at some positions only")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or (name == "weight" and bare.all()):
            continue
        if not torch.isfinite(tensor).all():
            refuse(f"`{name}` has numbers that are not finite")
        # float32 sums over a vocabulary of 1e5 may pass 1 by about 1e-5
        if name in PROBABILITIES and (tensor.min() < -1e-4 or tensor.max() > 1 + 1e-4):
            refuse(f"`{name}` must lie in [0, 1], got {tensor.min():.4g} to {tensor.max():.4g}")
