"""Rewards scored while rows are decoded: hidden time, the same values as in process, turns, interruption."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import row_rewards
import torch
from datasets import Dataset
from row_rewards import ROW_S, workers_alive
from tiny import tiny_model, tiny_tokenizer
from trainers import PROMPTS, make_trainer, rows
from trl.trainer import grpo_trainer

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo import scoring
from fastgrpo.grpo.trainer import FastGRPOTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*experimental.*:UserWarning"),
]

PID = os.getpid()


def logged(trainer: FastGRPOTrainer) -> str:
    """What TRL keeps for its table: prompts, completions, rewards by function, advantages; a NaN equals a NaN."""
    logs = trainer._logs
    return str([logs["prompt"], logs["completion"], dict(logs["rewards"]), logs["advantages"]])


# While others are decoded


def test_the_time_of_a_slow_reward_is_hidden_and_nothing_else_changes(tmp_path: Path) -> None:
    settings = {"rollout_slots": 1, "max_completion_length": 100, "max_steps": 1, "num_generations": 8}
    seen = {}
    for workers in (0, 2):
        trainer = make_trainer(
            tmp_path,
            reward_funcs=row_rewards.sleepy,
            per_device_train_batch_size=8,
            reward_workers=workers,
            **settings,
        )
        trainer.train()
        seen[workers] = logged(trainer)
        entry = next(entry for entry in trainer.state.log_history if "reward" in entry)
        if not workers:
            assert entry["time/reward"] > 8 * ROW_S
            assert "rewards/overlapped_s" not in entry
    assert seen[0] == seen[2]
    assert entry["time/reward"] < 8 * ROW_S / 2
    assert entry["rewards/overlapped_s"] > 8 * ROW_S / 2
    assert entry["rewards/waited_s"] <= entry["time/reward"]
    assert entry["rewards/workers_ended"] == 0
    assert not workers_alive()


def run_for(folder: Path, workers: int, *, chat: bool, **settings: Any) -> tuple[FastGRPOTrainer, list[Any], list[int]]:
    """A run of two rewards and two weights, its advantages by step, and how many rows each reward sent to workers."""
    data = Dataset.from_dict({"prompt": PROMPTS, "answer": list("abcdefgh")})
    if chat:
        data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = make_trainer(
        folder,
        reward_funcs=[row_rewards.letters, group_rank, row_rewards.tokens, row_rewards.inverse],
        reward_weights=[0.7, 0.2, -0.1, 1.0],
        reward_workers=workers,
        max_completion_length=16,
        eval_dataset=data.select(range(4)),
        num_generations_eval=2,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        **settings,
    )
    trainer.train_dataset = data
    advantages: list[Any] = []
    sent: list[int] = []
    score, submit = trainer._generate_and_score_completions, trainer._scoring.pool.submit

    def scored(inputs: Any) -> Any:
        sent.append(0)
        output = score(inputs)
        advantages.append(output["advantages"].tolist())
        return output

    def submitted(*job: Any) -> Any:
        sent[-1] += 1
        return submit(*job)

    trainer._generate_and_score_completions = scored  # type: ignore[method-assign]
    trainer._scoring.pool.submit = submitted  # type: ignore[method-assign]
    trainer.train()
    return trainer, advantages, sent


def group_rank(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A reward that needs the whole batch: how many of it are shorter."""
    assert os.getpid() == PID and len(completions) in (4, 8)
    lengths = [len(str(completion)) for completion in completions]
    return [float(sum(other < length for other in lengths)) for length in lengths]


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "conversational"])
def test_all_rewards_advantages_and_weights_are_those_of_scoring_in_process(tmp_path: Path, chat: bool) -> None:
    alone, advantages_alone, sent_alone = run_for(tmp_path / "0", 0, chat=chat)
    overlapped, advantages, sent = run_for(tmp_path / "2", 2, chat=chat)
    assert sent_alone == [0] * len(sent_alone)
    # every row was sent once per row-wise reward, so each early score was the one that TRL asked for, evaluation too
    assert sent == [3 * len(rows) for rows in advantages] and len(sent) > 2
    assert advantages == advantages_alone and any(value for rows in advantages for value in rows)
    assert logged(overlapped) == logged(alone)
    ours, theirs = overlapped.state.log_history, alone.state.log_history
    timed = ("time", "runtime", "per_second", "per_s", "overlapped", "waited", "workers_ended")
    for entry, twin in zip(ours, theirs, strict=True):
        keys = [key for key in twin if not any(word in key for word in timed)]
        assert str({key: entry[key] for key in keys}) == str({key: twin[key] for key in keys})
    assert any(entry.get("rewards/inverse/failures") for entry in ours)
    for name, value in overlapped.model.state_dict().items():
        assert torch.equal(value, alone.model.state_dict()[name])


