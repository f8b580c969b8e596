"""Rows of different lengths in one cache: every node is given what its text alone would give it."""

import pytest
import torch
from diversed.runtime.drafting import topology
from diversed.runtime.model import make_pair
from diversed.runtime.slots import Layout, Place, Side

from .support.models import module, tokenizer
from .test_batching import learned_positions, sliding_window

CPU = torch.device("cpu")
SHAPES = [topology("chain", 3), topology("with_replacement", 2, [2, 2]), topology("paths", 2, 2, trunk=1)]
MODELS = {
    "llama": lambda: module(0, 11, 2),
    "learned positions": lambda: learned_positions(0, 2),
    "a window of five tokens": lambda: sliding_window(0, 2),
}


def model(kind: str):
    return make_pair(MODELS[kind](), MODELS[kind](), tokenizer(11)).target


def committed(model, texts: list[list[int]], shape) -> Side:
    """A cache that holds all but the last token of every text."""
    side, longest = Side(model, model.cache(32), CPU), max(map(len, texts)) - 1
    tokens = torch.tensor([(text + [0] * longest)[:longest] for text in texts])
    model(tokens, None, None, side.cache, 0)
    return side


@pytest.mark.parametrize("lengths", [(6, 6), (4, 9)], ids=["of one length", "of two"])
@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree", "delayed paths"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_node_sees_its_own_text_and_after_a_move_so_does_what_follows(kind, shape, lengths):
    ours, generator = model(kind), torch.Generator().manual_seed(0)
    texts = [torch.randint(11, (length + 1,), generator=generator).tolist() for length in lengths]
    tokens = torch.randint(11, (2, shape.nodes), generator=generator)
    tokens[:, 0] = torch.tensor([text[-1] for text in texts])
    side, place = committed(ours, texts, shape), Place(list(lengths), CPU)
    out = side(Layout(ours, shape), place, tokens, 0, True)

    def alone(row: int, path: tuple[int, ...], more: tuple[int, ...] = ()):
        text = texts[row] + [int(tokens[row, node]) for node in path[1:]] + list(more)
        return ours(torch.tensor([text]), None, None, None, hidden=True)

    for row in range(2):
        for node, path in enumerate(shape.paths):
            assert torch.allclose(out.logits[row, node], alone(row, path).logits[0, -1], atol=1e-4)
    ends = torch.tensor([shape.nodes - 1, 1])
    depths, paths = torch.tensor(shape.depths), torch.tensor(shape.padded_paths)
    side.keep(place, paths[ends], depths[ends])
    later = Place([length + 1 + int(depth) for length, depth in zip(lengths, depths[ends], strict=True)], CPU)
    out = side(Layout(ours, topology("chain", 1)), later, torch.tensor([[3, 4], [5, 6]]), 0, False)
    for row, more in enumerate(((3, 4), (5, 6))):
        expected = alone(row, shape.paths[ends[row]], more).logits[0, -2:]
        assert torch.allclose(out.logits[row], expected, atol=1e-4) and out.hidden is None


def test_known_lengths_and_lengths_on_the_device_give_the_same_masks():
    """A view of the table, and rows of it; the token before the root has a row of its own."""
    ours = model("llama")
    for shape in SHAPES:
        for first, count in ((0, shape.nodes), (1, 1), (-1, 2)):
            known, fixed = Place([7, 7], CPU), Place(torch.tensor([7, 7]), CPU)
            view = Layout(ours, shape).masks(known, first, count, 7 + first + count)["full_attention"]
            rows = Layout(ours, shape).masks(fixed, first, count, 7 + first + count)["full_attention"]
            if view is None:  # one token that sees every slot up to its own
                view = torch.zeros(1, 1, count, 7 + first + count)
            assert torch.equal(view.expand_as(rows), rows)
    assert known.common == 7 and fixed.common is None and torch.equal(known.length, fixed.length)
