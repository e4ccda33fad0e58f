"""What a trainer must know about rollouts besides the tokens: who each sequence is, and how far off the sampler.

Sequence uids (the key of a sequence's noise), the ledger that keeps a row's uid over the turns of a tool loop, limits
that fit the model's context, the live bar, the precision correction. Knows nothing of TRL or of how tokens are drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from fastgrpo.config import FastGRPOConfig
from fastgrpo.speculation.engine import Progress

_ROW_BITS = 24
_GENERATION_BITS = 38
_EVAL_BIT = 1 << (_ROW_BITS + _GENERATION_BITS)


def check_correctable(args: FastGRPOConfig, *, rollout: torch.dtype, training: torch.dtype) -> bool:
    """Whether rollouts need the precision correction. Raises ValueError where the loss has no exact one."""
    if rollout == training:
        return False
    sequence_level = {
        "importance_sampling_level": args.importance_sampling_level == "sequence",
        "loss_type": args.loss_type in ("luspo", "vespo"),
    }
    for name, offends in sequence_level.items():
        if offends:
            raise ValueError(
                f"{name}={getattr(args, name)!r} weights whole sequences, while the correction for rollouts in "
                f"{rollout} under training in {training} weights tokens by their advantages: the two do not compose. "
                f"Set rollout_dtype={str(training).removeprefix('torch.')!r}, or a token-level loss."
            )
    return True


def sequence_uid(*, evaluation: bool, generation: int, row: int) -> int:
    """The uid of one sequence: (stream, number of the generation in it, row over all ranks) packed into 63 bits.

    Raises ValueError where a field does not fit (16.7 million rows, 2.7e11 generations).
    """
    if not 0 <= row < 1 << _ROW_BITS:
        raise ValueError(f"row={row} must lie in 0..{(1 << _ROW_BITS) - 1}: make the generation batch smaller.")
    if not 0 <= generation < 1 << _GENERATION_BITS:
        raise ValueError(f"generation={generation} must lie in 0..{(1 << _GENERATION_BITS) - 1}: start a new run.")
    return (_EVAL_BIT if evaluation else 0) | generation << _ROW_BITS | row


@dataclass
class RowLedger:
    """Which row of the generation batch each sequence of a turn is, from the first turn to the last tool answer.

    TRL's tool loop asks again for the rows that called a tool, in ascending order, with prompts that begin with all the
    tokens these rows have so far. That is how they are recognised: TRL does not say which rows they are.
    """

    evaluation: bool
    generation: int
    first_row: int  # of this rank, over all ranks
    _prompt_lengths: list[int] = field(default_factory=list)
    _tokens: list[list[int]] = field(default_factory=list)  # prompt and what came after it, per row

    def identify(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The local rows of `prompts` (one turn's, in order). Raises RuntimeError for one that continues no row."""
        if not self._tokens:
            self._prompt_lengths = [len(prompt) for prompt in prompts]
            self._tokens = [list(prompt) for prompt in prompts]
            return list(range(len(prompts)))
        rows: list[int] = []
        for prompt in prompts:
            start = rows[-1] + 1 if rows else 0
            for row in range(start, len(self._tokens)):
                if list(prompt[: len(self._tokens[row])]) == self._tokens[row]:
                    rows.append(row)
                    break
            else:
                raise RuntimeError(
                    f"A later turn's prompt of {len(prompt)} tokens continues none of the {len(self._tokens)} rows of "
                    "this generation batch, so its noise is undefined. Pass prompt + completion + new tokens, rows "
                    "ascending."
                )
        return rows

    def record(self, rows: list[int], prompts: list[list[int]], completions: list[list[int]]) -> None:
        """Remember what the rows hold after this turn."""
        for row, prompt, completion in zip(rows, prompts, completions, strict=True):
            self._tokens[row] = [*prompt, *completion]

    def uids(self, rows: Sequence[int]) -> list[int]:
        return [
            sequence_uid(evaluation=self.evaluation, generation=self.generation, row=self.first_row + row)
            for row in rows
        ]

    def limits(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], max_completion_length: int) -> list[int]:
        """How many tokens each row may still emit: the limit counts every turn and every tool's answer."""
        used = [len(prompt) - self._prompt_lengths[row] for row, prompt in zip(rows, prompts, strict=True)]
        return [max(1, max_completion_length - tokens) for tokens in used]  # TRL cuts the 1 off where nothing is left


def fit_to_context(limits: Sequence[int], prompts: Sequence[Sequence[int]], context: int | None) -> list[int]:
    """The limits, cut to what a model with so many positions leaves. ValueError for a prompt that leaves nothing."""
    if context is None:
        return list(limits)
    longest = max(map(len, prompts))
    if longest >= context:
        raise ValueError(
            f"A prompt of {longest} tokens leaves no room for a response in the model's context of {context}. Filter "
            "long prompts out of the dataset; they are never truncated."
        )
    return [min(limit, context - len(prompt)) for limit, prompt in zip(limits, prompts, strict=True)]


class RolloutBar:
    """A transient line on standard error while a rollout runs: rows done, tokens per second, and with drafts the accept
    length. Nothing off a terminal."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._line: tqdm | None = None

    def update(self, progress: Progress) -> None:
        if not self._wanted:
            return
        if self._line is None:
            self._line = tqdm(total=progress.rows_total, desc="rollout", unit="row", leave=False, file=sys.stderr)
        rate = progress.tokens / max(progress.elapsed_s, 1e-9)
        shown = f"{progress.tokens:,} tokens, {rate:,.0f} tokens/s"
        if progress.accept_length is not None:
            shown += f", accept length {progress.accept_length:.2f}"
        self._line.set_postfix_str(shown, refresh=False)
        self._line.update(progress.rows_done - self._line.n)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


@dataclass(frozen=True)
class Correction:
    """Weights for the per-token loss where the sampler's precision was not the trainer's, and how far off it was.

    weights: float32 (rows, tokens), in (0, cap], 1 where the mask is 0.
    """

    weights: torch.Tensor
    mean_difference: torch.Tensor  # scalar: mean |trainer log-prob - sampler log-prob| over the mask
    max_difference: torch.Tensor
    mean_weight: torch.Tensor
    capped_fraction: torch.Tensor  # share of the mask's tokens whose weight was cut to the cap


def precision_correction(
    trainer_logprobs: torch.Tensor,  # (rows, tokens)
    sampler_logprobs: torch.Tensor,  # (rows, tokens)
    mask: torch.Tensor,  # (rows, tokens), 1 where the policy wrote a token that is trained on
    *,
    cap: float,
) -> Correction:
    """min(exp(trainer log-prob - sampler log-prob), cap) per token: truncated importance sampling.

    A token whose sampler log-prob is NaN (not known) gets weight 1.
    """
    kept = mask.bool() & ~torch.isnan(sampler_logprobs)
    difference = torch.where(kept, trainer_logprobs.float() - sampler_logprobs.float(), 0.0)
    raw = difference.exp()
    count = kept.sum().clamp(min=1)
    return Correction(
        weights=raw.clamp(max=cap),
        mean_difference=difference.abs().sum() / count,
        max_difference=difference.abs().amax(),
        mean_weight=(raw.clamp(max=cap) * kept).sum() / count,
        capped_fraction=((raw > cap) & kept).sum() / count,
    )
