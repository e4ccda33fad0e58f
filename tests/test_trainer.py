"""FastGRPOTrainer on tiny models: it trains through our engine, and its rollouts are what the design says they are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from tiny import EOS_ID, tiny_model
from trainers import PROMPTS, Turn, distinct_characters, draft_for, fake_engine, make_trainer, record_turns, rows
from trl import GRPOConfig

from fastgrpo.grpo.accounting import PHASES
from fastgrpo.grpo.trainer import FastGRPOTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers on its own gradient-checkpointing names
    pytest.mark.filterwarnings("ignore:.*experimental.*:UserWarning"),
]


def weights(trainer: FastGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


# It trains


@pytest.mark.parametrize("peft", [None, LoraConfig(r=4, target_modules="all-linear")], ids=["full", "lora"])
def test_training_moves_the_weights_and_logs_where_the_time_went(tmp_path: Path, peft: Any) -> None:
    trainer = make_trainer(tmp_path, peft=peft, max_steps=3)
    before = weights(trainer)
    trainer.train()
    moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    trained = {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert moved and moved <= trained | {"lm_head.weight"}  # a tied head is in the state under both names
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert {f"time/{phase}" for phase in PHASES} <= entry.keys()
        assert entry["throughput/rollout_tokens_per_s"] > 0 and entry["throughput/train_tokens_per_s"] > 0
        assert "sampling/sampling_logp_difference/mean" not in entry  # equal precision: no correction
        assert entry["time/logprob"] == 0

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 3 and summary["generations"] == 3
    assert sum(summary["shares"].values()) == pytest.approx(1)
    assert summary["share_of_sampling"] == summary["shares"]["rollout"]
    assert summary["ceiling_of_faster_sampling"] == pytest.approx(1 / (1 - summary["share_of_sampling"]))
    assert summary["reward"]["by_generation"] == pytest.approx([entry["reward"] for entry in steps])
    assert summary["reward"]["first"] == pytest.approx(steps[0]["reward"])
    assert summary["tokens"]["rollout"] == sum(4 * entry["completions/mean_length"] for entry in steps)
    assert summary["engine"]["precision_correction"] is False
    assert {"torch", "trl", "transformers", "fastgrpo"} <= summary["versions"].keys()


def test_conversational_prompts_and_eos_reach_the_reward(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(tmp_path, reward_funcs=reward, max_completion_length=64, max_steps=1)
    trainer.train_dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]})
    turns = record_turns(trainer)
    trainer.train()
    assert all(message[0]["role"] == "assistant" for message, _ in seen)
    stopped = [ids for _, ids in seen if ids[-1] == EOS_ID]
    assert stopped, "no completion of 64 tokens met the eos, so this test shows nothing"
    assert all(EOS_ID not in ids[:-1] for _, ids in seen)
    assert turns[0].prompts[0] == trainer.processing_class.apply_chat_template(
        [{"role": "user", "content": turns_text(trainer, turns)}], add_generation_prompt=True, return_dict=False
    )


def turns_text(trainer: FastGRPOTrainer, turns: list[Turn]) -> str:
    shown = trainer.processing_class.decode(turns[0].prompts[0], skip_special_tokens=True)
    return next(text for text in PROMPTS if text in shown.splitlines())


# Rollouts: a function of weights, prompt, seed and place in the run


def test_the_same_seed_gives_the_same_completions_for_any_number_of_slots(tmp_path: Path) -> None:
    drawn = {}
    for slots in (None, 1, 3):
        trainer = make_trainer(tmp_path, rollout_slots=slots, max_completion_length=6)
        turns = record_turns(trainer)
        torch.rand(3)  # the global state must not matter
        trainer.train()
        drawn[slots] = [turn.completions for turn in turns]
    assert len(drawn[None]) == 2
    assert drawn[None] == drawn[1] == drawn[3]
    other = make_trainer(tmp_path, seed=8, max_completion_length=6, max_steps=1)
    turns = record_turns(other)
    other.train()
    assert turns[0].completions != drawn[None][0]


@pytest.mark.parametrize("settings", [{}, {"spec_policy": "fixed", "spec_width": 2}], ids=["plain", "drafts"])
def test_rollouts_leave_the_model_and_the_global_random_states_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    trainer = make_trainer(tmp_path, peft=lora, draft_model=draft_for("qwen2") if settings else None, **settings)
    trainer.model.train()
    found: list[bool] = []
    original = trainer._rollout

    def states() -> tuple[Any, ...]:
        model = trainer.model
        modes = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in model.modules()]
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        parameters = [(p.dtype, p.requires_grad, p.grad is None, p._version) for p in model.parameters()]
        numpy_state = np.random.get_state()[1].tolist()  # type: ignore[index]
        generators = (torch.get_rng_state().tolist(), numpy_state, random.getstate())
        return modes, hooks, parameters, model.config.to_dict(), model.generation_config.to_dict(), generators

    def checked(*args: Any, **kwargs: Any) -> Any:
        before = states()
        rollout = original(*args, **kwargs)
        found.append(before == states())
        return rollout

    trainer._rollout = checked  # type: ignore[method-assign]
    trainer._generate_and_score_completions(rows(trainer))
    assert found == [True]
    assert (trainer._tally.drafted > 0) == bool(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 5},
        {"max_steps": 6, "num_iterations": 2},
        {"max_steps": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 4, "num_generations": 8},
        {"max_steps": 10, "num_train_epochs": 3},  # 8 prompts, one a step: into the second epoch
    ],
    ids=["plain", "iterations", "accumulation", "epochs"],
)
def test_uids_of_training_never_repeat(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, **settings)
    fake_engine(trainer)
    turns = record_turns(trainer)
    trainer.train()
    trainer.train()  # a second run in the same process is new noise too
    uids = [uid for turn in turns for uid in turn.uids]
    assert len(uids) == len(set(uids)) and len(turns) >= 4


def test_every_evaluation_draws_the_same_noise_and_training_does_not_notice(tmp_path: Path) -> None:
    evals = Dataset.from_dict({"prompt": ["eval a", "eval b", "eval c"]})
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = make_trainer(tmp_path, eval_dataset=evals, max_steps=3, **settings)
    turns = record_turns(trainer)
    trainer.train()
    of_eval = [turn for turn in turns if turn.uids[0] >> 62]
    of_training = [turn for turn in turns if not turn.uids[0] >> 62]
    batches = len(of_eval) // 3
    assert batches == 2 and len(of_training) == 3
    first = [turn.uids for turn in of_eval[:batches]]
    assert [turn.uids for turn in of_eval[batches : 2 * batches]] == first == [t.uids for t in of_eval[-batches:]]
    assert len({uid for uids in first for uid in uids}) == 6
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"]["evaluation"] > 0

    alone = make_trainer(tmp_path, max_steps=3)
    turns_alone = record_turns(alone)
    alone.train()
    assert [turn.completions for turn in turns_alone] == [turn.completions for turn in of_training]


def test_a_resumed_run_is_the_run_that_would_have_been(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    whole = make_trainer(tmp_path / "whole", **settings)
    turns = record_turns(whole)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **settings)
    turns_resumed = record_turns(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert [turn.uids for turn in turns_resumed] == [turn.uids for turn in turns[2:]]
    assert [turn.completions for turn in turns_resumed] == [turn.completions for turn in turns[2:]]
    assert resumed._step == whole._step == 4

    (tmp_path / "whole" / "checkpoint-2" / "fastgrpo_state.json").unlink()  # as TRL's own trainer leaves it
    foreign = make_trainer(tmp_path / "foreign", **settings)
    turns_foreign = record_turns(foreign)
    foreign.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert [turn.completions for turn in turns_foreign] == [turn.completions for turn in turns[2:]]


# Turns


def two_turns(prompts: list[str], trainer: FastGRPOTrainer) -> dict[str, Any]:
    """A rollout function that lets rows 1 and 3 go on after an external answer, as TRL's tool loop does."""
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, trainer.num_generations)
    mask = [[1] * len(ids) for ids in completion_ids]
    again, answer = [1, 3], [40, 41]
    longer = [prompt_ids[i] + completion_ids[i] + answer for i in again]
    more_ids, more_logprobs = trainer._generate_single_turn(longer, images, fields, num_generations=1)
    for i, ids, values in zip(again, more_ids, more_logprobs, strict=True):
        completion_ids[i] = completion_ids[i] + answer + ids
        logprobs[i] = logprobs[i] + [0.0] * len(answer) + values
        mask[i] += [0] * len(answer) + [1] * len(ids)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs, "env_mask": mask}


