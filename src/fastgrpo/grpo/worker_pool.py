"""Processes that score rows: threads of ours, each with a guarded worker, behind one queue.

Knows nothing of trainers, and loads neither torch nor TRL. What a row scores is the reward's business.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from fastgrpo.grpo.guarded import GuardedCallError, GuardedWorker
from fastgrpo.grpo.row_scorer import Address

_NICENESS = 10  # where cores are short, decoding comes first
_LOAD_LIMIT_S = 300.0  # a reward's module may import the world
_MOST_WORKERS = 8  # by default: each holds what the reward's module imports
_LOAD, _SCORE = "fastgrpo.grpo.row_scorer:load", "fastgrpo.grpo.row_scorer:score"


def default_workers() -> int:
    """All cores of this process but one, 1 to 8; the cores are shared with the other ranks of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(1, cores // ranks - 1), _MOST_WORKERS)


@dataclass(frozen=True)
class Outcome:
    """What a worker made of a row: its value, or why there is none, the seconds it took, the processes it ended."""

    value: float | None
    failure: str | None
    seconds: float
    ended: int


class CannotLoadError(Exception):
    """A worker cannot have this function: its module does not import there, or no process can be started."""


@dataclass
class _Job:
    address: Address
    text: str
    row: str
    outcome: Future[Outcome] = field(default_factory=Future)


class WorkerPool:
    """Threads that hand rows to a process each, one at a time; all start when they are first needed.

    time_limit_s: wall time of one row, without the import of its module. A row whose process ends or passes that limit
    is tried again `retries` times, on a new process.
    """

    def __init__(self, size: int, *, time_limit_s: float, retries: int) -> None:
        self._size, self._time_limit_s, self._retries = size, time_limit_s, retries
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stop: Callable[[], object] | None = None

    def submit(self, address: Address, text: str, row: str) -> Future[Outcome]:
        """Have a response scored; `row`: the columns as JSON.

        The result raises CannotLoadError, or GuardedCallError with the name of what the reward raised.
        """
        if self._stop is None:
            threads = [_Thread(self._jobs, self._time_limit_s, self._retries) for _ in range(self._size)]
            for thread in threads:
                thread.start()
            self._stop = weakref.finalize(self, _stop, threads, self._jobs)  # at the latest when Python exits
        job = _Job(address, text, row)
        self._jobs.put(job)
        return job.outcome

    def close(self) -> None:
        """End all processes, whatever they do; what was not scored is cancelled. A later `submit` starts anew."""
        if self._stop is not None:
            self._stop()
            self._stop = None


def _stop(threads: list[_Thread], jobs: queue.SimpleQueue[_Job | None]) -> None:
    for thread in threads:
        thread.closing = True
    with contextlib.suppress(queue.Empty):
        while True:
            job = jobs.get_nowait()
            if job is not None:
                job.outcome.cancel()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        while thread.is_alive():
            thread.process.kill()  # again and again: it may have been about to start one
            thread.join(0.02)


class _Thread(threading.Thread):
    """Waits for one process, so that nobody else has to."""

    def __init__(self, jobs: queue.SimpleQueue[_Job | None], time_limit_s: float, retries: int) -> None:
        super().__init__(name="fastgrpo-rewards", daemon=True)
        self.process = GuardedWorker(None, memory_limit_bytes=None, niceness=_NICENESS)
        self.closing = False
        self._jobs, self._time_limit_s, self._retries = jobs, time_limit_s, retries
        self._loaded: tuple[int | None, set[Address]] = (None, set())  # a process, and what it has imported

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.outcome.set_running_or_notify_cancel():
                try:
                    job.outcome.set_result(self._score(job))
                except Exception as error:  # whatever it is, it belongs to who waits for the row
                    job.outcome.set_exception(error)
        self.process.close()

    def _score(self, job: _Job) -> Outcome:
        ended, reason = 0, ""
        while ended <= self._retries and not self.closing:
            self._load(job.address)
            try:
                reply = self.process.call(_SCORE, *job.address, job.text, job.row, time_limit_s=self._time_limit_s)
            except GuardedCallError as error:
                if error.raised:
                    raise
                ended, reason = ended + 1, str(error)
            else:
                return Outcome(**reply, ended=ended)
        return Outcome(None, reason, 0.0, ended)

    def _load(self, address: Address) -> None:
        pid, loaded = self._loaded
        if self.process.pid is None or self.process.pid != pid:
            loaded = set()
        if address not in loaded:
            try:
                self.process.call(_LOAD, *address, time_limit_s=_LOAD_LIMIT_S)
            except (GuardedCallError, ImportError, RuntimeError, OSError) as error:
                raise CannotLoadError(str(error)) from error
            loaded.add(address)
        self._loaded = (self.process.pid, loaded)
