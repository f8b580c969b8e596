"""A trace on disk: for every sampled text, the scalars per position from which a head is trained.

    shard-00000.safetensors ...   flat tensors over the S texts of a shard, see `columns`
    manifest.json                 what they were gathered with, and the sha256 of every shard

Files are written under a temporary name and renamed, so a folder never holds half a file under its
final name. Reading checks everything that a damaged or foreign file could break: checksums, types,
shapes, finite numbers, probabilities.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..fields import FLAG, OBJECT, TEXT, Field, fault, objects, optional, whole
from ..files import read_object, sha256, write_object, write_whole
from ..runtime.sampling import is_neutral
from ..verifier.features import FEATURES
from ..verifier.token_features import COUNT
from .columns import COLUMNS, REQUIRED

FORMAT = 2  # 1: features of the rows as sampled, not of what the models believe
MANIFEST = "manifest.json"
MOST_PROMPTS = 1 << 26  # held-out prompts are drawn by a permutation of all
SHARD = re.compile(r"shard-\d+\.safetensors")
AGAIN = (
    "delete it and run `diversed gather` again with the same options: only the missing shard is"
    " gathered anew"
)
ANEW = "gather the traces anew"
ENTRY = {
    "file": Field(
        lambda value: isinstance(value, str) and bool(SHARD.fullmatch(value)),
        "the name of a shard in this folder",
    ),
    "sha256": TEXT,
    "texts": whole(),
    "tokens": whole(),
}
FIELDS = {
    "complete": FLAG,
    "target": OBJECT,
    "target.hidden_size": whole(),
    "draft": OBJECT,
    "draft.hidden_size": whole(),
    "tokenizer": TEXT,
    "vocab": whole(),
    "sampling": OBJECT,
    "relaxation": TEXT,
    "task": TEXT,
    "seed": whole(),
    "prompts": whole(high=MOST_PROMPTS),
    "samples": whole(),
    "shards": objects(ENTRY),
    "label": optional(OBJECT),
    "token_table": optional(TEXT),
}


class Shard:
    """S texts and their X positions; every column of `columns` is an attribute, None if absent."""

    def __init__(self, **columns: Tensor | None):
        assert columns.keys() <= COLUMNS.keys(), f"no columns: {columns.keys() - COLUMNS.keys()}"
        self.columns = {name: columns[name] for name in COLUMNS if columns.get(name) is not None}

    def __getattr__(self, name: str) -> Tensor | None:
        if name not in COLUMNS:
            raise AttributeError(f"a shard has no column `{name}`")
        return self.columns.get(name)

    @property
    def texts(self) -> int:
        return len(self.columns["prompt"])

    @property
    def tokens(self) -> int:
        return len(self.columns["token"])


def write_shard(folder: str | Path, index: int, shard: Shard) -> dict:
    """Write shard number `index`; its entry for the manifest: file, sha256, texts, tokens. Same
    shard, same bytes.
    """
    path = Path(folder) / shard_name(index)
    _check(shard.columns, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No metadata: safetensors writes several entries in random order, and equal shards should have
    # equal checksums.
    write_whole(path, save({name: tensor.contiguous() for name, tensor in shard.columns.items()}))
    return {
        "file": path.name,
        "sha256": sha256(path),
        "texts": shard.texts,
        "tokens": shard.tokens,
    }


def shard_name(index: int) -> str:
    """The file name of shard number `index`."""
    return f"shard-{index:05d}.safetensors"


def write_manifest(folder: str | Path, manifest: dict, name: str = MANIFEST) -> Path:
    """Write FOLDER/NAME in one step; `format` is added. One of several processes has a manifest of
    its own.
    """
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_object(path, {"format": FORMAT, **manifest})


def read_manifest(folder: str | Path, incomplete: bool = False, name: str = MANIFEST) -> dict:
    """The manifest of a folder of traces, checked; `incomplete=True` admits one that is still being
    gathered.
    """
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {name}, so it is not a folder of traces; run `diversed gather`"
        )
    manifest = read_object(path, ANEW)
    found = manifest.get("format")
    if found not in (1, FORMAT):
        raise ValueError(
            f"{path} has trace format {found!r}, this version reads format {FORMAT}; {ANEW}"
        )
    if wrong := fault(manifest, FIELDS):
        raise ValueError(f"{path} is damaged ({wrong}); {ANEW}")
    if found == 1 and not _still_true(manifest):
        raise ValueError(
            f"{path} has trace format 1 and the sampling {manifest['sampling']}: its features are"
            f" those of tempered or filtered rows, this version's of softmax(logits); {ANEW}"
        )
    if not (incomplete or manifest["complete"]):
        raise ValueError(
            f"the traces in {folder} are incomplete ({len(manifest['shards'])} shards so far); "
            "run the same `diversed gather` again, it continues where it stopped"
        )
    if manifest["complete"] and not manifest["shards"]:
        raise ValueError(f"{path} is damaged (it is complete and names no shard); {ANEW}")
    return manifest


def _still_true(manifest: dict) -> bool:
    """Whether a folder of format 1 holds what it would hold now: rows as sampled were what the
    models believe, or it holds labels of a selector for exact decoding, which have no features.
    """
    exact = manifest["relaxation"] == "none" and "methods" in manifest
    return exact or is_neutral(manifest["sampling"])


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
    shard = Shard(**tensors)
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
    unknown = [name for name in tensors if name not in COLUMNS]
    if missing or unknown:
        refuse(
            f"fields {', '.join(missing) or 'none'} are missing and {', '.join(unknown) or 'none'}"
            " are unknown"
        )
    size = {"S": tensors["prompt"].numel(), "X": tensors["token"].numel()}
    size |= {"F": len(FEATURES), "C": COUNT}
    size["S+1"] = size["S"] + 1
    if manifest and "hidden" in tensors:
        size["H"] = hidden_size(manifest)
    for name, tensor in tensors.items():
        column, shape = COLUMNS[name], list(tensor.shape)
        last = shape[-1] if shape else 0
        expected = [size.setdefault(axis, last) for axis in column.axes]
        if tensor.dtype != column.dtype or shape != expected:
            refuse(f"`{name}` must be {expected} {column.dtype}, got {shape} {tensor.dtype}")
    start = tensors["start"]
    if size["S"] == 0 or start[0] != 0 or start[-1] != size["X"] or (start.diff() < 1).any():
        refuse(f"`start` must rise from 0 to {size['X']} with no empty text")
    if (tensors["prompt"] < 0).any() or (
        manifest and (tensors["prompt"] >= manifest["prompts"]).any()
    ):
        refuse(f"`prompt` must count the {manifest['prompts'] if manifest else ''} prompts from 0")
    for name in ("token", "alternative"):
        tokens, vocab = tensors.get(name, tensors["token"]), manifest["vocab"] if manifest else None
        if (tokens < 0).any() or (vocab and (tokens >= vocab).any()):
            refuse(f"`{name}` lies outside the vocabulary")
    if ("label" in tensors) != ("alternative" in tensors):
        refuse("`label` and `alternative` must stand together")
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
        known = tensor[~tensor.isnan()] if COLUMNS[name].holes else tensor
        if not torch.isfinite(known).all():
            refuse(f"`{name}` has numbers that are not finite")
        # float32 sums over a vocabulary of 1e5 may pass 1 by about 1e-5
        probability = COLUMNS[name].probability
        if probability and (tensor.min() < -1e-4 or tensor.max() > 1 + 1e-4):
            refuse(f"`{name}` must lie in [0, 1], got {tensor.min():.4g} to {tensor.max():.4g}")
