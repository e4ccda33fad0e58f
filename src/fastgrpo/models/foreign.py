"""Errors of parsers that are not ours (weights, tokenizers, configs, data files), made to say what a person needs.

What a damaged file makes them raise is not documented and changes with their releases, so nothing here lists types:
whatever comes out is explained. This file opens files only to find the damaged one.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

_OBJECTS = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json", "*.index.json")


@contextmanager
def foreign(explain: Callable[[Exception], Exception]) -> Iterator[None]:
    """Run foreign code; what it raises becomes `explain(error)`, raised from it, or stays where that is the error.

    A missing package and a lack of memory are no fault of a file, and pass as they are.
    """
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        told = explain(error)
        if told is error:
            raise
        raise told from error


def reason(error: Exception) -> str:
    """What an error says, in one line: its first, and the next where the first ends in a colon; its type if unusual."""
    if isinstance(error, pickle.UnpicklingError):  # torch's own words offer to run what is in it
        return "its weights are a damaged pickle, or one with code beside the tensors; none of it was run"
    lines = [line.strip() for line in str(error).strip().split("\n")]
    text = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def damaged_file(folder: Path) -> str | None:
    """The first file of a model's folder that is not what its name says, and how; None when nothing is seen to be."""
    for pattern in _OBJECTS:
        for file in sorted(folder.glob(pattern)):
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                return f"{file.name} is no JSON ({error})"
            if not isinstance(content, dict):
                return f"{file.name} holds a {type(content).__name__}, where an object is needed"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name} is cut short or damaged ({error})"
    return None
