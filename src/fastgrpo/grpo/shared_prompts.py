"""Replaces, on one model, the scoring forward that TRL hangs on it: prompts of a group run once, only responses scored.

TRL's trainer gives its model a forward that returns log-probs when called with `fused_lm_head=True`. It stays, and is
called by the one here with fewer tokens: rows that share a prompt become one unit, in which each response sees the
prompt and itself; short units lie behind one another where there would be padding; and the head is given the hidden
states of response tokens only. Losses, log-probs and entropies are still TRL's. Nothing else of the model changes, and
a call that asks for anything else is passed on as it is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastgrpo.grpo.batching import MAX_SHARED_TOKENS, Unit, pack, units

# Families whose attention takes a mask per pair of tokens, with positions given: what tests/test_shared_prompts.py ran.
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")


@dataclass(frozen=True)
class Sequences:
    """Rows of a batch (rows, columns) laid out as sequences (sequences, width) of units.

    source: flat index of each token in the batch. position: of each token in its text. unit: which it is part of, -1
    for padding. segment: 0 in the prompt of a unit, 1.. in its responses. scored: flat indices of the tokens whose next
    token is scored. target: flat index in the batch of the token that each of them predicts.
    """

    source: Tensor
    position: Tensor
    unit: Tensor
    segment: Tensor
    scored: Tensor
    target: Tensor

    @classmethod
    def of(
        cls,
        bins: Sequence[Sequence[Unit]],
        prompt_lengths: Sequence[int],
        lengths: Sequence[int],
        start: int,
        columns: int,
    ) -> Sequences:
        """start: the column where completions begin, columns: of the batch; all on the CPU."""
        shape = (len(bins), max(sum(unit.length for unit in chosen) for chosen in bins))
        source, position, segment = torch.zeros(3, *shape, dtype=torch.long).unbind()
        owner = torch.full(shape, -1)
        scored, target, number = [], [], 0
        for sequence, chosen in enumerate(bins):
            at = 0
            for unit in chosen:
                owner[sequence, at : at + unit.length] = number
                number += 1
                shared = prompt_lengths[unit.rows[0]] - 1
                last = unit.rows[0] * columns + start - 1  # of the prompt
                source[sequence, at : at + shared] = torch.arange(last - shared, last)
                position[sequence, at : at + shared] = torch.arange(shared)
                at += shared
                for name, row in enumerate(unit.rows, 1):
                    here, last = slice(at, at + lengths[row]), row * columns + start - 1
                    source[sequence, here] = torch.arange(last, last + lengths[row])
                    position[sequence, here] = torch.arange(shared, shared + lengths[row])
                    segment[sequence, here] = name
                    scored.append(sequence * shape[1] + torch.arange(here.start, here.stop))
                    target.append(torch.arange(last + 1, last + 1 + lengths[row]))
                    at = here.stop
        return cls(source, position, owner, segment, torch.cat(scored), torch.cat(target))

    def to(self, device: torch.device) -> Sequences:
        return Sequences(**{name: value.to(device) for name, value in vars(self).items()})

    def visible(self, window: int | None) -> Tensor:
        """True where a token (second to last axis) may look at another: (sequences, 1, width, width)."""
        same_unit = self.unit[:, :, None] == self.unit[:, None, :]
        mine, theirs = self.segment[:, :, None], self.segment[:, None, :]
        position = self.position.int()
        distance = position[:, :, None] - position[:, None, :]
        allowed = same_unit & ((theirs == 0) | (theirs == mine)) & (distance >= 0)
        if window is not None:
            allowed &= distance < window
        return allowed.unsqueeze(1)


def install(model: PreTrainedModel, *, max_tokens: int | None) -> None:
    """Hang the forward on `model`, which has TRL's. max_tokens: of a sequence with several rows."""
    trls = model.forward

    @functools.wraps(type(model).forward)  # generate() checks its arguments against the signature
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if value is not None}  # PEFT fills in None
        if args or not given.pop("fused_lm_head", False) or given.keys() != {"input_ids", "attention_mask", "labels"}:
            return trls(*args, **kwargs)
        return _score(self, trls, **given, max_tokens=max_tokens)

    model.forward = types.MethodType(forward, model)


