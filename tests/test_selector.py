"""What chooses the tree: whatever it chooses from what is known before drawing, the text keeps its law."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from diversed.runtime.choosers import LearnedSelector
from diversed.runtime.completion import Completion, Request
from diversed.runtime.engine import Engine, decode
from diversed.runtime.sampling import Sampling
from diversed.runtime.shape_network import FILES, SCALARS, ShapeNetwork, row_scalars
from diversed.runtime.shapes import parse_shape
from diversed.verifier.enumerate_laws import drafts, model_law, random_pair, text_law
from diversed.verifier.law import DraftTree
from diversed.verifier.methods import METHODS
from safetensors.torch import save_file

from .support.models import relaxed_law, tiny_pair
from .test_decode import LENGTH, TEXTS, VOCAB, chi_squared

SHAPES = ["1", "2", "2x1", "2x1+1"]
CHAINS = ["1", "2", "3", "4"]
WIDTH = 48
BASE = {"temperature": 1.0, "top_p": 1.0, "shape": "2x1"}


def network(pair, seed=0) -> ShapeNetwork:
    """Random weights that make every shape likely somewhere."""
    torch.manual_seed(seed)
    found = ShapeNetwork(pair.target.hidden_size, pair.draft.hidden_size, len(SHAPES), WIDTH)
    found.net[6].weight.data.normal_(0, 3)
    found.net[6].bias.data.zero_()
    found.standardise(torch.randn(20, len(SCALARS)))
    return found.eval()


def write_selector(path: Path, pair, method="traversal", **changes) -> str:
    """A folder with a selector for the pair and the method."""
    drafting = METHODS[method].drafting
    shapes = CHAINS if drafting == "chain" else SHAPES
    card = {"format": 1, "method": method, "drafting": drafting, "shapes": shapes, "width": WIDTH,
            "bases": [{"temperature": 1.0, "top_p": 1.0, "shape": shapes[2]}],
            "latency": {"step": 64, "draft": [1.0], "target": [2.0]},
            "settings": {"width": WIDTH, "validation": 0.25, "seed": 0}, "figures": [{"temperature": 1.0}]}  # fmt: skip
    for role in ("target", "draft"):
        model = getattr(pair, role)
        card[role] = {"name": model.name, "hash": model.hash, "hidden_size": model.hidden_size}
    (path / FILES[0]).write_text(json.dumps(card | changes))
    save_file(network(pair).state_dict(), path / FILES[1])
    return str(path)


@pytest.fixture
def folder(tmp_path):
    return partial(write_selector, tmp_path)


@pytest.mark.parametrize("method", ["traversal", "gbv", "univer"])
def test_a_network_that_chooses_the_tree_keeps_the_law(folder, method):
    pair, prompt = tiny_pair(VOCAB, end=False), [2, 3]
    chosen = []
    select = LearnedSelector.select

    class Spy(LearnedSelector):
        def select(self, numbers, active):
            """By the first request alone: the mean of 100 hardly changes; turned by a digit of a logit."""
            digit = int(1e4 * abs(numbers[0][1])) if numbers[0][0] else 0
            chosen.append((select(self, numbers[:1], [True]) + digit) % len(SHAPES))
            return chosen[-1]

    engine = Engine(pair, method, branches=folder(pair, method), relax_leaf=True)
    engine.selector.__class__ = Spy
    texts = list(engine.run({i: Request(prompt, i, LENGTH) for i in range(TEXTS // 10)}, 100).values())
    assert len(set(chosen)) > 2, "one shape or two would prove little"
    assert chi_squared(texts, relaxed_law(pair, prompt, "none", LENGTH)) > 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_a_chain_that_ends_where_the_draft_is_not_confident_is_exact(name):
    """By enumeration of all chains that may be drawn, with the row of an ended chain's last token left out."""
    method = METHODS[name]
    for kind in ("random", "tied", "zeros"):
        pair = random_pair(3, 5, kind, torch.Generator().manual_seed(4))
        every = drafts(pair, "chain", (-1, 0, 1, 2, 3))
        tree, lengths = every.tree, set()
        for confidence in (0.2, 0.4, 0.6):
            given = pair.draft[every.contexts[:, :-1]].gather(2, tree.tokens[:, 1:, None])[..., 0]
            grows = torch.cat([torch.ones(len(given), 1), given[:, :-1] >= confidence], 1).cumprod(1).bool()
            lengths |= set(grows.sum(1).tolist())
            tokens = torch.cat([tree.tokens[:, :1], tree.tokens[:, 1:].where(grows, -1)], 1)
            draft = torch.cat([tree.draft[:, :-1] * grows.unsqueeze(-1), tree.draft[:, -1:]], 1)
            ended = DraftTree(tokens, tree.parents, draft, tree.target)
            found = text_law(every, method.law(ended), pair.target, pair.length)
            assert (found - model_law(pair.target, pair.length)).abs().max() < 1e-12
        assert len(lengths) > 2


