"""A GGUF file as an ordinary model and tokenizer: read by transformers, then put right where that falls short.

Not here: which file, and where the result is kept (loading.py).
"""

from __future__ import annotations

import logging
import mmap
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.models.foreign import foreign, reason

logger = logging.getLogger(__name__)

# Above this file size a converted model is kept in bf16: quantisation has cost more than that rounding, and fp32 would
# take 4 bytes for every half byte of the file.
_LARGE_FILE = 2 * 1024**3
# Ends of a turn or text. A chat model may end with either, but a GGUF file names only one of them.
_END_MARKERS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "</s>",
    "<eos>",
)
# Splitting rules (`tokenizer.ggml.pre`) that come out of the conversion as the original tokenizer has them.
_KNOWN_SPLITS = ("default", "gpt-2", "qwen2", "smollm")


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dequantised weights in a model that counts as an ordinary one, and the tokenizer with every stop id."""
    if find_spec("gguf") is None:
        raise ImportError(f"Reading {path.name} needs the gguf package: `pip install 'fastgrpo[gguf]'`.")
    dtype = torch.bfloat16 if path.stat().st_size > _LARGE_FILE else torch.float32

    def explain(error: Exception) -> Exception:
        return ValueError(
            f"{str(path)!r} could not be read by transformers ({reason(error)}); if it is whole, its architecture has "
            f"no GGUF support: use the original checkpoint (a folder or hub id)."
        )

    with foreign(explain):
        loaded = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    _repair_splitting(path, tokenizer)
    # the loaded model counts as quantised and refuses save_pretrained: move its weights to one that never was
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    list_stop_ids(model, [special[marker] for marker in _END_MARKERS if marker in special])
    return model, tokenizer


def list_stop_ids(model: PreTrainedModel, more: Sequence[int]) -> None:
    """Make `generation_config.eos_token_id` its present ids followed by those of `more` that it lacks."""
    present = model.generation_config.eos_token_id
    present = [] if present is None else [present] if isinstance(present, int) else list(present)
    stop_ids = list(dict.fromkeys([*present, *more]))
    model.generation_config.eos_token_id = stop_ids or None


def _repair_splitting(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """SmolLM splits off every digit first; transformers drops that rule, so spaces before digits come out otherwise."""
    rule = _gguf_text(path, b"tokenizer.ggml.pre")
    if rule == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif rule is not None and rule not in _KNOWN_SPLITS:
        logger.warning(
            "%s splits text by the rule %r, which nobody has compared with its original tokenizer: check a few "
            "encodings, or use the original checkpoint.",
            path.name,
            rule,
        )


def _gguf_text(path: Path, key: bytes) -> str | None:
    """One text entry of a GGUF header: key, type 8 (text) as uint32, length as uint64, UTF-8 bytes; None without it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = content.find(struct.pack("<Q", len(key)) + key + struct.pack("<I", 8))
        if found < 0:
            return None
        start = found + 8 + len(key) + 4 + 8
        (length,) = struct.unpack("<Q", content[start - 8 : start])
        return content[start : start + length].decode()
