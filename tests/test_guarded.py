"""The process that scoring runs in: values, faults, hangs inside C code, memory, threads, forks.

The functions called are real ones of the standard library, so that nothing has to be patched in another process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from fastgrpo.grpo import guarded
from fastgrpo.grpo.guarded import GuardedCallError, GuardedWorker


@pytest.fixture(scope="module")
def worker() -> Iterator[GuardedWorker]:
    worker = GuardedWorker(cpu_limit_s=0.3)
    yield worker
    worker.close()


def test_a_value_comes_back_and_the_worker_stays(worker: GuardedWorker) -> None:
    first = worker.call("os:getpid")
    assert first != os.getpid()
    assert worker.call("os:getpid") == first
    assert worker.call("json:loads", '{"text": "caf\\u00e9 \\n two"}') == {"text": "café \n two"}


def test_an_exception_is_told_and_the_worker_stays(worker: GuardedWorker) -> None:
    before = worker.call("os:getpid")
    with pytest.raises(GuardedCallError, match="ZeroDivisionError: division by zero"):
        worker.call("operator:truediv", 1, 0)
    with pytest.raises(GuardedCallError, match="TypeError"):
        worker.call("builtins:object")  # a result that JSON cannot carry
    assert worker.call("os:getpid") == before


def test_a_call_stuck_in_c_code_is_ended(worker: GuardedWorker) -> None:
    # One C call of minutes: no Python signal handler could run inside it.
    with pytest.raises(GuardedCallError, match=r"ran past 0\.3 s of CPU time"):
        worker.call("math:factorial", 50_000_000)
    assert worker.call("operator:add", 2, 3) == 5


def test_a_call_that_ends_its_process_is_told(worker: GuardedWorker) -> None:
    with pytest.raises(GuardedCallError, match="ended its process"):
        worker.call("os:_exit", 3)
    assert worker.call("operator:add", 2, 3) == 5


def test_a_call_that_asks_for_all_memory_is_told(worker: GuardedWorker) -> None:
    with pytest.raises(GuardedCallError, match="MemoryError"):
        worker.call("operator:mul", "x", guarded.MEMORY_LIMIT_BYTES)


def test_what_a_function_prints_does_not_reach_the_replies(worker: GuardedWorker) -> None:
    assert worker.call("builtins:print", '{"value": 7}') is None
    assert worker.call("operator:add", 2, 3) == 5


def test_a_missing_module_is_no_fault_of_the_arguments(worker: GuardedWorker) -> None:
    with pytest.raises(ImportError, match="no_such_module:f cannot be imported by the scoring process"):
        worker.call("no_such_module:f")
    with pytest.raises(ImportError, match="no_such_function"):
        worker.call("math:no_such_function")


def test_a_worker_that_cannot_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the scoring process did not start"):
        GuardedWorker().call("operator:add", 2, 3)


def test_threads_take_turns(worker: GuardedWorker) -> None:
    results: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: worker.call("operator:mul", n, n)})) for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: n * n for n in range(16)}


def test_a_forked_child_does_not_use_its_parents_worker(worker: GuardedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = worker.call("os:getpid")
    monkeypatch.setattr(worker, "_owner_pid", -1)  # what a child made by fork sees
    assert worker.call("os:getpid") != parents
