"""Traces on disk: a round trip, equal bytes, and a sentence for everything that can be wrong with a folder."""

import errno
import json
import multiprocessing
import os

import pytest
import torch
from diversed.data.columns import REQUIRED
from diversed.data.traces import (
    Shard,
    read_manifest,
    read_shard,
    read_shards,
    write_manifest,
    write_shard,
)
from diversed.files import exclusive, sha256
from safetensors.torch import load_file, save_file

from .support.traces import synthetic_shard, synthetic_traces


@pytest.fixture
def folder(tmp_path):
    return synthetic_traces(tmp_path / "traces", prompts=4, samples=2, shards=2, hidden=(3, 5))


def edit_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_shard(folder, **changes):
    """Change tensors of the first shard and keep its checksum honest, as a foreign writer would."""
    path = folder / "shard-00000.safetensors"
    save_file({**load_file(path), **changes}, path)
    entries = read_manifest(folder)["shards"]
    edit_manifest(folder, shards=[{**entries[0], "sha256": sha256(path)}, entries[1]])


def changed(shard, **columns):
    return Shard(**{**shard.columns, **columns})


def test_a_shard_reads_back_as_it_was_written(tmp_path):
    for hidden in (0, 8):
        shard = synthetic_shard(6, hidden=hidden)
        shard = changed(shard, target_rest=torch.zeros(shard.tokens)) if hidden else shard
        manifest = {"prompts": 2, "vocab": 6, "draft": {"hidden_size": 3}, "target": {"hidden_size": 5}}
        back = read_shard(tmp_path, write_shard(tmp_path, 7, shard), manifest)
        assert back.columns.keys() == shard.columns.keys()
        assert all(torch.equal(back.columns[name], tensor) for name, tensor in shard.columns.items())


def test_equal_shards_have_equal_bytes_and_leave_no_temporary_file(tmp_path):
    entries = [write_shard(tmp_path / name, 0, synthetic_shard(6)) for name in "ab"]
    assert entries[0] == entries[1]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["shard-00000.safetensors"]


