"""Prompts of a group run once: TRL's own forward, log-probs, entropies and gradients, with fewer tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_trainer_precision import olmo
from tiny import ARCHITECTURES, tiny_model
from transformers import PreTrainedModel
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

from fastgrpo.grpo.shared_prompts import install, shares

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [15, 16, 17], [18, 19]]
RESPONSES = [(0, [20, 21, 22]), (1, [23]), (0, [24, 25, 26, 27, 28, 29]), (1, [30, 31]), (0, [32]), (0, [])]


def batch(rows: list[tuple[int, list[int]]] = RESPONSES) -> dict[str, torch.Tensor]:
    """Rows as TRL pads them: prompts on the left, responses on the right; labels are the responses."""
    prompt_width, width = max(map(len, PROMPTS)), max(len(response) for _, response in rows)
    ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (prompt, response) in enumerate(rows):
        left, right = prompt_width - len(PROMPTS[prompt]), prompt_width + len(response)
        ids[row, left:right] = torch.tensor(PROMPTS[prompt] + response)
        mask[row, left:right] = 1
        labels[row, prompt_width:right] = torch.tensor(response, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def scored(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, entropies, and the gradient of a loss that weighs every one of them differently."""
    output = model(**inputs, fused_lm_head=True)
    weights = torch.linspace(-1, 2, output.log_probs.numel()).view_as(output.log_probs)
    model.zero_grad()
    (weights * output.log_probs + weights.flip(0) * output.entropy).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.log_probs.detach(), output.entropy.detach(), gradients


def pair(model: PreTrainedModel, peft: bool = False) -> tuple[Any, Any]:
    """TRL's model and ours, of the same weights, in train mode."""
    models = [model, copy.deepcopy(model)]
    for one in models:
        add_fused_lm_head(one, temperature=0.7, outputs=("log_probs", "entropy"))
    install(models[1], max_tokens=None)
    if peft:
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        wrapped = []
        for one in models:
            torch.manual_seed(1)
            wrapped.append(get_peft_model(one, config))
        models = wrapped
    return models[0].train(), models[1].train()


def tokens_run(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Tokens, padding included, that go through the layers, and hidden states that go through the head."""
    seen: list[int] = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    embeds = base.get_input_embeddings().register_forward_hook(lambda _, args, output: seen.append(args[0].numel()))
    with pytest.MonkeyPatch.context() as patch:
        head = utils._ChunkedLogProbFunction.apply

        def counting(hidden: torch.Tensor, *args: Any) -> Any:
            seen.append(len(hidden))
            return head(hidden, *args)

        patch.setattr(utils._ChunkedLogProbFunction, "apply", counting)
        model(**inputs, fused_lm_head=True)
    embeds.remove()
    layers, scores = seen
    return layers, scores


def assert_same(theirs: Any, ours: Any) -> None:
    for expected, got in zip(theirs[:2], ours[:2], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert theirs[2].keys() == ours[2].keys()
    scale = max(float(g.abs().max()) for g in theirs[2].values())
    for name, expected in theirs[2].items():
        torch.testing.assert_close(ours[2][name], expected, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_values_and_gradients_are_trls(arch: str, peft: bool) -> None:
    theirs, ours = pair(tiny_model(arch), peft)
    assert_same(scored(theirs, batch()), scored(ours, batch()))
    assert tokens_run(theirs, batch()) == (6 * 16, 6 * 15)
    # prompt 1: 9 + 3 + 6 + 1 + 0 tokens in one sequence; prompt 2: 2 + 1 + 2, padded to it
    assert tokens_run(ours, batch()) == (2 * 19, 13)


def test_short_units_lie_behind_one_another() -> None:
    rows = [(2, [20, 21, 22]), (1, [25] * 20), (0, [23, 24])]
    theirs, ours = pair(tiny_model("gemma3"))
    assert_same(scored(theirs, batch(rows)), scored(ours, batch(rows)))
    assert tokens_run(ours, batch(rows))[0] == 2 * 22  # 2 + 20, and 9 + 2 with 1 + 3 behind it


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_with_checkpointed_layers_and_with_eager_attention(arch: str) -> None:
    theirs, ours = pair(tiny_model(arch))
    expected = scored(theirs, batch())
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(expected, scored(ours, batch()))
    ours.gradient_checkpointing_disable()
    ours.set_attn_implementation("eager")
    assert_same(expected, scored(ours, batch()))


def test_a_family_that_was_not_tried_keeps_its_rows_and_is_scored_where_there_are_responses() -> None:
    theirs, ours = pair(olmo())
    assert not shares(ours)
    assert_same(scored(theirs, batch()), scored(ours, batch()))
    assert tokens_run(ours, batch()) == (6 * 16, 13)


@pytest.mark.parametrize(
    "rows",
    [[(0, [20, 21]), (1, [22])], [(0, [])] * 2, [(0, [20])] * 3, [(1, [20, 21, 22])]],
    ids=["nothing shared", "nothing scored", "equal rows", "one row"],
)
def test_odd_batches(rows: list[tuple[int, list[int]]]) -> None:
    inputs = batch(rows)
    if not any(response for _, response in rows):  # a column of padding, as cut() leaves it
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        inputs = {name: torch.nn.functional.pad(value, (0, 1), value=fill[name]) for name, value in inputs.items()}
    theirs, ours = pair(tiny_model("qwen2"))
    assert_same(scored(theirs, inputs), scored(ours, inputs))


def test_prompts_are_not_shared_under_dropout_nor_where_padding_is_elsewhere() -> None:
    _, ours = pair(tiny_model("llama"))
    assert shares(ours)
    ours.config.attention_dropout = 0.1
    assert not shares(ours) and shares(ours.eval())
    ours.config.attention_dropout = 0.0
    theirs, ours = pair(tiny_model("llama"))
    holes = batch()
    holes["attention_mask"][0, 3] = 0
    assert_same(scored(theirs, holes), scored(ours, holes))
    assert tokens_run(ours, holes)[0] == 6 * 16


def test_every_other_call_is_passed_on() -> None:
    theirs, ours = pair(tiny_model("llama"))
    inputs = batch()
    torch.testing.assert_close(ours(inputs["input_ids"]).logits, theirs(inputs["input_ids"]).logits)
    loss = ours(**inputs).loss
    torch.testing.assert_close(loss, theirs(**inputs).loss)
