"""The engine: prompts in, completions and statistics out. What happens in between is `batch.py`'s.

Tokens of a row depend on (weights, prompt, seed, sequence uid) alone: not on its neighbours, on the number of slots, on
who finished when, or on what was drafted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from fastgrpo.models.cache import RaggedCache
from fastgrpo.models.target import Target, open_target
from fastgrpo.speculation.batch import LiveBatch, draft_slots
from fastgrpo.speculation.memory import plan_slots
from fastgrpo.speculation.policy import Policy, make_policy
from fastgrpo.speculation.proposers import Proposer
from fastgrpo.speculation.requests import Completion, Progress, Rollout, RolloutStats, make_requests, whole_number
from fastgrpo.speculation.sampling import SamplingParams

_T = TypeVar("_T")


class Engine:
    """Samples completions from a Hugging Face causal LM, plain or under PEFT.

    slots: rows that decode at once (default: all of them, as far as memory goes). dtype: precision of the passes
    (default: the model's). proposer: where drafts come from; None decodes plainly. policy: how much to draft for the
    rows that are live (default: `paper`, where there is a proposer). clock: what phases are timed by, in seconds; one
    that waits for an accelerator counts its work in the phase that asked for it. One engine serves one model and runs
    one rollout at a time; weights are read anew at every `generate`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int | None = None,
        dtype: torch.dtype | None = None,
        proposer: Proposer | None = None,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.slots = None if slots is None else whole_number("slots", slots, at_least=1)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype is {dtype!r}, but must be a torch.dtype such as torch.float32, or None.")
        self.target: Target = open_target(model, dtype=dtype)
        self.proposer, self.clock = proposer, clock
        self._running = threading.Lock()
        self.policy = policy or make_policy("paper" if proposer else "off")
        ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
        self.stop_token_ids = _stops("generation_config.eos_token_id", ids)

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
        feature_layers: Sequence[int] = (),
        on_completion: Callable[[Completion], None] | None = None,
        on_round: Callable[[Progress], None] | None = None,
    ) -> Rollout:
        """Sample one completion per row; rows are the prompts, each `group_size` times in a row.

        prompts: token ids, at least one each; consecutive equal prompts are run once. max_new_tokens: for all rows, or
        one number per row. stop_token_ids: a row ends with the first of these, which it keeps (default: every
        eos_token_id of the model's generation_config). seed, uids: the noise of row r is a function of (seed, its
        uid); uids default to first_uid + r. feature_layers: ascending indices into transformers' hidden_states, the
        last of them what the final norm puts out; every completion then has the target's features there, at the price
        of 2 * len(feature_layers) * hidden numbers a token. on_completion is called as each row ends, on_round after
        each pass. Returns completions in row order. Raises ValueError for prompts, limits or layers that cannot be,
        FloatingPointError when the model's logits are not finite, RuntimeError while another call runs.
        """
        started, seed = self.clock(), whole_number("seed", seed)
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling is {sampling!r}, but must be a SamplingParams: SamplingParams() has defaults.")
        requests = make_requests(
            prompts, group_size, max_new_tokens, uids, first_uid, self.target.vocab_size, self.target.longest
        )
        stops = self.stop_token_ids if stop_token_ids is None else _stops("stop_token_ids", stop_token_ids)
        room = self._draft_room(min(self.slots or len(requests), len(requests)))
        capacity = max(len(request.prompt) + request.max_new_tokens for request in requests) + room
        recorded = self._layers(feature_layers)
        kept = len(recorded) * self.target.hidden_size * self.target.layout.dtype.itemsize
        slots = plan_slots(self.target.layout, self.slots or len(requests), len(requests), capacity, kept)
        on_completion, on_round = _in_the_callers_mode(on_completion), _in_the_callers_mode(on_round)
        proposer = self.proposer if room else None  # a policy that never drafts has nobody fed
        taps = tuple(sorted({*recorded, *(proposer.taps if proposer else ())}))
        with self._alone(), self.target.session(taps):
            stats = RolloutStats(setup_s=self.clock() - started)
            batch = LiveBatch(self.target, RaggedCache(self.target.layout, slots, capacity), stats, self.clock)
            batch.law, batch.stops, batch.seed, batch.notify = sampling, stops, seed, on_completion
            batch.taps = taps
            if recorded:
                batch.record(recorded)
            batch.speculate(proposer, self.policy, room)
            batch.enqueue(requests)
            while batch.busy:
                batch.admit()
                batch.round()
                stats.total_s = self.clock() - started
                if on_round is not None:
                    done, tokens = len(batch.done), stats.completion_tokens
                    on_round(Progress(done, len(requests), tokens, stats.total_s, stats.accept_length))
        return Rollout(sorted(batch.done, key=lambda completion: completion.index), stats)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # target, proposer and policy keep the state of the rollout that runs
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "generate was called while this engine runs another rollout, from another thread or from a callback, "
                "and one engine runs one rollout at a time: wait for it, or make another Engine for this model."
            )
        try:
            yield
        finally:
            self._running.release()

    def _layers(self, wanted: Sequence[int]) -> tuple[int, ...]:
        if not hasattr(wanted, "__iter__"):
            raise ValueError(f"feature_layers is {wanted!r}, but must be a list of layers: () for none.")
        last = len(self.target.layout.heads)
        layers = tuple(whole_number("a layer of feature_layers", layer, at_least=0) for layer in wanted)
        if list(layers) != sorted(set(layers)) or max(layers, default=0) > last:
            raise ValueError(
                f"feature_layers is {list(layers)}, but must be ascending, distinct indices into the model's "
                f"hidden_states, 0 to {last}: the last is what the final norm puts out."
            )
        return layers

    def _draft_room(self, slots: int) -> int:
        """Slots behind the text that the largest draft takes, the draft's own beams and padding included."""
        if self.proposer is None:
            return 0
        shapes = [self.policy.choose(rows) for rows in range(1, slots + 1)]
        return max((draft_slots(shape) for shape in shapes if shape), default=0)


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
