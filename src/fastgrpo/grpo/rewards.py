r"""Reward functions in TRL's protocol, and ``load_reward``, which finds one by name.

Each is written for one row, ``score(text, row) -> float | None``, and made into a batch function by ``rowwise``. None
means "does not apply" (TRL leaves it out). No reward is ever given for a gold answer that cannot be read, and a
response that makes a scorer raise or run without end scores 0 and is counted. Truncated responses are scored like any
other text. This file knows nothing about trainers or tokenizers.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, overload

from fastgrpo.grpo.answers import extract_answer, is_plain_number, last_number, normalise_answer, written_out
from fastgrpo.grpo.guarded import GuardedCallError, guarded_call

Row = Mapping[str, Any]  # a dataset row: column -> value; its prompt is under TRL's name, "prompts"
Score = Callable[[str, Row], float | None]
RewardFunction = Callable[..., list[float | None]]


@dataclass
class Failures:
    """Responses that a scorer could not finish, since the start of the process; each scored 0."""

    total: int = 0
    last: str = ""


@overload
def rowwise(score: Score) -> RewardFunction: ...


@overload
def rowwise(*, in_process: bool) -> Callable[[Score], RewardFunction]: ...


def rowwise(score: Score | None = None, *, in_process: bool = False) -> Any:
    """Turn a function of one response and its row into a TRL reward function of the same name.

    The result takes ``completions`` (texts, or lists of messages) and the dataset's columns as keywords. It has the
    attributes ``score_row``, the function of one row, ``failures``, and ``in_process``. Where TRL passes
    ``log_metric``, the number of failures of the batch is logged as ``rewards/<name>/failures``.

    FastGRPOTrainer scores rows in worker processes while others are still decoded. So the function looks at nothing but
    its arguments and what its module holds when it is imported. ``@rowwise(in_process=True)`` keeps it in the training
    process: for one that takes microseconds and always ends.
    """
    if score is None:
        return functools.partial(_rowwise, in_process=in_process)
    return _rowwise(score, in_process=in_process)


def _rowwise(score: Score, *, in_process: bool) -> RewardFunction:
    def reward(
        completions: Sequence[Any], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        pairs = row_pairs(completions, columns)
        return settle(reward, (functools.partial(score, text, row) for text, row in pairs), log_metric)

    functools.update_wrapper(reward, score)
    del reward.__wrapped__  # type: ignore[attr-defined]  # the signature that callers see is the batch function's
    reward.score_row = score  # type: ignore[attr-defined]
    reward.failures = Failures()  # type: ignore[attr-defined]
    reward.in_process = in_process  # type: ignore[attr-defined]
    return reward


def row_pairs(completions: Sequence[Any], columns: Mapping[str, Any]) -> list[tuple[str, Row]]:
    """What a row-wise function gets for each row: the text, and of the columns those that have a value per row."""
    count = len(completions)
    names = [
        name
        for name, values in columns.items()
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    ]
    return [
        (completion_text(completion), {name: columns[name][index] for name in names})
        for index, completion in enumerate(completions)
    ]


def settle(
    reward: Any, scores: Iterable[Callable[[], float | None]], log_metric: Callable[[str, float], None] | None
) -> list[float | None]:
    """The rows' scores, each by its call; a GuardedCallError scores 0 and is counted in ``reward.failures``."""
    rewards: list[float | None] = []
    failed = 0
    for score in scores:
        try:
            rewards.append(score())
        except GuardedCallError as error:
            rewards.append(0.0)
            failed += 1
            reward.failures.total, reward.failures.last = reward.failures.total + 1, str(error)
    if log_metric is not None:
        log_metric(f"rewards/{reward.__name__}/failures", float(failed))
    return rewards


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a response: itself, or what the assistant wrote in its messages (tool results left out)."""
    if isinstance(completion, str):
        return completion
    parts: list[str] = []
    for message in completion:
        content = message.get("content")
        if message.get("role", "assistant") != "assistant" or content is None:
            continue
        if isinstance(content, str):
            parts.append(content)
        else:
            parts.extend(part["text"] for part in content if isinstance(part.get("text"), str))
    return "\n".join(parts)


@rowwise
def accuracy_reward(text: str, row: Row) -> float | None:
    r"""1 if the final answer (``\boxed{}``, else "the final answer is $...$") equals the gold answer, else 0.

    By math-verify. The gold answer is the column ``answer``, else ``solution``. None when it does not parse.
    """
    gold = _gold(row, "accuracy_reward")
    if gold is None:
        return None
    same = guarded_call("fastgrpo.grpo.math_answers:agrees", gold, text)
    return None if same is None else float(same)


@rowwise(in_process=True)
def format_reward(text: str, row: Row) -> float | None:
    r"""1 if the response ends its thoughts once, on a line of its own (exactly one ``\n</think>\n``), else 0."""
    return float(text.count("\n</think>\n") == 1)


@rowwise(in_process=True)
def number_reward(text: str, row: Row) -> float | None:
    """1 if the last number in the response equals the gold answer, else 0; None when the gold answer is no number."""
    gold = _gold(row, "number_reward")
    if gold is None or not is_plain_number(gold):
        return None
    return float(last_number(text) == Decimal(gold))


@rowwise
def reasoning_gym_reward(text: str, row: Row) -> float | None:
    r"""The task's own score, 0 to 1, of the response's answer; None for rows that are not from reasoning-gym.

    The answer is the last ``<answer>`` tag, else the last ``\boxed{}``, else the last number (if the gold answer is a
    number), else the last line that is not blank: correctness counts, not form. Some tasks give partial credit.
    """
    entry = row.get("entry")
    if not entry:
        return None
    answer = extract_answer(text, numeric=is_plain_number(str(row.get("answer") or "")))
    return float(guarded_call("fastgrpo.grpo.gym_tasks:score", entry, answer))


REWARDS: dict[str, RewardFunction] = {
    "accuracy": accuracy_reward,
    "format": format_reward,
    "number": number_reward,
    "reasoning_gym": reasoning_gym_reward,
}


def load_reward(name: str) -> RewardFunction:
    """A reward function by its short name here, or any TRL reward function by path: ``module:function`` or with dots.

    The current folder is searched for modules first. Raises ValueError when there is no such function (with the nearest
    name) or it is not callable, ImportError when its module is not found.
    """
    if name in REWARDS:
        return REWARDS[name]
    module_name, separator, attribute = name.partition(":")
    if not separator:
        module_name, separator, attribute = name.rpartition(".")
    if not module_name or not attribute:
        near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"there is no reward {name!r}; choose from {', '.join(REWARDS)}, or give a path like my_rewards:length."
            f"{hint}"
        )
    function = _import_attribute(name, module_name, attribute)
    if not callable(function):
        raise ValueError(f"reward {name!r} is a {type(function).__name__}, not a function; name a callable.")
    return function


def _import_attribute(name: str, module_name: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a command installed as a script does not search the current folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"reward {name!r}: module {error.name!r} is not found; check the spelling, or run in its folder."
        ) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reward {name!r}: {module_name} ({module.__file__}) has no {attribute!r}.{hint}")
    return getattr(module, attribute)


def _gold(row: Row, reward: str) -> str | None:
    """The normalised gold answer of a row; None when it holds none that can be read."""
    column = next((name for name in ("answer", "solution") if name in row), None)
    if column is None:
        raise ValueError(
            f"{reward} needs the dataset column 'answer' or 'solution', and the dataset has {', '.join(row) or 'none'}."
        )
    try:
        return written_out(normalise_answer(row[column]))
    except ValueError:
        return None
