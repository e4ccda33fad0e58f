"""Two rollouts that ought to be the same: how many tokens are, and how near to a tie the first differing ones were.

Where arithmetic depends on the shape of a pass, two tokens whose scores are closer than its rounding may change places,
and everything behind them differs with reason. A difference that is no near-tie is an error of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastgrpo.speculation.noise import arrival_times, row_keys
from fastgrpo.speculation.requests import Completion
from fastgrpo.speculation.sampling import SamplingParams


@dataclass(frozen=True)
class Agreement:
    """tokens: compared, of the shorter of each pair. equal: those before a row's first difference. margins: of each row
    that differs, see `margin`."""

    tokens: int
    equal: int
    margins: tuple[float, ...]

    @property
    def widest(self) -> float | None:
        """The margin of the difference that is hardest to explain; None where nothing differs."""
        return max(self.margins, default=None)


def agreement(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    one: Sequence[Completion],
    other: Sequence[Completion],
    sampling: SamplingParams,
    seed: int,
) -> Agreement:
    """Compare two rollouts row by row. prompts: one a row; seed: of both rollouts."""
    tokens = equal = 0
    margins = []
    for prompt, a, b in zip(prompts, one, other, strict=True):
        pairs = list(zip(a.token_ids, b.token_ids, strict=False))
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        tokens, equal = tokens + len(pairs), equal + first
        if first < len(pairs):
            text = [*prompt, *a.token_ids[:first]]
            margins.append(margin(model, text, pairs[first], sampling, a.uid, seed))
    return Agreement(tokens, equal, tuple(margins))


@torch.no_grad()
def margin(
    model: PreTrainedModel, text: Sequence[int], pair: tuple[int, int], sampling: SamplingParams, uid: int, seed: int
) -> float:
    """How little would have made the other of two tokens come next behind `text`, by the model's own forward.

    In nats between their scores in the race, or, where less, in probability between the mass above the better one and
    top_p: it was cut on one side only. Raises ValueError for laws with other cuts or a penalty.
    """
    if sampling.top_k or sampling.min_p or sampling.repetition_penalty != 1:
        raise ValueError(f"margins are known for a temperature and top_p, not for {sampling}: leave the others off.")
    ids = torch.tensor([list(text)], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].double()
    if sampling.greedy:
        return float((logits[pair[0]] - logits[pair[1]]).abs())
    law = (logits / sampling.temperature).log_softmax(-1)
    scores = law[list(pair)] - _times(uid, len(text), pair, seed).to(law).log()
    gap = float((scores[0] - scores[1]).abs())
    if sampling.top_p == 1:
        return gap
    better = law[pair[int(scores.argmax())]]
    above = float(law.exp()[law > better].sum())
    return min(gap, abs(above - sampling.top_p))


def _times(uid: int, position: int, ids: Sequence[int], seed: int) -> Tensor:
    signed = (uid + (1 << 63)) % (1 << 64) - (1 << 63)
    keys = row_keys(seed, torch.tensor([signed]), torch.tensor([position]))
    return arrival_times(keys, torch.tensor([list(ids)]))[0]
