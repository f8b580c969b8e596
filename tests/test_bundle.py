"""A bundle is a head that fits, or a sentence that says why not."""

import json
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from diversed.commands.export import export
from diversed.eval.summary import summarise
from diversed.export.bundle_writer import add_frontier
from diversed.files import read_object, sha256
from diversed.runtime.bundle import Card, load_bundle
from diversed.runtime.groups import BundleModels
from diversed.runtime.sampling import Sampling
from diversed.verifier.head import WeightHead
from diversed.verifier.relax import parse
from safetensors.torch import load_file, save_file

TARGET = {"name": "some/target", "hash": "aaaa", "hidden_size": 8}
DRAFT = {"name": "some/draft", "hash": "bbbb", "hidden_size": 4}
target, draft = SimpleNamespace(**TARGET), SimpleNamespace(**DRAFT)


def trained(folder, features="both", width=3):
    """A finished training run in `folder` and its head."""
    torch.manual_seed(0)
    head = WeightHead(features, draft_hidden=4, target_hidden=8, width=width)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        head.mean.normal_()
    manifest = {"target": TARGET, "draft": DRAFT, "tokenizer": "cccc", "vocab": 40, "sampling": vars(Sampling())}
    manifest |= {"relaxation": "ensemble:0.3", "task": "sums", "metric": "exact match"}
    described = {"features": features, "draft_hidden": 4, "target_hidden": 8, "width": width}
    record = {"head": described, "manifest": manifest, "traces_sha256": "d" * 64, "settings": {"lr": 5e-4}}
    folder.mkdir()
    (folder / "train.json").write_text(json.dumps(record))
    put(folder, head.state_dict())
    return head


def put(folder, tensors):
    """Make these tensors the head of a training run."""
    save_file(tensors, folder / "head.safetensors")
    record = json.loads((folder / "train.json").read_text()) | {"head_sha256": sha256(folder / "head.safetensors")}
    (folder / "train.json").write_text(json.dumps(record))


@pytest.fixture(params=["hidden", "logits", "both"])
def bundle(request, tmp_path):
    trained(tmp_path / "train", request.param, width=0 if request.param == "hidden" else 3)
    export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"), draft_length=7)
    return tmp_path / "bundle"


def change(bundle, **values):
    card = read_object(bundle / "card.json", "")
    (bundle / "card.json").write_text(json.dumps(card | values))


def test_export_and_load_give_the_head_back_bit_by_bit(bundle):
    before = load_file(bundle.parent / "train" / "head.safetensors")
    loaded = load_bundle(bundle, target, draft, Sampling())
    after = loaded.head.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.card.models == {"target": TARGET, "draft": DRAFT} and loaded.card.draft_length == 7
    assert sorted(path.name for path in bundle.iterdir()) == sorted(
        ["README.md", "card.json", "example.safetensors", "head.safetensors"]
    )


def test_an_exported_bias_is_the_bias_of_the_loaded_gate(bundle):
    export(train=str(bundle.parent / "train"), out=str(bundle.parent / "shifted"), bias=-1.5)
    rows, hidden = torch.randn(2, 5, 9).softmax(-1), torch.randn(5, 12)
    before, after = (load_bundle(bundle.parent / name).head for name in ("bundle", "shifted"))
    # one float32 addition in another place
    torch.testing.assert_close(before.weight(*rows, hidden, bias=-1.5), after.weight(*rows, hidden), atol=1e-5, rtol=0)


def test_who_can_read_the_card_can_read_the_gate(bundle):
    assert len({path.stat().st_mode for path in bundle.iterdir()}) == 1


def test_export_twice_gives_the_same_bytes(bundle):
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    export(train=str(bundle.parent / "train"), out=str(bundle), draft_length=7)
    assert before == {path.name: path.read_bytes() for path in bundle.iterdir()}


def test_a_bundle_refuses_another_model_and_names_both(bundle):
    other = SimpleNamespace(name="my/model", hash="ffff", hidden_size=8)
    with pytest.raises(ValueError, match=r"some/target \(hash aaaa, hidden size 8\), but got my/model \(hash ffff"):
        load_bundle(bundle, other, draft)
    with pytest.raises(ValueError, match=r"draft some/draft .*but got my/model .*hidden size 8"):
        load_bundle(bundle, target, other)


