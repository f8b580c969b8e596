"""Which tree to grow next: a choice made once a step, before the tree is drawn (delayed trees,
arXiv 2602.16994).

A choice may use whatever does not depend on the tree: the committed text, both models at the token
before the root, the draft at the root. Every method stays exact for the tree that it is then
handed. A shape is written KxL2+L1: a trunk of L1 single tokens, then K paths of L2; `5` is a chain.
What `--branches` may name, all in one interface:

    3x4+2                 constant
    auto                  GBV's number of paths, 1 to 4, for each request of the batch
    entropy:1.2,6,3x2     the first shape where the draft's row at the root has at most 1.2 nats, else the second
    confidence:0.5,8      a chain of at most 8 that ends behind the first token that the draft gave less than 0.5
    a folder              the network that `diversed select` trained, or a bundle that holds one

Confidence decides while the chain is drawn: whether a token has a child depends on what was drawn
up to it alone, so every method is exact for the chain that it is then handed.

A batch grows one topology a step. `auto` and confidence leave the nodes that a request did not ask
for absent, so that a text does not depend on its batch; the others choose for the whole batch,
which changes texts and not their law.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, layer_norm, pad

from ..verifier.head import LARGEST_SIZE
from ..verifier.law import DraftTree
from ..verifier.multipath import choose_paths
from .drafting import MAX_NODES, DraftShape, topology

if TYPE_CHECKING:
    from .model import Pair
    from .sampling import Sampling

MOST_PATHS = 4
FILES = ("selector.json", "selector.safetensors")
FORMAT = 1
ROW_SCALARS = ("target_entropy", "draft_entropy", "root_entropy", "kl", "reverse_kl", "l1")
SCALARS = (*ROW_SCALARS, "log_length", "temperature", "top_p", "draft_ms", "target_ms")
SIDE = 128  # numbers that each hidden state is mapped to
_SHAPE = re.compile(r"(?:(\d{1,3})x)?(\d{1,3})(?:\+(\d{1,3}))?", re.ASCII)


@dataclass(frozen=True)
class Shape:
    """A trunk of `trunk` single tokens, then `paths` paths of `length` tokens; one path is written
    without a trunk.
    """

    paths: int
    length: int
    trunk: int = 0

    def __str__(self) -> str:
        return (
            (f"{self.paths}x" if self.paths > 1 else "")
            + str(self.length)
            + (f"+{self.trunk}" * (self.trunk > 0))
        )

    @property
    def depth(self) -> int:
        return self.trunk + self.length

    @property
    def widths(self) -> list[int]:
        """Nodes of every depth, the root's first."""
        return [1] * (1 + self.trunk) + [self.paths] * self.length

    def grow(self, drafting: str) -> DraftShape:
        branches = (
            self.paths if drafting in ("paths", "chain") else [self.paths] + [1] * (self.length - 1)
        )
        return topology(drafting, self.length, branches, self.trunk)


def parse_shape(text: str) -> Shape:
    """The shape that is written KxL2+L1."""
    found = _SHAPE.fullmatch(text.strip())
    if not found or not int(found[2]) or found[1] == "0":
        raise ValueError(
            "a shape is written PATHSxLENGTH+TRUNK, such as 3x4+2, or one number for a chain, got"
            f" {text!r}"
        )
    paths, length, trunk = int(found[1] or 1), int(found[2]), int(found[3] or 0)
    return Shape(paths, length, trunk) if paths > 1 else Shape(1, length + trunk)


@dataclass(frozen=True)
class StepContext:
    """What a step knows before it draws its tree.

    state:  what `Selector.update` kept of the step before; zeros for a request without one.
    rows:   [B, W, V] `rows[:, -1]` is the draft's distribution at the root. With W = 2, `rows[:, 0]`
            is its distribution one token earlier; it is only meaningful for requests whose previous
            step stopped at a node that the draft had not evaluated.
    hidden: [B, W, H] the draft's hidden states there, if the selector looks back.
    length: [B] int64 committed tokens before the root.
    """

    state: tuple[Tensor, ...]
    rows: Tensor
    hidden: Tensor | None
    length: Tensor