@pytest.mark.parametrize("method", ["token", "block", "univer"])
@pytest.mark.parametrize("relaxation", ["none", "ensemble:0.4"])
def test_a_chain_ends_behind_the_first_token_that_the_draft_is_not_sure_of(method, relaxation, monkeypatch):
    """Alone as in a batch, by the laws of every tree as by the formulas for chains; against the draft's own rows."""
    pair, prompts = tiny_pair(11, end=False), [[2, 3, 4], [5], [6, 2, 3], [4, 4]]
    options = {"method": method, "relaxation": relaxation, "max_new_tokens": 24}
    options |= {"branches": "confidence:0.1,5", "seeds": [7, 8, 9, 10]}
    ended, record = [], Completion.add_step

    def spy(completion, new, accepted, drafted, *rest):
        ended.append((len(drafted), completion.draft_calls))
        record(completion, new, accepted, drafted, *rest)

    monkeypatch.setattr(Completion, "add_step", spy)
    alone = decode(pair, prompts, batch=1, **options)
    assert {drafted for drafted, _ in ended} > {1, 2, 3}
    for (drafted, before), (_, after) in zip(ended[:4], ended[1:5], strict=True):
        assert drafted == after - before, "alone, the draft stops with its text"
    calls = sum(c.draft_calls for c in alone)
    together = decode(pair, prompts, **options)
    monkeypatch.setattr("diversed.runtime.chain_twin.serves", lambda *_: False)
    general = decode(pair, prompts, **options)
    assert [c.tokens for c in alone] == [c.tokens for c in together] == [c.tokens for c in general]
    for name in ("weight_count", "drafted_by_depth", "accepted_by_depth", "target_calls"):
        assert len({str([getattr(c, name) for c in texts]) for texts in (alone, together, general)}) == 1
    assert sum(c.drafted for c in alone) == sum(c.drafted for c in together) < sum(c.draft_calls for c in together)
    assert calls <= sum(c.draft_calls for c in together)


