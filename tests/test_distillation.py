"""`diversed distill`: the losses, what training gains, the adapter that comes out, resuming, and what is refused."""

import json
import multiprocessing
import os
import shutil
import signal

import pytest
import torch
from diversed import cli
from diversed.commands.distill import distill
from diversed.commands.options import call
from diversed.data.batches import held_out
from diversed.data.tasks import DataOptions
from diversed.data.traces import read_shards
from diversed.files import exclusive
from diversed.runtime.forward import Model
from diversed.runtime.model import load_module, load_pair, load_tokenizer
from diversed.runtime.sampling import Sampling
from diversed.train import draft, draft_weights, fit
from diversed.train.draft import DraftModule, Texts, collate, compare
from diversed.train.draft_weights import keep_layers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .support.models import module, tiny_pair, tokenizer
from .test_model import small

VOCAB = 7
RESULT = ("adapter_model.safetensors", "adapter_config.json", "distill.json", "metrics.csv")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A saved pair, a target of three layers and a draft of one, 24 prompts, and the settings of a short run."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, seed, layers in (("target", 0, 3), ("draft", 1, 1)):
        module(seed, VOCAB, layers).save_pretrained(folder / name)
        tokenizer(VOCAB).save_pretrained(folder / name)
    lines = [json.dumps({"question": f"w2 w{2 + i % 5} w{2 + i // 5}"}) for i in range(24)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    settings = {
        "target": str(folder / "target"), "draft": str(folder / "draft"), "task": "jsonl", "prompts": 24, "samples": 4,
        "data": DataOptions(path=str(folder / "data.jsonl"), whole=True, prompt_field="question"), "rank": 4,
        "lr": 0.02, "max_new_tokens": 24, "epochs": 3, "batch": 12, "validation": 0.25, "patience": 0,
    }  # fmt: skip
    return folder, settings


@pytest.fixture(scope="module")
def finished(place):
    """A run that nobody interrupted."""
    folder, settings = place
    return call(distill, out=str(folder / "finished"), **settings)


def report(out):
    return json.loads((out / "distill.json").read_text())


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [1 << 25, 3 * VOCAB], ids=["at once", "three rows at a time"])
@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_the_loss_and_its_gradient_are_those_of_every_row_written_out(loss, numbers, monkeypatch):
    monkeypatch.setattr(draft, "NUMBERS", numbers)
    target, ours = module(0, VOCAB, 2).double(), module(1, VOCAB, 1).double()
    texts = [(torch.tensor([2, 3, 4, 5, 6]), 2), (torch.tensor([6, 5, 2, 1, 3, 4, 2, 5]), 1)]
    found, accepted = compare(target, ours, collate(texts), VOCAB, loss, Sampling(temperature=0.7))
    found.backward()
    gradients = {name: weight.grad.clone() for name, weight in ours.named_parameters()}
    ours.zero_grad()
    expected = shares = 0
    for tokens, before in texts:
        for position in range(before - 1, len(tokens) - 1):
            beginning = tokens[None, : position + 1]
            p, q = (
                model(beginning).logits[0, -1].div(0.7).softmax(-1) for model in (target.requires_grad_(False), ours)
            )
            for token in range(VOCAB):
                expected += (
                    p[token] * (p[token] / q[token]).log() if loss == "kl" else 0.5 * (p[token] - q[token]).abs()
                )
            shares += float(torch.minimum(p, q).detach().sum())
    expected.backward()
    # rows are compared in float32, whose sums over 7 tokens are rounded by 1e-7; gradients pass through layers of them
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert float(accepted) == pytest.approx(shares, abs=1e-5)
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_acceptance_at_temperature_zero_is_how_often_both_choose_the_same_token():
    pair = tiny_pair(VOCAB)
    batch = collate([(torch.tensor([2, 3, 4, 5, 6, 2, 3]), 1)])
    _, accepted = compare(pair.target.module, pair.draft.module, batch, VOCAB, "kl", Sampling(temperature=0))
    same = [model.module(batch["tokens"]).logits[0, :-1].argmax(-1) for model in (pair.target, pair.draft)]
    assert float(accepted) == int((same[0] == same[1]).sum())


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{}, {"loss": "tv"}, {"full": True}, {"layers": [0, 2], "full": True}, {"layers": [1]}]
)
def test_distilling_raises_acceptance_on_prompts_it_never_saw(place, finished, change):
    """By more than .1 at the very same positions, so that no sampling error comes between; the five gain .19 to .29."""
    folder, settings = place
    name = "-".join(change) + str(change.get("loss", ""))
    out = call(distill, out=str(folder / name), **{**settings, **change}) if change else finished
    figures = report(out)
    assert figures["after"]["held_out_acceptance"] > figures["before"]["held_out_acceptance"] + 0.1
    assert figures["after"]["held_out_loss"] < figures["before"]["held_out_loss"]
    assert figures["kind"] == ("model" if "layers" in change or "full" in change else "adapter")
    assert load_pair(settings["target"], str(out)).draft.hash == figures["hash"] != figures["base"]["hash"]


