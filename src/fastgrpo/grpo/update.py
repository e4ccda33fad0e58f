"""The update of TRL's trainer in sub-batches: the gradient, the loss and the metrics of the whole, in less memory.

Losses are TRL's own. Each sub-batch's is weighted so that their sum is that of the whole batch; gradients are
synchronised with the last. What TRL logs is not linear in sub-batches and is gathered over ranks, so it is computed
once, at the end, by TRL's loss over the whole batch with the log-probs that the sub-batches gave.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer

from fastgrpo.grpo import shared_prompts
from fastgrpo.grpo.batching import can_cut, cut, loss_mask, plan, prompts_of, weights
from fastgrpo.grpo.live_model import base_model


class Part(dict):
    """A sub-batch: TRL's record of `rows`. A `filler` keeps this rank in step with the others and weighs nothing."""

    rows: Sequence[int]
    weight: float = 1.0  # of the loss
    bonus_weight: float = 1.0  # of the entropy bonus in it
    filler: bool = False

    def __init__(self, record: dict[str, Any], rows: Sequence[int], multiple: int) -> None:
        super().__init__(cut(record, rows, multiple=multiple))
        self.rows = rows


class _Alone:
    """An accelerator to a loss that is neither logged nor the last of its step: nothing is gathered."""

    sync_gradients = False

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


class _Scores:
    """Log-probs and entropies of a whole batch, (rows, tokens), as its parts are scored."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.part: Part | None = None  # the one being scored; None when all are
        self.logps: torch.Tensor | None = None
        self.entropies: torch.Tensor | None = None

    def take(self, logps: torch.Tensor, entropies: torch.Tensor | None) -> None:
        if self.part is None or self.part.filler:
            return
        rows, width = torch.as_tensor(self.part.rows, device=logps.device), logps.shape[1]
        if self.logps is None:
            self.logps = logps.new_zeros(self.shape)
            self.entropies = None if entropies is None else entropies.new_zeros(self.shape)
        self.logps[rows, :width] = logps.detach()
        if entropies is not None and self.entropies is not None:
            self.entropies[rows, :width] = entropies.detach()


class SubBatchTrainer(GRPOTrainer):
    """GRPOTrainer that runs every prompt once per group and, with a token budget, cuts its update into sub-batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scores: _Scores | None = None  # while a batch is being updated in parts
        if self.pad_to_multiple_of is None and not self.args.torch_compile:
            for model in (self.model, self.ref_model):
                if model is not None:
                    shared_prompts.install(base_model(model, self.accelerator), max_tokens=self.args.max_training_token)

    # Cutting

    def _cuts(self) -> bool:
        """Whether this run's losses can be cut: not those that compare tokens with all others of the batch."""
        return self.args.max_training_token is not None and self.top_entropy_quantile == 1 and not self.aux_loss_enabled

    def _parts(self, record: dict[str, Any]) -> list[Part]:
        """The record in the same number of parts on every rank, with their weights."""
        chosen = self._chosen_rows(record) if self._cuts() else [list(range(len(record["prompt_ids"])))]
        missing = 0
        if self._cuts() and self.accelerator.num_processes > 1:
            counts = self.accelerator.gather(torch.tensor([len(chosen)], device=self.accelerator.device))
            missing = int(counts.max()) - len(chosen)
        multiple = self.pad_to_multiple_of or 1
        parts = [Part(record, rows, multiple) for rows in chosen]
        losses, bonuses = weights(
            self.loss_type, [len(rows) for rows in chosen], [int(loss_mask(part).sum()) for part in parts]
        )
        for part, loss, bonus in zip(parts, losses, bonuses, strict=True):
            part.weight, part.bonus_weight = loss, bonus
        fillers = [Part(record, chosen[0][:1], multiple) for _ in range(missing)]
        for part in fillers:
            part.filler, part.weight, part.bonus_weight = True, 0.0, 0.0
        return fillers + parts

    def _chosen_rows(self, record: dict[str, Any]) -> list[list[int]]:
        budget, gap = self.args.max_training_token, self.args.max_training_padding_gap
        prompts, lengths = prompts_of(record), record["completion_mask"].sum(1).tolist()
        if not can_cut(record):
            return [list(range(len(prompts)))]
        model = base_model(self.model, self.accelerator)
        if self.pad_to_multiple_of is None and not self.args.torch_compile and shared_prompts.shares(model):
            found = shared_prompts.shared_units(model, prompts, lengths, budget)
            batches = plan([unit.length for unit in found], max_tokens=budget, max_gap=gap)
            return [[row for unit in batch for row in found[unit].rows] for batch in batches]
        widest = max(map(len, prompts))  # rows are padded on both sides, so the longest text is not the widest row
        return plan([widest + length for length in lengths], max_tokens=budget, max_gap=gap)

    # Running the parts

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        started = time.perf_counter()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers, before anything is sampled
            self.optimizer.train()
        record = self._prepare_inputs(inputs)
        parts = self._parts(record)
        if len(parts) == 1:
            self._current_train_step_time += time.perf_counter() - started
            return super().training_step(model, parts[0], num_items_in_batch)
        self._scores = _Scores(record["completion_ids"].shape)
        try:
            for part in parts[:-1]:
                with self._gradients_kept_here(model):
                    super(GRPOTrainer, self).training_step(model, part, num_items_in_batch)
            self._current_train_step_time += time.perf_counter() - started
            super().training_step(model, parts[-1], num_items_in_batch)  # TRL's: counts the step and its time
            with torch.no_grad():
                return super()._compute_loss(model, record)
        finally:
            self._scores = None

    @contextmanager
    def _gradients_kept_here(self, model: torch.nn.Module) -> Iterator[None]:
        state = self.accelerator.gradient_state
        syncs = state.sync_gradients
        state._set_sync_gradients(False)  # as Trainer does between the batches of an optimizer step
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(syncs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch if isinstance(generation_batch, Part) else super()._prepare_inputs(generation_batch)

    def _compute_loss(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        if self._scores is None or not isinstance(inputs, Part):
            return super()._compute_loss(model, inputs)
        with self._aside(self._scores, inputs):
            loss = super()._compute_loss(model, inputs)
        return loss * inputs.weight

    @contextmanager
    def _aside(self, scores: _Scores, part: Part) -> Iterator[None]:
        """TRL's loss of one part without what it does beside: nothing is logged, gathered or adapted."""
        names = ("accelerator", "_metrics", "entropy_coef", "_entropy_window_stats")
        kept = {name: getattr(self, name) for name in names}
        self.accelerator: Any = _Alone(kept["accelerator"])
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self.entropy_coef *= part.bonus_weight / part.weight if part.weight else 0.0
        scores.part = part
        try:
            yield
        finally:
            scores.part = None
            for name, value in kept.items():
                setattr(self, name, value)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = self._scores
        if scores is not None and scores.part is None:
            return scores.logps, scores.entropies, None
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if scores is not None:
            scores.take(result[0], result[1])
        return result
