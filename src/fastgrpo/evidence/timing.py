"""Two or more sides measured fairly: in one process, in turn, medians and spreads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """The median of a few measurements, with the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def alternate(sides: Mapping[str, Callable[[int], T]], repeats: int) -> dict[str, list[T]]:
    """Call every side `repeats` times, in turn, with the number of the repeat; every second turn goes backwards.

    So a machine that slows down or speeds up meanwhile does so for all of them.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}, but every side must run at least once: use 1 or more.")
    results: dict[str, list[T]] = {name: [] for name in sides}
    for repeat in range(repeats):
        names = list(sides) if repeat % 2 == 0 else list(sides)[::-1]
        for name in names:
            results[name].append(sides[name](repeat))
    return results
