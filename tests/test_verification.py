"""The walk is exact: in law by enumeration, and token by token when a token is a function of its context."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_tree import VOCAB, Path, SlowNode, paths, rows_of_nodes, slow_walk, to_tree, trees
from torch import Tensor

from fastgrpo.speculation.tree import Tree, best_nodes, chain
from fastgrpo.speculation.verification import Draw, Walk, cut, walk

# a busy machine is no failure
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EXACT = 1e-12


def token_after(uid: int, text: Path) -> int:
    """A target that says one token for each (uid, text), as sampling with fixed noise does."""
    state = uid * 7919 + 17
    for token in text:
        state = (state * 1103515245 + 12345 + 40503 * (token + 1)) % (1 << 31)
    return (state >> 13) % VOCAB


def drawing(tree: Tree, says: Callable[[int, Path], int]) -> Draw:
    """A draw that asks says(row, path) at the node itself, and raises where nobody may ask."""
    known = [paths(tree, r) for r in range(tree.tokens.shape[0])]

    def draw(nodes: Tensor, active: Tensor, depth: int) -> Tensor:
        assert bool(active.any()), "nobody is walking"
        tokens = torch.full_like(nodes, -1)  # of rows that have stopped: no token at all
        for r, node in enumerate(nodes.tolist()):
            if bool(active[r]):
                path = known[r][node]
                assert path is not None and len(path) == depth, "a node is drawn at its own depth, padding never"
                tokens[r] = says(r, path)
        return tokens

    return draw


def rows_of(walked: Walk) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(walked.emitted, walked.counts.tolist(), strict=True)]


@EXAMPLES
@given(trees(), st.integers(0, 1000))
def test_the_walk_equals_the_slow_twin(tree: Tree, uid: int) -> None:
    walked = walk(tree, drawing(tree, lambda r, path: token_after(uid + r, path)))
    for r in range(tree.tokens.shape[0]):
        emitted, visited = slow_walk(tree, r, lambda path: token_after(uid + r, path))  # noqa: B023
        count = int(walked.counts[r])
        assert count == len(emitted)
        assert walked.emitted[r].tolist() == emitted + [0] * (tree.levels + 1 - count)
        assert walked.path[r].tolist() == visited + [0] * (tree.levels + 1 - count)


@EXAMPLES
@given(st.data(), st.integers(0, 1000), st.integers(1, 12), st.lists(st.integers(0, VOCAB - 1), max_size=1))
def test_any_trees_emit_what_plain_decoding_emits(data: st.DataObject, uid: int, limit: int, stops: list[int]) -> None:
    """Round after round with other random trees, to a stop token or a limit inside a block."""
    plain: list[int] = []
    while len(plain) < limit and not (plain and plain[-1] in stops):
        plain.append(token_after(uid, tuple(plain)))
    text: list[int] = []
    while len(text) < limit and not (text and text[-1] in stops):
        tree = data.draw(trees(rows=1))
        walked = walk(tree, drawing(tree, lambda r, path: token_after(uid, (*text, *path))))  # noqa: B023
        counts = cut(
            walked.emitted, walked.counts, torch.tensor(stops, dtype=torch.long), torch.tensor([limit - len(text)])
        )
        assert int(counts) >= 1
        text += walked.emitted[0, : int(counts)].tolist()
    assert text == plain


def test_rows_with_fixed_tokens_emit_them_for_any_tree() -> None:
    """Fixed per (row, depth), whatever the tree: the published claim of shared noise, many rows at once."""
    generator = torch.Generator().manual_seed(5)
    n, depth = 64, 5
    tokens = torch.randint(VOCAB, (n, depth + 1), generator=generator)
    reached = 0
    for _ in range(8):
        parents = torch.stack([torch.randint(j, (n,), generator=generator) for j in (1, *range(1, 24))], 1)
        parents[:, 0] = 0
        depths = torch.zeros_like(parents)
        for j in range(1, 24):
            depths[:, j] = depths.gather(1, parents[:, j : j + 1])[:, 0] + 1
        real = depths <= depth
        drafted = torch.randint(VOCAB, (n, 24), generator=generator) * real
        tree = Tree(drafted, parents * real, torch.where(real, depths, 1), real, depth)
        walked = walk(tree, lambda nodes, active, depth: tokens[:, depth])
        for r, emitted in enumerate(rows_of(walked)):
            assert emitted == tokens[r, : len(emitted)].tolist()
        reached = max(reached, int(walked.counts.max()))
    assert reached > 2, "the trees were never right, so nothing was tested"


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_perfect_tree_gives_one_more_than_its_depth(depth: int) -> None:
    # the right path among wrong siblings, which stand first
    row, node, text = [SlowNode(0, None)], 0, ()
    for _ in range(depth):
        right = token_after(3, text)
        row += [SlowNode((right + 1) % VOCAB, node), SlowNode(right, node)]
        node, text = len(row) - 1, (*text, right)
    tree = to_tree([row])
    walked = walk(tree, drawing(tree, lambda r, path: token_after(3, path)))
    assert walked.counts.tolist() == [depth + 1]
    assert walked.path[0, : depth + 1].tolist() == list(range(0, 2 * depth + 1, 2))


def test_an_adversarial_tree_gives_exactly_one() -> None:
    uids = range(6)
    row_lists = []
    for uid in uids:
        wrong = [token for token in range(VOCAB) if token != token_after(uid, ())]
        children = [SlowNode(token, 0) for token in wrong]
        # below them everything is right, which helps nobody
        row_lists.append([SlowNode(0, None), *children, *(SlowNode(t, 1) for t in range(VOCAB))])
    tree = to_tree(row_lists)
    walked = walk(tree, drawing(tree, lambda r, path: token_after(r, path)))
    assert walked.counts.tolist() == [1] * len(uids)
    assert walked.emitted[:, 0].tolist() == [token_after(uid, ()) for uid in uids]


def without_equal_siblings(row: list[SlowNode]) -> list[SlowNode]:
    kept, place, taken = [row[0]], {0: 0}, set()
    for j, node in enumerate(row[1:], 1):
        above = place.get(node.parent or 0)  # None where the parent was left out
        if above is not None and (above, node.token) not in taken:
            taken.add((above, node.token))
            place[j] = len(kept)
            kept.append(SlowNode(node.token, above))
    return kept


def in_another_order(row: list[SlowNode], source: random.Random) -> list[SlowNode]:
    """The same tree with its nodes in a random order, parents first."""
    order, ready = [0], [j for j, node in enumerate(row) if node.parent == 0]
    while ready:
        j = ready.pop(source.randrange(len(ready)))
        order.append(j)
        ready += [child for child, node in enumerate(row) if node.parent == j]
    place = {old: new for new, old in enumerate(order)}
    return [row[0], *(SlowNode(row[j].token, place[row[j].parent or 0]) for j in order[1:])]


@EXAMPLES
@given(st.lists(rows_of_nodes(), min_size=1, max_size=3), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_permuting_siblings_changes_nothing(lists: list[list[SlowNode]], uid: int, source: random.Random) -> None:
    rows = [without_equal_siblings(row) for row in lists]  # equal ones differ by their order alone
    results = []
    for tree in (to_tree(rows), to_tree([in_another_order(row, source) for row in rows])):
        walked = walk(tree, drawing(tree, lambda r, path: token_after(uid + r, path)))
        visited = [
            [paths(tree, r)[j] for j in walked.path[r, : int(count)].tolist()] for r, count in enumerate(walked.counts)
        ]
        results.append((rows_of(walked), visited))
    assert results[0] == results[1]


def test_a_row_does_not_see_its_neighbours() -> None:
    lists = [[SlowNode(0, None), *(SlowNode(t, 0) for t in range(VOCAB)), SlowNode(r % VOCAB, r)] for r in range(1, 5)]
    together = to_tree(lists, 9)
    walked = walk(together, drawing(together, lambda r, path: token_after(r, path)))
    for r, row in enumerate(lists):
        alone = to_tree([row])
        single = walk(alone, drawing(alone, lambda _, path: token_after(r, path)))  # noqa: B023
        assert rows_of(single)[0] == rows_of(walked)[r]


def test_levels_that_nobody_reaches_are_not_drawn() -> None:
    calls = []
    tree = chain(torch.tensor([0, 0]), torch.tensor([[1, 2, 3, 1], [2, 2, 2, 2]]))

    def draw(nodes: Tensor, active: Tensor, depth: int) -> Tensor:
        calls.append((depth, active.tolist()))
        return torch.tensor([[1, 3], [3, 0]][depth])

    walked = walk(tree, draw)
    assert walked.counts.tolist() == [2, 1]
    assert calls == [(0, [True, True]), (1, [True, False])]


def test_the_target_may_say_the_token_of_padding() -> None:
    tree = chain(torch.tensor([0]), torch.tensor([[2]])).padded(6)  # padding holds token 0, the root too
    assert walk(tree, lambda nodes, active, depth: torch.tensor([0])).counts.tolist() == [1]


# --- exact enumeration -----------------------------------------------------------------------------------------------


@functools.cache
def target_law(text: Path, seed: int) -> Tensor:
    """The target's law after a text, float64 (VOCAB,), sharp enough to differ everywhere."""
    mixed = seed * 1000003
    for token in text:
        mixed = mixed * VOCAB + token + 1
    return torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(mixed)).double() * 1.5, 0)


