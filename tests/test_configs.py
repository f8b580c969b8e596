"""Packaged settings files: each is read by every stage, and the paper's run from prompts to figures.

The runs are `diversed run --config NAME` with random models in place of the two it names: of the same architecture, a
few thousand numbers large. What else is overridden are sizes; task, features, objective and relaxation are the file's.
"""

import json
import string
from contextlib import redirect_stdout
from functools import cache
from io import StringIO

import pytest
import torch
import yaml
from diversed import cli
from diversed.commands.settings import FOLDER
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PAIRS = {
    "llama": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    "qwen": ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    "gemma": ("google/gemma-3-12b-it", "google/gemma-3-4b-it"),
}
METRICS = {"gsm8k": "exact match (final number)", "cnndm": "ROUGE-2", "xsum": "ROUGE-2", "mbpp": "pass@1"}
PAPER = [f"{pair}-{task}" for task in METRICS for pair in PAIRS]

# arXiv 2604.07622: 400 prompts, batch 8, 2 epochs, AdamW 5e-4, 10 warm-up steps, clip 5, 512 + 128 tokens, length 5.
SET_UP = {
    "gather": {"prompts": 400, "max_prompt_tokens": 512, "max_new_tokens": 128, "hidden": True},
    "export": {"draft_length": 5},
    "eval": {"draft_length": 5, "max_prompt_tokens": 512, "max_new_tokens": 128, "split": "test"},
    "model": {"objective": "reinforce", "features": "hidden", "width": 0, "lr": 5e-4, "warmup_steps": 10},
    "data": {"batch": 8, "validation": 0.0},
    "trainer": {"max_epochs": 2, "gradient_clip_val": 5.0},
}


@cache
def plan(name):
    """What `diversed run --config NAME --print_config` answers, as a mapping."""
    with redirect_stdout(StringIO()) as answer:
        assert cli.main(["run", "--config", name, "--print_config"]) == 0
    return yaml.safe_load(answer.getvalue())


@pytest.mark.parametrize("name", NAMES)
def test_a_packaged_file_is_read_by_every_stage_and_says_how_to_run_it(name):
    stages = plan(name)
    assert list(stages) == ["run", "gather", "export", "eval", "train"]
    assert stages["run"]["out"] == f"runs/{name}" and stages["gather"]["task"] == stages["eval"]["task"]
    assert stages["gather"]["sampling"]["temperature"] > 0, "a policy gradient needs sampled texts"
    first = (FOLDER / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ") and (name not in PAPER or first.endswith(f"diversed run --config {name}"))


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_file_is_the_papers_set_up_for_its_pair_and_task(name):
    pair, task = name.split("-")
    for stage in map(plan(name).get, ("gather", "eval")):
        assert (stage["target"], stage["draft"], stage["task"]) == (*PAIRS[pair], task)
    found = plan(name) | plan(name)["train"]
    assert {part: {key: found[part][key] for key in keys} for part, keys in SET_UP.items()} == SET_UP


# --- the dry runs ---------------------------------------------------------------------------------------------------

LETTERS = ["<s>", "</s>", *string.printable]
SIZES = {
    "vocab_size": len(LETTERS) + 10, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    "initializer_range": 0.4,  # rows far from uniform
}  # fmt: skip


def llama(hidden: int, factor: float) -> dict:
    """Llama 3.1 and 3.2 stretch their rotary positions in the same way by different factors."""
    rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        "model_type": "llama", **SIZES, "hidden_size": hidden, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": factor, **rope},
        "tie_word_embeddings": factor > 8,
    }  # fmt: skip


def qwen(hidden: int, tied: bool) -> dict:
    return {
        "model_type": "qwen3", **SIZES, "hidden_size": hidden, "max_position_embeddings": 40960,
        "rope_theta": 1000000, "tie_word_embeddings": tied,
    }  # fmt: skip


