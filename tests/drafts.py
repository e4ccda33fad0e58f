"""Drafts of tiny targets for tests, features tapped the documented way, and the draft's layer written out slowly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgrpo.models.draft import DraftModel
from fastgrpo.models.draft_config import DraftConfig


def tiny_draft(target: Any, *, seed: int = 1, **options: Any) -> DraftModel:
    """`DraftModel.for_target` with loud weights and random norms: what is forgotten or misplaced shows."""
    draft = DraftModel.for_target(target, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.25 * noise if "norm" in name else noise * 2 / math.sqrt(noise.shape[1]))
    return draft


def tap(target: Any, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """The features of every token by the target's own forward. tokens: (n, t). Returns (n, t, len(layers) * hidden)."""
    with torch.no_grad():
        states = target(tokens, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)


def slow_layer(
    config: DraftConfig, weights: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor, positions: Sequence[int]
) -> Tensor:
    """EAGLE-3's layer for one text, a token and a head at a time, with plain rotary frequencies.

    embedded, hidden: (q, h) float64, of the token after each position and of the position. Returns (q, h).
    """
    size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads

    def weight(name: str) -> Tensor:
        return weights[f"midlayer.{name}.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + config.rms_norm_eps) * weight(name)

    def project(x: Tensor, name: str, count: int) -> list[Tensor]:
        parts = list((weight(f"self_attn.{name}_proj") @ x).view(count, size))
        if config.qk_norm and name in "qk":
            parts = [norm(part, f"self_attn.{name}_norm") for part in parts]
        return parts

    def turned(x: Tensor, position: int) -> Tensor:
        out, half = torch.empty_like(x), size // 2
        for j in range(half):
            angle = position * config.rope_parameters["rope_theta"] ** (-2 * j / size)
            out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
            out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
        return out

    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    outputs = []
    for i, position in enumerate(positions):
        both = torch.cat([norm(embedded[i], "input_layernorm"), norm(hidden[i], "hidden_norm")])
        keys.append([turned(key, position) for key in project(both, "k", kv_heads)])
        values.append(project(both, "v", kv_heads))
        mixed = []
        for head, query in enumerate(project(both, "q", heads)):
            shared = head // (heads // kv_heads)
            scores = torch.stack([turned(query, position) @ key[shared] for key in keys]) / math.sqrt(size)
            shares = scores.exp() / scores.exp().sum()
            mixed.append(sum(share * value[shared] for share, value in zip(shares, values, strict=True)))
        x = hidden[i] + weight("self_attn.o_proj") @ torch.cat(mixed)
        h = norm(x, "post_attention_layernorm")
        gate = weight("mlp.gate_proj") @ h
        outputs.append(x + weight("mlp.down_proj") @ (gate * gate.sigmoid() * (weight("mlp.up_proj") @ h)))
    return torch.stack(outputs)
