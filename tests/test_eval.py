"""Every figure of an evaluation against its definition, and runs that are cut, continued or changed."""

import dataclasses
import json
import math
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from diversed.commands.eval import evaluate
from diversed.commands.options import call
from diversed.eval.comparison import Least
from diversed.eval.figure import frontier
from diversed.eval.results import read_results, rule_of
from diversed.eval.results_table import empty_texts, looping_texts
from diversed.eval.scoring import score_positions
from diversed.eval.summary import repetition, summarise
from diversed.eval.sweep import cell_of
from diversed.runtime.model import load_pair
from diversed.runtime.sampling import Sampling, probabilities

WORDS = ["<pad>", "<eos>", "<unk>", *(str(number) for number in range(10)), *(f"w{number}" for number in range(27))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a tiny target and draft that share a tokenizer of 40 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    folders = {}
    for seed, (name, layers) in enumerate((("target", 2), ("draft", 1))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=96, eos_token_id=1, pad_token_id=0,
            initializer_range=0.3,
        )  # fmt: skip
        folders[name] = str(tmp_path_factory.mktemp(name))
        LlamaForCausalLM(config).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Figures cost more than the runs they show; those of the fixtures that many tests share are drawn."""
    monkeypatch.setattr("diversed.eval.results_table.frontier", lambda rows, out: out)


@pytest.fixture(scope="module")
def pair(models):
    return load_pair(models["target"], models["draft"])


TEXTS = [[5, 6, 7, 8, 9, 10], [11, 1], [12, 13, 14, 15, 16, 17, 18, 19, 1], [20]]
PROMPTS = [[21, 22], [23, 24, 25, 26, 27], [28], [29, 30, 31, 32]]


def direct(pair, prompt, text, weight, sampling):
    """The four sums of one text from plain forward passes, in float64."""
    rows, believed = [], []
    for model in (pair.draft, pair.target):
        with torch.no_grad():
            logits = model.module(input_ids=torch.tensor([prompt + text])).logits[0]
        rows.append(probabilities(logits[len(prompt) - 1 : -1], sampling).double())
        believed.append(logits[len(prompt) - 1 : -1].double().softmax(-1))
    q, p = rows
    w = weight(*believed)
    if sampling.greedy:
        blend = (1 - w[:, None]) * believed[1] + w[:, None] * believed[0]
        v = torch.nn.functional.one_hot(blend.argmax(-1), blend.shape[-1]).double()
    else:
        kept = q * (p > 0) if sampling.filters else q
        share = torch.where(kept.sum(-1) > 0, w, 0)[:, None]
        v = (1 - share) * p + share * kept / kept.sum(-1, keepdim=True).clamp_min(1e-30)
    acceptance, bias = 1 - 0.5 * (q - v).abs().sum(-1), 0.5 * (p - v).abs().sum(-1)
    likelihood = p.gather(-1, torch.tensor(text)[:, None]).clamp_min(1e-30).log()
    return [float(value.sum()) for value in (acceptance, bias, w, likelihood)]


def gate(draft, target, hidden=None):
    """Half of the draft where the target's best token is an even one."""
    return 0.5 * (target.argmax(-1) % 2 == 0).to(target.dtype)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9), Sampling(0)])
@pytest.mark.parametrize("relaxation", ["none", "ensemble:0.3", "ensemble:0.3;bias=1", "gate"])
@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * 4 * len(WORDS), 1 << 28])
def test_position_sums_are_those_of_plain_forward_passes(pair, sampling, relaxation, chunk_bytes, monkeypatch):
    share = {"none": 0.0, "ensemble:0.3": 0.3, "ensemble:0.3;bias=1": 1 / (1 + 7 / 3 * math.exp(-1))}.get(relaxation)
    weight = gate if share is None else lambda q, p: torch.full_like(q[:, 0], share)
    if share is None:
        monkeypatch.setitem(sys.modules, "gates", SimpleNamespace(make=lambda tokenizer: gate))
        relaxation = "gates:make"
    got = score_positions(pair, PROMPTS, TEXTS, relaxation, sampling, chunk_bytes=chunk_bytes)
    for prompt, text, sums in zip(PROMPTS, TEXTS, got, strict=True):
        expected = direct(pair, prompt, text, weight, sampling)
        # float32 rows: about 1e-6 a position
        assert [sums.acceptance, sums.bias, sums.weight, sums.target_logprob] == pytest.approx(expected, abs=3e-5)
        assert sums.positions == len(text)


