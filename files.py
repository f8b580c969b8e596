"""The bottom of the house: whole writes, locks, checksums, checks of numbers and names, machine and
versions.

Every other folder may import this file. It imports nothing of the package and needs only the
standard library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path

# The versions that decide the bytes of a text.
DECIDING = ("diversed", "torch", "transformers")
# The versions that decide how fast it is.
MEASURED = ("diversed", "torch", "triton", "transformers", "pytorch-lightning", "numpy")
FEW = 16
# More threads than this end in a crash of the OpenMP runtime instead of an error.
MOST_THREADS = 1024
# A request's seed is an int64.
SEEDS = -(1 << 63), (1 << 63) - 1
LAUNCHERS = (("WORLD_SIZE", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID"))


def write_whole(path: str | Path, data: bytes | str) -> Path:
    """Write `data` under a temporary name beside `path` and rename it; where that fails nothing is
    left behind.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def read_settings(path: Path, option: str = "--out") -> dict:
    """The JSON object in `path`; ValueError with one sentence where it holds something else.

    option: of the command, that chooses another place.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); choose another {option} or delete the folder"
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} is damaged (it holds no object); choose another {option} or delete the folder"
        )
    return values


@contextmanager
def exclusive(folder: str | Path, option: str = "--out") -> Iterator[Path]:
    """Hold `folder` (made if missing) for this process; BlockingIOError, a sentence, where another
    process holds it.

    option: of the command, that chooses another place.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"{folder} is a file, expected a folder to write to; choose another {option}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise BlockingIOError(
                f"another process (pid {holder}) is writing to {folder}; wait until it ends or"
                f" choose another {option}"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield folder


def sha256(path: str | Path) -> str:
    """Checksum of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def within(low: int, high: int | None = None, **numbers: int | None) -> None:
    """A sentence unless every number is whole and lies in low..high; None is an option that was
    left out.
    """
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral)):
            raise TypeError(f"`{name}` must be a whole number, got {number!r}")
        if number is not None and number < low:
            raise ValueError(f"`{name}` must be at least {low}, got {number}")
        if number is not None and high is not None and number > high:
            raise ValueError(f"`{name}` must be at most {high}, got {number}")


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them where they
    are few.
    """
    names = sorted(names)
    group = name.rpartition(".")[0]
    siblings = {
        other.removeprefix(group): other
        for other in names
        if group and other.startswith(f"{group}.")
    }
    known = siblings or {other: other for other in names}
    close = get_close_matches(
        name.removeprefix(group) if siblings else name, known, n=1, cutoff=0.5
    )
    if close:
        return f"; did you mean `{known[close[0]]}`?"
    if len(names) > FEW:
        return "; --help lists them all"
    return f"; it is one of {', '.join(names)}" if names else ""


def worker(num_shards: int | None, shard_index: int | None) -> tuple[int, int]:
    """(number of processes, index of this one), from the arguments or else from torchrun's or
    SLURM's environment.
    """
    if num_shards is None and shard_index is None:
        for size, rank in LAUNCHERS:
            if size in os.environ and rank in os.environ:
                num_shards, shard_index = int(os.environ[size]), int(os.environ[rank])
                break
    within(1, num_shards=num_shards)
    num_shards, shard_index = num_shards or 1, shard_index or 0
    if not 0 <= shard_index < num_shards:
        raise ValueError(
            f"`shard_index` must lie in 0..{num_shards - 1} for num_shards={num_shards}, got"
            f" {shard_index}"
        )
    return num_shards, shard_index


def machine() -> dict:
    """What the numbers were measured on: processor, cores this process may use, GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"processor": _processor(), "cores": f"{cores} cores", "system": platform.platform()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = f"{torch.get_num_threads()} threads"
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    """The processor's name; `platform` gives only its architecture on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def versions(packages: tuple[str, ...] = DECIDING) -> dict[str, str]:
    """Versions of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
