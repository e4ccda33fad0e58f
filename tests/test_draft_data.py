"""What a draft learns from: vocabulary, lessons, weights, batches."""

from __future__ import annotations

import peft
import pytest
import torch
from drafts import tap, tiny_draft
from tiny import EOS_ID, VOCAB_SIZE, tiny_model

from fastgrpo.drafting.data import Answer, Head, Lesson, answers_of, batches, choose_vocabulary, read_lessons, stacked
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.sampling import SamplingParams

PROMPTS = [[5, 6, 7], [8], list(range(20, 60))]
SOME_IDS = list(range(4, VOCAB_SIZE, 3))


def answers(arch: str = "llama", temperature: float = 1.0) -> list[Answer]:
    rollout = Engine(tiny_model(arch)).generate(
        PROMPTS, SamplingParams(temperature=temperature), group_size=2, max_new_tokens=[6, 9, 1, 12, 7, 3]
    )
    return answers_of(PROMPTS, rollout, 2)


def test_answers_go_with_their_prompts() -> None:
    rollout = Engine(tiny_model("llama")).generate(PROMPTS, SamplingParams(), group_size=2, max_new_tokens=5)
    found = answers_of(PROMPTS, rollout, 2)
    assert [list(answer.prompt) for answer in found] == [
        PROMPTS[0],
        PROMPTS[0],
        PROMPTS[1],
        PROMPTS[1],
        *PROMPTS[2:] * 2,
    ]
    assert [list(answer.token_ids) for answer in found] == [c.token_ids for c in rollout.completions]
    assert [list(answer.logprobs) for answer in found] == [c.logprobs for c in rollout.completions]


# --- vocabulary ------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_what_must_be_and_then_what_is_frequent() -> None:
    texts = [Answer((9, 9, 7), (7, 7, 3), (0.0,) * 3), Answer((2,), (7, 9), (0.0,) * 2)]  # 7: 4, 9: 3, 2 and 3: 1
    assert choose_vocabulary(texts, 2, 12).tolist() == [7, 9]
    assert choose_vocabulary(texts, 2, 12, [11]).tolist() == [7, 11]
    assert choose_vocabulary(texts, 3, 12).tolist() == [2, 7, 9]  # the lower of two equals
    assert choose_vocabulary(texts, 6, 12, [11, 11]).tolist() == [0, 2, 3, 7, 9, 11]  # 0 fills
    assert choose_vocabulary(texts, 12, 12).tolist() == list(range(12))


@pytest.mark.parametrize("size", [0, 1, 13])
def test_a_vocabulary_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"draft vocabulary of {size} tokens.*target has 12.*2 must"):
        choose_vocabulary([], size, 12, [3, 4])


# --- lessons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "options"), [("llama", {}), ("gemma3", {"feature_layers": (1, 3)}), ("qwen2", {})])
def test_a_lesson_holds_what_the_target_made_of_the_text(arch: str, options: dict[str, tuple[int, ...]]) -> None:
    target = tiny_model(arch)
    draft = tiny_draft(target, vocabulary=SOME_IDS, **options)
    done: list[int] = []
    found = read_lessons(target, draft, answers(arch), on_read=done.append)
    assert done[-1] == len(found) == 6
    for lesson, answer in zip(found, answers(arch), strict=True):
        text = torch.tensor([answer.prompt + answer.token_ids])
        assert torch.equal(lesson.tokens, text[0])
        assert torch.allclose(lesson.features, tap(target, text, draft.config.feature_layers)[0], atol=1e-4)
        assert torch.allclose(lesson.final, tap(target, text, [draft.config.target_num_layers])[0], atol=1e-4)
        assert not lesson.final.is_inference()
        # what counts: the target's own mass inside of the draft's vocabulary, by its own full forward
        with torch.no_grad():
            law = target(text).logits[0].softmax(-1)
        mass = law[:, SOME_IDS].sum(-1)
        begins = len(answer.prompt)
        assert not bool(lesson.weights[:begins].any())
        assert torch.allclose(lesson.weights[begins:], mass[begins - 1 : -1], atol=1e-4)
        assert torch.allclose(Head(target, draft.ids).law(lesson.final, 1.0).exp() * mass[:, None], law[:, SOME_IDS])


