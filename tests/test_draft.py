"""The draft model against a slow twin, its incremental use against a full pass, and what it refuses to be bound to."""

from __future__ import annotations

import copy
import gc
import logging
import math
from typing import Any

import peft
import pytest
import torch
from drafts import slow_layer, tap, tiny_draft
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny_config, tiny_model
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from fastgrpo.models.attention import as_bias, causal_attention, grouped_attention, visible
from fastgrpo.models.cache import RaggedCache
from fastgrpo.models.draft import DraftInputs, DraftModel, align

TEXT = torch.randint(4, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(5))
SOME_IDS = [4, 5, 9, 30, 31, 77, 99]
OPTIONS = {
    "full": {},
    "reduced": {"vocabulary": SOME_IDS},
    "qk_norm": {"qk_norm": True},
    "single": {"feature_layers": (3,)},  # EAGLE-1's: what enters the head
}


def inputs_of(draft: DraftModel, target: Any, tokens: Tensor = TEXT) -> DraftInputs:
    features = tap(target, tokens, draft.config.feature_layers)
    return align(tokens, features, torch.zeros(len(tokens), dtype=torch.long))


def full_pass(draft: DraftModel, inputs: DraftInputs) -> Tensor:
    """The hidden states of whole texts, each from its start."""

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return causal_attention(query, keys, values, None, draft.scale)

    return draft.layer(inputs.tokens, draft.fuse(inputs.features), inputs.positions, attend)


