"""The fast sampler equals its slow twin, Hugging Face's warpers and the exact law, and does not depend on company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference_sampling import slow_sample, truncated_law
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastgrpo.speculation import sampling
from fastgrpo.speculation.noise import row_keys
from fastgrpo.speculation.sampling import SamplingParams, penalise, sample

SETTINGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "greedy": SamplingParams(temperature=0),
    "top_k": SamplingParams(top_k=20),
    "top_k of one": SamplingParams(top_k=1),
    "top_k of many": SamplingParams(top_k=1100, temperature=1.2),
    "top_p": SamplingParams(top_p=0.95),
    "low top_p": SamplingParams(top_p=0.3),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=1.3, top_k=50, top_p=0.8, min_p=0.02),
    "top_p and min_p": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.1),
}
ALL_SETTINGS = pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())


def keys_for(rows: int, seed: int = 0) -> torch.Tensor:
    return row_keys(seed, torch.arange(rows), torch.arange(rows) * 3)


def rows_of_every_kind(rows: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, vocab, generator=generator)
    holes = torch.where(normal < 0.5, -torch.inf, normal * 4)
    holes[:, vocab // 2] = 1.0  # no row is empty
    return {
        "flat": normal * 0.01,
        "usual": normal * 2.5,
        "peaked": normal * 9,
        "ties": (normal * 2).round(),
        "bf16": (normal * 3 + 12).bfloat16(),
        "holes": holes,
        "equal": torch.zeros(rows, vocab),
    }


def assert_equals_slow_twin(logits: torch.Tensor, params: SamplingParams) -> None:
    keys = keys_for(len(logits), seed=3)
    samples = sample(logits, params, keys)
    expected = [slow_sample(row, params, key) for row, key in zip(logits, keys, strict=True)]
    token_ids, logprobs, sampling_logprobs = zip(*expected, strict=True)
    assert samples.token_ids.tolist() == list(token_ids)
    assert samples.logprobs.tolist() == pytest.approx(logprobs, abs=1e-5)
    assert (samples.sampling_logprobs is not None) == params.truncates
    if samples.sampling_logprobs is not None:
        assert samples.sampling_logprobs.tolist() == pytest.approx(sampling_logprobs, abs=1e-5)


@ALL_SETTINGS
@pytest.mark.parametrize("vocab", [4, 61, 64, 1000, 5000])
def test_equals_slow_twin(params: SamplingParams, vocab: int) -> None:
    for logits in rows_of_every_kind(12, vocab).values():
        assert_equals_slow_twin(logits, params)


@pytest.mark.parametrize("vocab", [49_152, 151_936, 262_144 + 3])
@pytest.mark.parametrize("name", ["plain", "top_p", "all", "greedy"])
def test_equals_slow_twin_on_real_vocabularies(vocab: int, name: str) -> None:
    for kind, logits in rows_of_every_kind(2, vocab).items():
        if kind in ("usual", "peaked", "bf16"):
            assert_equals_slow_twin(logits, SETTINGS[name])


@ALL_SETTINGS
def test_keeps_what_hugging_face_keeps(params: SamplingParams) -> None:
    if params.greedy:
        return
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    for scale in (0.5, 3.0, 8.0):
        logits = torch.randn(300, 2000) * scale  # no ties: there Hugging Face's top-p follows the order of its sort
        samples = sample(logits, params, keys_for(300))
        theirs = torch.log_softmax(warpers(None, logits.clone()), -1).gather(1, samples.token_ids[:, None]).squeeze(1)
        ours = samples.logprobs if samples.sampling_logprobs is None else samples.sampling_logprobs
        # Equal up to one token at the edge of a nucleus, where their float32 sums may round the other way.
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def frequencies_z(logits: torch.Tensor, params: SamplingParams, law: torch.Tensor, n: int = 20_000) -> float:
    """Draw n tokens from one row of logits; return the normal score of their chi-square against a law.

    Infinite where a token outside the law was drawn. Cells that expect fewer than ten are thrown together.
    """
    part = 1000
    counts = torch.zeros_like(law)
    for uids in torch.arange(n).split(part):
        samples = sample(logits.expand(part, -1), params, row_keys(1, uids, torch.full_like(uids, 9)))
        counts += torch.bincount(samples.token_ids, minlength=len(law))
    if counts[law == 0].any():
        return math.inf
    rare = n * law < 10
    expected = torch.cat([n * law[~rare], n * law[rare].sum().unsqueeze(0)])
    counts = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(counts) - 1
    ratio = ((counts - expected) ** 2 / expected).sum().item() / df
    return (ratio ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


# A small law with weight everywhere, spread over four blocks of the vocabulary.
SMALL_LAW = torch.full((200,), -torch.inf)
SMALL_LAW[torch.tensor([0, 1, 5, 63, 64, 90, 127, 128, 150, 151, 190, 199])] = torch.tensor(
    [2.0, 0.1, 1.4, 1.1, -0.5, 0.8, 0.4, 0.2, -0.1, -0.9, -1.5, 1.0]
)
LAWS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.2),
    "temperature and top_p": SamplingParams(temperature=1.6, top_p=0.7),
    "temperature and min_p": SamplingParams(temperature=1.6, min_p=0.3),
    "all": SamplingParams(temperature=1.6, top_k=9, top_p=0.85, min_p=0.15),
}


@pytest.mark.parametrize("params", LAWS.values(), ids=LAWS.keys())
def test_draws_follow_the_exact_law(params: SamplingParams) -> None:
    assert frequencies_z(SMALL_LAW, params, truncated_law(SMALL_LAW, params)) < 5


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9)], ids=["plain", "top-p"])
def test_draws_follow_a_law_over_many_blocks(params: SamplingParams) -> None:
    logits = torch.randn(1500) * 2.5  # 24 blocks, of which some races open all
    assert frequencies_z(logits, params, truncated_law(logits, params), n=6000) < 5


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        pytest.param(SamplingParams(temperature=0.7), SamplingParams(), id="no temperature"),
        pytest.param(SamplingParams(top_k=5), SamplingParams(top_k=6), id="top-k one off"),
        pytest.param(SamplingParams(top_k=5), SamplingParams(top_k=4), id="top-k one off below"),
        pytest.param(SamplingParams(top_p=0.8), SamplingParams(top_p=0.9), id="another top-p"),
        pytest.param(SamplingParams(temperature=1.6, top_p=0.7), SamplingParams(top_p=0.7), id="no temperature, top-p"),
    ],
)
def test_draws_from_another_law_would_be_caught(params: SamplingParams, wrong: SamplingParams) -> None:
    assert frequencies_z(SMALL_LAW, params, truncated_law(SMALL_LAW, wrong)) > 10


@pytest.mark.parametrize("truncation", [SamplingParams(top_p=0.7), SamplingParams(min_p=0.3)], ids=["top-p", "min-p"])
def test_truncating_before_the_temperature_would_be_caught(truncation: SamplingParams) -> None:
    params = SamplingParams(temperature=1.6, top_p=truncation.top_p, min_p=truncation.min_p)
    kept = truncated_law(SMALL_LAW, truncation) > 0
    wrong = torch.softmax((SMALL_LAW / 1.6).double().masked_fill(~kept, -torch.inf), -1)
    assert frequencies_z(SMALL_LAW, params, wrong) > 10


def test_top_p_before_top_k_would_be_caught() -> None:
    params = SamplingParams(top_k=5, top_p=0.75)
    nucleus = truncated_law(SMALL_LAW, SamplingParams(top_p=0.75))
    wrong = truncated_law(SMALL_LAW.masked_fill(nucleus == 0, -torch.inf), SamplingParams(top_k=5))
    assert frequencies_z(SMALL_LAW, params, truncated_law(SMALL_LAW, params)) < 5
    assert frequencies_z(SMALL_LAW, params, wrong) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_logprobs_are_those_of_log_softmax(temperature: float) -> None:
    logits = torch.randn(8, 49_152) * 3 - 20
    samples = sample(logits, SamplingParams(temperature=temperature), keys_for(8))
    law = torch.log_softmax(logits / (temperature or 1.0), -1)
    torch.testing.assert_close(
        samples.logprobs, law.gather(1, samples.token_ids[:, None]).squeeze(1), atol=1e-5, rtol=0
    )
    assert samples.logprobs.dtype == torch.float32


@ALL_SETTINGS
@pytest.mark.parametrize("vocab", [61, 49_152])
def test_a_row_does_not_depend_on_its_company(params: SamplingParams, vocab: int) -> None:
    logits = torch.cat([torch.randn(5, vocab) * scale for scale in (0.3, 2.5, 9.0)])
    keys = keys_for(15)
    together = sample(logits, params, keys)
    order = torch.randperm(15)[:9]
    for rows in (order, torch.tensor([4]), torch.tensor([12, 12])):
        apart = sample(logits[rows], params, keys[rows])
        assert torch.equal(apart.token_ids, together.token_ids[rows])
        assert torch.equal(apart.logprobs, together.logprobs[rows])
        if together.sampling_logprobs is not None:
            torch.testing.assert_close(apart.sampling_logprobs, together.sampling_logprobs[rows], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("scale", "every", "params", "whole_truncations", "second_races", "third_races"),
    [
        pytest.param(9.0, 1, SamplingParams(), False, False, False, id="peaked, plain"),
        pytest.param(9.0, 1, SamplingParams(top_p=0.5), False, False, False, id="peaked, top-p"),
        pytest.param(0.1, 1, SamplingParams(top_p=0.5), True, False, False, id="flat, top-p"),
        pytest.param(2.5, 1, SamplingParams(), False, True, False, id="broad, plain"),
        pytest.param(0.1, 64, SamplingParams(), False, True, True, id="one in each block, plain"),
        pytest.param(0.0, 1, SamplingParams(top_k=5), True, False, False, id="all tied, top-k"),
        pytest.param(3.0, 1, SamplingParams(min_p=1e-9), True, True, False, id="wide, min-p"),
    ],
)
def test_fall_backs_are_taken_when_needed(
    scale: float,
    every: int,
    params: SamplingParams,
    whole_truncations: bool,
    second_races: bool,
    third_races: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which ways were taken for 60 rows over 100 blocks. That they end alike is the slow twin's matter."""
    truncate_whole, race_in = sampling._truncate_whole, sampling._race_in
    whole: list[int] = []
    raced: list[int] = []

    def spy_whole(law: sampling._Law, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
        whole.append(len(law.top))
        return truncate_whole(law, params)

    def spy_race(law: sampling._Law, cutoff: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        raced.append(n)
        return race_in(law, cutoff, n)

    monkeypatch.setattr(sampling, "_truncate_whole", spy_whole)
    monkeypatch.setattr(sampling, "_race_in", spy_race)
    monkeypatch.setattr(sampling, "_MOST_CANDIDATES", 1000)
    logits = torch.full((60, 6400), -30.0)
    logits[:, ::every] = torch.randn(60, 6400 // every) * scale
    assert_equals_slow_twin(logits, params)
    assert bool(whole) == whole_truncations
    assert (64 in raced) == second_races
    assert (100 in raced) == third_races


@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.999])
def test_a_nucleus_in_many_blocks_is_found_by_its_candidates(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((20, 9000), -9.0)
    logits[:, ::60] = torch.randn(20, 150) * 0.5  # one in each block, most of the mass
    logits[:10, ::60] = logits[:10, ::60].round(decimals=1)  # ties
    logits[0] = 0.0  # too many candidates for the limit below
    taken: list[int] = []
    for easing in (1, sampling._EASING):
        monkeypatch.setattr(sampling, "_EASING", easing)
        monkeypatch.setattr(sampling, "_MOST_CANDIDATES", 8500)
        truncate_above = sampling._truncate_above

        def spy(*args: object, truncate_above: object = truncate_above, **options: object) -> object:
            cutoff, mass, decided = truncate_above(*args, **options)  # type: ignore[operator]
            taken.append(int(decided.sum()))
            return cutoff, mass, decided

        monkeypatch.setattr(sampling, "_truncate_above", spy)
        assert_equals_slow_twin(logits, SamplingParams(top_p=top_p))
        assert_equals_slow_twin(logits, SamplingParams(top_p=top_p, min_p=0.2))
        monkeypatch.setattr(sampling, "_truncate_above", truncate_above)
    assert (max(taken) > 10) == (top_p < 0.99)  # nearly all ids are candidates at 0.999


def test_fall_backs_are_cut_to_fit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_IDS_AT_ONCE", 7000)
    for params in (SamplingParams(), SamplingParams(top_p=0.9)):
        assert_equals_slow_twin(torch.randn(20, 6400) * 2.5, params)


def test_a_closed_kth_token_does_not_shrink_the_mass() -> None:
    """A nucleus may look decided while tokens of the top k, whose mass it is a share of, lie in closed blocks."""
    logits = torch.full((1, 6400), -20.0)
    logits[0, ::64] = 1.0  # ties of the 20th in 100 blocks, of which 28 are opened
    logits[0, 1:12] = 2.0
    assert_equals_slow_twin(logits.expand(20, -1), SamplingParams(top_k=20, top_p=0.5))


def test_ties_at_the_cut_are_kept_whole() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.0]).expand(4000, -1)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(min_p=math.exp(-1.5))):
        assert sample(logits, params, keys_for(4000)).token_ids.unique().tolist() == [0, 1, 2, 3]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 300)
    logits[0, [7, 70, 299]] = 1.0
    logits[1, [299, 64]] = 2.0
    assert sample(logits, SamplingParams(temperature=0, top_k=3), keys_for(3)).token_ids.tolist() == [7, 64, 0]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((5000, 70), -torch.inf)
    logits[:, [3, 69]] = torch.tensor([0.0, -8.0])
    for params in (SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.9999), SamplingParams(min_p=1e-5)):
        assert sample(logits, params, keys_for(5000)).token_ids.unique().tolist() == [3, 69]


