"""Relaxed targets: (target, draft, context) -> a new target row; every method is then exact for
that row.

    none              the target's own row
    ensemble:w        (1-w) target + w draft, and the other rules without training: see `rules`
    learned           the same with a weight per node, computed by a head (DIVERSED, arXiv
                      2604.07622); also written as a bundle folder, or as package.module:NAME

Three kinds of rows. What the models *believe* is softmax(logits), whatever the temperature and the
filters: weights and every rule's criterion (the `if` of a cascade, the accepted tokens of
cascade-token and typical) look at that. The rows *as sampled* are tempered and filtered as the user
asked; they are blended or chosen, and give the *relaxed* row. At temperature 1 without filters the
first two are the same. A token that the target's filter removed never comes back: the draft's row
is restricted to the target's tokens and renormalised before it is used, and where nothing is left
of it the target's row stays.

At temperature 0 rows as sampled are one-hot, and so is the relaxed row: at the token that the rule
chooses from the two believed rows (`Rule.token`), the lowest id of a tie. For a blend that is the
most likely token of the blend, as in the paper and in transformers. `coin` alone stays a blend of
two one-hot rows. So methods see point masses, and a budget counts the mismatches that are taken.

`;blend=choice` after learned takes the draft's row if the weight is above 1/2, else the target's,
at every temperature; a bias moves the threshold. `;blend=logits` after ensemble or learned blends
logarithms, target^(1-w) draft^w normalised, as the paper's code does. A bundle's card says which of
probabilities and logits its head was trained for, so a bundle needs no `;blend=` but for choice.
After any of them `;bias=0.5` (added to the logit of the weight, where the weight is computed: the
head's logit, or the constant of ensemble and coin; rules without a weight have none to shift) and
`;budget=3` (expected substitutions per text).

The weight of a node depends on that node's context only, never on which siblings were drawn. Where
the draft was not run (an all-zero row: a leaf) the target's row stays; a caller that runs the draft
on leaves relaxes them by giving their rows.

Substitutions and the budget. Couple every committed token maximally with the target's own choice in
the same context: they differ with probability TV(target row, relaxed row), which for a blend is w
TV(target, draft). The sum over the committed steps is the expected number of *substitutions* in the
text, and it bounds the text's distance:

    TV(law of the text, law of the target's text) <= E[sum over steps of TV(target row, relaxed
    row)].

Proof. Draw both texts step by step; while they agree, the next pair of tokens comes from the
maximal coupling of the relaxed row and the target's row at their common context, so they part at
that step with probability TV of the two rows there. P(texts differ) is at most the expected sum of
these over the steps, taken along the relaxed text. The relaxed row may depend on the whole past,
block boundaries included, because the bound conditions on it; so it holds for a weight that is set
to 0 by a budget, and a row that keeps the target's costs 0. With `budget=b`, every row from the
root of a block to the stopping node is charged, and a node whose charge would make the sum along
its path pass b keeps the target's row. The sum is then at most b on every text, hence TV <= b, and
so is the expected number of substitutions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..files import close_to
from .law import DraftTree, unit
from .rules import RULES, ensemble_token, geometric_rows, geometric_token
from .tree import on_device, topology

BLENDS = ("probabilities", "logits", "choice")
WEIGHTED = ("ensemble", "coin", "learned")  # whose rows are a blend by a weight a node


@dataclass(frozen=True)
class Relaxation:
    """A parsed relaxation string; `str` writes it again, and `parse` reads that as the same one.

    name:       one of RULES or "learned".
    parameters: the numbers after the colon.
    bias:       added to the logit of the weight where it is computed, or None.
    budget:     largest sum of substitutions along a text, or None.
    source:     for "learned": a bundle folder or `package.module:NAME`, else "".
    blend:      of ensemble and learned: "probabilities" or "logits", of learned also "choice"; ""
                if the string names a bundle and leaves it to the card.
    """

    name: str
    parameters: tuple[float, ...] = ()
    bias: float | None = None
    budget: float | None = None
    source: str = ""
    blend: str = "probabilities"

    @classmethod
    def of_bundle(cls, folder: str | Path, bias: float | None = None) -> Relaxation:
        """The relaxation by the head of a bundle, which need not be written yet."""
        return cls("learned", bias=bias, source=str(folder), blend="")

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.options.items()]
        return ";".join([self.base, *options])

    @property
    def base(self) -> str:
        """The part before the first `;`: the rule and its numbers, the bundle, or the code."""
        if self.parameters:
            return f"{self.name}:{','.join(map(_written, self.parameters))}"
        return self.source or self.name

    @property
    def options(self) -> dict[str, str]:
        """What stands after the first `;`, by name."""
        found = {}
        if self.blend and self.blend != ("" if self.folder else "probabilities"):
            found["blend"] = self.blend
        for name in ("bias", "budget"):
            if (number := getattr(self, name)) is not None:
                found[name] = _written(number)
        return found

    def with_bias(self, bias: float | None) -> Relaxation:
        """The same relaxation with this bias in place of its own."""
        return replace(self, bias=bias)

    @property
    def is_code(self) -> bool:
        """Whether a function that the user names computes the weight."""
        return bool(_CODE.fullmatch(self.source))

    @property
    def folder(self) -> Path | None:
        """The folder of the bundle whose head computes the weight, None if there is no bundle."""
        return Path(self.source) if self.source and not self.is_code else None

    @property
    def is_blend(self) -> bool:
        """Whether the relaxed row is a blend of both rows, so that the draft has a share in it."""
        return self.name in ("none", *WEIGHTED)

    @property
    def kind(self) -> str:
        """exact, static (one weight everywhere), learned (a bundle), code or other."""
        if self.is_code:
            return "code"
        return {"none": "exact", "ensemble": "static", "learned": "learned"}.get(self.name, "other")

    @property
    def label(self) -> str:
        """What tells it from others of its kind, in words: `0.3, bias 1`."""
        words = {"exact": "", "static": ",".join(map(_written, self.parameters)), "learned": ""}
        words["code"] = self.source.rpartition(":")[2].replace("_", " ").lower()
        words["other"] = self.base.replace(":", " ")
        options = [f"{key} {value}" for key, value in self.options.items()]
        options = [option.replace("-", "\N{MINUS SIGN}") for option in options]
        return ", ".join(filter(None, [words[self.kind], *options]))

    @property
    def constant(self) -> float | None:
        """The draft's share where it is the same at every node, its logit shifted by the bias; None
        elsewhere.
        """
        if self.name == "none":
            return 0.0
        if self.name not in ("ensemble", "coin"):
            return None
        if not self.bias:
            return float(self.parameters[0])
        weight = torch.tensor(self.parameters[0], dtype=torch.float64)
        return float(torch.sigmoid(torch.logit(weight) + self.bias))


@dataclass(frozen=True)
class Believed:
    """What the models believe at the nodes of a tree: softmax(logits).

    target, draft: [B, N, V]; rows of zeros where a model was not run.
    """

    target: Tensor
    draft: Tensor


def relax(
    tree: DraftTree,
    relaxation: str | Relaxation,
    weight: Tensor | None = None,
    *,
    spent: Tensor | None = None,
    believed: Believed | None = None,
    greedy: bool = False,
    filtered: bool = False,
    temperature: float = 1.0,
) -> DraftTree:
    """The tree with relaxed target rows.

    weight: [B, N] the draft's share at each node, bias included; needed for "learned" and only
        there.
    spent:  [B] substitutions already charged to each request, for the budget; none if not given.
    believed: what the models believe; by default the tree's rows, which is so at temperature 1
        without filters.
    greedy: the tree's rows are one-hot, at the most likely token of each model (temperature 0).
    filtered: a filter removed tokens from the tree's rows.
    temperature: the tree's rows are softmax(logits / temperature). A blend of logits without
        filters reads it, because such rows no longer hold their small logits.
    """
    rule = parse(relaxation) if isinstance(relaxation, str) else relaxation
    if rule.name != "learned":
        parse(str(rule))  # one that was made by hand may hold any numbers
    if weight is not None and not ((weight >= 0) & (weight <= 1)).all():
        raise ValueError("`weight` must lie in [0, 1], got others; it is the draft's share")
    if spent is not None and not ((spent >= 0) & (spent < math.inf)).all():
        raise ValueError("`spent` must be at least 0 and finite, got others")
    return unchecked_relax(tree, rule, weight, spent, believed, greedy, filtered, temperature)


def unchecked_relax(
    tree: DraftTree,
    rule: Relaxation,
    weight: Tensor | None = None,
    spent: Tensor | None = None,
    believed: Believed | None = None,
    greedy: bool = False,
    filtered: bool = False,
    temperature: float = 1.0,
) -> DraftTree:
    """`relax` for numbers that are known to be sound; it waits for no device."""
    _check_weight(tree, rule, weight)
    if rule.name == "none":
        return tree
    believed = believed or Believed(tree.target, tree.draft)
    draft = on_target(tree.target, tree.draft) if filtered else tree.draft
    drafted = draft.amax(-1) > 0
    if rule.name not in WEIGHTED:
        rows = _ruled(rule, tree.target, draft, believed, greedy)
        return _within_budget(tree, rows, drafted, rule, spent)
    if weight is None:
        share = torch.full_like(tree.target[..., 0], rule.constant)
    else:
        share = weight.to(tree.target.dtype)
    if rule.blend == "choice":
        share = (share > 0.5).to(share.dtype)
    share = torch.where(drafted, share, 0)
    if greedy and rule.name != "coin" and rule.blend != "choice":
        token = geometric_token if rule.blend == "logits" else ensemble_token
        chosen = token(believed.target, believed.draft, share.unsqueeze(-1))
        rows = _one_hot(chosen, tree.target)
        return _within_budget(tree, rows, share > 0, rule, spent)
    if rule.blend == "logits":
        weights = share.unsqueeze(-1)
        if filtered:
            rows = geometric_rows(tree.target, draft, weights)
            rows = unit(rows * (tree.target > 0))
        else:
            rows = geometric_rows(believed.target, believed.draft, weights, temperature)
            rows = rows.to(tree.target.dtype)
        return _within_budget(tree, rows, share > 0, rule, spent)
    if rule.budget is not None:
        cost = share.double() * _distance(tree.target, draft)
        share = torch.where(_affordable(cost, tree.parents, rule.budget, spent), share, 0)
    return replace(tree, target=torch.lerp(tree.target, draft, share.unsqueeze(-1)))


def _check_weight(tree: DraftTree, rule: Relaxation, weight: Tensor | None) -> None:
    if (rule.name == "learned") != (weight is not None):
        wanted = (
            "`weight` [B, N] from its head"
            if rule.name == "learned"
            else "no `weight`, it computes its own rows"
        )
        raise ValueError(
            f"relaxation {rule.name} needs {wanted}; got {'none' if weight is None else 'one'}"
        )
    if weight is not None and weight.shape != tree.tokens.shape:
        raise ValueError(
            f"`weight` must be [B, N] like `tokens` {list(tree.tokens.shape)}, got"
            f" {list(weight.shape)}; one share a node"
        )


def _ruled(
    rule: Relaxation, target: Tensor, draft: Tensor, believed: Believed, greedy: bool
) -> Tensor:
    """The row of a rule without a weight, [B, N, V] in the dtype of `target`."""
    wide = torch.promote_types(target.dtype, torch.float32)
    judged = believed.target.to(wide), believed.draft.to(wide)
    if greedy:
        return _one_hot(RULES[rule.name].token(*judged, *rule.parameters), target)
    rows = RULES[rule.name].rows(
        target.to(wide),
        draft.to(wide),
        *rule.parameters,
        believed_target=judged[0],
        believed_draft=judged[1],
    )
    return rows.to(target.dtype)


def on_target(target: Tensor, draft: Tensor) -> Tensor:
    """The draft's rows [..., V] on the tokens that the target can say, renormalised; zero where
    they have no mass there.
    """
    return unit(draft * (target > 0))


def _one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, tokens.unsqueeze(-1), 1)


def _within_budget(
    tree: DraftTree, rows: Tensor, keep: Tensor, rule: Relaxation, spent: Tensor | None
) -> DraftTree:
    """The tree with `rows` [B, N, V] as target where `keep` [B, N] and the budget allow it."""
    if rule.budget is not None:
        cost = torch.where(keep, _distance(tree.target, rows), 0)
        keep = keep & _affordable(cost, tree.parents, rule.budget, spent)
    return replace(tree, target=torch.where(keep.unsqueeze(-1), rows, tree.target))


def substitutions(tree: DraftTree, relaxed: DraftTree) -> Tensor:
    """[B, N] expected substitutions of the token that follows each node: TV(target row, relaxed
    row).
    """
    if relaxed.target is tree.target:  # not relaxed: no pass over the rows is needed to know it
        return torch.zeros_like(tree.tokens, dtype=torch.float64)
    return _distance(tree.target, relaxed.target)


@lru_cache(maxsize=256)
def parse(text: str, recorded: bool = False) -> Relaxation:
    """The relaxation a string names; ValueError with one sentence for anything else.

    recorded: the string is that of a finished run, whose bundle need not exist any more: a name
        that is no rule is the folder of a bundle.
    """
    base, *options = (part.strip() for part in str(text).split(";"))
    chosen: dict[str, float | str] = {}
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        if key not in ("bias", "budget", "blend") or not equals or key in chosen:
            raise ValueError(
                f"relaxation {text!r}: after `;` comes bias=NUMBER, budget=NUMBER or blend=NAME,"
                f" once each; got {option!r}"
            )
        chosen[key] = value if key == "blend" else _number(text, key, value)
    if chosen.get("blend", "logits") not in BLENDS:
        raise ValueError(
            f"relaxation {text!r}: blend must be {', '.join(BLENDS[:-1])} or {BLENDS[-1]}, got"
            f" {chosen['blend']}"
        )
    if chosen.get("budget", 0) < 0:
        raise ValueError(
            f"relaxation {text!r}: budget must be at least 0 substitutions, got"
            f" {chosen['budget']:g}"
        )
    rule = replace(_base(text, base, recorded), **chosen)
    if rule.blend == "logits" and rule.name not in ("ensemble", "learned"):
        raise ValueError(
            f"relaxation {text!r}: {rule.name} blends no logits; leave out blend=logits"
        )
    if rule.blend == "choice" and rule.name != "learned":
        raise ValueError(
            f"relaxation {text!r}: {rule.name} has no weight that differs from node to node, so"
            " nothing to choose by; leave out blend=choice"
        )
    if rule.bias is not None and rule.name not in WEIGHTED and not recorded:
        raise ValueError(
            f"relaxation {text!r}: {rule.name} has no weight for a bias to shift; leave out bias"
        )
    return rule


_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _base(text: str, base: str, recorded: bool) -> Relaxation:
    """The part before the first `;`."""
    name, colon, rest = base.partition(":")
    if name in RULES:
        values = [part.strip() for part in rest.split(",")] if colon else []
        ranges, optional = RULES[name].ranges, RULES[name].optional
        if not len(ranges) - optional <= len(values) <= len(ranges):
            labels = [label.upper() for label, *_ in ranges]
            shape = name + (":" if labels else "") + ",".join(labels[: len(labels) - optional])
            shape += "".join(f"[,{label}]" for label in labels[len(labels) - optional :])
            raise ValueError(
                f"relaxation {text!r} must be written {shape}, got {len(values)} numbers"
            )
        return Relaxation(
            name,
            tuple(
                _within(text, value, *limits) for value, limits in zip(values, ranges, strict=False)
            ),
        )
    if base == "learned":
        return Relaxation("learned")
    if "/" in base or "\\" in base:
        return Relaxation.of_bundle(base)
    if base and Path(base).is_dir():  # as a path it cannot be taken for code
        return Relaxation.of_bundle(f"./{base}" if ":" in base else base)
    if _CODE.fullmatch(base):
        return Relaxation("learned", source=base)
    if base and recorded:
        return Relaxation.of_bundle(base)
    known = [*RULES, "learned"]
    others = f"; known are {', '.join(known)}, a bundle folder and package.module:NAME"
    raise ValueError(f"unknown relaxation {text!r}{close_to(name, known) or others}")


def _within(text: str, value: str, label: str, low: float, high: float, closed: bool) -> float:
    number = _number(text, label, value)
    if not (low <= number <= high) or (number == low and not closed):
        end = "inf)" if high == math.inf else f"{high:g}]"
        raise ValueError(
            f"relaxation {text!r}: {label} must lie in {'[' if closed else '('}{low:g}, {end}, got"
            f" {value}"
        )
    return number


def _number(text: str, label: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"relaxation {text!r}: {label} must be a finite number, got {value!r}")
    return number


def _written(number: float) -> str:
    """A number as short as it can be read again."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _affordable(
    cost: Tensor, parents: tuple[int, ...], budget: float, spent: Tensor | None
) -> Tensor:
    """[B, N] bool: True where a node costs something and the sum along its path, itself included,
    stays in the budget.

    A node that is denied costs nothing, so its descendants may still be relaxed. A node that costs
    nothing keeps the target's row bit for bit; so a budget of 0 gives the very text of exact
    decoding.
    """
    start = torch.zeros_like(cost[:, 0]) if spent is None else spent.to(cost)
    used = start.unsqueeze(-1).expand_as(cost).clone()
    granted = torch.zeros_like(cost, dtype=torch.bool)
    for nodes, above in _levels(parents, cost.device):
        wanted = used[:, above] + cost[:, nodes]
        granted[:, nodes] = (cost[:, nodes] > 0) & (wanted <= budget)
        used[:, nodes] = torch.where(granted[:, nodes], wanted, used[:, above])
    return granted


def _distance(first: Tensor, second: Tensor) -> Tensor:
    """[B, N] total variation as float64, because it is added up over a whole text."""
    return 0.5 * (first - second).abs_().sum(-1).double()


def _levels(parents: tuple[int, ...], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(nodes, their parents) of every level; the root is its own parent."""
    above = [[max(parents[node], 0) for node in nodes] for nodes in topology(parents).levels]
    return [
        (on_device(nodes, device), on_device(tuple(parents), device))
        for nodes, parents in zip(topology(parents).levels, above, strict=True)
    ]
