"""What a draft model is shaped like, on its own and for a given target: `DraftConfig`. No weights and no passes."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

# Rotary frequencies that hang on neither the other rows nor a part of the head.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "target_num_layers",
)
# What transformers itself puts into a config's keywords; any other unknown key would be silently without effect.
_TRANSFORMERS_KEYS = {
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "torch_dtype",
}


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The `hidden_states` indices to tap of a target with that many layers: low, middle, high, distinct and ascending.

    From 7 layers on EAGLE-3's (2, n // 2, n - 3); below, what there is between the first layer and the last but one.
    """
    if layers < 1:
        raise ValueError(f"a target of {layers} layers has no features to tap: pass one with at least 1 layer.")
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({1, max(1, layers // 2), max(1, layers - 1)}))


class DraftConfig(PretrainedConfig):
    """Shape of a draft and of the target that it was made for.

    feature_layers: indices into the target's Hugging Face `hidden_states`, ascending; j is the input of layer j, and
    target_num_layers the output of the final norm (alone: EAGLE-1's single feature). draft_vocab_size below vocab_size
    means a reduced vocabulary, which comes with a map (d2t, t2d). rope_parameters: as transformers has them, flat.
    target_name is for people: a difference is warned about, one of the shape refused.
    Raises ValueError for what cannot be, for keys that are missing and for keys that it does not know.
    """

    model_type = "fastgrpo_eagle3"

    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    num_hidden_layers: int = 1
    hidden_act: str = "silu"
    rms_norm_eps: float = 0.0
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 0
    qk_norm: bool = False
    vocab_size: int = 0
    draft_vocab_size: int = 0
    feature_layers: tuple[int, ...] = ()
    target_hidden_size: int = 0
    target_num_layers: int = 0
    target_model_type: str = ""
    target_name: str = ""

    def __post_init__(self, **kwargs: Any) -> None:
        kind = kwargs.pop("model_type", self.model_type)
        if kind != self.model_type:
            raise ValueError(
                f"model_type is {kind!r}, but a draft's config says {self.model_type!r}: this is another model, or a "
                "draft in another project's format, which must be imported."
            )
        unknown = sorted(kwargs.keys() - _TRANSFORMERS_KEYS)
        if unknown:
            raise ValueError(
                f"a draft's config has no {', '.join(unknown)}: remove what is meant to have no effect; a draft in "
                "another project's format must be imported."
            )
        # a copy, because transformers fills in defaults; and what is missing must not become its default frequencies
        self.rope_parameters = dict(self.rope_parameters or {})
        self._check_rope(self.rope_parameters)
        super().__post_init__(**kwargs)
        self.feature_layers = tuple(self.feature_layers)
        self._check_shape()
        self._check_features()

    def _check_rope(self, rope: dict[str, Any]) -> None:
        theta, kind = rope.get("rope_theta"), rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(theta, int | float) or theta <= 0:
            raise ValueError(
                f"rope_parameters is {rope!r}, but must name a rope_theta above 0: pass rope_parameters="
                "{'rope_type': 'default', 'rope_theta': 10000.0} or the target's."
            )
        if kind not in _ROPE_TYPES:
            raise ValueError(
                f"rope_type is {kind!r}, but a draft rotates whole heads by one of {', '.join(_ROPE_TYPES)}: pass "
                "rope_parameters={'rope_type': 'default', 'rope_theta': ...}, which need not be the target's."
            )

    def _check_shape(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 1: pass {name}=...")
        if self.num_hidden_layers != 1 or self.hidden_act != "silu":
            raise ValueError(
                f"a draft with {self.num_hidden_layers} layers and the activation {self.hidden_act!r} cannot be run "
                "here: it must have one layer and silu."
            )
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.num_attention_heads} heads of size {self.head_dim} over {self.num_key_value_heads} key/value "
                "heads cannot be: the heads must be a multiple of the key/value heads, and their size even."
            )
        if not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps!r}, but must be above 0, such as 1e-6.")
        if type(self.qk_norm) is not bool:
            raise ValueError(f"qk_norm is {self.qk_norm!r}, but must be true or false.")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but the target has only {self.vocab_size} tokens: it "
                "must be at most that."
            )

    def _check_features(self) -> None:
        layers, last = self.feature_layers, self.target_num_layers
        whole = all(type(layer) is int for layer in layers)
        if not layers or not whole or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] > last:
            raise ValueError(
                f"feature_layers is {list(layers)}, but must be ascending, distinct indices into the target's "
                f"hidden_states from 1 to {last}, such as {list(default_feature_layers(last))}."
            )


def base_of(target: Any) -> Any:
    """The Hugging Face causal LM in `target`, itself or under PEFT. Raises ValueError for anything else."""
    base = target.get_base_model() if hasattr(target, "get_base_model") else target
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is None:
        raise ValueError(
            f"{type(base).__name__} is not a Hugging Face causal language model: pass one loaded by "
            "AutoModelForCausalLM, or that wrapped by PEFT."
        )
    return base


def fields_for(base: Any) -> dict[str, Any]:
    """The fields of a `DraftConfig` for a target: its own shape, every token, the default layers."""
    config = base.config.get_text_config()
    vocabulary = base.get_output_embeddings().weight.shape[0]
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": _rope_for(config),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "feature_layers": default_feature_layers(config.num_hidden_layers),
        "target_hidden_size": config.hidden_size,
        "target_num_layers": config.num_hidden_layers,
        "target_model_type": config.model_type,
        "target_name": base.name_or_path,
    }


def _rope_for(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):  # one per kind of layer: the draft's sees everything
        rope = rope.get("full_attention") or next((value for value in rope.values() if value), {})
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in rope:
        return {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
