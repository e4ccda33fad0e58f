"""One process and two, which speculate, sample the same tokens when the generation batch is the same: uids name rows
over all ranks, and drafts change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes_run
import pytest
from trainers import draft_for

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def read(folder: Path, rank: int) -> list[list[Any]]:
    return json.loads((folder / f"rank{rank}.json").read_text())


def test_one_process_and_two_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    here = Path(processes_run.__file__)
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    draft = tmp_path / "draft"
    draft_for("qwen2").save_pretrained(draft)
    done = subprocess.run(
        [*command, str(here), str(tmp_path / "two"), str(draft)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    processes_run.run(tmp_path / "one")
    alone = read(tmp_path / "one", 0)
    ranks = zip(read(tmp_path / "two", 0), read(tmp_path / "two", 1), strict=True)
    together = [[a + b for a, b in zip(first, second, strict=True)] for first, second in ranks]
    assert len(alone) == 2 and all(len(uids) == 8 for _, uids, _ in alone)
    # From the second step on the weights come from gradients averaged over processes, which round otherwise than one
    # process's sum: a near-tie may flip there, so only the first step is exact by construction.
    assert together[0] == alone[0]
    assert [step[:2] for step in together] == [step[:2] for step in alone]
    summary = json.loads((tmp_path / "two" / "summary.json").read_text())
    assert summary["processes"] == 2
    assert summary["tokens"]["rollout"] == sum(len(ids) for *_, completions in together for ids in completions)
    speculation = summary["speculation"]  # of both ranks
    assert (speculation["responses"], speculation["tokens"]) == (16, summary["tokens"]["rollout"])
    assert speculation["drafted"] > 0
