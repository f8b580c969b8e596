"""The report page: escaped whatever the texts hold, complete in itself, the same bytes twice, the record's numbers."""

import json
import math
import random
import re
import shutil
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy
import pytest
import torch
from diversed import cli
from diversed.commands.report import write_page
from diversed.eval.figure import Series, frontier_svg, lines_svg, readable
from diversed.eval.intervals import bootstrap
from diversed.eval.page import page
from diversed.eval.placement import AROUND, BESIDE, obstacles, place
from diversed.eval.results import read_results
from diversed.eval.run_data import COMMANDS, best_point, read_runs, remember
from diversed.eval.scoring import score_positions
from diversed.eval.tokens import FIELDS, TOKENS, numbers_of
from diversed.runtime.model import load_pair
from diversed.runtime.sampling import Sampling
from diversed.verifier.head import WeightHead
from diversed.verifier.relax import parse
from matplotlib.figure import Figure

EVIL = "\"'><script>alert(1)</script><img src=//x onerror=alert(2)>&amp;\ud800\x00"
VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Every element of a page with its attributes; an error where one is not closed."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.open, self.words = [], [], []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)

    def attributes(self, key):
        return [attributes[key] for _, attributes in self.elements if key in attributes]


def record(relaxation, prompt, score, calls=4, **values):
    base = {"method": "token", "relaxation": relaxation, "seed": 0, "prompt": prompt, "score": score, "task": "made"}
    base |= {"metric": "points", "tokens": [1] * 12, "drafted": 20, "accepted": 8, "target_calls": calls, "id": "a row"}
    base |= {"positions": 12, "acceptance": 9.0 + calls / 10, "bias": 0.4, "weight": 1.0, "target_logprob": -8.0}
    base |= {"substitutions": 0.3, "seconds": 0.5, "batch": 4, "temperature": 1.0, "draft_length": 5, "text": "a text"}
    return base | {"drafted_by_depth": [4, 4, 4], "accepted_by_depth": [4, 3, 1]} | values


SETTINGS = {
    "target": {"name": "nowhere/target", "hash": "aa"}, "draft": {"name": "nowhere/draft", "hash": "bb"},
    "task": "made", "data": {}, "source": "a file", "split": "test", "prompts": 6, "draft_length": 5,
    "sampling": {"temperature": 1.0},
    "max_prompt_tokens": 9, "max_new_tokens": 12, "batch": 4, "seed": 0, "dtype": "torch.float32", "device": "cpu",
    "threads": 1, "heads": {},
}  # fmt: skip


def made(folder, bundle="nowhere/bundle", settings=None, **values):
    """A run folder with exact decoding, static blends and a learned point that is faster at equal quality."""
    draws = random.Random(0)
    points = {"none": (1.0, 6), "ensemble:0.3": (0.6, 5), "ensemble:0.6": (0.3, 4), bundle: (0.9, 3)}
    records = [
        record(relaxation, prompt, float(draws.random() < share), calls, **values)
        for relaxation, (share, calls) in points.items()
        for prompt in range(6)
    ]
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (folder / "eval.json").write_text(json.dumps(SETTINGS | (settings or {})))
    return folder


def written(*folders, **options):
    return write_page(runs=[str(folder) for folder in folders], **options).read_text(encoding="utf-8")


def test_what_no_file_can_hold_is_replaced():
    assert readable("\ud800\x00\n") == "?\N{REPLACEMENT CHARACTER}\n"


def test_hostile_texts_stay_texts_wherever_they_stand(tmp_path):
    evil_settings = {name: {"name": EVIL, "hash": EVIL} for name in ("target", "draft")}
    evil_settings |= {name: EVIL for name in ("task", "split", "source", "dtype", "device")}
    evil_settings |= {"heads": {EVIL: EVIL}, "sampling": {EVIL: EVIL}, "data": {EVIL: EVIL}}
    folder = made(tmp_path / "run", EVIL.replace(";", ""), evil_settings, task=EVIL, metric=EVIL, id=EVIL, text=EVIL)
    (folder / COMMANDS).write_text(json.dumps([{"command": EVIL, "machine": {EVIL: EVIL}, "versions": EVIL}]))
    (folder / "<script>alert(3)<.json").write_text("{}")
    run = read_runs([folder])[0]
    token = dict.fromkeys(FIELDS, 0.5) | {"piece": EVIL, "best": EVIL}
    shown = {"id": EVIL, "score": 1.0, "before": EVIL, "tokens": [list(token.values())]}
    kind = {"class": EVIL, "tokens": 1, "weight": 0.5, "distance": 0.5, "cost": 0.5, "other": 1}
    point = {"method": EVIL, "relaxation": EVIL, "temperature": 1.0, "draft_length": 5}
    source = page([run], [{"key": {"point": point}, "shown": [shown], "classes": [kind], "counted": 1}])
    source.encode()
    read, clean = Reader(source), Reader(written(made(tmp_path / "clean")))
    assert {name for name, _ in read.elements} <= {name for name, _ in clean.elements} | {"article"}
    assert [name for name, _ in read.elements].count("script") == 1
    assert not any(key.startswith("on") for _, attributes in read.elements for key in attributes)
    assert "<script>alert(3)<.json" in read.words and sum("<script>alert(1)" in words for words in read.words) > 10


