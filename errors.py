"""An error of the user as one sentence; every folder may import this file."""

from __future__ import annotations

import errno

# ValueError, TypeError and OSError carry a sentence: the argument, what it must be, what came, what
# to do. A missing module is an extra that is not installed.
USER_ERRORS = (ValueError, TypeError, OSError, ModuleNotFoundError)


# What torch says if an allocation fails; it has no class of its own on a CPU.
NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")
LONGEST = 1200  # characters of a sentence; what is longer quotes something that is longer itself


def lacks_memory(error: BaseException) -> bool:
    """Whether an allocation failed."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError) or said


def sentence(error: BaseException) -> str:
    """The error as one line for the person at the keyboard."""
    whole = _whole(error)
    return whole if len(whole) <= LONGEST else f"{whole[:LONGEST]} ... ({len(whole)} characters)"


def _whole(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = "diversed[gguf]" if error.name == "gguf" else str(error.name)
        return f"the package `{error.name}` is not installed; pip install '{extra}'"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" at {error.filename}" if error.filename else ""
        return (
            f"disk full{where}; nothing finished is lost: free some space and run the same command"
            " again"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the operating system says'}: {error.strerror}"
    if lacks_memory(error):
        return (
            "there is not enough memory; nothing finished is lost: lower `batch` or the lengths, or"
            " take a smaller model or type"
        )
    return " ".join(str(error).split()) or type(error).__name__