def law_of_texts(tree: Tree, length: int, seed: int) -> dict[Path, float]:
    """The law of the first `length` tokens when one round walks `tree` and plain sampling goes on from there.

    Every possible series of draws is one row of the walk; its probability is that of the draws at visited nodes, in the
    context of the node itself, so that a walk that strays would show.
    """
    draws = torch.tensor(list(itertools.product(range(VOCAB), repeat=tree.levels + 1)))
    parts = [part.expand(len(draws), -1) for part in (tree.tokens, tree.parents, tree.depths, tree.real)]
    many = Tree(*parts, tree.levels)
    walked = walk(many, lambda nodes, active, depth: draws[:, depth])
    known = paths(tree, 0)
    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=length), 0.0)
    for row, text in enumerate(rows_of(walked)):
        weight = VOCAB ** -float(tree.levels + 1 - len(text))  # draws that were never made
        for node, token in zip(walked.path[row].tolist(), text, strict=False):
            path = known[node]
            assert path is not None
            weight *= float(target_law(path, seed)[token])
        for rest in itertools.product(range(VOCAB), repeat=max(length - len(text), 0)):
            full = (*text, *rest)
            more = 1.0
            for i in range(len(text), len(full)):
                more *= float(target_law(full[:i], seed)[full[i]])
            law[full[:length]] += weight * more
    return law


