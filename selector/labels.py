"""What a chooser learns from: contexts along a pair's texts, and the tokens per step of every shape
there.

Both models run over a text once. Every 16th token of it is a context; the first one differs from
prompt to prompt, so that all places of a text occur. At each context some supertrees are drawn, and
the target runs on all their nodes in one call. The tokens per step of a shape are exact over the
verification and a mean over these supertrees. With a relaxation the rows are the relaxed ones, so a
chooser is made for the verifier that it will run with.

    shard-00000.safetensors ...    flat tensors over S contexts, see LAYOUT
    manifest.json                  what they were labelled with, and the sha256 of every file
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ..data.prompts import checksum
from ..data.shards import ShardFolder
from ..data.traces import MANIFEST, read_manifest, shard_name
from ..files import Folder, Progress, cut_units, sha256, within, write_whole
from ..runtime.batch import padded
from ..runtime.cache import PackedCache
from ..runtime.drafting import DraftShape
from ..runtime.engine import check_prompts
from ..runtime.forward import Model, Pair
from ..runtime.relaxer import Relaxer, contents, load_relaxer
from ..runtime.rollouts import Sampler
from ..runtime.sampling import Sampling, beliefs, probabilities
from ..runtime.shape_network import row_scalars
from ..runtime.shapes import Shape, parse_shape
from ..runtime.slots import Layout, Place, Side
from ..runtime.uniforms import uniforms
from ..verifier.law import DraftTree
from ..verifier.methods import METHODS
from ..verifier.relax import Believed
from .supertree import Supertree, take_part
from .tokens_per_step import chain_tokens, tree_tokens

CHOSEN_FOR = ("token", "block", "specinfer", "kseq", "traversal", "gbv", "univer")
CHAINS = ("1", "2", "3", "4", "6", "8")
TREES = ("2x1", "2x2", "2x4", "4x1", "4x2", "4x4", "2x2+2", "4x2+2", "2x4+2", "2x2+4")
LAYOUT = {
    "prompt": "[S] int64 number of the text's prompt",
    "length": "[S] int64 committed tokens before the root",
    "target_before": "[S, H_target] float16 the target's hidden state at the token before the root",
    "draft_before": "[S, H_draft] float16 the draft's there",
    "draft_root": "[S, H_draft] float16 the draft's at the root",
    "scalars": "[S, 6] float32 `shape_network.row_scalars`",
    "efficiency": (
        "[S, M, A] float32 tokens per step of each method and shape; 0 if a method cannot grow it"
    ),
}


@dataclass(frozen=True)
class Labelling:
    """Which contexts are labelled, and with which shapes.

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
    shapes: list[str] = field(default_factory=lambda: [*CHAINS, *TREES])
    relaxation: str = "none"
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    every: int = 16
    trees: int = 4
    unit: int = 16

    def __post_init__(self):
        within(1, every=self.every, trees=self.trees, unit=self.unit)

    @cached_property
    def parsed(self) -> tuple[Shape, ...]:
        """The shapes, each once."""
        return tuple(dict.fromkeys(map(parse_shape, self.shapes)))


