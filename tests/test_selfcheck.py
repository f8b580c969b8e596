"""The self check that users run finds what it says it finds."""

import pytest
import torch
from diversed.commands import selfcheck as module
from diversed.commands.selfcheck import sampled, selfcheck
from diversed.verifier import METHODS, Law, Method
from scipy.stats import chi2, chisquare, ncx2


def test_every_law_is_exact_here(capsys):
    assert selfcheck(method="gbv") and selfcheck(method="univer", seed=1)
    assert "exact" in capsys.readouterr().out


def off_by(distance: float) -> Method:
    """Token verification whose bonus token after a full accept is moved: the text's law is off by about `distance`."""

    def law(tree):
        found = METHODS["token"].unchecked(tree)
        rows = found.next.clone()
        moved = rows[:, 0, 1:].sum(-1) * distance
        rows[:, 0, 1:] *= 1 - distance
        rows[:, 0, 0] += moved
        return Law(found.stop, rows)

    return Method(law, "chain")


def test_a_wrong_law_is_found_by_enumeration_and_by_sampling(monkeypatch, capsys):
    """The residual at the root is shifted by a fifth, some 0.02 of the text's law in total variation."""
    monkeypatch.setitem(METHODS, "wrong", off_by(0.2))
    assert not selfcheck(method="wrong")
    assert "WRONG" in capsys.readouterr().out
    assert sampled(METHODS["wrong"], "chain", "cpu", 0) < module.FALSE_ALARM


def test_a_sound_law_is_refused_no_more_often_than_stated():
    """40 runs of 20,000 texts: the p-values are spread evenly, so that one in ten lies below 0.1."""
    chances = torch.tensor([sampled(METHODS["token"], "chain", "cpu", seed, 20_000) for seed in range(40)])
    assert chances.min() > 1e-3 and 0 <= (chances < 0.1).sum() <= 11  # binomial(40, 0.1) passes 11 once in 3,000


def test_an_error_of_one_percent_is_missed_as_rarely_as_stated():
    threshold = chi2.isf(module.FALSE_ALARM, 26)
    assert round(threshold, 1) == 61.7
    assert ncx2.cdf(threshold, 26, 4 * module.TEXTS * 0.01**2) < 1e-8
    counts = torch.ones(27) * 100 + torch.arange(27) % 2 * 30
    exact = chisquare(counts).pvalue
    assert abs(module._chi_square(counts, torch.full((27,), 1 / 27)) - exact) < 1e-4


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match="did you mean `block"):
        selfcheck(method="blok")


@pytest.mark.parametrize("device", ["tpu", "cuda:77", "meta"])
def test_a_device_that_cannot_be_used_is_named(device):
    with pytest.raises(ValueError, match=f"`device` '{device}' cannot be used on this machine"):
        selfcheck(method="token", device=device)
