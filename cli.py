"""The command line, `diversed COMMAND --option value`, and the edge at which an error becomes one
sentence.

Exit codes: 0 done, 1 a check failed (the command returned False), 2 bad input, 130 interrupted,
141 output unread. SIGTERM and SIGHUP end the process as they do without us, 143 and 129 in a shell.
"""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from . import __version__
from .commands.table import COMMANDS, command
from .errors import USER_ERRORS, lacks_memory, sentence
from .files import nearest

OVERVIEW = """usage: diversed COMMAND [--config NAME_OR_PATH] [--option value ...]

Speculative decoding that is faster than lossless, with a measured price.

commands:
{commands}

`diversed COMMAND --help` lists a command's options, `--print_config` prints them with their values.
Start with `diversed run --config quickstart`. DIVERSED_DEBUG=1 shows the traceback of an error."""


def main(args: list[str] | None = None) -> int:
    """Run one command and return the exit code; `args` are the words after `diversed`.

    Without `args` the process is the command's: its words are taken, and its signals.
    """
    ours, args = args is None, sys.argv[1:] if args is None else args
    with _told(args) if ours else nullcontext():
        return _run(args)


def _run(args: list[str]) -> int:
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
    except (*USER_ERRORS, MemoryError, RuntimeError) as error:
        ours = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("diversed")
        ours = ours or not isinstance(error, USER_ERRORS) and not lacks_memory(error)
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


def _resume(args: list[str]) -> str:
    return f"\ninterrupted; what was finished is kept, resume with: diversed {shlex.join(args)}\n"


def _interrupted(args: list[str]) -> int:
    print(_resume(args), end="", file=sys.stderr)
    return 130


@contextmanager
def _told(args: list[str]) -> Iterator[None]:
    """While it lasts, a signal that ends the process says how to resume.

    The process ends at once, as after SIGKILL, and not by an exception: libraries catch those.
    """

    def tell(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        cursor = "\x1b[?25h" if sys.stdout.isatty() else ""  # a bar of progress hides it
        with suppress(OSError):  # perhaps nobody reads
            os.write(2, (cursor + _resume(args)).encode())
        for child in _children():
            with suppress(OSError):
                os.kill(child, number)
        if number == signal.SIGINT:
            os._exit(130)
        os.kill(os.getpid(), number)

    usual = (signal.SIG_DFL, signal.default_int_handler)  # not if nohup or a shell ignores it
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler in usual}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for number in before:
        signal.signal(number, tell)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    """The processes that this one has started and that run, as far as Linux tells."""
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += map(int, task.read_text().split())
    return found
