"""FastGRPOConfig: TRL's GRPOConfig with fields of our own, and checks that refuse what cannot be honoured.

Holds no model code. Every sampling field of GRPOConfig is either honoured by the rollout engine or refused here by
name; nothing is dropped in silence.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from fastgrpo.speculation.policy import PaperPolicy, Policy, ThresholdPolicy, make_policy
from fastgrpo.speculation.requests import real_number, whole_number
from fastgrpo.speculation.sampling import SamplingParams

ROLLOUT_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# The keys of generation_kwargs that the engine has a meaning for; they override the config's field, as in TRL.
MERGED_GENERATION_KWARGS = ("top_p", "top_k", "min_p", "repetition_penalty")

# What the policies can be told: a field each, and where it is unset, the policy's own default holds.
POLICY_KNOBS = tuple(knob.name for policy in (PaperPolicy, ThresholdPolicy) for knob in dataclasses.fields(policy))

_GONE = {
    "max_prompt_length": (
        "max_prompt_length does not exist any more: TRL 1.16 never truncates prompts. Remove it, and filter long "
        "prompts out of the dataset instead."
    ),
}


def unknown_name_message(name: str, known: Iterable[str], what: str) -> str:
    """What to say about a `name` that is no `what` ("field of FastGRPOConfig"), with the nearest known name."""
    if name in _GONE:
        return _GONE[name]
    close = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{name!r} is not a {what}.{hint}"


@dataclass
class FastGRPOConfig(GRPOConfig):
    """GRPOConfig with what FastGRPO adds. Every field of TRL keeps its name, meaning and default.

    One default is resolved differently: `bf16` left unset means mixed precision only where an accelerator supports it,
    so that a config made on a CPU is one that trains there (TRL sets it everywhere and then refuses the machine).

    Args:
        rollout_slots: how many sequences are decoded at once (rows); more requests wait. None leaves it to the engine.
        rollout_dtype: precision of the rollouts: "float32", "bfloat16" or "float16". None is the precision of training
            (the mixed-precision type, else that of the weights). Another precision than training's turns on the
            correction: advantages times min(exp(trainer log-prob - sampler log-prob), rollout_correction_cap).
        rollout_correction_cap: that cap, at least 1.
        max_training_token: tokens, padding included, that go through the model at once in an update. A micro-batch is
            cut into sub-batches of rows of similar length, which changes neither gradients nor what is logged; a row
            longer than that goes alone. None (the default) runs micro-batches whole. Published value: 3072.
        max_training_padding_gap: tokens of padding that a row may add to the shorter ones in its sub-batch.
        draft_model: folder or hub id of a draft model that fits the model (`DraftModel.save_pretrained`). Rollouts
            speculate with it: the same tokens in fewer passes. None decodes plainly; so does `spec_policy="off"`.
        spec_policy: how much is drafted for the rows that are live: "paper", "threshold", "fixed" or "off".
        spec_depth, spec_width, spec_nodes: the draft of "fixed" and "threshold": levels, children of a node (1 is a
            chain) and how many drafted tokens the model verifies.
        spec_threshold_rows: most live rows for which "threshold" drafts.
        verification_capacity, max_draft_token_length, min_draft_token_length, max_draft_k, max_verification_num,
            draft_token_length_c: the knobs of "paper", under their published names. As with every field of a policy,
            None is its default (`fastgrpo.speculation.policy`), and a policy reads and checks its own fields alone.
        reward_workers: processes that score row-wise rewards while other rows are decoded, per rank. None: all cores
            but one, at most 8. 0: rewards are scored in the training process, as TRL does.
        reward_timeout: seconds of wall time after which such a process counts as hung in a row and is replaced. Set it
            far above what a row takes: how busy the machine is should not decide a reward.
        reward_retries: how often a row whose process hung or died is tried again before it scores 0.

    Raises:
        TypeError: an unknown field, with the nearest name.
        ValueError: a field that the rollout engine cannot honour, with the remedy.
    """

    bf16: bool | None = field(
        default=None,
        metadata={"help": "Mixed precision in bfloat16. Unset: where an accelerator supports it."},
    )
    rollout_slots: int | None = field(
        default=None,
        metadata={"help": "Sequences decoded at once; more wait for a free slot. Unset: the engine decides."},
    )
    rollout_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Precision of the rollouts: float32, bfloat16 or float16. Unset: the precision of training. "
            "Another one turns on the correction of the difference."
        },
    )
    rollout_correction_cap: float = field(
        default=2.0,
        metadata={"help": "Cap of the weight exp(trainer log-prob - sampler log-prob) when rollout_dtype is another."},
    )
    max_training_token: int | None = field(
        default=None,
        metadata={"help": "Tokens in the model at once in an update; micro-batches are cut to that. Unset: not cut."},
    )
    max_training_padding_gap: int = field(
        default=256,
        metadata={"help": "Tokens of padding that a row may add to the others of its sub-batch in an update."},
    )
    draft_model: str | None = field(
        default=None,
        metadata={"help": "Folder or hub id of a draft model: rollouts speculate with it. Unset: plain decoding."},
    )
    spec_policy: str = field(
        default="paper",
        metadata={"help": "How much is drafted for the rows that are live: paper, threshold, fixed or off."},
    )
    spec_depth: int | None = field(default=None, metadata={"help": "fixed, threshold: levels of a draft."})
    spec_width: int | None = field(
        default=None, metadata={"help": "fixed, threshold: children of a drafted token, 1 is a chain."}
    )
    spec_nodes: int | None = field(
        default=None, metadata={"help": "fixed, threshold: drafted tokens that are verified."}
    )
    spec_threshold_rows: int | None = field(default=None, metadata={"help": "threshold: most live rows that draft."})
    verification_capacity: int | None = field(
        default=None, metadata={"help": "paper: tokens of a pass that cost no more than one."}
    )
    max_draft_token_length: int | None = field(default=None, metadata={"help": "paper: most levels of a draft."})
    min_draft_token_length: int | None = field(default=None, metadata={"help": "paper: fewest levels of a draft."})
    max_draft_k: int | None = field(default=None, metadata={"help": "paper: most children of a drafted token."})
    max_verification_num: int | None = field(default=None, metadata={"help": "paper: most tokens of a row in a pass."})
    draft_token_length_c: float | None = field(
        default=None, metadata={"help": "paper: the better the draft, the smaller."}
    )
    reward_workers: int | None = field(
        default=None,
        metadata={
            "help": "Processes that score row-wise rewards while other rows are decoded. Unset: all cores but one, at "
            "most 8. 0: none, rewards are scored in the training process."
        },
    )
    reward_timeout: float = field(
        default=60.0,
        metadata={"help": "Seconds after which a scoring process counts as hung in a row and is replaced."},
    )
    reward_retries: int = field(
        default=1,
        metadata={"help": "How often a row whose scoring process hung or died is tried again before it scores 0."},
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> FastGRPOConfig:
        # The dataclass' own __init__ would name the unknown field too, but not the one that was meant.
        known = [f.name for f in dataclasses.fields(cls)] if kwargs else []
        for name in kwargs:
            if name not in known:
                raise TypeError(unknown_name_message(name, known, "field of FastGRPOConfig"))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        if self.spec_policy is False:  # what YAML makes of a bare off
            self.spec_policy = "off"
        _refuse_other_engines(self)
        _check_numbers(self)
        super().__post_init__()
        _check_our_fields(self)
        _check_reward_fields(self)
        _check_generation_kwargs({} if self.generation_kwargs is None else self.generation_kwargs, self.temperature)
        sampling_params(self)
        policy_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Every field and its value; transformers takes any name that ends in "_token" for a secret, and hides it."""
        return {**super().to_dict(), "max_training_token": self.max_training_token}


