"""Relaxed targets: every method is exact for the relaxed row, and the budget bounds what relaxing costs."""

import ast
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import diversed
import pytest
import torch
from diversed.verifier import METHODS, DraftTree, draw
from diversed.verifier.enumerate_laws import (
    KINDS,
    Pair,
    drafts,
    full_tree,
    model_law,
    paths,
    random_pair,
    text_law,
)
from diversed.verifier.relax import Relaxation, parse, relax, substitutions
from diversed.verifier.tree import chain, topology

from .support.rules import ROWS, row_by_hand

EXACT = 1e-12  # float64 sums of a few thousand terms below 1
RULES = [*ROWS, "learned"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relaxed_pair(pair: Pair, text: str, weight: torch.Tensor) -> torch.Tensor:
    """[C, V] relaxed row of every context."""
    if text in ("ensemble:0.3", "ensemble:0.3;blend=logits"):
        weight = torch.full_like(weight, 0.3)
    if text == "ensemble:0.3;bias=0.7":
        weight = torch.full_like(weight, 1 / (1 + math.exp(-math.log(0.3 / 0.7) - 0.7)))
    rows = zip(pair.target.tolist(), pair.draft.tolist(), weight.tolist(), strict=True)
    return torch.tensor([row_by_hand(text, p, q, w) for p, q, w in rows], dtype=torch.float64)


def weights(pair: Pair, seed: int) -> torch.Tensor:
    """[C] random weight of every context."""
    return torch.rand(len(pair.target), generator=seeded(seed), dtype=torch.float64)


def relaxed_tree(every, text, weight):
    return relax(every.tree, text, weight[every.contexts] if text.startswith("learned") else None)


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_the_text_has_the_law_of_the_relaxed_target(name, text):
    """Leaves were given their draft rows, so they are relaxed as well and the law is that of the rows alone."""
    drafting = METHODS[name].drafting
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(drafting, full_tree(2, 2))
    for seed, kind in enumerate(KINDS):
        pair = random_pair(3, 3, kind, seeded(seed))
        weight = weights(pair, seed)
        rows = relaxed_pair(pair, text, weight)
        every = drafts(pair, drafting, parents, leaf_rows=True)
        found = text_law(every, METHODS[name].law(relaxed_tree(every, text, weight)), rows, 3)
        assert (found - model_law(rows, 3)).abs().max() < EXACT, kind


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_a_leaf_without_a_draft_row_keeps_the_target(name, text):
    drafting = METHODS[name].drafting
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(drafting, full_tree(2, 2))
    pair = random_pair(3, 3, "random", seeded(3))
    weight = weights(pair, 3)
    rows = relaxed_pair(pair, text, weight)
    rows[4:] = pair.target[4:]  # contexts of two tokens, where the tree ends
    every = drafts(pair, drafting, parents)
    found = text_law(every, METHODS[name].law(relaxed_tree(every, text, weight)), rows, 3)
    assert (found - model_law(rows, 3)).abs().max() < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_the_blend_trades_acceptance_for_bias_one_to_one(kind):
    pair = random_pair(4, 2, kind, seeded())
    every = drafts(pair, "chain", chain(1))
    tv = 0.5 * (pair.target[0] - pair.draft[0]).abs().sum().item()
    for weight in (0.0, 0.3, 1.0):
        tree = relax(every.tree, f"ensemble:{weight}")
        accepted = (every.probability @ METHODS["token"].law(tree).stop[:, 1]).item()
        bias = substitutions(every.tree, tree)[0, 0].item()
        assert abs(bias - weight * tv) < EXACT
        assert abs(accepted - (1 - (1 - weight) * tv)) < EXACT


def path_sum(values: torch.Tensor, parents: tuple[int, ...]) -> torch.Tensor:
    """[B, N] sum of `values` [B, N] over the nodes from the root to each node, both included."""
    return values @ topology(parents).ancestors.to(values.dtype).T


def test_substitutions_add_up_along_the_path_and_not_across_siblings():
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]])
    assert path_sum(values, (-1, 0, 0, 1, 3)).tolist() == [[1, 3, 5, 11, 27]]


