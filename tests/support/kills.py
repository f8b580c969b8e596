"""Commands that a signal ends at random moments: they end as the signal does, and then with the bytes of a run in one go.

By hand, from the repository's root: python tests/support/kills.py FOLDER [--kills 50] [--seed 0] [--only gather ...]
[--signal KILL] [--fresh] prints one line a command. The commands are imported once and every run is a fork, so that a
signal meets work and not imports; with --fresh every run is a process of its own, imports and all. The moment is
uniform over the CPU time of the undisturbed run, which a busy machine does not stretch. After a run that came through
before its signal the files are compared and the folder begun anew; the last run is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from diversed import cli

GATHER = "gather --out out --prompts 12 --samples 2 --unit 2 --max_new_tokens 24 --go_on true"
LABELS = (
    "gather --out out --prompts 8 --samples 1 --unit 2 --max_new_tokens 24 --go_on true --sampling.temperature 0 "
    "--data.score final_number --label suffix"
)
REINFORCE = "reinforce --out out --prompts 5 --samples 2 --updates 4 --prompts_per_update 2 --max_new_tokens 24 --model.lr 0.02"
TRAIN = "train --data.traces traces --out out --trainer.max_epochs 4 --model.objective attribution --data.batch 4"
RUN = (
    "run --out out --rounds 2 --gather.prompts 12 --gather.samples 2 --gather.unit 4 --max_new_tokens 16 "
    "--train.trainer.max_epochs 2 --train.model.objective attribution --train.data.validation 0.3 "
    "--eval.prompts 4 --eval.batch 2 --eval.relaxations none"
)
EVAL = "eval --out out --prompts 8 --batch 4 --max_new_tokens 16 --methods token block --relaxations none ensemble:0.3"
DECODE = (
    "decode --input in.jsonl --output out/out.jsonl --unit 3 --batch 3 --max_new_tokens 16 --method block "
    "--relaxation ensemble:0.3 --threads 1 --dtype float32"
)
DISTILL = "distill --out out --prompts 12 --samples 1 --max_new_tokens 24 --epochs 3 --rank 4 --validation 0.3 --patience 0"
SELECT = (
    "select --out out --latencies gpu --prompts 6 --max_new_tokens 32 --unit 2 --trees 1 --methods token block "
    "--shapes 1 2 4 2x2 --epochs 3 --batch 8"
)


def _traces(folder: Path) -> None:
    words = f"gather --out {folder / 'traces'} --prompts 12 --samples 2 --unit 4 --max_new_tokens 24 --go_on true"
    assert end(start(words, folder))[0] == 0, (folder / "log").read_text()


def _prompts(folder: Path) -> None:
    rows = ({"prompt": f"{i} + {7 * i % 23} = ", "seed": i} for i in range(12))
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# name -> (words, what has to be there before)
SERIES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "gather": (GATHER, lambda folder: None),
    "labels": (LABELS, lambda folder: None),
    "reinforce": (REINFORCE, lambda folder: None),
    "train": (TRAIN, _traces),
    "run --rounds": (RUN, lambda folder: None),
    "eval": (EVAL, lambda folder: None),
    "decode": (DECODE, _prompts),
    "select": (SELECT, lambda folder: None),
    "distill": (DISTILL, lambda folder: None),
}
# signal -> the status that a process ends with
ENDS = {"KILL": -signal.SIGKILL, "TERM": -signal.SIGTERM, "HUP": -signal.SIGHUP, "INT": 130}
MEASURED = ("report.html", "frontier.png", "tokens.json")  # made of measured seconds
COUNTS = ("last.ckpt",)  # Lightning counts steps since the last restart in it


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but hidden ones and those above, by its path; seconds that were measured are left out."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in MEASURED + COUNTS)
    names = {path: path.relative_to(folder) for path in paths}
    return {str(name): _bare(path) for path, name in names.items() if not any(p.startswith(".") for p in name.parts)}


def _bare(path: Path) -> bytes:
    if path.name == "results.jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return json.dumps([{k: v for k, v in record.items() if k not in ("seconds", "crc32")} for record in records]).encode()
    if path.name == "card.json":
        return json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in ("frontier", "crc32")}).encode()
    return path.read_bytes() if path.suffix != ".md" else b""  # a bundle's README tells its tokens per second


def start(words: str, folder: Path, fresh: bool = False) -> int:
    """A child that runs the command in `folder`, what it prints appended to FOLDER/log; its pid."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.chdir(folder)
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["diversed", *words.split()]
        if fresh:
            os.execv(sys.executable, [sys.executable, "-m", *sys.argv])
        status = cli.main()
    finally:
        os._exit(status)


def end(child: int) -> tuple[int, float]:
    """(exit status, or minus the signal; seconds of CPU time)."""
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def kill(child: int, seconds: float, number: int) -> None:
    """Send the signal once the child has used so much CPU time, unless it has ended before."""
    clock = Path(f"/proc/{child}/schedstat")
    while float(clock.read_text().split()[0] or 0) < seconds * 1e9:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.002)
    os.kill(child, number)


def series(name: str, place: Path, kills: int, draw: random.Random, how: str = "KILL", fresh: bool = False) -> dict:
    """End one command so many times; what happened. AssertionError where a run fails or ends with other bytes, or where
    a signal is answered otherwise than by its status and a line that says how to resume.
    """
    import transformers.models.llama.modeling_llama  # noqa: F401  else every fork imports it

    words, prepare = SERIES[name]
    cli.command(words.split()[0])
    place.mkdir(parents=True)
    prepare(place)
    status, duration = end(start(words, place, fresh))
    assert status == 0, (place / "log").read_text()
    expected = contents(place / "out")
    shutil.rmtree(place / "out")
    found = {"seconds": duration, "files": len(expected), "kills": 0, "told": 0, "finished": 0}
    while True:
        last = found["kills"] == kills
        (place / "log").unlink()
        child = start(words, place, fresh)
        if not last:
            kill(child, draw.uniform(0, duration), signal.Signals[f"SIG{how}"])
        status, _ = end(child)
        assert status in (0, ENDS[how]), f"{status}: {(place / 'log').read_text()}"
        if status != 0:
            found["kills"] += 1
            found["told"] += f"resume with: diversed {words}" in (place / "log").read_text()
            continue
        found["finished"] += 1
        now = contents(place / "out")
        other = sorted(key for key in expected.keys() | now.keys() if expected.get(key) != now.get(key))
        assert not other, f"{name} after {found['kills']} kills: other bytes in {', '.join(other)}"
        if last:
            return found
        shutil.rmtree(place / "out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", default="KILL", choices=list(ENDS))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(SERIES), choices=list(SERIES))
    options = parser.parse_args()
    for name in options.only:
        place = options.folder.absolute() / name.partition(" ")[0]
        found = series(name, place, options.kills, random.Random(options.seed), options.signal, options.fresh)
        print(
            f"{name}: {found['kills']} times SIG{options.signal}, {found['told']} said how to resume, over {found['seconds']:.1f} s of CPU time, {found['finished']} runs came "
            f"through, {found['files']} files with the bytes of the undisturbed run",
            flush=True,
        )


if __name__ == "__main__":
    main()
