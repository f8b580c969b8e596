"""`diversed export`: a training run becomes a bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from ..eval.results import SETTINGS
from ..eval.summary import summarise
from ..export.bundle_writer import add_frontier, write_bundle
from ..export.card import make_card
from ..files import read_object
from ..runtime.bundle import CARD, Card, add_bias, load_bundle, sha256_of_head
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
    overwrite: bool = False,
) -> None:
    """Write a bundle: the trained head with a card that says what it is for, checked when it is
    loaded.

    Args:
        train: folder that `diversed train` wrote (head.safetensors and train.json).
        out: folder to write the bundle to; an older bundle there is replaced, a calibrated one only
            with --overwrite.
        draft_length: tokens drafted per target call the head is meant for; stated on the card.
        bias: added to the head's logit for good; larger is faster and further from the target;
            `;bias=` at run time is counted from there.
        any_pair: let the bundle be used with other models than it was trained for, with a warning;
            for heads that read no hidden states.
        results: results.jsonl of `diversed eval` with this head and these models, whose figures go
            on the card; can be added later.
        selector: folder of `diversed select`: the bundle holds its network too, for --branches.
        format: bundle, or hf: a bundle that is also a repository for `custom_generate` of
            transformers.
        overwrite: replace a calibrated bundle: its bias and the evidence for it are lost.
    """
    if draft_length < 1:
        raise ValueError(f"`draft_length` must be at least 1 token, got {draft_length}")
    if not abs(bias) < LARGEST_BIAS:
        raise ValueError(f"`bias` must be a finite number, added to a logit, got {bias}")
    training, head = read_trained(train)
    if any_pair and head.needs_hidden:
        raise ValueError(
            f"`any_pair` is for heads that read no hidden states; the head in {train} reads"
            f" {head.features}, and the hidden states of other models mean something else"
        )
    if not overwrite and (known := calibrated_from(out)):
        raise ValueError(
            f"bundle {out} was calibrated; exporting to it would lose its bias and the evidence"
            f" (bias {known['bias']}); give another --out, or --overwrite"
        )
    heads = {sha256_of_head(head)}
    add_bias(head, bias)
    heads.add(sha256_of_head(head))
    card = make_card(head, training, draft_length, bias)
    if results:
        _refuse_others_results(Path(results), card, heads)
    card = replace(card, any_pair=any_pair, custom_generate=format == "hf")
    write_bundle(out, head, card, selector)
    if results:
        add_frontier(out, summarise(results))
    print(f"bundle written to {out}: load it with --relaxation {out}")


def calibrated_from(bundle: str | Path) -> dict | None:
    """What `diversed calibrate` wrote into the card of a bundle; None if there is none."""
    if not (Path(bundle) / CARD).is_file():
        return None
    return load_bundle(bundle).card.calibration


def _refuse_others_results(results: Path, card: Card, heads: set[str]) -> None:
    """Refuse figures of other models, or of other heads alone.

    heads: checksums of the head, before and after a bias was added.
    """
    beside = results.parent / SETTINGS
    if not beside.is_file():
        raise ValueError(
            f"{beside}, which says what {results} was measured with, is not there; give the"
            " results.jsonl in a folder of `diversed eval`"
        )
    settings = read_object(beside, "measure again into another folder")
    for role in ("target", "draft"):
        came, expected = settings.get(role, {}), card.models[role]
        if came.get("hash") != expected["hash"]:
            raise ValueError(
                f"{results} was measured with the {role} {came.get('name')} (hash"
                f" {came.get('hash')}), the head was trained for {expected['name']} (hash"
                f" {expected['hash']}); give results of these models"
            )
    measured = settings.get("heads", {})
    if measured and not heads & set(measured.values()):
        raise ValueError(
            f"{results} holds figures of other heads ({', '.join(measured)}), none of this one;"
            " give results of this head"
        )
