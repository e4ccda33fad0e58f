"""The speculation bench: decoding with drafts against plain decoding, in one process, and where a round's time goes.

A round is the target's pass, the draft's own forwards, and the host, which is everything else: noise, sampling, trees,
masks, the walk, bookkeeping. Rounds are timed one by one; what counts are those with every row alive, the first one
left out, in which requests enter. On a GPU the parts come from runs that wait for the device after every forward, and
the speeds from runs that do not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgrpo.evidence.agreement import agreement
from fastgrpo.evidence.bench import OURS
from fastgrpo.evidence.footprint import Footprint, Plan, footprint, open_draft
from fastgrpo.evidence.machine import Report, aligned, wait_for
from fastgrpo.evidence.timing import Spread, alternate
from fastgrpo.evidence.workload import BUILTIN, as_run, encoded_prompts
from fastgrpo.models.draft import DraftModel
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import make_policy
from fastgrpo.speculation.proposers import DraftProposer
from fastgrpo.speculation.requests import Rollout
from fastgrpo.speculation.sampling import SamplingParams

OFF = "off"
# Knobs of the policy `fixed`, by the name that the results give it.
SHAPES: dict[str, dict[str, int] | None] = {
    OFF: None,
    "chain 3": {"spec_depth": 3},
    "tree 8": {"spec_depth": 3, "spec_width": 3, "spec_nodes": 8},
}
_FEWEST_TOKENS = 8  # two rounds, if all of a draft of three levels is accepted
_MIB = 1 << 20


@dataclass(frozen=True)
class SpeculationSettings:
    """draft: folder of a draft model; without one an untrained draft is made, whose costs are real and whose guesses
    are not. rows: one comparison each, of as many distinct prompts to exactly new_tokens. top_p: one law; by default
    0.95 and 1. memory_rows: rows of the rollouts whose memory is measured, one of `rows` (default: the most of them);
    0 leaves that out."""

    model: str = "smollm2-135m"
    draft: str | None = None
    dtype: str = "auto"
    rows: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 48
    temperature: float = 1.0
    top_p: float | None = None
    repeats: int = 2
    prompts: str = BUILTIN
    memory_rows: int | None = None
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.new_tokens < _FEWEST_TOKENS:
            raise ValueError(
                f"new_tokens is {self.new_tokens}, too few for a round that can be timed: use {_FEWEST_TOKENS} or more."
            )
        if self.memory_rows and self.memory_rows not in self.rows:
            raise ValueError(
                f"memory_rows is {self.memory_rows}, but the rollouts have {self.rows} rows: name one of them, or 0."
            )

    @property
    def laws(self) -> list[SamplingParams]:
        cuts = (0.95, 1.0) if self.top_p is None else (self.top_p,)
        return [SamplingParams(temperature=self.temperature, top_p=top_p) for top_p in cuts]


class Round(NamedTuple):
    """Seconds of one round. target: its pass. drafting: the proposer, of which `forwards` are the draft model's."""

    whole: float
    target: float
    drafting: float
    forwards: float


@dataclass(frozen=True)
class Timed:
    """One rollout, its seconds, and its rounds with every row alive (none where no stopwatch ran)."""

    seconds: float
    rollout: Rollout
    rounds: list[Round]


class Stopwatch:
    """Stands before an object and adds up the seconds inside some of its methods. All else is the object's."""

    def __init__(self, inner: Any, names: Sequence[str], device: torch.device):
        self._inner, self._names, self._device, self.seconds = inner, frozenset(names), device, 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names:
            return value

        def timed(*args: Any, **options: Any) -> Any:
            wait_for(self._device)
            started = time.perf_counter()
            try:
                return value(*args, **options)
            finally:
                wait_for(self._device)
                self.seconds += time.perf_counter() - started

        return timed


