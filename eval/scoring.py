"""Finished texts under both models, teacher-forced: acceptance, bias and weight at every token.

With p the target's row, q the draft's and v the relaxed target row at a position (all after
temperature, top-k, top-p, min-p; at temperature 0 all three are one-hot):

    step acceptance   mean over positions of 1 - TV(q, v): how often one drafted token is kept; no
                      draft length in it
    bias              mean over positions of TV(p, v): how often one token is not the target's own

Positions are those of the text, its end-of-text token included and nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.batch import padded, prefill
from ..runtime.forward import Output, Pair
from ..runtime.relaxer import Relaxer, load_relaxer
from ..runtime.sampling import Sampling, probabilities
from ..verifier.law import DraftTree
from ..verifier.relax import Relaxation

CHUNK_BYTES = 256 << 20  # of one model's float32 rows in memory at a time


@dataclass(frozen=True)
class PositionSums:
    """Sums over the positions of one text.

    positions:      tokens of the text, the end-of-text token included.
    acceptance:     sum of 1 - TV(q, v).
    bias:           sum of TV(p, v), also the expected number of substitutions under the maximal
                    coupling.
    weight:         sum of the draft's share, None if the relaxation is not a blend.
    target_logprob: log-likelihood of the text under the target, nats; a token that it excludes
        counts as 1e-30.
    """

    positions: int
    acceptance: float
    bias: float
    weight: float | None
    target_logprob: float


@dataclass(frozen=True)
class Rows:
    """Both models at Q consecutive positions of B texts.

    scored:                 [B, Q] bool, False outside the text.
    tokens:                 [B, Q] the token of the text at each position.
    target, draft, relaxed: [B, Q, V] rows of probabilities: p, q and v.
    weight:                 [B, Q] the draft's share, nan if the relaxation is not a blend.
    bias:                   [B, Q] TV(p, v).
    """

    scored: Tensor
    tokens: Tensor
    target: Tensor
    draft: Tensor
    relaxed: Tensor
    weight: Tensor
    bias: Tensor

    @property
    def likelihood(self) -> Tensor:
        """[B, Q] the target's probability of each token."""
        return self.target.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)


def score_positions(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    relaxation: str | Relaxation | Relaxer,
    sampling: Sampling,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[PositionSums]:
    """The sums of every text, from one teacher-forced pass of both models; see `scored_rows`."""
    relaxer = relaxation
    if not isinstance(relaxation, Relaxer):
        relaxer = load_relaxer(relaxation, pair, sampling)
    sums = torch.zeros(4, len(prompts), dtype=torch.float64)
    for rows in scored_rows(pair, prompts, completions, relaxer, sampling, chunk_bytes):
        acceptance = 1 - total_variation(rows.draft, rows.relaxed)
        logprob = rows.likelihood.clamp_min(1e-30).log()
        values = torch.stack([acceptance, rows.bias, rows.weight.to(acceptance), logprob]).double()
        sums += torch.where(rows.scored, values, 0).sum(-1).cpu()
    found = []
    for text, (acceptance, bias, weight, logprob) in zip(completions, sums.T.tolist(), strict=True):
        share = weight if relaxer.rule.is_blend else None
        found.append(PositionSums(len(text), acceptance, bias, share, logprob))
    return found


def scored_rows(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    relaxer: Relaxer,
    sampling: Sampling,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Rows]:
    """Every position of the texts once, a chunk at a time.

    prompts, completions: token ids; a completion ends with its end-of-text token if it has one.
    chunk_bytes: bounds the memory for rows; positions are cut accordingly, the figures stay the
        same.
    """
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"prompts {empty} are empty; a text needs at least one token before it")
    if not any(completions):
        return
    texts = [
        [*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)
    ]
    first = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
    tokens, count = padded(texts)
    end = count[:, None] - 1
    device = pair.target.device
    spent = torch.zeros(len(texts), dtype=torch.float64, device=device)
    for start, draft, target in _passes(
        pair, tokens[:, :-1], int(first.min()), relaxer.needs_hidden, chunk_bytes
    ):
        position = start + torch.arange(draft.logits.shape[1])
        scored = ((position >= first) & (position < end)).to(device)
        following = tokens[:, start + 1 : start + 1 + len(position)].to(device)
        p = probabilities(target.logits, sampling)
        q = probabilities(draft.logits.to(device), sampling)
        # A text is a chain; positions outside it look like places where the draft was not run, so
        # they cost nothing.
        parents = tuple(range(-1, len(position) - 1))
        before = tokens[:, start : start + len(position)].to(device)
        chain = DraftTree(before, parents, q * scored.unsqueeze(-1), p)
        believed = relaxer.beliefs(draft.logits.to(device), target.logits)
        relaxed = relaxer(chain, (draft.hidden, target.hidden), spent, believed)
        v = relaxed.tree.target
        rows = Rows(scored, following, p, q, v, relaxed.weight, total_variation(p, v))
        yield rows
        spent = spent + torch.where(scored, rows.bias.double(), 0).sum(-1)


def _passes(
    pair: Pair, tokens: Tensor, skip: int, hidden: bool, chunk_bytes: int
) -> Iterator[tuple[int, Output, Output]]:
    """(first position, draft's output, target's output) over the positions from `skip` on, a chunk
    at a time.

    Texts are padded on the right, so nothing real sees the padding. The `skip` first tokens only
    fill the caches.
    """
    batch, length = tokens.shape
    step = max(1, chunk_bytes // (4 * batch * pair.vocab))
    models = (pair.draft, pair.target)
    caches = [model.cache(length) for model in models]
    for model, cache in zip(models, caches, strict=True):
        prefill(model, tokens[:, :skip].to(model.device), cache)
    for start in range(skip, length, step):
        position = torch.arange(start, min(start + step, length))
        chunk = tokens[:, start : start + step]
        visible = (torch.arange(start + len(position)) <= position[:, None]).expand(batch, -1, -1)
        draft, target = (
            model(chunk, position.expand_as(chunk), visible, cache, start, hidden=hidden)
            for model, cache in zip(models, caches, strict=True)
        )
        yield start, draft, target


def total_variation(left: Tensor, right: Tensor) -> Tensor:
    """[...] half the L1 distance of rows [..., V]."""
    return 0.5 * (left - right).abs().sum(-1)
