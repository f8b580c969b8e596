"""Whatever comes in, a law stays exact and a reader answers with a value or with one sentence.

HYPOTHESIS_PROFILE=long pytest tests/test_fuzz.py looks further, at other examples every time.
"""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diversed import cli
from diversed.commands import options, settings
from diversed.commands.export import export
from diversed.data.requests import read_lines
from diversed.data.sources import read_rows
from diversed.data.traces import MANIFEST, read_manifest, read_shards
from diversed.eval.results import read_results
from diversed.files import read_settings, sha256
from diversed.runtime.bundle import load_bundle
from diversed.runtime.choosers import make_selector
from diversed.runtime.sampling import Sampling
from diversed.runtime.shapes import parse_shape
from diversed.selector.latencies import read_latencies
from diversed.train.module import _started
from diversed.train.record import read_trained
from diversed.verifier import METHODS, DraftTree
from diversed.verifier.enumerate_laws import Pair, drafts, law_error
from diversed.verifier.head import WeightHead
from diversed.verifier.relax import parse, relax
from diversed.verifier.tree import topology
from hypothesis import assume, example, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from .support.laws import shapes
from .support.models import tiny_pair
from .support.traces import synthetic_traces
from .test_bundle import trained
from .test_selector import folder as selector_folder

few = profile(max_examples=profile.default.max_examples // 10)

# Laws

SIZES = st.sampled_from([0.0, 5e-324, 1e-310, 1e-160, 1e-40, 1e-9, 0.1, 0.5, 1.0, 1.0 + 2**-52, 3.0])
PAIRS = [(name, drafting) for name, entry in METHODS.items() for drafting in entry.exact_for]
RELAXATIONS = ["none", "ensemble:0", "ensemble:0.3", "ensemble:1", "ensemble:0.5;bias=-2", "ensemble:0.3;blend=logits",
               "lenient:0.5", "cascade-opt:0.2", "cascade-diff:0.1", "cascade-chow:0.3", "cascade-token:0.4",
               "typical:0.3,0.6", "ensemble:0.5;budget=0.2", "learned", "learned;blend=logits"]  # fmt: skip


@st.composite
def rows(draw, count: int, vocabulary: int):
    """[count, V] float64 rows with zeros, ties and numbers that float32 or even float64 can hardly hold."""
    values = draw(st.lists(SIZES, min_size=count * vocabulary, max_size=count * vocabulary))
    found = torch.tensor(values, dtype=torch.float64).view(count, vocabulary)
    found = torch.where((found.sum(-1, keepdim=True) > 0), found, 1.0)
    return found / found.sum(-1, keepdim=True)


@st.composite
def cases(draw):
    """(method, drafting law, topology, pair of models)."""
    name, drafting = draw(st.sampled_from(PAIRS))
    vocabulary = draw(st.integers(2, 3))
    parents = draw(st.sampled_from([shape for shape in shapes(drafting, vocabulary) if len(shape) < 6]))
    length = topology(parents).depth + 1
    count = sum(vocabulary**depth for depth in range(length))
    return name, drafting, parents, Pair(draw(rows(count, vocabulary)), draw(rows(count, vocabulary)), length)


@few
@given(cases(), st.sampled_from(RELAXATIONS), st.lists(st.sampled_from([0.0, 1e-30, 0.5, 1.0]), min_size=1, max_size=5))
def test_the_text_has_the_law_of_the_relaxed_target_for_rows_at_the_edge_of_what_numbers_hold(case, relaxation, shares):
    name, drafting, parents, pair = case
    tokens = torch.zeros(len(pair.draft), 1, dtype=torch.int64)
    learned = relaxation.startswith("learned")
    weight = torch.tensor(shares).repeat(len(tokens))[: len(tokens), None] if learned else None
    one = relax(DraftTree(tokens, (-1,), pair.draft[:, None], pair.target[:, None]), relaxation, weight).target[:, 0]
    assert one.min() >= 0 and (one.sum(-1) - 1).abs().max() < 1e-12
    # rounding of a quotient of two nearly equal masses below 1e-9
    assert law_error(METHODS[name].law, Pair(pair.draft, one, pair.length), drafting, parents) < 1e-9


@few
@given(cases(), st.sampled_from([torch.float32, torch.float64]))
def test_a_law_is_a_distribution_in_any_precision(case, dtype):
    name, drafting, parents, pair = case
    pair = Pair(pair.draft.to(dtype).double(), pair.target.to(dtype).double(), pair.length)  # what cannot be drawn is 0
    every = drafts(pair, drafting, parents)
    tree = every.tree
    law = METHODS[name].law(DraftTree(tree.tokens, parents, tree.draft.to(dtype), tree.target.to(dtype)))
    assert law.stop.isfinite().all() and law.next.isfinite().all() and law.stop.min() >= 0 and law.next.min() >= 0
    # A draft that is rejected where nothing is left of the target's row in this precision has no mass to emit.
    lost = (law.stop.unsqueeze(-1) * law.next).sum((1, 2)).double() - 1
    assert (every.probability * lost.abs()).sum() < 1e-5


# What stands in a string, a file or the command line

NUMBERS = ["0", "1", "-1", "0.5", "1e-400", "1e400", "nan", "-inf", "", "0x1", "1_0", "٣", "9" * 400]
PIECES = ["none", "ensemble", "learned", "lenient", "cascade-opt", "typical", "bias", "budget", "blend", "logits", ":",
          ";", ",", "=", ".", "/", "..", " ", "\n", "\0", "\ud800", *NUMBERS]  # fmt: skip
ODD = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            2**31,
            2**63,
            10**30,
            0.5,
            float("nan"),
            float("inf"),
            "",
            "0",
            "nan",
            "../../etc/passwd",
            "/etc/passwd",
            "\0",
            "\ud800",
            [],
            {},
            [[]],
            [0],
            ["x"],
            {"": 0},
        ]
    ),  # fmt: skip
    st.text(max_size=4),
)


