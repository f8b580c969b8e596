"""A folder of shards: one file a unit of prompts, and a manifest that names them with checksums.

Several processes may share a folder, each with a manifest of its own, `manifest.1-of-4.json`.
Whoever finds all shards there writes `manifest.json` of the whole, which equals that of a single
process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..files import SETTINGS_FORMAT, Folder, cut_units, sha256
from .traces import FORMAT, MANIFEST, read_manifest, write_manifest

Entry = dict[str, Any]


class ShardFolder:
    """One process's part of a folder of shards. Use it while `folder` is held.

    settings: all that decides the shards, with `prompts`, their number, and `unit`, those of a
        shard.
    entries: of the shards that are there, by file, whoever wrote them.
    """

    def __init__(self, folder: Folder, settings: dict[str, Any]):
        self.folder, self.settings = folder, settings
        self.units = cut_units(settings["prompts"], settings["unit"])
        self.share = folder.share_of(self.units)
        self.entries: dict[str, Entry] = {}

    def number(self, unit: range) -> int:
        """The number in the name of a unit's shard."""
        return unit.start // self.settings["unit"]

    def begin(self, check: Callable[[Entry, dict[str, Any]], object]) -> list[range]:
        """The units of this process that no shard holds; other settings are refused.

        check: (entry, manifest) -> ValueError or OSError if that shard cannot be used; it is named
            and written anew.
        """
        self._manifests()  # that of another process may be of other settings
        self.folder.begin(self.settings, {"format": FORMAT, "complete": False, "shards": []})
        for manifest in self._manifests():
            for entry in manifest["shards"]:
                if entry["file"] in self.entries:
                    continue
                try:
                    check(entry, manifest)
                except (ValueError, OSError) as error:
                    print(f"this shard is written anew: {error}")
                else:
                    self.entries[entry["file"]] = entry
        numbers = {int(file.removeprefix("shard-").split(".")[0]) for file in self.entries}
        return [unit for unit in self.share if self.number(unit) not in numbers]

    def add(self, entry: Entry) -> None:
        """A shard of this process is there."""
        self.entries[entry["file"]] = entry
        alone = self.folder.num_shards == 1
        self._write(MANIFEST if alone else f"manifest.{self.folder.share}.json", complete=False)

    def finish(self) -> None:
        """Write the manifest of the whole if all shards are there and it does not say so yet."""
        out = self.folder.path
        with self.folder.turn():
            manifests = self._manifests()
            for manifest in manifests:
                for entry in manifest["shards"]:
                    path = out / entry["file"]
                    if path.name in self.entries or not path.is_file():
                        continue
                    if sha256(path) == entry["sha256"]:
                        self.entries[path.name] = entry
            if len(self.entries) < len(self.units):
                print(f"{out}: other processes have shards to write; the last writes {MANIFEST}")
                return
            if gone := [file for file in sorted(self.entries) if not (out / file).is_file()]:
                raise FileNotFoundError(
                    f"{out / gone[0]} is missing, it was deleted while the folder was written; run"
                    " the same command again"
                )
            if not any(manifest["complete"] for manifest in manifests):
                self._write(MANIFEST, complete=True)

    def _manifests(self) -> list[dict[str, Any]]:
        """The manifest of the whole and those of the processes, as far as they are there."""
        paths = sorted(self.folder.path.glob("manifest*.json"))
        manifests = [read_manifest(path.parent, incomplete=True, name=path.name) for path in paths]
        for manifest in manifests:
            self.folder.refuse_others(manifest, self.settings)
        return manifests

    def _write(self, name: str, complete: bool) -> None:
        shards = [self.entries[file] for file in sorted(self.entries)]
        settings = SETTINGS_FORMAT | self.settings
        manifest = {"complete": complete, **settings, "shards": shards}
        write_manifest(self.folder.path, manifest, name)
