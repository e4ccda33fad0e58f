"""Siblings: the index finds what plain search finds, tokens stay the same, and what was said before is accepted."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_siblings import SlowSiblings
from reference_tree import check, paths
from test_speculation import LAWS, POLICIES, PROMPTS, assert_same, draft_for, model_of, plainly, run
from tiny import ARCHITECTURES
from torch import Tensor

from fastgrpo.models.cache import Prefix
from fastgrpo.models.draft import DraftModel
from fastgrpo.speculation import siblings
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.mixed import MixedProposer
from fastgrpo.speculation.noise import arrival_times, row_keys
from fastgrpo.speculation.policy import DraftShape, make_policy
from fastgrpo.speculation.proposers import DraftProposer
from fastgrpo.speculation.siblings import SiblingProposer
from fastgrpo.speculation.tree import Tree, best_scored, chain

EXAMPLES = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def prefix_of(tokens: Sequence[int], features: Tensor | None = None) -> Prefix:
    return Prefix([torch.zeros(1, len(tokens), 1)], [torch.zeros(1, len(tokens), 1)], len(tokens), features)


def noise_of(rows: int, at: int, depth: int) -> Tensor:
    """Keys as the engine makes them, row r being sequence r, all of them at position `at`."""
    index = torch.arange(rows)
    return torch.stack([row_keys(5, index, torch.full_like(index, at + 1 + i)) for i in range(depth)], 1)


class Twins:
    """The proposer and its slow twin, told the same."""

    def __init__(self, shortest: int, tokens: int, rows: int, history: dict[tuple[int, ...], Any] | None = None):
        self.fast = SiblingProposer(shortest=shortest, tokens=tokens, history=history)
        assert self.fast.start(rows, 64)
        capacity = 1 << (max(tokens, rows) - 1).bit_length()
        self.slow = SlowSiblings(shortest, capacity, siblings._RECENT)
        self.prompts: list[tuple[Any, Any]] = []
        self.history = history or {}

    def read_prompt(self, tokens: Sequence[int]) -> None:
        earlier = self.history.get(tuple(tokens), ())
        self.prompts.append((self.fast.read_prompt(tokens, prefix_of(tokens)), self.slow.read_prompt(tokens, earlier)))

    def admit(self, prompt: int, tokens: Sequence[int]) -> None:
        self.fast.admit(self.prompts[prompt][0], len(self.slow.rows), torch.tensor(tokens))
        self.slow.admit(self.prompts[prompt][1], tokens)

    def observe(self, said: Sequence[Sequence[int]]) -> None:
        width = max(len(row) for row in said) + 1  # what was drawn behind a stop is there and does not count
        tokens = torch.tensor([[*row, *[3] * (width - len(row))] for row in said])
        self.fast.observe(None, tokens, torch.tensor([len(row) for row in said]))
        self.slow.observe(said)

    def leave(self, row: int) -> None:
        last = len(self.slow.rows) - 1
        if row < last:
            self.fast.move_row(last, row)
        self.slow.leave(row)

    def compare(self, shape: DraftShape, noisy: bool) -> None:
        n = len(self.slow.rows)
        noise = noise_of(n, 40, shape.depth) if noisy else None
        roots = torch.tensor([row.tokens[-1] for row in self.slow.rows])
        few = torch.arange(10).expand(n, -1)
        keys = () if noise is None else noise.unbind(1)
        times = [arrival_times(key, few).tolist() for key in keys]  # by depth, row and token
        for nodes, matches in ((shape.nodes, 16), (32 * shape.depth, 32)):
            wide = DraftShape(shape.depth, shape.width, nodes)
            tree, scores = self.fast.propose_scored(roots, wide, noise)
            check(tree)
            assert tree.tokens.shape == scores.shape == (n, nodes + 1)
            assert torch.equal(self.fast.propose(roots, wide, noise).tokens, tree.tokens)
            for r in range(n):
                arrivals = [level[r] for level in times] or None
                wanted = self.slow.scores(r, shape.depth, shape.width, matches, arrivals)
                marks = zip(paths(tree, r), scores[r].tolist(), strict=True)
                found = {path: score for path, score in marks if path is not None}
                assert found.pop(()) == 0
                assert found == pytest.approx({path: wanted.get(path) for path in found}, rel=1e-4, abs=1e-4)
                best = sorted(wanted.values(), reverse=True)[:nodes]
                assert sorted(found.values(), reverse=True) == pytest.approx(best, rel=1e-4, abs=1e-4)


def play(twins: Twins, dice: random.Random, rows: int, letters: int, rounds: int) -> None:
    """Rows of several groups come and go; what they say is random, over few letters."""

    def text(least: int, most: int) -> list[int]:
        return [dice.randrange(letters) for _ in range(dice.randint(least, most))]

    twins.read_prompt(text(1, 20))
    twins.admit(0, text(1, rows))
    for _ in range(rounds):
        twins.observe([text(1, 4) for _ in twins.slow.rows])
        for row in reversed(range(len(twins.slow.rows))):
            if dice.random() < 0.15 and len(twins.slow.rows) > 1:
                twins.leave(row)
        if dice.random() < 0.3:
            twins.read_prompt(text(1, 20))
        free = rows - len(twins.slow.rows)
        if free and dice.random() < 0.5:
            twins.admit(dice.randrange(len(twins.prompts)), text(1, free))
        if dice.random() < 0.4:
            shape = DraftShape(dice.randint(1, 5), dice.randint(1, 4), dice.randint(1, 12))
            twins.compare(shape, noisy=dice.random() < 0.5)
    twins.compare(DraftShape(4, 3, 8), noisy=True)


@EXAMPLES
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.integers(2, 5))
def test_the_index_finds_what_plain_search_finds(seed: int, shortest: int, rows: int, letters: int) -> None:
    play(Twins(shortest, 1 << 16, rows), random.Random(seed), rows, letters, rounds=12)


@EXAMPLES
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 3, 16, 60]))
def test_with_little_memory_the_oldest_text_is_dropped(seed: int, shortest: int, rows: int, tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # no run is missed when all that is remembered may be looked at, however many share a place of a small table
        patch.setattr(siblings, "_RECENT", 64)
        play(Twins(shortest, tokens, rows), random.Random(seed), rows, 3, rounds=16)


def test_earlier_responses_to_a_prompt_are_siblings() -> None:
    history = {(1, 2, 3): [[4, 5, 6, 7], [4, 8, 9]], (2, 2): [[1]]}
    twins = Twins(1, 64, 2, history)
    twins.read_prompt([1, 2, 3])
    twins.admit(0, [4, 4])
    twins.compare(DraftShape(3, 2, 6), noisy=False)
    tree = twins.fast.propose(torch.tensor([4, 4]), DraftShape(3, 2, 6), None)
    assert {(8,), (8, 9), (5,), (5, 6), (5, 6, 7)} == {path for path in paths(tree, 0) if path}


def drafted(proposer: SiblingProposer, roots: Sequence[int]) -> list[set[tuple[int, ...]]]:
    tree = proposer.propose(torch.tensor(roots), DraftShape(4, 4, 16), None)
    check(tree)
    return [{path for path in paths(tree, row) if path} for row in range(len(roots))]


def test_nothing_comes_from_another_group_or_across_the_end_of_a_text() -> None:
    proposer = SiblingProposer()
    proposer.start(3, 64)
    first, second = [10, 11, 12, 13], [20, 21]
    groups = [proposer.read_prompt(text, prefix_of(text)) for text in (first, second)]
    proposer.admit(groups[0], 0, torch.tensor([14]))
    proposer.admit(groups[1], 1, torch.tensor([11]))
    # 11 was followed by 12 in the other group only, and 14 by nothing: the next token of the log is another text's
    assert drafted(proposer, [14, 11]) == [set(), set()]
    proposer.admit(groups[0], 2, torch.tensor([14]))
    assert drafted(proposer, [14, 11, 14]) == [set(), set(), set()]
    proposer.observe(None, torch.tensor([[15], [11], [13]]), torch.tensor([1, 1, 1]))
    # 13 was followed by 14 twice, once by 15 behind; row 1 said 11 twice, so 11 followed 11
    assert drafted(proposer, [15, 11, 13]) == [set(), {(11,)}, {(14,), (14, 15), (14, 13)}]


def test_shortest_is_the_least_that_must_match() -> None:
    for shortest, found in ((1, {(8,), (8, 6), (7,), (7, 5)}), (2, set())):
        proposer = SiblingProposer(shortest=shortest)
        proposer.start(1, 64)
        text = [6, 7, 5]
        proposer.admit(proposer.read_prompt(text, prefix_of(text)), 0, torch.tensor([6]))
        proposer.observe(None, torch.tensor([[8, 6]]), torch.tensor([2]))
        assert drafted(proposer, [6]) == [found]
    for wrong in ({"shortest": 0}, {"tokens": 0}):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            SiblingProposer(**wrong)


def test_of_equal_candidates_the_one_that_wins_the_targets_race_is_proposed() -> None:
    """Token 9 was followed by four tokens four times each; a target with that law draws the draft's first choice."""
    rows, followers = 64, [30, 31, 32, 33]
    proposer = SiblingProposer()
    proposer.start(rows, 64)
    text = [token for i in range(16) for token in (9, followers[i % 4], 100 + i)]  # longer runs never come back
    proposer.admit(proposer.read_prompt(text, prefix_of(text)), 0, torch.full((rows,), 9))
    noise = noise_of(rows, len(text), 1)
    tree = proposer.propose(torch.full((rows,), 9), DraftShape(1, 1, 1), noise)
    times = arrival_times(noise[:, 0], torch.tensor(followers).expand(rows, -1))
    assert tree.tokens[:, 1].tolist() == [followers[i] for i in times.argmin(1).tolist()]
    assert len(set(tree.tokens[:, 1].tolist())) == 4


