"""The bottom of the house: whole writes, locks, folders of results, progress, checksums, checks of
numbers and names, machine and versions.

Every other folder may import this file. It imports nothing of the package and needs only the
standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import inspect
import json
import os
import platform
import sys
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from typing import Any, TextIO

# The versions that decide the bytes of a text, and those that decide its score.
DECIDING = ("diversed", "torch", "transformers", "tokenizers")
SCORING = (*DECIDING, "nltk", "sacrebleu", "torchmetrics")
# Settings of an older format do not say all that decides the results.
SETTINGS_FORMAT = {"settings_format": 2}
# The versions that decide how fast it is.
MEASURED = ("diversed", "torch", "triton", "transformers", "pytorch-lightning", "numpy")
FEW = 16
# More threads than this end in a crash of the OpenMP runtime instead of an error.
MOST_THREADS = 1024
# A request's seed is an int64.
SEEDS = -(1 << 63), (1 << 63) - 1
SEAL = "crc32"  # the field of a line that holds its checksum
OWN = {".lock", ".turn"}  # what a folder holds besides results
LAUNCHERS = (("WORLD_SIZE", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID"))
EVERY = 20.0  # seconds between two lines of progress if there is no terminal
LONG = 80  # characters of a setting in a sentence


def write_whole(path: str | Path, data: bytes | str) -> Path:
    """Write `data` under a temporary name beside `path` and rename it; a failure leaves nothing.

    The temporary file is always a new one, this process's own: a link of its name is removed and
    not written through. A device or a pipe of that name is refused: a rename would take its place.
    """
    path = Path(path)
    check_regular(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(path)  # a full disk names no file
        raise
    return path


def exchange(first: Path, second: Path) -> None:
    """Swap two folders in one step, so that no moment is without either.

    Where the system cannot, `second` is missing between two renames.
    """
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        swap = _cannot
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap(here, os.fsencode(first), here, os.fsencode(second), both) == 0:
        return
    aside = first.with_name(f".{first.name}.old")
    os.replace(second, aside)
    os.replace(first, second)


def _cannot(*_: object) -> int:
    return -1


def check_regular(path: Path) -> None:
    """ValueError for what is no file: a pipe can be read once, a device for ever."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"{path} must be a file, it is {kind}; name a file")


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; ValueError if it names a field twice, as nobody can know which value is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the field {twice} stands there twice")
    return found


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in `path`; ValueError if it holds something else.

    remedy: what the user can do about a damaged file, the end of the sentence.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged (it holds no object); {remedy}")
    stated = values.pop(SEAL, None)
    if stated is not None and stated != zlib.crc32(json.dumps(values).encode()):
        warnings.warn(
            f"{path} was changed after it was written (its checksum is not that of its contents);"
            " what it says may be wrong",
            stacklevel=2,
        )
    return values


def write_object(path: Path, values: dict[str, Any]) -> Path:
    """Write a JSON object with the CRC-32 of its contents, which `read_object` looks at."""
    seal = zlib.crc32(json.dumps(values).encode())
    return write_whole(path, json.dumps(values | {SEAL: seal}, indent=2) + "\n")


def sealed(record: dict[str, Any], run: str = "") -> str:
    """A line of JSON that ends with the CRC-32 of all before it, so that `unsealed` notices a
    changed letter, and a line of another run.
    """
    text = json.dumps(record)
    return f'{text[:-1]}, "{SEAL}": {zlib.crc32((run + text).encode())}}}\n'


