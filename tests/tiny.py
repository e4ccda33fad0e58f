"""Tiny random models, a character tokenizer and checkpoints for tests: built in code, nothing is downloaded.

The models are wide awake rather than realistic: their next-token law has 1.5 to 3 nats of entropy at temperature 1 and
depends on every token in reach, so a stale, missing or misplaced cache entry shows in the output (tests/test_tiny.py
measures both). Norm weights and biases are random, so a forgotten norm or bias shows too.
"""

from __future__ import annotations

import math
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
PAD_ID, EOS_ID, START_ID, UNK_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<|pad|>", "<|eos|>", "<|start|>", "<|unk|>")
CHARACTERS = "\n " + string.ascii_letters + string.digits + string.punctuation
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)  # 100
WINDOW = 8  # sliding window of mistral (every layer) and gemma3 (first and last layer)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_LOGIT_STD = 2.4  # of logits over unit-variance features: about 2.4 nats of entropy over 100 tokens


def tiny_config(arch: str, *, vocab_size: int = VOCAB_SIZE) -> PretrainedConfig:
    """4 query and 2 key heads, hidden size 32, 3 layers (mistral: 2); qwen3's heads are 16 wide, not 8."""
    common = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
    }
    special = {
        "llama": {},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"head_dim": 16},
        "mistral": {"head_dim": 8, "num_hidden_layers": 2, "sliding_window": WINDOW},
        "gemma3": {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    }
    if arch not in special:
        raise ValueError(f"arch={arch!r} has no tiny model; choose one of {', '.join(ARCHITECTURES)}.")
    return AutoConfig.for_model("gemma3_text" if arch == "gemma3" else arch, **{**common, **special[arch]})


def tiny_model(
    arch: str, *, seed: int = 0, vocab_size: int = VOCAB_SIZE, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random causal LM in eval mode, the same for the same arguments; draws from no global generator."""
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(tiny_config(arch, vocab_size=vocab_size), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(_initial(name, noise, gemma=arch == "gemma3", tied=tied))
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, eos_token_id=EOS_ID)
    return model.to(dtype).eval()


def _initial(name: str, noise: torch.Tensor, *, gemma: bool, tied: bool) -> torch.Tensor:
    """The initial value of one parameter from standard normal noise of its shape."""
    if "norm" in name:
        loud = gemma and ("post_attention" in name or "post_feedforward" in name)  # these set a layer's volume
        return noise * 0.25 + (2.5 if loud else 0.0 if gemma else 1.0)  # Gemma multiplies by 1 + weight
    if name.endswith("bias"):
        return noise * 0.5
    if "lm_head" in name or ("embed_tokens" in name and tied):
        return noise * _LOGIT_STD / math.sqrt(noise.shape[1])
    if "embed_tokens" in name:
        return noise
    gain = 1.4 if "q_proj" in name or "k_proj" in name else 2.5  # loud layers: the context outweighs the last token
    return noise * gain / math.sqrt(noise.shape[1])


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, VOCAB_SIZE in all; other characters become <|unk|>. Pads on the left."""
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|start|>"],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def tiny_checkpoint(folder: Path, arch: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save the tiny model and its tokenizer under `folder`/tiny-`arch` and return that path."""
    path = Path(folder) / f"tiny-{arch}"
    tiny_model(arch, seed=seed, dtype=dtype).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
