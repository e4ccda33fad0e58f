"""The draft model: one layer over a target's features, in EAGLE-3's layout, and its folder on disk.

Not here: whom it proposes to and with which cache (speculation/proposers.py), how it learns (drafting/), folders that
other projects wrote (draft_formats.py), how a target's features are tapped (target.py).

What goes with what: at position i the draft is fed the target's features of position i and the embedding of the token
at position i + 1, and predicts the token at position i + 2; `align` pairs them. Features are fused to a hidden state by
`fuse`; further down a draft's own chain there are none yet, and the draft's last hidden state, before its norm, stands
in for them. The embedding is the target's own module, looked up at every use and never saved; where a target scales
what it looks up (Gemma), the draft is fed the scaled embedding, in training as in drafting. No gradient reaches the
target.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fastgrpo.models.cache import CacheLayout
from fastgrpo.models.draft_config import DraftConfig, base_of, fields_for
from fastgrpo.models.foreign import damaged_file, foreign, reason

logger = logging.getLogger(__name__)

# Attention as the caller wants it: query (n, queries, heads, size), keys and values (n, kv_heads, queries, size) of the
# same tokens -> (n, queries, heads * size). It stores the keys, decides who looks at whom, and applies `draft.scale`.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DraftInputs(NamedTuple):
    """A stretch of the draft's inputs: input j stands at positions[:, j] and predicts the token two positions on."""

    tokens: Tensor  # (n, q) int64, each from one position further than its features
    features: Tensor  # (n, q, n_features * target_hidden)
    positions: Tensor  # (n, q) int64


