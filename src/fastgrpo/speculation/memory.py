"""How many rows fit into memory: planned before the first token, and said when it is fewer than asked for."""

from __future__ import annotations

import warnings

import psutil
import torch

from fastgrpo.models.cache import CacheLayout

# Of the memory that is free now; the rest is for activations, logits and what else the process does.
_SHARE = 0.8
_GIB = 1 << 30


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return psutil.virtual_memory().available


def plan_slots(layout: CacheLayout, wanted: int, rows: int, capacity: int, features: int = 0) -> int:
    """The number of rows to decode at once: `wanted`, no more than `rows`, no more than fit.

    capacity: tokens per row. features: bytes a token that every row keeps, live or ended, until the rollout is over.
    Raises MemoryError with the numbers when not even one row fits.
    """
    wanted = min(wanted, rows)
    per_row = (layout.bytes_per_token + features) * capacity
    budget = int(_SHARE * free_bytes(layout.device)) - rows * features * capacity
    fitting = budget // per_row
    what = "keys, values and features" if features else "keys and values"
    if fitting < 1:
        kept = f" beside the features that {rows} rows keep" if features else ""
        raise MemoryError(
            f"the {what} of one row of {capacity} tokens take {per_row / _GIB:.2f} GiB, and "
            f"{budget / _GIB:.2f} GiB may be used{kept}: lower max_new_tokens, or use a smaller model or dtype."
        )
    if fitting < wanted:
        warnings.warn(
            f"{wanted} rows of {capacity} tokens need {wanted * per_row / _GIB:.2f} GiB of {what}, and "
            f"{budget / _GIB:.2f} GiB may be used: {fitting} rows decode at once, the others wait.",
            stacklevel=3,
        )
    return min(wanted, fitting)
