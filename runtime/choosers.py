"""What chooses the tree before each step (delayed trees, arXiv 2602.16994).

A choice may use whatever does not depend on the tree: the committed text, both models at the token
before the root, the draft at the root. Every method stays exact for the tree that is chosen. One
interface serves all that `--branches` may name:

    3x4+2                 this shape always
    auto                  GBV's number of paths, 1 to 4, for each request of the batch
    confidence:0.5,8      a chain of at most 8 tokens; it ends behind the first token that the draft
                          gave a probability below 0.5
    a folder              the network that `diversed select` trained, or a bundle that holds one

Confidence decides while the chain is drawn. Whether a token has a child depends only on the tokens
up to it, so every method is exact for this chain too.

A batch grows one tree shape in a step. With `auto` and confidence a request leaves the nodes absent
that it did not ask for, so its text does not depend on the batch. The network chooses one shape for
the whole batch: that changes texts, but not their law.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from ..verifier.law import DraftTree
from ..verifier.multipath import choose_paths
from .drafting import MAX_NODES, DraftShape, topology
from .shape_network import (
    ShapeNetwork,
    card_scalars,
    read_network,
    read_selector_card,
    row_scalars,
)
from .shapes import Shape, parse_shape

if TYPE_CHECKING:
    from .forward import Pair
    from .sampling import Sampling

MOST_PATHS = 4


@dataclass(frozen=True)
class StepContext:
    """What a step knows before it draws its tree.

    state:  what `Selector.update` kept of the step before; zeros for a request without one.
    rows:   [B, W, V] `rows[:, -1]` is the draft's distribution at the root. With W = 2, `rows[:,
            0]` is its distribution one token earlier; it is only meaningful for requests whose
            previous step stopped at a node that the draft had not evaluated.
    hidden: [B, W, H] the draft's hidden states there, if the selector looks back.
    length: [B] int64 committed tokens before the root.
    """

    state: tuple[Tensor, ...]
    rows: Tensor
    hidden: Tensor | None
    length: Tensor


class Selector:
    """Chooses one of `shapes` before each step. This class itself always takes the first.

    looks_back: whether it needs hidden states of both models.
    by_request: whether the first feature of a request is its number of paths in the tree.
    confidence: a chain ends behind the first token that the draft gave a probability below this.
    """

    looks_back = by_request = False
    confidence = 0.0

    def __init__(self, shapes: list[DraftShape]):
        self.shapes = shapes

    def init_state(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        """The state of `size` requests that had no step yet."""
        return ()

    def update(
        self,
        tree: DraftTree,
        states: tuple[Tensor | None, Tensor | None],
        node: Tensor,
        paths: Tensor,
    ) -> tuple[Tensor, ...]:
        """The state after a step, in the shapes of `init_state`.

        states: hidden states of the draft [B, N, H_draft] and of the target [B, N, H_target].
        node:   [B] the node at which each row stopped.
        paths:  [N, L + 1] of the tree, see `Topology.padded_paths`.
        """
        return ()

    def features(self, context: StepContext) -> Tensor:
        """[B, X] the numbers that a choice reads of every request.

        They are computed without waiting for the host, so that a CUDA graph can compute them.
        """
        return context.rows.new_zeros(len(context.rows), 0)

    def select(self, features: list[list[float]], active: list[bool]) -> int:
        """Index of the shape that the batch grows.

        active: whether each request is still being decoded.
        """
        return 0


class PathsSelector(Selector):
    """GBV's number of paths from the rows of the step before (ALGORITHMS 5); shape i has i + 1
    paths.
    """

    by_request = True

    def init_state(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(2, size, self.shapes[0].depth + 1, pair.vocab, device=device))

    def update(self, tree, states, node, paths) -> tuple[Tensor, ...]:
        path = paths[node]
        # `paths` repeats the stopping node behind itself
        repeated = pad(path[:, 1:] == path[:, :-1], (1, 0), value=False).unsqueeze(-1)
        at = path.unsqueeze(-1).expand(-1, -1, tree.target.shape[-1])
        return tree.target.gather(1, at), tree.draft.gather(1, at).masked_fill(repeated, 0)

    def features(self, context: StepContext) -> Tensor:
        return choose_paths(*context.state, context.rows[:, -1], len(self.shapes)).unsqueeze(1)

    def select(self, features: list[list[float]], active: list[bool]) -> int:
        wanted = [paths for (paths,), one in zip(features, active, strict=True) if one]
        return int(max(wanted)) - 1


class ConfidenceSelector(Selector):
    """A chain that may grow to the last of `shapes`; shape i is what the batch drew if it ended
    after i + 1 tokens.
    """

    def __init__(self, shapes: list[DraftShape], confidence: float):
        super().__init__(shapes)
        self.confidence = confidence

    def select(self, features: list[list[float]], active: list[bool]) -> int:
        return len(self.shapes) - 1


class LearnedSelector(Selector):
    """The shape that a trained network finds most likely, on the mean over a batch's requests.

    A request without a step before it has no say; if no request has one, the shape is `base`.
    setting: [X, 5] SETTING_SCALARS at contexts of 0, step, 2 step, ... tokens.
    """

    looks_back = True

    def __init__(
        self, shapes: list[DraftShape], network: ShapeNetwork, base: int, setting: Tensor, step: int
    ):
        super().__init__(shapes)
        self.network, self.base, self.setting, self.step = network, base, setting, step

    def init_state(self, size: int, pair: Pair, device: torch.device) -> tuple[Tensor, ...]:
        """Row and hidden state at the token before the root, of the target, then of the draft; then
        whether there was a step. The draft's are zeros if it was not run there.
        """
        models = pair.target, pair.draft
        widths = *(width for model in models for width in (pair.vocab, model.hidden_size)), 1
        return tuple(torch.zeros(size, width, device=device) for width in widths)

    def update(self, tree, states, node, paths) -> tuple[Tensor, ...]:
        size, nodes = tree.tokens.shape
        at = node + torch.arange(0, size * nodes, nodes, device=node.device)
        every = tree.target, states[1], tree.draft, states[0]
        found = [embedding(at, rows.flatten(0, 1)) for rows in every]
        return *found, found[0].new_ones(size, 1)

    def features(self, context: StepContext) -> Tensor:
        """Whether there was a step before, then the logits."""
        target, target_hidden, draft, draft_hidden, seen = context.state
        rows, hidden = context.rows, context.hidden.float()
        ran = draft.amax(1, keepdim=True) > 0
        draft = draft.where(ran, rows[:, 0])
        draft_hidden = draft_hidden.where(ran, hidden[:, 0])
        place = context.length.div(self.step, rounding_mode="floor")
        setting = embedding(place.clamp_max(len(self.setting) - 1), self.setting)
        scalars = torch.cat([row_scalars(target, draft, rows[:, -1]), setting], 1)
        logits = self.network([target_hidden, draft_hidden, hidden[:, -1]], scalars)
        return torch.cat([seen, logits], 1)

    def select(self, features: list[list[float]], active: list[bool]) -> int:
        voters = [
            logits for (seen, *logits), one in zip(features, active, strict=True) if one and seen
        ]
        if not voters:
            return self.base
        return int(torch.tensor(voters, dtype=torch.float64).softmax(1).mean(0).argmax())


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
        counts = range(1, MOST_PATHS + 1)
        return PathsSelector([topology(drafting, draft_length, count, trunk) for count in counts])
    if text.startswith("confidence:"):
        return _confidence(text, drafting)
    if text.startswith("entropy:"):
        raise ValueError(
            f"`branches` {text}: entropy is not offered any more; use confidence:0.5,8, a chain of"
            " at most 8 that ends behind the first token of a probability below 0.5, or a network"
            " of `diversed select`"
        )
    if _is_folder(text):
        return _learned(Path(text), method, drafting, pair, sampling)
    return Selector([parse_shape(text).grow(drafting)])


def _confidence(text: str, drafting: str) -> ConfidenceSelector:
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
    chains = [Shape(1, count).grow(drafting) for count in range(1, tokens + 1)]
    return ConfidenceSelector(chains, confidence)


def _learned(folder: Path, method: str, drafting: str, pair: Pair, sampling: Sampling) -> Selector:
    """The network in a folder, if it fits; a constant shape if the card says that it is faster."""
    card = read_selector_card(folder)
    trained = {"method": card["method"], "drafting": card["drafting"]}
    came = {"method": method, "drafting": drafting}
    for role in ("target", "draft"):
        trained[role], came[role] = card[role]["hash"], getattr(pair, role).hash
    for name, value in came.items():
        if trained[name] != value:
            raise ValueError(
                f"the selector in {folder} was trained for {name} {trained[name]}, got {value};"
                " train one with `diversed select`"
            )

    def distance(base: dict) -> float:
        change = base["temperature"] - sampling.temperature
        return abs(change) + abs(base["top_p"] - sampling.top_p)

    base = min(card["bases"], key=distance)
    if base.get("constant"):
        return Selector([parse_shape(base["shape"]).grow(drafting)])
    device = pair.target.device
    return LearnedSelector(
        [parse_shape(shape).grow(drafting) for shape in card["shapes"]],
        read_network(folder, card).to(device),
        card["shapes"].index(base["shape"]),
        card_scalars(card, sampling).to(device),
        card["latency"]["step"],
    )


def _is_folder(text: str) -> bool:
    """Whether a text names a folder, there or not."""
    try:
        return "/" in text or Path(text).is_dir()
    except OSError:  # longer than any name
        return False