def cached_pass(draft: DraftModel, cache: RaggedCache, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """A pass over the first rows of a cache whose slots are positions."""
    heads, kv_heads = draft.config.num_attention_heads, draft.config.num_key_value_heads
    span = int(positions.max()) + 1
    cache.open(positions, span)
    bias = as_bias(visible(positions, torch.arange(span), None), heads // kv_heads, kv_heads, hidden.dtype)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = cache.append(0, keys, values)
        return grouped_attention(query, keys, values, bias, draft.scale)

    return draft.layer(tokens, hidden, positions, attend)


def other_target(**changes: Any) -> Any:
    config = tiny_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


# --- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", OPTIONS)
def test_state_dict_is_eagle_3s(option: str) -> None:
    draft = tiny_draft(tiny_model("llama"), **OPTIONS[option])
    features = 1 if option == "single" else 2
    vocabulary = len(SOME_IDS) if option == "reduced" else VOCAB_SIZE
    expected = {
        "fc.weight": (32, features * 32),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.mlp.gate_proj.weight": (64, 32),
        "midlayer.mlp.up_proj.weight": (64, 32),
        "midlayer.mlp.down_proj.weight": (32, 64),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (vocabulary, 32),
    }
    if option == "qk_norm":
        expected |= {"midlayer.self_attn.q_norm.weight": (8,), "midlayer.self_attn.k_norm.weight": (8,)}
    if option == "reduced":
        expected |= {"d2t": (vocabulary,), "t2d": (VOCAB_SIZE,)}
    state = draft.state_dict()
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == expected
    if option == "reduced":
        assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)
        assert state["d2t"].tolist() == [token - i for i, token in enumerate(SOME_IDS)]
        assert state["t2d"].nonzero().flatten().tolist() == SOME_IDS
    assert draft.ids.dtype == torch.int64
    assert draft.ids.tolist() == (SOME_IDS if option == "reduced" else list(range(VOCAB_SIZE)))
    assert draft.layout.heads == ((2, 8),)


def test_an_untrained_draft_has_small_weights_and_norms_of_one() -> None:
    draft = DraftModel.for_target(tiny_model("llama"), qk_norm=True)
    for name, weight in draft.named_parameters():
        assert bool((weight == 1).all()) if "norm" in name else 0.01 < float(weight.detach().std()) < 0.03, name
    assert not draft.training


@pytest.mark.parametrize(("arch", "option"), [*((a, "full") for a in ARCHITECTURES), *(("llama", o) for o in OPTIONS)])
def test_layer_is_the_slow_twins(arch: str, option: str) -> None:
    target = tiny_model(arch)
    draft = tiny_draft(target, **OPTIONS[option])
    inputs = inputs_of(draft, target)
    embedding = target.get_input_embeddings().weight.double()
    embedded = embedding[inputs.tokens] * (
        math.sqrt(32) if arch == "gemma3" else 1
    )  # Gemma's are fed as it scales them
    with torch.no_grad():
        hidden = full_pass(draft, inputs)
        logits = draft.logits(hidden)
    weights = {name: weight.double() for name, weight in draft.state_dict().items()}
    for row in range(2):
        fused = inputs.features[row].double() @ weights["fc.weight"].T
        expected = slow_layer(draft.config, weights, embedded[row], fused, inputs.positions[row].tolist())
        assert torch.allclose(hidden[row].double(), expected, atol=1e-4)
        size = (expected.pow(2).mean(-1, keepdim=True) + draft.config.rms_norm_eps).sqrt()
        head = (expected / size * weights["norm.weight"]) @ weights["lm_head.weight"].T
        assert torch.allclose(logits[row].double(), head, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_positions_are_scaled_as_the_targets(rope: dict[str, Any]) -> None:
    target = other_target(rope_parameters={"rope_theta": 10000.0, **rope})
    draft = DraftModel.for_target(target)
    positions, x = torch.tensor([[0, 1, 70, 900]]), torch.zeros(1, 4, 32)
    for ours, theirs in zip(draft._rope(positions, x), target.model.rotary_emb(x, positions), strict=True):
        assert torch.equal(ours[:, :, 0], theirs)
    assert draft.config.rope_parameters is not target.config.rope_parameters


# --- incremental use -------------------------------------------------------------------------------------------------


def test_ragged_steps_are_the_full_pass() -> None:
    target = tiny_model("qwen3")
    draft = tiny_draft(target)
    inputs = inputs_of(draft, target)
    cache = RaggedCache(draft.layout, rows=2, capacity=16)
    seen = torch.full((2, 11, 32), torch.nan)

    def run(rows: list[range]) -> None:
        index = torch.tensor([list(part) for part in rows])
        row = torch.arange(len(rows))[:, None]
        hidden = draft.fuse(inputs.features[row, index])
        seen[row, index] = cached_pass(draft, cache, inputs.tokens[row, index], hidden, index)

    with torch.no_grad():
        expected = full_pass(draft, inputs)
        run([range(2), range(2)])
        run([range(2, 6)])  # row 0 runs ahead
        run([range(6, 9), range(2, 5)])
        run([range(9, 10), range(5, 6)])
        run([range(10, 11), range(6, 7)])
        run([range(7, 11), range(7, 11)])  # and over what row 0 had
    assert torch.allclose(seen, expected, atol=1e-5)


def test_rewriting_from_true_features_leaves_what_a_fresh_pass_stores() -> None:
    target = tiny_model("llama")
    draft = tiny_draft(target)
    inputs = inputs_of(draft, target)
    kept, drafted = 6, 3
    cache, fresh = (RaggedCache(draft.layout, rows=2, capacity=16) for _ in range(2))

    def run(into: RaggedCache, part: slice) -> Tensor:
        hidden = draft.fuse(inputs.features[:, part])
        return cached_pass(draft, into, inputs.tokens[:, part], hidden, inputs.positions[:, part])

    def stored(of: RaggedCache) -> Tensor:
        return torch.stack([of.keys[0], of.values[0]])[..., : kept + drafted, :]

    with torch.no_grad():
        hidden = run(cache, slice(kept))[:, -1:]
        for depth in range(drafted):  # down its own chain: other tokens, its own hidden state for the features
            position = torch.full((2, 1), kept + depth)
            tokens = draft.ids[draft.logits(hidden).argmax(-1)]
            hidden = cached_pass(draft, cache, tokens, hidden, position)
        expected = run(fresh, slice(kept + drafted))
        assert not torch.allclose(stored(cache), stored(fresh), atol=1e-1)
        rewritten = run(cache, slice(kept, kept + drafted))
    assert torch.allclose(stored(cache), stored(fresh), atol=1e-5)
    assert torch.allclose(rewritten, expected[:, kept:], atol=1e-5)


def test_features_go_with_the_token_that_follows() -> None:
    """Two rows with 10 and 20 tokens in the cache, which accepted 2 of their round: a root, 2 accepted, a new root."""
    first = torch.tensor([10, 20])
    positions = first[:, None] + torch.arange(4)
    tokens, features = 100 + positions, positions[..., None].float()
    for known in (features[:, :3], features):
        inputs = align(tokens, known, first)
        assert inputs.positions.tolist() == [[10, 11, 12], [20, 21, 22]]
        assert inputs.features[..., 0].tolist() == [[10, 11, 12], [20, 21, 22]]
        assert inputs.tokens.tolist() == [[111, 112, 113], [121, 122, 123]]
    for wrong_tokens, wrong_features in ((tokens, features[:, :2]), (tokens[:, :1], features[:, :1])):
        with pytest.raises(ValueError, match="features do not go with"):
            align(wrong_tokens, wrong_features, first)


def test_an_input_sees_the_token_after_its_features_and_no_later_one() -> None:
    target = tiny_model("llama")
    draft = tiny_draft(target)
    inputs = inputs_of(draft, target)
    changed = inputs._replace(tokens=inputs.tokens.clone())
    changed.tokens[:, 4] = torch.where(inputs.tokens[:, 4] == 4, 5, 4)  # of position 5
    with torch.no_grad():
        differs = (full_pass(draft, inputs) - full_pass(draft, changed)).abs().amax((0, 2)) > 1e-3
    assert differs.tolist() == [False] * 4 + [True] * 7


# --- gradients and precision -----------------------------------------------------------------------------------------


def test_gradients_reach_the_draft_and_not_the_target() -> None:
    target = tiny_model("gemma3")
    target.enable_input_require_grads()  # what gradient checkpointing under PEFT does: a hook on the embedding
    draft = tiny_draft(target, qk_norm=True)
    with torch.inference_mode():
        full_pass(draft, inputs_of(draft, target))  # what a rollout leaves behind must not stand in training's way
    states = target(TEXT, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in draft.config.feature_layers], dim=-1)
    assert features.requires_grad
    hidden = full_pass(draft, align(TEXT, features, torch.zeros(2, dtype=torch.long)))
    draft.logits(hidden).log_softmax(-1)[..., 7].sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in draft.parameters())
    assert all(weight.grad is None for weight in target.parameters())


