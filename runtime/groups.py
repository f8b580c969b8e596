"""Options that several commands share. Each option is declared here once, with its help.

A group is a frozen dataclass; a command takes it whole, and its fields are options of the command
line without a prefix. Defaults of one command are those of the instance in its signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from ..files import MOST_THREADS, Folder, within, worker
from .bundle import ROLES, read_card
from .drafting import MAX_NODES, Branches
from .forward import Pair
from .model import check_dtype, load_pair
from .sampling import Sampling


@dataclass(frozen=True)
class Models:
    """The pair of models, and how it is loaded.

    Args:
        target: folder, hub name or .gguf file of the model being served; `sums-target` is the
            packaged one.
        draft: folder, hub name or .gguf file of the cheap model; `sums-draft` is the packaged one.
        dtype: float32, bfloat16, float16, or auto: as stored, and on a CPU that computes a stored
            half slower, float32.
        device: cpu, cuda, ..., or auto to spread the models.
        trust_remote_code: run model code that comes with a checkpoint.
    """

    target: str = "sums-target"
    draft: str = "sums-draft"
    dtype: str = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False

    def __post_init__(self):
        check_dtype(self.dtype)

    def load(self) -> Pair:
        """Both models."""
        return load_pair(self.target, self.draft, self.dtype, self.device, self.trust_remote_code)


@dataclass(frozen=True)
class BundleModels(Models):
    """The pair of models; those that are not named are the bundle's.

    Args:
        target: folder, hub name or .gguf file of the model being served; by default the bundle's,
            else `sums-target`.
        draft: folder, hub name or .gguf file of the cheap model; by default the bundle's, else
            `sums-draft`.
    """

    target: str | None = None
    draft: str | None = None

    def of_bundle(self, bundle: str | Path | None) -> Models:
        """The pair that was named, else the bundle's, else the packaged one."""
        given = {role: name for role, name in vars(self).items() if name is not None}
        if bundle and not {"target", "draft"} <= given.keys():
            card = read_card(bundle)
            given = {role: card.name(role) for role in ROLES} | given
        return Models(**given)


@dataclass(frozen=True)
class Tree:
    """How a tree is drafted and verified.

    Args:
        method: token, block, gbv, specinfer, kseq, rrsw, traversal, greedy_tree, univer,
            package.module:NAME, or plain (the target alone); or, lossy and for temperature 0
            alone, fly or fly:WINDOW,ENTROPY (fly:6,0.3), which looks WINDOW tokens ahead.
        draft_length: tokens on a drafted path.
        branches: shape of the tree: a number of paths, or of children of a node (one number, or one
            for each depth); PATHSxLENGTH+TRUNK such as 3x4+2; or what chooses a shape at each step:
            auto (gbv's number of paths), confidence:PROBABILITY,TOKENS (a chain that ends behind a
            token that the draft gave less), a folder of `diversed select`, or a bundle that holds
            its network.
        trunk: single drafted tokens before a tree's first branching.
        drafting: chain, paths, with_replacement, without_replacement or greedy, if a method is
            exact for several.
        relax_leaf: run the draft on the last drafted token too and relax there.
    """

    method: str = "token"
    draft_length: int = 5
    branches: Branches = None
    trunk: int = 0
    drafting: str | None = None
    relax_leaf: bool = False

    def __post_init__(self):
        within(0, MAX_NODES, draft_length=self.draft_length, trunk=self.trunk)
        if isinstance(self.branches, str) and self.branches != "auto" and self.trunk:
            raise ValueError(
                f"`trunk` means nothing beside `branches` {self.branches}, which says the whole"
                " shape; leave one out"
            )

    def check_alone(self, relaxation: str) -> None:
        """Refuse what means nothing if texts are decoded by this tree and this relaxation alone."""
        given = {name for name, value in vars(self).items() if value != getattr(Tree, name)}
        idle: set[str] = set()
        if self.method == "plain":
            idle, why = given - {"method"}, "method plain, which drafts nothing"
        elif isinstance(self.branches, str) and self.branches != "auto":
            idle, why = given & {"draft_length"}, f"branches {self.branches}, which says it"
        elif relaxation == "none":
            idle, why = given & {"relax_leaf"}, "relaxation none, which relaxes nothing"
        if idle:
            refuse_idle(sorted(idle), f"beside {why}")


def check_filters(sampling: Sampling, temperatures: Sequence[float] = ()) -> None:
    """Refuse filters that no text can feel, since all are decoded at temperature 0.

    temperatures: of the texts; by default that of `sampling`.
    """
    idle = sampling != Sampling(sampling.temperature)
    if idle and not any(temperatures or [sampling.temperature]):
        names = [n for n, v in vars(sampling).items() if v != getattr(Sampling, n)]
        names = [f"sampling.{name}" for name in names if name != "temperature"]
        refuse_idle(names, "at temperature 0, where the most likely token is taken")


def refuse_idle(names: Sequence[str], why: str) -> NoReturn:
    """ValueError for options that change nothing; why: the end of the sentence."""
    listed = ", ".join(f"`{name}`" for name in names)
    raise ValueError(f"{listed} would change nothing {why}; leave it out")


@dataclass(frozen=True)
class Run:
    """Where a command writes, and how many threads it computes with.

    Args:
        out: folder to write to; one that was begun with the same options is continued.
        threads: CPU threads; the same number gives the same bytes, another speed.
    """

    out: str
    threads: int = 1

    def __post_init__(self):
        within(1, MOST_THREADS, threads=self.threads)

    def folder(self, name: str = "settings.json") -> Folder:
        """The folder to write to; name: of the file with its settings."""
        return Folder(Path(self.out), name)

    def use_threads(self) -> None:
        """Compute with these threads from here on."""
        torch.set_num_threads(self.threads)


@dataclass(frozen=True)
class SharedRun(Run):
    """A run that several processes may share.

    Args:
        num_shards: number of processes that share this work; by default from the launcher's
            environment, else 1.
        shard_index: which of them this one is.
    """

    num_shards: int | None = None
    shard_index: int | None = None

    def share(self) -> tuple[int, int]:
        """(number of processes, index of this one)."""
        return worker(self.num_shards, self.shard_index)

    def folder(self, name: str = "settings.json") -> Folder:
        """The folder that the processes share; name: of the file with its settings."""
        num_shards, shard_index = self.share()
        return Folder(Path(self.out), name, num_shards=num_shards, shard_index=shard_index)
