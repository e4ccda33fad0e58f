"""Whatever trees are proposed, whenever rows stop, enter or leave: what comes out is the plain rollout.

Trees are drawn at random, partly right: a careless proposer that knows some of what its rows will say. The draft model
itself is mostly the matter of `test_speculation`; here the engine is held to what no draft would ever do.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tree import SlowNode, to_tree
from test_cache import Watched
from test_speculation import POLICIES, PROMPTS, Fickle, assert_same, draft_for, model_of
from tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model
from torch import Tensor

from fastgrpo.models.cache import Prefix
from fastgrpo.models.draft import DraftModel
from fastgrpo.models.target import open_target
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import DraftShape, Policy
from fastgrpo.speculation.proposers import DraftProposer, Proposer
from fastgrpo.speculation.requests import Completion, Rollout
from fastgrpo.speculation.sampling import SamplingParams
from fastgrpo.speculation.tree import Tree

LAWS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(),
    SamplingParams(top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.95, repetition_penalty=1.3),
)
TARGETS = [(arch, lean) for lean in (True, False) for arch in ARCHITECTURES]


class Moody:
    """Another shape of a draft every round, or none."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def choose(self, live_rows: int) -> DraftShape | None:
        if self.random.random() < 0.2:
            return None
        return DraftShape(self.random.randint(1, 4), self.random.randint(1, 3), self.random.randint(1, 9))

    def observe(self, shape: DraftShape | None, counts: Sequence[int], seconds: float) -> None:
        """It learns nothing."""


