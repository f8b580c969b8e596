"""Labels of importance: does it do harm to put the draft's token where the target said another?

The texts are the target's own. A *mismatch* is a position at which the maximal coupling of target
and draft gives another token than the text's; at temperature 0 it is one with another arg max.

counterfactual  AutoJudge (arXiv 2504.20039), above temperature 0 PAD (arXiv 2511.00351). The
                draft's token is put there, and the target finishes the text alone. The label is the
                score that is lost: that of the text, above temperature 0 that of `samples` texts
                that go on from the text's own token, minus that of the text with the draft's token.
suffix          SelfJudge (arXiv 2510.02329). Nothing is generated. The label is what the target's
                mean log-probability of its next `suffix` tokens loses, nats.

Only texts that earn something are labelled by counterfactuals: what is wrong already cannot become
wrong. Labels are independent: each looks at one mismatch alone. In `sequential` order (AutoJudge,
section 3) a mismatch without harm is kept, left to right, so later ones are judged behind it; the
text that is stored is the one with what was kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..files import within
from ..runtime.continuations import Branch, Branches
from ..runtime.groups import refuse_idle
from .first_look import FirstLook, rare
from .traces import Shard
from .writing import Writer

STRIDE = 6364136223846793005  # odd, so that different seeds stay different modulo 2^64
FEW = 0.02  # of the labels are of the rarer kind: more would be needed than are gathered


@dataclass(frozen=True)
class Labels:
    """Labels of importance, beside the target's own texts.

    Args:
        label: counterfactual: what the score loses if the draft's token stands at one position and
            the target goes on, for training with the objective judge or attribution; or suffix:
            what the log-likelihood of the next tokens loses, without generating any.
        label_order: independent: each position is judged alone; or sequential, at temperature 0:
            from left to right, and a token without harm is kept.
        label_samples: texts that go on from either token, above temperature 0.
        label_suffix: tokens behind a position that the kind suffix looks at.
        label_threshold: nats a token that the kind suffix takes for harm.
        label_batch: positions that are judged together.
    """

    label: Literal["counterfactual", "suffix"] | None = None
    label_order: Literal["independent", "sequential"] = "independent"
    label_samples: int = 1
    label_suffix: int = 20
    label_threshold: float = 0.2
    label_batch: int = 64

    def __post_init__(self):
        within(1, 1 << 10, label_samples=self.label_samples)
        within(1, label_suffix=self.label_suffix, label_batch=self.label_batch)
        if not 0 <= self.label_threshold < float("inf"):
            raise ValueError(
                "`label_threshold` must be a number of nats of at least 0, got"
                f" {self.label_threshold}"
            )
        idle = {name for name in vars(self) if getattr(self, name) != getattr(Labels, name)}
        used = {
            None: set(),
            "counterfactual": {"label", "label_order", "label_samples", "label_batch"},
            "suffix": {"label", "label_suffix", "label_threshold", "label_batch"},
        }
        if idle := idle - used[self.label]:
            why = f"beside the label {self.label}" if self.label else "without `label`"
            refuse_idle(sorted(idle), why)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the labels."""
        if not self.label:
            return {}
        found = {name.removeprefix("label_"): value for name, value in vars(self).items()}
        found["kind"] = found.pop("label")
        del found["batch"]
        return {"label": found}


