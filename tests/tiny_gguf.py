"""A tiny llama in a GGUF file, with a byte-level tokenizer, written as llama.cpp would."""

from __future__ import annotations

from pathlib import Path

import gguf
from tiny import tiny_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, *, seed: int = 0, rule: str = "smollm") -> PreTrainedModel:
    """Write a tiny llama with a byte-level tokenizer as llama.cpp would; return the model it was made from."""
    model = tiny_model("llama", seed=seed, vocab_size=len(TOKENS))
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:  # llama.cpp rotates neighbouring pairs, Hugging Face halves
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
