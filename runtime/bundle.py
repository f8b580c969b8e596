"""A bundle: one trained head in a folder that can be moved, checked and refused.

    head.safetensors     the head's tensors, float32
    card.json            what it was trained on and for: models, hashes, features, sampling, draft
                         length, figures
    example.safetensors  a few rows of both models and the head's logit there: replayed at every
                         loading
    README.md            the card for people, generated from card.json
    selector.json, selector.safetensors   what chooses the tree to draw (`runtime.shape_network`);
                                          optional

A bundle comes from strangers. It is safetensors and json only, file names are fixed, and shapes are
compared with the card before any tensor is read. `export.bundle_writer` writes bundles.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..fields import FLAG, OBJECT, TEXT, Field, fault, list_of, number, one_of, optional, whole
from ..files import read_object, sha256, write_whole
from ..verifier.head import FEATURES, KINDS, LARGEST_SIZE, WeightHead, logit_features
from ..verifier.token_features import COUNT
from .sampling import Sampling, is_neutral

FORMAT = 2  # 1: a head was shown rows as sampled, not what the models believe
HEAD = "head.safetensors"
CARD, EXAMPLE = "card.json", "example.safetensors"
FILES = (CARD, HEAD, EXAMPLE, "README.md")
ROLES = ("target", "draft")
AGAIN = "export the bundle again"
LARGEST_CARD = 16 << 20  # bytes
# A head's logit is a float32 sum of up to some ten thousand terms; another machine's order of
# summation moves it by less than 1e-4 of its size, a changed feature or a wrong tensor by far more
# than this.
TOLERANCE = 1e-3
SHOWN = 3  # figures in a warning
SIZES = ("draft_hidden", "target_hidden", "width")
HEAD_FIELDS = {f"head.{name}": whole(0, LARGEST_SIZE) for name in SIZES}
HEAD_FIELDS["head.features"] = one_of(*KINDS)
HEAD_FIELDS["head.offset"] = optional(TEXT)
# Of card.json; what is optional an older card may lack.
FIELDS = HEAD_FIELDS | {
    "models.target.name": TEXT,
    "models.draft.name": TEXT,
    "sampling": OBJECT,
    "head.blend": optional(one_of("probabilities", "logits")),
    "tokenizer": optional(TEXT),
    "token_table": optional(TEXT),
    "vocab": optional(whole(0)),
    "bias": optional(number()),
    "draft_length": optional(whole(0)),
    "task": optional(TEXT),
    "metric": optional(TEXT),
    "training": optional(OBJECT),
    "frontier": optional(list_of(OBJECT.good, "objects")),
    "versions": optional(OBJECT),
    "any_pair": optional(FLAG),
    "custom_generate": optional(FLAG),
    "calibration": Field(lambda value: isinstance(value, dict | None), "an object or null", False),
}


@dataclass(frozen=True)
class HeadCard:
    """What a head is built from and how it is used, see `WeightHead` and `Relaxation.blend`."""

    features: str
    draft_hidden: int
    target_hidden: int
    width: int
    feature_names: list[str] = field(default_factory=list)
    blend: str = "probabilities"
    offset: str = ""

    @classmethod
    def of(cls, head: WeightHead, blend: str = "probabilities") -> HeadCard:
        names = list(FEATURES) if head.needs_logits else []
        sizes = (getattr(head, name) for name in SIZES)
        return cls(head.features, *sizes, names, blend, head.offset)

    def head(self) -> WeightHead:
        sizes = self.draft_hidden, self.target_hidden, self.width
        return WeightHead(self.features, *sizes, self.offset)


@dataclass(frozen=True, kw_only=True)
class Card:
    """card.json: what a head was trained on and for.

    models:       "target" and "draft" -> name, hash and hidden_size of the model.
    vocab:        tokens that both models share; tokenizer: its hash.
    token_table:  checksum of the table of token classes, "" if the head does not read them.
    bias:         part of the head's weights, added to its logit at export or by `calibrate`.
    sampling:     fields of `Sampling` in training; draft_length: tokens drafted a step.
    training:     checksum of the traces, their relaxation, settings and figures of the training.
    frontier:     figures that `diversed eval` measured, a row for each method and relaxation.
    any_pair:     the head may be used with models that it was not trained for.
    custom_generate: the folder is also a repository for `generate` of transformers.
    calibration:  how `diversed calibrate` chose the bias, None if it did not.
    """

    models: dict[str, dict[str, Any]]
    tokenizer: str = ""
    vocab: int = 0
    token_table: str = ""
    head: HeadCard
    bias: float = 0.0
    sampling: dict[str, Any]
    draft_length: int = 0
    task: str = ""
    metric: str = "score"
    training: dict[str, Any] = field(default_factory=dict)
    frontier: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    any_pair: bool = False
    custom_generate: bool = False
    calibration: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any], folder: Path) -> Card:
        """The card of the bundle in `folder`; ValueError if it lacks what every use needs."""
        if (version := values.get("format")) not in (1, FORMAT):
            raise ValueError(
                f"bundle {folder} has format {version!r}, this version reads {FORMAT}; export it"
                " again"
            )
        if found := fault(values, FIELDS):
            raise ValueError(f"{folder / CARD} is damaged ({found}); {AGAIN}")
        card = known_fields(cls, values | {"head": known_fields(HeadCard, values["head"])})
        if version == 1:
            card = card._read_anew(folder)
        reads = "logits" in KINDS[card.head.features] or card.head.offset
        if reads and card.head.feature_names != list(FEATURES):
            raise ValueError(
                f"bundle {folder} was trained on other features of the rows than this version"
                f" computes: {card.head.feature_names} instead of {list(FEATURES)}; train the head"
                " again"
            )
        return card

    def _read_anew(self, folder: Path) -> Card:
        """A card of format 1, without the figures that this version would not measure again."""
        refuse_other_rows(f"bundle {folder}", self.head.features, self.sampling)
        neutral = is_neutral(self.sampling)
        kept = [row for row in self.frontier if neutral and row.get("temperature", 1) == 1]
        return replace(self, frontier=kept)

    def to_json(self) -> dict[str, Any]:
        """The values of card.json; `features` explains the numbers that the head reads."""
        features = dict(FEATURES) if self.head.feature_names else {}
        return {"format": FORMAT, **asdict(self), "features": features}

    def __getitem__(self, key: str) -> Any:
        """An entry of card.json."""
        return self.to_json()[key]

    def name(self, role: str) -> str:
        """Name of the "target" or "draft" model."""
        return self.models[role]["name"]


def refuse_other_rows(name: str, features: str, sampling: dict[str, Any]) -> None:
    """ValueError if a head of before format 2, trained at this sampling, reads numbers that are
    others now: no warning would make its weights right.
    """
    if "logits" in KINDS[features] and not is_neutral(sampling):
        raise ValueError(
            f"the head of {name} was trained on rows at {sampling}, and this version shows a head"
            " softmax(logits), which are other numbers; gather and train again"
        )


def known_fields(kind: type, values: dict[str, Any]) -> Any:
    """The dataclass with those of the values that it has a field for."""
    return kind(**{one.name: values[one.name] for one in fields(kind) if one.name in values})


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle: the head, its card and the folder it came from."""

    head: WeightHead
    card: Card
    folder: Path


