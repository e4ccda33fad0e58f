"""The draft's side of the target's race: which tokens would win it, were the draft's law the target's.

A race over every id that a draft knows would cost more than the draft. As in `sampling`, ids are cut into blocks, and
the largest logit of a block and its earliest arrival say how well any of its ids can do; a few blocks are opened. Here
nobody checks that the winner was among them: what is proposed need not be right, only likely.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgrpo.speculation.noise import BLOCK, arrival_times, block_times
from fastgrpo.speculation.sampling import block_maxima

# Blocks opened besides one for each token that is asked for.
_OPEN = 16


class DraftRace:
    """The race over one draft vocabulary. ids: int64 (v,), the target's ids in it, ascending."""

    def __init__(self, ids: Tensor):
        count = -(-len(ids) // BLOCK)
        self.ids = torch.cat([ids, ids[-1:].expand(count * BLOCK - len(ids))]).view(count, BLOCK)
        # a draft's block holds ids of one or more of the noise's blocks: the distinct ones, the last one repeated
        noise_blocks = self.ids // BLOCK
        new = F.pad(noise_blocks[:, 1:] != noise_blocks[:, :-1], (1, 0))
        place = new.cumsum(1)
        self.reached = noise_blocks[:, -1:].repeat(1, int(place.max()) + 1).scatter_(1, place, noise_blocks)
        self.noise_blocks = int(noise_blocks[-1, -1]) + 1

    def best(self, logits: Tensor, keys: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """The tokens likeliest to be the target's next ones, and the log-score of each among those looked at.

        logits: float32 (n, b, v), b contexts of each row at one position. keys: int64 (n, 2) of that position; None for
        greedy decoding. Returns target ids int64 and scores float32, (n, b, min(count, v)), the best first.
        """
        vocab = logits.shape[2]
        count = min(count, vocab)
        bounds = block_maxima(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
        opened = min(count, bounds.shape[2])  # the best logits lie in the blocks with the largest ones
        if keys is not None:
            earliest = block_times(keys, self.noise_blocks)[:, self.reached].amin(-1)  # (n, blocks)
            bounds = bounds - earliest.log_().float()[:, None]
            opened = min(count + _OPEN, bounds.shape[2])
        blocks = bounds.topk(opened, dim=-1).indices
        places = (blocks[..., None] * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten(2)
        scores = logits.gather(2, places.clamp(max=vocab - 1)).masked_fill_(places >= vocab, -torch.inf)
        ids = self.ids[blocks].flatten(2)
        if keys is None:
            scores = scores - logits.logsumexp(-1, keepdim=True)
        else:
            scores = (scores - arrival_times(keys, ids.flatten(1)).log_().float().view_as(ids)).log_softmax(-1)
        steps, best = scores.topk(count, dim=-1)
        return ids.gather(2, best), steps
