"""The multi-step loss: its hidden states against drafting with a cache, its numbers against slow twins."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from drafts import slow_layer, tap, tiny_draft
from tiny import VOCAB_SIZE, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastgrpo.drafting.data import Head, Lesson
from fastgrpo.drafting.losses import Loss, distillation_loss, unroll
from fastgrpo.models.attention import as_bias, causal_attention, grouped_attention, visible
from fastgrpo.models.cache import RaggedCache
from fastgrpo.models.draft import DraftModel

STEPS = 4
TEXT = torch.randint(4, VOCAB_SIZE, (2, 11), generator=torch.Generator().manual_seed(5))
SOME_IDS = [4, 5, 9, 30, 31, 50, 77, 99]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "reduced": {"vocabulary": SOME_IDS},
    "qk_norm": {"qk_norm": True},
    "single": {"feature_layers": (3,)},
}


def weights_of(tokens: Tensor) -> Tensor:
    """Prompts of 3 and 4 tokens, the second text two tokens shorter, one token of the first left out, none alike."""
    weights = 0.25 + torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1))
    weights[0, :3] = weights[1, :4] = weights[1, 9:] = weights[0, 7] = 0
    return weights


def lesson_of(target: Any, draft: DraftModel, tokens: Tensor = TEXT) -> Lesson:
    features = tap(target, tokens, draft.config.feature_layers)
    final = tap(target, tokens, [draft.config.target_num_layers])
    return Lesson(tokens, features, final, weights_of(tokens))


@functools.cache
def model_of(arch: str) -> Any:
    return tiny_model(arch)  # kept, because drafts do not keep their target


def pair(arch: str = "llama", **options: Any) -> tuple[Any, DraftModel, Head, Lesson]:
    target = model_of(arch)
    draft = tiny_draft(target, **options)
    return target, draft, Head(target, draft.ids), lesson_of(target, draft)


def drafted(draft: DraftModel, tokens: Tensor, features: Tensor, place: int, steps: int) -> list[Tensor]:
    """What a chain says that begins with the features of `place`, drafted with a cache as the proposer does it, when
    every proposal is what the text says. Returns `steps` hidden states (n, hidden)."""
    cache = RaggedCache(draft.layout, len(tokens), 32)
    heads, kv_heads = draft.config.num_attention_heads, draft.config.num_key_value_heads

    def feed(ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        span = int(positions.max()) + 1
        cache.open(positions, span)
        bias = as_bias(visible(positions, torch.arange(span), None), heads // kv_heads, kv_heads, hidden.dtype)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return grouped_attention(query, *cache.append(0, keys, values), bias, draft.scale)

        return draft.layer(ids, hidden, positions, attend)

    positions = torch.arange(place + 1).expand(len(tokens), place + 1)
    hidden = feed(tokens[:, 1 : place + 2], draft.fuse(features[:, : place + 1]), positions)[:, -1:]
    chain = [hidden[:, 0]]
    for step in range(1, steps):
        at = torch.full((len(tokens), 1), place + step)
        hidden = feed(tokens[:, place + 1 + step : place + 2 + step], hidden, at)
        chain.append(hidden[:, 0])
    return chain


@pytest.mark.parametrize(("arch", "option"), [("gemma3", "full"), ("qwen3", "full"), *(("llama", o) for o in OPTIONS)])
def test_step_s_of_training_is_step_s_of_drafting(arch: str, option: str) -> None:
    _, draft, _, lesson = pair(arch, **OPTIONS[option])
    length = TEXT.shape[1]
    with torch.no_grad():
        states = unroll(draft, lesson.tokens, lesson.features, STEPS)
        assert [state.shape[1] for state in states] == [length - 1 - step for step in range(STEPS)]
        for place in range(length - 1):
            chain = drafted(draft, lesson.tokens, lesson.features, place, min(STEPS, length - 1 - place))
            for state, alone in zip(states, chain, strict=False):
                assert torch.allclose(draft.logits(state[:, place]), draft.logits(alone), atol=1e-4)


def test_step_s_of_training_is_the_slow_twins() -> None:
    """One place at a time, every chain as a text of its own, in float64."""
    target, draft, _, lesson = pair()
    weights = {name: weight.double() for name, weight in draft.state_dict().items()}
    embedded = target.get_input_embeddings().weight.detach().double()[TEXT[0]]
    fused = lesson.features[0].double() @ weights["fc.weight"].T
    with torch.no_grad():
        states = unroll(draft, TEXT[:1], lesson.features[:1], 3)
    for place in (0, 3, 7):
        hidden = fused[: place + 1]
        for step in range(3):
            text = embedded[1 : place + 2 + step]
            out = slow_layer(draft.config, weights, text, hidden, range(place + 1 + step))
            assert torch.allclose(states[step][0, place].double(), out[-1], atol=1e-4), (place, step)
            hidden = torch.cat([hidden, out[-1:]])


def test_a_step_too_many_for_the_text_is_left_out() -> None:
    _, draft, head, lesson = pair()
    short = Lesson(*(part[:, :4] for part in lesson))
    short.weights[:, 2:] = 1
    assert len(unroll(draft, short.tokens, short.features, 9)) == 3
    loss = distillation_loss(draft, head, short, steps=9)
    assert len(loss.cross_entropy) == 2  # of the third and of the fourth token
    with pytest.raises(ValueError, match="third token"):
        distillation_loss(draft, head, Lesson(*(part[:, :2] for part in lesson)))


# --- the loss --------------------------------------------------------------------------------------------------------


def chained(draft: DraftModel, tokens: Tensor, features: Tensor, place: int, steps: int) -> list[Tensor]:
    """As `drafted`, but every chain runs as a text of its own, which autograd can follow."""

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return causal_attention(query, keys, values, None, draft.scale)

    fed = draft.fuse(features[:, : place + 1])
    chain = []
    for step in range(steps):
        positions = torch.arange(place + 1 + step).expand(len(tokens), -1)
        last = draft.layer(tokens[:, 1 : place + 2 + step], fed, positions, attend)[:, -1:]
        fed = torch.cat([fed, last], dim=1)
        chain.append(last[:, 0])
    return chain


def slow_loss(
    target: Any, draft: DraftModel, lesson: Lesson, steps: int, decay: float, temperature: float, feature_weight: float
) -> Loss:
    """By the definition, a token and a chain at a time."""
    n, length = lesson.tokens.shape
    sums = [torch.zeros(5) for _ in range(steps)]
    for place in range(length - 2):
        chain = chained(draft, lesson.tokens, lesson.features, place, min(steps, length - 2 - place))
        for step, hidden in enumerate(chain):
            spoken_of = place + 2 + step
            for row in range(n):
                weight = lesson.weights[row, spoken_of]
                with torch.no_grad():
                    logits = target.get_output_embeddings()(lesson.final[row, spoken_of - 1])[draft.ids]
                    goal = (logits / temperature).softmax(-1)
                    wanted = draft.fuse(lesson.features[row, spoken_of - 1])
                law = draft.logits(hidden[row]).softmax(-1)
                gap = (hidden[row] - wanted).abs()
                parts = [
                    torch.ones(()),
                    -(goal * law.log()).sum(),
                    (law.argmax() == goal.argmax()).float(),
                    torch.minimum(goal, law).sum(),
                    torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean(),
                ]
                sums[step] = sums[step] + weight * torch.stack(parts)
    means = torch.stack([part[1:] / part[0] for part in sums]).T  # (4, steps)
    decays = torch.tensor([decay**step for step in range(steps)])
    return Loss((decays * (means[0] + feature_weight * means[3])).sum(), *means[:3].detach())


@pytest.mark.parametrize("option", ["full", "reduced"])
@pytest.mark.parametrize(
    ("steps", "temperature", "feature_weight"),
    [(1, 1.0, 0.0), (3, 0.7, 0.0), (3, 1.0, 0.5)],
    ids=["one step", "three", "features"],
)
def test_the_loss_and_its_gradient_are_the_slow_twins(
    option: str, steps: int, temperature: float, feature_weight: float
) -> None:
    target, draft, head, lesson = pair(**OPTIONS[option])
    knobs = {"steps": steps, "decay": 0.6, "temperature": temperature, "feature_weight": feature_weight}
    found, gradients = {}, {}
    for name in ("fast", "slow"):
        draft.zero_grad(set_to_none=True)
        if name == "fast":
            loss = distillation_loss(draft, head, lesson, chunk=3, **knobs)
        else:
            loss = slow_loss(target, draft, lesson, *knobs.values())
        loss.total.backward()
        found[name] = loss
        gradients[name] = {key: weight.grad for key, weight in draft.named_parameters()}
    for field in ("total", "cross_entropy", "agreement", "overlap"):
        fast, slow = (getattr(found[name], field).detach() for name in ("fast", "slow"))
        torch.testing.assert_close(fast, slow, rtol=0, atol=2e-5)
    for key, gradient in gradients["slow"].items():
        size = float(gradient.norm())
        assert float((gradients["fast"][key] - gradient).norm()) < 1e-3 * size, key
    if option == "reduced":  # with few words an untrained draft agrees sometimes, so that is compared as well
        assert 0 < float(found["fast"].agreement[0]) < 1


def test_one_step_is_ordinary_distillation() -> None:
    target, draft, head, lesson = pair()
    everything = lesson._replace(weights=torch.ones_like(lesson.weights))
    with torch.no_grad():
        loss = distillation_loss(draft, head, everything, steps=1)
        law = draft.logits(unroll(draft, TEXT, lesson.features, 1)[0]).log_softmax(-1)[:, :-1]
        goal = target(TEXT).logits.softmax(-1)[:, 1:-1]
    torch.testing.assert_close(loss.total, -(goal * law).sum(-1).mean(), rtol=0, atol=1e-5)


def test_a_draft_with_the_targets_law_has_nothing_to_learn() -> None:
    _, draft, head, lesson = pair()
    with torch.no_grad():
        draft.lm_head.weight.zero_()
        head.rows = head.rows * 0
    loss = distillation_loss(draft, head, lesson)
    loss.total.backward()
    assert float(draft.lm_head.weight.grad.abs().max()) < 1e-7
    assert torch.allclose(loss.overlap, torch.ones(3))
    assert torch.allclose(loss.cross_entropy, torch.full((3,), math.log(VOCAB_SIZE)))


# --- what it touches -------------------------------------------------------------------------------------------------


def test_the_gradient_reaches_no_target_parameter() -> None:
    target = tiny_model("gemma3")
    target.enable_input_require_grads()  # as gradient checkpointing under PEFT does
    draft = tiny_draft(target)
    states = target(TEXT, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in draft.config.feature_layers], dim=-1)
    lesson = Lesson(TEXT, features, states[-1], weights_of(TEXT))
    assert features.requires_grad and states[-1].requires_grad
    distillation_loss(draft, Head(target, draft.ids), lesson, feature_weight=0.1).total.backward()
    assert all(weight.grad is None for weight in target.parameters())
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in draft.parameters())


def changed_at(lesson: Lesson, name: str, where: tuple[Any, ...]) -> Lesson:
    part = getattr(lesson, name).clone()
    part[where] = part[where] % 50 + 4 if name == "tokens" else part[where] + 3
    return lesson._replace(**{name: part})


def value(draft: DraftModel, head: Head, lesson: Lesson) -> tuple[float, Tensor]:
    draft.zero_grad(set_to_none=True)
    loss = distillation_loss(draft, head, lesson, feature_weight=0.1)
    loss.total.backward()
    return float(loss.total.detach()), draft.fc.weight.grad.clone()


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("tokens", (1, slice(9, None))),  # filling
        ("features", (1, slice(9, None))),
        ("final", (1, slice(8, None))),  # the law of what comes after the end
        ("final", (0, 6)),  # the law of a token that does not count
        ("final", (1, slice(0, 3))),  # the laws of the prompt
    ],
)
def test_what_does_not_count_changes_nothing(name: str, where: tuple[Any, ...]) -> None:
    _, draft, head, lesson = pair()
    before, gradient = value(draft, head, lesson)
    after, same = value(draft, head, changed_at(lesson, name, where))
    assert before == pytest.approx(after, abs=1e-6)
    assert torch.allclose(gradient, same, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "where"), [("tokens", (1, 7)), ("features", (1, 6)), ("final", (1, 7)), ("tokens", (1, 3))]
)
def test_what_counts_changes_something(name: str, where: tuple[Any, ...]) -> None:
    _, draft, head, lesson = pair()
    assert abs(value(draft, head, lesson)[0] - value(draft, head, changed_at(lesson, name, where))[0]) > 1e-4


def test_texts_of_a_batch_do_not_see_each_other() -> None:
    _, draft, head, lesson = pair()
    alone = Lesson(*(part[1:, :9] for part in lesson))  # without filling and without the other one
    silent = lesson._replace(weights=lesson.weights * torch.tensor([[0.0], [1.0]]))
    assert value(draft, head, alone)[0] == pytest.approx(value(draft, head, silent)[0], abs=1e-5)


def test_nothing_that_counts_is_no_loss_and_no_gradient() -> None:
    _, draft, head, lesson = pair()
    total, gradient = value(draft, head, lesson._replace(weights=torch.zeros_like(lesson.weights)))
    assert total == 0
    assert not bool(gradient.any())


@pytest.mark.parametrize("loud", ["draft", "target"])
def test_probabilities_that_underflow_give_no_nan(loud: str) -> None:
    _, draft, head, lesson = pair()
    if loud == "draft":
        with torch.no_grad():
            draft.lm_head.weight *= 1e4
    else:
        head.rows = head.rows * 1e4
    total, gradient = value(draft, head, lesson)
    assert math.isfinite(total)
    assert bool(gradient.isfinite().all())
    assert total > (1e3 if loud == "draft" else 0)  # not clipped away


class _Largest(TorchDispatchMode):
    """The most rows of any tensor as wide as the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCAB_SIZE:
                self.rows = max(self.rows, tensor.numel() // VOCAB_SIZE)
        return out


def test_no_more_logits_than_a_chunk() -> None:
    target = tiny_model("llama")
    draft = tiny_draft(target)
    tokens = torch.randint(4, VOCAB_SIZE, (8, 40), generator=torch.Generator().manual_seed(2))
    lesson = lesson_of(target, draft, tokens)
    head = Head(target, draft.ids)
    with _Largest() as largest:
        distillation_loss(draft, head, lesson, steps=3, chunk=16).total.backward()
    assert largest.rows == 16 * 3  # also more than the 32 rows of the transposed head
