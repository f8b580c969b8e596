"""Random command lines: `python tests/support/odd_lines.py --seed 0 --count 200` prints what was answered, and every line
that ended in another way than with a sentence of one line: a traceback, a hang, a folder left by a refusal. The exit code
is the number of such lines, at most 100.

Lines are made of real commands and options, some with odd values; nothing that is asked here is a whole piece of work.
With --near a line is a small piece of work that runs, with one option of its command set to something odd; it may run.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from diversed import cli

OPTIONS = json.loads((Path(__file__).parents[1] / "golden_options.json").read_text())
ODD = ["0", "-1", "9" * 25, "nan", "inf", "1e400", "", "null", "true", "[", "{}", "😀", "\udc80", "x" * 100_000, "../..",
       "/dev/null", "-", "--", "a b", "&a", "*a", "!!x", "'"]  # fmt: skip
NUMBERS = ["1", "2", "3", "1e-9", "0.5", "-0.5", "1e9", "true", "none", "auto", "1,2", "[1]"]
SMALL = {
    "decode": "decode --prompt 12+3= --max_new_tokens 4",
    "gather": "gather --out o --prompts 2 --samples 2 --max_new_tokens 4",
    "eval": "eval --out o --prompts 2 --max_new_tokens 4 --relaxations none ensemble:0.5",
    "train": "train --data.traces {home}/traces --out o --trainer.max_epochs 1",
    "export": "export --train {home}/train --out o",
    "calibrate": "calibrate --bundle {home}/bundle --out o --prompts 2 --max_new_tokens 4 --max_quality_drop 0.5 --biases 0",
    "reinforce": "reinforce --out o --updates 1 --prompts 2 --samples 2 --max_new_tokens 4",
    "report": "report {home}/eval --out o",
}
# What runs for a minute if nothing is odd about a line.
SHORT = {
    "run": "run --gather.prompts 2 --gather.samples 2 --max_new_tokens 4 --train.trainer.max_epochs 1 --eval.prompts 2",
    "reinforce": "reinforce --updates 1 --prompts 2 --samples 2 --max_new_tokens 4",
}
SECONDS, SLOW = 20, 5


class Hang(Exception):
    """A command took longer than SECONDS."""


def line(draw: random.Random) -> list[str]:
    command = draw.choice([name for name in OPTIONS if not name.startswith("bench")])
    words = SHORT.get(command, command).split()
    for name in draw.sample(list(OPTIONS[command]), min(len(OPTIONS[command]), draw.randint(1, 4))):
        words += [f"--{name}"] + draw.choices(ODD, k=draw.choice([0, 1, 1, 1, 2]))
    return words


def near(draw: random.Random, home: str) -> list[str]:
    command = draw.choice(list(SMALL))
    # A name that is no folder is looked for on the hub, which takes a minute if there is no network.
    name = draw.choice([name for name in OPTIONS[command] if name.split(".")[-1] not in ("target", "draft")])
    value = draw.choice(ODD + NUMBERS)
    return [*SMALL[command].format(home=home).split(), f"--{name}", value]


def prepared(home: str) -> None:
    """What the small pieces of work read."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for words in (
            "gather --out traces --prompts 4 --samples 2 --max_new_tokens 8",
            "train --data.traces traces --out train --trainer.max_epochs 1",
            "export --train train --out bundle",
            "eval --out eval --prompts 2 --max_new_tokens 4 --relaxations none ensemble:0.5",
        ):
            words = words.replace("traces traces", f"traces {home}/traces").replace("--out traces", f"--out {home}/traces")
            words = words.replace("--train train", f"--train {home}/train")
            words = words.replace("--out train", f"--out {home}/train").replace("--out bundle", f"--out {home}/bundle")
            assert cli.main(words.replace("--out eval", f"--out {home}/eval").split()) == 0, words


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
    parser.add_argument("--near", action="store_true")
    asked = parser.parse_args()

    def late(*_):
        raise Hang

    signal.signal(signal.SIGALRM, late)
    draw, counts, home = random.Random(asked.seed), Counter(), Path.cwd()
    made, good = tempfile.mkdtemp(), {"refused", "done", "exit 1"}
    if asked.near:
        prepared(made)
    for _ in range(asked.count):
        words = near(draw, made) if asked.near else line(draw)
        place = tempfile.mkdtemp()
        os.chdir(place)
        began = time.monotonic()
        answer = answered(words)
        if (took := time.monotonic() - began) > SLOW:
            print(f"{took:.0f} s  <-  {' '.join(word[-60:] for word in words)!r}", flush=True)
        os.chdir(home)
        shutil.rmtree(place)
        counts[answer.split(":")[0]] += 1
        if answer not in good:
            print(f"{answer}  <-  {' '.join(word[-60:] for word in words)!r}", flush=True)
    shutil.rmtree(made)
    print(dict(counts))
    sys.exit(min(100, sum(counts.values()) - sum(counts[answer] for answer in good)))


if __name__ == "__main__":
    main()
