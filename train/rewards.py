"""What the texts of traces earn, and what that is compared with.

An objective reads four numbers of a text: its reward; the advantage, which is the reward minus the
mean reward of the prompt's texts in the same folder; the base, which is what the target's own text
of that prompt is expected to earn; and graded, whether any reward of the traces is neither 0 nor 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.batches import Texts
from ..data.traces import Shard


def scored(shard: Shard) -> Tensor:
    """[S] the task's score of every text."""
    return shard.reward


def likelihood(shard: Shard) -> Tensor:
    """[S] float32, the mean log-probability of every text's tokens under the target, nats."""
    logprob = shard.target_prob.double().clamp_min(1e-30).log()
    total = torch.cat([torch.zeros(1, dtype=torch.float64), logprob.cumsum(0)])
    return (total[shard.start].diff() / shard.start.diff()).float()


REWARDS = {"task": scored, "likelihood": likelihood}


def compared(texts: Texts) -> dict[str, Tensor]:
    """reward, advantage, base and graded, each [S], of all texts."""
    reward = texts.reward
    return {
        "reward": reward,
        "advantage": advantage(reward, texts.group),
        "base": base(reward, texts.prompt, untouched(texts.substituted, texts.start, texts.length)),
        "graded": ((reward != 0) & (reward != 1)).any().expand(len(reward)),
    }


def advantage(reward: Tensor, group: Tensor) -> Tensor:
    """Reward minus the mean reward of its group.

    reward: [S]; group: [S] int64, equal for the texts of one prompt and one head. Returns [S]. With
    K texts a group the own reward is in the mean, so the expected gradient is (K - 1) / K of the
    true one.
    """
    _, index = torch.unique(group, return_inverse=True)
    count = torch.bincount(index).to(reward.dtype)
    mean = torch.zeros_like(count).index_add(0, index, reward) / count
    return reward - mean[index]


def untouched(substituted: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """[S] bool: the texts without a substitution, which are the target's own; substituted [X],
    start and length [S].
    """
    total = torch.cat([torch.zeros(1, dtype=torch.int64), substituted.long().cumsum(0)])
    return total[start + length] == total[start]


def base(reward: Tensor, prompt: Tensor, own: Tensor, prior: float = 2.0) -> Tensor:
    """[S] mean reward of the prompt's `own` texts, drawn towards the mean of all such texts as if
    by `prior` of them.

    reward, prompt, own: [S]. If no text is the target's own, the best reward stands for the mean.
    """
    overall = reward[own].mean() if own.any() else reward.max()
    _, index = torch.unique(prompt, return_inverse=True)
    count = torch.full((int(index.max()) + 1,), prior).index_add(0, index, own.to(reward.dtype))
    total = torch.full_like(count, prior * float(overall)).index_add(0, index, reward * own)
    return (total / count)[index]