def proposers(arch: str) -> dict[str, Any]:
    return {
        "siblings": SiblingProposer(),
        "mixed": MixedProposer([DraftProposer(draft_for(arch)), SiblingProposer(tokens=100)]),
    }


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_same_tokens_as_plainly(arch: str, law: str) -> None:
    for proposer in proposers(arch).values():
        rollout = run(arch, law, slots=5, proposer=proposer, policy=POLICIES["tree"]())
        assert_same(rollout, plainly(arch, law))
        assert rollout.stats.drafted > 0


@pytest.mark.parametrize(
    ("policy", "slots"), [*((policy, 3) for policy in POLICIES), ("fickle", 1), ("fickle", None), ("paper", None)]
)
def test_the_same_tokens_for_every_policy_and_number_of_slots(policy: str, slots: int | None) -> None:
    for proposer in proposers("gemma3").values():
        rollout = run("gemma3", "plain", slots=slots, proposer=proposer, policy=POLICIES[policy]())
        assert_same(rollout, plainly("gemma3", "plain"))


@pytest.mark.parametrize("law", ["greedy", "plain", "all"])
@pytest.mark.parametrize("kind", ["siblings", "mixed"])
def test_a_response_that_was_said_before_is_accepted_whole(law: str, kind: str) -> None:
    # one slot, two responses with one uid: the second says what the first said, and both have its noise
    proposer = proposers("qwen3")[kind]
    engine = Engine(model_of("qwen3"), slots=1, proposer=proposer, policy=make_policy("fixed", spec_depth=4))
    rollout = engine.generate(
        PROMPTS[3:], LAWS[law], group_size=2, max_new_tokens=41, stop_token_ids=[], uids=[7, 7], seed=3
    )
    first, second = rollout.completions
    assert first.token_ids == second.token_ids
    if kind == "siblings":
        assert second.blocks == [1, *[5] * 8]
    else:  # an untrained draft takes places of the four now and then
        assert second.blocks.count(5) >= 6


