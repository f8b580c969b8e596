"""Reading a bundle: one trained head in a folder that can be moved, checked and refused.

    head.safetensors     the gate's tensors, float32
    card.json            what it was trained on and for: models, hashes, features, sampling, draft length, figures
    example.safetensors  a few rows of both models and the gate's logit there: replayed every time the bundle is loaded
    README.md            the card for people, generated from card.json
    selector.json, selector.safetensors   where it has one, what chooses the tree to draw (`runtime.shape_network`)

A bundle comes from strangers: it is safetensors and json only, file names are fixed, and shapes are
compared with the card before any tensor is read.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..verifier.head import FEATURES, KINDS, LARGEST_SIZE, WeightHead, logit_features

FORMAT = 1
FILES = ("card.json", "head.safetensors", "example.safetensors", "README.md")
LARGEST_CARD = 16 << 20  # bytes
# A gate's logit is a float32 sum of up to some ten thousand terms; another machine's order of
# summation moves it by less than 1e-4 of its size, a changed feature or a wrong tensor by far more
# than this.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle: the gate, its card and the folder it came from."""

    head: WeightHead
    card: dict[str, Any]
    folder: Path


def load_bundle(
    folder: str | Path,
    target: Any = None,
    draft: Any = None,
    sampling: Any = None,
    any_pair: bool = False,
) -> Bundle:
    """Read a bundle, replay its example, and check that it fits the models and the sampling it is
    to be used with.

    folder: the bundle.
    target, draft: the models (`runtime.model.Model`) it will judge, or None to leave that
        unchecked.
    sampling: the `Sampling` it will be used at, or None; another one than in training only warns.
    any_pair: accept models it was not trained for, with a warning; only heads with
        features="logits" can be moved. A bundle that was exported with --any_pair accepts them by
        itself.
    """
    folder = Path(folder)
    card = read_card(folder)
    head = _read_head(folder, card)
    _replay(folder, head)
    misfits = "; ".join(
        filter(None, (_misfit(card, "target", target), _misfit(card, "draft", draft)))
    )
    any_pair = any_pair or card.get("any_pair") is True
    if misfits and any_pair and head.features == "logits":
        warnings.warn(
            f"bundle {folder} is used with models it was not trained for: {misfits}", stacklevel=2
        )
    elif misfits:
        hint = "train a head for this pair"
        if any_pair:
            hint += " (any_pair=True is only for heads with features='logits')"
        raise ValueError(f"bundle {folder} does not fit these models: {misfits}; {hint}")
    if sampling is not None and (differences := _differences(card["sampling"], asdict(sampling))):
        warnings.warn(
            f"bundle {folder} was not trained for these sampling settings: {differences};"
            " acceptance and quality may differ from its card",
            stacklevel=2,
        )
    calibration = card.get("calibration")
    if target is not None and calibration and calibration["bias"] is None:
        warnings.warn(
            f"the gate of bundle {folder} is closed, decoding with it is exact: `diversed"
            " calibrate` found no bias that is shown to lose at most"
            f" {calibration['max_quality_drop']:g}",
            stacklevel=2,
        )
    return Bundle(head=head, card=card, folder=folder)


