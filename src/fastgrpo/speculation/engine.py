"""The rollout loop: admit, run, sample, commit, retire.

Tokens of a row depend on (weights, prompt, seed, sequence uid) alone: not on its neighbours, on the number of slots or
on who finished when. Live rows are the first n rows of the cache; a finished row is replaced by the last live one, and
waiting requests enter behind it. The prompts of a group are run once and their keys and values copied to its rows.

This file proposes nothing yet: every pass gives each live row one token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastgrpo.models.cache import Prefix, RaggedCache
from fastgrpo.models.target import Target, open_target
from fastgrpo.speculation.memory import plan_slots
from fastgrpo.speculation.noise import row_keys
from fastgrpo.speculation.requests import (
    Completion,
    Progress,
    Request,
    Rollout,
    RolloutStats,
    make_requests,
    whole_number,
)
from fastgrpo.speculation.sampling import SamplingParams, logprobs_of, penalise, sample

# Prompt tokens that one prefill pass takes. More keeps an accelerator busy; on a CPU the activations leave the cache
# (390 tokens in a pass cost 2.0 ms each, 860 cost 2.25, SmolLM2 on two AVX2 cores).
_PREFILL_TOKENS = {"cpu": 512}
_PREFILL_TOKENS_ELSEWHERE = 8192


_T = TypeVar("_T")


@dataclass
class _Row:
    """One live sequence: its request and what it has emitted so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in the cache: all but the last emitted one, which the next pass will run."""
        return len(self.request.prompt) + len(self.tokens) - 1


@dataclass
class _Prompt:
    """A prompt that has been run, and the rows of its group that still wait for a slot."""

    requests: deque[Request]
    prefix: Prefix
    logits: Tensor  # (vocab,)


class Engine:
    """Samples completions from a Hugging Face causal LM, plain or under PEFT.

    slots: rows that decode at once (default: all of them, as far as memory goes). dtype: precision of the passes
    (default: the model's). One engine serves one model; weights are read anew at every `generate`.
    """

    def __init__(self, model: nn.Module, *, slots: int | None = None, dtype: torch.dtype | None = None):
        self.slots = None if slots is None else whole_number("slots", slots, at_least=1)
        self.target: Target = open_target(model, dtype=dtype)
        ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
        self._model_stops = _stops("generation_config.eos_token_id", ids)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        group_size: int = 1,
        max_new_tokens: int | Sequence[int] = 512,
        stop_token_ids: Sequence[int] | None = None,
        seed: int = 0,
        uids: Sequence[int] | None = None,
        first_uid: int = 0,
        on_completion: Callable[[Completion], None] | None = None,
        on_round: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        """Sample one completion per row; rows are the prompts, each `group_size` times in a row.

        prompts: token ids, at least one each; consecutive equal prompts are run once. max_new_tokens: for all rows, or
        one number per row. stop_token_ids: a row ends with the first of these, which it keeps (default: every
        eos_token_id of the model's generation_config). seed, uids: the noise of row r is a function of (seed, its
        uid); uids default to first_uid + r. on_completion is called as each row ends, on_round after each pass.
        Returns completions in row order. Raises ValueError for prompts or limits that cannot be, FloatingPointError
        when the model's logits are not finite.
        """
        started = time.perf_counter()
        requests = make_requests(
            prompts, group_size, max_new_tokens, uids, first_uid, self.target.vocab_size, self.target.longest
        )
        stops = self._model_stops if stop_token_ids is None else _stops("stop_token_ids", stop_token_ids)
        capacity = max(len(request.prompt) + request.max_new_tokens for request in requests)
        slots = plan_slots(self.target.layout, self.slots or len(requests), len(requests), capacity)
        on_completion, on_round = _in_the_callers_mode(on_completion), _in_the_callers_mode(on_round)
        with self.target.session():
            stats = RolloutStats(setup_s=time.perf_counter() - started)
            run = _Run(self.target, RaggedCache(self.target.layout, slots, capacity), sampling, stops, seed, stats)
            run.notify = on_completion
            run.waiting = deque(_group_equal_prompts(requests))
            while run.waiting or run.prompts or run.rows:
                run.admit()
                if run.rows:
                    run.step()
                stats.total_s = time.perf_counter() - started
                if on_round is not None:
                    on_round(Progress(len(run.done), len(requests), stats.completion_tokens, stats.total_s))
        return Rollout(sorted(run.done, key=lambda completion: completion.index), stats)


def _stops(name: str, ids: Any) -> frozenset[int]:
    if not hasattr(ids, "__iter__"):
        raise ValueError(f"{name} is {ids!r}, but must be a list of token ids.")
    return frozenset(whole_number(f"a token of {name}", token) for token in ids)


def _in_the_callers_mode(callback: Callable[[_T], None] | None) -> Callable[[_T], None] | None:
    # passes run without gradients and in inference mode, whose tensors a callback could never train on
    if callback is None:
        return None
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def call(value: _T) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            callback(value)

    return call


def _group_equal_prompts(requests: Sequence[Request]) -> list[deque[Request]]:
    groups: list[deque[Request]] = []
    for request in requests:
        if groups and groups[-1][0].prompt == request.prompt:
            groups[-1].append(request)
        else:
            groups.append(deque([request]))
    return groups


class _Run:
    """The state of one `generate` call."""

    def __init__(
        self,
        target: Target,
        cache: RaggedCache,
        sampling: SamplingParams,
        stops: frozenset[int],
        seed: int,
        stats: RolloutStats,
    ):
        self.target, self.cache, self.sampling, self.stops, self.seed, self.stats = (
            target, cache, sampling, stops, seed, stats,
        )  # fmt: skip
        self.waiting: deque[deque[Request]] = deque()  # groups whose prompt has not been run
        self.prompts: deque[_Prompt] = deque()  # run, with rows left to admit
        self.rows: list[_Row] = []  # live, in the order of the cache
        self.done: list[Completion] = []
        self.notify: Callable[[Completion], None] | None = None
        self.seen: Tensor | None = None  # (slots, vocab) bool, only for the repetition penalty
        if sampling.repetition_penalty != 1:
            shape = (cache.rows, target.vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=cache.layout.device)

    def admit(self) -> None:
        """Fill free slots: run waiting prompts, copy their keys to new rows, sample each row's own first token."""
        free = self.cache.rows - len(self.rows)
        while free and (self.prompts or self.waiting):
            if not self.prompts:
                self._prefill(free)
            prompt = self.prompts[0]
            entering = [_Row(prompt.requests.popleft()) for _ in range(min(free, len(prompt.requests)))]
            if not prompt.requests:
                self.prompts.popleft()
            first = len(self.rows)
            self.cache.place(prompt.prefix, first, len(entering))
            self.rows += entering
            if self.seen is not None:
                self.seen[first : len(self.rows)] = False
                self.seen[first : len(self.rows), list(set(entering[0].request.prompt))] = True
            self._sample(prompt.logits.expand(len(entering), -1), first)
            free = self.cache.rows - len(self.rows)

    def _prefill(self, free: int) -> None:
        # as many waiting prompts as the free slots and one pass's budget take, one at least
        budget = _PREFILL_TOKENS.get(self.cache.layout.device.type, _PREFILL_TOKENS_ELSEWHERE)
        groups, rows, longest = [self.waiting.popleft()], 0, 0
        rows, longest = len(groups[0]), len(groups[0][0].prompt)
        while self.waiting and rows < free:
            longest = max(longest, len(self.waiting[0][0].prompt))
            if longest * (len(groups) + 1) > budget:
                break
            groups.append(self.waiting.popleft())
            rows += len(groups[-1])
        started = time.perf_counter()
        texts = [group[0].prompt for group in groups]
        logits, prefixes = self.target.prefill(texts)
        self.prompts += [_Prompt(*parts) for parts in zip(groups, prefixes, logits, strict=True)]
        self.stats.prompt_tokens += sum(len(text) for text in texts)
        self.stats.prefill_s += time.perf_counter() - started

    def step(self) -> None:
        """One pass over the live rows, one token each."""
        started = time.perf_counter()
        device = self.cache.layout.device
        lengths = [row.length for row in self.rows]
        last = torch.tensor([row.tokens[-1] for row in self.rows], device=device)[:, None]
        positions = torch.tensor(lengths, device=device)[:, None]
        logits = self.target.decode(last, positions, self.cache, max(lengths) + 1)[:, 0]
        self.stats.passes += 1
        self.stats.live_rows.append(len(self.rows))
        self.stats.decode_s += time.perf_counter() - started
        self._sample(logits, 0)

    def _sample(self, logits: Tensor, first: int) -> None:
        """Draw the next token of the rows from `first` on, whose logits are (count, vocab), and retire who is done."""
        started = time.perf_counter()
        rows = self.rows[first:]
        drawn = logits
        if self.seen is not None:
            drawn = penalise(logits, self.seen[first : len(self.rows)], self.sampling.repetition_penalty)
        positions = torch.tensor([len(row.request.prompt) + len(row.tokens) for row in rows], device=logits.device)
        uids = torch.tensor([row.request.signed_uid for row in rows], device=logits.device)
        samples = sample(drawn, self.sampling, row_keys(self.seed, uids, positions))
        columns = [samples.token_ids.double(), samples.logprobs.double()]
        if samples.sampling_logprobs is not None:
            columns.append(samples.sampling_logprobs.double())
        if self.seen is not None:
            # the law drawn from is the penalised one; the policy's own log-prob, which training compares, is not
            columns[1:] = [
                logprobs_of(logits, samples.token_ids, self.sampling.temperature).double(),
                columns[-1],
            ]
            index = torch.arange(first, len(self.rows), device=logits.device)
            self.seen[index, samples.token_ids] = True
        packed = torch.stack(columns)  # ids are exact in float64, so one copy to the host serves all
        if not bool(packed.isfinite().all()):
            raise FloatingPointError(
                f"the model's logits are not finite after {self.stats.completion_tokens} tokens: its weights have "
                "diverged or the input overflowed its precision; go back to the last good checkpoint."
            )
        host = packed.tolist()
        for i, row in enumerate(rows):
            row.tokens.append(int(host[0][i]))
            row.logprobs.append(host[1][i])
            if len(host) > 2:
                row.sampling_logprobs.append(host[2][i])
        self.stats.completion_tokens += len(rows)
        self.stats.sampling_s += time.perf_counter() - started
        self._retire()

    def _retire(self) -> None:
        for slot in reversed(range(len(self.rows))):
            row = self.rows[slot]
            stopped = row.tokens[-1] in self.stops
            if not stopped and len(row.tokens) < row.request.max_new_tokens:
                continue
            mover = self.rows.pop()
            if slot < len(self.rows):
                self.cache.move_row(len(self.rows), slot, mover.length)
                self.rows[slot] = mover
                if self.seen is not None:
                    self.seen[slot] = self.seen[len(self.rows)]
            completion = Completion(
                index=row.request.index,
                uid=row.request.uid,
                token_ids=row.tokens,
                logprobs=row.logprobs,
                sampling_logprobs=row.sampling_logprobs or None,
                finish_reason="stop" if stopped else "length",
                rounds=len(row.tokens) - 1,
                drafted=0,
                accepted=0,
            )
            self.done.append(completion)
            if self.notify is not None:
                self.notify(completion)