def load_bundle(
    folder: str | Path,
    target: Any = None,
    draft: Any = None,
    sampling: Sampling | None = None,
    any_pair: bool = False,
) -> Bundle:
    """Read a bundle, replay its example, and check that it fits the models and the sampling it is
    to be used with.

    folder: the bundle.
    target, draft: the models (`runtime.forward.Model`) it will judge, or None to leave that
        unchecked.
    sampling: the `Sampling` it will be used at, or None; another one than in training only warns.
    any_pair: accept models it was not trained for, with a warning; only heads that read no hidden
        states can be moved. A bundle that was exported with --any_pair accepts them by
        itself.
    """
    folder = Path(folder)
    card = read_card(folder)
    head = read_head(folder, card.head)
    _replay(folder, head)
    misfits = _misfits(card, {"target": target, "draft": draft})
    any_pair = any_pair or card.any_pair
    if misfits and any_pair and not head.needs_hidden:
        warnings.warn(
            f"bundle {folder} is used with models it was not trained for: {misfits}", stacklevel=2
        )
    elif misfits:
        hint = "train a head for this pair"
        if any_pair:
            hint += " (any_pair=True is only for heads that read no hidden states)"
        raise ValueError(f"bundle {folder} does not fit these models: {misfits}; {hint}")
    if sampling is not None and (unmeasured := _unmeasured(card, sampling)):
        warnings.warn(f"bundle {folder} {unmeasured}", stacklevel=2)
    calibration = card.calibration
    if target is not None and calibration and calibration["bias"] is None:
        warnings.warn(
            f"the head of bundle {folder} is closed, decoding with it is exact: `diversed"
            " calibrate` found no bias that is shown to lose at most"
            f" {calibration.get('max_quality_drop')}",
            stacklevel=2,
        )
    return Bundle(head=head, card=card, folder=folder)


def read_card(folder: str | Path) -> Card:
    """card.json of a bundle, with the entries that every use needs."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"bundle {folder} is not a folder; `diversed export` writes one")
    if missing := [name for name in FILES[:3] if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"bundle {folder} has no {' and no '.join(missing)}; write it again with `diversed"
            " export`"
        )
    path = folder / CARD
    if path.stat().st_size > LARGEST_CARD:
        raise ValueError(f"{path} is larger than {LARGEST_CARD} bytes: this is not a bundle's card")
    return Card.from_json(read_object(path, AGAIN), folder)


def read_head(
    folder: Path, card: HeadCard, wish: str = "card.json describes", remedy: str = AGAIN
) -> WeightHead:
    """The head in a folder, without gradients; ValueError if it is not the one of `card`.

    wish, remedy: who asks for that head, and what to do if the file is damaged; for the sentences.
    """
    with torch.device("meta"):  # shapes without memory: the file is compared with them first
        head = card.head()
    wanted = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    head.load_state_dict(read_tensors(folder / HEAD, wanted, wish, remedy), assign=True)
    return head.eval().requires_grad_(False)


def write_head(folder: Path, head: WeightHead) -> Path:
    """Write the head's tensors; equal heads make equal bytes."""
    # Not save_file: it hides a full disk in an error of its own and makes files that only their
    # owner can read.
    return write_whole(folder / HEAD, _head_bytes(head))


