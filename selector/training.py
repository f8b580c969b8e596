"""`diversed select`: a network that chooses the tree before each step (delayed trees, arXiv
2602.16994).

    OUT/labels/T=1       contexts and the block efficiency of every shape there, one folder a temperature (data.shapes)
    OUT/choosing-*.json  milliseconds of a choice on the machine that began, where latencies are measured
    OUT/METHOD           selector.json and selector.safetensors, for `--branches OUT/METHOD` and for a bundle

With pi the network's probabilities of the shapes a at a context, BE their block efficiencies and
time their latencies,

    rate = sum of pi(a) BE(a) / sum of pi(a) time(a),      gain = rate / rate of the base shape,
    loss = - mean log(gain) + risk * mean over the worst tenth of max(1 - gain, 0)^2.

The base shape is the best constant one on the training contexts of its temperature. What is
reported is tokens over the sum of time/BE on the contexts of held-out prompts, where the network
takes its most likely shape: contexts lie evenly along texts, and a step begins at about one in BE
of their tokens, so that is what whole texts take. Measured latencies come with the time that a
choice takes on this machine; at a temperature where the network, with that time in every step, is
not faster there than the base shape, the base shape stays and nothing is chosen.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer, seed_everything
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ..data.batches import held_out
from ..data.selection import TextPrompts
from ..files import exclusive, sha256, within, write_whole
from ..runtime.choosers import (
    FILES,
    FORMAT,
    LearnedSelector,
    Shape,
    ShapeNetwork,
    StepContext,
    facts_of,
    parse_shape,
    read_selector_card,
)
from ..runtime.groups import Models, Run
from ..runtime.model import Pair
from ..runtime.prompt import prompt_tokens
from ..runtime.sampling import Sampling
from ..train.fit import DEFAULTS, Training, quiet
from ..verifier.head import LARGEST_SIZE
from ..verifier.law import DraftTree
from ..verifier.methods import METHODS
from .labels import ShapeGatherer, gather_shapes, read_labels, shapes_of
from .latency import Latencies, read_latencies, simulated

WORST = 0.1  # share of a batch in the risk term
FACTS_STEP = 64  # tokens of context between the latencies that a selector is told
GPU = "gpu"
CHOICES = 201  # that are timed
CHOOSING = "choosing-{}x{}.json"
CHOSEN_FOR = ("token", "block", "specinfer", "kseq", "traversal", "gbv", "univer")
SHAPES = (
    *("1", "2", "3", "4", "6", "8", "2x1", "2x2", "2x4", "4x1", "4x2", "4x4"),
    *("2x2+2", "4x2+2", "2x4+2", "2x2+4"),
)


@dataclass(frozen=True)
class Labelling:
    """The contexts that are labelled, and the shapes whose block efficiency is estimated there.

    Args:
        labels: folder for the labels, by default OUT/labels; what is there is used, what was
            interrupted continued.
        methods: whose trees are chosen.
        shapes: to choose from, PATHSxLENGTH+TRUNK; those that branch are left out for token and
            block.
        relaxation: of the texts and of the rows that are verified: none, ensemble:0.3, a bundle
            folder, ...
        temperatures: of both models; one selector serves them all.
        every: tokens between two labelled contexts of a text.
        trees: drawn at a context.
        unit: texts that are labelled and written together.
    """

    labels: str | None = None
    methods: list[str] = field(default_factory=lambda: list(CHOSEN_FOR))
    shapes: list[str] = field(default_factory=lambda: list(SHAPES))
    relaxation: str = "none"
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    every: int = 16
    trees: int = 4
    unit: int = 16

    def __post_init__(self):
        within(1, every=self.every, trees=self.trees, unit=self.unit)


@dataclass(frozen=True)
class Fitting:
    """How a selector is trained.

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
        if not 0 < self.validation < 1:
            raise ValueError(
                "`validation` must be in (0, 1), the share of prompts held out, got"
                f" {self.validation}"
            )


def train_selectors(
    run: Run,
    latencies: str,
    models: Models,
    prompts: TextPrompts,
    labelling: Labelling,
    fitting: Fitting,
) -> None:
    """Label contexts of a task's training prompts, then train a selector for every method."""
    within(2, prompts=prompts.prompts)
    run.use_threads()
    shapes = shapes_of(labelling.shapes)
    assumed = latencies == GPU
    costs = simulated() if assumed else read_latencies(latencies)
    pair, out = models.load(), Path(run.out)
    with exclusive(out):
        folders = _label(out, pair, prompts, labelling, shapes)
        settings = {
            "latencies": latencies if assumed else sha256(latencies),
            **asdict(fitting),
            "seed": prompts.seed,
        }
        choosing = 0.0
        if not assumed:
            timed = out / CHOOSING.format(len(shapes), fitting.width)
            choosing = _kept(timed, lambda: choosing_ms(pair, len(shapes), fitting.width)) / 1e3
        for method in labelling.methods:
            rows = train_selector(out / method, method, folders, costs, settings, choosing)
            print(line(method, rows), flush=True)


