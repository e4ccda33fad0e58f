"""Grouped attention against the formula, for every number of rows that a product may have and sums of several parts."""

from __future__ import annotations

import math

import pytest
import torch

from fastgrpo.models.attention import as_bias, grouped_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("span", [16, 128, 144, 400])
@pytest.mark.parametrize(("groups", "queries"), [(1, 1), (1, 5), (3, 1), (3, 4), (4, 1)])
def test_it_is_softmax_of_the_scores_over_what_is_allowed(
    groups: int, queries: int, span: int, dtype: torch.dtype
) -> None:
    n, kv_heads, size = 2, 2, 8
    query = torch.randn(n, queries, kv_heads * groups, size, dtype=dtype)
    keys, values = (torch.randn(n, kv_heads, span + 16, size, dtype=dtype)[:, :, :span] for _ in range(2))
    allowed = torch.rand(n, queries, span) < 0.5
    allowed[..., 3] = True
    mixed = grouped_attention(query, keys, values, as_bias(allowed, groups, kv_heads, dtype), 0.3)
    assert mixed.shape == (n, queries, kv_heads * groups * size)
    for row in range(n):
        for head in range(kv_heads * groups):
            own, held = keys[row, head // groups], values[row, head // groups]
            scores = (0.3 * query[row, :, head] @ own.T).masked_fill(~allowed[row], -math.inf)
            expected = scores.softmax(-1) @ held
            torch.testing.assert_close(mixed[row, :, head * size : (head + 1) * size], expected, rtol=0, atol=1e-5)
    everything = as_bias(torch.ones_like(allowed), groups, kv_heads, dtype)
    without = grouped_attention(query, keys, values, None, 0.3)
    torch.testing.assert_close(without, grouped_attention(query, keys, values, everything, 0.3), rtol=0, atol=1e-5)
