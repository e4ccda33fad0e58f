"""The noise is Exp(1), independent in every argument, a pure function, and resolved where it matters.

Everything is seeded, so a test either always passes or always fails; limits are set so that good noise with another
seed would fail with a probability under 1e-6.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastgrpo.speculation import noise
from fastgrpo.speculation.noise import BLOCK, arrival_times, arrival_times_in_blocks, block_times, row_keys

GOLDEN_KEYS = [[-501079146831371347, 4655828077994478440]]
GOLDEN_TIMES = [1.442543595071145, 1.0752282016841717, 2.1560896973465513, 1.8672620185347388, 0.6801356932368053]
Z_LIMIT = 5.0  # two-sided 5.7e-7


def keys_for(n_uids: int, n_positions: int = 1, *, seed: int = 0, uid: int = 0, position: int = 0) -> torch.Tensor:
    uids = torch.arange(uid, uid + n_uids).repeat_interleave(n_positions)
    return row_keys(seed, uids, torch.arange(position, position + n_positions).repeat(n_uids))


def chi_square_z(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Wilson and Hilferty's normal score of a chi-square statistic with fully known expectations."""
    df = counts.numel() - 1
    ratio = ((counts - expected) ** 2 / expected).sum().item() / df
    return (ratio ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def dependence(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the larger of two normal scores of dependence between paired Exp(1) samples of any one shape."""
    u, v = (-torch.expm1(-x.flatten()) for x in (a, b))
    pearson = (torch.special.ndtri(u) * torch.special.ndtri(v)).mean().item() * math.sqrt(len(u))
    cells = (u * 8).long() * 8 + (v * 8).long()
    counts = torch.bincount(cells, minlength=64).double()
    return max(abs(pearson), chi_square_z(counts, torch.full_like(counts, len(u) / 64)))


def ids_of(first: int, count: int, rows: int) -> torch.Tensor:
    return torch.arange(first, first + count).expand(rows, count)


def test_arrival_times_are_exponential() -> None:
    times = arrival_times(keys_for(256), ids_of(0, 2048, 256)).flatten()
    n = len(times)
    distance = (-torch.expm1(-times.sort().values) - (torch.arange(n) + 0.5) / n).abs().max().item()
    assert distance < 2.7 / math.sqrt(n)  # Kolmogorov: 2 exp(-2 * 2.7**2) = 9e-7
    for power in (1, 2, 3):
        mean, square = math.factorial(power), math.factorial(2 * power)
        assert abs((times**power).mean() - mean) < Z_LIMIT * math.sqrt((square - mean**2) / n)


def test_first_of_a_real_vocabulary_has_the_right_moments() -> None:
    first = torch.cat([block_times(keys_for(1000, uid=1000 * part), 768).amin(-1) for part in range(12)]) * 49_152
    n = len(first)
    assert abs(first.mean() - 1) < Z_LIMIT / math.sqrt(n)
    assert abs((first**2).mean() - 2) < Z_LIMIT * math.sqrt(20 / n)  # E X^4 - (E X^2)^2 = 24 - 4
    assert (first < 0.01).double().mean().item() == pytest.approx(-math.expm1(-0.01), abs=Z_LIMIT * math.sqrt(0.01 / n))


def test_rare_arrivals_come_at_their_rate() -> None:
    """A token of probability p wins when it arrives within about p of the start: pooled over the ids of 20 M blocks."""
    n_rows, n_blocks, parts = 100, 2000, 100
    early = {1e-6: 0, 1e-7: 0, 1e-8: 0}
    for part in range(parts):
        times = block_times(keys_for(n_rows, uid=part * n_rows, seed=5), n_blocks)
        for rate in early:
            early[rate] += int((times < rate).sum())
    for rate, count in early.items():
        expected = -math.expm1(-BLOCK * rate) * n_rows * n_blocks * parts
        assert abs(count - expected) < Z_LIMIT * math.sqrt(expected) + 3


@pytest.mark.parametrize("rate", [1e-3, 1e-8, 1e-9, 1e-11])
def test_small_times_are_finely_resolved(rate: float) -> None:
    """Count the hash values that arrive before `rate`, by bisection: their share must be the exponential law's."""
    low, high = 0, 1 << 51
    while low < high:
        middle = (low + high) // 2
        if noise._exponential(torch.tensor([middle << 12])).item() < rate:
            low = middle + 1
        else:
            high = middle
    assert low / 2**52 == pytest.approx(-math.expm1(-rate), rel=1e-4)


def test_no_time_is_zero_or_infinite() -> None:
    extremes = torch.tensor([0, -1, 1, (1 << 63) - 1, -(1 << 63), 0xFFF, -0x1000])
    times = noise._exponential(extremes)
    assert (times > 0).all()
    assert times.isfinite().all()


@pytest.mark.parametrize(
    ("other_keys", "first_id", "other_id"),
    [
        pytest.param(lambda: keys_for(64, 8, uid=1), 0, 0, id="uid"),
        pytest.param(lambda: keys_for(64, 8, position=1), 0, 0, id="position"),
        pytest.param(lambda: keys_for(64, 8, uid=1, position=-1), 0, 0, id="uid against position"),
        pytest.param(lambda: keys_for(64, 8, seed=1), 0, 0, id="seed"),
        pytest.param(lambda: keys_for(64, 8, seed=1 << 40), 0, 0, id="high bits of the seed"),
        pytest.param(lambda: keys_for(64, 8, uid=1 << 62), 0, 0, id="high bits of the uid"),
        pytest.param(lambda: keys_for(64, 8), 0, 1, id="id"),
        pytest.param(lambda: keys_for(64, 8), 0, BLOCK, id="id one block on"),
        pytest.param(lambda: keys_for(64, 8, uid=1), 0, 1, id="uid and id"),
        pytest.param(lambda: keys_for(64, 8, position=1), 1, 0, id="position and id"),
    ],
)
def test_neighbours_are_independent(other_keys: Callable[[], torch.Tensor], first_id: int, other_id: int) -> None:
    rows = 512
    a = arrival_times(keys_for(64, 8), ids_of(first_id, 512, rows))
    b = arrival_times(other_keys(), ids_of(other_id, 512, rows))
    assert dependence(a, b) < Z_LIMIT


@pytest.mark.parametrize(("first", "second"), [(62, 63), (63, 64), (0, 63), (64, 127), (7, 40)])
def test_ids_in_a_block_and_across_its_border_are_independent(first: int, second: int) -> None:
    times = arrival_times(keys_for(4096, 64), torch.tensor([first, second]).expand(4096 * 64, 2))
    assert dependence(times[:, 0], times[:, 1]) < Z_LIMIT


def test_first_arrivals_of_neighbouring_keys_are_independent() -> None:
    a = block_times(keys_for(512), 768) * BLOCK
    assert dependence(a[:-1], a[1:]) < Z_LIMIT
    assert dependence(a[:, :-1], a[:, 1:]) < Z_LIMIT


def test_a_careless_key_would_be_caught() -> None:
    """Negative control: keys that add uid and position give the same noise to (uid + 1, position - 1)."""

    def careless(uids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([uids + positions, uids + positions], dim=-1)

    uids, positions = torch.arange(512), torch.arange(512).flip(0)
    a = arrival_times(careless(uids, positions), ids_of(0, 512, 512))
    b = arrival_times(careless(uids + 1, positions - 1), ids_of(0, 512, 512))
    assert dependence(a, b) > 100


def test_a_careless_hash_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one multiplication without the finaliser leaves neighbouring ids dependent."""
    monkeypatch.setattr(noise, "_hash", lambda keys, counters: counters * noise._STEP + keys[:, :1])
    a = arrival_times(keys_for(64, 8), ids_of(0, 512, 512))
    b = arrival_times(keys_for(64, 8), ids_of(1, 512, 512))
    assert dependence(a, b) > 100


def test_first_in_a_block_is_any_of_its_ids_alike() -> None:
    times = arrival_times_in_blocks(keys_for(2000), torch.arange(16).expand(2000, 16))
    counts = torch.bincount(times.argmin(-1).flatten(), minlength=BLOCK).double()
    assert chi_square_z(counts, torch.full_like(counts, 2000 * 16 / BLOCK)) < Z_LIMIT


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4], [0, 64, 128, 1000, 49_151], [3, 62, 63, 64, 65]])
def test_the_race_draws_from_its_law(ids: list[int]) -> None:
    law = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01], dtype=torch.float64)
    n = 100_000
    winners = (arrival_times(keys_for(n), torch.tensor(ids).expand(n, 5)) / law).argmin(-1)
    counts = torch.bincount(winners, minlength=5).double()
    assert chi_square_z(counts, n * law) < Z_LIMIT
    assert chi_square_z(counts, n * law.roll(1)) > 100  # the test can fail


def test_whoever_asks_gets_the_same_number() -> None:
    keys = keys_for(6, 3, seed=11)
    whole = arrival_times(keys, ids_of(0, 640, 18))
    assert torch.equal(arrival_times_in_blocks(keys, torch.arange(10).expand(18, 10)).flatten(1), whole)
    assert torch.equal(whole.unflatten(1, (10, BLOCK)).amin(-1), block_times(keys, 10))
    assert torch.equal(block_times(keys, 3), block_times(keys, 10)[:, :3])
    some = torch.tensor([[639, 5, 64, 63, 5]]).expand(18, 5)
    assert torch.equal(arrival_times(keys, some), whole.gather(1, some))
    rows = torch.tensor([17, 0, 4])
    assert torch.equal(arrival_times(keys[rows], ids_of(100, 7, 3)), whole[rows, 100:107])
    blocks = torch.tensor([[9, 2], [2, 0], [1, 1]])
    assert torch.equal(
        arrival_times_in_blocks(keys[rows], blocks),
        whole[rows].unflatten(1, (10, BLOCK))[torch.arange(3)[:, None], blocks],
    )
    uids, positions = torch.tensor([5, 9]), torch.tensor([0, 77])
    both = row_keys(3, uids, positions)
    assert torch.equal(both[1:], row_keys(3, uids[1:], positions[1:]))


def test_noise_never_changes_between_releases() -> None:
    """Recorded numbers: a run can be repeated with the next version only as long as these stand."""
    keys = row_keys(42, torch.tensor([7]), torch.tensor([123]))
    assert keys.tolist() == GOLDEN_KEYS
    assert arrival_times(keys, torch.tensor([[0, 1, 63, 64, 49_151]])).squeeze(0).tolist() == pytest.approx(
        GOLDEN_TIMES, rel=1e-14
    )


def test_seeds_and_uids_count_in_all_their_bits() -> None:
    uids, positions = torch.tensor([0, 1, 1 << 32, -1, -(1 << 63)]), torch.zeros(5, dtype=torch.int64)
    assert len({tuple(key) for key in row_keys(0, uids, positions).tolist()}) == 5
    seeds = (0, 1, -1, 1 << 32, 1 << 63)
    assert len({tuple(row_keys(seed, uids[:1], positions[:1])[0].tolist()) for seed in seeds}) == 5
    assert torch.equal(row_keys(-1, uids, positions), row_keys((1 << 64) - 1, uids, positions))


def test_global_generators_stay_where_they_are() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    arrival_times(keys_for(3), ids_of(0, 5, 3))
    block_times(keys_for(3), 4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"uids \(2,\) and positions \(3,\)"):
        row_keys(0, torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"torch\.int32"):
        row_keys(0, torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
