"""Running model-written programs: does a program pass its tests, at the price of one interpreter
start?

A program gets one process with one thread, and keeps from the kernel only what computing needs:

seccomp   a list of allowed system calls (`data.sandbox.child`). None of them starts a process or a thread, sends a
          signal, opens a socket, writes, makes or deletes a file, waits, traces, mounts, or changes a limit. So there
          are no fork bombs, no grandchildren, no network, no folder to clean up. Without seccomp nothing runs.
landlock  (Linux 5.13, where it is switched on) of all files only Python's standard library and the system's libraries
          can be read; names and sizes of others stay visible. Without it a program can read what the user can, other
          processes' environments included, with one bit to tell it by, its score: a note says so once on stderr.
rlimits   CPU seconds, 1 GiB of address space, 0 bytes in files, 64 open files, no core. Processes need no limit.
the rest  no new privileges, a session of its own, an empty environment, no standard input, output thrown away; killed
          when the thread that started it ends, and when it tells more than a token. As nothing can
          wait, CPU time ends every program, however busy the machine; a wall clock ten times as
          long is there for what nobody thought of.

A pass is proved by a random token. The child reads the program, runs it, puts the builtins back,
reads the tests, runs them, and only then reads the token and returns it. So neither leaving early
nor printing counts, and while its module runs a program has the tests nowhere in memory. Both share
one interpreter, and some cheating cannot be stopped: a returned object may equal everything, a
called function may look through its callers' frames for the answer, and a program written against
this very file may read the descriptors itself. None of that reaches beyond a wrong 1.

Honest programs that need a thread, a sleep, a file or a site package fail. Hashes are seeded: sets
keep their order.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
READY, VISIBLE = b"ready", b"ready, files are visible"
SECONDS = 10  # of CPU time; of the reference solutions of MBPP and HumanEval the slowest takes 2 to 5, the next 0.05
MOST = 4096  # bytes of an answer: a line, the token, or the end of a traceback from a child that could not begin


def passes(program: str, tests: str, seconds: int = SECONDS) -> bool:
    """Whether the program runs and then its tests do, in the same names, within so many seconds of
    CPU time.
    """
    check()
    return _run(program, tests, seconds)[1]


@cache
def check() -> None:
    """OSError where programs cannot be confined here; a note on stderr where they can read files."""
    if sys.platform != "linux":
        raise OSError(
            f"running model-written code needs Linux, this is {sys.platform}; use data.score"
            " target_logprob"
        )
    began, passed = _run("def double(x): return 2 * x", "assert double(2) == 4", SECONDS)
    if not passed:
        reason = (
            " ".join(began.decode(errors="replace").split())[-200:] or "it ended without a word"
        )
        raise OSError(
            f"cannot confine model-written code on this machine ({reason}); use data.score"
            " target_logprob"
        )
    if began == VISIBLE:
        print(
            "note: without landlock in this kernel, model-written code can read your files",
            file=sys.stderr,
        )


def _run(program: str, tests: str, seconds: int) -> tuple[bytes, bool]:
    """(how the child began, whether it passed)."""
    token = secrets.token_bytes(16)
    parts = [text.encode("utf-8", "surrogatepass") for text in (program, tests)] + [token]
    # -s -S: no site packages. -P: the script's folder is not on the path.
    command = [sys.executable, "-s", "-S", "-P", CHILD, os.getpid(), seconds, *map(len, parts)]
    # A file in memory and not a pipe: a child that reads nothing cannot block the writer.
    with os.fdopen(os.memfd_create("program"), "wb") as source:
        source.write(b"".join(parts))
        source.seek(0)
        child = subprocess.Popen(
            list(map(str, command)),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
    with child:
        try:
            said = _read(child.stdout.fileno(), 10 * seconds)
        finally:
            child.kill()
    began, _, proof = said.partition(b"\n")
    if began not in (READY, VISIBLE):
        return said, False
    return began, proof == token


def _read(pipe: int, seconds: float) -> bytes:
    """What comes through the pipe until its end, the time limit, or more than anybody should say."""
    deadline, said, waiting = time.monotonic() + seconds, b"", select.poll()
    waiting.register(pipe, select.POLLIN)
    while len(said) < MOST and waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(pipe, MOST)
        if not piece:
            break
        said += piece
    return said
