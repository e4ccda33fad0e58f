"""The sampling law and one exact draw from it: temperature, top-k, top-p, min-p, log-probabilities.

`sample` is the only sampler of the project: plain decoding and verification both call it, so what a row emits is a
function of its logits and its noise keys alone. It sorts no vocabulary and evaluates little noise. Logits are cut into
the same blocks as the noise (see `noise`); the maximum of each block tells which few blocks can hold the winner, or
the tokens that truncation keeps. Those are opened, and every row checks that nothing outside could have mattered.
Rows that fail the check are done again with more blocks or with all of them, so the result is always exact.

Not here: which tokens were drafted, what a stop token is, where logits come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fastgrpo.speculation.noise import BLOCK, arrival_times_in_blocks, block_times
from fastgrpo.speculation.requests import real_number, whole_number

# Blocks opened at the first and the second try, of a race and of a truncation; the third takes whole rows. On real
# logits of a 135 M model at temperature 1, 7 to 9 % of the rows need a race's second try and less than 0.3 % the third;
# at top-p 0.95 one row in six needs a truncation's second try.
_TRIES = (16, 64)
# Tokens tied with the k-th may lie in more than k blocks: this many more are opened before a row falls back.
_SPARE_BLOCKS = 8
# A nucleus may lie in many blocks and yet have few ids. Up to this many candidates a row are sorted.
_MOST_CANDIDATES = 8192
_EASING = 16  # see _truncate_above
# Between these, float32 can divide any logits of a sound model by the temperature, and overflows nowhere.
_COLDEST, _HOTTEST = 1e-30, 1e30
# Ids worked on at once when rows fall back, so that flat laws over many rows cannot exhaust memory.
_IDS_AT_ONCE = 1 << 21


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The law that tokens are drawn from, applied in Hugging Face's order: penalty, temperature, top-k, top-p, min-p.

    temperature: divides the logits, 1e-30 to 1e30; 0 is greedy, which ignores the three truncations, as Hugging Face
    does.
    top_k: keep the k most probable tokens; 0 is off. top_p: of those, renormalised, keep the fewest most probable ones
    whose mass reaches top_p; 1 is off. min_p: of those, keep the ones at least min_p times as probable as the most
    probable; 0 is off. Tokens tied with the last one kept are kept as well (Hugging Face does so for top-k and min-p
    only), so the kept set is a function of the distribution and not of the order of a sort.
    repetition_penalty: see `penalise`; 1 is off.
    Raises ValueError for a value that is no number or outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        object.__setattr__(self, "top_k", whole_number("top_k", self.top_k))
        if not (self.temperature == 0 or _COLDEST <= self.temperature <= _HOTTEST):
            raise ValueError(
                f"temperature is {self.temperature}, but must lie in [{_COLDEST}, {_HOTTEST}], beyond which logits / "
                "temperature leave float32, or be 0: use 0 for greedy decoding."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, but must be >= 0: use 0 to switch it off.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must lie in (0, 1]: use 1 to switch it off.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, but must lie in [0, 1]: use 0 to switch it off.")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}, but must be finite and > 0: use 1 to switch it off."
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without noise."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from less than the full vocabulary."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Samples:
    """One drawn token per row.

    token_ids: int64 (rows,). logprobs: float32 (rows,), log softmax(logits / temperature) over the full vocabulary, at
    temperature 1 when greedy; not finite when the row's logits are broken (NaN, +inf, or nothing finite), whose token
    is then meaningless but inside the vocabulary.
    sampling_logprobs: float32 (rows,), under the truncated and renormalised law; None when nothing truncates.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor | None


