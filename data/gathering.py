"""Gather traces: prompts -> sampled texts under a relaxation, their rewards, and the scalars from
which a head is trained.

Work is cut into fixed units of prompts, one shard file each, and decoded with a fixed batch and
thread count, so that floating point repeats: a run that was killed and started again ends with the
same bytes, and so does one that several processes share.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..files import (
    SCORING,
    SETTINGS_FORMAT,
    Progress,
    duration,
    versions,
    within,
    write_object,
)
from ..runtime.bundle import head_sha256
from ..runtime.groups import Models, SharedRun, check_filters
from ..runtime.relaxer import contents
from ..runtime.sampling import Sampling
from ..verifier.relax import parse
from .columns import bytes_per_token
from .first_look import EVENTS, LOOKED_AT, NUMBERS, FirstLook, choose_weight
from .importance import Labeller, Labels
from .selection import SplitPrompts
from .shards import ShardFolder
from .traces import MANIFEST, Shard, read_shard, shard_name, write_shard
from .writing import Asked, Writer

# A text's random numbers are those of (seed << 44) ^ (prompt << 16) ^ sample, an int64.
MOST_SEED, MOST_SAMPLES = (1 << 19) - 1, 1 << 16
AUTO = "auto"
CHOICE = "auto.json"  # in the folder of traces: the weights that were tried, and the chosen one


@dataclass(frozen=True)
class Rollouts:
    """The texts that are sampled.

    Args:
        samples: texts for each prompt; the policy gradient needs several.
        first_sample: number of a prompt's first text; texts of other numbers are other texts of the
            same prompts.
        relaxation: what texts are sampled from, such as none, ensemble:0.3 (w is the DRAFT's share)
            or a bundle folder; or auto: ensemble, at temperature 0 coin, with the weight at which
            about half of the texts that the target gets right still succeed, chosen by trials on
            the first unit.
        sampling: temperature, top_k, top_p, min_p of both models.
        go_on: gather all texts even if the first ones will teach little.
    """

    samples: int = 4
    first_sample: int = 0
    relaxation: str = "ensemble:0.3"
    sampling: Sampling = Sampling()
    go_on: bool = False

    def __post_init__(self):
        within(1, MOST_SAMPLES, samples=self.samples)
        within(0, MOST_SAMPLES - self.samples, first_sample=self.first_sample)
        check_filters(self.sampling)
        draws = self.relaxation == AUTO or parse(self.relaxation).name == "coin"
        if self.sampling.greedy and self.samples > 1 and not draws:
            raise ValueError(
                f"the {self.samples} `samples` of a prompt would be the same text at temperature 0,"
                " where nothing is drawn; give --samples 1, or a relaxation coin:0.3, which draws"
            )


@dataclass(frozen=True)
class Stored:
    """What is stored of a text, and how many texts a file holds.

    Args:
        hidden: also store the last hidden states of both models, float16.
        store_logits: also store the log-probabilities of this many tokens, for training with
            `blend: logits`.
        unit: prompts per shard; unit x samples texts are decoded together.
    """

    hidden: bool = False
    store_logits: int = 0
    unit: int = 32

    def __post_init__(self):
        within(1, unit=self.unit)
        within(0, store_logits=self.store_logits)


def gather_traces(
    run: SharedRun,
    models: Models,
    prompts: SplitPrompts,
    rollouts: Rollouts,
    stored: Stored,
    labels: Labels = Labels(),  # noqa: B008  frozen
) -> Path:
    """Sample texts under a relaxation and store what a head needs to learn from them; a folder that
    was begun with the same options is continued.
    """
    within(0, MOST_SEED, seed=prompts.seed)
    folder = run.folder(MANIFEST)
    if labels.label:
        rollouts = _without_relaxation(rollouts)
    run.use_threads()
    asked = Asked.load(models, prompts)
    settings = {
        **asked.settings,
        "sampling": vars(rollouts.sampling),
        "relaxation": rollouts.relaxation,
        "samples": rollouts.samples,
        "first_sample": rollouts.first_sample,
        "unit": stored.unit,
        "hidden": stored.hidden,
        "store_logits": stored.store_logits,
        "threads": run.threads,
        "versions": versions(SCORING),
        **labels.settings,
    }

    def writer(relaxation: str, samples: int = rollouts.samples) -> Writer:
        kept = {"hidden": stored.hidden, "store_logits": stored.store_logits}
        return asked.writer(relaxation, rollouts.sampling, samples, rollouts.first_sample, **kept)

    if rollouts.relaxation == AUTO:
        if not asked.task.scores_text:
            raise ValueError(
                f"`relaxation` auto needs a task whose texts are right or wrong, and"
                f" {asked.task.name} gives none a score; name one, such as ensemble:0.3"
            )
        settings["relaxation"] = _chosen(run, settings, rollouts, writer)
    chosen = writer(settings["relaxation"])
    rule = chosen.sampler.relaxer.rule
    if rule.blend == "logits":  # a bundle's card says so, and training must know
        settings["relaxation"] = str(rule)
    if head := head_sha256(rule.folder):
        settings["gate"] = head  # texts of two heads must not be mixed under one name
    settings["contents"] = contents([rule])
    worker = Labeller(chosen, labels) if labels.label else chosen
    return _Gathering(ShardFolder(folder, settings), worker, rollouts.go_on).run()


def _without_relaxation(rollouts: Rollouts) -> Rollouts:
    """Texts of the target alone, which labels are about."""
    if rollouts.relaxation not in (Rollouts.relaxation, "none"):
        raise ValueError(
            f"`label` is of the target's own texts, not of those of {rollouts.relaxation}; leave"
            " `relaxation` out"
        )
    return replace(rollouts, relaxation="none")


def _chosen(
    run: SharedRun, settings: dict[str, Any], rollouts: Rollouts, writer: Callable[..., Writer]
) -> str:
    """The relaxation that trials on the first unit ask for. They stand in CHOICE, so nothing is
    tried twice, and processes that share the folder wait for the first.
    """
    place = run.folder(CHOICE)
    greedy = rollouts.sampling.greedy
    name = "coin" if greedy else "ensemble"
    unit = range(min(settings["unit"], settings["prompts"]))

    with place.held(), place.turn():
        state = place.begun()
        if state:
            place.refuse_others(state, settings)
        elif begun := run.folder(MANIFEST).begun():
            raise ValueError(
                f"{run.out} was begun with relaxation {begun['relaxation']}, which auto may not"
                " choose; give the same again to continue it, or choose another --out"
            )
        state = {"chosen": None, "tried": []} | SETTINGS_FORMAT | settings | state

        def trial(weight: float) -> FirstLook:
            for known in state["tried"]:
                if known["weight"] == weight:
                    return FirstLook(**known["look"])
            relaxation = f"{name}:{weight}" if weight else "none"
            samples = rollouts.samples if weight or not greedy else 1
            look = FirstLook.of(writer(relaxation, samples).unit(unit)[0])
            print(f"auto, {relaxation}: {look}", flush=True)
            state["tried"].append({"weight": weight, "look": asdict(look)})
            write_object(place.path / CHOICE, state)
            return look

        exact = trial(0.0)
        refuse(exact.cut(settings["max_new_tokens"]) or exact.failing(), rollouts.go_on)
        weight, kept = choose_weight(trial)
        state["chosen"] = f"{name}:{weight}"
        write_object(place.path / CHOICE, state)
    print(
        f"auto chose {state['chosen']}: {kept:.0%} of the {exact.reward:.3f} that exact texts earn"
        " was kept at the last weight that was tried, and half should be at this one"
    )
    return state["chosen"]


def refuse(objection: str | None, go_on: bool) -> None:
    """ValueError for what speaks against a gathering, or a note if it goes on all the same."""
    if objection and not go_on:
        raise ValueError(f"{objection}. What was gathered is kept; --go_on true continues as it is")
    if objection:
        print(f"note: {objection}", flush=True)


class _Gathering:
    """One process's part of a folder of traces."""

    def __init__(self, shards: ShardFolder, writer: Writer | Labeller, go_on: bool):
        self.shards, self.settings, self.writer = shards, shards.settings, writer
        self.go_on = go_on
        self.first: list[Shard] = []  # that were looked at

    def run(self) -> Path:
        shards, folder = self.shards, self.shards.folder
        with folder.held():
            missing = shards.begin(lambda entry, whole: read_shard(folder.path, entry, whole))
            if missing:
                for unit in shards.share[: shards.share.index(missing[0])]:
                    entry = shards.entries[shard_name(shards.number(unit))]
                    self._look(read_shard(folder.path, entry, self.settings))
                print(self._estimate(missing), flush=True)
                self._gather(missing)
            else:
                print(f"{folder.path}: traces are complete, nothing to gather")
            shards.finish()
        return folder.path

    def _estimate(self, missing: list[range]) -> str:
        s, out = self.settings, self.shards.folder.path
        texts = sum(map(len, missing)) * s["samples"]
        numbers = s["hidden"] * (s["target"]["hidden_size"] + s["draft"]["hidden_size"])
        each = bytes_per_token(numbers, s["store_logits"], "label" in s)
        most = texts * s["max_new_tokens"] * each
        free = shutil.disk_usage(out).free
        warning = "" if most < free else f"; only {free / 1e6:,.0f} MB are free there"
        step = self.writer.seconds_a_step(len(missing[0]) * s["samples"])
        seconds = len(missing) * s["max_new_tokens"] * step
        return (
            f"{s['task']}: {texts} texts of at most {s['max_new_tokens']} tokens at {each} bytes a"
            f" token: at most {most / 1e6:,.1f} MB in {out}{warning}, and {duration(seconds)} if"
            " every text is as long as it may be. A linear head wants at least"
            f" {2 * EVENTS * NUMBERS} texts, half of them failed ({EVENTS} of each kind for each"
            f" of its {NUMBERS} numbers)"
        )

    def _look(self, shard: Shard) -> None:
        """Say what the first units say of all texts, and stop if they will teach little."""
        if sum(known.texts for known in self.first) >= LOOKED_AT:
            return
        self.first.append(shard)
        said, objection = self.writer.look(self.first)
        print(said, flush=True)
        refuse(objection, self.go_on)

    def _gather(self, missing: list[range]) -> None:
        shards, share = self.shards, len(self.shards.share)
        reward, finished, texts, costs = 0.0, 0, 0, Counter()
        with Progress("gather", share, share - len(missing)) as progress:
            for unit in missing:
                shard, cost = self.writer.unit(unit)
                entry = write_shard(shards.folder.path, shards.number(unit), shard)
                shards.add(entry | cost)
                costs.update(cost)
                texts += shard.texts
                reward += float(shard.reward.sum())
                finished += int(shard.finished.sum())
                what = f"gather (reward {reward / texts:.3f}, {finished / texts:.0%} finished)"
                progress.add(tokens=shard.tokens, what=what)
                if unit != missing[-1]:  # else nothing would be saved
                    self._look(shard)
        print(
            f"gathered {progress.tokens} tokens in {progress.seconds:.1f} s, {progress.rate}"
            " (sampled tokens, the end token included)"
        )
        if costs:
            print(
                f"with labels {costs['generated']} tokens were generated, and {costs['forced']}"
                " were read without generating any; prompts are not counted"
            )
