"""Settings files: `--config NAME_OR_PATH`, one YAML for every command.

    target: sums-target          # shared: each command takes the keys that it has as options
    sampling: {temperature: 1.0}
    gather:                      # a section: for one command, over what is shared
      samples: 4

A file that `diversed COMMAND --print_config` printed is one too. A name without a folder or `.yaml`
is looked up in the package: `quickstart` is configs/quickstart.yaml. `configs: [paper, llama]` in a
file lays the file over others; several `--config` are laid over each other, the last on top. Every
key must be known; if not, the nearest one is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..files import nearest
from .table import COMMANDS

FOLDER = Path(__file__).parents[1] / "configs"
OTHERS = "configs"  # the key that names the files below this one
SHARED = (
    "target",
    "draft",
    "dtype",
    "device",
    "trust_remote_code",
    "task",
    "data",
    "sampling",
    "draft_length",
    "max_new_tokens",
    "seed",
)


@dataclass(frozen=True)
class File:
    """A settings file that was read.

    name: as errors call it. stem: its name without folder and suffix. values: what it says.
    """

    name: str
    stem: str
    values: dict


def read(name: str) -> File:
    """The file behind `--config name`."""
    path = find(name)
    return File(path.name, path.stem, load(path))


def find(name: str) -> Path:
    """The path behind `--config name`."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise FileNotFoundError(f"`--config` {name}: there is no such file")
        return path
    packaged = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}
    if name in packaged:
        return packaged[name]
    if path.is_file():
        return path
    raise ValueError(
        f"`--config` {name} is neither a file nor a packaged configuration{nearest(name, packaged)}"
    )


def load(path: Path, above: tuple[Path, ...] = ()) -> dict:
    """The file's mapping, as YAML 1.2 reads it (1e-4 is a number), laid over the files it names.

    above: the files that led to this one.
    """
    from jsonargparse import get_loader

    if path in above:
        raise ValueError(f"`{OTHERS}` of {above[-1]} leads back to {path}; name other files")
    try:
        values = get_loader("yaml")(path.read_text(encoding="utf-8"))
    except Exception as error:
        # The loader's errors have no common type; all of them mean that the file is not YAML.
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got {type(values).__name__}")
    if bad := [key for key in values if not isinstance(key, str)]:
        raise ValueError(f"{path} must have words as keys, got {bad[0]!r}")
    names = values.pop(OTHERS, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"`{OTHERS}` in {path} must be a list of settings files, got {names!r}")
    below: dict = {}
    for name in names:
        below = merge(below, load(find(name), (*above, path)))
    return merge(below, values)


def chosen(files: list[File], command: str, options: Iterable[str]) -> dict:
    """What `command` takes from the files, which are laid over each other."""
    several = any(is_section(*item) for file in files for item in file.values.items())
    # With sections in one of them, all of them are files of several commands.
    whole: dict = {command: None} if several else {}
    for file in files:
        values = {command: None, **file.values} if several else file.values
        select(values, command, options, file.name)
        whole = merge(whole, file.values)
    return select(whole, command, options, "")


def select(values: Mapping, command: str, options: Iterable[str], file: str) -> dict:
    """What `command` takes from a file: the shared keys it has, over them its own section.

    options: every option of the command, nested ones as `sampling.temperature`, and every group of
        them as `sampling`. file: its name.
    """
    options = set(options)
    values = _of_training(values) if command == "train" else values
    shared = {key: value for key, value in values.items() if not is_section(key, value)}
    for key in shared:
        if key in options or key in SHARED:
            continue
        if key in COMMANDS:
            raise ValueError(
                f"section `{key}` of {file} must hold options, one a line, got {values[key]!r}"
            )
        known = options | set(SHARED) | set(COMMANDS)
        raise ValueError(f"`{key}` at the top of {file} is not an option{nearest(key, known)}")
    own = values.get(command) if is_section(command, values.get(command)) else None
    taken = {key: value for key, value in shared.items() if key in options}
    taken = merge(taken, own or {})
    where = f"in section `{command}` of {file}" if own else f"in {file}"
    groups = {option.rpartition(".")[0] for option in options}
    mappings = options - groups  # an option may be a mapping, such as `model.init_args`
    for key in flatten(taken):
        if key in groups:
            inside = min(option for option in options if option.startswith(f"{key}."))
            raise ValueError(
                f"`{key}` {where} must hold options such as {inside}, one a line, got no such lines"
            )
        if key not in options and mappings.isdisjoint(_above(key)):
            raise ValueError(
                f"`{key}` {where} is not an option of `diversed {command}`{nearest(key, options)}"
            )
    return taken


def _of_training(values: Mapping) -> dict:
    """What a file says about training: its section `train` and the shared seed, or all of a file
    without sections. The shared `data` is no option of training, whose `data` are traces.
    """
    if not any(is_section(key, value) for key, value in values.items()):
        return {"train": values}
    seed = {"seed_everything": values["seed"]} if "seed" in values else {}
    return {"train": seed | (values.get("train") or {})}


def is_section(key: str, value: object) -> bool:
    """Whether a top-level key opens a command's section; in `train: runs/head` it is an option."""
    return key in COMMANDS and (value is None or isinstance(value, Mapping))


def merge(below: Mapping, above: Mapping) -> dict:
    """`above` laid over `below`, mapping by mapping."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def flatten(values: Mapping, prefix: str = "") -> list[str]:
    """Every key of nested mappings, as `sampling.temperature`."""
    keys = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            keys += flatten(value, f"{prefix}{key}.")
        else:
            keys.append(f"{prefix}{key}")
    return keys


def _above(key: str) -> list[str]:
    """The keys that `key` lies in: of `a.b.c`, `a` and `a.b`."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
