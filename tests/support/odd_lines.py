"""Random command lines: `python tests/support/odd_lines.py --seed 0 --count 200` prints what was answered, and every line
that ended in another way than with a sentence of one line: a traceback, a hang, a folder left by a refusal.

Lines are made of real commands and options, some with odd values; nothing that is asked here is a whole piece of work.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

from diversed import cli

OPTIONS = json.loads((Path(__file__).parents[1] / "golden_options.json").read_text())
ODD = ["0", "-1", "9" * 25, "nan", "inf", "1e400", "", "null", "true", "[", "{}", "😀", "\udc80", "x" * 100_000, "../..",
       "/dev/null", "-", "--", "a b", "&a", "*a", "!!x", "'"]  # fmt: skip
SECONDS = 20


class Hang(Exception):
    """A command took longer than SECONDS."""


def line(draw: random.Random) -> list[str]:
    command = draw.choice([name for name in OPTIONS if not name.startswith("bench")])
    words = command.split()
    for name in draw.sample(list(OPTIONS[command]), min(len(OPTIONS[command]), draw.randint(1, 4))):
        words += [f"--{name}"] + draw.choices(ODD, k=draw.choice([0, 1, 1, 1, 2]))
    return words


def answered(words: list[str]) -> str:
    """What became of a command line: refused, done, or what is wrong with its answer."""
    out, error = io.StringIO(), io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = cli.main(words)
    except SystemExit as stop:
        code = stop.code
    except Hang:
        return "hang"
    except BaseException as failure:  # whatever reaches the user as a traceback
        return f"traceback: {type(failure).__name__}: {str(failure)[:200]}"
    finally:
        signal.alarm(0)
    said = [text for text in error.getvalue().splitlines() if text and not text.startswith("note")]
    if code == 2 and len(said) != 1:
        return f"refused in {len(said)} lines: {said[-1:]}"
    if code == 2 and os.listdir():
        return f"refused, left {os.listdir()}"
    return {0: "done", 2: "refused"}.get(code, f"exit {code}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    asked = parser.parse_args()

    def late(*_):
        raise Hang

    signal.signal(signal.SIGALRM, late)
    draw, counts, home = random.Random(asked.seed), Counter(), Path.cwd()
    for _ in range(asked.count):
        words = line(draw)
        place = tempfile.mkdtemp()
        os.chdir(place)
        answer = answered(words)
        os.chdir(home)
        shutil.rmtree(place)
        counts[answer.split(":")[0]] += 1
        if answer != "refused":
            print(f"{answer}  <-  {' '.join(word[:30] for word in words)!r}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
