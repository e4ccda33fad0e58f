"""The draft of a trainer: where it comes from, and what drafting came to, counted.

Knows nothing of TRL. How a draft proposes and how much is drafted is `speculation/`'s.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import torch

from fastgrpo.config import POLICY_KNOBS, FastGRPOConfig
from fastgrpo.models.draft import DraftModel
from fastgrpo.speculation.requests import Rollout


def load_draft(draft: DraftModel | str | os.PathLike[str] | None, args: FastGRPOConfig) -> DraftModel | None:
    """The draft itself, or the one of that folder or hub id; None where there is none, and then `args` must ask for
    none. Raises ValueError for settings without effect and for a folder that holds no draft, TypeError for others.
    """
    if draft is None:
        _refuse_settings_without_effect(args)
        return None
    if isinstance(draft, DraftModel):
        return draft
    if not isinstance(draft, str | os.PathLike):
        raise TypeError(
            f"draft_model is a {type(draft).__name__}, but must be a fastgrpo DraftModel, or the folder or hub id of "
            "one that save_pretrained wrote."
        )
    return DraftModel.from_pretrained(draft)


def _refuse_settings_without_effect(args: FastGRPOConfig) -> None:
    if args.spec_policy == "off":
        return
    given = [name for name in POLICY_KNOBS if getattr(args, name) is not None]
    if args.spec_policy != FastGRPOConfig.spec_policy:
        given.insert(0, "spec_policy")
    if given:
        raise ValueError(
            f"{given[0]}={getattr(args, given[0])!r} has no effect without a draft. Set draft_model to the folder or "
            f"hub id of one, or remove {', '.join(given)}."
        )


@dataclass
class DraftTally:
    """What drafting came to. All are counts, so that those of turns, ranks and generations add up.

    passes: of the target, prefills left out; row_passes: a pass of n rows counts n times; drafted_row_passes: of them,
    those that verified drafts.
    """

    responses: int = 0
    tokens: int = 0
    passes: int = 0
    plain_passes: int = 0
    row_passes: int = 0
    drafted_row_passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def add_rollout(self, rollout: Rollout) -> None:
        stats = rollout.stats
        self.responses += len(rollout.completions)
        self.tokens += stats.completion_tokens
        self.passes += stats.passes
        self.plain_passes += sum(nodes == 0 for nodes in stats.drafts)
        self.row_passes += sum(stats.live_rows)
        self.drafted_row_passes += sum(rows for rows, nodes in zip(stats.live_rows, stats.drafts, strict=True) if nodes)
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    def add(self, counts: torch.Tensor) -> None:
        """counts: (ranks, fields) int64, as `counts` gives them."""
        for field, value in zip(fields(self), counts.sum(0).tolist(), strict=True):
            setattr(self, field.name, getattr(self, field.name) + value)

    def counts(self, device: torch.device) -> torch.Tensor:
        """(1, fields) int64."""
        return torch.tensor([[getattr(self, field.name) for field in fields(self)]], device=device)

    def rates(self) -> dict[str, float]:
        """By vLLM's definitions: acceptance_rate is of drafted tokens, mean_accept_length counts the target's own token
        and only passes that verified drafts. A rate of nothing is left out."""
        rates: dict[str, float] = {}
        if self.drafted:
            rates["acceptance_rate"] = self.accepted / self.drafted
        if self.drafted_row_passes:
            rates["mean_accept_length"] = 1 + self.accepted / self.drafted_row_passes
        if self.passes:
            # a prefill gives each response its first token
            rates["tokens_per_target_forward"] = (self.tokens - self.responses) / self.row_passes
            rates["active_rows_mean"] = self.row_passes / self.passes
            rates["off_fraction"] = self.plain_passes / self.passes
        return rates

    def metrics(self) -> dict[str, float]:
        """Of one generation, as a trainer logs them."""
        counted = {"drafted_tokens": float(self.drafted), "accepted_tokens": float(self.accepted)}
        return {f"spec/{name}": value for name, value in {**self.rates(), **counted}.items()}

    def summary(self) -> dict[str, Any]:
        return {**vars(self), **self.rates()}
