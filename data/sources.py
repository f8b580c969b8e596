"""Rows with named fields, from local files or the hub, and the splits they fall into.

Local files are .jsonl or .json (an array); both may be compressed, as .gz. A folder may hold one
file a split (train.jsonl, validation.jsonl, test.jsonl). If it holds a single file, of any name,
that is the training file. A split without a file of its own is carved from the training file.
Carving looks at a row's text only: u = sha256(text) / 2^256; u < .1 is test, .1 <= u < .2 is
validation, the rest is train. So splits never overlap, equal texts land in the same split, and no
seed, limit or added row moves a row.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..fields import MISSING, fault
from ..files import check_regular, close_to, unique_fields
from ..runtime.chat import CONVERSATION, Turns

SPLITS = ("train", "validation", "test")
STEMS = {name: name for name in SPLITS} | {name: "validation" for name in ("valid", "val", "dev")}
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
CARVED = {"test": (0.0, 0.1), "validation": (0.1, 0.2)}  # u in [low, high)
LONGEST_ROW = 1 << 26  # bytes of a line
LARGEST_ARRAY = 1 << 30  # bytes of a file that is one JSON array
LONGEST_GAP = 1 << 16  # bytes of blanks in front of an array


class Hole(ValueError):
    """A row that lacks a text or the reference that the score needs, or holds something else."""


class Blank(Hole):
    """A row whose text or reference is there, but says nothing."""


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
    if not path.is_dir():
        check_regular(path)
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
    """(place, row) of every row; a place reads "line 7 of a.jsonl" or "item 7 of a.json".

    ValueError for the first thing that is no row.
    """
    rows = scan_rows(path)
    for _, row in rows:
        if isinstance(row, ValueError):
            raise row
    return rows


def scan_rows(path: Path) -> list[tuple[str, dict | ValueError]]:
    """(place, row) of every row; what is no row is the error that says why.

    A line is read as far as a row may be long, and no further.
    """
    check_regular(path)
    with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as file:
        try:
            rows = _items(file, path) if _holds_array(file) else _lines(file, path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} must be a whole gzip file: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty; expected one JSON object a line")
    return rows


def _holds_array(file: BinaryIO) -> bool:
    """Whether the file is one JSON array; it stands at its beginning afterwards."""
    start = file.read(LONGEST_GAP).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _items(file: BinaryIO, path: Path) -> list[tuple[str, dict | ValueError]]:
    data = file.read(LARGEST_ARRAY + 1)
    if len(data) > LARGEST_ARRAY:
        raise ValueError(
            f"{path} is an array of more than {LARGEST_ARRAY} bytes, which is read as a whole;"
            " write one object a line"
        )
    parsed = _parsed(data, path)
    if isinstance(parsed, ValueError):
        raise parsed
    found = []
    for number, row in enumerate(parsed, 1):
        place = f"item {number} of {path.name}"
        found.append((place, _row(row, place)))
    return found


def _lines(file: BinaryIO, path: Path) -> list[tuple[str, dict | ValueError]]:
    found: list[tuple[str, dict | ValueError]] = []
    number = 0
    while data := file.readline(LONGEST_ROW + 1):
        number += 1
        place = f"line {number} of {path.name}"
        if len(data) > LONGEST_ROW:
            raise ValueError(
                f"line {number} of {path} has more than {LONGEST_ROW} bytes, which is no row; cut"
                " it into rows"
            )
        if data.strip():
            found.append((place, _row(_parsed(data, path, number), place)))
    return found


def _row(value: Any, place: str) -> dict | ValueError:
    if isinstance(value, dict | ValueError):
        return value
    got = json.dumps(value)[:60]
    return ValueError(f"{place} must be an object with named fields, got {got}")


def _parsed(data: bytes, path: Path, line: int | None = None) -> Any:
    """The JSON value, or the ValueError that says why there is none."""
    try:
        text = data.decode("utf-8-sig" if line in (None, 1) else "utf-8")
    except UnicodeDecodeError as error:
        line = line or data.count(b"\n", 0, error.start) + 1
        return ValueError(
            f"{path} must be UTF-8, line {line} is not; convert it, for example with iconv"
        )
    try:
        return json.loads(text, object_pairs_hook=unique_fields, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        # Besides what is not JSON: a number of more digits than Python reads, brackets deeper than
        # its stack.
        line = line or getattr(error, "lineno", 1)
        reason = getattr(error, "msg", str(error))
        if isinstance(error, RecursionError):
            reason = "nested too deeply"
        return ValueError(
            f"line {line} of {path} must be JSON: {reason}; it begins {text.strip()[:40]!r}"
        )


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def text_of(row: dict, field: str, place: str, option: str = "") -> str:
    """The text in a field of a row, or a number as text; Hole if it is none, Blank if it is null.

    field: a dot reaches inside lists and objects: "translation.de", "turns.0".
    option: that names another field.
    """
    value = _lookup(row, field, place, option)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        inside = ()
        if isinstance(value, dict | list) and value:
            inside = value if isinstance(value, dict) else ["0"]
        hint = "".join(
            f"; name what is inside, such as {field}.{name}" for name in list(inside)[:1]
        )
        got = json.dumps(value) if isinstance(value, bool) else f"a {type(value).__name__}"
        raise Hole(f"{place} must hold text in the field {field}, got {got}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise Hole(f"{place} must hold text in the field {field}, got a number beyond all bounds")
    _check_unicode(str(value), field, place)
    return str(value)


def prompt_of(row: dict, field: str, place: str, option: str = "") -> str | Turns:
    """The text in a field of a row, or its conversation: turns with `role` and `content`."""
    value = _lookup(row, field, place, option)
    if not isinstance(value, list) or not any(isinstance(turn, dict) for turn in value):
        return text_of(row, field, place, option)
    if found := fault({field: value}, {field: CONVERSATION}):
        raise Hole(f"{place}: {found}; a conversation is a list of turns with role and content")
    _check_unicode(json.dumps(value, ensure_ascii=False), field, place)
    return tuple(value)


def _check_unicode(text: str, field: str, place: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Hole(
            f"{place} must hold valid Unicode in the field {field}, got half a surrogate pair"
        ) from None


def _lookup(row: dict, field: str, place: str, option: str) -> Any:
    """The value in a field of a row; Hole if the field is not there, Blank if it is null."""
    value = row[field] if field in row else _inside(row, field)
    if value is MISSING:
        other = f"; name another with `{option}`" if option else ""
        listing = ", ".join(map(str, row)) or "no field"
        hint = close_to(field, row) or other
        if option == "data.prompt_field" and "messages" in row:
            hint = "; the conversation is the prompt with `data.prompt_field` messages"
        raise Hole(f"{place} has no field {field}, it has {listing}{hint}")
    if value is None:
        raise Blank(
            f"{place} must hold text in the field {field}, got null; fill it or delete the row"
        )
    return value


def _inside(value: Any, field: str) -> Any:
    """What a dotted name leads to, MISSING if that is nothing."""
    for key in field.split("."):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return MISSING
    return value
