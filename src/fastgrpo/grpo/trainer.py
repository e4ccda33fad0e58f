"""FastGRPOTrainer: TRL's GRPOTrainer with its responses sampled by FastGRPO's engine.

It overrides TRL's private seam `_generate_single_turn`, so TRL is pinned to a minor release, and
tests/test_trl_contract.py holds every fact that this file leans on. Rewards, advantages, losses, logging and
checkpoints are TRL's.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing

from fastgrpo.config import ROLLOUT_DTYPES, FastGRPOConfig
from fastgrpo.grpo.accounting import Account, StepClock, write_json
from fastgrpo.grpo.rollouts import RolloutBar, RowLedger, check_correctable, precision_correction, sampling_params
from fastgrpo.speculation.engine import Engine, Rollout

logger = get_logger(__name__)

STATE_FILE = "fastgrpo_state.json"  # in a checkpoint's folder
SUMMARY_FILE = "summary.json"  # in the output folder

_MIXED_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FastGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts come from `fastgrpo.Engine`. Constructor, datasets, rewards and metrics are TRL's.

    `args` is a FastGRPOConfig. Added metrics: time/{rollout,reward,logprob,update} (seconds per optimizer step) and
    throughput/{rollout,train}_tokens_per_s; with the precision correction, TRL's own sampling/* names and
    rollout/capped_fraction. The end of `train` writes summary.json into the output folder.

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
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else str(model.config._name_or_path)
            args = FastGRPOConfig(f"{name.split('/')[-1] or 'model'}-GRPO")
        if not isinstance(args, FastGRPOConfig):
            raise TypeError(
                f"args is a {type(args).__name__}, but FastGRPOTrainer needs a fastgrpo.FastGRPOConfig: the fields are "
                "the same, change the name."
            )
        self._sampling = sampling_params(args)  # before TRL loads a model
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
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
        self._refuse_what_the_engine_cannot_run()
        self._weights_dtype = self._base_model().dtype
        self._training_dtype = _MIXED_PRECISION.get(self.accelerator.mixed_precision, self._weights_dtype)
        named = args.rollout_dtype
        self._rollout_dtype = self._training_dtype if named is None else ROLLOUT_DTYPES[named]
        self._corrects = check_correctable(args, rollout=self._rollout_dtype, training=self._training_dtype)
        self._engine: Engine | None = None
        self._ledger: RowLedger | None = None
        self._generations = 0  # of training, ever: goes into the uids, so it survives in checkpoints
        self._eval_generations = 0  # of the evaluation under way
        self._warned: set[str] = set()
        self._account = Account(self.accelerator.device)
        self.add_callback(StepClock(self._begin_step, self._end_step))

    def _refuse_what_the_engine_cannot_run(self) -> None:
        if self._dist.fsdp_version == 2:
            raise NotImplementedError(
                "FSDP2 keeps weights sharded during generation, which FastGRPO's engine does not gather yet. Use DDP, "
                "DeepSpeed ZeRO or FSDP1 (fsdp_version: 1)."
            )
        if is_peft_model(self.model) and any(c.is_prompt_learning for c in self.model.peft_config.values()):
            raise ValueError(
                "This PEFT adapter is a learned prompt, which lives outside the model that the engine runs. Use LoRA "
                "or another adapter that is injected into the layers."
            )

    # The model that the engine runs

    def _base_model(self) -> PreTrainedModel:
        """The causal LM itself, adapters live inside it: no DDP, DeepSpeed, FSDP or PEFT wrapper around."""
        unwrapped = self.accelerator.unwrap_model(self.model_wrapped)
        return unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped

    @contextmanager
    def _model_for_rollout(self) -> Iterator[PreTrainedModel]:
        """The model with whole weights on this rank and its class's own forward.

        Weights are gathered once per generation, because ranks finish their rows at different times. accelerate and TRL
        hang forwards of theirs (autocast, fused head) on the instance, bound to it: a copy of the model in another
        precision would run the original's weights, and a rollout in full precision would be autocast.
        """
        if self._dist.is_zero3:
            gathered: Any = unwrap_model_for_generation(self.model_wrapped, self.accelerator)
        else:
            gathered = self._dist.summon_full_params(self.model_wrapped, recurse=True, writeback=False)
        with gathered:
            model = self._base_model()
            patched = vars(model).pop("forward", None)
            try:
                yield model
            finally:
                if patched is not None:
                    model.forward = patched

    # The seam

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        evaluation = not self.model.training
        self._ledger = RowLedger(
            evaluation=evaluation,
            generation=self._eval_generations if evaluation else self._generations,
            first_row=self.accelerator.process_index * len(inputs),
        )
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._ledger = None
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
        limits = self._ledger.limits(rows, prompt_ids, self.max_completion_length)
        rollout = self._rollout(prompt_ids, uids=self._ledger.uids(rows), limits=self._fit(prompt_ids, limits))
        completion_ids = [completion.token_ids for completion in rollout.completions]
        self._ledger.record(rows, prompt_ids, completion_ids)
        self._account.add_rollout(rollout.stats.completion_tokens)
        return completion_ids, [completion.logprobs for completion in rollout.completions]

    def _fit(self, prompts: list[list[int]], limits: list[int]) -> list[int]:
        """The limits, cut to what the model's context leaves. Raises ValueError for a prompt that leaves nothing."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if context is None:
            return limits
        room = [context - len(prompt) for prompt in prompts]
        if min(room) < 1:
            raise ValueError(
                f"A prompt of {max(map(len, prompts))} tokens leaves no room for a response in the model's context of "
                f"{context}. Filter long prompts out of the dataset; they are never truncated."
            )
        if any(free < limit for free, limit in zip(room, limits, strict=True)):
            self._warn_once(f"Some prompts leave less than max_completion_length in the model's context of {context}.")
        return [min(free, limit) for free, limit in zip(room, limits, strict=True)]

    def _rollout(self, prompts: list[list[int]], *, uids: list[int], limits: list[int]) -> Rollout:
        bar = RolloutBar(wanted=self.accelerator.is_main_process and not self.args.disable_tqdm)
        with self._account.phase("rollout"), self._model_for_rollout() as model:
            if self._engine is None:
                other = None if self._rollout_dtype == self._weights_dtype else self._rollout_dtype
                self._engine = Engine(model, slots=self.args.rollout_slots, dtype=other)
            try:
                return self._engine.generate(
                    prompts,
                    self._sampling,
                    max_new_tokens=limits,
                    stop_token_ids=self.eos_token_ids,
                    seed=self.args.seed,
                    uids=uids,
                    on_round=bar.update,
                )
            finally:
                bar.close()

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
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self._account.phase("logprob"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
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
        self._account = Account(self.accelerator.device)
        finished = False
        try:
            result = super().train(*args, **kwargs)
            finished = True
            return result
        finally:
            self.model.train()
            if self.accelerator.is_main_process:
                write_json(Path(self.args.output_dir) / SUMMARY_FILE, {"finished": finished, **self.summary()})

    def summary(self) -> dict[str, Any]:
        """What summary.json holds: steps, tokens, seconds, shares, ceiling of faster sampling, rewards, settings."""
        packages = ("fastgrpo", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
        return {
            **self._account.summary(),
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