class Labeller:
    """Writes units of texts with labels."""

    def __init__(self, writer: Writer, labels: Labels):
        sampler = replace(writer.sampler, alternatives=True)
        self.writer, self.labels = replace(writer, sampler=sampler), labels
        self.greedy = sampler.sampling.greedy
        if labels.label_order == "sequential" and not self.greedy:
            raise ValueError(
                "`label_order` sequential keeps tokens without harm, which one text above"
                " temperature 0 does not show; give --sampling.temperature 0 or independent labels"
            )
        if labels.label_samples > 1 and self.greedy:
            raise ValueError(
                f"the {labels.label_samples} `label_samples` would be the same text at temperature"
                " 0; give 1"
            )
        if labels.label == "counterfactual" and not writer.task.scores_text:
            raise ValueError(
                f"counterfactual labels need a task whose texts have scores, and"
                f" {writer.task.name} gives none; name `data.score` and `data.reference_field`, or"
                " give --label suffix"
            )

    def unit(self, unit: range) -> tuple[Shard, dict[str, int]]:
        """(the texts of some prompts with labels, tokens that were generated and those that were
        only read, without the prompts).
        """
        work = _Unit(self, unit)
        if self.labels.label == "suffix":
            work.by_suffix()
        elif self.labels.label_order == "sequential":
            work.in_sequence()
        else:
            work.by_continuing()
        return work.shard(), {"generated": work.generated, "forced": work.forced}

    def seconds_a_step(self, rows: int) -> float:
        """Of a decoding step of the texts, without their labels."""
        return self.writer.seconds_a_step(rows)

    def look(self, shards: list[Shard]) -> tuple[str, str | None]:
        """What the first texts say, and why more of their kind would teach little."""
        look = FirstLook.of(*shards)
        labels = torch.cat([shard.label for shard in shards])
        labels = labels[~labels.isnan()]
        harmful = int(harm(labels, self.labels.settings["label"]).gt(0).sum())
        said = f"{look}; {len(labels)} labels, {harmful} of them harmful"
        limit = self.writer.sampler.max_new_tokens
        objection = look.cut(limit)
        if self.labels.label == "counterfactual":
            objection = objection or look.failing()
        if not objection and rare(min(harmful, len(labels) - harmful), len(labels), FEW):
            objection = (
                f"{harmful} of the first {len(labels)} labels are harmful, nearly all say the same,"
                " so a head learns little from more of them; choose another task, temperature or"
                " `label_threshold`"
            )
        return said, objection