class Side:
    """One engine: plain, or with drafts of one shape. watched: whether its rounds are taken apart."""

    def __init__(
        self, model: PreTrainedModel, draft: DraftModel, shape: dict[str, int] | None, temperature: float, watched: bool
    ):
        self.engine, self.device = Engine(model), model.device
        self.watches: tuple[Any, ...] = ()
        inner: Any = Stopwatch(draft, ("fuse", "layer", "logits"), self.device) if watched else draft
        proposer: Any = DraftProposer(inner, temperature or 1.0)
        if watched:
            proposer = Stopwatch(proposer, ("propose", "observe"), self.device)
        if shape is not None:
            self.engine = Engine(model, proposer=proposer, policy=make_policy("fixed", **shape))
        if watched:
            target: Any = Stopwatch(self.engine.target, ("decode",), self.device)
            self.engine.target, self.watches = target, (target, proposer, inner)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, law: SamplingParams, seed: int) -> Timed:
        """One rollout, each prompt once, to exactly new_tokens; its seconds are the whole call's."""
        marks: list[Round] = []
        started = time.perf_counter()
        rollout = self.engine.generate(
            prompts,
            law,
            max_new_tokens=new_tokens,
            stop_token_ids=(),
            seed=seed,
            on_round=(lambda _: marks.append(self._mark())) if self.watches else None,
        )
        wait_for(self.device)
        seconds = time.perf_counter() - started
        between = [Round(*(b - a for a, b in zip(*pair, strict=True))) for pair in itertools.pairwise(marks)]
        alive = rollout.stats.live_rows[1:]
        rounds = zip(between, alive, strict=True) if self.watches else ()
        return Timed(seconds, rollout, [r for r, rows in rounds if rows == len(prompts)])

    def _mark(self) -> Round:
        wait_for(self.device)
        return Round(time.perf_counter(), *(watch.seconds for watch in self.watches))


def speculation_bench(
    settings: SpeculationSettings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], None],
) -> Report:
    """Measure, with a `note` of each comparison as it is done."""
    if settings.draft is None:
        note("no --draft: an untrained one is used, whose costs are real and whose guesses are not")
    draft = open_draft(model, settings.draft, settings.seed)
    prompts = encoded_prompts(settings.prompts, max(settings.rows), tokenizer)
    results: list[dict[str, Any]] = []
    for law in settings.laws:
        for rows in settings.rows:
            results += compare(settings, model, draft, prompts[:rows], law)
            off, *others = results[-len(SHAPES) :]
            shares = ", ".join(f"{r['policy']} {r['ratio']:.2f} times, host {r['host_share']:.0%}" for r in others)
            note(f"{rows} rows, top-p {law.top_p:g}: off {off['tokens_per_s']:.1f} tokens/s, {shares}")
    memory_rows = max(settings.rows) if settings.memory_rows is None else settings.memory_rows
    if memory_rows:
        _add_memory(settings, memory_rows, results, note)
    return Report("speculation", as_run(settings, model), render(results), results)


def compare(
    settings: SpeculationSettings,
    model: PreTrainedModel,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    law: SamplingParams,
) -> list[dict[str, Any]]:
    """The results of plain decoding and of every shape, for these prompts and this law."""

    def sides(watched: bool) -> dict[str, Callable[[int], Timed]]:
        made = {name: Side(model, draft, shape, settings.temperature, watched) for name, shape in SHAPES.items()}
        for side in made.values():  # what happens once for every shape of a pass is not counted
            side.run(prompts, _FEWEST_TOKENS, law, settings.seed)

        def runner(side: Side) -> Callable[[int], Timed]:
            return lambda repeat: side.run(prompts, settings.new_tokens, law, settings.seed + repeat)

        return {name: runner(side) for name, side in made.items()}

    waits = model.device.type == "cuda"  # there a stopwatch slows down what it measures
    runs = alternate(sides(watched=not waits), settings.repeats)
    parts = alternate(sides(watched=True), 1) if waits else runs
    results = []
    for name in SHAPES:
        result = _result(name, len(prompts), law, runs[name], parts[name])
        found = [
            agreement(model, prompts, plain.rollout.completions, run.rollout.completions, law, settings.seed + repeat)
            for repeat, (plain, run) in enumerate(zip(runs[OFF], runs[name], strict=True))
        ]
        result["tokens"], result["equal_tokens"] = sum(a.tokens for a in found), sum(a.equal for a in found)
        result["margins"] = [margin for a in found for margin in a.margins]
        results.append(result)
        result["ratio"] = result["tokens_per_s"] / results[0]["tokens_per_s"]
        result["pass_ratio"] = result["pass_ms"] / results[0]["pass_ms"]
        result["host_share"] = result["host_ms"] / results[0]["pass_ms"]
    return results