class Selector:
    """shapes: the trees it chooses from, as topologies.

    looks_back: it needs hidden states of both models.
    by_request: the first number that a request's choice reads is how many of the tree's paths it
        wants.
    confidence: a chain ends behind the first token whose probability in the draft's row is below
        this.
    """

    looks_back = by_request = False
    confidence = 0.0

    def __init__(self, shapes: list[DraftShape]):
        self.shapes = shapes

    def init_state(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        """`before` of requests that had no step yet."""
        return ()

    def update(
        self,
        tree: DraftTree,
        states: tuple[Tensor | None, Tensor | None],
        node: Tensor,
        paths: Tensor,
    ) -> tuple[Tensor, ...]:
        """What the next choice needs of this step, in the shapes of `init_state`.

        states: hidden, of the draft [B, N, H_draft] and the target [B, N, H_target]; node: [B]
            where each row stopped;
        paths: [N, L + 1] of the tree, see `DraftShape`.
        """
        return ()

    def features(self, context: StepContext) -> Tensor:
        """[B, X] the numbers that a choice reads of every request; computed without the host, as a
        graph needs it.
        """
        raise NotImplementedError

    def select(self, numbers: list[list[float]], active: list[bool]) -> int:
        """Index of the shape that the batch grows.

        numbers: of `features`; active: for each request whether it is still being decoded.
        """
        raise NotImplementedError


class PathsSelector(Selector):
    """GBV's number of paths from the rows of the block before (ALGORITHMS 5); shape i has i + 1
    paths.
    """

    by_request = True

    def init_state(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(2, size, self.shapes[0].depth + 1, pair.vocab, device=device))

    def update(self, tree, states, node, paths) -> tuple[Tensor, ...]:
        path = paths[node]
        again = pad(
            path[:, 1:] == path[:, :-1], (1, 0), value=False
        )  # the stopping node is repeated
        at = path.unsqueeze(-1).expand(-1, -1, tree.target.shape[-1])
        return tree.target.gather(1, at), tree.draft.gather(1, at).masked_fill(
            again.unsqueeze(-1), 0
        )

    def features(self, context: StepContext) -> Tensor:
        return choose_paths(*context.state, context.rows[:, -1], len(self.shapes)).unsqueeze(1)

    def select(self, numbers: list[list[float]], active: list[bool]) -> int:
        return int(max(paths for (paths,), one in zip(numbers, active, strict=True) if one)) - 1


class EntropySelector(Selector):
    """The first of two shapes where the draft's mean entropy at the roots is at most `threshold`
    nats.
    """

    def __init__(self, shapes: list[DraftShape], threshold: float):
        super().__init__(shapes)
        self.threshold = threshold

    def features(self, context: StepContext) -> Tensor:
        return -torch.special.xlogy(context.rows[:, -1], context.rows[:, -1]).sum(-1, keepdim=True)

    def select(self, numbers: list[list[float]], active: list[bool]) -> int:
        wanted = [entropy for (entropy,), one in zip(numbers, active, strict=True) if one]
        return int(sum(wanted) > self.threshold * len(wanted))


class ConfidenceSelector(Selector):
    """A chain that may grow to the last of `shapes`; shape i, of i + 1 tokens, is what a batch
    drafted if it ended.
    """

    def __init__(self, shapes: list[DraftShape], confidence: float):
        super().__init__(shapes)
        self.confidence = confidence

    def features(self, context: StepContext) -> Tensor:
        return context.rows.new_zeros(len(context.rows), 0)

    def select(self, numbers: list[list[float]], active: list[bool]) -> int:
        return len(self.shapes) - 1


def row_scalars(target: Tensor, draft: Tensor, root: Tensor) -> Tensor:
    """[B, 6] the numbers of ROW_SCALARS, nats; a probability below 1e-9 counts as 1e-9.

    target, draft: [B, V] rows at the token before the root; root: [B, V] the draft's row at the
        root.
    """
    sums = row_sums(target, draft, root)
    return torch.cat([sums[:, :9] @ _SUMS.to(sums), sums[:, 9:]], 1)


def row_sums(target: Tensor, draft: Tensor, root: Tensor) -> Tensor:
    """[B, 10] of the same rows the sums of row i times log row j, then the distance |target -
    draft|.
    """
    rows = torch.stack([target, draft, root], 1)
    products = torch.bmm(rows, rows.clamp_min(1e-9).log_().transpose(1, 2)).flatten(1)
    return torch.cat([products, torch.linalg.vector_norm(target - draft, 1, -1, keepdim=True)], 1)


# [9, 5] from those sums to three entropies and two divergences
_SUMS = torch.zeros(9, 5)
_SUMS[[0, 4, 8], [0, 1, 2]] = -1.0
_SUMS[[4, 3], 3] = torch.tensor([1.0, -1.0])
_SUMS[[0, 1], 4] = torch.tensor([1.0, -1.0])


class ShapeNetwork(nn.Module):
    """The network of the paper: three hidden states and some scalars -> one logit a shape.

    Hidden states go through a linear map to 128 and LayerNorm each, scalars are standardised; then
    `width` (the paper's is 512), 32 and the shapes, with GELU and dropout between. It starts at the
    shape `base`, whatever it sees.
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
        inner = (
            nn.Linear(3 * SIDE + len(SCALARS), width),
            nn.Linear(width, 32),
            nn.Linear(32, shapes),
        )
        self.net = nn.Sequential(
            inner[0],
            nn.GELU("tanh"),
            nn.Dropout(dropout),
            inner[1],
            nn.GELU("tanh"),
            nn.Dropout(dropout),
            inner[2],
        )
        nn.init.zeros_(inner[2].weight)
        nn.init.zeros_(inner[2].bias)
        inner[2].bias.data[base] = 3.0

    def standardise(self, scalars: Tensor) -> None:
        """Fit `mean` and `std` to scalars [X, 11]; one that never changes is left out."""
        self.mean.copy_(scalars.mean(0))
        spread = scalars.std(0, unbiased=False)
        self.std.copy_(torch.where(spread < 1e-4, 1e9, spread))

    def forward(self, hidden: list[Tensor], scalars: Tensor) -> Tensor:
        """Logits [B, A]; hidden: of the target and the draft before the root, and of the draft at
        the root, [B, H].
        """
        parts = [
            norm(side(x)) for side, norm, x in zip(self.sides, self.norms, hidden, strict=True)
        ]
        return self.net(torch.cat([*parts, (scalars - self.mean) / self.std], -1))

    def folded(self, facts: list[list[float]]) -> Folded:
        """The same function in fewer operations, for the facts that the last five of SCALARS are
        one row of.

        The norms' scales and the standardising go into the weights that follow, sums of rows into
        scalars too.
        """
        linear = [*self.sides, *(layer for layer in self.net if isinstance(layer, nn.Linear))]
        layers = [(layer.weight.T.double(), layer.bias.double()) for layer in linear]
        scale = torch.cat([*(norm.weight for norm in self.norms), 1 / self.std]).double()
        shift = torch.cat([*(norm.bias for norm in self.norms), -self.mean / self.std]).double()
        weight, bias = layers[3]
        seen, scalars, distance, others = (weight * scale.unsqueeze(1)).split([3 * SIDE, 5, 1, 5])
        offsets = (
            bias
            + shift @ weight
            + torch.tensor(facts, dtype=torch.float64, device=bias.device) @ others
        )
        layers[3] = torch.cat([seen, _SUMS.to(seen) @ scalars, distance]), offsets
        return Folded(
            [[part.float().contiguous() for part in layer] for layer in layers], self.norms[0].eps
        )


@dataclass(frozen=True)
class Folded:
    """`ShapeNetwork` for one setting.

    layers:  weight [in, out] and bias of the three sides, then of the three layers; the bias of the first of these has
             a row for every place in the list of facts.
    epsilon: of the norms.
    """

    layers: list[list[Tensor]]
    epsilon: float

    def __call__(self, hidden: list[Tensor], sums: Tensor, place: Tensor) -> Tensor:
        """Logits [B, A].

        hidden: see `ShapeNetwork`; sums: [B, 10] of `row_sums`; place: [B] int64 in the list of
            facts.
        """
        *sides, (weight, offsets), second, third = self.layers
        seen = torch.stack(
            [torch.addmm(bias, x, side) for x, (side, bias) in zip(hidden, sides, strict=True)], 1
        )
        seen = layer_norm(seen, (SIDE,), eps=self.epsilon).flatten(1)
        x = gelu(
            torch.addmm(embedding(place, offsets), torch.cat([seen, sums], 1), weight),
            approximate="tanh",
        )
        x = gelu(torch.addmm(second[1], x, second[0]), approximate="tanh")
        return torch.addmm(third[1], x, third[0])


class LearnedSelector(Selector):
    """The shape of the largest logit, by the mean of the shapes' probabilities over the requests of
    a batch.

    A request without a step yet has no say; where none has, the shape is `base`.
    """

    looks_back = True

    def __init__(
        self,
        shapes: list[DraftShape],
        network: ShapeNetwork,
        base: int,
        facts: list[list[float]],
        step: int,
    ):
        """facts: the last five of SCALARS at contexts of 0, step, 2 step, ... tokens."""
        super().__init__(shapes)
        self.logits, self.base, self.last, self.step = (
            network.folded(facts),
            base,
            len(facts) - 1,
            step,
        )

    def init_state(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        """Rows and hidden states before the root, of the target and of the draft, and whether there
        are any.

        The draft's are zeros where it was not run there.
        """
        models = pair.target, pair.draft
        widths = *(width for model in models for width in (pair.vocab, model.hidden_size)), 1
        return tuple(torch.zeros(size, width, device=device) for width in widths)

    def update(self, tree, states, node, paths) -> tuple[Tensor, ...]:
        size, nodes = tree.tokens.shape
        at = node + torch.arange(0, size * nodes, nodes, device=node.device) if size > 1 else node
        every = tree.target, states[1], tree.draft, states[0]
        found = [embedding(at, rows.flatten(0, 1)) for rows in every]
        return *found, found[0].new_ones(size, 1)

    def features(self, context: StepContext) -> Tensor:
        """Whether there was a step before, then the logits."""
        target, hidden, draft, draft_hidden, seen = context.state
        rows, states = context.rows, context.hidden.float()
        ran = draft.amax(1, keepdim=True) > 0
        draft, draft_hidden = draft.where(ran, rows[:, 0]), draft_hidden.where(ran, states[:, 0])
        sums = row_sums(target, draft, rows[:, -1])
        place = context.length.div(self.step, rounding_mode="floor").clamp_max(self.last)
        return torch.cat([seen, self.logits([hidden, draft_hidden, states[:, -1]], sums, place)], 1)

    def select(self, numbers: list[list[float]], active: list[bool]) -> int:
        voters = [
            logits for (seen, *logits), one in zip(numbers, active, strict=True) if one and seen
        ]
        if not voters:
            return self.base
        if len(voters) == 1:
            return max(range(len(voters[0])), key=voters[0].__getitem__)
        shares = np.exp(np.array(voters) - np.max(voters, 1, keepdims=True))
        return int((shares / shares.sum(1, keepdims=True)).mean(0).argmax())


def facts_of(
    length: float, temperature: float, top_p: float, draft_ms: float, target_ms: float
) -> list[float]:
    """The last five of SCALARS: of the context, the sampling, and calls on one token there."""
    return [math.log1p(length), temperature, top_p, draft_ms, target_ms]


def _load(folder: Path, method: str, drafting: str, pair: Pair, sampling: Sampling) -> Selector:
    """The network in a folder of `diversed select` or in a bundle, if it fits; a constant shape
    where it says so.
    """
    card = read_selector_card(folder)
    came = {"method": method, "drafting": drafting}
    came |= {role: getattr(pair, role).hash for role in ("target", "draft")}
    for name, value in came.items():
        if (trained := card[name]["hash"] if name in ("target", "draft") else card[name]) != value:
            raise ValueError(
                f"the selector in {folder} was trained for {name} {trained}, got {value}; train one"
                " with `diversed select`"
            )
    t, p = sampling.temperature, sampling.top_p
    base = min(
        card["bases"], key=lambda base: abs(base["temperature"] - t) + abs(base["top_p"] - p)
    )
    if base.get("constant"):
        return Selector([parse_shape(base["shape"]).grow(drafting)])
    sizes = (
        card["target"]["hidden_size"],
        card["draft"]["hidden_size"],
        len(card["shapes"]),
        card["width"],
    )
    with torch.device("meta"):
        network = ShapeNetwork(*sizes)
    load_network(folder, network)
    network = network.eval().requires_grad_(False).to(pair.target.device)
    shapes = [parse_shape(shape).grow(drafting) for shape in card["shapes"]]
    latency = zip(card["latency"]["draft"], card["latency"]["target"], strict=True)
    step = card["latency"]["step"]
    facts = [facts_of((place + 0.5) * step, t, p, *each) for place, each in enumerate(latency)]
    return LearnedSelector(shapes, network, card["shapes"].index(base["shape"]), facts, step)


def load_network(folder: Path, network: ShapeNetwork) -> None:
    """Give the network the weights in a folder, once they are found to be of its shapes."""
    from .bundle import read_tensors

    wanted = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    network.load_state_dict(read_tensors(folder / FILES[1], wanted), assign=True)


def read_selector_card(folder: Path) -> dict[str, Any]:
    """selector.json of a folder, with the entries that every use needs."""
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder} has no {' and no '.join(missing)}; `diversed select` writes both"
        )
    try:
        card = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
        found = card["format"]
        fault = "" if found != FORMAT else _fault(card)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        found, fault = FORMAT, repr(error)
    if fault:
        raise ValueError(
            f"{folder / FILES[0]} is damaged ({fault}); delete {folder} and run `diversed select`"
            " again"
        )
    if found != FORMAT:
        raise ValueError(
            f"{folder / FILES[0]} has format {found!r}, this version reads {FORMAT}; train it again"
        )
    return card


def _fault(card: dict[str, Any]) -> str:
    """What no selector's card says, empty where it is sound."""
    models, latency = [card["target"], card["draft"]], card["latency"]
    sizes = [
        card["width"],
        *(model["hidden_size"] for model in models if isinstance(model["hash"], str)),
    ]
    if len(sizes) < 3 or any(
        type(size) is not int or not 0 < size <= LARGEST_SIZE for size in sizes
    ):
        return "a model has no hash or hidden size"
    if (
        not card["shapes"]
        or [str(parse_shape(shape)) for shape in card["shapes"]] != card["shapes"]
    ):
        return "its shapes are none"
    if not card["bases"] or any(
        math.isnan(b["temperature"] + b["top_p"])
        or b["shape"] not in card["shapes"]
        or type(b.get("constant", False)) is not bool
        for b in card["bases"]
    ):
        return "a base is none of its shapes"
    if not {"width", "validation", "seed"} <= card["settings"].keys() or not card["figures"]:
        return "it has no settings or figures"
    times = [*latency["draft"], *latency["target"], card.get("choosing_ms", 0.0)]
    if (
        type(latency["step"]) is not int
        or latency["step"] < 1
        or not latency["draft"]
        or len(latency["draft"]) != len(latency["target"])
    ):
        return "its latencies do not belong together"
    return "" if all(0 <= value < math.inf for value in times) else "a latency is no time"


def make_selector(
    text: str,
    method: str,
    drafting: str,
    draft_length: int,
    trunk: int,
    pair: Pair,
    sampling: Sampling,
) -> Selector:
    """The selector that `branches` names; ValueError with one sentence for anything else."""
    if text == "auto":
        if method != "gbv":
            raise ValueError(
                "`branches` auto chooses the number of paths of gbv before each step, got method"
                f" {method!r}"
            )
        return PathsSelector(
            [topology(drafting, draft_length, paths, trunk) for paths in range(1, MOST_PATHS + 1)]
        )
    if text.startswith("entropy:"):
        threshold, *shapes = text.removeprefix("entropy:").split(",")
        try:
            limit = float(threshold)
        except ValueError:
            limit = float("nan")
        if not limit >= 0 or len(shapes) != 2:
            raise ValueError(
                "`branches` entropy is written entropy:NATS,SHAPE,SHAPE, such as"
                f" entropy:1.2,6,3x2, got {text!r}"
            )
        return EntropySelector([parse_shape(shape).grow(drafting) for shape in shapes], limit)
    if text.startswith("confidence:"):
        threshold, _, length = text.removeprefix("confidence:").partition(",")
        try:
            confidence, tokens = float(threshold), int(length)
        except ValueError:
            confidence, tokens = 0.0, 0
        if not (0 < confidence <= 1 and 0 < tokens < MAX_NODES):
            raise ValueError(
                "`branches` confidence is written confidence:PROBABILITY,TOKENS, such as"
                f" confidence:0.5,8 with a probability above 0 and at most 1, got {text!r}"
            )
        return ConfidenceSelector(
            [Shape(1, count).grow(drafting) for count in range(1, tokens + 1)], confidence
        )
    if _is_folder(text):
        return _load(Path(text), method, drafting, pair, sampling)
    return Selector([parse_shape(text).grow(drafting)])


def _is_folder(text: str) -> bool:
    """Whether a text names a folder, there or not."""
    try:
        return "/" in text or Path(text).is_dir()
    except OSError:  # longer than any name
        return False
