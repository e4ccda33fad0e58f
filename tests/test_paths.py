"""Which way of running a model is taken, and that what the lean one would miss is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_engine import hugging_face_greedy
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model
from torch import nn

from fastgrpo.models.target import HuggingFaceTarget, LeanTarget, open_target
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.sampling import SamplingParams

GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(4, VOCAB_SIZE, (length,), generator=GENERATOR).tolist() for length in (1, 24, 5)]


def greedy(engine: Engine) -> list[list[int]]:
    rollout = engine.generate(PROMPTS, SamplingParams(temperature=0), max_new_tokens=8, stop_token_ids=[])
    return [completion.token_ids for completion in rollout.completions]


def hugging_face(model: Any) -> list[list[int]]:
    return [hugging_face_greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_known_families_run_lean(arch: str) -> None:
    assert type(open_target(tiny_model(arch))) is LeanTarget
    assert type(open_target(tiny_model(arch), lean=False)) is HuggingFaceTarget


class Doubled(torch.nn.Module):
    """A norm that somebody put in place of the model's."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x * self.weight


class Packed(nn.Parameter):
    """Stands for a quantised weight."""


def replace_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = Doubled(model.model.layers[1].input_layernorm)


def replace_mlp(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Silent", (type(mlp),), {"forward": lambda self, x: 0 * x, "__module__": "elsewhere"})


def hook_a_layer(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 0 * output)


def pack_a_weight(model: Any) -> None:
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight = Packed(linear.weight.data)


def parametrize_a_weight(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def hook_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output.flip(-1))


def hook_the_embedding(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.flip(-1))


def hook_the_heads_input(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))


def give_a_layer_its_own_forward(model: Any) -> None:
    layer = model.model.layers[1]
    layer.forward = lambda hidden_states, *args, **kwargs: (
        2 * type(layer).forward(layer, hidden_states, *args, **kwargs)
    )


def give_a_linear_its_own_forward(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.forward = lambda x: (
        0 * nn.functional.linear(x, model.model.layers[0].self_attn.q_proj.weight)
    )


def change_the_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def change_the_scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def change_an_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 10.0


CHANGES = [
    *(replace_norm, replace_mlp, hook_a_layer, pack_a_weight, parametrize_a_weight, hook_the_head, hook_the_embedding),
    *(hook_the_heads_input, give_a_layer_its_own_forward, give_a_linear_its_own_forward, change_the_activation),
    *(change_the_scale, change_an_epsilon),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_lean_path_would_miss_takes_the_general_one(change: Any) -> None:
    model = tiny_model("qwen3")
    change(model)
    engine = Engine(model, slots=2)
    assert type(engine.target) is HuggingFaceTarget
    assert greedy(engine) == hugging_face(model)


@pytest.mark.parametrize("option", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_configs_that_change_the_arithmetic_are_not_lean(option: str) -> None:
    model = tiny_model("gemma3")
    setattr(model.config, option, 30.0)
    assert type(open_target(model)) is HuggingFaceTarget


def test_attention_that_looks_ahead_is_refused() -> None:
    model = tiny_model("gemma3")
    model.config.use_bidirectional_attention = True
    with pytest.raises(ValueError, match="computes another law"):
        open_target(model)


def test_a_window_that_the_model_does_not_read_is_refused() -> None:
    model = tiny_model("llama")
    model.config.sliding_window = 8  # mistral's field; llama attends to everything
    with pytest.raises(ValueError, match="computes another law"):
        open_target(model)


def test_gradient_checkpointing_under_peft_stays_lean() -> None:
    model = tiny_model("llama")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    assert type(open_target(model)) is LeanTarget


def test_subclasses_are_not_lean() -> None:
    model = tiny_model("llama")
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "elsewhere"})
    assert type(open_target(model)) is HuggingFaceTarget


def test_recording_hidden_states_does_not_end_the_lean_path() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model(input_ids=torch.tensor([PROMPTS[1]]), output_hidden_states=True)  # transformers hooks its layers
    assert type(open_target(model)) is LeanTarget


def test_a_model_that_changed_under_a_lean_engine_is_refused() -> None:
    model = tiny_model("llama")
    engine = Engine(model)
    hook_a_layer(model)
    with pytest.raises(ValueError, match="has changed since the engine was built"):
        greedy(engine)
