"""What a finished training leaves in its folder: head.safetensors, and train.json, which says of
which traces and settings it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..fields import OBJECT, TEXT, optional, read_checked, whole
from ..runtime.bundle import (
    HEAD,
    HEAD_FIELDS,
    HeadCard,
    head_sha256,
    known_fields,
    read_head,
    refuse_other_rows,
)
from ..verifier.head import WeightHead

RECORD = "train.json"
FIELDS = HEAD_FIELDS | {
    "manifest.target": OBJECT,
    "manifest.draft": OBJECT,
    "manifest.tokenizer": TEXT,
    "manifest.vocab": whole(1),
    "manifest.sampling": OBJECT,
    "manifest.task": TEXT,
    "manifest.relaxation": TEXT,
    "traces_sha256": TEXT,
    "settings": optional(OBJECT),
}


def read_trained(folder: str | Path) -> tuple[dict[str, Any], WeightHead]:
    """train.json and the head of a finished training."""
    folder = Path(folder)
    if missing := [name for name in (RECORD, HEAD) if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} has no {' and no '.join(missing)}: it is not a finished `diversed train` run"
        )
    record = read_checked(folder / RECORD, FIELDS, "train again")
    refuse_other_head(folder, record)
    described, manifest = known_fields(HeadCard, record["head"]), record["manifest"]
    if manifest.get("format", 1) == 1:  # that of the traces
        refuse_other_rows(str(folder), described.features, manifest["sampling"])
    return record, read_head(folder, described, f"{RECORD} describes", "train again")


def refuse_other_head(folder: Path, record: dict[str, Any]) -> None:
    """ValueError unless the head in a folder is the one that train.json is about."""
    if record.get("head_sha256") != head_sha256(folder):
        raise ValueError(
            f"{folder / HEAD} is not the head that {RECORD} describes; delete both files and the"
            " same `diversed train` writes them again"
        )
