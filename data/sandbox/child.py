"""The inside of `data.sandbox`, started as a script: gives up every right, then runs a program or
its judge.

Nothing of `diversed` is imported but `talk`: each child is one bare interpreter. What goes wrong
before the answer's first line is told in place of that line. Afterwards the program tells nothing,
and the judge nothing but the token of a pass.
"""

import builtins
import ctypes
import os
import resource
import struct
import sys

# machine -> (its name for seccomp, openat, futex, the other calls a program may make, in the order
# of the numbers)
CALLS = {
    # read write close stat fstat lstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
    # rt_sigreturn pread64 access sched_yield mremap madvise getitimer alarm setitimer getpid exit
    # uname getcwd readlink gettimeofday getrusage times getuid getgid geteuid getegid getppid
    # sigaltstack gettid time sched_getaffinity getdents64 restart_syscall clock_gettime
    # clock_getres exit_group newfstatat readlinkat faccessat getrandom statx rseq faccessat2
    "x86_64": (
        0xC000003E,
        257,
        202,
        (
            0,
            1,
            3,
            4,
            5,
            6,
            8,
            9,
            10,
            11,
            12,
            13,
            14,
            15,
            17,
            21,
            24,
            25,
            28,
            36,
            37,
            38,
            39,
            60,
            63,
            79,
            89,
            96,
            98,
            100,
            102,
            104,
            107,
            108,
            110,
            131,
            186,
            201,
            204,
            217,
            219,
            228,
            229,
            231,
            262,
            267,
            269,
            318,
            332,
            334,
            439,
        ),
    ),
    # getcwd faccessat close getdents64 lseek read write pread64 readlinkat newfstatat fstat exit
    # exit_group getitimer setitimer clock_gettime clock_getres sched_getaffinity sched_yield
    # restart_syscall sigaltstack rt_sigaction rt_sigprocmask rt_sigreturn times uname getrusage
    # gettimeofday getpid getppid getuid geteuid getgid getegid gettid brk munmap mremap mmap
    # mprotect madvise getrandom statx rseq faccessat2
    "aarch64": (
        0xC00000B7,
        56,
        98,
        (
            17,
            48,
            57,
            61,
            62,
            63,
            64,
            67,
            78,
            79,
            80,
            93,
            94,
            102,
            103,
            113,
            114,
            123,
            124,
            128,
            132,
            134,
            135,
            139,
            153,
            160,
            165,
            169,
            172,
            173,
            174,
            175,
            176,
            177,
            178,
            214,
            215,
            216,
            222,
            226,
            233,
            278,
            291,
            293,
            439,
        ),
    ),
}
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
NO_SUCH_CALL, READ_ONLY = (
    38,
    30,
)  # errno: what programs fall back on, and what the file system looks like
FUTEX_WAKE = (
    129  # private; libraries call it while they are loaded, with nobody asleep; waiting is refused
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVERY_RIGHT, READ_FILE, READ_FOLDER = (1 << 13) - 1, 1 << 2, 1 << 3  # landlock, first version
READABLE = (
    os.path.dirname(os.__file__),
    os.path.join(sys.base_prefix, "lib"),
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/urandom",
)
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    role, parent, seconds, source, sink, *sizes = sys.argv[1:]
    del sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from talk import Peer

    del sys.path[0]
    peer = Peer(int(source), int(sink))
    given, answer = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    os.environ.clear()
    try:
        hidden = confine(int(parent), int(seconds))
    except Exception as error:
        os.write(answer, f"{type(error).__name__}: {error}".encode())
        return
    os.write(answer, b"ready\n" if hidden else b"ready, files are visible\n")
    texts = [read(given, int(size)) for size in sizes]
    os.close(given)
    if role == "program":
        os.close(answer)
        run_program(peer, *texts)
    else:
        judge(peer, answer, *texts)


def read(source: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(source, size - len(data))
    return data


def confine(parent: int, seconds: int) -> bool:
    """Give up all rights but those of CALLS, for ever; False where files could not be hidden."""
    prctl(1, 9)  # PR_SET_PDEATHSIG: SIGKILL
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked to follow it
    for limit, most in (
        ("CPU", seconds),
        ("AS", 1 << 30),
        ("FSIZE", 0),
        ("NOFILE", 64),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    hidden = hide_files()
    lines = [struct.pack("HBBI", *line) for line in seccomp_filter(os.uname().machine)]
    code = ctypes.create_string_buffer(b"".join(lines))
    program = struct.pack("HP", len(lines), ctypes.addressof(code))
    prctl(22, 2, ctypes.c_char_p(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    return hidden


def prctl(option: int, value: int, pointer=0) -> None:
    if LIBC.prctl(
        option,
        ctypes.c_ulong(value),
        pointer or ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    ):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def hide_files() -> bool:
    """Landlock: no file but the READABLE ones can be opened; False where the kernel has none."""
    call = LIBC.syscall  # the numbers are the same on every machine
    rules = call(444, struct.pack("Q", EVERY_RIGHT), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    for path in filter(os.path.exists, READABLE):
        right = READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE
        descriptor = os.open(path, os.O_PATH)
        if call(445, rules, 1, struct.pack("=Qi", right, descriptor), 0):
            raise OSError(ctypes.get_errno(), "landlock_add_rule failed", path)
        os.close(descriptor)
    if call(446, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")
    os.close(rules)
    return True


def seccomp_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Lines of a BPF program over (call, machine, arguments): (operation, lines skipped if true, if
    false, operand).
    """
    if machine not in CALLS:
        raise OSError(f"system calls of {machine} are not known, only those of {', '.join(CALLS)}")
    name, openat, futex, allowed = CALLS[machine]

    def load(offset):
        return 0x20, 0, 0, offset

    def answer(verdict):
        return 0x06, 0, 0, verdict

    def rule(number, *lines):
        return [(0x15, 0, len(lines), number), *lines]

    lines = [load(4), (0x15, 1, 0, name), answer(KILL), load(0)]
    for number in allowed:
        lines += rule(number, answer(ALLOW))
    # Flags are openat's third argument, the operation futex' second; both machines are
    # little-endian.
    lines += rule(
        openat, load(32), (0x45, 0, 1, WRITING), answer(REFUSE | READ_ONLY), answer(ALLOW)
    )
    lines += rule(
        futex, load(24), (0x15, 0, 1, FUTEX_WAKE), answer(ALLOW), answer(REFUSE | NO_SUCH_CALL)
    )
    return [*lines, answer(REFUSE | NO_SUCH_CALL)]


def run_program(peer, program: bytes) -> None:
    """Run the program, then answer what the judge asks of it."""
    # Not __main__: what stands under `if __name__ == "__main__"` is not asked for.
    peer.module = sys.modules["program"] = type(sys)("program")
    try:
        exec(
            compile(str(program, "utf-8"), "program", "exec", dont_inherit=True), vars(peer.module)
        )
        peer.serve()
    finally:
        os._exit(1)


def judge(peer, answer: int, tests: bytes, token: bytes) -> None:
    """Run the tests on what the program defines; return the token if they pass.

    A name of the program does not replace a builtin that the tests use beside it, and a module that
    the program has imported is imported here.
    """
    try:
        code = compile(str(tests, "utf-8"), "tests", "exec", dont_inherit=True)
        own = {name for name in used(code) if not hasattr(builtins, name)}
        # Tests that name nothing but builtins are about the program's own, as `sum` of MBPP 126.
        names = peer.ask("names", sorted(own)) or peer.ask("names", sorted(used(code) - own))
        exec(code, {"__name__": "tests"} | names)
    except BaseException:
        os._exit(1)
    os.write(answer, token)
    os._exit(0)


def used(code) -> set[str]:
    """Names that a piece of code and the functions in it look up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, type(code)))
    return set(code.co_names).union(*map(used, inner))


if __name__ == "__main__":
    main()
