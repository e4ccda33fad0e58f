r"""What math-verify says about answers: does a gold answer parse, does a response agree with it.

Both functions can run for hours on hostile input and are called through ``guarded_call`` only (see guarded.py), which
is why math-verify's own time limit, an alarm in the calling process, is off.
"""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from fastgrpo.grpo.answers import is_plain_number, last_boxed, written_out

# The last \boxed{} of a response decides, else "the final answer is $...$": where TRL's accuracy reward looks. Unlike
# TRL's, \frac43 is read as \frac{4}{3}: MATH's own gold answers are written like that.
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

# Where letters do not multiply: in text, in a subscript, in the name of a command.
_NO_PRODUCT = re.compile(r"\\(?:text|mbox|mathrm|operatorname|begin|end)\w*\*?\s*\{[^{}]*\}|_\{[^{}]*\}|\\[A-Za-z]+")
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_SHORT_WORDS = {"dne", "ln", "no", "pi", "yes"}


def _parse(text: str) -> list[Any]:
    return parse(
        text, extraction_config=_EXTRACTION, extraction_mode="first_match", parsing_timeout=None, raise_on_error=True
    )


@lru_cache(maxsize=4096)
def _read_gold(gold: str) -> tuple[list[Any], str | None]:
    """The parsed gold answer (empty where it must not be used), and why it must not be used."""
    parsed = _parse(rf"\boxed{{{gold}}}")
    if not any(not isinstance(item, str) for item in parsed):  # a bare string is a failed parse
        return [], f"the answer {gold!r} does not parse as mathematics"
    if (word := _word_read_as_product(gold, parsed)) is not None:
        return [], f"the answer {gold!r} is read as mathematics, and {word!r} as a product of its letters"
    return parsed, None


def _word_read_as_product(gold: str, parsed: list[Any]) -> str | None:
    """A word that became variables: math-verify reads ``seven`` as s*e*v*e*n. Units, which it removes, did not.

    Letters are a word if they are many, or hold a vowel and are not in the order in which variables are multiplied
    (``xyz``, ``abc``); a few capitals may be points.
    """
    names = {symbol.name.lower() for item in parsed for symbol in getattr(item, "free_symbols", ())}
    variables = {"e", "i", *"".join(names)}  # these two are numbers to it
    for letters in _LETTERS.findall(_NO_PRODUCT.sub(" ", gold)):
        word = letters.lower()
        ordered = all(left < right for left, right in itertools.pairwise(word))
        short = len(word) < 3 or (letters.isupper() and len(word) < 4) or ordered or not set(word) & set("aeiou")
        if set(word) <= variables and (word in _SHORT_WORDS or len(word) > 4 or not short):
            return letters
    return None


def _equal(gold: str, parsed: list[Any], other: list[Any]) -> bool:
    # verify rounds to so many decimals, which would make all small numbers equal: keep six digits that are not zero
    number = Decimal(gold) if is_plain_number(gold) else Decimal(0)
    decimals = max(6, 6 - number.adjusted()) if number else 6
    return bool(verify(parsed, other, float_rounding=decimals, timeout_seconds=None, raise_on_error=True))


def gold_fault(gold: str) -> str | None:
    """Why this gold answer cannot be used, or None: it must parse, mean what it says, and be equal to itself."""
    parsed, fault = _read_gold(gold)
    if fault is None and not _equal(gold, parsed, _parse(rf"\boxed{{{gold}}}")):
        fault = f"the answer {gold!r} does not compare equal to itself"
    return fault


def agrees(gold: str, response: str) -> bool | None:
    """Whether the response's final answer equals ``gold``; None when ``gold`` cannot be used."""
    parsed, fault = _read_gold(gold)
    if fault is not None:
        return None
    return _equal(gold, parsed, _parse(_written_out_in(response)))


def _written_out_in(response: str) -> str:
    boxed = (last_boxed(response) or "").strip()
    try:
        plain = written_out(boxed)
    except ValueError:
        return response
    return response if plain == boxed else rf"\boxed{{{plain}}}"
