"""Sub-batches: what is planned together, that a cut of TRL's record loses only padding, and what a cut weighs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig

from fastgrpo.grpo.batching import NORMALISERS, can_cut, cut, loss_mask, pack, plan, prompts_of, units, weights

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=24)


def slow_plan(lengths: list[int], max_tokens: int, max_gap: int) -> list[list[int]]:
    """The published rule by its words: pad the candidates, count what is there and what was added."""
    waiting = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = []
    while waiting:
        batch = [waiting.pop(0)]
        while waiting:
            longer = [*batch, waiting[0]]
            padded = [max(lengths[i] for i in longer)] * len(longer)
            added = sum(padded[:-1]) - max(lengths[i] for i in batch) * len(batch)
            if sum(padded) > max_tokens or added > max_gap:
                break
            batch.append(waiting.pop(0))
        batches.append(batch)
    return batches


@given(LENGTHS, st.integers(1, 200), st.integers(0, 80))
def test_a_plan_keeps_the_budget_and_the_rule(lengths: list[int], max_tokens: int, max_gap: int) -> None:
    batches = plan(lengths, max_tokens=max_tokens, max_gap=max_gap)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= max_tokens
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(in_order)
    assert batches == slow_plan(lengths, max_tokens, max_gap)


def test_without_a_budget_nothing_is_cut() -> None:
    assert plan([3, 1, 2], max_tokens=None, max_gap=0) == [[0, 1, 2]]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=16),
    st.integers(1, 200),
    st.sampled_from([1, 8, 576]),
)
def test_units_share_a_prompt_within_the_budget(rows: list[tuple[int, int]], max_tokens: int, width: int) -> None:
    prompts, lengths = [prompt for prompt, _ in rows], [length for _, length in rows]
    sizes = [10 * prompt + 1 for prompt in prompts]
    found = units(prompts, sizes, lengths, width=width, max_tokens=max_tokens)
    assert sorted(row for unit in found for row in unit.rows) == list(range(len(rows)))
    for unit in found:
        assert len({prompts[row] for row in unit.rows}) == 1
        assert unit.length == sizes[unit.rows[0]] - 1 + sum(lengths[row] for row in unit.rows)
        assert len(unit.rows) == 1 or unit.length <= max_tokens


@given(LENGTHS)
def test_bins_hold_everything_and_no_two_would_fit_in_one(lengths: list[int]) -> None:
    bins = pack(lengths, max(lengths))
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    loads = sorted(sum(lengths[i] for i in chosen) for chosen in bins)
    assert loads[-1] <= max(lengths)
    assert len(loads) < 2 or loads[0] + loads[1] > max(lengths)


def test_short_responses_share_a_long_prompt_and_long_ones_do_not() -> None:
    def shared(prompt: int, response: int) -> int:
        found = units(["x"] * 8, [prompt] * 8, [response] * 8, width=576, max_tokens=4096)
        return max(len(unit.rows) for unit in found)

    assert shared(40, 16) == 8
    assert shared(100, 1) == 8
    assert shared(4, 500) == 1
    assert 1 < shared(200, 200) < 8


def record(rows: int = 5, prompt_width: int = 6, width: int = 8) -> dict[str, Any]:
    """Every field that TRL 1.16 gives a text batch, and its optional ones, each value naming its row and column."""
    row = torch.arange(rows)
    prompt_mask = (torch.arange(prompt_width) >= prompt_width - 1 - row[:, None] % 5).long()
    completion_mask = (torch.arange(width) < row[:, None] + 1).long()
    at = row[:, None] * 100.0 + torch.arange(width)
    return {
        "prompt_ids": (row[:, None] * 100 + torch.arange(prompt_width)) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": at.long() * completion_mask,
        "completion_mask": completion_mask,
        "tool_mask": (at.long() % 3 > 0).long(),
        "advantages": row.float(),
        "old_per_token_logps": at + 0.1,
        "ref_per_token_logps": at + 0.2,
        "sampling_per_token_logps": at + 0.3,
        "importance_sampling_ratio": at + 0.4,
        "token_type_ids": torch.cat([prompt_mask, completion_mask], dim=1),
        "num_items_in_batch": torch.tensor(15),
    }


def test_a_cut_keeps_every_row_of_every_field_and_drops_padding_only() -> None:
    whole = record()
    part = cut(whole, [3, 1])
    assert part.keys() == whole.keys()
    assert part["prompt_ids"].shape == (2, 4) and part["completion_ids"].shape == (2, 4)
    for name, value in whole.items():
        if name == "num_items_in_batch":
            assert part[name] == 15
        elif name == "advantages":
            assert part[name].tolist() == [3, 1]
        elif name.startswith("prompt"):
            assert torch.equal(part[name], value[[3, 1], -4:])
        elif name == "token_type_ids":
            assert torch.equal(part[name], value[[3, 1], 2:10])
        else:
            assert torch.equal(part[name], value[[3, 1], :4]), name
    assert prompts_of(part) == [prompts_of(whole)[3], prompts_of(whole)[1]]
    assert loss_mask(part).sum() == loss_mask(whole)[[3, 1]].sum()


def test_a_cut_keeps_one_column_a_sequence_level_ratio_and_a_wanted_multiple() -> None:
    whole = record()
    whole["importance_sampling_ratio"] = torch.ones(5, 1)
    whole["advantages"] = torch.ones(5, 8)
    whole["completion_mask"][0] = 0  # masked because it was truncated
    part = cut(whole, [0])
    assert part["completion_ids"].shape == (1, 1) and part["advantages"].shape == (1, 1)
    assert part["importance_sampling_ratio"].shape == (1, 1)
    assert cut(whole, [2], multiple=4)["completion_ids"].shape == (1, 4)
    assert cut(whole, [2], multiple=4)["prompt_ids"].shape == (1, 4)


def test_images_go_with_their_rows() -> None:
    """In TRL's flat layout: patches of all images in one tensor, as many as each image's grid says."""
    whole = {
        **record(3),
        "num_images": [1, 2, 1],
        "image_grid_thw": torch.tensor([[1, 2, 1], [1, 1, 1], [1, 3, 1], [1, 1, 1]]),
        "pixel_values": torch.tensor([0, 0, 1, 2, 2, 2, 3.0])[:, None],  # the image of each patch
    }
    part = cut(whole, [2, 1])
    assert part["num_images"] == [1, 2]
    assert part["pixel_values"].squeeze(1).tolist() == [3, 1, 2, 2, 2]
    assert part["image_grid_thw"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 3, 1]]
    assert can_cut(whole) and not can_cut({**whole, "num_images": [2, 2, 0]})


def test_weights_are_shares_of_what_the_loss_is_a_mean_of() -> None:
    assert weights("grpo", [3, 1], [10, 30])[0] == [0.75, 0.25]
    assert weights("bnpo", [3, 1], [10, 30]) == ([0.25, 0.75], [0.25, 0.75])
    assert weights("dapo", [3, 1], [10, 30]) == ([1, 1], [0.25, 0.75])
    assert weights("bnpo", [1, 1], [0, 0])[0] == [1, 1]  # no token: TRL divides zeros by 1


def test_every_loss_type_of_trl_has_a_normaliser() -> None:
    help_text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert all(f"'{name}'" in help_text for name in NORMALISERS)
    with pytest.raises(KeyError):
        weights("a new one", [1], [1])
