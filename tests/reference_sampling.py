"""Slow, obvious twins of fastgrpo.speculation.sampling: whole-vocabulary sorts, noise for every id."""

from __future__ import annotations

import torch

from fastgrpo.speculation.noise import arrival_times
from fastgrpo.speculation.sampling import SamplingParams


def truncated_law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the exact law of one row of logits (vocab,) under params (not greedy), float64 (vocab,)."""
    scaled = logits.float()
    if params.temperature != 1:
        scaled = scaled / params.temperature  # float32, so that ties are the ties that the sampler sees
    p = torch.softmax(scaled.double(), -1)
    if 0 < params.top_k < len(p):
        kth = scaled.sort(descending=True).values[params.top_k - 1]
        p = torch.where(scaled >= kth, p, 0.0)
        p = p / p.sum()
    if params.top_p < 1:
        order = p.sort(descending=True).indices
        before = p[order].cumsum(0) - p[order]
        last = scaled[order][before < params.top_p].min()
        p = torch.where(scaled >= last, p, 0.0)
        p = p / p.sum()
    if params.min_p > 0:
        p = torch.where(p >= params.min_p * p.max(), p, 0.0)
        p = p / p.sum()
    return p


def slow_sample(logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor) -> tuple[int, float, float]:
    """Return token id, full log-prob and truncated log-prob for one row (vocab,) and its key (2,)."""
    if params.greedy:
        token = logits.float().tolist().index(logits.float().max().item())
        full = torch.log_softmax(logits.double(), -1)[token].item()
        return token, full, full
    p = truncated_law(logits, params)
    times = arrival_times(keys.unsqueeze(0), torch.arange(len(p)).unsqueeze(0)).squeeze(0)
    token = int((p.log() - times.log()).argmax())
    full = torch.log_softmax(logits.double() / params.temperature, -1)[token].item()
    return token, full, p[token].log().item()
