"""`fastgrpo bench WHAT`: measurements, each a table and, as the last line, one JSON object. Progress goes to stderr.

Flags that a bench does not have are refused rather than ignored: what a bench has is the fields of its settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fastgrpo.evidence.machine import Report


class _Bench(NamedTuple):
    about: str
    place: tuple[str, str, str]  # in evidence/: module, its settings, its function


BENCHES = {
    "rollout": _Bench("our engine against Hugging Face generate", ("bench", "RolloutSettings", "rollout_bench")),
    "context": _Bench("the cost of a token as the context grows", ("context", "ContextSettings", "context_bench")),
    "parts": _Bench("where the time of a decoding pass goes", ("parts", "PartsSettings", "parts_bench")),
    "step": _Bench("a GRPO step against TRL's own trainer, by phase", ("step", "StepSettings", "step_bench")),
    "update": _Bench("an update against TRL's own, with token budgets", ("update", "UpdateSettings", "update_bench")),
    "speculation": _Bench(
        "drafts against plain decoding, and what they cost",
        ("speculation", "SpeculationSettings", "speculation_bench"),
    ),
    "invariance": _Bench(
        "which shapes of a pass give the same bits", ("invariance", "InvarianceSettings", "invariance_bench")
    ),
}


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers with commas between them, such as 1,8,32")
    return numbers


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=list(BENCHES),
        metavar="WHAT",
        help="; ".join(f"{name}: {bench.about}" for name, bench in BENCHES.items()),
    )
    # no defaults here: what is not given is the bench's own default, and what is given must be a field of its settings
    parser.add_argument("--model", help="hub id, local folder, .gguf file, smollm2-135m (default) or gemma3-270m")
    parser.add_argument("--architecture", help="rollout: random weights of qwen3, gemma3, .. in the model's sizes")
    parser.add_argument(
        "--dtype",
        help="auto (the fast one of this machine; step: float32; invariance: two), float32, bfloat16, float16",
    )
    parser.add_argument("--threads", type=_positive, help="threads of torch (its own choice)")
    parser.add_argument("--repeats", type=_positive, help="runs of each side, in turn")
    parser.add_argument("--seed", type=int, help="of the first run (0)")
    parser.add_argument("--draft", help="speculation: folder of a draft model (an untrained one)")
    parser.add_argument(
        "--rows", type=_numbers, help="rollout, parts, speculation: rows decoded together (1,8,32); context: (8)"
    )
    parser.add_argument(
        "--new_tokens",
        type=_positive,
        help="rollout, step: length of a response (256); speculation: 48; context: 32; update: 16",
    )
    parser.add_argument("--temperature", type=float, help="rollout, context, step, speculation (1)")
    parser.add_argument("--top_p", type=float, help="rollout, context, parts (0.95), step (1), speculation (both)")
    parser.add_argument("--prompts", help="rollout, speculation: builtin, or a data source as fastgrpo grpo takes it")
    parser.add_argument(
        "--natural_stops", action="store_true", default=None, help="rollout: rows end at the model's stop ids"
    )
    parser.add_argument(
        "--memory_rows", type=int, help="speculation: rows of the rollouts whose memory is measured (the most); 0: none"
    )
    parser.add_argument(
        "--group_prompts", type=int, help="rollout: prompts of a group comparison (0: none); step, update: (8)"
    )
    parser.add_argument("--group_size", type=int, help="rollout, step, update: responses to each (8)")
    parser.add_argument("--lengths", type=_numbers, help="context: prompt tokens (256,1024,4096)")
    parser.add_argument("--batch", type=_positive, help="step, update: rows of a micro-batch (8)")
    parser.add_argument("--budgets", type=_numbers, help="update: tokens of a sub-batch (512,1024,3072)")
    parser.add_argument(
        "--gradient_checkpointing", action="store_true", default=None, help="update: forget and recompute activations"
    )
    parser.add_argument(
        "--context",
        type=_positive,
        help="tokens before those that are looked at; invariance: (64), parts: (200), update: (40)",
    )


def run(args: argparse.Namespace) -> int:
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    report = _report(args.what, _given(args))
    print(report.table)
    print(report.json_line(), flush=True)
    return 0


def _given(args: argparse.Namespace) -> dict[str, Any]:
    apart = ("what", "traceback")
    return {name: value for name, value in vars(args).items() if value is not None and name not in apart}


def _settings(kind: type, what: str, given: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    for name in given:
        if name not in known:
            flags = ", ".join(f"--{field}" for field in sorted(known))
            raise ValueError(f"--{name} is not a flag of the {what} bench, which has {flags}")
    return kind(**given)


def _report(what: str, given: dict[str, Any]) -> Report:
    # each bench loads what it needs and no more: only `step` needs TRL
    module_name, settings_name, function = BENCHES[what].place
    module = importlib.import_module(f"fastgrpo.evidence.{module_name}")
    settings = _settings(getattr(module, settings_name), what, given)

    from fastgrpo.models.loading import load_model

    model, tokenizer = load_model(settings.model, dtype=settings.dtype)
    report: Report = getattr(module, function)(
        settings, model, tokenizer, lambda text: print(f"  {text}", file=sys.stderr, flush=True)
    )
    return report
