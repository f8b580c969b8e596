"""Conversations, and the chat template that makes a text of one.

A template is a program that comes with a checkpoint. transformers runs it in a sandbox that bounds
neither time nor memory. So it runs in a process of its own here, which gets little of both.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..fields import TEXT, objects

Turns = tuple[dict[str, Any], ...]  # of a conversation: `role`, `content`, and what else is there
CONVERSATION = objects({"role": TEXT, "content": TEXT}, 1)

# Of a chat template.
SECONDS = 5.0
MEMORY = 1 << 30  # bytes
LONGEST = 1 << 24  # characters
INSTEAD = "give the conversation as a text, without `chat`"


def check_chat(tokenizer) -> None:
    """ValueError unless the tokenizer has a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this one"
        raise ValueError(
            f"`chat` and conversations need a tokenizer with a chat template, {name} has none;"
            " leave `chat` out and give texts"
        )


def rendered(turns: Turns, tokenizer) -> str:
    """What the tokenizer's chat template makes of a conversation, up to where the assistant speaks.
    If the last turn is the assistant's, the text ends with it.
    """
    check_chat(tokenizer)
    start = tokenizer.bos_token
    if start and any(turn["content"].lstrip().startswith(start) for turn in turns):
        raise ValueError(
            f"the prompt begins with {start}, it went through a chat template already; leave `chat`"
            " out"
        )
    if not turns[-1]["content"].strip():
        raise ValueError("the last turn of the conversation is empty; leave it out or fill it")
    return _renderer(tokenizer, str(tokenizer.chat_template)).render(turns)


class _Renderer:
    """A process in which the chat template of one tokenizer runs."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._start()

    def _start(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(
            target=_serve, args=(theirs, self.pipe, self.tokenizer), daemon=True
        )
        self.process.start()
        theirs.close()

    def render(self, turns: Turns) -> str:
        self.pipe.send_bytes(json.dumps(turns).encode())
        reason = f"it ran for more than {SECONDS:g} s"
        try:
            if self.pipe.poll(SECONDS):
                text, reason = json.loads(self.pipe.recv_bytes(8 * LONGEST))
                if not reason:
                    return text
                raise ValueError(f"the tokenizer's chat template fails here ({reason}); {INSTEAD}")
        except (EOFError, OSError):
            reason = f"it took more than {MEMORY >> 20} MiB"
        self.process.kill()
        self.process.join()
        self._start()
        raise ValueError(f"the tokenizer's chat template was stopped: {reason}; {INSTEAD}")


@lru_cache(maxsize=1)
def _renderer(tokenizer, template: str) -> _Renderer:
    """The process for this tokenizer, as long as it has this template."""
    return _Renderer(tokenizer)


def _serve(pipe, theirs, tokenizer) -> None:
    """Answer every conversation with [its text, ""] or ["", why there is none]."""
    theirs.close()  # so that the end of the other process ends this one
    # A lock on a folder lasts as long as any process has its file open.
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other one answers it
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.is_file():
        used = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = used + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
    while True:
        try:
            turns = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(json.dumps(_answer(turns, tokenizer)).encode())


def _answer(turns: list[dict[str, Any]], tokenizer) -> tuple[str, str]:
    prefill = turns[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
        )
    except MemoryError:
        return "", f"it took more than {MEMORY >> 20} MiB"
    except Exception as error:  # a template can fail in any way
        words = " ".join(str(error).split())[:200]
        return "", f"{type(error).__name__}: {words}"
    if len(text) > LONGEST:
        return "", f"it made {len(text)} characters, at most {LONGEST} can be read"
    return text, ""
