"""The verbs of the command line. A command is imported when it is used, so that `diversed --help`
needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

# name -> (module, function, what it does)
COMMANDS = {
    "run": (
        "commands.run",
        "run",
        "gather, train, export and evaluate with one configuration; skips what is complete",
    ),
    "gather": (
        "commands.gather",
        "gather",
        "let a pair write texts and keep their traces: what a head learns from",
    ),
    "train": ("commands.train", "train", "train a head on traces"),
    "reinforce": (
        "commands.reinforce",
        "reinforce",
        "train a head on-policy: new texts from the head at every update",
    ),
    "select": (
        "commands.select_trees",
        "select",
        "train what chooses the tree before each step, from labelled contexts",
    ),
    "distill": (
        "commands.distill",
        "distill",
        "fine-tune a draft to its target, on texts of the target itself",
    ),
    "export": (
        "commands.export",
        "export",
        "make a bundle of a trained head: a folder that decoding can use",
    ),
    "eval": (
        "commands.eval",
        "evaluate",
        "measure quality and speed of methods and relaxations on held-out prompts",
    ),
    "calibrate": (
        "commands.calibrate",
        "calibrate",
        "choose a bundle's bias: quality drops by no more than a limit",
    ),
    "report": ("commands.report", "report", "write one HTML page of a run, or of several compared"),
    "decode": ("commands.decode", "decode_command", "write a text, with statistics"),
    "bench": ("commands.bench", "bench", "run a benchmark by its name and print its table"),
    "selfcheck": (
        "commands.selfcheck",
        "selfcheck",
        "check that a verification method obeys its law on this machine",
    ),
}


def command(name: str) -> Callable:
    """The function behind a command, imported now."""
    module, function, _ = COMMANDS[name]
    return getattr(import_module(f"...{module}", __name__), function)
