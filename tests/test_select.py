"""The selector's objective and training: from contexts whose best tree can be told, it learns to tell it."""

import json
import shutil

import pytest
import torch
from diversed.benchmarks import bench_latency as latency
from diversed.benchmarks.timing import record, write
from diversed.commands.options import call
from diversed.commands.select_trees import select
from diversed.export.bundle_writer import write_bundle
from diversed.export.card import make_card
from diversed.runtime.engine import Engine, decode
from diversed.runtime.model import load_pair
from diversed.runtime.sampling import Sampling
from diversed.runtime.shape_network import ROW_SCALARS, SCALARS, card_scalars, read_selector_card
from diversed.runtime.shapes import parse_shape
from diversed.selector.chooser_training import ChooserModule, ChooserOptions, objective, time_choice
from diversed.selector.contexts import Contexts, compare, read_contexts
from diversed.selector.labels import read_labels
from diversed.selector.latencies import read_latencies
from diversed.verifier.head import WeightHead

from .support.scripts import script

trees = script("trees")


def told(count=600, seed=0) -> Contexts:
    """Contexts whose first hidden number says whether the short or the long shape is twice as fast."""
    torch.manual_seed(seed)
    hidden = [torch.randn(count, 8) for _ in range(3)]
    long = hidden[0][:, 0] > 0
    efficiency = torch.where(long.unsqueeze(1), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0]))
    seconds = torch.tensor([1.0, 2.0]).expand(count, 2)
    prompt = torch.arange(count)
    return Contexts(
        [parse_shape("1"), parse_shape("4")], hidden, torch.randn(count, len(SCALARS)), efficiency, seconds,
        torch.ones(count, dtype=torch.float64), prompt, prompt % 4 == 0, torch.ones(count, dtype=torch.long), {},
    )  # fmt: skip


def test_the_objective_is_the_mean_log_gain_and_the_worst_tenth():
    gain = torch.tensor([2.0] * 8 + [0.5, 0.8], dtype=torch.float64)
    expected = -gain.log().mean() + 3 * 0.5**2
    torch.testing.assert_close(objective(gain, 3.0), expected)
    assert objective(torch.ones(5), 7.0) == 0


def test_the_gain_is_expected_tokens_over_expected_time_over_the_base_shapes():
    known = told()
    module = ChooserModule(known, ChooserOptions(lr=1e-3, width=64)).eval()
    index = torch.arange(10)
    share = module.logits(index).softmax(-1)
    for row in range(10):
        rate = (share[row] @ known.tokens[row]) / (share[row] @ known.seconds[row])
        base = known.tokens[row, 1] / known.seconds[row, 1]
        torch.testing.assert_close(module.gain(index)[row], rate / base)


def test_a_network_that_was_not_trained_grows_the_base_shape_everywhere():
    known = told()
    assert (ChooserModule(known, ChooserOptions(lr=1e-3, width=64)).choice() == known.base).all()


