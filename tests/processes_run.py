"""A short run of the trainer that writes what this process sampled; test_processes.py runs it here and by torchrun.

python -m torch.distributed.run --standalone --nproc_per_node 2 processes_run.py FOLDER [DRAFT]
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import astuple
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

from trainers import make_trainer, record_turns


def run(folder: Path, draft: Path | None = None) -> None:
    """Two steps of 8 rows over all processes; rank{n}.json holds [prompts, uids, completions] of each step."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make_trainer(folder, per_device_train_batch_size=8 // world, max_completion_length=6, draft_model=draft)
    turns = record_turns(trainer)
    trainer.train()
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps([astuple(turn) for turn in turns]))
    trainer.end()


if __name__ == "__main__":
    run(*map(Path, sys.argv[1:]))
