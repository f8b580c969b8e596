"""The plugin in vLLM beside vLLM's own verification, on whatever GPU there is; each case in a
process of its own.

    vllm        vLLM's own sampler, exact
    none        the plugin without a relaxation: the same law, so the same score and tokens a call, within intervals
    learned     the plugin with the bundle
    our loop    `decode` with the bundle: the score and tokens a call that `learned` must have, but for the first token
                of a text, which vLLM samples before there is a draft

For token and block verification. Speeds are medians of `repetitions` with the lowest and highest,
scores are means with 1.96 standard errors. Needs vllm; benchmarks/vllm.sh runs it together with the
tests.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from ..data.tasks import DataOptions, Task, load_task
from ..export.vllm import KEY, METHOD, chosen
from ..files import within

MOST_PROMPT_TOKENS = 384
BATCH = 256  # texts that our loop decodes together


def run(
    *,
    bundle: str,
    target: str = "sums-target",
    draft: str = "sums-draft",
    task: str = "sums",
    data: DataOptions = DataOptions(),  # noqa: B008  frozen
    prompts: int = 512,
    max_new_tokens: int = 96,
    draft_length: int = 5,
    temperature: float = 1.0,
    tensor_parallel: int = 1,
    dtype: str = "auto",
    device: str = "cuda",
    repetitions: int = 3,
) -> list[dict]:
    """Rows of tokens per second, tokens per target call and score.

    Args:
        bundle: a gate with features logits; `;bias=` may follow.
        target: folder or hub name of the target.
        draft: folder or hub name of its draft.
        task: where the prompts and scores come from.
        data: where the task's rows come from.
        prompts: texts a case.
        max_new_tokens: tokens a text may have.
        draft_length: drafted tokens a step.
        temperature: of both models.
        tensor_parallel: GPUs that share the target in vLLM.
        dtype: auto, float32, bfloat16 or float16.
        device: where our loop runs; vLLM finds its own.
        repetitions: times a case is measured.
    """
    from ..runtime.model import _split, load_tokenizer

    if find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    chosen(bundle)  # one that vLLM cannot have is told now, and not after the first engines
    within(2, max_new_tokens=max_new_tokens)  # before the first token vLLM drafts none
    within(1, draft_length=draft_length, tensor_parallel=tensor_parallel, repetitions=repetitions)
    tokenizer = load_tokenizer(target)
    given = load_task(task, split="test", limit=prompts, data=data)
    shared = {
        "target": _split(target)[0],
        "draft": _split(draft)[0],
        "names": [target, draft],
        "device": device,
        "prompts": [
            given.encode(example, tokenizer, MOST_PROMPT_TOKENS) for example in given.examples
        ],
        "max_new_tokens": max_new_tokens,
        "draft_length": draft_length,
        "temperature": temperature,
        "dtype": dtype,
        "tensor_parallel": tensor_parallel,
        "repetitions": repetitions,
        "stop": list(given.stop),
    }
    rows: list[dict] = []
    for theirs, ours in METHOD.items():
        first = len(rows)
        for name, relaxation in (("vllm", None), ("none", "none"), ("learned", bundle)):
            settings = shared | {"method": theirs, "relaxation": relaxation}
            rows += _rows(f"{name}+{ours}", _apart("engine", settings), given)
        _compare(rows[first:], f"vllm+{ours}")
        rows += _rows(
            f"our loop+{ours}",
            _apart("loop", shared | {"method": ours, "relaxation": bundle}),
            given,
        )
    return rows


def _rows(case: str, found: dict, task: Task) -> list[dict]:
    scores = [
        task.score(text, example)
        for text, example in zip(found["texts"], task.examples, strict=True)
    ]
    mean, error = statistics.mean(scores), 1.96 * statistics.pstdev(scores) / len(scores) ** 0.5
    speed = found["tokens_per_second"]
    return [
        {
            "case": case,
            "value": statistics.median(speed),
            "unit": "tokens/s",
            "low": min(speed),
            "high": max(speed),
        },
        {"case": case, "value": found["tokens_per_call"], "unit": "tokens a target call"},
        {
            "case": case,
            "value": mean,
            "unit": task.metric,
            "low": mean - error,
            "high": mean + error,
        },
    ]


def _compare(rows: list[dict], base: str) -> None:
    """Write the ratios to the base's speed into the other rows of speed."""
    value = next(row["value"] for row in rows if row["case"] == base and row["unit"] == "tokens/s")
    for row in rows:
        if row["unit"] == "tokens/s" and row["case"] != base:
            row["vs"] = {base: row["value"] / value}


