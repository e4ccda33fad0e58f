"""`speculative_generate`: the published signature and fields, the engine's tokens, lengths that are exact, features."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference_engine import hugging_face_greedy
from tiny import ARCHITECTURES, EOS_ID, PAD_ID, VOCAB_SIZE, tiny_model, tiny_tokenizer
from torch import Tensor

import fastgrpo
from fastgrpo import DraftModel, Engine, SamplingParams, SpeculativeModel, speculative_generate
from fastgrpo.models.target import open_target
from fastgrpo.speculation.generate import SpeculativeOutput
from fastgrpo.speculation.policy import make_policy

# Names, order and defaults as published; `...` where there is none.
PUBLISHED = {
    "model": ...,
    "input_ids": ...,
    "attention_mask": ...,
    "tokenizer": ...,
    "do_sample": False,
    "repeated_generate_nums": None,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": None,
    "verification_capacity": 160,
    "max_draft_token_length": 5,
    "max_draft_k": 8,
    "max_verification_num": 160,
    "min_draft_token_length": 3,
    "draft_token_length_c": 0.75,
    "statistical_time": True,
    "return_all_draft_input": False,
    "max_length": 2048,
}
FIELDS = (
    "generated_token_ids",
    "max_sequence_length",
    "total_acc_length",
    "total_decoded_token_num",
    "total_acc",
    "total_time_cost",
    "target_time_cost",
    "draft_time_cost",
    "check_time_cost",
    "prefill_time_cost",
    "post_time_cost",
    "all_draft_input_states",
    "all_draft_input_ids",
)
_GENERATOR = torch.Generator().manual_seed(2)
PROMPTS = [torch.randint(4, VOCAB_SIZE, (n,), generator=_GENERATOR).tolist() for n in (5, 9, 1)]
MAX_LENGTH = 24
TOKENIZER = tiny_tokenizer()
SAMPLED = {"do_sample": True, "repeated_generate_nums": 2, "temperature": 1.0, "top_p": 0.95, "max_length": MAX_LENGTH}


@functools.cache
def model_of(arch: str) -> Any:
    return tiny_model(arch)


@functools.cache
def pair_of(arch: str) -> SpeculativeModel:
    """A random draft that proposes every third token; its trees are wide enough to be right now and then."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SpeculativeModel(model_of(arch), DraftModel.for_target(model_of(arch), vocabulary=range(0, 100, 3)))


