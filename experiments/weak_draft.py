"""A draft whose texts mostly fail: the packaged one with noise on its weights.

    python experiments/weak_draft.py runs/weak-draft --noise 0.3

Every weight gets Gaussian noise of `noise` times the standard deviation of its tensor.
docs/learning.md uses it to show what `gather --relaxation auto` chooses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diversed.runtime.model import load_module, load_tokenizer


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--noise", type=float, default=0.3)
    given = parser.parse_args(words)
    module, generator = load_module("sums-draft"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += given.noise * parameter.std() * noise.to(parameter.dtype)
    module.save_pretrained(given.out)
    load_tokenizer("sums-draft").save_pretrained(given.out)


if __name__ == "__main__":
    main()