def plain_law(length: int, seed: int) -> dict[Path, float]:
    law = {}
    for text in itertools.product(range(VOCAB), repeat=length):
        law[text] = 1.0
        for i, token in enumerate(text):
            law[text] *= float(target_law(text[:i], seed)[token])
    return law


def distance(one: dict[Path, float], other: dict[Path, float]) -> float:
    """Total variation."""
    return sum(abs(one[text] - other[text]) for text in one) / 2


DRAFTS = {
    "nothing": [],
    "chain": [(0, 0), (1, 1), (2, 2)],
    "full first level": [(0, t) for t in range(VOCAB)],
    "deep and wide": [(0, 1), (0, 2), (1, 0), (1, 3), (2, 2), (3, 1), (3, 2), (5, 0)],
    "equal siblings": [(0, 1), (0, 1), (1, 2), (2, 3)],
    "out of level order": [(0, 3), (1, 0), (2, 0), (0, 1), (4, 2)],
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("nodes", DRAFTS.values(), ids=DRAFTS.keys())
def test_the_law_of_texts_is_the_targets_for_any_draft(nodes: list[tuple[int, int]], seed: int) -> None:
    tree = to_tree([[SlowNode(0, None), *(SlowNode(token, parent) for parent, token in nodes)]])
    depth = int(tree.depths.max())
    exact = Tree(tree.tokens, tree.parents, tree.depths, tree.real, depth)
    law = law_of_texts(exact, 3, seed)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, plain_law(3, seed)) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_chosen_by_the_drafts_scores_is_exact_too(seed: int) -> None:
    """Pruning by score is free under this rule: scores come from a draft, never from the target's draws."""
    generator = torch.Generator().manual_seed(seed)
    row = [SlowNode(0, None), *(SlowNode(t, 0) for t in range(VOCAB))]
    row += [SlowNode(t, p) for p in (1, 3) for t in range(VOCAB)]
    chosen = best_nodes(to_tree([row]), -torch.rand(1, len(row), generator=generator), 5)
    exact = Tree(chosen.tokens, chosen.parents, chosen.depths, chosen.real, 2)
    assert distance(law_of_texts(exact, 3, seed), plain_law(3, seed)) < EXACT


