"""reasoning-gym: makes the items of a task, and scores an answer with the task's own scorer.

Runs in a guarded worker (guarded.py), for scoring because scorers parse free text with a computer algebra system, and
for making items because some tasks let the order of a set or the global generator decide: in the worker both are
fixed, so that all processes of a run, and all runs, get the same items. Settings come from a source string such as
``reasoning_gym:chain_sum?min_terms=2&max_terms=2``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import random
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from reasoning_gym.factory import DATASETS, create_dataset

TRIES_PER_ITEM = 20  # a small task (two one-digit numbers: 200 items) runs out of new items; give up after this many


def parse_task(description: str) -> tuple[str, dict[str, Any]]:
    """``task?name=value&...`` -> the task's name and its settings, checked and typed.

    Values are JSON (``2``, ``true``, ``["+","-"]``), or text where they are not. Raises ValueError with the nearest
    task names, or with the valid settings of the task.
    """
    task, _, query = description.partition("?")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {len(DATASETS)} tasks, for example chain_sum."
        raise ValueError(f"reasoning-gym has no task {task!r}; {hint}")
    valid = {field.name for field in dataclasses.fields(DATASETS[task][1])}
    settings: dict[str, Any] = {}
    try:  # "+" is an operator of arithmetic tasks here, not a form's way to write a space
        pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ValueError(
            f"the settings of the reasoning-gym task {task!r} are {query!r}; write name=value&name=value."
        ) from error
    for name, value in pairs:
        if name not in valid:
            raise ValueError(
                f"the reasoning-gym task {task!r} has no setting {name!r}; it has {', '.join(sorted(valid))}."
            )
        try:
            settings[name] = json.loads(value)
        except json.JSONDecodeError:
            settings[name] = value
    return task, settings


def stream_seed(task: str, stream: str, seed: int) -> int:
    """The seed of a stream, "train" or "eval". Item i of a task is made from seed + i, so seeds must lie far apart."""
    digest = hashlib.sha256(f"{task}|{stream}|{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def make_items(description: str, size: int, seed: int, eval_size: int | float) -> dict[str, list[dict[str, str]]]:
    """Items "train" and "eval" of ``task?settings``, as rows ``question``, ``answer``, ``task``, ``entry``.

    No question comes twice. ``size`` and ``seed`` hold where the settings do not say; a float ``eval_size`` is a share
    of the training size. Fewer rows come back when the task has too few different items. Raises ValueError for an
    unknown task or setting, and when the task refuses its settings.
    """
    task, settings = parse_task(description)
    size, seed = settings.pop("size", size), settings.pop("seed", seed)
    if not isinstance(size, int) or size < 1 or not isinstance(seed, int):
        raise ValueError(
            f"size is {size!r} and seed {seed!r}; a size of at least 1 and a whole number as seed are needed."
        )
    held_out = round(eval_size * size) if isinstance(eval_size, float) else eval_size
    taken: set[str] = set()
    # The evaluation items come first: they do not change when the training size does.
    parts = {"eval": _distinct(task, settings, stream_seed(task, "eval", seed), held_out, taken)}
    return {**parts, "train": _distinct(task, settings, stream_seed(task, "train", seed), size, taken)}


def _distinct(task: str, settings: dict[str, Any], seed: int, size: int, taken: set[str]) -> list[dict[str, str]]:
    """Up to ``size`` items whose questions are not in ``taken``, which grows by them."""
    tries = size * TRIES_PER_ITEM
    random.seed(seed)  # this process is ours alone; a few tasks draw from the global generator
    try:
        dataset = create_dataset(task, **settings, seed=seed, size=max(1, tries))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"the reasoning-gym task {task!r} refuses its settings {settings}: {error}") from error
    rows: list[dict[str, str]] = []
    for index in range(tries):
        if len(rows) == size:
            break
        item = dataset[index]
        if item["question"] in taken:
            continue
        taken.add(item["question"])
        entry = json.dumps({"task": task, "settings": settings, "item": _pack(item)})
        # Where many answers are right (a graph colouring), the item has no answer of its own and the scorer decides.
        rows.append({"question": item["question"], "answer": item["answer"] or "", "task": task, "entry": entry})
    return rows


def _pack(value: Any) -> Any:
    """A value as JSON that keeps what JSON loses: tuples, and keys that are not text. Scorers compare both."""
    if isinstance(value, tuple):
        return {"tuple": [_pack(part) for part in value]}
    if isinstance(value, list):
        return [_pack(part) for part in value]
    if isinstance(value, dict):
        return {"dict": [[_pack(key), _pack(part)] for key, part in value.items()]}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(part) for part in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_unpack(part) for part in value["tuple"])
        return {_unpack(key): _unpack(part) for key, part in value["dict"]}
    return value


@lru_cache(maxsize=1024)
def _restore(entry: str) -> tuple[Any, dict[str, Any]]:
    stored = json.loads(entry)
    return create_dataset(stored["task"], **stored["settings"]), _unpack(stored["item"])


def score(entry: str, answer: str) -> float:
    """The task's own score of an answer, 0 to 1; partial credit is the task's choice."""
    dataset, item = _restore(entry)
    return float(dataset.score_answer(answer, item))
