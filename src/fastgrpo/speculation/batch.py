"""The rows that decode together, and one round of theirs: propose, verify, commit, retire, admit.

Live rows are the first n rows of the cache; a finished row is replaced by the last live one, and waiting requests enter
behind it. The prompts of a group are run once and their keys and values copied to its rows. A round without drafts
gives each live row one token; with them, as many as the target would have said itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastgrpo.models.attention import tree_look
from fastgrpo.models.cache import Prefix, RaggedCache, whole_lanes
from fastgrpo.models.target import Target
from fastgrpo.speculation.noise import row_keys
from fastgrpo.speculation.policy import DraftShape, Policy
from fastgrpo.speculation.proposers import Proposer
from fastgrpo.speculation.recorder import FeatureRecorder, Observer, columns
from fastgrpo.speculation.requests import Completion, Request, RolloutStats
from fastgrpo.speculation.sampling import SamplingParams, logprobs_of, penalise, sample
from fastgrpo.speculation.tree import Tree, bucket, path_slots
from fastgrpo.speculation.verification import Walk, walk

# Prompt tokens that one prefill pass takes. More keeps an accelerator busy; on a CPU the activations leave the cache
# (390 tokens in a pass cost 2.0 ms each, 860 cost 2.25, SmolLM2 on two AVX2 cores).
_PREFILL_TOKENS = {"cpu": 512}
_PREFILL_TOKENS_ELSEWHERE = 8192
# A walk asks for a draw at each level. Up to this many nodes one draw at all of them, visited or not, costs less.
_NODES_AT_ONCE = 16


def draft_slots(shape: DraftShape) -> int:
    """Cache slots behind the text that a draft takes: the tree's, or the draft model's own beams and a spare one."""
    return max(bucket(shape.nodes + 1), shape.depth * shape.width + 1)


@dataclass
class _Row:
    """One live sequence: its request and what it has emitted so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    stopped: bool = False

    @property
    def length(self) -> int:
        """Tokens in the cache: all but the last emitted one, which the next pass will run."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.request.max_new_tokens


@dataclass
class _Prompt:
    """A prompt that has been run, and the rows of its group that still wait for a slot."""

    requests: deque[Request]
    prefix: Prefix
    logits: Tensor  # (vocab,)
    states: list[Any]  # what each observer keeps of it


class LiveBatch:
    """The state of one `generate` call."""

    law: SamplingParams
    stops: frozenset[int]
    seed: int
    notify: Callable[[Completion], None] | None = None

    def __init__(
        self, target: Target, cache: RaggedCache, stats: RolloutStats, clock: Callable[[], float] = time.perf_counter
    ):
        self.target, self.cache, self.stats, self.clock = target, cache, stats, clock
        self.device = cache.layout.device
        self.waiting: deque[deque[Request]] = deque()  # groups whose prompt has not been run
        self.prompts: deque[_Prompt] = deque()  # run, with rows left to admit
        self.rows: list[_Row] = []  # live, in the order of the cache
        self.done: list[Completion] = []
        self.proposer: Proposer | None = None
        self.recorder: FeatureRecorder | None = None
        self.taps: tuple[int, ...] = ()  # of the target's session: what any observer wants
        self.uids = torch.zeros(cache.rows, dtype=torch.long, device=self.device)  # of the rows, by slot
        self.seen: Tensor | None = None  # (slots, vocab) bool, only for the repetition penalty

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prompts or self.rows)

    @property
    def observers(self) -> list[Observer]:
        """Who is told of every row, in a fixed order."""
        return [one for one in (self.proposer, self.recorder) if one is not None]

    def record(self, taps: tuple[int, ...]) -> None:
        """Give every completion the target's features at `taps`."""
        self.recorder = FeatureRecorder(taps, self.cache.rows, self.cache.capacity)

    def speculate(self, proposer: Proposer | None, policy: Policy, room: int) -> None:
        """Draft with `proposer` as `policy` says, if it can; room: slots behind the text of every row."""
        able = proposer is not None and proposer.start(self.cache.rows, self.cache.capacity + room)
        self.proposer, self.policy = proposer if able else None, policy

    def enqueue(self, requests: Sequence[Request]) -> None:
        """Consecutive requests with equal prompts become one group."""
        for request in requests:
            if self.waiting and self.waiting[-1][0].prompt == request.prompt:
                self.waiting[-1].append(request)
            else:
                self.waiting.append(deque([request]))

    # Rows enter

    def admit(self) -> None:
        """Fill free slots: run waiting prompts, copy their keys to new rows, sample each row's own first token."""
        while len(self.rows) < self.cache.rows and (self.prompts or self.waiting):
            free = self.cache.rows - len(self.rows)
            if not self.prompts:
                self._prefill(free)
            prompt = self.prompts[0]
            entering = [_Row(prompt.requests.popleft()) for _ in range(min(free, len(prompt.requests)))]
            if not prompt.requests:
                self.prompts.popleft()
            first = len(self.rows)
            self.cache.place(prompt.prefix, first, len(entering))
            self.rows += entering
            uids = [row.request.signed_uid for row in entering]
            self.uids[first : len(self.rows)] = torch.tensor(uids, device=self.device)
            if self.law.repetition_penalty != 1:
                self._mark_prompt(first, entering[0].request.prompt)
            index = torch.arange(first, len(self.rows), device=self.device)
            keys = self._keys(index, torch.full_like(index, len(entering[0].request.prompt)))
            drawn = self._draw(prompt.logits.expand(len(entering), -1), index, keys)
            for observer, state in zip(self.observers, prompt.states, strict=True):
                observer.admit(state, first, drawn[0].long())
            self._emit(first, drawn[:, :, None])
            self._retire()

    def _prefill(self, free: int) -> None:
        # as many waiting prompts as the free slots and one pass's budget take, one at least
        budget = _PREFILL_TOKENS.get(self.device.type, _PREFILL_TOKENS_ELSEWHERE)
        groups = [self.waiting.popleft()]
        rows, longest = len(groups[0]), len(groups[0][0].prompt)
        while self.waiting and rows < free:
            longest = max(longest, len(self.waiting[0][0].prompt))
            if longest * (len(groups) + 1) > budget:
                break
            groups.append(self.waiting.popleft())
            rows += len(groups[-1])
        started = self.clock()
        texts = [group[0].prompt for group in groups]
        logits, prefixes = self.target.prefill(texts)
        for group, prefix, row, text in zip(groups, prefixes, logits, texts, strict=True):
            states = [
                observer.read_prompt(text, replace(prefix, features=self._features_for(observer, prefix.features)))
                for observer in self.observers
            ]
            self.prompts.append(_Prompt(group, prefix, row, states))
        self.stats.prompt_tokens += sum(len(text) for text in texts)
        self.stats.prefill_s += self.clock() - started

    def _mark_prompt(self, first: int, prompt: Sequence[int]) -> None:
        if self.seen is None:
            shape = (self.cache.rows, self.target.vocab_size)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.seen[first : len(self.rows)] = False
        self.seen[first : len(self.rows), list(set(prompt))] = True

    # A round

    def round(self) -> None:
        """One target pass over the live rows, and what comes of it."""
        if not self.rows:
            return
        started = self.clock()
        lengths = torch.tensor([row.length for row in self.rows], device=self.device)
        roots = torch.tensor([row.tokens[-1] for row in self.rows], device=self.device)
        shape = self._shape()
        tree = None if shape is None else self._propose(roots, lengths, shape)
        proposed = self.clock()
        if tree is None:
            logits = self.target.decode(roots[:, None], lengths[:, None], self.cache, int(lengths.max()) + 1)
        else:
            logits = self._verify(tree, lengths)
        self.stats.live_rows.append(len(self.rows))
        self.stats.drafts.append(0 if shape is None else shape.nodes)
        passed = self.clock()
        features = self.target.features
        if tree is None:
            index = torch.arange(len(self.rows), device=self.device)
            drawn = self._draw(logits[:, 0], index, self._keys(index, lengths + 1))[:, :, None]
            kept = self._emit(0, drawn)
        else:
            drawn, path = self._walk(tree, logits, lengths)
            kept = self._emit(0, drawn, path.counts, tree.real[:, 1:].sum(1))
            sources, targets = path_slots(path.path, path.counts, lengths)
            if bool((sources != targets).any()):
                self.cache.move_slots(sources, targets)
            if features is not None:
                features = features.gather(1, path.path[:, :, None].expand(-1, -1, features.shape[2]))
        sampled = self.clock()
        for observer in self.observers:
            theirs = self._features_for(observer, features)
            observer.observe(theirs, drawn[0].long(), torch.tensor(kept, device=self.device))
        ended = self.clock()
        self.stats.passes += 1
        self.stats.draft_s += (proposed - started) + (ended - sampled)
        self.stats.decode_s += passed - proposed
        self.stats.sampling_s += sampled - passed
        self.policy.observe(shape, kept, ended - started)
        self._retire()

    def _features_for(self, observer: Observer, features: Tensor | None) -> Tensor | None:
        return None if features is None else columns(features, self.taps, observer.taps)

    def _shape(self) -> DraftShape | None:
        if self.proposer is None:
            return None
        shape = self.policy.choose(len(self.rows))
        room = self.cache.capacity - max(row.length for row in self.rows)
        return shape if shape is not None and draft_slots(shape) <= room else None

    def _propose(self, roots: Tensor, lengths: Tensor, shape: DraftShape) -> Tree:
        assert self.proposer is not None
        noise = None if self.law.greedy else self._keys_ahead(lengths, shape.depth)
        tree = self.proposer.propose(roots, shape, noise)
        return tree.padded(bucket(tree.tokens.shape[1]))

    def _verify(self, tree: Tree, lengths: Tensor) -> Tensor:
        span = whole_lanes(int(lengths.max()) + tree.tokens.shape[1])
        look = tree_look(lengths, tree.depths, tree.ancestors(), span)
        return self.target.decode(tree.tokens, lengths[:, None] + tree.depths, self.cache, span, look)

    def _walk(self, tree: Tree, logits: Tensor, lengths: Tensor) -> tuple[Tensor, Walk]:
        """What every row emits, (columns, n, levels + 1) float64 as `_draw` has them, and the way there."""
        levels: list[Tensor] = []
        rows = torch.arange(len(lengths), device=self.device)
        keys = self._keys_ahead(lengths, tree.levels + 1)
        at_once = self._draw_at_once(tree, logits, keys)

        def draw(nodes: Tensor, active: Tensor, depth: int) -> Tensor:
            if at_once is not None:
                column = at_once[:, rows, nodes]
            else:
                index = active.nonzero().squeeze(1)
                visited = logits[:, 0] if depth == 0 else logits[index, nodes[index]]
                drawn = self._draw(visited, index, keys[index, depth])
                column = drawn.new_zeros((len(drawn), len(nodes)))
                column[:, index] = drawn
            levels.append(column)
            return column[0].long()

        path = walk(tree, draw)
        drawn = torch.stack(levels, dim=2)
        width = drawn.shape[2]
        return drawn, Walk(path.emitted[:, :width], path.counts, path.path[:, :width])

    def _draw_at_once(self, tree: Tree, logits: Tensor, keys: Tensor) -> Tensor | None:
        """The draws of all nodes, (columns, n, nodes), where they are few; a penalty hangs on what came before them.

        keys: (n, levels + 1, 2), by depth.
        """
        if self.seen is not None or tree.tokens.numel() > _NODES_AT_ONCE:
            return None
        depths = tree.depths.clamp(max=tree.levels)[:, :, None]
        own = keys.gather(1, depths.expand(-1, -1, 2)).flatten(0, 1)
        return self._draw(logits.flatten(0, 1), own[:, 0], own).unflatten(1, tree.tokens.shape)

    def _keys(self, index: Tensor, positions: Tensor) -> Tensor:
        return row_keys(self.seed, self.uids[index], positions)

    def _keys_ahead(self, lengths: Tensor, count: int) -> Tensor:
        """The keys of the next `count` tokens of all rows, (n, count, 2)."""
        positions = lengths[:, None] + torch.arange(1, count + 1, device=self.device)
        uids = self.uids[: len(lengths), None].expand_as(positions)
        return row_keys(self.seed, uids.flatten(), positions.flatten()).unflatten(0, positions.shape)

    def _draw(self, logits: Tensor, index: Tensor, keys: Tensor) -> Tensor:
        """The next token of rows `index` from their logits (count, vocab): its id, its log-prob and, where that is
        another law, its log-prob under the one drawn from, (2 or 3, count) float64, which holds ids exactly."""
        drawn = logits
        if self.seen is not None:
            drawn = penalise(logits, self.seen[index], self.law.repetition_penalty)
        samples = sample(drawn, self.law, keys)
        columns = [samples.token_ids, samples.logprobs]
        if samples.sampling_logprobs is not None:
            columns.append(samples.sampling_logprobs)
        if self.seen is not None:
            # the law drawn from is the penalised one; the policy's own log-prob, which training compares, is not
            columns[1:] = [logprobs_of(logits, samples.token_ids, self.law.temperature), columns[-1]]
            self.seen[index, samples.token_ids] = True
        return torch.stack([column.double() for column in columns])

    def _emit(
        self, first: int, drawn: Tensor, counts: Tensor | None = None, drafted: Tensor | None = None
    ) -> list[int]:
        """Append to the rows from `first` on what they emitted, up to a stop or their limit.

        drawn: (columns, count, width) from `_draw`; counts: (count,), how much of the width is real, and drafted:
        (count,), how much was proposed; None for one token each that nobody proposed. Returns how many tokens each row
        kept. This is the round's one copy to the host.
        """
        columns = len(drawn)
        if counts is not None and drafted is not None:
            ends = torch.stack([counts, drafted]).double()[:, :, None].expand(-1, -1, drawn.shape[2])
            drawn = torch.cat([drawn, ends])
        if not bool(drawn.isfinite().all()):
            raise FloatingPointError(
                f"the model's logits are not finite after {self.stats.completion_tokens} tokens: its weights have "
                "diverged or the input overflowed its precision; go back to the last good checkpoint."
            )
        host = drawn.tolist()
        kept = []
        for i, row in enumerate(self.rows[first:]):
            emitted = 1 if counts is None else int(host[columns][i][0])
            before = len(row.tokens)
            for j in range(emitted):
                row.tokens.append(int(host[0][i][j]))
                row.logprobs.append(host[1][i][j])
                if columns > 2:
                    row.sampling_logprobs.append(host[2][i][j])
                row.stopped = row.tokens[-1] in self.stops
                if row.done:
                    break
            kept.append(len(row.tokens) - before)
            row.blocks.append(kept[-1])
            drafts, accepted = 0 if counts is None else int(host[columns + 1][i][0]), min(kept[-1], emitted - 1)
            row.drafted, row.accepted = row.drafted + drafts, row.accepted + accepted
            self.stats.drafted, self.stats.accepted = self.stats.drafted + drafts, self.stats.accepted + accepted
        self.stats.completion_tokens += sum(kept)
        return kept

    # Rows leave

    def _retire(self) -> None:
        for slot in reversed(range(len(self.rows))):
            row = self.rows[slot]
            if not row.done:
                continue
            features = None if self.recorder is None else self.recorder.take(slot)
            mover = self.rows.pop()
            if slot < len(self.rows):
                self.cache.move_row(len(self.rows), slot, mover.length)
                self.rows[slot] = mover
                self.uids[slot] = mover.request.signed_uid
                for observer in self.observers:
                    observer.move_row(len(self.rows), slot)
                if self.seen is not None:
                    self.seen[slot] = self.seen[len(self.rows)]
            completion = Completion(
                index=row.request.index,
                uid=row.request.uid,
                token_ids=row.tokens,
                logprobs=row.logprobs,
                sampling_logprobs=row.sampling_logprobs or None,
                finish_reason="stop" if row.stopped else "length",
                blocks=row.blocks,
                drafted=row.drafted,
                accepted=row.accepted,
                features=features,
            )
            self.done.append(completion)
            if self.notify is not None:
                self.notify(completion)
