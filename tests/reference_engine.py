"""Slow, obvious twin of fastgrpo.speculation.engine: a row at a time, the whole text run again for every token.

No cache, no batch, no masks. Noise comes from `noise.row_keys`, the law from reference_sampling.py, log-probs from a
plain log-softmax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from reference_sampling import truncated_law
from torch import nn

from fastgrpo.speculation.noise import arrival_times, row_keys
from fastgrpo.speculation.requests import Completion
from fastgrpo.speculation.sampling import SamplingParams

# A token whose lead over the runner-up is smaller may come out differently: float32 sums in another order.
NEAR_TIE = 1e-4
LOGPROB_TOLERANCE = 1e-4


@dataclass
class SlowRow:
    """What one row emits; `margins`: the lead of each token over the runner-up, in nats.

    logprobs are of the policy, sampling_logprobs of the law that was drawn from (penalised, truncated).
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: str = "length"


def penalised(logits: torch.Tensor, text: Sequence[int], penalty: float) -> torch.Tensor:
    """Hugging Face's repetition penalty, token by token. logits: (vocab,)."""
    logits = logits.clone()
    for token in set(text):
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    return logits


@torch.no_grad()
def slow_row(
    model: nn.Module,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    uid: int = 0,
    seed: int = 0,
    limit: int = 8,
    stops: Collection[int] = (),
) -> SlowRow:
    """Sample one completion of `prompt`; `model` must be in eval mode."""
    row, text = SlowRow(), list(prompt)
    while len(row.token_ids) < limit:
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float()
        drawn = penalised(logits, text, params.repetition_penalty)
        law = drawn.double().log_softmax(-1) if params.greedy else truncated_law(drawn, params).log()
        scores = law
        if not params.greedy:
            keys = row_keys(seed, torch.tensor([uid]), torch.tensor([len(text)]))
            scores = law - arrival_times(keys, torch.arange(len(law))[None])[0].log()
        best = scores.topk(2)
        token = int(best.indices[0])
        row.margins.append(float(best.values[0] - best.values[1]))
        row.token_ids.append(token)
        row.logprobs.append(float((logits.double() / (params.temperature or 1)).log_softmax(-1)[token]))
        row.sampling_logprobs.append(float(law[token]))
        text.append(token)
        if token in stops:
            row.finish_reason = "stop"
            break
    return row


def difference(got: Completion, expected: SlowRow) -> str:
    """Empty when `got` is what `expected` says, up to the first near-tie where both went different ways."""
    for i, (ours, theirs) in enumerate(zip(got.token_ids, expected.token_ids, strict=False)):
        if ours != theirs:
            return "" if expected.margins[i] < NEAR_TIE else f"token {i}: {got.token_ids} for {expected.token_ids}"
        pairs = [(got.logprobs[i], expected.logprobs[i])]
        if got.sampling_logprobs is not None:
            pairs.append((got.sampling_logprobs[i], expected.sampling_logprobs[i]))
        if any(abs(a - b) > LOGPROB_TOLERANCE for a, b in pairs):
            return f"log-probs of token {i}: {pairs}"
    if (len(got.token_ids), got.finish_reason) != (len(expected.token_ids), expected.finish_reason):
        return f"{got.token_ids} ({got.finish_reason}) for {expected.token_ids} ({expected.finish_reason})"
    return ""


def hugging_face_greedy(
    model: Any, prompt: Sequence[int], new_tokens: int, stops: Sequence[int] | None = None
) -> list[int]:
    """The response of one prompt by `generate`; `model` must be in eval mode."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None if stops is None else list(stops),
    )
    return out[0, len(prompt) :].tolist()
