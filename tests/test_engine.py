"""The rollout loop against Hugging Face's `generate` and against its slow twin, tests/reference_engine.py."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_engine import SlowRow, difference, hugging_face_greedy, penalised, slow_row
from reference_sampling import truncated_law
from tiny import ARCHITECTURES, VOCAB_SIZE, WINDOW, tiny_model
from torch import nn

from fastgrpo.models.cache import CacheLayout
from fastgrpo.models.target import open_target
from fastgrpo.speculation import memory
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.memory import plan_slots
from fastgrpo.speculation.requests import Completion, Progress, Rollout
from fastgrpo.speculation.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
LAWS = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.7),
    "top_p": SamplingParams(top_p=0.95),
    "top_k": SamplingParams(top_k=50),
    "min_p": SamplingParams(min_p=0.1),
    "penalty": SamplingParams(repetition_penalty=1.3),
    "all": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    "greedy penalty": SamplingParams(temperature=0, repetition_penalty=1.3),
}
LENGTHS = (1, 5, 3 * WINDOW + 1, WINDOW, 2, 12)  # a single token, one window exactly, several windows
PROMPTS = [
    torch.randint(4, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in LENGTHS
]
UIDS = [7, 0, 1 << 40, 3, -2, 8]
LIMITS = [12, 4, 10, 1, 16, 12]

paths = pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])
archs = pytest.mark.parametrize("arch", ARCHITECTURES)


@functools.cache
def model_of(arch: str) -> nn.Module:
    return tiny_model(arch)


def engine_over(model: nn.Module, *, lean: bool = True, slots: int | None = None) -> Engine:
    engine = Engine(model, slots=slots)
    engine.target = open_target(model, lean=lean)
    assert type(engine.target).__name__ == ("LeanTarget" if lean else "HuggingFaceTarget")
    return engine


@functools.cache
def twins(arch: str, law: str, seed: int = 0) -> list[SlowRow]:
    return [
        slow_row(model_of(arch), prompt, LAWS[law], uid=uid, seed=seed, limit=limit)
        for prompt, uid, limit in zip(PROMPTS, UIDS, LIMITS, strict=True)
    ]


def assert_matches(rollout: Rollout, expected: Sequence[SlowRow]) -> None:
    found = [difference(got, slow) for got, slow in zip(rollout.completions, expected, strict=True)]
    assert not any(found), "\n".join(f"row {i}: {text}" for i, text in enumerate(found) if text)


# --- greedy ---------------------------------------------------------------------------------------------------------


@paths
@archs
def test_greedy_is_hugging_faces(arch: str, lean: bool) -> None:
    model = model_of(arch)
    expected = [hugging_face_greedy(model, p, n) for p, n in zip(PROMPTS, LIMITS, strict=True)]
    engine = engine_over(model, lean=lean, slots=4)
    rollout = engine.generate(PROMPTS, GREEDY, max_new_tokens=LIMITS, stop_token_ids=[])
    assert [c.token_ids for c in rollout.completions] == expected
    assert {c.finish_reason for c in rollout.completions} == {"length"}
    # two stop ids: one that ends row 0 half-way, one that is the very first token of row 4
    stops = [expected[0][6], expected[4][0]]
    expected = [hugging_face_greedy(model, p, n, stops) for p, n in zip(PROMPTS, LIMITS, strict=True)]
    assert len(expected[0]) < LIMITS[0]
    assert len(expected[4]) == 1
    rollout = engine.generate(PROMPTS, GREEDY, max_new_tokens=LIMITS, stop_token_ids=stops)
    assert [c.token_ids for c in rollout.completions] == expected
    for completion in rollout.completions:
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in stops else "length")


@pytest.mark.parametrize("as_list", [True, False])
def test_stop_ids_come_from_the_models_generation_config(as_list: bool) -> None:
    model = tiny_model("llama")
    free = hugging_face_greedy(model, PROMPTS[2], 12)
    model.generation_config.eos_token_id = [99_999, free[5]] if as_list else free[5]
    (got,) = Engine(model).generate([PROMPTS[2]], GREEDY, max_new_tokens=12).completions
    assert got.token_ids == free[: free.index(free[5]) + 1]
    assert got.finish_reason == "stop"


def test_the_models_generation_config_decides_nothing_else() -> None:
    model = tiny_model("qwen3")
    before = Engine(model).generate(PROMPTS, SamplingParams(), max_new_tokens=8, stop_token_ids=[])
    for name, value in {"temperature": 0.1, "top_k": 2, "top_p": 0.3, "do_sample": False, "max_new_tokens": 3}.items():
        setattr(model.generation_config, name, value)
    after = Engine(model).generate(PROMPTS, SamplingParams(), max_new_tokens=8, stop_token_ids=[])
    assert [c.token_ids for c in before.completions] == [c.token_ids for c in after.completions]


# --- sampled tokens are a function of weights, prompt, seed and uid -------------------------------------------------


@pytest.mark.parametrize(
    ("lean", "slots"),
    [(True, 1), (True, 2), (True, 3), (True, 5), (True, None), (False, 2), (False, None)],
    ids=lambda value: str(value),
)
@archs
def test_sampled_tokens_are_the_slow_twins(arch: str, lean: bool, slots: int | None) -> None:
    engine = engine_over(model_of(arch), lean=lean, slots=slots)
    rollout = engine.generate(PROMPTS, LAWS["plain"], max_new_tokens=LIMITS, stop_token_ids=[], uids=UIDS)
    assert_matches(rollout, twins(arch, "plain"))
    assert [c.index for c in rollout.completions] == list(range(len(PROMPTS)))
    assert [c.uid for c in rollout.completions] == UIDS


@pytest.mark.parametrize("law", [law for law in LAWS if law != "plain"])
@pytest.mark.parametrize(
    ("arch", "lean"), [("llama", True), ("gemma3", True), ("mistral", False)], ids=lambda value: str(value)
)
def test_every_law_is_the_slow_twins(arch: str, lean: bool, law: str) -> None:
    engine = engine_over(model_of(arch), lean=lean, slots=2)
    rollout = engine.generate(PROMPTS, LAWS[law], max_new_tokens=LIMITS, stop_token_ids=[], uids=UIDS)
    assert_matches(rollout, twins(arch, law))
    differs = LAWS[law].truncates or LAWS[law].repetition_penalty != 1
    assert all((c.sampling_logprobs is not None) == differs for c in rollout.completions)


@archs
def test_order_and_neighbours_do_not_matter_and_the_seed_does(arch: str) -> None:
    engine = engine_over(model_of(arch), slots=3)
    order = [4, 2, 0, 5, 1, 3]
    rollout = engine.generate(
        [PROMPTS[i] for i in order],
        LAWS["plain"],
        max_new_tokens=[LIMITS[i] for i in order],
        stop_token_ids=[],
        uids=[UIDS[i] for i in order],
    )
    assert_matches(rollout, [twins(arch, "plain")[i] for i in order])
    alone = engine.generate([PROMPTS[4]], LAWS["plain"], max_new_tokens=LIMITS[4], stop_token_ids=[], uids=[UIDS[4]])
    assert_matches(alone, [twins(arch, "plain")[4]])
    other = engine.generate([PROMPTS[4]], LAWS["plain"], max_new_tokens=16, stop_token_ids=[], uids=[-2], seed=1)
    assert other.completions[0].token_ids != twins(arch, "plain")[4].token_ids
    assert_matches(other, [slow_row(model_of(arch), PROMPTS[4], LAWS["plain"], uid=-2, seed=1, limit=16)])


def test_default_uids_count_from_first_uid() -> None:
    engine = engine_over(model_of("llama"))
    counted = engine.generate(PROMPTS[:3], LAWS["plain"], max_new_tokens=6, first_uid=40, group_size=2)
    named = engine.generate(PROMPTS[:3], LAWS["plain"], max_new_tokens=6, uids=range(40, 46), group_size=2)
    assert [c.uid for c in counted.completions] == list(range(40, 46))
    assert [c.token_ids for c in counted.completions] == [c.token_ids for c in named.completions]


def agreement_excess(rows: Sequence[Completion], laws: Sequence[torch.Tensor]) -> float:
    """By how many standard deviations more neighbours agree in their first token than their laws, (vocab,), explain.

    Rows 2i and 2i + 1 are of one prompt and make one independent trial; laws[i] is the law that both draw from.
    """
    chance = torch.stack([(law**2).sum() for law in laws])
    agreeing = sum(a.token_ids[0] == b.token_ids[0] for a, b in zip(rows[::2], rows[1::2], strict=True))
    return float((agreeing - chance.sum()) / (chance * (1 - chance)).sum().sqrt())


def test_responses_of_a_group_share_no_more_than_chance() -> None:
    model, group = model_of("qwen2"), 32
    with torch.no_grad():
        laws = [model(input_ids=torch.tensor([p])).logits[0, -1].double().softmax(-1) for p in PROMPTS]
    laws = [law for law in laws for _ in range(group // 2)]
    arguments = {"group_size": group, "max_new_tokens": 12, "stop_token_ids": []}
    rows = engine_over(model, slots=40).generate(PROMPTS, LAWS["plain"], **arguments).completions
    assert abs(agreement_excess(rows, laws)) < 5
    assert len({tuple(c.token_ids) for c in rows}) == len(rows)  # 12 tokens of some 2 nats: no two are alike
    uids = [i for i in range(len(PROMPTS)) for _ in range(group)]
    copies = engine_over(model, slots=40).generate(PROMPTS, LAWS["plain"], uids=uids, **arguments).completions
    assert agreement_excess(copies, laws) > 10  # the statistic sees a shared noise
    assert len({tuple(c.token_ids) for c in copies}) == len(PROMPTS)


# --- log-probs ------------------------------------------------------------------------------------------------------


@paths
@pytest.mark.parametrize("law", ["cool", "all", "top_k"])
@archs
def test_logprobs_are_those_of_one_full_forward(arch: str, law: str, lean: bool) -> None:
    model, params = model_of(arch), LAWS[law]
    rollout = engine_over(model, lean=lean).generate(PROMPTS, params, max_new_tokens=LIMITS, stop_token_ids=[])
    for prompt, got in zip(PROMPTS, rollout.completions, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + got.token_ids])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(got.token_ids)[:, None]
        full = (logits.double() / params.temperature).log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(got.logprobs).double(), full, rtol=0, atol=1e-4)
        if got.sampling_logprobs is not None:
            texts = [prompt + got.token_ids[:i] for i in range(len(got.token_ids))]
            drawn = [penalised(row, t, params.repetition_penalty) for row, t in zip(logits, texts, strict=True)]
            kept = torch.stack([truncated_law(row, params) for row in drawn]).log().gather(1, chosen)[:, 0]
            torch.testing.assert_close(torch.tensor(got.sampling_logprobs).double(), kept, rtol=0, atol=1e-4)


# --- rows leave and enter -------------------------------------------------------------------------------------------

prompts_of_any_kind = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14), min_size=1, max_size=4
)


@given(
    arch=st.sampled_from(["llama", "gemma3"]),
    prompts=prompts_of_any_kind,
    group_size=st.integers(1, 3),
    slots=st.one_of(st.none(), st.integers(1, 5)),
    stops=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=25),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(-(2**70), 2**70),
    data=st.data(),
)
@settings(max_examples=24, deadline=None, derandomize=True, database=None)
def test_any_traffic_is_the_slow_twins(
    arch: str,
    prompts: list[list[int]],
    group_size: int,
    slots: int | None,
    stops: set[int],
    temperature: float,
    seed: int,
    data: st.DataObject,
) -> None:
    rows = len(prompts) * group_size
    limits = data.draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows))
    uids = data.draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=rows, max_size=rows))
    params = SamplingParams(temperature=temperature)
    rollout = engine_over(model_of(arch), slots=slots).generate(
        prompts,
        params,
        group_size=group_size,
        max_new_tokens=limits,
        stop_token_ids=sorted(stops),
        seed=seed,
        uids=uids,
    )
    signed = [(uid + 2**63) % 2**64 - 2**63 for uid in uids]
    expected = [
        slow_row(
            model_of(arch), prompts[r // group_size], params, uid=signed[r], seed=seed, limit=limits[r], stops=stops
        )
        for r in range(rows)
    ]
    assert_matches(rollout, expected)


# --- what a caller sees ---------------------------------------------------------------------------------------------


def test_callbacks_and_statistics() -> None:
    finished: list[Completion] = []
    progress: list[Progress] = []
    limits = [3, 1, 5, 2, 2, 9, 1, 1]
    prompts = [
        PROMPTS[1],
        PROMPTS[1],
        PROMPTS[0],
        PROMPTS[1],
    ]  # two equal neighbours share a prefill; the last does not
    rollout = engine_over(model_of("qwen2"), slots=3).generate(
        prompts,
        LAWS["plain"],
        group_size=2,
        max_new_tokens=limits,
        stop_token_ids=[],
        on_completion=finished.append,
        on_round=progress.append,
    )
    stats = rollout.stats
    assert [len(c.token_ids) for c in rollout.completions] == limits
    assert sorted(c.index for c in finished) == list(range(8))
    assert all(any(c is d for d in rollout.completions) for c in finished)
    assert finished[0].index == 1  # a row of one token ends at its prefill
    assert finished[-1].index == 5  # and the longest row ends last
    assert stats.prompt_tokens == 5 + 1 + 5
    assert stats.completion_tokens == sum(limits)
    assert stats.passes == len(stats.live_rows)
    assert sum(stats.live_rows) == sum(limits) - len(limits)  # every token but a row's first takes part in a pass
    assert max(stats.live_rows) <= 3
    assert all((c.rounds, c.drafted, c.accepted) == (len(c.token_ids) - 1, 0, 0) for c in rollout.completions)
    assert progress[-1].rows_done == progress[-1].rows_total == 8
    assert progress[-1].tokens == stats.completion_tokens
    assert [p.rows_done for p in progress] == sorted(p.rows_done for p in progress)
    parts = stats.setup_s + stats.prefill_s + stats.decode_s + stats.sampling_s
    assert 0 < parts <= stats.total_s
    assert progress[-1].elapsed_s == stats.total_s


def test_a_group_that_slots_split_is_prefilled_once() -> None:
    engine = engine_over(model_of("llama"), slots=2)
    stats = engine.generate(PROMPTS[:2], LAWS["plain"], group_size=5, max_new_tokens=3, stop_token_ids=[]).stats
    assert stats.prompt_tokens == len(PROMPTS[0]) + len(PROMPTS[1])


@paths
def test_callbacks_can_train(lean: bool) -> None:
    weight = torch.ones(1, requires_grad=True)
    kept: list[torch.Tensor] = []

    def learn(completion: Completion) -> None:
        kept.append(torch.tensor(completion.logprobs))
        (weight * kept[-1]).sum().backward()

    engine_over(model_of("llama"), lean=lean).generate(PROMPTS, GREEDY, max_new_tokens=2, on_completion=learn)
    (weight * kept[0]).sum().backward()  # what a callback keeps is of use afterwards
    assert weight.grad is not None


def test_no_global_generator_is_drawn_from() -> None:
    model = tiny_model("gemma3").train()
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for lean in (True, False):
        engine_over(model, lean=lean, slots=2).generate(PROMPTS, LAWS["all"], max_new_tokens=4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    assert before[2] == random.getstate()


# --- memory -------------------------------------------------------------------------------------------------------


def test_memory_is_planned_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = CacheLayout(((2, 8),) * 3, torch.float32, torch.device("cpu"))
    assert layout.bytes_per_token == 2 * 3 * 2 * 8 * 4
    row = layout.bytes_per_token * 100
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(row * 3.5 / 0.8))
    assert plan_slots(layout, 2, 8, 100) == 2
    assert plan_slots(layout, 8, 3, 100) == 3
    with pytest.warns(UserWarning, match=r"8 rows of 100 tokens need .* 3 rows decode at once"):
        assert plan_slots(layout, 8, 8, 100) == 3
    # features as large as the keys and values: each of 8 rows keeps its own to the end, a live one needs both
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(row * 12.5 / 0.8))
    assert plan_slots(layout, 8, 3, 100, features=layout.bytes_per_token) == 3
    with pytest.warns(UserWarning, match=r"need .* of keys, values and features, .*: 2 rows decode at once"):
        assert plan_slots(layout, 8, 8, 100, features=layout.bytes_per_token) == 2
    monkeypatch.setattr(memory, "free_bytes", lambda device: row)
    with pytest.raises(MemoryError, match=r"one row of 100 tokens take .* lower max_new_tokens"):
        plan_slots(layout, 8, 8, 100)
    with pytest.raises(MemoryError, match="one row of"):
        Engine(model_of("llama")).generate(PROMPTS, GREEDY, max_new_tokens=900)


def test_fewer_slots_than_asked_for_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(model_of("llama"))
    capacity = max(len(p) + n for p, n in zip(PROMPTS, LIMITS, strict=True))
    monkeypatch.setattr(
        memory, "free_bytes", lambda device: int(engine.target.layout.bytes_per_token * capacity * 2.5 / 0.8)
    )
    with pytest.warns(UserWarning, match="2 rows decode at once"):
        rollout = engine.generate(PROMPTS, LAWS["plain"], max_new_tokens=LIMITS, stop_token_ids=[], uids=UIDS)
    assert max(rollout.stats.live_rows) == 2
    assert_matches(rollout, twins("llama", "plain"))
