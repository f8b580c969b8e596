"""The shared words: a draft tree, the law a verification method states about it, and one draw from
that law.

A verification method is one pure function `law(tree) -> Law`. A chain, K paths and a tree are the
same type, `DraftTree`; one sampler, `draw`, serves every method, and its random numbers are an
argument.

Axis letters, here and in every docstring of the project: B requests, N nodes of a draft tree, V
vocabulary, L draft length (depth), K paths, M children per node, T text positions, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .tree import in_order, on_device, topology


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens and the rows of both models at every node.

    tokens:  [B, N] int64; node 0 is the root, the last committed token; -1 where a row lacks that
             child.
    parents: N ints shared by the batch; parents[0] == -1 and parents[i] < i.
    draft:   [B, N, V] probabilities of the draft model at each node; all-zero rows where the draft
             was not run.
    target:  [B, N, V] probabilities of the target model at each node; all-zero rows where the
             target was not run.
    pruned:  [B, N] bool or None; nodes that were drafted but whose target row was never computed.

    K paths are K chains that hang from one node: equal prefixes are not merged here, laws merge
    them. A pruned node keeps its token as a mark, because the draw happened and the law must know
    its outcome: its mass is emitted as an bonus token at its parent. To mark it absent (-1) instead
    would bias the text. Which nodes go may depend on any drawn token except those below the node
    itself. `validate` sets `pruned` for drafted nodes whose target row is all zeros.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    draft: Tensor
    target: Tensor
    pruned: Tensor | None = None


@dataclass(frozen=True)
class Law:
    """What a verification method says about one tree.

    stop: [B, N] probability that the accepted path ends at each node; a row sums to 1.
    next: [B, N, V] distribution of the one bonus token, given the stop.
    """

    stop: Tensor
    next: Tensor


@dataclass(frozen=True)
class Verdict:
    """One draw from a law.

    node:  [B] int64, the node where the accepted path ends.
    token: [B] int64, the bonus token that follows it.
    """

    node: Tensor
    token: Tensor


def draw(law: Law, uniform: Tensor) -> Verdict:
    """The verdict that `uniform` [B, 2] in [0, 1) selects: first the stopping node, then the extra
    token.
    """
    if tuple(uniform.shape) != (len(law.stop), 2) or not uniform.is_floating_point():
        raise ValueError(
            f"`uniform` must be [B, 2] floats, B = {len(law.stop)}, got {list(uniform.shape)}"
            f" {uniform.dtype}; two random numbers a request"
        )
    if not ((uniform >= 0) & (uniform < 1)).all():
        raise ValueError("`uniform` must lie in [0, 1), got others; torch.rand gives such numbers")
    return unchecked_draw(law, uniform)


def unchecked_draw(law: Law, uniform: Tensor) -> Verdict:
    """`draw` for numbers that are known to be sound; it waits for no device."""
    node = inverse_cdf(law.stop, uniform[:, :1]).squeeze(-1)
    rows = law.next[torch.arange(len(node), device=node.device), node]
    return Verdict(node=node, token=inverse_cdf(rows, uniform[:, 1:]).squeeze(-1))


def expected_length(law: Law, parents: tuple[int, ...]) -> Tensor:
    """[B] expected number of accepted tokens, without the bonus token."""
    return law.stop @ on_device(topology(parents).depths, law.stop.device).to(law.stop.dtype)


def validate(tree: DraftTree) -> DraftTree:
    """The tree itself if its shapes and rows are sound, else ValueError; drafted nodes without a
    target row are pruned.

    Reads every row twice (its sum, its minimum) and waits for the device once.
    """
    _validate_shapes(tree)
    drafted = tree.tokens[:, 1:]
    empty, flags = {}, [((drafted >= -1) & (drafted < tree.target.shape[2])).all()]
    for name in ("target", "draft"):
        rows = getattr(tree, name)
        half = rows.dtype.itemsize == 2
        total = rows.sum(-1, dtype=torch.float32 if half else rows.dtype)
        empty[name] = total == 0
        # an entry of a bfloat16 row is off by at most 2^-9 of itself, and so is the sum
        unit = (total - 1).abs() <= (2e-2 if half else 1e-3)
        flags += [total.isfinite().all(), (rows.amin(-1) >= 0).all(), (unit | empty[name]).all()]
    pruned = empty["target"] & (tree.tokens >= 0)
    flags += [~empty["target"][:, 0].any(), ~pruned.any()]
    *sound, whole = torch.stack(flags).tolist()
    for good, sentence in zip(sound, _SENTENCES, strict=True):
        if not good:
            raise ValueError(sentence)
    if whole:
        return tree
    return replace(tree, pruned=pruned if tree.pruned is None else pruned | tree.pruned)


_SENTENCES = [
    (
        "`tokens` must lie in 0..V-1, or be -1 for an absent child, got others below the root;"
        " check the vocabulary"
    ),
    "`target` must hold probabilities, got NaN or infinite entries; look at the model's logits",
    "`target` must hold probabilities, got negative entries; if these are logits, apply a softmax",
    "`target` must hold rows that sum to 1 or are all zero, got other sums; renormalise the rows",
    "`draft` must hold probabilities, got NaN or infinite entries; look at the model's logits",
    "`draft` must hold probabilities, got negative entries; if these are logits, apply a softmax",
    "`draft` must hold rows that sum to 1 or are all zero, got other sums; renormalise the rows",
    "`target` must have a row at the root, got zeros; the target model runs on the root always",
]


def inverse_cdf(rows: Tensor, uniform: Tensor) -> Tensor:
    """Indices [..., M] that `uniform` [..., M] in [0, 1) selects from `rows` [..., X], which need
    not be normalised.

    The first index whose cumulative sum exceeds uniform times the total; never one of probability
    zero, because the comparison is strict and the threshold stays below the total however it
    rounds. Sums are float64: a float32 sum over a vocabulary of 100,000 is off by more than its
    rarest tokens' probability.
    """
    cumulative = rows.double().cumsum(-1)
    total = cumulative[..., -1:]
    threshold = torch.minimum(
        uniform.double() * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, threshold.contiguous(), right=True).clamp_max(
        rows.shape[-1] - 1
    )


def unit(rows: Tensor) -> Tensor:
    """Rows [..., V] scaled to sum to 1; rows of zeros stay."""
    total = rows.sum(-1, keepdim=True)
    return rows / torch.where(total > 0, total, 1)


def _validate_shapes(tree: DraftTree) -> None:
    shape = tuple(tree.target.shape)
    if len(shape) != 3 or 0 in shape[1:]:
        raise ValueError(
            f"`target` must be [B, N, V], got {list(shape)}; a single row is [1, 1, V]"
        )
    if tuple(tree.draft.shape) != shape:
        raise ValueError(
            f"`draft` must be [B, N, V] like `target` {list(shape)}, got {list(tree.draft.shape)}; "
            "do both models share a tokenizer?"
        )
    if tree.draft.dtype != tree.target.dtype or not tree.target.is_floating_point():
        raise ValueError(
            f"`draft` and `target` must share one float dtype, got {tree.draft.dtype} and"
            f" {tree.target.dtype}; cast one"
        )
    if tuple(tree.tokens.shape) != shape[:2]:
        raise ValueError(
            f"`tokens` must be [B, N] like `target` {list(shape[:2])}, got"
            f" {list(tree.tokens.shape)}; one token a node, the root's included"
        )
    if torch.is_grad_enabled() and (tree.draft.requires_grad or tree.target.requires_grad):
        raise ValueError(
            "`draft` and `target` must not require gradients, a law is computed in place and has"
            " none; call it under torch.no_grad() or detach the rows"
        )
    parents = tree.parents
    if not isinstance(parents, tuple) or len(parents) != shape[1] or not in_order(parents):
        raise ValueError(
            f"`parents` must be a tuple of {shape[1]} ints, -1 first and then parents[i] < i, got"
            f" {parents}; number the nodes so that parents come first"
        )
