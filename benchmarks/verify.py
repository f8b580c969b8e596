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
import time
from collections.abc import Callable

import torch

from ..commands.bench import record, table
from ..verifier.enumerate_laws import chain, full_tree, paths
from ..verifier.law import DraftTree, draw
from ..verifier.methods import METHODS

# What is drafted for every drafting law: a chain of 8, eight tokens as 2 paths, or a binary tree of
# 31 nodes.
SHAPES = {
    "chain": ("chain of 8", chain(8)),
    "paths": ("2 paths of 4", paths(2, 4)),
    "with_replacement": ("tree of 31", full_tree(2, 4)),
    "without_replacement": ("tree of 31", full_tree(2, 4)),
    "greedy": ("tree of 31", full_tree(2, 4)),
}
ROWS_AT_ONCE = (
    6  # of a step on a CPU: both models' logits and probabilities, the law, and a row in work
)


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
    for vocabulary in vocabularies:
        for batch in batches:
            for name in methods:
                method = METHODS[name]
                shape, parents = SHAPES[method.drafting]
                case = f"{name}, {shape}, B = {batch}, V = {vocabulary:,}"
                size = 4 * ROWS_AT_ONCE * batch * len(parents) * vocabulary
                if device != "cpu" and method.kernel is None:
                    continue
                if size > most_gb * 1e9:
                    left_out.append(case)
                    continue
                step = _Step(name, parents, batch, vocabulary, getattr(torch, dtype), device, seed)
                rows.append(_row(case, step, repeats, device))
    if left_out:
        print(f"left out, they need more than {most_gb:g} GB: {'; '.join(left_out)}")
    return rows


class _Step:
    """The inputs of one case: peaked rows, children drawn from the draft's, distinct where the
    drafting law asks.
    """

    def __init__(
        self,
        name: str,
        parents: tuple,
        batch: int,
        vocabulary: int,
        dtype: torch.dtype,
        device: str,
        seed: int,
    ):
        self.method, self.parents = METHODS[name], parents
        generator = torch.Generator(device).manual_seed(seed)
        size = (batch, len(parents), vocabulary)
        self.target = (3 * torch.randn(size, generator=generator, device=device)).to(dtype)
        self.draft = (self.target + torch.randn(size, generator=generator, device=device)).to(dtype)
        self.inner = sorted({parent for parent in parents if parent >= 0})
        self.tokens = torch.zeros(batch, len(parents), dtype=torch.int64, device=device)
        for parent in self.inner:
            children = [node for node, above in enumerate(parents) if above == parent]
            law, several = (
                self.draft[:, parent].float().softmax(-1),
                self.method.drafting == "paths",
            )
            self.tokens[:, children] = torch.multinomial(
                law, len(children), several, generator=generator
            )
        self.uniform = torch.rand(batch, 2, generator=generator, device=device, dtype=torch.float64)
        self.weight = torch.zeros(batch, len(parents), device=device)

    def law(self) -> None:
        draft = self.draft.float().softmax(-1)
        draft[:, [node for node in range(len(self.parents)) if node not in self.inner]] = 0
        tree = DraftTree(self.tokens, self.parents, draft, self.target.float().softmax(-1))
        draw(self.method.unchecked(tree), self.uniform)

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

    def rows_read(self, name: str) -> int:
        """Rows of V that the kernel reads for a request, by the docstrings of verifier/kernels/."""
        nodes, inner = len(self.parents), len(self.inner)
        again = {"token": 2, "rrsw": 2 * (nodes - 1), "traversal": 2 * (nodes - 1)}.get(
            name, 2 * inner
        )
        return nodes + inner + again


def _row(case: str, step: _Step, repeats: int, device: str) -> dict:
    """Median milliseconds of the step, and its ratio to what stands beside it."""
    name = case.split(",")[0]
    works = {"step": step.law, "softmax": step.softmax}
    if device != "cpu":
        works = {"step": step.kernel, "copy": step.copy}
    elif step.target.shape[0] == 1 and step.method.drafting == "chain":
        works["transformers"] = step.transformers
    times: dict[str, list[float]] = {work: [] for work in works}
    for _ in range(
        repeats + 1
    ):  # in turns, so that a busy machine slows all alike; the first round warms up
        for work, function in works.items():
            times[work].append(_seconds(function, device))
    median = {work: statistics.median(values[1:]) for work, values in times.items()}
    row = {"case": case, "value": 1e3 * median["step"], "unit": "ms"}
    row |= {"low": 1e3 * min(times["step"][1:]), "high": 1e3 * max(times["step"][1:])}
    row["vs"] = {work: median["step"] / value for work, value in median.items() if work != "step"}
    if device != "cpu":
        size = step.target[0, 0].nbytes * len(step.target)
        read, moved = step.rows_read(name) * size, 2 * len(step.parents) * size
        row["vs"]["bytes/s of the copy"] = (read / median["step"]) / (moved / median["copy"])
    return row


def _seconds(work: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


if __name__ == "__main__":
    print(table(record(run())))
