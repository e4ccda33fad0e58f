"""Counter-based noise: one exponential arrival time per (seed, sequence uid, absolute position, token id).

A token of probability p[i] and arrival time T[i] ~ Exp(1) finishes its race at T[i] / p[i]; the first to finish is
an exact sample of p, because -log T is a standard Gumbel variable and argmin T / p = argmax(log p - log T).
Everything here is a pure function of its arguments: no state, no global generator, no dependence on batch or order.

Evaluating 49,152 or 262,144 times per token would cost a good part of a target pass, so times are built from the top.
Token ids are cut into blocks of BLOCK consecutive ids. By the memoryless property, n independent Exp(1) variables are
distributed as: the first arrival is Exp(n), its index is uniform, and every other arrival is the first plus an
independent Exp(1). One hash per block gives its first arrival and who it is; one hash per id gives the rest when
somebody asks for it. The block's first arrival is a lower bound for all its ids, so a sampler that knows the largest
logit of each block finds the winner by opening a few blocks (see `sampling`). The last block may reach beyond the
vocabulary; its imaginary ids race along and are never looked at, which leaves the real ids independent Exp(1).

This file is not a general random number generator and knows nothing of logits.
"""

from __future__ import annotations

import torch

_BLOCK_BITS = 6
BLOCK = 1 << _BLOCK_BITS  # ids per block: a power of two, because the winner is read off the low bits of a hash

_WORD = (1 << 64) - 1


def _signed(word: int) -> int:
    """Reduce any Python integer modulo 2**64 and return the int64 with the same bits."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


# The odd increment and the two multipliers of SplitMix64 (Steele, Lea and Flood 2014; Stafford's variant 13).
_STEP = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)
# Starting values of the two key chains: fractional bits of pi, nothing up the sleeve.
_CHAINS = (_signed(0x243F6A8885A308D3), _signed(0x13198A2E03707344))


def _shift_xor(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`words ^ (words >>> bits)`: torch shifts signed integers arithmetically, so the sign's copies are masked off."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(words)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 lanes (a bijection; multiplication wraps)."""
    words = _shift_xor(words, 30).mul_(_MULTIPLY_1)
    words = _shift_xor(words, 27).mul_(_MULTIPLY_2)
    return _shift_xor(words, 31)


def row_keys(seed: int, uids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the two 64-bit key words of every (seed, uid, position).

    seed: any Python integer, taken modulo 2**64. uids, positions: int64, (rows,) each, on one device, all bits used.
    Returns int64 of shape (rows, 2). Raises ValueError when the shapes or dtypes do not fit.
    """
    if uids.shape != positions.shape or uids.dim() != 1:
        raise ValueError(
            f"uids {tuple(uids.shape)} and positions {tuple(positions.shape)} must both have shape (rows,): "
            "pass one uid and one absolute position per row."
        )
    if uids.dtype != torch.int64 or positions.dtype != torch.int64:
        raise ValueError(
            f"uids ({uids.dtype}) and positions ({positions.dtype}) must be torch.int64: convert with .long()."
        )
    words = []
    for start in _CHAINS:
        # Each argument is absorbed by a bijection of the whole state, so neighbours in any argument land far apart,
        # and two rows share both words only by a 128-bit accident.
        word = torch.full_like(uids, _signed(start + seed * _STEP))
        word = _mix(_mix(word) ^ uids)
        words.append(_mix(_mix(word + _STEP) ^ positions))
    return torch.stack(words, dim=-1)


def _hash(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Hash counters (rows, m) under keys (rows, 2) to int64 words (rows, m).

    SplitMix64 seeded by the first key word, with the second one stirred in between the two multiplications.
    """
    words = (counters * _STEP).add_(keys[:, :1])
    words = _shift_xor(words, 30).mul_(_MULTIPLY_1).bitwise_xor_(keys[:, 1:])
    words = _shift_xor(words, 27).mul_(_MULTIPLY_2)
    return _shift_xor(words, 31)


def _exponential(words: torch.Tensor) -> torch.Tensor:
    """Turn the upper 52 bits of each word into an Exp(1) variable, float64, never 0 and never infinite.

    The uniform lies at the middle of one of 2**52 cells, so the winning (small) end is resolved to 2**-53: a token of
    probability 1e-9 is drawn at its rate. 53 bits would round the last cell up to 1.
    """
    uniform = (words >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(-(2.0**-52))
    return uniform.log1p_().neg_()


def first_arrivals(keys: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for blocks (rows, m), the first arrival time (float64) and the index in 0..BLOCK-1 of who it is.

    keys: int64 (rows, 2) from `row_keys`. Block b holds the BLOCK ids from b * BLOCK on, none of which arrives earlier.
    """
    words = _hash(keys, -1 - blocks)  # negative counters: never an id's
    return _exponential(words).div_(BLOCK), words & (BLOCK - 1)  # bits 12..63 and bits 0..5


def block_times(keys: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """Return the first arrival time in each of the first n_blocks blocks, float64 (rows, n_blocks).

    keys: int64 (rows, 2) from `row_keys`. Block b holds the BLOCK ids from b * BLOCK on, none of which arrives earlier.
    """
    blocks = torch.arange(n_blocks, device=keys.device).expand(keys.shape[0], n_blocks)
    return first_arrivals(keys, blocks)[0]


def arrival_times_in_blocks(keys: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the arrival times of all ids of some blocks, float64 (rows, m, BLOCK).

    keys: int64 (rows, 2). blocks: int64 (rows, m), any blocks in any order. The numbers are those of `arrival_times`,
    for half the hashing.
    """
    first, winner = first_arrivals(keys, blocks)
    offsets = torch.arange(BLOCK, device=keys.device)
    ids = (blocks * BLOCK).unsqueeze(-1) + offsets  # (rows, m, BLOCK)
    later = _exponential(_hash(keys, ids.flatten(1))).view_as(ids)
    return later.masked_fill_(offsets == winner.unsqueeze(-1), 0.0).add_(first.unsqueeze(-1))


def arrival_times(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the arrival time of each token id, float64 (rows, m).

    keys: int64 (rows, 2) from `row_keys`. ids: int64 (rows, m), non-negative, any subset in any order (a draft with a
    reduced vocabulary passes the target's ids). The same number is returned whoever asks and in whatever shape.
    """
    first, winner = first_arrivals(keys, ids >> _BLOCK_BITS)
    later = _exponential(_hash(keys, ids))
    return later.masked_fill_(ids & (BLOCK - 1) == winner, 0.0).add_(first)
