"""The model that is trained, as the engine runs it: unwrapped, weights whole, its own forward; and what it cannot run.

Neither trains nor samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation


def check_runnable(model: Any, backend: DistributedBackend, *, drafts: bool) -> None:
    """Raise NotImplementedError or ValueError, with the remedy, for a training that the engine cannot sample for."""
    if backend.fsdp_version == 2:
        raise NotImplementedError(
            "FSDP2 keeps weights sharded during generation, which FastGRPO's engine does not gather yet. Use DDP, "
            "DeepSpeed ZeRO or FSDP1 (fsdp_version: 1)."
        )
    if drafts and (backend.is_zero3 or backend.is_fsdp):
        raise NotImplementedError(
            "draft_model does not go with sharded weights (DeepSpeed ZeRO-3, FSDP) yet: the draft would be sharded as "
            "it is loaded, and nobody gathers it. Use DDP or ZeRO 1 or 2, or train without draft_model."
        )
    if is_peft_model(model) and any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ValueError(
            "This PEFT adapter is a learned prompt, which lives outside the model that the engine runs. Use LoRA "
            "or another adapter that is injected into the layers."
        )


def base_model(wrapped: Any, accelerator: Accelerator) -> PreTrainedModel:
    """The causal LM itself, adapters live inside it: no DDP, DeepSpeed, FSDP or PEFT wrapper around."""
    unwrapped = accelerator.unwrap_model(wrapped)
    return unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped


@contextmanager
def model_for_rollout(wrapped: Any, accelerator: Accelerator, backend: DistributedBackend) -> Iterator[PreTrainedModel]:
    """The model with whole weights on this rank and its class's own forward.

    Weights are gathered once per generation, because ranks finish their rows at different times. accelerate and TRL
    hang forwards of theirs (autocast, fused head) on the instance, bound to it: a copy of the model in another
    precision would run the original's weights, and a rollout in full precision would be autocast.
    """
    if backend.is_zero3:
        gathered: Any = unwrap_model_for_generation(wrapped, accelerator)
    else:
        gathered = backend.summon_full_params(wrapped, recurse=True, writeback=False)
    with gathered:
        model = base_model(wrapped, accelerator)
        patched = vars(model).pop("forward", None)
        try:
            yield model
        finally:
            if patched is not None:
                model.forward = patched
