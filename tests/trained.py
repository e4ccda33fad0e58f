"""A tiny target and a draft that was trained on its answers: made once a process, in seconds, always the same.

The target is random, so nothing but the draft's inputs tells what it will say: its law hangs on every token in reach
through three loud layers, and the draft sees two of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny import tiny_model

from fastgrpo.drafting.pretrain import PretrainConfig, pretrain
from fastgrpo.models.draft import DraftModel

WORDS = 24  # few enough that a small draft learns them in seconds


def some_prompts(count: int, seed: int) -> list[list[int]]:
    """Random prompts of 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, WORDS, (count, 8), generator=generator).tolist()


@functools.cache
def trained_pair() -> tuple[Any, DraftModel]:
    """The target and its draft, by the functions that users call."""
    target = tiny_model("llama", vocab_size=WORDS)
    config = PretrainConfig(group_size=4, max_new_tokens=48, epochs=8, learning_rate=3e-3, batch_tokens=1024)
    return target, pretrain(target, some_prompts(64, seed=0), config, stop_token_ids=[])
