"""Several proposers as one: their trees laid over each other, and the most likely nodes kept.

Which of them is right where is left to their scores, all log-probabilities on one scale; nothing is learned here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastgrpo.models.cache import Prefix
from fastgrpo.speculation.policy import DraftShape
from fastgrpo.speculation.proposers import Noise, ScoringProposer
from fastgrpo.speculation.recorder import columns
from fastgrpo.speculation.tree import Tree, best_scored, merge


class MixedProposer:
    """Drafts what any of some proposers finds likely: one tree a row, equal paths once, with the best score.

    One that cannot draft in a rollout is left out of it. Of equal scores the earlier proposer's node is kept. Raises
    ValueError when there are no proposers.
    """

    def __init__(self, proposers: Sequence[ScoringProposer]):
        if not proposers:
            raise ValueError("proposers is empty: give at least one, or decode with no proposer at all.")
        self.proposers = list(proposers)
        self.able = self.proposers
        self.taps = tuple(sorted({tap for proposer in self.proposers for tap in proposer.taps}))

    def start(self, rows: int, capacity: int) -> bool:
        self.able = [proposer for proposer in self.proposers if proposer.start(rows, capacity)]
        return bool(self.able)

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> list[Any]:
        return [
            proposer.read_prompt(tokens, replace(prefix, features=self._tapped(proposer, prefix.features)))
            for proposer in self.able
        ]

    def admit(self, prompt: list[Any], first_row: int, tokens: Tensor) -> None:
        for proposer, state in zip(self.able, prompt, strict=True):
            proposer.admit(state, first_row, tokens)

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        for proposer in self.able:
            proposer.observe(self._tapped(proposer, features), tokens, counts)

    def move_row(self, source: int, target: int) -> None:
        for proposer in self.able:
            proposer.move_row(source, target)

    def propose(self, roots: Tensor, shape: DraftShape, noise: Noise) -> Tree:
        return self.propose_scored(roots, shape, noise)[0]

    def propose_scored(self, roots: Tensor, shape: DraftShape, noise: Noise) -> tuple[Tree, Tensor]:
        drafts = [proposer.propose_scored(roots, shape, noise) for proposer in self.able]
        if len(drafts) == 1:
            return drafts[0]
        return best_scored(*merge(*zip(*drafts, strict=True)), shape.nodes)

    def _tapped(self, proposer: ScoringProposer, features: Tensor | None) -> Tensor | None:
        """Of features (..., taps * hidden) the taps of one proposer."""
        return None if features is None else columns(features, self.taps, proposer.taps)
