"""Rollouts leave the model as they found it: modes, weights, hooks, configs; also when they end badly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model

from fastgrpo.models.target import open_target
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.requests import Progress
from fastgrpo.speculation.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5], list(range(20, 44)), [7, 8, 9, 10, 11]]


def greedy(engine: Engine) -> list[list[int]]:
    rollout = engine.generate(PROMPTS, GREEDY, max_new_tokens=8, stop_token_ids=[])
    return [c.token_ids for c in rollout.completions]


def snapshot(model: Any) -> dict[str, Any]:
    return {
        "modes": {name: m.training for name, m in model.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
        "forwards": [name for name, m in model.named_modules() if "forward" in vars(m)],
        "parameters": {
            name: (p.data_ptr(), p.dtype, p.requires_grad, p.grad is None) for name, p in model.named_parameters()
        },
        "values": {name: p.detach().clone() for name, p in model.state_dict().items()},
        "buffers": {name: b.detach().clone() for name, b in model.named_buffers()},
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "attention": model.config._attn_implementation,
        "grad": torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key in ("values", "buffers"):
        old, new = before.pop(key), after.pop(key)
        assert old.keys() == new.keys()
        different = [n for n in old if not torch.equal(old[n].nan_to_num(7.0), new[n].nan_to_num(7.0))]
        assert not different, different
    assert before == after


def interrupt(progress: Progress) -> None:
    if progress.tokens > 3:
        raise KeyboardInterrupt


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["own", "other"])
@pytest.mark.parametrize("ending", ["well", "nan", "interrupt", "bad input"])
def test_the_model_is_left_as_it_was_found(ending: str, dtype: torch.dtype | None, lean: bool) -> None:
    model = tiny_model("gemma3").train()
    model.model.layers[0].eval()
    model.model.embed_tokens.requires_grad_(False)
    model.generation_config.update(do_sample=True, temperature=0.3, top_k=4)
    if ending == "nan":
        model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    engine = Engine(model, slots=2, dtype=dtype)
    engine.target = open_target(model, lean=lean, dtype=dtype)
    before = snapshot(model)
    if ending == "well":
        greedy(engine)
    elif ending == "nan":
        with pytest.raises(FloatingPointError, match="logits are not finite after 0 tokens"):
            greedy(engine)
    elif ending == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, SamplingParams(), max_new_tokens=9, on_round=interrupt)
    else:
        with pytest.raises(ValueError, match="no tokens"):
            engine.generate([[]], GREEDY)
    assert_same(before, snapshot(model))
    loss = model(input_ids=torch.tensor([PROMPTS[1]]), labels=torch.tensor([PROMPTS[1]])).loss
    loss.backward()  # nothing in the model has become an inference tensor
    if ending == "interrupt":  # and the engine can go on
        assert greedy(engine) == greedy(Engine(model, slots=2, dtype=dtype))
