"""The bottom of the house: whole writes, locks, folders that are continued, progress, fields of JSON objects."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from diversed import files
from diversed.fields import (
    FLAG,
    OBJECT,
    TEXT,
    fault,
    number,
    objects,
    one_of,
    optional,
    read_checked,
    unknown,
    whole,
)
from diversed.files import (
    Folder,
    Progress,
    cut_units,
    exclusive,
    open_own,
    read_object,
    sealed,
    unsealed,
    write_object,
    write_whole,
)

FORMAT = {"settings_format": 2}
SETTINGS = {"seed": 0, "sampling": {"temperature": 1.0, "top_k": 0}, "methods": ["token"]}


def begin(path, settings=SETTINGS, **options):
    folder = Folder(path, **options)
    with folder.held():
        return folder.begin(settings)


def test_a_folder_goes_on_with_the_same_settings_and_refuses_others(tmp_path):
    path = tmp_path / "out"
    assert begin(path) is False and begin(path) is True
    assert read_object(path / "settings.json", "") == FORMAT | SETTINGS
    for change, sentence in [
        ({"seed": 5}, "seed 0, now it is 5"),
        ({"sampling": {"temperature": 1.0, "top_k": 3}}, "sampling.top_k 0, now it is 3"),
        ({"sampling": {"temperature": 1.0}}, "sampling.top_k 0, now it is None"),
        ({"sampling": SETTINGS["sampling"] | {"top": None}}, "sampling.top None, now it is None"),
    ]:
        with pytest.raises(ValueError) as refused:
            begin(path, SETTINGS | change)
        assert str(refused.value) == (
            f"{path} was begun with {sentence}; give the same again to continue it, choose another --out or delete the "
            "folder"
        )
    assert read_object(path / "settings.json", "") == FORMAT | SETTINGS


def test_a_setting_that_the_folder_was_begun_without_is_named_with_a_remedy_that_works(tmp_path):
    begin(tmp_path)
    with pytest.raises(ValueError) as refused:
        begin(tmp_path, {**SETTINGS, "gate": "abc"})
    assert str(refused.value) == (
        f"{tmp_path} was begun without gate, now it is 'abc'; choose another --out or delete the folder"
    )


def test_settings_are_compared_as_the_file_holds_them_and_long_ones_are_cut(tmp_path):
    assert begin(tmp_path, {"shapes": ("1", "2")}) is False and begin(tmp_path, {"shapes": ["1", "2"]}) is True
    begin(tmp_path / "long", {"prompt": "a" * 1000})
    with pytest.raises(ValueError, match=r"was begun with prompt 'a{76}\.\.\., now it is 'b'"):
        begin(tmp_path / "long", {"prompt": "b"})


def test_state_stands_beside_the_settings_and_may_change(tmp_path):
    folder = Folder(tmp_path, "manifest.json")
    folder.begin(SETTINGS, state={"complete": False})
    assert folder.begun() == {"complete": False, **FORMAT, **SETTINGS}
    write_whole(tmp_path / "manifest.json", json.dumps({"complete": True, **FORMAT, **SETTINGS}))
    assert folder.begin(SETTINGS, state={"complete": False}) and folder.begun()["complete"]


def test_a_folder_without_results_may_begin_anew(tmp_path):
    begin(tmp_path)
    assert Folder(tmp_path).begin(SETTINGS | {"seed": 7}, anew=True) is False
    assert Folder(tmp_path).begun()["seed"] == 7


def test_the_refusal_names_the_file_of_results_that_the_user_knows(tmp_path):
    folder = Folder(tmp_path / "out.jsonl.run", option="--output", results=tmp_path / "out.jsonl")
    with folder.held():
        folder.begin({"seed": 0})
        with pytest.raises(ValueError) as refused:
            folder.begin({"seed": 1})
    out = tmp_path / "out.jsonl"
    assert str(refused.value) == (
        f"{out} was begun with seed 0, now it is 1; give the same again to continue it, choose another --output or "
        f"delete {out} and {out}.run"
    )


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000])
def test_damaged_settings_are_refused_in_a_sentence(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match="settings.json is damaged .*; choose another --out or delete the folder"):
        begin(tmp_path)


def test_one_set_of_settings_for_a_folder_however_many_processes_share_it(tmp_path):
    assert begin(tmp_path, num_shards=2, shard_index=1) is False
    for shards, index in ((2, 0), (3, 2), (1, 0)):
        assert begin(tmp_path, num_shards=shards, shard_index=index) is True
        with pytest.raises(ValueError, match="was begun with seed 0, now it is 7"):
            begin(tmp_path, SETTINGS | {"seed": 7}, num_shards=shards, shard_index=index)


def other(code):
    """Run code that knows this module's names in another process; what it printed."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_files import *\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()


