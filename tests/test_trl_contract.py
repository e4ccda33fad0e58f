"""What FastGRPOTrainer leans on in TRL 1.16, fact by fact, on TRL's own classes.

A failure here after an update of TRL means that the fact has changed: each assertion says what of ours to look at.
"""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import EOS_ID, PAD_ID, tiny_model, tiny_tokenizer
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from fastgrpo.grpo.batching import NORMALISERS
from fastgrpo.grpo.trainer import FastGRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# What the canned rollouts below "sampled": ragged, with and without the eos.
COMPLETIONS = [[9, 8, 7, EOS_ID], [9, 8, 7, 6, 5, 4], [EOS_ID], [11, 12, EOS_ID]]


class Canned(GRPOTrainer):
    """TRL's trainer with fixed rollouts, and the arguments that the seam was called with."""

    calls: list[tuple[Any, ...]]
    logprob: float | None = -0.5

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = [*getattr(self, "calls", []), (args, kwargs)]
        ids = [list(row) for row in COMPLETIONS]
        return ids, None if self.logprob is None else [[self.logprob] * len(row) for row in ids]


def count(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def make(folder: Path, *, peft: Any = None, **settings: Any) -> Canned:
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return Canned(
        tiny_model("qwen2"),
        count,
        GRPOConfig(str(folder), **{**defaults, **settings}),
        Dataset.from_dict({"prompt": ["abc", "hello there"]}),
        processing_class=tiny_tokenizer(),
        peft_config=peft,
    )


def batch(trainer: GRPOTrainer) -> dict[str, Any]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([{"prompt": "abc"}] * 2 + [{"prompt": "hello there"}] * 2)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_release_is_the_one_that_was_read() -> None:
    assert version("trl").startswith("1.16."), "run this file against the new TRL, then move the pin in pyproject.toml"


def test_the_constructor_is_trls_and_draft_model() -> None:
    ours, theirs = (dict(inspect.signature(c.__init__).parameters) for c in (FastGRPOTrainer, GRPOTrainer))
    assert ours.pop("draft_model").kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours) == list(theirs), "FastGRPOTrainer.__init__"
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()], "FastGRPOTrainer.__init__"


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("_generate_single_turn", ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"]),
        ("_generate_and_score_completions", ["inputs"]),
        ("_prepare_inputs", ["generation_batch"]),
        ("_calculate_rewards", ["inputs", "prompts", "completions", "completion_ids_list"]),
        ("_compute_loss", ["model", "inputs"]),
        ("training_step", ["model", "inputs", "num_items_in_batch"]),
        ("_save_checkpoint", ["model", "trial"]),
        ("_load_optimizer_and_scheduler", ["checkpoint"]),
    ],
)
def test_the_methods_that_we_override_have_these_arguments(method: str, names: list[str]) -> None:
    assert parameters(getattr(GRPOTrainer, method)) == ["self", *names], f"FastGRPOTrainer.{method}"


def test_log_probs_are_asked_for_by_these_arguments() -> None:
    names = parameters(GRPOTrainer._get_per_token_logps_and_entropies)
    expected = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    assert names[:7] == expected, "FastGRPOTrainer._trainer_logprobs"
    assert parameters(disable_gradient_checkpointing) == ["model", "gradient_checkpointing_kwargs"], "_trainer_logprobs"
    assert parameters(unwrap_model_for_generation)[:2] == ["model", "accelerator"], "model_for_rollout (ZeRO-3)"


