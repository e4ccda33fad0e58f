"""GRPO training of language models with its own rollout engine; a drop-in for TRL's `GRPOTrainer`.

The public names below load what they need at their first use, so that `import fastgrpo` costs nothing and the engine
works without TRL installed. This file holds no code of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgrpo.config import FastGRPOConfig
    from fastgrpo.grpo.trainer import FastGRPOTrainer
    from fastgrpo.models.loading import load_model
    from fastgrpo.speculation.engine import Engine
    from fastgrpo.speculation.sampling import SamplingParams

__version__ = "0.1.0.dev0"

_HOME_OF = {
    "Engine": "fastgrpo.speculation.engine",
    "FastGRPOConfig": "fastgrpo.config",
    "FastGRPOTrainer": "fastgrpo.grpo.trainer",
    "SamplingParams": "fastgrpo.speculation.sampling",
    "load_model": "fastgrpo.models.loading",
}

__all__ = ["Engine", "FastGRPOConfig", "FastGRPOTrainer", "SamplingParams", "__version__", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fastgrpo' has no attribute {name!r}; it offers {', '.join(sorted(_HOME_OF))}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME_OF))
