"""FastGRPOConfig: TRL's fields under TRL's names, and every field that cannot be honoured refused by name."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from fastgrpo.config import POLICY_KNOBS, FastGRPOConfig, policy_of
from fastgrpo.speculation.policy import FixedPolicy, OffPolicy, PaperPolicy, ThresholdPolicy


def make(folder: Path, **settings: Any) -> FastGRPOConfig:
    return FastGRPOConfig(str(folder), **{"use_cpu": True, **settings})


def test_every_field_of_trl_is_there_with_its_default(tmp_path: Path) -> None:
    ours = {f.name: f for f in dataclasses.fields(FastGRPOConfig)}
    theirs = {f.name: f for f in dataclasses.fields(GRPOConfig)}
    rollouts = {"rollout_slots", "rollout_dtype", "rollout_correction_cap"}
    updates = {"max_training_token", "max_training_padding_gap"}
    rewards = {"reward_workers", "reward_timeout", "reward_retries"}
    assert set(ours) - set(theirs) == rollouts | updates | rewards | {"draft_model", "spec_policy", *POLICY_KNOBS}
    assert not set(theirs) - set(ours)
    assert [n for n in theirs if ours[n].default != theirs[n].default] == []


def test_a_config_made_on_this_machine_trains_on_it(tmp_path: Path) -> None:
    """TRL turns on bf16 everywhere and then raises where there is no accelerator for it."""
    assert FastGRPOConfig(str(tmp_path)).bf16 is False or FastGRPOConfig(str(tmp_path)).device.type != "cpu"
    assert make(tmp_path).bf16 is False
    assert make(tmp_path, bf16=True).bf16 is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_prompt_length", "max_prompt_length does not exist any more: TRL 1.16 never truncates prompts. Remove it"),
        ("num_generation", "'num_generation' is not a field of FastGRPOConfig. Did you mean 'num_generations'?"),
        ("rollout_slot", "Did you mean 'rollout_slots'?"),
        ("top-p", "Did you mean 'top_p'?"),
        ("xyzzy", "'xyzzy' is not a field of FastGRPOConfig."),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_one(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(TypeError) as error:
        make(tmp_path, **{name: 1})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_vllm": True}, "use_vllm=True asks for another rollout engine.*Set use_vllm=False"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching=True asks for another"),
        ({"use_transformers_paged": True}, "use_transformers_paged=True asks for another"),
        ({"cache_implementation": "static"}, "cache_implementation='static' cannot be honoured.*Remove it"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0.*1.0 is the default"),
        ({"temperature": -1.0}, "temperature=-1.0 must be above 0"),
        ({"temperature": float("nan")}, "temperature is nan, but must be a number"),
        ({"temperature": "1"}, "temperature is '1', but must be a number"),
        ({"temperature": 1e-40}, "temperature is 1e-40, but must lie in"),
        ({"top_p": float("nan")}, "top_p is nan, but must be a number"),
        ({"top_p": 1.5}, r"top_p is 1.5, but must lie in \(0, 1\]"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast', but must be a number"),
        ({"num_generations": "8"}, "num_generations is '8', but must be a whole number"),
        ({"max_completion_length": 8.5}, "max_completion_length is 8.5, but must be a whole number"),
        ({"max_completion_length": "8"}, "max_completion_length is '8', but must be a whole number"),
        ({"rollout_slots": 2.5}, "rollout_slots is 2.5, but must be a whole number"),
        ({"rollout_correction_cap": None}, "rollout_correction_cap is None, but must be a number"),
        ({"generation_kwargs": ["top_p"]}, "generation_kwargs=.'top_p'. must be a mapping"),
        ({"generation_kwargs": {"top_p": "0.9"}}, "top_p is '0.9', but must be a number"),
        ({"generation_kwargs": {"repetition_penalty": "x"}}, "repetition_penalty is 'x', but must be a number"),
        ({"max_completion_length": None}, "max_completion_length=None must be a number"),
        ({"max_completion_length": 0}, "max_completion_length=0 must be a number of tokens, at least 1"),
        ({"rollout_slots": 0}, "rollout_slots=0 must be at least 1"),
        ({"rollout_dtype": "bf16"}, "rollout_dtype='bf16' must be one of float32, bfloat16, float16"),
        ({"reward_workers": -1}, "reward_workers=-1 must be at least 0"),
        ({"reward_retries": -1}, "reward_retries=-1 must be at least 0"),
        ({"reward_timeout": 0.0}, "reward_timeout=0.0 must be above 0"),
        ({"rollout_correction_cap": 0.5}, "rollout_correction_cap=0.5 must be at least 1"),
        ({"spec_policy": "papre"}, "spec_policy='papre': .*did you mean 'paper'. the policies are paper, threshold"),
        ({"spec_policy": True}, "spec_policy=True: True is no policy"),
        ({"max_draft_k": 0}, "spec_policy='paper': max_draft_k is 0, but must be a whole number of at least 1: give"),
        ({"spec_policy": "fixed", "spec_depth": 1.5}, "spec_policy='fixed': spec_depth is 1.5, but must be a whole"),
        ({"spec_policy": "fixed", "spec_nodes": 9}, "spec_nodes is 9, but a draft of depth 3.*lower it to 3"),
        ({"draft_token_length_c": float("nan")}, "draft_token_length_c is nan, but must be finite and > 0"),
        ({"max_training_token": 0}, "max_training_token=0 must be at least 1.*leave it unset"),
        ({"max_training_padding_gap": -1}, "max_training_padding_gap=-1 must be 0.*256 is the default"),
        (
            {"generation_kwargs": {"num_beams": 4}},
            "generation_kwargs key 'num_beams' .4. cannot be honoured.*remove it",
        ),
        ({"generation_kwargs": {"prompt_lookup_num_tokens": 4}}, "key 'prompt_lookup_num_tokens'"),
        ({"generation_kwargs": {"temperature": 0.5}}, "key 'temperature' .0.5. cannot.*set temperature=0.5 itself"),
        ({"generation_kwargs": {"max_new_tokens": 9}}, "key 'max_new_tokens'.*set max_completion_length=9 itself"),
        ({"generation_kwargs": {"do_sample": False}}, "key 'do_sample'.*GRPO needs sampled responses"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **settings)


def test_generation_kwargs_that_can_be_honoured_pass(tmp_path: Path) -> None:
    given = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "do_sample": True, "temperature": 0.8}
    assert make(tmp_path, temperature=0.8, generation_kwargs=given).generation_kwargs == given
    assert make(tmp_path, generation_kwargs='{"top_k": 5}').generation_kwargs == {
        "top_k": 5
    }  # as a command line has it


def test_a_policys_fields_are_its_own_and_unset_ones_its_defaults(tmp_path: Path) -> None:
    assert policy_of(make(tmp_path)) == PaperPolicy()
    knobs = {"verification_capacity": 60, "draft_token_length_c": 0.5, "max_draft_k": 4, "spec_width": 2}
    given = {"verification_capacity": 60, "draft_token_length_c": 0.5, "max_draft_k": 4}
    assert policy_of(make(tmp_path, **knobs)) == PaperPolicy(**given)
    assert policy_of(make(tmp_path, spec_policy="fixed", **knobs)) == FixedPolicy(spec_width=2)
    threshold = policy_of(make(tmp_path, spec_policy="threshold", spec_threshold_rows=5, spec_depth=2))
    assert threshold == ThresholdPolicy(spec_threshold_rows=5, spec_depth=2)
    assert policy_of(make(tmp_path, spec_policy="off", spec_depth=2)) == OffPolicy()
    assert make(tmp_path, spec_policy=False).spec_policy == "off"  # YAML reads a bare off as false


def test_a_config_can_be_copied_and_pickled(tmp_path: Path) -> None:
    config = make(tmp_path, rollout_slots=3)
    assert copy.deepcopy(config).rollout_slots == pickle.loads(pickle.dumps(config)).rollout_slots == 3