def test_a_bundle_refuses_another_hidden_size_and_names_both(bundle):
    with pytest.raises(ValueError, match=r"hidden size 8\), but got some/target \(hash aaaa, hidden size 16\)"):
        load_bundle(bundle, SimpleNamespace(**TARGET | {"hidden_size": 16}), draft)


def test_only_a_head_on_rows_moves_to_another_pair_and_warns(bundle):
    other = SimpleNamespace(name="my/model", hash="ffff", hidden_size=32)
    if load_bundle(bundle).head.features == "logits":
        with pytest.warns(UserWarning, match="models it was not trained for"):
            load_bundle(bundle, other, draft, any_pair=True)
    else:
        with pytest.raises(ValueError, match="any_pair=True is only for heads that read no hidden states"):
            load_bundle(bundle, other, draft, any_pair=True)


def test_a_sampling_that_was_not_measured_warns_with_the_figures_that_there_are(bundle):
    sentence = "not measured at temperature 0.6, top_k 5; it was trained at temperature 1.0 and has no figures"
    with pytest.warns(UserWarning, match=sentence):
        load_bundle(bundle, sampling=Sampling(temperature=0.6, top_k=5))
    figures = [
        {"relaxation": "none", "score": 0.95, "tokens_per_call": 2.5, "temperature": at} for at in (1.0, 0.3)
    ] + [{"relaxation": "a/b;bias=1", "score": 0.9, "tokens_per_call": 3, "temperature": 0.3}]
    change(bundle, frontier=figures)
    known = "its figures are for temperature 0.3: none scores 0.950 at 2.50 tokens a call, a/b;bias=1 scores 0.900 at 3.00"
    with pytest.warns(UserWarning, match=f"not measured at temperature 0; {known}"):
        load_bundle(bundle, sampling=Sampling(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (1.0, 0.3):
            load_bundle(bundle, target, draft, sampling=Sampling(temperature))


def test_a_bundle_of_format_1_is_read_if_its_head_was_shown_what_the_models_believed(bundle):
    figures = [
        {"relaxation": "none", "score": 0.95, "tokens_per_call": 2.5, "temperature": at} for at in (1.0, 0.3)
    ]
    change(bundle, format=1, frontier=figures)
    read = load_bundle(bundle)
    assert read.card.frontier == figures[:1], "what was measured at other temperatures is measured anew"
    change(bundle, sampling={"temperature": 0.7})
    if read.head.features == "hidden":
        assert load_bundle(bundle).card.frontier == []
    else:
        with pytest.raises(ValueError, match="trained on rows at {'temperature': 0.7}, .* gather and train again"):
            load_bundle(bundle)


def test_decoding_with_a_bundle_takes_the_models_that_its_card_names(bundle):
    def names(models, relaxation):
        chosen = models.of_bundle(parse(relaxation).folder)
        return chosen.target, chosen.draft

    assert names(BundleModels(), f"{bundle};bias=-1") == ("some/target", "some/draft")
    assert names(BundleModels("mine"), str(bundle)) == ("mine", "some/draft")
    assert names(BundleModels(), "ensemble:0.3") == ("sums-target", "sums-draft")


def test_the_stored_example_catches_a_head_that_changed(bundle):
    tensors = load_file(bundle / "head.safetensors")
    name = next(name for name in tensors if name.endswith("weight"))
    save_file(tensors | {name: tensors[name] * 1.1}, bundle / "head.safetensors")
    with pytest.raises(ValueError, match="does not repeat its stored example"):
        load_bundle(bundle)


def test_damaged_bundles_are_refused_in_a_sentence(bundle):
    whole = (bundle / "head.safetensors").read_bytes()
    (bundle / "head.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"head.safetensors is damaged .*export the bundle again"):
        load_bundle(bundle)
    (bundle / "head.safetensors").write_bytes(whole)
    (bundle / "example.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no example.safetensors"):
        load_bundle(bundle)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_bundle(bundle / "nothing")
    (bundle / "example.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="but card.json describes"):
        load_bundle(bundle)
    for models in ({}, {"target": TARGET}, {"target": TARGET, "draft": None}, {"target": TARGET, "draft": {"name": 3}}):
        change(bundle, models=models)
        with pytest.raises(ValueError, match=r"card.json is damaged \(`models.(target|draft).name` (is missing|must be)"):
            load_bundle(bundle)
    change(bundle, format=99)
    with pytest.raises(ValueError, match="format 99, this version reads 2"):
        load_bundle(bundle)
    (bundle / "card.json").write_text("{")
    with pytest.raises(ValueError, match="card.json is damaged"):
        load_bundle(bundle)


@pytest.mark.parametrize("size", [-1, 2**40, True, "8", None, 1.5])
def test_sizes_are_checked_before_memory_is_taken(bundle, size):
    head = json.loads((bundle / "card.json").read_text())["head"]
    change(bundle, head=head | {"width": size})
    with pytest.raises(ValueError, match="`head.width` (is missing|must be a whole number in 0..1048576, got)"):
        load_bundle(bundle)
    change(bundle, head=head | {"width": 2**20})  # a terabyte, were it allocated
    with pytest.raises(ValueError, match="but card.json describes"):
        load_bundle(bundle)


def test_a_head_on_other_features_of_the_rows_is_refused(tmp_path):
    trained(tmp_path / "train", "logits")
    export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"))
    head = json.loads((tmp_path / "bundle" / "card.json").read_text())["head"]
    change(tmp_path / "bundle", head=head | {"feature_names": ["entropy"]})
    with pytest.raises(ValueError, match="trained on other features"):
        load_bundle(tmp_path / "bundle")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    head = trained(tmp_path / "train", "logits")
    put(tmp_path / "train", head.state_dict() | {"mean": torch.full((12,), torch.nan)})
    with pytest.raises(ValueError, match="not finite"):
        export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()


def test_export_refuses_a_head_that_is_not_the_one_of_its_training_record(tmp_path):
    head = trained(tmp_path / "train", "logits")
    save_file(head.state_dict() | {"mean": torch.zeros(12)}, tmp_path / "train" / "head.safetensors")
    with pytest.raises(ValueError, match="head.safetensors is not the head that train.json describes; delete both"):
        export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (lambda record: [], "it holds no object"),
        (lambda record: record | {"head": []}, "`head.draft_hidden` is missing"),
        (lambda record: record | {"settings": "x"}, "`settings` must be an object"),
        (lambda record: record | {"manifest": {"target": TARGET, "draft": DRAFT}}, "`manifest.tokenizer` is missing"),
        (lambda record: record | {"head": record["head"] | {"width": 10**12}}, "`head.width` must be a whole number"),
        (lambda record: record | {"head": record["head"] | {"features": "all"}}, "`head.features` must be one of"),
    ],
)
def test_export_names_what_a_damaged_training_record_lacks(tmp_path, damage, sentence):
    trained(tmp_path / "train")
    record = json.loads((tmp_path / "train/train.json").read_text())
    (tmp_path / "train/train.json").write_text(json.dumps(damage(record)))
    with pytest.raises(ValueError, match=f"train.json is damaged .{sentence}.*; train again"):
        export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"))


@pytest.mark.parametrize("bias", [float("nan"), float("-inf"), 1e39])
def test_a_bias_that_no_logit_can_take_is_refused(tmp_path, bias):
    trained(tmp_path / "train")
    with pytest.raises(ValueError, match="`bias` must be a finite number"):
        export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"), bias=bias)


def test_export_says_what_is_missing_and_keeps_foreign_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no train.json and no head.safetensors"):
        export(train=str(tmp_path), out=str(tmp_path / "bundle"))
    trained(tmp_path / "train")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("all of it")
    with pytest.raises(FileExistsError, match="exists and is not a bundle"):
        export(train=str(tmp_path / "train"), out=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "all of it"
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".card.json.part").write_text("{")  # from a process killed while it wrote the card
    export(train=str(tmp_path / "train"), out=str(tmp_path / "killed"))
    assert not (tmp_path / "killed" / ".card.json.part").exists()
    with pytest.raises(ValueError, match="`draft_length` must be at least 1 token, got 0"):
        export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"), draft_length=0)


def test_measured_figures_reach_the_card_and_the_readme(bundle, tmp_path):
    record = {"method": "token", "seed": 0, "tokens": [1, 2, 3], "drafted": 4, "accepted": 2, "target_calls": 1}
    record |= {"positions": 3, "acceptance": 2.4, "bias": 0.3, "weight": 0.6, "target_logprob": -3.0}
    record |= {"substitutions": 0.25, "seconds": 0.1}
    lines = [
        json.dumps(record | {"relaxation": relaxation, "prompt": prompt, "score": float(prompt < good)})
        for relaxation, good in (("none", 9), ("runs/bundle;bias=1", 8))
        for prompt in range(10)
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    assert "Not measured yet" in (bundle / "README.md").read_text()
    add_frontier(bundle, summarise(tmp_path / "results.jsonl"))
    exact, learned = load_bundle(bundle).card.frontier
    assert (exact["score"], learned["score"], learned["relaxation"]) == (0.9, 0.8, "runs/bundle;bias=1")
    assert learned["difference"] == pytest.approx(-0.1) and learned["tokens_per_call"] == 3
    assert "| token | `runs/bundle;bias=1` | 0.800 [" in (bundle / "README.md").read_text()


def test_readme_is_a_model_card(bundle):
    text = (bundle / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: diversed\n") and '- "some/target"' in text
    assert "draft length | 7 tokens" in text and "NOT distributed like the target's" in text


def test_a_bundle_exported_for_any_pair_says_so_and_warns_where_it_is_used(tmp_path):
    trained(tmp_path / "train", "logits")
    export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"), any_pair=True)
    other = SimpleNamespace(**TARGET | {"hash": "eeee"})
    with pytest.warns(UserWarning, match="is used with models it was not trained for: .*hash eeee"):
        load_bundle(tmp_path / "bundle", other, draft)
    trained(tmp_path / "hidden", "hidden")
    with pytest.raises(ValueError, match="`any_pair` is for heads that read no hidden states; the head in .* reads hidden"):
        export(train=str(tmp_path / "hidden"), out=str(tmp_path / "refused"), any_pair=True)
    assert not (tmp_path / "refused").exists()


def test_a_card_is_written_as_it_is_read_and_an_older_one_lacks_only_what_has_a_default(bundle):
    card = load_bundle(bundle).card
    values = card.to_json()
    assert Card.from_json(values, bundle) == card
    assert read_object(bundle / "card.json", "") == values
    older = {name: values[name] for name in ("format", "models", "head", "sampling")} | {"unknown": 1}
    older["head"] = {name: value for name, value in values["head"].items() if name != "blend"}
    read = Card.from_json(older, bundle)
    assert (read.head, read.models, read.sampling) == (card.head, card.models, card.sampling)
    assert (read.any_pair, read.calibration, read.frontier, read.draft_length) == (False, None, [], 0)


@pytest.mark.parametrize(
    "entry, value",
    [("vocab", "many"), ("bias", None), ("calibration", []), ("frontier", [3]), ("any_pair", "yes"), ("sampling", 1)],
)
def test_entries_of_another_kind_are_refused(bundle, entry, value):
    change(bundle, **{entry: value})
    with pytest.raises(ValueError, match=f"card.json is damaged .`{entry}`.* export the bundle again"):
        load_bundle(bundle)


def test_a_head_of_tempered_rows_is_not_exported_and_one_of_believed_rows_is(tmp_path):
    trained(tmp_path / "train", "logits")
    record = json.loads((tmp_path / "train" / "train.json").read_text())
    record["manifest"]["sampling"] = {"temperature": 0.7}
    for version, sentence in ((1, "gather and train again"), (2, "")):
        record["manifest"]["format"] = version
        (tmp_path / "train" / "train.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
            export(train=str(tmp_path / "train"), out=str(tmp_path / "bundle"))
