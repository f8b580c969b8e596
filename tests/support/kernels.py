"""Kernels beside the laws they are twins of: in triton's interpreter where TRITON_INTERPRET is set, else on a GPU."""

import os
from dataclasses import dataclass, replace

import torch
from diversed.runtime.sampling import Sampling, probabilities
from diversed.verifier import METHODS, DraftTree, Law
from diversed.verifier.kernels import Verified
from diversed.verifier.kernels.cuts import cut
from diversed.verifier.relax import relax

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# a uniform this close to a step may fall on either side: see diversed.verifier.kernels
NEAR = 1e-6

CHAIN, TREE = (-1, 0, 1), (-1, 0, 0, 0, 1, 1)
SHAPES = {"token": CHAIN, "block": CHAIN, "greedy_tree": TREE, "univer": TREE, "rrsw": TREE, "traversal": TREE}


@dataclass(frozen=True)
class Case:
    """What a kernel is given; `sampling` says how rows are made of the logits."""

    method: str
    target: torch.Tensor
    draft: torch.Tensor
    tokens: torch.Tensor
    parents: tuple[int, ...]
    weight: torch.Tensor
    uniform: torch.Tensor
    sampling: Sampling = Sampling()

    def verdict(self) -> Verified:
        filtered = self.sampling.temperature > 0 and self.sampling != Sampling(self.sampling.temperature)
        cuts = [cut(x, probabilities(x, self.sampling) > 0) if filtered else None for x in (self.target, self.draft)]
        given = self.target, self.draft, self.tokens, self.parents, self.weight, self.uniform
        on_device = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in given)
        cuts = (x if x is None else x.to(DEVICE) for x in cuts)
        return METHODS[self.method].kernel(*on_device, self.sampling.temperature, *cuts)

    def tree(self) -> DraftTree:
        """The exact rows in float64, on the support that `probabilities` keeps."""
        return DraftTree(self.tokens, self.parents, exact(self.draft, self.sampling), exact(self.target, self.sampling))

    def law(self) -> Law:
        return METHODS[self.method].unchecked(relax(self.tree(), "learned", self.weight.double()))


def exact(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    kept = probabilities(logits, sampling) > 0
    rows = (logits.double() / (sampling.temperature or 1)).masked_fill(~kept, -torch.inf).softmax(-1)
    return rows.nan_to_num(0)


def random_case(
    method: str,
    vocabulary: int,
    batch: int = 3,
    parents: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    weight: float | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    seed: int = 0,
    spread: float = 2.0,
) -> Case:
    """Random rows, children drawn from the draft's; leaves have no draft row. `weight` None draws it in [0, 1]."""
    parents = SHAPES[method] if parents is None else parents
    generator = torch.Generator().manual_seed(seed)
    size = batch, len(parents), vocabulary
    target, draft = (torch.randn(2, *size, generator=generator) * spread).to(dtype)
    draft[:, [node for node in range(len(parents)) if node not in parents]] = -torch.inf
    rows = exact(draft, sampling)
    tokens = torch.zeros(size[:2], dtype=torch.int64)
    for node, parent in enumerate(parents[1:], 1):
        tokens[:, node] = torch.multinomial(rows[:, parent], 1, generator=generator)[:, 0]
    share = torch.rand(size[:2], generator=generator)
    share = share if weight is None else torch.full_like(share, weight)
    uniform = torch.rand(batch, 2, generator=generator, dtype=torch.float64)
    return Case(method, target, draft, tokens, parents, share, uniform, sampling)


def disagreement(case: Case) -> str:
    """Empty if kernel and law give the same verdict, wherever the uniform is not near a step; else what differs."""
    law, found = case.law(), case.verdict()
    node, token = found.verdict.node.cpu(), found.verdict.token.cpu()
    wrong = []
    for what, rows, lane, got in (
        ("node", law.stop, 0, node),
        ("token", law.next[torch.arange(len(node)), node], 1, token),
    ):
        near, wanted = chosen(rows, case.uniform[:, lane])
        bad = ((got != wanted) & ~near).nonzero()[:, 0].tolist()
        wrong += [f"row {b}: {what} {got[b]}, not {wanted[b]}, for {case.uniform[b, lane]}" for b in bad]
    return "; ".join(wrong)


def chosen(rows: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether a step lies near the uniform [B], index [B] it selects) for rows [B, X]."""
    steps = rows.cumsum(-1) / rows.sum(-1, keepdim=True)
    return ((steps - uniform[:, None]).abs() < NEAR).any(-1), (steps <= uniform[:, None]).sum(-1)


def at_every_step(case: Case, nodes: tuple[int, ...]) -> Case:
    """The request of `case` often, uniforms on both sides of every step: of `stop`, and of `next` at `nodes`."""
    law = case.law()
    stops, chances = law.stop[0].cumsum(0), law.stop[0]
    pairs = [(step + side, 0.3) for step in stops[:-1] for side in (-2 * NEAR, 2 * NEAR)]
    for node in (node for node in nodes if chances[node] > 1e-4):
        middle, row = stops[node] - chances[node] / 2, law.next[0, node]
        steps = row.cumsum(0)[row > 0][:-1]
        pairs += [(middle, step + side) for step in steps for side in (-2 * NEAR, 2 * NEAR)]
    uniform = torch.tensor([(float(a), float(b)) for a, b in pairs], dtype=torch.float64).clamp(0, 1 - 1e-9)
    many = {
        name: getattr(case, name).expand(len(uniform), *getattr(case, name).shape[1:])
        for name in ("target", "draft", "tokens", "weight")
    }
    return replace(case, uniform=uniform, **many)


def quickened(monkeypatch) -> None:
    """Make triton's interpreter twice as fast: it patches its language for every nested call, and checks overflows."""
    from triton.runtime import interpreter

    given, scopes = interpreter._patch_lang, {}

    class Scopes:
        def restore(self):
            for scope in reversed(list(scopes.values())):
                scope.restore()
            scopes.clear()

    def once(function):
        # triton's own functions see other modules than ours do
        own = function.__module__.startswith("triton.")
        if own not in scopes:
            scopes[own] = given(function)
        return Scopes()

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))