def test_history_is_accepted_and_siblings_learn_from_live_rows() -> None:
    engine = Engine(model_of("llama"))
    arguments: dict[str, Any] = {"max_new_tokens": 41, "stop_token_ids": [], "seed": 3}
    plain = engine.generate(PROMPTS[3:], LAWS["plain"], group_size=2, **arguments)
    said = {tuple(PROMPTS[3]): [c.token_ids for c in plain.completions]}
    engine.proposer, engine.policy = SiblingProposer(history=said), make_policy("fixed", spec_depth=4)
    rollout = engine.generate(PROMPTS[3:], LAWS["plain"], group_size=2, **arguments)
    assert_same(rollout, plain)
    assert [c.blocks for c in rollout.completions] == [[1, *[5] * 8]] * 2


class Scored:
    """Proposes one fixed chain for every row, scored as told; remembers what it was given."""

    def __init__(self, tokens: Sequence[int], score: float, taps: tuple[int, ...] = (), able: bool = True):
        self.chain, self.score, self.taps, self.able = tokens, score, taps, able
        self.heard: list[Any] = []

    def start(self, rows: int, capacity: int) -> bool:
        return self.able

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> Any:
        self.heard.append(prefix.features)
        return self.score

    def admit(self, prompt: Any, first_row: int, tokens: Tensor) -> None:
        self.heard.append(prompt)

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        self.heard.append(features)

    def move_row(self, source: int, target: int) -> None:
        self.heard.append((source, target))

    def propose(self, roots: Tensor, shape: DraftShape, noise: Any) -> Tree:
        return self.propose_scored(roots, shape, noise)[0]

    def propose_scored(self, roots: Tensor, shape: DraftShape, noise: Any) -> tuple[Tree, Tensor]:
        tree = chain(roots, torch.tensor(self.chain).expand(len(roots), -1))
        return best_scored(tree, self.score * tree.depths, shape.nodes)


