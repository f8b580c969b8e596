"""diversed: speculative decoding faster than lossless, at a price you can read.

The public names are looked up on first use, so that `import diversed` costs milliseconds and needs
no torch.
"""

from importlib import import_module

__version__ = "0.1.0"

PUBLIC = {
    # verification: a draft tree, a method's law, one draw from it
    "DraftTree": "verifier.law",
    "Law": "verifier.law",
    "Verdict": "verifier.law",
    "draw": "verifier.law",
    "expected_length": "verifier.law",
    "Method": "verifier.methods",
    "METHODS": "verifier.methods",
    "Relaxation": "verifier.relax",
    "relax": "verifier.relax",
    # decoding: a pair of models, requests, their completions
    "load_pair": "runtime.model",
    "make_pair": "runtime.model",
    "Sampling": "runtime.sampling",
    "Request": "runtime.completion",
    "Completion": "runtime.completion",
    "Engine": "runtime.engine",
    "decode": "runtime.engine",
    "load_bundle": "runtime.bundle",
    # training: a head under Lightning
    "HeadModule": "train.module",
    "HeadOptions": "train.module",
    "TraceModule": "train.datamodule",
    "TraceOptions": "train.datamodule",
    # every command as a function
    "call": "commands.options",
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
