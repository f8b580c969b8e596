"""What a GPU makes of this package, from nothing: no download, no data, neither datasets nor
jsonargparse.

A pair of the shape of Llama 3.1 8B and 3.2 1B gets random weights on the device; a step then costs
what it costs with trained ones, but how much is accepted says nothing. Three parts, whose cases
begin with their names:

    verify  a verification step from logits to the verdict, beside a copy of the logits
    step    milliseconds of a step of the loop and of the captured one, whose gain stands beside it
    decode  tokens per second beside transformers in the same run

`benchmarks/gpu.sh` runs the GPU tests and then this.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from ..runtime.forward import Pair
from ..runtime.model import make_pair
from ..runtime.sampling import Sampling
from . import bench_decode, bench_step, bench_verify
from .timing import record, table, write
from .workload import Workload

# layers, hidden, intermediate, heads, heads of keys and values, vocabulary of target and draft
SHAPES = {
    "8b": ((32, 4096, 14336, 32, 8, 128_256), (16, 2048, 8192, 32, 8, 128_256)),
    "tiny": ((2, 64, 128, 4, 2, 512), (1, 32, 64, 4, 2, 512)),
}
CASES = [
    ("plain", "none"),
    ("token", "none"),
    ("block", "none"),
    ("block", "ensemble:0.3"),
    ("traversal", "none"),
]


def run(*, size: str = "8b", device: str = "cuda", seed: int = 0) -> list[dict]:
    """Rows of all three parts.

    Args:
        size: of the pair, 8b (with a draft of 1b, in bfloat16) or tiny.
        device: cuda; or cpu, where the steps run uncaptured and nothing is learned but that they
            run.
        seed: of weights, prompts and texts.
    """
    small = size == "tiny"
    verified = bench_verify.run(
        batches=[1] if small else [1, 8, 32],
        vocabularies=[512] if small else [128_256],
        repeats=2 if small else 20,
        dtype="float32" if small else "bfloat16",
        device=device,
        most_gb=16.0,
        seed=seed,
    )
    pair = random_pair(size, device, seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [6, 9] if small else [48, 64]
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]
    work = Workload(max_new_tokens=8 if small else 32, seed=seed)
    made = bench_step.engines(pair, CASES, 4, Sampling())
    stepped = []
    for batch in (2,) if small else (1, 16):
        requests = work.requests([prompts[number % 2] for number in range(batch)])
        stepped += bench_step.gains(made, requests, 3)
    wanted = bench_decode.Comparison(
        methods=["plain", "token", "block"],
        draft_lengths=[2 if small else 4],
        tuning_prompts=1,
        repetitions=1 if small else 3,
    )
    decoded = bench_decode.compare(pair, prompts * 2, wanted, work)
    parts = {"verify": verified, "step": stepped, "decode": decoded}
    return [
        row | {"case": f"{part}: {row['case']}"} for part, rows in parts.items() for row in rows
    ]


def random_pair(size: str, device: str, seed: int) -> Pair:
    """Two Llamas with random weights made on the device, and a tokenizer of 256 bytes that nothing
    here needs.
    """
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    modules = []
    for layers, hidden, wide, heads, shared, vocab in SHAPES[size]:
        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=wide,
            num_attention_heads=heads,
            num_key_value_heads=shared,
            vocab_size=vocab,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        # A weight is made in the type it is kept in: in float32 the larger one alone would be 32
        # GB.
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32 if size == "tiny" else torch.bfloat16)
        try:
            with torch.device(device):
                modules.append(LlamaForCausalLM(config).eval())
        finally:
            torch.set_default_dtype(before)
    bytes_ = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(256)}, unk_token="<0>"))
    return make_pair(*modules, PreTrainedTokenizerFast(tokenizer_object=bytes_))


def main(file: str, tests: str) -> None:
    """Write the rows, and what became of the GPU tests, to `file`; print the table."""
    torch.set_num_threads(1)
    document = record(
        run(size=os.environ.get("SIZE", "8b"), device=os.environ.get("DEVICE", "cuda"))
    )
    write(document | {"tests": tests}, file)
    print(table(document))
    print(json.dumps({"tests": tests, "written to": file}))


if __name__ == "__main__":
    main(*sys.argv[1:])