def test_acceptance_and_bias_of_a_blend_sum_to_the_same_line(pair):
    """1 - TV(q, v) + TV(p, v) = 1 - (1 - 2w) TV(p, q): the static blend trades one for the other."""
    exact = score_positions(pair, PROMPTS, TEXTS, "none", Sampling())
    blend = score_positions(pair, PROMPTS, TEXTS, "ensemble:0.4", Sampling())
    for before, after in zip(exact, blend, strict=True):
        distance = before.positions - before.acceptance
        assert before.bias == 0
        assert after.bias == pytest.approx(0.4 * distance, abs=1e-5)
        assert after.acceptance == pytest.approx(before.positions - 0.6 * distance, abs=1e-5)


def test_a_budget_bounds_the_bias_of_every_text_and_lowers_the_weight(pair):
    free = score_positions(pair, PROMPTS, TEXTS, "ensemble:0.5", Sampling())
    for chunk_bytes in (1, 1 << 28):  # what was spent is carried from chunk to chunk
        held = score_positions(pair, PROMPTS, TEXTS, "ensemble:0.5;budget=0.5", Sampling(), chunk_bytes=chunk_bytes)
        assert all(sums.bias <= 0.5 for sums in held) and max(sums.bias for sums in free) > 0.5
        assert sum(sums.weight for sums in held) < sum(sums.weight for sums in free)


def test_rules_without_a_weight_have_none(pair):
    assert all(sums.weight is None for sums in score_positions(pair, PROMPTS, TEXTS, "lenient:0.5", Sampling()))


def test_an_empty_prompt_is_refused(pair):
    with pytest.raises(ValueError, match=r"prompts \[1\] are empty"):
        score_positions(pair, [[3], []], [[4], [5]], "none", Sampling())


def record(relaxation="none", prompt=0, score=1.0, method="token", seed=0, **values):
    base = {"method": method, "relaxation": relaxation, "seed": seed, "prompt": prompt, "score": score, "task": "made"}
    base |= {"metric": "points", "tokens": [1, 2, 3, 4], "drafted": 5, "accepted": 2, "target_calls": 2, "positions": 4}
    base |= {"acceptance": 3.0, "bias": 0.4, "weight": 1.0, "target_logprob": -8.0}
    base |= {"substitutions": 0.3, "seconds": 0.5}
    return base | {"drafted_by_depth": [2, 2, 1], "accepted_by_depth": [1, 1], "batch": 4} | values


def test_a_summary_is_the_ratio_of_sums_not_the_mean_of_ratios():
    long = record(prompt=1, tokens=[0] * 12, target_calls=2, drafted=10, accepted=10, positions=12, acceptance=12.0)
    row, other = summarise([record(), long, record("lenient:0.5", weight=None)])
    assert row["tokens_per_call"] == 16 / 4 and row["accepted_share"] == 12 / 15 and row["step_acceptance"] == 15 / 16
    assert row["mean_bias"] == 0.8 / 16 and row["mean_weight"] == 2 / 16 and row["tokens_per_second"] == 16
    assert row["acceptance_by_depth"] == [2 / 4, 2 / 4, 0] and row["substitutions"] == 0.3
    assert other["mean_weight"] is None and (other["requests"], other["prompts"]) == (1, 1)


def test_differences_are_paired_by_prompt_and_with_exact_decoding_of_the_same_method():
    """Scores that always differ by 0.25 have a difference without any spread, however much prompts differ."""
    draws = random.Random(0)
    scores = [draws.random() for _ in range(50)]
    records = [record("none", i, score, method) for method in ("token", "block") for i, score in enumerate(scores)]
    records += [record("ensemble:0.5", i, score - 0.25) for i, score in enumerate(scores)]
    exact, _, blend = summarise(records)
    assert exact["difference"] is None and exact["score_high"] - exact["score_low"] > 0.1
    assert [blend[f"difference{end}"] for end in ("", "_low", "_high")] == pytest.approx([-0.25] * 3)
    assert blend["score_low"] < blend["score"] < blend["score_high"]


def test_seeds_of_a_prompt_are_one_observation():
    """Ten equal seeds of a prompt say nothing new: the interval stays that of one seed."""
    one = [record(prompt=i, score=float(i % 2)) for i in range(20)]
    many = [record(prompt=i, score=float(i % 2), seed=seed) for seed in range(10) for i in range(20)]
    assert [summarise(one)[0][f"score{end}"] for end in ("", "_low", "_high")] == pytest.approx(
        [summarise(many)[0][f"score{end}"] for end in ("", "_low", "_high")]
    )


