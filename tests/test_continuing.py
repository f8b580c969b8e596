"""Everything that decides a result is in the settings of its folder.

For every command that can be continued: a run is cut off, then each option is given another value, one at a time, and
each file behind a name another content. The command is refused and writes nothing, unless the option is listed as not
deciding, with the reason. In the end the same command as before continues to the bytes of a run that was not cut off.
"""

import functools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from diversed import cli
from diversed.commands import calibrate, decode, select_trees
from diversed.commands import eval as evaluation
from diversed.eval.sweep import Sweep
from diversed.export.bundle_writer import write_bundle
from diversed.export.card import make_card
from diversed.runtime.model import load_pair
from diversed.runtime.sampling import Sampling
from diversed.selector.latencies import PACKAGED
from diversed.train import distillation, head_training, on_policy
from diversed.verifier.head import WeightHead

from .support.kills import contents
from .support.models import module, tokenizer
from .support.traces import synthetic_traces
from .test_golden_options import PROMISED

BEGUN = ("was begun with", "holds results of another", "holds the calibration of another")
DATA = {
    "task": "gsm8k", "data.path": "copy.jsonl", "data.whole": "false", "data.prompt_field": "other",
    "data.article_field": "other", "data.reference_field": "other", "data.template": "Q: {prompt}",
    "data.score": "rouge2", "data.stop": "w3", "data.max_new_tokens": "5", "data.chat": "true",
    "data.skip_incomplete": "true", "data.shots": "1",
}  # fmt: skip
MODELS = {"target": "other", "draft": "other", "dtype": "bfloat16", "threads": "2"}
SAMPLING = {"sampling.temperature": "0.5", "sampling.top_k": "3", "sampling.top_p": "0.9", "sampling.min_p": "0.1"}
PROMPTS = {"prompts": "5", "max_prompt_tokens": "40", "max_new_tokens": "6", "seed": "1"}
LABELS = ("label", "label_order", "label_samples", "label_suffix", "label_threshold", "label_batch")
PLACE = "names the folder"
SHARE = "who does the work does not change it"
CELL = "a line says it, and lines of other values are added"
ANYWHERE = {
    "device": "in the settings; there is one device here",
    "trust_remote_code": "code that comes with a model is in the settings by its checksum",
}
TRAINER = {
    "precision": "bf16-true", "fast_dev_run": "true", "max_epochs": "4", "min_epochs": "2", "max_steps": "5",
    "min_steps": "2", "max_time": "00:01:00:00", "limit_train_batches": "2", "limit_val_batches": "1",
    "overfit_batches": "1", "val_check_interval": "2", "check_val_every_n_epoch": "2", "accumulate_grad_batches": "2",
    "gradient_clip_val": "1.5", "gradient_clip_algorithm": "value", "deterministic": "true", "benchmark": "true",
    "sync_batchnorm": "true", "reload_dataloaders_every_n_epochs": "1",
}  # fmt: skip
HEAD = {
    "features": "hidden", "width": "3", "lr": "0.1", "warmup_steps": "3", "weight_decay": "0.5", "lambda_": "0.5 --model.objective reinforce",
    "ratio_clip": "3 --model.objective reinforce", "acceptance": "sum --model.objective reinforce", "objective": "bounded", "blend": "logits --model.objective reinforce", "bound": "0.5 --model.objective bounded",
    "start": "trained", "patience": "2", "offset": "divergence:0.3",
}  # fmt: skip
COMMON = "--target target --draft draft --task jsonl --data.path data.jsonl --data.whole --data.prompt_field question"
SCORED = f"{COMMON} --data.reference_field answer --data.score rouge1 --prompts 6 --max_new_tokens 8 --max_prompt_tokens 50"


def edit(old, new):
    return lambda path: path.write_text(path.read_text().replace(old, new))


def changed(**values):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


def copy(source):
    return lambda path: path.write_bytes((path.parent / source).read_bytes())


# What lies behind a name: file -> what makes another of it.
ROWS = {"data.jsonl": edit("w3 4", "w3 5")}
PAIR = {
    "target/chat_template.jinja": edit("w2", "w3"),
    "target/tokenizer.json": edit('"normalizer": null', '"normalizer": {"type": "Lowercase"}'),
    "target/generation_config.json": changed(eos_token_id=[1, 4]),
    "target/config.json": changed(rms_norm_eps=1e-2),
    "draft/config.json": changed(rms_norm_eps=1e-2),
    "draft/model.safetensors": copy("../other/model.safetensors"),
}
BUNDLE = {"bundle": lambda path: _swap(path, path.parent / "bundle2"), "bundle/card.json": edit('"probabilities"', '"logits"')}
FILES = ROWS | PAIR | BUNDLE


