"""What is installed, what this machine is fast at, and what is missing, as data and as text.

Versions come from package metadata, so that a package that does not import is still reported. Speed is measured, with
one small matrix product per precision, because flags promise more than kernels keep. Nothing is changed or downloaded.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass

import torch
from packaging.requirements import Requirement

from fastgrpo.models.loading import BUILT_IN, fast_dtype

# What each optional part is for. The extras' own packages come from the package metadata.
PURPOSES = {
    "gguf": "reading .gguf files, the built-in models among them",
    "rich": "tables of completions while training (log_completions)",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """One package: the version that is installed (None: it is not), the range that was tested, and how to get it."""

    name: str
    version: str | None
    tested: str
    required: bool
    remedy: str
    purpose: str

    @property
    def problem(self) -> str | None:
        if self.version is None:
            return "missing"
        if not Requirement(f"{self.name}{self.tested}").specifier.contains(self.version, prereleases=True):
            return f"outside the tested range {self.tested}"
        return None


@dataclass(frozen=True)
class Checkup:
    """machine: label and value, in the order of display. auto_dtype: what dtype "auto" loads models in.
    matmul_ms: milliseconds of one small product per dtype.
    """

    machine: list[tuple[str, str]]
    auto_dtype: str
    matmul_ms: dict[str, float]
    parts: list[Part]

    @property
    def faster_dtype(self) -> str | None:
        """A dtype that was clearly faster here than what "auto" picks, if one was."""
        fastest = min(self.matmul_ms, key=lambda name: self.matmul_ms[name])
        return fastest if self.matmul_ms[fastest] < 0.7 * self.matmul_ms[self.auto_dtype] else None

    @property
    def healthy(self) -> bool:
        return not any(part.required and part.problem for part in self.parts)


def examine() -> Checkup:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Checkup(
        machine=describe_machine(),
        auto_dtype=str(fast_dtype(device)).removeprefix("torch."),
        matmul_ms={str(dtype).removeprefix("torch."): matmul_ms(dtype, device) for dtype in DTYPES},
        parts=required_and_extra_parts() + built_in_model_parts(),
    )


def describe_machine() -> list[tuple[str, str]]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = [
        ("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
        ("cores", f"{usable} usable of {os.cpu_count()}, torch uses {torch.get_num_threads()}"),
        ("cpu capability", torch.backends.cpu.get_cpu_capability()),
    ]
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        rows.append(("memory", f"{memory / 2**30:.1f} GiB"))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append((f"gpu {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        rows.append(("gpu", "none that torch sees"))
    return rows


def matmul_ms(dtype: torch.dtype, device: torch.device) -> float:
    """Milliseconds of (8, 1024) x (1024, 1024), the shape of a decoding pass; the best of twenty after a warm-up."""
    left = torch.full((8, 1024), 0.5, dtype=dtype, device=device)
    right = torch.full((1024, 1024), 0.5, dtype=dtype, device=device)

    def seconds() -> float:
        start = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for the device
        return time.perf_counter() - start

    seconds()
    return 1000 * min(seconds() for _ in range(20))


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def required_and_extra_parts() -> list[Part]:
    """What the package's own metadata asks for, the development tools left out."""
    parts = []
    for text in importlib.metadata.requires("fastgrpo") or []:
        wanted = Requirement(text)
        if wanted.marker is not None and wanted.name not in PURPOSES:
            continue  # a development tool
        required = wanted.marker is None
        parts.append(
            Part(
                name=wanted.name,
                version=installed_version(wanted.name),
                tested=str(wanted.specifier),
                required=required,
                remedy=f"`pip install '{wanted.name}{wanted.specifier}'`",
                purpose="" if required else PURPOSES[wanted.name],
            )
        )
    return parts


def built_in_model_parts() -> list[Part]:
    """The packages that hold the built-in models, under the models' names; a model in several needs them all."""
    parts = []
    for name, model in BUILT_IN.items():
        versions = [installed_version(package) for package, _ in model.parts]
        version = None if None in versions else versions[0]
        parts.append(Part(name, version, "", required=False, remedy=model.install, purpose="a built-in model"))
    return parts


def render(checkup: Checkup) -> str:
    lines = [f"{label:<16}{value}" for label, value in checkup.machine]
    speeds = ", ".join(f"{name} {ms:.2f} ms" for name, ms in checkup.matmul_ms.items())
    lines.append(f"{'dtype auto':<16}{checkup.auto_dtype} (a small matrix product: {speeds})")
    if checkup.faster_dtype:
        lines.append(f"{'':<16}{checkup.faster_dtype} was faster here: try --dtype {checkup.faster_dtype}")
    lines.append("")
    lines += [
        f"{part.name:<26}{part.version or '-':<12}{part.problem or 'ok':<10}"
        f"{part.purpose if part.problem and not part.required else ''}".rstrip()
        for part in checkup.parts
    ]
    to_install = [part for part in checkup.parts if part.problem]
    if to_install:
        lines.append("")
    for part in to_install:
        lines.append(f"{'required' if part.required else 'optional'}: {part.remedy}")
    lines += ["", "healthy" if checkup.healthy else "NOT healthy: see the required parts above"]
    return "\n".join(lines)
