"""The short verification of a chain against the laws that it stands for, on the same random numbers."""

import pytest
import torch
from diversed.runtime.chain_twin import chances, sample, serves, verdict
from diversed.verifier.law import DraftTree, draw, inverse_cdf
from diversed.verifier.methods import METHODS, Method

CPU = torch.device("cpu")


def chain(generator, batch, length, vocab, noise, sharp):
    """A chain drawn from its draft's rows; equal rows where `noise` is 0, rows of one token where `sharp`."""
    logits = 3 * torch.randn(batch, length + 1, vocab, generator=generator)
    draft = logits.softmax(-1)
    target = (logits + noise * torch.randn(logits.shape, generator=generator)).softmax(-1)
    if sharp:
        target = torch.zeros_like(target).scatter_(-1, target.argmax(-1, keepdim=True), 1)
    coins = torch.rand(batch, length, 1, generator=generator, dtype=torch.float64)
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.long), inverse_cdf(draft[:, :length], coins)[..., 0]], 1)
    draft[:, length:] = 0
    return DraftTree(tokens, tuple(range(-1, length)), draft, target)


@pytest.mark.parametrize("sharp", [False, True], ids=["any target", "a target of one token"])
@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("vocab", [1, 3, 643])
@pytest.mark.parametrize("name", METHODS)
def test_a_verdict_is_the_draw_from_the_law(name, vocab, noise, sharp):
    """Two uniforms in a thousand may fall within the rounding of a float32 cumulative sum; here none of 480 does."""
    generator = torch.Generator().manual_seed(vocab)
    method = METHODS[name]
    for length in (0, 1, 2, 5):
        tree = chain(generator, 120, length, vocab, noise, sharp)
        uniform = torch.rand(120, 2, generator=generator, dtype=torch.float64)
        ours, theirs = verdict(method, tree, uniform), draw(method.unchecked(tree), uniform)
        assert torch.equal(ours.node, theirs.node) and torch.equal(ours.token, theirs.token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_the_largest_uniform_stops_at_a_node_that_is_there(name, dtype):
    """Chains that ended after two of four tokens, whose stops need not add up to 1."""
    generator = torch.Generator().manual_seed(1)
    tree = chain(generator, 400, 2, 19, 1.0, False)
    rows = [torch.cat([rows, rows.new_zeros(400, 2, 19)], 1).to(dtype) for rows in (tree.draft, tree.target)]
    rows[1][:, 3:] = 1 / 19
    tokens = torch.cat([tree.tokens, torch.full((400, 2), -1)], 1)
    ended = DraftTree(tokens, (-1, 0, 1, 2, 3), *rows)
    ours = verdict(METHODS[name], ended, torch.full((400, 2), 1 - 2**-53, dtype=torch.float64))
    assert int(ours.node.max()) == 2
    assert (METHODS[name].unchecked(ended).stop.gather(1, ours.node.unsqueeze(1)) > 0).all()


def test_a_sample_is_the_inverse_of_the_cumulative_sum():
    generator = torch.Generator().manual_seed(0)
    rows = (9 * torch.randn(50, 1, 643, generator=generator)).softmax(-1)
    for coin in (torch.rand(50, generator=generator, dtype=torch.float64), torch.full((50,), 1 - 2**-53).double()):
        tokens = sample(rows, coin[:, None])
        assert torch.equal(tokens, inverse_cdf(rows, coin[:, None, None]))
        assert chances(rows, tokens[:, 0]) == rows.gather(2, tokens).flatten().tolist()


def test_only_chains_on_a_cpu_are_served():
    token, line, fork = METHODS["token"], (-1, 0, 1), (-1, 0, 0)
    own = Method(token.unchecked, "chain")
    assert serves(token, line, CPU) and serves(METHODS["block"], (-1,), CPU)
    assert not serves(own, line, CPU) and not serves(METHODS["univer"], fork, CPU)
    assert not serves(token, line, torch.device("meta"))