def test_processes_that_share_a_folder_keep_others_out_and_each_its_own_place(tmp_path):
    code = """
try:
    with Folder(Path({path!r}), num_shards={shards}, shard_index={index}).held():
        print("held")
except BlockingIOError as error:
    print(error)
"""
    with Folder(tmp_path, num_shards=2, shard_index=0).held():
        assert other(code.format(path=str(tmp_path), shards=2, index=1)) == "held"
        assert f"is writing to {tmp_path / '.worker-0-of-2'};" in other(code.format(path=str(tmp_path), shards=2, index=0))
        assert f"is writing to {tmp_path};" in other(code.format(path=str(tmp_path), shards=1, index=0))
    with Folder(tmp_path).held():
        assert f"(pid {os.getpid()}) is writing to {tmp_path}; wait" in other(
            code.format(path=str(tmp_path), shards=2, index=1)
        )
    assert other(code.format(path=str(tmp_path), shards=1, index=0)) == "held"


def test_of_processes_that_begin_together_with_other_settings_one_is_refused(tmp_path):
    code = f"""
from diversed.files import Folder, Path
folder = Folder(Path({str(tmp_path)!r}), num_shards=8, shard_index=int(sys.argv[1]))
with folder.held():
    folder.begin({{"seed": int(sys.argv[1]) % 2}})
"""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{code}"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(i)], stderr=subprocess.PIPE, text=True) for i in range(4)
    ]
    errors = [process.communicate(timeout=120)[1] for process in started]
    seed = Folder(tmp_path).begun()["seed"]
    assert [process.returncode for process in started] == [int(i % 2 != seed) for i in range(4)]
    assert sum("was begun with seed" in error for error in errors) == 2


def test_every_unit_is_done_once_and_a_process_may_have_none():
    units = cut_units(7, 3)
    assert units == [range(0, 3), range(3, 6), range(6, 7)] and cut_units(0, 3) == []
    shares = [Folder(Path("out"), num_shards=5, shard_index=index).share_of(units) for index in range(5)]
    assert sum(shares, []) == units and shares[3:] == [[], []]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_locks_and_temporary_files_are_not_written_through_links(tmp_path, link):
    victim = tmp_path / "victim"
    victim.write_text("a diary")
    (tmp_path / "out").mkdir()
    link(victim, tmp_path / "out/.lock")
    with pytest.raises(ValueError, match=r"\.lock is a link, expected a file of its own; delete it"):
        with exclusive(tmp_path / "out"):
            pass
    link(victim, tmp_path / f"out/.a.json.{os.getpid()}.part")
    write_whole(tmp_path / "out/a.json", "{}")
    assert victim.read_text() == "a diary" and (tmp_path / "out/a.json").read_text() == "{}"
    assert not (tmp_path / "out/a.json").is_symlink() and not (tmp_path / f"out/.a.json.{os.getpid()}.part").exists()


