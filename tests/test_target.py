"""Both ways of running a model: which one is taken, adapters, precisions."""

from __future__ import annotations

import warnings
from typing import Any

import peft
import pytest
import torch
from reference_engine import hugging_face_greedy
from tiny import ARCHITECTURES, VOCAB_SIZE, WINDOW, tiny_config, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fastgrpo.models.target import HuggingFaceTarget, LeanTarget, open_target
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPTS = [
    torch.randint(4, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 3 * WINDOW, 5)
]
paths = pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])


def engine_over(model: nn.Module, *, lean: bool = True, dtype: torch.dtype | None = None) -> Engine:
    engine = Engine(model, slots=2, dtype=dtype)
    engine.target = open_target(model, lean=lean, dtype=dtype)
    return engine


def greedy(engine: Engine, new_tokens: int = 8) -> list[list[int]]:
    rollout = engine.generate(PROMPTS, GREEDY, max_new_tokens=new_tokens, stop_token_ids=[])
    return [c.token_ids for c in rollout.completions]


def hugging_face(model: Any, new_tokens: int = 8) -> list[list[int]]:
    return [hugging_face_greedy(model, prompt, new_tokens) for prompt in PROMPTS]


def randomise(model: nn.Module, part: str = "", seed: int = 1) -> None:
    """Give every trainable parameter whose name has `part` a value that shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.requires_grad and part in name:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator).to(weight.dtype)


def with_adapter(config: peft.PeftConfig, arch: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    model = peft.get_peft_model(tiny_model(arch, dtype=dtype), config)
    randomise(model)
    return model.eval()


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        **{"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], **options}
    )


# --- which path ------------------------------------------------------------------------------------------------------


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


@paths
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_eager_attention_is_honoured(arch: str, lean: bool) -> None:
    model = tiny_model(arch)
    model.set_attn_implementation("eager")
    assert greedy(engine_over(model, lean=lean)) == hugging_face(model)


def small(model_type: str, **options: Any) -> Any:
    """A random model of a family without a lean path."""
    config = tiny_config("llama").to_dict()
    for name in ("model_type", "architectures", "rope_parameters", "head_dim", "transformers_version"):
        config.pop(name, None)
    config = AutoConfig.for_model(model_type, **{**config, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data = torch.randn(weight.shape, generator=generator) * (1.6 / weight.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("phi3", {}),
        ("gpt_neox", {}),  # a key/value head for every query head, without saying so
        ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}),  # soft caps, eager
        ("starcoder2", {"sliding_window": WINDOW}),
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_other_families_run_by_their_own_forward(model_type: str, options: dict[str, Any]) -> None:
    model = small(model_type, **options)
    engine = Engine(model, slots=2)
    assert type(engine.target) is HuggingFaceTarget
    assert greedy(engine) == hugging_face(model)


@paths
def test_windows_may_differ_between_layers_of_qwen2(lean: bool) -> None:
    model = small("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    assert len(set(model.config.layer_types)) == 2
    assert greedy(engine_over(model, lean=lean)) == hugging_face(model)


def test_models_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear is not a Hugging Face causal language model"):
        open_target(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no rotary position embedding"):
        open_target(small("gpt2"))
    chunked = tiny_model("qwen2")
    chunked.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(ValueError, match="has a layer of type 'chunked_attention'"):
        open_target(chunked)
    flash = small("phi3")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation is 'flash_attention_2'"):
        open_target(flash)
    latent = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    with pytest.raises(ValueError, match="deepseek_v3 does not store keys and values of one size in layer 0"):
        open_target(small("deepseek_v3", **latent, num_key_value_heads=4, first_k_dense_replace=3))
    tuned = peft.get_peft_model(
        tiny_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(ValueError, match="learns a prompt"):
        open_target(tuned)


# --- adapters --------------------------------------------------------------------------------------------------------


@paths
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_adapter_that_counts_is_the_active_one(arch: str, lean: bool) -> None:
    model = with_adapter(lora(), arch)
    engine, first = engine_over(model, lean=lean), hugging_face(model)
    assert greedy(engine) == first
    with model.disable_adapter():
        bare = greedy(engine)
        assert bare == hugging_face(model) == hugging_face(tiny_model(arch))
    model.add_adapter("second", lora(target_modules=["k_proj", "o_proj"], use_rslora=True))
    model.set_adapter("second")
    randomise(model, ".second.", seed=2)
    model.eval()
    second = hugging_face(model)
    assert greedy(engine) == second
    model.base_model.set_adapter(["default", "second"])
    both = hugging_face(model)
    assert greedy(engine) == both
    model.merge_adapter()
    assert greedy(engine) == hugging_face(model)
    model.unmerge_adapter()
    model.set_adapter("default")
    assert greedy(engine) == first
    assert len({str(tokens) for tokens in (bare, first, second, both)}) == 4  # each of them shows


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (lora(use_dora=True), HuggingFaceTarget),
        (lora(lora_bias=True), HuggingFaceTarget),
        (lora(modules_to_save=["lm_head"]), HuggingFaceTarget),
        (lora(modules_to_save=["input_layernorm"]), HuggingFaceTarget),
        (lora(target_modules=["embed_tokens", "q_proj"]), HuggingFaceTarget),
        (lora(target_modules=["lm_head", "q_proj"]), HuggingFaceTarget),
        (peft.AdaLoraConfig(task_type="CAUSAL_LM", total_step=10, target_modules=["q_proj"]), HuggingFaceTarget),
        (peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]), HuggingFaceTarget),
        (
            peft.IA3Config(
                task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
            ),
            HuggingFaceTarget,
        ),
        (lora(use_rslora=True, lora_alpha=3), LeanTarget),
        (lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 9}), LeanTarget),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, peft.PeftConfig) else value.__name__,
)
def test_every_kind_of_adapter_is_live(config: peft.PeftConfig, target: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice
        model = with_adapter(config)
    engine = Engine(model, slots=2)
    assert type(engine.target) is target
    assert greedy(engine) == hugging_face(model) != hugging_face(tiny_model("llama"))


def test_dora_that_comes_later_is_not_lost() -> None:
    model = with_adapter(lora())
    lean, general = engine_over(model), engine_over(model, lean=False)
    model.add_adapter("dora", lora(use_dora=True))
    model.set_adapter("dora")
    randomise(model, ".dora.")
    model.eval()
    assert greedy(general) == hugging_face(model)
    with pytest.raises(ValueError, match="build a new Engine"):
        greedy(lean)


@paths
def test_dropout_does_not_act_and_training_goes_on(lean: bool) -> None:
    model = with_adapter(lora(lora_dropout=0.5))
    expected = hugging_face(model)
    model.train()
    model.base_model.model.model.layers[1].eval()  # a part that its owner froze
    modes = {name: module.training for name, module in model.named_modules()}
    assert greedy(engine_over(model, lean=lean)) == expected
    assert {name: module.training for name, module in model.named_modules()} == modes


# --- precisions ------------------------------------------------------------------------------------------------------


def last_logits(engine: Engine) -> torch.Tensor:
    with engine.target.session():
        return engine.target.prefill([PROMPTS[1]])[0].float()  # (1, vocab)


@paths
def test_lora_in_bfloat16_is_beside_the_weights(lean: bool) -> None:
    model = with_adapter(lora(), dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPTS[1]])).logits[:, -1].float()
        with model.disable_adapter():
            bare = model(input_ids=torch.tensor([PROMPTS[1]])).logits[:, -1].float()
    engine = engine_over(model, lean=lean)
    assert engine.target.layout.dtype == torch.bfloat16
    error = (last_logits(engine) - expected).abs().max()
    assert error < 0.25, error  # logits of some 7 units, of which bfloat16 resolves 0.03, over three layers
    assert (bare - expected).abs().max() > 1


@paths
@pytest.mark.parametrize(("own", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float64")])
def test_passes_may_run_in_another_precision(own: str, wanted: str, lean: bool) -> None:
    model = with_adapter(lora(), "gemma3", dtype=getattr(torch, own))
    engine = engine_over(model, lean=lean, dtype=getattr(torch, wanted))
    assert engine.target.layout.dtype == getattr(torch, wanted)
    reference = engine_over(model, lean=lean)
    error = (last_logits(engine) - last_logits(reference)).abs().max()
    assert error < (1e-4 if "bfloat16" not in (own, wanted) else 0.5), error
    assert model.dtype == getattr(torch, own)
    tokens = greedy(engine)
    assert [len(row) for row in tokens] == [8] * 3
    randomise(model, seed=3)  # an update of the policy
    assert greedy(engine) != tokens
    with model.disable_adapter():  # and a reference model
        off = last_logits(engine)
        assert (off - last_logits(reference)).abs().max() < 0.5
    model.add_adapter("later", lora(target_modules=["q_proj"]))
    model.set_adapter("later")
    randomise(model, ".later.")
    assert (last_logits(engine) - off).abs().max() > 1


def test_rotary_frequencies_are_not_rounded() -> None:
    model = tiny_model("llama")
    target: Any = open_target(model, dtype=torch.bfloat16, lean=False)
    with target.session():
        assert target.runner.model.norm.weight.dtype == torch.bfloat16
        assert torch.equal(target.runner.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert target.runner is model  # the copy is gone
