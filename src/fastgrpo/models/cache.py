"""Keys and values of many sequences of different lengths, in tensors that are allocated once.

This file is storage only: it knows nothing of masks, tokens or models' forward passes. Every row starts at slot 0 and
has its own length, so nothing is ever padded, realigned or re-packed: to append is to write at a row's own slots, to
rewind is to use a smaller length, and slots at or past a row's length are never read (their content is arbitrary but
finite, which keeps a masked product from turning into NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class CacheLayout:
    """What one token costs: `heads[i]` = (key/value heads, head size) of layer i."""

    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes over all layers, keys and values."""
        return 2 * sum(heads * size for heads, size in self.heads) * self.dtype.itemsize


@dataclass(frozen=True)
class Prefix:
    """The keys and values of one prompt, to be fanned out to the rows of its group.

    `keys[i]`, `values[i]`: (kv_heads, length, head_size) of layer i. features: (length, taps * hidden), the target's
    hidden states at the layers that were tapped; None when none were.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int
    features: Tensor | None = None


# Softmax sums a row in the lanes of a vector unit, float32 values in the widest register. When what a pass looks at is
# whole lanes, the sum over a row's real slots is the same however far it looks: bits do not depend on neighbours.
_LANES = 16


def whole_lanes(slots: int) -> int:
    """The number of slots, rounded up to whole lanes."""
    return -(-slots // _LANES) * _LANES


class FreshKeys:
    """The store of a prefill pass: nothing was there before, so what comes in is what is attended to."""

    def __init__(self, layers: int):
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """keys, values: (rows, kv_heads, queries, head_size); returned as they are."""
        self.keys[layer], self.values[layer] = keys, values
        return keys, values

    def prefix(self, row: int, first: int, length: int, features: Tensor | None = None) -> Prefix:
        """What the pass stored of `length` tokens of row `row`, from token `first` on; features: (rows, all, f)."""
        part = slice(first, first + length)
        cut = [[t[row, :, part] for t in side if t is not None] for side in (self.keys, self.values)]
        return Prefix(cut[0], cut[1], length, None if features is None else features[row, part])


class RaggedCache:
    """Preallocated keys and values for `rows` sequences of up to `capacity` tokens each, rounded up to whole lanes.

    A pass works on the first n rows (the live ones): `open` says where its tokens go and how far it looks, and
    `append`, called once a layer, writes them and returns what is visible. Rows leave by `move_row` of the last live
    row into the hole and enter by `place` behind the last live one.
    """

    def __init__(self, layout: CacheLayout, rows: int, capacity: int):
        self.layout, self.rows, self.capacity = layout, rows, whole_lanes(capacity)
        # calloc'ed zeros: pages that no token reaches are never touched, and stale slots stay finite
        shapes = [(rows, heads, self.capacity, size) for heads, size in layout.heads]
        self.keys = [torch.zeros(shape, dtype=layout.dtype, device=layout.device) for shape in shapes]
        self.values = [torch.zeros(shape, dtype=layout.dtype, device=layout.device) for shape in shapes]
        self._slots = torch.empty(0, dtype=torch.long, device=layout.device)
        self._span = 0
        self._index: dict[int, Tensor] = {}

    def open(self, slots: Tensor, span: int) -> None:
        """Prepare a pass over the first n rows.

        slots: (n, queries) int64, the slot that each token's keys go to; span: number of slots the pass looks at.
        """
        self._slots, self._span, self._index = slots, span, {}

    def _flat(self, slots: Tensor, kv_heads: int) -> Tensor:
        # (n * kv_heads * queries,) rows of the cache seen as (rows * kv_heads * capacity, head_size)
        n = slots.shape[0]
        heads = torch.arange(n * kv_heads, device=slots.device).view(n, kv_heads, 1)
        return (heads * self.capacity + slots[:, None, :]).reshape(-1)

    def _flat_index(self, kv_heads: int) -> Tensor:
        # the same for all layers of equal head count, so it is made once a pass
        if kv_heads not in self._index:
            self._index[kv_heads] = self._flat(self._slots, kv_heads)
        return self._index[kv_heads]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys, values (n, kv_heads, queries, head_size); return views (n, kv_heads, span, head_size)."""
        n, kv_heads, _, size = keys.shape
        index = self._flat_index(kv_heads)
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            store.view(-1, size).index_copy_(0, index, new.reshape(-1, size))
        return self.keys[layer][:n, :, : self._span], self.values[layer][:n, :, : self._span]

    def place(self, prefix: Prefix, first_row: int, count: int) -> None:
        """Copy a prompt's keys and values to the start of `count` rows from `first_row` on."""
        rows = slice(first_row, first_row + count)
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            self.keys[layer][rows, :, : prefix.length] = keys
            self.values[layer][rows, :, : prefix.length] = values

    def move_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots of the first n rows within their rows, (n, k) int64 each: all are read, then all are written."""
        for stores in zip(self.keys, self.values, strict=True):
            kv_heads, size = stores[0].shape[1], stores[0].shape[3]
            read, write = self._flat(sources, kv_heads), self._flat(targets, kv_heads)
            for store in stores:
                flat = store.view(-1, size)
                flat.index_copy_(0, write, flat.index_select(0, read))

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` over row `target`."""
        for store in (*self.keys, *self.values):
            store[target, :, :length] = store[source, :, :length]


class _HuggingFaceLayer(CacheLayerMixin):
    """One layer of either store behind the interface that transformers' attention modules call."""

    def __init__(self, store: FreshKeys | RaggedCache, layer: int):
        super().__init__()
        self.store, self.layer, self.is_initialized = store, layer, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store is allocated by its owner."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.store.append(self.layer, key_states, value_states)

    # The engine passes masks and position ids itself, so transformers needs no sizes; zero says "nothing was there".
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def as_hugging_face_cache(store: FreshKeys | RaggedCache, layers: int) -> Cache:
    """A transformers `Cache` whose layers write to and read from `store`."""
    return Cache(layers=[_HuggingFaceLayer(store, layer) for layer in range(layers)])
