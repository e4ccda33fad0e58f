"""The ragged cache as storage, and what an engine keeps in it: after any traffic, what a fresh prefill would hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model
from torch import Tensor

from fastgrpo.models.cache import CacheLayout, FreshKeys, Prefix, RaggedCache, as_hugging_face_cache, whole_lanes
from fastgrpo.models.draft import DraftModel
from fastgrpo.models.target import open_target
from fastgrpo.speculation.batch import LiveBatch
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import make_policy
from fastgrpo.speculation.proposers import DraftProposer
from fastgrpo.speculation.sampling import SamplingParams

LAYOUT = CacheLayout(((2, 4), (1, 6)), torch.float32, torch.device("cpu"))  # layers need not be alike
GARBAGE = 1e4  # finite, and large enough to drown whatever attends to it


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def numbers(rows: int, queries: int, layer: int, start: float) -> Tensor:
    """(rows, kv_heads, queries, size) that tell row, head, query and channel apart."""
    heads, size = LAYOUT.heads[layer]
    return start + torch.arange(rows * heads * queries * size).view(rows, heads, queries, size).float()


def test_append_writes_each_row_at_its_own_slots() -> None:
    cache = RaggedCache(LAYOUT, rows=3, capacity=5)
    slots = torch.tensor([[0, 1], [3, 4]])  # rows 0 and 1 of three, two tokens each
    cache.open(slots, span=5)
    for layer, (heads, size) in enumerate(LAYOUT.heads):
        new = numbers(2, 2, layer, 1)
        keys, values = cache.append(layer, new, -new)
        assert keys.shape == values.shape == (2, heads, 5, size)
        expected = torch.zeros(3, heads, cache.capacity, size)
        for row in range(2):
            for query in range(2):
                expected[row, :, slots[row, query]] = new[row, :, query]
        assert torch.equal(cache.keys[layer], expected)
        assert torch.equal(cache.values[layer], -expected)
        assert torch.equal(keys, expected[:2, :, :5])
    cache.open(torch.tensor([[2]]), span=3)  # the next pass: other rows, other slots, a shorter look
    keys, _ = cache.append(0, numbers(1, 1, 0, 100), numbers(1, 1, 0, 100))
    assert keys.shape == (1, 2, 3, 4)
    assert torch.equal(keys[0, :, 2], numbers(1, 1, 0, 100)[0, :, 0])
    assert torch.equal(keys[0, :, :2], numbers(2, 2, 0, 1)[0])


def test_capacity_is_whole_lanes_so_that_no_look_is_cut_short() -> None:
    assert [RaggedCache(LAYOUT, rows=1, capacity=n).capacity for n in (1, 16, 17)] == [16, 16, 32]
    assert [whole_lanes(n) for n in (0, 15, 16, 33)] == [0, 16, 16, 48]


def test_append_takes_transposed_keys() -> None:
    cache = RaggedCache(LAYOUT, rows=2, capacity=3)
    cache.open(torch.tensor([[1], [0]]), span=2)
    new = numbers(2, 1, 0, 1)
    transposed = new.transpose(1, 2).contiguous().transpose(1, 2)
    cache.append(0, transposed, transposed)
    assert torch.equal(cache.keys[0][0, :, 1], new[0, :, 0])
    assert torch.equal(cache.keys[0][1, :, 0], new[1, :, 0])


def test_place_and_move_touch_nothing_else() -> None:
    cache = RaggedCache(LAYOUT, rows=4, capacity=5)
    for store in (*cache.keys, *cache.values):
        store.fill_(GARBAGE)
    prefix = Prefix([numbers(1, 3, i, 1)[0] for i in range(2)], [numbers(1, 3, i, 50)[0] for i in range(2)], 3)
    cache.place(prefix, first_row=1, count=2)
    for layer in range(2):
        for side, start in ((cache.keys[layer], 1), (cache.values[layer], 50)):
            for row in (1, 2):
                assert torch.equal(side[row, :, :3], numbers(1, 3, layer, start)[0])
            assert bool((side[[0, 3]] == GARBAGE).all())
            assert bool((side[:, :, 3:] == GARBAGE).all())
    cache.move_row(2, 0, length=2)
    assert torch.equal(cache.keys[1][0, :, :2], cache.keys[1][2, :, :2])
    assert torch.equal(cache.values[0][0, :, :2], cache.values[0][2, :, :2])
    assert bool((cache.keys[1][0, :, 2:] == GARBAGE).all())


def test_a_prefill_hands_out_parts_of_what_it_ran() -> None:
    store = FreshKeys(layers=2)
    for layer in range(2):
        new = numbers(3, 4, layer, 1)
        keys, values = store.append(layer, new, -new)
        assert keys is new
        assert torch.equal(values, -new)
    prefix = store.prefix(row=1, first=1, length=2)
    assert prefix.length == 2
    for layer in range(2):
        assert torch.equal(prefix.keys[layer], numbers(3, 4, layer, 1)[1, :, 1:3])
        assert torch.equal(prefix.values[layer], -numbers(3, 4, layer, 1)[1, :, 1:3])


def test_hugging_faces_cache_reads_and_writes_the_store() -> None:
    store = RaggedCache(LAYOUT, rows=2, capacity=3)
    store.open(torch.tensor([[2], [0]]), span=3)
    cache: Any = as_hugging_face_cache(store, layers=2)
    keys, values = cache.update(numbers(2, 1, 1, 1), numbers(2, 1, 1, 7), 1)
    assert keys.shape == (2, 1, 3, 6)
    assert torch.equal(keys[0, :, 2], numbers(2, 1, 1, 1)[0, :, 0])
    assert torch.equal(values[1, :, 0], numbers(2, 1, 1, 7)[1, :, 0])
    assert torch.equal(store.keys[1][:, :, :3], keys)


# --- under an engine ------------------------------------------------------------------------------------------------


class Watched(LiveBatch):
    """A batch that compares every live row with a fresh prefill, after every round."""

    compared = 0

    def round(self) -> None:
        super().round()
        for slot, row in enumerate(self.rows):
            text = [*row.request.prompt, *row.tokens[:-1]]
            assert row.length == len(text)
            _, (fresh,) = self.target.prefill([text])
            for layer in range(len(fresh.keys)):
                for kept, expected in ((self.cache.keys, fresh.keys), (self.cache.values, fresh.values)):
                    held = kept[layer][slot, :, : len(text)]
                    torch.testing.assert_close(held, expected[layer], rtol=0, atol=1e-4)
            Watched.compared += 1


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "trees"])
def test_live_rows_are_a_fresh_prefill_of_their_text(
    arch: str, lean: bool, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastgrpo.speculation.engine.LiveBatch", Watched)
    Watched.compared = 0
    model = tiny_model(arch)
    with torch.random.fork_rng():
        proposer = DraftProposer(DraftModel.for_target(model)) if drafts else None
    policy = make_policy("fixed", spec_depth=3, spec_width=3, spec_nodes=8) if drafts else None
    engine = Engine(model, slots=3, proposer=proposer, policy=policy)
    engine.target = open_target(model, lean=lean)
    limits = [3, 9, 2, 5, 1, 7, 4, 2]  # rows leave from every place and others enter behind them
    engine.generate(
        random_prompts([4, 19, 1, 9]), SamplingParams(), group_size=2, max_new_tokens=limits, stop_token_ids=[]
    )
    assert Watched.compared > (8 if drafts else 15)


class Poisoned(RaggedCache):
    """A cache whose unused slots are never zero, and are spoilt again whenever a row comes or moves."""

    def __init__(self, layout: CacheLayout, rows: int, capacity: int):
        super().__init__(layout, rows, capacity)
        for store in (*self.keys, *self.values):
            store.fill_(GARBAGE)

    def place(self, prefix: Prefix, first_row: int, count: int) -> None:
        super().place(prefix, first_row, count)
        for store in (*self.keys, *self.values):
            store[first_row:, :, prefix.length :] = GARBAGE
            store[first_row + count :] = GARBAGE

    def move_row(self, source: int, target: int, length: int) -> None:
        super().move_row(source, target, length)
        for store in (*self.keys, *self.values):
            store[target, :, length:] = -GARBAGE
            store[source] = GARBAGE


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stale_slots_never_show(arch: str, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(arch)

    def rollout() -> list[tuple[list[int], list[float]]]:
        engine = Engine(model, slots=3)
        engine.target = open_target(model, lean=lean)
        done = engine.generate(
            random_prompts([12, 3, 1, 9, 4, 6]),
            SamplingParams(),
            max_new_tokens=[3, 9, 2, 12, 1, 7],
            stop_token_ids=[],
        )
        return [(c.token_ids, c.logprobs) for c in done.completions]

    clean = rollout()
    monkeypatch.setattr("fastgrpo.speculation.engine.RaggedCache", Poisoned)
    assert rollout() == clean
