"""`diversed select`: a network for every method that chooses the tree before each step (delayed
trees, arXiv 2602.16994).

    OUT/settings.json    what the selectors are trained with
    OUT/labels/T=1       contexts and the tokens per step of every shape, one folder a temperature
    OUT/choosing-*.json  milliseconds of a choice on this machine, if latencies are measured
    OUT/METHOD           selector.json and selector.safetensors, for `--branches OUT/METHOD` and for
                         a bundle
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..data.selection import TextPrompts
from ..fields import number, read_checked
from ..files import exclusive, sha256, versions, within, write_whole
from ..runtime.forward import Pair
from ..runtime.groups import Models, Run
from ..runtime.prompt import prompt_tokens
from ..runtime.sampling import Sampling
from ..selector.chooser_training import ChooserOptions, time_choice, train_chooser
from ..selector.contexts import summary
from ..selector.labels import Labeller, Labelling, write_labels
from ..selector.latencies import PACKAGED, read_latencies

TRAINING = ("diversed", "torch", "pytorch-lightning")  # whose versions decide a selector
MOST_PROMPT_TOKENS = 384
TEXT_TOKENS = 64  # of a text that continues one prompt


def select(
    run: Run,
    models: Models = Models(),
    texts: TextPrompts = TextPrompts(),
    labelling: Labelling = Labelling(),
    training: ChooserOptions = ChooserOptions(),
    *,
    latencies: str,
) -> None:
    """Label contexts of a task's training prompts, then train a selector for every method.

    Args:
        latencies: file of `diversed bench latency --json`, or gpu for an assumed pair of 25 and
            3 ms a call.
    """
    within(2, prompts=texts.prompts)
    times, shapes = read_latencies(latencies), len(labelling.parsed)
    run.use_threads()
    pair, out = models.load(), Path(run.out)
    with exclusive(out):
        settings = {
            "latencies": sha256(PACKAGED.get(latencies, latencies)),
            "seed": texts.seed,
            "threads": run.threads,
            "versions": versions(TRAINING),
        }
        asked = settings | {"temperatures": labelling.temperatures} | asdict(training)
        if begun := run.folder().begun():  # before other labels are made
            run.folder().refuse_others(begun, asked)
        folders = _label(run, pair, texts, labelling)
        run.folder().begin(asked)
        choosing = 0.0
        if not times.assumed:
            file = out / f"choosing-{shapes}x{training.width}.json"
            choosing = _kept(file, lambda: time_choice(pair, shapes, training.width)) / 1e3
        for method in labelling.methods:
            place = out / method
            rows = train_chooser(place, method, folders, times, training, settings, choosing)
            print(summary(method, rows), flush=True)


def _label(run: Run, pair: Pair, texts: TextPrompts, labelling: Labelling) -> list[Path]:
    """The folders of labels, one for each temperature."""
    out = Path(run.out)
    origin = {"task": texts.task, "prompt": texts.prompt, "source": "one prompt"}
    if texts.prompt:
        encoded = [prompt_tokens(texts.prompt, pair.tokenizer)] * texts.prompts
        stop, limit = (), TEXT_TOKENS
    else:
        task = texts.load()
        encoded = task.encode_all(pair.tokenizer, None, MOST_PROMPT_TOKENS)
        stop, limit = task.stop, task.max_new_tokens
        origin |= task.settings
    origin |= {"threads": run.threads, "versions": versions()}
    labellers = {}
    for temperature in labelling.temperatures:
        labellers[temperature] = Labeller(
            pair, Sampling(temperature), labelling, texts.max_new_tokens or limit, stop
        )
        labellers[temperature].check(dict(enumerate(encoded)))
    folders = []
    for temperature, labeller in labellers.items():
        folder = Path(labelling.labels or out / "labels") / f"T={temperature:g}"
        folders.append(write_labels(folder, labeller, encoded, origin, texts.seed))
    return folders


def _kept(file: Path, measure: Callable[[], float]) -> float:
    """The milliseconds in the file. They are measured and written once: a run that continues must
    not time a choice anew.
    """
    if not file.is_file():
        write_whole(file, json.dumps({"choosing_ms": measure()}) + "\n")
    remedy = "delete it, and the selectors beside it that were trained with it"
    return read_checked(file, {"choosing_ms": number(0)}, remedy)["choosing_ms"]
