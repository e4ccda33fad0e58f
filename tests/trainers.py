"""Trainers over tiny models, and what they asked of the engine: shared by the tests of the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo.trainer import FastGRPOTrainer
from fastgrpo.models.draft import DraftModel
from fastgrpo.speculation.requests import Completion, Rollout, RolloutStats

PROMPTS = ["abc", "hello there", "xy 12", "q", "Zz?", "one two", "m", "9 8 7"]


def distinct_characters(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def make_trainer(
    folder: Path, model: str | PreTrainedModel = "qwen2", *, peft: Any = None, **settings: Any
) -> FastGRPOTrainer:
    """A trainer over a tiny model: 4 rows (1 prompt) per step unless told otherwise."""
    apart = ("rollout_func", "reward_funcs", "train_dataset", "eval_dataset", "draft_model")
    others = {name: settings.pop(name) for name in apart if name in settings}
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
        **{"reward_funcs": distinct_characters, "train_dataset": Dataset.from_dict({"prompt": PROMPTS}), **others},
        args=FastGRPOConfig(str(folder), **{**defaults, **settings}),
        processing_class=tiny_tokenizer(),
        peft_config=peft,
    )


def olmo() -> PreTrainedModel:
    """A family without a lean path, so that the engine runs the model's own forward; the same at every call."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", **sizes, **heads, **ids))
    for weight in model.parameters():
        weight.data.mul_(20 if weight.dim() == 2 else 1)  # from nearly uniform to a law that depends on the context
    return model


def draft_for(model: str | PreTrainedModel) -> DraftModel:
    """An untrained draft, the same for the same shape of model: now and then it is right, because noise is shared."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return DraftModel.for_target(tiny_model(model) if isinstance(model, str) else model)


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
