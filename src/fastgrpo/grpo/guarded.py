"""Calls a function in a process of its own, which can be stopped whatever the function is doing.

It exists because answers written by a language model reach a computer algebra system: some of them (a tower of powers,
a huge factorial) run for hours inside C code, or ask for all the memory. A signal alarm in the training process cannot
interrupt C code, works in the main thread only, and would take the alarm away from everyone else. A worker process can
be ended at any time, from any thread, and costs about a tenth of a millisecond a call.

The worker is started as ``python -m fastgrpo.grpo.guarded``, not by ``multiprocessing``: a user's script is then never
imported a second time, and no CUDA state is forked. It is not a pool (worker_pool.py is) and not a sandbox: it runs
our own functions and the user's. It needs POSIX (interval timers on CPU time).
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

# For one call. CPU time, not wall time: how busy the machine is must not decide a reward.
CPU_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 4 << 30  # of address space
_PARENT_WATCH_S = 1.0


class GuardedCallError(Exception):
    """The function raised, ran past a limit, or took the worker down; the message says which.

    ``raised`` is the name of the exception's type, empty when there was none.
    """

    def __init__(self, message: str, raised: str = ""):
        super().__init__(f"{raised}: {message}" if raised else message)
        self.raised = raised
        self.reason = message


class GuardedWorker:
    """One worker process, started at the first call and again after each call that took it down.

    Calls from several threads take turns. A child made by ``os.fork`` starts a worker of its own.
    cpu_limit_s: CPU seconds of one call. memory_limit_bytes: of the worker's address space. None sets no limit.
    niceness: added to the worker's own.
    """

    def __init__(
        self,
        cpu_limit_s: float | None = CPU_LIMIT_S,
        *,
        memory_limit_bytes: int | None = MEMORY_LIMIT_BYTES,
        niceness: int = 0,
    ):
        self.cpu_limit_s = cpu_limit_s
        self._settings = [str(memory_limit_bytes or 0), str(niceness)]
        self._process: subprocess.Popen[str] | None = None
        self._owner_pid = 0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process that the next call would go to; None when it would start one."""
        process = self._process
        running = process is not None and self._owner_pid == os.getpid() and process.poll() is None
        return process.pid if process is not None and running else None

    def call(
        self, function: str, *args: Any, cpu_limit_s: float | None = None, time_limit_s: float | None = None
    ) -> Any:
        """Return ``function(*args)``; ``function`` is ``"module:name"``, arguments and result are plain JSON values.

        The module is imported before the clock of the CPU limit (``cpu_limit_s``, else the worker's) starts.
        ``time_limit_s`` is of wall time and counts all of the call: give it only where nothing else ends a hang. Raises
        GuardedCallError when the function raised, ran past a limit or ended the process, and ImportError when it cannot
        be imported (the fault of the installation, not of the arguments).
        """
        limit = self.cpu_limit_s if cpu_limit_s is None else cpu_limit_s
        request = json.dumps([function, args, limit])
        with self._lock:
            reply = self._exchange(request, time_limit_s)
        if reply is None:
            past = "" if limit is None else f"ran past {limit:g} s of CPU time, or "
            raise GuardedCallError(f"{past}ended its process")
        if "missing" in reply:
            raise ImportError(f"{function} cannot be imported by the scoring process: {reply['missing']}")
        if "raised" in reply:
            raise GuardedCallError(reply["reason"], reply["raised"])
        return reply["value"]

    def kill(self) -> None:
        """End the process from any thread: a call that is under way in another one fails as if the process had died."""
        process = self._process
        if process is not None and self._owner_pid == os.getpid():
            process.kill()

    def close(self) -> None:
        """End the worker; a later call starts a new one. Not while another thread is in a call: `kill` is for that."""
        process, self._process = self._process, None
        if process is None or self._owner_pid != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, request: str, time_limit_s: float | None) -> dict[str, Any] | None:
        """Send one line and read one; None when the worker died on it."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            if time_limit_s is not None and not _readable(process.stdout, time_limit_s):
                raise GuardedCallError(f"took longer than {time_limit_s:g} s")
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            # Given up between question and answer: the next reader would get this answer. Start afresh.
            self.close()
            raise
        if not line:
            self.close()
            return None
        return json.loads(line)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self.pid is not None:
            return self._process
        self.close()
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Some libraries let the order of a set decide; with one hash seed, all processes and runs agree. One thread:
        # the cores are the trainer's.
        environment = dict(os.environ, PYTHONPATH=search_path, PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._process, self._owner_pid = process, os.getpid()
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            self.close()
            # Without this check a broken installation would look like a stream of wrong answers.
            raise RuntimeError(
                f"the scoring process did not start ({sys.executable} -m {__name__}); run that command to see its error"
            )
        return process


def _readable(pipe: IO[str], seconds: float) -> bool:
    """Whether something comes within so many seconds, or the other end closes."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


_SHARED = GuardedWorker()
atexit.register(_SHARED.close)


def guarded_call(function: str, *args: Any, cpu_limit_s: float | None = None) -> Any:
    """``GuardedWorker.call`` on the worker that this process shares between its callers."""
    return _SHARED.call(function, *args, cpu_limit_s=cpu_limit_s)


def _answer(function: str, args: list[Any], cpu_limit_s: float | None) -> dict[str, Any]:
    module_name, _, name = function.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        return {"missing": str(error)}
    # The signal's default action ends the process, also when it is deep inside C code; no Python handler is needed.
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s or 0)
    try:
        return {"value": target(*args)}
    except Exception as error:  # any exception is the answer to the question that was asked
        return _fault(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _fault(error: Exception) -> dict[str, str]:
    return {"raised": type(error).__name__, "reason": str(error)[:2000]}


def _serve(requests: IO[str], replies: IO[str]) -> None:
    for line in requests:
        reply = _answer(*json.loads(line))
        try:
            text = json.dumps(reply)
        except (TypeError, ValueError) as error:
            text = json.dumps(_fault(error))
        replies.write(text + "\n")
        replies.flush()


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, also in the middle of a call, which would not see its input end."""
    while os.getppid() == parent:
        time.sleep(_PARENT_WATCH_S)
    os._exit(1)


def _main(memory_limit_bytes: int = 0, niceness: int = 0) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; the worker ends when its input does
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.nice(niceness)
    if memory_limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.WARNING)  # libraries warn that no timeout is set: the timer above is the timeout
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not between the replies
    replies.write("ready\n")
    replies.flush()
    _serve(sys.stdin, replies)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