@pytest.mark.parametrize("text", ["ensemble:0.8", "lenient:0.2", "cascade-chow:0.9", "typical:0.3,0.9", "mentored:3", "regret:2", "learned"])
@pytest.mark.parametrize("parents", [chain(3), full_tree(2, 2), paths(2, 2)])
def test_no_path_inside_a_tree_passes_the_budget(text, parents):
    generator = seeded()
    rows = torch.rand(2, 64, len(parents), 5, generator=generator, dtype=torch.float64).pow(3)
    draft, target = rows / rows.sum(-1, keepdim=True)
    tree = DraftTree(torch.zeros(64, len(parents), dtype=torch.int64), parents, draft, target)
    weight = torch.rand(64, len(parents), generator=generator) if text.startswith("learned") else None
    spent = torch.rand(64, generator=generator, dtype=torch.float64) * 0.6
    free = path_sum(substitutions(tree, relax(tree, text, weight)), parents)
    charged = path_sum(substitutions(tree, relax(tree, f"{text};budget=0.6", weight, spent=spent)), parents)
    assert (spent.unsqueeze(-1) + free > 0.6).any() and (charged > 0).any()
    assert (spent.unsqueeze(-1) + charged).max() <= 0.6 + EXACT


@pytest.mark.parametrize("text", [rule for rule in RULES if rule != "none"])
@pytest.mark.parametrize("name", METHODS)
def test_a_budget_of_zero_gives_the_text_of_exact_decoding(name, text):
    drafting = METHODS[name].drafting
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(drafting, full_tree(2, 2))
    for kind in ("random", "equal", "zeros"):
        pair = random_pair(3, 3, kind, seeded(5))
        every = drafts(pair, drafting, parents, leaf_rows=True)
        tree = replace(every.tree, draft=every.tree.draft.float(), target=every.tree.target.float())
        weight = torch.rand(tree.tokens.shape, generator=seeded()) if text.startswith("learned") else None
        relaxed = relax(tree, f"{text};budget=0", weight)
        assert torch.equal(relaxed.target, tree.target)
        uniform = torch.rand(len(tree.tokens), 2, generator=seeded(1))
        one, other = (draw(METHODS[name].law(which), uniform) for which in (tree, relaxed))
        assert torch.equal(one.node, other.node) and torch.equal(one.token, other.token)


@pytest.mark.parametrize("leaf_rows", [False, True])
@pytest.mark.parametrize("name, budget", [("block", 0.1), ("block", 0.35), ("univer", 0.35), ("traversal", 0.35)])
def test_the_budget_bounds_the_distance_of_five_tokens_of_text(name, budget, leaf_rows):
    """Block after block on V = 3 until five tokens stand: every text, every way its blocks fall, all its charges."""
    pair = random_pair(3, 8, "random", seeded(8))
    weight = 0.3 + 0.7 * weights(pair, 2)
    law, charge = five_tokens(METHODS[name], pair, weight, f"learned;budget={budget}", leaf_rows)
    distance = 0.5 * (law - model_law(pair.target, 5)).abs().sum().item()
    assert abs(law.sum().item() - 1) < EXACT
    assert 0.02 < distance <= charge + EXACT
    assert charge <= budget + EXACT


def test_without_a_budget_the_charge_is_the_mean_number_of_substitutions_of_the_relaxed_text():
    """With relaxed leaves the text's law is the blend's own, and so the charge does not depend on the blocks."""
    pair = random_pair(3, 8, "random", seeded(8))
    weight = weights(pair, 2)
    rows = relaxed_pair(pair, "learned", weight)
    cost = 0.5 * (rows - pair.target).abs().sum(-1)
    expected, start = 0.0, 0
    for depth in range(5):
        expected += (model_law(rows, depth) @ cost[start : start + 3**depth]).item()
        start += 3**depth
    for name in ("token", "univer"):
        law, charge = five_tokens(METHODS[name], pair, weight, "learned", leaf_rows=True)
        assert (law - model_law(rows, 5)).abs().max() < EXACT
        assert abs(charge - expected) < EXACT