@pytest.fixture(scope="module")
def options(models, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "made.jsonl"
    draws = random.Random(1)
    rows = ({"prompt": " ".join(draws.choices(WORDS[3:], k=3 + i % 4)), "reference": str(i % 10)} for i in range(11))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from diversed.data.tasks import DataOptions

    data = DataOptions(path=str(file), whole=True, reference_field="reference", score="final_number")
    return {
        **models, "task": "jsonl", "data": data, "prompts": 11, "batch": 4, "max_new_tokens": 12, "draft_length": 3,
        "relaxations": ["none", "ensemble:0.5"],
    }  # fmt: skip


TIMES = ("seconds",)


def texts(folder):
    records = read_results(folder / "results.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in records]


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "eval"
    call(evaluate, out=str(out), **options)
    return out


def test_evaluate_leaves_a_line_a_text_and_a_figure(finished, options):
    records = texts(finished)
    assert [(line["relaxation"], line["prompt"]) for line in records] == [
        (relaxation, prompt) for relaxation in options["relaxations"] for prompt in range(11)
    ]
    for line in records:
        assert line["positions"] == len(line["tokens"]) <= 12 and line["score"] in (0.0, 1.0)
        assert 0 <= line["accepted"] <= line["drafted"] and line["accepted"] < len(line["tokens"])
        assert line["repetition"] == repetition(line["tokens"])
    exact, blend = summarise(finished / "results.jsonl")
    assert exact["mean_bias"] == exact["substitutions"] == 0 < blend["mean_bias"]
    assert blend["step_acceptance"] > exact["step_acceptance"]
    assert (finished / "frontier.png").read_bytes()[:4] == b"\x89PNG"


def test_the_least_differences_are_written_down_and_may_change_like_what_they_judge(finished, options):
    settings = json.loads((finished / "eval.json").read_text())
    assert settings["least"] == {"tokens_per_call": 0.02, "step_acceptance": 0.005}
    call(evaluate, out=str(finished), **options, least=Least(0.1, 0.05))
    settings = json.loads((finished / "eval.json").read_text())
    assert settings["least"] == {"tokens_per_call": 0.1, "step_acceptance": 0.05}
    call(evaluate, out=str(finished), **options)


def test_the_table_says_what_its_words_mean(finished, options, capsys):
    call(evaluate, out=str(finished), **options)
    printed = capsys.readouterr().out
    for words in ("ensemble:0.5", "accepted / drafted", "1 - TV(draft, relaxed target)", "11 prompts", "batch of 4"):
        assert words in printed


@pytest.mark.parametrize("where", [0.0, 0.3, 0.77])
def test_a_run_cut_at_any_byte_continues_to_the_same_texts(finished, options, tmp_path, where):
    whole = (finished / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(whole[: int(where * len(whole))])
    (tmp_path / "eval.json").write_bytes((finished / "eval.json").read_bytes())
    call(evaluate, out=str(tmp_path), **options)
    assert texts(tmp_path) == texts(finished)


SWEEP = {"methods": ["token", "plain"], "temperatures": [1.0, 0.7], "draft_lengths": [2, 3], "seeds": [4]}


@pytest.fixture(scope="module")
def swept(options, tmp_path_factory):
    out = tmp_path_factory.mktemp("swept") / "eval"
    call(evaluate, out=str(out), **options | SWEEP)
    return out


def test_a_sweep_decodes_every_cell_once_and_plain_once_a_temperature(swept, options):
    cells = list(dict.fromkeys(map(cell_of, texts(swept))))
    drafted = {
        ("token", relaxation, t, n, 4) for relaxation in options["relaxations"] for t in (1, 0.7) for n in (2, 3)
    }
    assert set(cells) == drafted | {("plain", "none", t, 0, 4) for t in (1, 0.7)}
    assert len(texts(swept)) == 11 * len(cells)
    pictures = sorted(path.name for path in swept.glob("*.png"))
    assert pictures == ["frontier-T0.7-L2.png", "frontier-T0.7-L3.png", "frontier-T1-L3.png", "frontier.png"]


def test_a_cell_of_a_sweep_is_the_run_with_its_temperature_and_draft_length(swept, options, tmp_path):
    call(evaluate, out=str(tmp_path), **options | {"sampling": Sampling(temperature=0.7), "draft_length": 2, "seeds": [4]})
    mine = [line for line in texts(swept) if cell_of(line)[0::2] == ("token", 0.7, 4) and line["draft_length"] == 2]
    assert texts(tmp_path) == mine and len(mine) == 22


def test_exact_decoding_is_what_a_point_of_its_temperature_and_draft_length_is_compared_with(swept):
    rows = {
        (row["relaxation"], row["temperature"], row["draft_length"]): row for row in summarise(swept / "results.jsonl")
    }
    for (relaxation, temperature, length), row in rows.items():
        if relaxation != "none":
            exact = rows["none", temperature, length]
            assert row["difference"] == pytest.approx(row["score"] - exact["score"]) and 0 < row["text_p"] <= 1


def unmeasured(path):
    """The bytes of a file of results, its measured seconds and the checksum over them set to 0."""
    lines = path.read_text().splitlines()
    return "".join(json.dumps(json.loads(line) | {"seconds": 0, "crc32": 0}) + "\n" for line in lines)


def test_processes_that_share_a_sweep_end_with_the_bytes_of_one(finished, options, tmp_path, capsys):
    for index in (2, 0, 1):
        call(evaluate, out=str(tmp_path), **options, num_shards=3, shard_index=index)
        assert (tmp_path / "results.jsonl").exists() == (index == 1)
    assert unmeasured(tmp_path / "results.jsonl") == unmeasured(finished / "results.jsonl")
    assert (tmp_path / "eval.json").read_bytes() == (finished / "eval.json").read_bytes()
    printed = capsys.readouterr().out
    assert "results.2-of-3.jsonl: this part is complete; the last process to finish writes" in printed
    assert "1 - TV(draft, relaxed target)" in printed


def test_a_process_killed_among_several_resumes_to_the_bytes_of_one(finished, options, tmp_path):
    code = (
        "from diversed.commands.eval import evaluate; from diversed.commands.options import call; from diversed.data.tasks import DataOptions; "
        f"call(evaluate, out={str(tmp_path)!r}, num_shards=2, shard_index=0, "
        f"**{ {**options, 'data': None}!r} | {{'data': {options['data']!r}}})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = tmp_path / "results.0-of-2.jsonl"
    while not part.exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert part.exists() and not (tmp_path / "results.jsonl").exists()
    call(evaluate, out=str(tmp_path), **options, num_shards=2, shard_index=1)
    part.write_bytes(part.read_bytes()[:-100])
    call(evaluate, out=str(tmp_path), **options, num_shards=2, shard_index=0)
    assert unmeasured(tmp_path / "results.jsonl") == unmeasured(finished / "results.jsonl")


def test_lines_of_an_older_version_have_the_settings_temperature_and_draft_length(finished, options, tmp_path):
    lines = read_results(finished / "results.jsonl")
    older = [{k: v for k, v in line.items() if k not in ("temperature", "draft_length")} for line in lines]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in older))
    unknown = read_results(tmp_path / "results.jsonl")
    assert {(line["temperature"], line["draft_length"]) for line in unknown} == {(None, None)}
    (tmp_path / "eval.json").write_bytes((finished / "eval.json").read_bytes())
    assert read_results(tmp_path / "results.jsonl") == lines
    call(evaluate, out=str(tmp_path), **options)
    assert texts(tmp_path) == texts(finished)


def test_a_dry_run_says_what_would_be_decoded_and_writes_nothing(finished, options, tmp_path, capsys):
    out = tmp_path / "new"
    call(evaluate, out=str(out), **options, dry_run=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "22 texts to decode of 22" in printed and "estimated from a probe of 4 texts of token none" in printed
    assert not out.exists()
    before = {path: path.read_bytes() for path in finished.iterdir()}
    call(evaluate, out=str(finished), **options | {"relaxations": ["ensemble:0.5", "ensemble:0.9"]}, dry_run=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert "11 texts to decode of 22" in printed and "estimated from 22 texts decoded before" in printed
    assert "none, paired by prompt" in printed
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_a_finished_run_is_left_alone_and_more_cells_are_added(finished, options, tmp_path):
    for name in ("results.jsonl", "eval.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    call(evaluate, out=str(tmp_path), **options)
    assert (tmp_path / "results.jsonl").read_bytes() == (finished / "results.jsonl").read_bytes()
    call(evaluate, out=str(tmp_path), **options | {"relaxations": ["ensemble:0.9"], "methods": ["block", "plain"]})
    cells = list(dict.fromkeys((line["method"], line["relaxation"]) for line in texts(tmp_path)))
    assert cells[2:] == [("block", "ensemble:0.9"), ("plain", "none")]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 5}, "begun with batch 4, now it is 5"),
        ({"sampling": Sampling(top_p=0.5)}, "begun with sampling.top_p"),
        ({"temperatures": []}, "`temperatures` is empty"),
        ({"temperatures": [-1.0]}, "temperature` must be 0 or a finite number"),
        ({"draft_lengths": [3, 0]}, "`draft_lengths` must be at least 1, got 0"),
        ({"num_shards": 2, "shard_index": 2}, "`shard_index` must lie in 0..1"),
        ({"methods": []}, "`methods` is empty"),
        ({"methods": ["tokne"]}, "token"),
        ({"relaxations": ["ensemble:2"]}, "weight must lie in"),
        ({"relaxations": ["no/such/bundle"]}, "no/such/bundle"),
        ({"seeds": [-1]}, "`seeds` must lie in"),
        ({"batch": 0}, "`batch` must be at least 1, got 0"),
        ({"max_new_tokens": 200}, "longer than the context"),
    ],
)
def test_bad_or_changed_options_are_refused_in_a_sentence(finished, options, change, sentence):
    before = (finished / "results.jsonl").read_bytes()
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        call(evaluate, out=str(finished), **options | change)
    assert (finished / "results.jsonl").read_bytes() == before


def test_other_rows_in_the_same_file_are_refused(options, tmp_path):
    data = dataclasses.replace(options["data"], path=str(tmp_path / "rows.jsonl"))
    small = options | {"data": data, "prompts": 2, "relaxations": ["none"], "out": str(tmp_path / "eval")}
    rows = [{"prompt": "w1 w2 w3", "reference": "1"}, {"prompt": "w4 w5", "reference": "2"}]
    for reference in ("2", "3"):
        rows[1]["reference"] = reference
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if reference == "2":
            call(evaluate, **small)
    with pytest.raises(ValueError, match="was begun with rows_sha256 '[0-9a-f]{64}', now it is '"):
        call(evaluate, **small, num_shards=2, shard_index=0)


@pytest.mark.parametrize("change", [{"methods": ["tokne"]}, {"relaxations": ["ensemble:2"]}])
def test_a_wrong_name_is_refused_before_any_model_is_loaded(tmp_path, change):
    with pytest.raises(ValueError, match="token|weight"):
        call(evaluate, out=str(tmp_path / "eval"), target="no/such/target", **change)
    assert not (tmp_path / "eval").exists()


def test_results_that_are_no_results_are_refused_with_their_line(tmp_path):
    path = tmp_path / "results.jsonl"
    with pytest.raises(FileNotFoundError, match="`diversed eval` writes it"):
        read_results(path)
    path.write_text(json.dumps(record()) + "\nnonsense\n" + json.dumps(record()) + "\n")
    with pytest.raises(ValueError, match="line 2 is no result"):
        read_results(path)
    for damaged in ({"prompt": [1]}, {"score": "high"}, {"tokens": 3}, {"seconds": None}):
        path.write_text(json.dumps(record() | damaged) + "\n")
        with pytest.raises(ValueError, match=f"line 1 is no result: {next(iter(damaged))} is missing or no figure"):
            read_results(path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="line 1 is no result"):
        read_results(path)
    path.write_text(json.dumps(record()) + "\n" + json.dumps(record())[:30])
    assert len(read_results(path)) == 1


@pytest.mark.parametrize(
    ("relaxation", "expected"),
    [
        ("none", ("exact", "")),
        ("ensemble:0.30", ("static", "0.3")),
        ("runs/quickstart/bundle", ("learned", "")),
        ("runs/quickstart/bundle;bias=-1", ("learned", "bias \N{MINUS SIGN}1")),
        ("diversed.assets.sums:oracle", ("code", "oracle")),
        ("cascade-opt:0.2", ("other", "cascade-opt 0.2")),
        ("typical:0.09,0.3", ("other", "typical 0.09,0.3")),
    ],
)
def test_points_are_named_by_what_they_are(relaxation, expected):
    rule = rule_of(relaxation)
    assert (rule.kind, rule.label) == expected


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_figure_is_drawn_with_every_kind_of_point(tmp_path, ending):
    relaxations = ["none", "ensemble:0.1", "ensemble:0.2", "a/b", "a/b;bias=-1", "a.b:oracle", "lenient:0.5"]
    rows = summarise(
        [
            record(relaxation, prompt, prompt % 2, method, target_calls=2 + number)
            for number, relaxation in enumerate(relaxations)
            for method in ("token", "block")
            for prompt in range(4)
        ]
    )
    out = frontier(rows, tmp_path / f"frontier.{ending}")
    assert out.stat().st_size > 10_000
    with pytest.raises(ValueError, match="no result to draw"):
        frontier([], out)


def test_texts_that_are_empty_under_exact_decoding_are_told():
    """Nine of ten with words are usual, eight are not; what a relaxation leaves empty is no matter of the prompt."""
    full = [{"method": "token", "relaxation": "none", "text": "words"}] * 9 + [{"method": "token", "relaxation": "ensemble:0.5", "text": ""}] * 9
    empty = {"method": "token", "relaxation": "none", "text": " \n"}
    assert empty_texts([*full, empty]) is None and empty_texts([]) is None
    assert empty_texts([*full, empty, empty]).startswith("note: 2 of 11 texts of exact decoding are empty;")


def test_repetition_is_the_share_of_runs_of_four_that_occurred_before_in_the_same_text():
    again = [1, 2, 3, 4, 1, 2, 3, 4]  # of five runs the last
    assert repetition(again) == pytest.approx(1 / 5) and repetition([7] * 10) == pytest.approx(6 / 7)
    assert repetition([1, 2, 3]) is None and repetition() is None and repetition([1, 2, 3, 4]) == 0
    assert repetition(again, [1, 2, 3, 4, 5]) == pytest.approx(1 / 7), "another text's runs are no repetition"
    row, loop = summarise([record(tokens=again), record("lenient:0.5", tokens=[7] * 10)])
    assert (row["repetition"], loop["repetition"], loop["tokens_per_text"]) == (pytest.approx(1 / 5), pytest.approx(6 / 7), 10)


def test_relaxed_texts_that_loop_are_told():
    exact, loop = record(tokens=[*range(20)]), record("lenient:0.5", tokens=[7] * 10)
    told = looping_texts(summarise([exact, loop, record("ensemble:0.5", tokens=[*range(9)])]))
    assert told.endswith("(exact decoding's): token lenient:0.5 0.86 (0.00)")
    assert looping_texts(summarise([loop])) is None  # nothing to compare with
    assert looping_texts(summarise([record(tokens=[7] * 10), loop, record("ensemble:0.5", tokens=[7])])) is None


def test_every_kind_of_point_is_named_once_however_many_methods_there_are():
    """The learned head of a second method is faster than the first one's; both stand for the same name."""
    from diversed.eval.figure import _labels

    ends = {"score": 0.5, "score_low": 0.4, "score_high": 0.6}
    groups = [
        [
            {"method": method, "relaxation": relaxation, "tokens_per_call": speed + number, **ends}
            for relaxation, speed in (("none", 1.0), ("ensemble:0.5", 2.0), ("runs/bundle", 3.0), ("a.b:oracle", 4.0))
        ]
        for number, method in enumerate(("token", "block"))
    ]
    labels = _labels(groups, "tokens_per_call", kinds_named=True)
    expected = ["exact decoding", "learned head", "oracle", "static blend, w = 0.5"]
    assert sorted(label.words for label in labels) == expected


def test_points_with_one_seed_beside_points_with_two_are_said_to_be_so():
    from io import StringIO

    from diversed.eval.results_table import print_table
    from rich.console import Console

    cells = [("none", 0), ("none", 1), ("ensemble:0.1", 0)]
    records = [record(name, prompt, 1, "token", seed=seed) for name, seed in cells for prompt in range(2)]
    settings = dict.fromkeys(("split", "batch", "threads", "device", "dtype"), "x")
    settings |= {"prompts": 2, "sampling": {}, "target": {"name": "t"}, "draft": {"name": "d"}}
    print_table(summarise(records), settings, Console(file=(page := StringIO()), width=200))
    assert "2 to 4 texts a row (2 prompts, 1 to 2 seed(s))" in page.getvalue()