def test_acceptance_before_training_is_that_of_the_traces(place, finished):
    """Gathering measures it token by token with a cache; figures are rounded to six decimals, rows to 1e-6."""
    pair = load_pair(*(place[1][name] for name in ("target", "draft")))
    texts = Texts(finished / "traces", pair, place[1]["data"])
    shard = next(read_shards(finished / "traces"))
    held = torch.isin(shard.prompt, held_out(24, 0.25, 0))
    at = torch.repeat_interleave(held, shard.start.diff())
    expected = float((1 - shard.tv[at].double()).mean())
    assert report(finished)["before"]["held_out_acceptance"] == pytest.approx(expected, abs=1e-5)
    assert len(texts) == 96 and all(len(tokens) > before for tokens, before in texts.items)


def test_training_stops_where_acceptance_stops_rising_and_the_best_epoch_is_kept(place, finished):
    """With a learning rate of nothing no epoch is better than the draft, which is what comes out."""
    folder, settings = place
    change = {"lr": 1e-12, "patience": 2, "epochs": 9, "traces": str(finished / "traces")}
    out = call(distill, out=str(folder / "patience"), **{**settings, **change})
    figures = report(out)
    assert [row["epoch"] for row in figures["figures"]] == [0, 1, 2] and figures["best_epoch"] == 0
    assert figures["after"] == figures["before"] and figures["hash"] == figures["base"]["hash"]


def test_a_draft_of_all_layers_of_the_target_is_the_target():
    for kind in ("llama", "gemma3_text", "gpt2"):
        model = small(kind).eval()
        count, tokens = model.config.num_hidden_layers, torch.tensor([[2, 3, 4]])
        assert torch.equal(keep_layers(model, list(range(count)))(tokens).logits, model(tokens).logits)
        first = keep_layers(model, [count - 1])
        assert first.config.num_hidden_layers == 1 and first.num_parameters() < model.num_parameters()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_rows_come_from_hidden_states_by_the_output_layer_or_the_model_is_refused(kind):
    model, tokens = small(kind).eval(), torch.tensor([[2, 3, 4]])
    draft.refuse_other_output(model, kind, tokens)
    if kind == "gemma3_text":
        model.config.final_logit_softcapping = 2.0
        draft.refuse_other_output(model, kind, tokens)
    model.register_forward_hook(lambda _, __, out: type(out)(logits=3 * out.logits))
    with pytest.raises(ValueError, match="by more than its output layer"):
        draft.refuse_other_output(model, kind, tokens)


# --- the adapter ------------------------------------------------------------------------------------------------------


def test_peft_reads_the_adapter_and_our_merged_draft_computes_the_same(place, finished):
    tokens = torch.tensor([[2, 3, 4, 5, 6, 2, 3]])
    base = AutoModelForCausalLM.from_pretrained(place[1]["draft"])
    theirs = PeftModel.from_pretrained(base, finished)(tokens).logits
    ours = load_module(str(finished))
    assert type(ours) is type(module(0, VOCAB)) and not any("lora" in name for name, _ in ours.named_modules())
    # float32: W x + B A x beside (W + B A) x, logits of size 3
    torch.testing.assert_close(ours(tokens).logits, theirs, rtol=0, atol=1e-5)
    assert (ours(tokens).logits - load_module(place[1]["draft"])(tokens).logits).abs().max() > 0.1


