"""Trees: chosen, merged, masked and gathered as the slow twins do it, for every row and every shape of tree."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_tree import SlowNode, check, paths, slow_ancestors, slow_best_nodes, to_tree, trees

from fastgrpo.speculation.tree import Tree, best_nodes, best_scored, bucket, chain, grow, merge, path_slots

# a busy machine is no failure
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
INF = float("inf")


@st.composite
def scored_trees(draw: st.DrawFn, rows: int | None = None) -> tuple[Tree, torch.Tensor]:
    """Trees with scores of few different values, so that ties, -inf and NaN are common; not falling along a path."""
    tree = draw(trees(rows))
    values = st.sampled_from([0.0, -1.0, -1.0, -2.0, 3.0, -INF, float("nan")])
    n, m = tree.tokens.shape
    scores = [[draw(values) for _ in range(m)] for _ in range(n)]
    return tree, torch.tensor(scores)


def level_scores(tree: Tree, seed: int) -> torch.Tensor:
    """Cumulative log-probabilities: each node's is its parent's plus something below 0."""
    steps = -torch.rand(tree.tokens.shape, generator=torch.Generator().manual_seed(seed)) - 0.01
    scores = torch.zeros_like(steps)
    for j in range(1, steps.shape[1]):
        scores[:, j] = scores.gather(1, tree.parents[:, j : j + 1])[:, 0] + steps[:, j]
    return scores


@EXAMPLES
@given(trees())
def test_ancestors_equal_the_slow_twin(tree: Tree) -> None:
    check(tree)
    assert torch.equal(tree.ancestors(), slow_ancestors(tree))


def test_ancestors_reach_up_a_long_chain() -> None:
    tree = chain(torch.tensor([1]), torch.arange(40)[None])
    assert torch.equal(tree.ancestors()[0], torch.ones(41, 41, dtype=torch.bool).tril())


def test_padding_sees_the_root_and_itself() -> None:
    tree = chain(torch.tensor([3]), torch.tensor([[1, 2]])).padded(5)
    check(tree)
    assert tree.ancestors()[0, 3:].tolist() == [[True, False, False, True, False], [True, False, False, False, True]]
    assert tree.levels == 2
    with pytest.raises(ValueError, match=r"nodes is 2, but the trees have 3.*best_nodes"):
        chain(torch.tensor([3]), torch.tensor([[1, 2]])).padded(2)


def test_trees_of_other_shapes_and_dtypes_are_refused() -> None:
    good = chain(torch.tensor([3]), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="shapes"):
        Tree(good.tokens, good.parents[:, :2], good.depths, good.real)
    with pytest.raises(ValueError, match=r"dtypes.*\.long\(\)"):
        Tree(good.tokens.int(), good.parents, good.depths, good.real)


def test_chains_end_at_their_first_gap() -> None:
    real = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    tree = chain(torch.tensor([7, 8, 9]), torch.tensor([[1, 2, 3]] * 3), real)
    check(tree)
    assert [paths(tree, r) for r in range(3)] == [
        [(), (1,), None, None],
        [(), (1,), (1, 2), (1, 2, 3)],
        [(), None, None, None],
    ]
    assert tree.tokens[:, 0].tolist() == [7, 8, 9]


def test_a_chain_may_be_a_root_alone() -> None:
    tree = chain(torch.tensor([7, 8]), torch.empty(2, 0, dtype=torch.long))
    check(tree)
    assert tree.tokens.tolist() == [[7], [8]]
    assert tree.ancestors().tolist() == [[[True]], [[True]]]


def test_growing_hangs_children_on_beams_and_adds_scores() -> None:
    tree, scores = chain(torch.tensor([5, 6]), torch.empty(2, 0, dtype=torch.long)), torch.zeros(2, 1)
    first = torch.tensor([[[10, 11]], [[20, 21]]])
    tree, scores = grow(tree, scores, torch.zeros(2, 1, dtype=torch.long), first, torch.tensor([[[-1.0, -2.0]]] * 2))
    beams = torch.tensor([[2, 1], [1, 2]])
    second = torch.tensor([[[12, 13], [14, 15]], [[22, 23], [24, 25]]])
    tree, scores = grow(tree, scores, beams, second, torch.tensor([[[-0.5, -0.25], [-3.0, -4.0]]] * 2))
    check(tree)
    assert paths(tree, 0) == [(), (10,), (11,), (11, 12), (11, 13), (10, 14), (10, 15)]
    assert paths(tree, 1) == [(), (20,), (21,), (20, 22), (20, 23), (21, 24), (21, 25)]
    assert scores.tolist() == [
        [0.0, -1.0, -2.0, -2.5, -2.25, -4.0, -5.0],
        [0.0, -1.0, -2.0, -1.5, -1.25, -5.0, -6.0],
    ]
    assert tree.levels == 2


def test_children_of_padding_are_padding() -> None:
    tree = chain(torch.tensor([5]), torch.tensor([[1, 2]]), torch.tensor([[True, False]]))
    grown, _ = grow(tree, torch.zeros(1, 3), torch.tensor([[2, 1]]), torch.tensor([[[8], [9]]]), torch.zeros(1, 2, 1))
    check(grown)
    assert paths(grown, 0) == [(), (1,), None, None, (1, 9)]


def slow_worth(tree: Tree, scores: torch.Tensor, row: int, nodes: list[int]) -> list[float]:
    """What each node counts for: the least score on its path, 0 for the root."""
    worth = {0: INF}
    for j in nodes[1:]:  # parents first
        worth[j] = min(float(scores[row, j]), worth[int(tree.parents[row, j])])
    return [worth[j] if j else 0.0 for j in nodes]


@EXAMPLES
@given(scored_trees(), st.integers(0, 12))
def test_best_nodes_equal_the_slow_twin(scored: tuple[Tree, torch.Tensor], count: int) -> None:
    tree, scores = scored
    chosen, worth = best_scored(tree, scores, count)
    check(chosen)
    assert torch.equal(best_nodes(tree, scores, count).tokens, chosen.tokens)
    assert chosen.tokens.shape == worth.shape == (tree.tokens.shape[0], count + 1)
    for r in range(tree.tokens.shape[0]):
        kept = slow_best_nodes(tree, scores, r, count)
        expected = [paths(tree, r)[j] for j in kept]
        assert paths(chosen, r) == expected + [None] * (count + 1 - len(kept))
        assert worth[r].tolist() == pytest.approx(slow_worth(tree, scores, r, kept) + [-INF] * (count + 1 - len(kept)))
        assert int(chosen.tokens[r, 0]) == int(tree.tokens[r, 0])
        assert chosen.depths[r, : len(kept)].tolist() == sorted(chosen.depths[r, : len(kept)].tolist())


@EXAMPLES
@given(trees(rows=1, most=8), st.integers(0, 7), st.integers(0, 1000))
def test_no_other_choice_has_more_probability(tree: Tree, count: int, seed: int) -> None:
    """The sum over kept nodes of their path's probability is the expected number of accepted tokens."""
    scores = level_scores(tree, seed).double()
    nodes = [j for j in range(1, tree.tokens.shape[1]) if bool(tree.real[0, j])]
    size = min(count, len(nodes))
    best = max(
        sum(float(scores[0, j].exp()) for j in subset)
        for subset in itertools.combinations(nodes, size)
        if all(int(tree.parents[0, j]) in (0, *subset) for j in subset)
    )
    kept = slow_best_nodes(tree, scores, 0, count)
    assert len(kept) == size + 1
    assert sum(float(scores[0, j].exp()) for j in kept[1:]) == pytest.approx(best)
    assert paths(best_nodes(tree, scores, count), 0)[: size + 1] == [paths(tree, 0)[j] for j in kept]


