"""How a row-wise reward function is sent to another process: named here, found and called there.

What runs in a scoring worker, so it loads nothing but the function's own module. It starts no process: worker_pool.py
does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import operator
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastgrpo.grpo.guarded import GuardedCallError

Address = tuple[str, str, str]  # name of the module, its file ("" for none), path of the function in it


def address_of(reward: Any) -> Address | None:
    """Where another process finds this function; None for what it cannot: lambdas, closures, the script that is run."""
    module = sys.modules.get(reward.__module__)
    if module is None or module.__name__ == "__main__":
        return None
    try:
        found = operator.attrgetter(reward.__qualname__)(module)
    except AttributeError:  # defined inside a function, or a lambda
        return None
    if found is not reward and found is not reward.score_row:
        return None
    return module.__name__, getattr(module, "__file__", None) or "", reward.__qualname__


def load(module_name: str, file: str, name: str) -> None:
    """Import a function ahead of its first call, whose time then is its own."""
    _find(module_name, file, name)


def score(module_name: str, file: str, name: str, text: str, row: str) -> dict[str, Any]:
    """Score one row, given as JSON: ``value``, or ``failure`` of a guarded call within it, and ``seconds``."""
    score_row, columns = _find(module_name, file, name), json.loads(row)
    began = time.perf_counter()
    value, failure = None, None
    try:
        value = score_row(text, columns)
    except GuardedCallError as error:
        failure = str(error)
    seconds = time.perf_counter() - began
    return {"value": None if value is None else float(value), "failure": failure, "seconds": seconds}


@functools.cache
def _find(module_name: str, file: str, name: str) -> Callable[[str, Any], Any]:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not file or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        module = None
    if file and (module is None or not _is_from(module, file)):
        module = _load_file(module_name, file)
    found = operator.attrgetter(name)(module)
    return getattr(found, "score_row", found)


def _is_from(module: ModuleType, file: str) -> bool:
    own = getattr(module, "__file__", None)
    return own is not None and os.path.exists(own) and os.path.exists(file) and os.path.samefile(own, file)


def _load_file(module_name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    spec.loader.exec_module(module)
    return module
