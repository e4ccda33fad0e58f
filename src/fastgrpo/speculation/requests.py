"""What goes into the engine and what comes out of it: plain data, and the checks on what goes in."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor


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
    when that is the same one: no truncation and no repetition penalty. blocks: how many tokens each target pass gave
    it, the prefill's 1 first; all but the last of a later block were drafted, but for a row that ended inside one.
    drafted, accepted: draft tokens. features: the target's hidden states at the layers that were asked for, of every
    token of prompt and response but the last, (tokens - 1, layers * hidden) in the passes' dtype; None when none were.
    """

    index: int
    uid: int
    token_ids: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float] | None
    finish_reason: Literal["stop", "length"]
    blocks: list[int]
    drafted: int
    accepted: int
    features: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def from_draft(self) -> list[bool]:
        """Of each token, whether it was drafted and accepted; the others are the target's own."""
        marks = [drafted for block in self.blocks for drafted in [*[True] * (block - 1), False]]
        # a row that ended inside a block did not get that block's own token: its last one was drafted too
        marks[-1] = self.accepted > sum(marks)
        return marks

    @property
    def rounds(self) -> int:
        """Target passes that this row took part in after its prefill."""
        return len(self.blocks) - 1


@dataclass
class RolloutStats:
    """Where a rollout's time went, in seconds, and how much it did.

    prompt_tokens counts each distinct prompt once; live_rows has the number of live rows of every decoding pass, and
    drafts how many drafted tokens of each row it verified, 0 for a plain one. drafted, accepted: draft tokens of all
    rows. decode_s: the target's passes; draft_s: proposing, and what draft and recorder take from a round.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    setup_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    decode_s: float = 0.0
    sampling_s: float = 0.0
    total_s: float = 0.0
    live_rows: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    @property
    def accept_length(self) -> float | None:
        """Tokens that a row gained in a pass that verified drafts, on average, the target's own included, as vLLM
        counts it; None before the first such pass."""
        rounds = sum(rows for rows, drafts in zip(self.live_rows, self.drafts, strict=True) if drafts)
        return 1 + self.accepted / rounds if rounds else None


@dataclass
class Rollout:
    """The answer of `Engine.generate`: completions in row order, and the statistics of the call."""

    completions: list[Completion]
    stats: RolloutStats


@dataclass(frozen=True)
class Progress:
    """How far a running rollout is. accept_length: as in `RolloutStats`."""

    rows_done: int
    rows_total: int
    tokens: int
    elapsed_s: float
    accept_length: float | None = None


def whole_number(name: str, value: Any, at_least: int | None = None) -> int:
    """`value` as an int: Python's, numpy's or a tensor's, but no bool and nothing that would be rounded."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (at_least is not None and number < at_least):
        least = "" if at_least is None else f" of at least {at_least}"
        raise ValueError(f"{name} is {value!r}, but must be a whole number{least}.")
    return number


def real_number(name: str, value: Any) -> float:
    """`value` as a float: Python's or numpy's, whole or infinite, but no bool, no NaN and no text."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"{name} is {value!r}, but must be a number.")
    return float(value)


def make_requests(
    prompts: Sequence[Sequence[int]],
    group_size: int,
    max_new_tokens: int | Sequence[int],
    uids: Sequence[int] | None,
    first_uid: int,
    vocab_size: int,
    longest: int | None,
) -> list[Request]:
    """Turn the arguments of `Engine.generate` into one request per row; ValueError names what does not fit.

    longest: positions that the model has, prompt and response together; None is no limit.
    """
    if not _is_list(prompts):
        raise ValueError(f"prompts is {prompts!r}, but must be a list of prompts, each a list of token ids.")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: pass at least one prompt, a list of token ids.")
    whole_number("group_size", group_size, at_least=1)
    distinct = [_text(i, prompt, vocab_size) for i, prompt in enumerate(prompts)]
    texts = [text for text in distinct for _ in range(group_size)]
    per_row = _is_list(max_new_tokens)
    limits: Sequence[Any] = max_new_tokens if per_row else [max_new_tokens] * len(texts)  # type: ignore[assignment]
    first_uid = whole_number("first_uid", first_uid)
    names: Sequence[Any] = range(first_uid, first_uid + len(texts)) if uids is None else uids
    for name, values in (("max_new_tokens", limits), ("uids", names)):
        if not _is_list(values):
            raise ValueError(f"{name} is {values!r}, but must be a list with one value per row.")
        if len(values) != len(texts):
            raise ValueError(f"{name} has {len(values)} values for {len(texts)} rows: give one per row.")
    requests = []
    for i, (uid, text, limit) in enumerate(zip(names, texts, limits, strict=True)):
        limit = whole_number(f"max_new_tokens of row {i}", limit, at_least=1)
        if longest is not None and len(text) + limit > longest:
            raise ValueError(
                f"row {i} may reach {len(text)} prompt tokens + {limit} new ones, and the model has {longest} "
                "positions: lower max_new_tokens, or leave the prompt out."
            )
        requests.append(Request(i, whole_number(f"uid of row {i}", uid), text, limit))
    return requests


def _is_list(value: Any) -> bool:
    """Whether `value` is a list, a tuple, an array or a tensor with a first dimension: no text, no generator."""
    if isinstance(value, str | bytes | Mapping | Set) or not hasattr(value, "__getitem__"):
        return False
    return getattr(value, "ndim", 1) > 0 and hasattr(value, "__len__")


def _text(i: int, prompt: Any, vocab_size: int) -> tuple[int, ...]:
    """Prompt i as a tuple of token ids, checked."""
    if not _is_list(prompt):
        raise ValueError(
            f"prompt {i} is {prompt!r}, but must be a list of token ids: tokenize texts, and nest one prompt."
        )
    if len(prompt) == 0:
        raise ValueError(f"prompt {i} has no tokens: give it at least one, such as the beginning-of-text token.")
    text = tuple(whole_number(f"a token of prompt {i}", token) for token in prompt)
    for token in (min(text), max(text)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt {i} holds token id {token}, but the model knows 0 to {vocab_size - 1}: "
                "use the tokenizer that belongs to the model."
            )
    return text
