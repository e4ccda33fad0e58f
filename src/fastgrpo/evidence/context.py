"""The context bench: what a decoded token costs as the context grows, next to what attention alone costs there.

An engine that copies its cache, or looks at it more than once, shows here: the part of a pass that attention does not
explain must not grow with the context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.evidence.bench import OURS
from fastgrpo.evidence.machine import Report, aligned, wait_for
from fastgrpo.evidence.timing import Spread, alternate
from fastgrpo.evidence.workload import Run, Workload, as_run, run_engine, text_stream
from fastgrpo.models.attention import grouped_attention
from fastgrpo.models.cache import CacheLayout
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.sampling import SamplingParams


@dataclass(frozen=True)
class ContextSettings:
    """lengths: prompt tokens. rows: responses to that one prompt, decoded together for new_tokens passes."""

    model: str = "smollm2-135m"
    dtype: str = "auto"
    lengths: tuple[int, ...] = (256, 1024, 4096)
    rows: tuple[int, ...] = (8,)
    new_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 0.95
    repeats: int = 2
    threads: int | None = None
    seed: int = 0


def context_bench(
    settings: ContextSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], None],
) -> Report:
    """Measure every length at every number of rows, in turn, with a `note` of each as it is done."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(settings.lengths) + settings.new_tokens
    if limit is not None and longest > limit:
        raise ValueError(
            f"a context of {max(settings.lengths)} tokens and {settings.new_tokens} new ones exceed the {limit} "
            "positions of this model: use shorter lengths."
        )
    sampling = SamplingParams(temperature=settings.temperature, top_p=settings.top_p)
    stream = text_stream(max(settings.lengths), tokenizer)
    engine = Engine(model)
    run_engine(engine, Workload([stream[:16]], 2, 4, (), sampling), 0)
    results = []
    for rows in settings.rows:
        works = {n: Workload([stream[:n]], rows, settings.new_tokens, (), sampling) for n in sorted(settings.lengths)}

        def side(work: Workload) -> Callable[[int], Run]:
            return lambda repeat: run_engine(engine, work, settings.seed + repeat)

        runs = alternate({str(n): side(work) for n, work in works.items()}, settings.repeats)
        for n, work in works.items():
            results.append(_result(model, engine.target.layout, n, work, runs[str(n)]))
            note(f"{rows} rows, context {n}: {results[-1]['pass_ms']:.1f} ms a pass")
    return Report("context", as_run(settings, model), render(results), results)


def _result(
    model: PreTrainedModel, layout: CacheLayout, length: int, work: Workload, runs: Sequence[Run]
) -> dict[str, Any]:
    pass_s = Spread.of([run.parts["decode_s"] / run.passes for run in runs])
    rate = Spread.of([run.row_passes / run.parts["decode_s"] for run in runs])
    span = length + work.new_tokens // 2  # what a pass in the middle of the run looks at
    heads = model.config.get_text_config().num_attention_heads
    attention = attention_seconds(layout, heads, work.rows, span)
    return {
        "engine": OURS,
        "policy": "off",
        "rows": work.rows,
        "context": length,
        "tokens_per_s": rate.median,  # decoding passes alone, without sampling and prefill
        "tokens_per_target_pass": 1.0,
        "spread": [rate.low, rate.high],
        "pass_ms": 1000 * pass_s.median,
        "token_ms": 1000 * pass_s.median / work.rows,
        "kv_mib": work.rows * span * layout.bytes_per_token / 2**20,
        "attention_ms": 1000 * attention,
        "rest_ms": 1000 * (pass_s.median - attention),
        "prefill_s": Spread.of([run.parts["prefill_s"] for run in runs]).median,
    }


def attention_seconds(layout: CacheLayout, heads: int, rows: int, span: int, repeats: int = 5) -> float:
    """Seconds that attention itself takes in one pass: every layer's products over keys and values that lie whole in
    memory, of exactly `span` slots. The median of a few tries. An upper bound for layers with windows.
    """
    with torch.no_grad():
        layers = []
        for kv_heads, size in layout.heads:
            shape = (rows, kv_heads, span, size)
            keys, values = (torch.full(shape, 0.01, dtype=layout.dtype, device=layout.device) for _ in range(2))
            query = torch.full((rows, 1, heads, size), 0.01, dtype=layout.dtype, device=layout.device)
            bias = torch.zeros(rows * kv_heads, heads // kv_heads, span, dtype=layout.dtype, device=layout.device)
            layers.append((query, keys, values, bias, size**-0.5))
        taken = []
        for _ in range(repeats):
            wait_for(layout.device)
            started = time.perf_counter()
            for layer in layers:
                grouped_attention(*layer)
            wait_for(layout.device)
            taken.append(time.perf_counter() - started)
    return Spread.of(taken).median


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table, and how what attention does not explain has grown."""
    header = ("rows", "context", "ms/pass", "ms/token", "KV MiB/pass", "attention alone ms", "the rest ms", "prefill s")
    keys = ("rows", "context", "pass_ms", "token_ms", "kv_mib", "attention_ms", "rest_ms", "prefill_s")
    table = aligned(header, [[r[key] for key in keys] for r in results])
    lines = [table]
    for rows in dict.fromkeys(r["rows"] for r in results):
        own = [r for r in results if r["rows"] == rows]
        first, last = own[0], own[-1]
        lines.append(
            f"{rows} rows, from {first['context']} to {last['context']} tokens: a pass grows by "
            f"{last['pass_ms'] - first['pass_ms']:.1f} ms, attention alone by "
            f"{last['attention_ms'] - first['attention_ms']:.1f} ms."
        )
    return "\n".join(lines)
