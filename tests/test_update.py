"""An update in sub-batches is TRL's own update of the whole: gradients, loss and everything that is logged."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import update_processes
from datasets import Dataset
from peft import LoraConfig
from test_trainer_precision import olmo
from tiny import tiny_model, tiny_tokenizer
from trainers import PROMPTS, distinct_characters, make_trainer
from trl import GRPOConfig, GRPOTrainer

from fastgrpo.grpo.batching import NORMALISERS
from fastgrpo.grpo.update import Part

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

BUDGET = 40
PROMPT_IDS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21]]
ROWS = [(0, 3), (1, 12), (0, 9), (1, 1), (0, 0), (1, 7), (0, 12), (0, 4)]  # prompt, response tokens (0: masked)


def record(rows: list[tuple[int, int]] = ROWS, seed: int = 0) -> dict[str, Any]:
    """A slice as TRL hands it over, with every optional field, off-policy enough for clipping to act."""
    generator = torch.Generator().manual_seed(seed)
    count, width, prompt_width = len(rows), 14, 9  # wider than any row: padding of other slices
    prompt_ids, prompt_mask = torch.zeros(2, count, prompt_width, dtype=torch.long).unbind()
    completion_mask = torch.zeros(count, width, dtype=torch.long)
    completion_ids = torch.randint(5, 90, (count, width), generator=generator)
    for row, (prompt, length) in enumerate(rows):
        ids = PROMPT_IDS[prompt]
        prompt_ids[row, -len(ids) :], prompt_mask[row, -len(ids) :] = torch.tensor(ids), 1
        completion_mask[row, :length] = 1
    tool_mask = (torch.rand(count, width, generator=generator) > 0.2).long()

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, width, generator=generator)

    logps = -3 + noise(1.0)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids * completion_mask,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.randn(count, generator=generator),
        "old_per_token_logps": logps,
        "ref_per_token_logps": logps + noise(0.2),
        "sampling_per_token_logps": logps + noise(0.1),
        "importance_sampling_ratio": noise(0.3).exp() * completion_mask + (1 - completion_mask),
        "num_items_in_batch": (completion_mask * tool_mask).sum() * 2.0,
    }


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches come as they are given: what is tested here begins where TRL's buffer ends."""
    monkeypatch.setattr(GRPOTrainer, "_prepare_inputs", lambda self, batch: batch)


def their_trainer(folder: Path, model: Any = None, *, peft: Any = None, **settings: Any) -> GRPOTrainer:
    args = GRPOConfig(
        str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4, report_to="none",
        max_completion_length=14, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    data, tokenizer = Dataset.from_dict({"prompt": PROMPTS}), tiny_tokenizer()
    return GRPOTrainer(
        model or tiny_model("qwen2"), distinct_characters, args, data, processing_class=tokenizer, peft_config=peft
    )


def our_trainer(folder: Path, model: Any = "qwen2", *, peft: Any = None, **settings: Any) -> GRPOTrainer:
    ours = {"max_training_token": BUDGET, "max_training_padding_gap": 16, "gradient_checkpointing": False}
    return make_trainer(folder, model, peft=peft, max_completion_length=14, **{**ours, **settings})


def update(trainer: GRPOTrainer, records: list[dict[str, Any]], **attributes: Any) -> dict[str, Any]:
    """One optimizer step's accumulation over these slices: its gradients, losses and metrics."""
    trainer.current_gradient_accumulation_steps = len(records)
    for name, value in attributes.items():
        assert hasattr(trainer, name), name
        setattr(trainer, name, value)
    losses = []
    for number, one in enumerate(records, 1):
        trainer.accelerator.gradient_state._set_sync_gradients(number == len(records))
        losses.append(trainer.training_step(trainer.model, one, None).item())
    metrics = {name: values for name, values in trainer._metrics["train"].items() if name != "step_time"}
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    state = {name: getattr(trainer, name) for name in ("entropy_coef", "_last_world_entropy", "_step")}
    return {"gradients": gradients, "losses": losses, "metrics": metrics, "state": state}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["gradients"].keys() == theirs["gradients"].keys() and len(ours["gradients"]) > 5
    scale = max(float(g.abs().max()) for g in theirs["gradients"].values())
    assert scale > 1e-3
    for name, expected in theirs["gradients"].items():
        torch.testing.assert_close(ours["gradients"][name], expected, rtol=1e-5, atol=1e-5 * scale)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5, abs=1e-6)
    assert_same_metrics(ours["metrics"], theirs["metrics"])
    assert ours["state"] == pytest.approx(theirs["state"], rel=1e-5)


def assert_same_metrics(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name] == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True), name


def count_parts(trainer: Any) -> list[int]:
    """How many sub-batches each slice was cut into, from here on."""
    counts: list[int] = []
    original = trainer._parts

    def counting(one: dict[str, Any]) -> list[Part]:
        parts = original(one)
        counts.append(len(parts))
        return parts

    trainer._parts = counting
    return counts