def padded(prompts: Sequence[list[int]], side: str = "left") -> tuple[Tensor, Tensor]:
    batch = TOKENIZER.pad({"input_ids": [list(p) for p in prompts]}, padding_side=side, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


def generate(model: Any, prompts: Sequence[list[int]] = tuple(PROMPTS), **options: Any) -> SpeculativeOutput:
    return speculative_generate(model, *padded(prompts), TOKENIZER, **{"max_length": MAX_LENGTH, **options})


def by_the_engine(arch: str, law: SamplingParams, **options: Any) -> list[list[int]]:
    limits = [MAX_LENGTH - len(prompt) for prompt in PROMPTS for _ in range(options.get("group_size", 1))]
    rollout = Engine(model_of(arch)).generate(PROMPTS, law, max_new_tokens=limits, **options)
    return [completion.token_ids for completion in rollout.completions]


# --- what goes in and comes out -------------------------------------------------------------------------------------


def test_the_signature_is_the_published_one_and_ours_are_keywords() -> None:
    parameters = inspect.signature(speculative_generate).parameters
    given = {
        name: ... if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    assert list(given.items()) == list(PUBLISHED.items())
    ours = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert ours == ["seed", "first_sequence_uid", "policy"]


def test_the_result_is_the_published_dict_with_attributes() -> None:
    output = generate(pair_of("llama"), **SAMPLED)
    assert tuple(output)[: len(FIELDS)] == FIELDS
    for name in output:
        assert output[name] is getattr(output, name)
    assert {"logprobs", "sampling_logprobs", "finish_reasons", "rounds", "drafted", "accepted"} <= set(output)
    assert output.all_draft_input_states is None and output.all_draft_input_ids is None
    # what the published trainer does with it
    output["decoded_sequences"] = [TOKENIZER.decode(ids) for ids in output["generated_token_ids"]]
    assert len(dict(output)["decoded_sequences"]) == 6
    assert "decoded_sequences" in output and output.get("nothing") is None
    with pytest.raises(KeyError, match="nothing"):
        output["nothing"]
    del output["decoded_sequences"]
    assert "decoded_sequences" not in output


@pytest.mark.parametrize("speculate", [False, True])
def test_the_counts_are_what_their_names_say(speculate: bool) -> None:
    output = generate(pair_of("qwen3") if speculate else model_of("qwen3"), **SAMPLED)
    responses = output.generated_token_ids
    lengths = [len(response) for response in responses]
    assert output.max_sequence_length == max(lengths)
    assert output.total_acc_length == sum(lengths) - len(lengths)
    assert output.total_decoded_token_num == sum(output.rounds)
    assert output.total_acc == max(lengths) / output.stats.passes
    for i, blocks in enumerate(output.blocks):
        assert (sum(blocks), len(blocks)) == (lengths[i], output.rounds[i] + 1)
        assert len(output.logprobs[i]) == len(output.sampling_logprobs[i]) == lengths[i]
        assert output.finish_reasons[i] == ("stop" if responses[i][-1] == EOS_ID else "length")
    assert (sum(output.drafted) > 0) == speculate
    assert (sum(output.accepted) > 0) == speculate
    assert (output.total_acc_length > output.total_decoded_token_num) == speculate


def test_the_times_add_up_and_their_parts_are_left_out_when_unwanted() -> None:
    timed = generate(pair_of("llama"), **SAMPLED)
    parts = [timed[f"{part}_time_cost"] for part in ("prefill", "target", "draft", "post")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) < timed.total_time_cost
    assert 0 < timed.check_time_cost < timed.draft_time_cost
    untimed = generate(pair_of("llama"), statistical_time=False, **SAMPLED)
    assert [untimed[f"{part}_time_cost"] for part in ("target", "draft", "check")] == [0, 0, 0]
    assert untimed.total_time_cost > untimed.prefill_time_cost > 0
    assert untimed.generated_token_ids == timed.generated_token_ids


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "side"), [*((arch, "left") for arch in ARCHITECTURES), ("llama", "right")])
def test_greedy_is_hugging_faces_on_padded_batches(arch: str, side: str) -> None:
    model = model_of(arch)
    expected = [hugging_face_greedy(model, p, MAX_LENGTH - len(p), [EOS_ID]) for p in PROMPTS]
    for speaker in (model, pair_of(arch)):
        output = speculative_generate(speaker, *padded(PROMPTS, side), TOKENIZER, max_length=MAX_LENGTH)
        assert output.generated_token_ids == expected
        assert output.sampling_logprobs is None
    cold = speculative_generate(model, *padded(PROMPTS, side), TOKENIZER, True, None, 0, max_length=MAX_LENGTH)
    assert cold.generated_token_ids == expected  # temperature 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sampled_tokens_are_the_engines_with_every_policy(arch: str) -> None:
    law = SamplingParams(temperature=1.0, top_p=0.95)
    expected = by_the_engine(arch, law, group_size=2, seed=3, first_uid=40)
    assert len(set(map(tuple, expected))) == len(expected)
    assert any(a[0] != b[0] for a, b in zip(expected[::2], expected[1::2], strict=True))  # no shared first token
    policies: list[Any] = ["paper", "off", make_policy("fixed", spec_depth=2, spec_width=4)]
    for policy in policies:
        output = generate(pair_of(arch), seed=3, first_sequence_uid=40, policy=policy, **SAMPLED)
        assert output.generated_token_ids == expected
        assert (sum(output.drafted) > 0) == (policy != "off")
    plain = generate(model_of(arch), seed=3, first_sequence_uid=40, **SAMPLED)
    assert plain.generated_token_ids == expected
    for got, wanted in zip(output.logprobs, plain.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=0, atol=1e-4)


def test_truncation_is_off_where_falsy_and_on_where_given() -> None:
    for given, law in (
        ({"top_p": None, "top_k": 0}, SamplingParams(temperature=0.8)),
        ({"top_p": 0.0, "top_k": None}, SamplingParams(temperature=0.8)),
        ({"top_k": 3}, SamplingParams(temperature=0.8, top_p=0.9, top_k=3)),
    ):
        output = generate(model_of("llama"), do_sample=True, **given)
        assert output.generated_token_ids == by_the_engine("llama", law)
        assert (output.sampling_logprobs is None) == (not law.truncates)


def test_new_uids_or_another_seed_are_new_noise() -> None:
    first, again, later, other = (
        generate(model_of("llama"), **SAMPLED, **options).generated_token_ids
        for options in ({}, {}, {"first_sequence_uid": 6}, {"seed": 1})
    )
    assert first == again
    assert first != later and first != other and later != other


