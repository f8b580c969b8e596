"""Make the embedded pair: a tokenizer, a target of eight layers and a draft of one, trained on
`sums` from fixed seeds.

    python experiments/make_pair.py --out assets/pair

Each model reads fresh training problems in its own house style (`sums.STYLES`), with the loss on
the answer alone. Everything measured goes to `numbers.json`; test problems come from frames and
names that training never sees.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import time
from datetime import date
from pathlib import Path

import torch
from diversed.assets import sums
from diversed.data.scores import exact_number
from diversed.eval.scoring import scored_rows, total_variation
from diversed.files import versions
from diversed.runtime.engine import decode
from diversed.runtime.forward import Pair
from diversed.runtime.model import load_pair
from diversed.runtime.relaxer import load_relaxer
from diversed.runtime.sampling import Sampling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>")
SHAPES = {
    "target": {
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
    },
    "draft": {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 2,
    },
}
BATCH = 16  # problems a step
WORDING = 0.2  # weight of a wording token in the loss, a working token has 1
INITIAL = {"target": 0.05, "draft": 0.02}  # standard deviation of the first weights
# (steps, peak rate) of each cycle of training, a warm-up and a cosine; a second cycle begins with a
# fresh optimiser
CYCLES = {"target": ((2500, 2e-3), (2000, 1e-3)), "draft": ((2000, 2e-3),)}
# The last norm is scaled by this after training. Sampled at temperature 1 a model this small slips
# at 1 number in 300; 1.2 makes temperature 1 what 0.83 was. The factor is part of the models, so
# everything that runs them sees it.
SHARPNESS = {"target": 1.2, "draft": 1.2}
SEEDS = {"target": 1, "draft": 2}
ORACLE = "diversed.assets.sums:oracle"
# What is measured, by the name in numbers.json.
CASES = {"target": "none", "draft": "ensemble:1"}
CASES |= {f"static {share}": f"ensemble:{share}" for share in (0.1, 0.2, 0.3, 0.5)}
CASES["oracle"] = ORACLE
BATCH_OF_TEXTS, LONGEST = 250, 100  # texts decoded together, and tokens in the longest of them


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for target/, draft/ and numbers.json"
    )
    parser.add_argument(
        "--only",
        choices=("target", "draft", "numbers"),
        help="one stage; the others are read from --out",
    )
    parser.add_argument(
        "--steps", type=int, help="steps of every cycle of training, instead of the shipped pair's"
    )
    parser.add_argument(
        "--test", type=int, default=1000, help="held-out test problems to measure on"
    )
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    for which in ("target", "draft"):
        if options.only in (None, which):
            model, record = train(which, tokenizer, options.steps)
            save(model, tokenizer, options.out / which, record)
    if options.only in (None, "numbers"):
        write_numbers(options.out, options.test)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words, single digits, syllables of names and the 256 bytes: any text is encodable and
    comes back.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = {piece: -1.0 for piece in _pieces(byte_level)}
    vocab = [(token, 0.0) for token in SPECIAL]
    vocab += [
        (char, pieces.pop(char, -10.0)) for char in sorted(pre_tokenizers.ByteLevel.alphabet())
    ]
    tokenizer = Tokenizer(models.Unigram(vocab + sorted(pieces.items()), unk_id=None))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    pad, start, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def _pieces(byte_level: pre_tokenizers.ByteLevel) -> set[str]:
    """What training text is made of, names cut into syllables and numbers into digits, in the byte
    alphabet.
    """
    texts = [item["prompt"] + item["reference"] for item in sums.problems("train", 4000)]
    texts += [" " + word for word in sums.vocabulary()]
    chunks = {chunk for text in texts for chunk, _ in byte_level.pre_tokenize_str(text)}
    known = set(sums.vocabulary())
    words = {
        chunk
        for chunk in chunks
        if chunk.strip("Ġ") in known or not re.search(r"\w", chunk.strip("Ġ"))
    }
    digits = {space + digit for space in ("", "Ġ") for digit in "0123456789"}
    return words | digits | set(sums.HEADS) | {"Ġ" + head for head in sums.HEADS} | set(sums.TAILS)


def train(
    which: str, tokenizer: PreTrainedTokenizerFast, steps: int | None
) -> tuple[LlamaForCausalLM, dict]:
    """A model trained from SEEDS[which] on fresh problems in its own style, and what was done."""
    torch.manual_seed(SEEDS[which])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=INITIAL[which],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPES[which],
    )
    model = LlamaForCausalLM(config)
    start = time.perf_counter()
    for cycle, (length, peak) in enumerate(CYCLES[which]):
        train_cycle(model, which, tokenizer, steps or length, peak, SEEDS[which] + 100 * cycle)
    with torch.no_grad():
        model.model.norm.weight *= SHARPNESS[which]
    record = {
        "seed": SEEDS[which],
        "cycles": CYCLES[which],
        "batch": BATCH,
        "sharpness": SHARPNESS[which],
    }
    return model.eval(), record | {
        "seconds": round(time.perf_counter() - start),
        "machine": platform.processor() or "CPU",
    }


def train_cycle(
    model: LlamaForCausalLM,
    which: str,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    peak: float,
    seed: int,
) -> None:
    """One warm-up and cosine over BATCH * steps problems of this seed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, steps))
    examples = encode(sums.problems("train", BATCH * steps, seed, which), tokenizer)
    working = sums.is_working(tokenizer)
    start, recent = time.perf_counter(), []
    for step in range(steps):
        tokens, answer = batch(examples[step * BATCH : (step + 1) * BATCH], tokenizer.pad_token_id)
        loss, working_loss = answer_loss(model, tokens, answer, working)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        recent.append(working_loss.item())
        if (step + 1) % 100 == 0:
            print(
                f"{which} step {step + 1} working loss {sum(recent) / len(recent):.4f}"
                f" {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            recent = []


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 100)
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def encode(items: list[dict], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], int]]:
    """Each problem as (tokens of prompt, reference and end of text; how many are the prompt's)."""
    prompts = tokenizer([item["prompt"] for item in items])["input_ids"]
    answers = tokenizer([item["reference"] for item in items])["input_ids"]
    return [
        (prompt + answer + [tokenizer.eos_token_id], len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def batch(examples: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [B, T] int64, right padded, and answer [B, T - 1] bool: where the next token belongs
    to the answer.
    """
    length = max(len(tokens) for tokens, _ in examples)
    tokens = torch.tensor([row + [pad] * (length - len(row)) for row, _ in examples])
    answer = torch.zeros(tokens.shape[0], length - 1, dtype=torch.bool)
    for place, (row, prompt) in enumerate(examples):
        answer[place, prompt - 1 : len(row) - 1] = True
    return tokens, answer


def answer_loss(
    model: LlamaForCausalLM, tokens: torch.Tensor, answer: torch.Tensor, working: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy in nats over the answers' tokens, wording weighted by WORDING, and its mean
    over working tokens.

    Wording is drawn at random, so its gradient is mostly noise; a smaller weight leaves its best
    fit where it was. Right padding needs no mask under causal attention.
    """
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    truth = tokens[:, 1:][answer]
    losses = torch.nn.functional.cross_entropy(
        model.lm_head(hidden[answer]), truth, reduction="none"
    )
    weights = torch.where(working[truth], 1.0, WORDING)
    return (losses * weights).sum() / weights.sum(), losses.detach()[working[truth]].mean()


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, record: dict
) -> None:
    """Weights as float16 (half the size; load them as float32 on a CPU), the tokenizer and the
    training record.
    """
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(
        0o644
    )  # it is written for its owner alone, and a wheel keeps the mode
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def write_numbers(out: Path, count: int) -> None:
    """numbers.json: the saved pair measured on `count` held-out test problems, and how."""
    pair = load_pair(str(out / "target"), str(out / "draft"), dtype="float32")
    items = sums.problems("test", count)
    started, cases = time.perf_counter(), {}
    for name, relaxation in CASES.items():
        cases[name] = measure(pair, items, relaxation)
        print(name, cases[name], f"{time.perf_counter() - started:.0f} s", flush=True)
    numbers = {
        "definitions": DEFINITIONS,
        "problems": count,
        "temperature": 1.0,
        "cases": cases,
        "pair": describe(pair, out),
        "date": date.today().isoformat(),
        "versions": versions(("torch", "transformers", "tokenizers"))
        | {"machine": f"{platform.machine()}, one thread"},
        "seconds": round(time.perf_counter() - started),
    }
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")


DEFINITIONS = {
    "exact_match": (
        "share of texts whose number after #### is the reference's, in percent"
        " (data.scores.exact_number)"
    ),
    "step_acceptance": (
        "mean over the positions of the case's own texts of 1 - TV(draft row, case row); the case "
        "row is (1 - w) target + w draft"
    ),
    "wording_share_of_tv": (
        "share of the summed TV(target row, draft row) at positions the oracle gate calls wording"
    ),
    "wording_share_of_positions": "share of positions the oracle gate calls wording",
    "substitutions": (
        "expected tokens a text that differ from the target's own: mean over texts of the sum of"
        " w TV"
    ),
    "working_tv": "mean over texts of the sum of TV(target row, draft row) at working positions",
    "tokens": "mean tokens a text, end of text included",
}


def measure(pair: Pair, items: list[dict], relaxation: str) -> dict:
    """Texts decoded under the relaxation at temperature 1 and scored, as DEFINITIONS says."""
    prompts = [list(pair.tokenizer(item["prompt"]).input_ids) for item in items]
    together = {"batch": BATCH_OF_TEXTS, "max_new_tokens": LONGEST}
    texts = decode(pair, prompts, relaxation=relaxation, **together)
    share = load_relaxer(relaxation, pair, Sampling()).constant  # None for the oracle
    oracle = load_relaxer(ORACLE, pair, Sampling())
    total = torch.zeros(5, dtype=torch.float64)
    for start in range(0, len(items), BATCH_OF_TEXTS):
        chunk = slice(start, start + BATCH_OF_TEXTS)
        tokens = [text.tokens for text in texts[chunk]]
        for rows in scored_rows(pair, prompts[chunk], tokens, oracle, Sampling()):
            distance = total_variation(rows.target, rows.draft)[rows.scored].double()
            wording = rows.weight[rows.scored].double()
            substituted = distance * (wording if share is None else share)
            columns = torch.ones_like(distance), distance, substituted, wording, distance * wording
            total += torch.stack(columns).sum(1)
    positions, distance, substituted, wording, on_wording = total.tolist()
    right = [
        exact_number(text.text, item["reference"]) for text, item in zip(texts, items, strict=True)
    ]
    return {
        "exact_match": round(100 * sum(right) / len(items), 2),
        "step_acceptance": round(1 - (distance - substituted) / positions, 4),
        "wording_share_of_tv": round(on_wording / distance, 4),
        "wording_share_of_positions": round(wording / positions, 4),
        "substitutions": round(substituted / len(items), 3),
        "working_tv": round((distance - on_wording) / len(items), 3),
        "tokens": round(positions / len(items), 2),
    }


def describe(pair: Pair, out: Path) -> dict:
    """What the two models are and how each was trained."""
    found = {}
    for name in SHAPES:
        module = getattr(pair, name).module
        shape = {key: getattr(module.config, key) for key in SHAPES[name]}
        training = json.loads((out / name / "training.json").read_text())
        parameters = sum(weight.numel() for weight in module.parameters())
        found[name] = {"shape": shape, "parameters": parameters, "training": training}
    size = sum(path.stat().st_size for name in SHAPES for path in (out / name).iterdir())
    return found | {"vocabulary": pair.vocab, "bytes": size, "skew": sums.SKEW}


if __name__ == "__main__":
    main()
