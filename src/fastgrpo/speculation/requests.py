"""What goes into the engine and what comes out of it: plain data, and the checks on what goes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Request:
    """One row to be sampled: its place in the answer, the name of its noise, its prompt and its limit."""

    index: int
    uid: int
    prompt: tuple[int, ...]
    max_new_tokens: int

    @property
    def signed_uid(self) -> int:
        """The uid modulo 2**64 as the int64 with the same bits, which is what tensors hold."""
        return (self.uid + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass
class Completion:
    """One finished row.

    token_ids: the response, its stop token included, at least one. logprobs: log softmax(logits / temperature) of each
    over the full vocabulary (temperature 1 when greedy). sampling_logprobs: under the law that was drawn from, None
    when that is the same one: no truncation and no repetition penalty. rounds: target passes that this row took part
    in after its prefill; drafted, accepted: draft tokens.
    """

    index: int
    uid: int
    token_ids: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float] | None
    finish_reason: Literal["stop", "length"]
    rounds: int
    drafted: int
    accepted: int


@dataclass
class RolloutStats:
    """Where a rollout's time went, in seconds, and how much it did.

    prompt_tokens counts each distinct prompt once; live_rows has the number of live rows of every decoding pass.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    passes: int = 0
    setup_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sampling_s: float = 0.0
    total_s: float = 0.0
    live_rows: list[int] = field(default_factory=list)


@dataclass
class Rollout:
    """The answer of `Engine.generate`: completions in row order, and the statistics of the call."""

    completions: list[Completion]
    stats: RolloutStats


@dataclass(frozen=True)
class Progress:
    """How far a running rollout is."""

    rows_done: int
    rows_total: int
    tokens: int
    elapsed_s: float


def make_requests(
    prompts: Sequence[Sequence[int]],
    group_size: int,
    max_new_tokens: int | Sequence[int],
    uids: Sequence[int] | None,
    first_uid: int,
    vocab_size: int,
) -> list[Request]:
    """Turn the arguments of `Engine.generate` into one request per row; ValueError names what does not fit."""
    if not prompts:
        raise ValueError("prompts is empty: pass at least one prompt, a list of token ids.")
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, but every prompt needs at least one response: use 1 or more.")
    texts = [tuple(int(token) for token in prompt) for prompt in prompts for _ in range(group_size)]
    for i, text in enumerate(texts[::group_size]):
        if not text:
            raise ValueError(f"prompt {i} has no tokens: give it at least one, such as the beginning-of-text token.")
        if min(text) < 0 or max(text) >= vocab_size:
            bad = max(text) if max(text) >= vocab_size else min(text)
            raise ValueError(
                f"prompt {i} holds token id {bad}, but the model knows 0 to {vocab_size - 1}: "
                "use the tokenizer that belongs to the model."
            )
    limits = [max_new_tokens] * len(texts) if isinstance(max_new_tokens, int) else [int(n) for n in max_new_tokens]
    for name, values in (("max_new_tokens", limits), ("uids", uids)):
        if values is not None and len(values) != len(texts):
            raise ValueError(f"{name} has {len(values)} values for {len(texts)} rows: give one per row.")
    if min(limits) < 1:
        raise ValueError(
            f"max_new_tokens is {min(limits)} for row {limits.index(min(limits))}, but must be at least 1."
        )
    names = list(uids) if uids is not None else range(first_uid, first_uid + len(texts))
    return [
        Request(i, int(uid), text, limit) for i, (uid, text, limit) in enumerate(zip(names, texts, limits, strict=True))
    ]
