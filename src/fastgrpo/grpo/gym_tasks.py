"""reasoning-gym: makes the items of a task, and scores an answer with the task's own scorer.

An item is a function of (task, settings with the seed, index), so a row carries these three and not the item itself:
some items hold tuples or sets that would come back from JSON changed, and score wrongly. Settings come from a source
string such as ``reasoning_gym:chain_sum?min_terms=2&max_terms=2``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator
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
    for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
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


def make_items(
    task: str, settings: dict[str, Any], *, stream: str, seed: int, size: int, taken: set[str]
) -> Iterator[dict[str, Any]]:
    """Up to ``size`` items as rows ``question``, ``answer``, ``task``, ``entry``, with questions not in ``taken``.

    ``taken`` grows by each question given out. Fewer rows come back when the task has too few different items. Raises
    ValueError when the task refuses its settings.
    """
    if size == 0:
        return
    tries = size * TRIES_PER_ITEM
    full = {**settings, "seed": stream_seed(task, stream, seed), "size": tries}
    try:
        dataset = create_dataset(task, **full)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"the reasoning-gym task {task!r} refuses its settings {settings}: {error}") from error
    given = 0
    for index in range(tries):
        if given == size:
            return
        item = dataset[index]
        if item["question"] in taken:
            continue
        taken.add(item["question"])
        given += 1
        entry = json.dumps({"task": task, "settings": full, "index": index})
        # Where many answers are right (a graph colouring), the item has no answer of its own and the scorer decides.
        yield {"question": item["question"], "answer": item["answer"] or "", "task": task, "entry": entry}


@lru_cache(maxsize=1024)
def _restore(entry: str) -> tuple[Any, dict[str, Any]]:
    stored = json.loads(entry)
    dataset = create_dataset(stored["task"], **stored["settings"])
    return dataset, dataset[stored["index"]]


def score(entry: str, answer: str) -> float:
    """The task's own score of an answer, 0 to 1; partial credit is the task's choice. Call it through guarded_call."""
    dataset, item = _restore(entry)
    return float(dataset.score_answer(answer, item))
