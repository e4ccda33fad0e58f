"""Where drafted tokens come from, behind one protocol: the draft model, with noise coupled to the target's.

A proposer sees what was committed and answers with one token tree a row. It cannot change what is emitted (the target
draws its own tokens, see `verification`), so nothing here needs to be right, only likely. It keeps its own state row by
row, in the order of the target's cache, and moves it when the batch moves rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fastgrpo.models.attention import as_bias, causal_attention, grouped_attention, visible
from fastgrpo.models.cache import FreshKeys, Prefix, RaggedCache, whole_lanes
from fastgrpo.models.draft import DraftModel
from fastgrpo.speculation.coupling import DraftRace
from fastgrpo.speculation.policy import DraftShape
from fastgrpo.speculation.tree import Tree, best_scored, grow

logger = logging.getLogger(__name__)

# The keys of the tokens 1 to `depth` positions behind each row's root, (n, depth, 2) int64; None for greedy decoding.
Noise = Tensor | None


@dataclass(frozen=True)
class PromptState:
    """What a proposer keeps of one prompt, for all rows of its group."""

    prefix: Prefix | None  # of the draft's cache: one input less than the prompt has tokens; None when that is none
    last: Tensor  # (f,), the target's features of the prompt's last token
    length: int


class Proposer(Protocol):
    """What the engine needs of a source of drafts."""

    taps: tuple[int, ...]  # hidden_states of the target that it learns from; () for none

    def start(self, rows: int, capacity: int) -> bool:
        """Forget everything; at most `rows` rows of at most `capacity` tokens will come. False: it cannot draft."""

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> Any:
        """Read a prompt once, for the whole group; `prefix` is the target's, with features. What `admit` needs."""

    def admit(self, prompt: Any, first_row: int, tokens: Tensor) -> None:
        """Rows of this prompt enter from `first_row` on; tokens: (count,) int64, the first one that each emitted."""

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        """A round is over. features: (n, w, f) of the w positions from each row's root on, None without taps; tokens:
        (n, w), the one behind each of them; counts: (n,), how many of them were committed."""

    def propose(self, roots: Tensor, shape: DraftShape, noise: Noise) -> Tree:
        """Draft for the first n rows; roots: (n,) int64, the last token that each emitted."""

    def move_row(self, source: int, target: int) -> None:
        """The row in slot `source` is in slot `target` from now on."""


class ScoringProposer(Proposer, Protocol):
    """A proposer that says how sure it is, so that its trees can be merged with others' (see `mixed`)."""

    def propose_scored(self, roots: Tensor, shape: DraftShape, noise: Noise) -> tuple[Tree, Tensor]:
        """What `propose` answers, 1 + shape.nodes columns, and its scores, float (n, 1 + shape.nodes): of each node the
        logarithm of the estimated probability that the row says the whole path to it, 0 for the root and -inf for
        padding. With noise, given the noise."""


