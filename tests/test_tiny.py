"""The tiny models must be able to show a mistake: entropy in range, and every token in reach matters."""

from __future__ import annotations

import pytest
import torch
from tiny import ARCHITECTURES, EOS_ID, VOCAB_SIZE, WINDOW, tiny_checkpoint, tiny_model, tiny_tokenizer

LENGTH = 24


def random_prompts(count: int, length: int = LENGTH) -> torch.Tensor:
    """(count, length) ids of ordinary characters."""
    return torch.randint(4, VOCAB_SIZE, (count, length), generator=torch.Generator().manual_seed(5))


def reach(arch: str) -> int:
    """How far back from the last position a changed token can change the output of every tested layer's window."""
    return WINDOW if arch in ("mistral", "gemma3") else LENGTH


@torch.no_grad()
def last_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits[:, -1].float()  # (rows, vocab)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_entropy_is_in_range(arch: str, seed: int) -> None:
    log_probs = last_logits(tiny_model(arch, seed=seed), random_prompts(64)).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert 1.5 < entropy.mean() < 3.0, entropy.mean()
    assert ((entropy > 1.0) & (entropy < 3.5)).float().mean() > 0.9


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_earlier_tokens_and_their_order_decide(arch: str, seed: int) -> None:
    model, ids = tiny_model(arch, seed=seed), random_prompts(64)
    before = last_logits(model, ids).argmax(-1)
    changed_shares = []
    for back in range(1, reach(arch)):
        changed = ids.clone()
        changed[:, -1 - back] = 4 + (changed[:, -1 - back] - 4 + 37) % (VOCAB_SIZE - 4)
        changed_shares.append((last_logits(model, changed).argmax(-1) != before).float().mean().item())
    assert sum(changed_shares) / len(changed_shares) > 0.3, changed_shares
    assert min(changed_shares) > 0.15, changed_shares

    start = LENGTH - reach(arch)
    swapped = torch.cat([ids[:, :start], ids[:, start:-1].flip(1), ids[:, -1:]], dim=1)
    assert (last_logits(model, swapped).argmax(-1) != before).float().mean() > 0.4


def test_windows_are_honoured() -> None:
    ids = random_prompts(8, 4 * WINDOW)
    changed = ids.clone()
    changed[:, 0] = 4 + (changed[:, 0] - 4 + 37) % (VOCAB_SIZE - 4)
    mistral, gemma = tiny_model("mistral"), tiny_model("gemma3")
    # two layers of window 8 see 2 * 7 tokens back; gemma3's full layer sees all
    assert torch.equal(last_logits(mistral, ids), last_logits(mistral, changed))
    assert not torch.equal(last_logits(gemma, ids), last_logits(gemma, changed))


def test_same_seed_same_weights_and_no_global_draw() -> None:
    state = torch.random.get_rng_state()
    first, again, other = tiny_model("qwen3"), tiny_model("qwen3"), tiny_model("qwen3", seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.config.head_dim != first.config.hidden_size // first.config.num_attention_heads


def test_qwen2_has_biases_that_matter() -> None:
    model, ids = tiny_model("qwen2"), random_prompts(8)
    before = last_logits(model, ids)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
    assert (last_logits(model, ids) - before).abs().max() > 0.1


def test_tokenizer_round_trips_and_fits() -> None:
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    text = "What is 2 + 3?\n  Answer: {5}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == EOS_ID == tiny_model("llama").generation_config.eos_token_id
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|start|>user\nhi<|eos|>\n<|start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(rendered)["input_ids"]
    assert len(ids) == len("user\nhi\nassistant\n") + 3
    assert tokenizer.decode(ids) == rendered


@pytest.mark.parametrize("arch", ["gemma3", "qwen2"])
def test_checkpoint_loads_back(arch: str, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_checkpoint(tmp_path, arch)
    ids = random_prompts(2)
    assert torch.equal(last_logits(AutoModelForCausalLM.from_pretrained(path), ids), last_logits(tiny_model(arch), ids))
    assert AutoTokenizer.from_pretrained(path).get_vocab() == tiny_tokenizer().get_vocab()
