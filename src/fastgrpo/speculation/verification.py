"""The walk through a tree of drafted tokens: which of them the target would have said itself.

At the root the target draws its own token. If that token is one of the root's children, the walk steps there and the
target draws again; else it ends. Every emitted token is the target's own draw at its own context, so the law of what is
emitted is the target's, whatever was drafted; and when the draw is a function of the noise of (row, position), so are
the tokens. There is no acceptance ratio, no residual and no draft probability.

How a token is drawn is the caller's affair, as is what ends a row; `cut` applies it to what was emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastgrpo.speculation.tree import Tree

# draw(nodes, active, depth): the target's own token at node nodes[r] of every row r, int64 (n,). nodes: int64 (n,).
# active: bool (n,), the rows that are still walking; what is returned for the others is not read. depth: the depth of
# all these nodes, so row r's token is the one at its root's position + 1 + depth.
Draw = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, eq=False)
class Walk:
    """What n rows emit in one round.

    emitted: int64 (n, levels + 1), row r's tokens are the first counts[r], the others are 0: accepted ones, then one
    that was not drafted there (the correction, or the bonus after a whole path). counts: int64 (n,), at least 1;
    counts - 1 drafted tokens were accepted. path: int64 (n, levels + 1), the node each token was drawn at, 0 first;
    entries from counts[r] on are 0.
    """

    emitted: Tensor
    counts: Tensor
    path: Tensor


def walk(tree: Tree, draw: Draw) -> Walk:
    """Walk all rows down their trees, level by level. `draw` is called once a level, while any row is walking.

    Of children with equal tokens the first is taken. A row's result depends on its own tree and draws alone.
    """
    n, m = tree.tokens.shape
    device = tree.tokens.device
    emitted = torch.zeros((n, tree.levels + 1), dtype=torch.long, device=device)
    path = torch.zeros_like(emitted)
    counts = torch.zeros(n, dtype=torch.long, device=device)
    nodes = torch.zeros_like(counts)
    active = torch.ones(n, dtype=torch.bool, device=device)
    may_be_child = tree.real & (torch.arange(m, device=device) > 0)  # the root is its own parent, but no child
    for depth in range(tree.levels + 1):
        tokens = draw(nodes, active, depth)
        emitted[:, depth] = torch.where(active, tokens, 0)
        path[:, depth] = nodes
        counts += active
        hits = may_be_child & (tree.parents == nodes[:, None]) & (tree.tokens == tokens[:, None])  # (n, m)
        active = active & hits.any(1)
        if not bool(active.any()):  # synchronises; a draw for nobody would cost more
            break
        nodes = torch.where(active, hits.to(torch.uint8).argmax(1), 0)
    return Walk(emitted, counts, path)


def cut(emitted: Tensor, counts: Tensor, stops: Tensor, room: Tensor) -> Tensor:
    """How many of the emitted tokens count: up to a row's first stop token, which it keeps, and no more than its room.

    emitted: int64 (n, width). counts: int64 (n,), from `walk`. stops: int64 (k,), k >= 0. room: int64 (n,), tokens that
    the row may still emit. Returns int64 (n,).
    """
    width = emitted.shape[1]
    places = torch.arange(width, device=emitted.device)
    first_stop = torch.where(torch.isin(emitted, stops), places, width).amin(1)
    return torch.minimum(torch.minimum(counts, first_stop + 1), room)