def test_the_page_needs_nothing_else_and_its_links_and_ids_resolve(tmp_path):
    source = written(made(tmp_path / "run"))
    read = Reader(source)
    identifiers = read.attributes("id")
    assert len(set(identifiers)) == len(identifiers) > 5
    assert all(link[1:] in identifiers for link in read.attributes("href") if link != "data:,")
    assert not read.attributes("src") and "url(" not in source and "@import" not in source
    (policy,) = (content for content in read.attributes("content") if "src" in content)
    assert policy.startswith("default-src 'none';")


def test_the_page_is_a_function_of_the_files(tmp_path):
    first = written(made(tmp_path / "run"))
    assert written(tmp_path / "run") == first
    shutil.copytree(tmp_path / "run", tmp_path / "moved")
    (tmp_path / "moved" / "report.html").unlink()
    assert written(tmp_path / "moved") == first


def test_the_verdicts_are_those_of_the_statements(tmp_path):
    folder = made(tmp_path / "run")
    run = read_runs([folder])[0]
    words = " ".join("".join(Reader(written(folder)).words).split())
    assert len(run.statements) == 2
    for one in run.statements:
        assert one.verdict in words and f"in {one.speed}: {one.learned:.3f} against {one.line:.3f}" in words
    path = folder / "results.jsonl"
    oracle = [record("diversed.assets.sums:oracle", prompt, 1.0, 2) for prompt in range(6)]
    path.write_text(path.read_text() + "".join(json.dumps(one) + "\n" for one in oracle))
    words = " ".join("".join(Reader(written(folder)).words).split())
    (_, quality, gain), *_ = read_runs([folder])[0].statements[0].codes
    assert f"The weight function diversed.assets.sums:oracle, of quality {quality:.3f}, gains {gain:+.3f} over the same" in words
    few = made(tmp_path / "few", "ensemble:0.9")
    assert "No learned point stands beside two or more that need no training." in written(few)


def test_quality_can_be_the_likelihood_where_the_task_is_too_hard(tmp_path):
    """-8 nats over 12 positions in every text, so that points differ in speed alone and no texts in quality."""
    folder = made(tmp_path / "run")
    words = " ".join("".join(Reader(written(folder, quality="likelihood")).words).split())
    assert (folder / "report-likelihood.html").is_file() and not (folder / "report.html").exists()
    assert "Quality is target log-probability" in words
    assert "A log-probability above exact decoding's is no better quality" in words
    rows = read_runs([folder], "likelihood")[0].rows
    assert [row["score"] for row in rows] == pytest.approx([-8 / 12] * len(rows), rel=1e-12)


def test_intervals_of_a_speed_are_the_bootstrap_of_its_mean_where_every_text_has_one_call(tmp_path):
    folder, draws = made(tmp_path / "run"), random.Random(1)
    counts = [draws.randrange(1, 30) for _ in range(40)]
    records = [record("none", prompt, 1.0, 1, tokens=[1] * count) for prompt, count in enumerate(counts)]
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    row = read_runs([folder])[0].rows[0]
    expected = bootstrap(counts)
    got = [row[f"tokens_per_call{end}"] for end in ("", "_low", "_high")]
    assert got == pytest.approx(expected, rel=1e-12)  # the same resamples, sums in another order


