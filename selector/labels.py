"""What a selector learns from: contexts along a pair's texts, and the block efficiency of every
tree shape there.

Both models run over a text once. From every 16th token, the first of them another for each prompt
so that all places
of a text are among them, a comb is drafted: a trunk, and at each of its nodes from which a shape
    may branch as many
rollouts as the shapes ask for. Every shape is a part of the comb, so one call of the target covers
them all; the efficiency is exact over the verification and a mean over `trees` combs. With a
relaxation the rows are the relaxed ones, so the selector is made for the verifier that it will run
with.

    shard-00000.safetensors ...    flat tensors over S contexts, see LAYOUT
    manifest.json                  what they were gathered with, and the sha256 of every file, as for traces
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from ..data.traces import read_manifest, write_manifest
from ..files import sha256, write_whole
from ..runtime.batch import padded
from ..runtime.choosers import Shape, parse_shape, row_scalars
from ..runtime.drafting import DraftShape, children
from ..runtime.engine import check_prompts
from ..runtime.model import Pair
from ..runtime.progress import bar
from ..runtime.relaxer import Relaxer, load_relaxer
from ..runtime.rollouts import Sampler
from ..runtime.sampling import Sampling, probabilities
from ..runtime.uniforms import uniforms
from ..verifier.efficiency import block_efficiency, chain_efficiency
from ..verifier.law import DraftTree, inverse_cdf
from ..verifier.methods import METHODS
from ..verifier.tree import on_device

LAYOUT = {
    "prompt": "[S] int64 number of the text's prompt",
    "length": "[S] int64 committed tokens before the root",
    "target_before": "[S, H_target] float16 the target's hidden state at the token before the root",
    "draft_before": "[S, H_draft] float16 the draft's there",
    "draft_root": "[S, H_draft] float16 the draft's at the root",
    "scalars": "[S, 6] float32 `selector.row_scalars`",
    "efficiency": (
        "[S, M, A] float32 new tokens per target call of each method and shape; 0 where a method"
        " has no tree"
    ),
}


def columns(drafting: str, paths: int, most: int) -> list[int]:
    """Rollouts of a branching node that make up K paths; a greedy node's sampled child is another
    for every K.
    """
    return [*range(paths - 1), most - 2 + paths] if drafting == "greedy" else list(range(paths))


@dataclass(frozen=True)
class Comb:
    """The smallest tree of which every shape is a part, under one drafting law.

    keys: of every node, by depth: (-1, -1, depth) on the trunk, (trunk, column, place) on a
        rollout, place from 1.
    """

    drafting: str
    shapes: tuple[Shape, ...]

    @property
    def most(self) -> int:
        return max(shape.paths for shape in self.shapes)

    @cached_property
    def keys(self) -> list[tuple[int, int, int]]:
        reach: dict[tuple[int, int], int] = {}
        for shape in self.shapes:
            for column in columns(self.drafting, shape.paths, self.most):
                place = shape.trunk, column
                reach[place] = max(reach.get(place, 0), shape.length)
        trunk = max(trunk for trunk, _ in reach)
        keys = [(-1, -1, depth) for depth in range(trunk + 1)]
        keys += [(*place, step) for place, length in reach.items() for step in range(1, length + 1)]
        return sorted(keys, key=lambda key: (max(key[0], 0) + key[2], key))

    @cached_property
    def place(self) -> dict[tuple[int, int, int], int]:
        return {key: node for node, key in enumerate(self.keys)}

    @cached_property
    def topology(self) -> DraftShape:
        return DraftShape(tuple(self._parent(key) for key in self.keys), self.drafting)

    def _parent(self, key: tuple[int, int, int]) -> int:
        trunk, column, step = key
        if step == 0:
            return -1
        if trunk < 0 or step > 1:
            return self.place[trunk, column, step - 1]
        return self.place[-1, -1, trunk]

    def part(self, shape: Shape, first: int = 0) -> list[int]:
        """Nodes of the shape in the order of its own topology; `first` shifts the rollouts of one
        path.
        """
        chosen = [column + first for column in columns(self.drafting, shape.paths, self.most)]
        trunk = [self.place[-1, -1, depth] for depth in range(shape.trunk + 1)]
        below = [
            self.place[shape.trunk, column, step]
            for step in range(1, shape.length + 1)
            for column in chosen
        ]
        return trunk + below

    def draw(self, rows: Tensor, level: int, coins: Tensor) -> Tensor:
        """Tokens [R, n] of the nodes of depth `level`; rows: [R, N, V] of the draft, coins: [R, N]."""
        first, last = self.topology.bounds[level : level + 2]
        tokens = []
        for node in range(first, last):
            trunk, column, step = self.keys[node]
            row, coin = rows[:, self.topology.parents[node]], coins[:, node : node + 1]
            if trunk >= 0 and step == 1 and self.drafting != "paths":
                begin = self.place.get((trunk, 0, 1), node)
                token = self._first(row, column, coins[:, begin : begin + self.most])
            else:
                token = inverse_cdf(row, coin)
            tokens.append(torch.where(row.sum(-1, keepdim=True) > 0, token, -1))
        return torch.cat(tokens, 1)

    def _first(self, row: Tensor, column: int, coins: Tensor) -> Tensor:
        """[R, 1] the first token of a rollout whose siblings it must differ from."""
        if self.drafting == "without_replacement":
            return children(
                self.drafting, row.unsqueeze(1), column + 1, coins[:, None, : column + 1]
            )[:, 0, -1:]
        if column < self.most - 1:
            return row.topk(column + 1, dim=-1).indices[:, -1:]
        count = column - self.most + 2
        return children(self.drafting, row.unsqueeze(1), count, coins[:, None, :count])[:, 0, -1:]


@dataclass(frozen=True)
class ShapeGatherer:
    """Texts and labels of one pair under one sampling.

    relaxation: of the texts and of the rows that are verified.
    every:      tokens between two contexts; trees: combs a context; rows: of combs that are verified together.
    """

    pair: Pair
    sampling: Sampling
    methods: tuple[str, ...]
    shapes: tuple[Shape, ...]
    relaxation: str = "none"
    every: int = 16
    trees: int = 4
    rows: int = 64
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()

    @cached_property
    def relaxer(self) -> Relaxer:
        return load_relaxer(self.relaxation, self.pair, self.sampling)

    @cached_property
    def combs(self) -> dict[str, Comb]:
        """By drafting law; that of paths holds the chains of all methods, as long as any."""
        found = {}
        for name in self.methods:
            if METHODS[name].drafting != "chain":
                found[METHODS[name].drafting] = tuple(
                    shape for shape in self.shapes if shape.paths > 1
                )
        chains = tuple(shape for shape in self.shapes if shape.paths == 1)
        found["paths"] = found.get("paths", ()) + chains
        return {drafting: Comb(drafting, shapes) for drafting, shapes in found.items() if shapes}

    @torch.no_grad()
    def run(self, prompts: dict[int, list[int]], seed: int) -> dict[str, Tensor]:
        """The tensors of LAYOUT for one text of every prompt."""
        deepest = max(comb.topology.depth for comb in self.combs.values())
        check_prompts(self.pair, prompts, self.max_new_tokens + deepest + 1)
        sampler = Sampler(self.pair, self.relaxer, self.sampling, self.max_new_tokens, self.stop)
        samples = sampler.run(prompts, 1, lambda prompt, _: (seed << 44) ^ (prompt << 16))
        texts = [
            prompt + sample.tokens for prompt, sample in zip(prompts.values(), samples, strict=True)
        ]
        roots = [
            (row, prompt, at)
            for row, (prompt, tokens) in enumerate(prompts.items())
            for at in range(len(tokens) + prompt % self.every, len(texts[row]) - 1, self.every)
        ]
        if not roots:
            return {}
        outs, caches = self._pass(texts)
        parts = [
            self._contexts(roots[i : i + size], texts, outs, caches, seed)
            for size in [max(1, self.rows // self.trees)]
            for i in range(0, len(roots), size)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in LAYOUT}

    def _pass(self, texts: list[list[int]]):
        """Both models over the texts: outputs [B, T, ...] and caches, of target and draft."""
        tokens, _ = padded(texts, self.pair.target.device)
        room = tokens.shape[1] + max(comb.topology.nodes for comb in self.combs.values())
        slot = torch.arange(tokens.shape[1], device=tokens.device)
        visible = (slot <= slot[:, None]).expand(len(tokens), -1, -1)
        caches = [model.cache(room) for model in (self.pair.target, self.pair.draft)]
        outs = [
            model(tokens, slot.expand_as(tokens), visible, cache, 0, hidden=True)
            for model, cache in zip((self.pair.target, self.pair.draft), caches, strict=True)
        ]
        return outs, caches

    def _contexts(
        self, roots: list[tuple[int, int, int]], texts, outs, caches, seed: int
    ) -> dict[str, Tensor]:
        """The tensors of LAYOUT for some roots: (row of the text, prompt, position of the root)."""
        device = self.pair.target.device
        row, prompt, at = (
            torch.tensor(column, device=device) for column in zip(*roots, strict=True)
        )
        width = outs[0].logits.shape[1]
        target, draft = outs
        before = [probabilities(out.logits[row, at - 1], self.sampling) for out in outs]
        root = [probabilities(out.logits[row, at], self.sampling) for out in outs]
        repeat = torch.arange(len(roots), device=device).repeat_interleave(self.trees)
        tree = torch.arange(len(repeat), device=device) % self.trees
        state = _Roots(
            at[repeat],
            torch.tensor([texts[r][a] for r, _, a in roots], device=device)[repeat],
            [rows[repeat] for rows in root],
            [out.hidden[row, at].float()[repeat] for out in outs],
            [_fork(cache, row[repeat]) for cache in caches],
            width,
            (seed << 44) ^ (prompt[repeat] << 16) ^ (tree + 1),
        )
        found = (
            self._efficiency(state)
            .view(len(roots), self.trees, len(self.methods), len(self.shapes))
            .mean(1)
        )
        labels = {
            "prompt": prompt,
            "length": at,
            "target_before": target.hidden[row, at - 1].half(),
            "draft_before": draft.hidden[row, at - 1].half(),
            "draft_root": draft.hidden[row, at].half(),
            "scalars": row_scalars(*before, root[1]),
            "efficiency": found,
        }
        return {name: tensor.cpu() for name, tensor in labels.items()}

    def _efficiency(self, state: _Roots) -> Tensor:
        """[R, M, A] new tokens per target call, one drawn tree each."""
        found = torch.zeros(
            len(state.length), len(self.methods), len(self.shapes), device=state.length.device
        )
        for drafting, comb in self.combs.items():
            tree = self._drafted(
                comb, replace(state, caches=[_fork(cache) for cache in state.caches])
            )
            for a, shape in enumerate(self.shapes):
                if shape.paths == 1 and drafting == "paths":
                    by = {coupled: _chains(tree, comb, shape, coupled) for coupled in (False, True)}
                for m, name in enumerate(self.methods):
                    if shape.paths == 1 and drafting == "paths":
                        found[:, m, a] = by[METHODS[name].on_chain == "block"]
                    elif shape.paths > 1 and METHODS[name].drafting == drafting:
                        found[:, m, a] = block_efficiency(
                            METHODS[name].unchecked, _part(tree, comb.part(shape))
                        )
        return found

    def _drafted(self, comb: Comb, state: _Roots) -> DraftTree:
        """The comb drawn under every root, with both models' rows, those of the target relaxed."""
        topology, pair = comb.topology, self.pair
        coins = uniforms(state.seed, state.length + 1, topology.nodes + comb.most)
        tokens, rows, hidden = (
            state.token.unsqueeze(1),
            state.rows[1].unsqueeze(1),
            state.hidden[1].unsqueeze(1),
        )
        for level in range(1, topology.depth + 1):
            drawn = comb.draw(rows, level, coins)
            out = self._call(pair.draft, state, state.caches[1], topology, drawn, level)
            present = (drawn >= 0).unsqueeze(-1)
            rows = torch.cat([rows, probabilities(out.logits, self.sampling) * present], 1)
            tokens, hidden = (
                torch.cat([tokens, drawn], 1),
                torch.cat([hidden, out.hidden.float()], 1),
            )
        out = self._call(pair.target, state, state.caches[0], topology, tokens[:, 1:], None)
        target = torch.cat(
            [state.rows[0].unsqueeze(1), probabilities(out.logits, self.sampling)], 1
        )
        states = torch.cat([state.hidden[0].unsqueeze(1), out.hidden.float()], 1)
        tree = DraftTree(tokens, topology.parents, rows, target)
        return self.relaxer.tree(tree, (hidden, states))

    def _call(
        self, model, state: _Roots, cache, topology: DraftShape, tokens: Tensor, level: int | None
    ):
        """Run a model on the nodes of one depth, or on all but the root."""
        first, last = topology.bounds[level : level + 2] if level else (1, topology.nodes)
        device = state.length.device
        committed = torch.arange(state.width, device=device) <= state.length[:, None, None]
        seen = topology.ancestors[first:last, 1:last].to(device).expand(len(tokens), -1, -1)
        visible = torch.cat([committed.expand(-1, last - first, -1), seen], -1)
        positions = state.length.unsqueeze(1) + on_device(topology.depths[first:last], device)
        return model(
            tokens.clamp_min(0), positions, visible, cache, state.width + first - 1, hidden=True
        )


