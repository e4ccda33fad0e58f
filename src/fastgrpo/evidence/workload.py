"""What the benches run: models by name, prompts as token ids, and one rollout by each engine, timed.

Hugging Face `generate` is run as its users run it: left padding, its own cache, one batch until the last row is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fastgrpo.evidence.machine import wait_for
from fastgrpo.evidence.word_problems import question
from fastgrpo.grpo.data import load_prompts
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.sampling import SamplingParams

BUILTIN = "builtin"
_LOGIT_STD = 4.2  # over 49,152 tokens and a final norm of unit weight: about 2 nats of entropy


@dataclass(frozen=True)
class Workload:
    """One rollout: each prompt `group` times, at most `new_tokens` each, or exactly so where `stops` is empty."""

    prompts: Sequence[Sequence[int]]
    group: int
    new_tokens: int
    stops: tuple[int, ...]
    sampling: SamplingParams

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the distinct prompts."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class Run:
    """One rollout as it went. tokens: real ones, each row's up to its stop. row_passes: rows in each decoding pass,
    summed; finished rows that stay count. parts: seconds by phase, where the engine tells them."""

    seconds: float
    tokens: int
    passes: int
    row_passes: int
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def in_the_sizes_of(model: PreTrainedModel, architecture: str, seed: int) -> PreTrainedModel:
    """A random model of another architecture with the sizes, vocabulary and stop ids of `model`: for speed alone.

    Its head is as loud as a trained model's: laws as flat as random weights give would be slow to sample from.
    """
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
    )  # fmt: skip
    sizes = {name: getattr(model.config, name) for name in names}
    head_dim = getattr(model.config, "head_dim", None) or sizes["hidden_size"] // sizes["num_attention_heads"]
    config = AutoConfig.for_model("gemma3_text" if architecture == "gemma3" else architecture, **sizes)
    config.head_dim = config.query_pre_attn_scalar = head_dim
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        other: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
        head = other.get_output_embeddings().weight
        head.data.normal_(std=_LOGIT_STD * sizes["hidden_size"] ** -0.5)
    other.generation_config = model.generation_config
    return other.to(model.device).eval()


def as_run(settings: Any, model: PreTrainedModel) -> dict[str, Any]:
    """The settings (a dataclass) as JSON, with the precision and the threads that they came to on this machine."""
    found = {"dtype": str(model.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    return asdict(settings) | found


def encoded_prompts(source: str, count: int, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of `count` prompts: the built-in word problems, or those of a data source (see `grpo/data.py`)."""
    if source == BUILTIN:
        texts: list[Any] = [[{"role": "user", "content": question(i)}] for i in range(count)]
    else:
        found = load_prompts(source, answers="none", limit=count).train["prompt"]
        texts = [found[i % len(found)] for i in range(count)]
    return [_encode(messages, tokenizer) for messages in texts]


def _encode(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:  # a base model: the question alone
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template wrote the special tokens


def text_stream(tokens: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """That many token ids of running text: the built-in problems one after another, from the start again if need be."""
    stream: list[int] = []
    problem = 0
    while len(stream) < tokens:
        stream += tokenizer(question(problem) + "\n\n", add_special_tokens=False)["input_ids"]
        problem += 1
    return stream[:tokens]


def stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every id that ends a completion, as the model's generation_config has them."""
    eos = model.generation_config.eos_token_id
    return tuple(eos if isinstance(eos, list) else [] if eos is None else [eos])


def run_engine(engine: Engine, work: Workload, seed: int) -> Run:
    """Our engine, seconds of the whole call: weights are read, prompts run, rows decoded."""
    started = time.perf_counter()
    rollout = engine.generate(
        work.prompts,
        work.sampling,
        group_size=work.group,
        max_new_tokens=work.new_tokens,
        stop_token_ids=work.stops,
        seed=seed,
    )
    wait_for(engine.target.layout.device)
    seconds = time.perf_counter() - started
    stats = rollout.stats
    names = ("setup_s", "prefill_s", "decode_s", "sampling_s")
    parts = {name: getattr(stats, name) for name in names}
    return Run(seconds, stats.completion_tokens, stats.passes, sum(stats.live_rows), parts)


def run_transformers(model: PreTrainedModel, work: Workload, seed: int) -> Run:
    """Hugging Face `generate`, sampling by the same law, from the same prompts (each repeated `group` times)."""
    wait_for(model.device)
    started = time.perf_counter()
    responses = transformers_responses(model, work, seed)
    wait_for(model.device)
    seconds = time.perf_counter() - started
    steps = responses.shape[1]
    return Run(seconds, real_tokens(responses, work.stops), steps - 1, work.rows * (steps - 1))


@torch.inference_mode()
def transformers_responses(model: PreTrainedModel, work: Workload, seed: int) -> Tensor:
    """What `generate` answers, (rows, steps) int64: rows that stopped are padded to the longest."""
    prompts = [prompt for prompt in work.prompts for _ in range(work.group)]
    ids, mask = left_padded(prompts, model.device)
    # its own seed, and the caller's random state is left alone
    with torch.random.fork_rng(), _generation_config(model, work):
        torch.manual_seed(seed)
        output: Tensor = model.generate(input_ids=ids, attention_mask=mask)
    return output[:, ids.shape[1] :]


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask, both (rows, longest) int64, padded on the left with token 0, which the mask hides."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def real_tokens(responses: Tensor, stops: Sequence[int]) -> int:
    """Tokens up to each row's first stop, the stop included. responses: (rows, steps)."""
    stopped = torch.isin(responses, torch.tensor(stops, dtype=responses.dtype, device=responses.device))
    before = stopped.long().cumsum(-1) - stopped.long() == 0
    return int(before.sum())


@contextmanager
def _generation_config(model: PreTrainedModel, work: Workload) -> Iterator[None]:
    # `generate` fills what a passed config leaves open from the model's own, its stop ids among them: so ours is the
    # model's own meanwhile
    sampling = work.sampling
    law: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        law = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    found = model.generation_config
    pad = found.pad_token_id if found.pad_token_id is not None else (stop_ids(model) or (0,))[0]
    model.generation_config = GenerationConfig(
        max_new_tokens=work.new_tokens, eos_token_id=list(work.stops) or None, pad_token_id=pad, **law
    )
    try:
        yield
    finally:
        model.generation_config = found


def warm_up(engine: Engine, model: PreTrainedModel, work: Workload) -> None:
    """A few tokens by both, so that neither pays for what happens once in a process."""
    short = replace(work, new_tokens=min(4, work.new_tokens))
    run_engine(engine, short, 0)
    run_transformers(model, short, 0)