def _label(
    out: Path, pair: Pair, prompts: TextPrompts, labelling: Labelling, shapes: list[Shape]
) -> list[Path]:
    """The folders with labels, one a temperature."""
    if prompts.prompt:
        tokens = [prompt_tokens(prompts.prompt, pair.tokenizer)] * prompts.prompts
        limit, stop, source = prompts.max_new_tokens or 64, (), "one prompt"
    else:
        task = prompts.load()
        tokens = [task.encode(example, pair.tokenizer, 384) for example in task.examples]
        limit, stop = prompts.max_new_tokens or task.max_new_tokens, task.stop
        source = task.source
    origin = {"task": prompts.task, "prompt": prompts.prompt, "source": source}
    folders = []
    for temperature in labelling.temperatures:
        gatherer = ShapeGatherer(
            pair,
            Sampling(temperature),
            tuple(labelling.methods),
            shapes,
            labelling.relaxation,
            labelling.every,
            labelling.trees,
            max_new_tokens=limit,
            stop=stop,
        )
        folder = Path(labelling.labels or out / "labels") / f"T={temperature:g}"
        given = (folder, gatherer, tokens.__getitem__, len(tokens), origin)
        folders.append(gather_shapes(*given, labelling.unit, prompts.seed))
    return folders


@dataclass(frozen=True)
class Contexts:
    """What a method's selector learns from and is judged on, S contexts and A shapes.

    hidden: three of [S, H]; scalars: [S, 11]; efficiency, seconds: [S, A]; temperature: [S]; held:
    [S] bool, contexts of held-out prompts; base: [S] index of the best constant shape on the others
    of that temperature; prompt: [S].
    """

    shapes: list[Shape]
    hidden: list[Tensor]
    scalars: Tensor
    efficiency: Tensor
    seconds: Tensor
    temperature: Tensor
    prompt: Tensor
    held: Tensor
    base: Tensor
    manifest: dict

    @property
    def cost(self) -> Tensor:
        """[S, A] seconds a token."""
        return (self.seconds / self.efficiency).double()

    def rate(self, choice: Tensor, chosen: Tensor, choosing: float = 0.0) -> float:
        """Tokens per second of texts through the contexts `chosen` [S] bool where `choice` [S]
        names the shapes and every step takes `choosing` seconds more.
        """
        cost = self.cost[chosen] + choosing / self.efficiency[chosen].double()
        return 1 / float(cost.gather(1, choice[chosen].unsqueeze(1)).mean())


def contexts(
    folders: list[Path], method: str, costs: Latencies, validation: float = 0.25, seed: int = 0
) -> Contexts:
    """The labels in these folders, one a temperature, for one method."""
    parts, temperatures, facts = [], [], []
    for folder in folders:
        labels, manifest = read_labels(folder)
        parts.append(labels)
        sampling = manifest["sampling"]
        temperatures += [sampling["temperature"]] * len(labels["prompt"])
        facts.append(_facts(labels["length"], sampling, costs))
    labels = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    shapes = [parse_shape(shape) for shape in manifest["shapes"]]
    usable = [
        a
        for a, shape in enumerate(shapes)
        if shape.paths == 1 or METHODS[method].drafting != "chain"
    ]
    shapes = [shapes[a] for a in usable]
    efficiency = labels["efficiency"][:, manifest["methods"].index(method), usable]
    length = labels["length"].numpy().astype(float)
    seconds = torch.stack(
        [torch.from_numpy(costs.step(method, shape, length)).float() / 1e3 for shape in shapes], 1
    )
    held = torch.isin(labels["prompt"], held_out(manifest["prompts"], validation, seed))
    temperature, base = (
        torch.tensor(temperatures, dtype=torch.float64),
        torch.zeros(len(held), dtype=torch.long),
    )
    for value in temperature.unique():
        here = (temperature == value) & ~held
        base[temperature == value] = (seconds[here] / efficiency[here]).double().sum(0).argmin()
    hidden = [labels[name].float() for name in ("target_before", "draft_before", "draft_root")]
    scalars = torch.cat([labels["scalars"], torch.cat(facts)], 1)
    return Contexts(
        shapes,
        hidden,
        scalars,
        efficiency,
        seconds,
        temperature,
        labels["prompt"],
        held,
        base,
        manifest,
    )