@pytest.mark.parametrize("temperature", [0.5, 0.0])
def test_weights_are_at_the_temperature_of_the_answers(temperature: float) -> None:
    target = tiny_model("llama")
    draft = tiny_draft(target, vocabulary=SOME_IDS)
    taught = temperature or 1.0  # as log-probs are
    for answer in answers(temperature=temperature):
        (lesson,) = read_lessons(target, draft, [answer], taught)
        with torch.no_grad():
            law = (target(lesson.tokens[None]).logits[0] / taught).softmax(-1)
        begins = len(answer.prompt)
        assert torch.allclose(lesson.weights[begins:], law[begins - 1 : -1, SOME_IDS].sum(-1), atol=1e-4)


def test_a_full_vocabulary_weighs_every_token_one() -> None:
    target = tiny_model("llama")
    for lesson, answer in zip(read_lessons(target, tiny_draft(target), answers()), answers(), strict=True):
        ones = (torch.arange(len(lesson.tokens)) >= len(answer.prompt)).float()
        assert torch.allclose(lesson.weights, ones, atol=1e-4)


def test_a_law_that_is_not_the_heads_product_is_refused() -> None:
    target = tiny_model("llama")
    wrapped = peft.get_peft_model(target, peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    with pytest.raises(ValueError, match="output layer's product"):
        read_lessons(wrapped, tiny_draft(wrapped), answers())


def test_adapters_count_as_they_are() -> None:
    target = tiny_model("llama")
    wrapped = peft.get_peft_model(target, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    draft = tiny_draft(wrapped)
    lesson = read_lessons(wrapped, draft, answers()[:1])[0]
    text = lesson.tokens[None]
    assert torch.allclose(lesson.features, tap(wrapped, text, draft.config.feature_layers)[0], atol=1e-4)
    with wrapped.disable_adapter():
        assert not torch.allclose(lesson.features, tap(wrapped, text, draft.config.feature_layers)[0], atol=1e-2)


# --- batches ---------------------------------------------------------------------------------------------------------


def lesson_of_length(length: int) -> Lesson:
    return Lesson(torch.full((length,), length), torch.ones(length, 4), torch.ones(length, 2), torch.ones(length))


def test_texts_are_stacked_to_one_length() -> None:
    batch = stacked([lesson_of_length(3), lesson_of_length(5)])
    assert [tuple(part.shape) for part in batch] == [(2, 5), (2, 5, 4), (2, 5, 2), (2, 5)]
    assert batch.tokens.tolist() == [[3, 3, 3, 0, 0], [5] * 5]
    assert batch.weights.tolist() == [[1, 1, 1, 0, 0], [1] * 5]


def test_batches_hold_every_lesson_once_within_the_budget() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 40, (150,), generator=generator).tolist() + [500]
    lessons = [lesson_of_length(length) for length in lengths]
    orders = []
    for _ in range(2):
        groups = [[len(lesson.tokens) for lesson in group] for group in batches(lessons, 128, generator)]
        assert sorted(length for group in groups for length in group) == sorted(lengths)
        assert all(max(group) * len(group) <= 128 for group in groups if len(group) > 1)
        assert sum(max(group) * len(group) for group in groups) < 1.3 * sum(lengths)  # little filling
        orders.append(groups)
    assert orders[0] != orders[1]
    again = torch.Generator().manual_seed(3)
    torch.randint(3, 40, (150,), generator=again)
    assert [[len(lesson.tokens) for lesson in group] for group in batches(lessons, 128, again)] == orders[0]


def test_stop_ids_end_an_answer_and_teach() -> None:
    rollout = Engine(tiny_model("llama")).generate([[5]], SamplingParams(), group_size=40, max_new_tokens=40)
    ended = [answer for answer in answers_of([[5]], rollout, 40) if answer.token_ids[-1] == EOS_ID]
    assert ended
    target = tiny_model("llama")
    lesson = read_lessons(target, tiny_draft(target), ended[:1])[0]
    assert lesson.tokens[-1] == EOS_ID
    assert float(lesson.weights[-1]) == pytest.approx(1.0, abs=1e-4)
