"""Names of tree shapes: `3x4+2` is a trunk of two single tokens, then three paths of four tokens.

`5` is a chain of five tokens. One path is always written without a trunk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .drafting import DraftShape, topology

_NAME = re.compile(r"(?:(\d{1,3})x)?(\d{1,3})(?:\+(\d{1,3}))?", re.ASCII)


@dataclass(frozen=True)
class Shape:
    """A trunk of `trunk` single tokens, then `paths` paths of `length` tokens."""

    paths: int
    length: int
    trunk: int = 0

    def __str__(self) -> str:
        if self.paths == 1:
            return str(self.length)
        trunk = f"+{self.trunk}" if self.trunk else ""
        return f"{self.paths}x{self.length}{trunk}"

    @property
    def depth(self) -> int:
        return self.trunk + self.length

    @property
    def widths(self) -> list[int]:
        """Number of nodes at every depth, from the root on."""
        return [1] * (1 + self.trunk) + [self.paths] * self.length

    def grow(self, drafting: str) -> DraftShape:
        """The tree of this shape under a drafting law: paths branch once, below the trunk."""
        if drafting in ("paths", "chain"):
            return topology(drafting, self.length, self.paths, self.trunk)
        branches = [self.paths] + [1] * (self.length - 1)
        return topology(drafting, self.length, branches, self.trunk)


def parse_shape(text: str) -> Shape:
    """The shape with this name."""
    found = _NAME.fullmatch(text.strip())
    if not found or not int(found[2]) or found[1] == "0":
        raise ValueError(
            "a shape is written PATHSxLENGTH+TRUNK, such as 3x4+2, or one number for a chain, got"
            f" {text!r}"
        )
    paths, length, trunk = int(found[1] or 1), int(found[2]), int(found[3] or 0)
    return Shape(paths, length, trunk) if paths > 1 else Shape(1, length + trunk)
