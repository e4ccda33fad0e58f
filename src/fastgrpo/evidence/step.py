"""The step bench: one GRPO step by FastGRPOTrainer and by TRL's own GRPOTrainer, by phase, from the same weights.

Both get the same settings, prompts, reward and precision, and are timed by the same account at the same seams. Each
measurement is a fresh trainer on a fresh copy of the model, one optimizer step, responses with natural stops.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from fastgrpo.config import FastGRPOConfig
from fastgrpo.evidence.bench import OURS
from fastgrpo.evidence.machine import Report, aligned
from fastgrpo.evidence.timing import Spread, alternate
from fastgrpo.evidence.word_problems import PROBLEMS, question
from fastgrpo.evidence.workload import as_run
from fastgrpo.grpo.accounting import Account, StepClock
from fastgrpo.grpo.rewards import number_reward
from fastgrpo.grpo.trainer import FastGRPOTrainer

TRL = "trl"
_SECONDS = ("rollout", "reward", "logprob", "update", "other")


@dataclass(frozen=True)
class StepSettings:
    """One step of prompts_per_step x group_size responses of at most new_tokens, in micro-batches of `batch`.

    dtype: of the weights and of everything else; float32 is what TRL loads.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    group_prompts: int = 8
    group_size: int = 8
    new_tokens: int = 256
    batch: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    gradient_checkpointing: bool = True
    repeats: int = 1
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rows = self.group_prompts * self.group_size
        if self.batch < 1 or rows % self.batch:
            raise ValueError(
                f"{self.group_prompts} prompts x {self.group_size} responses are {rows} rows, and micro-batches of "
                f"{self.batch} do not divide them: choose another --batch."
            )


class _ForwardClock:
    """Seconds of the forward passes inside the update, which both trainers make in one method."""

    forward_s = 0.0

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if torch.is_grad_enabled():
            self.forward_s += time.perf_counter() - started
        return result


class TimedFastGRPOTrainer(_ForwardClock, FastGRPOTrainer):
    def seconds(self) -> dict[str, float]:
        return self.summary()["seconds"]