@dataclass(frozen=True)
class Labeller:
    """Writes texts of one pair under one sampling and labels contexts in them.

    max_new_tokens, stop: of the texts.
    rows: supertrees that are verified together.
    """

    pair: Pair
    sampling: Sampling
    labelling: Labelling
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    rows: int = 64

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the labels of a text, for a manifest."""
        return {
            **self.pair.settings,
            "sampling": vars(self.sampling),
            "relaxation": self.labelling.relaxation,
            "contents": contents([self.relaxer.rule]),
            "methods": self.labelling.methods,
            "shapes": [str(shape) for shape in self.labelling.parsed],
            "every": self.labelling.every,
            "trees": self.labelling.trees,
            "rows": self.rows,
            "max_new_tokens": self.max_new_tokens,
        }

    @cached_property
    def relaxer(self) -> Relaxer:
        return load_relaxer(self.labelling.relaxation, self.pair, self.sampling)

    @cached_property
    def supertrees(self) -> list[Supertree]:
        """One for each drafting law; that of `paths` holds the chains of all methods too."""
        drafting = {METHODS[name].drafting for name in self.labelling.methods} - {"chain"}
        branching = tuple(shape for shape in self.labelling.parsed if shape.paths > 1)
        chains = tuple(shape for shape in self.labelling.parsed if shape.paths == 1)
        found = {law: branching for law in sorted(drafting)}
        found["paths"] = found.get("paths", ()) + chains
        return [Supertree(law, shapes) for law, shapes in found.items() if shapes]

    @torch.no_grad()
    def run(self, prompts: dict[int, list[int]], seed: int) -> dict[str, Tensor]:
        """The tensors of LAYOUT for one text of every prompt."""
        texts, every = self._texts(prompts, seed), self.labelling.every
        roots = [
            (row, prompt, at)
            for row, (prompt, tokens) in enumerate(prompts.items())
            for at in range(len(tokens) + prompt % every, len(texts[row]) - 1, every)
        ]
        if not roots:
            return {}
        passes = [self._pass(model, texts) for model in (self.pair.target, self.pair.draft)]
        size = max(1, self.rows // self.labelling.trees)
        parts = []
        for unit in cut_units(len(roots), size):
            chosen = roots[unit.start : unit.stop]
            parts.append(self._contexts(chosen, texts, passes, seed))
        return {name: torch.cat([part[name] for part in parts]) for name in LAYOUT}

    def check(self, prompts: dict[int, list[int]]) -> None:
        """Refuse prompts that leave no room for a text and a tree, and a relaxation that fails."""
        deepest = max(supertree.topology.depth for supertree in self.supertrees)
        check_prompts(self.pair, prompts, self.max_new_tokens + deepest + 1)
        _ = self.relaxer

    def _texts(self, prompts: dict[int, list[int]], seed: int) -> list[list[int]]:
        """One text after every prompt, the prompt included."""
        sampler = Sampler(self.pair, self.relaxer, self.sampling, self.max_new_tokens, self.stop)
        samples = sampler.run(prompts, 1, lambda prompt, _: (seed << 44) ^ (prompt << 16))
        pairs = zip(prompts.values(), samples, strict=True)
        return [prompt + sample.tokens for prompt, sample in pairs]

    def _pass(self, model: Model, texts: list[list[int]]) -> _Pass:
        tokens, _ = padded(texts, self.pair.target.device)
        nodes = max(supertree.topology.nodes for supertree in self.supertrees)
        cache = model.cache(tokens.shape[1] + nodes)
        out = model(tokens, None, None, cache, hidden=True)
        return _Pass(model, out.logits, out.hidden, cache)

    def _contexts(
        self,
        roots: list[tuple[int, int, int]],
        texts: list[list[int]],
        passes: list[_Pass],
        seed: int,
    ) -> dict[str, Tensor]:
        """The tensors of LAYOUT for some roots: (row of the text, prompt, position of the root)."""
        device, trees = self.pair.target.device, self.labelling.trees
        row, prompt, at = torch.tensor(roots, device=device).unbind(1)
        token = torch.tensor([texts[r][a] for r, _, a in roots], device=device)
        target, draft = passes
        before = [probabilities(one.logits[row, at - 1], self.sampling) for one in passes]
        repeat = torch.arange(len(roots), device=device).repeat_interleave(trees)
        tree = torch.arange(len(repeat), device=device) % trees
        seeds = (seed << 44) ^ (prompt[repeat] << 16) ^ (tree + 1)
        found = self._tokens_per_step(passes, _Roots(row[repeat], at[repeat], token[repeat], seeds))
        labels = {
            "prompt": prompt,
            "length": at,
            "target_before": target.hidden[row, at - 1].half(),
            "draft_before": draft.hidden[row, at - 1].half(),
            "draft_root": draft.hidden[row, at].half(),
            "scalars": row_scalars(*before, probabilities(draft.logits[row, at], self.sampling)),
            "efficiency": found.unflatten(0, (len(roots), trees)).mean(1),
        }
        return {name: tensor.cpu() for name, tensor in labels.items()}

    def _tokens_per_step(self, passes: list[_Pass], roots: _Roots) -> Tensor:
        """[R, M, A] of one drawn tree each."""
        methods, shapes = self.labelling.methods, self.labelling.parsed
        size = len(roots.length), len(methods), len(shapes)
        found = torch.zeros(size, device=roots.length.device)
        for supertree in self.supertrees:
            tree = self._drawn(supertree, passes, roots)
            for a, shape in enumerate(shapes):
                if shape in supertree.shapes:
                    self._fill(found[:, :, a], supertree, tree, shape)
        return found

    def _fill(self, found: Tensor, supertree: Supertree, tree: DraftTree, shape: Shape) -> None:
        """Write the tokens per step of one shape into found [R, M], for the methods that grow it
        as a part of this supertree.
        """
        if shape.paths == 1:
            by = {coupled: _chains(tree, supertree, shape, coupled) for coupled in (False, True)}
            for m, name in enumerate(self.labelling.methods):
                found[:, m] = by[METHODS[name].on_chain == "block"]
            return
        part = take_part(tree, supertree.part(shape))
        for m, name in enumerate(self.labelling.methods):
            if METHODS[name].drafting == supertree.drafting:
                found[:, m] = tree_tokens(METHODS[name].unchecked, part)

    def _drawn(self, supertree: Supertree, passes: list[_Pass], roots: _Roots) -> DraftTree:
        """The supertree drawn under every root, with the rows of the draft and the relaxed ones of
        the target.
        """
        topology = supertree.topology
        relaxer = self.relaxer
        target, draft = (_Run(one, topology, roots, relaxer) for one in passes)
        uniform = uniforms(roots.seed, roots.length + 1, topology.nodes + supertree.most)
        tokens = roots.token.unsqueeze(1)
        for depth in range(1, topology.depth + 1):
            drawn = supertree.draw(draft.rows, depth, uniform)
            draft.extend(drawn)
            draft.rows[:, -drawn.shape[1] :] *= (drawn >= 0).unsqueeze(-1)
            tokens = torch.cat([tokens, drawn], 1)
        target.extend(tokens[:, 1:])
        tree = DraftTree(tokens, topology.parents, draft.rows, target.rows)
        believed = None
        if relaxer.believes:
            believed = Believed(target.believed, draft.believed)
        return relaxer.tree(tree, (draft.hidden, target.hidden), believed)


@dataclass(frozen=True)
class _Pass:
    """A model's run over the texts: logits [B, T, V], hidden states [B, T, H], and its cache."""

    model: Model
    logits: Tensor
    hidden: Tensor
    cache: PackedCache