# Turns


def test_only_a_rows_last_word_is_scored_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through TRL's tool loop: rows whose first id is odd call a tool and go on; they are scored when TRL asks."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}

    def parse(tokenizer: Any, ids: list[int], **kwargs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        return {**message, "tool_calls": [call]} if ids[0] % 2 else message

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    monkeypatch.setattr(scoring, "parse_response", parse)
    seen = {}
    for workers in (0, 1):
        trainer = tool_trainer(tmp_path, workers)
        early = early_texts(trainer)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        inputs = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows(trainer, 8)]
        output = trainer._generate_and_score_completions(inputs)
        seen[workers] = (output["advantages"].tolist(), logged(trainer))
        completions = list(trainer._logs["completion"])
        trainer._scoring.close()
    assert seen[0] == seen[1]
    final = [messages[0]["content"] for messages in completions if not messages[0].get("tool_calls")]
    assert sorted(early) == sorted(final) and 0 < len(final) < len(completions)
    assert any(len(messages) > 2 for messages in completions)


def early_texts(trainer: FastGRPOTrainer) -> list[str]:
    """The texts that are scored before TRL asks, from here on."""
    texts: list[str] = []
    for pooled in trainer._scoring._pooled:
        original = pooled.score_early

        def score_early(text: str, row: Any, original: Any = original) -> None:
            texts.append(text)
            original(text, row)

        pooled.score_early = score_early  # type: ignore[method-assign]
    return texts


TOOL_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}{{ call['function'] | tojson }}{% endfor %}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tool_trainer(folder: Path, workers: int) -> FastGRPOTrainer:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one number
            b: another one
        """
        return a + b

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_schema = {"type": "object"}
    config = FastGRPOConfig(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=40,
        max_tool_calling_iterations=2,
        report_to="none",
        reward_workers=workers,
    )
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]})
    trainer = FastGRPOTrainer(
        tiny_model("qwen2"), row_rewards.letters, config, data, processing_class=tokenizer, tools=[add]
    )
    trainer.eos_token_ids = list(range(4, 30))  # so that turns are short
    trainer._get_tool_suffix_ids = lambda messages: [50, 51]  # type: ignore[method-assign]
    return trainer


def test_a_rollout_functions_rows_are_scored_when_trl_asks(tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: FastGRPOTrainer) -> dict[str, Any]:
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        ids, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs, "extra": list(range(len(ids)))}

    logs = []
    for workers in (0, 1):
        trainer = make_trainer(
            tmp_path, rollout_func=rollout, reward_funcs=row_rewards.letters, reward_workers=workers, max_steps=1
        )
        trainer.train()
        logs.append(logged(trainer))
    assert logs[0] == logs[1]


# Interruption


def test_an_interrupted_run_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, reward_funcs=row_rewards.sleepy, reward_workers=1, max_completion_length=40)
    found: list[int] = []
    began = time.monotonic()

    class InterruptedBar:
        def __init__(self, *, wanted: bool) -> None: ...

        def update(self, progress: Any) -> None:
            while progress.rows_done and not found and time.monotonic() < began + 20:
                found.extend(workers_alive())
            if found:
                raise KeyboardInterrupt

        def close(self) -> None: ...

    monkeypatch.setattr("fastgrpo.grpo.trainer.RolloutBar", InterruptedBar)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(found) == 1 and not workers_alive()
