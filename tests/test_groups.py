"""Groups of options: what they load, what they refuse."""

import pytest
from diversed.data.selection import BundlePrompts, LongPrompts, Prompts, SplitPrompts, TextPrompts
from diversed.runtime.groups import BundleModels, Models, Run, SharedRun


def test_prompts_load_their_task_and_split():
    task = SplitPrompts(prompts=3, seed=2, split="test").load()
    assert len(task.examples) == 3 and task.source == "3 problems of sums, test, seed 2"
    assert Prompts(prompts=2).load("validation").source == "2 problems of sums, validation, seed 0"


def test_models_load_as_a_pair():
    pair = Models(dtype="float32").load()
    assert (pair.target.name, pair.draft.name) == ("sums-target", "sums-draft")


def test_what_a_command_takes_from_a_bundle_has_no_default_of_its_own():
    assert (BundleModels().target, BundleModels().draft, BundlePrompts().task) == (None, None, None)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Prompts(prompts=0), "`prompts` must be at least 1, got 0"),
        (lambda: TextPrompts(max_new_tokens=0), "`max_new_tokens` must be at least 1, got 0"),
        (lambda: LongPrompts(max_prompt_tokens=0), "`max_prompt_tokens` must be at least 1, got 0"),
        (lambda: Run("o", threads=0), "`threads` must be at least 1, got 0"),
        (lambda: SharedRun("o", num_shards=2, shard_index=2).share(), "`shard_index` must lie in 0..1"),
    ],
)
def test_a_bad_number_gets_one_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
