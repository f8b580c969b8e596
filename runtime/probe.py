"""A look at a model before it is used: does it give a row the same logits in a batch as alone?

Rows of a batch have different lengths, their slots in the cache lie apart, and the nodes of a tree
see only their own path. A model is decoded right only if its logits depend on the tokens that a
node sees and on their positions, and on nothing else. Families whose attention counts slots (ALiBi,
local layers), that look ahead, need an encoder, or ignore masks do not. The probe finds them by
their logits, whatever their name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .forward import Model

LENGTHS = (9, 4)  # tokens of the two rows
LOOK = 600  # slots between a row and its tree; more than any local window that is not in the config
MOST_GAP = 4096
# Largest difference of two logits that rounding explains, in standard deviations of the logits.
ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-2}
HALF = 0.15
# Rounding may send a token to another expert. A fault of the kind that is looked for moves most
# rows.
FEW = 0.25


@torch.inference_mode()
def probe(model: Model) -> None:
    """ValueError with one sentence if the model cannot be decoded in batches and trees."""
    kind = getattr(model.config, "model_type", "this model")
    # The largest id that two rows can share; special tokens are mostly small or last.
    ids = torch.arange(2, 2 + sum(LENGTHS) + 3) * 7 % max(model.vocab - 1, 1)
    texts = [ids[: LENGTHS[0]], ids[LENGTHS[0] : sum(LENGTHS)]]
    nodes = ids[-3:]
    try:
        together = _together(model, texts, nodes)
        alone = [_alone(model, text, nodes) for text in texts]
    except (
        RuntimeError,
        AttributeError,
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AssertionError,
    ) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ValueError(
            f"{model.name} ({kind}) cannot be decoded here: a call with a cache and a mask ends in"
            f" {type(error).__name__}: {reason}; use a decoder-only model of another family"
        ) from error
    allowed = ROUNDING.get(model.dtype, HALF)
    expected = torch.stack(alone).float()
    scale = expected.std().clamp_min(1e-6)
    off = (together.float() - expected).abs().amax(-1) / scale
    if not (off <= allowed).float().mean() >= 1 - FEW:
        raise ValueError(
            f"{model.name} ({kind}) cannot be decoded here: in a batch of rows of different lengths"
            " its logits differ from those of each row alone by up to"
            f" {float(off.max()):.2g} standard deviations, because its attention counts slots,"
            " looks ahead or ignores the mask; use a model of another family"
        )


def _together(model: Model, texts: list[Tensor], nodes: Tensor) -> Tensor:
    """[2, 3, V] logits at a chain of two nodes and a sibling of the second, far behind the
    texts.
    """
    device, longest = model.device, max(LENGTHS)
    start = longest + _gap(model)
    cache = model.cache(start + 3)
    prompt = torch.zeros(2, longest, dtype=torch.long)
    for row, text in enumerate(texts):
        prompt[row, : len(text)] = text
    model(prompt.to(device), None, None, cache)
    length = torch.tensor(LENGTHS).unsqueeze(1)
    slots = torch.arange(start + 3)
    visible = (slots < length).unsqueeze(1).repeat(1, 3, 1)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    visible[:, :, start:] = tree
    positions = length + torch.tensor([0, 1, 1])
    tokens = nodes.expand(2, -1)
    return model(
        tokens.to(device), positions.to(device), visible.to(device), cache, start
    ).logits.cpu()


def _alone(model: Model, text: Tensor, nodes: Tensor) -> Tensor:
    """[3, V] the same logits from whole texts without cache, mask or positions of ours."""
    first, second, sibling = nodes
    paths = torch.stack([torch.cat([text, first[None], last[None]]) for last in (second, sibling)])
    logits = model.module(
        input_ids=paths.to(model.device), use_cache=False, return_dict=True
    ).logits
    rows = logits[:, -2:, : model.vocab].cpu()
    return torch.stack([rows[0, 0], rows[0, 1], rows[1, 1]])


def _gap(model: Model) -> int:
    """More slots than any local window of the model holds, if that is affordable."""
    named = vars(model.config).items()
    windows = [
        value
        for name, value in named
        if isinstance(value, int) and ("window" in name or "local" in name or "chunk" in name)
    ]
    wanted = min(MOST_GAP, max([LOOK, *(2 * window for window in windows)]))
    return max(0, min(wanted, model.max_positions - max(LENGTHS) - 3))
