"""The whole story on a pair of random models: every stage runs, and the same command again only reads."""

import functools
import json
import string

import pytest
import torch
from diversed import cli
from diversed.runtime.bundle import load_bundle
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SETTINGS = """
target: {folder}/target
draft: {folder}/draft
run: {{biases: [0, 1]}}
gather: {{prompts: 4, samples: 2, unit: 2, max_new_tokens: 8}}
train: {{trainer: {{max_epochs: 1}}}}
eval: {{prompts: 3, relaxations: [none], max_new_tokens: 8}}
"""


@pytest.fixture
def quick(tmp_path, capfd):
    """A settings file for a random pair whose tokens are characters."""
    letters = ["<s>", "</s>", *string.printable]
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, [], unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    for seed, name in enumerate(("target", "draft")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        fast.save_pretrained(tmp_path / name)
    path = tmp_path / "quick.yaml"
    path.write_text(SETTINGS.format(folder=tmp_path))
    capfd.readouterr()
    return path


def test_the_story_runs_and_the_second_time_only_reads(quick, tmp_path, capfd, monkeypatch):
    out = tmp_path / "story"
    words = ["run", "--config", str(quick), "--out", str(out)]

    from diversed.commands import eval as evaluation

    @functools.wraps(evaluation.evaluate)
    def interrupt(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", interrupt)
        assert cli.main(words) == 130
    assert "resume with: diversed run --config" in capfd.readouterr().err

    assert cli.main(words) == 0
    printed = capfd.readouterr().out
    assert "traces are complete" in printed and "already trained" in printed
    files = ("traces/manifest.json", "train/head.safetensors", "bundle/card.json", "results.jsonl", "frontier.png")
    files += ("report.html", "tokens.json")
    assert str(out / "report.html") in printed
    first = {name: (out / name).read_bytes() for name in files}
    assert first["results.jsonl"].count(b"\n") == 3 * 3  # exact decoding and two biases, three prompts each
    assert b"tokens_per_call" in first["bundle/card.json"]

    assert cli.main(words) == 0
    assert {name: (out / name).read_bytes() for name in files} == first

    limit = ["--max_quality_drop", "0.9", "--prompts", "4", "--max_new_tokens", "8", "--biases", "0"]
    assert cli.main(["calibrate", "--bundle", str(out / "bundle"), *limit]) in (0, 1)
    calibrated = {path: path.read_bytes() for path in sorted((out / "bundle").iterdir())}
    capfd.readouterr()
    assert cli.main(words) == 0
    printed = capfd.readouterr().out
    assert "was calibrated and stays as it is" in printed and "is of the bundle before it was calibrated" in printed
    assert {path: path.read_bytes() for path in sorted((out / "bundle").iterdir())} == calibrated
    assert (out / "results.jsonl").read_bytes() == first["results.jsonl"]
    for more, sentence in ((["--eval.prompts", "2"], "other prompts"), (["--biases", "0", "1", "2"], "no whole ")):
        assert cli.main([*words, *more]) == 2
        refusal = capfd.readouterr().err
        assert f"holds {sentence}" in refusal and "is of the bundle before it was calibrated" in refusal
    assert cli.main(["export", "--train", str(out / "train"), "--out", str(out / "bundle")]) == 2
    assert "was calibrated; exporting to it would lose its bias and the evidence" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in sorted((out / "bundle").iterdir())} == calibrated
    assert cli.main(["export", "--train", str(out / "train"), "--out", str(out / "bundle"), "--overwrite"]) == 0
    assert load_bundle(out / "bundle").card.calibration is None
    assert cli.main([*words, "--export.overwrite"]) == 0, "it decides nothing about a bundle"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda settings: settings["target"].update(hash="0"), "was measured with the target"),
        (lambda settings: settings["draft"].update(hash="0"), "was measured with the draft"),
        (lambda settings: settings.update(heads={"other": "0"}), "holds figures of other heads (other), none of this one"),
        (None, "eval.json, which says what"),
    ],
)
def test_figures_of_others_do_not_reach_a_card(quick, tmp_path, capfd, change, sentence):
    out = tmp_path / "story"
    assert cli.main(["run", "--config", str(quick), "--out", str(out)]) == 0
    words = ["export", "--train", str(out / "train"), "--out", str(tmp_path / "new"), "--results", str(out / "results.jsonl")]
    assert cli.main(words) == cli.main([*words, "--bias", "-1"]) == 0
    assert load_bundle(tmp_path / "new").card.frontier
    if change:
        settings = json.loads((out / "eval.json").read_text())
        change(settings)
        (out / "eval.json").write_text(json.dumps(settings))
    else:
        (out / "eval.json").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert cli.main(words) == 2 and sentence in capfd.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "new").iterdir()} == before


def test_rounds_gather_with_the_head_so_far_and_the_last_head_becomes_the_bundle(quick, tmp_path):
    out = tmp_path / "rounds"
    options = ["--rounds", "2", "--train.data.validation", "0.5", "--export.bias", "0.5"]
    assert cli.main(["run", "--config", str(quick), "--out", str(out), *options]) == 0
    manifest = json.loads((out / "round-2/traces/manifest.json").read_text())
    assert (manifest["relaxation"], manifest["first_sample"]) == (str(out / "round-1/bundle"), 2)
    traces = json.loads((out / "round-2/train/train.json").read_text())["traces"]
    assert traces == [str(out / f"round-{number}/traces") for number in (1, 2)]
    last, whole = (load_bundle(folder).head(torch.zeros(1, 12)) for folder in (out / "round-2/bundle", out / "bundle"))
    assert (whole - last).item() == pytest.approx(0.5, abs=1e-6), "the bias that was asked for is for the last bundle"