def policy_of(config: FastGRPOConfig) -> Policy:
    """The policy that `config` names, with the knobs that it sets. Raises ValueError for what the policy refuses."""
    values = {name: getattr(config, name) for name in POLICY_KNOBS}
    try:
        return make_policy(config.spec_policy, **{name: value for name, value in values.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"spec_policy={config.spec_policy!r}: {error}") from None


def sampling_params(config: FastGRPOConfig) -> SamplingParams:
    """The law that `config` asks for; generation_kwargs override its fields, as in TRL. ValueError for a bad value."""
    given = config.generation_kwargs or {}

    def value(name: str, off: float) -> Any:
        wanted = given.get(name, getattr(config, name))
        return off if wanted is None else wanted  # None means off in TRL

    return SamplingParams(
        temperature=config.temperature,
        top_p=value("top_p", 1.0),
        top_k=value("top_k", 0),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
    )


def _refuse_other_engines(config: FastGRPOConfig) -> None:
    """Settings that choose another engine; before TRL's own checks, whose messages would send users there."""
    if config.use_vllm:
        raise ValueError(
            "use_vllm=True asks for another rollout engine than FastGRPO's own. Set use_vllm=False, or use "
            "trl.GRPOTrainer for rollouts by vLLM."
        )
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        if getattr(config, name):
            raise ValueError(
                f"{name}=True asks for another rollout engine than FastGRPO's own, which already lets finished rows "
                f"leave and waiting ones enter. Remove {name}; rollout_slots sets how many rows are live."
            )
    if config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be honoured: FastGRPO's rollouts use their "
            "own key-value cache. Remove it."
        )


