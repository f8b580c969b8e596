"""Gathering: the law of the texts, the scalars, the bytes after a kill, and what is refused."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from diversed import cli
from diversed.commands.gather import gather
from diversed.commands.options import call
from diversed.data import gathering
from diversed.data.columns import bytes_per_token
from diversed.data.tasks import DataOptions
from diversed.data.traces import read_manifest, read_shards
from diversed.data.writing import as_shard
from diversed.export.bundle_writer import write_bundle
from diversed.export.card import make_card
from diversed.files import sha256, worker
from diversed.runtime.model import load_pair
from diversed.runtime.relaxer import Relaxer
from diversed.runtime.rollouts import Sampler, couple
from diversed.runtime.sampling import Sampling, probabilities
from diversed.verifier.head import WeightHead, logit_features
from diversed.verifier.relax import parse

from .support.models import module, relaxed_law, tiny_pair, tokenizer

VOCAB, LENGTH = 4, 3


def sampler(pair, relaxation, gate=None, length=LENGTH, sampling=Sampling(), **options):  # noqa: B008  frozen
    return Sampler(pair, Relaxer(parse(relaxation), gate, sampling=sampling), sampling, length, **options)


def test_the_maximal_coupling_has_the_relaxed_law_and_replaces_as_rarely_as_possible():
    target, relaxed = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)).softmax(-1).double()
    grid = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    coins = torch.cartesian_prod(grid, grid, grid)
    tokens, replaced = couple(target.expand(len(coins), -1), relaxed.expand(len(coins), -1), coins)
    # a grid of 60 misses at most one cell at each of the few edges of a one-dimensional CDF
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / len(coins), relaxed.float(), atol=0.04, rtol=0)
    tv = 0.5 * (target - relaxed).abs().sum()
    assert replaced.double().mean() == pytest.approx(float(tv), abs=0.02)


WAYS = [(relaxation, Sampling()) for relaxation in ("ensemble:0.5", "typical:0.2,0.5", "none")]
WAYS += [("coin:0.4", Sampling(0)), ("ensemble:0.8", Sampling(0)), ("ensemble:0.5", Sampling(0.7, top_p=0.8))]


@pytest.mark.parametrize("relaxation, sampling", WAYS)
def test_sampled_texts_follow_the_relaxed_law(relaxation, sampling):
    """20,000 texts of three tokens: the largest deviation of 64 binomial frequencies stays below 5 of their s.d."""
    pair, prompt, count = tiny_pair(VOCAB, end=False), [2, 3], 20_000
    drawn = sampler(pair, relaxation, sampling=sampling)
    texts = drawn.run({0: prompt}, count, lambda prompt, sample: sample)
    base = torch.tensor([VOCAB ** (LENGTH - 1 - i) for i in range(LENGTH)])
    digits = torch.tensor([text.tokens for text in texts]) @ base
    observed = torch.bincount(digits, minlength=VOCAB**LENGTH) / count
    law = relaxed_law(pair, prompt, relaxation, LENGTH, sampling)
    assert ((observed - law).abs() <= 5 * (law * (1 - law) / count).sqrt() + 1 / count).all()
    replaced = torch.cat([text.columns["substituted"] for text in texts])
    assert replaced.any() == (relaxation != "none")


def test_a_trace_holds_the_numbers_of_both_models_at_its_own_contexts():
    pair, prompts = tiny_pair(7), {0: [2, 3], 1: [4, 5, 6, 2], 2: [3]}
    texts = sampler(pair, "learned", lambda draft, target, hidden: draft.amax(-1) * target.amax(-1), length=12, hidden=True, store_logits=3).run(
        prompts, 2, lambda p, s: 10 * p + s
    )
    for i, text in enumerate(texts):
        prompt = prompts[i // 2]
        tokens = torch.tensor([prompt + text.tokens])
        with torch.no_grad():
            outs = [model.module(tokens, output_hidden_states=True) for model in (pair.target, pair.draft)]
        rows = [out.logits[0, len(prompt) - 1 : -1].softmax(-1) for out in outs]
        hidden = torch.cat([out.hidden_states[-1][0, len(prompt) - 1 : -1] for out in (outs[1], outs[0])], -1)
        at = torch.tensor(text.tokens)[:, None]
        expected = {
            "target_prob": rows[0].gather(1, at)[:, 0],
            "draft_prob": rows[1].gather(1, at)[:, 0],
            "tv": 0.5 * (rows[0] - rows[1]).abs().sum(-1),
            "weight": rows[0].amax(-1) * rows[1].amax(-1),
            "features": logit_features(rows[1], rows[0]),
        }
        top = (rows[0] + rows[1]).topk(3).indices
        for name, row in (("target", rows[0]), ("draft", rows[1])):
            expected[f"{name}_rest"] = 1 - row.gather(1, top).sum(-1)
        for name, value in expected.items():
            torch.testing.assert_close(text.columns[name], value, atol=1e-5, rtol=1e-4, msg=name)
        # stored as float16: three decimal digits
        torch.testing.assert_close(text.columns["hidden"].float(), hidden, atol=2e-3, rtol=2e-3)
        assert text.columns["top_index"].tolist() == top.tolist()
        for name, row in (("target_top", rows[0]), ("draft_top", rows[1])):
            torch.testing.assert_close(text.columns[name].float(), row.gather(1, top).log(), atol=2e-2, rtol=2e-3)
        assert text.finished == (text.tokens[-1] == 1)


@pytest.mark.parametrize(
    "relaxation, sampling, weight",
    [("coin:0.4", Sampling(0), 0.4), ("ensemble:0.4", Sampling(0), math.nan), ("ensemble:0.4", Sampling(2, top_k=2), 0.4)],
)
def test_a_trace_holds_features_of_what_is_believed_and_numbers_of_rows_as_sampled(relaxation, sampling, weight):
    """weight is the share in the row that the token was drawn from, NaN where that is no blend of rows as sampled."""
    pair, prompt = tiny_pair(7, end=False), [2, 3]
    (text,) = sampler(pair, relaxation, length=30, sampling=sampling).run({0: prompt}, 1, lambda p, s: 1)
    with torch.no_grad():
        ids = torch.tensor([prompt + text.tokens])
        logits = [model.module(ids).logits[0, 1:-1] for model in (pair.target, pair.draft)]
    believed, (p, q) = [each.softmax(-1) for each in logits], [probabilities(each, sampling) for each in logits]
    kept = (q * (p > 0)).sum(-1, keepdim=True)
    q = torch.where(kept > 0, q * (p > 0) / kept, p) if sampling.filters else q
    torch.testing.assert_close(text.columns["features"], logit_features(believed[1], believed[0]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(text.columns["tv"], 0.5 * (p - q).abs().sum(-1), atol=1e-5, rtol=1e-4)
    assert 0.1 < text.columns["tv"].mean() < 1 and text.columns["substituted"].any()
    assert text.columns["weight"].tolist() == pytest.approx([weight] * 30, nan_ok=True)


def test_texts_do_not_depend_on_the_batch_they_are_sampled_in():
    pair, prompts = tiny_pair(7), {0: [2, 3], 1: [4, 5, 6, 2], 2: [3]}
    together = sampler(pair, "ensemble:0.5", length=20).run(prompts, 3, lambda p, s: 10 * p + s)
    alone = [
        sampler(pair, "ensemble:0.5", length=20).run({p: tokens}, 3, lambda p, s: 10 * p + s)[s]
        for p, tokens in prompts.items()
        for s in range(3)
    ]
    assert [t.tokens for t in together] == [t.tokens for t in alone]


def test_texts_of_other_sample_numbers_are_other_texts_and_the_same_whoever_samples_them(tmp_path):
    options = dict(prompts=2, unit=2, max_new_tokens=12, relaxation="ensemble:0.5")
    whole = next(read_shards(call(gather, out=str(tmp_path / "whole"), samples=4, **options)))
    later = next(read_shards(call(gather, out=str(tmp_path / "later"), samples=2, first_sample=2, **options)))
    mine = torch.isin(whole.sample, later.sample)
    assert later.sample.tolist() == [2, 3, 2, 3]
    lengths = whole.start.diff()[mine]
    assert later.start.diff().tolist() == lengths.tolist()
    at = torch.repeat_interleave(mine, whole.start.diff())
    assert torch.equal(later.token, whole.token[at])


def test_bytes_per_token_are_those_of_the_file(tmp_path):
    texts = sampler(tiny_pair(7), "ensemble:0.5", length=20, hidden=True, store_logits=3).run(
        {0: [2, 3]}, 50, lambda p, s: s
    )
    shard = as_shard(texts, [0] * 50, list(range(50)), [0.0] * 50)
    per_text = 8 + 8 + 4 + 1 + 8  # prompt, sample, reward, finished, start
    stored = sum(t.numel() * t.element_size() for t in shard.columns.values())
    assert stored == shard.tokens * bytes_per_token(32, 3) + 50 * per_text + 8


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A saved tiny pair, a JSONL of prompts, and the options that gather four shards from them."""
    folder = tmp_path_factory.mktemp("gather")
    for name, seed in (("target", 0), ("draft", 1)):
        module(seed, 7, 2 - seed).save_pretrained(folder / name)
        tokenizer(7).save_pretrained(folder / name)
    lines = [f'{{"question": "w2 w{2 + i % 5} w{2 + i // 5}", "answer": "w3 w4"}}' for i in range(25)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    data = DataOptions(
        path=str(folder / "data.jsonl"), whole=True, prompt_field="question", reference_field="answer", score="rouge1"
    )
    options = {
        "target": str(folder / "target"), "draft": str(folder / "draft"), "task": "jsonl", "data": data, "prompts": 20,
        "samples": 3, "unit": 5, "max_new_tokens": 12,
    }  # fmt: skip
    return folder, options


def test_gathering_in_two_processes_gives_the_manifest_of_one(workplace):
    folder, options = workplace
    call(gather, out=str(folder / "one"), **options)
    for index in (1, 0):
        call(gather, out=str(folder / "two"), **options, num_shards=2, shard_index=index)
    assert sha256(folder / "one/manifest.json") == sha256(folder / "two/manifest.json")
    manifest = read_manifest(folder / "two")
    assert len(manifest["shards"]) == 4 and sum(entry["texts"] for entry in manifest["shards"]) == 60
    rewards = torch.cat([shard.reward for shard in read_shards(folder / "two")])
    assert 0 < rewards.mean() < 1


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2)])
def test_a_process_without_work_is_no_error_and_the_folder_becomes_complete(workplace, order, capsys):
    folder, options = workplace
    options, out = options | {"unit": 10}, folder / f"three-{order[0]}"
    call(gather, out=str(folder / "whole-10"), **options)
    for index in order:
        call(gather, out=str(out), **options, num_shards=3, shard_index=index)
    assert (folder / "whole-10/manifest.json").read_bytes() == (out / "manifest.json").read_bytes()
    assert "other processes have shards to write; the last writes manifest.json" in capsys.readouterr().out