def test_the_merged_draft_is_decoded_with_like_any_other(place, finished):
    pair = load_pair(place[1]["target"], str(finished))
    assert pair.draft.lean and pair.draft.hash != Model(load_module(place[1]["draft"]), "base").hash
    assert load_tokenizer(str(finished)).get_vocab() == load_tokenizer(place[1]["draft"]).get_vocab()


def test_a_finished_run_says_what_it_is_and_keeps_no_checkpoint(place, finished):
    figures = report(finished)
    assert figures["target"]["name"] == place[1]["target"] and figures["base"]["name"] == place[1]["draft"]
    assert [row["epoch"] for row in figures["figures"]] == [0, 1, 2, 3]
    assert not (finished / "last.ckpt").exists()
    lines = (finished / "metrics.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("epoch,step,lr,train_loss,train_acceptance,held_out_loss")
    assert not list(finished.glob(".*.part"))


def test_an_adapter_of_another_base_is_refused(place, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "moved")
    settings = json.loads((finished / "adapter_config.json").read_text())

    def based_on(model):
        text = json.dumps(settings | {"base_model_name_or_path": model})
        (tmp_path / "moved/adapter_config.json").write_text(text)
        return str(tmp_path / "moved")

    with pytest.raises(
        ValueError, match="does not fit its base .*trained on the weights .*, these are .*; distil again"
    ):
        load_module(based_on(place[1]["target"]))
    (tmp_path / "moved/distill.json").unlink()
    with pytest.raises(ValueError, match="does not fit its base .*: 28 tensors differ in name or shape, such as"):
        load_module(based_on(place[1]["target"]))
    with pytest.raises(ValueError, match="adapters of adapters are not read"):
        load_module(based_on(str(finished)))
    weights = load_file(finished / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), tmp_path / "moved/adapter_model.safetensors")
    with pytest.raises(ValueError, match="1 tensors differ in name or shape"):
        load_module(based_on(place[1]["draft"]))
    (tmp_path / "moved/adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="does not fit its base .*No such file"):
        load_module(based_on(place[1]["draft"]))
    (tmp_path / "moved/adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="does not say which model it adapts"):
        load_module(str(tmp_path / "moved"))


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_step(count):
    original, seen = DraftModule.training_step, []

    def step(self, *args):
        seen.append(1)
        return original(self, *args) if len(seen) <= count else _die()

    DraftModule.training_step = step


def _die_replacing(name, number=1):
    """Half of a file's bytes are written when the process dies."""
    original, seen = os.replace, []

    def change(source, path):
        seen.append(str(path).endswith(name))
        if seen[-1] and sum(seen) == number:
            if os.path.isfile(source):
                os.truncate(source, os.path.getsize(source) // 2)
            _die()
        original(source, path)

    os.replace = change


KILLS = {
    "in the middle of the first epoch": lambda: _die_at_step(2),
    "in the middle of the second epoch": lambda: _die_at_step(9),
    "while the second checkpoint replaces the first": lambda: _die_replacing("last.ckpt", 2),
    "between a checkpoint and its figures": lambda: setattr(fit, "_write_metrics", _die),
    "between training and the adapter": lambda: setattr(draft_weights, "write_adapter", _die),
    "while the adapter is written": lambda: _die_replacing("adapter_config.json"),
    "while distill.json is written": lambda: _die_replacing("distill.json"),
}


def _run_and_die(kill, out, settings):
    kill()
    call(distill, out=out, **settings)


def killed(kill, out, settings):
    child = multiprocessing.get_context("fork").Process(target=_run_and_die, args=(kill, str(out), settings))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL and not (out / "distill.json").exists()


def test_a_checkpoint_holds_what_trains_alone(place, finished, tmp_path):
    settings = {**place[1], "traces": str(finished / "traces")}
    killed(KILLS["between training and the adapter"], tmp_path / "out", settings)
    checkpoint = torch.load(tmp_path / "out" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"] and all(".lora_" in name for name in checkpoint["state_dict"])


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_ends_with_the_same_bytes_when_it_is_run_again(kill, place, finished, tmp_path):
    settings = {**place[1], "traces": str(finished / "traces")}
    killed(KILLS[kill], tmp_path / "out", settings)
    out = call(distill, out=str(tmp_path / "out"), **settings)
    for name in RESULT:
        assert (out / name).read_bytes() == (finished / name).read_bytes(), name


def test_a_draft_of_layers_survives_kills_from_the_cut_to_the_saved_model(place, tmp_path):
    settings = {**place[1], "layers": [0, 2], "epochs": 1, "prompts": 8}
    whole = call(distill, out=str(tmp_path / "whole"), **settings)
    for kill in (
        lambda: _die_replacing("cut-0-2"),
        lambda: _die_replacing("manifest.json", 2),
        lambda: _die_at_step(1),
        lambda: _die_replacing("model.safetensors"),
    ):
        killed(kill, tmp_path / "out", settings)
    out = call(distill, out=str(tmp_path / "out"), **settings)
    for name in ("model.safetensors", "config.json", "metrics.csv"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_runs_that_are_compared_share_texts_and_cut(place, tmp_path, capsys):
    settings = {**place[1], "layers": [0, 2], "epochs": 1, "prompts": 8}
    first = call(distill, out=str(tmp_path / "kl"), **settings)
    gathered = (first / "traces/manifest.json").read_bytes()
    capsys.readouterr()
    second = call(distill, out=str(tmp_path / "tv"), **settings, loss="tv", traces=str(first / "traces"))
    assert "traces are complete, nothing to gather" in capsys.readouterr().out
    assert (first / "traces/manifest.json").read_bytes() == gathered and not (second / "cut-0-2").exists()
    assert report(first)["before"]["held_out_acceptance"] == report(second)["before"]["held_out_acceptance"]
    assert report(first)["hash"] != report(second)["hash"]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_finished_run_is_left_alone_and_other_settings_are_refused_by_name(place, finished, capsys):
    settings = place[1]
    call(distill, out=str(finished), **settings)
    assert "is already distilled; choose another --out" in capsys.readouterr().out
    for name, value in (("rank", 8), ("loss", "tv"), ("seed", 1), ("draft", settings["target"])):
        with pytest.raises(
            ValueError, match=f"was begun with {name} .*, now it is {value!r}; .*choose another --out"
        ):
            call(distill, out=str(finished), **{**settings, name: value})
    with exclusive(finished), pytest.raises(OSError, match="is writing to .*choose another --out"):
        call(distill, out=str(finished), **settings)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"modules": ["q_proj", "lm_head"]}, "`modules` must name linear layers .*down_proj, .*; got 'lm_head'"),
        ({"layers": [0, 3]}, r"`layers` must name some of the target's layers 0\.\.2, got 3"),
        ({"layers": [1, 0]}, r"`layers` must be numbers of the target's layers, from 0 and rising, got \[1, 0\]"),
        ({"layers": []}, r"`layers` must be numbers of the target's layers"),
        ({"samples": 0}, "`samples` must be at least 1, got 0"),
        ({"prompts": 1}, "`prompts` must be at least 2, got 1"),
        ({"validation": 0.0}, r"`validation` must be in \(0, 1\), .* got 0.0"),
        ({"loss": "js"}, "`loss` must be one of kl, tv, got 'js'"),
        ({"lr": 0.0}, "`lr` must be a positive number, got 0.0"),
        ({"rank": 0}, "`rank` must be at least 1, got 0"),
        ({"device": "auto"}, "`device` must be one device such as cpu or cuda:0"),
        ({"draft": "finished"}, "`draft` .* is an adapter already; give its base, or --full true"),
        ({"target": "nowhere/at/all"}, "the folder does not exist"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(place, finished, tmp_path, change, sentence):
    folder, settings = place
    if change.get("draft"):
        change = {"draft": str(folder / change["draft"])}
    with pytest.raises((ValueError, OSError), match=sentence) as refused:
        call(distill, out=str(tmp_path / "out"), **{**settings, "traces": str(finished / "traces"), **change})
    assert "\n" not in str(refused.value)


def test_the_command_line_takes_layers_with_commas(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["distill", "--out", "x", "--layers", "0,1,14", "--full", "--print_config"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and "layers:\n- 0\n- 1\n- 14\n" in printed and "full: true" in printed
