"""How a draft is taught: distillation over several steps of its own drafting (training-time test). Pure functions.

Step 0 is an ordinary pass over a text with the target's features. At step s every position goes on as the draft itself
would have: its own last hidden state in place of features it could not have, the token that followed, one position
further. It sees the keys of step 0 up to where it began and, of the later steps, only those that it wrote itself. So
the hidden states of step s are those of a chain s tokens deep, for every place of the text at once.

The lesson at each place is the target's law over the tokens that the draft knows, at the temperature of sampling: soft
cross-entropy, weighted as the lesson says. Logits exist for a few positions at a time.

Not here: where texts, features and weights come from (data.py), optimisers and schedules (pretrain.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgrpo.drafting.data import Head, Lesson
from fastgrpo.models.draft import DraftModel, align


@dataclass(frozen=True)
class Loss:
    """What a batch gave. Per step, without gradient and float32 (steps,), as means over the tokens that count.

    total: the loss, a scalar. cross_entropy: in nats. agreement: share of places where the draft's most likely token is
    the target's. overlap: the sum of the smaller of both probabilities, which no way of proposing one token from this
    law can exceed on average.
    """

    total: Tensor
    cross_entropy: Tensor
    agreement: Tensor
    overlap: Tensor


def unroll(draft: DraftModel, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """The draft's hidden states, step by step.

    tokens: (n, t) int64; features: (n, t, f). Returns for every step s < min(steps, t - 1) a tensor (n, t - 1 - s,
    hidden) before the norm, whose entry j began at the features of position j and speaks of the token at j + 2 + s.
    The attention scores of every step are kept for the gradient: memory grows with the square of t.
    """
    inputs = align(tokens, features, torch.zeros(len(tokens), dtype=torch.long, device=tokens.device))
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key)
        values.append(value)
        return chain_attention(query, keys, values, draft.scale)

    hidden = draft.fuse(inputs.features)
    states: list[Tensor] = []
    for step in range(min(steps, inputs.tokens.shape[1])):
        # one place fewer a step: the last one has no token to go on with
        hidden = hidden[:, : inputs.tokens.shape[1] - step]
        hidden = draft.layer(inputs.tokens[:, step:], hidden, inputs.positions[:, step:], attend)
        states.append(hidden)
    return states


def chain_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """Attention at the last step of an unrolling: to the text up to one's own beginning, and to one's own chain.

    query: (n, q, heads, size), of the last step. keys, values: of each step, (n, kv_heads, at least q, size); query i
    sees entries 0 to i of the first and entry i of every other. Returns (n, q, heads * size).
    """
    n, queries, heads, size = query.shape
    kv_heads = keys[0].shape[1]
    grouped = (query * scale).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # (n, kv_heads, groups, q, size)
    text = grouped.flatten(2, 3) @ keys[0][:, :, :queries].transpose(2, 3)  # (n, kv_heads, groups * q, q)
    later = torch.ones((queries, queries), dtype=torch.bool, device=query.device).triu(1)
    scores = [text.unflatten(2, (-1, queries)).masked_fill(later, -torch.inf)]
    scores += [(grouped * key[:, :, None, :queries]).sum(-1, keepdim=True) for key in keys[1:]]
    shares = torch.cat(scores, dim=-1).softmax(-1)  # (n, kv_heads, groups, q, q + steps - 1)
    mixed = shares[..., :queries].flatten(2, 3) @ values[0][:, :, :queries]
    mixed = mixed.unflatten(2, (-1, queries))
    for i, value in enumerate(values[1:], queries):
        mixed = mixed + shares[..., i : i + 1] * value[:, :, None, :queries]
    return mixed.permute(0, 3, 1, 2, 4).reshape(n, queries, heads * size)


def distillation_loss(
    draft: DraftModel,
    head: Head,
    lesson: Lesson,
    *,
    steps: int = 3,
    decay: float = 0.8,
    temperature: float = 1.0,
    feature_weight: float = 0.0,
    chunk: int = 128,
) -> Loss:
    """The sum over steps s of decay^s times the mean cross-entropy of that step; one step is ordinary distillation.

    lesson: a batch, (n, t, ...) with t at least 3. temperature: of the target's law. feature_weight: adds that times
    the smooth L1 distance of hidden states from what true features would have fed in their place. chunk: tokens whose
    logits are in memory at once, those of every step of the draft and the target's. No gradient reaches the target.
    """
    length = lesson.tokens.shape[1]
    if length < 3:
        raise ValueError(f"texts of {length} tokens teach nothing: a draft first speaks of the third token.")
    states = unroll(draft, lesson.tokens, lesson.features, min(steps, length - 2))
    # everything below is by the token spoken of, columns 2 and up: at step s of the place s + 2 before it
    counted = lesson.weights[:, 2:] > 0
    columns = [F.pad(state[:, : length - 2 - step], (0, 0, step, 0)) for step, state in enumerate(states)]
    hidden = torch.stack(columns, dim=2)[counted]  # (m, steps, hidden)
    order = torch.arange(len(states), device=counted.device)
    began = counted.nonzero()[:, 1:] >= order  # (m, steps): not before the text
    weights = lesson.weights[:, 2:][counted][:, None] * began
    means = weights / weights.sum(0).clamp(min=1e-9)
    decays = decay**order
    total, metrics = _SoftCrossEntropy.apply(
        draft.norm(hidden), draft.lm_head.weight, head, lesson.final[:, 1:-1][counted], means, decays, temperature,
        chunk, torch.is_grad_enabled(),
    )  # fmt: skip
    if feature_weight:
        wanted = draft.fuse(lesson.features[:, 1:-1]).detach()[counted]  # (m, hidden)
        distance = F.smooth_l1_loss(hidden, wanted[:, None].expand_as(hidden), reduction="none").mean(-1)
        total = total + feature_weight * (distance * means * decays).sum()
    return Loss(total, *metrics)


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy through the draft's head, some tokens at a time; the gradient is made on the way, so that no logits
    are kept and none are computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (m, steps, h), normed
        weight: Tensor,  # (draft_vocab, h)
        head: Head,
        final: Tensor,  # (m, target_hidden)
        means: Tensor,  # (m, steps), each step sums to 1
        decays: Tensor,  # (steps,)
        temperature: float,
        chunk: int,
        learn: bool,
    ) -> tuple[Tensor, Tensor]:
        metrics = torch.zeros((3, len(decays)), device=hidden.device)
        into_hidden = torch.empty_like(hidden) if learn else None
        into_weight = torch.zeros_like(weight) if learn else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            states, shares = hidden[part].flatten(0, 1), means[part]
            goal = head.law(final[part], temperature)[:, None]  # (c, 1, draft_vocab)
            law = F.linear(states, weight).float().log_softmax(-1).unflatten(0, shares.shape)
            likely, goal_likely = law.argmax(-1), goal.argmax(-1)
            goal, law_p = goal.exp_(), law.exp()
            cross_entropy = -(law @ goal.transpose(1, 2))[..., 0]  # (c, steps)
            overlap = torch.minimum(goal, law_p).sum(-1)
            metrics += torch.stack([cross_entropy, (likely == goal_likely).float(), overlap]).mul_(shares).sum(1)
            if into_hidden is not None and into_weight is not None:
                slope = law_p.sub_(goal).mul_((shares * decays)[..., None]).flatten(0, 1).to(weight.dtype)
                into_hidden[part] = (slope @ weight).unflatten(0, shares.shape)
                into_weight.addmm_(slope.T, states)
        ctx.save_for_backward(into_hidden, into_weight)
        ctx.mark_non_differentiable(metrics)
        return (metrics[0] * decays).sum(), metrics

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        into_hidden, into_weight = ctx.saved_tensors
        return slopes[0] * into_hidden, slopes[0] * into_weight, *[None] * 7
