"""FastGRPOTrainer on tiny models: it trains through our engine, and its rollouts are what the design says they are."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl import GRPOConfig

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo.accounting import PHASES, Account
from fastgrpo.grpo.rollouts import RowLedger, check_correctable, precision_correction, sampling_params, sequence_uid
from fastgrpo.grpo.trainer import FastGRPOTrainer
from fastgrpo.speculation.requests import Completion, Rollout, RolloutStats

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers on its own gradient-checkpointing names
    pytest.mark.filterwarnings("ignore:.*experimental.*:UserWarning"),
]

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


def test_rollouts_leave_the_model_and_the_global_random_states_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, peft=LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))
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


def test_the_ledger_tells_equal_prompts_apart_by_what_followed() -> None:
    ledger = RowLedger(evaluation=False, generation=3, first_row=8)
    assert ledger.identify([[5, 6], [5, 6], [7]]) == [0, 1, 2]
    ledger.record([0, 1, 2], [[5, 6], [5, 6], [7]], [[1], [2], [3, 3]])
    assert ledger.identify([[5, 6, 2, 9], [7, 3, 3, 9]]) == [1, 2]
    assert ledger.limits([1, 2], [[5, 6, 2, 9], [7, 3, 3, 9]], 4) == [2, 1]
    assert ledger.uids([1, 2]) == [sequence_uid(evaluation=False, generation=3, row=row) for row in (9, 10)]
    with pytest.raises(RuntimeError, match="continues none of the 3 rows"):
        ledger.identify([[5, 6, 8, 9]])


def test_sequence_uids_are_distinct_in_every_field() -> None:
    grid = [(e, g, r) for e in (False, True) for g in (0, 1, 2**38 - 1) for r in (0, 1, 2**24 - 1)]
    uids = {sequence_uid(evaluation=e, generation=g, row=r) for e, g, r in grid}
    assert len(uids) == len(grid) and max(uids) < 2**63
    with pytest.raises(ValueError, match=r"row=16777216 must lie in 0\.\.16777215"):
        sequence_uid(evaluation=False, generation=0, row=2**24)
    with pytest.raises(ValueError, match="generation=-1 must lie in"):
        sequence_uid(evaluation=False, generation=-1, row=0)


# Precision


@pytest.mark.parametrize("peft", [None, LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear")])
@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
def test_in_equal_precision_trainer_and_sampler_agree(tmp_path: Path, arch: str, peft: Any) -> None:
    trainer = make_trainer(tmp_path, arch, peft=peft, temperature=0.7, top_p=0.9, max_completion_length=24)
    trainer.train()  # so that LoRA's B is not zero
    trainer.model.train()
    output = trainer._generate_and_score_completions(rows(trainer))
    assert output["advantages"].shape == (4,)  # no correction
    mask = output["completion_mask"].bool()
    difference = (trainer._trainer_logprobs(output) - output["sampling_per_token_logps"])[mask]
    assert difference.abs().max() < 1e-4


def test_another_precision_weights_the_advantages_and_says_by_how_much(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rollout_dtype="bfloat16", max_completion_length=24)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert 1e-4 < entry["sampling/sampling_logp_difference/mean"] < entry["sampling/sampling_logp_difference/max"] < 1
    assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.1)
    assert entry["rollout/capped_fraction"] == 0
    assert entry["time/logprob"] > 0
    trainer.model.train()
    output = trainer._generate_and_score_completions(rows(trainer))
    trainer_logprobs = trainer._trainer_logprobs(output)
    ratio = (trainer_logprobs - output["sampling_per_token_logps"]).exp().clamp(max=2.0)
    assert output["advantages"].shape == ratio.shape and (ratio - 1).abs().max() > 1e-3
    advantages = output["advantages"][:, :1] / ratio[:, :1]  # one number a row, as TRL computed it
    assert advantages.abs().max() > 0.1
    mask = output["completion_mask"].bool()
    torch.testing.assert_close(output["advantages"][mask], (advantages * ratio)[mask])
    assert trainer.model.training


def olmo() -> PreTrainedModel:
    """A family without a lean path, so that the engine runs the model's own forward."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ids = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", **sizes, **heads, **ids))
    for weight in model.parameters():
        weight.data.mul_(20 if weight.dim() == 2 else 1)  # from nearly uniform to a law that depends on the context
    return model


@pytest.mark.parametrize(
    ("settings", "largest"),
    [({}, 1e-4), ({"rollout_dtype": "bfloat16"}, 0.5), ({"bf16": True, "rollout_dtype": "float32"}, 0.5)],
    ids=["equal", "bf16 rollouts", "fp32 rollouts under mixed precision"],
)
def test_the_general_path_runs_the_current_weights_in_its_own_precision(
    tmp_path: Path, settings: dict[str, Any], largest: float
) -> None:
    """accelerate and TRL replace `forward` on the instance; a copy that kept theirs would run other weights."""
    trainer = make_trainer(tmp_path, olmo(), learning_rate=1e-2, max_steps=3, **settings)
    trainer.train()
    trainer.model.train()
    forward = trainer.model.forward
    output = trainer._generate_and_score_completions(rows(trainer))
    assert trainer.model.forward == forward
    difference = (trainer._trainer_logprobs(output) - output["sampling_per_token_logps"]).abs()
    mean = difference[output["completion_mask"].bool()].mean()
    assert (mean > 1e-3) == bool(settings) and mean < largest, f"mean difference {mean}"
    assert trainer._engine is not None and trainer._engine.target.layout.dtype == trainer._rollout_dtype