@dataclass(frozen=True)
class _Roots:
    """R roots: committed tokens before each [R], the roots' tokens [R], rows and hidden states of
    target and draft there, [R, V] and [R, H], their caches, whose texts fill `width` slots, and
    seeds [R].
    """

    length: Tensor
    token: Tensor
    rows: list[Tensor]
    hidden: list[Tensor]
    caches: list
    width: int
    seed: Tensor


def _fork(cache, rows: Tensor | None = None):
    """A cache that may be written to while the one it was made from stays; of these rows, or of
    all.
    """
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    twin.select(
        torch.arange(len(cache.positions), device=cache.positions.device) if rows is None else rows
    )
    return twin


def _part(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of these nodes; the draft was not run on its leaves."""
    parents = tuple(nodes.index(tree.parents[node]) if node else -1 for node in nodes)
    inner = torch.tensor(
        [place in parents for place in range(len(nodes))], device=tree.tokens.device
    )
    return DraftTree(
        tree.tokens[:, nodes], parents, tree.draft[:, nodes] * inner[:, None], tree.target[:, nodes]
    )


def _chains(tree: DraftTree, comb: Comb, shape: Shape, coupled: bool) -> Tensor:
    """[R] efficiency of a chain, the mean over the comb's rollouts from the root that are long
    enough.
    """
    longest = [first for first in range(comb.most) if (0, first, shape.length) in comb.place]
    found = [
        chain_efficiency(_part(tree, comb.part(shape, first)), coupled)[:, -1] for first in longest
    ]
    return torch.stack(found).mean(0)


def gather_shapes(
    out: str | Path,
    gatherer: ShapeGatherer,
    encode: Callable[[int], list[int]],
    prompts: int,
    settings: dict,
    unit: int = 16,
    seed: int = 0,
) -> Path:
    """Write the labels of prompts 0 .. prompts - 1 to a folder; one that was begun with these
    settings is continued.

    encode: number of a prompt -> its tokens. settings: what else decides the labels, for the
        manifest.
    """
    out, models = Path(out), {role: getattr(gatherer.pair, role) for role in ("target", "draft")}
    described = {
        role: {"name": m.name, "hash": m.hash, "hidden_size": m.hidden_size}
        for role, m in models.items()
    }
    settings = {
        **described,
        "tokenizer": gatherer.pair.tokenizer_hash,
        "vocab": gatherer.pair.vocab,
        "sampling": vars(gatherer.sampling),
        "relaxation": gatherer.relaxation,
        "seed": seed,
        "prompts": prompts,
        "samples": 1,
        "methods": list(gatherer.methods),
        "shapes": [str(shape) for shape in gatherer.shapes],
        "every": gatherer.every,
        "trees": gatherer.trees,
        "rows": gatherer.rows,
        "unit": unit,
        "max_new_tokens": gatherer.max_new_tokens,
        **settings,
    }
    entries = _begun(out, settings)
    with bar() as progress:
        step = progress.add_task("label", total=-(-prompts // unit), completed=len(entries))
        for number in range(len(entries), -(-prompts // unit)):
            chosen = range(number * unit, min((number + 1) * unit, prompts))
            found = gatherer.run({prompt: encode(prompt) for prompt in chosen}, seed)
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"shard-{number:05d}.safetensors"
            write_whole(path, save({name: tensor.contiguous() for name, tensor in found.items()}))
            count = len(found.get("prompt", ()))
            entries.append(
                {"file": path.name, "sha256": sha256(path), "texts": len(chosen), "tokens": count}
            )
            whole = len(entries) == -(-prompts // unit)
            write_manifest(out, {"complete": whole, **settings, "shards": entries})
            progress.update(step, advance=1)
    return out


def _begun(out: Path, settings: dict) -> list[dict]:
    """Entries of the files that are there and whole, in order; other settings are refused."""
    if not (out / "manifest.json").is_file():
        return []
    manifest = read_manifest(out, incomplete=True)
    for name, value in settings.items():
        if manifest.get(name) != value:
            raise ValueError(
                f"{out} was labelled with {name} {manifest.get(name)!r}, now it is {value!r};"
                " choose another --out or delete the folder"
            )
    kept = []
    for entry in manifest["shards"]:
        path = out / entry["file"]
        if not path.is_file() or sha256(path) != entry["sha256"]:
            print(f"labelling anew from {path} on: it is missing or damaged")
            break
        kept.append(entry)
    return kept


def read_labels(folder: str | Path) -> tuple[dict[str, Tensor], dict]:
    """(the tensors of LAYOUT, the manifest) of a folder that is complete; a damaged file is
    refused.
    """
    manifest = read_manifest(folder)
    parts = list(_shards(Path(folder), manifest))
    return {name: torch.cat([part[name] for part in parts]) for name in LAYOUT}, manifest


def _shards(folder: Path, manifest: dict) -> Iterator[dict[str, Tensor]]:
    for entry in manifest["shards"]:
        path = folder / entry["file"]
        if not path.is_file() or sha256(path) != entry["sha256"]:
            raise ValueError(
                f"{path} is missing or damaged; run `diversed select` again, it labels these texts"
                " anew"
            )
        if entry["tokens"]:
            yield load_file(path)


def shapes_of(texts: list[str]) -> tuple[Shape, ...]:
    """The shapes of a list of names, each once."""
    return tuple(dict.fromkeys(parse_shape(text) for text in texts))
