"""One interface to run any Hugging Face causal LM with rotary positions: prefill prompts, decode ragged rows.

`open_target` picks the lean path of `lean.py` where it computes the same thing, and the model's own forward elsewhere.
Either way the model is left as it was found: nothing of it is replaced, and its modes are restored after a generation.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastgrpo.models.attention import TreeLook, layer_windows, visible
from fastgrpo.models.cache import CacheLayout, FreshKeys, Prefix, RaggedCache, as_hugging_face_cache, whole_lanes
from fastgrpo.models.lean import LeanDecoder

# Sliding windows up to this many tokens are crossed when a target is opened, to see that the model has them too.
_LONGEST_PROBE = 512


class Target(Protocol):
    """What the engine needs of a model."""

    vocab_size: int
    hidden_size: int  # width of one tap
    layout: CacheLayout
    longest: int | None  # positions, prompt and response together

    @property
    def features(self) -> Tensor | None:
        """Of the last decoding pass, (n, queries, taps * hidden); None when nothing is tapped."""

    def session(self, taps: tuple[int, ...] = ()) -> Any:
        """A context in which passes may run; reads the current weights on entry, restores the model on exit.

        taps: indices into transformers' hidden_states, ascending, whose values the passes keep as features.
        """

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Prefix]]:
        """Run whole prompts. Returns the logits after each one's last token, (n, vocab), and its keys and values."""

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: RaggedCache, span: int, look: TreeLook | None = None
    ) -> Tensor:
        """Run `tokens` at `positions`, both (n, queries), of the first n rows.

        span: how many slots to look at, at least the largest slot written + 1, in whole lanes where there is a look.
        look: where the nodes of trees go and what they see; without one, slots equal positions and text is a line.
        Returns logits (n, queries, vocab).
        """