def _facts(length: Tensor, sampling: dict[str, Any], costs: Latencies) -> Tensor:
    """[S, 5] the last of `selector.SCALARS`, latencies as a selector is told them at run time."""
    middle = ((length // FACTS_STEP).double() + 0.5) * FACTS_STEP
    calls = [costs.call(role, 1, middle.numpy()) for role in ("draft", "target")]
    temperature, top_p, rows = (
        sampling["temperature"],
        sampling["top_p"],
        zip(middle.tolist(), *calls, strict=True),
    )
    return torch.tensor(
        [facts_of(at, temperature, top_p, *each) for at, *each in rows], dtype=torch.float32
    )


class SelectorModule(Training):
    """The network and the paper's objective; `best` holds the weights of the epoch whose choices
    were fastest on the
    held-out prompts, which flatters them there: judge a selector by other prompts.

    Batches are indices of contexts. choosing: seconds that a choice takes.
    """

    def __init__(self, known: Contexts, lr: float, risk: float, width: int, choosing: float = 0.0):
        super().__init__(lr, weight_decay=0.01, warmup_steps=0, patience=0)
        self.known, self.risk, self.choosing = known, risk, choosing
        sizes = known.hidden[0].shape[1], known.hidden[1].shape[1]
        common = int(known.base[~known.held].mode().values)
        self.network = ShapeNetwork(*sizes, len(known.shapes), width, common)
        self.network.standardise(known.scalars[~known.held])

    def logits(self, index: Tensor) -> Tensor:
        return self.network([part[index] for part in self.known.hidden], self.known.scalars[index])

    def gain(self, index: Tensor) -> Tensor:
        """[B] expected rate over that of the base shape."""
        known, share = self.known, self.logits(index).softmax(-1)
        efficiency, seconds, base = (
            known.efficiency[index],
            known.seconds[index],
            known.base[index].unsqueeze(1),
        )
        rate = (share * efficiency).sum(1) / (share * seconds).sum(1)
        return rate * (seconds.gather(1, base) / efficiency.gather(1, base)).squeeze(1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return objective(self.gain(batch[0]), self.risk)

    def figures(self) -> dict:
        rows = figures(self.known, self.choice(), self.choosing)
        self.train()
        return {"gain": sum(math.log(row["selector"] / row["base"]) for row in rows)}

    def score(self, row: dict) -> float:
        return row["gain"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    @torch.no_grad()
    def choice(self) -> Tensor:
        """[S] the most likely shape at every context."""
        return self.eval().logits(torch.arange(len(self.known.base))).argmax(-1)


def objective(gain: Tensor, risk: float) -> Tensor:
    """[] the loss of contexts with these gains [B] over the base shape."""
    loss = (1 - gain).clamp_min(0).square()
    worst = loss.topk(max(1, math.ceil(WORST * len(loss)))).values
    return -gain.log().mean() + risk * worst.mean()


@torch.inference_mode()
def choosing_ms(pair: Pair, shapes: int, width: int) -> float:
    """Median of a choice for one request on this machine: what a step leaves for it, the network,
    the shape.
    """
    device, hidden, vocab = (
        pair.target.device,
        (pair.draft.hidden_size, pair.target.hidden_size),
        pair.vocab,
    )
    network = ShapeNetwork(hidden[1], hidden[0], shapes, width).eval().to(device)
    selector = LearnedSelector([], network, 0, [facts_of(0, 0, 0, 0, 0)], FACTS_STEP)
    draft, target = torch.randn(2, 1, 4, vocab, device=device).softmax(-1)
    tree = DraftTree(
        torch.zeros(1, 4, dtype=torch.long, device=device), (-1, 0, 1, 2), draft, target
    )
    states = tuple(torch.randn(1, 4, size, device=device) for size in hidden)
    node, paths = (
        torch.tensor([2], device=device),
        torch.zeros(4, 4, dtype=torch.long, device=device),
    )
    taken = []
    for _ in range(CHOICES):
        began = time.perf_counter()
        before = selector.update(tree, states, node, paths)
        known = StepContext(before, draft[:, :2], states[0][:, :2], node)
        selector.select(selector.features(known).tolist(), [True])
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def _kept(file: Path, measure: Callable[[], float]) -> float:
    """The number in the file, measured and written where there is none: a run that continues must
    not time anew.
    """
    if not file.is_file():
        write_whole(file, json.dumps({"choosing_ms": measure()}) + "\n")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["choosing_ms"]
        if 0 <= found < math.inf:
            return found
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(
        f"{file} is damaged: delete it, and the selectors beside it that were trained with it"
    )


def train_selector(
    out: Path,
    method: str,
    folders: list[Path],
    costs: Latencies,
    settings: dict,
    choosing: float = 0.0,
) -> list[dict]:
    """Train and write one selector; its figures on held-out prompts, one row a temperature. Kept
    where it is there.

    choosing: seconds that a choice takes, see `choosing_ms`.
    """
    settings = settings | {"labels": [sha256(folder / "manifest.json") for folder in folders]}
    if (out / FILES[0]).is_file():
        card = read_selector_card(out)
        if card["settings"] != settings:
            raise ValueError(
                f"{out} was trained with other settings or labels; choose another --out or"
                " delete it"
            )
        return card["figures"]
    known = contexts(folders, method, costs, settings["validation"], settings["seed"])
    if not known.held.any() or known.held.all():
        raise ValueError(
            "`prompts` must leave texts to train on and texts held out; label more, or longer texts"
        )
    with quiet():
        seed_everything(settings["seed"], verbose=False)
        module = SelectorModule(
            known, settings["lr"], settings["risk"], settings["width"], choosing
        )
        index = (~known.held).nonzero().squeeze(1)
        loader = DataLoader(TensorDataset(index), settings["batch"], shuffle=True)
        options = {**DEFAULTS, "max_epochs": settings["epochs"], "gradient_clip_val": 1.0}
        quietly = {"enable_checkpointing": False, "enable_progress_bar": False}
        Trainer(**options, **quietly).fit(module, loader)
    module.restore_best()
    rows = figures(known, module.choice(), choosing)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(
        out / FILES[1],
        save({name: t.contiguous() for name, t in module.network.state_dict().items()}),
    )
    card = _card(method, known, costs, settings, module.best["epoch"], rows) | {
        "choosing_ms": 1e3 * choosing
    }
    write_whole(out / FILES[0], json.dumps(card, indent=2) + "\n")
    return rows


def figures(known: Contexts, choice: Tensor, choosing: float = 0.0) -> list[dict]:
    """For every temperature tokens per second on held-out prompts: of the base shape, of the
    choice, and of the best shape at each context, which knows the labels and is therefore above
    what any choice could reach.

    `constant`: the choice is not faster, so that the base shape stays and its rate is the
        selector's.
    """
    ideal, rows = known.cost.argmin(1), []
    for value in known.temperature.unique():
        here = known.held & (known.temperature == value)
        rates = {
            "base": known.rate(known.base, here),
            "selector": known.rate(choice, here, choosing),
        }
        constant = rates["selector"] <= rates["base"]
        rates |= {"selector": max(rates.values()), "ideal": known.rate(ideal, here)}
        base = str(known.shapes[int(known.base[here][0])])
        row = {
            "temperature": float(value),
            "base_shape": base,
            "contexts": int(here.sum()),
            **rates,
        }
        rows.append(row | {"constant": constant})
    return rows


def settled(known: Contexts, choice: Tensor, card: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[S] the choice, or the base shape where a selector's card says that it stays; [S] seconds
    that choosing takes.
    """
    constant = [base["temperature"] for base in card["bases"] if base.get("constant")]
    stays = torch.isin(known.temperature, torch.tensor(constant, dtype=torch.float64))
    return known.base.where(stays, choice), card.get("choosing_ms", 0.0) / 1e3 * ~stays


def _card(
    method: str, known: Contexts, costs: Latencies, settings: dict, epoch: int, rows: list[dict]
) -> dict:
    middle = torch.arange(0, 4096, FACTS_STEP).double().add(FACTS_STEP / 2).numpy()
    manifest = known.manifest
    return {
        "format": FORMAT,
        "method": method,
        "drafting": METHODS[method].drafting,
        "shapes": [str(shape) for shape in known.shapes],
        "width": settings["width"],
        "bases": [
            {
                "temperature": row["temperature"],
                "top_p": 1.0,
                "shape": row["base_shape"],
                "constant": row["constant"],
            }
            for row in rows
        ],
        "latency": {
            "step": FACTS_STEP,
            **{role: costs.call(role, 1, middle).tolist() for role in ("draft", "target")},
        },
        "target": manifest["target"],
        "draft": manifest["draft"],
        "relaxation": manifest["relaxation"],
        "settings": settings,
        "epoch": epoch,
        "figures": rows,
    }


def line(method: str, rows: list[dict]) -> str:
    """The figures of a selector in words."""
    return "\n".join(
        f"{method} at T={row['temperature']:g}: {row['selector']:.1f} tokens/s predicted on"
        f" held-out prompts, {row['base']:.1f} with {row['base_shape']} always, {row['ideal']:.1f}"
        " with the labels known"
        + f"; choosing is not faster, so {row['base_shape']} stays"
        * row.get("constant", False)
        for row in rows
    )
