r"""Prompts and gold answers for GRPO: any source -> a dataset in TRL's format, with every unusable row listed.

    prompts = load_prompts("gsm8k", template="published", eval_size=200)
    trainer = FastGRPOTrainer(..., train_dataset=prompts.train, eval_dataset=prompts.eval)

Rows have ``prompt`` (messages, or text), ``answer`` (normalised) and ``solution`` (``\boxed{answer}``, the column that
TRL's own accuracy reward reads), ``task`` and ``entry`` when they come from reasoning-gym, and the source's other
columns. This file does not read files (data_sources.py) and does not score (rewards.py).
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from fastgrpo.grpo.data_sources import RawRows, Unreadable, read_rows
from fastgrpo.grpo.guarded import GuardedCallError, guarded_call
from fastgrpo.grpo.prompts import PromptStyle, RowReader, choose_reader, prompt_text
from fastgrpo.models.foreign import reason

GYM_PREFIX = "reasoning_gym:"
GYM_CPU_LIMIT_S = 3600.0  # making items may take minutes, not hours
GYM_SIZE = 500  # items when neither the source string nor `limit` says how many; reasoning-gym's own default
# Names that TRL passes to reward functions itself, or gives a meaning of its own: a source's column cannot keep them.
_RESERVED = {"prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
_RESERVED |= {"image", "images", "environment", "environments"}
_KEY = "_question"  # a row's prompt as text with single blanks: two rows with the same one ask the same


@dataclass(frozen=True)
class Skipped:
    """A row that is not used: its number in the source (from 0) and why."""

    row: int
    reason: str


@dataclass(frozen=True)
class PromptSet:
    """What ``load_prompts`` returns; ``eval`` is None when no evaluation items were asked for."""

    train: Dataset
    eval: Dataset | None
    skipped: list[Skipped]
    source: str

    def summary(self) -> str:
        """One line: source, counts, and the commonest reasons for skipping rows."""
        text = f"{self.source}: {len(self.train):,} training prompts"
        if self.eval is not None:
            text += f", {len(self.eval):,} evaluation prompts"
        return f"{text}, {summarise_skipped(self.skipped)}"


def summarise_skipped(skipped: Sequence[Skipped]) -> str:
    """One line about skipped rows: how many, and up to three reasons, each with its count and first row."""
    if not skipped:
        return "no row skipped"
    # Reasons quote the row's own value and sizes; without these, rows with the same fault count together.
    first: dict[str, Skipped] = {}
    kinds: Counter[str] = Counter()
    for item in skipped:
        kind = re.sub(r"""'.*'|".*"|\d[\d,]*""", "", item.reason)
        kinds[kind] += 1
        first.setdefault(kind, item)
    parts = [f"{count:,} x {first[kind].reason} (row {first[kind].row})" for kind, count in kinds.most_common(3)]
    return f"{len(skipped):,} {'row' if len(skipped) == 1 else 'rows'} skipped: {'; '.join(parts)}"


def load_prompts(
    source: str,
    *,
    split: str = "train",
    config: str | None = None,
    eval_size: int | float = 0,
    eval_split: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    answers: Literal["math", "text", "none"] = "math",
    system_prompt: str | None = None,
    template: str | None = None,
    conversational: bool = True,
    fraction: float = 1.0,
    limit: int | None = None,
    seed: int = 0,
    data_dir: str | Path = "data",
) -> PromptSet:
    r"""Load prompts and gold answers from a published name, a local file or folder, a hub id, or reasoning-gym.

    Args:
        source: ``gsm8k``, ``simplelr_abel_level3to5``, ``simplelr_qwen_level3to5`` or ``DAPO-math`` (folders under
            ``data_dir``); a .json, .jsonl, .parquet or .csv file; a folder of such files or a saved dataset; a hub id;
            or ``reasoning_gym:<task>?setting=value&...`` (``size`` and ``seed`` are settings too).
        split, config: which part of a folder or hub dataset to train on.
        eval_size: evaluation rows: a number, or a fraction below 1 of the usable rows. No question is in both parts.
        eval_split: take the evaluation rows from this split (all of them when ``eval_size`` is 0).
        prompt_column, answer_column: column names, dots reach into nested columns; found by name when not given.
        answers: "math" (must parse as mathematics), "text" (any short text) or "none" (no answer column is read).
        system_prompt: a system message in front; "published" as ``template`` brings its own.
        template: text with ``{question}`` and any other ``{column}``, or "published"; None is the question alone.
        conversational: False gives ``prompt`` as plain text, for models without a chat template.
        fraction, limit: keep this random share of the rows; then at most this many training rows.
        seed: decides the share, the evaluation rows and reasoning-gym's items; same arguments, same rows.

    Raises:
        ValueError: an argument, column or source that cannot be used, or no usable row at all.
        FileNotFoundError: a published dataset or a file that is not there.
    """
    _check_options(eval_size, fraction, limit, seed, answers)
    style = PromptStyle(system_prompt, template, conversational)
    if source.startswith(GYM_PREFIX):
        if eval_split is not None or fraction != 1.0:
            raise ValueError("eval_split and fraction do not apply to reasoning_gym; use eval_size and ?size=.")
        return _load_gym(source, eval_size=eval_size, limit=limit, seed=seed, style=style)

    def reader_for(raw: RawRows) -> RowReader:
        columns = (prompt_column or raw.prompt_column, answer_column or raw.answer_column)
        return choose_reader(raw.rows, *columns, answers, style)

    raw = read_rows(source, split=split, config=config, data_dir=data_dir)
    chooser = random.Random(seed)
    numbers = sorted(chooser.sample(range(len(raw.rows)), max(1, round(len(raw.rows) * fraction))))
    wanted = None if limit is None or not isinstance(eval_size, int) else limit + (0 if eval_split else eval_size)
    rows, skipped = _prepare(raw, numbers, reader_for(raw), at_most=wanted)
    if eval_split is None:
        held_out, rows = _hold_out(rows, eval_size, chooser)
    else:
        raw_eval = read_rows(source, split=eval_split, config=config, data_dir=data_dir)
        candidates, faults = _prepare(raw_eval, range(len(raw_eval.rows)), reader_for(raw_eval))
        skipped += [Skipped(item.row, f"{item.reason} (split {eval_split})") for item in faults]
        held_out, _ = _hold_out(candidates, eval_size or len(candidates), chooser)
        known = {row[_KEY] for row in held_out}
        rows = [row for row in rows if row[_KEY] not in known]
    return _prompt_set(rows[:limit], held_out, skipped, raw.description)


def check_prompt_lengths(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_total: int,
    *,
    min_response: int = 1,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Dataset, list[Skipped]]:
    """Leave out prompts that leave fewer than ``min_response`` of ``max_total`` tokens (prompt + response).

    Returns the dataset of the others and what was left out, row numbers being those of ``dataset``. Raises ValueError
    when nothing is left, or when messages meet a tokenizer without a chat template.
    """
    options = {"add_generation_prompt": True, "tokenize": False, **(chat_template_kwargs or {})}
    kept, skipped = [], []
    for row, prompt in enumerate(dataset["prompt"]):
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        elif tokenizer.chat_template is None:
            raise ValueError(
                "the prompts are messages and the tokenizer has no chat template; use conversational=False."
            )
        else:
            ids = tokenizer(tokenizer.apply_chat_template(prompt, **options), add_special_tokens=False)["input_ids"]
        if len(ids) + min_response <= max_total:
            kept.append(row)
            continue
        need = f"{min_response:,} {'token' if min_response == 1 else 'tokens'} of response"
        skipped.append(
            Skipped(row, f"the prompt has {len(ids):,} tokens and leaves no room for {need} in {max_total:,}")
        )
    if not kept:
        raise ValueError(f"no prompt fits: {summarise_skipped(skipped)}. Raise max_total or shorten the prompts.")
    return (dataset if not skipped else dataset.select(kept)), skipped


def _check_options(eval_size: Any, fraction: Any, limit: Any, seed: Any, answers: str) -> None:
    if answers not in ("math", "text", "none"):
        raise ValueError(f'answers is {answers!r}; it must be "math", "text" or "none".')
    for name, value in (("limit", 1 if limit is None else limit), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be a whole number.")
    for name, value in (("eval_size", eval_size), ("fraction", fraction)):
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be a number.")
    if not eval_size >= 0 or (isinstance(eval_size, float) and eval_size >= 1):
        raise ValueError(f"eval_size is {eval_size}; it must be a number of rows, or a fraction below 1.")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; it must be above 0 and at most 1.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1, or None for all rows.")


# --- rows of a dataset


def _prepare(
    raw: RawRows, numbers: Iterable[int], reader: RowReader, at_most: int | None = None
) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """The usable rows among ``numbers``, in order, and the others with their reasons; stops at ``at_most`` usable."""
    usable: list[dict[str, Any]] = []
    skipped: list[Skipped] = []
    for number in numbers:
        if at_most is not None and len(usable) == at_most:
            break
        row = raw.rows[number]
        try:
            if isinstance(row, Unreadable):
                raise ValueError(row.reason)
            finished = {**row, **_finished_row(reader.messages(row), reader.answer(row), reader.style)}
            _check_storable(finished)
        except ValueError as error:
            skipped.append(Skipped(number, str(error)))
        else:
            usable.append(finished)
    if not usable:
        raise ValueError(
            f"{raw.description} has no usable row: {summarise_skipped(skipped)}. Name the right columns, or choose the "
            f'kind of answers ("math", "text", "none").'
        )
    return usable, skipped


def _check_storable(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that no column can hold; values that only differ in type are a column's matter."""
    for name, value in row.items():
        if name in _RESERVED:
            continue
        try:
            pyarrow.array([{name: value}])
        except pyarrow.ArrowException:
            continue
        except Exception as error:  # whatever Python's own conversions raise
            raise ValueError(f"the column {name} holds what a dataset cannot store: {reason(error)}") from error


