"""The processes that score rows: what is sent to them, what they answer, what happens when they fail or are closed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import row_rewards
import torch
from row_rewards import workers_alive

from fastgrpo.grpo.rewards import format_reward, rowwise
from fastgrpo.grpo.scoring import Scoring
from fastgrpo.grpo.worker_pool import default_workers

LIMIT_S = 0.6
PID = os.getpid()
MakeScoring = Callable[..., Scoring]


@pytest.fixture
def make_scoring() -> Iterator[MakeScoring]:
    made: list[Scoring] = []

    def make(*rewards: Any, workers: int = 1, retries: int = 0, said: list[str] | None = None) -> Scoring:
        say = [].append if said is None else said.append
        made.append(Scoring(rewards, workers=workers, time_limit_s=LIMIT_S, retries=retries, say=say))
        return made[-1]

    yield make
    for each in made:
        each.close()


def group_rank(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(other < text for other in completions)) for text in completions]


# What is sent, and what is not


def test_the_rows_of_quick_group_dependent_and_other_rewards_stay_in_process(
    tmp_path: Path, make_scoring: MakeScoring
) -> None:
    async def waiting(completions: Any, **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    model = torch.nn.Linear(1, 1)
    said: list[str] = []
    given = [row_rewards.quick, format_reward, group_rank, waiting, model]
    assert make_scoring(*given, said=said).reward_funcs == given and not said
    assert make_scoring(row_rewards.sleepy, workers=0).reward_funcs == [row_rewards.sleepy]
    assert row_rewards.quick(completions=["a"]) == [PID]


def test_a_row_wise_reward_is_called_elsewhere_and_looks_the_same(make_scoring: MakeScoring) -> None:
    (where, named) = make_scoring(row_rewards.where, row_rewards.named).reward_funcs
    assert where.__name__ == "where" and where.score_row is row_rewards.where.score_row
    logged: list[Any] = []
    (first, second) = where(completions=["a", "b"], log_metric=lambda *metric: logged.append(metric))
    assert first == second != PID
    assert logged == [("rewards/where/failures", 0.0)]
    assert named(completions=["a"]) == [3.0]


def test_what_cannot_be_sent_is_scored_in_process_and_that_is_said(make_scoring: MakeScoring) -> None:
    @rowwise
    def closure(text: str, row: Any) -> float | None:
        return float(os.getpid())

    said: list[str] = []
    functions = make_scoring(closure, row_rewards.unnamed, said=said).reward_funcs
    assert functions == [closure, row_rewards.unnamed]
    assert closure(completions=["a"]) == [PID]
    assert ["closure" in said[0], "<lambda>" in said[1]] == [True, True] and "a module of its own" in said[0]


def test_a_row_that_json_does_not_carry_is_scored_in_process(make_scoring: MakeScoring) -> None:
    said: list[str] = []
    (where,) = make_scoring(row_rewards.where, said=said).reward_funcs
    values = where(completions=["a", "b", "c"], image=[b"png", None, (1, 2)])
    assert [value == PID for value in values] == [True, False, True]
    assert "JSON" in said[0]


def test_a_reward_of_a_file_that_no_path_leads_to(tmp_path: Path, make_scoring: MakeScoring) -> None:
    file = tmp_path / "hidden_rewards.py"
    file.write_text(
        "import os\nfrom fastgrpo.grpo.rewards import rowwise\n@rowwise\ndef mine(text, row):\n    return os.getpid()\n"
    )
    spec = importlib.util.spec_from_file_location("hidden_rewards", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hidden_rewards"] = module
    spec.loader.exec_module(module)
    try:
        (mine,) = make_scoring(module.mine).reward_funcs
        assert mine(completions=["a"]) != [PID]
    finally:
        del sys.modules["hidden_rewards"]


def test_a_module_that_does_not_load_elsewhere_is_said_and_scored_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_scoring: MakeScoring
) -> None:
    (tmp_path / "only_here.py").write_text(
        f"import os\nfrom fastgrpo.grpo.rewards import rowwise\nif os.getpid() != {PID}:\n    raise OSError('no key')\n"
        "@rowwise\ndef mine(text, row):\n    return os.getpid()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    said: list[str] = []
    (mine,) = make_scoring(only_here.mine, said=said).reward_funcs
    assert mine(completions=["a", "b"]) == [PID, PID]
    assert len(said) == 1 and "OSError: no key" in said[0]
    assert mine(completions=["a"]) == [PID] and len(said) == 1


def test_the_script_that_is_run_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            print("run")
            from fastgrpo.grpo.rewards import rowwise
            from fastgrpo.grpo.row_scorer import address_of
            from fastgrpo.grpo.worker_pool import WorkerPool

            @rowwise
            def mine(text, row):
                return os.getpid()

            pool = WorkerPool(1, time_limit_s=9, retries=0)
            import row_rewards
            elsewhere = pool.submit(address_of(row_rewards.where), "a", "{}").result().value
            print(address_of(mine), elsewhere != os.getpid())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout.splitlines() == ["run", "None True"]


# Processes that fail


def test_a_row_that_raises_raises_in_trls_call(make_scoring: MakeScoring) -> None:
    (fragile,) = make_scoring(row_rewards.fragile).reward_funcs
    with pytest.raises(LookupError, match="no such answer") as raised:
        fragile(completions=["fine", "raise"])
    assert any(entry.name == "fragile" for entry in raised.traceback)  # in this process, where it can be debugged
    assert fragile(completions=["fine", "none"]) == [4.1, None]


def test_a_guarded_call_that_fails_within_scores_zero_with_the_same_words(make_scoring: MakeScoring) -> None:
    (fragile,) = make_scoring(row_rewards.fragile, retries=2).reward_funcs
    before = row_rewards.fragile.failures.total
    assert fragile(completions=["guarded", "fine"]) == [0.0, 4.1]
    there = row_rewards.fragile.failures.last
    assert row_rewards.fragile(completions=["guarded"]) == [0.0]
    assert row_rewards.fragile.failures.last == there == "ZeroDivisionError: division by zero"
    assert row_rewards.fragile.failures.total == before + 2


@pytest.mark.parametrize(("text", "reason"), [("exit", "ended its process"), ("hang", f"took longer than {LIMIT_S} s")])
def test_a_process_that_dies_or_hangs_is_replaced_and_its_row_scores_zero(
    make_scoring: MakeScoring, text: str, reason: str
) -> None:
    said: list[str] = []
    scorer = make_scoring(row_rewards.fragile, said=said)
    (fragile,) = scorer.reward_funcs
    logged: list[tuple[str, float]] = []
    values = fragile(completions=["fine", text, "fine"], log_metric=lambda *metric: logged.append(metric))
    assert values == [4.1, 0.0, 4.1]
    assert row_rewards.fragile.failures.last == reason
    assert len(said) == 1 and "the reward fragile died or was hung" in said[0]
    scorer.end(lambda *metric: logged.append(metric))
    metrics = dict(logged)
    assert metrics["rewards/fragile/failures"] == 1 and metrics["rewards/workers_ended"] == 1
    assert 0 <= metrics["rewards/overlapped_s"] <= metrics["rewards/waited_s"] + 1


def test_a_row_is_tried_again_where_that_is_asked_for(tmp_path: Path, make_scoring: MakeScoring) -> None:
    row = {"file": [str(tmp_path / "first")]}
    (never,) = make_scoring(row_rewards.fragile, retries=0).reward_funcs
    assert never(completions=["once"], **row) == [0.0]
    (tmp_path / "first").unlink()
    (again,) = make_scoring(row_rewards.fragile, retries=1).reward_funcs
    assert again(completions=["once"], **row) == [4.1]
    assert again(completions=["exit"], **row) == [0.0]


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(1, 1, 1), (2, 1, 1), (8, 2, 3), (64, 8, 7), (64, 1, 8)])
def test_as_many_workers_as_cores_but_one_shared_by_the_ranks(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert default_workers() == workers


# Shutting down


def test_no_process_outlives_close_or_a_killed_trainer(tmp_path: Path, make_scoring: MakeScoring) -> None:
    scorer = make_scoring(row_rewards.fragile, workers=2)
    (fragile,) = scorer.reward_funcs
    fragile(completions=["fine"] * 4)
    for _ in range(4):
        fragile.score_early("hang", {})
    assert 1 <= len(workers_alive()) <= 2
    began = time.perf_counter()
    scorer.close()
    assert time.perf_counter() - began < LIMIT_S + 2 and not workers_alive()
    scorer.end()
    assert fragile(completions=["fine"]) == [4.1]  # it starts anew

    script = (
        "import os, row_rewards, signal, sys\n"
        "from fastgrpo.grpo.row_scorer import address_of\n"
        "from fastgrpo.grpo.worker_pool import WorkerPool\n"
        "pool = WorkerPool(1, time_limit_s=99, retries=0)\n"
        "pid = pool.submit(address_of(row_rewards.where), 'a', '{}').result().value\n"
        "pool.submit(address_of(row_rewards.fragile), 'hang', '{}')\n"
        "print(int(pid), flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as child:
        worker = int(child.stdout.readline())
        os.kill(worker, 0)  # it lives
        child.communicate("\n")
    deadline = time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
