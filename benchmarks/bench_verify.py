"""One verification step from logits to the verdict: what it costs, beside what it must at least
cost.

On a CPU the step is the softmax of both models' rows, the law and the draw; beside it stand one
softmax of the target's rows and, for a chain of one request, transformers' `_speculative_sampling`
of the same logits. On a GPU the step is the method's kernel; beside it stands a copy of the same
logits on the device, in the same run, and the bytes that the kernel reads in a second over those
the copy reads and writes. Methods in turns, medians of `repeats`, spread as low and high. Cases
whose rows would not fit into `most_gb` are left out, and named.
"""

from __future__ import annotations

import statistics
from itertools import product

import torch

from ..runtime.drafting import topology
from ..verifier.law import DraftTree, unchecked_draw
from ..verifier.methods import METHODS
from .timing import in_turns, row, seconds
from .workload import drawn

# What is drafted for every drafting law: a chain of 8, eight tokens as 2 paths, or a binary tree of
# 31 nodes.
SHAPES = {
    "chain": ("chain of 8", topology("chain", 8)),
    "paths": ("2 paths of 4", topology("paths", 4, 2)),
}
for _law in ("with_replacement", "without_replacement", "greedy"):
    SHAPES[_law] = ("tree of 31", topology(_law, 4, 2))
# Rows of a step on a CPU: both models' logits and probabilities, the law, and a row in work.
ROWS_AT_ONCE = 6


def run(
    *,
    methods: list[str] = list(METHODS),  # noqa: B006, B008  never written to
    batches: list[int] = [1, 8],  # noqa: B006
    vocabularies: list[int] = [32_000, 128_000],  # noqa: B006
    dtype: str = "float32",
    repeats: int = 9,
    device: str = "cpu",
    most_gb: float = 4.0,
    seed: int = 0,
) -> list[dict]:
    """One row a method, shape, batch and vocabulary: median milliseconds of a step.

    Args:
        methods: verification methods; on a GPU those with a kernel.
        batches: requests verified together.
        vocabularies: sizes of a row.
        dtype: of the logits, float32, bfloat16 or float16.
        repeats: timed steps of every case.
        device: cpu or cuda.
        most_gb: memory that a case may take for its rows.
        seed: of the logits and tokens.
    """
    rows, left_out = [], []
    for vocabulary, batch, name in product(vocabularies, batches, methods):
        method = METHODS[name]
        words, shape = SHAPES[method.drafting]
        case = f"{name}, {words}, B = {batch}, V = {vocabulary:,}"
        if device != "cpu" and method.kernel is None:
            continue
        if 4 * ROWS_AT_ONCE * batch * shape.nodes * vocabulary > most_gb * 1e9:
            left_out.append(case)
            continue
        size = (batch, shape.nodes, vocabulary)
        step = _Step(name, size, getattr(torch, dtype), device, seed)
        rows.append(_row(case, step, repeats))
    if left_out:
        print(f"left out, they need more than {most_gb:g} GB: {'; '.join(left_out)}")
    return rows


class _Step:
    """The inputs of one case: peaked rows, and children drawn from the draft's rows.

    Children are distinct if the drafting law asks for that.
    """

    def __init__(
        self, name: str, size: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int
    ):
        """size: batch, nodes, vocabulary."""
        self.name, self.method, self.device = name, METHODS[name], device
        shape = SHAPES[self.method.drafting][1]
        self.parents, self.inner = shape.parents, sorted(set(shape.parents[1:]))
        generator = torch.Generator(device).manual_seed(seed)
        logits = 3 * torch.randn(size, generator=generator, device=device)
        self.target = logits.to(dtype)
        noise = torch.randn(size, generator=generator, device=device)
        self.draft = (self.target + noise).to(dtype)
        self.tokens = drawn(self.draft.float().softmax(-1), shape, generator)
        two = (size[0], 2)
        self.uniform = torch.rand(two, generator=generator, device=device, dtype=torch.float64)
        self.weight = torch.zeros(size[:2], device=device)

    def law(self) -> None:
        draft = self.draft.float().softmax(-1)
        draft[:, [node for node in range(len(self.parents)) if node not in self.inner]] = 0
        tree = DraftTree(self.tokens, self.parents, draft, self.target.float().softmax(-1))
        unchecked_draw(self.method.unchecked(tree), self.uniform)

    def kernel(self) -> None:
        drafted = self.inner[-1] + 1
        self.method.kernel(
            self.target,
            self.draft[:, :drafted],
            self.tokens,
            self.parents,
            self.weight,
            self.uniform,
        )

    def softmax(self) -> None:
        self.target.float().softmax(-1)

    def copy(self) -> None:
        self.target.clone()

    def transformers(self) -> None:
        from transformers.generation.utils import _speculative_sampling

        length = len(self.parents) - 1
        _speculative_sampling(
            self.tokens[:, 1:], self.draft[:, :length].float(), length, self.target.float()
        )

    def rows_read(self) -> int:
        """Rows of V that the kernel reads for a request, by the docstrings of verifier/kernels/."""
        nodes, inner = len(self.parents), len(self.inner)
        again = {"token": 2, "rrsw": 2 * (nodes - 1), "traversal": 2 * (nodes - 1)}
        return nodes + inner + again.get(self.name, 2 * inner)


def _row(case: str, step: _Step, repeats: int) -> dict:
    """Median milliseconds of the step, and its ratio to what stands beside it."""
    works = {"step": step.law, "softmax": step.softmax}
    if step.device != "cpu":
        works = {"step": step.kernel, "copy": step.copy}
    elif step.target.shape[0] == 1 and step.method.drafting == "chain":
        works["transformers"] = step.transformers

    found = in_turns(works, lambda work, _: 1e3 * seconds(work, step.device), repeats)
    taken = {name: statistics.median(values) for name, values in found.items()}
    ratios = {name: taken["step"] / value for name, value in taken.items() if name != "step"}
    if step.device != "cpu":
        moved = step.rows_read() / (2 * len(step.parents))
        ratios["bytes/s of the copy"] = moved * taken["copy"] / taken["step"]
    return row(case, found["step"], "ms", vs=ratios)
