"""Trainers over tiny models, and what they asked of the engine: shared by the tests of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo.trainer import FastGRPOTrainer
from fastgrpo.speculation.requests import Completion, Rollout, RolloutStats

PROMPTS = ["abc", "hello there", "xy 12", "q", "Zz?", "one two", "m", "9 8 7"]


def distinct_characters(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def make_trainer(
    folder: Path, model: str | PreTrainedModel = "qwen2", *, peft: Any = None, **settings: Any
) -> FastGRPOTrainer:
    """A trainer over a tiny model: 4 rows (1 prompt) per step unless told otherwise."""
    others = {name: settings.pop(name) for name in ("rollout_func", "reward_funcs", "eval_dataset") if name in settings}
    defaults = {
        "use_cpu": True,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }
    return FastGRPOTrainer(
        tiny_model(model) if isinstance(model, str) else model,
        **{"reward_funcs": distinct_characters, **others},
        args=FastGRPOConfig(str(folder), **{**defaults, **settings}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer(),
        peft_config=peft,
    )


def fake_engine(trainer: FastGRPOTrainer) -> None:
    """Let rollouts be one token each, for tests that ask who is sampled and not what."""

    def rollout(prompts: list[list[int]], *, uids: list[int], limits: list[int]) -> Rollout:
        done = [Completion(i, uid, [5 + i % 2], [-1.0], None, "length", 0, 0, 0) for i, uid in enumerate(uids)]
        return Rollout(done, RolloutStats(completion_tokens=len(done)))

    trainer._rollout = rollout  # type: ignore[method-assign]


@dataclass
class Turn:
    prompts: list[list[int]]
    uids: list[int]
    completions: list[list[int]]


def record_turns(trainer: FastGRPOTrainer) -> list[Turn]:
    """Every call that the trainer makes to its engine from here on."""
    turns: list[Turn] = []
    original = trainer._rollout

    def recording(prompts: list[list[int]], *, uids: list[int], limits: list[int]) -> Any:
        rollout = original(prompts, uids=uids, limits=limits)
        turns.append(Turn(prompts, uids, [list(completion.token_ids) for completion in rollout.completions]))
        return rollout

    trainer._rollout = recording  # type: ignore[method-assign]
    return turns


def rows(trainer: FastGRPOTrainer, n: int = 4) -> list[dict[str, str]]:
    """A generation batch as TRL's sampler gives it: each prompt num_generations times."""
    group = trainer.num_generations
    return [{"prompt": PROMPTS[i // group]} for i in range(n)]