def test_a_mixed_tree_holds_the_best_of_all_once() -> None:
    likely, unlikely = Scored([1, 2, 3], -0.5), Scored([1, 2, 4], -0.7)
    mixed = MixedProposer([unlikely, likely])
    assert mixed.start(2, 64)
    tree, scores = mixed.propose_scored(torch.tensor([8, 9]), DraftShape(3, 1, 4), None)
    check(tree)
    assert paths(tree, 1) == [(), (1,), (1, 2), (1, 2, 4), (1, 2, 3)]
    torch.testing.assert_close(scores[1], torch.tensor([0, -0.5, -1.0, -2.1, -1.5]))
    narrow = mixed.propose(torch.tensor([8, 9]), DraftShape(3, 1, 3), None)
    assert paths(narrow, 0) == [(), (1,), (1, 2), (1, 2, 3)]


def test_each_proposer_hears_its_own_taps_and_state() -> None:
    parts = [Scored([1], -1.0, (2, 5)), Scored([1], -2.0), Scored([2], -3.0, (1, 5)), Scored([3], -4.0, able=False)]
    mixed = MixedProposer(parts)
    assert mixed.taps == (1, 2, 5)
    assert mixed.start(2, 64)
    features = torch.arange(12.0).view(2, 6)  # 2 tokens, 3 taps of 2
    state = mixed.read_prompt([4, 4], prefix_of([4, 4], features))
    mixed.admit(state, 0, torch.tensor([1]))
    mixed.observe(features[None], torch.tensor([[1, 2]]), torch.tensor([2]))
    mixed.move_row(1, 0)
    own = [features[:, 2:], None, features[:, [0, 1, 4, 5]]]
    for part, wanted in zip(parts, own, strict=False):
        prompt, score, round_, move = part.heard
        assert (prompt is None and round_ is None) if wanted is None else torch.equal(prompt, wanted)
        assert wanted is None or torch.equal(round_[0], wanted)
        assert (score, move) == (part.score, (1, 0))
    assert parts[3].heard == []
    assert not MixedProposer([parts[3]]).start(2, 64)
    with pytest.raises(ValueError, match="proposers is empty"):
        MixedProposer([])


def test_siblings_go_on_where_the_draft_cannot(caplog: pytest.LogCaptureFixture) -> None:
    draft = DraftModel.for_target(model_of("llama"))
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    mixed = MixedProposer([DraftProposer(draft), SiblingProposer()])
    rollout = run("llama", "plain", slots=3, proposer=mixed, policy=POLICIES["tree"]())
    assert "decoded without it" in caplog.text
    assert_same(rollout, plainly("llama", "plain"))
    assert rollout.stats.accepted > 0


def full_house(groups: int, group_size: int, length: int) -> tuple[SiblingProposer, torch.Generator]:
    """Rows of a long rollout; words are as common as words are."""
    proposer, generator = SiblingProposer(), torch.Generator().manual_seed(0)
    rows = groups * group_size
    proposer.start(rows, 2 * length)
    for group in range(groups):
        text = words((1, 200), generator)[0].tolist()
        prompt = proposer.read_prompt(text, prefix_of(text))
        proposer.admit(prompt, group * group_size, torch.full((group_size,), 5))
    for _ in range(length // 100):
        proposer.observe(None, words((rows, 100), generator), torch.full((rows,), 100))
    return proposer, generator


def words(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) * 10).exp().long()


@pytest.mark.parametrize(("groups", "group_size"), [(4, 8), (1, 1)])
def test_a_round_is_cheap_however_long_the_texts_are(groups: int, group_size: int) -> None:
    rows, shape = groups * group_size, DraftShape(5, 8, 16)
    least = {}
    for length in (200, 4000):
        proposer, generator = full_house(groups, group_size, length)
        seconds = []
        for _ in range(15):
            tokens, counts = words((rows, 6), generator), torch.randint(1, 7, (rows,), generator=generator)
            start = time.thread_time()  # of this thread: the machine may have other work
            proposer.observe(None, tokens, counts)
            roots = tokens.gather(1, counts[:, None] - 1)[:, 0]
            tree = proposer.propose(roots, shape, noise_of(rows, length, shape.depth))
            seconds.append(time.thread_time() - start)
        least[length] = 1000 * min(seconds)
        assert length < 4000 or int(tree.real.sum()) > 2 * rows, "there was something to look up"
    print(f"{rows} rows: {least[200]:.1f} ms a round at 200 tokens each, {least[4000]:.1f} ms at 4,000")
    assert least[4000] < 20
    assert least[4000] < 2 * least[200] + 5