@dataclass(frozen=True)
class _Law:
    """Rows of a distribution, summarised by block. All tensors share their first dimension."""

    scaled: torch.Tensor  # (rows, vocab) float32: logits / temperature
    maxima: torch.Tensor  # (rows, n_blocks) float32: the largest of each block
    top: torch.Tensor  # (rows,) float32: the largest of all
    mass: torch.Tensor  # (rows,) float64: sum of exp(scaled - top)
    keys: torch.Tensor  # (rows, 2) int64

    def rows(self, index: torch.Tensor) -> _Law:
        return _Law(self.scaled[index], self.maxima[index], self.top[index], self.mass[index], self.keys[index])


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Apply Hugging Face's repetition penalty: divide the positive logits of seen tokens by it, multiply the others.

    logits: (rows, vocab), any float dtype. seen: bool (rows, vocab), the tokens of the prompt and the response so far.
    Returns a new tensor of the same shape and dtype.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / temperature) of one token per row, float32 (rows,); temperature 0 counts as 1."""
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)


def sample(logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor) -> Samples:
    """Draw one token per row, exactly from the law of `params`, with the noise of `keys`.

    logits: (rows, vocab), any float dtype, already penalised where a repetition penalty is on (`penalise`).
    keys: int64 (rows, 2) from `noise.row_keys`, on the same device; unused when greedy.
    Greedy takes the largest logit, the lowest id among equals. A row's token depends on that row alone.
    Raises ValueError when the shapes do not fit. NaN logits do not raise: see `Samples.logprobs`.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or keys.shape != (logits.shape[0], 2):
        raise ValueError(
            f"logits {tuple(logits.shape)} and keys {tuple(keys.shape)} must have shapes (rows, vocab) and (rows, 2): "
            "make the keys with row_keys, one per row of logits."
        )
    scaled = logits.float()
    if params.temperature not in (0, 1):
        scaled = scaled / params.temperature
    maxima = block_maxima(scaled)
    top = maxima.amax(-1)
    law = _Law(scaled, maxima, top, _mass(scaled, top), keys)
    sampling_logprobs = None
    if params.greedy:
        token_ids = scaled.argmax(-1)  # the first of equals
    elif params.truncates:
        cutoff, kept_mass = _truncate(law, params)
        token_ids = _race(law, cutoff)
        sampling_logprobs = _logprobs(law, token_ids, kept_mass)
    else:
        token_ids = _race(law, torch.full_like(top, -torch.inf))
    return Samples(token_ids, _logprobs(law, token_ids, law.mass), sampling_logprobs)


