"""The edge of the kernels: inputs are checked once, by their shapes alone, and handed to the
method.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..tree import in_order, topology
from . import chain, greedy, recursive, rows
from .cuts import greedy_cut
from .launch import Call

KERNELS = {
    "token": chain.token,
    "block": chain.block,
    "greedy_tree": greedy.greedy_tree,
    "univer": greedy.univer,
    "rrsw": recursive.rrsw,
    "traversal": recursive.traversal,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(
    method: str,
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    parents: tuple[int, ...],
    weight: Tensor,
    uniform: Tensor,
    temperature: float,
    target_cut: Tensor | None,
    draft_cut: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(node, token, accepted, substitutions), see `verify`."""
    if method not in KERNELS:
        raise ValueError(
            f"`method` must have a kernel ({', '.join(KERNELS)}), got {method!r}; use the"
            " method's law"
        )
    if not target.is_cuda and isinstance(rows.normalise, triton.JITFunction):
        raise ValueError(
            f"kernels run on a CUDA device, got tensors on {target.device}; use the method's law"
            " there"
        )
    _check(target, draft, tokens, parents, weight, uniform, temperature, target_cut, draft_cut)
    cuts = (
        None
        if target_cut is None
        else (target_cut.float().contiguous(), draft_cut.float().contiguous())
    )
    if temperature == 0:
        cuts, temperature = (greedy_cut(target), greedy_cut(draft)), 1.0
    if method in ("token", "block") and not topology(parents).is_chain:
        raise ValueError(
            f"{method} verifies a chain, one child a node; got parents {parents}; use a method for"
            " trees"
        )
    call = Call(
        target,
        draft,
        tokens.contiguous(),
        parents,
        weight.float().contiguous(),
        uniform.double().contiguous(),
        temperature,
        cuts,
    )
    with torch.cuda.device_of(target):
        KERNELS[method](call)
    return call.stop, call.token, call.accepted, call.costs.sum(-1)


def _check(
    target, draft, tokens, parents, weight, uniform, temperature, target_cut, draft_cut
) -> None:
    batch, nodes, vocabulary = target.shape
    depth = draft.shape[1]
    wanted = {
        "draft": (draft, (batch, min(depth, nodes), vocabulary)),
        "tokens": (tokens, (batch, nodes)),
        "weight": (weight, (batch, nodes)),
        "uniform": (uniform, (batch, 2)),
    }
    if (target_cut is None) != (draft_cut is None):
        raise ValueError(
            "`target_cut` and `draft_cut` must be given both or neither; an uncut model has -inf"
            " thrice"
        )
    if target_cut is not None:
        wanted |= {
            "target_cut": (target_cut, (batch, nodes, 3)),
            "draft_cut": (draft_cut, (batch, depth, 3)),
        }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.device != target.device:
            raise ValueError(
                f"`{name}` must be {list(shape)} on {target.device} beside `target`"
                f" {list(target.shape)}, got {list(tensor.shape)} on {tensor.device}"
            )
    for name, tensor in (("target", target), ("draft", draft)):
        if tensor.dtype not in DTYPES or tensor.stride(-1) != 1:
            raise ValueError(
                f"`{name}` must hold float32, bfloat16 or float16 logits, each row in one piece;"
                f" got {tensor.dtype} with strides {tensor.stride()}"
            )
    if vocabulary >= 1 << 24:
        raise ValueError(
            f"`target` must have fewer than 2^24 tokens, got {vocabulary}; ids are kept in float32"
        )
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"`temperature` must be 0 or a positive number, got {temperature}")
    if len(parents) != nodes or not in_order(parents):
        raise ValueError(
            f"`parents` must be {nodes} ints, -1 first and then parents[i] < i, got {parents}"
        )