def test_bfloat16_rounds_weights_and_not_rotations() -> None:
    target = tiny_model("llama", dtype=torch.bfloat16)
    draft = tiny_draft(target)
    assert draft.lm_head.weight.dtype == draft.layout.dtype == torch.bfloat16
    inputs = inputs_of(draft, target)
    same = tiny_draft(target, dtype=torch.float32)
    same.load_state_dict(draft.state_dict())
    with torch.no_grad():
        hidden, expected = full_pass(draft, inputs), full_pass(same, inputs)
        assert draft.logits(hidden).dtype == hidden.dtype == torch.bfloat16
    assert float((hidden.float() - expected).norm() / expected.norm()) < 0.02
    positions = torch.tensor([[5000, 5001]])
    exact = [half.to(torch.bfloat16) for half in same._rope(positions, torch.zeros(1))]
    for half, expected_half in zip(draft._rope(positions, torch.zeros(1, dtype=torch.bfloat16)), exact, strict=True):
        assert torch.equal(half, expected_half)


# --- the target ------------------------------------------------------------------------------------------------------


def test_the_embedding_is_the_targets_also_under_an_adapter() -> None:
    target = tiny_model("llama")
    draft = tiny_draft(target)
    before = draft._embed(TEXT)
    assert torch.equal(before, target.get_input_embeddings()(TEXT))
    assert not any(weight is target.get_input_embeddings().weight for weight in draft.parameters())
    wrapped = peft.get_peft_model(target, peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))
    for name, weight in wrapped.named_parameters():
        if "lora_embedding" in name:
            weight.data += 0.5
    now = draft._embed(TEXT)
    assert torch.equal(now, target.get_input_embeddings()(TEXT))
    assert not torch.allclose(now, before, atol=0.1)
    again = DraftModel.for_target(wrapped)
    assert torch.equal(again._embed(TEXT), now)
    assert again.config.to_dict() == draft.config.to_dict()


def test_gemmas_embedding_is_fed_as_gemma_scales_it() -> None:
    """The layer cannot show it: its norm of the embedding takes the scale away again, up to rms_norm_eps."""
    target = tiny_model("gemma3")
    expected = target.get_input_embeddings().weight[TEXT] * math.sqrt(32)
    assert torch.allclose(tiny_draft(target)._embed(TEXT), expected)


def test_a_draft_does_not_keep_its_target_and_copies_share_it() -> None:
    target = tiny_model("llama")
    draft = tiny_draft(target)
    assert copy.deepcopy(draft)._target is draft._target
    del target
    gc.collect()
    with pytest.raises(RuntimeError, match="call bind"):
        draft._embed(TEXT)
    with pytest.raises(RuntimeError, match="call bind"):
        DraftModel(draft.config)._embed(TEXT)


def test_another_name_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_model("llama")
    target.name_or_path = "models/first"
    draft = DraftModel.for_target(target)
    with caplog.at_level(logging.WARNING):
        target.name_or_path = "elsewhere/first"
        draft.bind(target)
        assert not caplog.records
        target.name_or_path = "models/second"
        draft.bind(target)
    assert "made for first and is used with second" in caplog.text


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: tiny_model("llama", vocab_size=90), "vocab_size 100, and this one has 90"),
        (lambda: other_target(hidden_size=16), "target_hidden_size 32, and this one has 16"),
        (lambda: other_target(num_hidden_layers=4), "target_num_layers 3, and this one has 4"),
        (lambda: tiny_model("qwen3"), "target_model_type 'llama', and this one has 'qwen3'"),
        (lambda: nn.Linear(2, 2), "Linear is not a Hugging Face causal language model"),
        (lambda: AutoModel.from_config(tiny_config("llama")), "LlamaModel is not a Hugging Face causal"),
    ],
)
def test_another_target_is_refused(other: Any, reason: str) -> None:
    target = tiny_model("llama")
    draft = DraftModel.for_target(target)
    with pytest.raises(ValueError, match=reason):
        draft.bind(other())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, but it is fed the target's token embedding, which is 32 wide"),
        ({"draft_vocab_size": 8}, r"reduced vocabulary \(8 of 100 tokens\) without a map"),
        ({"vocabulary": [4, 4, 5]}, "vocabulary maps to token 4 and then to 4"),
        ({"vocabulary": [5, 4]}, "vocabulary maps to token 5 and then to 4"),
        ({"vocabulary": [4, 100]}, "vocabulary maps to token 100, but the target's tokens are 0 to 99"),
        ({"vocabulary": [-1, 4]}, "vocabulary maps to token -1"),
        ({"vocabulary": []}, "at least one token id"),
        ({"depth": 3}, "a draft's config has no depth"),
        ({"feature_layers": (1, 4)}, r"feature_layers is \[1, 4\].* from 1 to 3"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DraftModel.for_target(tiny_model("llama"), **options)