@pytest.mark.parametrize("count", range(7))
def test_equal_scores_orphan_nobody(count: int) -> None:
    # a child of probability exactly 1 scores as its parent does; here every child stands as far forward as it can
    row = [SlowNode(0, None), *(SlowNode(t, p) for t, p in ((1, 0), (1, 1), (1, 2), (2, 0), (2, 4), (2, 5)))]
    tree = to_tree([row, row])
    chosen = best_nodes(tree, torch.zeros(2, 7), count)
    check(chosen)
    by_depth = [(), (1,), (2,), (1, 1), (2, 2), (1, 1, 1), (2, 2, 2)]
    assert paths(chosen, 0) == paths(chosen, 1) == by_depth[: count + 1]


def test_rows_choose_independently() -> None:
    tree = to_tree([[SlowNode(0, None), SlowNode(1, 0), SlowNode(2, 0), SlowNode(3, 1)]] * 2)
    chosen = best_nodes(tree, torch.tensor([[0.0, -1.0, -5.0, -2.0], [0.0, -1.0, -0.5, -2.0]]), 2)
    assert [paths(chosen, r) for r in range(2)] == [[(), (1,), (1, 3)], [(), (1,), (2,)]]


@EXAMPLES
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_merging_equals_a_trie(data: st.DataObject, rows: int, parts: int) -> None:
    scored = [data.draw(scored_trees(rows)) for _ in range(parts)]
    merged, scores = merge([tree for tree, _ in scored], [score for _, score in scored])
    check(merged)
    assert merged.tokens.shape == scores.shape
    assert scores.shape[1] == 1 + sum(tree.tokens.shape[1] - 1 for tree, _ in scored)
    for r in range(rows):
        trie: dict[tuple[int, ...], float] = {}
        for tree, score in scored:
            for path, value in zip(paths(tree, r), score[r].tolist(), strict=True):
                if path:
                    trie[path] = max(trie.get(path, -INF), value if value == value else -INF)
        found = [(path, value) for path, value in zip(paths(merged, r), scores[r].tolist(), strict=True) if path]
        assert list(dict(found)) == [path for path, _ in found] == list(trie), "one node a path, in order of arrival"
        assert dict(found) == trie
        assert not bool((scores[r][~merged.real[r]] > -INF).any())


