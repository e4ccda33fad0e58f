"""Token-budget sub-batches: which rows of a batch are updated together, a cut of TRL's record, and what a cut weighs.

Pure functions over lengths, masks and the dict that TRL's `_generate_and_score_completions` returns. They run nothing:
update.py does, and shared_prompts.py runs the rows of a unit as one sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

# A loss type is normalised by what the batch holds of one of these; "nothing" has a normaliser that is global already.
NORMALISERS = {
    "grpo": "rows",
    "sapo": "rows",
    "dr_grpo": "rows",
    "luspo": "rows",
    "bnpo": "tokens",
    "dapo": "nothing",
    "cispo": "nothing",
    "vespo": "nothing",
}
MAX_SHARED_TOKENS = 4096  # of rows run as one sequence: its mask has the square of that many entries

_PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")
_OF_IMAGES = ("pixel_", "image_", "spatial_")
_BOTH_COLUMNS = ("token_type_ids", "mm_token_type_ids")  # as wide as prompt and completion together


@dataclass(frozen=True)
class Unit:
    """Rows that are run as one sequence, because they share their prompt, or one row; `length` is in tokens."""

    rows: tuple[int, ...]
    length: int


def plan(lengths: Sequence[int], *, max_tokens: int | None, max_gap: int) -> list[list[int]]:
    """Items in sub-batches, shortest first: an item joins while all, padded to it, stay within `max_tokens` and the
    padding that it adds to the others is at most `max_gap` tokens. One item is always allowed; None is no budget.
    """
    if max_tokens is None:
        return [list(range(len(lengths)))]
    batches: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[item]
        if batches:
            count, longest = len(batches[-1]), lengths[batches[-1][-1]]
            if length * (count + 1) <= max_tokens and (length - longest) * count <= max_gap:
                batches[-1].append(item)
                continue
        batches.append([item])
    return batches


def units(
    prompts: Sequence[Hashable], prompt_lengths: Sequence[int], lengths: Sequence[int], *, width: int, max_tokens: int
) -> list[Unit]:
    """Rows that share a prompt as few sequences: the prompt without its last token once, then each response behind
    that token, without its own last one, which predicts nothing.

    `lengths` are those of the responses, `width` is the model's hidden size. Attention is computed for every pair of a
    sequence, also where it is masked, so long responses share in smaller company: what costs the least is taken.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    found = []
    for rows in groups.values():
        rows.sort(key=lambda row: lengths[row])
        shared = prompt_lengths[rows[0]] - 1
        choices = [_parts(rows, shared, lengths, size, max_tokens) for size in range(1, len(rows) + 1)]
        found += min(choices, key=lambda parts: sum(unit.length * (6 * width + unit.length) for unit in parts))
    return found


def _parts(rows: Sequence[int], shared: int, lengths: Sequence[int], size: int, max_tokens: int) -> list[Unit]:
    """The rows, in order, in units of at most `size` rows and, where a unit has two or more, `max_tokens` tokens."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and len(parts[-1]) < size and shared + lengths[row] + sum(lengths[r] for r in parts[-1]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [Unit(tuple(part), shared + sum(lengths[row] for row in part)) for part in parts]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Items in as few bins of `capacity` as first-fit finds, longest first; `capacity` is at least the longest."""
    bins: list[list[int]] = []
    left: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        number = next((n for n, room in enumerate(left) if room >= lengths[item]), len(bins))
        if number == len(bins):
            bins.append([])
            left.append(capacity)
        bins[number].append(item)
        left[number] -= lengths[item]
    return bins


def prompts_of(record: dict[str, Any]) -> list[tuple[int, ...]]:
    """The token ids of every row's prompt, padding excluded."""
    ids, counts = record["prompt_ids"].tolist(), record["prompt_mask"].sum(1).tolist()
    return [tuple(row[len(row) - count :]) for row, count in zip(ids, counts, strict=True)]


def can_cut(record: dict[str, Any]) -> bool:
    """Whether every sub-batch of this record is one that a model can run: with images, every row must have one."""
    return "pixel_values" not in record or ("num_images" in record and min(record["num_images"]) > 0)


def cut(record: dict[str, Any], rows: Sequence[int], *, multiple: int = 1) -> dict[str, Any]:
    """These rows of TRL's record, every tensor and list of it, without the padding that only other rows needed.

    Prompts are padded on the left and completions on the right; widths stay a multiple of `multiple`. Scalars, such as
    num_items_in_batch, are kept: they belong to the whole.
    """
    total, prompt_width = record["prompt_ids"].shape
    width = record["completion_ids"].shape[1]
    index = torch.tensor(rows, device=record["prompt_ids"].device)
    left = prompt_width - _used(record["prompt_mask"][index].flip(1), multiple)
    right = _used(record["completion_mask"][index], multiple)
    part = {}
    for name, value in split_pixel_values_by_grid(record).items():
        if isinstance(value, list):
            value = [value[row] for row in rows]
        elif isinstance(value, Tensor) and value.ndim and len(value) == total:
            value = value[index]
            if name in _PROMPT_COLUMNS:
                value = value[:, left:]
            elif name in _BOTH_COLUMNS:
                value = value[:, left : prompt_width + right]
            elif value.ndim == 2 and value.shape[1] == width and not name.startswith(_OF_IMAGES):
                value = value[:, :right]
        part[name] = value
    return unsplit_pixel_values_by_grid(part)


def _used(mask: Tensor, multiple: int) -> int:
    """Columns up to the last that any row uses, at least 1, rounded up to `multiple`."""
    columns = mask.bool().any(0).nonzero()
    used = int(columns[-1]) + 1 if len(columns) else 1
    return min(-(-used // multiple) * multiple, mask.shape[1])


def loss_mask(record: dict[str, Any]) -> Tensor:
    """The tokens that the loss is about, (rows, tokens): those of completions that the policy itself wrote."""
    mask = record["completion_mask"]
    return mask * record["tool_mask"] if "tool_mask" in record else mask


def weights(loss_type: str, rows: Sequence[int], tokens: Sequence[int]) -> tuple[list[float], list[float]]:
    """What the sub-batches' losses, and their entropy bonuses, are multiplied by so that their sums are the whole's.

    rows, tokens: of each sub-batch. TRL divides by at least one token, and the weights by tokens know that.
    """
    by_tokens = [max(count, 1) / max(sum(tokens), 1) for count in tokens]
    by_rows = [count / sum(rows) for count in rows]
    losses = {"rows": by_rows, "tokens": by_tokens, "nothing": [1.0] * len(rows)}[NORMALISERS[loss_type]]
    return losses, by_tokens
