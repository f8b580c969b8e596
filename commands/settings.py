"""Settings files: `--config NAME_OR_PATH`, one YAML for every command.

    target: sums-target          # shared: each command takes the keys that it has as options
    sampling: {temperature: 1.0}
    gather:                      # a section: for one command, over what is shared
      samples: 4

A file that `diversed COMMAND --print_config` printed is one too. A name without a folder or `.yaml`
is looked up
in the package: `quickstart` is configs/quickstart.yaml. Every key must be known; the nearest one is
    named if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..cli import COMMANDS
from ..files import nearest

FOLDER = Path(__file__).parents[1] / "configs"
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


def find(name: str) -> Path:
    """The file behind `--config name`."""
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


def load(path: Path) -> dict:
    """The file's mapping, as YAML 1.2 reads it (1e-4 is a number)."""
    from jsonargparse import get_loader

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
    return values


def shared(values: Mapping, command: str) -> Mapping:
    """`values` with what `command` shares with the others under its own names.

    Training shares the seed alone: its `data` are traces, and its seed is called `seed_everything`.
    A file without sections is one command's own.
    """
    if command != "train" or not any(is_section(key, value) for key, value in values.items()):
        return values
    seed = {"seed_everything": values["seed"]} if "seed" in values else {}
    return {"train": {**seed, **(values.get("train") or {})}}


def select(values: Mapping, command: str, options: Iterable[str], file: str) -> dict:
    """What `command` takes from a file: the shared keys it has, over them its own section.

    options: every option of the command, nested ones as `sampling.temperature`; file: named in
        errors.
    """
    options = set(options)
    top = {key: value for key, value in values.items() if not is_section(key, value)}
    known = options | set(SHARED) | set(COMMANDS)
    for key in top:
        if key in COMMANDS and not _accepts(options, key):
            raise ValueError(
                f"section `{key}` of {file} must hold options, one a line, got {top[key]!r}"
            )
        if not _accepts(options, key) and key not in SHARED:
            raise ValueError(f"`{key}` at the top of {file} is not an option{nearest(key, known)}")
    chosen = {key: value for key, value in top.items() if _accepts(options, key)}
    own = values.get(command)
    chosen = merge(chosen, own if is_section(command, own) and own else {})
    where = f"in section `{command}` of {file}" if own else f"in {file}"
    for key in flatten(chosen):
        if not _accepts(options, key) and not _inside_leaf(options, key):
            raise ValueError(
                f"`{key}` {where} is not an option of `diversed {command}`{nearest(key, options)}"
            )
        inside = sorted(option for option in options if option.startswith(f"{key}."))
        if inside:
            raise ValueError(
                f"`{key}` {where} must hold options such as {inside[0]}, one a line, got no such"
                " lines"
            )
    return chosen


def is_section(key: str, value: object) -> bool:
    """Whether a top-level key opens a command's section (`train: runs/head` is an option of another
    command).
    """
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
        keys += (
            flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
        )
    return keys


def _accepts(options: set[str], key: str) -> bool:
    return key in options or any(option.startswith(f"{key}.") for option in options)


def _inside_leaf(options: set[str], key: str) -> bool:
    """Whether `key` lies in an option that holds a mapping of its own (`model.init_args.x` under
    `model`).
    """
    parents = key.split(".")[:-1]
    leaves = (".".join(parents[: depth + 1]) for depth in range(len(parents)))
    return any(
        leaf in options and not any(o.startswith(f"{leaf}.") for o in options) for leaf in leaves
    )
