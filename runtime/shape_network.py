"""The network that chooses a tree shape before each step, and how its folder is read.

The network is that of delayed trees (arXiv 2602.16994). `diversed select` trains it and writes

    selector.json         what it was trained for: method, models, shapes, latencies, figures
    selector.safetensors  its weights, float32

A bundle may hold the same two files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..fields import FLAG, OBJECT, TEXT, Field, fault, list_of, number, objects, optional, whole
from ..files import read_object
from ..verifier.head import LARGEST_SIZE
from .bundle import read_tensors
from .sampling import Sampling
from .shapes import parse_shape

FILES = ("selector.json", "selector.safetensors")
FORMAT = 1
ROW_SCALARS = ("target_entropy", "draft_entropy", "root_entropy", "kl", "reverse_kl", "l1")
SETTING_SCALARS = ("log_length", "temperature", "top_p", "draft_ms", "target_ms")
SCALARS = (*ROW_SCALARS, *SETTING_SCALARS)
SIDE = 128  # numbers that each hidden state is mapped to
LARGEST_TIME = 1e9  # milliseconds


class ShapeNetwork(nn.Module):
    """Three hidden states and eleven scalars -> one logit for every shape.

    Each hidden state goes through a linear map to 128 numbers and LayerNorm; scalars are
    standardised. Then come layers of `width` (512 in the paper) and 32, with GELU and dropout.
    Before training the network chooses the shape with index `base`, whatever it sees.
    """

    def __init__(
        self,
        target_hidden: int,
        draft_hidden: int,
        shapes: int,
        width: int = 512,
        base: int = 0,
        dropout: float = 0.1,
    ):
        super().__init__()
        sizes = (target_hidden, draft_hidden, draft_hidden)
        self.sides = nn.ModuleList(nn.Linear(size, SIDE) for size in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(SIDE) for _ in sizes)
        self.register_buffer("mean", torch.zeros(len(SCALARS)))
        self.register_buffer("std", torch.ones(len(SCALARS)))
        self.net = nn.Sequential(
            nn.Linear(3 * SIDE + len(SCALARS), width),
            nn.GELU("tanh"),
            nn.Dropout(dropout),
            nn.Linear(width, 32),
            nn.GELU("tanh"),
            nn.Dropout(dropout),
            nn.Linear(32, shapes),
        )
        last = self.net[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        last.bias.data[base] = 3.0

    def standardise(self, scalars: Tensor) -> None:
        """Fit `mean` and `std` to scalars [X, 11]; a scalar that never changes is left out."""
        self.mean.copy_(scalars.mean(0))
        spread = scalars.std(0, unbiased=False)
        self.std.copy_(torch.where(spread < 1e-4, 1e9, spread))

    def forward(self, hidden: list[Tensor], scalars: Tensor) -> Tensor:
        """Logits [B, A].

        hidden:  [B, H] of the target and of the draft at the token before the root, then of the
                 draft at the root.
        scalars: [B, 11] in the order of SCALARS.
        """
        parts = [
            norm(side(x)) for side, norm, x in zip(self.sides, self.norms, hidden, strict=True)
        ]
        return self.net(torch.cat([*parts, (scalars - self.mean) / self.std], -1))


def row_scalars(target: Tensor, draft: Tensor, root: Tensor) -> Tensor:
    """[B, 6] the numbers of ROW_SCALARS, in nats; a probability below 1e-9 counts as 1e-9.

    target, draft: [B, V] rows at the token before the root.
    root:          [B, V] the draft's row at the root.
    """
    rows = torch.stack([target, draft, root], 1)
    # products[:, i, j] is the sum of row i times log row j
    products = torch.bmm(rows, rows.clamp_min(1e-9).log_().transpose(1, 2))
    entropies = -products.diagonal(dim1=1, dim2=2)
    kl = products[:, 1, 1] - products[:, 1, 0]
    reverse_kl = products[:, 0, 0] - products[:, 0, 1]
    distance = torch.linalg.vector_norm(target - draft, 1, -1)
    return torch.cat([entropies, torch.stack([kl, reverse_kl, distance], 1)], 1)


def setting_scalars(
    length: Tensor, temperature: float, top_p: float, draft_ms: Tensor, target_ms: Tensor
) -> Tensor:
    """[X, 5] float32 the numbers of SETTING_SCALARS.

    length:              [X] float64 tokens of the context.
    draft_ms, target_ms: [X] float64 milliseconds of a call on one token there.
    """
    sampling = torch.tensor([temperature, top_p], dtype=torch.float64).expand(len(length), 2)
    times = torch.stack([draft_ms, target_ms], 1)
    return torch.cat([length.log1p().unsqueeze(1), sampling, times], 1).float()


def card_scalars(card: dict[str, Any], sampling: Sampling) -> Tensor:
    """[X, 5] SETTING_SCALARS under this sampling; row i is for contexts of i to i + 1 times
    `card["latency"]["step"]` tokens, as the network was told of them in training.
    """
    latency = card["latency"]
    draft, target = (
        torch.tensor(latency[role], dtype=torch.float64) for role in ("draft", "target")
    )
    length = (torch.arange(len(draft), dtype=torch.float64) + 0.5) * latency["step"]
    return setting_scalars(length, sampling.temperature, sampling.top_p, draft, target)


def read_network(folder: Path, card: dict[str, Any]) -> ShapeNetwork:
    """The trained network of a folder; its file is compared with the card before it is read."""
    hidden = [card[role]["hidden_size"] for role in ("target", "draft")]
    with torch.device("meta"):
        network = ShapeNetwork(*hidden, len(card["shapes"]), card["width"])
    wanted = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict(read_tensors(folder / FILES[1], wanted), assign=True)
    return network.eval().requires_grad_(False)


def _is_shape(value: Any) -> bool:
    try:
        return str(parse_shape(value)) == value
    except (ValueError, TypeError, AttributeError):
        return False


def _is_time(value: Any) -> bool:
    return not fault({"ms": value}, {"ms": number(0, LARGEST_TIME)})


_SIZE = whole(1, LARGEST_SIZE)
SHAPE = Field(_is_shape, "a shape such as 3x4+2")
_TIMES = list_of(_is_time, "milliseconds", 1)
CARD = {
    "method": TEXT,
    "drafting": TEXT,
    "target.hash": TEXT,
    "target.hidden_size": _SIZE,
    "draft.hash": TEXT,
    "draft.hidden_size": _SIZE,
    "width": _SIZE,
    "shapes": list_of(_is_shape, "shapes such as 3x4+2", 1),
    "bases": objects(
        {
            "temperature": number(0, 1e6),
            "top_p": number(0, 1),
            "shape": SHAPE,
            "constant": optional(FLAG),
        },
        1,
    ),
    "latency.step": whole(1),
    "latency.draft": _TIMES,
    "latency.target": _TIMES,
    "choosing_ms": optional(number(0, LARGEST_TIME)),
    "settings": OBJECT,
    "figures": list_of(lambda row: isinstance(row, dict), "objects", 1),
}


def read_selector_card(folder: Path) -> dict[str, Any]:
    """selector.json of a folder, with the entries that every use needs."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} has no {' and no '.join(missing)}; `diversed select` writes both"
        )
    path, remedy = folder / FILES[0], f"delete {folder} and run `diversed select` again"
    card = read_object(path, remedy)
    if card.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {card.get('format')!r}, this version reads {FORMAT}; train it again"
        )
    if found := fault(card, CARD) or _contradiction(card):
        raise ValueError(f"{path} is damaged ({found}); {remedy}")
    return card


def _contradiction(card: dict[str, Any]) -> str:
    """What does not belong together in a card whose fields are sound; empty if all does."""
    if any(base["shape"] not in card["shapes"] for base in card["bases"]):
        return "a base is none of its shapes"
    if len(card["latency"]["draft"]) != len(card["latency"]["target"]):
        return "its latencies do not belong together"
    return ""