def test_training_tells_contexts_apart_that_differ():
    known = told()
    module = ChooserModule(known, ChooserOptions(lr=3e-3, width=64))
    (before,) = compare(known, known.base)
    assert before["base"] == before["selector"] < 0.9 * before["ideal"]
    optimizer, index = module.configure_optimizers(), (~known.held).nonzero().squeeze(1)
    module.train()
    for _ in range(60):
        loss = module.training_step([index], 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (after,) = compare(known, module.choice())
    # on held-out contexts; the rest are those close to the border, of which 450 for training say little
    assert after["selector"] > 0.94 * after["ideal"] > 1.1 * after["base"]


def test_the_base_shape_stays_where_choosing_takes_more_than_it_gains():
    """The long shape takes 2 seconds and gives 4 tokens where it is right, else 1; the short one gives 1 in 1."""
    known = told()
    ideal = known.cost.argmin(1)
    (free,) = compare(known, ideal)
    (cheap,) = compare(known, ideal, choosing=0.1)
    (dear,) = compare(known, ideal, choosing=1.0)
    assert not free["constant"] and not cheap["constant"] and dear["constant"]
    assert free["ideal"] == free["selector"] > cheap["selector"] > dear["selector"] == dear["base"]
    long = known.hidden[0][known.held, 0] > 0
    assert cheap["selector"] == pytest.approx(1 / torch.where(long, 2.1 / 4, 1.1).mean().item(), rel=1e-5)
    (same,) = compare(known, known.base)
    assert same["constant"], "what chooses the base shape everywhere need not choose"


def test_a_selector_that_says_so_grows_the_base_shape_and_looks_at_nothing(selected, tmp_path):
    out, _ = selected
    pair = load_pair("sums-target", "sums-draft")
    texts = {}
    for constant in (False, True):
        folder = tmp_path / str(constant)
        folder.mkdir()
        card = json.loads((out / "traversal" / "selector.json").read_text())
        card["bases"] = [base | {"shape": "2x2+1", "constant": constant} for base in card["bases"]]
        (folder / "selector.json").write_text(json.dumps(card))
        (folder / "selector.safetensors").write_bytes((out / "traversal" / "selector.safetensors").read_bytes())
        engine = Engine(pair, "traversal", branches=str(folder))
        assert (len(engine.shapes), engine.hidden) == ((1, False) if constant else (3, True))
        texts[constant] = decode(pair, [[5, 6, 7]], method="traversal", branches=str(folder), max_new_tokens=20)
    (expected,) = decode(pair, [[5, 6, 7]], method="traversal", branches="2x2+1", max_new_tokens=20)
    assert texts[True][0].tokens == expected.tokens and texts[True][0].drafted == expected.drafted


def test_the_time_of_a_choice_is_measured():
    pair = load_pair("sums-target", "sums-draft")
    assert 0 < time_choice(pair, 4, 24) < 1000


@pytest.fixture(scope="module")
def selected(tmp_path_factory):
    """A selector for traversal on the packaged pair, from eight short texts."""
    out = tmp_path_factory.mktemp("select") / "out"
    options = {
        "latencies": "gpu", "prompts": 8, "methods": ["block", "traversal"], "shapes": ["1", "3", "2x2+1"],
        "temperatures": [1.0, 0.5], "every": 6, "trees": 1, "max_new_tokens": 14, "unit": 8, "epochs": 3, "width": 24,
    }  # fmt: skip
    call(select, out=str(out), **options)
    return out, options


def test_a_selector_is_trained_kept_and_decodes(selected, capsys):
    out, options = selected
    before = (out / "traversal" / "selector.safetensors").read_bytes()
    call(select, out=str(out), **options)
    printed = capsys.readouterr().out
    assert "traversal at T=0.5:" in printed and "block at T=1:" in printed
    assert (out / "traversal" / "selector.safetensors").read_bytes() == before
    card = json.loads((out / "traversal" / "selector.json").read_text())
    assert [row["temperature"] for row in card["figures"]] == [0.5, 1.0] and card["shapes"] == ["1", "3", "2x2+1"]
    assert json.loads((out / "block" / "selector.json").read_text())["shapes"] == ["1", "3"]
    with pytest.raises(ValueError, match="out was begun with epochs 3, now it is 4"):
        call(select, out=str(out), **options | {"epochs": 4})
    pair = load_pair("sums-target", "sums-draft")
    (text,) = decode(pair, [[5, 6, 7]], method="traversal", branches=str(out / "traversal"), max_new_tokens=12)
    assert text.tokens


def test_a_run_with_measured_latencies_continues_with_the_time_it_measured(selected, tmp_path, monkeypatch, capsys):
    """A card of the version before has no `constant`; it is kept, as settings and labels are the same."""
    out, options = selected
    timed = call(latency.run, methods=["block", "traversal"], shapes=["1", "3", "2x2+1"], contexts=[16], tokens=[1, 4],
                        repetitions=1, step_repetitions=1, max_new_tokens=4)  # fmt: skip
    write(record(timed), tmp_path / "F.json")
    options = options | {"latencies": str(tmp_path / "F.json"), "labels": str(out / "labels")}
    call(select, out=str(tmp_path / "out"), **options)
    (kept,) = (tmp_path / "out").glob("choosing-*.json")
    written = {path: path.read_bytes() for path in (tmp_path / "out").rglob("selector.*")}
    assert len(written) == 4
    capsys.readouterr()
    for path in written:
        path.unlink()
    monkeypatch.setattr("diversed.commands.select_trees.time_choice", lambda *_: 1e6)
    call(select, out=str(tmp_path / "out"), **options)
    assert {path: path.read_bytes() for path in written} == written
    card = json.loads((tmp_path / "out" / "block" / "selector.json").read_text())
    for row in card["figures"] + card["bases"]:
        row.pop("constant")
    (tmp_path / "out" / "block" / "selector.json").write_text(json.dumps(card))
    call(select, out=str(tmp_path / "out"), **options)
    assert "block at T=1:" in capsys.readouterr().out
    for damaged in ("{", '{"choosing_ms": -1}', '{"choosing_ms": null}', "[]"):
        kept.write_text(damaged)
        with pytest.raises(ValueError, match="is damaged .*; delete it"):
            call(select, out=str(tmp_path / "out"), **options)
    (tmp_path / "out" / "block" / "selector.json").write_text("{")
    kept.unlink()
    with pytest.raises(ValueError, match="delete .*block and run `diversed select` again"):
        call(select, out=str(tmp_path / "out"), **options)


def test_the_base_is_the_best_constant_shape_of_each_temperature_on_the_training_prompts(selected):
    out, _ = selected
    folders = [out / "labels" / f"T={t:g}" for t in (1.0, 0.5)]
    known = read_contexts(folders, "traversal", read_latencies("gpu"))
    assert known.tokens.shape == (len(known.base), 3) and known.held.any() and not known.held.all()
    for temperature in (0.5, 1.0):
        here = (known.temperature == temperature) & ~known.held
        rates = [known.rate(torch.full_like(known.base, shape), here) for shape in range(3)]
        assert (known.base[known.temperature == temperature] == rates.index(max(rates))).all()
    labels, _ = read_labels(folders[0])
    assert (labels["efficiency"][:, 0, 2] == 0).all() and (labels["efficiency"][:, 1] >= 1).all()


def test_a_chooser_is_told_of_its_setting_while_it_decodes_what_it_was_told_in_training(selected):
    out, _ = selected
    card = read_selector_card(out / "traversal")
    known = read_contexts([out / "labels" / "T=0.5"], "traversal", read_latencies("gpu"))
    place = read_labels(out / "labels" / "T=0.5")[0]["length"] // card["latency"]["step"]
    torch.testing.assert_close(card_scalars(card, Sampling(0.5))[place], known.scalars[:, len(ROW_SCALARS) :])


def test_a_bundle_carries_a_selector_that_chooses_the_same(selected, tmp_path):
    out, _ = selected
    pair = load_pair("sums-target", "sums-draft")
    head = WeightHead("logits")
    manifest = {role: {"name": f"sums-{role}", "hash": getattr(pair, role).hash,
                       "hidden_size": getattr(pair, role).hidden_size} for role in ("target", "draft")}  # fmt: skip
    manifest |= {"tokenizer": "", "vocab": 643, "sampling": {"temperature": 1.0}, "task": "sums", "relaxation": "none"}
    card = make_card(head, {"manifest": manifest, "traces_sha256": "0"}, 5, 0.0)
    write_bundle(tmp_path / "bundle", head, card, out / "traversal")
    options = {"method": "traversal", "max_new_tokens": 20, "seeds": [3]}
    ours, theirs = (
        decode(pair, [[5, 6, 7]], branches=str(folder), **options)[0].tokens
        for folder in (tmp_path / "bundle", out / "traversal")
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"prompts": 1}, "`prompts` must be at least 2"),
        ({"validation": 1.0}, "`validation` must be in \\(0, 1\\)"),
        ({"latencies": "nowhere.json"}, "nowhere.json"),
        ({"shapes": ["3by2"]}, "a shape is written"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(change, sentence, tmp_path):
    with pytest.raises((ValueError, OSError), match=sentence):
        call(select, **{"out": str(tmp_path / "out"), "latencies": "gpu"} | change)


def test_the_benchmark_sets_what_is_predicted_beside_what_is_measured(selected):
    out, _ = selected
    options = {"selectors": str(out), "methods": ["block", "traversal"], "temperatures": [1.0]}
    rows = call(trees.run, latencies="gpu", prompts=0, **options)
    names = [row["case"].split(" ", 1)[1].removesuffix(", held out") for row in rows]
    base = json.loads((out / "traversal" / "selector.json").read_text())["figures"][1]
    assert names[3:] == [
        f"traversal {base['base_shape']}",
        "traversal selector",
        "traversal ideal",
    ]
    predicted = {name: row["value"] for name, row in zip(names, rows, strict=True)}
    assert predicted["traversal selector"] == pytest.approx(base["selector"], rel=1e-6)
    assert rows[5]["vs"] == {base["base_shape"]: base["ideal"] / base["base"]}


def test_a_chain_that_ends_by_confidence_is_priced_by_the_steps_that_it_took(selected):
    out, _ = selected
    rows = call(
        trees.run, selectors=str(out), latencies="gpu", methods=["block", "traversal"], temperatures=[1.0], prompts=3,
        confidences=[0.9],
    )  # fmt: skip
    found = {(row["case"], row["unit"]): row for row in rows if "held out" not in row["case"]}
    assert [case for case, _ in found if "confidence" in case] == [
        "T=1 block confidence 0.9",
        "T=1 block confidence 0.9, predicted",
    ]
    ended = found["T=1 block confidence 0.9, predicted", "tokens/s"]
    assert ended["low"] <= ended["value"] <= ended["high"] and ended["vs"]
    per_call = found["T=1 block confidence 0.9", "tokens/call"]["value"]
    assert 1 < per_call <= 9
    longest = read_latencies("gpu").step("block", parse_shape("8"), torch.zeros(1).numpy())[0]
    assert ended["value"] > 1e3 * per_call / longest, "every step would be as long as the chain may grow"


def test_measured_rows_count_the_steps_that_were_taken(selected, tmp_path):
    out, _ = selected
    timed = call(latency.run, methods=["traversal"], shapes=["1", "2", "2x1"], contexts=[16], tokens=[1, 4], repetitions=1,
                        step_repetitions=1, max_new_tokens=4)  # fmt: skip
    write(record(timed), tmp_path / "F.json")
    copied = shutil.copytree(out / "traversal", tmp_path / "traversal")
    card = json.loads((copied / "selector.json").read_text())
    card["bases"] = [base | {"constant": False} for base in card["bases"]]
    (copied / "selector.json").write_text(json.dumps(card))
    rows = call(
        trees.run, selectors=str(tmp_path), latencies=str(tmp_path / "F.json"), methods=["traversal"],
        temperatures=[1.0], prompts=2, max_new_tokens=10,
    )  # fmt: skip
    measured = {(row["case"], row["unit"]): row for row in rows if "held out" not in row["case"]}
    per_call = [row["value"] for (_, unit), row in measured.items() if unit == "tokens/call"]
    assert len(per_call) == 2 and all(1 <= value <= 4 for value in per_call)
    choosing = [row["value"] for (_, unit), row in measured.items() if unit == "% of a step"]
    assert len(choosing) == 1 and 0 < choosing[0] < 100
