"""Speculation in the trainer changes the time of a run and nothing else, and the run says what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import tiny_checkpoint, tiny_model
from trainers import Turn, draft_for, make_trainer, olmo, record_turns

from fastgrpo.grpo.live_model import base_model, check_runnable
from fastgrpo.grpo.trainer import FastGRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CHAIN = {"spec_policy": "fixed"}
TREES = {"spec_policy": "paper", "verification_capacity": 24, "rollout_slots": 3}  # of 5 to 20 nodes
CLOCKS = ("time/", "throughput/", "step_time", "train_")  # what a log line may differ in
SPECULATION = {
    f"spec/{name}"
    for name in (
        "acceptance_rate", "mean_accept_length", "tokens_per_target_forward", "active_rows_mean", "off_fraction",
        "drafted_tokens", "accepted_tokens",
    )
}  # fmt: skip


def train(folder: Path, model: Any = "qwen2", **settings: Any) -> tuple[FastGRPOTrainer, list[Turn]]:
    trainer = make_trainer(folder, model, **settings)
    turns = record_turns(trainer)
    trainer.train()
    return trainer, turns


def steps(trainer: FastGRPOTrainer) -> list[dict[str, Any]]:
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def without(entries: list[dict[str, Any]], *prefixes: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if not name.startswith(prefixes)} for entry in entries]


def assert_same_run(one: tuple[FastGRPOTrainer, list[Turn]], other: tuple[FastGRPOTrainer, list[Turn]]) -> None:
    """Tokens, rewards, losses and weights to the last bit."""
    (trainer, turns), (second, second_turns) = one, other
    assert turns == second_turns
    logs = [without(t.state.log_history, *CLOCKS, "spec/") for t in (trainer, second)]
    assert logs[0] == logs[1]
    weights, others = trainer.model.state_dict(), second.model.state_dict()
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_ten_steps_with_drafts_are_the_ten_steps_without(tmp_path: Path, lora: bool) -> None:
    def ten_steps(name: str, **settings: Any) -> tuple[FastGRPOTrainer, list[Turn]]:
        peft = LoraConfig(r=4, target_modules="all-linear") if lora else None
        return train(tmp_path / name, peft=peft, max_steps=10, **settings)

    plain = ten_steps("plain")
    assert len(plain[1]) == 10
    assert not [name for entry in steps(plain[0]) for name in entry if "spec/" in name or name == "time/draft"]
    assert "speculation" not in plain[0].summary()
    folder = tmp_path / "draft"
    draft_for("qwen2").save_pretrained(folder)
    for name, settings in {"trees": TREES, **({} if lora else {"chain": CHAIN})}.items():
        drafted = ten_steps(name, draft_model=folder, **settings)
        assert_same_run(drafted, plain)
        check_metrics(drafted[0], json.loads((tmp_path / name / "summary.json").read_text()))


def check_metrics(trainer: FastGRPOTrainer, summary: dict[str, Any]) -> None:
    for entry in steps(trainer):
        assert entry.keys() >= SPECULATION
        assert 0 <= entry["spec/accepted_tokens"] <= entry["spec/drafted_tokens"]
        rate = entry["spec/accepted_tokens"] / entry["spec/drafted_tokens"]
        assert entry["spec/acceptance_rate"] == pytest.approx(rate)
        assert 1 <= entry["spec/tokens_per_target_forward"] <= entry["spec/mean_accept_length"] <= 6
        assert 1 <= entry["spec/active_rows_mean"] <= 4
        assert entry["spec/off_fraction"] == 0
        assert 0 < entry["time/draft"] < entry["time/rollout"]
    totals = summary["speculation"]
    for name in ("drafted", "accepted"):
        assert totals[name] == sum(entry[f"spec/{name}_tokens"] for entry in steps(trainer)) > 0
    assert totals["tokens"] == summary["tokens"]["rollout"] and totals["responses"] == 40
    assert totals["policy"] == trainer.args.spec_policy and totals["draft"].endswith("draft")
    assert 0 < totals["draft_seconds"] < summary["seconds"]["rollout"]
    if trainer.args.spec_policy == "fixed":  # a chain of three for every row in every pass
        assert totals["drafted"] == 3 * totals["row_passes"] == 3 * totals["drafted_row_passes"]


def test_the_draft_is_bound_to_the_live_model_and_runs_in_the_precision_of_rollouts(tmp_path: Path) -> None:
    """On both paths of the engine, the lean one and the model's own forward, which runs a copy in another precision."""
    for make, dtype in ((lambda: tiny_model("qwen2"), "bfloat16"), (olmo, None), (olmo, "bfloat16")):
        draft = draft_for(make())  # bound to a model that is gone
        settings = {"rollout_dtype": dtype, "learning_rate": 1e-2, "temperature": 0.7}
        trainer, turns = train(tmp_path, make(), draft_model=draft, **CHAIN, **settings)
        assert {weight.dtype for weight in draft.parameters()} == {trainer._rollout_dtype}
        assert draft._target is not None and draft._target() is base_model(trainer.model, trainer.accelerator)
        assert trainer._engine is not None and trainer._engine.proposer.temperature == 0.7  # the target's law
        assert trainer.summary()["speculation"]["accepted"] > 0
        if dtype is None:
            assert_same_run((trainer, turns), train(tmp_path, make(), **settings))


