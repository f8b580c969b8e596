"""What the target makes of its own texts if one token of them is another.

A branch keeps the beginning of a text, puts a token behind it, and goes on from there. The keys and
values of every text are computed once and copied to all of its branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..verifier.law import inverse_cdf
from .batch import padded, prefill
from .completion import Stops
from .forward import Pair
from .rollouts import Rows
from .sampling import Sampling, beliefs, probabilities
from .uniforms import uniforms


@dataclass(frozen=True)
class Branch:
    """A text from one position on.

    text: index of the text. kept: its tokens that are kept, without the prompt.
    token: the token behind them. seed: of the random numbers of what follows.
    """

    text: int
    kept: int
    token: int
    seed: int = 0


@dataclass(frozen=True)
class Branches:
    """Texts of the target, and what becomes of their branches.

    prompts, texts: token ids of each text's prompt, and of the text.
    most: branches that are computed together; it changes no result but for rounding.
    """

    pair: Pair
    sampling: Sampling
    prompts: Sequence[list[int]]
    texts: Sequence[list[int]]
    most: int = 64

    @torch.no_grad()
    def continued(
        self, branches: Sequence[Branch], stops: Stops, max_new_tokens: int
    ) -> list[list[int]]:
        """The whole texts of the branches, each continued by the target alone until it ends."""
        done = []
        for chunk in self._chunks(branches):
            done += self._continue(chunk, stops, max_new_tokens)
        return done

    @torch.no_grad()
    def likelihood(self, branches: Sequence[Branch], count: int) -> list[float]:
        """The target's mean log-probability of the next `count` tokens of each branch's text behind
        the branch's token, nats; 0 if the text ends there. Nothing is generated.
        """
        found = []
        for chunk in self._chunks(branches):
            found += self._forced(chunk, count)
        return found

    def _chunks(self, branches: Sequence[Branch]) -> Iterator[Sequence[Branch]]:
        for start in range(0, len(branches), self.most):
            yield branches[start : start + self.most]

    def _begun(self, chunk: Sequence[Branch], room: int) -> Rows:
        """Rows that hold what the branches keep, with the branches' tokens as roots.

        room: new slots of a row.
        """
        target = self.pair.target
        owners = sorted({branch.text for branch in chunk})
        whole = []
        for owner in owners:
            kept = max(branch.kept for branch in chunk if branch.text == owner)
            whole.append(self.prompts[owner] + self.texts[owner][:kept])
        tokens, _ = padded(whole, target.device)
        base = tokens.shape[1]
        cache = target.cache(base + room)
        prefill(target, tokens, cache)
        places = [owners.index(branch.text) for branch in chunk]
        cache.select(torch.tensor(places, device=target.device))
        lengths = [len(self.prompts[branch.text]) + branch.kept for branch in chunk]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=target.device)

        return Rows(
            names=list(range(len(chunk))),
            texts=column(list(range(len(chunk)))),
            seed=column([branch.seed for branch in chunk]),
            length=column(lengths),
            last=column([branch.token for branch in chunk]).unsqueeze(1),
            caches=[cache],
            base=base,
        )

    def _continue(
        self, chunk: Sequence[Branch], stops: Stops, max_new_tokens: int
    ) -> list[list[int]]:
        texts = [self.texts[branch.text][: branch.kept] + [branch.token] for branch in chunk]

        def goes_on(text: list[int]) -> bool:
            ended = text[-1] in self.pair.eos or stops.ended(text)
            return not ended and len(text) < max_new_tokens

        going = {row for row, text in enumerate(texts) if goes_on(text)}
        if not going:
            return texts
        room = max_new_tokens - min(len(texts[row]) for row in going)
        rows = self._begun(chunk, room)
        rows.select(sorted(going))
        for position in range(room):
            new = self._next(rows, position)
            rows.last = new.unsqueeze(1)
            for owner, token in zip(rows.names, new.tolist(), strict=True):
                if owner in going:
                    texts[owner].append(token)
                    if not goes_on(texts[owner]):
                        going.remove(owner)
            if not going:
                break
            rows.drop_all_but([row for row, owner in enumerate(rows.names) if owner in going])
        return texts

    def _next(self, rows: Rows, position: int) -> Tensor:
        """[B] the next token of every row."""
        logits = rows.forward(self.pair.target, rows.last, position).logits[:, 0]
        coins = uniforms(rows.seed, rows.length + position + 1, 1)
        return inverse_cdf(probabilities(logits, self.sampling), coins).squeeze(1)

    def _forced(self, chunk: Sequence[Branch], count: int) -> list[float]:
        rows = self._begun(chunk, count + 1)
        behind = [self.texts[b.text][b.kept + 1 : b.kept + 1 + count] for b in chunk]
        tokens, numbers = padded([[0, *tokens] for tokens in behind], rows.last.device)
        tokens[:, :1] = rows.last
        logits = rows.forward(self.pair.target, tokens, 0).logits
        right = tokens[:, 1:].unsqueeze(-1)
        logprob = beliefs(logits[:, :-1]).gather(-1, right).squeeze(-1).clamp_min(1e-30).log()
        scored = torch.arange(logprob.shape[1], device=logprob.device) < (numbers - 1).unsqueeze(1)
        total = torch.where(scored, logprob, 0).double().sum(1)
        return (total / (numbers - 1).clamp_min(1)).tolist()
