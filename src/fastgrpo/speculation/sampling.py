"""The sampling law and one exact draw from it: temperature, top-k, top-p, min-p, log-probabilities.

`sample` is the only sampler of the project: plain decoding and verification both call it, so what a row emits is a
function of its logits and its noise keys alone. It never sorts a vocabulary in the usual case. Logits are cut into the
same blocks as the noise (see `noise`); the maximum of each block tells which few blocks can hold the winner, or the
tokens that truncation keeps. Those are opened, and every row checks that nothing outside could have mattered. Rows
that fail the check try again with more blocks, at last with all of them, so the result is always exact.

Not here: which tokens were drafted, what a stop token is, where logits come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastgrpo.speculation.noise import BLOCK, arrival_times_in_blocks, block_times

# Blocks opened at the first and the second try; the third opens all.
_TRIES = (16, 128)
# Ids whose noise is evaluated at once when rows fall back, so that a flat law over many rows cannot exhaust memory.
_IDS_AT_ONCE = 1 << 21


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The law that tokens are drawn from, applied in Hugging Face's order: penalty, temperature, top-k, top-p, min-p.

    temperature: divides the logits; 0 is greedy, which ignores the three truncations, as Hugging Face does.
    top_k: keep the k most probable tokens; 0 is off. top_p: of those, renormalised, keep the fewest most probable ones
    whose mass reaches top_p; 1 is off. min_p: of those, keep the ones at least min_p times as probable as the most
    probable; 0 is off. Tokens tied with the last one kept are kept as well (Hugging Face does so for top-k and min-p
    only), so the kept set is a function of the distribution and not of the order of a sort.
    repetition_penalty: see `penalise`; 1 is off.
    Raises ValueError for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature is {self.temperature}, but must be finite and >= 0: use 0 for greedy decoding."
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}, but must be an integer >= 0: use 0 to switch it off.")
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


# A try: (law, blocks to open) -> token ids (int64), kept mass (float64), whether decided (bool); (rows,) each.
_Try = Callable[[_Law, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Apply Hugging Face's repetition penalty: divide the positive logits of seen tokens by it, multiply the others.

    logits: (rows, vocab), any float dtype. seen: bool (rows, vocab), the tokens of the prompt and the response so far.
    Returns a new tensor of the same shape and dtype.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


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
    maxima = _block_maxima(scaled)
    top = maxima.amax(-1)
    law = _Law(scaled, maxima, top, _mass(scaled, top), keys)
    if params.greedy:
        token_ids, kept_mass = scaled.argmax(-1), law.mass  # argmax takes the first of equals
    elif params.truncates:
        token_ids, kept_mass = _decide(law, lambda rows, n: _try_truncated(rows, n, params), params.top_k)
    else:
        token_ids, kept_mass = _decide(law, _try_untruncated, 0)
    return Samples(
        token_ids=token_ids,
        logprobs=_logprobs(law, token_ids, law.mass),
        sampling_logprobs=_logprobs(law, token_ids, kept_mass) if params.truncates else None,
    )


def _logprobs(law: _Law, token_ids: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    chosen = law.scaled.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return ((chosen.double() - law.top) - mass.log()).float()


def _block_maxima(scaled: torch.Tensor) -> torch.Tensor:
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


def _decide(law: _Law, attempt: _Try, at_least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attempt` with more and more blocks until every row is decided; return token ids and kept mass, (rows,) each.

    at_least: the number of ids that the first try must open (top-k).
    """
    n_blocks = law.maxima.shape[1]
    tries = [n for n in _TRIES if at_least <= n * BLOCK and n < n_blocks] + [n_blocks]
    token_ids, kept_mass, decided = attempt(law, tries[0])
    for n in tries[1:]:
        if bool(decided.all()):  # the one synchronisation of a call in the usual case
            break
        for index in (~decided).nonzero().squeeze(1).split(max(1, _IDS_AT_ONCE // (n * BLOCK))):
            token_ids[index], kept_mass[index], decided[index] = attempt(law.rows(index), n)
    return token_ids, kept_mass


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


def _finish_first(blocks: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the id with the largest score, int64 (rows,), and that score.

    blocks: (rows, n). scores: (rows, n * BLOCK), those of the blocks' ids.
    """
    best, place = scores.max(-1)
    block = blocks.gather(1, (place // BLOCK).unsqueeze(1)).squeeze(1)
    return block * BLOCK + place % BLOCK, best


def _try_untruncated(law: _Law, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Race all ids. No id of a closed block can score more than the block's largest logit at its first arrival."""
    bounds = law.maxima - block_times(law.keys, law.maxima.shape[1]).log_()  # float64
    blocks, values, closed = _open(law, bounds, n)
    scores = values - arrival_times_in_blocks(law.keys, blocks).flatten(1).log_()
    token_ids, best = _finish_first(blocks, scores)
    return token_ids, law.mass.clone(), (best > closed) | closed.isneginf()


def _try_truncated(law: _Law, n: int, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Race the kept ids. A row is decided if every value that shapes its law exceeds every closed one."""
    blocks, values, closed = _open(law, law.maxima, n)
    cutoff, needed = _cutoff(law, values, params)
    kept = values >= cutoff.unsqueeze(1)
    scores = values - arrival_times_in_blocks(law.keys, blocks).flatten(1).log_()
    token_ids, _ = _finish_first(blocks, scores.masked_fill_(~kept, -torch.inf))
    weights = (values.double() - law.top.unsqueeze(1)).exp_()
    kept_mass = weights.masked_fill_(~kept, 0.0).sum(-1)
    return token_ids, kept_mass, (needed > closed) | closed.isneginf()


def _cutoff(law: _Law, values: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest scaled logit that is kept, and the smallest that had to be open to know it; float32 (rows,).

    values: (rows, m), the open scaled logits. What is kept is everything at or above the cutoff: each truncation
    keeps a head of the sorted distribution, and ties are kept whole.
    """
    cutoff = torch.full_like(law.top, -torch.inf)
    needed = cutoff
    mass = law.mass
    top_k = params.top_k if params.top_k < law.scaled.shape[1] else 0
    if top_k or params.top_p < 1:
        ordered = values.sort(-1, descending=True).values
        weights = (ordered.double() - law.top.unsqueeze(1)).exp_()
        if top_k:
            cutoff = ordered[:, top_k - 1]
            weights.masked_fill_(ordered < cutoff.unsqueeze(1), 0.0)
            mass = weights.sum(-1)
        needed = cutoff
        if params.top_p < 1:
            upto = weights.cumsum(-1)
            goal = params.top_p * mass
            # A token stays while the mass before it falls short of the goal.
            n_kept = ((upto - weights < goal.unsqueeze(1)) & (weights > 0)).sum(-1).clamp(min=1)
            cutoff = ordered.gather(1, n_kept.unsqueeze(1) - 1).squeeze(1)
            if not top_k:  # else the mass itself comes from the k open values
                needed = torch.where(upto[:, -1] >= goal, cutoff, -torch.inf)
    if params.min_p > 0:
        cutoff = torch.maximum(cutoff, law.top + math.log(params.min_p))
        if not top_k and params.top_p == 1:
            needed = cutoff
    return cutoff, needed
