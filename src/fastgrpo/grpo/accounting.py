"""Where a run's time went: seconds and tokens by phase, per optimizer step and in total, and the summary of a run.

Counts and divides only: it draws no conclusions, reads no model and decides nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

# A training step is these four and "other" (tokenising, padding, advantages). "update" is forward, backward, optimizer.
PHASES = ("rollout", "reward", "logprob", "update")
_COUNTS = ("rollout_tokens", "train_tokens")
_KEYS = (*PHASES, *_COUNTS, "step", "draft")  # a step's numbers; drafting is a part of the rollout


@dataclass
class Account:
    """Seconds by phase and counts of tokens. One per trainer; `device` is waited for at every reading of the clock."""

    device: torch.device
    evaluating: bool = False
    steps: int = 0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_KEYS, 0.0))
    evaluation_s: float = 0.0
    rewards: list[float] = field(default_factory=list)  # mean reward of each generation of training
    _started: float = field(default_factory=time.perf_counter)
    _step_began: float | None = None
    _prepare_s: float = 0.0
    _phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _rollout_tokens: int = 0
    _draft_s: float = 0.0
    _train_tokens: torch.Tensor | int = 0

    def now(self) -> float:
        if self.device.type == "cuda":
            # kernels run behind the host: without this a phase would pay the last one's bill
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside as phase `name` of the training step; in an evaluation they are not counted."""
        began = self.now()
        try:
            yield
        finally:
            if not self.evaluating:
                self._phase_s[name] += self.now() - began

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Everything that is not the update: what makes a batch out of prompts."""
        began = self.now()
        try:
            yield
        finally:
            if not self.evaluating:
                self._prepare_s += self.now() - began

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        began, self.evaluating = self.now(), True
        try:
            yield
        finally:
            self.evaluating = False
            self.evaluation_s += self.now() - began

    def add_rollout(self, tokens: int) -> None:
        if not self.evaluating:
            self._rollout_tokens += tokens

    def add_drafting(self, seconds: float) -> None:
        """Seconds that the phase "rollout" counts too."""
        if not self.evaluating:
            self._draft_s += seconds

    def add_trained(self, tokens: torch.Tensor) -> None:
        """`tokens`: a scalar on the device; it is read at the end of the step, not here."""
        if not self.evaluating:
            self._train_tokens = self._train_tokens + tokens

    def begin_step(self) -> None:
        self._step_began = self.now()

    def end_step(self) -> list[float]:
        """Close the step and return its numbers in this process, in the order of _KEYS."""
        step_s = self.now() - self._step_began if self._step_began is not None else 0.0
        self._phase_s["update"] = max(0.0, step_s - self._prepare_s)
        counts = (self._rollout_tokens, float(self._train_tokens))
        numbers = [*(self._phase_s[name] for name in PHASES), *counts, step_s, self._draft_s]
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        self._prepare_s, self._draft_s, self._rollout_tokens, self._train_tokens = 0.0, 0.0, 0, 0
        return numbers

    def book(self, per_rank: torch.Tensor) -> dict[str, float]:
        """Add one step's numbers, (ranks, 8) as `end_step` returns them, to the totals and return its metrics.

        Seconds are means over ranks, tokens sums; a throughput is all tokens over the slowest rank's seconds.
        """
        by_key = dict(zip(_KEYS, per_rank.double().unbind(dim=1), strict=True))
        step = {key: (ranks.sum() if key in _COUNTS else ranks.mean()).item() for key, ranks in by_key.items()}
        for key, value in step.items():
            self.totals[key] += value
        self.steps += 1
        metrics = {f"time/{name}": step[name] for name in PHASES}
        if self.totals["draft"]:
            metrics["time/draft"] = step["draft"]
        for name, tokens, phase in (("rollout", "rollout_tokens", "rollout"), ("train", "train_tokens", "update")):
            slowest = by_key[phase].max().item()
            if slowest > 0 and step[tokens] > 0:
                metrics[f"throughput/{name}_tokens_per_s"] = step[tokens] / slowest
        return metrics

    def summary(self) -> dict[str, Any]:
        """Totals, shares of the training steps' time, and the ceiling that Amdahl's law sets for faster sampling."""
        steps_s = self.totals["step"]
        seconds = {name: self.totals[name] for name in PHASES}
        seconds["other"] = max(0.0, steps_s - sum(seconds.values()))
        shares = {name: value / steps_s if steps_s else 0.0 for name, value in seconds.items()}
        sampling = shares["rollout"]
        return {
            "steps": self.steps,
            "generations": len(self.rewards),
            "tokens": {name.removesuffix("_tokens"): int(self.totals[name]) for name in _COUNTS},
            "seconds": {
                **seconds,
                "steps": steps_s,
                "evaluation": self.evaluation_s,
                "run": self.now() - self._started,
            },
            "shares": shares,
            "share_of_sampling": sampling,
            "ceiling_of_faster_sampling": 1 / (1 - sampling) if sampling < 1 else None,
            "throughput": {
                "rollout_tokens_per_s": _rate(self.totals["rollout_tokens"], self.totals["rollout"]),
                "train_tokens_per_s": _rate(self.totals["train_tokens"], self.totals["update"]),
            },
            "reward": {
                "first": self.rewards[0] if self.rewards else None,
                "last": self.rewards[-1] if self.rewards else None,
                "by_generation": self.rewards,
            },
        }


class StepClock(TrainerCallback):
    """Calls `begin` and `end` around every optimizer step; Trainer has no method to override for that."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._end()


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write beside, then rename: a full disk or a kill leaves the previous file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
