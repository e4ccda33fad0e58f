r"""One row of a source -> one prompt and one gold answer: columns, templates, and why a row cannot be used.

Sees one row at a time and keeps nothing; loops, splits and counts are data.py's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgrpo.grpo.answers import is_plain_number, normalise_answer, written_out
from fastgrpo.grpo.guarded import GuardedCallError, guarded_call

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query")
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "reward_model.ground_truth", "solution")

PUBLISHED_SYSTEM_PROMPT = "You are an assistant who solves mathematical problems with care."
PUBLISHED_TEMPLATE = """\
Below is an instruction that states a problem. Write a response that solves it.
Put your thoughts between <think> and </think>, and after them your answer, a number, between <answer> and </answer>.

### Instruction:
{question}

Please reason step by step, and put your final answer within \\boxed{}."""

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class PromptStyle:
    """How a question is put to the model."""

    system_prompt: str | None = None
    template: str | None = None
    conversational: bool = True

    def resolved(self) -> PromptStyle:
        """The same style with the name "published" replaced by its texts; a system prompt of the user's own stays."""
        if self.template != "published":
            return self
        return PromptStyle(self.system_prompt or PUBLISHED_SYSTEM_PROMPT, PUBLISHED_TEMPLATE, self.conversational)


@dataclass(frozen=True)
class RowReader:
    """Reads the prompt and the answer out of a row; both methods raise ValueError with the reason a row is unusable."""

    prompt_column: str
    answer_column: str | None  # None: rows have no gold answer
    math: bool  # the answer must parse as mathematics
    style: PromptStyle

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """The prompt as messages, template and system prompt applied."""
        prompt = value_at(row, self.prompt_column)
        if isinstance(prompt, list):
            return _styled(_checked_messages(prompt), row, self.style)
        if prompt is None:
            raise ValueError(f"the prompt (column {self.prompt_column}) is missing")
        if not isinstance(prompt, str):
            raise ValueError(
                f"the prompt (column {self.prompt_column}) is a {type(prompt).__name__}, where text is needed"
            )
        if not prompt.strip():
            raise ValueError(f"the prompt (column {self.prompt_column}) is empty")
        return _styled([{"role": "user", "content": prompt.strip()}], row, self.style)

    def answer(self, row: Mapping[str, Any]) -> str | None:
        """The normalised gold answer; None when rows have none."""
        if self.answer_column is None:
            return None
        answer = normalise_answer(value_at(row, self.answer_column))
        if not self.math:
            return answer
        answer = written_out(answer)
        # A plain number always parses; asking would only cost time (a test compares the two).
        if not is_plain_number(answer) and (fault := _math_fault(answer)) is not None:
            raise ValueError(fault)
        return answer


def choose_reader(
    rows: Sequence[Mapping[str, Any]],
    prompt_column: str | None,
    answer_column: str | None,
    answers: str,
    style: PromptStyle,
) -> RowReader:
    """Find the columns that were not named, and check the template against the columns.

    ``answers`` is "math", "text" or "none". Raises ValueError naming the columns there are, and the nearest one.
    """
    present = list(dict.fromkeys(name for row in rows[:100] for name in row))
    nested = [f"{name}.{key}" for name in present if isinstance(rows[0].get(name), dict) for key in rows[0][name]]
    prompt = _find_column("prompt", prompt_column, PROMPT_COLUMNS, present, nested)
    answer = None
    if answers != "none":
        answer = _find_column("answer", answer_column, ANSWER_COLUMNS, present, nested)
    style = style.resolved()
    if style.template is not None:
        _check_template(style.template, present, answer)
    return RowReader(prompt, answer, math=answers == "math", style=style)


def prompt_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as plain text, for models without a chat template."""
    return "\n\n".join(message["content"] for message in messages)


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column; dots reach into nested columns. None when it is not there."""
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _find_column(
    role: str, asked: str | None, usual: Sequence[str], present: Sequence[str], nested: Sequence[str]
) -> str:
    if asked is not None:
        if asked in present or asked in nested:
            return asked
        near = difflib.get_close_matches(asked, [*present, *nested], n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"the dataset has no {role} column {asked!r}; it has {', '.join(present)}.{hint}")
    by_lower_case = {name.lower(): name for name in reversed(present)}
    for name in usual:
        if name in by_lower_case or name in nested:
            return by_lower_case.get(name, name)
    remedy = f"name it with {role}_column"
    if role == "answer":
        remedy += ', or use answers="none" if no reward needs it'
    raise ValueError(f"no {role} column was found: looked for {', '.join(usual)} among {', '.join(present)}; {remedy}.")


def _check_template(template: str, present: Sequence[str], answer_column: str | None) -> None:
    fields = set(_FIELD.findall(template))
    if not fields & {"question", *present}:
        raise ValueError(f"the template {template[:60]!r} has no {{question}}: every prompt would be the same text.")
    if answer_column is not None and answer_column.split(".")[0] in fields - {"question"}:
        raise ValueError(f"the template holds {{{answer_column}}}, the answer column: the prompt would give it away.")


def _checked_messages(prompt: list[Any]) -> list[dict[str, str]]:
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError("the prompt is a list whose items are not messages with a role and text content")
    if not prompt or prompt[-1]["role"] != "user" or not prompt[-1]["content"].strip():
        raise ValueError("the prompt does not end with a user message that has text")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _styled(messages: list[dict[str, str]], row: Mapping[str, Any], style: PromptStyle) -> list[dict[str, str]]:
    """Apply the template to the last user message, and put the system prompt in front."""
    if style.template is not None:
        fill = {**row, "question": messages[-1]["content"]}

        def field(match: re.Match[str]) -> str:
            return str(fill[match[1]]) if match[1] in fill else match[0]  # other braces, as in \boxed{x}, stay

        messages = [*messages[:-1], {"role": "user", "content": _FIELD.sub(field, style.template)}]
    if style.system_prompt is not None:
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": style.system_prompt})
    return messages


def _math_fault(answer: str) -> str | None:
    try:
        return guarded_call("fastgrpo.grpo.math_answers:gold_fault", answer)
    except GuardedCallError as error:
        return f"the answer {answer!r} does not parse as mathematics: {error}"
