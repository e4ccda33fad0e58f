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
    from fastgrpo.models.draft import DraftModel
    from fastgrpo.models.draft_config import DraftConfig
    from fastgrpo.models.loading import load_model
    from fastgrpo.speculation.engine import Engine
    from fastgrpo.speculation.generate import SpeculativeModel, speculative_generate
    from fastgrpo.speculation.sampling import SamplingParams

__version__ = "0.1.0.dev0"

_HOME_OF = {
    "DraftConfig": "fastgrpo.models.draft_config",
    "DraftModel": "fastgrpo.models.draft",
    "Engine": "fastgrpo.speculation.engine",
    "FastGRPOConfig": "fastgrpo.config",
    "FastGRPOTrainer": "fastgrpo.grpo.trainer",
    "SamplingParams": "fastgrpo.speculation.sampling",
    "SpeculativeModel": "fastgrpo.speculation.generate",
    "load_model": "fastgrpo.models.loading",
    "speculative_generate": "fastgrpo.speculation.generate",
}

__all__ = [
    "DraftConfig",
    "DraftModel",
    "Engine",
    "FastGRPOConfig",
    "FastGRPOTrainer",
    "SamplingParams",
    "SpeculativeModel",
    "__version__",
    "load_model",
    "speculative_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fastgrpo' has no attribute {name!r}; it offers {', '.join(sorted(_HOME_OF))}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME_OF))