def five_tokens(method, pair: Pair, weight: torch.Tensor, text: str, leaf_rows: bool):
    """(law [3^5] of the text, expected charge of its five tokens), by following every (text, charge) through blocks."""
    length, size = 5, 3
    law, charge = torch.zeros(size**length, dtype=torch.float64), 0.0
    first = (size**length - 1) // (size - 1)
    waiting = {depth: defaultdict(float) for depth in range(length)}
    waiting[0][0, 0.0] = 1.0
    parents = {"chain": chain(2), "paths": paths(2, 2)}.get(method.drafting, full_tree(2, 1))
    for depth in range(length):
        for (context, spent), chance in waiting[depth].items():
            below = subtree(pair, context, 3)
            every = drafts(Pair(pair.draft[below], pair.target[below], 3), method.drafting, parents, leaf_rows)
            index = below[every.contexts]
            before = torch.full((len(index),), spent, dtype=torch.float64)
            relaxed = relax(every.tree, text, weight[index], spent=before)
            found = method.law(relaxed)
            cost = substitutions(every.tree, relaxed)
            mass = chance * every.probability[:, None, None] * found.stop.unsqueeze(-1) * found.next
            verdicts = mass.nonzero(as_tuple=True)
            tokens = path_sum(torch.ones(1, len(parents)), parents)[0].long().tolist()  # of a block, the extra one too
            index, charged, cost = index.tolist(), path_sum(cost, parents).tolist(), cost.tolist()
            for draft, node, token, share in zip(*(part.tolist() for part in (*verdicts, mass[verdicts])), strict=True):
                after, reached = index[draft][node] * size + 1 + token, depth + tokens[node]
                used = charged[draft][node]
                while reached > length:  # a block may run past the end: cut it there, and its charges with it
                    after, reached = (after - 1) // size, reached - 1
                    used -= cost[draft][node]
                    node = parents[node]
                charge += share * used
                if reached == length:
                    law[after - first] += share
                else:
                    waiting[reached][after, round(spent + used, 14)] += share
    return law, charge


def subtree(pair: Pair, context: int, length: int) -> torch.Tensor:
    """Contexts below `context`, in the numbering of a pair that starts there."""
    level, out = [context], [context]
    for _ in range(length - 1):
        level = [above * 3 + 1 + token for above in level for token in range(3)]
        out += level
    return torch.tensor(out)


def test_relaxing_does_not_write_into_the_tree_and_keeps_its_dtype():
    pair = random_pair(3, 3, "random", seeded())
    tree = drafts(pair, "chain", chain(2)).tree
    before = tree.target.clone()
    for text in RULES:
        weight = torch.rand(tree.tokens.shape, generator=seeded()) if text.startswith("learned") else None
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            typed = replace(tree, draft=tree.draft.to(dtype), target=tree.target.to(dtype))
            relaxed = relax(typed, f"{text};budget=1", weight)
            assert relaxed.target.dtype == dtype
            METHODS["block"].law(relaxed)
    assert torch.equal(tree.target, before)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("none", Relaxation("none")),
        ("ensemble:0.3", Relaxation("ensemble", (0.3,))),
        ("lenient:0.5;budget=3", Relaxation("lenient", (0.5,), budget=3.0)),
        ("cascade-token:0.2", Relaxation("cascade-token", (0.2,))),
        ("typical:0.09,0.3", Relaxation("typical", (0.09, 0.3))),
        ("divergence:0.3", Relaxation("divergence", (0.3,))),
        ("divergence:0.3,0.8", Relaxation("divergence", (0.3, 0.8))),
        ("learned;bias=-0.5;budget=3", Relaxation("learned", bias=-0.5, budget=3.0)),
        ("runs/gsm8k/bundle;bias=0.5", Relaxation("learned", bias=0.5, source="runs/gsm8k/bundle", blend="")),
        ("a/b;blend=probabilities", Relaxation("learned", source="a/b")),
        ("my.gates:GATE", Relaxation("learned", source="my.gates:GATE")),
    ],
)
def test_a_relaxation_string_is_parsed(text, expected):
    assert parse(text) == expected


def test_the_name_of_a_folder_is_a_bundle(tmp_path, monkeypatch):
    (tmp_path / "heads").mkdir()
    (tmp_path / "my.heads:HEAD").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse("heads") == Relaxation("learned", source="heads", blend="")
    named_like_code = parse("my.heads:HEAD")
    assert not named_like_code.is_code and parse(str(named_like_code)) == named_like_code


