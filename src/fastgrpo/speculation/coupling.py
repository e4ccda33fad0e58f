"""The draft's side of the target's race: which tokens would win it, were the draft's law the target's.

A race over every id that a draft knows would cost more than the draft. Who wins is likely, or lucky: one of the most
probable ids, or the first arrival of its block of the noise, which comes cheaply. No others race, and nobody checks
that the winner was among them: what is proposed need not be right, only likely.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgrpo.speculation.noise import BLOCK, arrival_times, first_arrivals
from fastgrpo.speculation.sampling import block_maxima

# Blocks of the most probable ids that race whole, besides one for each token that is asked for.
_OPEN = 8


class DraftRace:
    """The race over one draft vocabulary. ids: int64 (v,), the target's ids in it, ascending."""

    def __init__(self, ids: Tensor):
        count = -(-len(ids) // BLOCK)
        own = torch.arange(len(ids), device=ids.device)
        self.ids = torch.cat([ids, ids[-1:].expand(count * BLOCK - len(ids))]).view(count, BLOCK)
        self.noise_blocks = torch.arange(int(ids[-1]) // BLOCK + 1, device=ids.device)
        # which number the draft has for an id of the target; -1 where it has none
        self.numbers = torch.full((len(self.noise_blocks) * BLOCK,), -1, device=ids.device).scatter_(0, ids, own)

    def best(self, logits: Tensor, keys: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """The tokens likeliest to be the target's next ones, and the log-score of each among those that race.

        logits: float32 (n, b, v), b contexts of each row at one position. keys: int64 (n, 2) of that position; None for
        greedy decoding. Returns target ids int64 and scores float32, (n, b, min(count, v)), the best first.
        """
        vocab = logits.shape[2]
        count = min(count, vocab)
        maxima = block_maxima(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
        wanted = count if keys is None else count + _OPEN  # the best `count` logits lie in as many blocks
        blocks = maxima.topk(min(wanted, maxima.shape[2]), dim=-1).indices
        places = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten(2)
        scores = logits.gather(2, places.clamp(max=vocab - 1)).masked_fill_(places >= vocab, -torch.inf)
        ids = self.ids[blocks].flatten(2)
        if keys is None:
            scores = scores - logits.logsumexp(-1, keepdim=True)
        else:
            scores = scores - arrival_times(keys, ids.flatten(1)).log_().float().view_as(ids)
            lucky_ids, lucky_scores = self._lucky(logits, keys, blocks)
            ids = torch.cat([ids, lucky_ids[:, None].expand_as(lucky_scores)], dim=-1)
            scores = torch.cat([scores, lucky_scores], dim=-1).log_softmax(-1)
        steps, best = scores.topk(count, dim=-1)
        return ids.gather(2, best), steps

    def _lucky(self, logits: Tensor, keys: Tensor, opened: Tensor) -> tuple[Tensor, Tensor]:
        """The first arrival of every noise block, (n, noise blocks), and its score, (n, b, noise blocks).

        -inf where the draft does not know it or its own block, of those opened (n, b, o), races already.
        """
        times, who = first_arrivals(keys, self.noise_blocks.expand(len(keys), -1))
        ids = self.noise_blocks * BLOCK + who
        numbers = self.numbers[ids]
        known = numbers.clamp(min=0)[:, None].expand(-1, logits.shape[1], -1)
        racing = torch.zeros((*logits.shape[:2], len(self.ids)), dtype=torch.bool, device=ids.device)
        racing = racing.scatter_(2, opened, True).gather(2, known // BLOCK)
        scores = logits.gather(2, known) - times.log_().float()[:, None]
        return ids, scores.masked_fill_(racing | (numbers < 0)[:, None], -torch.inf)
