"""Reward functions: values, TRL's protocol, broken gold answers, responses that raise or never end, look-up by name."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from trl.rewards import accuracy_reward as trl_accuracy_reward

from fastgrpo.grpo import guarded, rewards
from fastgrpo.grpo.data import load_prompts
from fastgrpo.grpo.guarded import GuardedWorker
from fastgrpo.grpo.rewards import (
    accuracy_reward,
    completion_text,
    format_reward,
    load_reward,
    number_reward,
    reasoning_gym_reward,
    rowwise,
)


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# --- accuracy


def test_accuracy_gives_one_for_an_equal_answer_only() -> None:
    responses = [r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{1}", "0.5", "", r"The final answer is $\frac{1}{2}$."]
    values = accuracy_reward(completions=responses, answer=[r"\frac{1}{2}"] * len(responses))
    assert values == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_accuracy_agrees_with_trl_where_the_latex_is_well_formed() -> None:
    gold = ["72", r"\frac{3}{4}", "x^2+1", r"\{1,2\}", "(0,3)", r"\sqrt{2}", "50\\%", r"\text{Evelyn}", "10080"]
    written = [rf"Thus \boxed{{{answer}}}." for answer in gold]
    written += [r"\boxed{0.75}", r"\boxed{1+x^{2}}", r"$72$", "72", r"\boxed{72 \text{ clips}}", r"\boxed{72, 73}"]
    pairs = [*zip(gold, written, strict=False), *((answer, text) for answer in gold[:3] for text in written)]
    ours = accuracy_reward(completions=[text for _, text in pairs], answer=[answer for answer, _ in pairs])
    boxed = [rf"\boxed{{{answer}}}" for answer, _ in pairs]
    theirs = trl_accuracy_reward([messages(text) for _, text in pairs], boxed)
    assert ours == theirs
    assert len(gold) < sum(ours) < len(pairs) / 2


def test_accuracy_reads_the_solution_column_of_trl_datasets() -> None:
    assert accuracy_reward(completions=[r"\boxed{3}"], solution=[r"One plus two is \boxed{3}."]) == [1.0]


@pytest.mark.parametrize("gold", ["", None, r"\frac{1}{", "???", "word " * 60])
def test_a_broken_gold_answer_is_never_rewarded(gold: str | None) -> None:
    responses = [r"\boxed{1}", "", str(gold), rf"\boxed{{{gold}}}"]
    for reward in (accuracy_reward, number_reward):
        assert reward(completions=responses, answer=[gold] * 4) == [None] * 4


def test_a_dataset_without_a_gold_answer_is_named() -> None:
    for reward in (accuracy_reward, number_reward):
        with pytest.raises(
            ValueError, match=rf"{reward.__name__} needs the dataset column 'answer' or 'solution'.*level"
        ):
            reward(completions=["1"], level=[3])


def test_a_response_without_end_scores_zero_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = GuardedWorker(cpu_limit_s=1.0)
    monkeypatch.setattr(guarded, "_SHARED", worker)
    before = accuracy_reward.failures.total
    logged: list[tuple[str, float]] = []
    responses = [r"\boxed{5}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}"]
    values = accuracy_reward(
        completions=responses, answer=["5"] * 3, log_metric=lambda name, value: logged.append((name, value))
    )
    worker.close()
    assert values == [1.0, 0.0, 1.0]
    assert accuracy_reward.failures.total == before + 1
    assert "ran past 1 s of CPU time" in accuracy_reward.failures.last
    assert logged == [("rewards/accuracy_reward/failures", 1.0)]


def test_a_response_that_raises_scores_zero_and_is_counted() -> None:
    @rowwise
    def touchy(text: str, row: rewards.Row) -> float | None:
        return float(guarded.guarded_call("operator:truediv", 1, int(text)))

    assert touchy(completions=["2", "0", "1"]) == [0.5, 0.0, 1.0]
    assert (touchy.failures.total, touchy.failures.last) == (1, "ZeroDivisionError: division by zero")


def test_an_error_of_the_reward_itself_is_not_hidden() -> None:
    @rowwise
    def wrong(text: str, row: rewards.Row) -> float | None:
        return row["no such column"]

    with pytest.raises(KeyError):
        wrong(completions=["2"])


def test_failures_are_logged_at_every_call_because_ranks_gather_them() -> None:
    logged: list[tuple[str, float]] = []
    format_reward(completions=["a"], log_metric=lambda name, value: logged.append((name, value)))
    assert logged == [("rewards/format_reward/failures", 0.0)]


def test_accuracy_works_outside_the_main_thread() -> None:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.extend(accuracy_reward(completions=[r"\boxed{5}"], answer=["5"])))
    thread.start()
    thread.join()
    assert values == [1.0]


# --- the others


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>\na\n</think>\nb", 1.0),
        ("a\n</think>\nb\n</think>\nc", 0.0),
        ("a </think>\nb", 0.0),
        ("a\n</think>", 0.0),
        ("", 0.0),
    ],
)
def test_format(text: str, value: float) -> None:
    assert format_reward(completions=[text, messages(text)]) == [value, value]


def test_number() -> None:
    gold = ["1234", "-4", "0.50", "7", "7", r"\frac{1}{2}"]
    responses = ["so 1,234.", "4 - 8 = -4", "it is .5 or 0.5", "7 and 8", "none", "1/2"]
    assert number_reward(completions=responses, answer=gold) == [1.0, 1.0, 1.0, 0.0, 0.0, None]


def test_reasoning_gym_scores_with_the_tasks_own_scorer() -> None:
    rows = load_prompts("reasoning_gym:chain_sum?size=4", seed=1).train
    gold = rows["answer"]
    columns = {"answer": gold, "entry": rows["entry"], "task": rows["task"]}
    for form in ("{}", "<answer>{}</answer> 99", r"3 4 \boxed{{{}}} 99", "that makes {}.0"):
        assert reasoning_gym_reward(completions=[form.format(answer) for answer in gold], **columns) == [1.0] * 4
    wrong = reasoning_gym_reward(completions=[f"{int(answer) + 1}" for answer in gold], **columns)
    assert max(value for value in wrong if value is not None) < 0.1  # the scorer gives 0.01 for a number at all
    assert reasoning_gym_reward(completions=["1"], entry=[None]) == [None]
    assert reasoning_gym_reward(completions=["1"], answer=["1"]) == [None]


def test_reasoning_gym_tasks_whose_items_json_would_change_score_fully() -> None:
    row = load_prompts("reasoning_gym:rearc?size=1").train[0]
    answer = f"<answer>{row['answer']}</answer>"
    assert reasoning_gym_reward(completions=[answer], answer=[row["answer"]], entry=[row["entry"]]) == [1.0]


# --- TRL's protocol


def test_trl_keywords_are_accepted_and_rows_are_separate() -> None:
    keywords: dict[str, Any] = {
        "prompts": ["a", "b"],
        "completion_ids": [[1], [2]],
        "trainer_state": object(),
        "log_extra": lambda column, values: None,
        "environments": None,
        "answer": ["1", "2"],
    }
    texts = ["1", "1"]
    assert number_reward(completions=texts, **keywords) == [1.0, 0.0]
    assert number_reward(completions=[messages(text) for text in texts], **keywords) == [1.0, 0.0]
    twin = [number_reward.score_row(text, {"answer": gold}) for text, gold in zip(texts, ["1", "2"], strict=True)]
    assert twin == [1.0, 0.0]


def test_text_of_a_completion() -> None:
    turns = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is"}, {"type": "image"}]},
        {"role": "assistant", "content": "5"},
    ]
    assert completion_text(turns) == "It is\n5"
    assert completion_text("plain") == "plain"


# --- by name


def test_names_of_ours() -> None:
    assert load_reward("accuracy") is accuracy_reward
    for name, function in rewards.REWARDS.items():
        assert load_reward(name).__name__ == f"{name}_reward" == function.__name__


def test_any_function_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_reward_module.py").write_text(
        "LIMIT = 3\ndef shortness(completions, **kwargs):\n    return [-len(c) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    for path in ("my_reward_module:shortness", "my_reward_module.shortness"):
        assert load_reward(path)(completions=["ab"]) == [-2]
    assert load_reward("trl.rewards.think_format_reward").__name__ == "think_format_reward"
    with pytest.raises(ValueError, match=r"has no 'shortnes'\. Did you mean 'shortness'\?"):
        load_reward("my_reward_module:shortnes")
    with pytest.raises(ValueError, match="is a int, not a function"):
        load_reward("my_reward_module.LIMIT")


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no reward 'acuracy'; choose from accuracy, .* Did you mean 'accuracy'\?"):
        load_reward("acuracy")
    with pytest.raises(ImportError, match="module 'no_such_module' is not found"):
        load_reward("no_such_module:f")
