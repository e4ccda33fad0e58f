"""What a person hands to FastGRPOTrainer, checked where TRL would fail later, elsewhere, or not at all.

Names that only FastGRPO knows, data sets, prompts that leave no room, values of reward functions; and what to say when
the weights diverge. This file changes nothing that TRL does with sound input, and imports no trainer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.utils import is_async_callable

from fastgrpo.grpo.data import PromptSet
from fastgrpo.grpo.rewards import REWARDS, load_reward
from fastgrpo.grpo.rollouts import fit_to_context
from fastgrpo.models.loading import BUILT_IN


def check_inputs(model: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse what `fastgrpo` has a word for and TRL has not. Raises ValueError (model) or TypeError (data sets)."""
    if isinstance(model, str) and (model.lower() in BUILT_IN or model.lower().endswith(".gguf")):
        raise ValueError(
            f"model={model!r} is a name that load_model knows, and TRL would look for it on the hub: "
            f"model, tokenizer = fastgrpo.load_model({model!r}), then pass model=model, processing_class=tokenizer."
        )
    for name, data, part in (("train_dataset", train_dataset, "train"), ("eval_dataset", eval_dataset, "eval")):
        if isinstance(data, PromptSet):
            raise TypeError(f"{name} is a PromptSet, which holds two data sets: pass {name}=prompts.{part}.")


def named_rewards(reward_funcs: Any) -> Any:
    """`reward_funcs` as TRL takes them, with names as the command line has them made into functions.

    A text with a slash, or that names a folder, stays the reward model that it is to TRL. Raises what load_reward does.
    """
    if isinstance(reward_funcs, list):
        return [named_rewards(one) for one in reward_funcs]
    if not isinstance(reward_funcs, str):
        return reward_funcs
    is_model = reward_funcs not in REWARDS and ("/" in reward_funcs or Path(reward_funcs).is_dir())
    return reward_funcs if is_model else load_reward(reward_funcs)


def guard_rewards(trainer: Any) -> None:
    """From here on, TRL calls the trainer's reward functions as `checked_rewards` has them."""
    trainer.reward_funcs = checked_rewards(trainer.reward_funcs, trainer.reward_func_names)


def checked_rewards(reward_funcs: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The same functions, whose errors name them and whose values must be finite; reward models are left alone."""
    pairs = zip(reward_funcs, names, strict=True)
    return [one if isinstance(one, nn.Module) else _checked(one, name) for one, name in pairs]


def _checked(function: Any, name: str) -> Any:
    if is_async_callable(function):

        @functools.wraps(function)
        async def reward(*args: Any, **kwargs: Any) -> Any:
            with _naming(name):
                return _finite(name, await function(*args, **kwargs))
    else:

        @functools.wraps(function)
        def reward(*args: Any, **kwargs: Any) -> Any:
            with _naming(name):
                return _finite(name, function(*args, **kwargs))

    return reward


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"This came out of the reward function {name!r}.")
        raise


def _finite(name: str, rewards: Any) -> Any:
    """The rewards, each None (does not apply) or a finite number."""
    if isinstance(rewards, str | Mapping) or not hasattr(rewards, "__iter__"):
        raise ValueError(f"the reward function {name!r} returned {rewards!r:.60}: return a list, one reward per row.")
    for row, value in enumerate(rewards := list(rewards)):
        try:
            usable = value is None or (not isinstance(value, str) and math.isfinite(value))
        except (TypeError, ValueError):  # no number, or a tensor of several
            usable = False
        if not usable:
            raise ValueError(
                f"the reward function {name!r} returned {value!r:.60} for row {row} of its batch: return a finite "
                "number for every row, or None where the reward does not apply."
            )
    return rewards


def check_prompts_fit(trainer: Any) -> None:
    """Raise ValueError for a training or evaluation prompt that leaves no room for a response in the model's context.

    Only prompts with many bytes for the context are tokenized, so this costs little. Data sets that are streamed, or
    whose prompts hang on more than their text (images, environments), are left to the rollouts, which check as well.
    """
    context = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    if context is None or trainer._is_vlm or trainer.environment_factories is not None:
        return
    evaluation = trainer.eval_dataset
    parts = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    sets = {"train_dataset": trainer.train_dataset, **{f"eval_dataset {name}".strip(): d for name, d in parts.items()}}
    for name, data in sets.items():
        if not isinstance(data, Dataset) or "prompt" not in data.column_names or "images" in data.column_names:
            continue
        for row, prompt in enumerate(data["prompt"]):
            # A token has a byte at least, and half a context is enough for any template around the text.
            if len(str(prompt).encode(errors="replace")) <= context // 2:
                continue
            ids = trainer._tokenize_prompts([prompt])[0]
            try:
                fit_to_context([1], ids, context)
            except ValueError as error:
                raise ValueError(f"Row {row} of {name}: {error} (fastgrpo.grpo.data.check_prompt_lengths)") from None


def diverged(error: FloatingPointError, step: int, folder: str) -> FloatingPointError:
    """The engine's `error` with what the run knows: its step and its last checkpoint in `folder`."""
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    where = f"the last checkpoint is {last}" if last else f"{folder} holds no checkpoint (save_steps says how often)"
    return FloatingPointError(f"after step {step}, {error} Here {where}. A lower learning_rate may keep it from this.")