@ALL_SETTINGS
def test_broken_logits_show_in_the_logprobs(params: SamplingParams) -> None:
    logits = torch.randn(5, 5000)
    logits[0, 70], logits[1], logits[2, 3], logits[3] = torch.nan, -torch.inf, torch.inf, torch.nan
    samples = sample(logits, params, keys_for(5))
    assert samples.logprobs.isfinite().tolist() == [False, False, False, False, True]
    assert ((samples.token_ids >= 0) & (samples.token_ids < 5000)).all()


def test_penalty_is_that_of_hugging_face() -> None:
    logits = torch.randn(6, 50)
    history = torch.randint(0, 50, (6, 9))
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, history, True)
    before = logits.clone()
    penalised = penalise(logits, seen, 1.3)
    assert torch.equal(penalised, RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone()))
    assert torch.equal(logits, before)


def test_views_and_empty_batches_are_fine() -> None:
    logits = torch.randn(4, 3, 300)
    view = logits[:, 1, :257]
    for params in (SamplingParams(), SamplingParams(top_p=0.9)):
        samples = sample(view, params, keys_for(4))
        assert torch.equal(samples.token_ids, sample(view.contiguous(), params, keys_for(4)).token_ids)
        assert sample(view[:0], params, keys_for(4)[:0]).token_ids.shape == (0,)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("temperature", -1.0, "0 for greedy"),
        ("temperature", math.nan, "must be a number"),
        ("top_k", -1, "0 to switch it off"),
        ("temperature", 1e-40, "0 for greedy"),  # logits / temperature would overflow
        ("temperature", 1e-31, "0 for greedy"),
        ("temperature", math.inf, "0 for greedy"),
        ("top_k", 2.5, "must be a whole number"),
        ("top_k", None, "must be a whole number"),
        ("top_p", None, "must be a number"),
        ("top_p", "0.9", "must be a number"),
        ("temperature", True, "must be a number"),
        ("repetition_penalty", math.nan, "must be a number"),
        ("top_p", 0.0, "1 to switch it off"),
        ("top_p", 1.1, "1 to switch it off"),
        ("min_p", -0.1, "0 to switch it off"),
        ("repetition_penalty", 0.0, "1 to switch it off"),
    ],
)
def test_bad_parameters_are_named(field: str, value: float, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}.*{remedy}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_the_coldest_and_the_hottest_law_are_finite(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0, -torch.inf]])
    drawn = sample(logits, SamplingParams(temperature=temperature), keys_for(1))
    assert drawn.logprobs.isfinite().all()
    assert temperature > 1 or drawn.token_ids.tolist() == [0]


def test_numbers_of_numpy_become_pythons() -> None:
    law = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), top_p=1)
    assert law == SamplingParams(temperature=0.5, top_k=3)
    assert [type(value) for value in vars(law).values()] == [float, int, float, float, float]


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"logits \(3, 7\) and keys \(2, 2\)"):
        sample(torch.zeros(3, 7), SamplingParams(), keys_for(2))


def test_truncates_and_greedy_say_what_holds() -> None:
    assert [name for name, params in SETTINGS.items() if params.greedy] == ["greedy"]
    assert [name for name, params in SETTINGS.items() if not params.truncates] == ["plain", "cold", "hot", "greedy"]
    assert not SamplingParams(temperature=0, top_k=5).truncates