def test_shards_come_in_order_with_all_texts(folder):
    shards = list(read_shards(folder))
    assert torch.cat([shard.prompt for shard in shards]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [shard.hidden.shape[1] for shard in shards] == [8, 8]


def test_a_weight_that_is_nan_everywhere_marks_a_relaxation_that_is_not_a_blend(folder):
    edit_shard(folder, weight=torch.full_like(load_file(folder / "shard-00000.safetensors")["weight"], torch.nan))
    assert next(read_shards(folder)).weight.isnan().all()


def test_a_damaged_shard_is_named_with_the_way_out(folder):
    path = folder / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is damaged .*delete it and run `diversed gather`"):
        list(read_shards(folder))
    path.write_bytes(bytes(data)[: len(data) // 2])
    with pytest.raises(ValueError, match="is not a safetensors file"):
        list(read_shards(folder, verify=False))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001\.safetensors is missing; run `diversed gather` again"):
        list(read_shards(folder))


@pytest.mark.parametrize(
    "name, index, value, sentence",
    [
        ("tv", 0, torch.nan, "`tv` has numbers that are not finite"),
        ("hidden", (0, 0), torch.inf, "`hidden` has numbers that are not finite"),
        ("reward", 0, torch.inf, "`reward` has numbers that are not finite"),
        ("weight", 0, torch.nan, "`weight` is NaN at some positions only"),
        ("weight", 0, 1.5, r"`weight` must lie in \[0, 1\]"),
        ("target_prob", 0, -0.1, r"`target_prob` must lie in \[0, 1\]"),
        ("start", 1, 0, "no empty text"),
        ("prompt", 0, 99, "`prompt` must count the 4 prompts from 0"),
        ("token", 0, 6, "`token` lies outside the vocabulary"),
    ],
)
def test_a_number_that_cannot_be_is_refused(folder, name, index, value, sentence):
    tensor = load_file(folder / "shard-00000.safetensors")[name]
    tensor[index] = value
    edit_shard(folder, **{name: tensor})
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors: .*" + sentence):
        list(read_shards(folder))


def test_wrong_shapes_types_and_fields_are_refused(folder):
    tensors = load_file(folder / "shard-00000.safetensors")
    for changes, sentence in (
        ({"tv": tensors["tv"][1:]}, "`tv` must be"),
        ({"tv": tensors["tv"].double()}, "got .* torch.float64"),
        ({"hidden": tensors["hidden"][:, 1:].contiguous()}, "`hidden` must be .*, 8.*got .*, 7"),
        ({"extra": torch.zeros(1)}, "extra are unknown"),
    ):
        edit_shard(folder, **{**tensors, **changes})
        with pytest.raises(ValueError, match=sentence):
            list(read_shards(folder))


def test_a_shard_is_checked_before_it_is_written(tmp_path):
    with pytest.raises(ValueError, match="`tv` must be"):
        write_shard(tmp_path, 0, changed(synthetic_shard(4), tv=torch.zeros(1)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"complete": False}, r"incomplete \(2 shards so far\); run the same `diversed gather` again"),
        ({"format": 3}, "has trace format 3, this version reads format 2"),
        ({"format": 1, "sampling": {"temperature": 0.5}}, "features are those of tempered or filtered rows"),
        ({"format": 1, "sampling": {"top_p": 0.9}}, "features are those of tempered or filtered rows"),
        (
            {"shards": [{"file": "../x", "sha256": "", "texts": 1, "tokens": 1}]},
            r"damaged \(`shards` 0: `file` must be the name of a shard in this folder, got \"../x\"\); gather the traces anew",
        ),
        ({"shards": [{"file": "shard-0.safetensors"}]}, "`shards` 0: `sha256` is missing, a text"),
        ({"shards": None}, "`shards` must be a list of objects, got null"),
        ({"shards": [3]}, "`shards` 0: it must be an object, got 3"),
        ({"shards": []}, "it is complete and names no shard"),
        ({"target": "x"}, '`target` must be an object, got "x"'),
        ({"target": {"hidden_size": 2.5}}, "`target.hidden_size` must be a whole number, got 2.5"),
        ({"vocab": None}, "`vocab` must be a whole number, got null"),
        ({"prompts": 10**12}, "`prompts` must be a whole number, at most 67108864, got 1000000000000"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(folder, changes, sentence):
    edit_manifest(folder, **changes)
    with pytest.raises(ValueError, match=sentence):
        read_manifest(folder)


@pytest.mark.parametrize("changes", [{}, {"sampling": {"top_k": 9}, "relaxation": "none", "methods": ["gbv"]}])
def test_a_folder_of_format_1_that_still_means_what_it_says_is_read(folder, changes):
    """Rows as sampled were believed ones, or it holds a selector's labels of exact decoding."""
    edit_manifest(folder, format=1, **changes)
    assert read_manifest(folder)["format"] == 1


def test_a_manifest_that_is_absent_broken_or_short_is_refused(folder):
    with pytest.raises(FileNotFoundError, match="is not a folder of traces; run `diversed gather`"):
        read_manifest(folder / "nowhere")
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged .*; gather the traces anew"):
        read_manifest(folder)
    write_manifest(folder, {"complete": True})
    with pytest.raises(ValueError, match="`target` is missing, an object"):
        read_manifest(folder)


def test_an_incomplete_manifest_can_be_read_to_continue_it(folder):
    edit_manifest(folder, complete=False)
    assert len(read_manifest(folder, incomplete=True)["shards"]) == 2


def _try_lock(folder, answers):
    try:
        with exclusive(folder):
            answers.put("held")
    except OSError as error:
        answers.put(str(error))


def test_a_folder_has_one_writer_and_is_free_again_afterwards(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def ask():
        process = context.Process(target=_try_lock, args=(tmp_path, answers))
        process.start()
        process.join()
        return answers.get()

    with exclusive(tmp_path):
        assert ask().endswith(f"is writing to {tmp_path}; wait until it ends or choose another --out")
    assert ask() == "held"


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file, expected a folder"):
        with exclusive(tmp_path / "out"):
            pass


def test_a_full_disk_is_an_os_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError) as caught:
        write_shard(tmp_path, 0, synthetic_shard(4))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename.endswith("shard-00000.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_shard_has_the_columns_of_the_table_and_no_others():
    shard = synthetic_shard(4)
    assert {*REQUIRED, "token_features"} == shard.columns.keys() and shard.hidden is None
    with pytest.raises(AttributeError, match="has no column `tvs`"):
        shard.tvs  # noqa: B018
    with pytest.raises(AssertionError, match="no columns: {'tvs'}"):
        Shard(**shard.columns, tvs=shard.tv)


def test_a_shard_can_be_read_by_those_who_can_read_the_manifest(tmp_path):
    folder = synthetic_traces(tmp_path)
    assert (folder / "shard-00000.safetensors").stat().st_mode == (folder / "manifest.json").stat().st_mode