@dataclass(frozen=True)
class _Roots:
    """R roots, each [R]: row of the text, committed tokens before the root, the root, seed."""

    row: Tensor
    length: Tensor
    token: Tensor
    seed: Tensor


class _Run:
    """A model's run over trees below R roots: rows [R, n, V] and hidden states [R, n, H] of the
    nodes so far; what it believes there, rows of no tokens unless the relaxer reads that.
    """

    def __init__(self, one: _Pass, topology: DraftShape, roots: _Roots, relaxer: Relaxer):
        device, at = roots.length.device, (roots.row, roots.length)
        self.relaxer, self.layout = relaxer, Layout(one.model, topology)
        self.place = Place(roots.length.tolist(), device)
        self.rows, self.believed = self._rows(one.logits[at].unsqueeze(1))
        self.hidden = one.hidden[at].float().unsqueeze(1)
        cache = copy.copy(one.cache)
        cache.layers = [copy.copy(layer) for layer in one.cache.layers]
        cache.select(roots.row)
        self.side = Side(one.model, cache, device)

    def extend(self, tokens: Tensor) -> None:
        """Run the model on the next n nodes, whose tokens are [R, n]."""
        out = self.side(self.layout, self.place, tokens, self.rows.shape[1], hidden=True)
        rows, believed = self._rows(out.logits)
        self.rows = torch.cat([self.rows, rows], 1)
        self.believed = torch.cat([self.believed, believed], 1)
        self.hidden = torch.cat([self.hidden, out.hidden.float()], 1)

    def _rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = probabilities(logits, self.relaxer.sampling)
        return rows, beliefs(logits) if self.relaxer.believes else rows[..., :0]


def _chains(tree: DraftTree, supertree: Supertree, shape: Shape, coupled: bool) -> Tensor:
    """[R] tokens per step of a chain, the mean over the rollouts of the root that are long
    enough.
    """
    found = []
    for first in range(supertree.most):
        if (0, first, shape.length) in supertree.node:
            chain = take_part(tree, supertree.part(shape, first))
            found.append(chain_tokens(chain, coupled)[:, -1])
    return torch.stack(found).mean(0)


def write_labels(
    out: str | Path,
    labeller: Labeller,
    prompts: list[list[int]],
    origin: dict[str, Any],
    seed: int = 0,
) -> Path:
    """Write the labels of encoded prompts to a folder; one that was begun with the same settings is
    continued.

    origin: where the prompts come from, for the manifest.
    """
    settings = {
        **labeller.settings,
        "unit": labeller.labelling.unit,
        "seed": seed,
        "prompts": len(prompts),
        "samples": 1,
        **origin,
        "prompts_sha256": checksum(prompts),
    }
    folder = Folder(Path(out), MANIFEST)
    with folder.held():
        shards = ShardFolder(folder, settings)
        missing = shards.begin(lambda entry, _: _whole(folder.path, entry))
        share = len(shards.share)
        with Progress("label", share, share - len(missing)) as progress:
            for chosen in missing:
                labels = labeller.run({prompt: prompts[prompt] for prompt in chosen}, seed)
                entry = _write_shard(folder.path, shards.number(chosen), labels)
                shards.add(entry | {"texts": len(chosen)})
                progress.add()
        shards.finish()
    return folder.path


def _write_shard(folder: Path, number: int, labels: dict[str, Tensor]) -> dict[str, Any]:
    """Write one file of labels; its entry in the manifest, which calls contexts tokens."""
    path = folder / shard_name(number)
    write_whole(path, save({name: tensor.contiguous() for name, tensor in labels.items()}))
    return {"file": path.name, "sha256": sha256(path), "tokens": len(labels.get("prompt", ()))}


def _whole(folder: Path, entry: dict[str, Any]) -> Path:
    """The file of a shard; ValueError unless it is the one that the manifest names."""
    path = folder / entry["file"]
    if not path.is_file() or sha256(path) != entry["sha256"]:
        raise ValueError(
            f"{path} is missing or damaged; run `diversed select` again, it labels these texts anew"
        )
    return path


def read_labels(folder: str | Path) -> tuple[dict[str, Tensor], dict]:
    """(the tensors of LAYOUT, the manifest) of a folder that is complete; a damaged file is
    refused.
    """
    manifest = read_manifest(folder)
    parts = []
    for entry in manifest["shards"]:
        path = _whole(Path(folder), entry)
        if entry["tokens"]:
            parts.append(load_file(path))
    return {name: torch.cat([part[name] for part in parts]) for name in LAYOUT}, manifest
