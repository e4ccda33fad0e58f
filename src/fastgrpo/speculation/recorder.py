"""The target's features of every committed token, kept as the passes of a rollout compute them: no layer runs for it.

What they are for (training a draft, `speculative_generate`'s `return_all_draft_input`) is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgrpo.models.cache import Prefix


class Observer(Protocol):
    """Who follows the rows of a batch, told of them as `proposers.Proposer` says; a proposer drafts besides."""

    taps: tuple[int, ...]

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> Any: ...

    def admit(self, prompt: Any, first_row: int, tokens: Tensor) -> None: ...

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None: ...

    def move_row(self, source: int, target: int) -> None: ...


def columns(features: Tensor, taps: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor | None:
    """Of features (..., len(taps) * hidden) the part that belongs to some of the taps; None for none of them."""
    if wanted == taps or not wanted:
        return features if wanted else None
    places = [taps.index(tap) for tap in wanted]
    return features.unflatten(-1, (len(taps), -1))[..., places, :].flatten(-2)


class FeatureRecorder:
    """Keeps the features of `rows` live rows of up to `capacity` tokens each.

    taps: indices into transformers' hidden_states, ascending. Takes rows * capacity * len(taps) * hidden numbers of the
    passes' dtype, beside the cache and allocated once, and a copy of its own length for every row that has ended.
    """

    def __init__(self, taps: tuple[int, ...], rows: int, capacity: int):
        self.taps, self.rows, self.capacity = taps, rows, capacity
        self.features: Tensor | None = None  # (rows, capacity, f)
        self.lengths: Tensor | None = None  # (rows,) int64, tokens whose features are there

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> Tensor:
        assert prefix.features is not None
        return prefix.features

    def admit(self, prompt: Tensor, first_row: int, tokens: Tensor) -> None:
        if self.features is None or self.lengths is None:
            self.features = prompt.new_zeros((self.rows, self.capacity, prompt.shape[1]))
            self.lengths = torch.zeros(self.rows, dtype=torch.long, device=prompt.device)
        rows = slice(first_row, first_row + len(tokens))
        self.features[rows, : len(prompt)] = prompt
        self.lengths[rows] = len(prompt)

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        assert features is not None and self.features is not None and self.lengths is not None
        n, width = features.shape[:2]
        rows = torch.arange(n, device=features.device)[:, None]
        # what is not committed is written as well, behind the row's end, where the next round writes over it
        places = self.lengths[:n, None] + torch.arange(width, device=features.device)
        self.features[rows, places] = features
        self.lengths[:n] += counts

    def move_row(self, source: int, target: int) -> None:
        assert self.features is not None and self.lengths is not None
        length = int(self.lengths[source])
        self.features[target, :length] = self.features[source, :length]
        self.lengths[target] = length

    def take(self, row: int) -> Tensor:
        """The features of a row that ends, (tokens but the last, f): its own memory, and fit for training."""
        assert self.features is not None and self.lengths is not None
        with torch.inference_mode(False), torch.no_grad():
            return self.features[row, : int(self.lengths[row])].clone()
