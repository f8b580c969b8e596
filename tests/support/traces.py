"""Small folders of traces from made-up rows: every number is what real rows would give, no model is run."""

from __future__ import annotations

from pathlib import Path

import torch
from diversed.data.traces import Shard, write_manifest, write_shard
from diversed.runtime.rollouts import _top
from diversed.verifier.features import logit_features
from diversed.verifier.rules import geometric_rows
from diversed.verifier.token_features import TokenTable

VOCABULARY = 6
TABLE = TokenTable.of([" a", "7", "A", "+", "(", "7."])


def synthetic_shard(
    texts: int, prompt: int = 0, samples: int = 4, hidden: int = 0, weight: float = 0.5, seed: int = 0,
    blend: str = "probabilities", labels: bool = False,
):  # fmt: skip
    """A shard of `texts` texts of 2 to 9 tokens; the reward halves with every substitution where TV is above 0.5."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(2, 10, (texts,), generator=generator)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])
    positions = int(start[-1])
    logits = 2 * torch.randn(2, positions, VOCABULARY, generator=generator)
    draft, target = logits.softmax(-1)
    own = torch.multinomial(target, 1, generator=generator)
    blend_row, extra = (1 - weight) * target + weight * draft, draft - target
    if blend == "logits":
        blend_row = geometric_rows(target, draft, torch.full_like(target[..., :1], weight))
        extra = blend_row - target
    keep = torch.rand(positions, 1, generator=generator) <= blend_row.gather(1, own) / target.gather(1, own)
    other = torch.multinomial(extra.clamp_min(0) + 1e-12, 1, generator=generator)
    token, substituted = torch.where(keep, own, other), ~keep.squeeze(1)
    tv = 0.5 * (draft - target).abs().sum(-1)
    text = torch.repeat_interleave(torch.arange(texts), length)
    harm = torch.zeros(texts).index_add(0, text, (substituted & (tv > 0.5)).float())
    told = {}
    if labels:  # harm where TV is above 0.5, at every second position
        known = torch.arange(positions) % 2 == 0
        told = {"alternative": other.squeeze(1).int(), "label": torch.where(known, (tv > 0.5).float(), torch.nan)}
    return Shard(
        start=start,
        prompt=prompt + torch.arange(texts) // samples,
        sample=torch.arange(texts) % samples,
        reward=0.5**harm,
        finished=torch.ones(texts, dtype=torch.bool),
        token=token.squeeze(1).int(),
        target_prob=target.gather(1, token).squeeze(1),
        draft_prob=draft.gather(1, token).squeeze(1),
        tv=tv,
        weight=torch.full((positions,), weight),
        substituted=substituted,
        features=logit_features(draft, target),
        token_features=TABLE.features(draft, target, token.squeeze(1)).byte(),
        **told,
        hidden=torch.randn(positions, hidden, generator=generator).half() if hidden else None,
        **(_top(target, draft, VOCABULARY) if blend == "logits" else {}),
    )


def synthetic_traces(
    folder: Path,
    prompts: int = 8,
    samples: int = 4,
    shards: int = 2,
    hidden: tuple[int, int] = (0, 0),
    weight: float = 0.5,
    seed: int = 0,
    reward: float | None = None,
    blend: str = "probabilities",
    labels: bool = False,
) -> Path:
    """A complete folder of traces; `hidden` are the sizes (draft, target), `reward` is that of every text if given."""
    per_shard = prompts // shards
    entries = []
    for index in range(shards):
        first, shard_seed = index * per_shard, 1000 * seed + index
        shard = synthetic_shard(per_shard * samples, first, samples, sum(hidden), weight, shard_seed, blend, labels)
        if reward is not None:
            shard.reward.fill_(reward)
        entries.append(write_shard(folder, index, shard))
    manifest = {
        "complete": True,
        "target": {"name": "made-up target", "hash": "t", "hidden_size": hidden[1] or 5},
        "draft": {"name": "made-up draft", "hash": "d", "hidden_size": hidden[0] or 3},
        "tokenizer": "k",
        "vocab": VOCABULARY,
        "sampling": {"temperature": 1.0},
        "relaxation": f"ensemble:{weight}" + (";blend=logits" if blend == "logits" else ""),
        "task": "made-up",
        "metric": "score",
        "seed": 0,
        "prompts": per_shard * shards,
        "samples": samples,
        "unit": per_shard,
        "shards": entries,
        "versions": {},
        "token_table": TABLE.sha256,
    }
    if labels:
        manifest["label"] = {"kind": "counterfactual"}
    write_manifest(folder, manifest)
    return folder
