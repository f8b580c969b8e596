"""The shared words: a draft tree, the law a verification method states about it, and one draw from that law.

A verification method is one pure function `law(tree) -> Law`. A chain, K paths and a tree are the same type,
`DraftTree`; one sampler, `draw`, serves every method, and its random numbers are an argument.

Axis letters, here and in every docstring of the project: B requests, N nodes of a draft tree, V vocabulary,
L draft length (depth), K paths, M children per node, T text positions, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens and the rows of both models at every node.

    tokens:  [B, N] int64; node 0 is the root, the last committed token; -1 where a row lacks that child.
    parents: N ints shared by the batch; parents[0] == -1 and parents[i] < i.
    draft:   [B, N, V] probabilities of the draft model at each node; all-zero rows where the draft was not run.
    target:  [B, N, V] probabilities of the target model at each node.

    K paths are K chains that hang from one node: equal prefixes are not merged here, laws merge them.
    """

    tokens: Tensor
    parents: tuple[int, ...]
    draft: Tensor
    target: Tensor


@dataclass(frozen=True)
class Law:
    """What a verification method says about one tree.

    stop: [B, N] probability that the accepted path ends at each node; a row sums to 1.
    next: [B, N, V] distribution of the one extra token, given the stop.
    """

    stop: Tensor
    next: Tensor


@dataclass(frozen=True)
class Verdict:
    """One draw from a law.

    node:  [B] int64, the node where the accepted path ends.
    token: [B] int64, the extra token that follows it.
    """

    node: Tensor
    token: Tensor


def draw(law: Law, uniform: Tensor) -> Verdict:
    """The verdict that `uniform` [B, 2] in [0, 1) selects: first the stopping node, then the extra token."""
    node = inverse_cdf(law.stop, uniform[:, :1]).squeeze(-1)
    rows = law.next[torch.arange(len(node), device=node.device), node]
    return Verdict(node=node, token=inverse_cdf(rows, uniform[:, 1:]).squeeze(-1))


def expected_length(law: Law, parents: tuple[int, ...]) -> Tensor:
    """[B] expected number of accepted tokens, without the extra token."""
    return law.stop @ torch.tensor(depths(parents), dtype=law.stop.dtype, device=law.stop.device)


def depths(parents: tuple[int, ...]) -> list[int]:
    """Depth of every node; the root has depth 0."""
    depth = [0] * len(parents)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return depth


def inverse_cdf(rows: Tensor, uniform: Tensor) -> Tensor:
    """Indices [..., M] that `uniform` [..., M] in [0, 1) selects from `rows` [..., X], which need not be normalised.

    The first index whose cumulative sum exceeds uniform times the total; never one of probability zero, because the
    comparison is strict and the threshold stays below the total however it rounds. Sums are float64: a float32 sum over
    a vocabulary of 100,000 is off by more than its rarest tokens' probability.
    """
    cumulative = rows.double().cumsum(-1)
    total = cumulative[..., -1:]
    threshold = torch.minimum(uniform.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold.contiguous(), right=True).clamp_max(rows.shape[-1] - 1)
