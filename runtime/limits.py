"""Whole numbers that an option may be, said once: the sentence names the option, its bound and what came."""

from __future__ import annotations

from numbers import Integral

# More threads than this end in a crash of the OpenMP runtime instead of an error.
MOST_THREADS = 1024
# A request's seed is an int64.
SEEDS = -(1 << 63), (1 << 63) - 1


def within(low: int, high: int | None = None, **numbers: int | None) -> None:
    """A sentence unless every number is whole and lies in low..high; None is an option that was left out."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral)):
            raise TypeError(f"`{name}` must be a whole number, got {number!r}")
        if number is not None and number < low:
            raise ValueError(f"`{name}` must be at least {low}, got {number}")
        if number is not None and high is not None and number > high:
            raise ValueError(f"`{name}` must be at most {high}, got {number}")
