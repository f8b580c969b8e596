"""What a finished training leaves in its folder: head.safetensors, and train.json, which says of
which traces and settings it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..files import read_object
from ..runtime.bundle import HEAD, HeadCard, read_head
from ..verifier.head import WeightHead

RECORD = "train.json"
MANIFEST = ("target", "draft", "tokenizer", "vocab", "sampling", "task", "relaxation")


def read_trained(folder: str | Path) -> tuple[dict[str, Any], WeightHead]:
    """train.json and the head of a finished training."""
    folder = Path(folder)
    if missing := [name for name in (RECORD, HEAD) if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} has no {' and no '.join(missing)}: it is not a finished `diversed train` run"
        )
    record, shape = _read_record(folder / RECORD)
    return record, read_head(folder, shape, f"{RECORD} describes", "train again")


def _read_record(path: Path) -> tuple[dict[str, Any], HeadCard]:
    record = read_object(path, "train again")
    lacking = [name for name in ("head", "manifest") if not isinstance(record.get(name), dict)]
    if not lacking:
        lacking = [name for name in MANIFEST if name not in record["manifest"]]
        lacking += [] if isinstance(record.get("settings", {}), dict) else ["settings"]
        lacking += [] if "traces_sha256" in record else ["traces_sha256"]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}; train again")
    return record, HeadCard.from_json(record["head"], path)