def test_a_later_turn_keeps_its_rows_uid_and_its_limit(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_func=two_turns, max_completion_length=20, max_steps=1)
    turns = record_turns(trainer)
    trainer.train()
    first, second = turns
    assert second.uids == [first.uids[1], first.uids[3]]
    totals = [len(first.completions[i]) + 2 + len(second.completions[k]) for k, i in enumerate((1, 3))]
    spent = [len(first.completions[i]) + 2 for i in (1, 3)]
    assert all(total <= max(20, used + 1) for total, used in zip(totals, spent, strict=True))


# Bad input, interruption


def test_a_plain_config_a_learned_prompt_and_a_prompt_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"needs a fastgrpo\.FastGRPOConfig"):
        FastGRPOTrainer(tiny_model("qwen2"), distinct_characters, args=GRPOConfig(str(tmp_path), use_cpu=True))
    learned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="learned prompt"):
        make_trainer(tmp_path, peft=learned, gradient_checkpointing=False)
    trainer = make_trainer(tmp_path)
    trainer.model.train()
    context = trainer.model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"A prompt of {context + 1} tokens leaves no room"):
        trainer._generate_and_score_completions([{"prompt": "a" * (context + 1)}] * 4)


def test_prompts_that_no_rollout_can_begin_from_are_refused_at_construction(tmp_path: Path) -> None:
    for column, values, message in (
        ("question", ["a"], "eval_dataset has no column 'prompt', only question; rename"),
        ("prompt", ["a", None], "prompt in row 1 of eval_dataset is None; leave the row out"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, eval_dataset=Dataset.from_dict({column: values}))


def test_the_seam_cannot_be_called_without_a_place_in_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"use fastgrpo\.Engine"):
        make_trainer(tmp_path)._generate_single_turn([[5, 6]], None, {}, 1)


def test_an_interrupted_run_leaves_a_summary_and_a_model_in_train_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.model.eval()
    closed: list[bool] = []

    class InterruptedBar:
        def __init__(self, *, wanted: bool) -> None:
            assert not wanted  # disable_tqdm

        def update(self, progress: Any) -> None:
            assert progress.rows_total == 4 and progress.tokens >= 4
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr("fastgrpo.grpo.trainer.RolloutBar", InterruptedBar)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert closed == [True]
    assert all(module.training for module in trainer.model.modules())
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] is False