def test_a_chain_that_ends_early_keeps_the_law():
    pair, prompt = tiny_pair(VOCAB, end=False), [2, 3]
    texts = decode(
        pair, [prompt] * (TEXTS // 10), method="block", branches="confidence:0.3,3", batch=20, max_new_tokens=LENGTH
    )
    assert chi_squared(texts, relaxed_law(pair, prompt, "none", LENGTH)) > 1e-5


def test_what_ends_while_it_is_drawn_is_refused_where_leaves_and_shapes_must_be_known():
    pair = tiny_pair(11)
    with pytest.raises(ValueError, match="`relax_leaf` needs leaves that are known"):
        Engine(pair, "token", branches="confidence:0.5,4", relax_leaf=True)
    with pytest.raises(ValueError, match="`compile` needs .* the host must see where the draft is not confident"):
        Engine(pair, "token", branches="confidence:0.5,4", compile=True)


@pytest.mark.parametrize("method", ["specinfer", "kseq", "traversal", "gbv", "univer"])
def test_a_named_shape_is_the_tree_of_the_three_options(method):
    pair, prompts = tiny_pair(11), [[2, 3, 4], [5], [6, 2, 3]]
    paths = [2, 1] if method in ("traversal", "univer") else 2
    options = {"method": method, "max_new_tokens": 20, "relaxation": "ensemble:0.3"}
    named = decode(pair, prompts, branches="2x2+1", **options)
    spelled = decode(pair, prompts, branches=paths, draft_length=2, trunk=1, **options)
    assert [c.tokens for c in named] == [c.tokens for c in spelled]


def test_a_selector_sees_both_models_at_the_token_before_the_root_and_the_draft_at_the_root(folder):
    """Against runs of both models over the committed text alone; the draft is run anew only behind a leaf."""
    pair = tiny_pair(11, end=False)
    engine, seen = Engine(pair, "traversal", branches=folder(pair)), []
    look = engine.selector.features
    engine.selector.features = lambda known: seen.append(known) or look(known)
    (done,) = engine.run({0: Request([2, 3, 4], 3, 25)}).values()
    text = [2, 3, 4] + done.tokens
    assert len(seen) > 5 and not any(part.any() for part in seen[0].state)
    anew = [bool((known.state[2] == 0).all()) for known in seen[1:]]
    assert {False, True} == set(anew) and [known.rows.shape[1] == 2 for known in seen[1:]] == anew
    for known in seen[1:]:
        root = int(known.length)
        with torch.no_grad():
            target, draft = (
                model.module(torch.tensor([text[: root + 1]]), output_hidden_states=True)
                for model in (pair.target, pair.draft)
            )
        row, hidden, *remembered, there = known.state
        assert there.item() == 1
        rows, states = known.rows, known.hidden
        if rows.shape[1] == 1:
            pairs = zip(remembered, (rows, states), strict=True)
            rows, states = (torch.stack([old, new[:, 0]], 1) for old, new in pairs)
        close = {"atol": 1e-5, "rtol": 1e-4}
        torch.testing.assert_close(row[0], target.logits[0, root - 1].softmax(-1), **close)
        torch.testing.assert_close(hidden[0], target.hidden_states[-1][0, root - 1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rows[0], draft.logits[0, root - 1 :].softmax(-1), **close)
        torch.testing.assert_close(states[0], draft.hidden_states[-1][0, root - 1 :], atol=1e-4, rtol=1e-4)


def test_the_scalars_of_rows_are_what_they_are_called():
    target, draft, root = torch.rand(3, 4, 9, dtype=torch.float64).softmax(-1)
    kl = torch.nn.functional.kl_div
    wanted = [-(row * row.log()).sum(-1) for row in (target, draft, root)]
    wanted += [kl(target.log(), draft, reduction="none").sum(-1), kl(draft.log(), target, reduction="none").sum(-1)]
    wanted.append((target - draft).abs().sum(-1))
    torch.testing.assert_close(row_scalars(target, draft, root), torch.stack(wanted, -1))


@pytest.mark.parametrize(
    "text, shape", [("5", (1, 5, 0)), ("3x4+2", (3, 4, 2)), ("1x2+3", (1, 5, 0)), ("2x1", (2, 1, 0))]
)
def test_a_shape_is_read_and_written(text, shape):
    found = parse_shape(text)
    assert (found.paths, found.length, found.trunk) == shape and parse_shape(str(found)) == found
    assert sum(found.widths) == found.grow("paths").nodes and found.depth == found.grow("paths").depth


@pytest.mark.parametrize(
    "method, branches, sentence",
    [
        ("traversal", "auto", "chooses the number of paths of gbv"),
        ("traversal", "3by4", "a shape is written PATHSxLENGTH\\+TRUNK"),
        ("traversal", "0x4", "a shape is written"),
        ("traversal", "2x0", "a shape is written"),
        ("traversal", "99999999", "a shape is written"),
        ("traversal", "9x999", "more than 512 nodes"),
        ("traversal", "entropy:1.2,6,3x2", "entropy is not offered any more; use confidence:0.5,8"),
        ("token", "confidence:0.5", "written confidence:PROBABILITY,TOKENS"),
        ("token", "confidence:0,8", "written confidence:PROBABILITY,TOKENS"),
        ("token", "confidence:nan,8", "written confidence:PROBABILITY,TOKENS"),
        ("token", "confidence:0.5,0", "written confidence:PROBABILITY,TOKENS"),
        ("token", "confidence:0.5,3x2", "written confidence:PROBABILITY,TOKENS"),
        ("token", "confidence:0.5,8,2", "written confidence:PROBABILITY,TOKENS"),
        ("token", "confidence:1/2,8", "written confidence:PROBABILITY,TOKENS"),
        ("token", "confidence:0.5," + 300 * "9", "written confidence:PROBABILITY,TOKENS"),
        ("token", 300 * "9", "a shape is written PATHSxLENGTH"),
        ("block", "2x3", "verifies one chain"),
        ("traversal", "./nowhere", "has no selector.json and no selector.safetensors; `diversed select` writes both"),
    ],
)
def test_a_name_that_chooses_nothing_is_refused_in_one_sentence(method, branches, sentence):
    with pytest.raises((ValueError, OSError), match=sentence):
        Engine(tiny_pair(11), method, branches=branches)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"method": "gbv"}, "trained for method gbv, got traversal"),
        ({"draft": {"name": "x", "hash": "other", "hidden_size": 16}}, "trained for draft other"),
        ({"format": 9}, "has format 9, this version reads 1"),
        ({"latency": {}}, "is damaged .*run `diversed select` again"),
        ({"latency": {"step": 64, "draft": [1.0, 2.0], "target": [1.0]}}, "do not belong together"),
        ({"latency": {"step": 0.5, "draft": [1.0], "target": [1.0]}}, "`latency.step` must be a whole number"),
        ({"bases": [{"temperature": 1.0, "top_p": 1.0, "shape": "9"}]}, "a base is none of its shapes"),
        ({"shapes": [3]}, "is damaged"),
        ({"bases": [BASE | {"constant": "yes"}]}, "`bases` 0: `constant` must be true or false"),
        ({"bases": [BASE | {"constant": 1}]}, "`bases` 0: `constant` must be true or false"),
        ({"bases": [BASE | {"temperature": 10**400}]}, "is damaged"),
        ({"choosing_ms": float("nan")}, "`choosing_ms` must be a number"),
        ({"choosing_ms": None}, "is damaged"),
        ({"figures": []}, "`figures` must be a list of objects, at least 1"),
        ({"settings": []}, "`settings` must be an object"),
        ({"shapes": ["2x1"]}, "holds float32 tensors"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_sentence(folder, changes, sentence):
    pair = tiny_pair(11)
    with pytest.raises(ValueError, match=sentence):
        Engine(pair, "traversal", branches=folder(pair, **changes), sampling=Sampling())