def answered(read, *given):
    """What a reader makes of it, or None where it refuses it with one sentence."""
    try:
        return read(*given)
    except (ValueError, OSError) as error:
        assert cli.sentence(error).strip() and "\n" not in cli.sentence(error)
    return None


@few
@given(st.lists(st.sampled_from(PIECES), max_size=7).map("".join) | st.text(max_size=12))
@example("learned;budget=\ud800")
def test_a_relaxation_is_read_or_refused(text):
    found = answered(parse, text)
    assert found is None or found.budget is None or found.budget >= 0
    assert found is None or parse(str(found)) == found


@few
@given(st.lists(st.sampled_from(["x", "+", ":", ",", "entropy", *NUMBERS[:5], "2", "4"]), max_size=6).map("".join))
def test_a_shape_is_read_or_refused(text):
    assert (found := answered(parse_shape, text)) is None or found.paths >= 1


JSON = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
LINES = st.one_of(
    st.binary(max_size=40),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [
            b"[" * 30_000,
            b'{"prompt": "a"}',
            b'{"prompt": "a", "prompt": "b"}',
            b'{"prompt": NaN}',
            b"\0",
            b'{"prompt": "' + b"x" * 200_000 + b'"}',
            b'{"a":' * 3000,
            b"\xef\xbb\xbf{}",
            b"\xff\xfe",
            b"1" * 5000,
            b'{"prompt": "\\ud800"}',
        ]
    ),  # fmt: skip
)


READERS = [read_rows, read_settings, read_results, read_latencies]


@pytest.mark.parametrize("reader", READERS)
def test_brackets_without_end_are_refused(place, reader):
    with pytest.raises(ValueError, match=r"deep\.jsonl"):
        reader(place("deep.jsonl", b"[" * 100_000 + b"\n"))