class TimedGRPOTrainer(_ForwardClock, GRPOTrainer):
    """TRL's trainer as it is, with an account at the seams where FastGRPOTrainer has its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.account = Account(self.accelerator.device)
        self.add_callback(StepClock(self.account.begin_step, self._end_step))

    def _end_step(self) -> None:
        self.account.book(torch.tensor([self.account.end_step()]))

    def seconds(self) -> dict[str, float]:
        return self.account.summary()["seconds"]

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self.account.preparing():
            return super()._prepare_inputs(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.account.phase("rollout"):
            return super()._generate_single_turn(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.account.phase("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self.account.phase("logprob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@dataclass(frozen=True)
class Step:
    """One measured optimizer step. seconds: by phase, and `steps` for the whole; lengths in tokens."""

    seconds: dict[str, float]
    forward_s: float
    mean_length: float
    max_length: float


def step_bench(
    settings: StepSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], None],
) -> Report:
    """Measure both trainers in turn, after a tiny step of each, with a `note` of each step as it is done."""
    tiny = replace(settings, group_prompts=1, group_size=2, batch=2, new_tokens=2)
    for name in (OURS, TRL):
        one_step(name, tiny, model, tokenizer)

    def side(name: str) -> Callable[[int], Step]:
        def run(repeat: int) -> Step:
            step = one_step(name, replace(settings, seed=settings.seed + repeat), model, tokenizer)
            note(f"{name}: {step.seconds['steps']:.1f} s, of which sampling {step.seconds['rollout']:.1f} s")
            return step

        return run

    steps = alternate({name: side(name) for name in (OURS, TRL)}, settings.repeats)
    results = [_result(name, settings, steps[name]) for name in (OURS, TRL)]
    for part in ("step", "rollout"):
        results[0][f"{part}_ratio"] = results[1][f"{part}_s"] / results[0][f"{part}_s"]
    return Report("step", as_run(settings, model), render(results), results)


def one_step(name: str, settings: StepSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Step:
    """One optimizer step of the trainer called `name`, on a copy of `model`."""
    ours = name == OURS
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(settings, folder)
        trainer = (TimedFastGRPOTrainer if ours else TimedGRPOTrainer)(
            model=copy.deepcopy(model),
            reward_funcs=number_reward,
            args=FastGRPOConfig(**arguments) if ours else GRPOConfig(**arguments),
            train_dataset=_dataset(settings, tokenizer),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)  # standard output is the report's
        trainer.train()
        history = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
        step = Step(
            trainer.seconds(),
            trainer.forward_s,
            history["completions/mean_length"],
            history["completions/max_length"],
        )
    del trainer
    gc.collect()  # trainers hold themselves in circles, and with them the copy of the model
    return step


def _arguments(settings: StepSettings, folder: str) -> dict[str, Any]:
    law = {"temperature": settings.temperature, "top_p": settings.top_p}
    rows = settings.group_prompts * settings.group_size
    return {**one_step_arguments(settings, folder, rows, settings.batch), **law}


def one_step_arguments(settings: Any, folder: str, rows: int, batch: int) -> dict[str, Any]:
    """What either trainer is told to make one silent optimizer step of `rows` responses in micro-batches of `batch`.

    settings: any bench's that has group_size, new_tokens, gradient_checkpointing and seed.
    """
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": rows // batch,
        "num_generations": settings.group_size,
        "max_completion_length": settings.new_tokens,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,  # the weights' own precision, for both
        "use_cpu": not torch.cuda.is_available(),
        "seed": settings.seed,
    }


def _dataset(settings: StepSettings, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    rows = []
    for i in range(settings.group_prompts):
        text = question(i)
        prompt: Any = [{"role": "user", "content": text}] if tokenizer.chat_template else text
        rows.append({"prompt": prompt, "answer": PROBLEMS[i % len(PROBLEMS)][1]})
    return Dataset.from_list(rows)


def _result(name: str, settings: StepSettings, steps: Sequence[Step]) -> dict[str, Any]:
    rows = settings.group_prompts * settings.group_size
    rate = Spread.of([rows * step.mean_length / step.seconds["rollout"] for step in steps])
    seconds = {f"{key}_s": Spread.of([step.seconds[key] for step in steps]).median for key in _SECONDS}
    whole = Spread.of([step.seconds["steps"] for step in steps])
    share = Spread.of([step.seconds["rollout"] / step.seconds["steps"] for step in steps]).median
    busy = sum(step.mean_length for step in steps) / sum(step.max_length for step in steps)
    return {
        "engine": name,
        "policy": "off",
        "rows": rows,
        "tokens_per_s": rate.median,  # of the sampling
        # per row in a pass, so that 1 is what plain decoding gives; with TRL finished rows stay and give 0
        "tokens_per_target_pass": 1.0 if name == OURS else busy,
        "spread": [rate.low, rate.high],
        "repeats": len(steps),
        **seconds,
        "forward_s": Spread.of([step.forward_s for step in steps]).median,  # a part of the update
        "step_s": whole.median,
        "step_spread": [whole.low, whole.high],
        "share_of_sampling": share,
        "ceiling_of_faster_sampling": 1 / (1 - share) if share < 1 else None,
        "mean_length": sum(step.mean_length for step in steps) / len(steps),
    }


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table in seconds, and what it says."""
    header = ("engine", "step", "sampling", "rewards", "log-probs", "update", "(its forward)", "other",
              "sampling share", "sampling tokens/s", "mean length")  # fmt: skip
    keys = ("engine", "step_s", "rollout_s", "reward_s", "logprob_s", "update_s", "forward_s", "other_s",
            "share_of_sampling", "tokens_per_s", "mean_length")  # fmt: skip
    ours = results[0]
    return "\n".join(
        [
            aligned(header, [[r[key] for key in keys] for r in results]),
            f"A step takes 1/{ours['step_ratio']:.2f} of TRL's time, its sampling 1/{ours['rollout_ratio']:.2f}. "
            "Sampling that cost nothing would make ours "
            f"{ours['ceiling_of_faster_sampling'] or float('inf'):.2f} times as fast again.",
        ]
    )