class DraftProposer:
    """Drafts by an EAGLE-3 draft model.

    Features that no draft has seen wait in a buffer, so a pause of speculation costs nothing: the next draft catches
    up with one batched pass. With noise, the draft proposes the tokens that would win the target's own race if the
    draft's law were the target's. temperature: divides the draft's logits.
    """

    def __init__(self, draft: DraftModel, temperature: float = 1.0):
        self.draft, self.temperature = draft, temperature
        self.taps = tuple(draft.config.feature_layers)

    def start(self, rows: int, capacity: int) -> bool:
        if not all(bool(weights.isfinite().all()) for weights in self.draft.parameters()):
            logger.warning("The draft's weights are not finite, so this rollout is decoded without it.")
            return False
        layout = self.draft.layout
        # behind the text: beams of a draft, and a last slot that padding is written to and nobody looks at
        self.cache = RaggedCache(layout, rows, capacity)
        self.race = DraftRace(self.draft.ids)
        self.fed = torch.zeros(rows, dtype=torch.long, device=layout.device)  # inputs in the draft's cache
        self.waiting = torch.zeros_like(self.fed)  # inputs not yet there
        self.features: Tensor | None = None  # (rows, buffer, f)
        self.tokens = torch.zeros((rows, 0), dtype=torch.long, device=layout.device)
        return True

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> PromptState:
        assert prefix.features is not None
        length, features = len(tokens), prefix.features
        if length == 1:
            return PromptState(None, features[-1], length)
        store = FreshKeys(1)
        positions = torch.arange(length - 1, device=features.device)[None]
        follows = torch.tensor([tokens[1:]], device=features.device)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return causal_attention(query, *store.append(0, keys, values), None, self.draft.scale)

        self.draft.layer(follows, self.draft.fuse(features[None, :-1]), positions, attend)
        return PromptState(store.prefix(0, 0, length - 1), features[-1], length)

    def admit(self, prompt: PromptState, first_row: int, tokens: Tensor) -> None:
        rows = slice(first_row, first_row + len(tokens))
        if prompt.prefix is not None:
            self.cache.place(prompt.prefix, first_row, len(tokens))
        self.fed[rows], self.waiting[rows] = prompt.length - 1, 1
        self._make_room(1, prompt.last)
        assert self.features is not None
        self.features[rows, 0], self.tokens[rows, 0] = prompt.last, tokens

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        assert features is not None
        n, width = tokens.shape
        self._make_room(int(self.waiting[:n].max()) + width, features)
        assert self.features is not None
        places = self.waiting[:n, None] + torch.arange(width, device=tokens.device)
        self.features[:n].scatter_(1, places[:, :, None].expand_as(features), features)
        self.tokens[:n].scatter_(1, places, tokens)
        self.waiting[:n] += counts

    def _make_room(self, wanted: int, like: Tensor) -> None:
        rows, have = self.tokens.shape
        if self.features is None:
            self.features = like.new_zeros((rows, have, like.shape[-1]))
        if wanted > have:
            more = max(wanted, 2 * have, 16) - have
            self.features = torch.cat([self.features, self.features.new_zeros((rows, more, like.shape[-1]))], 1)
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros((rows, more))], 1)

    def move_row(self, source: int, target: int) -> None:
        self.cache.move_row(source, target, int(self.fed[source]))
        for state in (self.fed, self.waiting, self.tokens, self.features):
            assert state is not None
            state[target] = state[source]

    def propose(self, roots: Tensor, shape: DraftShape, noise: Noise) -> Tree:
        return self.propose_scored(roots, shape, noise)[0]

    def propose_scored(self, roots: Tensor, shape: DraftShape, noise: Noise) -> tuple[Tree, Tensor]:
        n = len(roots)
        hidden = self._catch_up(n)  # (n, 1, h), behind the root
        none = torch.zeros((n, 1), dtype=torch.long, device=roots.device)
        tree = Tree(roots[:, None], none, none, torch.ones_like(none, dtype=torch.bool), 0)
        scores = torch.zeros((n, 1), dtype=torch.float32, device=roots.device)
        # the nodes whose children come next, which of the last inputs each hangs on, and what those inputs saw
        beams, parent_of, columns = none, none, torch.zeros((n, 1, 0), dtype=torch.bool, device=roots.device)
        for depth in range(1, shape.depth + 1):
            if depth > 1:
                hidden, columns = self._run_beams(tree, beams, hidden, parent_of, columns, depth)
            tokens, steps = self._children(hidden, shape.width, None if noise is None else noise[:, depth - 1])
            before = tree.tokens.shape[1]
            tree, scores = grow(tree, scores, beams, tokens, steps)
            best = scores[:, before:].topk(min(shape.width, scores.shape[1] - before), dim=1).indices.sort(1).values
            beams, parent_of = best + before, best // tokens.shape[2]
        return best_scored(tree, scores, shape.nodes)

    def _catch_up(self, n: int) -> Tensor:
        """Feed what waits; the hidden state behind each row's last input, (n, 1, h)."""
        assert self.features is not None
        waiting, fed = self.waiting[:n], self.fed[:n]
        width = int(waiting.max())
        steps = torch.arange(width, device=fed.device)
        positions = fed[:, None] + steps
        slots = torch.where(steps < waiting[:, None], positions, self.cache.capacity - 1)
        span = whole_lanes(int((fed + waiting).max()))
        self.cache.open(slots, span)
        allowed = visible(positions, torch.arange(span, device=fed.device), None)
        hidden = self._layer(self.tokens[:n, :width], self.draft.fuse(self.features[:n, :width]), positions, allowed)
        fed += waiting
        last = (waiting - 1)[:, None, None].expand(n, 1, hidden.shape[2])
        waiting.zero_()
        return hidden.gather(1, last)

    def _run_beams(
        self, tree: Tree, beams: Tensor, hidden: Tensor, parent_of: Tensor, columns: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Run the beams of one level, (n, b) nodes. hidden: (n, b', h) of the level before, of which beam i hangs on
        number parent_of[:, i]; columns: bool (n, b', c), which drafted inputs those saw. Returns both for this level.
        """
        n, b = beams.shape
        fed = self.fed[:n]
        index = parent_of[:, :, None]
        own = torch.eye(b, dtype=torch.bool, device=beams.device).expand(n, b, b)
        above = columns.gather(1, index.expand(n, b, columns.shape[2]))
        offset = columns.shape[2]
        columns = torch.cat([above, own], dim=2)  # (n, b, offset + b)
        slots = fed[:, None] + offset + torch.arange(b, device=beams.device)
        span = whole_lanes(int(fed.max()) + offset + b)
        node = torch.arange(span, device=beams.device) - fed[:, None]  # which drafted input a slot holds
        inside = node.clamp(0, offset + b - 1)
        seen = columns.gather(2, inside[:, None].expand(n, b, span)) & ((node >= 0) & (node < offset + b))[:, None]
        self.cache.open(slots, span)
        inputs = hidden.gather(1, index.expand(n, b, hidden.shape[2]))
        positions = (fed + depth - 2)[:, None].expand(n, b)
        tokens = tree.tokens.gather(1, beams)
        return self._layer(tokens, inputs, positions, seen | (node < 0)[:, None]), columns

    def _layer(self, tokens: Tensor, hidden: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        config = self.draft.config
        groups = config.num_attention_heads // config.num_key_value_heads
        bias = as_bias(allowed, groups, config.num_key_value_heads, hidden.dtype)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return grouped_attention(query, *self.cache.append(0, keys, values), bias, self.draft.scale)

        return self.draft.layer(tokens, hidden, positions, attend)

    def _children(self, hidden: Tensor, width: int, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """The best children of each beam, target ids (n, b, width), and the log-score of each."""
        logits = self.draft.logits(hidden).float()  # (n, b, draft vocab)
        if self.temperature != 1:
            logits = logits / self.temperature
        return self.race.best(logits, keys, width)