def test_a_folder_begun_by_two_processes_is_finished_by_one(workplace):
    folder, options = workplace
    call(gather, out=str(folder / "half"), **options, num_shards=2, shard_index=1)
    before = {path: path.stat().st_mtime_ns for path in (folder / "half").glob("shard-*")}
    call(gather, out=str(folder / "half"), **options)
    call(gather, out=str(folder / "one"), **options)
    assert len(before) == 2 and all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert (folder / "one/manifest.json").read_bytes() == (folder / "half/manifest.json").read_bytes()


def test_a_finished_folder_is_never_written_to(workplace, capsys):
    folder, options = workplace
    call(gather, out=str(folder / "one"), **options)
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (folder / "one").glob("[!.]*")}
    for share in ({}, {"num_shards": 2, "shard_index": 0}, {"num_shards": 9, "shard_index": 8}):
        call(gather, out=str(folder / "one"), **options, **share)
        assert "traces are complete, nothing to gather" in capsys.readouterr().out
        with pytest.raises(ValueError, match="was begun with seed 0, now it is 7"):
            call(gather, out=str(folder / "one"), **{**options, "seed": 7}, **share)
    now = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (folder / "one").glob("[!.]*")}
    assert now == files


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"template": "Q: {prompt}"}, "was begun with data.template None, now it is 'Q: {prompt}'"),
        ({"stop": ("w3",)}, r"was begun with data.stop None, now it is \['w3'\]"),
        ({"reference_field": "other"}, "was begun with data.reference_field 'answer', now it is 'other'"),
        ({"prompt_field": "other"}, "was begun with data.prompt_field 'question', now it is 'other'"),
        ({}, "was begun with rows_sha256 "),
    ],
)
def test_everything_that_decides_the_texts_is_in_the_settings(tmp_path, workplace, change, sentence):
    _, options = workplace
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"question": f"w2 w{i}", "other": f"w3 w{i}", "answer": "w4"}) + "\n" for i in range(2, 6)]
    path.write_text("".join(lines))
    data = dataclasses.replace(options["data"], path=str(path))
    options = options | {"prompts": 4, "unit": 2, "samples": 1, "data": data, "out": str(tmp_path / "out")}
    call(gather, **options, num_shards=2, shard_index=0)
    if not change:
        path.write_text("".join(lines[:3]) + lines[3].replace("w4", "w6"))
    with pytest.raises(ValueError, match=sentence):
        call(gather, **options | {"data": dataclasses.replace(data, **change)}, num_shards=2, shard_index=1)
    assert len(list((tmp_path / "out").glob("shard-*"))) == 1 and not read_manifest(tmp_path / "out", True)["complete"]


