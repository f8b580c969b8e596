"""The command line, `diversed COMMAND --option value`, and the edge at which errors become one
sentence.

A command is a function: its signature gives the options, its docstring their help. It is imported
on use, so that `diversed --help` needs neither torch nor transformers. A function of a single
argument `args` reads its own options.

Exit codes: 0 done, 1 a check failed (the command returned False), 2 bad input, 130 interrupted, 141
    output unread.
"""

from __future__ import annotations

import errno
import inspect
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from importlib import import_module

from . import __version__

COMMANDS = {
    "run": (
        "commands.run",
        "run",
        "gather, train, export and evaluate with one configuration; skips what is complete",
    ),
    "gather": (
        "data.gathering",
        "gather",
        "let a pair write texts and keep their traces: what a gate learns from",
    ),
    "train": ("commands.train", "train", "train a head on traces"),
    "select": (
        "selector.training",
        "select",
        "train what chooses the tree before each step, from labelled contexts",
    ),
    "distill": (
        "train.adapters",
        "distill",
        "fine-tune a draft to its target, on texts of the target itself",
    ),
    "export": (
        "commands.export",
        "export",
        "make a bundle of a trained gate: a folder that decoding can use",
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

# ValueError, TypeError and OSError carry sentences for users; a missing module is an extra
# that is not installed.
USER_ERRORS = (ValueError, TypeError, OSError, ModuleNotFoundError)


def main(args: list[str] | None = None) -> int:
    """Run one command and return the exit code; `args` are the words after `diversed`."""
    args = sys.argv[1:] if args is None else args
    written_before, warnings.formatwarning = warnings.formatwarning, _note
    try:
        return dispatch(args)
    except KeyboardInterrupt:
        return _interrupted(args)
    except SystemExit as stop:
        # Lightning answers an interrupt with SystemExit.
        if isinstance(stop.__context__, KeyboardInterrupt):
            return _interrupted(args)
        # Rich answers a broken pipe with SystemExit.
        if isinstance(stop.__context__, BrokenPipeError):
            return _unread()
        raise
    except BrokenPipeError:
        return _unread()
    except USER_ERRORS as error:
        ours = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("diversed")
        if ours or os.environ.get("DIVERSED_DEBUG"):
            raise
        print(f"diversed{_command(args)}: {sentence(error)}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = written_before


def dispatch(args: list[str]) -> int:
    """The command that `args` name, run with its options; the exit code."""
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"diversed {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        from .files import nearest

        raise ValueError(f"`{name}` is not a command{nearest(name, COMMANDS)}")
    function = command(name)
    if reads_own_options(function):
        return 1 if function(rest) is False else 0
    from .commands.options import parse

    return 1 if function(**parse(function, rest, name)) is False else 0


def command(name: str) -> Callable:
    """The function behind a command, imported now."""
    module, function, _ = COMMANDS[name]
    return getattr(import_module(f".{module}", __package__), function)


def reads_own_options(function: Callable) -> bool:
    """Whether a command takes the words of the command line instead of options."""
    return list(inspect.signature(function).parameters) == ["args"]


def overview() -> str:
    """What `diversed --help` prints."""
    lines = [f"  {name:<10} {help}" for name, (_, _, help) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: diversed COMMAND [--config NAME_OR_PATH] [--option value ...]",
            "",
            "Speculative decoding that is faster than lossless, with a measured price.",
            "",
            "commands:",
            *lines,
            "",
            (
                "`diversed COMMAND --help` lists a command's options, `--print_config` prints them"
                " with their values."
            ),
            (
                "Start with `diversed run --config quickstart`. DIVERSED_DEBUG=1 shows the"
                " traceback of an error."
            ),
        ]
    )


def sentence(error: BaseException) -> str:
    """An error as one line for the person at the keyboard."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = "diversed[gguf]" if error.name == "gguf" else str(error.name)
        return f"the package `{error.name}` is not installed; pip install '{extra}'"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" at {error.filename}" if error.filename else ""
        return (
            f"disk full{where}; nothing finished is lost: free some space and run the same command"
            " again"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the operating system says'}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _unread() -> int:
    """The reader of a pipe has left (`| head`): the command has not finished, and says so as other
    programs do.
    """
    # Without this, Python complains once more while it shuts down.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _note(message: Warning | str, *where: object) -> str:
    """A warning as a line for the person at the keyboard, without the place in the code that gave
    it.
    """
    return f"note: {' '.join(str(message).split())}\n"


def _interrupted(args: list[str]) -> int:
    print(
        f"\ninterrupted; what was finished is kept, resume with: diversed {shlex.join(args)}",
        file=sys.stderr,
    )
    return 130


def _command(args: list[str]) -> str:
    return f" {args[0]}" if args and args[0] in COMMANDS else ""