def test_a_single_prompt_and_no_mask() -> None:
    expected = generate(model_of("llama"), PROMPTS[:1]).generated_token_ids
    ids = torch.tensor(PROMPTS[0])
    for input_ids, mask in ((ids, None), (ids, torch.ones_like(ids)), (ids[None], None), (ids[None], ids[None] > 0)):
        output = speculative_generate(model_of("llama"), input_ids, mask, TOKENIZER, max_length=MAX_LENGTH)
        assert output.generated_token_ids == expected
    with pytest.warns(UserWarning, match="begin or end with the pad token 0 and attention_mask is None"):
        speculative_generate(model_of("llama"), padded(PROMPTS)[0], None, TOKENIZER, max_length=MAX_LENGTH)


def test_a_row_stops_at_the_tokenizers_eos_and_at_the_models() -> None:
    (free,) = generate(model_of("llama"), PROMPTS[:1]).generated_token_ids
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(free[7])
    model.generation_config.eos_token_id = [PAD_ID, free[4]]
    for stops in ([free[7], free[4]], [free[7]]):
        output = speculative_generate(model, *padded(PROMPTS[:1]), tokenizer, max_length=MAX_LENGTH)
        end = min(free.index(token) for token in stops) + 1
        assert output.generated_token_ids == [free[:end]]
        assert output.finish_reasons == ["stop"]
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize("speculate", [False, True])
def test_max_length_counts_prompt_and_response_of_each_row_exactly(speculate: bool) -> None:
    model = tiny_model("mistral")
    model.generation_config.eos_token_id = None
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    speaker = SpeculativeModel(model, DraftModel.for_target(model)) if speculate else model
    for max_length in (10, 11, 17):
        output = speculative_generate(speaker, *padded(PROMPTS), tokenizer, True, 2, max_length=max_length)
        lengths = [len(response) for response in output.generated_token_ids]
        assert lengths == [max_length - len(prompt) for prompt in PROMPTS for _ in range(2)]
        assert set(output.finish_reasons) == {"length"}


# --- features -------------------------------------------------------------------------------------------------------