def _swap(first, second):
    shutil.rmtree(first)
    shutil.copytree(second, first)


class Case:
    """words: of the command; cut: how its first run is cut off; changes: option -> another value; other: option -> why
    it does not decide; files: what lies behind names; out: where results lie.
    """

    def __init__(self, words, cut, changes, other, files, out="out"):
        self.words, self.cut, self.changes, self.other, self.files, self.out = words, cut, changes, other, files, out


def second_process(place, words, patch):
    """The first of two processes has done its share."""
    assert cli.main([*words, "--num_shards", "2", "--shard_index", "0"]) == 0


def stopped(module, name, calls=1):
    """The command is interrupted at a call of a function."""

    def cut(place, words, patch):
        original, seen = getattr(module, name), []

        @functools.wraps(original)
        def interrupt(*arguments, **options):
            seen.append(1)
            if len(seen) < calls:
                return original(*arguments, **options)
            raise KeyboardInterrupt

        patch.setattr(module, name, interrupt)
        assert cli.main(words) == 130

    return cut


def one_bias(place, words, patch):
    """The command is interrupted when the texts of its first bias are there."""

    def interrupt(measured, *_):
        next(measured)
        raise KeyboardInterrupt

    patch.setattr(calibrate, "choose", interrupt)
    assert cli.main(words) == 130


