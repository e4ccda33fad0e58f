"""Drafts from what was said before: by the row itself, in its prompt, and by the other responses to that prompt.

Responses of a group resemble each other, and so do the repetitions within one. `TextIndex` remembers where every run of
1, 2, 4, 8 or 16 tokens came last, and before that; `SiblingProposer` looks up how each row ends, reads on from the
places it finds, and scores the tree of these continuations. No weights are involved, and the cost of a round does not
grow with the length of the texts. What a proposer may be wrong about, and why that cannot change a token: `proposers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgrpo.models.cache import Prefix
from fastgrpo.speculation.noise import arrival_times
from fastgrpo.speculation.policy import DraftShape
from fastgrpo.speculation.proposers import Noise
from fastgrpo.speculation.requests import whole_number
from fastgrpo.speculation.tree import Tree, best_scored

_DOUBLINGS = 5  # kinds of match: the shortest and four doublings, so 1 to 16 tokens by default
_RECENT = 16  # matches of one kind that are looked up, latest first
_MATCHES = (16, 32)  # least and most that are read on from, longest first: as many as there may be nodes
# A match of n tokens is taken to be followed by the right token with probability n / (n + _DOUBT); 4 fits SmolLM2's
# responses at temperature 1.
_DOUBT = 4.0
# What nobody proposes races too. The logarithm of an arrival time is minus Euler's constant on average, and that stands
# for the times of all other tokens.
_OPEN_RATE = math.exp(0.5772156649)
_WORD_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64))  # odd, bits well spread


def _stir(words: Tensor) -> Tensor:
    """A bijection of int64 words after which every bit hangs on all lower ones, and the low ones on the high."""
    for odd in _WORD_MIX:
        words = words * odd
        words = words ^ ((words >> 32) & 0xFFFFFFFF)
    return words


@dataclass
class TextEnds:
    """How n texts end, which is all that is needed to go on with them; an index writes to these tensors.

    words: int64 (n, longest match), the last tokens, stirred, zeros in front of a short text. lengths: int64 (n,),
    tokens of the whole text. groups: int64 (n,), whom it is compared with. last: int64 (n,), the log's number of the
    last token, 0 when what comes next does not belong behind it (other texts may go on from there too).
    """

    words: Tensor
    lengths: Tensor
    groups: Tensor
    last: Tensor

    @staticmethod
    def empty(n: int, longest: int, device: torch.device) -> TextEnds:
        numbers = torch.zeros((3, n), dtype=torch.long, device=device)
        return TextEnds(torch.zeros((n, longest), dtype=torch.long, device=device), *numbers)

    def rows(self, rows: slice) -> TextEnds:
        """The same tensors, some rows of them."""
        return TextEnds(self.words[rows], self.lengths[rows], self.groups[rows], self.last[rows])

    def copy(self, source: TextEnds) -> None:
        for name in ("words", "lengths", "groups", "last"):
            getattr(self, name).copy_(getattr(source, name))


class TextIndex:
    """A log of tokens, the oldest overwritten first, in which runs of `sizes` tokens are found.

    Tokens are numbered as they come, through all texts. Each knows the next one of its text, and for every size the one
    before it that followed the same run (a chain per run, entered by a hash table). So to add a token and to look one
    match up take a constant number of steps, and memory is allocated once: 176 bytes a token with five sizes. What is
    overwritten is noticed by its number. Where two runs share a place in the table, matches of either may be missed; a
    match is never made up, the hash of a run being 64 bits long.
    """

    def __init__(self, tokens: int, sizes: Sequence[int], device: torch.device):
        self.capacity = 1 << (tokens - 1).bit_length()
        self.sizes = torch.tensor(sorted(sizes, reverse=True), device=device)  # (k,), the longest first
        self._sizes = sorted(sizes, reverse=True)
        self._kinds = torch.arange(len(sizes), device=device)
        powers = [pow(_WORD_MIX[0], i, 1 << 64) - (1 << 63) for i in range(max(sizes))]  # odd
        self._powers = torch.tensor(powers, device=device)

        def table(entries: int) -> Tensor:  # zeroed memory is not touched before it is used; number 0 is nobody's
            return torch.zeros(entries + 1, dtype=torch.long, device=device)  # the last entry is written, never read

        k = len(sizes)
        self._heads = 2 * self.capacity
        self.tokens, self.follows = table(self.capacity), table(self.capacity)
        self.runs, self.earlier = table(self.capacity * k), table(self.capacity * k)  # by the token behind the run
        self.newest = table(self._heads * k)
        self.end = torch.tensor(self.capacity, device=device)  # the number of the next token

    def append(self, ends: TextEnds, tokens: Tensor, counts: Tensor) -> None:
        """Go on with n texts. tokens: int64 (n, w); counts: int64 (n,), how many of them are said."""
        n, width = tokens.shape
        step = max(self.capacity // n, 1)  # never a place twice in one go
        for first in range(0, width, step):
            part = tokens[:, first : first + step]
            self._append(ends, part, (counts - first).clamp(0, part.shape[1]))

    def _append(self, ends: TextEnds, tokens: Tensor, counts: Tensor) -> None:
        width = tokens.shape[1]
        columns = torch.arange(width, device=tokens.device)
        said = columns < counts[:, None]
        numbers = (counts.cumsum(0) - counts)[:, None] + columns + self.end
        self.end = self.end + counts.sum()
        places = torch.where(said, self._place(numbers), self.capacity)
        words = torch.cat([ends.words, _stir(tokens + 1)], 1)  # (n, longest + w)
        before = words.unfold(1, ends.words.shape[1], 1)[:, :width]  # what stood before each token
        known = ends.lengths[:, None, None] + columns[:, None] >= self.sizes
        self._enter(self._hash(before, ends.groups), numbers, said[:, :, None], known)
        self.tokens[places] = tokens
        self.follows[places] = 0
        previous = torch.cat([ends.last[:, None], numbers[:, :-1]], 1)
        linked = said & (previous > self.end - self.capacity)
        self.follows[torch.where(linked, self._place(previous), self.capacity)] = numbers
        shift = counts[:, None] + torch.arange(ends.words.shape[1], device=tokens.device)
        ends.words.copy_(words.gather(1, shift))
        ends.lengths += counts
        final = numbers.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        ends.last.copy_(torch.where(counts > 0, final, ends.last))

    def _enter(self, runs: Tensor, numbers: Tensor, said: Tensor, known: Tensor) -> None:
        """Token numbers[r, j] follows the runs with hashes runs[r, j], (n, w, k), if it was said, (n, w, 1); known: (n,
        w, k), whether its text is that long."""
        k = len(self._sizes)
        places = torch.where(said, self._place(numbers)[:, :, None] * k + self._kinds, self.capacity * k).flatten()
        heads = torch.where(said & known, self._head(runs), self._heads * k).flatten()
        self.runs[places] = torch.where(known, runs, 0).flatten()
        order = heads.argsort(stable=True)  # one run may come several times in a round: in the order of the log
        heads = heads[order]
        entering = numbers[:, :, None].expand_as(runs).flatten()[order]
        first = F.pad(heads[1:] != heads[:-1], (1, 0), value=True)
        self.earlier[places[order]] = torch.where(first, self.newest[heads], entering.roll(1))
        self.newest[torch.where(first.roll(-1), heads, self._heads * k)] = entering

    def find(self, ends: TextEnds, most: int) -> tuple[Tensor, Tensor]:
        """Where the last tokens of n texts came before in their group, `most` places each.

        Returns the numbers of the tokens behind the matches, int64 (n, most), longest match first, then the latest, 0
        for none, and the kind of each match, a place in `sizes`.
        """
        k = len(self._sizes)
        runs = self._hash(ends.words[:, None], ends.groups)[:, 0]  # (n, k)
        found = [self.newest[self._head(runs)]]
        for _ in range(_RECENT - 1):
            found.append(self.earlier[self._place(found[-1]) * k + self._kinds])
        numbers = torch.stack(found, 2)  # (n, k, recent), falling until they meet what was overwritten
        there = (numbers > self.end - self.capacity).cumprod(2).bool()
        there &= (ends.lengths[:, None] >= self.sizes)[:, :, None]
        places = self._place(numbers) * k
        matches = there & (self.runs[places + self._kinds[:, None]] == runs[:, :, None])
        # a match that is longer was found as such
        longer = self.runs[places[:, 1:] + self._kinds[:-1, None]] == runs[:, :-1, None]
        matches[:, 1:] &= ~(longer & (ends.lengths[:, None] >= self.sizes[:-1])[:, :, None])
        return self._first(matches, numbers, most)

    def _first(self, matches: Tensor, numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
        n, _, recent = matches.shape
        matches = matches.flatten(1)
        rank = matches.cumsum(1)
        rank = torch.where(matches & (rank <= most), rank - 1, most)
        kept = numbers.new_zeros((2, n, most + 1))
        kept[0].scatter_(1, rank, numbers.flatten(1))
        kept[1].scatter_(1, rank, self._kinds.repeat_interleave(recent).expand(n, -1))
        return kept[0, :, :-1], kept[1, :, :-1]

    def read(self, numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` tokens from each of `numbers` (n, m) on, int64 (n, count, m), and which of them were said."""
        tokens, said = [], []
        for _ in range(count):
            places = self._place(numbers)
            said.append(numbers > 0)
            tokens.append(self.tokens[places])
            numbers = torch.where(said[-1], self.follows[places], 0)
        return torch.stack(tokens, 1), torch.stack(said, 1)

    def _hash(self, words: Tensor, groups: Tensor) -> Tensor:
        """words: int64 (n, w, longest). The hash of the last tokens of each, one for every size: (n, w, k)."""
        spread = words * self._powers
        sums = torch.stack([spread[:, :, -size:].sum(2) for size in self._sizes], 2)
        return _stir(sums + (groups * len(self._sizes))[:, None, None] + self._kinds)

    def _place(self, numbers: Tensor) -> Tensor:
        return numbers & (self.capacity - 1)

    def _head(self, runs: Tensor) -> Tensor:
        return (runs & (self._heads - 1)) * len(self._sizes) + self._kinds


