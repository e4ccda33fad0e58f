"""A draft before a run: the target answers prompts, and the draft learns from its answers.

`pretrain` does it all; `sample_answers` and `train_draft` are its halves, for those who have answers already or want to
keep them. Weights are float32 while they are trained. Nothing depends on a clock, and no global generator moves.

Not here: the loss (losses.py), learning while a policy is trained (online.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastgrpo.drafting.data import Answer, Head, Lesson, answers_of, batches, choose_vocabulary, read_lessons, stacked
from fastgrpo.drafting.losses import Loss, distillation_loss
from fastgrpo.models.draft import DraftModel
from fastgrpo.models.draft_config import base_of
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.requests import whole_number
from fastgrpo.speculation.sampling import SamplingParams

_VOLUME = 0.3  # of a new draft's logits, against the target's


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """How to make a draft. Raises ValueError for what cannot be.

    The answers: sampling, the law that training will sample by; group_size of them to every prompt, max_new_tokens
    each; slots, rows that decode at once (None: as many as memory holds).
    The draft: vocabulary, how many tokens it knows (None: all of the target's).
    Learning: steps and decay, the depth of the drafts that are practised and the weight of a step against the one
    before; feature_weight, see `distillation_loss`; epochs over the answers; learning_rate, reached after the share
    `warmup` of the training and falling to 0 by a cosine; batch_tokens of an update; max_grad_norm.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    group_size: int = 8
    max_new_tokens: int = 256
    slots: int | None = None
    vocabulary: int | None = None
    steps: int = 3
    decay: float = 0.8
    feature_weight: float = 0.0
    epochs: int = 4
    learning_rate: float = 1e-3
    warmup: float = 0.05
    batch_tokens: int = 2048
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("group_size", "max_new_tokens", "steps", "epochs", "batch_tokens"):
            whole_number(name, getattr(self, name), at_least=1)
        whole_number("seed", self.seed)
        for name, low, high, remedy in (
            ("decay", 0.0, 1.0, "0.8 is usual, 1 counts every step alike"),
            ("feature_weight", 0.0, math.inf, "0 is off"),
            ("learning_rate", 0.0, 1.0, "1e-3 is usual"),
            ("warmup", 0.0, 0.9, "it is a share of the training, 0.05 is usual"),
            ("max_grad_norm", 0.0, math.inf, "1 is usual"),
        ):
            value = getattr(self, name)
            if not (low <= value <= high) or (value == 0 and name in ("decay", "learning_rate", "max_grad_norm")):
                bound = ">" if name in ("decay", "learning_rate", "max_grad_norm") else ">="
                raise ValueError(f"{name} is {value!r}, but must be {bound} {low:g} and <= {high:g}: {remedy}.")

    @property
    def temperature(self) -> float:
        """Of the law that is taught: that of sampling, and 1 where sampling is greedy, as for log-probs."""
        return self.sampling.temperature or 1.0


@dataclass(frozen=True)
class PretrainProgress:
    """How far it is: rows sampled, answers read, or tokens trained on, over all epochs. metrics: of the last update."""

    stage: Literal["sampling", "reading", "training"]
    done: int
    total: int
    metrics: dict[str, float] = field(default_factory=dict)


Report = Callable[[PretrainProgress], None] | None


def pretrain(
    target: Any,
    prompts: Sequence[Sequence[int]],
    config: PretrainConfig,
    *,
    stop_token_ids: Sequence[int] | None = None,
    on_progress: Report = None,
) -> DraftModel:
    """A draft for `target` (a Hugging Face causal LM, plain or under PEFT), trained on its own answers to `prompts`.

    prompts: token ids. stop_token_ids: as in `Engine.generate`; they are always in the draft's vocabulary. Returns the
    draft in the target's precision, bound, in eval mode. Raises ValueError for input that cannot be, FloatingPointError
    where training diverges.
    """
    answers = sample_answers(target, prompts, config, stop_token_ids=stop_token_ids, on_progress=on_progress)
    return train_draft(target, answers, config, stop_token_ids=stop_token_ids, on_progress=on_progress)


def sample_answers(
    target: Any,
    prompts: Sequence[Sequence[int]],
    config: PretrainConfig,
    *,
    stop_token_ids: Sequence[int] | None = None,
    on_progress: Report = None,
) -> list[Answer]:
    """What the target answers, by our engine, plainly. Arguments as for `pretrain`."""
    rollout = Engine(target, slots=config.slots).generate(
        prompts,
        config.sampling,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=stop_token_ids,
        seed=config.seed,
        on_round=lambda now: _tell(on_progress, "sampling", now.rows_done, now.rows_total),
    )
    return answers_of(prompts, rollout, config.group_size)


def train_draft(
    target: Any,
    answers: Sequence[Answer],
    config: PretrainConfig,
    *,
    stop_token_ids: Sequence[int] | None = None,
    on_progress: Report = None,
) -> DraftModel:
    """A draft trained on answers that are there already. Arguments as for `pretrain`."""
    answers = [answer for answer in answers if len(answer.prompt) + len(answer.token_ids) > 2]
    if not answers:
        raise ValueError(
            "no answer has the three tokens, prompt included, that a draft needs to learn from: sample longer ones."
        )
    base = base_of(target)
    vocabulary = None
    if config.vocabulary is not None:
        size = base.get_output_embeddings().weight.shape[0]
        stops = _model_stops(base) if stop_token_ids is None else stop_token_ids
        vocabulary = choose_vocabulary(answers, config.vocabulary, size, stops)
    # training needs gradients and tensors that can carry them, whatever the caller's mode
    with torch.inference_mode(False), torch.enable_grad():
        draft = begin(target, vocabulary, config.seed)
        lessons = read_lessons(
            target,
            draft,
            answers,
            config.temperature,
            lambda done: _tell(on_progress, "reading", done, len(answers)),
        )
        scale = level(lessons, len(draft.config.feature_layers))
        _learn(draft, Head(target, draft.ids), lessons, config, on_progress)
        with torch.no_grad():
            draft.fc.weight /= scale
    return draft.to(base.get_input_embeddings().weight.dtype).eval()


def begin(target: Any, vocabulary: Tensor | None, seed: int) -> DraftModel:
    """An untrained draft in float32 with its target's words: its head's rows, and its final norm, turned down.

    At full volume a draft that knows nothing yet is sure of it. What is left to learn is which hidden state comes next,
    not what the words are.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = DraftModel.for_target(target, vocabulary=vocabulary, dtype=torch.float32)
    base = base_of(target)
    norm = getattr(getattr(base, base.base_model_prefix, None), "norm", None)
    with torch.no_grad():
        draft.lm_head.weight.copy_(base.get_output_embeddings().weight[draft.ids])
        if isinstance(norm, nn.Module):
            # what it does to a vector of ones is its weight, however it stores that (Gemma: less 1)
            ones = torch.ones_like(draft.norm.weight, dtype=base.dtype)
            draft.norm.weight.copy_(_VOLUME * norm(ones))
    return draft


def level(lessons: Sequence[Lesson], layers: int) -> Tensor:
    """Divide the features of each tapped layer by their usual size, in place; returns the divisors, (f,).

    Deep layers may be ten times as loud as a fresh draft's own layer, which would then be drowned out and learn nothing
    for long. Dividing the weights that the features meet by the same numbers afterwards makes up for it exactly.
    """
    sizes = torch.cat([lesson.features.float().unflatten(1, (layers, -1)).norm(dim=-1) for lesson in lessons])
    width = lessons[0].features.shape[1] // layers
    scale = (sizes.median(dim=0).values / width**0.5).clamp(min=1e-6).repeat_interleave(width)
    for lesson in lessons:
        lesson.features.div_(scale)
    return scale


def _learn(
    draft: DraftModel, head: Head, lessons: Sequence[Lesson], config: PretrainConfig, on_progress: Report
) -> None:
    parameters = list(draft.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(config.seed)
    total, done = config.epochs * sum(len(lesson.tokens) for lesson in lessons), 0
    for _ in range(config.epochs):
        for batch in batches(lessons, config.batch_tokens, generator):
            tokens = sum(len(lesson.tokens) for lesson in batch)
            loss = distillation_loss(
                draft,
                head,
                stacked(batch),
                steps=config.steps,
                decay=config.decay,
                temperature=config.temperature,
                feature_weight=config.feature_weight,
            )
            optimizer.zero_grad(set_to_none=True)
            loss.total.backward()
            norm = float(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"the draft's gradient is not finite after {done} tokens of training: lower learning_rate, which "
                    f"is {config.learning_rate:g}."
                )
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * schedule((done + tokens / 2) / total, config.warmup)
            optimizer.step()
            done += tokens
            _tell(on_progress, "training", done, total, _numbers(loss))


def schedule(share: float, warmup: float) -> float:
    """The learning rate as a share of its peak, when that share of the training is done: a ramp, then a cosine."""
    if share < warmup:
        return share / warmup
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (share - warmup) / (1 - warmup)))


def _numbers(loss: Loss) -> dict[str, float]:
    numbers = {"loss": float(loss.total.detach())}
    for what in fields(loss)[1:]:
        for step, value in enumerate(getattr(loss, what.name).tolist(), 1):
            numbers[f"{what.name}_{step}"] = value
    return numbers


def _tell(on_progress: Report, stage: Any, done: int, total: int, metrics: dict[str, float] | None = None) -> None:
    if on_progress is not None:
        on_progress(PretrainProgress(stage, done, total, metrics or {}))


def _model_stops(base: Any) -> list[int]:
    found = getattr(base.generation_config, "eos_token_id", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)