def test_a_calibrated_operating_point_is_shown_and_its_texts_come_first(tmp_path):
    folder = made(tmp_path / "run", "somewhere/bundle")
    run = read_runs([folder])[0]
    assert best_point(run)["relaxation"] == "somewhere/bundle"
    rows = [*run.rows, run.rows[-1] | {"relaxation": "other/calibrated"}]
    tried = [{"bias": -1.25, "drop": 0.01, "upper_bound": 0.0295, "p": 0.04, "passed": True}]
    card = SimpleNamespace(calibration={"bias": -1.25, "max_quality_drop": 0.03, "prompts": 500, "tried": tried}, training={})
    calibrated = type(run)(**vars(run) | {"rows": rows, "cards": {"other/calibrated": card}})
    assert best_point(calibrated)["relaxation"] == "other/calibrated"
    words = Reader(page([calibrated], ["no numbers"])).words
    assert "Operating point of other/calibrated, chosen by calibration" in words
    assert any(
        "Bias -1.25, the largest shown to lose at most 0.03 of the score, on 500" in " ".join(one.split()) for one in words
    )
    assert {"within the limit", "0.0295", "yes"} <= set(words)
    card.calibration["bias"] = None
    assert any("this head is closed" in one for one in Reader(page([calibrated], ["no numbers"])).words)


def test_where_models_are_missing_the_page_says_so_in_one_sentence(tmp_path, monkeypatch):
    def missing(*_):
        raise OSError("no such model")

    monkeypatch.setattr("diversed.eval.tokens.load_pair", missing)
    folder = made(tmp_path / "run")
    assert "which could not be loaded: no such model." in written(folder)
    assert not (folder / TOKENS).exists()
    assert "were not asked for" in written(folder, texts=0)


def test_several_runs_stand_on_one_frontier_and_are_told_apart(tmp_path):
    folders = [made(tmp_path / name / "eval", settings={"batch": batch}) for name, batch in (("a", 4), ("b", 16))
               if (tmp_path / name).mkdir() is None]  # fmt: skip
    with pytest.raises(ValueError, match="`out` must be given to compare 2 runs"):
        written(*folders)
    out = tmp_path / "both.html"
    source = written(*folders, out=str(out))
    read = Reader(source)
    assert out.read_text() == source and source.count("made, token verification</h3>") == 3
    assert "Tokens/s against batch: made, token verification" in read.words
    assert {"a/eval", "b/eval", "run", "Settings in which the runs differ"} <= set(read.words)
    with pytest.raises(ValueError, match="names a folder twice"):
        written(folders[0], folders[0], out=str(out))


def test_temperatures_and_draft_lengths_of_one_run_have_figures_of_their_own(tmp_path):
    folder = made(tmp_path / "run")
    records = read_results(folder / "results.jsonl")
    again = [one | {"temperature": 0.5, "draft_length": 3} for one in records]
    plain = [one | {"method": "plain", "draft_length": 0} for one in records if one["relaxation"] == "none"]
    with open(folder / "results.jsonl", "a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in again + plain))
    heads = re.findall(r"<h3>(made, .*?)</h3>", written(folder))
    assert heads == [f"made, token verification, {at}" for at in
                     ("temperature 1, draft length 5", "temperature 0.5, draft length 3")] * 2  # fmt: skip


def test_the_least_differences_of_a_run_are_those_that_its_page_judges_by(tmp_path):
    run = made(tmp_path / "run", settings={"least": {"tokens_per_call": 9.0, "step_acceptance": 0.5}})
    words = " ".join("".join(Reader(written(run)).words).split())
    calls, step = read_runs([run])[0].statements
    assert (calls.least, step.least) == (pytest.approx(9 * calls.line), 0.5)
    assert "from 0.500 on it counts" in words
    for least in ({"tokens_per_call": -1}, {"unknown": 1}, "EVIL", [1]):
        with pytest.raises(ValueError, match="eval.json is damaged"):
            read_runs([made(tmp_path / str(least)[:8].strip("{'["), settings={"least": least})])


def test_every_cell_of_a_column_sorts_as_what_it_is(tmp_path):
    read = Reader(written(made(tmp_path / "run")))
    values = read.attributes("data-v")
    assert len(values) == 4 * 15 and all(value == "" or float(value) < 1e9 for value in values)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a folder; name one that"),
        (lambda folder: (folder / "results.jsonl").unlink(), "results.jsonl does not exist"),
        (lambda folder: (folder / "results.jsonl").write_text(""), "holds no result yet"),
        (lambda folder: (folder / "eval.json").unlink(), "eval.json does not exist"),
        (lambda folder: (folder / "eval.json").write_text("{"), "eval.json is damaged"),
        (lambda folder: (folder / "eval.json").write_text("{}"), "lacks target, draft, task"),
        (lambda folder: (folder / COMMANDS).write_text("3"), "holds no list of objects"),
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, capsys, damage, sentence):
    folder = made(tmp_path / "run")
    damage(folder)
    assert cli.main(["report", str(folder)]) == 2
    assert sentence in capsys.readouterr().err