def test_a_part_that_a_killed_process_left_is_taken_away_and_no_others(tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    for name in (f".a.json.{killed.pid}.part", f".a.json.{os.getpid()}.part", ".mine.part", "a.part"):
        (tmp_path / name).write_text("half")
    with exclusive(tmp_path):
        names = {path.name for path in tmp_path.iterdir()}
    assert names == {f".a.json.{os.getpid()}.part", ".mine.part", "a.part", ".lock"}


@pytest.mark.parametrize("shards", [1, 2])
def test_what_fails_before_it_writes_leaves_no_folder_that_it_made(tmp_path, shards):
    (tmp_path / "there").mkdir()
    for path, left in ((tmp_path / "a/b", False), (tmp_path / "there", True)):
        with pytest.raises(KeyError):
            with Folder(path, num_shards=shards).held():
                with Folder(path, num_shards=shards).turn():
                    raise KeyError
        assert path.exists() == left
    assert not (tmp_path / "a").exists()
    with pytest.raises(KeyError):
        with Folder(tmp_path / "c", num_shards=shards).held():
            (tmp_path / "c/results").write_text("1")
            raise KeyError
    assert (tmp_path / "c/results").exists()


@pytest.mark.parametrize("able", [True, False])
def test_two_folders_are_swapped(tmp_path, monkeypatch, able):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not able:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    files.exchange(tmp_path / "first", tmp_path / "second")
    assert (tmp_path / "second/first").exists()
    assert (tmp_path / "first/second").exists() == able


def test_a_folder_that_does_not_say_by_which_format_is_of_an_older_version(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(ValueError, match="was begun by an older version.*can be read, but not continued; choose another --out"):
        begin(tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps({"settings_format": 3} | SETTINGS))
    with pytest.raises(ValueError, match="was begun with settings_format 3, now it is 2"):
        begin(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", "old")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_progress_says_how_much_how_fast_and_how_long(monkeypatch, capsys):
    clock = iter([0.0, 10.0, 30.0, 30.0, 40.0, 60.0, 60.0])
    monkeypatch.setattr(files.time, "monotonic", lambda: next(clock))
    with Progress("gather", 12, 2) as progress:
        progress.add(tokens=100)
        progress.add(tokens=500)
        progress.add()
        progress.add(5, what="label")
    assert capsys.readouterr().err.splitlines() == [
        "gather 4/12, 20 tokens/s, 120 s left",
        "label 10/12, 10 tokens/s, 15 s left",
    ]


FIELDS = {
    "name": TEXT,
    "size": whole(1, 9),
    "rate": optional(number(0)),
    "kind": optional(one_of("token", "block")),
    "done": optional(FLAG),
    "model": OBJECT,
    "model.hash": TEXT,
    "files": objects({"file": TEXT, "texts": whole()}, least=1),
}
GOOD = {"name": "a", "size": 3, "model": {"hash": "f"}, "files": [{"file": "x", "texts": 0}]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, ""),
        ({"rate": 0, "kind": "block", "done": False, "more": None}, ""),
        ({"name": 3}, "`name` must be a text, got 3"),
        ({"size": True}, "`size` must be a whole number in 1..9, got true"),
        ({"size": 10}, "`size` must be a whole number in 1..9, got 10"),
        ({"rate": -0.5}, "`rate` must be a number, at least 0, got -0.5"),
        ({"rate": math.nan}, "`rate` must be a number, at least 0, got NaN"),
        ({"rate": 10**400}, ""),
        ({"rate": math.inf}, "`rate` must be a number, at least 0, got Infinity"),
        ({"kind": "blok"}, '`kind` must be one of token, block, got "blok"'),
        ({"done": 1}, "`done` must be true or false, got 1"),
        ({"model": "f"}, '`model` must be an object, got "f"'),
        ({"model": {}}, "`model.hash` is missing, a text"),
        ({"files": []}, "`files` must be a list of objects, at least 1, got []"),
        ({"files": [{"file": "x", "texts": 0}, 3]}, "`files` 1: it must be an object, got 3"),
        ({"files": [{"file": "x"}]}, "`files` 0: `texts` is missing, a whole number"),
    ],
)
def test_the_first_fault_of_an_object_is_named(change, sentence, tmp_path):
    assert fault({**GOOD, **change}, FIELDS) == sentence
    (tmp_path / "a.json").write_text(json.dumps({**GOOD, **change}))
    if not sentence:
        assert read_checked(tmp_path / "a.json", FIELDS, "write it again") == {**GOOD, **change}
        return
    with pytest.raises(ValueError) as refused:
        read_checked(tmp_path / "a.json", FIELDS, "write it again")
    assert str(refused.value) == f"{tmp_path / 'a.json'} is damaged ({sentence}); write it again"


def test_an_unknown_field_is_answered_with_the_nearest():
    assert unknown({"name": 1, "siez": 2}, FIELDS) == "`siez` is not a field; did you mean `size`?"
    assert unknown(GOOD, FIELDS) == ""
    assert fault([1], FIELDS) == "it must be an object, got [1]" and fault({}, FIELDS) == "`name` is missing, a text"


def test_a_line_that_was_changed_after_it_was_written_is_noticed_wherever():
    """Every bit of a line; only the name of the checksum's field itself may change, which harms nothing."""
    record = {"text": "12 eggs, \N{EURO SIGN}", "tokens": [1, 2, 30], "score": 0.1, "weight": None, "none": float("inf")}
    line = sealed(record)
    assert unsealed(line) == record == unsealed(json.dumps(record)) and line.endswith("}\n")
    raw, noticed = line.encode(), 0
    for place in range(len(raw) - 1):
        for bit in range(8):
            changed = bytearray(raw)
            changed[place] ^= 1 << bit
            found = unsealed(changed.decode("utf-8", errors="replace"))
            if found:
                assert {name: found.get(name) for name in record} == record
                assert set(found) - set(record) or found == record
            noticed += not found
    assert noticed > 0.9 * 8 * len(raw)
    assert unsealed(b"") == unsealed("[1]") == unsealed("[" * 100_000) == {}


def test_an_object_that_was_changed_after_it_was_written_is_told(tmp_path):
    path, values = tmp_path / "a.json", {"name": "target", "share": 0.1, "none": None, "list": [1, {"x": "\N{EURO SIGN}"}]}
    write_object(path, values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_object(path, "") == values
        older = tmp_path / "older.json"
        older.write_text(json.dumps(values))
        assert read_object(older, "") == values
    path.write_text(path.read_text().replace("0.1", "0.2"))
    with pytest.warns(UserWarning, match="a.json was changed after it was written"):
        assert read_object(path, "")["share"] == 0.2


@pytest.mark.parametrize("write", [lambda path: write_whole(path, "x"), lambda path: open_own(path, os.O_WRONLY)])
def test_a_device_or_a_pipe_is_never_replaced_or_waited_for(write, tmp_path):
    """As root a rename would put a file in the place of /dev/null."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, kind in ((Path("/dev/null"), "a pipe or a device"), (pipe, "a pipe or a device"), (folder, "a folder")):
        with pytest.raises(ValueError, match=f"{path} must be a file, it is {kind}"):
            write(path)
    assert Path("/dev/null").is_char_device() and pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]
