"""Row-wise rewards scored in worker processes, from the moment that a response ends, while others are still decoded.

TRL's own call then collects the values, so weights, gathering, None and metrics stay TRL's. A score that was made early
counts only if TRL asks for the same text and row in the end; everything else is scored when TRL asks. This file decides
when and where a row is scored, never what it scores.
"""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo.guarded import GuardedCallError
from fastgrpo.grpo.rewards import Row, completion_text, row_pairs, settle
from fastgrpo.grpo.row_scorer import Address, address_of
from fastgrpo.grpo.worker_pool import CannotLoadError, Outcome, WorkerPool, default_workers

_OWN_COLUMNS = ("prompt", "completion", "completion_ids")  # of a dataset; TRL passes them under its own names or not

Decoder = Callable[[Sequence[int], Sequence[int]], Any]  # ids of prompt and response -> the response as TRL gives it


class Scoring:
    """The reward functions of a trainer, those that can be in workers, and the generation whose rows they score.

    `reward_funcs` are to be called by TRL in place of the given ones; all that are not row-wise, or cannot be sent, are
    the given ones. workers: None for `default_workers`, 0 to score everything in process. say: where a person reads it.
    """

    def __init__(
        self,
        reward_funcs: Sequence[Any],
        *,
        workers: int | None,
        time_limit_s: float,
        retries: int,
        say: Callable[[str], None],
    ) -> None:
        self.pool = WorkerPool(
            default_workers() if workers is None else workers, time_limit_s=time_limit_s, retries=retries
        )
        self.reward_funcs = list(reward_funcs)
        self._pooled: list[PooledReward] = []
        for position, function in enumerate(reward_funcs):
            address = _sendable(function, say) if workers != 0 else None
            if address is not None:
                self._pooled.append(PooledReward(function, address, self.pool, say))
                self.reward_funcs[position] = self._pooled[-1]
        self._generation: tuple[Sequence[Mapping[str, Any]], Decoder] | None = None

    def begin(self, inputs: Sequence[Mapping[str, Any]], decoder: Decoder | None) -> None:
        """A generation for these dataset rows begins; without a decoder its rows are scored when TRL asks for them."""
        self._generation = (inputs, decoder) if self._pooled and decoder is not None else None

    def listener(self, prompt_ids: Sequence[Sequence[int]]) -> Callable[[Any], None] | None:
        """For the engine's finished responses, of the generation's first turn; None where nothing is scored early."""
        if self._generation is None:
            return None
        inputs, decode = self._generation
        self._generation = None  # later turns continue rows whose messages TRL alone knows
        columns = [key for key in inputs[0] if key not in _OWN_COLUMNS]

        def finished(completion: Any) -> None:
            example = inputs[completion.index]
            message = decode(prompt_ids[completion.index], completion.token_ids)
            if not isinstance(message, str) and message[-1].get("tool_calls"):
                return  # not its last word
            row = {"prompts": example["prompt"], "completion_ids": completion.token_ids}
            row |= {key: example[key] for key in columns}
            for function in self._pooled:
                function.score_early(completion_text(message), row)

        return finished

    def end(self, log_metric: Callable[[str, float], None] | None = None) -> None:
        """Drop what TRL did not ask for. Log seconds of scoring that nobody waited for, seconds that TRL's call did
        wait, and how many processes ended or were ended."""
        tallies = [function.finish() for function in self._pooled]
        self._generation = None
        if tallies and log_metric is not None:
            log_metric("rewards/overlapped_s", max(0.0, sum(t.seconds - t.waited_s for t in tallies)))
            log_metric("rewards/waited_s", sum(t.waited_s for t in tallies))
            log_metric("rewards/workers_ended", float(sum(t.ended for t in tallies)))

    def close(self) -> None:
        self.pool.close()


@dataclass
class _Tally:
    """Of one function in one generation: what its rows cost the workers, and how long TRL's call waited for them."""

    seconds: float = 0.0
    waited_s: float = 0.0
    ended: int = 0


