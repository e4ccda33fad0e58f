"""Row-wise rewards for the tests of scoring in other processes, which import this file: nothing heavy is loaded."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from fastgrpo.grpo.guarded import guarded_call
from fastgrpo.grpo.rewards import Row, rowwise

ROW_S = 0.2


@rowwise
def sleepy(text: str, row: Row) -> float | None:
    """Other characters than this, after a while."""
    time.sleep(ROW_S)
    return len(set(text)) / 7


@rowwise
def where(text: str, row: Row) -> float | None:
    return float(os.getpid())


@rowwise
def letters(text: str, row: Row) -> float | None:
    """The share of letters, and nothing to say about every fourth length."""
    return sum(character.isalpha() for character in text) / len(text) if len(text) % 4 else None


@rowwise
def tokens(text: str, row: Row) -> float | None:
    return len(row["completion_ids"]) + len(str(row["prompts"])) / 1000


@rowwise
def inverse(text: str, row: Row) -> float | None:
    """A third of the lengths fails, in a process of the worker's own."""
    return guarded_call("operator:truediv", 1, len(text) % 3)


@rowwise
def fragile(text: str, row: Row) -> float | None:
    """What `text` says: raise, end the process, hang, do so the first time only, or have its answer."""
    if text == "raise":
        raise LookupError("no such answer")
    if text == "guarded":
        guarded_call("operator:truediv", 1, 0)
    if text == "once":
        first = Path(row["file"])
        if not first.exists():
            first.touch()
            os._exit(3)
    if text == "exit":
        os._exit(3)
    if text == "hang":
        time.sleep(600)
    return None if text == "none" else 0.1 + len(text)


@rowwise(in_process=True)
def quick(text: str, row: Row) -> float | None:
    return float(os.getpid())


def _score(text: str, row: Row) -> float | None:
    return 3.0


def workers_alive() -> list[int]:
    """The processes of this one that score rows."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "fastgrpo.grpo.guarded" in child.cmdline() and child.cmdline()[-2] == "0":  # without a memory limit
                found.append(child.pid)
    return found


named = rowwise(_score)
unnamed = rowwise(lambda text, row: 4.0)
