"""Token trees as tensors: one tree a row, all rows at once, nothing on the way back to the host.

Node 0 is the root, the last token that a row emitted and that its cache does not hold yet. A node comes after its
parent, so a tree is read from left to right. Rows have as many columns as the widest needs; what is left over is
padding, which looks at the root only, takes part in the pass and is never walked to.

Here trees are made, merged, chosen and turned into masks and slots. Who proposes tokens, how they are scored and which
of them the target accepts is not: see `proposers` and `verification`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_PAD_DEPTH = 1  # padding hangs on the root


@dataclass(frozen=True, eq=False)
class Tree:
    """Trees of n rows with m nodes each, node 0 the root.

    tokens: int64 (n, m). parents: int64 (n, m), parents[:, 0] = 0 and parents[:, j] < j. depths: int64 (n, m), 0 for
    the root. real: bool (n, m), the root and every node that may be walked to; a real node's parent is real. The other
    nodes are padding: token 0, parent 0, depth 1. levels: no real node lies deeper, by default all that m nodes allow;
    who knows better saves work. Raises ValueError when the shapes or dtypes do not fit.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    real: Tensor
    levels: int = -1

    def __post_init__(self) -> None:
        shapes = [tuple(part.shape) for part in (self.tokens, self.parents, self.depths, self.real)]
        dtypes = [part.dtype for part in (self.tokens, self.parents, self.depths, self.real)]
        if len(set(shapes)) > 1 or len(shapes[0]) != 2 or shapes[0][1] == 0:
            raise ValueError(
                f"tokens, parents, depths and real have shapes {shapes}: give all four (rows, nodes >= 1)."
            )
        if dtypes != [torch.int64] * 3 + [torch.bool]:
            raise ValueError(
                f"tokens, parents, depths and real have dtypes {dtypes}: convert the first three with .long() and the "
                "last with .bool()."
            )
        most = shapes[0][1] - 1
        object.__setattr__(self, "levels", most if self.levels < 0 else min(self.levels, most))

    def ancestors(self) -> Tensor:
        """bool (n, m, m): [:, i, j] says whether node j is node i or one of its ancestors, so whether i may see j."""
        n, m = self.tokens.shape
        seen = torch.eye(m, dtype=torch.bool, device=self.tokens.device).expand(n, m, m)
        for jump in self._jumps():
            seen = seen | seen.gather(1, jump[:, :, None].expand(n, m, m))
        return seen

    def padded(self, nodes: int) -> Tree:
        """The same trees with `nodes` columns, at least as many as now."""
        extra = nodes - self.tokens.shape[1]
        if extra < 0:
            raise ValueError(
                f"nodes is {nodes}, but the trees have {self.tokens.shape[1]} already: choose some with best_nodes."
            )
        if extra == 0:
            return self
        return Tree(
            F.pad(self.tokens, (0, extra)),
            F.pad(self.parents, (0, extra)),
            F.pad(self.depths, (0, extra), value=_PAD_DEPTH),
            F.pad(self.real, (0, extra)),
            self.levels,
        )

    def _jumps(self) -> Iterator[Tensor]:
        """The ancestor of every node 1, 2, 4, ... generations up, the root its own, until all levels are covered.

        What is gathered over these in turn, each time with what was gathered before, has been gathered along whole
        paths: the number of passes is the logarithm of the depth.
        """
        jump = self.parents
        for step in range(self.levels.bit_length()):
            if step:
                jump = jump.gather(1, jump)
            yield jump


def _with_clean_padding(tokens: Tensor, parents: Tensor, depths: Tensor, real: Tensor, levels: int) -> Tree:
    return Tree(
        tokens.masked_fill(~real, 0),
        parents.masked_fill(~real, 0),
        depths.masked_fill(~real, _PAD_DEPTH),
        real,
        levels,
    )


def chain(root: Tensor, tokens: Tensor, real: Tensor | None = None) -> Tree:
    """One path a row: each token the child of the one before it.

    root: int64 (n,). tokens: int64 (n, depth), depth >= 0. real: bool (n, depth), where a row's path is that long
    (default: everywhere); nothing behind a gap counts. Returns trees of 1 + depth nodes.
    """
    n, depth = tokens.shape
    if real is None:
        real = torch.ones_like(tokens, dtype=torch.bool)
    real = F.pad(real.cumprod(1).bool(), (1, 0), value=True)
    depths = torch.arange(depth + 1, device=tokens.device).expand(n, depth + 1)
    return _with_clean_padding(torch.cat([root[:, None], tokens], 1), (depths - 1).clamp(min=0), depths, real, depth)


def grow(tree: Tree, scores: Tensor, parents: Tensor, tokens: Tensor, steps: Tensor) -> tuple[Tree, Tensor]:
    """Hang k children on each of b nodes a row, behind the nodes there are, parent by parent.

    scores: float (n, m), the sum of the log-scores from the root to each node (0 for the root). parents: int64 (n, b).
    tokens: int64 (n, b, k), the children of one parent distinct. steps: float (n, b, k), the log-score of each child
    after its parent. Returns trees of m + b * k nodes and their scores. Children of padding are padding.
    """
    above = parents[:, :, None].expand_as(tokens).flatten(1)  # (n, b * k)
    return (
        _with_clean_padding(
            torch.cat([tree.tokens, tokens.flatten(1)], 1),
            torch.cat([tree.parents, above], 1),
            torch.cat([tree.depths, tree.depths.gather(1, above) + 1], 1),
            torch.cat([tree.real, tree.real.gather(1, above)], 1),
            tree.levels + 1,
        ),
        torch.cat([scores, scores.gather(1, above) + steps.flatten(1)], 1),
    )


