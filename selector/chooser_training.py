"""How a network learns to choose a tree shape, and the folder it is written to.

With pi the network's probabilities of the shapes a at a context:

    rate = sum of pi(a) tokens(a) / sum of pi(a) seconds(a)
    gain = rate / rate of the base shape
    loss = - mean log(gain) + risk * mean over the worst tenth of max(1 - gain, 0)^2

The base shape is the best constant one on the training contexts of its temperature. If choosing,
with the time that a choice takes, is not faster on the held-out prompts than the base shape, the
card says that the base shape stays.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer, seed_everything
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ..data.batches import check_share
from ..files import SETTINGS_FORMAT, Folder, sha256, within, write_object, write_whole
from ..runtime.choosers import LearnedSelector, StepContext
from ..runtime.forward import Pair
from ..runtime.shape_network import (
    FILES,
    FORMAT,
    SETTING_SCALARS,
    ShapeNetwork,
    read_selector_card,
)
from ..train.fit import DEFAULTS, Training, quiet
from ..verifier.head import LARGEST_SIZE
from ..verifier.law import DraftTree
from ..verifier.methods import METHODS
from .contexts import LATENCY_STEP, Contexts, compare, read_contexts
from .latencies import ROLES, Latencies

WORST = 0.1  # part of a batch in the risk term
CHOICES = 201  # that are timed
LONGEST = 4096  # tokens of context up to which a chooser is told latencies


@dataclass(frozen=True)
class ChooserOptions:
    """How a chooser is trained.

    Args:
        epochs: passes over the training contexts; the best on held-out prompts is kept.
        batch: contexts a step.
        lr: learning rate of AdamW.
        risk: weight of the term for contexts where the choice is slower than the base shape.
        width: of the network's widest layer; the paper's 512 costs most of what choosing costs, on
            a CPU use 64.
        validation: share of the prompts that is held out.
    """

    epochs: int = 120
    batch: int = 256
    lr: float = 1e-3
    risk: float = 1.0
    width: int = 512
    validation: float = 0.25

    def __post_init__(self):
        within(1, epochs=self.epochs, batch=self.batch)
        within(1, LARGEST_SIZE, width=self.width)
        check_share(self.validation)


class ChooserModule(Training):
    """The network and its objective. Batches are indices of contexts.

    The epoch whose choices were fastest on the held-out prompts is kept. That flatters the chooser
    there: judge it by other prompts.

    choosing: seconds that a choice takes.
    """

    def __init__(self, known: Contexts, options: ChooserOptions, choosing: float = 0.0):
        super().__init__(options.lr, weight_decay=0.01, warmup_steps=0, patience=0)
        self.known, self.options, self.choosing = known, options, choosing
        sizes = known.hidden[0].shape[1], known.hidden[1].shape[1]
        common = int(known.base[~known.held].mode().values)
        self.network = ShapeNetwork(*sizes, len(known.shapes), options.width, common)
        self.network.standardise(known.scalars[~known.held])

    def logits(self, index: Tensor) -> Tensor:
        return self.network([part[index] for part in self.known.hidden], self.known.scalars[index])

    def gain(self, index: Tensor) -> Tensor:
        """[B] expected rate over that of the base shape."""
        probability = self.logits(index).softmax(-1)
        tokens, seconds = self.known.tokens[index], self.known.seconds[index]
        rate = (probability * tokens).sum(1) / (probability * seconds).sum(1)
        base = self.known.base[index].unsqueeze(1)
        return rate * (seconds.gather(1, base) / tokens.gather(1, base)).squeeze(1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return objective(self.gain(batch[0]), self.options.risk)

    def figures(self) -> dict:
        rows = compare(self.known, self.choice(), self.choosing)
        self.train()
        return {"gain": sum(math.log(row["selector"] / row["base"]) for row in rows)}

    def score(self, row: dict) -> float:
        return row["gain"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    @torch.no_grad()
    def choice(self) -> Tensor:
        """[S] the most likely shape at every context."""
        return self.network.eval()(self.known.hidden, self.known.scalars).argmax(-1)


def objective(gain: Tensor, risk: float) -> Tensor:
    """[] the loss of contexts with these gains [B] over the base shape."""
    loss = (1 - gain).clamp_min(0).square()
    worst = loss.topk(max(1, math.ceil(WORST * len(loss)))).values
    return -gain.log().mean() + risk * worst.mean()


def train_chooser(
    out: Path,
    method: str,
    folders: list[Path],
    latencies: Latencies,
    options: ChooserOptions,
    settings: dict[str, Any],
    choosing: float = 0.0,
) -> list[dict]:
    """Train and write the chooser of a method; its figures on held-out prompts, see `compare`. A
    chooser that is there is kept.

    folders:  of the labels, one for each temperature.
    settings: `seed`, and what else decides the result besides the options and the labels.
    choosing: seconds that a choice takes, see `time_choice`.
    """
    labels = [sha256(folder / "manifest.json") for folder in folders]
    settings = settings | asdict(options) | {"labels": labels}
    if (out / FILES[0]).is_file():
        card = read_selector_card(out)
        Folder(out).refuse_others(card["settings"], settings)
        return card["figures"]
    known = read_contexts(folders, method, latencies, options.validation, settings["seed"])
    if not known.held.any() or known.held.all():
        raise ValueError(
            "`prompts` must leave texts to train on and texts held out; label more, or longer texts"
        )
    module = _fit(known, options, choosing, settings["seed"])
    figures = compare(known, module.choice(), choosing)
    card = _card(method, known, latencies, figures) | {
        "width": options.width,
        "settings": SETTINGS_FORMAT | settings,
        "epoch": module.best["epoch"],
        "choosing_ms": 1e3 * choosing,
    }
    weights = {name: tensor.contiguous() for name, tensor in module.network.state_dict().items()}
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / FILES[1], save(weights))
    write_object(out / FILES[0], card)
    return figures


def _fit(known: Contexts, options: ChooserOptions, choosing: float, seed: int) -> ChooserModule:
    """A trained module, with the weights of its best epoch."""
    with quiet():
        seed_everything(seed, verbose=False)
        module = ChooserModule(known, options, choosing)
        index = (~known.held).nonzero().squeeze(1)
        loader = DataLoader(TensorDataset(index), options.batch, shuffle=True)
        chosen = {**DEFAULTS, "max_epochs": options.epochs, "gradient_clip_val": 1.0}
        silent = {"enable_checkpointing": False, "enable_progress_bar": False}
        Trainer(**chosen, **silent).fit(module, loader)
    return module


def _card(method: str, known: Contexts, latencies: Latencies, figures: list[dict]) -> dict:
    """What `shape_network.CARD` asks for, but for how the network was trained."""
    contexts = torch.arange(0, LONGEST, LATENCY_STEP).double() + LATENCY_STEP / 2
    calls = {role: latencies.call(role, 1, contexts.numpy()).tolist() for role in ROLES}
    bases = [
        {
            "temperature": row["temperature"],
            "top_p": 1.0,
            "shape": row["base_shape"],
            "constant": row["constant"],
        }
        for row in figures
    ]
    return {
        "format": FORMAT,
        "method": method,
        "drafting": METHODS[method].drafting,
        "shapes": [str(shape) for shape in known.shapes],
        "bases": bases,
        "latency": {"step": LATENCY_STEP, **calls},
        "target": known.manifest["target"],
        "draft": known.manifest["draft"],
        "relaxation": known.manifest["relaxation"],
        "figures": figures,
    }


@torch.inference_mode()
def time_choice(pair: Pair, shapes: int, width: int) -> float:
    """Median milliseconds of a choice for one request on this machine: keeping what a step leaves,
    the features, and the shape.
    """
    device, vocab = pair.target.device, pair.vocab
    sizes = pair.draft.hidden_size, pair.target.hidden_size
    network = ShapeNetwork(sizes[1], sizes[0], shapes, width).eval().to(device)
    setting = torch.zeros(1, len(SETTING_SCALARS), device=device)
    selector = LearnedSelector([], network, 0, setting, LATENCY_STEP)
    draft, target = torch.randn(2, 1, 4, vocab, device=device).softmax(-1)
    tokens = torch.zeros(1, 4, dtype=torch.long, device=device)
    tree = DraftTree(tokens, (-1, 0, 1, 2), draft, target)
    hidden = tuple(torch.randn(1, 4, size, device=device) for size in sizes)
    node = torch.tensor([2], device=device)
    paths = torch.zeros(4, 4, dtype=torch.long, device=device)
    taken = []
    for _ in range(CHOICES):
        began = time.perf_counter()
        state = selector.update(tree, hidden, node, paths)
        context = StepContext(state, draft[:, :2], hidden[0][:, :2], node)
        selector.select(selector.features(context).tolist(), [True])
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)
