"""The options of a sweep, and the sweep that they ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import product

from ..data.prompts import checksum
from ..data.selection import SplitPrompts
from ..files import SCORING, versions, within
from ..runtime.bundle import head_sha256
from ..runtime.engine import Engine, check_prompts
from ..runtime.groups import Models, SharedRun, check_filters
from ..runtime.relaxer import contents
from ..runtime.sampling import Sampling
from ..verifier.fly import WINDOW
from ..verifier.methods import method as find_method
from ..verifier.relax import parse
from .comparison import Least
from .results import SETTINGS
from .sweep import Cell, Sweep

STATIC = [f"ensemble:0.{tenth}" for tenth in range(1, 10)]
# The other rules that need no training, mild and strong. The last two are a control: they truncate
# the target's own row, which is a part of what cascade-token and typical do.
RULES = [
    "ensemble:0.3;blend=logits",
    "ensemble:0.6;blend=logits",
    "lenient:0.5",
    "mentored:2",
    "mentored:5",
    "cascade-opt:0.1",
    "cascade-diff:0.1",
    "cascade-chow:0.1",
    "divergence:0.5",
    "divergence:2",
    "cascade-token:0.97",
    "typical:0.09,0.3",
    "typical:0.02,0.1",
    "regret:2",
    "regret:4",
    "min-p:0.05",
    "top-p:0.9",
]


@dataclass(frozen=True)
class Grid:
    """What is decoded and compared.

    Args:
        methods: such as token or block; `plain`, the target alone, and fly, which is lossy by
            itself, are run with relaxation none only.
        relaxations: none, ensemble:0.3, another rule without training (`diversed decode --help`
            lists them), a bundle folder, package.module:NAME; after any `;bias=0.5` or `;budget=3`.
        temperatures: everything is decoded at each of these; by default at the sampling's one.
        draft_lengths: and with each of these; by default with `draft_length`.
        seeds: of the sampled texts; every seed decodes every prompt once.
        chosen: learned points that were chosen on other prompts; only the others' intervals are
            corrected for how many of them are looked at.
        draft_length: tokens drafted per target call.
        sampling: temperature, top_k, top_p, min_p of both models.
        least: least differences that count: a learned point is not called better by less.
    """

    methods: list[str] = field(default_factory=lambda: ["token"])
    relaxations: list[str] = field(default_factory=lambda: ["none", *STATIC, *RULES])
    temperatures: list[float] | None = None
    draft_lengths: list[int] | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    chosen: list[str] = field(default_factory=list)
    draft_length: int = 5
    sampling: Sampling = Sampling()
    least: Least = Least()

    def __post_init__(self):
        within(1, draft_length=self.draft_length)

    def cells(self) -> list[Cell]:
        """Every way of decoding once, in the order given. What is wrong with them is said before
        any model is loaded.
        """
        temperatures, lengths = self.temperatures, self.draft_lengths
        temperatures = [self.sampling.temperature] if temperatures is None else temperatures
        lengths = [self.draft_length] if lengths is None else lengths
        lists = {"methods": self.methods, "relaxations": self.relaxations, "seeds": self.seeds}
        lists |= {"temperatures": temperatures, "draft_lengths": lengths}
        for name, values in lists.items():
            if not values:
                raise ValueError(f"`{name}` is empty; name at least one")
        check_filters(self.sampling, temperatures)
        if len(self.seeds) > 1 and not any(temperatures):
            raise ValueError(
                "several `seeds` would give the same texts at temperature 0, which draws nothing;"
                " give one"
            )
        default = self.relaxations in (["none"], Grid().relaxations)
        if set(self.methods) == {"plain"} and not default:
            raise ValueError(
                "`relaxations` would change nothing beside method plain, which drafts nothing;"
                " leave them out"
            )
        for relaxation in self.relaxations:
            parse(relaxation)
        for temperature in temperatures:
            Sampling(temperature=temperature)
        for length in lengths:
            within(1, draft_lengths=length)
        if bad := [seed for seed in self.seeds if not 0 <= seed < 2**31]:
            raise ValueError(f"`seeds` must lie in 0..{2**31 - 1}, got {bad[0]}")
        found: list[Cell] = []
        for temperature, length in product(temperatures, lengths):
            methods = [*self.methods, *self._lossy(temperature, length)]
            found += self._cells_at(methods, float(temperature), length)
        return list(dict.fromkeys(found))

    def _lossy(self, temperature: float, length: int) -> list[str]:
        """The lossy methods that stand beside the default relaxations at temperature 0."""
        if temperature or length < 2 or self.relaxations != Grid().relaxations:
            return []
        return ["fly" if length > WINDOW else f"fly:{length - 1}"]

    def _cells_at(self, methods: list[str], temperature: float, length: int) -> list[Cell]:
        found = []
        for method in methods:
            plain = method == "plain"
            alone = plain or find_method(method).ahead
            relaxations = ["none"] if alone else self.relaxations
            drafted = 0 if plain else length
            for relaxation, seed in product(relaxations, self.seeds):
                found.append(Cell(method, relaxation, temperature, drafted, seed))
        return found


def prepare(run: SharedRun, models: Models, prompts: SplitPrompts, grid: Grid, batch: int) -> Sweep:
    """The sweep over a grid, with its models and prompts loaded; `batch` prompts are decoded
    together.
    """
    within(1, batch=batch)
    folder = run.folder(SETTINGS)
    cells = grid.cells()
    run.use_threads()
    pair = models.load()
    engines = {}
    for cell in dict.fromkeys(cell._replace(seed=0) for cell in cells):
        sampling = replace(grid.sampling, temperature=cell.temperature)
        way = cell.method, cell.relaxation, cell.draft_length
        engines[cell] = Engine(pair, *way, sampling=sampling)
    task = prompts.load()
    most = prompts.max_prompt_tokens
    encoded = task.encode_all(pair.tokenizer, most)
    new_tokens = prompts.max_new_tokens or task.max_new_tokens
    for engine in engines.values():
        check_prompts(pair, dict(enumerate(encoded)), new_tokens + engine.shape.depth + 1)
    first = cells[0]
    draft_length = grid.draft_lengths[0] if grid.draft_lengths else grid.draft_length
    settings = {
        **pair.settings,
        "prompts": len(encoded),
        "draft_length": draft_length,  # also if the first cell drafts nothing
        "sampling": asdict(grid.sampling) | {"temperature": first.temperature},
        "max_prompt_tokens": most,
        "max_new_tokens": new_tokens,
        "batch": batch,
        "seed": prompts.seed,
        "dtype": str(pair.target.dtype),
        "device": models.device,
        "threads": run.threads,
        **task.settings,
        "prompts_sha256": checksum(encoded),
        "versions": versions(SCORING),
        "chosen": grid.chosen,
        "least": asdict(grid.least),
        "heads": _heads(engines.values()),
        "contents": contents([e.relaxer.rule for e in engines.values()], grid.methods),
    }
    return Sweep(folder, cells, engines, task, encoded, new_tokens, batch, settings)


def _heads(engines: Iterable[Engine]) -> dict[str, str]:
    """Checksum of every bundle's head: results of two heads must not be mixed under one name."""
    rules = {engine.relaxer.rule for engine in engines if engine.relaxer.rule.folder}
    return {rule.source: head_sha256(rule.folder) for rule in sorted(rules, key=str)}
