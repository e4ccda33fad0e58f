"""What libraries say in every run of the command and nobody can act upon, silenced in this one place.

For the command alone: in Python, what is shown is the caller's business. Nothing here hides a message that tells of
anything else than a known, harmless habit.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

# A pattern for the beginning of the message, and its category.
_HABITS: tuple[tuple[str, type[Warning]], ...] = (
    (".*gradient_checkpointing", FutureWarning),  # TRL's own use of transformers' older names
    (".*pin_memory.* no accelerator is found", UserWarning),  # the default of TrainingArguments on a CPU
)


def silence_known_noise() -> None:
    """Before anything heavy is imported: bars look for the environment only then."""
    for message, category in _HABITS:
        warnings.filterwarnings("ignore", message=message, category=category)
    logging.getLogger("transformers.trainer").addFilter(_tells_something)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a bar in a file is a line for each of its states


def _tells_something(record: logging.LogRecord) -> bool:
    """False for the missing head of a tied model, which is the embedding and was never saved."""
    missing_head = "There were missing keys in the checkpoint model loaded: ['lm_head.weight']"
    return not record.getMessage().startswith(missing_head)
