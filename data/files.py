"""Files that appear whole under their name, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


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
