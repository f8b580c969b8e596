"""diversed: speculative decoding faster than lossless, at a price you can read.

The public names are looked up on first use, so that `import diversed` costs milliseconds and needs
no torch.
"""

from importlib import import_module

__version__ = "0.1.0"

PUBLIC = {
    "DraftTree": "verifier.law",
    "Law": "verifier.law",
    "Verdict": "verifier.law",
    "draw": "verifier.law",
    "expected_length": "verifier.law",
    "METHODS": "verifier.methods",
    "relax": "verifier.relax",
    "decode": "runtime.engine",
    "load_bundle": "runtime.bundle",
}

__all__ = list(PUBLIC)


def __getattr__(name: str):
    if name not in PUBLIC:
        raise AttributeError(
            f"module `diversed` has no `{name}`; its public names are {', '.join(PUBLIC)}"
        )
    value = getattr(import_module(f".{PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC])