def test_the_attributes_that_we_read(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer._step == 0, "_save_checkpoint and _load_optimizer_and_scheduler restore the micro-step"
    assert trainer._is_vlm is False, "_generate_single_turn: which rows take TRL's own path"
    assert trainer.eos_token_ids == [EOS_ID], "_rollout: stop ids"
    backend = trainer._dist
    assert (backend.is_zero3, backend.is_fsdp, backend.fsdp_version) == (False, False, None), "grpo/live_model.py"
    assert trainer.use_vllm is False and trainer.max_completion_length == 6 and trainer.num_iterations == 1
    assert trainer.args.steps_per_generation == 1, "_load_optimizer_and_scheduler"
    assert trainer.accelerator.mixed_precision == "no", "FastGRPOTrainer.__init__: the precision of training"
    assert set(trainer._metrics) == {"train", "eval"}, "where our metrics are appended"
    assert trainer.rollout_func is trainer.environment_factories is None and not trainer.tools, "first_turn_decoder"
    assert trainer._tokenizer is trainer.processing_class, "first_turn_decoder"
    assert trainer.reward_funcs == [count], "pool_rewards puts functions of ours there"
    assert parameters(GRPOTrainer._log_metric) == ["self", "name", "value"], "Scoring.end"
    assert Trainer.evaluation_loop, "FastGRPOTrainer.evaluation_loop: evaluations start their noise anew there"


def test_the_seam_gets_token_ids_once_per_row_and_returns_ids_and_log_probs(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    batch(trainer)
    ((prompt_ids, images, fields, generations), kwargs), *more = trainer.calls
    encode = trainer.processing_class.encode
    assert prompt_ids == [encode("abc")] * 2 + [encode("hello there")] * 2, "RowLedger: prompts arrive repeated"
    assert (images, fields, generations, kwargs, more) == (None, {}, 4, {}, []), "FastGRPOTrainer._generate_single_turn"


def test_what_the_loss_does_besides(tmp_path: Path) -> None:
    """SubBatchTrainer keeps it from doing so in a sub-batch: what is gathered, and the state that it moves."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    used = {"gather", "gather_for_metrics", "reduce", "num_processes", "sync_gradients"}
    assert set(re.findall(r"self\.accelerator\.(\w+)", source)) == used, "update._Alone"
    moved = {"entropy_coef", "_entropy_window_stats", "_last_world_entropy"}
    assert set(re.findall(r"self\.(\w+) [+*-]?= ", source)) == moved, "SubBatchTrainer._aside"
    assert "gather_for_metrics" in source[source.index("if self.aux_loss_enabled") :], "SubBatchTrainer._cuts"
    names = re.findall(r"self\.loss_type (?:in|==) (\[.*?\]|\".*?\")", source)
    assert {name for found in names for name in re.findall(r"\w+", found)} == set(NORMALISERS), "batching.weights"
    trainer = make(tmp_path)
    assert trainer._current_train_step_time == 0 and trainer.loss_is_scaled_for_ga, "SubBatchTrainer.training_step"
    assert trainer.top_entropy_quantile == 1 and trainer.aux_loss_enabled is False, "SubBatchTrainer._cuts"
    assert trainer.pad_to_multiple_of is None, "batching.cut"


def test_the_model_is_asked_for_log_probs_by_these_arguments(tmp_path: Path) -> None:
    """shared_prompts.install answers a call with these and passes on every other."""
    trainer, asked = make(tmp_path), []
    inner = trainer.model.forward
    trainer.model.forward = lambda **kwargs: asked.append(kwargs) or inner(**kwargs)  # type: ignore[method-assign]
    trainer._compute_loss(trainer.model, batch(trainer))
    assert asked[-1].keys() == {"input_ids", "attention_mask", "labels", "fused_lm_head"}


def test_the_batch_that_comes_out_of_a_generation(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    output = batch(trainer)
    expected = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
    assert set(output) == expected | {"sampling_per_token_logps"}, "_correct_precision reads this batch"
    assert output["advantages"].shape == (4,), "_correct_precision makes (rows, tokens) of it"
    assert output["completion_mask"].sum(1).tolist() == [4, 6, 1, 3], "the eos counts as a token"
    assert output["completion_ids"][2].tolist() == [EOS_ID] + [PAD_ID] * 5, "completions are padded on the right"
    assert output["prompt_mask"][0].tolist() == [0] * 8 + [1] * 3, "prompts are padded on the left"
    assert output["sampling_per_token_logps"][3].tolist() == [-0.5] * 3 + [0.0] * 3, "precision_correction: the mask"
    metrics = trainer._metrics["train"]
    assert metrics["reward"] == [14 / 4], "_generate_and_score_completions keeps the mean reward for summary.json"
    assert metrics["completions/clipped_ratio"] == [0.25], "a row is whole when its last id is a stop id"
    trainer.logprob = None
    assert "sampling_per_token_logps" not in batch(trainer), "_correct_precision: rollouts without log-probs"


@pytest.mark.parametrize(
    ("settings", "there"),
    [({}, False), ({"num_iterations": 2}, True), ({"steps_per_generation": 2, "num_generations": 8}, True)],
)
def test_old_log_probs_are_there_only_where_updates_share_a_generation(
    tmp_path: Path, settings: dict[str, Any], there: bool
) -> None:
    trainer = make(tmp_path, **settings)
    trainer.num_generations = 4
    assert ("old_per_token_logps" in batch(trainer)) is there, "_correct_precision uses them instead of a forward"


def test_trainer_log_probs_are_of_the_tempered_full_vocabulary(tmp_path: Path) -> None:
    trainer = make(tmp_path, temperature=0.7, num_iterations=2)
    trainer.model.eval()
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": "abc"}] * 4
    trainer.model.train()
    output = trainer._generate_and_score_completions(rows)
    ids, prompt = output["completion_ids"], output["prompt_ids"]
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.cat([prompt, ids], 1)).logits[:, prompt.shape[1] - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask = output["completion_mask"].bool()
    message = "the engine's log-probs must be log softmax(logits / temperature), without truncation"
    torch.testing.assert_close(
        output["old_per_token_logps"][mask], expected[mask], msg=lambda text: f"{message}\n{text}"
    )
    assert not output["old_per_token_logps"][~mask].any(), "precision_correction: padding has log-prob 0"


def test_the_loss_takes_an_advantage_per_token_and_no_sampling_log_probs(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    inputs = batch(trainer)
    loss = trainer._compute_loss(trainer.model, inputs)
    per_token = inputs["advantages"].unsqueeze(1).expand(-1, 6).contiguous()
    assert torch.equal(trainer._compute_loss(trainer.model, {**inputs, "advantages": per_token}), loss), (
        "_correct_precision hands the loss advantages of shape (rows, tokens)"
    )
    other = {**inputs, "sampling_per_token_logps": inputs["sampling_per_token_logps"] * 99}
    assert torch.equal(trainer._compute_loss(trainer.model, other), loss), "then our correction would be counted twice"


def test_the_buffer_keeps_an_advantage_per_token_beside_its_row() -> None:
    rows = torch.arange(6)
    advantages = rows[:, None] + torch.zeros(6, 3)
    halves = split_tensor_dict(shuffle_sequence_dict({"advantages": advantages, "completion_ids": rows[:, None]}), 2)
    assert all(torch.equal(half["advantages"][:, :1], half["completion_ids"].float()) for half in halves)


def test_the_mode_is_the_models(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.model.eval()
    trainer._generate_and_score_completions([{"prompt": "abc"}] * 4)
    assert trainer._metrics["eval"]["reward"] and not trainer._metrics["train"], "which stream of uids is drawn from"


@pytest.mark.parametrize("peft", [None, LoraConfig(r=2, target_modules="all-linear")])
def test_forward_is_replaced_on_the_instance(tmp_path: Path, peft: Any) -> None:
    model = make(tmp_path, peft=peft).model
    base = model.get_base_model() if peft else model
    assert "forward" in vars(base), "model_for_rollout takes it off and puts it back"


def test_a_step_is_closed_before_it_is_logged(tmp_path: Path) -> None:
    """Our metrics are appended at on_step_end; these are the names that TRL's users look for in the same entry."""
    trainer = make(tmp_path)
    trainer.train()
    entry = trainer.state.log_history[0]
    names = {"loss", "grad_norm", "learning_rate", "num_tokens", "step_time", "reward", "reward_std", "entropy"}
    lengths = {f"completions/{which}_length" for which in ("mean", "min", "max")}
    assert names | lengths | {"rewards/count/mean", "frac_reward_zero_std", "clip_ratio/region_mean"} <= entry.keys()
    source = inspect.getsource(Trainer._run_epoch)
    assert source.index("on_step_end") < source.index("_maybe_log_save_evaluate"), "FastGRPOTrainer._end_step"


def test_the_tool_loop_asks_again_for_some_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say which rows they are: RowLedger.identify knows them by prompt + completion, in ascending order."""
    monkeypatch.setattr(grpo_trainer, "parse_response", lambda *args, **kwargs: {"role": "assistant", "content": ""})
    asked: list[Any] = []

    def single_turn(prompt_ids: Any, images: Any, fields: Any, **kwargs: Any) -> Any:
        asked.append((prompt_ids, images, fields, kwargs))
        return [[7] for _ in prompt_ids], [[-0.5] for _ in prompt_ids]

    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    says = {"role": "assistant", "content": "no tool"}
    trainer = SimpleNamespace(
        max_tool_calling_iterations=3, max_completion_length=20, use_vllm=False, vllm_mode="colocate", _is_vlm=False,
        tools=[len], environment_factories=None, _tokenizer=None, _get_tool_suffix_ids=lambda messages: [50, 51],
        _sync_tool_dicts=[{"add": lambda: 3}] * 4, _async_tool_dicts=[{}] * 4, _generate_single_turn=single_turn,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1024)),
    )  # fmt: skip
    mask, _, completion_ids, logprobs, *_ = GRPOTrainer._tool_call_loop(
        trainer,
        [[{"role": "user", "content": "x"}] for _ in range(4)],
        [[1, 2]] * 4,
        [[9], [8], [9], [8, 8]],
        [[says], [dict(calls)], [dict(calls)], [dict(calls)]],
        [[-1.0], [-1.0], [-1.0], [-1.0, -1.0]],
        None,
        {},
    )
    ((prompt_ids, images, fields, kwargs),) = asked
    assert prompt_ids == [[1, 2, 8, 50, 51], [1, 2, 9, 50, 51], [1, 2, 8, 8, 50, 51]], "RowLedger.identify"
    assert (images, fields, kwargs) == (None, {}, {"num_generations": 1, "has_tool_images": False})
    assert completion_ids[1] == [8, 50, 51, 7] and mask[1] == [1, 0, 0, 1]
    assert logprobs[1] == [-1.0, 0.0, 0.0, -0.5], "_correct_precision: a tool's tokens have log-prob 0 and are masked"