CASES = {
    "gather": Case(
        f"gather --out out {SCORED} --samples 2 --unit 3 --relaxation bundle",
        second_process,
        DATA | MODELS | SAMPLING | PROMPTS
        | {"split": "validation", "samples": "3", "first_sample": "1", "relaxation": "ensemble:0.3", "hidden": "true",
           "store_logits": "2", "unit": "2"},
        ANYWHERE | {"out": PLACE, "num_shards": SHARE, "shard_index": SHARE, "go_on": "decides whether a command ends early, not a byte"}
        | dict.fromkeys(LABELS, "labels are of the target's own texts, not of a bundle's; see test_importance.py"),
        FILES,
    ),
    "eval": Case(
        f"eval --out out {SCORED} --batch 3 --methods token block --relaxations none bundle --draft_length 3",
        second_process,
        DATA | MODELS | SAMPLING | PROMPTS | {"split": "validation", "batch": "2"},
        ANYWHERE
        | dict.fromkeys(("methods", "relaxations", "temperatures", "draft_lengths", "seeds", "draft_length"), CELL)
        | dict.fromkeys(("chosen", "least.tokens_per_call", "least.step_acceptance"), "decides what is said under the table")
        | {"sampling.temperature": CELL, "dry_run": "decodes nothing",
           "out": PLACE, "num_shards": SHARE, "shard_index": SHARE},
        FILES,
    ),
    "decode": Case(
        "decode --input in.jsonl --output out/out.jsonl --target target --draft draft --unit 3 --batch 3 --threads 1 "
        "--max_new_tokens 8 --method kseq --branches 2 --draft_length 3 --relaxation bundle --dtype float32",
        stopped(decode, "run_grouped", 2),
        MODELS | SAMPLING
        | {"input": "in2.jsonl", "method": "gbv", "relaxation": "ensemble:0.3", "draft_length": "2", "branches": "3",
           "trunk": "1", "drafting": "with_replacement", "relax_leaf": "true", "max_new_tokens": "6", "stop": "w3",
           "chat": "true", "seed": "1", "batch": "2", "unit": "2", "compile": "true --method rrsw"},
        ANYWHERE | {"prompt": "is for one text", "output": PLACE,
                    "skip_bad": "the rows that are kept are in the settings"},  # fmt: skip
        PAIR | BUNDLE | {"in.jsonl": edit("w2 w3", "w3 w2")},
    ),
    "train": Case(
        "train --data.traces traces --out out --trainer.max_epochs 3 --data.batch 4 --data.validation 0.25 "
        "--model.start start --model.objective attribution",
        stopped(head_training, "write_head_of"),
        {f"trainer.{name}": value for name, value in TRAINER.items()}
        | {f"model.{name}": value for name, value in HEAD.items()}
        | {"data.traces": "traces2", "data.batch": "2", "data.validation": "0.5", "data.reward": "likelihood",
           "seed_everything": "1", "threads": "2"},
        {f"trainer.{name}": "changes nothing about the head, or is in the settings as processes and device"
         for name in head_training.NOT_DECIDING} | {"out": PLACE},
        {"traces": lambda path: _swap(path, path.parent / "traces2"),
         "start/head.safetensors": copy("../trained/head.safetensors")},
    ),
    "reinforce": Case(
        f"reinforce --out out {SCORED} --updates 3 --prompts_per_update 2 --samples 2",
        stopped(on_policy, "write_head_of"),
        DATA | MODELS | SAMPLING | PROMPTS
        | {f"model.{name}": value.split()[0] for name, value in HEAD.items() if name not in ("objective", "blend", "bound", "patience")}
        | {"model.acceptance": "mean", "model.start": "logits", "split": "validation",
           "updates": "4", "prompts_per_update": "3", "samples": "3", "first_weight": "0.4"},
        ANYWHERE | {"out": PLACE} | dict.fromkeys(("model.objective", "model.blend", "model.bound", "model.patience"), "one is possible"),
        {name: change for name, change in FILES.items() if not name.startswith("bundle")},
    ),
    "distill": Case(
        f"distill --out out {COMMON} --prompts 6 --max_new_tokens 8 --max_prompt_tokens 50 --samples 2 --epochs 2 "
        "--batch 4 --rank 2 --validation 0.3 --patience 0",
        stopped(distillation, "_report"),
        {name: value for name, value in DATA.items() if name not in ("task", "data.reference_field", "data.score")}
        | {"task": "gsm8k --data.reference_field answer"} | MODELS | SAMPLING | PROMPTS
        | {"samples": "3", "layers": "0", "full": "true", "rank": "3", "alpha": "3", "modules": "q_proj", "loss": "tv",
           "epochs": "3", "batch": "3", "lr": "0.1", "validation": "0.4", "patience": "1"},
        ANYWHERE | {"out": PLACE, "traces": "names a folder, whose texts are in the settings by their checksum",
                    "data.reference_field": "texts are not scored", "data.score": "texts are not scored"},
        {"data.jsonl": edit("w2 w3", "w3 w2")} | PAIR,
    ),
    "select": Case(
        f"select --out out {COMMON} --latencies fast.json --prompts 6 --max_new_tokens 24 --unit 2 --trees 1 --every 4 "
        "--methods token gbv --shapes 1 2 2x2 --epochs 1 --batch 8 --width 16 --relaxation bundle",
        stopped(select_trees, "train_chooser", 2),
        {name: value for name, value in DATA.items() if name not in ("task", "data.reference_field", "data.score", "data.shots")}
        | {"task": "gsm8k --data.reference_field answer", "latencies": "slow.json"} | MODELS
        | {name: value for name, value in PROMPTS.items() if name != "max_prompt_tokens"}
        | {"methods": "token", "shapes": "1 2", "relaxation": "ensemble:0.3", "temperatures": "0.5",
           "every": "5", "trees": "2", "unit": "3", "epochs": "2", "batch": "4", "lr": "0.1", "risk": "2",
           "width": "8", "validation": "0.4"},
        ANYWHERE | {"out": PLACE, "prompt": "is refused beside a task", "labels": "names a folder, whose labels are in the settings by their checksum",
                    "data.reference_field": "labels hold no score", "data.score": "labels hold no score",
                    "data.shots": "is refused without a score"},
        {"data.jsonl": edit("w2 w3", "w3 w2")} | PAIR | BUNDLE | {"fast.json": copy("slow.json")},
    ),
    "calibrate": Case(
        f"calibrate --bundle bundle --out out {SCORED} --split train --max_quality_drop 0.4 --biases -1 1 --batch 3 --draft_length 3",
        one_bias,
        DATA | MODELS | SAMPLING | PROMPTS | {"split": "validation", "batch": "2", "bundle": "bundle2"},
        ANYWHERE
        | dict.fromkeys(("method", "seeds", "draft_length", "sampling.temperature"), CELL)
        | dict.fromkeys(("biases", "level", "max_quality_drop"), "what was decoded is judged anew, from the first bundle")
        | {"out": PLACE},
        ROWS | PAIR,
    ),
    "run": Case(
        f"run --out out {COMMON} --data.reference_field answer --data.score rouge1 --max_new_tokens 8 --gather.prompts 6 "
        "--gather.samples 2 --gather.unit 3 --eval.prompts 3 --eval.split train --eval.relaxations none "
        "--train.trainer.max_epochs 1 --train.model.objective attribution --train.data.validation 0.3",
        stopped(evaluation, "evaluate"),
        {"rounds": "2", "max_drop": "0.5", "export.draft_length": "4", "export.bias": "1", "export.any_pair": "true",
         "export.format": "hf", "export.selector": "bundle", "gather.seed": "1", "train.model.lr": "0.1", "seed": "1",
         "data.template": "Q: {prompt}"},
        {"out": PLACE, "biases": CELL, "export.overwrite": "says what may be replaced, not what is written"},
        ROWS | PAIR,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Everything that the commands read."""
    place = tmp_path_factory.mktemp("source")
    words = tokenizer(7)
    words.chat_template = "w2 {{ messages[0]['content'] }} w2"
    for name, seed, layers in (("target", 0, 2), ("draft", 1, 1), ("other", 5, 1)):
        module(seed, 7, layers).save_pretrained(place / name)
        words.save_pretrained(place / name)
    rows = [{"question": f"w2 w{2 + i % 5} w{2 + i // 5}", "other": f"w4 w{2 + i % 5} w3", "answer": "w3 4"} for i in range(25)]
    for name in ("data.jsonl", "copy.jsonl"):
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, seed in (("in.jsonl", 0), ("in2.jsonl", 1)):
        (place / name).write_text("".join(json.dumps({"prompt": row["question"], "seed": seed}) + "\n" for row in rows[:7]))
    pair = load_pair(str(place / "target"), str(place / "draft"))
    models = {"target": pair.target.described, "draft": pair.draft.described}
    manifest = models | {"tokenizer": pair.tokenizer_hash, "vocab": 7, "sampling": vars(Sampling()), "task": "jsonl"}
    manifest |= {"relaxation": "ensemble:0.3", "metric": "rouge1"}
    for name, bias in (("bundle", 0.0), ("bundle2", 1.0)):
        head = WeightHead("logits")
        head.net.bias.data += bias
        card = make_card(head, {"manifest": manifest, "traces_sha256": "d"}, 3, 0.0)
        write_bundle(place / name, head, replace(card, any_pair=True))
    for name, seed in (("traces", 0), ("traces2", 1)):
        synthetic_traces(place / name, hidden=(3, 5), seed=seed)
    for name, seed in (("start", 1), ("trained", 2)):
        words = f"train --data.traces {place}/traces --out {place}/{name} --trainer.max_epochs 1 --model.objective attribution"
        assert cli.main([*words.split(), "--seed_everything", str(seed), "--model.lr", f"0.{seed}"]) == 0
    times = PACKAGED["gpu"].read_text()
    (place / "fast.json").write_text(times)
    (place / "slow.json").write_text(times.replace("25", "26", 1))
    return place


def spelled(option, value):
    return [f"--{option}", *value.split()] if value != "Q: {prompt}" else [f"--{option}", value]


@pytest.mark.parametrize("command", CASES)
def test_every_option_is_tried_or_said_not_to_decide(command):
    case, stages = CASES[command], ("gather", "train", "eval")  # which have tables of their own
    names = {name.removeprefix("run.") for name in PROMISED[command]}
    assert {name for name in names if name.partition(".")[0] not in stages} <= case.changes.keys() | case.other.keys()


@pytest.mark.parametrize("command", CASES)
def test_whatever_decides_a_result_is_refused_when_it_changes(command, source, tmp_path, monkeypatch, capsys):
    case, place = CASES[command], shutil.copytree(source, tmp_path / "place")
    monkeypatch.chdir(place)
    words = case.words.split()
    assert cli.main(words) in (0, 1)
    whole = place / "whole"
    (place / case.out).rename(whole)
    if command == "calibrate":
        _swap(place / "bundle", source / "bundle")
    with monkeypatch.context() as patch:
        case.cut(place, words, patch)
    before, wrong = contents(place / case.out), {}
    capsys.readouterr()

    def tried(name, more=()):
        code, said = cli.main([*words, *more]), capsys.readouterr().err
        if code != 2 or not any(sentence in said for sentence in BEGUN):
            wrong[name] = f"exit code {code}: {said[-300:]}"
        elif contents(place / case.out) != before:
            wrong[name] = "refused, and written to"

    for option, value in case.changes.items():
        if option not in case.other:
            tried(option, spelled(option, value))
    for name, change in case.files.items():
        change(place / name)
        tried(name)
        (shutil.rmtree if (place / name).is_dir() else type(place).unlink)(place / name)
        (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, place / name)
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())
    assert cli.main(words) in (0, 1)
    ended = contents(place / case.out)
    assert {name: ended[name] for name in contents(whole)} == contents(whole)


# What the version before wrote, by command. None of them says by which settings it was begun.
OLDER = {
    "gather": "gather --out gather --prompts 4 --samples 2 --unit 2 --max_new_tokens 10 --dtype float32",
    "train": "train --data.traces traces --out train --trainer.max_epochs 2 --model.objective attribution --data.validation 0.3",
    "eval": "eval --out eval --prompts 2 --batch 1 --max_new_tokens 8 --relaxations none",
    "decode": "decode --input in.jsonl --output out.jsonl --unit 2 --max_new_tokens 8 --threads 1 --dtype float32",
    "select": "select --out select --latencies gpu --prompts 4 --max_new_tokens 24 --unit 2 --trees 1 --methods token "
    "--shapes 1 2 --epochs 1 --width 8",
}


@pytest.fixture
def older(tmp_path, monkeypatch):
    place = shutil.copytree(Path(__file__).with_name("cases") / "older", tmp_path / "older")
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("share", [[], ["--num_shards", "2", "--shard_index", "1"]])
@pytest.mark.parametrize("command", OLDER)
def test_what_an_older_version_began_is_not_continued(older, command, share, capsys):
    before = contents(older)
    if share and command not in ("gather", "eval"):
        return
    assert cli.main([*OLDER[command].split(), *share]) == 2
    said = capsys.readouterr().err
    assert "was begun by an older version" in said and "what is finished there can be read, but not continued" in said
    assert contents(older) == before


def test_what_an_older_version_finished_is_read(older, capsys):
    assert cli.main(OLDER["train"].replace("--out train", "--out new").split()) == 0
    assert cli.main("export --train train --out exported".split()) == 0
    words = "decode --prompt 1+1= --max_new_tokens 4 --relaxation"
    assert cli.main([*words.split(), "bundle"]) == 0 and cli.main([*words.split(), "exported"]) == 0


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize(("command", "file", "more"), [("eval", "results.jsonl", ["--seeds", "0", "1"]), ("decode", "out.jsonl", [])])
def test_results_are_not_written_through_links(source, tmp_path, monkeypatch, capsys, link, command, file, more):
    monkeypatch.chdir(shutil.copytree(source, tmp_path / "place"))
    words = CASES[command].words.split()
    if command == "decode":
        with monkeypatch.context() as patch:
            CASES[command].cut(tmp_path, words, patch)
    else:
        assert cli.main(words) == 0
    file = Path("out", file)
    victim = file.rename(tmp_path / "victim")
    link(victim, file)
    before = victim.read_bytes()
    assert cli.main([*words, *more]) == 2
    assert f"{file} is a link, expected a file of its own; delete it" in capsys.readouterr().err
    assert victim.read_bytes() == before


# What each command refuses once its folder is held.
REFUSED = dict.fromkeys(("gather", "eval", "distill", "select", "run", "calibrate", "reinforce"), "--data.prompt_field nothing")
REFUSED |= {"train": "--model.patience 2 --data.validation 0", "decode": "--max_new_tokens 1000"}


@pytest.mark.parametrize("command", CASES)
def test_a_refused_command_leaves_no_folder(command, source, tmp_path, monkeypatch, capsys):
    place = shutil.copytree(source, tmp_path / "place")
    monkeypatch.chdir(place)
    before = sorted(place.iterdir())
    assert cli.main([*CASES[command].words.split(), *REFUSED[command].split()]) == 2
    assert sorted(place.iterdir()) == before, capsys.readouterr().err


def test_results_that_are_deleted_while_they_are_written_are_not_called_complete(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(shutil.copytree(source, tmp_path / "place"))
    records, run_grouped = Sweep.records, decode.run_grouped

    def emptied(original):
        def call(*arguments, **options):
            for name in ("out/results.jsonl", "out/out.jsonl"):
                Path(name).unlink(missing_ok=True)
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(Sweep, "records", emptied(records))
    monkeypatch.setattr(decode, "run_grouped", emptied(run_grouped))
    for command, sentence in (("eval", "results in out were deleted while"), ("decode", "out.jsonl was changed while")):
        assert cli.main(CASES[command].words.split()) == 2
        assert sentence in capsys.readouterr().err
        shutil.rmtree("out")
