"""Running model-written programs: does a program pass its tests, at the price of two
interpreter starts?

A program gets one process with one thread. It keeps from the kernel only what computing needs:

seccomp   a list of allowed system calls (`data.sandbox.child`). None of them starts a process or a
          thread, sends a signal, opens a socket, writes, makes or deletes a file, waits, traces,
          mounts, or changes a limit. So there are no fork bombs, no grandchildren, no network, no
          folder to clean up. Without seccomp nothing runs.
landlock  (Linux 5.13, where it is switched on) of all files only Python's standard library and the
          system's libraries can be read; names and sizes of others stay visible. Without it a
          program can read what the user can, other processes' environments included, with one bit
          to tell it by, its score: a note says so once on stderr.
rlimits   CPU seconds, 1 GiB of address space, 0 bytes in files, 64 open files, no core. Processes
          need no limit.
the rest  no new privileges, a session of its own, an empty environment, no standard input, output
          thrown away; killed when the thread that started it ends, and when it tells more than a
          token. As nothing can wait, CPU time ends every program, however busy the machine; a wall
          clock ten times as long is there for what nobody thought of.

A second process of the same kind is the judge: it holds the tests and a random token, which it
returns if they pass. It asks the program's process to call its functions, over two pipes
(`data.sandbox.talk`). Plain values go over as copies of the exact builtin types, so an answer
cannot bring methods with it. The program has no tests, no token, no expected value and no frame of
the judge to look at; the judge has builtins and modules of its own. So no program passes by leaving
early, printing, patching or searching.

What a judge cannot exclude: a program that has the right answers to these very tests by heart; and
if a test compares two objects of the program with each other, asks whether one is an instance of a
class of the program, or looks at its truth, the program's own methods answer.

If both processes wait for each other, nothing can end their waiting, so both are ended.

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
# of CPU time; of the reference solutions of MBPP and HumanEval the slowest takes 2 to 5, the next
# 0.05
SECONDS = 10
STUCK = 2.0  # seconds in which both processes wait and neither computes
# bytes of an answer: a line, the token, or the end of a traceback from a child that could not begin
MOST = 4096


def passes(program: str, tests: str, seconds: int = SECONDS) -> bool:
    """Whether the program runs and then its tests do, in the same names, within so many seconds of
    CPU time.
    """
    check()
    return _run(program, tests, seconds)[1]


@cache
def check() -> None:
    """OSError where programs cannot be confined here; a note on stderr where they can read
    files.
    """
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
    """(how the program's process began, whether the judge says that it passed)."""
    token = secrets.token_bytes(16)
    program_text, tests_text = (text.encode("utf-8", "surrogatepass") for text in (program, tests))
    questions, answers = os.pipe(), os.pipe()
    ends = [*questions, *answers]
    try:
        with _start("program", questions[0], answers[1], seconds, [program_text]) as defendant:
            try:
                with _start(
                    "judge", answers[0], questions[1], seconds, [tests_text, token]
                ) as judge:
                    try:
                        while ends:
                            os.close(ends.pop())
                        return _verdict(defendant, judge, token, 10 * seconds)
                    finally:
                        judge.kill()
            finally:
                defendant.kill()
    finally:
        for end in ends:
            os.close(end)


def _start(role: str, source: int, sink: int, seconds: int, texts: list[bytes]) -> subprocess.Popen:
    """A child that reads `texts` from a file in memory and talks over two pipes."""
    sizes = map(len, texts)
    # -s -S: no site packages. -P: the script's folder is not on the path.
    command = [sys.executable, "-s", "-S", "-P", CHILD, role, os.getpid(), seconds, source, sink]
    # A file in memory and not a pipe: a child that reads nothing cannot block the writer.
    with os.fdopen(os.memfd_create("texts"), "wb") as given:
        given.write(b"".join(texts))
        given.seek(0)
        return subprocess.Popen(
            list(map(str, [*command, *sizes])),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"PYTHONHASHSEED": "0"},
            pass_fds=(source, sink),
            start_new_session=True,
        )


def _verdict(
    defendant: subprocess.Popen, judge: subprocess.Popen, token: bytes, seconds: float
) -> tuple[bytes, bool]:
    deadline = time.monotonic() + seconds
    pair = (defendant.pid, judge.pid)
    began = _read(defendant.stdout.fileno(), deadline, pair)
    if began.partition(b"\n")[0] not in (READY, VISIBLE):
        return began, False
    said = _read(judge.stdout.fileno(), deadline, pair)
    first, _, proof = said.partition(b"\n")
    return began.partition(b"\n")[0], first in (READY, VISIBLE) and proof == token


def _read(pipe: int, deadline: float, pair: tuple[int, int]) -> bytes:
    """What comes through the pipe until its end, the deadline, more than anybody should say, or
    until both processes have waited for STUCK seconds without computing.
    """
    said, waiting = b"", select.poll()
    waiting.register(pipe, select.POLLIN)
    before, since = None, time.monotonic()
    while len(said) < MOST and (now := time.monotonic()) < deadline:
        if waiting.poll(min(STUCK / 4, deadline - now) * 1000):
            piece = os.read(pipe, MOST)
            if not piece:
                break
            said += piece
            continue
        state = [_waiting(process) for process in pair]
        if None in state or state != before:
            before, since = state, now
        elif now - since > STUCK:
            break
    return said


def _waiting(process: int) -> tuple[str, ...] | None:
    """CPU ticks of a process that waits; None if it computes."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ()
    return tuple(fields[11:13]) if fields[0] in "SZX" else None
