"""A relaxation ready for use: the rule, and what computes its weights.

    relaxer = load_relaxer("runs/quickstart/bundle;bias=1", pair, sampling)
    relaxed = relaxer(tree, (draft_hidden, target_hidden), believed=believed)   # tree, weight, cost

The weight of a learned rule comes from a bundle's head or from a function that the user names. It
is called with what both models believe at a context, rows [..., V] without temperature and filter,
and, if it needs them, with their last
hidden states [..., H_draft + H_target], draft first. The result [...] is the draft's share, in [0,
1]. It sees one context at a time, so the weight of a node never depends on which siblings were
drawn.

Nothing here waits for the device, but the check of a function that the user names (`checked`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..files import code_sha256
from ..verifier.head import WeightHead
from ..verifier.law import DraftTree
from ..verifier.methods import is_lossy
from ..verifier.relax import Believed, Relaxation, parse, substitutions, unchecked_relax
from ..verifier.token_features import TokenTable
from .bundle import Bundle, head_sha256, load_bundle
from .forward import Pair
from .sampling import Sampling, beliefs
from .vocabulary import token_table

Hidden = tuple[Tensor | None, Tensor | None]  # of draft and target, [..., H_draft], [..., H_target]
NO_HIDDEN: Hidden = (None, None)


@dataclass(frozen=True)
class Relaxed:
    """What became of a tree.

    tree:   the tree, its target rows relaxed; the very same object if the rule is `none`.
    weight: [B, N] float32, the draft's share at each node: 0 where the budget left the target's
        row, NaN where the draft was not run, and everywhere if the rule is no blend. At temperature
        0 it is the share in the blend whose most likely token is taken, see `Relaxer.mixes`.
    cost:   [B, N] float64, expected substitutions of the token that follows each node.
    """

    tree: DraftTree
    weight: Tensor
    cost: Tensor


@dataclass(frozen=True)
class Relaxer:
    """Relaxes trees by one rule.

    rule:  the relaxation, its blend known.
    weigh: of a learned rule: (draft's rows, target's rows, hidden states or None) -> the draft's
        share; if `needs_tokens` with one argument more, the tokens before the contexts.
    needs_hidden: whether `weigh` reads hidden states.
    needs_tokens: whether it reads the tokens before.
    checked: whether the host looks at what `weigh` returns; a captured step cannot hold it then.
    sampling: how the rows of the trees came from logits.
    """

    rule: Relaxation
    weigh: Callable[..., Tensor] | None = None
    needs_hidden: bool = False
    checked: bool = False
    sampling: Sampling = Sampling()
    needs_tokens: bool = False

    def __call__(
        self,
        tree: DraftTree,
        hidden: Hidden = NO_HIDDEN,
        spent: Tensor | None = None,
        believed: Believed | None = None,
    ) -> Relaxed:
        """hidden: last hidden states [B, N, H] of draft and target; read only if `needs_hidden`.
        spent: [B] substitutions already charged to each request, for a budget.
        believed: what the models believe; needed if `believes`.
        """
        weight = self.weight(tree, hidden, believed)
        relaxed = self._relax(tree, weight, spent, believed)
        cost = substitutions(tree, relaxed)
        if self.rule.budget is not None:
            weight = torch.where(cost > 0, weight, 0)
        weight = torch.where(tree.draft.sum(-1) > 0, weight.float(), torch.nan)
        return Relaxed(relaxed, weight, cost)

    def tree(
        self, tree: DraftTree, hidden: Hidden = NO_HIDDEN, believed: Believed | None = None
    ) -> DraftTree:
        """The relaxed tree alone, without a pass over the rows for what it costs."""
        return self._relax(tree, self.weight(tree, hidden, believed), None, believed)

    def _relax(
        self, tree: DraftTree, weight: Tensor, spent: Tensor | None, believed: Believed | None
    ) -> DraftTree:
        return unchecked_relax(
            tree,
            self.rule,
            weight if self.weigh else None,
            spent,
            believed if self.believes else None,
            self.sampling.greedy,
            self.sampling.filters,
            self.sampling.temperature or 1.0,
        )

    def weight(
        self, tree: DraftTree, hidden: Hidden = NO_HIDDEN, believed: Believed | None = None
    ) -> Tensor:
        """[B, N] the draft's share at each node before any budget, which a kernel takes; NaN if the
        rule is no blend. Only a learned rule reads rows.
        """
        if self.weigh is None:
            constant = torch.nan if self.constant is None else self.constant
            return torch.full_like(tree.tokens, constant, dtype=torch.float32)
        both = None
        if self.needs_hidden:
            draft, target = hidden
            both = torch.cat([draft.to(target.device), target], -1)
        rows = believed if self.believes else tree
        before = (tree.tokens,) if self.needs_tokens else ()
        weight = self.weigh(rows.draft, rows.target, both, *before)
        return (weight > 0.5).to(weight.dtype) if self.rule.blend == "choice" else weight

    @property
    def believes(self) -> bool:
        """Whether it reads what the models believe, and that is not the tree's rows."""
        if self.sampling.neutral:
            return False
        judges = self.constant is None or self.rule.name == "ensemble" and self.sampling.greedy
        return judges or self.rule.blend == "logits" and not self.sampling.filters

    def beliefs(self, draft: Tensor, target: Tensor) -> Believed | None:
        """What the models with these logits [B, N, V] believe; None unless it is read."""
        return Believed(beliefs(target), beliefs(draft)) if self.believes else None

    @property
    def mixes(self) -> bool:
        """Whether the weight says what the relaxed rows are, blends of the tree's rows: not at
        temperature 0 for a blend of what the models believe.
        """
        rule = self.rule
        aside = rule.name in ("none", "coin") or rule.blend == "choice"
        return rule.is_blend and (aside or not self.sampling.greedy)

    @property
    def constant(self) -> float | None:
        """The draft's share if it is the same at every node, else None."""
        return self.rule.constant

    @property
    def fusible(self) -> bool:
        """Whether a method's kernel can relax while it verifies, given `weight`.

        That is so for a blend of probabilities without a budget, of rows as sampled: a budget
        changes weights from node to node, other rules are not made of a weight, a filter of the
        target also falls on the draft's row, and at temperature 0 a blend is not of one-hot rows.
        """
        rule, plain = self.rule, not (self.sampling.greedy or self.sampling.filters)
        blend = rule.is_blend and rule.blend != "logits" and rule.budget is None
        return blend and (plain or rule.name == "none")