def _apart(kind: str, settings: dict) -> dict:
    """What `loop` or `engine` finds, in a process of its own: neither gives a GPU its memory back
    before it ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        # -P: in this folder `vllm` would be this file. What vLLM logs, causes of errors with it,
        # goes to its stdout; ours is the table's.
        command = [sys.executable, "-P", "-m", __name__, kind, str(file)]
        answer = subprocess.run(command, input=json.dumps(settings), stdout=2, text=True)
        if answer.returncode:
            case = f"{kind}, method {settings['method']}, relaxation {settings['relaxation']}"
            raise ValueError(
                f"the process of {case} ended with {answer.returncode}; what it said stands above"
            )
        return json.loads(file.read_text())


def loop(settings: dict) -> dict:
    """Texts, speeds and tokens a target call of our loop."""
    from ..runtime.completion import Request
    from ..runtime.engine import Engine
    from ..runtime.model import load_pair
    from ..runtime.sampling import Sampling

    pair = load_pair(*settings["names"], settings["dtype"], settings["device"])
    ours = Engine(
        pair,
        settings["method"],
        settings["relaxation"],
        settings["draft_length"],
        sampling=Sampling(settings["temperature"]),
    )
    new_tokens, stop = settings["max_new_tokens"], tuple(settings["stop"])
    requests = {
        seed: Request(tokens, seed, new_tokens, stop)
        for seed, tokens in enumerate(settings["prompts"])
    }
    for seed, request in requests.items():
        ours.check(seed, request)
    ours.run(requests, BATCH)  # on a GPU the steps are captured here
    speeds = []
    for _ in range(settings["repetitions"]):
        began = time.perf_counter()
        done = list(ours.run(requests, BATCH).values())
        speeds.append(sum(len(text.tokens) for text in done) / (time.perf_counter() - began))
    calls, count = sum(text.target_calls for text in done), sum(len(text.tokens) for text in done)
    return {
        "texts": [text.text for text in done],
        "tokens_per_second": speeds,
        "tokens_per_call": count / calls,
    }


def engine(settings: dict) -> dict:
    """Texts, speeds and tokens a target call of one engine of vLLM."""
    from vllm import LLM, SamplingParams

    drafting = {
        "method": "draft_model",
        "model": settings["draft"],
        "num_speculative_tokens": settings["draft_length"],
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": settings["method"],
    }
    relaxation = settings["relaxation"]
    served = LLM(
        settings["target"],
        speculative_config=drafting,
        tensor_parallel_size=settings["tensor_parallel"],
        dtype=settings["dtype"],
        additional_config={KEY: relaxation} if relaxation else {},
        disable_log_stats=False,
    )
    params = [
        SamplingParams(
            temperature=settings["temperature"],
            seed=seed,
            max_tokens=settings["max_new_tokens"],
            stop=settings["stop"] or None,
        )
        for seed in range(len(settings["prompts"]))
    ]
    prompts = [{"prompt_token_ids": tokens} for tokens in settings["prompts"]]
    served.generate(prompts[:8], params[:8], use_tqdm=False)
    before, speeds = _accepted(served), []
    for _ in range(settings["repetitions"]):
        began = time.perf_counter()
        done = served.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        speeds.append(sum(len(text.outputs[0].token_ids) for text in done) / seconds)
    drafts, accepted = (now - then for now, then in zip(_accepted(served), before, strict=True))
    texts = [text.outputs[0].text for text in done]
    return {"texts": texts, "tokens_per_second": speeds, "tokens_per_call": 1 + accepted / drafts}


def _accepted(engine) -> tuple[float, float]:
    """Steps that had drafts, counted for each request, and drafted tokens accepted, since the
    engine began.
    """
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]


if __name__ == "__main__":
    kind, file = sys.argv[1:]
    Path(file).write_text(json.dumps({"loop": loop, "engine": engine}[kind](json.load(sys.stdin))))
