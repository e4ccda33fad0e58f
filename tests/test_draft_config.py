"""Which layers a draft taps, what it takes over from its target, and configs that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny_config, tiny_model
from transformers import AutoConfig

from fastgrpo.models.draft_config import DraftConfig, _rope_for, default_feature_layers, fields_for

GOOD: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0},
    "max_position_embeddings": 1024,
    "vocab_size": 100,
    "draft_vocab_size": 100,
    "feature_layers": [1, 2],
    "target_hidden_size": 32,
    "target_num_layers": 3,
}


@pytest.mark.parametrize("layers", range(1, 61))
def test_default_feature_layers(layers: int) -> None:
    tapped = default_feature_layers(layers)
    assert 1 <= len(tapped) <= 3
    assert list(tapped) == sorted(set(tapped))
    assert tapped[0] >= 1
    assert tapped[-1] <= max(1, layers - 1)  # none after the final norm, where there is another
    if layers >= 7:
        assert tapped == (2, layers // 2, layers - 3)


def test_default_feature_layers_of_shallow_targets() -> None:
    shallow = [default_feature_layers(layers) for layers in range(1, 8)]
    assert shallow == [(1,), (1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 3, 5), (2, 3, 4)]
    with pytest.raises(ValueError, match="a target of 0 layers"):
        default_feature_layers(0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_draft_is_shaped_like_its_target(arch: str) -> None:
    target = tiny_config(arch)
    config = DraftConfig(**fields_for(tiny_model(arch)))
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 64, VOCAB_SIZE)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.head_dim == (16 if arch == "qwen3" else 8)
    assert config.draft_vocab_size == VOCAB_SIZE
    assert config.feature_layers == ((1,) if arch == "mistral" else (1, 2))
    assert (config.target_hidden_size, config.target_num_layers) == (32, target.num_hidden_layers)
    assert config.target_model_type == target.model_type
    assert config.max_position_embeddings == 1024
    theirs = target.rope_parameters["full_attention"] if arch == "gemma3" else target.rope_parameters
    assert config.rope_parameters == theirs
    assert DraftConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_rope_of_targets_with_frequencies_that_are_not_a_drafts() -> None:
    parts = AutoConfig.for_model("llama")
    parts.rope_parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert _rope_for(parts) == {"rope_type": "default", "rope_theta": 500.0}
    parts.rope_parameters = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
    assert _rope_for(parts) == {"rope_type": "default", "rope_theta": 500.0}
    parts.rope_parameters = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
    assert _rope_for(parts) == {"rope_type": "default", "rope_theta": 500.0}
    parts.rope_parameters = {"sliding_attention": {"rope_theta": 7.0}, "full_attention": None}
    assert _rope_for(parts) == {"rope_theta": 7.0}


def test_the_callers_rope_parameters_are_left_alone() -> None:
    rope = {"rope_theta": 10000.0}
    config = DraftConfig(**{**GOOD, "rope_parameters": rope})
    assert rope == {"rope_theta": 10000.0}
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 0}, "hidden_size is 0, but must be a whole number of at least 1"),
        ({"intermediate_size": None}, "intermediate_size is None"),
        ({"intermediate_size": [64, 64]}, r"intermediate_size is \[64, 64\]"),
        ({"head_dim": 7}, "4 heads of size 7 over 2 key/value heads"),
        ({"num_key_value_heads": 3}, "over 3 key/value heads"),
        ({"num_hidden_layers": 2}, "a draft with 2 layers"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"qk_norm": "yes"}, "qk_norm is 'yes'"),
        ({"draft_vocab_size": 101}, "draft_vocab_size is 101, but the target has only 100 tokens"),
        ({"feature_layers": []}, r"feature_layers is \[\]"),
        ({"feature_layers": [0, 1]}, r"feature_layers is \[0, 1\]"),
        ({"feature_layers": [2, 1]}, r"feature_layers is \[2, 1\]"),
        ({"feature_layers": [1, 1]}, r"feature_layers is \[1, 1\]"),
        ({"feature_layers": [4]}, "indices into the target's hidden_states from 1 to 3"),
        ({"feature_layers": [-1]}, r"feature_layers is \[-1\]"),
        ({"feature_layers": ["1"]}, r"feature_layers is \['1'\]"),
        ({"rope_parameters": None}, "must name a rope_theta above 0"),
        ({"rope_parameters": {"rope_type": "default"}}, "must name a rope_theta above 0"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
        ({"rope_theta": 1e4}, "a draft's config has no rope_theta"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    DraftConfig(**GOOD)
    with pytest.raises(ValueError, match=reason):
        DraftConfig(**{**GOOD, **changes})


def test_what_is_missing_is_refused() -> None:
    for name in GOOD:
        with pytest.raises(ValueError, match=name):
            DraftConfig(**{key: value for key, value in GOOD.items() if key != name})