def first_token_law(children: list[int], seed: int) -> Tensor:
    """The law of a round's first token by the walk, for a root with these children."""
    tree = to_tree([[SlowNode(0, None), *(SlowNode(token, 0) for token in children)]])
    law = law_of_texts(Tree(tree.tokens, tree.parents, tree.depths, tree.real, 1), 1, seed)
    return torch.tensor([law[(token,)] for token in range(VOCAB)], dtype=torch.float64)


def rejection_law(p: Tensor, q: Tensor, children: list[int]) -> Tensor:
    """The law of the first token by multi-round rejection with draft probabilities, q losing each refused child."""
    law, reached = torch.zeros_like(p), 1.0
    for child in children:
        accept = min(1.0, float(p[child] / q[child]))
        law[child] += reached * accept
        reached *= 1 - accept
        if reached <= 0:
            return law
        p = (p - q).clamp(min=0)
        p = p / p.sum()
        q = q.clone()
        q[child] = 0
        q = q / q.sum()
    return law + reached * p


def sampled_children_law(p: Tensor, q: Tensor, sort: bool) -> Tensor:
    """`rejection_law` over two children drawn from q without replacement, in draw order or sorted by q."""
    law = torch.zeros_like(p)
    for first, second in itertools.permutations(range(VOCAB), 2):
        weight = q[first] * q[second] / (1 - q[first])
        order = sorted((first, second), key=lambda child: -float(q[child])) if sort else [first, second]
        law += weight * rejection_law(p, q, order)
    return law


@pytest.mark.parametrize("seed", range(4))
def test_the_biased_rules_are_told_from_the_exact_one(seed: int) -> None:
    """Negative controls: what goes wrong in the wild is far outside the tolerance that the walk is held to."""
    p = target_law((), seed)
    q = target_law((), seed + 100)  # a draft that disagrees
    best_two = q.topk(2).indices.tolist()

    def off(law: Tensor) -> float:
        assert float(law.sum()) == pytest.approx(1)
        return float((law - p).abs().sum()) / 2

    assert off(first_token_law(best_two, seed)) < EXACT
    assert off(sampled_children_law(p, q, sort=False)) < EXACT, "rejection itself is exact for children drawn from q"
    assert off(rejection_law(p, q, best_two)) > 1e-2, "children chosen, but judged as if they had been drawn from q"
    assert off(sampled_children_law(p, q, sort=True)) > 1e-3, "children drawn, but judged in the order of their scores"


# --- what counts of what was emitted ---------------------------------------------------------------------------------


def test_rows_are_cut_at_their_first_stop_and_at_their_room() -> None:
    emitted = torch.tensor([[5, 9, 7, 9], [5, 6, 7, 0], [9, 9, 9, 9], [5, 6, 8, 7], [5, 6, 9, 0], [5, 6, 7, 8]])
    counts = torch.tensor([4, 3, 4, 4, 2, 4])
    room = torch.tensor([9, 9, 9, 9, 9, 1])
    assert cut(emitted, counts, torch.tensor([9, 8]), room).tolist() == [2, 3, 1, 3, 2, 1]
    assert cut(emitted, counts, torch.tensor([], dtype=torch.long), room).tolist() == [4, 3, 4, 4, 2, 1]
    assert counts.tolist() == [4, 3, 4, 4, 2, 4]


@EXAMPLES
@given(st.data(), st.integers(1, 5), st.lists(st.integers(0, 5), max_size=3))
def test_cutting_equals_the_slow_twin(data: st.DataObject, n: int, stops: list[int]) -> None:
    tokens = [data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)) for _ in range(n)]
    room = [data.draw(st.integers(1, 7)) for _ in range(n)]
    expected = []
    for row, limit in zip(tokens, room, strict=True):
        kept: list[int] = []
        for token in row:
            if len(kept) == limit or (kept and kept[-1] in stops):
                break
            kept.append(token)
        expected.append(len(kept))
    emitted = torch.tensor([row + [0] * (6 - len(row)) for row in tokens])
    counts = torch.tensor([len(row) for row in tokens])
    assert cut(emitted, counts, torch.tensor(stops, dtype=torch.long), torch.tensor(room)).tolist() == expected
