"""Gold answers mean what was written: which are used, which are refused, and what agrees with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fastgrpo.grpo.answers import normalise_answer, written_out
from fastgrpo.grpo.data import load_prompts
from fastgrpo.grpo.math_answers import agrees, gold_fault
from fastgrpo.grpo.rewards import accuracy_reward, number_reward

MATHEMATICS = (
    r"\frac{3}{4}",
    r"\text{Evelyn}",
    r"\text{(C)}",
    r"6 - 5i",
    r"x_{max} + 1",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"(-\infty, 2) \cup (3, \infty)",
    "C",
    "ABC",
    "2abc",
    "xyz",
    "lwh",
    "x = 5",
    "e^2",
    "2e",
    "50%",
    "5 cm",
    "12 apples",
    "10 mph",
    r"5 \text{ inches}",
    r"90^\circ",
    "1, 2 and 3",
    "sqrt(2)",
)
WORDS = ("True", "False", "yes", "no", "seven", "two", "half", "Evelyn", "DNE", "pi", "sin x", "18 dollars")


@pytest.mark.parametrize("gold", MATHEMATICS)
def test_mathematics_and_units_are_used(gold: str) -> None:
    assert gold_fault(gold) is None
    assert agrees(gold, rf"\boxed{{{gold}}}") is True


@pytest.mark.parametrize("gold", [*WORDS, "I think it is seven"])
def test_words_are_refused_and_never_rewarded(gold: str) -> None:
    assert "as a product of its letters" in str(gold_fault(gold))
    assert agrees(gold, rf"\boxed{{{gold}}}") is None


def test_rows_with_words_are_skipped_and_counted(tmp_path: Path) -> None:
    golds = [True, "I think it is seven", "2e-3", 1e-7, "1e5", "7"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "?", "answer": gold}) + "\n" for gold in golds))
    loaded = load_prompts(str(file))
    assert loaded.train["answer"] == ["0.0000001", "100000", "7"]
    assert [item.row for item in loaded.skipped] == [0, 1, 2]
    assert "3 rows skipped: 2 x the answer 'True' is read as mathematics" in loaded.summary()
    assert load_prompts(str(file), answers="text").train["answer"][:5] == [
        "True",
        "I think it is seven",
        "2e-3",
        "0.0000001",
        "1e5",
    ]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (1e-7, ("0.0000001", "10^{-7}", "1e-7", "1e-07"), ("e-7", "0", "0.0000002", "7")),
        ("1e5", ("100000", "1e5", "10^5"), ("5e", "5", "1")),
        (0.00012345, ("0.00012345", "1.2345E-4"), ("0.00012346", "0")),
    ],
)
def test_e_notation_is_rewarded_for_its_value_only(
    gold: float | str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    for answers, expected in ((right, 1.0), (wrong, 0.0)):
        boxed = [rf"\boxed{{{answer}}}" for answer in answers]
        assert accuracy_reward(completions=boxed, answer=[gold] * len(boxed)) == [expected] * len(boxed)
    assert number_reward(completions=[f"it is {right[0]}", "it is 7", "it is 0"], answer=[gold] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.skipif("FASTGRPO_DATA" not in os.environ, reason="FASTGRPO_DATA names no folder with math500.jsonl")
def test_every_row_of_math500_is_usable() -> None:
    with (Path(os.environ["FASTGRPO_DATA"]) / "math500.jsonl").open(encoding="utf-8") as lines:
        golds = [written_out(normalise_answer(json.loads(line)["answer"])) for line in lines]
    assert [fault for gold in golds if (fault := gold_fault(gold)) is not None] == []
