"""The draft's race over a few blocks against the race over everything that it knows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastgrpo.speculation.coupling import DraftRace
from fastgrpo.speculation.noise import BLOCK, arrival_times, row_keys

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
@pytest.mark.parametrize("name", ["dense, then sparse", "few"])
def test_where_all_blocks_race_the_race_is_the_whole_one(name: str, count: int) -> None:
    ids = VOCABULARIES[name]
    assert len(ids) <= 9 * BLOCK
    logits, keys = torch.randn(40, 2, len(ids)) * 2, keys_for(40)
    tokens, steps = DraftRace(ids).best(logits, keys, count)
    expected, law = slow_best(ids, logits, keys, count)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(steps.double(), law, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("scale", "share"), [(1.0, 0.9), (2.5, 0.9), (5.0, 0.95)])
@pytest.mark.parametrize("step", [1, 3])
def test_few_racers_nearly_always_hold_the_winner(step: int, scale: float, share: float) -> None:
    ids = torch.arange(0, 64 * BLOCK * step, step)
    logits, keys = torch.randn(200, 1, len(ids)) * scale, keys_for(200)
    tokens, steps = DraftRace(ids).best(logits, keys, 2)
    expected, law = slow_best(ids, logits, keys, 2)
    right = tokens[..., 0] == expected[..., 0]
    assert float(right.double().mean()) > share
    # a share of fewer racers is no smaller than one of all
    assert bool((steps[..., 0][right].double() > law[..., 0][right] - 1e-4).all())
    assert not bool((tokens[..., 0] == tokens[..., 1]).any()), "nobody races twice"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_and_numbers_are_each_others_inverse(name: str) -> None:
    ids = VOCABULARIES[name]
    race = DraftRace(ids)
    assert torch.equal(race.ids.flatten()[: len(ids)], ids)
    assert race.numbers[ids].tolist() == list(range(len(ids)))
    assert int((race.numbers >= 0).sum()) == len(ids)


def test_broken_logits_propose_nothing() -> None:
    race = DraftRace(VOCABULARIES["all"])
    for value in (torch.nan, torch.inf):
        tokens, steps = race.best(torch.full((2, 1, TARGET_VOCAB), value), keys_for(2), 3)
        assert bool(steps.isnan().all())
        assert bool(((tokens >= 0) & (tokens < TARGET_VOCAB)).all())
