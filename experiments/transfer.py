"""A gate that reads the two rows alone, taken to another task or another pair: as it is, and after
a short refit.

Gates of one kind (attribution on logit features) on the test prompts of the place they are taken
to: trained elsewhere; the same refitted on `refit` texts of the new place, at two learning rates;
trained on those few texts alone; trained there on `rollouts` texts. Thresholds are chosen on
validation prompts of the new place as in benchmarks/verifiers.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from diversed.commands.bench import measure
from diversed.commands.export import export
from diversed.data.batches import TraceOptions
from diversed.data.tasks import DataOptions
from diversed.train.fit import train
from diversed.train.module import HeadOptions
from verifiers import FIT, HEADS, World, choose, rows_of


def run(
    *,
    elsewhere: str,
    out: str = "runs/transfer",
    target: str = "sums-target",
    draft: str = "sums-draft",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    rollouts: int = 4096,
    refit: int = 512,
    relaxation: str = "ensemble:0.2",
    oracle: str | None = None,
    biases: list[float] = [-8.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0],  # noqa: B006
    max_drop: float = 0.02,
    likelihood: bool = False,
    validation_prompts: int = 500,
    test_prompts: int = 1000,
    max_prompt_tokens: int = 384,
    max_new_tokens: int | None = None,
    seed: int = 0,
    threads: int = 1,
) -> list[dict]:
    """Rows of score and step acceptance on test prompts of the new place.

    Args:
        elsewhere: folder of `diversed train` with the gate that is taken along: features logits,
            width 32.
        out: folder for everything; what is finished there is not done again.
        target: folder, hub name or .gguf file of the new place's target.
        draft: folder, hub name or .gguf file of its draft.
        task: where its prompts come from.
        data: where the task's rows come from.
        rollouts: texts of the gate that is trained there.
        refit: texts of the short refit.
        relaxation: what training texts are sampled from.
        oracle: relaxation whose step acceptance is the other end of the gap; none leaves the gap
            out.
        biases: thresholds to choose from.
        max_drop: loss of mean score that a head may cost.
        likelihood: score texts by the target's mean log-probability, for tasks without references.
        validation_prompts: prompts on which a threshold is chosen.
        test_prompts: prompts of the figures.
        max_prompt_tokens: longer prompts lose the end of their article, never the instruction or
            the question.
        max_new_tokens: tokens a text may have; by default the task's own number.
        seed: of the gathered prompts and texts and of training.
        threads: CPU threads.
    """
    prompts = {"train": rollouts // 4, "validation": validation_prompts, "test": test_prompts}
    world = World(
        out,
        prompts,
        likelihood,
        target=target,
        draft=draft,
        task=task,
        data=data,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        threads=threads,
    )
    exact, ceiling = (
        world.measure("test", "none"),
        world.measure("test", oracle) if oracle else None,
    )
    baseline = world.measure("validation", "none")
    rows = rows_of("exact", exact, exact, None)
    few, all_ = (world.traces(seed, relaxation, 32, count) for count in (refit, rollouts))
    fresh = {**FIT, **HEADS["logits"], "features": "logits"}
    gates = {
        "elsewhere": None,
        f"elsewhere, refitted on {refit} at a tenth of the rate": (
            few,
            {**fresh, "start": elsewhere, "lr": 3e-4},
        ),
        f"elsewhere, refitted on {refit}": (few, {**fresh, "start": elsewhere}),
        f"here, {refit} texts": (few, fresh),
        f"here, {rollouts} texts": (all_, fresh),
    }
    for number, (name, plan) in enumerate(gates.items()):
        head, bundle = elsewhere, Path(out) / f"bundle-{number}"
        if plan:
            traces, settings = plan
            head = str(Path(out) / f"head-{number}")
            reward = "likelihood" if likelihood else "task"
            data = TraceOptions(traces, 32, reward=reward)
            train(data, head, HeadOptions(**settings), {"max_epochs": 12}, seed)
        if not bundle.exists():
            export(train=head, out=str(bundle), any_pair=True)
        bias = choose(world, str(bundle), biases, baseline, max_drop / 2)
        cell = world.measure("test", f"{bundle};bias={bias:g}")
        rows += rows_of(f"{name}, bias {bias:g}", cell, exact, ceiling)
    return rows


if __name__ == "__main__":
    measure(run, sys.argv[1:], "experiments/transfer.py")