def test_the_correction_is_the_capped_ratio_where_the_policy_wrote_and_one_elsewhere() -> None:
    trainer = torch.tensor([[-1.0, -2.0, -0.5, -7.0], [-1.0, -1.0, -1.0, -1.0]])
    sampler = torch.tensor([[-1.2, -1.5, -2.5, 0.0], [-1.0, float("nan"), -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    found = precision_correction(trainer, sampler, mask, cap=2.0)
    expected = torch.tensor([[0.2, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).exp()
    expected[0, 2] = 2.0
    torch.testing.assert_close(found.weights, expected)
    assert found.mean_difference.item() == pytest.approx((0.2 + 0.5 + 2.0) / 5)
    assert found.max_difference.item() == pytest.approx(2.0)
    assert found.capped_fraction.item() == pytest.approx(1 / 5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_weighted_advantages_are_a_weighted_loss(tmp_path: Path, loss_type: str) -> None:
    """The twin is TRL's own correction, which multiplies the per-token loss by `importance_sampling_ratio`."""
    trainer = make_trainer(tmp_path, loss_type=loss_type, rollout_dtype="bfloat16", delta=4.0)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions(rows(trainer))
    shape = inputs["completion_ids"].shape
    generator = torch.Generator().manual_seed(1)
    inputs["advantages"] = torch.tensor([1.5, -0.5, 0.0, -1.0])
    logprobs = trainer._trainer_logprobs(inputs)
    inputs["old_per_token_logps"] = logprobs + 0.4 * torch.randn(shape, generator=generator)  # some tokens are clipped
    weight = (0.5 * torch.randn(shape, generator=generator)).exp().clamp(max=2.0)

    def gradient(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, {**inputs, **changes})
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    loss, ours = gradient(advantages=inputs["advantages"].unsqueeze(1) * weight)
    unweighted, _ = gradient()
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    expected_loss, expected = gradient(importance_sampling_ratio=weight)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(loss, unweighted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level='sequence' weights whole sequences"),
        ({"loss_type": "luspo"}, "loss_type='luspo' weights whole sequences"),
        ({"loss_type": "vespo"}, "loss_type='vespo' weights whole sequences"),
    ],
)
def test_losses_over_whole_sequences_are_refused_with_the_correction_only(
    tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    args = FastGRPOConfig(str(tmp_path), use_cpu=True, **settings)
    assert check_correctable(args, rollout=torch.float32, training=torch.float32) is False
    with pytest.raises(ValueError, match=message) as error:
        check_correctable(args, rollout=torch.bfloat16, training=torch.float32)
    assert "rollout_dtype='float32'" in str(error.value)


def test_mixed_precision_rolls_out_in_the_precision_of_its_passes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, bf16=True)
    assert (trainer._training_dtype, trainer._rollout_dtype) == (torch.bfloat16, torch.bfloat16)
    assert not trainer._corrects
    assert make_trainer(tmp_path, bf16=True, rollout_dtype="float32")._corrects


# Settings, bad input, interruption


def test_every_sampling_field_reaches_the_engine(tmp_path: Path) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.05, "repetition_penalty": 1.1}
    law = sampling_params(FastGRPOConfig(str(tmp_path), use_cpu=True, **settings))
    assert vars(law) == settings
    given = {"generation_kwargs": {"top_p": 0.5, "min_p": None, "top_k": 3}}
    law = sampling_params(FastGRPOConfig(str(tmp_path), use_cpu=True, **settings, **given))
    assert vars(law) == {**settings, "top_p": 0.5, "min_p": 0.0, "top_k": 3}
    with pytest.raises(ValueError, match="top_p"):
        sampling_params(FastGRPOConfig(str(tmp_path), use_cpu=True, top_p=1.5))


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
    assert trainer._fit([[1] * (context - 3), [1]], [8, 8]) == [3, 8]


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


def test_an_account_adds_up() -> None:
    account = Account(torch.device("cpu"))
    # two ranks: rollout, reward, logprob, update seconds, rollout tokens, trained tokens, step seconds
    metrics = account.book(torch.tensor([[2.0, 1.0, 0.0, 4.0, 30, 90, 8.0], [4.0, 1.0, 0.0, 2.0, 10, 70, 8.0]]))
    assert metrics["time/rollout"] == 3 and metrics["time/update"] == 3
    assert metrics["throughput/rollout_tokens_per_s"] == 40 / 4 and metrics["throughput/train_tokens_per_s"] == 160 / 4
    summary = account.summary()
    assert summary["shares"] == {"rollout": 3 / 8, "reward": 1 / 8, "logprob": 0, "update": 3 / 8, "other": 1 / 8}
    assert summary["ceiling_of_faster_sampling"] == pytest.approx(8 / 5)
    with account.evaluation(), account.phase("rollout"):
        account.add_rollout(5)
    assert account.end_step()[:5] == [0, 0, 0, 0, 0] and account.evaluation_s > 0
