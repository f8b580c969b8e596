"""The command line, `diversed COMMAND --option value`, and the edge at which an error becomes one
sentence.

Exit codes: 0 done, 1 a check failed (the command returned False), 2 bad input, 130 interrupted,
141 output unread.
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
import warnings

from . import __version__
from .commands.table import COMMANDS, command
from .errors import USER_ERRORS, sentence
from .files import nearest

OVERVIEW = """usage: diversed COMMAND [--config NAME_OR_PATH] [--option value ...]

Speculative decoding that is faster than lossless, with a measured price.

commands:
{commands}

`diversed COMMAND --help` lists a command's options, `--print_config` prints them with their values.
Start with `diversed run --config quickstart`. DIVERSED_DEBUG=1 shows the traceback of an error."""


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
        name = f" {args[0]}" if args[0] in COMMANDS else ""
        print(f"diversed{name}: {sentence(error)}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = written_before


def dispatch(args: list[str]) -> int:
    """Run the command that `args` name with its options; the exit code.

    A function with the single parameter `args` takes the words as they are.
    """
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"diversed {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        raise ValueError(f"`{name}` is not a command{nearest(name, COMMANDS)}")
    function = command(name)
    if list(inspect.signature(function).parameters) == ["args"]:
        return 1 if function(rest) is False else 0
    from .commands.options import call, parse

    return 1 if call(function, **parse(function, rest, name)) is False else 0


def overview() -> str:
    """What `diversed --help` prints."""
    lines = [f"  {name:<10} {help}" for name, (_, _, help) in COMMANDS.items()]
    return OVERVIEW.format(commands="\n".join(lines))


def _unread() -> int:
    """The reader of a pipe has left (`| head`), so the command has not finished."""
    # Without this, Python complains once more while it shuts down.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _note(message: Warning | str, *where: object) -> str:
    """A warning as one line, without the place in the code that gave it."""
    return f"note: {' '.join(str(message).split())}\n"


def _interrupted(args: list[str]) -> int:
    print(
        f"\ninterrupted; what was finished is kept, resume with: diversed {shlex.join(args)}",
        file=sys.stderr,
    )
    return 130