def _check_numbers(config: FastGRPOConfig) -> None:
    """Fields that are numbers, TRL's too, before anyone asks for their range. A policy checks its own fields."""
    checks = {int: whole_number, float: real_number}
    theirs = {f.name for f in dataclasses.fields(GRPOConfig)} - {"temperature"}  # whose None is TRL's to judge
    for name, hint in get_type_hints(type(config)).items():
        options = set(get_args(hint) or (hint,))
        kinds, value = options - {type(None)}, getattr(config, name, None)
        if name in POLICY_KNOBS or len(kinds) != 1 or (kind := kinds.pop()) not in checks:
            continue
        if value is not None or not (type(None) in options or name in theirs):
            checks[kind](name, value)


def _check_our_fields(config: FastGRPOConfig) -> None:
    if config.rollout_slots is not None and config.rollout_slots < 1:
        raise ValueError(
            f"rollout_slots={config.rollout_slots} must be at least 1. Raise it, or leave it unset: the engine decides."
        )
    if config.rollout_dtype is not None and config.rollout_dtype not in ROLLOUT_DTYPES:
        raise ValueError(
            f"rollout_dtype={config.rollout_dtype!r} must be one of {', '.join(ROLLOUT_DTYPES)}. Leave it unset for "
            "the precision of training."
        )
    if not config.rollout_correction_cap >= 1:
        raise ValueError(
            f"rollout_correction_cap={config.rollout_correction_cap} must be at least 1, or tokens on which sampler "
            "and trainer agree would be weighted down. 2.0 is the default."
        )
    if config.max_training_token is not None and config.max_training_token < 1:
        raise ValueError(
            f"max_training_token={config.max_training_token} must be at least 1. Raise it, or leave it unset: "
            "micro-batches are not cut."
        )
    if config.max_training_padding_gap < 0:
        raise ValueError(
            f"max_training_padding_gap={config.max_training_padding_gap} must be 0 (rows of one length together) or "
            "more. 256 is the default."
        )
    if not config.temperature > 0:
        raise ValueError(
            f"temperature={config.temperature} must be above 0: TRL's loss divides the logits by it, and greedy "
            "responses of one prompt are all the same, so they carry no advantage. 1.0 is the default."
        )
    if config.max_completion_length is None or config.max_completion_length < 1:
        raise ValueError(
            f"max_completion_length={config.max_completion_length} must be a number of tokens, at least 1. 512 is the "
            "default."
        )


def _check_reward_fields(config: FastGRPOConfig) -> None:
    for name in ("reward_workers", "reward_retries"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} must be at least 0. 0 switches it off.")
    if not config.reward_timeout > 0:
        raise ValueError(
            f"reward_timeout={config.reward_timeout} must be above 0: it is the seconds that a row may take. 60 is the "
            "default."
        )


def _check_generation_kwargs(kwargs: Mapping[str, Any], temperature: float) -> None:
    if not isinstance(kwargs, Mapping):
        raise ValueError(
            f"generation_kwargs={kwargs!r} must be a mapping of names to values, such as {{'repetition_penalty': 1.1}}."
        )
    for key, value in kwargs.items():
        if key in MERGED_GENERATION_KWARGS or (key == "do_sample" and value):
            continue
        if key == "temperature":
            if value == temperature:
                continue
            remedy = f"the loss would still divide by temperature={temperature}; set temperature={value} itself"
        elif key in ("max_new_tokens", "max_length"):
            remedy = f"set max_completion_length={value} itself"
        elif key == "do_sample":
            remedy = "GRPO needs sampled responses; remove it"
        else:
            remedy = f"the engine has no such setting (it takes {', '.join(MERGED_GENERATION_KWARGS)}); remove it"
        raise ValueError(f"generation_kwargs key {key!r} ({value!r}) cannot be honoured: {remedy}.")