def gemma(hidden: int) -> dict:
    """The checkpoints are those of a model that also sees; the prompts here are longer than the window."""
    text = {
        **SIZES, "hidden_size": hidden, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    sight = {"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    return {
        "model_type": "gemma3", "text_config": text, "mm_tokens_per_image": 4, "eos_token_id": 1,
        "vision_config": {"hidden_size": 8, "intermediate_size": 8, **sight},
    }  # fmt: skip


CONFIGS = {
    "llama": (llama(24, 8.0), llama(16, 32.0)),
    "qwen": (qwen(24, False), qwen(16, True)),
    "gemma": (gemma(24), gemma(16)),
}
CLASSES = {"llama": "LlamaForCausalLM", "qwen": "Qwen3ForCausalLM", "gemma": "Gemma3ForConditionalGeneration"}
ROWS = {
    "gsm8k": lambda i: {
        "question": f"A shelf holds {i} boxes of 3 lamps. How many lamps are there?",
        "answer": f"Each box has 3 lamps, so there are {i} * 3 = <<{i}*3={3 * i}>>{3 * i}.\n#### {3 * i}",
    },
    "cnndm": lambda i: {
        "article": f"Pier {i} was closed on Monday. " + "Boats waited in the bay until the wind fell. " * 30,
        "highlights": f"Pier {i} closed.\nBoats waited for the wind to fall.",
        "id": str(i),
    },
    "xsum": lambda i: {
        "document": f"Street {i} has a new tree. " + "Neighbours water it in turn, every second evening. " * 30,
        "summary": f"Neighbours share the care of a tree in street {i}.",
        "id": str(i),
    },
    "mbpp": lambda i: {
        "task_id": 600 + i,
        "text": f"Write a function that adds {i} to a number.",
        "code": f"def add(x):\n    return x + {i}",
        "test_list": [f"assert add(1) == {1 + i}", f"assert add(0) == {i}"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """FOLDER/PAIR/target and draft, random models that share a tokenizer of characters; FOLDER/TASK, rows by split."""
    folder = tmp_path_factory.mktemp("paper")
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(LETTERS)}, [], unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    for pair, configs in CONFIGS.items():
        for name, config in zip(("target", "draft"), configs, strict=True):
            with torch.random.fork_rng():
                torch.manual_seed(len(name))
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
            assert type(model).__name__ == CLASSES[pair]
            model.save_pretrained(folder / pair / name)
            fast.save_pretrained(folder / pair / name)
    for task, row in ROWS.items():
        (folder / task).mkdir()
        for first, split in enumerate(("train", "validation", "test")):
            lines = [json.dumps(row(2 + 2 * first + i)) + "\n" for i in range(2)]
            (folder / task / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_file_runs_from_prompts_to_figures(name, workplace, tmp_path, capfd):
    pair, task = name.split("-")
    out, new_tokens, prompts, samples = tmp_path / "out", 6, 2, 2
    sizes = {
        "gather.prompts": prompts, "gather.samples": samples, "eval.prompts": 2, "max_new_tokens": new_tokens,
        "train.trainer.max_epochs": 1,
    }  # fmt: skip
    places = {
        "target": workplace / pair / "target", "draft": workplace / pair / "draft", "device": "cpu",
        "data.path": workplace / task, "out": out,
    }  # fmt: skip
    words = [f"--{option}={value}" for option, value in (places | sizes).items()]
    assert cli.main(["run", "--config", name, *words]) == 0, capfd.readouterr().err

    manifest = json.loads((out / "traces/manifest.json").read_text())
    assert (manifest["task"], manifest["metric"]) == (task, METRICS[task])
    assert manifest["hidden"] and manifest["relaxation"] == "ensemble:0.5" and manifest["max_prompt_tokens"] == 512
    assert sum(shard["texts"] for shard in manifest["shards"]) == prompts * samples
    training = json.loads((out / "train/train.json").read_text())
    assert training["head"] == {"features": "hidden", "offset": "", "draft_hidden": 16, "target_hidden": 24, "width": 0}
    assert training["settings"]["objective"] == "reinforce" and training["settings"]["batch"] == 8
    figures = training["figures"][-1]
    assert 0 < figures["train_step_acceptance"] < 1 and "held_out_loss" not in figures
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    relaxations = ["none", "ensemble:0.3", "ensemble:0.5", "ensemble:0.7", str(out / "bundle")]
    assert [(r["relaxation"], r["prompt"]) for r in records] == [(r, i) for r in relaxations for i in range(2)]
    assert all(0 <= r["score"] <= 1 and 1 <= len(r["tokens"]) <= new_tokens for r in records)
    assert (out / "frontier.png").stat().st_size > 0
