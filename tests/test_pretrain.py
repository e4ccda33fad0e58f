"""Making a draft: it learns, the same for the same seed, and leaves everything else alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EOS_ID, tiny_model

from fastgrpo.drafting.data import Lesson
from fastgrpo.drafting.losses import Loss
from fastgrpo.drafting.pretrain import (
    PretrainConfig,
    PretrainProgress,
    begin,
    level,
    pretrain,
    sample_answers,
    schedule,
)
from fastgrpo.models.draft import DraftModel

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
SHORT = {"group_size": 4, "max_new_tokens": 24, "epochs": 6, "batch_tokens": 128, "learning_rate": 3e-3}


def make(target: Any, on_progress: Any = None, **changes: Any) -> DraftModel:
    return pretrain(target, PROMPTS, PretrainConfig(**{**SHORT, **changes}), on_progress=on_progress)


def weights(draft: DraftModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in draft.state_dict().items()}


def test_a_draft_learns_its_answers_and_says_how_far_it_is() -> None:
    told: list[PretrainProgress] = []
    target = tiny_model("llama")
    draft = make(target, told.append)
    stages = [progress.stage for progress in told]
    assert list(dict.fromkeys(stages)) == ["sampling", "reading", "training"]
    assert stages == sorted(stages, key=["sampling", "reading", "training"].index)
    for stage in ("sampling", "reading", "training"):
        last = [progress for progress in told if progress.stage == stage][-1]
        assert last.done == last.total > 0
    metrics = [progress.metrics for progress in told if progress.stage == "training"]
    assert {"loss", "overlap_1", "agreement_3", "cross_entropy_2"} <= metrics[0].keys()
    for step in (1, 2, 3):
        assert metrics[-1][f"overlap_{step}"] > metrics[0][f"overlap_{step}"] + 0.03
    assert not draft.training
    assert draft._embed(torch.tensor([[5]])).shape == (1, 1, 32)  # bound


def test_the_same_seed_gives_the_same_draft_and_no_global_generator_moves() -> None:
    target = tiny_model("llama")
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed + 40)  # which must not matter
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        runs.append(weights(make(target, seed=seed, epochs=1)))
        after = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert (before[1] == after[1]).all()
        assert before[2] == after[2]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0]["fc.weight"], runs[2]["fc.weight"])


def test_the_target_is_left_as_it_was_found() -> None:
    target = tiny_model("gemma3").train()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    make(target, epochs=1)
    assert target.training
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())
    assert all(weight.grad is None for weight in target.parameters())


def test_a_reduced_vocabulary_holds_stops_and_what_was_said() -> None:
    target = tiny_model("llama")
    draft = make(target, vocabulary=30, epochs=1)
    ids = set(draft.ids.tolist())
    assert len(ids) == draft.config.draft_vocab_size == 30
    assert EOS_ID in ids
    config = PretrainConfig(**SHORT)
    said = [token for answer in sample_answers(target, PROMPTS, config) for token in answer.token_ids]
    kept = sum(token in ids for token in said)
    assert kept > 0.5 * len(said)
    assert set(pretrain_with_stops(target, [50, 51]).ids.tolist()) >= {50, 51}


def pretrain_with_stops(target: Any, stops: list[int]) -> DraftModel:
    config = PretrainConfig(**{**SHORT, "epochs": 1, "vocabulary": 8})
    return pretrain(target, PROMPTS, config, stop_token_ids=stops)


def test_a_draft_begins_with_the_targets_norm_and_words() -> None:
    for arch in ("llama", "gemma3"):
        target = tiny_model(arch)
        draft = begin(target, torch.tensor([4, 9, 70]), seed=3)
        # whatever hidden state enters: as if it had come out of the target's last layer
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            ours = draft.logits(hidden)
            theirs = target.get_output_embeddings()(target.model.norm(hidden))[:, [4, 9, 70]]
        assert torch.allclose(ours, 0.3 * theirs, atol=1e-4)


def test_taps_are_brought_to_one_size_and_the_weights_make_up_for_it() -> None:
    target = tiny_model("llama")
    draft = begin(target, None, 0)
    layers, width = len(draft.config.feature_layers), 32
    loudness = torch.tensor([30.0, 0.2]).repeat_interleave(width)
    shapes = [(t, layers * width) for t in (5, 9)]
    generator = torch.Generator().manual_seed(3)
    loud = [torch.randn(shape, generator=generator) * loudness for shape in shapes]
    lessons = [Lesson(torch.zeros(len(x)).long(), x.clone(), torch.zeros(len(x), 32), torch.ones(len(x))) for x in loud]
    with torch.no_grad():
        before = [draft.fuse(x / loudness) for x in loud]
        scale = level(lessons, layers)
        assert torch.allclose(scale, loudness, rtol=0.3)
        assert torch.allclose(lessons[1].features * scale, loud[1], rtol=1e-4)
        inside = [draft.fuse(lesson.features) for lesson in lessons]
        draft.fc.weight /= scale
        for x, trained, plain in zip(loud, inside, before, strict=True):
            assert torch.allclose(draft.fuse(x), trained, atol=1e-5)
            assert float((trained - plain).norm()) < 0.3 * float(plain.norm())


def test_precision_is_float32_in_training_and_the_targets_after() -> None:
    target = tiny_model("llama", dtype=torch.bfloat16)
    assert begin(target, None, 0).lm_head.weight.dtype == torch.float32
    draft = make(target, epochs=1)
    assert {value.dtype for value in draft.parameters()} == {torch.bfloat16}


def test_it_trains_whatever_mode_the_caller_is_in() -> None:
    target = tiny_model("llama")
    wanted = weights(make(target, epochs=1))
    with torch.inference_mode():
        found = weights(make(target, epochs=1))
    assert all(torch.equal(wanted[name], found[name].clone()) for name in wanted)


def test_the_learning_rate_climbs_and_falls_to_nothing() -> None:
    rates = [schedule(i / 100, 0.1) for i in range(101)]
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.5)
    assert rates[10] == max(rates) == 1
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0)
    assert schedule(0, 0) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("steps", 0),
        ("decay", 0.0),
        ("decay", 1.5),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup", 1.0),
        ("max_grad_norm", 0.0),
        ("feature_weight", -1.0),
        ("batch_tokens", 2.5),
        ("group_size", True),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}, but must be"):
        PretrainConfig(**{name: value})


def test_what_cannot_be_learned_from_is_refused() -> None:
    target = tiny_model("llama")
    with pytest.raises(ValueError, match="three tokens"):
        pretrain(target, [[5]], PretrainConfig(group_size=2, max_new_tokens=1))
    with pytest.raises(ValueError, match="draft vocabulary of 1000 tokens"):
        pretrain(target, PROMPTS, PretrainConfig(**{**SHORT, "vocabulary": 1000}))


def test_a_gradient_that_is_not_finite_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(draft: DraftModel, *args: Any, **knobs: Any) -> Loss:
        none = torch.zeros(3)
        return Loss(draft.fc.weight.sum() * torch.inf, none, none, none)

    monkeypatch.setattr("fastgrpo.drafting.pretrain.distillation_loss", diverged)
    with pytest.raises(FloatingPointError, match=r"after 0 tokens.*lower learning_rate, which is 0\.003"):
        make(tiny_model("llama"))