def open_target(model: Any, *, dtype: torch.dtype | None = None, lean: bool = True) -> Target:
    """A target over `model`, a Hugging Face causal LM, plain or under PEFT.

    dtype: the precision of the passes, by default the model's. lean: False forces the model's own forward.
    Raises ValueError for models whose state is not a cache of keys and values or that have no rotary positions.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is None:
        raise ValueError(
            f"{type(base).__name__} is not a Hugging Face causal language model: pass one loaded by "
            "AutoModelForCausalLM, or that wrapped by PEFT."
        )
    if not any("rotary" in type(module).__name__.lower() for module in base.modules()):
        raise ValueError(
            f"{type(base).__name__} has no rotary position embedding, and the engine runs models with rotary positions "
            "only: use a model of the llama, qwen, mistral or gemma kind."
        )
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise ValueError(
            "the model's PEFT adapter learns a prompt (prompt, prefix or p-tuning), and the engine runs "
            "token ids only: use LoRA, or another adapter that changes layers."
        )
    layer_windows(base.config.get_text_config())
    longest_text(base.config.get_text_config())
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}, but passes run in a floating-point type: use float32 or bfloat16.")
    dtype = dtype or base.get_input_embeddings().weight.dtype
    if lean and LeanDecoder.supports(base):
        return LeanTarget(base, dtype)
    attention = base.config.get_text_config()._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"the model's attn_implementation is {attention!r}, and the engine passes explicit masks, which only "
            "'sdpa' and 'eager' honour: call model.set_attn_implementation('sdpa')."
        )
    return HuggingFaceTarget(model, base, dtype)


def longest_text(config: Any) -> int | None:
    """The number of positions that the model was made for, None where its config does not say.

    Raises ValueError for rotary frequencies that change with the longest row of a pass: rows would not be independent.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        if kind.get("rope_type") == "dynamic":
            raise ValueError(
                f"{config.model_type} scales its rotary positions by the longest row of a pass (rope_type 'dynamic'), "
                "so a row would depend on its neighbours: set another rope_type in the config (yarn, linear)."
            )
        if kind.get("rope_type") == "longrope":  # one set of frequencies up to here, another one beyond
            limit = kind.get("original_max_position_embeddings") or limit
    return limit


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and positions, both (n, longest) int64; short prompts are filled up with token 0 on the right."""
    longest = max(len(prompt) for prompt in prompts)
    rows = [list(prompt) + [0] * (longest - len(prompt)) for prompt in prompts]
    positions = torch.arange(longest, device=device).expand(len(prompts), longest)
    return torch.tensor(rows, dtype=torch.long, device=device), positions


class LeanTarget:
    """The lean path: the model itself is only read."""

    def __init__(self, base: PreTrainedModel, dtype: torch.dtype):
        self.decoder = LeanDecoder(base, dtype)
        self.layout = self.decoder.layout()
        self.hidden_size = base.config.hidden_size
        self.vocab_size = base.get_output_embeddings().weight.shape[0]
        self.longest = longest_text(base.config)

    @property
    def features(self) -> Tensor | None:
        return self.decoder.features

    @contextmanager
    def session(self, taps: tuple[int, ...] = ()) -> Iterator[None]:
        self.decoder.taps = taps
        with torch.inference_mode():  # a little cheaper per operation than no_grad
            if not LeanDecoder.supports(self.decoder.base):
                raise ValueError(
                    "the model has changed since the engine was built (an adapter, a module or a hook) and the lean "
                    "path no longer computes it: build a new Engine."
                )
            self.decoder.refresh()
            try:
                yield
            finally:
                self.decoder.release()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Prefix]]:
        # end to end in one row: nothing is padded, and no prompt's arithmetic depends on another's length
        lengths = [len(prompt) for prompt in prompts]
        starts = [0, *itertools.accumulate(lengths)][:-1]
        device = self.layout.device
        tokens = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        store = FreshKeys(len(self.layout.heads))
        hidden = self.decoder.prefill(tokens, positions, store, lengths)
        last = hidden[0, [start + length - 1 for start, length in zip(starts, lengths, strict=True)]]
        parts = zip(starts, lengths, strict=True)
        prefixes = [store.prefix(0, start, length, self.features) for start, length in parts]
        return self.decoder.logits(last), prefixes

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: RaggedCache, span: int, look: TreeLook | None = None
    ) -> Tensor:
        span = whole_lanes(span)
        cache.open(positions if look is None else look.slots, span)
        hidden = self.decoder.decode(tokens, positions, cache, span, look)
        return self.decoder.logits(hidden.flatten(0, 1)).view(*tokens.shape, -1)


def _copy_in(model: Any, dtype: torch.dtype) -> Any:
    """A copy of `model` with weights in `dtype`, tied ones tied, and nothing held twice.

    Computed buffers keep their precision, as after loading: rotary frequencies in bfloat16 would misplace every token.
    """
    memo: dict[int, Any] = {}
    for weight in model.state_dict(keep_vars=True).values():
        if isinstance(weight, Tensor) and weight.is_floating_point():
            cast = weight.detach().to(dtype)
            memo[id(weight)] = nn.Parameter(cast, requires_grad=False) if isinstance(weight, nn.Parameter) else cast
    return copy.deepcopy(model, memo)


class HuggingFaceTarget:
    """The general path: the model's own forward with our cache, explicit positions and explicit masks."""

    def __init__(self, model: Any, base: PreTrainedModel, dtype: torch.dtype):
        self.model, self.config = model, base.config.get_text_config()
        self.hidden_size = self.config.hidden_size
        weight = base.get_input_embeddings().weight
        self.runner = model
        self.taps: tuple[int, ...] = ()
        self.features: Tensor | None = None
        self.windows = layer_windows(self.config)
        # configs name heads and sizes in too many ways: one token, in the model's own precision, shows what is stored
        self.casts, self.layout = False, CacheLayout((), weight.dtype, weight.device)
        heads = self._measured_heads()
        self._compare_with_its_own_forward(weight.shape[0])
        self.casts, self.layout = dtype != weight.dtype, CacheLayout(heads, dtype, weight.device)
        self.vocab_size = base.get_output_embeddings().weight.shape[0]
        self.longest = longest_text(self.config)

    def _measured_heads(self) -> tuple[tuple[int, int], ...]:
        token = torch.zeros((1, 1), dtype=torch.long, device=self.layout.device)
        store = FreshKeys(len(self.windows))
        with self.session():
            self._run(token, token, store, 1, 1)
        pairs = zip(store.keys, store.values, strict=True)
        odd = [i for i, (k, v) in enumerate(pairs) if k is None or v is None or k.shape != v.shape]
        if odd:
            raise ValueError(
                f"{self.config.model_type} does not store keys and values of one size in layer {odd[0]}, and the "
                "engine runs models that do: use a model of the llama, qwen, mistral or gemma kind."
            )
        return tuple((keys.shape[1], keys.shape[3]) for keys in store.keys if keys is not None)

    def _compare_with_its_own_forward(self, vocab: int) -> None:
        # masks are made here from what the config says of windows; a class may read its config otherwise
        window = min((window for window in self.windows if window), default=0)
        length = window + 2 if window <= _LONGEST_PROBE else 8
        tokens = torch.arange(length, device=self.layout.device)[None] * 7 % vocab
        with self.session():
            positions = torch.arange(length, device=tokens.device)[None]
            ours = self._run(tokens, positions, FreshKeys(len(self.windows)), length, 1)
            theirs = self.runner(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
        off = (ours.float().log_softmax(-1) - theirs.float().log_softmax(-1)).abs().max().item()
        if off > (1e-2 if ours.dtype == torch.float32 else 1.0):  # NaN is the weights' affair
            raise ValueError(
                f"{type(self.model).__name__} computes another law ({off:.2g} nats off) when the engine passes it "
                "positions and masks than when it is called with token ids alone, so rollouts would not be its own: "
                "use a model of the llama, qwen, mistral or gemma kind."
            )

    @contextmanager
    def session(self, taps: tuple[int, ...] = ()) -> Iterator[None]:
        self.taps = taps
        # another precision needs weights of its own: a copy, made anew at every generation so that adapters are as they
        # are now, and gone afterwards
        before = self.runner
        self.runner = _copy_in(self.model, self.layout.dtype) if self.casts else self.model
        training = [module for module in self.runner.modules() if module.training]
        self.runner.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True
            self.runner, self.features = before, None

    def _mask(self, allowed: Tensor) -> Tensor:
        # (n, 1, queries, span); transformers' eager attention adds its mask, where True would count as 1
        if self.config._attn_implementation == "sdpa":
            return allowed[:, None]
        bias = torch.zeros(allowed.shape, dtype=self.layout.dtype, device=allowed.device)
        return bias.masked_fill_(~allowed, torch.finfo(bias.dtype).min)[:, None]

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        store: FreshKeys | RaggedCache,
        span: int,
        keep: Any,
        look: TreeLook | None = None,
    ) -> Tensor:
        keys = torch.arange(span, device=tokens.device) if look is None else look.key_positions
        masks = {}
        for window in dict.fromkeys(self.windows):
            allowed = visible(positions, keys, window)
            masks[window] = self._mask(allowed if look is None else allowed & look.allowed)
        mask: Any = masks[self.windows[0]]
        if len(masks) > 1:
            kinds = dict(zip(self.config.layer_types, self.windows, strict=True))
            mask = {kind: masks[window] for kind, window in kinds.items()}
        output = self.runner(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=as_hugging_face_cache(store, len(self.windows)),
            use_cache=True,
            logits_to_keep=keep,
            **({"output_hidden_states": list(self.taps)} if self.taps else {}),
        )
        if self.taps:
            self.features = torch.cat([output.hidden_states[tap] for tap in self.taps], dim=-1)
        return output.logits

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Prefix]]:
        tokens, positions = _pad(prompts, self.layout.device)
        store = FreshKeys(len(self.windows))
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=tokens.device)
        keep, which = ends.unique(return_inverse=True)
        logits = self._run(tokens, positions, store, tokens.shape[1], keep)
        last = logits[torch.arange(len(prompts)), which]
        return last, [store.prefix(i, 0, len(prompt), self.features) for i, prompt in enumerate(prompts)]

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: RaggedCache, span: int, look: TreeLook | None = None
    ) -> Tensor:
        cache.open(positions if look is None else look.slots, span)
        return self._run(tokens, positions, cache, span, 0, look)
