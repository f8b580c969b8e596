"""Groups of options: what they load, what they refuse."""

import pytest
from diversed import cli
from diversed.commands.calibrate import Limit
from diversed.data.selection import BundlePrompts, LongPrompts, Prompts, SplitPrompts, TextPrompts
from diversed.eval.grid import Grid, prepare
from diversed.eval.sweep import Cell
from diversed.runtime.groups import BundleModels, Models, Run, SharedRun
from diversed.runtime.sampling import Sampling


def test_prompts_load_their_task_and_split():
    task = SplitPrompts(prompts=3, seed=2, split="test").load()
    assert len(task.examples) == 3 and task.source == "3 problems of sums, test, seed 2"
    assert Prompts(prompts=2).load("validation").source == "2 problems of sums, validation, seed 0"


def test_models_load_as_a_pair():
    pair = Models(dtype="float32").load()
    assert (pair.target.name, pair.draft.name) == ("sums-target", "sums-draft")


def test_what_a_command_takes_from_a_bundle_has_no_default_of_its_own():
    assert (BundleModels().target, BundleModels().draft, BundlePrompts().task) == (None, None, None)


def test_a_grid_is_every_combination_and_its_defaults_are_one_temperature_and_length():
    one = Grid(relaxations=["none"], sampling=Sampling(0.5), draft_length=3)
    assert one.cells() == [Cell("token", "none", 0.5, 3, 0)]
    more = Grid(relaxations=["none"], temperatures=[0.5, 1.0], draft_lengths=[2, 4], seeds=[0, 1]).cells()
    assert len(more) == 8 and {(cell.temperature, cell.draft_length) for cell in more} == {
        (0.5, 2), (0.5, 4), (1.0, 2), (1.0, 4),
    }  # fmt: skip


def test_a_sweep_is_prepared_from_its_groups(tmp_path):
    grid = Grid(methods=["block"], relaxations=["none"])
    sweep = prepare(SharedRun(str(tmp_path), 1, 2, 1), Models(), SplitPrompts(prompts=3), grid, 2)
    assert (len(sweep.prompts), [len(unit) for unit in sweep.units]) == (3, [2, 1])
    assert (sweep.settings["split"], sweep.settings["draft_length"], sweep.folder.share) == ("train", 5, "1-of-2")


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Prompts(prompts=0), "`prompts` must be at least 1, got 0"),
        (lambda: TextPrompts(max_new_tokens=0), "`max_new_tokens` must be at least 1, got 0"),
        (lambda: LongPrompts(max_prompt_tokens=0), "`max_prompt_tokens` must be at least 1, got 0"),
        (lambda: Run("o", threads=0), "`threads` must be at least 1, got 0"),
        (lambda: Grid(draft_length=0), "`draft_length` must be at least 1, got 0"),
        (lambda: Limit("b", 1.0), "`max_quality_drop` must lie between 0 and 1, both excluded, got 1.0"),
        (lambda: SharedRun("o", num_shards=2, shard_index=2).share(), "`shard_index` must lie in 0..1"),
    ],
)
def test_a_bad_number_gets_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("decode --prompt 1 --sampling.temperature 0 --sampling.top_p 0.9", "`sampling.top_p` would change nothing at temperature 0"),
        ("eval --out o --sampling.temperature 0 --sampling.top_k 5", "`sampling.top_k` would change nothing at temperature 0"),
        ("eval --out o --temperatures 0 0 --sampling.min_p 0.1", "`sampling.min_p` would change nothing at temperature 0"),
        ("eval --out o --sampling.temperature 0 --seeds 0 1", "several `seeds` would give the same texts at temperature 0"),
        ("calibrate --bundle b --max_quality_drop 0.1 --sampling.temperature 0 --sampling.top_p 0.5", "`sampling.top_p` would change"),
        ("gather --out o --sampling.temperature 0 --sampling.top_p 0.5 --samples 1", "`sampling.top_p` would change nothing"),
        ("gather --out o --sampling.temperature 0 --samples 2 --relaxation none", "the 2 `samples` of a prompt would be the same text"),
        ("calibrate --bundle b --max_quality_drop 0.1 --sampling.temperature 0 --seeds 0 1", "several `seeds` would give the same"),
        ("eval --out o --methods plain --relaxations ensemble:0.3", "`relaxations` would change nothing beside method plain"),
        ("select --out o --latencies gpu --prompt a --task gsm8k", "`task` and `data` would change nothing beside `prompt`"),
        ("distill --out o --sampling.temperature 0 --samples 2", "the 2 `samples` of a prompt would be the same text"),
        ("train --data.traces t --out o --model.objective attribution --model.ratio_clip 0.3", "`ratio_clip` is of the objective reinforce"),
        ("train --data.traces t --out o --model.bound 3", "`bound` is of the objective bounded, reinforce does not read it"),
        ("run --config quickstart --out o --sampling.temperature 0 --eval.sampling.top_p 0.5", "`samples` of a prompt would be the same"),
        ("run --config quickstart --out o --train.model.bound 3", "`bound` is of the objective bounded, attribution does not read it"),
        ("run --config quickstart --out o --eval.dtype float8", "`dtype` must be one of auto, float32, bfloat16, float16, got 'float8'"),
        ("run --config quickstart --out o --train.trainer.val_check_interval 0", "`trainer.val_check_interval` must be above 0"),
        ("run --config quickstart --out o --train.trainer.precision 7", "precision"),
        ("decode --prompt 1 --device meta", "`device` 'meta' cannot be used on this machine: it holds no numbers"),
    ],
)  # fmt: skip
def test_what_means_nothing_or_fails_in_a_late_stage_is_refused_at_once(words, sentence, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 2
    assert sentence in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
