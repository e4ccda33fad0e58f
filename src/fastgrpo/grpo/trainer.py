"""FastGRPOTrainer: TRL's GRPOTrainer with its responses sampled by FastGRPO's engine.

It overrides TRL's private seam `_generate_single_turn`, so TRL is pinned to a minor release, and
tests/test_trl_contract.py holds every fact that this file leans on. Rewards, advantages, losses, logging and
checkpoints are TRL's.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.models.utils import disable_gradient_checkpointing

from fastgrpo.config import ROLLOUT_DTYPES, FastGRPOConfig, policy_of, sampling_params
from fastgrpo.grpo.accounting import Account, StepClock, write_json
from fastgrpo.grpo.drafts import DraftTally, load_draft
from fastgrpo.grpo.inputs import check_inputs, check_prompts_fit, diverged, guard_rewards, named_rewards
from fastgrpo.grpo.live_model import base_model, check_runnable, model_for_rollout
from fastgrpo.grpo.prompts import check_prompts
from fastgrpo.grpo.rollouts import (
    RolloutBar,
    RowLedger,
    check_correctable,
    fit_to_context,
    precision_correction,
)
from fastgrpo.grpo.scoring import first_turn_decoder, pool_rewards
from fastgrpo.grpo.update import Part, SubBatchTrainer
from fastgrpo.models.draft import DraftModel
from fastgrpo.speculation.engine import Engine, Rollout
from fastgrpo.speculation.proposers import DraftProposer

logger = get_logger(__name__)

STATE_FILE = "fastgrpo_state.json"  # in a checkpoint's folder
SUMMARY_FILE = "summary.json"  # in the output folder

_MIXED_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _our_config(args: Any, model: str | PreTrainedModel) -> FastGRPOConfig:
    if args is None:
        name = model if isinstance(model, str) else str(model.config._name_or_path)
        return FastGRPOConfig(f"{name.split('/')[-1] or 'model'}-GRPO")
    if not isinstance(args, FastGRPOConfig):
        raise TypeError(
            f"args is a {type(args).__name__}, but FastGRPOTrainer needs a fastgrpo.FastGRPOConfig: the fields are "
            "the same, change the name."
        )
    return args


class FastGRPOTrainer(SubBatchTrainer):
    """GRPOTrainer whose rollouts come from `fastgrpo.Engine`. Constructor, datasets, rewards and metrics are TRL's.

    `args` is a FastGRPOConfig. draft_model: a DraftModel, or a folder or hub id of one (default: `args.draft_model`);
    rollouts speculate with it as `args.spec_policy` says, which changes their time and not their tokens. It is bound to
    the model, and moved to its device and to the precision of the rollouts.

    Added metrics: time/{rollout,reward,logprob,update} (seconds per optimizer step) and
    throughput/{rollout,train}_tokens_per_s; with the precision correction, TRL's own sampling/* names and
    rollout/capped_fraction; with a draft, time/draft (part of time/rollout) and of every generation
    spec/{acceptance_rate,mean_accept_length,tokens_per_target_forward,active_rows_mean,off_fraction} and
    spec/{drafted,accepted}_tokens; with row-wise rewards that are scored while rows are decoded (scoring.py), of every
    generation rewards/{overlapped_s,waited_s,workers_ended}. The end of `train` writes summary.json into the output
    folder.

    With a fixed `args.seed`, the tokens of a rollout depend on weights, prompt, and the sequence's place in the run
    (generation number, row), not on rollout_slots, on the other rows or on any global random state.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "fastgrpo"]

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: FastGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        draft_model: DraftModel | str | os.PathLike[str] | None = None,
    ) -> None:
        args = _our_config(args, model)
        # before TRL loads a model and seeds the generators
        check_inputs(model, train_dataset, eval_dataset)
        self._sampling = sampling_params(args)
        self._draft = load_draft(args.draft_model if draft_model is None else draft_model, args)
        super().__init__(
            model=model,
            reward_funcs=named_rewards(reward_funcs),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        if rollout_func is None and environment_factory is None:  # both may bring prompts of their own
            parts = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
            check_prompts({"train_dataset": train_dataset, **parts}, self.processing_class)
        check_runnable(self.model, self._dist, drafts=self._draft is not None)
        self._choose_precision(base_model(self.model, self.accelerator))
        self._engine: Engine | None = None
        self._ledger: RowLedger | None = None
        self._tally, self._drafting = DraftTally(), DraftTally()  # of this rank's generation under way; of the training
        self._generations = 0  # of training, ever: goes into the uids, so it survives in checkpoints
        self._eval_generations = 0  # of the evaluation under way
        self._warned: set[str] = set()
        self._account = Account(self.accelerator.device)
        self._scoring = pool_rewards(self, args, say=self._warn_once)
        self.add_callback(StepClock(self._begin_step, self._end_step))
        guard_rewards(self)
        check_prompts_fit(self)

    def _choose_precision(self, base: PreTrainedModel) -> None:
        """Of training, as `base` and the config have it, and of rollouts, where the draft follows."""
        self._weights_dtype = base.dtype
        self._training_dtype = _MIXED_PRECISION.get(self.accelerator.mixed_precision, self._weights_dtype)
        named = self.args.rollout_dtype
        self._rollout_dtype = self._training_dtype if named is None else ROLLOUT_DTYPES[named]
        self._corrects = check_correctable(self.args, rollout=self._rollout_dtype, training=self._training_dtype)
        if self._draft is not None:
            self._draft.bind(base).to(device=self.accelerator.device, dtype=self._rollout_dtype)

    # The seam

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        evaluation = not self.model.training
        self._ledger = RowLedger(
            evaluation=evaluation,
            generation=self._eval_generations if evaluation else self._generations,
            first_row=self.accelerator.process_index * len(inputs),
        )
        self._tally = DraftTally()
        self._scoring.begin(inputs, first_turn_decoder(self, inputs))
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._ledger = None
            self._scoring.end()
        if self._draft is not None:
            self._log_drafting("eval" if evaluation else "train")
        if evaluation:
            self._eval_generations += 1
            return output
        self._generations += 1
        self._account.rewards.append(self._metrics["train"]["reward"][-1])
        if self._corrects:
            self._correct_precision(output)
        return output

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        if self._is_vlm or images is not None:
            self._warn_once("Multimodal rows are generated by TRL's own path: FastGRPO's engine reads text only.")
            with self._account.phase("rollout"):
                return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        if self._ledger is None:
            raise RuntimeError(
                "_generate_single_turn was called outside _generate_and_score_completions, so the rows have no place "
                "in the run to take their noise from. To sample from the model yourself, use fastgrpo.Engine."
            )
        rows = self._ledger.identify(prompt_ids)
        wanted = self._ledger.limits(rows, prompt_ids, self.max_completion_length)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        limits = fit_to_context(wanted, prompt_ids, context)
        if limits != wanted:
            self._warn_once(f"Some prompts leave less than max_completion_length in the model's context of {context}.")
        rollout = self._rollout(prompt_ids, uids=self._ledger.uids(rows), limits=limits)
        completion_ids = [completion.token_ids for completion in rollout.completions]
        self._ledger.record(rows, prompt_ids, completion_ids)
        self._account.add_rollout(rollout.stats.completion_tokens)
        if self._draft is not None:
            self._account.add_drafting(rollout.stats.draft_s)
            self._tally.add_rollout(rollout)
        return completion_ids, [completion.logprobs for completion in rollout.completions]

    def _rollout(self, prompts: list[list[int]], *, uids: list[int], limits: list[int]) -> Rollout:
        bar = RolloutBar(wanted=self.accelerator.is_main_process and not self.args.disable_tqdm)
        live = model_for_rollout(self.model_wrapped, self.accelerator, self._dist)
        with self._account.phase("rollout"), live as model:
            if self._engine is None:
                self._engine = self._make_engine(model)
            try:
                return self._engine.generate(
                    prompts,
                    self._sampling,
                    max_new_tokens=limits,
                    stop_token_ids=self.eos_token_ids,
                    seed=self.args.seed,
                    uids=uids,
                    on_completion=self._scoring.listener(prompts),
                    on_round=bar.update,
                )
            except FloatingPointError as error:
                raise diverged(error, self.state.global_step, self.args.output_dir) from error
            finally:
                bar.close()

    def _make_engine(self, model: PreTrainedModel) -> Engine:
        return Engine(
            model,
            slots=self.args.rollout_slots,
            dtype=None if self._rollout_dtype == self._weights_dtype else self._rollout_dtype,
            proposer=None if self._draft is None else DraftProposer(self._draft, self._sampling.temperature),
            policy=policy_of(self.args),
        )

    def _log_drafting(self, mode: str) -> None:
        """Log what drafting came to in this generation, over all ranks."""
        counts = self.accelerator.gather(self._tally.counts(self.accelerator.device))
        generation = DraftTally()
        generation.add(counts)
        if mode == "train":
            self._drafting.add(counts)
        for name, value in generation.metrics().items():
            self._metrics[mode][name].append(value)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    # The precision correction

    def _correct_precision(self, output: dict[str, Any]) -> None:
        """Weight the advantages, (rows,) -> (rows, tokens), by how much likelier the trainer finds each token."""
        if "sampling_per_token_logps" not in output:
            self._warn_once("The rollouts came without log-probs, so the precision correction is off for them.")
            return
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        correction = precision_correction(
            output["old_per_token_logps"] if "old_per_token_logps" in output else self._trainer_logprobs(output),
            output["sampling_per_token_logps"],
            mask,
            cap=self.args.rollout_correction_cap,
        )
        output["advantages"] = output["advantages"].unsqueeze(1) * correction.weights
        gathered = {
            "sampling/sampling_logp_difference/mean": self.accelerator.gather(correction.mean_difference).mean(),
            "sampling/sampling_logp_difference/max": self.accelerator.gather(correction.max_difference).max(),
            "sampling/importance_sampling_ratio/mean": self.accelerator.gather(correction.mean_weight).mean(),
            "rollout/capped_fraction": self.accelerator.gather(correction.capped_fraction).mean(),
        }
        for name, value in gathered.items():
            self._metrics["train"][name].append(value.item())

    def _trainer_logprobs(self, output: dict[str, Any]) -> torch.Tensor:
        """The policy's log-probs of the completions, (rows, tokens), by the training forward but without dropout.

        TRL computes them only where several updates share a generation; dropout would add its noise to every weight.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                logprobs, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                    torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                    output["completion_ids"].size(1),
                    batch_size=self.args.per_device_train_batch_size,
                )
        finally:
            self.model.train(was_training)
        return logprobs

    # Where the time goes

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self._account.preparing():
            return super()._prepare_inputs(generation_batch)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._account.phase("reward"):
            rewards = super()._calculate_rewards(*args, **kwargs)
        self._scoring.end(self._log_metric)
        return rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self._account.phase("logprob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if not (isinstance(inputs, Part) and inputs.filler):
            self._account.add_trained(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())
        return super()._compute_loss(model, inputs)

    def _begin_step(self) -> None:
        self._account.begin_step()

    def _end_step(self) -> None:
        numbers = torch.tensor([self._account.end_step()], dtype=torch.float32, device=self.accelerator.device)
        for name, value in self._account.book(self.accelerator.gather(numbers)).items():
            self._metrics["train"][name].append(value)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._eval_generations = 0  # every evaluation draws the same noise
        with self._account.evaluation():
            return super().evaluation_loop(*args, **kwargs)

    # A run and its checkpoints

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer.train, then summary.json; also when the run is interrupted, which leaves the model in train mode."""
        self._account, self._drafting = Account(self.accelerator.device), DraftTally()
        finished = False
        try:
            result = super().train(*args, **kwargs)
            finished = True
            return result
        finally:
            self._scoring.close()
            self.model.train()
            if self.accelerator.is_main_process:
                write_json(Path(self.args.output_dir) / SUMMARY_FILE, {"finished": finished, **self.summary()})

    def summary(self) -> dict[str, Any]:
        """What summary.json holds: steps, tokens, seconds, shares, ceiling of faster sampling, rewards, settings, and
        with a draft what it came to in training."""
        drafting = {}
        if self._draft is not None:
            name, seconds = self._draft.name_or_path, self._account.totals["draft"]
            settings = {"draft": name, "policy": self.args.spec_policy, "draft_seconds": seconds}
            drafting = {"speculation": {**settings, **self._drafting.summary()}}
        packages = ("fastgrpo", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
        return {
            **self._account.summary(),
            **drafting,
            "engine": {
                "slots": self.args.rollout_slots,
                "rollout_dtype": str(self._rollout_dtype).removeprefix("torch."),
                "training_dtype": str(self._training_dtype).removeprefix("torch."),
                "precision_correction": self._corrects,
                "sampling": vars(self._sampling),
                "max_completion_length": self.max_completion_length,
                "seed": self.args.seed,
            },
            "processes": self.accelerator.num_processes,
            "device": self.accelerator.device.type,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in packages},
            },
        }

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            write_json(folder / STATE_FILE, {"micro_step": self._step, "generations": self._generations})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Also restore what TRL forgets: its micro-step and how many generations there were; no uid repeats."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / STATE_FILE
        if file.exists():
            state = json.loads(file.read_text(encoding="utf-8"))
            self._step, self._generations = int(state["micro_step"]), int(state["generations"])
        else:  # a checkpoint of TRL's own trainer: no fewer than it can have done
            every = self.args.steps_per_generation * self.num_iterations
            self._step = self.state.global_step * self.args.gradient_accumulation_steps
            self._generations = -(-self._step // every)
