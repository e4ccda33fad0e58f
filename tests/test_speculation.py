"""Speculation changes nothing but the number of passes: the same tokens and log-probs, whatever is drafted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model
from torch import Tensor

from fastgrpo.models.cache import Prefix, RaggedCache
from fastgrpo.models.draft import DraftModel
from fastgrpo.models.target import open_target
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import DraftShape, make_policy
from fastgrpo.speculation.proposers import DraftProposer
from fastgrpo.speculation.requests import Rollout
from fastgrpo.speculation.sampling import SamplingParams
from fastgrpo.speculation.tree import chain

_GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(4, VOCAB_SIZE, (n,), generator=_GENERATOR).tolist() for n in (5, 11, 1, 23)]
LIMITS = [20, 13, 20, 2]
LAWS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.7, top_p=0.95),
    "all": SamplingParams(temperature=0.7, top_k=50, top_p=0.95, repetition_penalty=1.3),
}


class Fickle:
    """Changes its mind every round: a tree, a chain, nothing, a wide level."""

    SHAPES = (DraftShape(3, 3, 8), DraftShape(4, 1, 4), None, DraftShape(1, 4, 4))

    def __init__(self) -> None:
        self.round = -1

    def choose(self, live_rows: int) -> DraftShape | None:
        self.round += 1
        return self.SHAPES[self.round % len(self.SHAPES)]

    def observe(self, shape: DraftShape | None, counts: Sequence[int], seconds: float) -> None:
        pass


POLICIES = {
    "chain": lambda: make_policy("fixed"),
    "tree": lambda: make_policy("fixed", spec_depth=3, spec_width=3, spec_nodes=8),
    "paper": lambda: make_policy("paper", verification_capacity=24),
    "threshold": lambda: make_policy("threshold", spec_threshold_rows=3),
    "fickle": Fickle,
}


class Pausing:
    """Drafts a chain of three, but not in its first rounds."""

    def __init__(self, pause: int):
        self.pause, self.rounds = pause, 0

    def choose(self, live_rows: int) -> DraftShape | None:
        return None if self.rounds < self.pause and self.rounds else DraftShape(3, 1, 3)

    def observe(self, shape: DraftShape | None, counts: Sequence[int], seconds: float) -> None:
        self.rounds += 1


class Oracle:
    """Drafts chains of what the rows will say, from a finished rollout with one row a prompt; shifted: always wrong."""

    taps: tuple[int, ...] = ()

    def __init__(self, rollout: Rollout, prompts: Sequence[Sequence[int]], shift: int = 0):
        self.answers = {tuple(p): c.token_ids for p, c in zip(prompts, rollout.completions, strict=True)}
        self.shift = shift

    def start(self, rows: int, capacity: int) -> bool:
        self.rows: list[Any] = [None] * rows
        return True

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> tuple[int, ...]:
        return tuple(tokens)

    def admit(self, prompt: tuple[int, ...], first_row: int, tokens: Tensor) -> None:
        for row in range(first_row, first_row + len(tokens)):
            self.rows[row] = [prompt, 1]

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            self.rows[row][1] += count

    def propose(self, roots: Tensor, shape: DraftShape, noise: Any) -> Any:
        tokens = torch.zeros((len(roots), shape.depth), dtype=torch.long)
        real = torch.zeros_like(tokens, dtype=torch.bool)
        for row in range(len(roots)):
            prompt, done = self.rows[row]
            coming = self.answers[prompt][done : done + shape.depth]
            tokens[row, : len(coming)] = (torch.tensor(coming, dtype=torch.long) + self.shift) % VOCAB_SIZE
            real[row, : len(coming)] = True
        return chain(roots, tokens, real)

    def move_row(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]


@functools.cache
def model_of(arch: str) -> Any:
    return tiny_model(arch)


@functools.cache
def draft_for(arch: str) -> DraftModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DraftModel.for_target(model_of(arch), vocabulary=range(0, VOCAB_SIZE, 2))


def run(
    arch: str, law: str, *, lean: bool = True, slots: int | None = None, stops: Sequence[int] = (), **more: Any
) -> Rollout:
    engine = Engine(model_of(arch), slots=slots, **more)
    engine.target = open_target(model_of(arch), lean=lean)
    return engine.generate(
        PROMPTS,
        LAWS[law],
        group_size=2,
        max_new_tokens=[n for n in LIMITS for _ in range(2)],
        stop_token_ids=stops,
        seed=3,
    )


@functools.cache
def plainly(arch: str, law: str, stops: tuple[int, ...] = ()) -> Rollout:
    return run(arch, law, stops=stops)


def assert_same(rollout: Rollout, plain: Rollout) -> None:
    for got, wanted in zip(rollout.completions, plain.completions, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.finish_reason == wanted.finish_reason
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(wanted.logprobs), rtol=0, atol=1e-4)
        if wanted.sampling_logprobs is not None:
            law = torch.tensor(wanted.sampling_logprobs)
            torch.testing.assert_close(torch.tensor(got.sampling_logprobs), law, rtol=0, atol=1e-4)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_tokens_with_trees_as_without(arch: str, law: str, lean: bool) -> None:
    rollout = run(arch, law, lean=lean, slots=5, proposer=DraftProposer(draft_for(arch)), policy=POLICIES["tree"]())
    assert_same(rollout, plainly(arch, law))
    assert sum(c.drafted for c in rollout.completions) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [1, 3, None])
def test_the_same_tokens_for_every_policy_and_number_of_slots(policy: str, slots: int | None) -> None:
    for law in ("plain", "all"):
        proposer = DraftProposer(draft_for("gemma3"))
        rollout = run("gemma3", law, slots=slots, proposer=proposer, policy=POLICIES[policy]())
        assert_same(rollout, plainly("gemma3", law))


def test_a_stop_inside_an_accepted_block_ends_the_row_there() -> None:
    said = [token for c in plainly("llama", "plain").completions for token in c.token_ids]
    stops = tuple(sorted(set(said), key=said.count)[-2:])  # the two commonest tokens
    plain = plainly("llama", "plain", stops)
    assert any(c.finish_reason == "stop" for c in plain.completions)
    for policy in ("tree", "paper"):
        proposer = DraftProposer(draft_for("llama"))
        assert_same(run("llama", "plain", stops=stops, slots=3, proposer=proposer, policy=POLICIES[policy]()), plain)


@pytest.mark.parametrize("shift", [0, 1], ids=["perfect", "adversarial"])
def test_a_perfect_draft_gives_depth_plus_one_and_a_wrong_one_gives_one(shift: int) -> None:
    engine = Engine(model_of("qwen3"))
    arguments = {"max_new_tokens": 21, "stop_token_ids": []}
    plain = engine.generate(PROMPTS, LAWS["plain"], **arguments)
    engine.proposer, engine.policy = Oracle(plain, PROMPTS, shift), make_policy("fixed", spec_depth=4)
    rollout = engine.generate(PROMPTS, LAWS["plain"], **arguments)
    assert_same(rollout, plain)
    # 21 tokens: the first one comes with the prompt, the other 20 in rounds of 5 or of 1
    assert [c.rounds for c in rollout.completions] == [20 if shift else 4] * len(PROMPTS)
    assert [c.accepted for c in rollout.completions] == [0 if shift else 16] * len(PROMPTS)
    assert rollout.stats.passes == (20 if shift else 4)


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, 3e38])
def test_a_draft_that_computes_nan_changes_nothing(weight: float, caplog: pytest.LogCaptureFixture) -> None:
    draft = DraftModel.for_target(model_of("llama"))
    with torch.no_grad():
        draft.lm_head.weight.fill_(weight)
    rollout = run("llama", "plain", proposer=DraftProposer(draft), policy=POLICIES["tree"]())
    assert_same(rollout, plainly("llama", "plain"))
    assert rollout.stats.accepted == 0
    # weights that are not finite are seen at once; ones that overflow draft nothing
    assert ("decoded without it" in caplog.text) == (weight != 3e38)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])
def test_taps_are_hugging_faces_hidden_states(arch: str, lean: bool) -> None:
    model, taps = model_of(arch), (1, 2, 3)
    text = PROMPTS[3]
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[tap][0] for tap in taps], dim=-1)
    target = open_target(model, lean=lean)
    with target.session(taps):
        _, prefixes = target.prefill([text[:-1], PROMPTS[0]])
        cache = RaggedCache(target.layout, 1, 32)
        cache.place(prefixes[0], 0, 1)
        target.decode(torch.tensor([text[-1:]]), torch.tensor([[len(text) - 1]]), cache, len(text))
        torch.testing.assert_close(prefixes[0].features, wanted[:-1], rtol=0, atol=1e-4)
        torch.testing.assert_close(target.features[0], wanted[-1:], rtol=0, atol=1e-4)


def test_the_drafts_cache_is_what_true_features_give() -> None:
    """After rounds of trees and pauses, the draft's keys equal one pass over the text with true features."""
    model, draft = model_of("qwen2"), draft_for("qwen2")
    proposer = DraftProposer(draft)
    engine = Engine(model, proposer=proposer, policy=Fickle())
    caught: list[tuple[list[int], Tensor]] = []
    original = proposer.propose

    def spy(roots: Tensor, shape: DraftShape, noise: Any) -> Any:
        tree = original(roots, shape, noise)
        caught[:] = [(proposer.fed[: len(roots)].tolist(), proposer.cache.keys[0][: len(roots)].clone())]
        return tree

    proposer.propose = spy  # type: ignore[method-assign]
    rollout = engine.generate(PROMPTS[:1], LAWS["plain"], max_new_tokens=30, stop_token_ids=[])
    fed, keys = caught[0]
    text = PROMPTS[0] + rollout.completions[0].token_ids
    with torch.no_grad():
        states = model(torch.tensor([text[: fed[0]]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[tap] for tap in draft.config.feature_layers], dim=-1)
        fresh: list[Tensor] = []

        def attend(query: Tensor, new_keys: Tensor, values: Tensor) -> Tensor:
            fresh.append(new_keys)
            return query.flatten(2)

        follows = torch.tensor([text[1 : fed[0] + 1]])
        draft.layer(follows, draft.fuse(features), torch.arange(fed[0])[None], attend)
    torch.testing.assert_close(keys[0, :, : fed[0]], fresh[0][0], rtol=0, atol=1e-4)


def test_speculation_switched_on_in_mid_rollout_accepts_as_if_always_on() -> None:
    # a draft whose proposals depend on its whole history, at a position reached by plain rounds and by drafted ones
    def proposals(pause: int) -> dict[int, list[int]]:
        proposer = DraftProposer(draft_for("llama"))
        seen: dict[int, list[int]] = {}
        original = proposer.propose

        def spy(roots: Tensor, shape: DraftShape, noise: Any) -> Any:
            tree = original(roots, shape, noise)
            seen[int(proposer.fed[0])] = tree.tokens[0].tolist()
            return tree

        proposer.propose = spy  # type: ignore[method-assign]
        policy = Pausing(pause)
        Engine(model_of("llama"), proposer=proposer, policy=policy).generate(
            PROMPTS[:1], LAWS["plain"], max_new_tokens=30, stop_token_ids=[]
        )
        return seen

    always, late = proposals(0), proposals(12)
    shared = [at for at in late if at in always and at > len(PROMPTS[0]) + 12]
    assert shared
    assert all(late[at] == always[at] for at in shared)
