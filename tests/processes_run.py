"""A short run of the trainer that writes what this process sampled; test_processes.py runs it here and by torchrun.

python -m torch.distributed.run --standalone --nproc_per_node 2 processes_run.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer

from fastgrpo.config import FastGRPOConfig
from fastgrpo.grpo.trainer import FastGRPOTrainer


def distinct_characters(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def run(folder: Path) -> None:
    """Two steps of 8 rows over all processes; rank{n}.json holds one [uid, prompt, completion] per row and step."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = FastGRPOConfig(
        str(folder), use_cpu=True, max_steps=2, per_device_train_batch_size=8 // world, num_generations=4,
        max_completion_length=6, learning_rate=1e-3, logging_steps=1, save_strategy="no", disable_tqdm=True, seed=7,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": ["abc", "hello there", "xy 12", "q", "Zz?", "one"]})
    trainer = FastGRPOTrainer(
        tiny_model("qwen2"), distinct_characters, args, dataset, processing_class=tiny_tokenizer()
    )
    steps: list[list[Any]] = []
    original = trainer._rollout

    def recording(prompts: list[list[int]], *, uids: list[int], limits: list[int]) -> Any:
        rollout = original(prompts, uids=uids, limits=limits)
        rows = zip(uids, prompts, rollout.completions, strict=True)
        steps.append([[uid, prompt, completion.token_ids] for uid, prompt, completion in rows])
        return rollout

    trainer._rollout = recording  # type: ignore[method-assign]
    trainer.train()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(steps))
    trainer.end()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
