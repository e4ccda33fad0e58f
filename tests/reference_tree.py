"""Slow, obvious twins of fastgrpo.speculation.tree and .verification for one row, and random trees for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from fastgrpo.speculation.tree import Tree

VOCAB = 4  # of the random trees

Path = tuple[int, ...]  # the tokens below the root that lead to a node; () is the root


@dataclass(frozen=True)
class SlowNode:
    """A node of one row: its parent's place in the list, or None for the root."""

    token: int
    parent: int | None


def to_tree(rows: Sequence[Sequence[SlowNode]], columns: int | None = None) -> Tree:
    """The tensors of these rows, whose nodes are lists with the root in front; padding at the end."""
    columns = columns or max(len(row) for row in rows)
    tokens, parents, depths, real = ([[] for _ in rows] for _ in range(4))
    for r, row in enumerate(rows):
        for node in row:
            tokens[r].append(node.token)
            parents[r].append(node.parent or 0)
            depths[r].append(0 if node.parent is None else depths[r][node.parent] + 1)
            real[r].append(True)
        extra = columns - len(row)
        for column, filler in ((tokens, 0), (parents, 0), (depths, 1), (real, False)):
            column[r].extend([filler] * extra)
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), torch.tensor(real))


def check(tree: Tree) -> None:
    """What every tree promises."""
    places = torch.arange(tree.tokens.shape[1])
    assert bool(tree.real[:, 0].all())
    assert bool((tree.parents[:, 0] == 0).all())
    assert bool((tree.parents[:, 1:] < places[1:]).all())
    assert bool((tree.depths[:, 0] == 0).all())
    assert bool((tree.depths[:, 1:] == tree.depths.gather(1, tree.parents)[:, 1:] + 1).all())
    assert bool(tree.real.gather(1, tree.parents)[tree.real].all())
    padding = ~tree.real
    assert not bool((tree.parents[padding] != 0).any() or (tree.depths[padding] != 1).any())
    assert not bool((tree.tokens[padding] != 0).any())
    assert int((tree.depths * tree.real).max()) <= tree.levels <= tree.tokens.shape[1] - 1


def paths(tree: Tree, row: int) -> list[Path | None]:
    """The tokens that lead to each node of a row, None for padding."""
    found: list[Path | None] = [()]
    for j in range(1, tree.tokens.shape[1]):
        above = found[int(tree.parents[row, j])]
        assert above is not None or not bool(tree.real[row, j])
        found.append((*above, int(tree.tokens[row, j])) if bool(tree.real[row, j]) and above is not None else None)
    return found


def slow_ancestors(tree: Tree) -> torch.Tensor:
    n, m = tree.tokens.shape
    seen = torch.zeros(n, m, m, dtype=torch.bool)
    for r in range(n):
        for i in range(m):
            j = i
            seen[r, i, j] = True
            while j:
                j = int(tree.parents[r, j])
                seen[r, i, j] = True
    return seen


def slow_best_nodes(tree: Tree, scores: torch.Tensor, row: int, count: int) -> list[int]:
    """The nodes that best_nodes keeps of a row, in its order: numbers of `tree`, root first."""
    worth = {0: float("inf")}
    for j in range(1, tree.tokens.shape[1]):
        score = float(scores[row, j])
        if bool(tree.real[row, j]) and score == score and int(tree.parents[row, j]) in worth and score > -float("inf"):
            worth[j] = min(score, worth[int(tree.parents[row, j])])
    ranked = sorted(worth, key=lambda j: (-worth[j], int(tree.depths[row, j]), j))
    return sorted(ranked[: count + 1], key=lambda j: (int(tree.depths[row, j]), j))


def slow_walk(tree: Tree, row: int, token_after: Callable[[Path], int]) -> tuple[list[int], list[int]]:
    """Tokens that a row emits and the nodes they were drawn at, when the target says token_after(path) at a node."""
    node, path, emitted, visited = 0, (), [], []
    while True:
        token = token_after(path)
        emitted.append(token)
        visited.append(node)
        children = [
            j
            for j in range(1, tree.tokens.shape[1])
            if bool(tree.real[row, j]) and int(tree.parents[row, j]) == node and int(tree.tokens[row, j]) == token
        ]
        if not children:
            return emitted, visited
        node, path = children[0], (*path, token)


@st.composite
def rows_of_nodes(draw: st.DrawFn, most: int = 9) -> list[SlowNode]:
    """A random tree of up to `most` nodes over VOCAB tokens; siblings may be equal, as a careless proposer's are."""
    row = [SlowNode(draw(st.integers(0, VOCAB - 1)), None)]
    for j in range(1, draw(st.integers(1, most))):
        row.append(SlowNode(draw(st.integers(0, VOCAB - 1)), draw(st.integers(0, j - 1))))
    return row


@st.composite
def trees(draw: st.DrawFn, rows: int | None = None, most: int = 9) -> Tree:
    """Random trees for `rows` rows (default: 1 to 4), with some columns of padding."""
    n = rows or draw(st.integers(1, 4))
    lists = [draw(rows_of_nodes(most)) for _ in range(n)]
    return to_tree(lists, max(len(row) for row in lists) + draw(st.integers(0, 3)))