@pytest.mark.parametrize(
    "name, reader, file",
    [
        ("traces", read_manifest, MANIFEST),
        ("bundle", load_bundle, "card.json"),
        ("train", read_trained, "train.json"),
    ],
)
def test_brackets_without_end_in_a_folder_are_refused(untouched, tmp_path, name, reader, file):
    folder = shutil.copytree(untouched / name, tmp_path / name)
    (folder / file).write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        reader(folder)


@few
@given(st.lists(LINES, max_size=3).map(b"\n".join), st.sampled_from(["rows.jsonl", "rows.json", "rows.jsonl.gz"]))
def test_rows_of_any_bytes_are_read_or_refused(place, data, name):
    path = place(name, data)
    given = {"seed": 0, "max_new_tokens": 3, "stop": (), "relaxation": "none", "method": "token"}
    answered(read_lines, path, given)
    for reader in READERS:
        answered(reader, path)


WORDS = st.sampled_from(
    ["target", "sampling", "temperature", "gather", "train", "eval", "seed", "prompts", "relaxations"]
)


@few
@given(st.binary(max_size=40) | st.text("{}[]:-,&*!|>#% \n\tab0'\"", max_size=30).map(str.encode)
       | st.dictionaries(WORDS | st.text(max_size=3), JSON | st.dictionaries(WORDS, JSON), max_size=3).map(
           lambda value: yaml.safe_dump(value).encode()))  # fmt: skip
@example(b"!!python/object/apply:os.system ['touch /tmp/x']")
@example(b"a: &a [*a]")
def test_a_settings_file_of_any_bytes_is_read_or_refused(place, data):
    path = place("settings.yaml", data)
    values = answered(settings.load, path)
    if values:
        answered(settings.select, values, "gather", ["target", "seed", "sampling.temperature", "prompts"], path.name)
        answered(options.parse, cli.command("gather"), ["--config", str(path), "--out", "x"], "gather")


@few
@given(
    st.sampled_from(["gather", "eval", "decode", "export", "calibrate", "select"]),
    st.lists(st.sampled_from(["--out", "--prompts", "--sampling", "--sampling.temperature", "--relaxations", "--stop",
                              "--seeds", "--threads", "--no", "--", "-", "--=", "=", "--out=", "--config", "quickstart",
                              "[", "{}", "null", "[1,2]", "{a: 1}", "'", "\ud800", "&a", "*a", "!!x", *NUMBERS])
             | st.text(max_size=5).filter(lambda word: word not in ("-h",)), max_size=5),
)  # fmt: skip
@example("calibrate", ["--seeds", "\x96"])
def test_a_command_line_of_any_words_is_read_or_refused(name, words):
    """A TypeError is a sentence of the parser's here."""
    try:
        answered(options.parse, cli.command(name), words, name)
    except TypeError as error:
        assert "\n" not in cli.sentence(error)


# Folders of others


