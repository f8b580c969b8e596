"""The sandbox: honest programs pass, and every hostile one scores 0 and leaves nothing behind.

Hostile programs are real. None runs before the child has answered that the kernel confines it.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from diversed.data import sandbox

HONEST = "def double(x):\n    return 2 * x\n", "assert double(2) == 4"
try:
    sandbox.check()
    REASON = ""
except OSError as error:
    REASON = str(error)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
HIDDEN = not REASON and sandbox._run(*HONEST, sandbox.SECONDS)[0] == sandbox.READY
needs_landlock = pytest.mark.skipif(not HIDDEN, reason="this kernel has no landlock: files are readable")


def children() -> set[int]:
    """Processes whose parent this one is, dead ones that nobody waited for among them."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_and_the_next_honest_program_passes():
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert (children(), len(os.listdir("/proc/self/fd"))) == before
    assert sandbox.passes(*HONEST)


def probe(program: str) -> bool:
    """Whether a program that asserts something about where it runs gets through."""
    return sandbox.passes(program, "assert True")


# Honest programs


def test_a_program_passes_exactly_when_its_tests_do():
    assert sandbox.passes(*HONEST)
    assert not sandbox.passes(HONEST[0], "assert double(2) == 5")
    assert not sandbox.passes("", HONEST[1])
    assert not sandbox.passes("def double(x) return", HONEST[1])
    assert not sandbox.passes(HONEST[0] + "\0", HONEST[1])
    assert not sandbox.passes(HONEST[0] + "# \ud800", HONEST[1])


def test_the_standard_library_is_there():
    assert probe(
        "import array, bisect, cmath, collections, copy, dataclasses, datetime, decimal, fractions, functools, hashlib,"
        " heapq, itertools, json, math, operator, random, re, statistics, string, sys, typing"
    )
    assert probe("from __future__ import annotations\nfrom dataclasses import *\n@dataclass\nclass A:\n    x: int")


def test_a_large_program_and_large_tests_are_read_whole():
    program = HONEST[0] + "".join(f"x{i} = {i}\n" for i in range(20_000))
    assert sandbox.passes(program, f"{HONEST[1]}\n" * 20_000 + "assert x19999 == 19999")


def test_what_stands_under_main_is_not_run():
    assert probe("if __name__ == '__main__':\n    raise SystemExit(1)")


def test_sets_of_text_keep_their_order_from_run_to_run():
    code = "list({'ab', 'cd', 'ef', 'gh', 'ij', 'kl', 'mn', 'op', 'qr'})"
    printing = [sys.executable, "-c", f"print({code})"]
    order = subprocess.run(printing, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True).stdout
    assert probe(f"assert {code} == {order}")


def test_runs_in_several_threads_do_not_mix():
    answers = {}

    def run(i):
        answers[i] = sandbox.passes(f"value = {i % 3}", "assert value == 1")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: i % 3 == 1 for i in range(9)}


# Programs that take without end