class PooledReward:
    """A row-wise reward in TRL's protocol whose rows are scored by a pool. Values, failures and name are the reward's.

    What raises in a worker is scored again in process, where it raises with its own traceback.
    """

    def __init__(self, reward: Any, address: Address, pool: WorkerPool, say: Callable[[str], None]) -> None:
        functools.update_wrapper(self, reward)
        self.reward = reward
        self._address: Address | None = address
        self._pool, self._say = pool, say
        self._early: defaultdict[str, list[tuple[Row, Future[Outcome]]]] = defaultdict(list)
        self._tally = _Tally()

    def score_early(self, text: str, row: Row) -> None:
        outcome = self._submit(text, row)
        if outcome is not None:
            self._early[text].append((row, outcome))

    def __call__(
        self, completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        pairs = row_pairs(completions, columns)
        outcomes = [self._claim(text, row) or self._submit(text, row) for text, row in pairs]  # all, then wait
        scores = [
            functools.partial(self._value, outcome, text, row)
            for outcome, (text, row) in zip(outcomes, pairs, strict=True)
        ]
        return settle(self.reward, scores, log_metric)

    def finish(self) -> _Tally:
        for entries in self._early.values():
            for _, outcome in entries:
                outcome.cancel()
        self._early.clear()
        tally, self._tally = self._tally, _Tally()
        return tally

    def _submit(self, text: str, row: Row) -> Future[Outcome] | None:
        if self._address is None:
            return None
        encoded = _as_json(row)
        if encoded is None:
            self._say(
                f"Rows for the reward {self.reward.__name__} hold values that JSON does not carry, so they are scored "
                "in the training process, one batch at a time."
            )
            return None
        return self._pool.submit(self._address, text, encoded)

    def _claim(self, text: str, row: Row) -> Future[Outcome] | None:
        """The early score of this very row, once: rows that are equal have one each."""
        entries = self._early.get(text, [])
        for position, (early_row, outcome) in enumerate(entries):
            if early_row == row:
                del entries[position]
                return outcome
        return None

    def _value(self, pending: Future[Outcome] | None, text: str, row: Row) -> float | None:
        if pending is None:
            return self.reward.score_row(text, row)
        began = time.perf_counter()
        try:
            outcome = pending.result()
        except CannotLoadError as error:
            if self._address is not None:
                self._address = None
                self._say(
                    f"The reward {self.reward.__name__} is scored in the training process, one batch at a time: a "
                    f"scoring process cannot load it ({error})."
                )
            return self.reward.score_row(text, row)
        except GuardedCallError as error:
            value = self.reward.score_row(text, row)
            self._say(f"The reward {self.reward.__name__} raised {error} in a scoring process, and not in this one.")
            return value
        finally:
            self._tally.waited_s += time.perf_counter() - began
        self._tally.seconds += outcome.seconds
        self._tally.ended += outcome.ended
        if outcome.ended:
            name = self.reward.__name__
            self._say(
                f"A process that scored the reward {name} died or was hung, and was replaced. rewards/workers_ended "
                f"counts them, rewards/{name}/failures the rows that score 0 for it."
            )
        if outcome.failure is not None:
            raise GuardedCallError(outcome.failure)  # scores 0
        return outcome.value


def pool_rewards(trainer: Any, args: FastGRPOConfig, say: Callable[[str], None]) -> Scoring:
    """Have the row-wise ones among a trainer's `reward_funcs` scored by workers, as many and as long as `args` says."""
    scoring = Scoring(
        trainer.reward_funcs,
        workers=args.reward_workers,
        time_limit_s=args.reward_timeout,
        retries=args.reward_retries,
        say=say,
    )
    trainer.reward_funcs = scoring.reward_funcs
    return scoring


def first_turn_decoder(trainer: Any, inputs: Sequence[Mapping[str, Any]]) -> Decoder | None:
    """How TRL turns ids into what rewards get, as far as it is known when a response ends; None where it is not.

    A rollout function may add turns and columns, an environment changes prompts and has a state of its own.
    """
    if trainer.rollout_func is not None or trainer.environment_factories is not None:
        return None
    tokenizer, chat = trainer._tokenizer, is_conversational({"prompt": inputs[0]["prompt"]})
    parses = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))

    def decode(prompt_ids: Sequence[int], ids: Sequence[int]) -> Any:
        if chat and parses:
            return [parse_response(tokenizer, list(ids), prefix=list(prompt_ids), tools=trainer.tools)]
        (text,) = trainer.processing_class.batch_decode([ids], skip_special_tokens=True)
        return [{"role": "assistant", "content": text}] if chat else text

    return decode


def _sendable(function: Any, say: Callable[[str], None]) -> Address | None:
    """The address of a row-wise function that is to be scored in workers; what cannot be sent is said."""
    if not hasattr(function, "score_row") or function.in_process:
        return None
    address = address_of(function)
    if address is None:
        say(
            f"The reward {function.__name__} is scored in the training process, one batch at a time: another process "
            "cannot import it, because it is a lambda, defined inside a function, or in the script that is run. Put it "
            "into a module of its own to have rows scored while others are decoded."
        )
    return address


def _as_json(row: Row) -> str | None:
    """The row as text; None where another process would read something else from it."""
    try:
        encoded = json.dumps(row)
        return encoded if json.loads(encoded) == row else None
    except (TypeError, ValueError):
        return None
