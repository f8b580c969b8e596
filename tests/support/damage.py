"""Damaged files: `python tests/support/damage.py --seed 0 --count 200` makes a small run, damages one file of it at a time,
and asks the command that reads the file. Each answer must be a sentence with exit code 2, a note that the file was
changed, or the very results of the undamaged run. The exit code is the number of other answers, at most 100.

A file is flipped (one bit), cut, emptied, deleted, lengthened, given one line twice or one less, or replaced by the same
file of another run.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from diversed import cli

try:
    from .kills import contents
except ImportError:
    from kills import contents

SECONDS = 60
SMALL = "--max_new_tokens 6"
MADE = {
    "traces": f"gather --out traces --prompts 6 --unit 2 --samples 2 --go_on true {SMALL}",
    "train": "train --data.traces traces --out train --trainer.max_epochs 2 --model.objective attribution",
    "bundle": "export --train train --out bundle",
    "eval": f"eval --out eval --prompts 4 --batch 2 {SMALL} --relaxations none bundle",
    "out": f"decode --input in.jsonl --output out.jsonl --relaxation bundle {SMALL}",
}
# What reads the files of a folder: the command that made it, and those that use it.
READ = {
    "traces": ["traces", "train --data.traces traces --out train2 --trainer.max_epochs 2 --model.objective attribution"],
    "train": ["train", "export --train train --out bundle2"],
    "bundle": [f"decode --prompt 1+2= --relaxation bundle {SMALL}", "out2"],
    "eval": ["eval", "report eval"],
    "out": ["out"],
}


def ask(words: list[str]) -> tuple[int, str]:
    """(exit code, or -1 for a traceback; what was said on standard error)."""
    out, error = io.StringIO(), io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            return cli.main(words), error.getvalue()
    except BaseException as failure:
        return -1, f"{type(failure).__name__}: {failure}"
    finally:
        signal.alarm(0)


def make(place: Path, seed: int) -> None:
    place.mkdir()
    os.chdir(place)
    Path("in.jsonl").write_text("".join(f'{{"id": "{i}", "prompt": "{i}+{seed}="}}\n' for i in range(5)))
    for name, words in MADE.items():
        more = ["--seed", str(seed)] if name in ("traces", "eval") else []
        code, said = ask([*words.split(), *more])
        assert code == 0, (name, said)


def damaged(path: Path, other: Path, draw: random.Random) -> str | None:
    """Damage a file; in words, None if nothing was changed."""
    data = path.read_bytes()
    kinds = ["flip"] * 6 + ["cut", "empty", "delete", "longer", "line twice", "line less", "swap"]
    kind, changed = draw.choice(kinds), bytearray(data)
    lines = data.splitlines(keepends=True)
    if kind == "flip" and data:
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        changed = changed[: draw.randrange(len(data) + 1)]
    elif kind == "empty":
        changed = bytearray()
    elif kind == "longer":
        changed += draw.randbytes(draw.randint(1, 40))
    elif kind.startswith("line") and lines:
        at = draw.randrange(len(lines))
        lines[at : at + 1] = [lines[at]] * 2 if kind == "line twice" else []
        changed = bytearray(b"".join(lines))
    elif kind == "swap":
        changed = bytearray(other.read_bytes() if other.is_file() else b"")
    if kind == "delete":
        path.unlink()
    elif bytes(changed) == data:
        return None
    else:
        path.write_bytes(bytes(changed))
    return f"{kind} {path}"


def readable(folder: str) -> list[Path]:
    names = ["out.jsonl", "in.jsonl", *(f"out.jsonl.run/{path.name}" for path in Path("out.jsonl.run").iterdir())]
    if folder != "out":
        names = [str(path) for path in Path(folder).rglob("*") if path.is_file()]
    # Pages and pictures are made anew and read by no command; locks hold a number that means nothing.
    return [Path(name) for name in sorted(names) if Path(name).suffix not in (".png", ".html", ".md") and ".lock" not in name]


def result(reading: str, place: Path) -> dict[str, bytes]:
    """What a command leaves, for comparison."""
    folders = {"traces": "traces", "train": "train", "eval": "eval", "out": "."}
    words = reading.split()
    where = folders.get(reading) or (words[words.index("--out") + 1] if "--out" in words else None)
    return contents(place / where) if where else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("a command hangs")))
    draw, counts, home = random.Random(asked.seed), Counter(), Path(tempfile.mkdtemp())
    for name, seed in (("one", 1), ("two", 2)):
        make(home / name, seed)
    for number in range(asked.count):
        place = home / f"work-{number}"
        folder = draw.choice(list(READ))
        reading = draw.choice(READ[folder])
        reading = "out" if reading == "out2" else reading
        words = MADE.get(reading, reading).split()
        words += ["--seed", "1"] if reading in ("traces", "eval") else []
        clean = home / f"clean-{number}"
        for copy in (place, clean):
            shutil.copytree(home / "one", copy)
        os.chdir(place)
        what = damaged(path := draw.choice(readable(folder)), home / "two" / path, draw)
        code, said = ask(words)
        after = {} if code else result(reading, place)
        os.chdir(clean)
        ask(words)
        expected = result(reading, clean)
        for found in (after, expected):  # the damaged file itself, and what is written for people
            for name in [*found]:
                if str(path).endswith(name) or name.endswith("metrics.csv"):
                    del found[name]
        lines = [text for text in said.splitlines() if text and not text.startswith(("note", "in.jsonl"))]
        if what is None or (code == 2 and len(lines) == 1):
            answer = "refused" if what else "nothing damaged"
        elif code == 0 and "was changed after it was written" in said:
            answer = "told"
        elif code == 0 and after == expected:
            answer = "same results"
        else:
            answer = "WRONG"
            names = [name for name in expected | after if expected.get(name) != after.get(name)]
            print(f"{what} <- {' '.join(words)}: code {code}, {said.strip()[-300:]!r}, differs {names[:4]}", flush=True)
        counts[answer] += 1
        os.chdir(home)
        shutil.rmtree(place)
        shutil.rmtree(clean)
    shutil.rmtree(home)
    print(dict(counts))
    sys.exit(min(100, counts["WRONG"]))


if __name__ == "__main__":
    main()