@st.composite
def spoilt(draw, whole: bytes):
    """The bytes of a file after some of them were changed, lost, doubled or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at, size = draw(st.integers(0, len(data))), draw(st.integers(0, 12))
        data[at : at + size] = draw(st.binary(max_size=12) | st.just(bytes(data[at : at + size]) * 2))
    return bytes(data)


def changed(draw, value, depth: int = 0):
    """The value with one entry somewhere inside replaced or left out."""
    value = copy.copy(value)
    if not value or not isinstance(value, dict | list) or (depth and draw(st.integers(0, 3)) == 0):
        return draw(ODD)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = draw(st.sampled_from(list(keys)))
    if draw(st.integers(0, 5)) == 0:
        del value[key]
    else:
        value[key] = changed(draw, value[key], depth + 1)
    return value


def strange(draw, path):
    """Spoil one file of a folder: as JSON where it is some, else as a header or as bytes."""
    whole = path.read_bytes()
    if path.suffix == ".json" and draw(st.booleans()):
        path.write_text(json.dumps(changed(draw, json.loads(whole))))
    elif path.suffix == ".safetensors" and draw(st.booleans()):
        size = int.from_bytes(whole[:8], "little")
        header = json.dumps(changed(draw, json.loads(whole[8 : 8 + size]))).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + size :])
    else:
        path.write_bytes(draw(spoilt(whole)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A function that writes a file and returns its path."""
    folder = tmp_path_factory.mktemp("fuzz")

    def write(name, data):
        (folder / name).write_bytes(data)
        return folder / name

    return write


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """Folders as our own commands write them: traces, a training, its bundle, a selector."""
    folder = tmp_path_factory.mktemp("whole")
    synthetic_traces(folder / "traces", prompts=4, samples=2, shards=2, hidden=(3, 5))
    trained(folder / "train")
    export(train=str(folder / "train"), out=str(folder / "bundle"))
    (folder / "selector").mkdir()
    selector_folder.__wrapped__(folder / "selector")(tiny_pair(11))
    return folder


@pytest.fixture(scope="module")
def spoil(untouched, tmp_path_factory):
    """A function that copies one of the folders and spoils one of its files."""
    place = tmp_path_factory.mktemp("spoilt")

    def copied(draw, name):
        shutil.rmtree(place / name, ignore_errors=True)
        shutil.copytree(untouched / name, place / name)
        strange(draw, draw(st.sampled_from(sorted(path for path in (place / name).iterdir() if path.suffix != ".md"))))
        return place / name

    return copied


@few
@given(st.data())
def test_traces_of_strangers_are_read_or_refused(spoil, data):
    """Checksums are made to agree, as a stranger would."""
    folder = spoil(data.draw, "traces")
    answered(read_manifest, folder)
    answered(lambda: list(read_shards(folder)))
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for entry in manifest["shards"]:
            entry["sha256"] = sha256(folder / entry["file"])
        (folder / MANIFEST).write_text(json.dumps(manifest))
    except (ValueError, TypeError, KeyError, OSError):
        assume(False)
    for shard in answered(lambda: list(read_shards(folder))) or []:
        assert shard.tv.isfinite().all() and int(shard.start[-1]) == shard.tokens


@few
@given(st.data())
def test_a_bundle_of_strangers_is_read_or_refused(spoil, data):
    loaded = answered(load_bundle, spoil(data.draw, "bundle"), None, None, Sampling())
    assert loaded is None or all(tensor.isfinite().all() for tensor in loaded.head.state_dict().values())


@few
@given(st.data())
def test_a_training_of_strangers_is_read_or_refused(spoil, data):
    folder = spoil(data.draw, "train")
    answered(_started, folder, WeightHead("both", draft_hidden=4, target_hidden=8, width=3))
    answered(read_trained, folder)
    answered(lambda: export(train=str(folder), out=str(folder.parent / "exported")))


@few
@given(st.data())
def test_a_selector_of_strangers_is_read_or_refused(spoil, data):
    folder = spoil(data.draw, "selector")
    answered(make_selector, f"{folder}/", "traversal", "without_replacement", 5, 0, tiny_pair(11), Sampling())


@pytest.mark.parametrize("more", [["--count", "200"], ["--near", "--count", "30"]], ids=["odd", "nearly right"])
def test_random_command_lines_are_answered_with_one_sentence(more):
    """tests/support/odd_lines.py says what they are, and looks further: --seed 1 --count 500."""
    script = Path(__file__).parent / "support" / "odd_lines.py"
    answer = subprocess.run([sys.executable, str(script), *more], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_damaged_files_are_refused_told_or_change_nothing():
    """tests/support/damage.py says how they are damaged, and looks further: --seed 1 --count 300."""
    script = Path(__file__).parent / "support" / "damage.py"
    answer = subprocess.run([sys.executable, str(script), "--count", "25"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
