"""Make a draft out of a target: keep some of its layers, then distil on texts that the target samples itself.

    python -m diversed.assets.make_draft --target FOLDER --layers 0,4 --out DRAFT

The loss is KL(target || draft) at every position of those texts (Zhou 2023, DistillSpec, arXiv 2310.08461, forward KL
on-policy for the target); what is printed at the end is the step acceptance on texts the draft was not trained on.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor

from ..runtime.model import DTYPES, load_module, load_tokenizer


def make_draft(
    target: str, layers: list[int], out: str, steps: int = 300, batch: int = 16, length: int = 128, lr: float = 1e-3,
    seed: int = 0, dtype: str = "float32",
) -> float:
    """Write a draft with these layers of the target to the folder `out`; returns its step acceptance on fresh texts.

    steps, batch, length: optimiser steps, texts a step, tokens a text. dtype: of the target; the draft is trained in
    float32 and saved in the target's dtype.
    """  # fmt: skip
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}")
    torch.manual_seed(seed)
    teacher = load_module(target, dtype).eval().requires_grad_(False)
    tokenizer = load_tokenizer(target)
    draft = keep_layers(teacher, layers).float()
    texts = [sample(teacher, tokenizer, batch, length) for _ in range(max(1, min(steps, 40)))]
    optimiser = torch.optim.AdamW(draft.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=max(steps, 1), pct_start=0.05)
    for step in range(steps):
        text = texts[step % len(texts)]
        loss = divergence(teacher, draft, text)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}/{steps}: KL {loss.item():.3f} nats a token", flush=True)
    accepted = step_acceptance(teacher, draft, sample(teacher, tokenizer, batch, length))
    draft.to(teacher.dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{Path(out)}: layers {layers} of {target}, step acceptance {accepted:.3f} on the target's texts at T = 1")
    return accepted


def keep_layers(teacher, layers: list[int]):
    """A copy of the model with only these layers, in this order."""
    body = teacher.model
    if any(not 0 <= layer < len(body.layers) for layer in layers) or not layers:
        raise ValueError(f"`layers` must name some of the target's layers 0..{len(body.layers) - 1}, got {layers}")
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    draft = type(teacher)(config)
    weights = teacher.state_dict()
    for name in list(weights):
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            value = weights.pop(name)
            for new, layer in enumerate(layers):
                if int(parts[2]) == layer:
                    weights[".".join(["model", "layers", str(new), *parts[3:]])] = value
    draft.load_state_dict(weights)
    return draft.requires_grad_(True)


def sample(teacher, tokenizer, batch: int, length: int) -> Tensor:
    """[batch, length] texts of the target at temperature 1, from the token that begins a text."""
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    start = torch.full((batch, 1), first)
    return teacher.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
        max_new_tokens=length - 1, min_new_tokens=length - 1, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip


def divergence(teacher, draft, text: Tensor) -> Tensor:
    """Mean KL(target || draft), nats a position."""
    with torch.no_grad():
        target = teacher(text).logits.float().log_softmax(-1)
    return torch.nn.functional.kl_div(
        draft(text).logits.log_softmax(-1).flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean"
    )


@torch.no_grad()
def step_acceptance(teacher, draft, text: Tensor) -> float:
    """Mean over positions of 1 - TV(target, draft)."""
    rows = [model(text).logits.float().softmax(-1) for model in (teacher, draft)]
    return float(1 - 0.5 * (rows[0] - rows[1]).abs().sum(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--layers", required=True, help="such as 0,4")
    parser.add_argument("--out", required=True)
    for name, default in (("steps", 300), ("batch", 16), ("length", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    options = vars(parser.parse_args())
    options["layers"] = [int(layer) for layer in options["layers"].split(",")]
    make_draft(**options)


if __name__ == "__main__":
    main()