def features_of(model: Any, text: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, :-1]


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "general"])
@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_features_are_a_full_forwards_and_fit_for_training(
    arch: str, speculate: bool, lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = functools.partial(open_target, lean=lean)
    monkeypatch.setattr("fastgrpo.speculation.engine.open_target", opened)
    model = pair_of(arch) if speculate else model_of(arch)
    prompts = [*PROMPTS, [7] * (MAX_LENGTH - 1)]  # the last row ends with its first token
    with torch.inference_mode(arch == "llama"):  # as the published trainer calls it
        output = generate(model, prompts, return_all_draft_input=True, **SAMPLED)
    states, ids = output.all_draft_input_states, output.all_draft_input_ids
    assert len(states) == len(ids) == 2 * len(prompts)
    assert len({len(response) for response in output.generated_token_ids}) > 2  # rows leave early and move
    assert (sum(output.accepted) > 0) == speculate
    for i, response in enumerate(output.generated_token_ids):
        text = [*prompts[i // 2], *response]
        assert ids[i].tolist() == text[1:]
        torch.testing.assert_close(states[i], features_of(model_of(arch), text), rtol=0, atol=1e-4)
    weight = torch.ones(states[0].shape[1], requires_grad=True)
    (states[0] @ weight * ids[0]).sum().backward()
    assert weight.grad is not None


def test_the_engine_keeps_the_layers_asked_for_while_rows_wait() -> None:
    pair = pair_of("qwen2")
    law = SamplingParams()
    engine = Engine(pair.target, slots=2, proposer=pair.proposer(law))
    plain = Engine(pair.target, slots=2)
    for feature_layers in ((0, 2, 3), tuple(pair.draft.config.feature_layers)):
        seen = []
        arguments: dict[str, Any] = {"group_size": 2, "max_new_tokens": [9, 1, 12, 4, 2, 7], "stop_token_ids": []}
        arguments |= {"feature_layers": feature_layers, "on_completion": seen.append}
        rollout = engine.generate(PROMPTS, law, **arguments)
        assert len(seen) == 6
        expected = plain.generate(PROMPTS, law, **arguments)
        for completion, same in zip(rollout.completions, expected.completions, strict=True):
            assert completion.token_ids == same.token_ids
            text = torch.tensor([[*PROMPTS[completion.index // 2], *completion.token_ids]])
            with torch.no_grad():
                states = pair.target(text, output_hidden_states=True).hidden_states
            wanted = torch.cat([states[layer] for layer in feature_layers], -1)[0, :-1]
            torch.testing.assert_close(completion.features, wanted, rtol=0, atol=1e-4)
            torch.testing.assert_close(same.features, wanted, rtol=0, atol=1e-4)
        assert rollout.stats.accepted > 0


def test_features_are_recorded_when_the_draft_cannot_draft(caplog: pytest.LogCaptureFixture) -> None:
    draft = DraftModel.for_target(model_of("llama"))
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    output = generate(SpeculativeModel(model_of("llama"), draft), return_all_draft_input=True, **SAMPLED)
    assert "decoded without it" in caplog.text
    plain = generate(model_of("llama"), return_all_draft_input=True, **SAMPLED)
    assert output.generated_token_ids == plain.generated_token_ids
    for got, wanted in zip(output.all_draft_input_states, plain.all_draft_input_states, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 9}, r"prompt 1 has 9 tokens and max_length.* is 9, which leaves no room.*: raise max_length"),
        ({"max_length": 2048}, r"max_length is 2048, but the model has 1024 positions: lower it to 1024"),
        ({"max_length": 12.5}, r"max_length is 12\.5, but must be a whole number"),
        ({"repeated_generate_nums": 0}, r"repeated_generate_nums is 0, but must be a whole number of at least 1"),
        ({"do_sample": 1}, r"do_sample is 1, but must be True, or False"),
        ({"do_sample": True, "temperature": -1.0}, r"temperature is -1\.0"),
        ({"do_sample": True, "top_p": 1.5}, r"top_p is 1\.5"),
        ({"do_sample": True, "top_k": 2.0}, r"top_k is 2\.0"),
        ({"verification_capacity": 0}, r"verification_capacity is 0"),
        ({"min_draft_token_length": 6}, r"min_draft_token_length is 6 and max_draft_token_length is 5"),
        ({"draft_token_length_c": 0}, r"draft_token_length_c is 0"),
        ({"policy": "papr"}, r"'papr' is no policy: did you mean 'paper'"),
        ({"policy": None}, r"policy is None, but must be the name of a policy"),
        ({"seed": 0.5}, r"seed is 0\.5"),
        ({"first_sequence_uid": "a"}, r"first_sequence_uid is 'a'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model_of("llama"), **options)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros((2, 0), dtype=torch.long), None, r"input_ids has the shape \(2, 0\)"),
        (torch.zeros((1, 2, 3), dtype=torch.long), None, r"input_ids has the shape \(1, 2, 3\)"),
        (torch.tensor([[0.5]]), None, r"dtype torch\.float32, but must be token ids"),
        (torch.tensor([[5, 6]]), torch.tensor([[1]]), r"attention_mask has the shape \(1, 1\) and input_ids \(1, 2\)"),
        (torch.tensor([[5, 6]]), torch.tensor([[0.0, -1e9]]), r"attention_mask holds -1000000000\.0"),
        (torch.tensor([[5, 6], [7, 8]]), torch.tensor([[0, 1], [0, 0]]), r"prompt 1 is all padding"),
        (torch.tensor([[5, VOCAB_SIZE]]), None, r"token id 100, but the model knows 0 to 99"),
    ],
)
def test_input_that_cannot_be_is_refused(ids: Tensor, mask: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculative_generate(model_of("llama"), ids, mask, TOKENIZER, max_length=MAX_LENGTH)


def test_models_and_drafts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the draft is a LlamaForCausalLM, but must be a DraftModel: load one"):
        SpeculativeModel(model_of("llama"), model_of("llama"))
    with pytest.raises(ValueError, match=r"target_model_type 'qwen3', and this one has 'llama'"):
        SpeculativeModel(model_of("llama"), pair_of("qwen3").draft)
    draft = DraftModel.for_target(model_of("llama")).to("meta")
    with pytest.raises(
        ValueError, match=r"the draft is on meta and the target on cpu: move it there, draft\.to\('cpu'\)"
    ):
        SpeculativeModel(model_of("llama"), draft)
    with pytest.raises(ValueError, match="not a Hugging Face causal language model"):
        generate(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"feature_layers is \[1, 4\], but must be ascending.* 0 to 3"):
        Engine(model_of("llama")).generate([[5]], SamplingParams(), feature_layers=[1, 4])
    assert fastgrpo.speculative_generate is speculative_generate
