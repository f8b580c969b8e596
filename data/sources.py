"""Rows with named fields, from local files or the hub, and the splits they fall into.

Local files are .jsonl or .json (an array); both may be compressed, as .gz. A folder may hold one
file a split (train.jsonl, validation.jsonl, test.jsonl). If it holds a single file, of any name,
that is the training file. A split without a file of its own is carved from the training file.
Carving looks at a row's text only: u = sha256(text) / 2^256; u < .1 is test, .1 <= u < .2 is
validation, the rest is train. So splits never overlap, equal texts land in the same split, and no
seed, limit or added row moves a row.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import close_to

SPLITS = ("train", "validation", "test")
STEMS = {name: name for name in SPLITS} | {name: "validation" for name in ("valid", "val", "dev")}
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
CARVED = {"test": (0.0, 0.1), "validation": (0.1, 0.2)}  # u in [low, high)


class Blank(ValueError):
    """A row without text, or without the reference that the score needs."""


@dataclass(frozen=True)
class Source:
    """Rows and where they came from.

    name:   the file, or repository and split.
    rows:   a list or datasets.Dataset of dicts.
    place:  row index -> words such as "line 7 of train.jsonl".
    carved: the splits besides train that are carved from these rows; empty if all rows are of
        the split asked for.
    local:  False for the hub, whose rows nobody here can mend.
    """

    name: str
    rows: Sequence[dict]
    place: Callable[[int], str]
    carved: tuple[str, ...]
    local: bool

    def split_of(self, text: str) -> str:
        """The split of a row with this text, if something is carved."""
        u = (
            int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")
            / 2**256
        )
        return next(
            (split for split in self.carved if CARVED[split][0] <= u < CARVED[split][1]), "train"
        )


def local_source(path: Path, split: str, whole: bool = False) -> Source:
    """The rows of the split's file, or of the training file if it has none; `whole` carves
    nothing out of them.
    """
    files = split_files(path)
    if split not in files and "train" not in files:
        holds = ", ".join(file.name for file in files.values())
        raise FileNotFoundError(
            f"{path} must hold a {split} file, or a train file to carve it from; it holds {holds}"
        )
    file = files.get(split) or files["train"]
    places, rows = zip(*read_rows(file), strict=True)
    return Source(str(file), rows, places.__getitem__, _carved(split, files, whole), local=True)


def hub_source(
    repository: str,
    configuration: str | None,
    splits: Collection[str],
    split: str,
    whole: bool = False,
):
    """The same from the hub; `splits` are those the repository has, and a lone one stands as the
    training split.
    """
    import datasets

    stored = split if split in splits else "train"
    if len(splits) == 1:
        (stored,), splits = splits, ("train",)
    try:
        rows = datasets.load_dataset(repository, configuration, split=stored)
    except Exception as error:  # the hub's client raises errors of four libraries
        reason = (str(error).strip() or "no reason given").split("\n")[0][:200]
        raise OSError(
            f"cannot load {repository} from the hub ({type(error).__name__}: {reason}); check the"
            " network or give local files with `data.path`"
        ) from error
    name = f"{repository} {stored}"
    return Source(
        name, rows, lambda i: f"row {i} of {name}", _carved(split, splits, whole), local=False
    )


def _carved(split: str, stored: Collection[str], whole: bool) -> tuple[str, ...]:
    if whole or (split in stored and split != "train"):
        return ()
    return tuple(name for name in CARVED if name not in stored)


def split_files(path: Path) -> dict[str, Path]:
    """Split -> its own file; a lone file is {"train": file}."""
    if not path.exists():
        hint = close_to(path.name, [other.name for other in path.parent.glob("*")])
        raise FileNotFoundError(
            f"`data.path` must be a file or a folder, {path} does not exist{hint}"
        )
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"`data.path` must end in one of {', '.join(SUFFIXES)}, got {path}")
        return {"train": path}
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(SUFFIXES))
    named = [(STEMS[p.name.split(".")[0]], p) for p in files if p.name.split(".")[0] in STEMS]
    if len(files) == 1:
        return {"train": files[0]}
    if named and len(dict(named)) == len(named):
        return dict(named)
    listing = ", ".join(p.name for p in files) or "nothing of the kind"
    raise ValueError(
        f"`data.path` must be a folder with one {'/'.join(SUFFIXES[:2])} file a split (train,"
        f" validation, test) or one file in all, {path} holds {listing}; name one file"
    )


def read_rows(path: Path) -> list[tuple[str, dict]]:
    """(place, row) of every row; a place reads "line 7 of a.jsonl" or "item 7 of a.json"."""
    text = _text(path)
    if text.lstrip().startswith("["):
        rows = [(f"item {i} of {path.name}", row) for i, row in enumerate(_parsed(text, path), 1)]
    else:
        # Not splitlines: JSON strings may hold U+2028 and other characters that it would split at.
        lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [(f"line {i} of {path.name}", _parsed(line, path, i)) for i, line in lines]
    if not rows:
        raise ValueError(f"{path} is empty; expected one JSON object a line")
    for place, row in rows:
        if not isinstance(row, dict):
            raise ValueError(
                f"{place} must be an object with named fields, got {json.dumps(row)[:60]}"
            )
    return rows


def _text(path: Path) -> str:
    try:
        data = (
            gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzip file: {error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} must be UTF-8, line {line} is not; convert it, for example with iconv"
        ) from None


def _parsed(text: str, path: Path, line: int | None = None):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        # Besides what is not JSON: a number of more digits than Python reads, brackets deeper than
        # its stack.
        line = line or getattr(error, "lineno", 1)
        reason = (
            "nested too deeply"
            if isinstance(error, RecursionError)
            else getattr(error, "msg", str(error))
        )
        raise ValueError(
            f"line {line} of {path} must be JSON: {reason}; it begins {text.lstrip()[:40]!r}"
        ) from None


def text_of(row: dict, field: str, place: str, option: str = "") -> str:
    """The text in a field of a row; ValueError, or Blank if it is null.

    field: a dot reaches inside lists and objects: "translation.de", "turns.0".
    option: that names another field.
    """
    try:
        value = _lookup(row, field)
    except LookupError:
        other = f"; name another with `{option}`" if option else ""
        listing = ", ".join(map(str, row)) or "no field"
        raise ValueError(
            f"{place} has no field {field}, it has {listing}{close_to(field, row) or other}"
        ) from None
    if value is None:
        raise Blank(
            f"{place} must hold text in the field {field}, got null; fill it or delete the row"
        )
    if not isinstance(value, str | int | float):
        inside = next(iter(value if isinstance(value, dict) else map(str, range(len(value)))), None)
        hint = f"; name what is inside, such as {field}.{inside}" if inside else ""
        raise ValueError(
            f"{place} must hold text in the field {field}, got a {type(value).__name__}{hint}"
        )
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{place} must hold valid Unicode in the field {field}, got half a surrogate pair"
        ) from None
    return str(value)


def _lookup(row: dict, field: str) -> Any:
    if field in row:
        return row[field]
    value = row
    for key in field.split("."):
        if isinstance(value, dict):
            value = value[key]
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)]
        else:
            raise LookupError(field)
    return value