class Careless:
    """Drafts random trees, no two rows alike, of tokens that are often right; `texts` are what rows may say, by prompt.

    Siblings may be equal, a token may stand at many places of a tree, rows may be padding altogether.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, texts: dict[tuple[int, ...], list[list[int]]], seed: int):
        self.texts, self.random = texts, random.Random(seed)

    def start(self, rows: int, capacity: int) -> bool:
        self.rows: list[Any] = [None] * rows
        return True

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> tuple[int, ...]:
        return tuple(tokens)

    def admit(self, prompt: tuple[int, ...], first_row: int, tokens: Tensor) -> None:
        for row, token in enumerate(tokens.tolist(), first_row):
            self.rows[row] = (prompt, [token])

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        for row, (said, count) in enumerate(zip(tokens.tolist(), counts.tolist(), strict=True)):
            self.rows[row][1].extend(said[:count])

    def move_row(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]

    def propose(self, roots: Tensor, shape: DraftShape, noise: Any) -> Tree:
        drafts = []
        for row, root in enumerate(roots.tolist()):
            prompt, said = self.rows[row]
            assert said[-1] == root, "the root is the last token that the row emitted"
            coming = [text[len(said) :] for text in self.texts[prompt] if text[: len(said)] == said]
            drafts.append(self._tree(root, self.random.choice(coming) if coming else [], shape.nodes))
        return to_tree(drafts, min(max(map(len, drafts)) + self.random.randint(0, 2), shape.nodes + 1))

    def _tree(self, root: int, coming: list[int], nodes: int) -> list[SlowNode]:
        tree, depths, right = [SlowNode(root, None)], [0], [True]
        for _ in range(self.random.randint(0, nodes)):
            parent = self.random.choice([len(tree) - 1, self.random.randrange(len(tree))])
            depth = depths[parent]
            truth = right[parent] and depth < len(coming) and self.random.random() < 0.6
            others = [node.token for node in tree] + [self.random.randrange(VOCAB_SIZE)]
            tree.append(SlowNode(coming[depth] if truth else self.random.choice(others), parent))
            depths.append(depth + 1)
            right.append(right[parent] and depth < len(coming) and tree[-1].token == coming[depth])
        return tree


def engine_for(target: tuple[str, bool], slots: int | None, proposer: Proposer | None, policy: Policy | None) -> Engine:
    engine = Engine(model_of(target[0]), slots=slots, proposer=proposer, policy=policy)
    engine.target = open_target(model_of(target[0]), lean=target[1])
    return engine


def cut_at(completion: Completion, stops: set[int]) -> Completion:
    """What a completion without stops would have been with them."""
    length = next((i for i, token in enumerate(completion.token_ids, 1) if token in stops), None)
    if length is not None:
        completion.finish_reason = "stop"
    completion.token_ids, completion.logprobs = completion.token_ids[:length], completion.logprobs[:length]
    if completion.sampling_logprobs is not None:
        completion.sampling_logprobs = completion.sampling_logprobs[:length]
    return completion


def plainly(
    target: tuple[str, bool], texts: list[list[int]], law: SamplingParams, arguments: dict[str, Any]
) -> tuple[Rollout, dict[tuple[int, ...], list[list[int]]]]:
    """The plain rollout without stops, and what the rows of each prompt said in it."""
    plain = engine_for(target, None, None, None).generate(texts, law, stop_token_ids=(), **arguments)
    said: dict[tuple[int, ...], list[list[int]]] = {}
    for text, completion in zip(texts, plain.completions, strict=True):
        said.setdefault(tuple(text), []).append(list(completion.token_ids))
    return plain, said


def check_counts(rollout: Rollout, stops: set[int], limits: Sequence[int], seen: Counter[str]) -> None:
    for completion, limit in zip(rollout.completions, limits, strict=True):
        assert not stops & set(completion.token_ids[:-1]), "something was emitted after a stop"
        assert 1 <= len(completion.token_ids) <= limit
        assert len(completion.logprobs) == len(completion.token_ids) == sum(completion.blocks)
        assert min(completion.blocks) >= 1 and completion.blocks[0] == 1
        gained = sum(completion.blocks[1:]) - completion.rounds
        # a row that ended inside a block kept accepted tokens only, the last of them among the rounds' own
        assert gained <= completion.accepted <= min(gained + 1, completion.drafted)
        if completion.accepted > gained:
            seen[f"{completion.finish_reason} inside an accepted block"] += 1
        seen["accepted"] += completion.accepted
        seen["refused"] += completion.drafted - completion.accepted
    stats = rollout.stats
    assert stats.completion_tokens == sum(len(c.token_ids) for c in rollout.completions)
    assert (stats.drafted, stats.accepted) == (
        sum(c.drafted for c in rollout.completions),
        sum(c.accepted for c in rollout.completions),
    )
    assert sum(stats.live_rows) == sum(c.rounds for c in rollout.completions)
    assert stats.passes == len(stats.live_rows) == len(stats.drafts)


def test_any_trees_and_any_traffic_give_the_plain_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    Watched.compared = 0

    @given(
        target=st.sampled_from(TARGETS),
        law=st.sampled_from(LAWS),
        prompts=st.lists(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14), min_size=1, max_size=4, unique_by=tuple
        ),
        group_size=st.integers(1, 3),
        slots=st.one_of(st.none(), st.integers(1, 5)),
        seed=st.integers(-(2**70), 2**70),
        backwards=st.booleans(),
        watch=st.integers(0, 4),
        data=st.data(),
    )
    @settings(max_examples=45, deadline=None, derandomize=True, database=None)
    def check(
        target: tuple[str, bool],
        law: SamplingParams,
        prompts: list[list[int]],
        group_size: int,
        slots: int | None,
        seed: int,
        backwards: bool,
        watch: int,
        data: st.DataObject,
    ) -> None:
        texts = [prompt for prompt in prompts for _ in range(group_size)]
        rows = len(texts)
        limits = data.draw(st.lists(st.integers(1, 16), min_size=rows, max_size=rows))
        uids = data.draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=rows, max_size=rows))
        plain, said = plainly(target, texts, law, {"max_new_tokens": limits, "seed": seed, "uids": uids})
        # stops are tokens that rows do say, so that they end inside accepted blocks
        common = sorted({token for c in plain.completions for token in c.token_ids})
        stops = data.draw(st.sets(st.sampled_from(common), max_size=2))
        plain.completions = [cut_at(completion, stops) for completion in plain.completions]
        order = range(rows)[::-1] if backwards else range(rows)
        with monkeypatch.context() as patch:
            if watch == 0:  # and every row's cache is compared with a fresh prefill after every round
                patch.setattr("fastgrpo.speculation.engine.LiveBatch", Watched)
            mood = data.draw(st.integers(0, 10**6))
            rollout = engine_for(target, slots, Careless(said, mood), Moody(mood)).generate(
                [texts[i] for i in order],
                law,
                max_new_tokens=[limits[i] for i in order],
                stop_token_ids=sorted(stops),
                seed=seed,
                uids=[uids[i] for i in order],
            )
        check_counts(rollout, stops, [limits[i] for i in order], seen)
        rollout.completions = [rollout.completions[order.index(i)] for i in range(rows)]
        assert_same(rollout, plain)

    check()
    # the examples were hard enough: drafts were right and wrong, and rows ended where it is easiest to go on
    assert min(seen["accepted"], seen["refused"]) > 200, seen
    assert min(seen["stop inside an accepted block"], seen["length inside an accepted block"]) > 3, seen
    assert Watched.compared > 0


# --- every temperature, truncation, architecture and policy, each pair of them at least once -------------------------

TEMPERATURES = (0.0, 0.7, 1.0)
TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.95},
    {"top_k": 50},
    {"repetition_penalty": 1.3},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
)


def squares() -> list[tuple[str, str, int, float, bool]]:
    """Architecture, policy, truncation, temperature, lean: columns of a Latin square, so all pairs meet."""
    found = []
    for i, j in itertools.product(range(5), repeat=2):
        temperature, lean = TEMPERATURES[(i + 2 * j) % 5 % 3], (i + 3 * j) % 5 % 2 == 0
        found.append((ARCHITECTURES[i], list(POLICIES)[j], (i + j) % 5, temperature, lean))
    return found


def test_every_pair_of_settings_meets() -> None:
    columns = list(zip(*squares(), strict=True))
    for one, other in itertools.combinations(columns, 2):
        assert len(set(zip(one, other, strict=True))) == len(set(one)) * len(set(other))
    assert [len(set(column)) for column in columns] == [5, 5, 5, 3, 2]


@pytest.mark.parametrize(("arch", "policy", "truncation", "temperature", "lean"), squares())
def test_the_same_tokens_for_every_pair_of_settings(
    arch: str, policy: str, truncation: int, temperature: float, lean: bool
) -> None:
    law = SamplingParams(temperature=temperature, **TRUNCATIONS[truncation])
    arguments: dict[str, Any] = {"group_size": 2, "max_new_tokens": [16, 9, 12, 3, 7, 16, 1, 10], "seed": 11}
    plain = engine_for((arch, lean), None, None, None).generate(PROMPTS, law, stop_token_ids=(), **arguments)
    last = [c.token_ids for c in plain.completions]
    stops = {last[0][9], last[5][4]}
    plain.completions = [cut_at(completion, stops) for completion in plain.completions]
    rollout = engine_for((arch, lean), 5, DraftProposer(draft_for(arch)), POLICIES[policy]()).generate(
        PROMPTS, law, stop_token_ids=sorted(stops), **arguments
    )
    assert_same(rollout, plain)
    assert rollout.stats.drafted > 0


def test_drafting_draws_from_no_global_generator() -> None:
    model = tiny_model("gemma3")
    draft = DraftModel.for_target(model)
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for lean in (True, False):
        engine = Engine(model, slots=2, proposer=DraftProposer(draft), policy=Fickle())
        engine.target = open_target(model, lean=lean)
        assert engine.generate(PROMPTS, LAWS[-1], max_new_tokens=8, stop_token_ids=()).stats.drafted > 0
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()
    assert before[2] == random.getstate()
