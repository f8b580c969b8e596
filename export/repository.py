"""A bundle as a repository for `model.generate(..., custom_generate=FOLDER)` of transformers.

The repository is the bundle with a folder custom_generate/ in it. transformers copies the Python
files of that folder into a cache of its own and runs them there, away from the bundle; so the head
travels in one of them, gate.py. generate.py calls `export.hf.generate` of this package, which must
be installed: requirements.txt says so, and transformers looks.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

from .. import __version__
from ..files import write_whole
from ..runtime.bundle import AGAIN, FILES

CARRIED = tuple(name for name in FILES if name != "README.md")
UNPACKING = Lock()
GENERATE = '''"""Speculative decoding with the learned verifier in gate.py; needs the package `diversed`."""

from diversed.export.hf import generate as _generate

from .gate import FILES


def generate(model, **arguments):
    return _generate(model, FILES, **arguments)
'''


def add_custom_generate(bundle: str | Path) -> None:
    """Make the folder of a bundle a repository that transformers can decode from."""
    bundle = Path(bundle)
    folder = bundle / "custom_generate"
    folder.mkdir(exist_ok=True)
    lines = "".join(
        f'    "{name}": "{base64.b64encode((bundle / name).read_bytes()).decode()}",\n'
        for name in CARRIED
    )
    packed = f'"""The bundle\'s files, in base64."""\n\nFILES = {{\n{lines}}}\n'
    write_whole(folder / "gate.py", packed)
    write_whole(folder / "generate.py", GENERATE)
    write_whole(folder / "requirements.txt", f"diversed>={__version__}\ntransformers>=5.19\n")


def unpacked(files: dict[str, str]) -> Path:
    """The bundle of gate.py in a folder of this process; `files`: name -> bytes in base64.

    The folder is the same for all calls, because Python gives a warning once for every text.
    """
    contents = {name: _content(files, name) for name in CARRIED}
    digest = hashlib.sha256(b"".join(contents.values())).hexdigest()
    with UNPACKING:
        folder = Path(_room(os.getpid()).name, f"custom_generate-{digest[:8]}")
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            if not (folder / name).is_file():  # in a long life the machine may have tidied it away
                (folder / name).write_bytes(content)
    return folder


@cache
def _room(process: int) -> tempfile.TemporaryDirectory:
    """A folder of the process; a forked one gets its own."""
    return tempfile.TemporaryDirectory(prefix="diversed-")


def _content(files: dict[str, str], name: str) -> bytes:
    try:
        return base64.b64decode(files[name], validate=True)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"custom_generate/gate.py does not hold {name}; {AGAIN}") from None