def test_a_merged_tree_is_cut_to_size_with_parents() -> None:
    root = torch.tensor([9])
    draft = chain(root, torch.tensor([[1, 2, 3]]))
    sibling = chain(root, torch.tensor([[1, 2, 4]]))
    merged, scores = merge([draft, sibling], [torch.tensor([[0.0, -1, -2, -3]]), torch.tensor([[0.0, -2, -2.5, -2.6]])])
    chosen = best_nodes(merged, scores, 3)
    assert paths(chosen, 0) == [(), (1,), (1, 2), (1, 2, 4)]


def test_buckets_are_few_and_waste_little() -> None:
    widths = [bucket(nodes) for nodes in range(1, 161)]
    assert all(width >= nodes for nodes, width in enumerate(widths, 1))
    assert all(bucket(width) == width for width in widths)
    assert len(set(widths)) == 25
    assert max((width - nodes) / width for nodes, width in enumerate(widths, 1)) < 0.2
    assert widths[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10]


@EXAMPLES
@given(trees(), st.data())
def test_path_slots_line_up_the_accepted_keys(tree: Tree, data: st.DataObject) -> None:
    n, m = tree.tokens.shape
    lengths = torch.tensor([data.draw(st.integers(1, 6)) for _ in range(n)])
    ends = [data.draw(st.sampled_from([j for j in range(m) if bool(tree.real[r, j])])) for r in range(n)]
    path, counts = torch.zeros(n, tree.levels + 1, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    for r, end in enumerate(ends):
        nodes = slow_ancestors(tree)[r, end].nonzero()[:, 0]  # ancestors come first
        path[r, : len(nodes)], counts[r] = nodes, len(nodes)
    store = torch.full((n, 6 + m), -1)
    for r in range(n):
        store[r, : lengths[r]] = 1000 + torch.arange(int(lengths[r]))  # keys of earlier tokens
        store[r, lengths[r] : lengths[r] + m] = torch.arange(m)  # keys of the tree's nodes
    before = store.clone()
    sources, targets = path_slots(path, counts, lengths)
    store.scatter_(1, targets, store.gather(1, sources))
    for r in range(n):
        start, count = int(lengths[r]), int(counts[r])
        assert torch.equal(store[r, :start], before[r, :start])
        assert torch.equal(store[r, start : start + count], path[r, :count])


def test_a_chain_moves_nothing() -> None:
    sources, targets = path_slots(torch.arange(4)[None].repeat(2, 1), torch.tensor([4, 2]), torch.tensor([3, 8]))
    assert torch.equal(sources, targets)
