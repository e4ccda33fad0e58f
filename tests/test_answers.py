"""Normalising gold answers and finding answers in responses, by table and by property."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgrpo.grpo.answers import (
    MAX_ANSWER_CHARS,
    extract_answer,
    last_boxed,
    last_number,
    normalise_answer,
    written_out,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("She has 2+2 = <<2+2=4>>4.\n#### 4", "4"),
        ("#### 1,234", "1234"),
        ("  -7. ", "-7"),
        (145.0, "145"),
        (0.5, "0.5"),
        (1e-7, "0.0000001"),
        (-2.5e-9, "-0.0000000025"),
        (1e22, "1" + "0" * 22),
        (Decimal("1.50"), "1.50"),
        (Decimal("7.00"), "7"),
        (12, "12"),
        (["3"], "3"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\boxed{8}}", "8"),
        (r"$10,\!080$", "10080"),
        ("12{,}000", "12000"),
        (r"\$18.50", "18.50"),
        ("$1,000,000", "1000000"),
        ("(1,234)", "(1,234)"),  # a pair, not a number
        ("1,2,3", "1,2,3"),
        ("$x$ and $y$", "$x$ and $y$"),
        (r"\(x+1\)", "x+1"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
    ],
)
def test_normalise(value: Any, expected: str) -> None:
    assert normalise_answer(value) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "the answer is missing"),
        ("", "the answer is missing"),
        (" \n", "the answer is missing"),
        ("none", "the answer is missing"),
        ("####  ", "the answer is missing"),
        (r"\boxed{}", "the answer is missing"),
        (float("nan"), "the answer is missing"),
        (float("inf"), "the answer is missing"),
        (Decimal("nan"), "the answer is missing"),
        ([], "the answer is a list of 0 values"),
        (["1", "2"], "the answer is a list of 2 values"),
        ({"value": 3}, "the answer is a dict"),
        ("word " * 50, "the answer is 249 characters of text without a final answer"),
        ("first line\nsecond line", "without a final answer"),
    ],
)
def test_what_cannot_be_normalised(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normalise_answer(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-07", "0.0000001"),
        ("-1e-7", "-0.0000001"),
        ("1e5", "100000"),
        ("1.5E-7", "0.00000015"),
        ("2.50e+01", "25.0"),
        ("2e", "2e"),  # Euler's number, twice
        ("e-7", "e-7"),
        ("3e^2", "3e^2"),
        ("12", "12"),
    ],
)
def test_e_notation_is_written_out(text: str, expected: str) -> None:
    assert written_out(text) == expected


@given(st.floats(1e-99, 1e99) | st.floats(-1e99, -1e-99))
def test_floats_keep_their_value(value: float) -> None:
    assert float(normalise_answer(value)) == value
    assert float(written_out(f"{value:.17E}")) == value


@pytest.mark.parametrize(
    ("text", "reason"), [("2e-3", "Euler's number - 3"), ("1e201", "too long"), ("1e-99999999999", "too long")]
)
def test_what_cannot_be_written_out(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        written_out(text)


@given(st.text(alphabet="0123456789,.$\\!{}- #abx()[]", max_size=24) | st.integers() | st.floats())
def test_normalising_twice_changes_nothing(value: Any) -> None:
    try:
        once = normalise_answer(value)
    except ValueError:
        return
    assert 0 < len(once) <= MAX_ANSWER_CHARS
    assert normalise_answer(once) == once


@given(st.integers(-(10**12), 10**12))
def test_grouped_and_plain_numbers_meet(number: int) -> None:
    assert normalise_answer(f"{number:,}") == normalise_answer(number) == str(number)
    assert last_number(f"So the answer is {number:,}.") == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{a} \boxed {b}", "b"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"),
        (r"\boxed{1} and an open \boxed{2", "1"),
        (r"\fbox{7}", "7"),
        ("no box", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4 - 1 - 7 = -4", "-4"),
        ("2-3", "3"),
        ("x -3", "-3"),
        ("(5)-3", "3"),
        ("is \u22125", "-5"),
        (r"\boxed{-12}", "-12"),
        ("costs $1,250.75.", "1250.75"),
        ("1,2,3", "3"),
        ("1.5.", "1.5"),
        ("12,345,67", "67"),
        ("A4", "4"),
        ("= 1e-07", "1E-7"),
        ("2.5E+3 in all", "2500"),
        ("1e5x", "5"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert last_number(text) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
    ("text", "numeric", "expected"),
    [
        (r"<answer>3</answer> no: <answer> 4 </answer> \boxed{5} 6", True, "4"),
        (r"\boxed{5} or rather 6", True, "5"),
        ("it is 5, or rather 1,006", True, "1006"),
        ("it is 5\n\nYES \n", False, "YES"),
        ("no digits", True, ""),
        ("", False, ""),
    ],
)
def test_extract_answer(text: str, numeric: bool, expected: str) -> None:
    assert extract_answer(text, numeric=numeric) == expected