def shares(model: PreTrainedModel) -> bool:
    """Whether rows of one prompt may be run as one sequence: they would share their dropout too, so not with any."""
    if type(model).__name__ not in FAMILIES or model.config._attn_implementation not in ("sdpa", "eager"):
        return False
    if not model.training:
        return True
    drops = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    return not drops and not getattr(model.config, "attention_dropout", 0)


def shared_units(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    max_tokens: int | None,
) -> list[Unit]:
    """The units that `model` runs for rows with these prompts and numbers of response tokens."""
    return units(
        prompts,
        [len(prompt) for prompt in prompts],
        lengths,
        width=model.config.hidden_size,
        max_tokens=MAX_SHARED_TOKENS if max_tokens is None else min(max_tokens, MAX_SHARED_TOKENS),
    )


def _score(
    model: PreTrainedModel,
    trls: Callable[..., Any],
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    max_tokens: int | None,
) -> Any:
    """What TRL's forward returns for these rows, (rows, columns - 1) per field."""
    wanted = labels != -100
    wanted[:, 0] = False  # nothing predicts a first token
    if not bool(wanted.any()):
        return trls(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    sequences = _sequences(model, input_ids, attention_mask, wanted, max_tokens) if shares(model) else None
    if sequences is None:
        target = wanted.flatten().nonzero().squeeze(1)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        scored = target - 1
    else:
        target, scored = sequences.target, sequences.scored
        inputs = {
            "input_ids": input_ids.flatten()[sequences.source],
            "attention_mask": _masks(model, sequences),
            "position_ids": sequences.position,
        }

    def only_scored(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden.flatten(0, 1)[scored.to(hidden.device)].unsqueeze(0)
        return output

    hook = model.base_model.register_forward_hook(only_scored)
    try:
        output = trls(**inputs, shift_labels=labels.flatten()[target].unsqueeze(0), fused_lm_head=True)
    finally:
        hook.remove()
    return _spread(output, target, labels.shape)


def _spread(output: Any, target: Tensor, shape: torch.Size) -> Any:
    """Put the values of scored tokens where TRL expects them: column c is about token c + 1, others are 0."""
    fields = {"label_mask": torch.zeros(shape, dtype=torch.bool, device=target.device)}
    fields["label_mask"].view(-1)[target] = True
    fields["label_mask"] = fields["label_mask"][:, 1:]
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"):
        values = getattr(output, name)
        if values is not None:
            whole = values.new_zeros(shape.numel()).index_put((target,), values.squeeze(0))
            fields[name] = whole.view(shape)[:, 1:]
    return type(output)(loss=output.loss, aux_loss=output.aux_loss, **fields)


def _sequences(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, wanted: Tensor, max_tokens: int | None
) -> Sequences | None:
    """The rows as sequences; None where that saves nothing, or where the padding is not where TRL puts it."""
    start = int(wanted.any(0).nonzero()[0])  # completions begin where the first is scored
    left, right = attention_mask[:, :start].bool(), attention_mask[:, start:].bool()
    packed_together = (left[:, 1:] >= left[:, :-1]).all() & (right[:, 1:] <= right[:, :-1]).all()
    if start == 0 or not bool(packed_together & left[:, -1].all() & (right == wanted[:, start:]).all()):
        return None
    counts, lengths = left.sum(1).tolist(), right.sum(1).tolist()
    ids = input_ids[:, :start].tolist()
    prompts = [tuple(row[start - count :]) for row, count in zip(ids, counts, strict=True)]
    found = shared_units(model, prompts, lengths, max_tokens)
    width = max(unit.length for unit in found)
    bins = pack([unit.length for unit in found], width)
    if len(bins) * width >= input_ids.numel() - len(prompts):  # no more than the rows' last tokens
        return None
    chosen = [[found[i] for i in one] for one in bins]
    return Sequences.of(chosen, counts, lengths, start, input_ids.shape[1]).to(input_ids.device)


def _masks(model: PreTrainedModel, sequences: Sequences) -> Tensor | dict[str, Tensor]:
    """The mask per pair of tokens, for models with more than one kind of layer one by its name."""
    config = model.config
    window = getattr(config, "sliding_window", None)

    def mask(window: int | None) -> Tensor:
        allowed = sequences.visible(window)
        if config._attn_implementation == "sdpa":
            return allowed
        return torch.zeros_like(allowed, dtype=model.dtype).masked_fill(~allowed, torch.finfo(model.dtype).min)

    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return mask(window)
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: mask(windows[kind]) for kind in set(kinds)}
