"""The forward pass of the common decoder families, written out: llama, mistral, qwen2, qwen3, gemma3.

The same arithmetic as transformers' modules, over the same weights, without what generation does not need: module
calls, repeated keys, a growing cache. On a CPU the weights are copied once per policy update into the layout that
oneDNN multiplies fastest (a row-major weight costs up to three times as much between 2 and 16 tokens); elsewhere they
are shared. `target.py` decides when this path serves and tests compare it with the general one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from fastgrpo.models.attention import TreeLook, as_bias, causal_attention, grouped_attention, layer_windows, visible
from fastgrpo.models.cache import CacheLayout, FreshKeys, RaggedCache

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")
# oneDNN chooses its layout for an expected number of tokens; this one was within 10 % of the best from 1 to 128
_PACK_FOR_TOKENS = 32


def adapters(module: Any) -> list[tuple[Tensor, Tensor, float]] | None:
    """The active LoRA pairs (A, B, scale) of a PEFT layer, [] for a plain one; None where there is more to it."""
    if type(module) is nn.Linear:
        return []
    base, active = getattr(module, "base_layer", None), getattr(module, "active_adapters", None)
    if type(base) is not nn.Linear or active is None:
        return None
    if not isinstance(getattr(module, "lora_A", None), nn.ModuleDict):  # AdaLoRA's are bare parameters
        return None
    if getattr(module, "merged", False) or getattr(module, "disable_adapters", False):
        return [] if not getattr(module, "lora_variant", None) else None
    names = [name for name in active if name in module.lora_A]
    if any(name in getattr(module, "lora_variant", {}) for name in names):
        return None  # DoRA and friends change the product itself
    if any(module.lora_B[name].bias is not None for name in names):
        return None
    return [(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]) for name in names]


class Linear:
    """One or more nn.Linear with the same input, as one product over weights read from the modules.

    In float32 a LoRA pair is added to the copy that packing makes anyway; in less precision that would round it away,
    so it is applied beside the product, as PEFT does.
    """

    def __init__(self, modules: list[Any], dtype: torch.dtype):
        bases = [getattr(module, "base_layer", module) for module in modules]
        self.weights = [base.weight.detach().to(dtype) for base in bases]
        biases = [base.bias for base in bases]
        self.bias = None
        if any(bias is not None for bias in biases):
            zeros = [weight.new_zeros(weight.shape[0]) for weight in self.weights]
            filled = [z if b is None else b.detach().to(dtype) for b, z in zip(biases, zeros, strict=True)]
            self.bias = torch.cat(filled)
        self.pairs: list[list[tuple[Tensor, Tensor, float]]] = []
        for i, module in enumerate(modules):
            pairs = adapters(module) or []
            if dtype == torch.float32 and pairs:
                delta = sum(scale * (b.detach().float() @ a.detach().float()) for a, b, scale in pairs)
                self.weights[i] = self.weights[i] + delta
                pairs = []
            self.pairs.append([(a.detach().to(dtype), b.detach().to(dtype), scale) for a, b, scale in pairs])
        self.packed = _pack(self.weights)
        if self.packed is not None:
            self.sizes = [weight.shape[0] for weight in self.weights]
            self.weights = []

    def __call__(self, x: Tensor) -> Tensor:
        """x: (tokens, in). Returns (tokens, out), the outputs of the modules side by side."""
        if self.packed is not None:
            out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        elif len(self.weights) == 1:
            out = F.linear(x, self.weights[0], self.bias)
        else:
            out = torch.cat([F.linear(x, weight) for weight in self.weights], dim=-1)
            out = out if self.bias is None else out + self.bias
        if any(self.pairs):
            first = 0
            sizes = self.sizes if self.packed is not None else [w.shape[0] for w in self.weights]
            for size, pairs in zip(sizes, self.pairs, strict=True):
                for a, b, scale in pairs:
                    out[:, first : first + size] += scale * F.linear(F.linear(x, a), b)
                first += size
        return out


def _pack(weights: list[Tensor]) -> Tensor | None:
    """The weights as one oneDNN matrix, or None where that is not to be had or does not pay."""
    if weights[0].device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weights[0].dtype != torch.float32 and not (
        weights[0].dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    joined = weights[0] if len(weights) == 1 else torch.cat(weights)
    return torch.ops.mkldnn._reorder_linear_weight(joined.contiguous(), _PACK_FOR_TOKENS)


@dataclass
class _Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    norms: dict[str, Tensor]  # by the module's name; Gemma's already 1 + weight
    window: int | None
    rope: str | None


# How a layer's queries (n, queries, heads, size) look at its keys and values (n, kv_heads, span, size).
_Attend = Callable[[_Layer, Tensor, Tensor, Tensor], Tensor]


class LeanDecoder:
    """Runs a supported model over either store of `cache.py`. Never touches the model; `refresh` reads its weights."""

    def __init__(self, base: Any, dtype: torch.dtype):
        config = base.config
        self.base, self.dtype = base, dtype
        self.gemma = config.model_type.startswith("gemma3")
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        activation = config.hidden_activation if self.gemma else config.hidden_act
        self.activation: Callable[[Tensor], Tensor] = ACT2FN[activation]
        self.scale = config.query_pre_attn_scalar**-0.5 if self.gemma else self.size**-0.5
        self.windows = layer_windows(config)
        self.layer_types = config.layer_types if self.gemma else [None] * config.num_hidden_layers
        self.layers: list[_Layer] = []
        self.head: Linear | None = None
        self.taps: tuple[int, ...] = ()  # hidden_states indices, as transformers counts them
        self.features: Tensor | None = None  # of the last pass, (n, queries, taps * hidden)

    @staticmethod
    def supports(base: Any) -> bool:
        """Whether this file computes what `base` would: a known family, plain or LoRA linears, nothing soft-capped."""
        if type(base).__name__ not in FAMILIES or not type(base).__module__.startswith("transformers."):
            return False
        config = base.config
        if getattr(config, "attn_logit_softcapping", None) or getattr(config, "final_logit_softcapping", None):
            return False
        if getattr(config, "use_bidirectional_attention", False):
            return False
        if config.model_type == "llama" and getattr(config, "sliding_window", None):  # which llama does not read
            return False
        # what stands between the linears is computed here, so it must be the family's own, with nothing hooked in
        home = type(base).__module__
        parts = [base.model.norm, base.model.rotary_emb]
        for layer in base.model.layers:
            parts += [layer, layer.self_attn, layer.mlp]
            parts += [child for name, child in layer.named_modules() if name.endswith("norm")]
        if any(type(part).__module__ != home for part in parts) or _patched(base) or _retuned(base):
            return False
        linears = [m for layer in base.model.layers for m in (*_attention_linears(layer), *_mlp_linears(layer))]
        plain = [base.get_input_embeddings(), base.get_output_embeddings()]
        return (
            all(adapters(module) is not None for module in linears)
            and isinstance(plain[0], nn.Embedding)
            and type(plain[1]) is nn.Linear
            and all(type(p) in (nn.Parameter, Tensor) for p in base.parameters())  # no DTensor, nothing quantised
        )

    def refresh(self) -> None:
        """Read the weights, as they are now."""
        for module, window, kind in zip(self.base.model.layers, self.windows, self.layer_types, strict=True):
            q, k, v, out = _attention_linears(module)
            gate, up, down = _mlp_linears(module)
            norms = {name: self._norm_weight(child) for name, child in module.named_modules() if name.endswith("norm")}
            groups = {"qkv": [q, k, v], "out": [out], "gate_up": [gate, up], "down": [down]}
            linears = {name: Linear(group, self.dtype) for name, group in groups.items()}
            self.layers.append(_Layer(**linears, norms=norms, window=window, rope=kind))
        self.final_norm = self._norm_weight(self.base.model.norm)
        self.embedding = self.base.get_input_embeddings().weight.detach()
        self.head = Linear([self.base.get_output_embeddings()], self.dtype)

    def release(self) -> None:
        """Let go of what `refresh` read: packed weights are a second copy, which training needs the room of."""
        self.layers, self.head, self.features = [], None, None

    def _norm_weight(self, module: Any) -> Tensor:
        weight = module.weight.detach().float()
        return (1.0 + weight if self.gemma else weight).to(self.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def layout(self) -> CacheLayout:
        """What a token costs in a cache for this decoder."""
        heads = ((self.kv_heads, self.size),) * len(self.windows)
        return CacheLayout(heads, self.dtype, self.base.get_input_embeddings().weight.device)

    def prefill(self, tokens: Tensor, positions: Tensor, store: FreshKeys, lengths: Sequence[int]) -> Tensor:
        """Run whole texts that lie end to end. Returns the hidden states after the final norm, (1, total, hidden).

        tokens, positions: (1, total) int64; lengths: of the texts, which do not see each other.
        """

        def attend(layer: _Layer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            parts = [side.split(list(lengths), dim=d) for side, d in ((query, 1), (keys, 2), (values, 2))]
            texts = [causal_attention(q, k, v, layer.window, self.scale) for q, k, v in zip(*parts, strict=True)]
            return torch.cat(texts, dim=1)

        return self._run(tokens, positions, store, attend)

    def decode(
        self, tokens: Tensor, positions: Tensor, store: RaggedCache, span: int, look: TreeLook | None = None
    ) -> Tensor:
        """Continue the rows of an opened cache. Returns the hidden states after the final norm, (n, queries, hidden).

        tokens, positions: (n, queries) int64; span: slots to look at; look: what the nodes of trees see.
        """
        biases = self._biases(positions, span, look)

        def attend(layer: _Layer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return grouped_attention(query, keys, values, biases[layer.window], self.scale)

        return self._run(tokens, positions, store, attend)

    def _run(self, tokens: Tensor, positions: Tensor, store: FreshKeys | RaggedCache, attend: _Attend) -> Tensor:
        n, queries = tokens.shape
        x = F.embedding(tokens.reshape(-1), self.embedding).to(self.dtype)
        if self.gemma:
            x = x * self.base.model.embed_tokens.embed_scale.to(self.dtype)
        ropes = {kind: self._rope(x, positions, kind) for kind in dict.fromkeys(self.layer_types)}
        tapped: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if i in self.taps:
                tapped.append(x)
            h = self._norm(x, layer.norms["input_layernorm"])
            qk, value = self._project(layer, h, n, queries, ropes[layer.rope])
            query, key = qk[..., : self.heads, :], qk[..., self.heads :, :].transpose(1, 2)
            keys, values = store.append(i, key, value.transpose(1, 2))
            mixed = attend(layer, query, keys, values)
            x = self._finish(layer, x, layer.out(mixed.view(n * queries, -1)))
        x = self._norm(x, self.final_norm)
        if self.taps:
            tapped += [x] * (len(self.layers) in self.taps)
            self.features = torch.cat(tapped, dim=-1).view(n, queries, -1)
        return x.view(n, queries, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (tokens, hidden), after the final norm. Returns (tokens, vocab)."""
        if self.head is None:
            raise RuntimeError("the weights have not been read: run passes inside the target's session().")
        return self.head(hidden)

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        # Gemma normalises what each half adds; the others normalise only what each half reads
        if self.gemma:
            x = x + self._norm(attended, layer.norms["post_attention_layernorm"])
            return x + self._norm(
                self._mlp(layer, self._norm(x, layer.norms["pre_feedforward_layernorm"])),
                layer.norms["post_feedforward_layernorm"],
            )
        x = attended.add_(x)  # in place of what nobody else holds, here and below: a pass is short of memory bandwidth
        return self._mlp(layer, self._norm(x, layer.norms["post_attention_layernorm"])).add_(x)

    def _mlp(self, layer: _Layer, h: Tensor) -> Tensor:
        gate, up = layer.gate_up(h).chunk(2, dim=-1)
        return layer.down(self.activation(gate).mul_(up))

    def _project(
        self, layer: _Layer, h: Tensor, n: int, queries: int, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        # (n, queries, heads + kv_heads, size) rotated queries and keys; (n, queries, kv_heads, size) values
        qkv = layer.qkv(h).view(n, queries, self.heads + 2 * self.kv_heads, self.size)
        qk, value = qkv[..., : self.heads + self.kv_heads, :], qkv[..., self.heads + self.kv_heads :, :]
        if "self_attn.q_norm" in layer.norms:
            query, key = qk[..., : self.heads, :], qk[..., self.heads :, :]
            query = self._norm(query, layer.norms["self_attn.q_norm"])
            qk = torch.cat((query, self._norm(key, layer.norms["self_attn.k_norm"])), dim=2)
        cos, sin = rope
        half = self.size // 2
        swapped = torch.cat((qk[..., half:], qk[..., :half]), dim=-1)
        return torch.addcmul(qk * cos, swapped, sin), value

    def _rope(self, x: Tensor, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        # by the model's own module, so that every kind of scaling is honoured; the minus of the rotation goes into sin
        arguments = (x, positions) if kind is None else (x, positions, kind)
        # some kinds of scaling store what they compute in the module: that must not become an inference tensor
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self.base.model.rotary_emb(*arguments)
        half = self.size // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos[:, :, None], sin[:, :, None]

    def _biases(self, positions: Tensor, span: int, look: TreeLook | None) -> dict[int | None, Tensor]:
        keys = torch.arange(span, device=positions.device) if look is None else look.key_positions
        biases = {}
        for window in dict.fromkeys(self.windows):
            allowed = visible(positions, keys, window)
            allowed = allowed if look is None else allowed & look.allowed
            biases[window] = as_bias(allowed, self.heads // self.kv_heads, self.kv_heads, self.dtype)
        return biases


def _attention_linears(layer: Any) -> list[Any]:
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]


def _mlp_linears(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]


def _patched(base: Any) -> bool:
    """Whether a module of `base` does more than its class says: a foreign hook, or a forward of the instance's own.

    transformers' hooks only record what passes by (output_hidden_states), and what makes inputs require gradients,
    under whoever's name, changes no value. A forward that is patched onto the whole model is its owner's affair: it is
    called from outside.
    """
    for module in base.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            home, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
            if not home.startswith("transformers.") and name != "make_inputs_require_grad":
                return True
        if "forward" in vars(module) and module is not base:
            return True
    return False


def _retuned(base: Any) -> bool:
    """Whether a number or function that this file takes from the config was changed in a module."""
    config = base.config
    gemma = config.model_type.startswith("gemma3")
    activation = type(ACT2FN[config.hidden_activation if gemma else config.hidden_act])
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scale = (config.query_pre_attn_scalar if gemma else size) ** -0.5
    norms = [module for name, module in base.model.named_modules() if name.endswith("norm")]
    return (
        any(getattr(norm, "eps", getattr(norm, "variance_epsilon", None)) != config.rms_norm_eps for norm in norms)
        or any(layer.self_attn.scaling != scale for layer in base.model.layers)
        or any(type(layer.mlp.act_fn) is not activation for layer in base.model.layers)
    )