def best_nodes(tree: Tree, scores: Tensor, count: int) -> Tree:
    """Keep the root and the `count` best nodes of every row, the parent of every kept node among them.

    scores: float (n, m), higher is better, the root's is not read. A node counts for no more than any node on the way
    to it; of equals the shallower one is better, then the one with the smaller index, so no node is kept without its
    parent whatever the scores are. Nodes scored -inf or NaN, and all below them, are left out.
    Returns trees of 1 + count nodes, by depth, then in the order they had; padding is at the end.
    """
    return best_scored(tree, scores, count)[0]


def best_scored(tree: Tree, scores: Tensor, count: int) -> tuple[Tree, Tensor]:
    """`best_nodes`, and what each of them counts for, (n, 1 + count): 0 for the root, -inf for padding."""
    m = tree.tokens.shape[1]
    worth = scores.masked_fill(~tree.real | scores.isnan(), -torch.inf)
    worth[:, 0] = torch.inf
    for jump in tree._jumps():
        worth = torch.minimum(worth, worth.gather(1, jump))
    by_depth = tree.depths.sort(dim=1, stable=True).indices
    by_worth = worth.gather(1, by_depth).sort(dim=1, descending=True, stable=True).indices
    kept = by_depth.gather(1, by_worth)[:, : count + 1]
    real = ~worth.gather(1, kept).isneginf()
    order = (tree.depths.gather(1, kept).masked_fill(~real, m) * m + kept).argsort(1)
    kept, real = kept.gather(1, order), real.gather(1, order)
    numbers = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    place = torch.zeros_like(tree.parents).scatter(1, kept, numbers)  # where a kept node stands now
    chosen = _with_clean_padding(
        tree.tokens.gather(1, kept),
        place.gather(1, tree.parents.gather(1, kept)),
        tree.depths.gather(1, kept),
        real,
        tree.levels,
    )
    worth[:, 0] = 0
    marks = F.pad(worth.gather(1, kept), (0, count + 1 - kept.shape[1]), value=-torch.inf)
    return chosen.padded(count + 1), marks


def merge(trees: Sequence[Tree], scores: Sequence[Tensor]) -> tuple[Tree, Tensor]:
    """Lay trees with the same roots over each other: a token under the same path is one node, with its best score.

    scores: float (n, m_i) for each of the trees, on one scale. Returns trees of 1 + the sum of all (m_i - 1) nodes, the
    first one's nodes in front, and their scores; a node that was there before becomes padding with score -inf, so cut
    the result to size with `best_nodes`.
    """
    whole = _side_by_side(trees)
    # NaN would win every maximum
    marks = torch.cat([part[:, min(i, 1) :] for i, part in enumerate(scores)], 1).nan_to_num(
        nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
    )
    n, m = whole.tokens.shape
    # same[:, i, j]: the paths to nodes i and j read the same
    same = (whole.tokens[:, :, None] == whole.tokens[:, None]) & (whole.depths[:, :, None] == whole.depths[:, None])
    same &= whole.real[:, :, None] & whole.real[:, None]
    for jump in whole._jumps():
        above = same.gather(1, jump[:, :, None].expand(n, m, m)).gather(2, jump[:, None].expand(n, m, m))
        same = same & above
    first = same.to(torch.uint8).argmax(2)  # the first of equals; 0 for padding
    real = whole.real & (first == torch.arange(m, device=first.device))
    best = marks[:, None].expand(n, m, m).masked_fill(~same, -torch.inf).amax(2)
    parents = first.gather(1, whole.parents)
    merged = _with_clean_padding(whole.tokens, parents, whole.depths, real, whole.levels)
    return merged, best.masked_fill(~real, -torch.inf)


def _side_by_side(trees: Sequence[Tree]) -> Tree:
    """One tree a row with the nodes of all, the roots being one node, and nothing deduplicated."""
    first, *others = trees
    tokens, parents, depths, real = [first.tokens], [first.parents], [first.depths], [first.real]
    offset = first.tokens.shape[1] - 1
    for tree in others:
        tokens.append(tree.tokens[:, 1:])
        parents.append(torch.where(tree.parents == 0, 0, tree.parents + offset)[:, 1:])
        depths.append(tree.depths[:, 1:])
        real.append(tree.real[:, 1:])
        offset += tree.tokens.shape[1] - 1
    levels = max(tree.levels for tree in trees)
    return Tree(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(real, 1), levels)


def bucket(nodes: int) -> int:
    """The smallest of a few widths that hold `nodes` nodes, the root included: 1 to 8, then four sizes an octave.

    So passes have few shapes (25 up to 160 nodes) and no more than a fifth of one is padding.
    """
    step = 1 << max(nodes.bit_length() - 3, 0)
    return -(-nodes // step) * step


def path_slots(path: Tensor, counts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Which cache slots to copy where, so that the keys of an accepted path lie behind each other.

    path: int64 (n, depth + 1), the nodes walked through, root first. counts: int64 (n,), how many of them. lengths:
    int64 (n,), tokens in the cache before the pass; node j of a row was written to slot lengths + j. Returns sources
    and targets, int64 (n, depth) each: read all sources, then write all targets. Unused entries copy a slot to itself,
    and so do all entries of a chain. A row is counts tokens longer afterwards.
    """
    steps = torch.arange(1, path.shape[1], device=path.device)
    targets = lengths[:, None] + steps
    return torch.where(steps < counts[:, None], lengths[:, None] + path[:, 1:], targets), targets
