"""Verification on the GPU, from logits to the verdict, without a row of probabilities in memory
(Triton).

    verify(method, target, draft, ...) == draw(law(relaxed tree), uniform)

for the rows `runtime.sampling.probabilities` makes of the same logits, unless a uniform lies within
1e-6 of a step of
the cumulative sums. Where the 1e-6 comes from: float32 gives every entry of a row a relative error
    of some 3e-7 (exp2
to 2 ulp, a tree sum for the normaliser), and as such errors are spread over a row, masses that are
sums of entries err by less than that. At a temperature other than 1 `probabilities` itself rounds
the quotient of logit and temperature, by 6e-8 of its size; the kernel scales the difference to the
largest logit, and so stays nearer to the exact row.

Softmax, blending, verification and the draw are fused; every kernel's docstring counts its passes
over V. Random numbers are arguments, a pure function of (seed, request, position), so ranks that
hold the same logits agree.
GBV, SpecInfer and K-SEQ have no kernel: a sort of every row, a root search over it; they stay torch
    operations.

Importing this needs torch alone; triton is loaded by the first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from ..law import Verdict

NAMES = ("token", "block", "greedy_tree", "univer", "rrsw", "traversal")


@dataclass(frozen=True)
class Verified:
    """What one call of a kernel says.

    verdict:       node [B] and token [B]; both -1 for a request whose numbers are unsound: a NaN or
                   +inf logit at a present node, a target row without a finite logit, a weight
                   outside [0, 1], a token >= V. Look at it where the verdict is read anyway, so
                   that nothing else waits for the device.
    accepted:      [B] int64 accepted tokens, without the bonus token; -1 as above.
    substitutions: [B, N] float32, weight * TV(target, draft) at every node of the accepted path; it
                   comes at no further pass, except for `token`, which reads nodes with a weight
                   once more.
    """

    verdict: Verdict
    accepted: Tensor
    substitutions: Tensor


def verify(
    method: str,
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    parents: tuple[int, ...],
    weight: Tensor,
    uniform: Tensor,
    temperature: float = 1.0,
    target_cut: Tensor | None = None,
    draft_cut: Tensor | None = None,
) -> Verified:
    """The verdict of `method`, one of NAMES, on a drafted tree.

    target:      [B, N, V] logits, float32, bfloat16 or float16; rows may be apart, entries of a row
                 may not.
    draft:       [B, D, V] logits at the first D <= N nodes; a row of -inf alone, or of a node from
                 D on, was not run.
    tokens:      [B, N] int64, -1 where a row lacks that child; node 0 is the root.
    parents:     N ints, as in `DraftTree`.
    weight:      [B, N] the draft's share at every node, 0 for exact verification; 0 anyway where
                 the draft was not run.
    uniform:     [B, 2] in [0, 1).
    temperature: divides the logits; 0 takes the most likely token, the lowest id of a tie, at one
        more pass of torch.
    target_cut, draft_cut: [B, N, 3] and [B, D, 3] from `cuts.cut`, for top-k, top-p and min-p; both
        or neither.
    """
    found = torch.ops.diversed.verify(
        method,
        target,
        draft,
        tokens,
        list(parents),
        weight,
        uniform,
        temperature,
        target_cut,
        draft_cut,
    )
    node, token, accepted, substitutions = found
    return Verified(Verdict(node, token), accepted, substitutions)


@torch.library.custom_op("diversed::verify", mutates_args=())
def _verify(
    method: str,
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    parents: list[int],
    weight: Tensor,
    uniform: Tensor,
    temperature: float,
    target_cut: Tensor | None,
    draft_cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if find_spec("triton") is None:
        raise ValueError(
            "`kernel` needs triton, which is not installed; install triton, or use the method's law"
        )
    from . import dispatch

    return dispatch.run(
        method,
        target,
        draft,
        tokens,
        tuple(parents),
        weight,
        uniform,
        temperature,
        target_cut,
        draft_cut,
    )


@_verify.register_fake
def _shapes(
    method, target, draft, tokens, parents, weight, uniform, temperature, target_cut, draft_cut
):
    batch, nodes = target.shape[:2]
    verdict = [target.new_empty(batch, dtype=torch.int64) for _ in range(3)]
    return (*verdict, target.new_empty(batch, nodes, dtype=torch.float32))