def test_the_command_takes_folders_first_and_prints_the_file(tmp_path, capsys):
    folder = made(tmp_path / "run")
    assert cli.main(["report", str(folder), "--texts", "0"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert cli.main(["report"]) == 2 and "needs the folder of a run" in capsys.readouterr().err
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "no" / "x")]) == 2
    assert "`out` must be a file in a folder that exists" in capsys.readouterr().err


def test_a_command_is_remembered_once_with_machine_and_versions(tmp_path):
    for _ in range(2):
        remember(tmp_path)
    (entry,) = json.loads((tmp_path / COMMANDS).read_text())
    assert {"command", "machine", "versions", "date"} == set(entry) and "torch" in entry["versions"]


# Figures


def apart(one, other):
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_labels_of_a_crowded_frontier_cover_nothing_and_stay_inside():
    spots = [(40 + 30 * i, 250 - 12 * i) for i in range(9)] + [(310 + 6 * i, 240 - 9 * i) for i in range(4)]
    sizes = [(25, 12)] * 9 + [(90, 12)] * 4
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in spots]
    frame = (30, 30, 390, 280)
    boxes = place(spots, sizes, taken, frame, AROUND)
    for index, box in enumerate(boxes):
        assert box[2] - box[0] == pytest.approx(sizes[index][0]) and box[3] - box[1] == pytest.approx(12)
        assert frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
        assert all(apart(box, other) for other in (*taken, *boxes[:index]))


def test_points_intervals_and_lines_are_obstacles_and_the_empty_corner_is_none():
    figure = Figure(figsize=(4, 3), dpi=72)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 4), ylim=(0, 3))
    axes.errorbar([1, 3], [2, 1], yerr=0.5, marker="o")
    boxes = obstacles(axes)
    for x, y in ((1, 2), (3, 1), (1, 2.4), (3, 0.6), (2, 1.5)):
        spot = (72 * x - 2, 72 * y - 2, 72 * x + 2, 72 * y + 2)  # boxes along a line may stand 2 pixels apart
        assert not all(apart(box, spot) for box in boxes)
    assert all(apart(box, (160, 130, 280, 210)) for box in boxes)


def test_a_label_lies_at_the_nearest_place_that_is_free():
    (box,) = place([(100, 100)], [(20, 10)], [], (0, 0, 200, 200), [(9, 0), (-9, 0), (30, 0)])
    assert box == (109, 95, 129, 105)
    (box,) = place([(100, 100)], [(20, 10)], [(109, 0, 200, 200)], (0, 0, 200, 200), [(9, 0), (-9, 0), (30, 0)])
    assert box == (71, 95, 91, 105)


def test_names_at_the_ends_of_lines_lie_a_line_apart():
    spots = [(300, 200 - i / 10) for i in range(8)] + [(300, 40), (300, 5)]
    boxes = place(spots, [(60, 12)] * 10, [], (0, 0, 400, 300), BESIDE)
    heights = [box[1] for box in boxes]
    assert max(numpy.diff(heights[:9])) <= -12 and {box[0] for box in boxes} == {310}  # from the top down, in order
    assert heights[9] >= 0 and min(abs(numpy.diff(sorted(heights)))) >= 12


def test_a_figure_is_text_in_the_colours_of_the_page_and_says_its_numbers(tmp_path):
    rows = read_runs([made(tmp_path / "run")])[0].rows
    first = frontier_svg({"": rows}, "tokens_per_call", "a <b>")
    assert frontier_svg({"": rows}, "tokens_per_call", "a <b>") == first
    read = Reader(first)
    assert {"exact", "0.3", "0.6", "bias 0", "tokens per target call"} <= {words.strip() for words in read.words}
    titles = re.findall("<title>(.*?)</title>", first)
    assert len(titles) == len(rows)
    row = rows[1]
    ends = f"[{row['tokens_per_call_low']:.3f}, {row['tokens_per_call_high']:.3f}]"
    assert any(f"tokens per target call {row['tokens_per_call']:.3f} {ends}" in title for title in titles)
    assert not re.search("#[0-9a-f]{6}[;\"]", first) and first.count("var(--static)") > 2 and "<style" not in first
    other = frontier_svg({"": rows}, "tokens_per_call", "another")
    marks = [set(Reader(svg).attributes("id")) for svg in (first, other)]
    assert marks[0] and not marks[0] & marks[1]


def test_a_line_skips_the_ticks_that_have_no_value_and_is_named_once():
    svg = lines_svg([Series([0.5, math.nan, 0.25], "learned", 0, "a < b")], ["1", "2", "3"], ("depth", "share"), "x")
    assert "<title>a &lt; b: 1: 0.5, 3: 0.25</title>" in svg
    assert [words.strip() for words in Reader(svg).words].count("a < b") == 1