def test_evaluations_speculate_and_log_apart_from_training(tmp_path: Path) -> None:
    evals = Dataset.from_dict({"prompt": ["eval a", "eval b", "eval c"]})
    evaluate = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    both, _ = train(tmp_path, draft_model=draft_for("qwen2"), eval_dataset=evals, **CHAIN, **evaluate)
    alone, _ = train(tmp_path, draft_model=draft_for("qwen2"), **CHAIN)
    # evaluating shuffles the rows of an update (by a draw of the global generator), so losses round otherwise
    logs = [[{name: entry[name] for name in SPECULATION} for entry in steps(trainer)] for trainer in (both, alone)]
    assert logs[0] == logs[1] and len(logs[0]) == 2
    evaluations = [entry for entry in both.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2
    for entry in evaluations:
        assert {f"eval_{name}" for name in SPECULATION} <= entry.keys()
        assert entry["eval_spec/drafted_tokens"] > 0
    counts = [vars(trainer._drafting) for trainer in (both, alone)]
    assert counts[0] == counts[1]


def test_a_resumed_run_speculates_as_the_whole_one_did(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    whole, turns = train(tmp_path / "whole", draft_model=draft_for("qwen2"), **TREES, **settings)
    resumed = make_trainer(tmp_path / "resumed", draft_model=draft_for("qwen2"), **TREES, **settings)
    turns_resumed = record_turns(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert turns_resumed == turns[2:]
    assert without(steps(resumed)[-2:], *CLOCKS) == without(steps(whole)[-2:], *CLOCKS)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_draft_of_nan_trains_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = draft_for("qwen2")
    with torch.no_grad():
        draft.lm_head.weight[3, 5] = torch.nan
    broken = train(tmp_path, draft_model=draft, **TREES)
    assert "The draft's weights are not finite, so this rollout is decoded without it." in caplog.text
    assert_same_run(broken, train(tmp_path))
    for entry in steps(broken[0]):
        assert entry["spec/off_fraction"] == 1 and entry["spec/drafted_tokens"] == 0
        assert "spec/acceptance_rate" not in entry and "spec/mean_accept_length" not in entry


# What is refused, before anything runs


def test_a_draft_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="made for a target with target_model_type 'llama', and this one has 'qwen2'"):
        make_trainer(tmp_path, draft_model=draft_for("llama"))
    with pytest.raises(ValueError, match="made for a target with vocab_size 96, and this one has 100"):
        make_trainer(tmp_path, draft_model=draft_for(tiny_model("qwen2", vocab_size=96)))
    with pytest.raises(ValueError, match="model_type is 'qwen2', but a draft's config says"):
        make_trainer(tmp_path, draft_model=tiny_checkpoint(tmp_path, "qwen2"))
    with pytest.raises(TypeError, match="draft_model is a Qwen2ForCausalLM, but must be a fastgrpo DraftModel"):
        make_trainer(tmp_path, draft_model=tiny_model("qwen2"))
    with pytest.raises(OSError, match="no-such-draft"):
        make_trainer(tmp_path, draft_model=str(tmp_path / "no-such-draft"))


@pytest.mark.parametrize("settings", [{"spec_depth": 4}, CHAIN, {"verification_capacity": 9}], ids=str)
def test_settings_of_speculation_without_a_draft_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r} has no effect without a draft. Set draft_model"):
        make_trainer(tmp_path, **settings)
    make_trainer(tmp_path, **{**settings, "spec_policy": "off"})  # whoever switches it off may keep the rest


def test_a_draft_beside_sharded_weights_is_refused() -> None:
    for backend in (
        SimpleNamespace(fsdp_version=1, is_fsdp=True, is_zero3=False),
        SimpleNamespace(fsdp_version=None, is_fsdp=False, is_zero3=True),
    ):
        check_runnable(tiny_model("qwen2"), backend, drafts=False)
        with pytest.raises(NotImplementedError, match="draft_model does not go with sharded weights"):
            check_runnable(tiny_model("qwen2"), backend, drafts=True)
