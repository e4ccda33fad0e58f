"""Both ways of running a model: other families, adapters, precisions. Which one is taken: test_paths.py."""

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


# --- the general path ------------------------------------------------------------------------------------------------


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
