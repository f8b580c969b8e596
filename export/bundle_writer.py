"""Writing a bundle; `runtime.bundle` says what it holds and reads it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ..files import exchange, write_object, write_whole
from ..runtime.bundle import CARD, EXAMPLE, FILES, Card, load_bundle, logits_of, write_head
from ..runtime.shape_network import FILES as SELECTOR
from ..runtime.shape_network import read_selector_card
from ..verifier.head import WeightHead
from ..verifier.token_features import COUNT
from .card import model_card, with_frontier
from .repository import add_custom_generate


def write_bundle(
    folder: str | Path, head: WeightHead, card: Card, selector: str | Path | None = None
) -> Path:
    """Write a bundle beside `folder` and move it into place as a whole; an older bundle there is
    replaced.

    selector: folder of `diversed select`, whose network is copied into the bundle.
    """
    folder = Path(folder)
    if folder.exists() and not _ours(folder):
        raise FileExistsError(
            f"{folder} exists and is not a bundle; give another folder to write the bundle to"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as room:
        new = Path(room) / "bundle"
        new.mkdir()
        head = head.to("cpu", torch.float32).eval()
        write_head(new, head)
        write_whole(new / EXAMPLE, save(_example(head)))
        _write_card(new, card)
        if selector is not None:
            read_selector_card(Path(selector))
            for name in SELECTOR:
                (new / name).write_bytes((Path(selector) / name).read_bytes())
        load_bundle(new)
        if folder.exists():
            exchange(new, folder)
        else:
            os.replace(new, folder)
    return folder


def _ours(folder: Path) -> bool:
    """Whether a folder holds nothing but a bundle, and what a process leaves that was killed while
    it wrote one.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
    strange = names - {*FILES, *SELECTOR, "custom_generate"}
    return all(name.startswith(".") and name.endswith(".part") for name in strange)


def add_frontier(folder: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write measured figures, rows of `eval.summary.summarise`, into a bundle's card and README."""
    bundle = load_bundle(folder)
    _write_card(bundle.folder, with_frontier(bundle.card, rows))


def _write_card(folder: Path, card: Card) -> None:
    """Write card.json and README.md, each at once, and custom_generate/, which holds the bundle's
    files once more.
    """
    write_object(folder / CARD, card.to_json())
    write_whole(folder / "README.md", model_card(card))
    if card.custom_generate:
        add_custom_generate(folder)


def _example(head: WeightHead, count: int = 6, vocab: int = 12) -> dict[str, torch.Tensor]:
    """Rows of two imagined models, hidden states around those of training, and the head's logit
    [count] there.
    """
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, count, vocab, generator=generator).mul(2).softmax(-1)
    size = head.draft_hidden + head.target_hidden if head.needs_hidden else 0
    hidden = head.mean[:size] + head.std[:size] * torch.randn(count, size, generator=generator)
    example = {"draft": draft.contiguous(), "target": target.contiguous(), "hidden": hidden}
    if head.needs_tokens:
        example["tokens"] = torch.randint(2, (count, COUNT), generator=generator).float()
    return example | {"logit": logits_of(head, example)}
