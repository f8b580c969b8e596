"""Texts sampled token by token from the maximal coupling of target and relaxed row, for traces.

Every token is drawn as the target would draw it, x ~ p, and kept with probability min(1,
v(x)/p(x)); otherwise it is replaced by one from norm(max(v - p, 0)). The law of the text is that of
v, exactly what speculative decoding under the same relaxation gives, and every replaced token, a
*substitution*, is known (ALGORITHMS section 7.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..verifier.features import logit_features
from ..verifier.law import DraftTree, inverse_cdf
from ..verifier.relax import Believed, on_target
from ..verifier.token_features import TokenTable
from .batch import padded, prefill, refuse_nan
from .completion import Stops
from .engine import check_prompts
from .forward import Model, Output, Pair
from .relaxer import Relaxer
from .sampling import Sampling, beliefs, probabilities
from .uniforms import uniforms
from .vocabulary import token_table


@dataclass
class Sample:
    """One sampled text.

    tokens:   new tokens, the end token included.
    finished: ended by an end token or a stop string.
    columns:  name of a field of `data.traces.Shard` -> [T, ...], one entry a token.
    """

    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    columns: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampler:
    """What stays the same for every batch of a gathering.

    alternatives: also note the token that the draft would put at each position, by the maximal
        coupling of target and draft; the relaxation must be none.
    """

    pair: Pair
    relaxer: Relaxer
    sampling: Sampling
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    hidden: bool = False
    store_logits: int = 0
    alternatives: bool = False

    @cached_property
    def stops(self) -> Stops:
        """The stop strings for this pair's tokenizer."""
        return Stops(self.pair.tokenizer, self.stop)

    @cached_property
    def table(self) -> TokenTable:
        """The classes of this pair's tokens."""
        return token_table(self.pair.tokenizer, self.pair.vocab).to(self.pair.target.device)

    @torch.no_grad()
    def run(
        self,
        prompts: dict[int, list[int]],
        samples: int,
        seed: Callable[[int, int], int],
        given: list[list[int]] | None = None,
    ) -> list[Sample]:
        """`samples` texts for every prompt, prompt by prompt; `seed(prompt, sample)` selects their
        random numbers.

        given: the tokens of all texts, if they are to be read and not drawn.
        """
        pair, device = self.pair, self.pair.target.device
        check_prompts(pair, prompts, self.max_new_tokens)
        tokens, count = padded(list(prompts.values()), device)
        longest, length = tokens.shape[1], count - 1
        repeat = torch.arange(len(prompts), device=device).repeat_interleave(samples)
        caches = []
        for model in (pair.target, pair.draft):
            cache = model.cache(longest + self.max_new_tokens)
            prefill(model, tokens[:, :-1], cache)
            cache.select(repeat)
            caches.append(cache)
        state = Rows(
            names=[index for index in prompts for _ in range(samples)],
            texts=torch.arange(len(repeat), device=device),
            seed=torch.tensor(
                [seed(index, sample) for index in prompts for sample in range(samples)],
                device=device,
            ),
            length=length[repeat],
            last=tokens.gather(1, length.unsqueeze(1))[repeat],
            caches=caches,
            base=longest - 1,
        )
        return self._texts(state, len(repeat), padded(given, device)[0] if given else None)

    def _texts(self, state: Rows, count: int, given: Tensor | None) -> list[Sample]:
        texts = [Sample() for _ in range(count)]
        steps: list[tuple[list[int], dict[str, Tensor]]] = []
        for position in range(self.max_new_tokens):
            owners = state.texts.tolist()
            told = None if given is None else given[state.texts, position]
            new, columns = self._step(state, position, told)
            chosen = new.tolist()
            steps.append((owners, {name: column.cpu() for name, column in columns.items()}))
            for row, owner in enumerate(owners):
                text = texts[owner]
                if not text.finished:
                    text.tokens.append(chosen[row])
                    ends = chosen[row] in self.pair.eos
                    text.finished = ends or self.stops.ended(text.tokens)
            alive = [row for row, owner in enumerate(owners) if not texts[owner].finished]
            if not alive:
                break
            state.last = new.unsqueeze(1)
            state.drop_all_but(alive)
        self._collect(texts, steps)
        return texts

    @staticmethod
    def _collect(texts: list[Sample], steps: list[tuple[list[int], dict[str, Tensor]]]) -> None:
        """Turn columns per step into columns per text, leaving out what rows went on to say after
        their end.
        """
        parts: list[dict[str, list[Tensor]]] = [{} for _ in texts]
        for position, (owners, columns) in enumerate(steps):
            for row, owner in enumerate(owners):
                if position < len(texts[owner].tokens):
                    for name, column in columns.items():
                        parts[owner].setdefault(name, []).append(column[row])
        for text, part in zip(texts, parts, strict=True):
            text.columns = {name: torch.stack(values) for name, values in part.items()}

    def _step(
        self, state: Rows, position: int, told: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One token for every row: tokens [B] and the columns of the trace at this position, each
        [B, ...].

        told: [B] the tokens, if they are not drawn.
        """
        needs_hidden = self.hidden or self.relaxer.needs_hidden
        models = (self.pair.target, self.pair.draft)
        outs = [
            state.forward(model, state.last, position, needs_hidden, side)
            for side, model in enumerate(models)
        ]
        logits = [out.logits[:, 0].to(state.length.device) for out in outs]
        target, draft = (probabilities(values, self.sampling) for values in logits)
        for rows, which in ((target, "target"), (draft, "draft")):
            refuse_nan(rows, which, state.names)
        before = state.last[:, 0].to(target.device)
        hidden, believed = (outs[1].hidden, outs[0].hidden), (target, draft)
        if not self.sampling.neutral:
            believed = tuple(beliefs(values) for values in logits)
        tree = DraftTree(state.last, (-1,), draft.unsqueeze(1), target.unsqueeze(1))
        believing = Believed(*(rows.unsqueeze(1) for rows in believed))
        relaxed = self.relaxer(tree, hidden, believed=believing)
        coins = uniforms(state.seed, state.length + position + 1, 3)
        token, substituted = couple(target, relaxed.tree.target[:, 0], coins)
        if told is not None:
            token = told
        if self.sampling.filters:  # the draft's row as it is blended
            kept = on_target(target, draft)
            draft = torch.where(kept.amax(-1, keepdim=True) > 0, kept, target)
        at = token.unsqueeze(1)
        share = relaxed.weight[:, 0]
        columns = {
            "token": token.int(),
            "target_prob": target.gather(1, at).squeeze(1),
            "draft_prob": draft.gather(1, at).squeeze(1),
            "tv": (0.5 * (target - draft).abs().sum(-1)).clamp(0, 1),
            "weight": share if self.relaxer.mixes else torch.full_like(share, torch.nan),
            "substituted": substituted,
            "features": logit_features(believed[1], believed[0]),
            "token_features": self.table.features(believed[1], believed[0], before).byte(),
        }
        if self.alternatives:
            other, _ = couple(target, draft, coins)
            columns["alternative"] = other.int()
        if self.hidden:
            parts = [part[:, 0].to(target.device) for part in hidden]
            columns["hidden"] = torch.cat(parts, -1).half()
        if self.store_logits:
            columns |= _top(target, draft, self.store_logits)
        return token, columns


@dataclass
class Rows:
    """Rows of a batch between steps; `base` is the slot of the first root, the same for all."""

    names: list[int]
    texts: Tensor
    seed: Tensor
    length: Tensor
    last: Tensor
    caches: list
    base: int

    def forward(
        self, model: Model, tokens: Tensor, position: int, hidden: bool = False, side: int = 0
    ) -> Output:
        """Run the model of cache number `side` on tokens [B, Q], of which the first is `position`
        behind the root.
        """
        slot, device = self.base + position, self.length.device
        ahead = torch.arange(tokens.shape[1], device=device)
        seen = torch.arange(slot + len(ahead), device=device)
        behind = (seen >= self.base) & (seen <= slot + ahead.unsqueeze(1))
        visible = (seen < self.length[:, None, None]) | behind
        where = (self.length + position).unsqueeze(1) + ahead
        return model(tokens, where, visible, self.caches[side], slot, hidden)

    def drop_all_but(self, rows: list[int]) -> None:
        """Keep only these rows, if the others are so many that it pays."""
        if len(rows) <= 0.75 * len(self.names):
            self.select(rows)

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.length.device)
        self.names = [self.names[row] for row in rows]
        for name in ("texts", "seed", "length", "last"):
            setattr(self, name, getattr(self, name)[index])
        for cache in self.caches:
            cache.select(index)


def couple(target: Tensor, relaxed: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [B], substituted [B] bool) from the maximal coupling of rows [B, V]; coins [B, 3] in
    [0, 1).
    """
    own = inverse_cdf(target, coins[:, :1])
    ratio = relaxed.gather(1, own) / target.gather(1, own)
    other = inverse_cdf((relaxed - target).clamp_min(0), coins[:, 2:])
    replaced = coins[:, 1:2] >= ratio
    return torch.where(replaced, other, own).squeeze(1), replaced.squeeze(1)


def _top(target: Tensor, draft: Tensor, k: int) -> dict[str, Tensor]:
    """Of rows [B, V]: the k tokens with the largest sum, both log-probabilities, and the mass
    outside them.
    """
    index = (target + draft).topk(min(k, target.shape[-1]), dim=-1).indices
    columns = {"top_index": index.int()}
    for name, rows in (("target", target), ("draft", draft)):
        kept = rows.gather(-1, index)
        columns[f"{name}_top"] = kept.clamp_min(1e-30).log().half()
        columns[f"{name}_rest"] = (1 - kept.sum(-1)).clamp(0, 1)
    return columns