def load_relaxer(relaxation: str | Relaxation, pair: Pair, sampling: Sampling) -> Relaxer:
    """The relaxation with the head or the function that it names, checked for this pair."""
    rule = parse(relaxation) if isinstance(relaxation, str) else relaxation
    if rule.name != "learned":
        return Relaxer(rule, sampling=sampling)
    if rule.is_code:
        if rule.bias:
            raise ValueError(
                f"`bias` moves the logit of a head; the weight function {rule.source} has none,"
                " leave it out"
            )
        made = _made(rule.source, pair.tokenizer)
        return Relaxer(rule, _checked(made, rule.source), checked=True, sampling=sampling)
    if not rule.source:
        raise ValueError(
            "`learned` needs to know which head: give the bundle's folder, or package.module:NAME"
        )
    bundle = load_bundle(rule.folder, pair.target, pair.draft, sampling)
    return bundle_relaxer(rule, bundle, pair.target.device, sampling, pair.tokenizer)


def bundle_relaxer(
    rule: Relaxation,
    bundle: Bundle,
    device: torch.device,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    tokenizer=None,
) -> Relaxer:
    """The relaxer of a bundle's head; a head that reads tokens needs the pair's tokenizer."""
    head, table = bundle.head.to(device), None
    if head.needs_tokens:
        table = token_table(tokenizer, bundle.card.vocab)
        if bundle.card.token_table not in ("", table.sha256):
            raise ValueError(
                f"bundle {bundle.folder} was trained with another tokenizer: the classes of its"
                " tokens are others; use the pair that its card names"
            )
        table = table.to(device)
    return head_relaxer(settled(rule, bundle), head, sampling, table)


def head_relaxer(
    rule: Relaxation, head: WeightHead, sampling: Sampling, table: TokenTable | None
) -> Relaxer:
    """The relaxer of a head, with the classes of tokens if it reads them; both are on the device of
    the rows.
    """
    bias = rule.bias or 0.0

    def weigh(
        draft: Tensor, target: Tensor, hidden: Tensor | None, before: Tensor | None = None
    ) -> Tensor:
        return head.weight(draft, target, hidden, bias, before, table)

    return Relaxer(
        rule, weigh, head.needs_hidden, sampling=sampling, needs_tokens=head.needs_tokens
    )


def settled(rule: Relaxation, bundle: Bundle) -> Relaxation:
    """The relaxation with the blend of the bundle's card, which the string may leave out; `choice`
    is for every head.
    """
    blend = bundle.card.head.blend
    if rule.blend == "choice":
        return rule
    if rule.blend not in ("", blend):
        raise ValueError(
            f"bundle {rule.source} was trained for the blend of {blend}, got {str(rule)!r}; leave"
            " `blend` out"
        )
    return replace(rule, blend=blend)


def contents(rules: Iterable[Relaxation], methods: Iterable[str] = ()) -> dict[str, str | None]:
    """What names stand for, for the settings of a folder: of a bundle the checksum of its head and
    the blend, of code the checksum of its file.
    """
    rules = list(rules)
    found = {r.source: f"{head_sha256(r.folder)} {r.blend}" for r in rules if r.folder}
    code = [rule.source for rule in rules if rule.is_code]
    code += [method for method in methods if ":" in method and not is_lossy(method)]
    modules = {source: sys.modules[source.partition(":")[0]] for source in code}
    return found | {source: code_sha256(module) for source, module in modules.items()}


def _checked(function: Callable, source: str) -> Callable:
    """The user's function, its answers checked: a law is only a law for weights in [0, 1]."""

    def weigh(draft: Tensor, target: Tensor, hidden: Tensor | None) -> Tensor:
        found = function(draft, target, hidden)
        shape = draft.shape[:-1]
        if (
            not isinstance(found, Tensor)
            or found.shape != shape
            or not bool(((found >= 0) & (found <= 1)).all())
        ):
            got = found
            if isinstance(found, Tensor):
                got = f"{list(found.shape)}, {found.min():.3g} to {found.max():.3g}"
            raise ValueError(
                f"the weight function {source} must return weights {list(shape)} in [0, 1], got"
                f" {got}"
            )
        return found

    return weigh


def _made(source: str, tokenizer) -> Callable:
    """The function that the factory named by `source` makes for this tokenizer."""
    module, name = source.split(":", 1)
    try:
        function = getattr(importlib.import_module(module), name)(tokenizer)
        if not callable(function):
            raise TypeError(f"it returned a {type(function).__name__}")
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"no weight function at {source!r}: {error}; give package.module:NAME of a factory that"
            " takes the tokenizer and returns weigh(draft, target, hidden)"
        ) from error
    return function