# Single tokens


@pytest.fixture(scope="module")
def pair():
    return load_pair()


@pytest.mark.parametrize("relaxation", ["ensemble:0.3", "ensemble:0.6;budget=2", "diversed.assets.sums:oracle"])
def test_numbers_of_single_tokens_add_up_to_those_of_the_text(pair, relaxation):
    """Weight, cost and log-likelihood of `eval.scoring.score_positions`, which is tested against plain forward passes."""
    prompts, texts = [[5, 9, 30], [7, 41], [12]], [[20, 21, 22, 23], [300, 2], [50, 60, 70, 80, 90, 100]]
    rule, sampling = parse(relaxation), Sampling(temperature=0.8)
    found = numbers_of(pair, prompts, texts, rule, sampling)
    sums = score_positions(pair, prompts, texts, rule, sampling)
    for numbers, total, text in zip(found, sums, texts, strict=True):
        assert numbers.shape == (len(text), 7)
        weight, cost = float(numbers[:, 2].sum()), float(numbers[:, 6].sum())
        logprob = float(numbers[:, 0].clamp_min(1e-30).log().sum())
        # float32 rows: about 1e-6 a position
        assert [weight, cost, logprob] == pytest.approx([total.weight, total.bias, total.target_logprob], abs=3e-5)
        best = numbers[:, 3].long() == torch.tensor(text)
        assert bool((numbers[best, 0] == numbers[best, 4]).all()) and bool((numbers[:, 0] <= numbers[:, 4]).all())


@pytest.fixture(scope="module")
def story(pair, tmp_path_factory):
    """A run folder that the packaged pair and a gate of random weights made, bundle and all."""
    from diversed.commands.eval import evaluate
    from diversed.commands.options import call
    from diversed.export.bundle_writer import write_bundle
    from diversed.export.card import make_card

    out = tmp_path_factory.mktemp("story") / "run"
    torch.manual_seed(0)
    head = WeightHead("logits", draft_hidden=0, target_hidden=0, width=3)
    models = {
        role: {"name": f"sums-{role}", "hash": getattr(pair, role).hash, "hidden_size": getattr(pair, role).hidden_size}
        for role in ("target", "draft")
    }
    manifest = models | {"tokenizer": pair.tokenizer_hash, "vocab": pair.vocab, "sampling": vars(Sampling())}
    manifest |= {"task": "sums", "relaxation": "none"}
    write_bundle(out / "bundle", head, make_card(head, {"manifest": manifest, "traces_sha256": "d" * 64}, 5, 0.0))
    relaxations = ["none", "ensemble:0.2", "ensemble:0.6", str(out / "bundle"), "diversed.assets.sums:oracle"]
    call(evaluate, out=str(out), prompts=6, batch=6, max_new_tokens=48, relaxations=relaxations)
    return out


def test_a_real_run_shows_its_texts_token_by_token_and_again_without_models(story, tmp_path, monkeypatch):
    source = written(story, texts=4)
    assert len(source) < 1_000_000 and (story / TOKENS).is_file()
    mine = [one for one in read_results(story / "results.jsonl") if one["relaxation"] == str(story / "bundle")]
    numbers = json.loads((story / TOKENS).read_text())
    assert sum(one["tokens"] for one in numbers["classes"]) == sum(len(one["tokens"]) for one in mine[:4])
    for shown, one in zip(numbers["shown"][:3], mine[:3], strict=True):
        assert "".join(token[0] for token in shown["tokens"]).removesuffix("</s>") == one["text"]
    cost = sum(one["cost"] for one in numbers["classes"])
    # kept with four digits
    assert cost == pytest.approx(sum(one["bias"] for one in mine[:4]), rel=1e-3)
    hints = Reader(source).attributes("data-i")
    assert len(hints) == sum(len(shown["tokens"]) for shown in numbers["shown"]) and "target p" in hints[0]

    monkeypatch.setattr("diversed.eval.tokens.load_pair", lambda *_: pytest.fail("the models were loaded again"))
    shutil.copytree(story, tmp_path / "moved")
    assert written(tmp_path / "moved", texts=4) == source == written(story, texts=4)


def test_texts_of_another_head_are_not_explained_by_this_one(story, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(story, moved)
    settings = json.loads((moved / "eval.json").read_text())
    settings["heads"] = {str(story / "bundle"): "0" * 64}
    (moved / "eval.json").write_text(json.dumps(settings))
    assert "is not there any more with the head that was measured" in written(moved, texts=2)