def unsealed(line: str | bytes, run: str = "") -> dict[str, Any]:
    """The object on a line, without its checksum; empty if there is none, if it was changed, or if
    it is of another run. A line without a checksum is of an older version.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    stated = found.pop(SEAL, None)
    if stated is not None and stated != zlib.crc32((run + json.dumps(found)).encode()):
        return {}
    return found


def read_settings(path: Path, option: str = "--out") -> dict[str, Any]:
    """The settings in `path`; ValueError if it holds something else.

    option: of the command, that chooses another place.
    """
    return read_object(path, f"choose another {option} or delete the folder")


@contextmanager
def exclusive(folder: str | Path, option: str = "--out", shared: bool = False) -> Iterator[Path]:
    """Hold `folder` (made if missing) for this process; BlockingIOError if another one holds it.

    option: of the command, that chooses another place.
    shared: hold it together with other processes that share it, and against all others.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"{folder} is a file, expected a folder to write to; choose another {option}"
        )
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with _nothing_left(made), _open_lock(folder / ".lock") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read().strip() or "unknown"
            raise BlockingIOError(
                f"another process (pid {holder}) is writing to {folder}; wait until it ends or"
                f" choose another {option}"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        if not shared:
            _tidy(folder)
        yield folder


@contextmanager
def _nothing_left(made: list[Path]) -> Iterator[None]:
    """Take away these folders, the innermost first, if what fails in it wrote nothing to them."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty, or gone
            for number, folder in enumerate(made):
                if number == 0 and {path.name for path in folder.iterdir()} <= OWN:
                    for name in OWN:
                        (folder / name).unlink(missing_ok=True)
                folder.rmdir()
        raise


def _tidy(folder: Path) -> None:
    """Delete what killed processes have left half written."""
    for path in folder.glob(".*.part"):
        process = path.name.split(".")[-2]
        if process.isdecimal() and path.is_file() and not Path(f"/proc/{process}").exists():
            path.unlink(missing_ok=True)


def _open_lock(path: Path) -> TextIO:
    return os.fdopen(open_own(path, os.O_RDWR), "r+")


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that is written in place, made if missing; a link is refused, because
    its other end would be written.
    """
    refusal = f"{path} is a link, expected a file of its own; delete it"
    if not path.is_symlink():
        check_regular(path)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(refusal) from None
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise ValueError(refusal)
    return descriptor


@dataclass(frozen=True)
class Folder:
    """A folder of results that is filled by one process or by several, and continued after a kill.

    The file `name` in it holds all that decides the results. The first process writes it; every
    later one must come with the same settings, however many processes there are.

    path: the folder, made if missing; name: of the file of settings.
    option: of the command, that chooses another place.
    results: what the user knows the results by, if that is a file beside the folder.
    num_shards, shard_index: number of processes that share the work, and which of them this is.
    """

    path: Path
    name: str = "settings.json"
    option: str = "--out"
    results: Path | None = None
    num_shards: int = 1
    shard_index: int = 0

    @property
    def share(self) -> str:
        """This process among all of them, for the names of its files."""
        return f"{self.shard_index}-of-{self.num_shards}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder against every process but those that share its work."""
        alone = self.num_shards == 1
        with exclusive(self.path, self.option, shared=not alone):
            worker = self.path if alone else self.path / f".worker-{self.share}"
            if alone:
                yield
                return
            with exclusive(worker, self.option):
                yield

    def begun(self) -> dict[str, Any]:
        """The settings that the folder was begun with, empty if it was not begun."""
        path = self.path / self.name
        return read_settings(path, self.option) if path.is_file() else {}

    def begin(
        self, settings: dict[str, Any], state: dict[str, Any] | None = None, anew: bool = False
    ) -> bool:
        """Write the settings down, or refuse a folder that was begun with others. Whether it was
        begun before. Call it while the folder is held.

        state: entries that stand in the file beside the settings and may change later.
        anew: whether nothing is there yet that other settings would spoil.
        """
        with self.turn():
            before = {} if anew else self.begun()
            if before:
                self.refuse_others(before, settings)
            else:
                values = {**(state or {}), **SETTINGS_FORMAT, **settings}
                write_object(self.path / self.name, values)
        return bool(before)

    def refuse_others(self, before: dict[str, Any], settings: dict[str, Any]) -> None:
        """ValueError that names the first of `settings` that differs from those of `before`."""
        named = self.results or self.path
        place = f"{self.results} and {self.path}" if self.results else "the folder"
        anew = f"choose another {self.option} or delete {place}"
        if not before.keys() & SETTINGS_FORMAT:
            raise ValueError(
                f"{named} was begun by an older version, which did not write down all that decides"
                f" the results: what is finished there can be read, but not continued; {anew}"
            )
        now = json.loads(json.dumps(SETTINGS_FORMAT | settings))
        was = json.loads(json.dumps({name: before.get(name) for name in now}))
        if was == now:
            return
        name, old, new = _difference(was, now)
        begun = f"with {name} {_short(old)}"
        again = "give the same again to continue it, "
        if name.partition(".")[0] not in before:
            begun, again = f"without {name}", ""
        raise ValueError(f"{named} was begun {begun}, now it is {_short(new)}; {again}{anew}")

    def share_of(self, units: Sequence[range]) -> list[range]:
        """The units that this process does, perhaps none."""
        return list(units[self.shard_index :: self.num_shards])

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let one process after another look at what all of them have written, and write."""
        if self.num_shards == 1:
            yield
            return
        with _open_lock(self.path / ".turn") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _difference(was: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any]:
    """(name, before, now) of the first entry that differs, inner ones as `sampling.top_k`."""
    name = next(name for name in {**was, **now} if was.get(name, ...) != now.get(name, ...))
    old, new = was.get(name), now.get(name)
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return name, old, new
    inner, old, new = _difference(old, new)
    return f"{name}.{inner}", old, new


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."


def cut_units(total: int, size: int) -> list[range]:
    """0 .. total - 1 in units of `size`, the last perhaps smaller."""
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def duration(seconds: float) -> str:
    """Seconds as a person says them, such as 2 h 5 min, 3 min 12 s, 7 s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class Progress:
    """One line that says how far a command is, on standard error: rewritten on a terminal, a new
    one every 20 seconds elsewhere.

    what: the command's word for its work; total: of what is counted; done: before this run.
    """

    def __init__(self, what: str, total: int, done: int = 0):
        self.what, self.total, self.before, self.done = what, total, done, done
        self.tokens = 0
        self.terminal = sys.stderr.isatty()
        self.began = self.said = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def add(self, count: int = 1, tokens: int = 0, what: str | None = None) -> None:
        """So much more is done, and so many tokens were made."""
        self.done += count
        self.tokens += tokens
        self.what = what or self.what
        now = time.monotonic()
        if now - self.said < (0.1 if self.terminal else EVERY):
            return
        self.said = now
        start, end = ("\r\x1b[K", "") if self.terminal else ("", "\n")
        print(f"{start}{self.line(now)}", end=end, file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return max(time.monotonic() - self.began, 1e-9)

    @property
    def rate(self) -> str:
        """Tokens per second of this run."""
        return f"{self.tokens / self.seconds:,.0f} tokens/s"

    def line(self, now: float) -> str:
        """What is done, how fast it went and how long the rest will take."""
        parts = [f"{self.what} {self.done}/{self.total}"]
        if self.tokens:
            parts.append(self.rate)
        if self.done > self.before:
            each = (now - self.began) / (self.done - self.before)
            parts.append(f"{(self.total - self.done) * each:,.0f} s left")
        return ", ".join(parts)


def sha256(path: str | Path) -> str:
    """Checksum of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_sha256(thing: Any) -> str | None:
    """Checksum of the file in which a class, a function or a module is written, None if there is
    none.
    """
    with suppress(TypeError):
        if path := inspect.getsourcefile(thing):
            return sha256(path) if os.path.isfile(path) else None
    return None


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
    """The end of a sentence about an unknown name: the nearest known one, or all of them if they
    are few.
    """
    names = sorted(names)
    if hint := close_to(name, names):
        return hint
    if len(names) > FEW:
        return "; --help lists them all"
    return f"; it is one of {', '.join(names)}" if names else ""


def close_to(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or nothing.

    Of dotted names the last part counts if the parts before it are known.
    """
    names = list(names)
    group = name.rpartition(".")[0] + "."
    siblings = [other for other in names if group != "." and other.startswith(group)]
    known = siblings or names
    prefix = group if siblings else ""
    ends = {other.removeprefix(prefix): other for other in known}
    close = get_close_matches(name.removeprefix(prefix), ends, n=1, cutoff=0.5)
    return f"; did you mean `{ends[close[0]]}`?" if close else ""


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
