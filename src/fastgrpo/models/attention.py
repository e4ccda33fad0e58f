"""Who may look at whom, and grouped attention by plain batched matmul.

Pure functions, shared by both ways of running a target (`target.py`, `lean.py`). There is no cache here and no module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of each layer, None where a layer sees everything.

    Raises ValueError for layers whose state is not keys and values (linear attention, chunked attention).
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if kind not in known:
            raise ValueError(
                f"{config.model_type} has a layer of type {kind!r}, but the engine keeps and rewinds keys and "
                "values only: use a model whose layers are all full_attention or sliding_attention."
            )
    return [known[kind] for kind in types]


def visible(positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """True where a query may attend: not to its future, and not past its window.

    positions: (n, queries); key_positions: (span,) or (n, 1, span). Returns bool (n, queries, span).
    """
    distance = positions[:, :, None] - key_positions
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


@dataclass(frozen=True)
class TreeLook:
    """Where the nodes of token trees are written, and what each of them may see.

    slots: (n, nodes) int64. allowed: bool (n, nodes, span), the committed text and a node's own path.
    key_positions: (n, 1, span) int64, the position of what a slot holds, which in a tree is not the slot's number.
    """

    slots: Tensor
    allowed: Tensor
    key_positions: Tensor


def tree_look(lengths: Tensor, depths: Tensor, ancestors: Tensor, span: int) -> TreeLook:
    """The look of trees whose nodes lie behind `lengths` committed tokens each, node j in slot lengths + j.

    lengths: (n,) int64; depths: (n, nodes) int64; ancestors: bool (n, nodes, nodes), [:, i, j]: i sees j.
    """
    n, nodes = depths.shape
    slots = torch.arange(span, device=depths.device)
    node = slots - lengths[:, None]  # (n, span): which node a slot holds; negative is committed text
    inside = node.clamp(0, nodes - 1)
    own_path = ancestors.gather(2, inside[:, None].expand(n, nodes, span)) & (node < nodes)[:, None]
    allowed = (node < 0)[:, None] | (own_path & (node >= 0)[:, None])
    key_positions = torch.where(node < 0, slots, lengths[:, None] + depths.gather(1, inside))
    own_slots = lengths[:, None] + torch.arange(nodes, device=depths.device)
    return TreeLook(own_slots, allowed, key_positions[:, None])


def as_bias(allowed: Tensor, groups: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """The additive mask in the layout of `grouped_attention`: 0 or -inf.

    allowed: bool (n, queries, span). Returns (n * kv_heads, groups * queries, span), made once a pass for all layers.
    """
    n, queries, span = allowed.shape
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)
    bias = bias[:, None, None].expand(n, kv_heads, groups, queries, span)
    return bias.reshape(n * kv_heads, groups * queries, span)


def grouped_attention(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * q k^T + bias) v, the queries of a key/value head side by side so that keys are never repeated.

    query: (n, queries, heads, size); keys, values: (n, kv_heads, span, size), any strides that leave rows whole;
    bias: (n * kv_heads, groups * queries, span) or None. Returns (n, queries, heads * size).
    """
    n, queries, heads, size = query.shape
    kv_heads, span = keys.shape[1], keys.shape[2]
    grouped = query.view(n, queries, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(n * kv_heads, -1, size)
    flat_keys = keys.reshape(n * kv_heads, span, size).transpose(1, 2)
    if bias is None:
        scores = torch.bmm(grouped * scale, flat_keys)
    else:
        scores = torch.baddbmm(bias, grouped, flat_keys, alpha=scale)
    mixed = torch.bmm(scores.softmax(-1), values.reshape(n * kv_heads, span, size))
    mixed = mixed.view(n, kv_heads, heads // kv_heads, queries, size).permute(0, 3, 1, 2, 4)
    return mixed.reshape(n, queries, heads * size)


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float) -> Tensor:
    """Attention of a text to itself, by torch's fused kernel. The quadratic scores are never stored.

    query: (n, queries, heads, size); keys, values: (n, kv_heads, queries, size). Returns (n, queries, heads * size).
    """
    n, queries, heads, size = query.shape
    groups = heads // keys.shape[1]
    keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
    mask = None
    if window is not None and queries > window:
        positions = torch.arange(queries, device=query.device)
        mask = visible(positions[None], positions, window)[:, None]
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return mixed.transpose(1, 2).reshape(n, queries, heads * size)