def forecast(
    tokens: Tensor, said: Tensor, kinds: Tensor, sizes: Tensor, times: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tree of what followed m matches, and how likely each node is.

    tokens: int64 (n, d, m), the d tokens behind each match, of which `said` were said, bool, falling along d. kinds:
    int64 (n, m), of each match, a place in sizes: (k,), longest first. times: float64 (n, d, m), when each token
    arrives in the target's race at its depth; None for greedy decoding. width: most children of a node.
    Node i of a level is what match i proposes there. Returns, (n, d, m) each: whether it is in the tree, the node one
    level up that is its parent, and its score, the logarithm of the probability that the path is right.

    At a node the matches that agree with the path so far vote for its children. c matches of n tokens are believed by
    n c / (n c + _DOUBT), the longest first; shorter ones share what is left. So q(token) sums up to less than 1, and
    the rest is for tokens that nobody proposed. A token of probability q that arrives at time t wins a race in
    proportion to q / t (the draft model's scores are made the same way), and that is what is summed up along a path.
    """
    depth, m = tokens.shape[1:]
    place = torch.arange(m, device=tokens.device)
    equal = tokens[:, :, :, None] == tokens[:, :, None]
    equal &= said[:, :, :, None] & said[:, :, None]
    for level in range(1, depth):
        equal[:, level] &= equal[:, level - 1]
    agree = F.pad(equal[:, :-1], (0, 0, 0, 0, 1, 0), value=True)  # the paths to the parent read the same
    same = equal.float()  # (n, d, m, m): those to the node
    kind = F.one_hot(kinds, len(sizes)).float()[:, None]  # (n, 1, m, k)
    voters = kind * said[:, :, :, None]
    rates = torch.ones_like(voters[..., 0]) if times is None else times.reciprocal().float()
    votes, raced = (agree.float() @ torch.cat([voters, voters * rates[:, :, :, None]], 3)).chunk(2, 3)  # (n, d, m, k)
    lengths = sizes + torch.arange(depth, device=tokens.device)[:, None, None]  # (d, 1, k): the path was matched too
    doubt = _DOUBT / (lengths * votes + _DOUBT)
    left = doubt.cumprod(3)
    belief = lengths * doubt / _DOUBT * F.pad(left[..., :-1], (1, 0), value=1.0)  # in one match of a kind
    law = (belief * (same @ kind)).sum(3)
    rest = left[..., -1] * (1.0 if times is None else _OPEN_RATE)
    steps = law * rates / ((belief * raced).sum(3) + rest)
    first = same.argmax(3)  # of the matches that propose the same
    alone = said & (first == place)
    better = steps[:, :, None] > steps[:, :, :, None]  # (n, d, i, j): node j than node i
    better |= (steps[:, :, None] == steps[:, :, :, None]) & (place < place[:, None])
    rank = (better & alone[:, :, None] & agree).sum(3)
    parents = F.pad(first[:, :-1], (0, 0, 1, 0))
    return alone & (rank < width), parents, steps.log().cumsum(1)


class SiblingProposer:
    """Drafts what followed the last tokens of a row where they came before: in the prompt, in its own response, in the
    other responses of its group, finished or not, and in earlier ones to that prompt where `history` has any.

    With noise, tokens are ranked by the race that the target will run, as `DraftProposer` ranks them. shortest: least
    tokens that must match; 1 by default, because a pass costs the same whether its tree is full or not, and a token
    that is right once in five times is better than none. tokens: how many of all texts are kept, rounded up to a power
    of two, the oldest dropped first; 176 bytes each. history: earlier responses, token ids, by the prompt's. A row
    without a match is given no nodes. Raises ValueError for numbers below 1.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        shortest: int = 1,
        tokens: int = 1 << 19,
        history: Mapping[tuple[int, ...], Sequence[Sequence[int]]] | None = None,
    ):
        self.sizes = [whole_number("shortest", shortest, at_least=1) << i for i in range(_DOUBLINGS)]
        self.tokens = whole_number("tokens", tokens, at_least=1)
        self.history = {} if history is None else history

    def start(self, rows: int, capacity: int) -> bool:
        self.rows, self.groups = rows, 0
        self.index: TextIndex | None = None  # made where the first prompt is
        return True

    def read_prompt(self, tokens: Sequence[int], prefix: Prefix) -> TextEnds:
        device = prefix.keys[0].device
        if self.index is None:
            self.index = TextIndex(max(self.tokens, self.rows), self.sizes, device)
            self.ends = TextEnds.empty(self.rows, self.sizes[-1], device)
        self.groups += 1
        prompt = TextEnds.empty(1, self.sizes[-1], device)
        prompt.groups.fill_(self.groups)
        self._append(prompt, tokens)
        prompt.last.zero_()  # every response goes on from here
        for response in self.history.get(tuple(tokens), ()):
            earlier = TextEnds.empty(1, self.sizes[-1], device)
            earlier.copy(prompt)
            self._append(earlier, response)
        return prompt

    def _append(self, ends: TextEnds, tokens: Sequence[int]) -> None:
        assert self.index is not None
        said = torch.tensor(tokens, dtype=torch.long, device=ends.lengths.device)[None]
        self.index.append(ends, said, torch.full_like(ends.lengths, len(tokens)))

    def admit(self, prompt: TextEnds, first_row: int, tokens: Tensor) -> None:
        assert self.index is not None
        ends = self.ends.rows(slice(first_row, first_row + len(tokens)))
        ends.copy(prompt)
        self.index.append(ends, tokens[:, None], torch.ones_like(tokens))

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        assert self.index is not None
        self.index.append(self.ends.rows(slice(len(tokens))), tokens, counts)

    def move_row(self, source: int, target: int) -> None:
        self.ends.rows(slice(target, target + 1)).copy(self.ends.rows(slice(source, source + 1)))

    def propose(self, roots: Tensor, shape: DraftShape, noise: Noise) -> Tree:
        return self.propose_scored(roots, shape, noise)[0]

    def propose_scored(self, roots: Tensor, shape: DraftShape, noise: Noise) -> tuple[Tree, Tensor]:
        assert self.index is not None
        n = len(roots)
        least, most = _MATCHES
        matches, kinds = self.index.find(self.ends.rows(slice(n)), min(max(shape.nodes, least), most))
        tokens, said = self.index.read(matches, shape.depth)
        depth, m = tokens.shape[1:]
        times = None
        if noise is not None:
            times = arrival_times(noise[:, :depth].flatten(0, 1), tokens.flatten(0, 1)).view(tokens.shape)
        real, parents, scores = forecast(tokens, said, kinds, self.index.sizes, times, shape.width)
        levels = torch.arange(depth, device=roots.device)[:, None]
        parents = torch.where(levels > 0, 1 + (levels - 1) * m + parents, 0)

        def nodes(of_matches: Tensor, of_root: int) -> Tensor:
            return F.pad(of_matches.flatten(1), (1, 0), value=of_root)

        tree = Tree(
            torch.cat([roots[:, None], tokens.flatten(1)], 1),
            nodes(parents, 0),
            nodes((levels + 1).expand_as(tokens), 0),
            nodes(real, True),
            depth,
        )
        return best_scored(tree, nodes(scores, 0), shape.nodes)
