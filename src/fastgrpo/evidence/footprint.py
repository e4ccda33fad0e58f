"""The memory of one rollout, measured in a process of its own, where nothing else has been before it.

`footprint` starts that process, `python -m fastgrpo.evidence.footprint JSON`. On a GPU what is counted is what torch
allocated there; on a CPU the resident memory of the process, its libraries included, whose peak is set back after the
model has been loaded (where the system allows that, which is on Linux; elsewhere loading counts as well).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from fastgrpo.evidence.workload import encoded_prompts
from fastgrpo.models.draft import DraftModel
from fastgrpo.models.loading import load_model
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import make_policy
from fastgrpo.speculation.proposers import DraftProposer
from fastgrpo.speculation.sampling import SamplingParams


@dataclass(frozen=True)
class Plan:
    """What to run: `rows` prompts, each to exactly `new_tokens`. shape: knobs of the policy `fixed`, None for plain
    decoding without a draft. draft: its folder; None is an untrained one of the default shape."""

    model: str
    dtype: str
    draft: str | None
    shape: dict[str, int] | None
    prompts: str
    rows: int
    new_tokens: int
    temperature: float
    top_p: float
    seed: int
    threads: int


@dataclass(frozen=True)
class Footprint:
    """Bytes. before: when the model, and the draft if any, were loaded. peak: of the rollout. draft: its weights."""

    before: int
    peak: int
    draft: int


def footprint(plan: Plan) -> Footprint:
    """Run the plan in another process. Raises RuntimeError with the end of what it said where it failed."""
    command = [sys.executable, "-m", "fastgrpo.evidence.footprint", json.dumps(asdict(plan))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that measures memory failed: {done.stderr[-2000:]}")
    return Footprint(**json.loads(done.stdout.splitlines()[-1]))


def open_draft(model: Any, folder: str | None, seed: int) -> DraftModel:
    """The draft of that folder, on the model's device and in its precision; without a folder an untrained one."""
    if folder is not None:
        return DraftModel.from_pretrained(folder, dtype=model.dtype).to(model.device).bind(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DraftModel.for_target(model)


def measure(plan: Plan) -> Footprint:
    """What the other process does: load, run, look."""
    torch.set_num_threads(plan.threads)
    model, tokenizer = load_model(plan.model, dtype=plan.dtype)
    prompts = encoded_prompts(plan.prompts, plan.rows, tokenizer)
    engine, draft_bytes = Engine(model), 0
    if plan.shape is not None:
        draft = open_draft(model, plan.draft, plan.seed)
        tensors = [*draft.parameters(), *draft.buffers()]
        draft_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        proposer = DraftProposer(draft, plan.temperature or 1.0)
        engine = Engine(model, proposer=proposer, policy=make_policy("fixed", **plan.shape))
    _forget_peak(model.device)
    before = _resident(model.device)
    law = SamplingParams(temperature=plan.temperature, top_p=plan.top_p)
    engine.generate(prompts, law, max_new_tokens=plan.new_tokens, stop_token_ids=(), seed=plan.seed)
    return Footprint(before, _peak(model.device), draft_bytes)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def _resident(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes there, KiB elsewhere


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Plan(**json.loads(sys.argv[1]))))))
