"""The update bench: one optimizer step of given responses by TRL's own trainer and by ours, with token budgets.

Nothing is sampled: every side gets the same weights and the same record, prompts and responses of random tokens in a
given number and length, as TRL's own generation would hand it over. The gradient's norm shows that all did the same.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig

from fastgrpo.config import FastGRPOConfig
from fastgrpo.evidence.bench import OURS
from fastgrpo.evidence.machine import Report, aligned
from fastgrpo.evidence.step import TRL, TimedFastGRPOTrainer, TimedGRPOTrainer, one_step_arguments
from fastgrpo.evidence.timing import Spread, alternate
from fastgrpo.evidence.workload import as_run


@dataclass(frozen=True)
class UpdateSettings:
    """group_prompts x group_size responses of at most new_tokens to prompts of about `context` tokens.

    batch: rows of a micro-batch, as both trainers take them. budgets: tokens of a sub-batch where ours gets all rows in
    one micro-batch.
    """

    model: str = "smollm2-135m"
    dtype: str = "float32"
    group_prompts: int = 8
    group_size: int = 8
    new_tokens: int = 16
    context: int = 40
    batch: int = 8
    budgets: tuple[int, ...] = (512, 1024, 3072)
    gradient_checkpointing: bool = False
    repeats: int = 1
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows % self.batch:
            raise ValueError(
                f"{self.group_prompts} prompts x {self.group_size} responses are {self.rows} rows, and micro-batches "
                f"of {self.batch} do not divide them: choose another --batch."
            )

    @property
    def rows(self) -> int:
        return self.group_prompts * self.group_size


@dataclass(frozen=True)
class Update:
    """One measured update: its tokens, its seconds, those of its forward passes, and the norm of its gradient."""

    tokens: int  # of prompts and responses, a prompt counted with each of its responses
    seconds: float
    forward_s: float
    grad_norm: float


class _Given:
    """A trainer that finds its responses sampled and scored."""

    record: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return dict(self.record)


class _OurUpdate(_Given, TimedFastGRPOTrainer):
    pass


class _TheirUpdate(_Given, TimedGRPOTrainer):
    pass


def update_bench(
    settings: UpdateSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], None],
) -> Report:
    """Measure every side in turn, after a tiny update of each trainer, with a `note` of each as it is done."""
    tiny = replace(settings, group_prompts=1, group_size=2, batch=2)
    for name in (TRL, OURS):
        one_update(name, None, tiny, model, tokenizer)

    def side(name: str, budget: int | None) -> Callable[[int], Update]:
        def run(repeat: int) -> Update:
            update = one_update(name, budget, replace(settings, seed=settings.seed + repeat), model, tokenizer)
            note(f"{label(name, budget, settings)}: {update.seconds:.2f} s")
            return update

        return run

    kinds = [(TRL, None), (OURS, None), *((OURS, budget) for budget in settings.budgets)]
    done = alternate({label(*kind, settings): side(*kind) for kind in kinds}, settings.repeats)
    theirs = Spread.of([update.seconds for update in done[TRL]]).median
    results = [_result(*kind, settings, done[label(*kind, settings)], theirs) for kind in kinds]
    return Report("update", as_run(settings, model), render(results), results)


def label(name: str, budget: int | None, settings: UpdateSettings) -> str:
    return name if budget is None else f"{name}, {settings.rows} rows cut to {budget} tokens"


def one_update(
    name: str, budget: int | None, settings: UpdateSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Update:
    """One optimizer step of the trainer called `name`, on a copy of `model`."""
    ours = name == OURS
    with tempfile.TemporaryDirectory() as folder:
        batch = settings.batch if budget is None else settings.rows
        arguments = one_step_arguments(settings, folder, settings.rows, batch)
        trainer = (_OurUpdate if ours else _TheirUpdate)(
            model=copy.deepcopy(model),
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=FastGRPOConfig(**arguments, max_training_token=budget) if ours else GRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": ["unused"] * settings.group_prompts}),
            processing_class=tokenizer,
        )
        trainer.record = given_record(settings, len(tokenizer), trainer.accelerator.device)
        trainer.remove_callback(PrinterCallback)  # standard output is the report's
        trainer.train()
        history = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
        tokens = int(trainer.record["prompt_mask"].sum() + trainer.record["completion_mask"].sum())
        update = Update(tokens, trainer.seconds()["update"], trainer.forward_s, history["grad_norm"])
    del trainer
    gc.collect()  # trainers hold themselves in circles, and with them the copy of the model
    return update


def given_record(settings: UpdateSettings, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """What TRL's `_generate_and_score_completions` returns, its groups together; lengths are spread evenly."""
    generator = torch.Generator().manual_seed(settings.seed)

    def lengths(count: int, low: int, high: int) -> torch.Tensor:
        return torch.linspace(low, high, count).round().long()[torch.randperm(count, generator=generator)]

    longest = settings.context + settings.context // 4
    prompts = lengths(settings.group_prompts, max(1, settings.context - settings.context // 4), longest)
    responses = lengths(settings.rows, max(1, settings.new_tokens // 4), settings.new_tokens)
    prompt_mask = (torch.arange(longest) >= longest - prompts[:, None]).long()
    prompt_ids = torch.randint(vocabulary, prompt_mask.shape, generator=generator)
    completion_mask = (torch.arange(settings.new_tokens) < responses[:, None]).long()
    record = {
        "prompt_ids": prompt_ids.repeat_interleave(settings.group_size, 0),
        "prompt_mask": prompt_mask.repeat_interleave(settings.group_size, 0),
        "completion_ids": torch.randint(vocabulary, completion_mask.shape, generator=generator),
        "completion_mask": completion_mask,
        "advantages": torch.randn(settings.rows, generator=generator),
        "num_items_in_batch": completion_mask.sum(),
    }
    return {name: value.to(device) for name, value in record.items()}


def _result(
    name: str, budget: int | None, settings: UpdateSettings, updates: Sequence[Update], theirs: float
) -> dict[str, Any]:
    spread = Spread.of([update.seconds for update in updates])
    return {
        "engine": name,
        "policy": "off",  # nothing is sampled, so nothing is drafted
        "budget": budget,
        "micro_batch": settings.batch if budget is None else settings.rows,
        "rows": settings.rows,
        "tokens_per_s": updates[0].tokens / spread.median,
        "tokens_per_target_pass": None,
        "spread": [updates[0].tokens / spread.high, updates[0].tokens / spread.low],
        "update_s": spread.median,
        "update_spread": [spread.low, spread.high],
        "forward_s": Spread.of([update.forward_s for update in updates]).median,  # a part of the update
        "ratio": theirs / spread.median,
        "grad_norm": updates[0].grad_norm,
        "repeats": len(updates),
    }


def render(results: Sequence[dict[str, Any]]) -> str:
    header = ("engine", "micro-batch", "token budget", "update s", "(its forward)", "ratio to trl", "gradient norm")
    keys = ("engine", "micro_batch", "budget", "update_s", "forward_s", "ratio", "grad_norm")
    return aligned(header, [[r[key] for key in keys] for r in results])
