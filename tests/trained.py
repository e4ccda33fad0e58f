"""A tiny target that was taught a language, and a draft that was taught the target: made once a process, in seconds.

The language is made so that a draft is good only if it is fed rightly. Each token follows from the one two or the one
three places before it, and some from nothing: a draft must read the token that its features stand for, and, from the
keys of earlier inputs, the one before that. No law is sure, so coupled noise pays.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny import EOS_ID, PAD_ID
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fastgrpo.drafting.pretrain import PretrainConfig, pretrain
from fastgrpo.models.draft import DraftModel

FIRST_WORD, WORDS = 4, 20
_STEPS, _LEARNING_RATE = 250, 3e-3


def texts(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """(rows, length) int64. A token is the heir of the one two places back in half of the cases, of the one three
    places back in four of ten, and else any word; so are the first three."""
    heirs = torch.Generator().manual_seed(9)
    near, far = (torch.randperm(WORDS, generator=heirs) for _ in range(2))
    words = torch.randint(0, WORDS, (rows, length), generator=generator)
    chance = torch.rand((rows, length), generator=generator)
    for i in range(3, length):
        heir = torch.where(chance[:, i] < 0.6, near[words[:, i - 2]], far[words[:, i - 3]])
        words[:, i] = torch.where(chance[:, i] < 0.1, words[:, i], heir)
    return words + FIRST_WORD


def prompts(count: int, seed: int) -> list[list[int]]:
    """Beginnings of 8 tokens."""
    beginnings: list[list[int]] = texts(count, 8, torch.Generator().manual_seed(seed)).tolist()
    return beginnings


@functools.cache
def trained_pair() -> tuple[Any, DraftModel]:
    """The target, and its draft by the function that users call."""
    target = _taught()
    config = PretrainConfig(
        group_size=2, max_new_tokens=40, steps=2, epochs=6, learning_rate=1e-2, batch_tokens=320, seed=0
    )
    return target, pretrain(target, prompts(80, seed=0), config, stop_token_ids=[])


def _taught() -> Any:
    config = AutoConfig.for_model(
        "llama", vocab_size=FIRST_WORD + WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        pad_token_id=PAD_ID, eos_token_id=EOS_ID, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(target.parameters(), weight_decay=0.0)
    for step in range(_STEPS):
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * (1 - step / _STEPS)
        batch = texts(32, 32, generator)
        optimizer.zero_grad()
        target(batch, labels=batch).loss.backward()
        optimizer.step()
    target.requires_grad_(False)
    return target.eval()
