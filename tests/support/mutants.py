"""A copy of the verifier with one mistake in it, and the laws that must catch the mistake."""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import diversed.verifier
import torch
from diversed.verifier.enumerate_laws import (
    Pair,
    delayed,
    drafts,
    full_tree,
    law_error,
    model_law,
    paths,
    random_pair,
    text_law,
)
from diversed.verifier.tree import chain, topology

from .believed import (
    RULES,
    each_row,
    filtered_pair,
    greedy_pair,
    greedy_row,
    sampled_row,
)
from .rules import ROWS, row_by_hand, token_by_hand

SOURCE = Path(diversed.verifier.__file__).parent
FILES = ("__init__", "tree", "law", "plans", "compose", "multipath", "fly", "methods", "rules", "relax")
EXACT = 1e-12


def verifier_with(edits: list[tuple[str, str, str]], folder: Path, name: str):
    """The package `name`, a copy of the verifier in `folder` after `edits` of (file, old text, new text)."""
    for file in FILES:
        text = (SOURCE / f"{file}.py").read_text().replace("from ..files", "from diversed.files")
        for where, old, new in edits:
            if where == file:
                assert text.count(old) == 1, (
                    f"{file}.py has {text.count(old)} places that read {old!r}: update the list"
                )
                text = text.replace(old, new)
        (folder / f"{file}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    importlib.import_module(f"{name}.relax")
    return module


def forget(name: str) -> None:
    """Take the copy out of the interpreter."""
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def first_broken_law(verifier) -> str | None:
    """The first law that does not hold for this copy of the verifier, or None: a digest of the other test files."""
    for law, holds in LAWS.items():
        try:
            if not holds(verifier):
                return law
        except Exception as error:  # a mistake may crash as well as lie
            return f"{law}: {type(error).__name__}: {error}"
    return None


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


_CASES = [
    ("token", "chain", chain(2)),
    ("block", "chain", chain(3)),
    ("gbv", "paths", paths(2, 2)),
    ("gbv", "paths", delayed(1, paths(2, 1))),
    ("specinfer", "paths", paths(2, 2)),
    ("specinfer", "with_replacement", full_tree(3, 1)),
    ("specinfer", "paths", delayed(1, paths(2, 1))),
    ("kseq", "paths", paths(3, 1)),
    ("kseq", "paths", paths(2, 2)),
    ("kseq", "paths", delayed(1, paths(2, 1))),
    ("rrsw", "without_replacement", full_tree(3, 1)),
    ("traversal", "without_replacement", full_tree(2, 2)),
    ("traversal", "paths", paths(2, 2)),
    ("greedy_tree", "greedy", full_tree(3, 1)),
    ("univer", "greedy", full_tree(2, 2)),
    ("univer", "greedy", full_tree(3, 2)),
]


def _lossless(verifier) -> bool:
    for kind in ("random", "tied", "zeros"):
        for name, drafting, parents in _CASES:
            for vocabulary in (2, 3):
                pair = random_pair(vocabulary, topology(parents).depth + 1, kind, _seeded(3))
                if law_error(verifier.METHODS[name].law, pair, drafting, parents) >= EXACT:
                    return False
    return True


def _prunable(verifier) -> bool:
    for name, drafting, parents in _CASES:
        if name in ("token", "block", "gbv"):
            continue
        pair = random_pair(3, topology(parents).depth + 1, "random", _seeded(5))
        every = drafts(pair, drafting, parents)
        gone = torch.zeros_like(every.tree.tokens, dtype=torch.bool)
        for node in range(1, len(parents)):
            gone[:, node] = (every.tree.tokens[:, node] == 1) | gone[:, parents[node]]
        tree = replace(every.tree, target=every.tree.target.masked_fill(gone.unsqueeze(-1), 0))
        found = text_law(every, verifier.METHODS[name].law(tree), pair.target, pair.length)
        if (found - model_law(pair.target, pair.length)).abs().max() >= EXACT:
            return False
    return True


def _relaxed(verifier) -> bool:
    pair = random_pair(3, 3, "random", _seeded(7))
    weight = torch.rand(len(pair.target), generator=_seeded(8), dtype=torch.float64)
    p, q, w = pair.target, pair.draft, weight.unsqueeze(-1)
    kept = torch.minimum(q, p / 0.5)
    missing = (p - q).clamp(min=0)
    lenient = kept + (1 - kept.sum(-1, keepdim=True)) * missing / missing.sum(-1, keepdim=True)
    on = p >= 0.6 * p.amax(-1, keepdim=True)
    cascade = q * on + p * (q * ~on).sum(-1, keepdim=True)
    opt = torch.where(q.amax(-1) < p.amax(-1) - 0.2 * missing.sum(-1), p.T, q.T).T
    wanted = {
        "learned": (1 - w) * p + w * q,
        "lenient:0.5": lenient,
        "cascade-token:0.4": cascade,
        "cascade-opt:0.2": opt,
    }
    for text, rows in wanted.items():
        rows = rows.clone()
        rows[4:] = p[4:]  # contexts of two tokens: leaves, where the draft was not run
        every = drafts(pair, "greedy", full_tree(2, 2))
        share = weight[every.contexts] if text == "learned" else None
        tree = sys.modules[f"{verifier.__name__}.relax"].relax(every.tree, text, share)
        found = text_law(every, verifier.METHODS["univer"].law(tree), rows, 3)
        if (found - model_law(rows, 3)).abs().max() >= EXACT:
            return False
    return True


def _ruled(verifier) -> bool:
    """Rows by the formula in plain Python, and believed rows that decide in place of the sampled ones."""
    rules = sys.modules[f"{verifier.__name__}.rules"].RULES
    relaxing = sys.modules[f"{verifier.__name__}.relax"]
    target, draft = (random_pair(5, 3, "random", _seeded(seed)).target for seed in (13, 14))
    for text in (text for text in ROWS if ";" not in text):
        rule = relaxing.parse(text)
        rows = rules[rule.name].rows(
            target, draft, *rule.parameters, believed_target=target, believed_draft=draft
        )
        pairs = zip(target.tolist(), draft.tolist(), strict=True)
        wanted = [row_by_hand(text, p, q, rule.constant) for p, q in pairs]
        if not (rows - torch.tensor(wanted, dtype=torch.float64)).abs().max() < EXACT:  # nor NaN
            return False
    flat = torch.full_like(target, 0.2)
    for name, numbers in (("cascade-opt", (0.2,)), ("regret", (0.0,)), ("typical", (0.3, 0.9))):
        rows = rules[name].rows(target, draft, *numbers, believed_target=flat, believed_draft=flat)
        if (rows - draft).abs().max() >= EXACT:
            return False
    return True


def _greedy(verifier) -> bool:
    """Tokens at temperature 0 by plain Python, on rows in eighths, most of which have ties."""
    rules = sys.modules[f"{verifier.__name__}.rules"]
    relaxing = sys.modules[f"{verifier.__name__}.relax"]
    drawn = torch.randint(5, (2, 300, 8), generator=_seeded(15))
    target, draft = torch.nn.functional.one_hot(drawn, 5).sum(-2).double() / 8
    for text in (text for text in ROWS if "bias" not in text):
        rule = relaxing.parse(text)
        token = rules.geometric_token if rule.blend == "logits" else rules.RULES[rule.name].token
        pairs = zip(target.tolist(), draft.tolist(), strict=True)
        wanted = [token_by_hand(text, p, q, rule.constant) for p, q in pairs]
        if token(target, draft, *rule.parameters).tolist() != wanted:
            return False
    return True


def _believed(verifier) -> bool:
    """The row of every rule at temperature 0 and with filters, at every context."""
    relaxing = sys.modules[f"{verifier.__name__}.relax"]
    for seed, kind in enumerate(("random", "tied", "zeros")):
        pair = random_pair(3, 3, kind, _seeded(seed))
        weight = torch.rand(len(pair.target), generator=_seeded(8), dtype=torch.float64)
        zero, filtered = greedy_pair(pair), filtered_pair(pair)
        for text in RULES:
            greedily = each_row(partial(greedy_row, text), pair.target, pair.draft, weight)
            sampled = filtered.target, filtered.draft, pair.target, pair.draft, weight
            rows = each_row(partial(sampled_row, text, filtered=True), *sampled)
            for one, wanted, option in ((zero, greedily, "greedy"), (filtered, rows, "filtered")):
                tree = drafts(one, "chain", chain(2), leaf_rows=True)
                believed = relaxing.Believed(*(each[tree.contexts] for each in (pair.target, pair.draft)))
                share = weight[tree.contexts] if text.startswith("learned") else None
                found = relaxing.relax(tree.tree, text, share, believed=believed, **{option: True}).target
                back = option == "filtered" and found[tree.tree.target == 0].any()
                if back or (found - wanted[tree.contexts]).abs().max() >= EXACT:
                    return False
    return True


def _budgeted(verifier) -> bool:
    relaxing = sys.modules[f"{verifier.__name__}.relax"]
    pair = random_pair(3, 5, "random", _seeded(9))
    tree = drafts(pair, "chain", chain(4), leaf_rows=True).tree
    for budget, spent in ((0.0, 0.0), (0.3, 0.0), (0.3, 0.25)):
        before = torch.full((len(tree.tokens),), spent, dtype=torch.float64)
        relaxed = relaxing.relax(tree, f"ensemble:0.9;budget={budget}", spent=before)
        cost = 0.5 * (relaxed.target - tree.target).abs().sum(-1)
        if not torch.allclose(relaxing.substitutions(tree, relaxed), cost, rtol=0, atol=EXACT):
            return False
        if (cost.sum(-1) + before).max() > budget + EXACT or (cost.sum() == 0) != (budget == 0):
            return False
    return True


def _longer(verifier) -> bool:
    """Lengths that a lossless but wasteful mistake would lose: optima and closed forms."""
    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    cases = [("block", "chain", chain(1), 1.0), ("gbv", "paths", paths(2, 1), 0.75)]
    for name, drafting, parents, wanted in cases:
        every = drafts(Pair(half, half, 2), drafting, parents)
        law = verifier.METHODS[name].law(every.tree)
        found = every.probability @ verifier.expected_length(law, parents)
        if abs(found.item() - wanted) >= EXACT:
            return False
    pair = random_pair(3, 4, "random", _seeded(11))
    every = drafts(pair, "chain", chain(3))
    lengths = [
        (every.probability @ verifier.expected_length(verifier.METHODS[name].law(every.tree), chain(3))).item()
        for name in ("token", "block")
    ]
    granted, drawn, expected = {0: 1.0}, {0: 1.0}, 0.0
    for context in range(1, 40):
        above, token = (context - 1) // 3, (context - 1) % 3
        drawn[context] = drawn[above] * pair.draft[above, token].item()
        granted[context] = min(drawn[context], granted[above] * pair.target[above, token].item())
        expected += granted[context]
    return abs(lengths[1] - expected) < EXACT and lengths[0] < lengths[1]


def _single(verifier) -> bool:
    draft = torch.tensor([[[1 - 3e-8, 2e-8, 1e-8], [0, 0, 0], [0, 0, 0]]])
    target = torch.tensor([[[0.2, 0.5, 0.3]] * 3])
    tree = verifier.DraftTree(torch.tensor([[0, 0, 1]]), (-1, 0, 0), draft, target)
    return abs(verifier.METHODS["greedy_tree"].law(tree).stop[0, 2].item() - 0.75) < 1e-5


LAWS = {
    "the text has the target's law": _lossless,
    "drawn children may be pruned": _prunable,
    "the text has the relaxed target's law": _relaxed,
    "rules give the rows of their formulas": _ruled,
    "rules choose the tokens of their greedy forms": _greedy,
    "rules judge by what is believed, and relax what is sampled": _believed,
    "no path passes the budget, and zero is exact": _budgeted,
    "expected lengths are the known ones": _longer,
    "a sliver of the draft keeps its precision": _single,
}