def _head_bytes(head: WeightHead) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in head.state_dict().items()})


def sha256_of_head(head: WeightHead) -> str:
    """The checksum of the file that `write_head` makes of a head on the CPU in float32."""
    return hashlib.sha256(_head_bytes(head)).hexdigest()


def head_sha256(folder: Path | None) -> str | None:
    """Checksum of the head in a folder; None if there is none."""
    path = folder and folder / HEAD
    return sha256(path) if path and path.is_file() else None


def add_bias(head: WeightHead, bias: float) -> None:
    """Add `bias` to the head's logit for good."""
    list(head.net.modules())[-1].bias.data += bias


def read_tensors(
    path: Path, wanted: dict[str, list[int]], wish: str = "card.json describes", remedy: str = AGAIN
) -> dict[str, Tensor]:
    """The float32 tensors of a file, after its header was found to state exactly the wanted
    shapes.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            found = {
                name: part.get_shape() for name, part in slices.items() if part.get_dtype() == "F32"
            }
            if found != wanted or len(slices) != len(wanted):
                raise ValueError(f"{path} holds float32 tensors {found}, but {wish} {wanted}")
            tensors = {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from None
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(
            f"{path}: {', '.join(bad)} holds values that are not finite; train the head again"
        )
    return tensors


@torch.no_grad()
def logits_of(head: WeightHead, example: dict[str, Tensor]) -> Tensor:
    """[X] the head's logit at the rows and hidden states of an example."""
    return head(
        logit_features(example["draft"], example["target"]) if head.needs_logits else None,
        example["hidden"] if head.needs_hidden else None,
        example["tokens"] if head.needs_tokens else None,
    )


def _replay(folder: Path, head: WeightHead) -> None:
    """Refuse a bundle whose head does not give again what it gave when it was exported."""
    size = head.draft_hidden + head.target_hidden if head.needs_hidden else 0
    wanted = {"draft": [6, 12], "target": [6, 12], "hidden": [6, size], "logit": [6]}
    if head.needs_tokens:
        wanted["tokens"] = [6, COUNT]
    example = read_tensors(folder / EXAMPLE, wanted)
    got, expected = logits_of(head, example), example["logit"]
    error = float((got - expected).abs().max())
    if not error <= TOLERANCE * (1 + float(expected.abs().max())):
        raise ValueError(
            f"bundle {folder} does not repeat its stored example: the head's logit differs by"
            f" {error:.3g}; it is damaged or was written by another version: export it again"
        )


def _misfits(card: Card, models: dict[str, Any]) -> str:
    """What is wrong with using the models in their roles: expected and what came; "" if they
    fit.
    """
    found = []
    for role, model in models.items():
        expected = card.models[role]
        came = {name: getattr(model, name, None) for name in ("name", "hash", "hidden_size")}
        fits = all(expected.get(name) == came[name] for name in ("hash", "hidden_size"))
        if model is not None and not fits:
            words = f"{_describe(expected)}, but got {_describe(came)}"
            found.append(f"it was trained for the {role} {words}")
    return "; ".join(found)


def _describe(model: dict[str, Any]) -> str:
    return f"{model.get('name')} (hash {model.get('hash')}, hidden size {model.get('hidden_size')})"


def _unmeasured(card: Card, sampling: Sampling) -> str:
    """What to say of a bundle at a sampling that its figures are not for, with the figures that it
    has; "" if they are for it.

    Temperature and filters leave a head's weights as they are; what these cost is another matter.
    """
    used, trained = asdict(sampling), card.sampling
    measured = {row.get("temperature", 1) for row in card.frontier} or {trained.get("temperature")}
    changed = [
        f"{name} {value:g}"
        for name, value in used.items()
        if (value not in measured if name == "temperature" else trained.get(name, value) != value)
    ]
    if not changed:
        return ""
    nearest = min(measured, key=lambda at: abs((at or 0) - sampling.temperature))
    figures = [
        f"{row['relaxation']} scores {row['score']:.3f} at {row['tokens_per_call']:.2f} tokens a"
        " call"
        for row in card.frontier
        if row.get("temperature", 1) == nearest
    ]
    known = f"it was trained at temperature {nearest} and has no figures"
    if figures:
        known = f"its figures are for temperature {nearest:g}: {', '.join(figures[:SHOWN])}"
    return (
        f"was not measured at {', '.join(changed)}; {known}. Its weights are the same at every"
        " temperature, what they cost is not"
    )
