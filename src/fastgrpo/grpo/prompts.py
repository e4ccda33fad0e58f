r"""One row of a source -> one prompt and one gold answer: columns, templates, and why a row cannot be used.

Sees one row at a time and keeps nothing; loops, splits and counts are data.py's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

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
_LATEX_BRACES = re.compile(r"(?:\\[A-Za-z]+|[\^_])(?:\{[^{}]*\})+")  # \boxed{x}, \frac{a}{b}, x^{n}: no fields
_ANSWER_NAMES = {name.split(".")[0] for name in ANSWER_COLUMNS}


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
    fields: tuple[str, ...] = ()  # columns that the template names

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """The prompt as messages, template and system prompt applied."""
        prompt = value_at(row, self.prompt_column)
        if isinstance(prompt, list):
            return _styled(_checked_messages(prompt), row, self.style, self.fields)
        if prompt is None:
            raise ValueError(f"the prompt (column {self.prompt_column}) is missing")
        if not isinstance(prompt, str):
            raise ValueError(
                f"the prompt (column {self.prompt_column}) is a {type(prompt).__name__}, where text is needed"
            )
        if not prompt.strip():
            raise ValueError(f"the prompt (column {self.prompt_column}) is empty")
        return _styled([{"role": "user", "content": prompt.strip()}], row, self.style, self.fields)

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
    fields: tuple[str, ...] = ()
    if style.template is not None:
        fields = _check_template(style.template, present)
        if answer is not None:
            _check_secrecy(fields, rows[:100], answer)
    return RowReader(prompt, answer, math=answers == "math", style=style, fields=fields)


def prompt_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as plain text, for models without a chat template."""
    return "\n\n".join(message["content"] for message in messages)


def check_prompts(datasets: Mapping[str, Any], tokenizer: Any) -> None:
    """Refuse rows that no rollout can begin from: no prompt, none in it, or messages that nothing puts into text.

    datasets: by the name to give in errors; what is no Dataset (None, streamed) is left out. Raises ValueError.
    """
    for name, data in datasets.items():
        if not isinstance(data, Dataset):
            continue
        if "prompt" not in data.column_names:
            raise ValueError(f"{name} has no column 'prompt', only {', '.join(data.column_names)}; rename its column.")
        for row, prompt in enumerate(data["prompt"]):
            if not prompt or (isinstance(prompt, str) and not prompt.strip()):
                raise ValueError(f"the prompt in row {row} of {name} is {prompt!r}; leave the row out.")
            if not isinstance(prompt, str) and getattr(tokenizer, "chat_template", None) is None:
                raise ValueError(
                    f"the prompt in row {row} of {name} is messages, and the tokenizer has no chat template; make it "
                    f"text (load_prompts: conversational=False), or set tokenizer.chat_template."
                )


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


def _check_template(template: str, present: Sequence[str]) -> tuple[str, ...]:
    """The columns that the template names, `question` aside."""
    names = dict.fromkeys(_FIELD.findall(template))
    known = {"question", *present}
    if not known & names.keys():
        raise ValueError(f"the template {template[:60]!r} has no {{question}}: every prompt would be the same text.")
    for name in _FIELD.findall(_LATEX_BRACES.sub("", template)):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {{{near[0]}}}?" if near else ""
            raise ValueError(
                f"the template holds {{{name}}}, and the dataset has no such column, only {', '.join(present)}; "
                f"correct it, or write {{ {name} }} with blanks if the braces are meant.{hint}"
            )
    return tuple(name for name in names if name in present and name != "question")


def _check_secrecy(fields: Sequence[str], rows: Sequence[Mapping[str, Any]], answer_column: str) -> None:
    """Raise ValueError for a column in the template that holds the answer, by its name or by what is in it."""
    for field in fields:
        if field == answer_column.split(".")[0]:
            raise ValueError(f"the template holds {{{field}}}, the answer column: the prompt would give it away.")
        pairs = [(_final(row.get(field)), _final(value_at(row, answer_column))) for row in rows]
        known = [value == gold for value, gold in pairs if value is not None and gold is not None]
        if field.lower() in _ANSWER_NAMES or (known and all(known)):
            raise ValueError(
                f"the template holds {{{field}}}, a column of answers: the prompt would give away what {answer_column} "
                f"holds; leave it out, or rename the column if it is part of the question."
            )


def _final(value: Any) -> str | None:
    try:
        return normalise_answer(value)
    except ValueError:
        return None


def _checked_messages(prompt: list[Any]) -> list[dict[str, str]]:
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise ValueError("the prompt is a list whose items are not messages with a role and text content")
    if not prompt or prompt[-1]["role"] != "user" or not prompt[-1]["content"].strip():
        raise ValueError("the prompt does not end with a user message that has text")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _styled(
    messages: list[dict[str, str]], row: Mapping[str, Any], style: PromptStyle, fields: Sequence[str]
) -> list[dict[str, str]]:
    """Apply the template to the last user message, and put the system prompt in front."""
    if style.template is not None:
        if (missing := next((name for name in fields if row.get(name) is None), None)) is not None:
            raise ValueError(f"the column {missing}, which the template names, is missing")
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