def _result(name: str, rows: int, law: SamplingParams, runs: Sequence[Timed], parts: Sequence[Timed]) -> dict[str, Any]:
    rate = Spread.of([run.rollout.stats.completion_tokens / run.seconds for run in runs])
    stats = [run.rollout.stats for run in runs]
    lengths = [s.accept_length for s in stats if s.accept_length is not None]
    rounds = [r for run in parts for r in run.rounds]

    def ms(seconds: Callable[[Round], float]) -> float:
        return 1000 * Spread.of([seconds(r) for r in rounds]).median

    return {
        "engine": OURS,
        "policy": name,
        "rows": rows,
        "top_p": law.top_p,
        "tokens_per_s": rate.median,
        "tokens_per_target_pass": sum(s.completion_tokens - rows for s in stats) / sum(sum(s.live_rows) for s in stats),
        "spread": [rate.low, rate.high],
        "repeats": len(runs),
        "accept_length": Spread.of(lengths).median if lengths else None,
        "round_ms": ms(lambda r: r.whole),
        "pass_ms": ms(lambda r: r.target),
        "draft_forwards_ms": ms(lambda r: r.forwards),
        "draft_host_ms": ms(lambda r: r.drafting - r.forwards),
        "sampling_ms": ms(lambda r: r.whole - r.target - r.drafting),
        "host_ms": ms(lambda r: r.whole - r.target - r.forwards),
        "timed_rounds": len(rounds),
    }


def _add_memory(
    settings: SpeculationSettings, rows: int, results: Sequence[dict[str, Any]], note: Callable[[str], None]
) -> None:
    found: dict[str, Footprint] = {}
    for name, shape in SHAPES.items():
        plan = Plan(
            model=settings.model,
            dtype=settings.dtype,
            draft=settings.draft,
            shape=shape,
            prompts=settings.prompts,
            rows=rows,
            new_tokens=settings.new_tokens,
            temperature=settings.temperature,
            top_p=settings.laws[0].top_p,
            seed=settings.seed,
            threads=torch.get_num_threads(),
        )
        found[name] = footprint(plan)
        note(f"{rows} rows, {name}: a peak of {found[name].peak / _MIB:.0f} MiB")
    for result in results:
        if result["rows"] == rows and result["top_p"] == settings.laws[0].top_p:
            own, plain = found[result["policy"]], found[OFF]
            result["peak_mib"], result["before_mib"] = own.peak / _MIB, own.before / _MIB
            result["draft_mib"] = own.draft / _MIB
            result["peak_ratio"] = (own.peak - own.draft) / plain.peak


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table, in milliseconds a round, and what was equal; then memory, where it was measured."""
    header = ("rows", "top-p", "policy", "tokens/s", "low..high", "ratio", "tokens/pass", "accept length", "round",
              "= pass", "(x plain)", "+ draft forwards", "+ drafting", "+ sampling etc", "host", "% of plain pass",
              "equal tokens", "widest margin")  # fmt: skip
    table = []
    for r in results:
        table.append(
            (str(r["rows"]), r["top_p"], r["policy"], r["tokens_per_s"], "{:.1f}..{:.1f}".format(*r["spread"]),
             r["ratio"], r["tokens_per_target_pass"], r["accept_length"], r["round_ms"], r["pass_ms"], r["pass_ratio"],
             r["draft_forwards_ms"], r["draft_host_ms"], r["sampling_ms"], r["host_ms"], 100 * r["host_share"],
             f"{r['equal_tokens']}/{r['tokens']}", max(r["margins"], default=None))
        )  # fmt: skip
    lines = [aligned(header, table)]
    for r in results:
        if "peak_mib" in r:
            lines.append(
                f"memory, {r['rows']} rows, {r['policy']}: {r['before_mib']:.0f} MiB loaded, {r['peak_mib']:.0f} MiB "
                f"at the peak; less the draft's {r['draft_mib']:.0f} MiB {r['peak_ratio']:.3f} times plain decoding"
            )
    return "\n".join(lines)