ENDLESS = {
    "loop": "while True: pass",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "deaf loop": "import signal as s\nfor i in set(s.Signals) - {9, 19}: s.signal(i, s.SIG_IGN)\nwhile True: pass",
    "loop that swallows errors": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "output": "import sys\nwhile True:\n    print('x' * 100_000)\n    print('x' * 100_000, file=sys.stderr)",
    "regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "great number": "10 ** 10 ** 10",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_never_ends_is_ended_by_its_cpu_time(kind):
    assert not sandbox.passes(ENDLESS[kind], "", seconds=1)


WAITING = {
    "sleep": "import time\ntime.sleep(1e6)",
    "lock": "import threading\na = threading.Lock()\na.acquire()\na.acquire()",
    "select": "import select\nselect.select([], [], [])",
    "signal": "import signal\nsignal.sigwait([2])",
    "input": "input()",
}


@pytest.mark.parametrize("kind", WAITING)
def test_nothing_can_wait_so_that_cpu_time_ends_every_program(kind):
    """At the default limit, whose wall clock is 100 seconds: this test would be that slow."""
    assert not sandbox.passes(WAITING[kind], "")


def test_a_child_that_waits_all_the_same_is_ended_by_the_clock(tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(1e6)")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "CHILD", tmp_path / "child.py")
        assert not sandbox._run("", "", seconds=0.1)[1]


@pytest.mark.parametrize("program", ["x = bytearray(1 << 31)", "x = []\nwhile True: x.append(bytearray(1 << 24))"])
def test_a_memory_bomb_meets_its_limit(program):
    indented = program.replace("\n", "\n    ")
    assert probe(f"try:\n    {indented}\nexcept MemoryError:\n    x = None\nelse: raise ValueError")
    assert not sandbox.passes("x = bytes(1 << 31)", "")


def test_a_crash_of_the_interpreter_is_a_program_that_fails():
    assert not sandbox.passes("import ctypes\nctypes.string_at(0)", "")
    assert not sandbox.passes("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nx = [f]\nrepr(f())", "", 1)


# Programs that reach out


REFUSED = {
    "fork": "os.fork()",
    "process": "__import__('subprocess').run(['true'])",
    "shell": "assert os.system('true') != 0 or False\nraise OSError",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "exec": "os.execv('/bin/true', ['true'])",
    "thread": "try:\n    __import__('threading').Thread(target=print).start()\nexcept RuntimeError: raise OSError",
    "kill parent": "os.kill(os.getppid(), 9)",
    "kill group": "os.killpg(os.getpgid(os.getppid()), 9)",
    "kill all": "os.kill(-1, 9)",
    "session": "os.setsid()",
    "daemon": "os.fork() or (os.setsid(), os.fork())",
    "limits of the parent": "__import__('resource').prlimit(os.getppid(), 7, (1, 1))",
    "own limits": "__import__('resource').setrlimit(0, (9, 9))",
    "user": "os.setuid(0)",
    "priority": "os.setpriority(0, 0, -5)",
    "signal through a file": "__import__('fcntl').fcntl(0, 8, os.getppid())",
    "internet": "socket.socket()",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "socket pair": "socket.socketpair()",
    "name look-up": "socket.getaddrinfo('example.com', 80)",
    "shared memory": "__import__('multiprocessing.shared_memory').shared_memory.SharedMemory('x', True, 9)",
    "memory file": "os.memfd_create('x')",
    "pipe": "os.pipe()",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_kernel_refuses_what_reaches_beyond_the_process(kind):
    code = REFUSED[kind].replace("\n", "\n    ")
    assert probe(f"import os, socket\ntry:\n    {code}\nexcept OSError: pass\nelse: raise ValueError('it worked')")


CALLS = {
    "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424,
    "ptrace": 101, "process_vm_writev": 311, "io_uring_setup": 425, "bpf": 321, "clone": 56, "clone3": 435, "fork": 57,
    "vfork": 58, "execve": 59, "execveat": 322, "prctl": 157, "socket": 41, "mount": 165, "ioctl": 16, "shmget": 29,
    "nanosleep": 35, "clock_nanosleep": 230, "futex": 202,
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("number", CALLS.values(), ids=CALLS)
def test_calls_below_python_are_refused_too(number):
    assert probe(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"assert libc.syscall({number}, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 38"
    )


@pytest.mark.parametrize(
    "code",
    [
        "open(path, 'w')", "open(path, 'a')", "open(path, 'r+')", "os.open(path, os.O_CREAT)", "os.remove(path)",
        "os.rename(path, path + '2')", "os.mkdir(path + '2')", "os.rmdir(os.path.dirname(path))",
        "os.truncate(path, 0)", "os.chmod(path, 0)", "os.utime(path)", "os.symlink(path, path + '2')",
        "os.link(path, path + '2')", "os.mkfifo(path + '2')", "os.setxattr(path, 'user.x', b'')",
        "__import__('tempfile').TemporaryFile()",
    ],
)  # fmt: skip
def test_no_file_is_written_made_or_deleted(code, tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    before = path.stat()
    assert probe(f"import os\npath = {str(path)!r}\ntry:\n    {code}\nexcept OSError: pass\nelse: raise ValueError")
    assert path.read_text() == "kept" and list(tmp_path.iterdir()) == [path]
    assert (path.stat().st_mode, path.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@needs_landlock
@pytest.mark.parametrize(
    "path",
    [
        __file__, sandbox.__file__, "/etc/passwd", "/proc/self/environ", "/proc/1/environ", "/proc/PARENT/environ",
        "/proc/PARENT/mem", "/dev/zero", "/sys/kernel/notes",
    ],
)  # fmt: skip
def test_no_file_but_the_libraries_can_be_read(path):
    path = path.replace("PARENT", str(os.getpid()))
    assert Path(path).exists()
    assert probe(f"try:\n    open({path!r}, 'rb').read(1)\nexcept OSError: pass\nelse: raise ValueError")


@needs_landlock
@pytest.mark.parametrize("folder", ["/", "/tmp", "/proc", "/etc", os.getcwd()])
def test_no_folder_but_those_of_the_libraries_can_be_listed(folder):
    assert probe(f"import os\ntry:\n    os.listdir({folder!r})\nexcept OSError: pass\nelse: raise ValueError")


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("TOKEN_OF_THE_HUB", "secret")
    assert probe("import os\nassert not os.environ, os.environ")


def test_a_listening_service_of_this_machine_hears_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        assert not sandbox.passes(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", "")
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_child_dies_with_its_parent(tmp_path):
    """The parent is killed with SIGKILL while its child loops."""
    code = (
        "import os, subprocess, sys; from diversed.data import sandbox; begin = subprocess.Popen\n"
        "def told(*a, **k):\n    child = begin(*a, **k); print(child.pid, flush=True); return child\n"
        "sandbox.subprocess.Popen = told; sandbox._run('while True: pass', '', 60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        wait_until(lambda: "Seccomp:\t2" in status(child))
        parent.kill()
    wait_until(lambda: "State:" not in status(child) or "State:\tZ" in status(child))


def status(process: int) -> str:
    try:
        return Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Programs that would like to pass


CHEATS = {
    "leaves with success": "import os\nos._exit(0)",
    "leaves politely": "import sys\nsys.exit(0)",
    "leaves when called": "import os\ndef double(x):\n    os._exit(0)",
    "raises nothing": "import sys\ndef double(x):\n    sys.exit(0)",
    "prints": "print('ready\\nOK PASSED 1.0 True')",
    "writes everywhere": (
        "import os\nfor d in range(64):\n    try: os.write(d, b'ready\\n' + bytes(16))\n    except OSError: pass"
    ),
    "closes every descriptor": "import os\nos.closerange(0, 64)\ndef double(x): return 2 * x",
    "floods the answer": "import os\nwhile True:\n    try: os.write(4, b'x' * 60000)\n    except OSError: pass",
    "makes compile harmless": "import builtins\nbuiltins.compile = lambda *a, **k: 'pass'",
    "makes exec harmless": "import builtins\nbuiltins.exec = lambda *a: None",
    "names its own builtins": "__builtins__ = {'double': lambda x: 4}",
    "jumps over the tests": (
        "import sys\ndef jump(frame, event, _):\n    if frame.f_code.co_filename == 'tests' and event == 'line':\n"
        "        frame.f_lineno = 2\n    return jump\nsys.settrace(jump)\ndouble = lambda x: 5"
    ),
    "swallows assertions": "AssertionError = Exception\nBaseException = ()\ndouble = lambda x: 5",
    "exits from its exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
}


@pytest.mark.parametrize("kind", CHEATS)
def test_a_pass_is_not_to_be_had_without_passing(kind):
    assert not sandbox.passes(CHEATS[kind], f"{HONEST[1]}\nFINISHED = True", seconds=1)


def test_the_tests_see_the_true_builtins():
    program = "import builtins\nbuiltins.all = builtins.any = lambda *_: True\nbuiltins.len = lambda _: 3"
    assert not sandbox.passes(program, "assert all([False])")
    assert not sandbox.passes(program, "assert len([]) == 3")


def test_the_tests_are_nowhere_while_the_program_runs():
    search = (
        "import gc, sys\nframe = sys._getframe()\nseen = []\nwhile frame:\n    seen += frame.f_locals.values()\n"
        "    frame = frame.f_back\nassert not any(''.join(['MARK', 'ER']) in repr(x) for x in seen + gc.get_objects())"
    )
    assert sandbox.passes(search, "'MARKER'")
    assert not sandbox.passes("x = 'MARKER'\n" + search, "'MARKER'")  # the search finds what is there


FORGED = {
    "reads every descriptor": (
        "import os\nd = b''\nfor f in range(3, 64):\n    try: d += os.pread(f, 9999, 0)\n    except OSError: pass\n"
        "for f in range(3, 64):\n    try: os.write(f, b'ready\\n' + d[-16:])\n    except OSError: pass"
    ),
    "an answer that equals everything": "class Yes:\n    def __eq__(self, other): return True\ndouble = lambda x: Yes()",
    "a number that equals everything": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndouble = lambda x: Yes(0)"
    ),
    "constants of the caller": (
        "import sys\ndef double(x):\n    f = sys._getframe()\n    while f:\n        c = f.f_code.co_consts\n"
        "        if x in c and len(c) > c.index(x) + 1: return c[c.index(x) + 1]\n        f = f.f_back\n    return 1"
    ),
    "names of the caller": (
        "import sys\ndef double(x):\n    f = sys._getframe()\n    while f:\n        for v in list(f.f_locals.values()):\n"
        "            if isinstance(v, bytes) and b'ass' + b'ert' in v: return 2 * x\n        f = f.f_back\n    return 1"
    ),
    "reads the tests when they are compiled": (
        "import sys, re\nknown = {}\ndef hook(event, a):\n    if event == 'compile' and a[0]:\n        text = str(a[0])\n"
        "        known.update(re.findall(r'double\\((\\d+)\\) == (\\d+)', text))\nsys.addaudithook(hook)\n"
        "def double(x): return int(known.get(str(x), 1))"
    ),
    "changes the number that is compared": (
        "import ctypes\ndef double(x):\n    ctypes.c_uint32.from_address(id(4) + 24).value = 0\n    return 0"
    ),
    "answers before it is asked": (
        "import os, json\nm = json.dumps(['value', {'double': 4}, []]).encode()\nm = len(m).to_bytes(8, 'big') + m\n"
        "for f in range(3, 64):\n    try: os.write(f, m)\n    except OSError: pass\ndef double(x): return 1"
    ),
    "kills from a destructor": "import os\nclass A:\n    def __del__(self): os._exit(0)\na = A()\ndef double(x): raise ValueError",
    "a builtin of its own": "def isinstance(*_): return True\ndef double(x): return 'no'",
}


@pytest.mark.parametrize("kind", FORGED)
def test_nothing_of_the_judge_can_be_reached(kind):
    assert not sandbox.passes(FORGED[kind], f"{HONEST[1]}\nassert isinstance(double(1), int)", seconds=2)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0", "import math\nassert math.isclose(f(2), 4)"),
        ("def set(x=()): return 0\ndef f(a): return ()", "assert set(f(1)) == set((4, 5))"),
        ("sorted = lambda *a, **k: 0\ndef f(l): return 1", "def check(g):\n    assert sorted(g([3])) == sorted([3])\ncheck(f)"),
        ("import builtins\nbuiltins.len = lambda x: 3\ndef f(): return []", "assert len(f()) == 3"),
        ("def check(c): pass\ndef f(x): return 0", "def check(c):\n    assert c(2) == 4\n\ncheck(f)"),
        ("class Yes(list):\n    def __eq__(s, o): return True\nf = lambda: Yes()", "assert f() == [1]"),
        ("class Yes(dict):\n    def __eq__(s, o): return True\nf = lambda: Yes()", "assert {1: 2} == f()"),
        ("class Yes(str):\n    def __eq__(s, o): return True\nf = lambda: Yes()", "assert f() == 'a'"),
        ("class Yes(float):\n    def __eq__(s, o): return True\nf = lambda: Yes()", "assert f() == 1.5"),
        ("f = float('nan')", "assert f == f"),
    ],
)
def test_the_judge_has_builtins_modules_and_values_of_its_own(program, tests):
    assert not sandbox.passes(program, tests, seconds=2)


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(l): l.append(3)", "a = [1]\nf(a)\nassert a == [1, 3]"),
        ("def f(d, **k): d.update(k)\ndef g(s): s.add(2)", "d, s = {}, set()\nf(d, a=1)\ng(s)\nassert d == {'a': 1} and s == {2}"),
        ("def f(g, x): return g(x) + 1", "assert f(lambda x: 10 * x, 2) == 21"),
        ("def f():\n    yield from (1, 2)", "assert list(f()) == [1, 2] and next(f()) == 1"),
        ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
         "try: f(-1)\nexcept ValueError as e: assert str(e) == 'negative'\nelse: assert False"),
        ("class Bad(Exception): pass\ndef f(): raise Bad('no')", "try: f()\nexcept Bad: pass\nelse: assert False"),
        ("class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(ps): return max(p.b for p in ps)",
         "assert f([Pair(1, 5), Pair(2, 3)]) == 5\nassert Pair(1, 2).a == 1"),
        ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
         "    def __eq__(self, o): return self.x == o.x\n    def __len__(self): return self.x",
         "assert V(1) + V(2) == V(3) and len(V(4)) == 4 and isinstance(V(1), V)"),
        ("from collections import *\ndef f(): return Counter('aab')\ndef g(): return deque([1])\ndef h(): return OrderedDict(a=1)",
         "from collections import deque\nassert f() == {'a': 2, 'b': 1} and g() == deque([1]) and h() == {'a': 1}"),
        ("from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\n"
         "f = lambda: (Decimal('1.5'), Fraction(1, 3), 1j, b'x', None, True, frozenset([1]), range(3), datetime.date(2020, 1, 2))",
         "import datetime\nx = f()\nassert x[0] == 1.5 and x[1] * 3 == 1 and x[2] ** 2 == -1 and x[3] == b'x'\n"
         "assert x[4] is None and x[5] is True and x[6] == {1} and list(x[7]) == [0, 1, 2] and x[8] == datetime.date(2020, 1, 2)"),
        ("import re\ndef f(t): return re.match('a+', t)", "assert f('aab') and not f('b') and f('aab').group() == 'aa'"),
        ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\nf = lambda: P(1)", "assert f() == (1,)"),
        ("f = lambda n: n * 10 ** 5000", "assert f(2) == 2 * 10 ** 5000"),
        ("f = lambda: float('inf')", "assert f() == float('inf') and f() > 1"),
        ("import math", "assert math.floor(2.5) == 2"),
        ("def sum(a, b): return a * b", "assert sum(3, 4) == 12"),
        ("x = [1, {'a': (2, None)}]", "assert x == [1, {'a': (2, None)}]"),
    ],
)  # fmt: skip
def test_what_honest_programs_and_tests_do_works_between_two_processes(program, tests):
    assert sandbox.passes(program, tests)


def test_what_a_judge_cannot_exclude_is_named():
    """Told in the module's docstring: objects of the program that are compared with each other."""
    equal = "class Yes:\n    def __eq__(self, other): return True\nf = lambda x: Yes()"
    assert sandbox.passes(equal, "assert f(1) == f(2)")


def test_two_processes_that_wait_for_each_other_are_ended():
    began = time.monotonic()
    assert not sandbox.passes("import os\nfor d in range(3, 9):\n    try: os.read(d, 1)\n    except OSError: pass", "double(1)")
    assert time.monotonic() - began < 30  # the clock alone would take 100 s


# Machines where it does not work


@pytest.fixture
def fresh():
    sandbox.check.cache_clear()
    yield
    sandbox.check.cache_clear()


@pytest.mark.parametrize("child", ["print('Traceback: no seccomp here')", "", "import no_such_module"])
def test_a_child_that_cannot_confine_itself_is_a_sentence_and_not_a_score_of_0(child, tmp_path, monkeypatch, fresh):
    (tmp_path / "child.py").write_text(child)
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "CHILD", tmp_path / "child.py")
        with pytest.raises(OSError, match=r"cannot confine model-written code on this machine \(.+\); use data.score"):
            sandbox.passes(*HONEST)


def test_other_systems_are_refused_in_a_sentence(monkeypatch, fresh):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(OSError, match="needs Linux, this is darwin; use data.score target_logprob"):
            sandbox.check()


def test_without_landlock_programs_run_and_one_note_says_so(tmp_path, monkeypatch, fresh, capsys):
    source = sandbox.CHILD.read_text()
    assert "call(444," in source
    (tmp_path / "child.py").write_text(source.replace("call(444,", "call(-1,"))
    shutil.copy(sandbox.CHILD.with_name("talk.py"), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "CHILD", tmp_path / "child.py")
        assert sandbox.passes(*HONEST) and sandbox.passes(*HONEST)
        assert probe("import os\ntry: os.fork()\nexcept OSError: pass\nelse: raise ValueError")
    assert capsys.readouterr().err.count("note: without landlock") == 1


def test_an_unknown_machine_is_named():
    from diversed.data.sandbox.child import seccomp_filter

    with pytest.raises(OSError, match="system calls of riscv64 are not known"):
        seccomp_filter("riscv64")
