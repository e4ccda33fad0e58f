"""The rollout bench: our engine against Hugging Face `generate`, on the workload of training.

One process runs both in turn, on the same prompts, by the same law and to the same lengths; what is printed are medians
and their spread. The engine's time is the whole call, the reading of the weights included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.evidence.machine import Report, aligned
from fastgrpo.evidence.timing import Spread, alternate
from fastgrpo.evidence.workload import (
    BUILTIN,
    Run,
    Workload,
    as_run,
    encoded_prompts,
    in_the_sizes_of,
    run_engine,
    run_transformers,
    stop_ids,
    warm_up,
)
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.sampling import SamplingParams

OURS, THEIRS = "fastgrpo", "transformers"


@dataclass(frozen=True)
class RolloutSettings:
    """architecture: random weights of another one, in the model's sizes. rows: one comparison each, as many distinct
    prompts. group_prompts, group_size: one more comparison, of a few
    prompts with a group of responses each, run once (0 leaves it out). natural_stops: rows end at the model's stop ids;
    otherwise every row has exactly new_tokens."""

    model: str = "smollm2-135m"
    architecture: str | None = None
    dtype: str = "auto"
    rows: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 0.95
    repeats: int = 2
    prompts: str = BUILTIN
    natural_stops: bool = False
    group_prompts: int = 0
    group_size: int = 8
    threads: int | None = None
    seed: int = 0


def rollout_bench(
    settings: RolloutSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], None],
) -> Report:
    """Measure, with a `note` of each comparison as it is done."""
    if settings.architecture is not None:
        model = in_the_sizes_of(model, settings.architecture, settings.seed)
    sampling = SamplingParams(temperature=settings.temperature, top_p=settings.top_p)
    stops = stop_ids(model) if settings.natural_stops else ()
    most = max((*settings.rows, settings.group_prompts))
    prompts = encoded_prompts(settings.prompts, most, tokenizer)
    # more rows take longer and vary less: with the default of two repeats, 32 rows are run once and the bench ends in
    # ten minutes on two cores
    often = {n: settings.repeats if n <= 16 else max(1, settings.repeats - 1) for n in settings.rows}
    works = [(Workload(prompts[:n], 1, settings.new_tokens, stops, sampling), often[n]) for n in settings.rows]
    if settings.group_prompts and settings.group_size:
        few = prompts[: settings.group_prompts]
        works.append((Workload(few, settings.group_size, settings.new_tokens, stops, sampling), 1))
    engine = Engine(model)
    warm_up(engine, model, replace(works[0][0], prompts=prompts[: min(most, 8)]))
    results = []
    for work, repeats in works:
        results += compare(engine, model, work, repeats, settings.seed)
        ours = results[-2]
        note(
            f"{_name(ours)}: {ours['tokens_per_s']:.1f} tokens/s, {ours['ratio']:.2f} times Hugging Face generate, "
            f"prefill {ours['prefill_ratio']:.2f} times"
        )
    return Report("rollout", as_run(settings, model), render(results), results)


def compare(engine: Engine, model: PreTrainedModel, work: Workload, repeats: int, seed: int) -> list[dict[str, Any]]:
    """The result of our engine, then that of `generate`, for one workload. Ours has the ratios, above 1 if faster."""
    prefill = replace(work, new_tokens=1)
    firsts = alternate(_sides(engine, model, prefill, seed), repeats)
    runs = alternate(_sides(engine, model, work, seed), repeats)
    ours, theirs = (_result(name, work, runs[name], firsts[name]) for name in (OURS, THEIRS))
    ours["ratio"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
    ours["prefill_ratio"] = theirs["prefill_ms_per_token"] / ours["prefill_ms_per_token"]
    return [ours, theirs]


def _sides(engine: Engine, model: PreTrainedModel, work: Workload, seed: int) -> dict[str, Callable[[int], Run]]:
    return {
        OURS: lambda repeat: run_engine(engine, work, seed + repeat),
        THEIRS: lambda repeat: run_transformers(model, work, seed + repeat),
    }


def _result(name: str, work: Workload, runs: Sequence[Run], firsts: Sequence[Run]) -> dict[str, Any]:
    rate = Spread.of([run.tokens_per_s for run in runs])
    # a rollout of one token, less what is paid once per rollout and not per prompt token
    first = Spread.of([run.seconds - run.parts.get("setup_s", 0.0) for run in firsts])
    row_passes = sum(run.row_passes for run in runs)
    after_first = sum(run.tokens for run in runs) - work.rows * len(runs)
    parts = {key: Spread.of([run.parts[key] for run in runs]).median for key in runs[0].parts}
    return {
        "engine": name,
        "policy": "off",
        "rows": work.rows,
        "prompts": len(work.prompts),
        "prompt_tokens": work.prompt_tokens,
        "tokens": Spread.of([run.tokens for run in runs]).median,
        "tokens_per_s": rate.median,
        # per row in a pass, so that 1 is what plain decoding gives; rows that are done and stay give 0
        "tokens_per_target_pass": after_first / row_passes if row_passes else None,
        "spread": [rate.low, rate.high],
        "repeats": len(runs),
        "seconds": Spread.of([run.seconds for run in runs]).median,
        "passes": Spread.of([run.passes for run in runs]).median,
        "prefill_ms_per_token": 1000 * first.median / work.prompt_tokens,
        **parts,
    }


def _name(result: dict[str, Any]) -> str:
    if result["prompts"] == result["rows"]:
        return f"{result['rows']} row{'s' if result['rows'] > 1 else ''}"
    return f"{result['prompts']} prompts x {result['rows'] // result['prompts']}"


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table; prefill is milliseconds per distinct prompt token, decode and sampling are per pass."""
    header = ("workload", "engine", "tokens/s", "low..high", "ratio", "tokens/pass", "passes", "prefill ms/token",
              "ratio", "setup s", "prefill s", "decode ms", "sampling ms")  # fmt: skip
    rows = []
    for r in results:
        per_pass = [
            1000 * r[key] / r["passes"] if key in r and r["passes"] else None for key in ("decode_s", "sampling_s")
        ]
        spread = f"{r['spread'][0]:.1f}..{r['spread'][1]:.1f}"
        rows.append(
            (_name(r), r["engine"], r["tokens_per_s"], spread, r.get("ratio"), r["tokens_per_target_pass"],
             f"{r['passes']:.0f}", r["prefill_ms_per_token"], r.get("prefill_ratio"), r.get("setup_s"),
             r.get("prefill_s"), *per_pass)
        )  # fmt: skip
    return aligned(header, rows)
