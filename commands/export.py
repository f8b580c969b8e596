"""`diversed export`: a training run becomes a bundle."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..eval.summary import summarise
from ..export.bundle_writer import add_frontier, write_bundle
from ..export.card import make_card
from ..runtime.bundle import add_bias
from ..train.record import read_trained
from ..verifier.head import LARGEST_BIAS


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
    training, head = read_trained(train)
    if any_pair and head.features != "logits":
        raise ValueError(
            f"`any_pair` is for heads with features logits; the head in {train} reads"
            f" {head.features}, and the hidden states of other models mean something else"
        )
    add_bias(head, bias)
    card = make_card(head, training, draft_length, bias)
    card = replace(card, any_pair=any_pair, custom_generate=format == "hf")
    write_bundle(out, head, card, selector)
    if results:
        add_frontier(out, summarise(results))
    print(f"bundle written to {out}: load it with --relaxation {out}")