def _logprobs(law: _Law, token_ids: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    chosen = law.scaled.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return ((chosen.double() - law.top) - mass.log()).float()


def block_maxima(scaled: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each block of BLOCK columns, (rows, n_blocks); the last block may be short."""
    whole = scaled.shape[1] // BLOCK * BLOCK
    maxima = scaled[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).amax(-1)
    if whole == scaled.shape[1]:
        return maxima
    return torch.cat([maxima, scaled[:, whole:].amax(-1, keepdim=True)], dim=1)


def _mass(scaled: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Return the sum of exp(scaled - top) of each row, float64 (rows,).

    Summed by block, then over blocks: a reduction to one number may be cut between threads when there is one row and
    not when there are many, and the result must not depend on that.
    """
    weights = (scaled - top.unsqueeze(1)).exp_()
    whole = scaled.shape[1] // BLOCK * BLOCK
    mass = weights[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(-1).sum(-1, dtype=torch.float64)
    return mass + weights[:, whole:].sum(-1, dtype=torch.float64)


def _open(law: _Law, bounds: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Open the n blocks with the largest bounds.

    bounds: (rows, n_blocks). Returns the block numbers, ascending, int64 (rows, n); the scaled logits of their ids,
    float32 (rows, n * BLOCK), -inf beyond the vocabulary; and the largest bound left closed, (rows,), -inf if none is.
    """
    n_blocks = bounds.shape[1]
    if n == n_blocks:
        blocks = torch.arange(n, device=bounds.device).expand(bounds.shape)
        closed = bounds.new_full((bounds.shape[0],), -torch.inf)
    else:
        largest, order = bounds.topk(n + 1, dim=-1)
        closed, blocks = largest[:, n], order[:, :n].sort(-1).values  # ascending: the lowest id wins among equals
    vocab = law.scaled.shape[1]
    ids = (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=bounds.device)).flatten(1)
    if vocab % BLOCK == 0:
        return blocks, law.scaled.gather(1, ids), closed
    values = law.scaled.gather(1, ids.clamp(max=vocab - 1))
    return blocks, values.masked_fill_(ids >= vocab, -torch.inf), closed


def _split(undecided: torch.Tensor, ids_per_row: int) -> Sequence[torch.Tensor]:
    """Return the numbers of the rows marked in `undecided`, in parts that fit _IDS_AT_ONCE. Synchronises."""
    return undecided.nonzero().squeeze(1).split(max(1, _IDS_AT_ONCE // ids_per_row))


def _race(law: _Law, cutoff: torch.Tensor) -> torch.Tensor:
    """Return the winner among the ids whose scaled logit is at least cutoff (rows,): int64 (rows,)."""
    n_blocks = law.maxima.shape[1]
    tries = [n for n in _TRIES if n < n_blocks] + [n_blocks]
    token_ids, decided = _race_in(law, cutoff, tries[0])
    for n in tries[1:]:
        if bool(decided.all()):
            break
        for rows in _split(~decided, n * BLOCK):
            token_ids[rows], decided[rows] = _race_in(law.rows(rows), cutoff[rows], n)
    return token_ids


def _race_in(law: _Law, cutoff: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Race in the n most promising blocks; return the winners, int64 (rows,), and which of them are beyond doubt.

    No id of a closed block can score more than the block's largest logit would at the block's first arrival.
    """
    n_blocks = law.maxima.shape[1]
    bounds = law.maxima - block_times(law.keys, n_blocks).log_()  # float64: ties are as good as impossible
    bounds = bounds.masked_fill_(law.maxima < cutoff.unsqueeze(1), -torch.inf)
    blocks, values, closed = _open(law, bounds, n)
    scores = values - arrival_times_in_blocks(law.keys, blocks).flatten(1).log_()
    best, place = scores.masked_fill_(values < cutoff.unsqueeze(1), -torch.inf).max(-1)
    block = blocks.gather(1, (place // BLOCK).unsqueeze(1)).squeeze(1)
    return block * BLOCK + place % BLOCK, (best > closed) | closed.isneginf()


def _truncate(law: _Law, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest scaled logit that is kept, float32, and the mass of the kept ids, float64: (rows,) each.

    Everything at or above the cutoff is kept, because each truncation keeps a head of the sorted law, ties whole.
    """
    n_blocks, vocab = law.maxima.shape[1], law.scaled.shape[1]
    n = min(n_blocks, max(_TRIES[0], params.top_k + _SPARE_BLOCKS if params.top_k else 0))
    cutoff, mass, decided = _truncate_in(law, params, n)
    tries: list[tuple[int, _Truncation]] = []
    if params.top_p < 1 and not 0 < params.top_k < vocab:
        tries += [(vocab, partial(_truncate_above, easing=easing)) for easing in (_EASING, 1)]
    elif n < _TRIES[1] < n_blocks:
        tries.append((_TRIES[1] * BLOCK, lambda law, params: _truncate_in(law, params, _TRIES[1])))
    for ids_per_row, truncation in [*tries, (vocab, _truncate_whole)]:
        if bool(decided.all()):
            break
        for rows in _split(~decided, ids_per_row):
            cutoff[rows], mass[rows], decided[rows] = truncation(law.rows(rows), params)
    return cutoff, mass


# Cutoff, mass and which rows are beyond doubt, as `_truncate_in` returns them.
_Truncation = Callable[[_Law, SamplingParams], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _truncate_in(law: _Law, params: SamplingParams, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_truncate` by sorting the ids of the n blocks with the largest maxima; also return which rows are beyond doubt.

    A row is if every value that shapes its law exceeds every closed one.
    """
    _, values, closed = _open(law, law.maxima, n)
    ordered = values.sort(-1, descending=True).values
    weights = (ordered.double() - law.top.unsqueeze(1)).exp_()
    cutoff = torch.full_like(law.top, -torch.inf)
    needed, mass = cutoff, law.mass
    top_k = params.top_k if params.top_k < law.scaled.shape[1] else 0
    if top_k:
        needed = cutoff = ordered[:, top_k - 1]
        mass = weights.masked_fill(ordered < cutoff.unsqueeze(1), 0.0).sum(-1)
    if params.top_p < 1:
        upto, goal = weights.cumsum(-1), params.top_p * mass
        # A token stays while the mass before it falls short of the goal.
        n_kept = ((upto - weights < goal.unsqueeze(1)) & (weights > 0)).sum(-1).clamp(min=1)
        cutoff = torch.maximum(cutoff, ordered.gather(1, n_kept.unsqueeze(1) - 1).squeeze(1))
        if not top_k:  # else the goal itself hangs on the k-th
            needed = torch.where(upto[:, -1] >= goal, cutoff, -torch.inf)
    if params.min_p > 0:
        floor = law.top + math.log(params.min_p)
        cutoff = torch.maximum(cutoff, floor)
        if not (top_k and params.top_p < 1):  # whatever lies below the floor is cut anyway
            needed = torch.maximum(needed, floor)
    mass = weights.masked_fill_(ordered < cutoff.unsqueeze(1), 0.0).sum(-1)
    return cutoff, mass, (needed > closed) | closed.isneginf()


def _truncate_above(law: _Law, params: SamplingParams, easing: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_truncate` by top-p, and min-p, by sorting the ids that may be in the nucleus, wherever they lie.

    Ids of less than (1 - top_p) / vocab of the mass have less than 1 - top_p together, so the others reach top_p. Those
    of `easing` times as much are fewer and nearly always reach it too. Where they do not, or where there are too many,
    the row is not decided.
    """
    least = (law.mass * (easing * (1 - params.top_p) / law.scaled.shape[1])).log() + law.top
    candidates = law.scaled >= (least - 1e-3).unsqueeze(1).float()  # rounding must not lose one
    counts = candidates.sum(-1)
    decided = counts <= _MOST_CANDIDATES
    rows, ids = (candidates & decided.unsqueeze(1)).nonzero(as_tuple=True)
    counts = counts * decided
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    values = torch.full_like(law.scaled[:, : max(int(counts.max()), 1)], -torch.inf)
    values[rows, place] = law.scaled[rows, ids]
    ordered = values.sort(-1, descending=True).values
    weights = (ordered.double() - law.top.unsqueeze(1)).exp_()
    upto, goal = weights.cumsum(-1), params.top_p * law.mass
    if easing > 1:
        decided &= upto[:, -1] >= goal
    n_kept = ((upto - weights < goal.unsqueeze(1)) & (weights > 0)).sum(-1).clamp(min=1)
    cutoff = ordered.gather(1, n_kept.unsqueeze(1) - 1).squeeze(1)
    if params.min_p > 0:
        cutoff = torch.maximum(cutoff, law.top + math.log(params.min_p))
    return cutoff, weights.masked_fill_(ordered < cutoff.unsqueeze(1), 0.0).sum(-1), decided


def _truncate_whole(law: _Law, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_truncate` over whole rows, however flat their laws."""
    cutoff = torch.full_like(law.top, -torch.inf)
    weights = (law.scaled.double() - law.top.unsqueeze(1)).exp_()
    if 0 < params.top_k < law.scaled.shape[1]:
        cutoff = law.scaled.topk(params.top_k, dim=-1).values[:, -1]
        weights.masked_fill_(law.scaled < cutoff.unsqueeze(1), 0.0)
    if params.top_p < 1:
        cutoff = torch.maximum(cutoff, _nucleus_edge(law.scaled, weights, params.top_p))
    if params.min_p > 0:
        cutoff = torch.maximum(cutoff, law.top + math.log(params.min_p))
    kept_mass = weights.masked_fill_(law.scaled < cutoff.unsqueeze(1), 0.0).sum(-1)
    return cutoff, kept_mass, torch.ones_like(cutoff, dtype=torch.bool)


def _nucleus_edge(values: torch.Tensor, weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the smallest value of the fewest largest ones whose weight reaches top_p of the row's; float32 (rows,).

    values: float32 (rows, vocab). weights: float64 (rows, vocab). A radix selection, exact and without a sort: the
    bits of a float, the lower 31 flipped when it is negative, order like the float when read as an integer; histograms
    of the weight over the upper, middle and lower bits narrow the range that holds the edge down to one value.
    """
    bits = values.view(torch.int32)
    descending = 0x7FFFFFFF - (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # 0 .. 2**32 - 1, 0 for the largest
    goal = top_p * weights.sum(-1)
    edge = torch.zeros_like(goal, dtype=torch.int64)
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        prefix = descending >> shift
        inside = weights.masked_fill(prefix >> width != edge.unsqueeze(1), 0.0)
        histogram = weights.new_zeros(len(weights), 1 << width)
        histogram.scatter_add_(1, prefix & ((1 << width) - 1), inside)
        before = histogram.cumsum(-1) - histogram
        # The edge lies in the last occupied bin before which the weight falls short of the goal.
        candidates = (before < goal.unsqueeze(1)) & (histogram > 0)
        chosen = (candidates * torch.arange(1 << width, device=values.device)).amax(-1)
        goal = goal - before.gather(1, chosen.unsqueeze(1)).squeeze(1)
        edge = (edge << width) | chosen
    order = (0x7FFFFFFF - edge).int()
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32)
