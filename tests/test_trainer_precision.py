"""Rollouts in the precision of training agree with the trainer; in another one they are corrected, as TRL would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trainers import make_trainer, olmo, rows

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo.rollouts import check_correctable

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


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
