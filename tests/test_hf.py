"""`model.generate(custom_generate=FOLDER)` is our loop: the same texts, the same law, and a sentence for the rest."""

import json
import sys
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from diversed.commands.export import export
from diversed.data.tasks import load_task
from diversed.export.bundle_writer import add_frontier, write_bundle
from diversed.export.hf import FIELDS, _refuse
from diversed.files import SEEDS, sha256
from diversed.runtime.bundle import add_bias, load_bundle
from diversed.runtime.engine import decode
from diversed.runtime.model import load_pair, make_pair
from diversed.runtime.sampling import Sampling
from diversed.verifier.head import WeightHead
from diversed.verifier.law import DraftTree
from diversed.verifier.methods import METHODS
from diversed.verifier.relax import relax
from safetensors.torch import save_file
from transformers import GenerationConfig, dynamic_module_utils
from transformers.generation import utils as transformers_utils

from .support.models import module, relaxed_law, tiny_pair, tokenizer
from .test_decode import LENGTH, VOCAB, chi_squared

PROMPTS = [[2, 3, 4], [5], [6, 2, 3, 4, 5, 2], [3, 3]]


@pytest.fixture(autouse=True, scope="module")
def modules_cache(tmp_path_factory):
    """transformers copies the files of a repository into a cache that it imports from; here one of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def repository(folder, pair, features="both", weight=None, draft_length=3):
    """A gate for the pair as a repository: a random one, or one that gives every node the same weight."""
    torch.manual_seed(0)
    sizes = {"draft_hidden": pair.draft.hidden_size, "target_hidden": pair.target.hidden_size, "width": 0}
    head = WeightHead(features, **sizes)
    if weight is None:
        torch.nn.init.normal_(head.net.weight, std=0.3)
    else:
        torch.nn.init.constant_(head.net.bias, torch.logit(torch.tensor(weight)).item())
    models = {
        role: {"name": f"tiny/{role}", "hash": model.hash, "hidden_size": model.hidden_size}
        for role, model in (("target", pair.target), ("draft", pair.draft))
    }
    manifest = models | {"tokenizer": "cccc", "vocab": pair.vocab, "sampling": vars(Sampling()), "task": "sums"}
    manifest |= {"relaxation": "none"}
    record = {"head": {"features": features} | sizes, "manifest": manifest, "traces_sha256": "d" * 64}
    train = folder.parent / f"{folder.name}-train"
    train.mkdir()
    save_file(head.state_dict(), train / "head.safetensors")
    record["head_sha256"] = sha256(train / "head.safetensors")
    (train / "train.json").write_text(json.dumps(record))
    export(train=str(train), out=str(folder), draft_length=draft_length, format="hf")
    return folder


def batch(prompts, pad=0):
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(pair, folder, **options):
    options = {"max_new_tokens": 30, "pad_token_id": 0, "eos_token_id": 1, "do_sample": True, "top_k": 0} | options
    return pair.target.module.generate(
        assistant_model=pair.draft.module, custom_generate=str(folder), trust_remote_code=True, **options
    )


def seeds(manual, count):
    torch.manual_seed(manual)
    return torch.randint(*SEEDS, (count,)).tolist()


@pytest.mark.parametrize("features", ["hidden", "logits", "both"])
@pytest.mark.parametrize("method", ["token", "block", "univer"])
def test_generate_gives_the_texts_of_our_loop(tmp_path, features, method):
    pair = tiny_pair(11)
    folder = repository(tmp_path / "gate", pair, features)
    chosen = {"temperature": 0.9, "top_k": 8, "top_p": 0.95, "min_p": 0.01}
    torch.manual_seed(5)
    sequences = generate(pair, folder, method=method, **batch(PROMPTS), **chosen)
    ours = decode(
        pair, PROMPTS, method=method, relaxation=str(folder), draft_length=3, sampling=Sampling(**chosen),
        max_new_tokens=30, seeds=seeds(5, 4),
    )  # fmt: skip
    assert sequences[:, :6].equal(batch(PROMPTS)["input_ids"])
    texts = [row[: len(c.tokens)] for row, c in zip(sequences[:, 6:].tolist(), ours, strict=True)]
    assert texts == [c.tokens for c in ours]
    ends = {len(c.tokens) for c in ours}
    assert len(ends) > 1 and sequences.shape[1] == 6 + max(ends), "texts of several lengths"
    assert all(not any(row[len(c.tokens) :]) for row, c in zip(sequences[:, 6:].tolist(), ours, strict=True)), "padding"


def test_texts_do_not_depend_on_the_padding_of_the_batch(tmp_path):
    pair = tiny_pair(11)
    folder = repository(tmp_path / "gate", pair)
    texts = []
    for copies in (1, 3):
        torch.manual_seed(2)
        ids = batch(PROMPTS[2:3] * copies + [[2] * 9] * (copies > 1))
        texts.append(generate(pair, folder, **ids)[0, ids["input_ids"].shape[1] :].tolist())
    length = texts[0].index(1) + 1 if 1 in texts[0] else 30
    assert texts[0][:length] == texts[1][:length]


def test_a_weight_that_is_the_same_everywhere_gives_the_law_of_the_static_ensemble(tmp_path):
    """Chi-squared over all 64 texts of three tokens, at a level of 1e-5 with fixed seeds; 20,000 texts find a total
    variation of .02. Three tokens are drafted a step, so that no token of the text comes from a leaf, whose row is the
    target's own.
    """
    pair, prompt = tiny_pair(VOCAB, end=False), [2, 3]
    folder = repository(tmp_path / "gate", pair, "logits", weight=0.4, draft_length=LENGTH)
    torch.manual_seed(0)
    ids = torch.tensor([prompt])
    made = generate(pair, folder, input_ids=ids, num_return_sequences=20_000, max_new_tokens=LENGTH, eos_token_id=None)
    assert made.shape == (20_000, 2 + LENGTH)
    texts = [type("Text", (), {"tokens": row}) for row in made[:, 2:].tolist()]
    law = relaxed_law(pair, prompt, "ensemble:0.4", LENGTH)
    assert chi_squared(texts, law) > 1e-5
    assert chi_squared(texts, relaxed_law(pair, prompt, "none", LENGTH)) < 1e-5, "the test sees a wrong law"


@pytest.mark.parametrize("weight", [0.3, 0.8])
def test_ensemble_is_the_law_of_transformers_assistant_ensemble_weight(weight, monkeypatch):
    """By enumeration of all drafts of two tokens, V = 3; transformers' weight is the target's share, one minus ours.

    transformers draws inside; its acceptance probability is found by bisection of the coin (2^-50), the law of its
    bonus token is what it hands to multinomial. Both run in float64.
    """
    torch.manual_seed(0)
    size, vocab = 2, 3
    draft, target = torch.randn(size, vocab).double(), torch.randn(size + 1, vocab).double()
    coins, extra = torch.zeros(size).double(), []

    def multinomial(row, num_samples):
        extra.append(row)
        return row.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "rand_like", lambda ratio: coins)
    monkeypatch.setattr(torch, "multinomial", multinomial)

    def matches(tokens, *values):
        coins.copy_(torch.tensor(values, dtype=torch.float64))
        _, found = transformers_utils._speculative_sampling(
            torch.tensor([[0, *tokens]]), draft[None], size, target[None], assistant_ensemble_weight=1 - weight
        )
        return int(found), extra.pop()[0]

    def threshold(tokens, position):
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            found, _ = matches(tokens, *([0.0] * position), middle, *([0.0] * (size - 1 - position)))
            low, high = (middle, high) if found > position else (low, middle)
        return high

    for tokens in product(range(vocab), repeat=size):
        theirs, reach = torch.zeros(size + 1, vocab).double(), 1.0
        for stop in range(size + 1):
            accept = threshold(tokens, stop) if stop < size else 0.0
            _, row = matches(tokens, *([0.0] * stop + [2.0] * (size - stop)))
            theirs[stop] = reach * (1 - accept) * row
            reach *= accept
        rows = torch.cat([draft.softmax(-1), torch.zeros(1, vocab).double()])
        tree = DraftTree(torch.tensor([[0, *tokens]]), (-1, 0, 1), rows[None], target.softmax(-1)[None])
        law = METHODS["token"].law(relax(tree, f"ensemble:{weight}"))
        # 1e-12: float64 and 50 halvings of the unit interval
        torch.testing.assert_close(law.stop[0].unsqueeze(-1) * law.next[0], theirs, atol=1e-12, rtol=0)


def test_what_the_owner_of_the_modules_had_set_is_there_afterwards(tmp_path):
    pair = tiny_pair(11, seed=3)
    folder = repository(tmp_path / "gate", pair)
    model = pair.target.module.train().requires_grad_(True)
    generate(pair, folder, **batch(PROMPTS))
    assert model.training and model.model.layers[0].mlp.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in pair.draft.module.parameters())
    model.eval().requires_grad_(False)


def test_greedy_stop_strings_streamer_and_returned_classes(tmp_path):
    pair = tiny_pair(11)
    folder = repository(tmp_path / "gate", pair)
    ids = {"input_ids": torch.tensor([PROMPTS[0]])}
    shown = []

    class Streamer:
        put = staticmethod(lambda tokens: shown.append(tokens.flatten().tolist()))
        end = staticmethod(lambda: shown.append("end"))

    plain = generate(pair, folder, **ids, do_sample=False, streamer=Streamer, return_dict_in_generate=True).sequences
    ours = decode(
        pair, PROMPTS[:1], relaxation=str(folder), draft_length=3, sampling=Sampling(0), max_new_tokens=30,
        seeds=seeds(0, 1),
    )[0].tokens  # fmt: skip
    torch.manual_seed(0)
    assert generate(pair, folder, **ids, do_sample=False)[0, 3:].tolist() == ours
    assert shown[0] == PROMPTS[0] and shown[-1] == "end" and sum(shown[:-1], []) == plain[0].tolist()
    stop = {"stop_strings": f"w{ours[2]}", "tokenizer": pair.tokenizer}
    torch.manual_seed(0)
    stopped = generate(pair, folder, **ids, do_sample=False, **stop)[0, 3:].tolist()
    assert stopped == ours[: ours.index(ours[2]) + 1]
    torch.manual_seed(0)
    assert generate(pair, folder, **ids, do_sample=False, max_new_tokens=None, max_length=7)[0].tolist()[3:] == ours[:4]


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"num_beams": 4}, "`num_beams` must be left at its default 1, got 4"),
        ({"repetition_penalty": 1.2}, "`repetition_penalty` must be left at its default 1.0, got 1.2"),
        ({"output_scores": True}, "`output_scores` must be left at its default False, got True"),
        ({"use_cache": False}, "`use_cache` must be left at its default True, got False"),
        ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight` must be left at its default None"),
        ({"num_assistant_tokens_schedule": "heuristic"}, "`num_assistant_tokens_schedule` must be left at its default"),
        ({"prefix_allowed_tokens_fn": print}, "cannot honour `prefix_allowed_tokens_fn`"),
        ({"logits_processor": [print]}, "cannot honour `logits_processor`"),
        ({"temprature": 1.0}, "cannot honour `temprature`"),
        ({"stop_strings": "w2"}, "give `tokenizer` too"),
        ({"max_new_tokens": None, "max_length": 2}, "`max_length` 2 leaves no room after 3 prompt tokens"),
        ({"max_new_tokens": 200}, "is longer than the context"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "zeros and then ones in every row, got others; pad prompts"),
        ({"attention_mask": torch.tensor([[True, False, True]])}, "zeros and then ones in every row, got others"),
        ({"attention_mask": torch.tensor([[1, 0, 1]], dtype=torch.uint8)}, "zeros and then ones in every row"),
        ({"attention_mask": torch.tensor([[0, 0.5, 1]])}, "zeros and then ones in every row, got others"),
        ({"attention_mask": torch.tensor([[-1, -1, 1]])}, "zeros and then ones in every row, got others"),
        ({"attention_mask": torch.tensor([[0, 0, 0]])}, "zeros and then ones in every row, got others"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"like `input_ids`, .* got \[1, 1, 3, 3\]"),
        ({"attention_mask": [[1, 1, 1]]}, "got list; pad prompts on the left"),
        ({"input_ids": torch.tensor([[0, 2, 3]])}, "`input_ids` hold `pad_token_id`; give `attention_mask`"),
        ({"input_ids": torch.tensor([2, 3])}, r"`input_ids` must be a tensor \[B, T\] of token ids, got \[2\]"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"of token ids, got \[1, 0\] of torch.int64"),
        ({"input_ids": torch.tensor([[True]])}, r"of token ids, got \[1, 1\] of torch.bool"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 16)}, "of token ids, got NoneType; encode the prompts"),
        ({"input_ids": torch.tensor([[2, 11]])}, "prompt 0 has a token outside 0..10"),
        ({"num_return_sequences": 2, "streamer": print}, "`streamer` shows one text, got 2"),
        ({"streamer": print}, "`streamer` must have the methods put and end"),
        ({"temprature": False}, "cannot honour `temprature`"),
        ({"generation_config": {"top_k": 3}}, "`generation_config` must be a GenerationConfig, got dict"),
        ({"stop_strings": ["w2", ""]}, r"must be a text or a list of texts, none empty, got \['w2', ''\]"),
        ({"stop_strings": [3]}, "`stop_strings` must be a text or a list of texts"),
        ({"tokenizer": "tiny/target"}, "`tokenizer` must be the models' tokenizer, got 'tiny/target'"),
        ({"eos_token_id": "w1"}, "`eos_token_id` must be a whole number, got 'w1'"),
        ({"pad_token_id": "w0"}, "`pad_token_id` must be a whole number, got 'w0'"),
        ({"do_sample": "no"}, "`do_sample` must be True or False, got 'no'"),
        ({"temperature": "1"}, "`sampling.temperature` must be a number, got '1'"),
        ({"top_k": 2.5}, "`sampling.top_k` must be a whole number, got 2.5"),
        ({"top_p": float("nan")}, r"`sampling.top_p` must be in \(0, 1\], got nan"),
        ({"method": "plain"}, "`method` must name a verification method, such as token or block, got 'plain'"),
        ({"bias": float("nan")}, "`bias` must be a finite number, added to a logit, got nan"),
        ({"bias": "1"}, "`bias` must be a finite number, added to a logit, got '1'"),
        ({"max_new_tokens": 2.5}, "`max_new_tokens` must be a whole number, got 2.5"),
        ({"max_new_tokens": None, "max_length": "9"}, "`max_length` must be a whole number, got '9'"),
        ({"num_return_sequences": 0}, "`num_return_sequences` must be at least 1, got 0"),
        ({"num_return_sequences": -1}, "`num_return_sequences` must be at least 1, got -1"),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` must be at least 1, got 0"),
        ({"num_assistant_tokens": 2.5}, "`num_assistant_tokens` must be a whole number, got 2.5"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(tmp_path, options, sentence):
    pair = tiny_pair(11)
    folder = repository(tmp_path / "gate", pair)
    with pytest.raises((ValueError, TypeError), match=sentence):
        generate(pair, folder, **{"input_ids": torch.tensor([PROMPTS[0]])} | options)


def test_every_field_that_the_loop_does_not_read_is_refused_away_from_its_default(tmp_path):
    """Of this version of transformers, whatever it is: a new field must not be passed over."""
    pair, never = tiny_pair(11), object()
    folder = repository(tmp_path / "gate", pair)
    fields = GenerationConfig().to_dict() | GenerationConfig._get_default_generation_params()
    for name in set(fields) - set(FIELDS):
        config = GenerationConfig()
        setattr(config, name, never)
        with pytest.raises(ValueError, match=f"`{name}` must be left at its default"):
            _refuse(pair.target.module, pair.draft.module, config, {})
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="load both models in its dtype"):
        generate(pair, folder, input_ids=torch.tensor([[2]]))
    with pytest.raises(TypeError, match="`assistant_model` must be a model of transformers, got 'sums-draft'"):
        pair.target.module.generate(
            torch.tensor([[2]]), assistant_model="sums-draft", custom_generate=str(folder), trust_remote_code=True
        )


@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("pad", [0, 1, None])
@pytest.mark.parametrize("ends", [1, [5, 1], (5, 1), torch.tensor([5, 1]), []])
def test_texts_end_at_any_end_token_and_are_filled_up(tmp_path, count, pad, ends):
    """Whatever holds the ids of the end tokens, padding may be one of them, and prompts may hold both."""
    pair, prompts = tiny_pair(11), ([[2, 1, 3, 0], [5], [6, 2, 1]] * 6)[:count]
    folder = repository(tmp_path / "gate", pair)
    torch.manual_seed(1)
    made = generate(pair, folder, eos_token_id=ends, pad_token_id=pad, **batch(prompts))[:, 4:]
    known = torch.as_tensor(ends).reshape(-1).tolist()
    ours = decode(
        replace(pair, eos=tuple(known)), prompts, relaxation=str(folder), draft_length=3, max_new_tokens=30,
        seeds=seeds(1, count),
    )  # fmt: skip
    filling = pad if pad is not None else known[0] if known else None
    for row, completion in zip(made.tolist(), ours, strict=True):
        assert row[: len(completion.tokens)] == completion.tokens
        assert all(token == filling for token in row[len(completion.tokens) :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_give_the_texts_of_our_loop(tmp_path, dtype):
    pair = make_pair(*(module(seed, 11, 2 - seed).to(dtype) for seed in (0, 1)), tokenizer(11))
    folder = repository(tmp_path / "gate", pair)
    torch.manual_seed(5)
    made = generate(pair, folder, **batch(PROMPTS))[:, 6:].tolist()
    ours = decode(pair, PROMPTS, relaxation=str(folder), draft_length=3, max_new_tokens=30, seeds=seeds(5, 4))
    assert [row[: len(c.tokens)] for row, c in zip(made, ours, strict=True)] == [c.tokens for c in ours]


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("card.json", None, "does not hold card.json; export the bundle again"),
        ("card.json", "!", "does not hold card.json"),
        ("card.json", "bm8=", "card.json is damaged"),
        ("head.safetensors", "bm8=", "head.safetensors is damaged"),
    ],
)
def test_a_damaged_gate_is_named(tmp_path, name, content, sentence):
    pair = tiny_pair(11)
    gate = repository(tmp_path / "gate", pair) / "custom_generate" / "gate.py"
    line = next(line for line in gate.read_text().splitlines(keepends=True) if f'"{name}"' in line)
    gate.write_text(gate.read_text().replace(line, f'    "{name}": "{content}",\n' if content else ""))
    with pytest.raises(ValueError, match=f"custom_generate.*{sentence}"):
        generate(pair, tmp_path / "gate", input_ids=torch.tensor([[2]]))


def test_a_note_is_given_once_for_many_calls(tmp_path):
    pair = tiny_pair(11)
    folder = repository(tmp_path / "gate", pair)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("default")
        for _ in range(3):
            generate(pair, folder, input_ids=torch.tensor([[2]]), top_k=4)
    (note,) = [str(note.message) for note in noted if "was not measured" in str(note.message)]
    assert "custom_generate" in note and "was not measured at top_k 4; it was trained at temperature" in note


def test_a_repository_whose_bundle_is_written_anew_holds_the_new_one(tmp_path):
    """As `diversed calibrate` does, which moves the gate's bias, and as figures are added to a card."""
    pair = tiny_pair(11)
    folder = repository(tmp_path / "gate", pair)
    loaded, before = load_bundle(folder), (folder / "custom_generate" / "gate.py").read_text()
    add_bias(loaded.head, -1e4)
    write_bundle(folder, loaded.head, loaded.card)
    assert (folder / "custom_generate" / "gate.py").read_text() != before
    torch.manual_seed(0)
    made = generate(pair, folder, input_ids=torch.tensor([[2, 3]]))[0, 2:].tolist()
    assert made == decode(pair, [[2, 3]], draft_length=3, max_new_tokens=30, seeds=seeds(0, 1))[0].tokens, "exact"
    before = (folder / "custom_generate" / "gate.py").read_text()
    add_frontier(folder, [])
    assert (folder / "custom_generate" / "gate.py").read_text() == before


