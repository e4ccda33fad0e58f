r"""What math-verify says about answers: does a gold answer parse, does a response agree with it.

Both functions can run for hours on hostile input and are called through ``guarded_call`` only (see guarded.py), which
is why math-verify's own time limit, an alarm in the calling process, is off.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

# The last \boxed{} of a response decides, else "the final answer is $...$": where TRL's accuracy reward looks. Unlike
# TRL's, \frac43 is read as \frac{4}{3}: MATH's own gold answers are written like that.
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]


def _parse(text: str) -> list[Any]:
    return parse(
        text, extraction_config=_EXTRACTION, extraction_mode="first_match", parsing_timeout=None, raise_on_error=True
    )


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    """The parsed gold answer; empty unless it became a mathematical object (a bare string is a failed parse)."""
    parsed = _parse(rf"\boxed{{{gold}}}")
    return parsed if any(not isinstance(item, str) for item in parsed) else []


def gold_fault(gold: str) -> str | None:
    """Why this gold answer cannot be used, or None: it must parse, and be equal to itself."""
    parsed = _parse_gold(gold)
    if not parsed:
        return f"the answer {gold!r} does not parse as mathematics"
    if not verify(parsed, _parse(rf"\boxed{{{gold}}}"), timeout_seconds=None, raise_on_error=True):
        return f"the answer {gold!r} does not compare equal to itself"
    return None


def agrees(gold: str, response: str) -> bool | None:
    """Whether the response's final answer equals ``gold``; None when ``gold`` does not parse."""
    parsed = _parse_gold(gold)
    if not parsed:
        return None
    return bool(verify(parsed, _parse(response), timeout_seconds=None, raise_on_error=True))
