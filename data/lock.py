"""One writer a folder: an advisory lock that dies with its process.

The lock is `flock` on FOLDER/.lock. A killed process leaves the file but not the lock, so nothing has to be cleaned up.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(folder: str | Path, option: str = "--out") -> Iterator[Path]:
    """Hold `folder` (made if missing) for this process; BlockingIOError, a sentence, where another process holds it.

    option: of the command, that chooses another place.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, expected a folder to write to; choose another {option}")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise BlockingIOError(
                f"another process (pid {holder}) is writing to {folder}; wait until it ends or choose another {option}"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield folder
