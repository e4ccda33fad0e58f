"""What a draft learns from: answers of the target, and what the target made of each of their tokens.

An answer becomes a lesson by one pass of the target: the features that a draft is fed, the hidden states that the
target's head turns into its law, and how much each token counts. Lessons are kept in memory, in the target's precision.

Not here: the loss (losses.py), the order and the number of updates (pretrain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastgrpo.models.draft import DraftModel
from fastgrpo.models.draft_config import base_of
from fastgrpo.models.target import open_target
from fastgrpo.speculation.requests import Rollout

_PASS_TOKENS = 512  # of one pass of the target; a longer text is a pass of its own
_LAW_TOKENS = 256  # positions whose logits are in memory at once
_SORTED_TOGETHER = 64  # lessons: enough for batches of like length, few enough that batches differ between epochs


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target answered.

    logprobs: of every token of the answer, over the whole vocabulary, at the temperature of the law that the draft is
    to learn (`Completion.logprobs`).
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def answers_of(prompts: Sequence[Sequence[int]], rollout: Rollout, group_size: int = 1) -> list[Answer]:
    """The rows of a rollout over `prompts`, each of which was answered `group_size` times."""
    return [
        Answer(tuple(prompts[c.index // group_size]), tuple(c.token_ids), tuple(c.logprobs))
        for c in rollout.completions
    ]


def choose_vocabulary(answers: Sequence[Answer], size: int, vocab_size: int, always: Sequence[int] = ()) -> Tensor:
    """The target ids that a draft shall know, (size,) int64, ascending: `always`, then the most frequent ones.

    Prompts count as well, because answers repeat their words. Among equally frequent ids the lowest come first: in a
    byte-pair vocabulary these are the commoner ones, so they also fill what the answers do not.
    """
    if not len(set(always)) <= size <= vocab_size or size < 1:
        raise ValueError(
            f"a draft vocabulary of {size} tokens cannot be: the target has {vocab_size}, and {len(set(always))} must "
            "be in it; choose a size between the two."
        )
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer.prompt + answer.token_ids), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


class Head:
    """The target's output layer, and its rows for the tokens that a draft knows. Weights are read once."""

    def __init__(self, target: Any, ids: Tensor):
        """ids: (draft_vocab,) int64, ascending, as `DraftModel.ids` has them."""
        module = base_of(target).get_output_embeddings()
        self.weight, self.bias = module.weight.detach(), getattr(module, "bias", None)
        self.bias = None if self.bias is None else self.bias.detach()
        everything = len(ids) == len(self.weight)
        self.rows = self.weight if everything else self.weight[ids]
        self.row_bias = self.bias if everything or self.bias is None else self.bias[ids]

    def law(self, final: Tensor, temperature: float) -> Tensor:
        """Log-probs over the draft's tokens alone, renormalised. final: (m, h). Returns float32 (m, draft_vocab)."""
        return self._scores(final, temperature).log_softmax(-1)

    def mass(self, final: Tensor, tokens: Tensor, logprobs: Tensor, temperature: float) -> Tensor:
        """What the target gives to the draft's tokens together, of 1; float32 (m,).

        final: (m, h); tokens: (m,) int64, any token of the target's, and logprobs: (m,), its log-prob over the whole
        vocabulary at this temperature: they tell the normaliser, so the whole vocabulary need not be computed.
        """
        own = (final.float() * self.weight[tokens].float()).sum(-1)
        own = own if self.bias is None else own + self.bias[tokens].float()
        whole = own / temperature - logprobs
        parts = [self._scores(part, temperature).logsumexp(-1) for part in final.split(_LAW_TOKENS)]
        return (torch.cat(parts) - whole).exp().clamp(max=1.0)

    def logits(self, final: Tensor) -> Tensor:
        """Over the whole vocabulary: (m, vocab)."""
        return F.linear(final, self.weight, self.bias)

    def _scores(self, final: Tensor, temperature: float) -> Tensor:
        return F.linear(final, self.rows, self.row_bias).float() / temperature


class Lesson(NamedTuple):
    """One text (t tokens), or several filled up on the right to one length (n texts: every shape begins with n)."""

    tokens: Tensor  # (t,) int64
    features: Tensor  # (t, f), what the draft is fed
    final: Tensor  # (t, target_hidden), what the target's head is fed: at i, the law of the token at i + 1
    weights: Tensor  # (t,) float32, how much the prediction of each token counts: 0 for prompts and filling


