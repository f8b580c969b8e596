"""The scripts of experiments/: they are not part of the package, so a test loads them from their files."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "experiments"


def script(name: str) -> ModuleType:
    """experiments/NAME.py as a module; its neighbours can be imported from it, as when it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name)
