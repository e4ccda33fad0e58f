"""The machine, versions and settings behind a measurement, and the JSON line that every bench ends with."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastgrpo.evidence.doctor import describe_machine, installed_version

_PACKAGES = ("fastgrpo", "torch", "transformers", "trl", "peft", "accelerate")


@dataclass
class Report:
    """What a bench found. results: one mapping a row; the keys `engine`, `policy`, `rows`, `tokens_per_s`,
    `tokens_per_target_pass` and `spread` mean the same in every bench that has them."""

    bench: str
    settings: dict[str, Any]
    table: str
    results: list[dict[str, Any]]
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    versions: dict[str, str] = field(default_factory=lambda: versions())

    def json_line(self) -> str:
        """One line of JSON: bench, machine, versions, settings, results."""
        keys = ("bench", "machine", "versions", "settings", "results")
        return json.dumps({key: getattr(self, key) for key in keys})


def machine() -> dict[str, Any]:
    """Labels and values. load: processes that wanted a core when the measurement was reported, this one included."""
    facts: dict[str, Any] = dict(describe_machine())
    facts["cpu"] = _cpu_name()
    if hasattr(os, "getloadavg"):
        facts["load"] = round(os.getloadavg()[0], 1)
    return facts


def versions() -> dict[str, str]:
    found = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that was asked of it, so that the clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def aligned(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A text table: the first column to the left, the others to the right; floats in three significant digits."""
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *others]))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)