def stacked(lessons: Sequence[Lesson]) -> Lesson:
    """Several texts as one batch, filled up with zeros."""
    return Lesson(*(pad_sequence(list(parts), batch_first=True) for parts in zip(*lessons, strict=True)))


def read_lessons(
    target: Any,
    draft: DraftModel,
    answers: Sequence[Answer],
    temperature: float = 1.0,
    on_read: Callable[[int], None] | None = None,
) -> list[Lesson]:
    """Run the target over every answer, once, for a draft of this shape; the target is left as it was found.

    A token of an answer weighs what the target gives to the draft's tokens together at its place: what the draft cannot
    say, it need not learn. on_read is called with the number of answers that are done. Raises ValueError for targets
    whose logits are more than a product of the head and the last hidden state.
    """
    runner, config = open_target(target), draft.config
    taps = tuple(sorted({*config.feature_layers, config.target_num_layers}))
    head = Head(target, draft.ids)
    lessons: list[Lesson] = []
    with runner.session(taps):
        for group in _in_passes(answers):
            logits, prefixes = runner.prefill([answer.prompt + answer.token_ids for answer in group])
            for answer, prefix, last in zip(group, prefixes, logits, strict=True):
                assert prefix.features is not None
                # out of inference mode, whose tensors nothing can be trained on
                with torch.inference_mode(False), torch.no_grad():
                    states = dict(zip(taps, prefix.features.clone().chunk(len(taps), dim=-1), strict=True))
                    if not lessons:
                        _check_head(head, states[config.target_num_layers][-1], last.clone(), target)
                    lessons.append(_lesson(answer, states, draft, head, temperature))
            if on_read is not None:
                on_read(len(lessons))
    return lessons


def _lesson(answer: Answer, states: dict[int, Tensor], draft: DraftModel, head: Head, temperature: float) -> Lesson:
    config, begins = draft.config, len(answer.prompt)
    final = states[config.target_num_layers].contiguous()
    tokens = torch.tensor(answer.prompt + answer.token_ids, device=final.device)
    weights = torch.zeros(len(tokens), device=final.device)
    logprobs = torch.tensor(answer.logprobs, device=final.device)
    weights[begins:] = head.mass(final[begins - 1 : -1], tokens[begins:], logprobs, temperature)
    features = torch.cat([states[layer] for layer in config.feature_layers], dim=-1)
    return Lesson(tokens, features, final, weights)


def _in_passes(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    group: list[Answer] = []
    longest = 0
    for answer in answers:
        length = len(answer.prompt) + len(answer.token_ids)
        longest = max(longest, length)
        if group and longest * (len(group) + 1) > _PASS_TOKENS:
            yield group
            group, longest = [], length
        group.append(answer)
    if group:
        yield group


def _check_head(head: Head, final: Tensor, logits: Tensor, target: Any) -> None:
    ours, theirs = head.logits(final[None])[0].float(), logits.float()
    if float((ours - theirs).norm()) > 0.05 * float(theirs.norm()):  # rounding in bfloat16 is below 0.01
        raise ValueError(
            f"the logits of {type(base_of(target)).__name__} are not its output layer's product with the last hidden "
            "state (they are capped or scaled after it, or an adapter sits on the output layer), so its law cannot be "
            "taught from hidden states: use a target without that."
        )


def batches(lessons: Sequence[Lesson], tokens: int, generator: torch.Generator) -> Iterator[list[Lesson]]:
    """Every lesson once, in an order drawn anew, in batches of at most `tokens` tokens once they are `stacked`.

    Lessons of like length go together; one that is longer than `tokens` is a batch of its own.
    """
    order = torch.randperm(len(lessons), generator=generator).tolist()
    groups: list[list[Lesson]] = []
    for start in range(0, len(order), _SORTED_TOGETHER):
        some = [lessons[i] for i in order[start : start + _SORTED_TOGETHER]]
        group: list[Lesson] = []
        for lesson in sorted(some, key=lambda lesson: -len(lesson.tokens)):  # the first one is the longest
            if group and len(group[0].tokens) * (len(group) + 1) > tokens:
                groups.append(group)
                group = []
            group.append(lesson)
        groups.append(group)
    for i in torch.randperm(len(groups), generator=generator).tolist():
        yield groups[i]
