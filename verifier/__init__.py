"""Verification of drafts: laws, the plans they are made of, relaxed targets. Needs only torch."""

from .law import DraftTree, Law, Verdict, draw, expected_length, validate
from .methods import METHODS, Method, method

__all__ = [
    "METHODS",
    "DraftTree",
    "Law",
    "Method",
    "Verdict",
    "draw",
    "expected_length",
    "method",
    "validate",
]