def test_a_repository_is_a_bundle_moves_and_refuses_other_models(tmp_path):
    pair, other = tiny_pair(11), tiny_pair(11, seed=7)
    folder = repository(tmp_path / "gate", pair)
    assert load_bundle(folder, pair.target, pair.draft).card.custom_generate is True
    readme = (folder / "README.md").read_text()
    assert "custom_generate=" in readme and "\n- custom_generate\n" in readme
    assert (folder / "custom_generate" / "requirements.txt").read_text().startswith("diversed>=")
    moved = folder.rename(tmp_path / "moved")
    assert generate(pair, moved, input_ids=torch.tensor([[2]]), revision="main").shape[0] == 1
    with pytest.raises(ValueError, match="does not fit these models: it was trained for the target"):
        generate(other, moved, input_ids=torch.tensor([[2]]))
    with pytest.raises(ValueError, match="`assistant_model` is missing"):
        pair.target.module.generate(torch.tensor([[2]]), custom_generate=str(moved), trust_remote_code=True)
    export(train=str(tmp_path / "gate-train"), out=str(moved), format="hf")  # over the older one
    export(train=str(tmp_path / "gate-train"), out=str(moved))
    assert not (moved / "custom_generate").exists()


@pytest.mark.parametrize("weight", [0.5, 0.8])
def test_greedy_ensemble_gives_the_texts_of_transformers_assisted_generation(weight):
    """On the embedded pair, token for token; the texts end by themselves, so no draft is cut short by a limit."""
    pair, length = load_pair("sums-target", "sums-draft", "float32", "cpu"), 5
    task = load_task("sums", split="test", limit=6)
    prompts = [task.encode(example, pair.tokenizer, 512) for example in task.examples]
    options = {"relaxation": f"ensemble:{weight}", "sampling": Sampling(0), "draft_length": length}
    ours = decode(pair, prompts, max_new_tokens=96, **options)
    draft = pair.draft.module
    draft.generation_config.num_assistant_tokens = length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    exact = decode(pair, prompts, max_new_tokens=96, sampling=Sampling(0), draft_length=length)
    for prompt, text in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = pair.target.module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=draft, do_sample=False,
            max_new_tokens=96, assistant_ensemble_weight=1 - weight, eos_token_id=list(pair.eos),
            pad_token_id=pair.eos[0],
        )  # fmt: skip
        assert text.finished and theirs[0, len(prompt) :].tolist() == text.tokens
    assert [text.tokens for text in ours] != [text.tokens for text in exact]
