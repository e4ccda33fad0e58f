"""`speculative_generate`: the published function's arguments and results, answered by the engine.

Only names are translated here: rows, rounds and laws are the engine's. docs/published-interface.md says argument by
argument what is the same as published and what is not, and why.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastgrpo.models.draft import DraftModel
from fastgrpo.models.draft_config import base_of
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import Policy, make_policy
from fastgrpo.speculation.proposers import DraftProposer
from fastgrpo.speculation.requests import Rollout, RolloutStats, whole_number
from fastgrpo.speculation.sampling import SamplingParams

Clock = Callable[[], float]


class SpeculativeModel:
    """A target and the draft that speaks ahead of it.

    target: a Hugging Face causal LM, plain or under PEFT. draft: one made for this kind of model; it is bound to the
    target here. Raises ValueError for a draft that does not fit or lies on another device.
    """

    def __init__(self, target: Any, draft: DraftModel):
        if not isinstance(draft, DraftModel):
            raise ValueError(
                f"the draft is a {type(draft).__name__}, but must be a DraftModel: load one with "
                "DraftModel.from_pretrained(folder), or build one with DraftModel.for_target(target)."
            )
        self.target, self.draft = target, draft.bind(target)
        here, there = base_of(target).get_input_embeddings().weight.device, draft.lm_head.weight.device
        if here != there:
            raise ValueError(
                f"the draft is on {there} and the target on {here}: move it there, draft.to({str(here)!r})."
            )

    def proposer(self, law: SamplingParams, clock: Clock = time.perf_counter) -> TimedProposer:
        """Where drafts come from, for the `Engine`, when tokens are drawn by `law`."""
        return TimedProposer(self.draft, law.temperature or 1.0, clock)


class TimedProposer(DraftProposer):
    """Counts the seconds that the draft takes to read what was accepted: the published check_time_cost."""

    def __init__(self, draft: DraftModel, temperature: float, clock: Clock):
        super().__init__(draft, temperature)
        self.clock, self.check_s = clock, 0.0

    def _catch_up(self, n: int) -> Tensor:
        started = self.clock()
        hidden = super()._catch_up(n)
        self.check_s += self.clock() - started
        return hidden


@dataclass(eq=False)
class SpeculativeOutput(MutableMapping[str, Any]):
    """What `speculative_generate` returns: attributes, and a mapping with the same names, as the published dict.

    Lists have one entry a response, in the order prompt * repeated_generate_nums + number in the group. The first
    thirteen fields are the published ones, times in seconds.

    generated_token_ids: responses without prompt, stop token included. max_sequence_length: tokens of the longest.
    total_acc_length: tokens emitted in rounds, so without each response's first, over all responses.
    total_decoded_token_num: rounds, each counted once for every response that took part; the quotient of the two is
    the mean accept length. total_acc: max_sequence_length by the number of rounds, 0 where there was none.
    total_time_cost: the whole call. prefill_time_cost: running the prompts, the draft's reading of them included.
    target_time_cost: the target's passes after that, and drawing tokens. draft_time_cost: proposing tokens and keeping
    what comes of them; its part check_time_cost: the draft's passes over accepted tokens. post_time_cost: putting this
    answer together. Phases do not overlap otherwise, and target, draft and check are 0 without statistical_time.
    all_draft_input_states, all_draft_input_ids: None unless asked for; of a response with its prompt, T tokens t, the
    features f_0..f_{T-2} after the target's final norm, (T - 1, hidden), and t_1..t_{T-1}, (T - 1,) int64.

    logprobs: log softmax(logits / temperature) of every token over the full vocabulary (temperature 1 when greedy);
    sampling_logprobs: under the truncated law that was drawn from, None where nothing truncates. finish_reasons: "stop"
    or "length". rounds, drafted, accepted: target passes after the prefill, draft tokens verified, draft tokens
    accepted. blocks: tokens that each pass gave, the prefill's 1 first. stats: of the whole call.
    """

    generated_token_ids: list[list[int]]
    max_sequence_length: int
    total_acc_length: int
    total_decoded_token_num: int
    total_acc: float
    total_time_cost: float
    target_time_cost: float
    draft_time_cost: float
    check_time_cost: float
    prefill_time_cost: float
    post_time_cost: float
    all_draft_input_states: list[Tensor] | None = field(repr=False)
    all_draft_input_ids: list[Tensor] | None = field(repr=False)
    logprobs: list[list[float]] = field(repr=False)
    sampling_logprobs: list[list[float]] | None = field(repr=False)
    finish_reasons: list[str]
    rounds: list[int]
    drafted: list[int]
    accepted: list[int]
    blocks: list[list[int]] = field(repr=False)
    stats: RolloutStats = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        vars(self)[name] = value  # the published trainer puts its own entries beside ours

    def __delitem__(self, name: str) -> None:
        del vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


def speculative_generate(
    model: SpeculativeModel | Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    tokenizer: Any,
    do_sample: bool = False,
    repeated_generate_nums: int | None = None,
    temperature: float = 0.8,
    top_p: float | None = 0.9,
    top_k: int | None = None,
    verification_capacity: int = 160,
    max_draft_token_length: int = 5,
    max_draft_k: int = 8,
    max_verification_num: int = 160,
    min_draft_token_length: int = 3,
    draft_token_length_c: float = 0.75,
    statistical_time: bool = True,
    return_all_draft_input: bool = False,
    max_length: int = 2048,
    *,
    seed: int = 0,
    first_sequence_uid: int = 0,
    policy: str | Policy = "paper",
) -> SpeculativeOutput:
    """Sample `repeated_generate_nums` responses (None: one) to each prompt, with the model's draft where it has one.

    model: a `SpeculativeModel`, or a Hugging Face causal LM, which decodes plainly. input_ids: (prompts, length) token
    ids, or (length,); attention_mask: 1 for tokens and 0 for padding, on whichever side, None where nothing is padded.
    A response ends with the first of the tokenizer's eos_token_id and of the model's generation_config, or where prompt
    and response together have max_length tokens, padding not counted.
    do_sample False or temperature 0 is greedy; top_k and top_p are off where falsy. The six arguments from
    verification_capacity to draft_token_length_c are the policy's, where that is a name (see `policy.PaperPolicy`).
    statistical_time: time phases, waiting for an accelerator at their ends. return_all_draft_input: return the target's
    features as well, 2 * hidden numbers a token while it runs and half of that afterwards, on the model's device.

    Response r draws its noise from (seed, first_sequence_uid + r): a call is repeated by the same two numbers, and
    fresh noise in the next call needs another seed, or a first_sequence_uid past the uids that were used.

    Raises ValueError for arguments that cannot be, a prompt that leaves no room for a response among them;
    FloatingPointError when the model's logits are not finite; MemoryError when not even one row fits.
    """
    started = time.perf_counter()
    stops = _ids_of(getattr(tokenizer, "eos_token_id", None))
    prompts = _prompts(input_ids, attention_mask, getattr(tokenizer, "pad_token_id", None))
    group = 1
    if repeated_generate_nums is not None:
        group = whole_number("repeated_generate_nums", repeated_generate_nums, at_least=1)
    law = _law(do_sample, temperature, top_p, top_k)
    policy = _policy(
        policy,
        verification_capacity=verification_capacity,
        max_draft_token_length=max_draft_token_length,
        max_draft_k=max_draft_k,
        max_verification_num=max_verification_num,
        min_draft_token_length=min_draft_token_length,
        draft_token_length_c=draft_token_length_c,
    )
    engine, drafter = _engine(model, law, policy, statistical_time)
    rooms = _rooms(prompts, max_length, engine.target.longest)
    rollout = engine.generate(
        prompts,
        law,
        group_size=group,
        max_new_tokens=[room for room in rooms for _ in range(group)],
        stop_token_ids=sorted(engine.stop_token_ids | set(stops)),
        seed=whole_number("seed", seed),
        first_uid=whole_number("first_sequence_uid", first_sequence_uid),
        feature_layers=[len(engine.target.layout.heads)] if return_all_draft_input else [],
    )
    output = _output(rollout, prompts, group, drafter.check_s if drafter else 0.0)
    if not statistical_time:
        output.target_time_cost = output.draft_time_cost = output.check_time_cost = 0.0
    output.total_time_cost = time.perf_counter() - started
    return output


def _engine(
    model: SpeculativeModel | Any, law: SamplingParams, policy: Policy, timed: bool
) -> tuple[Engine, TimedProposer | None]:
    """The engine for a call, and who drafts in it by a model, if anybody does."""
    target = model.target if isinstance(model, SpeculativeModel) else model
    clock = _clock(base_of(target).get_input_embeddings().weight.device, timed)
    drafter = model.proposer(law, clock) if isinstance(model, SpeculativeModel) else None
    return Engine(target, proposer=drafter, policy=policy, clock=clock), drafter


def _policy(policy: str | Policy, **knobs: Any) -> Policy:
    if isinstance(policy, str):
        return make_policy(policy, **knobs)
    if not callable(getattr(policy, "choose", None)):
        raise ValueError(
            f"policy is {policy!r}, but must be the name of a policy, such as 'paper' or 'off', or an object with its "
            "methods (see fastgrpo.speculation.policy.Policy)."
        )
    return policy


def _ids_of(ids: Any) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _prompts(input_ids: Any, attention_mask: Any, pad: int | None) -> list[list[int]]:
    """The real tokens of every row."""
    ids = torch.as_tensor(input_ids)
    if ids.ndim not in (1, 2) or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"input_ids has the shape {tuple(ids.shape)} and the dtype {ids.dtype}, but must be token ids, "
            "(prompts, length) or (length,): pass the tokenizer's input_ids."
        )
    mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(mask.shape)} and input_ids {tuple(ids.shape)}: pass the mask "
            "that the tokenizer gave with these ids, or None where nothing is padded."
        )
    odd = mask[(mask != 0) & (mask != 1)]
    if len(odd):
        raise ValueError(
            f"attention_mask holds {odd[0].item()}, but must be 1 for tokens and 0 for padding: pass the tokenizer's, "
            "not an additive one."
        )
    rows = [ids, mask.bool()] if ids.ndim == 2 else [ids[None], mask.bool()[None]]
    texts = [row[real].tolist() for row, real in zip(*(part.cpu() for part in rows), strict=True)]
    for i, text in enumerate(texts):
        if not text:
            raise ValueError(f"prompt {i} is all padding: give it at least one token, or leave the row out.")
    if attention_mask is None and len(texts) > 1 and any(pad in (text[0], text[-1]) for text in texts):
        warnings.warn(
            f"input_ids begin or end with the pad token {pad} and attention_mask is None, so it counts as text: pass "
            "the tokenizer's attention_mask.",
            stacklevel=3,
        )
    return texts


def _law(do_sample: bool, temperature: float, top_p: float | None, top_k: int | None) -> SamplingParams:
    if not isinstance(do_sample, bool):
        raise ValueError(f"do_sample is {do_sample!r}, but must be True, or False for greedy decoding.")
    if not do_sample:
        return SamplingParams(temperature=0)
    return SamplingParams(temperature=temperature, top_k=top_k or 0, top_p=top_p or 1.0)


def _rooms(prompts: Sequence[Sequence[int]], max_length: int, longest: int | None) -> list[int]:
    """How many tokens each prompt leaves for its responses."""
    whole_number("max_length", max_length, at_least=1)
    if longest is not None and max_length > longest:
        raise ValueError(f"max_length is {max_length}, but the model has {longest} positions: lower it to {longest}.")
    for i, prompt in enumerate(prompts):
        if len(prompt) >= max_length:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens and max_length, prompt and response together, is {max_length}, "
                "which leaves no room for a response: raise max_length, or leave the prompt out."
            )
    return [max_length - len(prompt) for prompt in prompts]


def _clock(device: torch.device, waits: bool) -> Clock:
    """Seconds by the host's clock; one that waits reads it when the device has done its work."""
    if not waits or device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def _output(rollout: Rollout, prompts: Sequence[list[int]], group: int, check_s: float) -> SpeculativeOutput:
    """Everything but the total time, which is not over yet."""
    began, done, stats = time.perf_counter(), rollout.completions, rollout.stats
    states, following = None, None
    if done[0].features is not None:
        states = [completion.features for completion in done if completion.features is not None]
        with torch.inference_mode(False):  # so that a caller in inference mode can train on them afterwards
            following = [
                torch.tensor([*prompts[c.index // group], *c.token_ids][1:], device=state.device)
                for c, state in zip(done, states, strict=True)
            ]
    longest = max(len(completion.token_ids) for completion in done)
    truncated = [c.sampling_logprobs for c in done if c.sampling_logprobs is not None]
    return SpeculativeOutput(
        generated_token_ids=[completion.token_ids for completion in done],
        max_sequence_length=longest,
        total_acc_length=stats.completion_tokens - len(done),
        total_decoded_token_num=sum(completion.rounds for completion in done),
        total_acc=longest / stats.passes if stats.passes else 0.0,
        total_time_cost=0.0,
        target_time_cost=stats.decode_s + stats.sampling_s,
        draft_time_cost=stats.draft_s,
        check_time_cost=check_s,
        prefill_time_cost=stats.prefill_s,
        post_time_cost=time.perf_counter() - began,
        all_draft_input_states=states,
        all_draft_input_ids=following,
        logprobs=[completion.logprobs for completion in done],
        sampling_logprobs=truncated or None,
        finish_reasons=[completion.finish_reason for completion in done],
        rounds=[completion.rounds for completion in done],
        drafted=[completion.drafted for completion in done],
        accepted=[completion.accepted for completion in done],
        blocks=[completion.blocks for completion in done],
        stats=stats,
    )
