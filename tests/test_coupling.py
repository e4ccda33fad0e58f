"""The draft's race over a few blocks against the race over everything that it knows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgrpo.speculation.coupling import DraftRace
from fastgrpo.speculation.noise import BLOCK, arrival_times, block_times, row_keys

TARGET_VOCAB = 3000
VOCABULARIES = {
    "all": torch.arange(TARGET_VOCAB),
    "every third": torch.arange(0, TARGET_VOCAB, 3),
    "dense, then sparse": torch.cat([torch.arange(300), torch.arange(300, TARGET_VOCAB, 37)]),
    "few": torch.tensor([3, 64, 2999]),
}


def keys_for(rows: int) -> Tensor:
    return row_keys(4, torch.arange(rows), torch.full((rows,), 9))


def slow_best(ids: Tensor, logits: Tensor, keys: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Noise for every id, scores of every id."""
    scores = logits.double()
    if keys is not None:
        scores = scores - arrival_times(keys, ids.expand(len(keys), -1)).log()[:, None]
    steps, best = scores.log_softmax(-1).topk(min(count, len(ids)), dim=-1)
    return ids[best], steps


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_greedy_children_are_the_most_probable_ones(name: str, count: int) -> None:
    ids = VOCABULARIES[name]
    logits = torch.randn(5, 2, len(ids)) * 2
    tokens, steps = DraftRace(ids).best(logits, None, count)
    expected, law = slow_best(ids, logits, None, count)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(steps.double(), law, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("name", ["every third", "dense, then sparse", "few"])
def test_where_all_blocks_are_opened_the_race_is_the_whole_one(name: str, count: int) -> None:
    ids = VOCABULARIES[name]
    assert len(ids) <= 16 * BLOCK
    logits, keys = torch.randn(40, 2, len(ids)) * 2, keys_for(40)
    tokens, steps = DraftRace(ids).best(logits, keys, count)
    expected, law = slow_best(ids, logits, keys, count)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(steps.double(), law, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("scale", "share"), [(2.0, 0.9), (4.0, 0.99)])
@pytest.mark.parametrize("step", [1, 2])
def test_few_blocks_nearly_always_hold_the_winner(step: int, scale: float, share: float) -> None:
    ids = torch.arange(0, 128 * BLOCK * step, step)
    logits, keys = torch.randn(300, 1, len(ids)) * scale, keys_for(300)
    tokens, _ = DraftRace(ids).best(logits, keys, 1)
    expected, _ = slow_best(ids, logits, keys, 1)
    assert float((tokens == expected).double().mean()) > share


@pytest.mark.parametrize("name", VOCABULARIES)
def test_no_id_of_a_block_arrives_before_its_bound(name: str) -> None:
    race, keys = DraftRace(VOCABULARIES[name]), keys_for(7)
    assert torch.equal(race.ids.flatten()[: len(VOCABULARIES[name])], VOCABULARIES[name])
    earliest = block_times(keys, race.noise_blocks)[:, race.reached].amin(-1)
    times = arrival_times(keys, race.ids.flatten().expand(7, -1)).view(7, -1, BLOCK)
    assert bool((times >= earliest[:, :, None]).all())
    for block, reached in zip(race.ids, race.reached, strict=True):
        assert set(reached.tolist()) == set((block // BLOCK).tolist())


def test_broken_logits_propose_nothing() -> None:
    race = DraftRace(VOCABULARIES["all"])
    for value in (torch.nan, torch.inf):
        tokens, steps = race.best(torch.full((2, 1, TARGET_VOCAB), value), keys_for(2), 3)
        assert bool(steps.isnan().all())
        assert bool(((tokens >= 0) & (tokens < TARGET_VOCAB)).all())