def _finished_row(messages: list[dict[str, str]], answer: str | None, style: PromptStyle) -> dict[str, Any]:
    text = prompt_text(messages)
    row: dict[str, Any] = {"prompt": messages if style.conversational else text, _KEY: " ".join(text.split())}
    if answer is not None:
        row |= {"answer": answer, "solution": rf"\boxed{{{answer}}}"}
    return row


def _hold_out(
    rows: list[dict[str, Any]], size: int | float, chooser: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draw evaluation rows with different questions; every row with one of these questions leaves the training part."""
    questions = list(dict.fromkeys(row[_KEY] for row in rows))
    count = round(size * len(questions)) if isinstance(size, float) else min(size, len(questions))
    chosen = set(chooser.sample(questions, count))
    first = {row[_KEY]: row for row in reversed(rows)}
    held_out = [first[question] for question in questions if question in chosen]
    return held_out, [row for row in rows if row[_KEY] not in chosen]


# --- reasoning-gym


def _load_gym(source: str, *, eval_size: int | float, limit: int | None, seed: int, style: PromptStyle) -> PromptSet:
    arguments = (source.removeprefix(GYM_PREFIX), limit or GYM_SIZE, seed, eval_size)
    try:
        items = guarded_call("fastgrpo.grpo.gym_tasks:make_items", *arguments, cpu_limit_s=GYM_CPU_LIMIT_S)
    except ImportError as error:
        raise ImportError(f"{source!r} needs reasoning-gym: pip install reasoning-gym ({error})") from error
    except GuardedCallError as error:
        said = error.reason if error.raised == "ValueError" else f"{source!r} cannot be made: {error}"
        raise ValueError(said) from error
    columns = dict.fromkeys(("question", "answer", "task"))  # all that a template may see: the entry holds the answer
    reader = choose_reader([columns], "question", "answer", "text", style)
    held_out, rows = (
        [{**item, **_finished_row(reader.messages(item), item["answer"], reader.style)} for item in items[part]]
        for part in ("eval", "train")
    )
    if not rows or (isinstance(eval_size, int) and len(held_out) < eval_size):
        raise ValueError(
            f"{source!r} has only {len(held_out) + len(rows):,} different items for {eval_size} evaluation items and "
            f"at least one training item; lower eval_size or widen the task's settings."
        )
    note = f" ({len(rows):,} different training items)"
    return _prompt_set(rows[:limit], held_out, [], f"{source}{note}", drop=("question",))


# --- the result


def _prompt_set(
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]],
    skipped: list[Skipped],
    source: str,
    drop: tuple[str, ...] = (),
) -> PromptSet:
    if not rows:
        raise ValueError(f"{source} leaves no training row beside {len(held_out):,} for evaluation; lower eval_size.")
    hidden = {_KEY, *drop}
    return PromptSet(
        train=_dataset(rows, hidden),
        eval=_dataset(held_out, hidden) if held_out else None,
        skipped=skipped,
        source=source,
    )


def _dataset(rows: list[dict[str, Any]], hidden: set[str]) -> Dataset:
    """Columns of the rows; one whose values have no common type (a level written 3 and "3") is kept as JSON text."""
    names = dict.fromkeys(name for row in rows for name in row if name not in hidden | _RESERVED)
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            Dataset.from_dict({name: values})
        except Exception:  # no type, or none that it can follow (too deep): it raises what Python and Arrow raise
            values = [json.dumps(value, default=str) for value in values]
        columns[name] = values
    return Dataset.from_dict(columns)
