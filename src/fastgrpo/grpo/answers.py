r"""Text to final answer: how a gold answer is cleaned once, and how an answer is found in a response.

Pure string functions. Whether two answers mean the same is decided elsewhere (math_answers.py, gym_tasks.py).
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

MAX_ANSWER_CHARS = 200  # the longest answer in MATH-500 has 53; what is longer is a worked solution or prose

_ABSENT = {"", "nan", "none", "null", "n/a"}
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)")
_GROUPED_NUMBER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# A minus counts as a sign only where it cannot be a subtraction: "2-3" ends in 3, "= -3" in -3.
_NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212])?(?<![\d.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\w))?"
)
# Digits, E and an exponent, as computers write them. "2e-3" alone could as well be Euler's number: 2e - 3.
_E_NOTATION = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([eE])([+-]?)(\d+)")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` (or ``\fbox``) whose braces balance; None when there is none."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for index in range(match.end(), len(text)):
            if text[index] in "{}" and text[index - 1] != "\\":
                depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return text[match.end() : index]
    return None


def normalise_answer(value: Any) -> str:
    r"""One gold answer as a short string; the same function on its own output changes nothing.

    Takes what datasets hold: a number, a string, a worked solution that ends in ``#### 18`` (GSM8K) or ``\boxed{18}``,
    or a list with one of them. Removes surrounding dollar signs, the final full stop, and the commas and thin spaces
    inside a number. Raises ValueError, with the reason alone as its message, for a value without a final answer.
    """
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError(f"the answer is a list of {len(value)} values, where one is needed")
        value = value[0]
    if value is None or (isinstance(value, float | Decimal) and not math.isfinite(value)):
        raise ValueError("the answer is missing")
    if not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"the answer is a {type(value).__name__}, where text or a number is needed")
    if isinstance(value, float | Decimal):
        value = int(value) if value == int(value) else f"{Decimal(str(value)):f}"  # never 1e-07, which reads as e - 7
    text = str(value)
    if "####" in text:
        text = text.rpartition("####")[2]
    while (inside := last_boxed(text)) is not None:
        text = inside
    text = _tidy(text)
    if text.lower() in _ABSENT:
        raise ValueError("the answer is missing")
    if len(text) > MAX_ANSWER_CHARS or "\n" in text:
        raise ValueError(f"the answer is {len(text)} characters of text without a final answer (#### or \\boxed)")
    return text


def _tidy(text: str) -> str:
    """Strip delimiters, a final full stop and number grouping until nothing changes."""
    before = None
    while text != before:
        before = text
        text = text.strip().removesuffix(".")
        for opening, closing in _MATH_DELIMITERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner.strip() and opening not in inner:
                text = inner
        bare = text.replace(r"\!", "").replace("{,}", ",").removeprefix("\\$").removeprefix("$").strip()
        if _GROUPED_NUMBER.fullmatch(bare):
            text = bare.replace(",", "")
        elif _PLAIN_NUMBER.fullmatch(bare):
            text = bare
    return text


def is_plain_number(text: str) -> bool:
    """Whether the whole text is a decimal number such as ``-12`` or ``0.5``."""
    return _PLAIN_NUMBER.fullmatch(text) is not None


def written_out(text: str) -> str:
    """A number in E-notation as a decimal number: 1.5e-7 is 0.00000015; any other text as it is.

    Mathematics reads E-notation as a multiple of Euler's number. Raises ValueError where that may be what is meant
    (``2e-3``), and for numbers that are too long to write out.
    """
    match = _E_NOTATION.fullmatch(text)
    if match is None:
        return text
    digits, letter, sign, exponent = match.groups()
    if letter == "e" and sign and exponent[0] != "0" and digits.strip("+-") != "1" and "." not in digits:
        raise ValueError(
            f"the answer {text!r} can be 10 to the power {sign}{exponent} and Euler's number {sign} {exponent}"
        )
    if len(exponent.lstrip("0")) > 3 or abs(int(exponent)) > MAX_ANSWER_CHARS:
        raise ValueError(f"the answer {text!r} is too long to be written out")
    return f"{Decimal(text):f}"


def last_number(text: str) -> Decimal | None:
    """The last decimal number written in the text, thousands commas and E-notation allowed; None without any."""
    found = None
    for match in _NUMBER_IN_TEXT.finditer(text):
        found = match.group()
    return None if found is None else Decimal(found.replace(",", "").replace("\u2212", "-"))


def extract_answer(text: str, *, numeric: bool) -> str:
    r"""The answer that a free response gives, for scorers that want the bare answer.

    In this order: the last ``<answer>`` tag; the last ``\boxed{}``; the last number, if ``numeric`` (the gold answer is
    one); the last line that is not blank. A response without any text gives an empty string.
    """
    tags = _ANSWER_TAG.findall(text)
    if tags:
        return tags[-1].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if numeric:
        number = last_number(text)
        return "" if number is None else f"{number:f}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
