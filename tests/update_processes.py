"""One update of very unequal ranks, whole and in sub-batches; test_update.py runs it in two processes.

python -m torch.distributed.run --standalone --nproc_per_node 2 update_processes.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import torch
from trainers import make_trainer
from trl import GRPOTrainer

LENGTHS = ([1, 1, 2, 2], [20, 14, 17, 11])  # response tokens of each rank's rows


def record(rank: int, total: int) -> dict[str, Any]:
    lengths = torch.tensor(LENGTHS[rank])
    completion_mask = (torch.arange(20) < lengths[:, None]).long()
    generator = torch.Generator().manual_seed(rank)
    prompt_ids = torch.tensor([[7, 8, 9]]).repeat(4, 1)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": torch.randint(5, 90, (4, 20), generator=generator) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(4, generator=generator),
        "num_items_in_batch": torch.tensor(float(total)),
    }


def update(trainer: Any, model: torch.nn.Module, one: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    model.zero_grad()
    trainer._metrics["train"].clear()
    trainer.training_step(model, one, None)
    metrics = {name: values for name, values in trainer._metrics["train"].items() if name != "step_time"}
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    return gradient.clone(), metrics


def run(folder: Path) -> None:
    GRPOTrainer._prepare_inputs = lambda self, batch: batch  # type: ignore[method-assign]
    trainer = make_trainer(folder, loss_type="dapo", gradient_checkpointing=False, max_completion_length=20)
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.accelerator.prepare(trainer.model)
    rank = trainer.accelerator.process_index
    one = record(rank, sum(map(sum, LENGTHS)))
    whole, metrics_of_the_whole = update(trainer, model, one)

    trainer.args.max_training_token = 22
    synchronised: list[bool] = []
    model.register_comm_hook(None, lambda _, bucket: allreduce(synchronised, bucket))
    planned = len(trainer._chosen_rows(one))
    parts = trainer._parts(one)
    gradient, metrics = update(trainer, model, one)
    result = {
        "planned": planned,
        "run": len(parts),
        "gradient_difference": float((gradient - whole).abs().max() / whole.abs().max()),
        "metrics": metrics,
        "metrics_of_the_whole": metrics_of_the_whole,
        "synchronised": sum(synchronised),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    # torch can hang as it takes gloo apart when the trainer is let go of: a destructor joins a thread that waits for
    # the lock of the interpreter
    os._exit(0)


def allreduce(seen: list[bool], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's own mean over ranks, counted once per backward that synchronises."""
    seen.append(bucket.is_last())
    buffer = bucket.buffer().div_(torch.distributed.get_world_size())
    work = torch.distributed.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


if __name__ == "__main__":
    run(Path(sys.argv[1]))