def read_card(folder: str | Path) -> dict[str, Any]:
    """card.json of a bundle, with the entries that every use needs."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"bundle {folder} is not a folder; `diversed export` writes one")
    if missing := [name for name in FILES[:3] if not (folder / name).is_file()]:
        missing = " and no ".join(missing)
        raise FileNotFoundError(
            f"bundle {folder} has no {missing}; write it again with `diversed export`"
        )
    if (folder / "card.json").stat().st_size > LARGEST_CARD:
        raise ValueError(
            f"{folder / 'card.json'} is larger than {LARGEST_CARD} bytes: this is not a bundle's"
            " card"
        )
    try:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder / 'card.json'} is not readable json ({error}); export the bundle again"
        ) from None
    version = card.get("format") if isinstance(card, dict) else None
    if version != FORMAT:
        raise ValueError(
            f"bundle {folder} has format {version!r}, this version reads {FORMAT}; export it again"
        )
    if missing := [
        key for key in ("models", "head", "sampling") if not isinstance(card.get(key), dict)
    ]:
        raise ValueError(
            f"{folder / 'card.json'} lacks {', '.join(missing)}; export the bundle again"
        )
    for role in ("target", "draft"):
        model = card["models"].get(role)
        if not isinstance(model, dict) or not isinstance(model.get("name"), str):
            raise ValueError(
                f"{folder / 'card.json'} does not name the {role} model; export the bundle again"
            )
    return card


def check_sizes(described: dict[str, Any], path: Path) -> dict[str, int]:
    """The sizes of a gate that `path` describes; ValueError where no gate has them."""
    sizes = {name: described.get(name) for name in ("draft_hidden", "target_hidden", "width")}
    if bad := {k: v for k, v in sizes.items() if type(v) is not int or not 0 <= v <= LARGEST_SIZE}:
        raise ValueError(f"{path} states sizes that no gate has: {bad}; write it again")
    if described.get("features") not in KINDS:
        raise ValueError(
            f"{path}: features must be one of {KINDS}, got {described.get('features')!r}"
        )
    return sizes


def _read_head(folder: Path, card: dict[str, Any]) -> WeightHead:
    described = card["head"]
    sizes = check_sizes(described, folder / "card.json")
    with torch.device(
        "meta"
    ):  # shapes without memory: the file is compared with them before it is read
        head = WeightHead(described["features"], **sizes)
    if head.needs_logits and described.get("feature_names") != list(FEATURES):
        raise ValueError(
            f"bundle {folder} was trained on other features of the rows than this version computes:"
            f" {described.get('feature_names')} instead of {list(FEATURES)}; train the head again"
        )
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    head.load_state_dict(read_tensors(folder / "head.safetensors", wanted), assign=True)
    return head.eval().requires_grad_(False)


def read_tensors(path: Path, wanted: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """The float32 tensors of a file, after its header was found to state exactly the wanted shapes."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            found = {
                name: part.get_shape() for name, part in slices.items() if part.get_dtype() == "F32"
            }
            if found != wanted or len(slices) != len(wanted):
                raise ValueError(
                    f"{path} holds float32 tensors {found}, but card.json describes {wanted}"
                )
            tensors = {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); export the bundle again") from None
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"{path}: {', '.join(bad)} holds values that are not finite; train the head again"
        )
    return tensors


@torch.no_grad()
def logits_of(head: WeightHead, example: dict[str, torch.Tensor]) -> torch.Tensor:
    return head(
        logit_features(example["draft"], example["target"]) if head.needs_logits else None,
        example["hidden"] if head.needs_hidden else None,
    )


def _replay(folder: Path, head: WeightHead) -> None:
    """Refuse a bundle whose gate does not give again what it gave when it was exported."""
    size = head.draft_hidden + head.target_hidden if head.needs_hidden else 0
    wanted = {"draft": [6, 12], "target": [6, 12], "hidden": [6, size], "logit": [6]}
    example = read_tensors(folder / "example.safetensors", wanted)
    got, expected = logits_of(head, example), example["logit"]
    error = float((got - expected).abs().max())
    if not error <= TOLERANCE * (1 + float(expected.abs().max())):
        raise ValueError(
            f"bundle {folder} does not repeat its stored example: the gate's logit differs by"
            f" {error:.3g}; it is damaged or was written by another version: export it again"
        )


def _misfit(card: dict[str, Any], role: str, model: Any) -> str | None:
    """What is wrong with using `model` in this role, saying what was expected and what came; None
    if it fits.
    """
    if model is None:
        return None
    expected = card["models"][role]
    came = {"name": model.name, "hash": model.hash, "hidden_size": model.hidden_size}
    if all(expected.get(key) == came[key] for key in ("hash", "hidden_size")):
        return None
    return f"it was trained for the {role} {_describe(expected)}, but got {_describe(came)}"


def _describe(model: dict[str, Any]) -> str:
    return f"{model.get('name')} (hash {model.get('hash')}, hidden size {model.get('hidden_size')})"


def _differences(trained: dict[str, Any], used: dict[str, Any]) -> str:
    changed = {name: value for name, value in used.items() if trained.get(name, value) != value}
    return ", ".join(
        f"{name} is {value} (trained for {trained[name]})" for name, value in changed.items()
    )