def test_a_bundle_of_a_finished_run_need_not_exist_any_more():
    with pytest.raises(ValueError, match="unknown relaxation"):
        parse("bundle;bias=1")
    assert parse("bundle;bias=1", recorded=True) == Relaxation("learned", bias=1, source="bundle", blend="")


@pytest.mark.parametrize(
    "text, canonical, kind",
    [
        ("none", "none", "exact"),
        ("ensemble: 0.30", "ensemble:0.3", "static"),
        ("ensemble:0.123456789012", "ensemble:0.123456789012", "static"),
        ("ensemble:0.3;budget=2;bias=1;blend=logits", "ensemble:0.3;blend=logits;bias=1;budget=2", "static"),
        ("ensemble:0.3;blend=probabilities", "ensemble:0.3", "static"),
        ("typical:.09, .3;budget=1e-7", "typical:0.09,0.3;budget=1e-07", "other"),
        ("learned", "learned", "learned"),
        ("runs/a/bundle; bias=-1", "runs/a/bundle;bias=-1", "learned"),
        ("runs/a/bundle;blend=logits", "runs/a/bundle;blend=logits", "learned"),
        ("runs/a/bundle;blend=probabilities", "runs/a/bundle;blend=probabilities", "learned"),
        ("my.gates:GATE;blend=logits", "my.gates:GATE;blend=logits", "code"),
    ],
)
def test_a_relaxation_is_written_as_it_is_read(text, canonical, kind):
    rule = parse(text)
    assert str(rule) == canonical and parse(canonical) == rule
    assert rule.kind == kind and rule.is_code == (kind == "code") and rule.is_blend == (kind != "other")
    assert rule.folder == (Path(rule.source) if "/" in text else None)
    bias = 0.25 if rule.name in ("ensemble", "learned") else None
    assert parse(str(replace(rule.with_bias(bias), budget=3))) == replace(rule, bias=bias, budget=3)
    assert rule.with_bias(1).with_bias(None) == replace(rule, bias=None)
    assert rule.base == canonical.split(";")[0]


def test_a_label_says_what_tells_a_relaxation_from_others_of_its_kind():
    texts = ["none", "ensemble:0.30;blend=logits", "a/b;bias=-1", "a.b:SUMS_ORACLE", "cascade-opt:0.2;budget=1e-7"]
    assert [parse(text).label for text in texts] == [
        "", "0.3, blend logits", "bias \N{MINUS SIGN}1", "sums oracle", "cascade-opt 0.2, budget 1e\N{MINUS SIGN}07"
    ]  # fmt: skip


def test_a_bundle_need_not_be_written_to_be_named(tmp_path):
    assert str(Relaxation.of_bundle(tmp_path)) == str(tmp_path)
    assert parse(str(Relaxation.of_bundle(tmp_path, 2))) == parse(f"{tmp_path};bias=2")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("ensemble:1.5", r"weight must lie in \[0, 1\], got 1.5"),
        ("lenient:0", r"leniency must lie in \(0, 1\], got 0"),
        ("typical:0.1,-1", r"delta must lie in \[0, inf\), got -1"),
        ("cascade-opt:nan", "alpha must be a finite number"),
        ("ensemble", "must be written ensemble:WEIGHT"),
        ("typical:0.3", "must be written typical:EPSILON,DELTA"),
        ("divergence", r"must be written divergence:THRESHOLD\[,SURE\], got 0 numbers"),
        ("divergence:1,0.9,3", r"must be written divergence:THRESHOLD\[,SURE\], got 3 numbers"),
        ("mentored:0.9", r"cap must lie in \[1, inf\), got 0.9"),
        ("top-p:0", r"mass must lie in \(0, 1\], got 0"),
        ("lenint:0.4", "did you mean `lenient"),
        ("lerned", "did you mean `learned"),
        ("", "known are none, ensemble"),
        ("none;bias=1", "none has no weight for a bias to shift; leave out bias"),
        ("lenient:0.5;bias=0", "lenient has no weight for a bias to shift; leave out bias"),
        ("none;budget=-1", "budget must be at least 0"),
        ("none;bias", "bias=NUMBER, budget=NUMBER or blend=NAME, once each"),
        ("ensemble:0.5;blend=sum", "blend must be probabilities, logits or choice, got sum"),
        ("lenient:0.5;blend=logits", "lenient blends no logits"),
        ("coin:0.5;blend=logits", "coin blends no logits"),
        ("ensemble:0.5;blend=choice", "ensemble has no weight that differs from node to node"),
        ("none;budget=1;budget=2", "once each"),
    ],
)
def test_a_bad_relaxation_string_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(text)