class _Unit:
    """Texts of some prompts on their way to a shard."""

    def __init__(self, labeller: Labeller, unit: range):
        self.labeller, self.labels, self.writer = labeller, labeller.labels, labeller.writer
        self.texts, self.owners = self.writer.texts(unit)
        self.rewards = [self._reward(number, text.tokens) for number, text in enumerate(self.texts)]
        self.label = [[torch.nan] * len(text.tokens) for text in self.texts]
        self.generated, self.forced = sum(len(text.tokens) for text in self.texts), 0

    def shard(self) -> Shard:
        """The texts as they are now, with their labels."""
        for text, label in zip(self.texts, self.label, strict=True):
            text.columns["label"] = torch.tensor(label)
        return self.writer.shard(self.texts, self.owners, self.rewards)

    def by_continuing(self) -> None:
        """Counterfactual labels, each for itself."""
        places = [(number, at) for number in self._right() for at in self._mismatches(number)]
        greedy = self.labeller.greedy
        sides = ["alternative"] if greedy else ["alternative", "token"]
        branches = []
        for number, at in places:
            columns = self.texts[number].columns
            for chosen in [columns[name] for name in sides]:
                for again in range(self.labels.label_samples):
                    seed = self._seed(number, again)
                    branches.append(Branch(number, at, int(chosen[at]), seed))
        shape = len(places), len(sides), self.labels.label_samples
        scores = self._scores(branches).view(shape).mean(-1)
        for (number, at), score in zip(places, scores.tolist(), strict=True):
            before = self.rewards[number] if greedy else score[1]
            self.label[number][at] = before - score[0]

    def by_suffix(self) -> None:
        """Labels by the likelihood of what the target says next."""
        places = [(n, at) for n in range(len(self.texts)) for at in self._mismatches(n)]
        branches = []
        for number, at in places:
            for name in ("token", "alternative"):
                token = int(self.texts[number].columns[name][at])
                branches.append(Branch(number, at, token))
        count = self.labels.label_suffix
        found = torch.tensor(self._branches().likelihood(branches, count)).view(-1, 2)
        for number, at in places:
            behind = len(self.texts[number].tokens) - at - 1
            self.forced += 2 * min(count, behind)
        for (number, at), (own, other) in zip(places, found.tolist(), strict=True):
            self.label[number][at] = own - other

    def in_sequence(self) -> None:
        """Counterfactual labels from left to right; tokens without harm are kept."""
        begin = dict.fromkeys(self._right(), 0)
        while begin:
            branches = []
            for number in list(begin):
                places = [at for at in self._mismatches(number) if at >= begin[number]]
                if not places:
                    del begin[number]
                    continue
                other = int(self.texts[number].columns["alternative"][places[0]])
                branches.append(Branch(number, places[0], other))
            changed = []
            for branch, tokens in zip(branches, self._continued(branches), strict=True):
                number, at = branch.text, branch.kept
                score = self._reward(number, tokens)
                self.label[number] = self.label[number][: at + 1] + [torch.nan] * len(tokens)
                self.label[number][at] = self.rewards[number] - score
                begin[number] = at + 1
                if score >= self.rewards[number]:
                    self.texts[number].tokens, self.rewards[number] = tokens, score
                    changed.append(number)
            self._replay(changed)
        for number, text in enumerate(self.texts):
            del self.label[number][len(text.tokens) :]

    def _replay(self, numbers: list[int]) -> None:
        """The columns of texts that are others now."""
        if not numbers:
            return
        tokens = [self.texts[number].tokens for number in numbers]
        prompts = {number: self._prompt(number) for number in numbers}
        seeds = {number: self._seed(number) for number in numbers}
        found = self.writer.sampler.run(prompts, 1, lambda number, _: seeds[number], tokens)
        self.forced += sum(map(len, tokens))
        for number, text in zip(numbers, found, strict=True):
            self.texts[number] = text

    def _right(self) -> list[int]:
        """The texts that earn something."""
        return [number for number, reward in enumerate(self.rewards) if reward > 0]

    def _mismatches(self, number: int) -> list[int]:
        columns = self.texts[number].columns
        return (columns["alternative"] != columns["token"]).nonzero().squeeze(1).tolist()

    def _branches(self) -> Branches:
        sampler = self.writer.sampler
        prompts = [self._prompt(number) for number in range(len(self.texts))]
        texts = [text.tokens for text in self.texts]
        most = self.labels.label_batch
        return Branches(sampler.pair, sampler.sampling, prompts, texts, most)

    def _continued(self, branches: list[Branch]) -> list[list[int]]:
        sampler = self.writer.sampler
        found = self._branches().continued(branches, sampler.stops, sampler.max_new_tokens)
        for branch, tokens in zip(branches, found, strict=True):
            self.generated += len(tokens) - branch.kept - 1
        return found

    def _scores(self, branches: list[Branch]) -> Tensor:
        continued = zip(branches, self._continued(branches), strict=True)
        scores = [self._reward(branch.text, tokens) for branch, tokens in continued]
        return torch.tensor(scores, dtype=torch.float64)

    def _reward(self, number: int, tokens: list[int]) -> float:
        text = self.texts[number]
        return self.writer.reward(replace(text, tokens=tokens), self.owners[number])

    def _prompt(self, number: int) -> list[int]:
        return self.writer.prompts[self.owners[number]]

    def _seed(self, number: int, again: int | None = None) -> int:
        """Of a text, or of one of its continuations, which are not the text itself."""
        seed = self.writer.seed_of(self.owners[number], number % self.writer.samples)
        if again is None:
            return seed
        mixed = (seed * STRIDE + again + 1) % (1 << 64)
        return mixed - (1 << 63)


def harm(label: Tensor, settings: dict[str, Any]) -> Tensor:
    """[...] in [0, 1] what labels [...] say of harm; NaN where there is no label.

    settings: `label` of the manifest. A loss of log-likelihood counts beyond the threshold.
    """
    if settings["kind"] == "suffix":
        return torch.where(label.isnan(), label, (label > settings["threshold"]).to(label.dtype))
    return label.clamp(0, 1)
