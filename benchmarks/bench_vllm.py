"""The plugin in vLLM beside vLLM's own verification, on whatever GPU there is; each case in a
process of its own.

    vllm        vLLM's own sampler, exact
    none        the plugin without a relaxation: the same law, so the same score and tokens a call
    learned     the plugin with the bundle
    our loop    `decode` with the bundle: it must have the score and the tokens a call of `learned`,
                but for the first token of a text, which vLLM samples before there is a draft

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
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from ..data.selection import LongPrompts
from ..data.tasks import Task
from ..export.vllm import KEY, METHOD, chosen
from ..files import within
from ..runtime.groups import Models
from ..runtime.model import load_tokenizer, split_name
from .timing import in_turns, row

BATCH = 256  # texts that our loop decodes together


def run(
    models: Models = Models(device="cuda"),  # noqa: B008  frozen
    prompts: LongPrompts = LongPrompts(prompts=512, max_new_tokens=96),  # noqa: B008
    *,
    bundle: str,
    draft_length: int = 5,
    temperature: float = 1.0,
    tensor_parallel: int = 1,
    repetitions: int = 3,
) -> list[dict]:
    """Rows of tokens per second, tokens per target call and score.

    Args:
        bundle: a bundle whose head sees logits; `;bias=` may follow.
        draft_length: drafted tokens a step.
        temperature: of both models.
        tensor_parallel: GPUs that share the target in vLLM; `device` says where our loop runs.
        repetitions: times a case is measured.
    """
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    chosen(bundle)  # one that vLLM cannot have is told now, and not after the first engines
    within(2, max_new_tokens=prompts.max_new_tokens)  # before the first token vLLM drafts none
    within(1, draft_length=draft_length, tensor_parallel=tensor_parallel, repetitions=repetitions)
    tokenizer, task = load_tokenizer(models.target), prompts.load("test")
    most = prompts.max_prompt_tokens
    shared = {
        "models": asdict(models),
        "prompts": [task.encode(example, tokenizer, most) for example in task.examples],
        "first_seed": prompts.seed << 20,
        "max_new_tokens": prompts.max_new_tokens or task.max_new_tokens,
        "draft_length": draft_length,
        "temperature": temperature,
        "tensor_parallel": tensor_parallel,
        "repetitions": repetitions,
        "stop": list(task.stop),
    }
    rows: list[dict] = []
    for theirs, ours in METHOD.items():
        first = len(rows)
        for name, relaxation in (("vllm", None), ("none", "none"), ("learned", bundle)):
            settings = shared | {"method": theirs, "relaxation": relaxation}
            rows += _rows(f"{name}+{ours}", _apart("engine", settings), task)
        base, *others = rows[first::3]  # the rows of speed
        for other in others:
            other["vs"] = {base["case"]: other["value"] / base["value"]}
        settings = shared | {"method": ours, "relaxation": bundle}
        rows += _rows(f"our loop+{ours}", _apart("loop", settings), task)
    return rows


def _rows(case: str, found: dict, task: Task) -> list[dict]:
    scores = [
        task.score(text, example)
        for text, example in zip(found["texts"], task.examples, strict=True)
    ]
    mean, error = statistics.mean(scores), 1.96 * statistics.pstdev(scores) / len(scores) ** 0.5
    interval = {"low": mean - error, "high": mean + error}
    per_call = found["tokens_per_call"]
    return [
        row(case, found["tokens_per_second"], "tokens/s"),
        {"case": case, "value": per_call, "unit": "tokens a target call"},
        {"case": case, "value": mean, "unit": task.metric, **interval},
    ]


def _apart(kind: str, settings: dict) -> dict:
    """What `loop` or `engine` finds, in a process of its own: neither gives a GPU its memory back
    before it ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        # What vLLM logs, causes of errors with it, goes to its stdout; ours is the table's.
        command = [sys.executable, "-m", __name__, kind, str(file)]
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
    from ..runtime.sampling import Sampling

    way = settings["method"], settings["relaxation"], settings["draft_length"]
    sampling = Sampling(settings["temperature"])
    ours = Engine(Models(**settings["models"]).load(), *way, sampling=sampling)
    new_tokens, stop = settings["max_new_tokens"], tuple(settings["stop"])
    requests = {
        seed: Request(tokens, seed, new_tokens, stop)
        for seed, tokens in enumerate(settings["prompts"], settings["first_seed"])
    }
    for seed, request in requests.items():
        ours.check(seed, request)

    def measure(engine: Engine, _: int) -> tuple[list, float]:
        began = time.perf_counter()
        done = list(engine.run(requests, BATCH).values())
        return done, sum(len(text.tokens) for text in done) / (time.perf_counter() - began)

    turns = in_turns({"loop": ours}, measure, settings["repetitions"])["loop"]
    done, _ = turns[-1]
    calls, tokens = sum(text.target_calls for text in done), sum(len(text.tokens) for text in done)
    return {
        "texts": [text.text for text in done],
        "tokens_per_second": [rate for _, rate in turns],
        "tokens_per_call": tokens / calls,
    }


def engine(settings: dict) -> dict:
    """Texts, speeds and tokens a target call of one engine of vLLM."""
    from vllm import LLM, SamplingParams

    models, relaxation = settings["models"], settings["relaxation"]
    served = LLM(
        split_name(models["target"])[0],
        speculative_config={
            "method": "draft_model",
            "model": split_name(models["draft"])[0],
            "num_speculative_tokens": settings["draft_length"],
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": settings["method"],
        },
        tensor_parallel_size=settings["tensor_parallel"],
        dtype=models["dtype"],
        trust_remote_code=models["trust_remote_code"],
        additional_config={KEY: relaxation} if relaxation else {},
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in settings["prompts"]]
    params = [
        SamplingParams(
            temperature=settings["temperature"],
            seed=settings["first_seed"] + number,
            max_tokens=settings["max_new_tokens"],
            stop=settings["stop"] or None,
        )
        for number in range(len(prompts))
    ]

    def measure(served: LLM, _: int) -> tuple[list, float]:
        began = time.perf_counter()
        done = [text.outputs[0] for text in served.generate(prompts, params, use_tqdm=False)]
        return done, sum(len(text.token_ids) for text in done) / (time.perf_counter() - began)

    turns = in_turns({"engine": served}, measure, settings["repetitions"])["engine"]
    drafts, accepted = _accepted(served)
    return {
        "texts": [text.text for text in turns[-1][0]],
        "tokens_per_second": [rate for _, rate in turns],
        "tokens_per_call": 1 + accepted / drafts,
    }


def _accepted(engine) -> tuple[float, float]:
    """Steps that had drafts, counted for each request, and drafted tokens accepted, since the
    engine began.
    """
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]


if __name__ == "__main__":
    kind, file = sys.argv[1:]
    Path(file).write_text(json.dumps({"loop": loop, "engine": engine}[kind](json.load(sys.stdin))))