def test_a_weight_is_asked_for_where_it_is_needed_and_only_there():
    tree = drafts(random_pair(3, 3, "random", seeded()), "chain", chain(2)).tree
    with pytest.raises(ValueError, match="learned needs `weight`"):
        relax(tree, "learned")
    with pytest.raises(ValueError, match="no `weight`"):
        relax(tree, "lenient:0.5", torch.ones(tree.tokens.shape))
    with pytest.raises(ValueError, match="one share a node"):
        relax(tree, "learned", torch.ones(1, 1))


# Nobody else knows how the string is written

FOLDER = Path(diversed.__file__).parent
METHODS_OF_TEXT = {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "removeprefix"}
OPTIONS = (";bias=", ";blend=", ";budget=")


def takes_apart(source: str) -> set[int]:
    """Lines that write an option of a relaxation with a value, cut a text at `;`, or look into its text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            texts = [part.value if isinstance(part, ast.Constant) else "" for part in node.values]
            bad = any(text.endswith(OPTIONS) for text in texts[:-1]) or texts[:1] and texts[0] in OPTIONS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            given = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            about = "" if isinstance(node.func.value, ast.Constant) else ast.unparse(node.func.value)
            bad = node.func.attr in METHODS_OF_TEXT and (";" in given or "relaxation" in about)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and isinstance(node.left, ast.Constant):
            bad = str(node.left.value).removeprefix(";").startswith(("bias=", "blend=", "budget="))
        else:
            bad = isinstance(node, ast.Constant) and node.value in (";blend=logits", *OPTIONS)
        if bad:
            found.add(node.lineno)
    return found


def test_only_this_module_takes_the_string_of_a_relaxation_apart():
    names = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.py")]
    # A checkout may hold an environment of its own (`.venv`) and what a build left behind.
    names = [name for name in names if not name.parts[0].startswith((".", "tests", "build"))]
    names = [name for name in names if name.parts != ("verifier", "relax.py")]
    found = {str(name): takes_apart((FOLDER / name).read_text(encoding="utf-8")) for name in names}
    assert len(found) > 60 and not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        'f"{bundle};bias={bias:g}"',
        'f";blend={blend}"',
        'relaxation.split(";")[0]',
        'row["relaxation"].startswith("ensemble:")',
        '"blend=logits" in row["relaxation"]',
        'str(bundle) + ";blend=logits"',
    ],
)
def test_taking_it_apart_is_noticed(line):
    assert takes_apart(line) == {1}


@pytest.mark.parametrize("wrong", [-1e-9, 1 + 1e-6, math.nan, math.inf])
def test_weights_and_numbers_that_are_none_are_refused(wrong):
    rows = torch.full((2, 3, 4), 0.25)
    tree, share = DraftTree(torch.zeros(2, 3, dtype=torch.int64), chain(2), rows, rows), torch.full((2, 3), 0.5)
    share[1, 2] = wrong
    with pytest.raises(ValueError, match=r"`weight` must lie in \[0, 1\], got others"):
        relax(tree, "learned", share)
    with pytest.raises(ValueError, match=r"weight must (lie in \[0, 1\]|be a finite number)"):
        relax(tree, Relaxation("ensemble", (wrong,)))
    if not 0 <= wrong < math.inf:
        with pytest.raises(ValueError, match="`spent` must be at least 0 and finite"):
            relax(tree, "ensemble:0.5;budget=1", spent=torch.full((2,), wrong))
    empty = DraftTree(tree.tokens[:0], tree.parents, rows[:0], rows[:0])
    assert relax(empty, "learned", share[:0]).target.shape == (0, 3, 4)