def align(tokens: Tensor, features: Tensor, first: Tensor) -> DraftInputs:
    """Pair the features of a stretch of text with the tokens that follow them.

    tokens: (n, q + 1) int64, tokens[:, j] from position first + j; features: (n, q or q + 1, f), features[:, j] from
    position first + j; first: (n,) int64. Features of the last token are left out, since what follows is not known.
    After a round that began with L tokens in the cache and accepted a: first = L, tokens = the old root, the accepted
    ones and the new root, features = those of the old root and the accepted ones.
    """
    count = tokens.shape[1] - 1
    if count < 1 or features.shape[1] not in (count, count + 1):
        raise ValueError(
            f"{features.shape[1]} features do not go with {tokens.shape[1]} tokens: pass at least 2 tokens, and "
            "features of all of them or all but the last."
        )
    positions = first[:, None] + torch.arange(count, device=tokens.device)
    return DraftInputs(tokens[:, 1:], features[:, :count], positions)


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        width, size = 2 * config.hidden_size, config.head_dim
        self.size = size
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=False)
        # identities have no weights, so no keys in the state dict
        self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query, key, value = (p(x).unflatten(-1, (-1, self.size)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = _rotate(self.q_norm(query), rope), _rotate(self.k_norm(key), rope)
        return self.o_proj(attend(query, key.transpose(1, 2), value.transpose(1, 2)))


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    # x: (n, q, heads, size); channel j turns with channel j + size / 2
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.self_attn, self.mlp = _Attention(config), _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # of the token's embedding
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)  # (n, q, 2h)
        x = hidden + self.self_attn(both, rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(PreTrainedModel):
    """A draft; `for_target` builds an untrained one, `from_pretrained` loads one, `bind` gives either its target.

    State dict: `fc`, `midlayer.*`, `norm`, `lm_head`, and with a reduced vocabulary `d2t` (int64, target id of draft id
    i = i + d2t[i], ascending) and `t2d` (bool, True where the target's token has a draft id). The target is held by a
    weak reference: a draft does not keep it alive, and copies of a draft share it.
    """

    config: DraftConfig
    config_class = DraftConfig  # which transformers cannot read off an annotation that is a string

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:  # an empty map, which `bind` refuses
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._target: weakref.ref[Any] | None = None
        self._rotary: dict[torch.device, LlamaRotaryEmbedding] = {}
        self.post_init()

    @classmethod
    def for_target(
        cls,
        target: Any,
        *,
        vocabulary: Sequence[int] | Tensor | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> DraftModel:
        """An untrained draft for `target`, a Hugging Face causal LM, plain or under PEFT; bound, and in eval mode.

        vocabulary: the target ids that the draft can propose, ascending (default: all). dtype: by default that of the
        target's embedding, whose device the draft is on. options: fields of `DraftConfig`, such as feature_layers,
        qk_norm or intermediate_size; the others are the target's. The draft attends to everything, whatever the
        target's window, and rotates whole heads: where the target turns parts of them, by plain frequencies.
        Weights are drawn from torch's global generator. Raises ValueError for what does not fit.
        """
        base = base_of(target)
        fields = {**fields_for(base), **options}
        if vocabulary is not None:
            vocabulary = torch.as_tensor(vocabulary, dtype=torch.long, device="cpu")
            _check_ids("vocabulary", vocabulary, fields["vocab_size"])
            fields["draft_vocab_size"] = len(vocabulary)
        draft = cls(DraftConfig(**fields))
        if vocabulary is not None and draft.reduced:
            draft.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
            draft.t2d[vocabulary] = True
        weight = base.get_input_embeddings().weight
        return draft.to(device=weight.device, dtype=dtype or weight.dtype).bind(target).eval()

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **options: Any) -> DraftModel:
        """Load a folder or hub id that `save_pretrained` wrote; in eval mode, not bound.

        options: transformers' (dtype, revision, ...). Pickled weights are read as tensors only. Raises ValueError where
        the weights are not exactly those that the config asks for, or the vocabulary's map cannot be.
        """
        if not options.setdefault("weights_only", True):
            raise ValueError("weights_only=False would run code from the checkpoint: leave it out.")
        options.update(output_loading_info=True, ignore_mismatched_sizes=True)  # reported below, as errors

        def explain(error: Exception) -> Exception:
            if isinstance(error, ValueError | OSError):
                return error  # of the config or of transformers, which names the folder
            said = (damaged_file(Path(name)) if Path(name).is_dir() else None) or reason(error)
            return ValueError(f"the draft {name} cannot be read: {said}. Get it again, or save it anew.")

        with foreign(explain):
            draft, report = super().from_pretrained(name, *args, **options)
        missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
        if "d2t" in missing:
            raise ValueError(
                f"{name} proposes {draft.config.draft_vocab_size} of {draft.config.vocab_size} tokens, but its map d2t "
                "is missing, so nobody knows which: get the complete checkpoint."
            )
        shapes = [f"{key} {tuple(there)}, not {tuple(here)}" for key, there, here in sorted(report["mismatched_keys"])]
        lists = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        wrong = [f"{what}: {', '.join(keys)}" for what, keys in lists if keys]
        if wrong:
            raise ValueError(
                f"the weights of {name} are not those of its config ({'; '.join(wrong)}): the draft would propose "
                "noise, so get the complete checkpoint, or import it if it is in another project's format."
            )
        draft._check_map()
        return draft

    def bind(self, target: Any) -> DraftModel:
        """Use `target`'s token embedding from now on, after checking that it is the kind of model this draft is for.

        Returns the draft. Raises ValueError for a target of another shape, or a reduced vocabulary without a map.
        """
        base = base_of(target)
        theirs = fields_for(base)
        for name in ("target_model_type", "target_num_layers", "target_hidden_size", "vocab_size"):
            if getattr(self.config, name) != theirs[name]:
                raise ValueError(
                    f"the draft was made for a target with {name} {getattr(self.config, name)!r}, and this one has "
                    f"{theirs[name]!r}: use the draft's own target, {self.config.target_name or 'unnamed'!r}, or build "
                    "a draft for this one (DraftModel.for_target) and train it."
                )
        width = base.get_input_embeddings().weight.shape[1]
        if self.config.hidden_size != width:
            raise ValueError(
                f"the draft's hidden_size is {self.config.hidden_size}, but it is fed the target's token embedding, "
                f"which is {width} wide: it must be {width}."
            )
        self._check_map()
        names = Path(self.config.target_name).name, Path(theirs["target_name"]).name
        if all(names) and names[0] != names[1]:
            logger.warning("The draft was made for %s and is used with %s: expect fewer accepted tokens.", *names)
        self._target = weakref.ref(base)
        return self

    @property
    def reduced(self) -> bool:
        """Whether the draft proposes only some of the target's tokens."""
        return self.config.draft_vocab_size < self.config.vocab_size

    @property
    def ids(self) -> Tensor:
        """(draft_vocab,) int64: the target's id of every draft id, ascending. Computed anew: keep it for a rollout."""
        own = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return own + self.d2t if self.reduced else own

    @property
    def scale(self) -> float:
        """What `attend` multiplies the scores by."""
        return self.config.head_dim**-0.5

    @property
    def layout(self) -> CacheLayout:
        """What a token costs in a cache for this draft: one layer."""
        weight = self.lm_head.weight
        return CacheLayout(((self.config.num_key_value_heads, self.config.head_dim),), weight.dtype, weight.device)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features, (..., n_features * target_hidden) of any dtype, as a hidden state (..., hidden)."""
        return self.fc(features.detach().to(self.fc.weight.dtype))

    def layer(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass. tokens: (n, q) int64 target ids, hidden: (n, q, hidden), positions: (n, q) int64, as `align` pairs
        them. Returns (n, q, hidden) before the norm: what `logits` takes, and a later level instead of `fuse`.
        """
        return self.midlayer(self._embed(tokens), hidden, self._rope(positions, hidden), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (..., hidden) from `layer`. Returns (..., draft_vocab): column i is the token `ids[i]`."""
        return self.lm_head(self.norm(hidden))

    def _embed(self, tokens: Tensor) -> Tensor:
        base = self._target() if self._target is not None else None
        if base is None:
            raise RuntimeError("the draft has no target, or it is gone: call bind(target) and keep the target.")
        with torch.no_grad():
            embedded = base.get_input_embeddings()(tokens)
        return embedded.detach().to(self.lm_head.weight.dtype)  # a hook may have asked for gradients all the same

    def _rope(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        # (n, q, 1, head_dim) cosines and sines in x's dtype. Made at the first use and not a submodule, so that casting
        # the draft never rounds frequencies; outside of inference mode, so that training may use what a rollout made
        with torch.inference_mode(False), torch.no_grad():
            if x.device not in self._rotary:
                self._rotary[x.device] = LlamaRotaryEmbedding(self.config).to(x.device)
            cos, sin = self._rotary[x.device](x, positions)
        return cos[:, :, None], sin[:, :, None]

    def _check_map(self) -> None:
        if not self.reduced:
            return
        if not bool(self.t2d.any()):
            raise ValueError(
                f"the draft has a reduced vocabulary ({self.config.draft_vocab_size} of {self.config.vocab_size} "
                "tokens) without a map: pass vocabulary=, the target's ids, to DraftModel.for_target."
            )
        ids = self.ids
        _check_ids("d2t", ids, self.config.vocab_size)
        if not torch.equal(self.t2d.nonzero().flatten(), ids):
            raise ValueError("t2d does not mark the tokens that d2t maps to: the checkpoint's map is damaged.")


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless ids (m,) are ascending, distinct target ids, at least one."""
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"{name} has the shape {tuple(ids.shape)}, but must be a list of at least one token id.")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"{name} maps to token {int(ids.min() if ids.min() < 0 else ids.max())}, but the target's tokens are 0 to "
            f"{vocab_size - 1}."
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        at = int((ids[1:] <= ids[:-1]).nonzero()[0])
        raise ValueError(
            f"{name} maps to token {int(ids[at])} and then to {int(ids[at + 1])}, but must be ascending without "
            "repetition: sort the ids and drop duplicates."
        )