def test_a_folder_that_was_emptied_while_it_was_written_is_not_complete(workplace, monkeypatch):
    folder, options = workplace
    write, written = gathering.write_shard, []

    def emptied(to, number, shard):
        for path in written:
            path.unlink(missing_ok=True)
        entry = write(to, number, shard)
        written.append(to / entry["file"])
        return entry

    monkeypatch.setattr(gathering, "write_shard", emptied)
    with pytest.raises(FileNotFoundError, match="shard-00000.safetensors is missing, it was deleted while"):
        call(gather, out=str(folder / "emptied"), **options)
    assert not read_manifest(folder / "emptied", incomplete=True)["complete"]
    monkeypatch.undo()
    call(gather, out=str(folder / "emptied"), **options)
    assert read_manifest(folder / "emptied")["complete"]


def test_a_killed_run_resumes_to_the_same_bytes(workplace):
    folder, options = workplace
    call(gather, out=str(folder / "whole"), **options)
    data = options["data"]
    code = (
        "from diversed.commands.gather import gather; from diversed.commands.options import call; from diversed.data.tasks import DataOptions; "
        f"call(gather, out={str(folder / 'killed')!r}, **{ {**options, 'data': None}!r} | {{'data': {data!r}}})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "killed" / "shard-00001.safetensors").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    call(gather, out=str(folder / "killed"), **options)
    assert sha256(folder / "whole/manifest.json") == sha256(folder / "killed/manifest.json")


def test_a_damaged_shard_is_named_and_gathered_anew(workplace, capsys):
    folder, options = workplace
    call(gather, out=str(folder / "bad"), **options)
    before = sha256(folder / "bad/manifest.json")
    shard = folder / "bad/shard-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    call(gather, out=str(folder / "bad"), **options)
    assert "shard-00002.safetensors is damaged" in capsys.readouterr().out
    assert sha256(folder / "bad/manifest.json") == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 5}, "was begun with seed 0, now it is 5; .*choose another --out"),
        ({"relaxation": "ensemble:0.7"}, "was begun with relaxation 'ensemble:0.3'"),
        ({"out": "other", "relaxation": "ensemble:1.7"}, r"\[0, 1\]"),
        ({"out": "other", "samples": 0}, "`samples` must be at least 1"),
        ({"out": "other", "samples": 1 << 17}, "`samples` must be at most 65536"),
        ({"out": "other", "seed": -1}, "`seed` must be at least 0"),
        ({"out": "other", "seed": 1 << 19}, "`seed` must be at most 524287"),
        ({"out": "other", "max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
        ({"out": "other", "store_logits": -1}, "`store_logits` must be at least 0"),
        ({"out": "other", "threads": 10**6}, "`threads` must be at most 1024"),
        ({"out": "other", "num_shards": 0}, "`num_shards` must be at least 1"),
        ({"out": "other", "max_new_tokens": 200}, "leaves no room for a prompt in a context of 128"),
        ({"out": "other", "max_prompt_tokens": 2}, "data.jsonl"),
        ({"out": "other", "task": "gsm8"}, "gsm8k"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(workplace, change, sentence):
    folder, options = workplace
    call(gather, out=str(folder / "settled"), **options)
    change = {**change, "out": str(folder / change.get("out", "settled"))}
    with pytest.raises((ValueError, OSError), match=sentence) as refused:
        call(gather, **{**options, **change})
    assert "\n" not in str(refused.value)


def test_the_share_of_work_comes_from_the_launchers_environment(monkeypatch):
    assert worker(None, None) == (1, 0)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert worker(None, None) == (4, 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert worker(None, None) == (2, 1) and worker(3, 0) == (3, 0)
    with pytest.raises(ValueError, match="`shard_index` must lie in 0..1"):
        worker(2, 2)


@pytest.mark.parametrize("blend, ending", [("logits", ";blend=logits"), ("probabilities", "")])
def test_traces_say_the_blend_that_a_bundles_card_says(workplace, tmp_path, blend, ending):
    """Training for a blend refuses texts of the other, and the string need not tell."""
    folder, options = workplace
    pair = load_pair(options["target"], options["draft"])
    manifest = {
        role: {"name": model.name, "hash": model.hash, "hidden_size": model.hidden_size}
        for role, model in (("target", pair.target), ("draft", pair.draft))
    }
    manifest |= {"tokenizer": "", "vocab": 7, "sampling": vars(Sampling()), "task": "jsonl", "relaxation": "none"}
    record = {"manifest": manifest, "traces_sha256": "d", "settings": {"blend": blend}}
    head = WeightHead("logits")
    bundle = write_bundle(tmp_path / "bundle", head, make_card(head, record, 5, 0.0))
    options |= {"prompts": 2, "samples": 1, "relaxation": f"{bundle};bias=1", "store_logits": 3}
    call(gather, out=str(tmp_path / "traces"), **options)
    assert read_manifest(tmp_path / "traces")["relaxation"] == f"{bundle}{ending};bias=1"


@pytest.mark.parametrize("remedy", ["--max_prompt_tokens", "rows"])
def test_long_prompts_are_refused_before_the_first_unit_and_both_remedies_work_on_the_folder(tmp_path, remedy, capsys):
    rows = [{"prompt": f"{i} + 1 ="} for i in range(8)]
    rows[6] = {"prompt": "1 + " * 60}
    file = tmp_path / "rows.jsonl"

    def gathered(*more):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["gather", "--task", "jsonl", "--data.path", str(file), "--data.whole", "--prompts", "8", "--unit", "2"]
        words += ["--samples", "1", "--max_new_tokens", "4", "--out", str(tmp_path / "out"), "--go_on", "true", "--max_prompt_tokens"]
        return cli.main([*words, *(more or ["40"])])

    assert gathered() == 2
    err = capsys.readouterr().err
    longest = int(re.search(r"line 7 of rows.jsonl has (\d+) tokens, the limit is 40; raise `max_prompt_tokens` to \1 or"
                            " leave such rows out", err)[1])  # fmt: skip
    assert not (tmp_path / "out").exists()
    if remedy == "rows":
        del rows[6]
    assert gathered(*([str(longest)] if remedy != "rows" else [])) == 0
    assert read_manifest(tmp_path / "out")["complete"]
