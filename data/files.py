"""Files that appear whole under their name, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path


def read_settings(path: Path, option: str = "--out") -> dict:
    """The JSON object in `path`; ValueError with one sentence where it holds something else.

    option: of the command, that chooses another place.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); choose another {option} or delete the folder") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged (it holds no object); choose another {option} or delete the folder")
    return values


def write_whole(path: str | Path, data: bytes | str) -> Path:
    """Write `data` under a temporary name beside `path` and rename it; where that fails nothing is left behind."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
