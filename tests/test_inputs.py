"""What a person hands to the trainer: names, data sets, prompts that leave no room, rewards, weights that diverge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer
from torch import nn
from trainers import PROMPTS, distinct_characters, make_trainer, rows

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo.data import PromptSet
from fastgrpo.grpo.inputs import checked_rewards, named_rewards
from fastgrpo.grpo.rewards import accuracy_reward, format_reward
from fastgrpo.grpo.trainer import FastGRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


# Names and data sets


@pytest.mark.parametrize("name", ["smollm2-135m", "Gemma3-270M", "models/mine.gguf"])
def test_a_name_of_load_model_is_refused_with_the_two_lines_to_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"fastgrpo.load_model.'{name}'., then pass model=model, processing_class=tok"):
        FastGRPOTrainer(name, distinct_characters, FastGRPOConfig(str(tmp_path), use_cpu=True))


def test_a_prompt_set_is_refused_with_its_part(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": PROMPTS})
    both = PromptSet(data, data, [], "here")
    for name, part in (("train_dataset", "train"), ("eval_dataset", "eval")):
        with pytest.raises(TypeError, match=f"{name} is a PromptSet, .*: pass {name}=prompts.{part}"):
            FastGRPOTrainer(
                tiny_model("qwen2"),
                distinct_characters,
                FastGRPOConfig(str(tmp_path), use_cpu=True),
                **{"train_dataset": data, name: both},
                processing_class=tiny_tokenizer(),
            )


def test_rewards_have_the_command_lines_names(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, reward_funcs=["format", "trl.rewards:think_format_reward"])
    assert trainer.reward_func_names == ["format_reward", "think_format_reward"]
    assert named_rewards("accuracy") is accuracy_reward
    assert named_rewards([format_reward, "accuracy"]) == [format_reward, accuracy_reward]
    assert named_rewards("someone/reward-model") == "someone/reward-model"  # TRL's: a model of the hub, or a folder
    assert named_rewards(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match=r"there is no reward 'acuracy'.*Did you mean 'accuracy'"):
        named_rewards("acuracy")


# Prompts


@pytest.mark.parametrize("part", ["train_dataset", "eval_dataset", "eval_dataset hard"])
def test_a_prompt_without_room_is_named_before_the_run(tmp_path: Path, part: str) -> None:
    context = tiny_model("qwen2").config.max_position_embeddings
    good, long = (Dataset.from_dict({"prompt": ["ab", "c", last]}) for last in ("a" * (context - 1), "a" * context))
    name, _, key = part.partition(" ")
    chosen = {"train_dataset": good, "eval_dataset": {"easy": good}} | {name: {key: long} if key else long}
    with pytest.raises(ValueError, match=f"Row 2 of {part}: A prompt of {context} tokens leaves no room"):
        make_trainer(tmp_path, **chosen)
    make_trainer(tmp_path, train_dataset=good, eval_dataset=good)


# Rewards


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", [1.0], torch.tensor(math.nan)])
def test_a_reward_that_is_no_finite_number_is_refused_with_its_function_and_row(tmp_path: Path, value: Any) -> None:
    def odd(completions: list[str], **columns: Any) -> list[Any]:
        return [None, 0.5, value, value]

    trainer = make_trainer(tmp_path, reward_funcs=[distinct_characters, odd])
    with pytest.raises(ValueError, match=r"the reward function 'odd' returned .* for row 2 of its batch") as error:
        trainer._generate_and_score_completions(rows(trainer))
    assert error.value.__notes__ == ["This came out of the reward function 'odd'."]


@pytest.mark.parametrize("values", [1.0, None, "1111", {0: 1.0}])
def test_a_reward_that_is_no_list_is_refused(values: Any) -> None:
    (reward,) = checked_rewards([lambda **columns: values], ["odd"])
    with pytest.raises(ValueError, match=r"the reward function 'odd' returned .*: return a list, one reward per row"):
        reward(completions=["a"])


def test_none_whole_numbers_and_tensors_are_rewards() -> None:
    given = [None, 1, True, 0.5, torch.tensor(2.0)]
    (reward,) = checked_rewards([lambda **columns: given], ["good"])
    assert reward(completions=["a"] * 5) == given


def test_an_error_of_a_reward_names_it_and_stays_what_it_was(tmp_path: Path) -> None:
    def typo(completions: list[str], **columns: Any) -> list[float]:
        return [float(int("x")) for _ in completions]

    async def late_typo(completions: list[str], **columns: Any) -> list[float]:
        return typo(completions)

    model = nn.Linear(1, 1)
    assert checked_rewards([model], ["model"]) == [model]
    for reward in (typo, late_typo):
        trainer = make_trainer(tmp_path, reward_funcs=reward)
        with pytest.raises(ValueError, match="invalid literal for int") as error:
            trainer._generate_and_score_completions(rows(trainer))
        assert error.value.__notes__ == [f"This came out of the reward function {reward.__name__!r}."]


# Divergence


def test_diverged_weights_name_the_step_and_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, learning_rate=1e20, max_steps=5, save_strategy="steps", save_steps=1)
    with pytest.raises(FloatingPointError, match=r"after step \d, the model's logits are not finite") as error:
        trainer.train()
    last = trainer.state.global_step
    assert f"after step {last}," in str(error.value) and f"the last checkpoint is {tmp_path}" in str(error.value)
    assert (tmp_path / f"checkpoint-{last}").is_dir() and f"checkpoint-{last}." in str(error.value)
    trainer.args.output_dir = str(tmp_path / "empty")
    with pytest.raises(FloatingPointError, match="empty holds no checkpoint"):
        trainer._generate_and_score_completions(rows(trainer))
