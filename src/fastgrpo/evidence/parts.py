"""The parts bench: where the time of one decoding pass goes, next to Hugging Face's pass and to the machine's floor.

Each part is run alone, on the same shapes and weights, in turn with the others. What the parts leave of a pass is the
host: the many small operations between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TopPLogitsWarper

from fastgrpo.evidence.bench import OURS
from fastgrpo.evidence.context import attention_seconds
from fastgrpo.evidence.machine import Report, aligned, wait_for
from fastgrpo.evidence.timing import Spread
from fastgrpo.evidence.workload import as_run, text_stream
from fastgrpo.models.cache import RaggedCache
from fastgrpo.models.target import LeanTarget, open_target
from fastgrpo.speculation.noise import row_keys
from fastgrpo.speculation.sampling import SamplingParams, sample


@dataclass(frozen=True)
class PartsSettings:
    """A pass of one token for each of `rows` rows, with `context` tokens behind each; the median of `repeats` runs."""

    model: str = "smollm2-135m"
    dtype: str = "auto"
    rows: tuple[int, ...] = (1, 8, 32)
    context: int = 200
    top_p: float = 0.95
    repeats: int = 11
    threads: int | None = None


def parts_bench(
    settings: PartsSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None]
) -> Report:
    """Measure every number of rows, with a `note` of each. Raises ValueError for a model without the lean path."""
    target = open_target(model)
    if not isinstance(target, LeanTarget):
        raise ValueError(f"{type(model).__name__} takes the general path, whose parts cannot be run alone.")
    text = text_stream(settings.context, tokenizer)
    floor = _read_seconds(model)
    results = []
    with target.session():
        for rows in settings.rows:
            runs = _runs(model, target, text, rows, settings)
            spreads = _measured(runs, settings.repeats, target.layout.device)
            seconds = {name: spread.median for name, spread in spreads.items()}
            heads = model.config.num_attention_heads
            seconds["attention"] = attention_seconds(target.layout, heads, rows, settings.context)
            inner = seconds["products"] + seconds["attention"] + seconds["norms"]
            parts = {f"{name}_ms": 1000 * value for name, value in seconds.items()}
            results.append(
                {
                    "engine": OURS,
                    "policy": "off",
                    "rows": rows,
                    "tokens_per_s": rows / (seconds["pass"] + seconds["sampling"]),
                    "tokens_per_target_pass": 1.0,
                    "spread": [
                        rows / (spreads["pass"].high + spreads["sampling"].high),
                        rows / (spreads["pass"].low + spreads["sampling"].low),
                    ],
                    **parts,
                    "host_ms": 1000 * (seconds["pass"] - inner),
                    "floor_ms": 1000 * floor,
                }
            )
            note(f"{rows} rows: a pass {parts['pass_ms']:.1f} ms, of which products {parts['products_ms']:.1f} ms")
    return Report("parts", as_run(settings, model), render(results), results)


def _runs(
    model: PreTrainedModel, target: LeanTarget, text: list[int], rows: int, settings: PartsSettings
) -> dict[str, Callable[[], object]]:
    device, decoder = target.layout.device, target.decoder
    cache = RaggedCache(target.layout, rows, len(text) + 1)
    cache.place(target.prefill([text])[1][0], 0, rows)
    tokens = torch.full((rows, 1), text[-1], device=device)
    positions = torch.full((rows, 1), len(text), device=device)
    logits = target.decode(tokens, positions, cache, len(text) + 1)[:, 0].clone()
    index = torch.arange(rows, device=device)
    keys = row_keys(0, index, index)
    law, warper = SamplingParams(top_p=settings.top_p), TopPLogitsWarper(settings.top_p)
    inputs = {width: torch.randn(rows, width, device=device, dtype=target.layout.dtype) for width in _widths(model)}
    past = DynamicCache(config=model.config)
    # what the model itself makes lives outside of inference mode, as in `generate`
    with torch.inference_mode(False), torch.no_grad():
        model(tokens.new_tensor([text] * rows), cache=past, use_cache=True, logits_to_keep=1)

    def theirs() -> None:
        with torch.no_grad():
            model(tokens, cache=past, use_cache=True)
        past.crop(-1)

    def products() -> None:
        for layer in decoder.layers:
            for linear, width in zip((layer.qkv, layer.out, layer.gate_up, layer.down), _order(model), strict=True):
                linear(inputs[width])
        decoder.logits(inputs[model.config.hidden_size])

    def norms() -> None:
        for _ in range(2 * len(decoder.layers) + 1):
            decoder._norm(inputs[model.config.hidden_size], decoder.final_norm)

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return {
        "pass": lambda: target.decode(tokens, positions, cache, len(text) + 1),
        "products": products,
        "norms": norms,
        "sampling": lambda: sample(logits, law, keys),
        "their_pass": theirs,
        "their_products": lambda: [F.linear(inputs[m.weight.shape[1]], m.weight, m.bias) for m in linears],
        "their_sampling": lambda: torch.multinomial(warper(tokens, logits.float()).softmax(-1), 1),
    }


def _order(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """How wide the inputs of a layer's four products are."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.hidden_size, config.num_attention_heads * size, config.hidden_size, config.intermediate_size


def _widths(model: PreTrainedModel) -> set[int]:
    return {module.weight.shape[1] for module in model.modules() if isinstance(module, nn.Linear)} | set(_order(model))


def _measured(runs: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, Spread]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):  # two to warm up
        for name, run in runs.items():
            wait_for(device)
            started = time.perf_counter()
            run()
            wait_for(device)
            if turn >= 2:
                taken[name].append(time.perf_counter() - started)
    return {name: Spread.of(values) for name, values in taken.items()}


def _read_seconds(model: PreTrainedModel) -> float:
    """Seconds to read every weight of a pass once, the embedding aside unless it is the head; the best of a few."""
    read: list[Tensor] = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    best = float("inf")
    with torch.no_grad():
        for _ in range(5):
            started = time.perf_counter()
            for weight in read:
                weight.sum()
            wait_for(model.device)
            best = min(best, time.perf_counter() - started)
    return best


def render(results: list[dict[str, Any]]) -> str:
    """The table, in milliseconds."""
    header = ("rows", "pass", "= products", "+ attention", "+ norms", "+ host", "reading the weights", "sampling",
              "their pass", "their products", "their sampling")  # fmt: skip
    keys = ("pass", "products", "attention", "norms", "host", "floor", "sampling", "their_pass", "their_products",
            "their_sampling")  # fmt: skip
    return aligned(header, [[str(r["rows"]), *(r[f"{key}_ms"] for key in keys)] for r in results])