EVERYTHING = {"beta": 0.1, "use_vllm": True, "vllm_importance_sampling_correction": True}
BONUS = {"entropy_coef": 0.05}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 9.0}


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("settings", [{}, BONUS], ids=["", "entropy bonus"])
@pytest.mark.parametrize("loss_type", NORMALISERS)
def test_every_loss_type(tmp_path: Path, loss_type: str, settings: dict[str, Any]) -> None:
    """With old and reference log-probs, tool masks, importance ratios, an empty row, over two accumulated slices."""
    slices = [record(), record([(1, 2), (0, 11), (1, 5), (1, 12), (0, 7), (0, 2)], seed=1)]
    ours = our_trainer(tmp_path, loss_type=loss_type, **settings)
    counts = count_parts(ours)
    theirs = their_trainer(tmp_path, loss_type=loss_type, **settings)
    assert_same(update(ours, slices, **EVERYTHING), update(theirs, slices, **EVERYTHING))
    assert min(counts) > 1


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    "settings",
    [
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
        {"off_policy_mask_threshold": 0.5, "delta": 1.5, "use_bias_correction_kl": True},
        {**ADAPTIVE, "loss_type": "grpo"},
        {"pad_to_multiple_of": 8},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_settings_of_the_loss(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours, theirs = our_trainer(tmp_path, **settings), their_trainer(tmp_path, **settings)
    counts = count_parts(ours)
    slices = [record(), record(seed=1)]
    for _ in range(2):  # the adaptive bonus acts from the second step on
        assert_same(update(ours, slices, **EVERYTHING), update(theirs, slices, **EVERYTHING))
    assert min(counts) > 1


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "sapo"])
def test_an_advantage_per_token_and_nothing_optional(tmp_path: Path, loss_type: str) -> None:
    """On-policy, as most runs are: old log-probs are the policy's own."""
    one = record()
    one["advantages"] = one["advantages"][:, None] * (1 + torch.rand(8, 14))
    optional = ("tool_mask", "old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
    one = {name: value for name, value in one.items() if name not in optional}
    ours, theirs = our_trainer(tmp_path, loss_type=loss_type), their_trainer(tmp_path, loss_type=loss_type)
    assert_same(update(ours, [one]), update(theirs, [one]))


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("budget", [None, 1, BUDGET, 10_000])
def test_every_budget(tmp_path: Path, budget: int | None) -> None:
    ours = our_trainer(tmp_path, loss_type="bnpo", max_training_token=budget)
    counts = count_parts(ours)
    theirs = their_trainer(tmp_path, loss_type="bnpo")
    assert_same(update(ours, [record()], beta=0.1), update(theirs, [record()], beta=0.1))
    assert counts == [{None: 1, 1: 8}.get(budget, counts[0])]


@pytest.mark.usefixtures("prepared")
def test_lora_and_checkpointed_layers(tmp_path: Path) -> None:
    peft = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ours = our_trainer(tmp_path, peft=peft, gradient_checkpointing=True)
    theirs = their_trainer(tmp_path, peft=peft)
    ours.model.load_state_dict(theirs.model.state_dict())
    assert_same(update(ours, [record()], **EVERYTHING), update(theirs, [record()], **EVERYTHING))


@pytest.mark.usefixtures("prepared")
def test_a_family_whose_prompts_are_not_shared(tmp_path: Path) -> None:
    model = olmo()
    ours, theirs = our_trainer(tmp_path, copy.deepcopy(model)), their_trainer(tmp_path, model)
    parts = ours._parts(record())
    sizes = [(part["prompt_ids"].shape[1] + part["completion_ids"].shape[1], len(part.rows)) for part in parts]
    assert len(sizes) > 1 and all(width * rows <= BUDGET or rows == 1 for width, rows in sizes)
    assert_same(update(ours, [record()], **EVERYTHING), update(theirs, [record()], **EVERYTHING))


@pytest.mark.usefixtures("prepared")
def test_losses_that_compare_tokens_of_the_whole_batch_are_not_cut(tmp_path: Path) -> None:
    settings = {"top_entropy_quantile": 0.5}
    ours, theirs = our_trainer(tmp_path, **settings), their_trainer(tmp_path, **settings)
    counts = count_parts(ours)
    assert_same(update(ours, [record()]), update(theirs, [record()]))
    assert counts == [1]


def test_a_run_with_a_budget_is_the_run_without(tmp_path: Path) -> None:
    logs = []
    for budget in (None, 30):
        trainer = make_trainer(
            tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=2,
            num_iterations=2, max_steps=2, max_completion_length=12, loss_type="bnpo", max_training_token=budget,
        )  # fmt: skip
        trainer.train()
        timed = ("time/", "throughput/", "train_", "total_flos", "step_time", "epoch")
        logs.append([{k: v for k, v in log.items() if not k.startswith(timed)} for log in trainer.state.log_history])
        assert trainer._step == 4
    for without, budgeted in zip(*logs, strict=True):
        assert budgeted == pytest.approx(without, rel=1e-4, abs=1e-5)


def test_ranks_with_unequal_lengths_agree_and_do_not_wait_for_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    here = Path(update_processes.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(here), str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [rank["planned"] for rank in ranks] == [1, 4]
    assert [rank["run"] for rank in ranks] == [4, 4]
    for rank in ranks:
        assert rank["gradient_difference"] < 1e-5
        assert_same_metrics(rank["metrics"], rank["metrics_of_the_whole"])
        assert rank["synchronised"] == 1
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
