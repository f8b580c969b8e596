"""`diversed export`: a training run becomes a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..eval.summary import summarise
from ..export.bundle_writer import add_bias, add_frontier, write_bundle
from ..export.card import make_card
from ..runtime.bundle import check_sizes
from ..verifier.head import LARGEST_BIAS, WeightHead

MANIFEST = ("target", "draft", "tokenizer", "vocab", "sampling", "task", "relaxation")


def export(
    *,
    train: str,
    out: str,
    draft_length: int = 5,
    bias: float = 0.0,
    any_pair: bool = False,
    results: str | None = None,
    selector: str | None = None,
    format: Literal["bundle", "hf"] = "bundle",
) -> None:
    """Write a bundle: the trained head with a card that says what it is for, checked when it is
    loaded.

    Args:
        train: folder that `diversed train` wrote (head.safetensors and train.json).
        out: folder to write the bundle to; an older bundle there is replaced.
        draft_length: tokens drafted per target call the head is meant for; stated on the card.
        bias: added to the head's logit for good; larger is faster and further from the target;
            `;bias=` at run time is counted from there.
        any_pair: let the bundle be used with other models than it was trained for, with a warning;
            for heads that read the two rows alone (features logits).
        results: results.jsonl of `diversed eval`, whose figures go on the card; can be added later.
        selector: folder of `diversed select`: the bundle holds its network too, for --branches.
        format: bundle, or hf: a bundle that is also a repository for `custom_generate` of
            transformers.
    """
    if draft_length < 1:
        raise ValueError(f"`draft_length` must be at least 1 token, got {draft_length}")
    if not abs(bias) < LARGEST_BIAS:
        raise ValueError(f"`bias` must be a finite number, added to a logit, got {bias}")
    run = Path(train)
    training = _read_training(run)
    head = _read_head(run, training["head"])
    if any_pair and head.features != "logits":
        raise ValueError(
            f"`any_pair` is for heads with features logits; the head in {train} reads"
            f" {head.features}, and the hidden states of other models mean something else"
        )
    add_bias(head, bias)
    card = make_card(head, training, draft_length, bias) | {"any_pair": any_pair}
    if format == "hf":
        card["custom_generate"] = True
    write_bundle(out, head, card, selector)
    if results:
        add_frontier(out, summarise(results))
    print(f"bundle written to {out}: load it with --relaxation {out}")


def _read_training(run: Path) -> dict[str, Any]:
    names = ("train.json", "head.safetensors")
    if missing := [name for name in names if not (run / name).is_file()]:
        raise FileNotFoundError(
            f"{run} has no {' and no '.join(missing)}: it is not a finished `diversed train` run"
        )
    file = run / "train.json"
    try:
        training = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable json ({error}); train again") from None
    try:
        check_sizes(training["head"], file)
        lacking = [key for key in MANIFEST if key not in training["manifest"]]
        if not isinstance(training.get("settings", {}), dict):
            lacking.append("settings")
        if "traces_sha256" not in training:
            lacking.append("traces_sha256")
    except (KeyError, TypeError, AttributeError):
        lacking = ["head", "manifest"]
    if lacking:
        raise ValueError(f"{file} lacks {', '.join(lacking)}; train again")
    return training


def _read_head(run: Path, described: dict[str, Any]) -> WeightHead:
    head = WeightHead(
        **{name: described[name] for name in ("features", "draft_hidden", "target_hidden", "width")}
    )
    path = run / "head.safetensors"
    try:
        head.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not the head that train.json describes ({error}); train again"
        ) from None
    return head
