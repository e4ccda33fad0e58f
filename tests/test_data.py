"""load_prompts: reasoning-gym, templates, splits, unusable rows, lengths, and every error message of these."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tiny import tiny_tokenizer

from fastgrpo.grpo import guarded, prompts
from fastgrpo.grpo.data import PromptSet, Skipped, check_prompt_lengths, load_prompts, summarise_skipped
from fastgrpo.grpo.guarded import GuardedCallError
from fastgrpo.grpo.math_answers import gold_fault


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(dataset: datasets.Dataset | None) -> list[str]:
    assert dataset is not None
    return [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in dataset["prompt"]]


def additions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + 1?", "answer": f"{i} and one more.\n#### {i + 1}"} for i in range(count)]


# --- reasoning-gym


def test_reasoning_gym_items_are_distinct_disjoint_and_repeatable() -> None:
    source = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&size=60"
    loaded = load_prompts(source, eval_size=40)
    train, held_out = questions(loaded.train), questions(loaded.eval)
    assert (len(set(train)), len(set(held_out)), len(set(train) | set(held_out))) == (60, 40, 100)
    assert set(loaded.train.column_names) == {"prompt", "answer", "solution", "task", "entry"}
    again = load_prompts(source, eval_size=40)
    assert (questions(again.train), questions(again.eval)) == (train, held_out)
    assert questions(load_prompts(source, eval_size=40, seed=1).eval) != held_out
    assert questions(load_prompts(f"{source}&seed=1", eval_size=40).eval) != held_out
    for question, answer in zip(train, loaded.train["answer"], strict=True):
        left, sign, right = re.fullmatch(r".*: (\d) ([+-]) (\d) =", question).groups()  # type: ignore[union-attr]
        assert int(answer) == int(left) + int(f"{sign}{right}")


def test_reasoning_gym_settings_are_json_and_a_plus_is_a_plus() -> None:
    source = "reasoning_gym:basic_arithmetic?min_terms=2&max_terms=2&min_digits=1&max_digits=1&operators={}&size=5"
    for written in ('["+"]', '["%2B"]'):
        questions = load_prompts(source.format(written)).train["prompt"]
        assert all("+" in question[-1]["content"] for question in questions)


def test_reasoning_gym_sizes() -> None:
    assert len(load_prompts("reasoning_gym:chain_sum", limit=7).train) == 7
    assert len(load_prompts("reasoning_gym:chain_sum?size=9", limit=7, eval_size=0.5).train) == 7
    tiny = "reasoning_gym:chain_sum?min_terms=1&max_terms=1&min_digits=1&max_digits=1"  # ten different items
    loaded = load_prompts(f"{tiny}&size=20", eval_size=4)
    assert (len(loaded.train), len(loaded.eval or [])) == (6, 4)
    assert "(6 different training items)" in loaded.summary()
    with pytest.raises(
        ValueError, match="has only 10 different items for 10 evaluation items and at least one training"
    ):
        load_prompts(tiny, eval_size=10)


def test_reasoning_gym_items_do_not_hang_on_hash_seed_or_global_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ("list_functions", "isomorphic_strings")  # by themselves they differ from process to process
    first = [load_prompts(f"reasoning_gym:{task}?size=3").train["entry"][:] for task in tasks]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    random.seed(7)
    guarded._SHARED.close()  # the next call starts a new process
    assert [load_prompts(f"reasoning_gym:{task}?size=3").train["entry"][:] for task in tasks] == first


def test_reasoning_gym_errors() -> None:
    with pytest.raises(ValueError, match="no task 'chain_sums'; did you mean chain_sum"):
        load_prompts("reasoning_gym:chain_sums")
    with pytest.raises(ValueError, match="'chain_sum' has no setting 'terms'; it has allow_negation, max_digits"):
        load_prompts("reasoning_gym:chain_sum?terms=2")
    with pytest.raises(ValueError, match=r"refuses its settings .*: max_terms must be >= min_terms"):
        load_prompts("reasoning_gym:chain_sum?min_terms=4&max_terms=2")
    with pytest.raises(
        ValueError, match="settings of the reasoning-gym task 'chain_sum' are 'min_terms'; write name=v"
    ):
        load_prompts("reasoning_gym:chain_sum?min_terms")
    for field, message in (("answer", "the answer column"), ("entry", "no such column")):
        with pytest.raises(ValueError, match=message):
            load_prompts("reasoning_gym:chain_sum?size=2", template=f"{{question}} {{{field}}}")
    with pytest.raises(ValueError, match="size is 0 and seed 0; a size of at least 1"):
        load_prompts("reasoning_gym:chain_sum?size=0")
    with pytest.raises(ValueError, match="eval_split and fraction do not apply"):
        load_prompts("reasoning_gym:chain_sum", fraction=0.5)


# --- prompts


def test_styles(tmp_path: Path) -> None:
    row = {"Body": "Two birds.", "Question": "How many?", "Answer": 2.0}
    file = str(write_jsonl(tmp_path / "svamp.jsonl", [row]))

    def prompt(**style: Any) -> Any:
        return load_prompts(file, **style).train["prompt"][0]

    assert prompt() == [{"role": "user", "content": "How many?"}]
    assert prompt(conversational=False) == "How many?"
    suffix = r"{Body} {question} Answer in \boxed{x}, { like_this }, x^{n} or {}."
    assert prompt(template=suffix, system_prompt="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": r"Two birds. How many? Answer in \boxed{x}, { like_this }, x^{n} or {}."},
    ]
    assert prompt(template="{Body}", system_prompt="S", conversational=False) == "S\n\nTwo birds."
    with pytest.raises(ValueError, match=r"has no \{question\}: every prompt would be the same"):
        prompt(template="Solve it.")
    with pytest.raises(ValueError, match=r"holds \{Answer\}, the answer column: the prompt would give it away"):
        prompt(template="{question} {Answer}")


def test_a_template_keeps_the_answer_and_has_no_misspelt_field(tmp_path: Path) -> None:
    rows = [
        {"question": f"{i}?", "answer": str(i), "solution": "long", "key": rf"It is \boxed{{{i}}}", "level": 1}
        for i in range(3)
    ]
    rows.append({"question": "3?", "answer": "3"})
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))

    def load(template: str, **options: Any) -> PromptSet:
        return load_prompts(file, template=template, **options)

    for field in ("solution", "key"):  # by its name, by what it holds
        with pytest.raises(ValueError, match=rf"holds \{{{field}\}}, a column of answers: the prompt would give away"):
            load(f"{{question}} {{{field}}}", answer_column="answer")
        load(f"{{question}} {{{field}}}", answers="none")
    with pytest.raises(ValueError, match=r"holds \{qestion\}, and .* no such column.*Did you mean \{question\}\?"):
        load("{question} {qestion}")
    loaded = load("{question} (level {level})")
    assert questions(loaded.train)[0] == "0? (level 1)"
    assert loaded.skipped == [Skipped(3, "the column level, which the template names, is missing")]


def test_the_published_template(tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", additions(1)))
    system, user = load_prompts(file, template="published").train["prompt"][0]
    assert system == {"role": "system", "content": prompts.PUBLISHED_SYSTEM_PROMPT}
    for part in (
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "Instruction:\nWhat is 0 + 1?\n",
        "step by step",
        r"\boxed{}",
    ):
        assert part in user["content"]
    assert load_prompts(file, template="published", system_prompt="Mine.").train["prompt"][0][0]["content"] == "Mine."


def test_messages_stay_messages(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Old."}, {"role": "user", "content": "1+1?"}]
    file = str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": turns, "answer": "2"}]))
    assert load_prompts(file).train["prompt"][0] == turns
    assert load_prompts(file, system_prompt="New.", template="Q: {question}").train["prompt"][0] == [
        {"role": "system", "content": "New."},
        {"role": "user", "content": "Q: 1+1?"},
    ]


# --- rows that cannot be used


def test_unusable_rows_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "answer": "2"},
        {"answer": "2"},
        {"prompt": " ", "answer": "2"},
        {"prompt": 7, "answer": "2"},
        {"prompt": [{"role": "user"}], "answer": "2"},
        {"prompt": [{"role": "assistant", "content": "2"}], "answer": "2"},
        {"prompt": "1+1?"},
        {"prompt": "1+1?", "answer": r"\frac{1}{"},
        {"prompt": "1+1?", "answer": "???"},
        {"prompt": "1+1?", "answer": ["1", "2"]},
        {"prompt": "2+2?", "answer": r"\frac{8}{2}"},
    ]
    loaded = load_prompts(str(write_jsonl(tmp_path / "rows.jsonl", rows)))
    assert loaded.train["answer"] == ["2", r"\frac{8}{2}"]
    assert [item.row for item in loaded.skipped] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    reasons = [item.reason for item in loaded.skipped]
    assert reasons[:3] == [
        "the prompt (column prompt) is missing",
        "the prompt (column prompt) is empty",
        "the prompt (column prompt) is a int, where text is needed",
    ]
    assert reasons[5:7] == ["the answer is missing", r"the answer '\\frac{1}{' does not parse as mathematics"]
    assert "2 training prompts, 9 rows skipped: 2 x the answer '" in loaded.summary()


def test_no_usable_row_is_an_error(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1?", "answer": ""}] * 3)
    with pytest.raises(ValueError, match=r"no usable row: 3 rows skipped: 3 x the answer is missing \(row 0\)"):
        load_prompts(str(file))


def test_a_gold_answer_that_never_ends_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def guarded_call(function: str, answer: str) -> str | None:
        if answer == "9^{9^9}":
            raise GuardedCallError("ran past 2 s of CPU time, or ended its process")
        return None

    monkeypatch.setattr(prompts, "guarded_call", guarded_call)
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "9^{9^9}"}, {"prompt": "b", "answer": "x"}])
    loaded = load_prompts(str(file))
    assert [item.row for item in loaded.skipped] == [0]
    assert "ran past 2 s of CPU time" in loaded.skipped[0].reason


@pytest.mark.parametrize("number", ["0", "-12", "3.50", ".5", "007", "123456789012345678901234567890", "+4"])
def test_plain_numbers_need_no_parser(number: str) -> None:
    assert prompts.is_plain_number(number)
    assert gold_fault(number) is None


def test_summary_of_skipped_rows() -> None:
    assert summarise_skipped([]) == "no row skipped"
    assert summarise_skipped([Skipped(4, "the answer is missing")]) == (
        "1 row skipped: 1 x the answer is missing (row 4)"
    )


# --- splits


def test_a_question_is_never_in_both_parts(tmp_path: Path) -> None:
    rows = [
        {"question": f"What is {i % 20}  + 1?".replace("  ", " " * (1 + i // 20)), "answer": "1"} for i in range(40)
    ]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    loaded = load_prompts(file, eval_size=0.25)
    assert (len(loaded.train), len(loaded.eval or [])) == (30, 5)
    plain = [" ".join(question.split()) for question in questions(loaded.train)]
    assert not set(plain) & {" ".join(question.split()) for question in questions(loaded.eval)}


def test_fraction_limit_and_seed(tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", additions(100)))

    def load(**options: Any) -> PromptSet:
        return load_prompts(file, **options)

    half = load(fraction=0.5, seed=3)
    assert len(half.train) == 50
    assert questions(half.train) == questions(load(fraction=0.5, seed=3).train)
    assert questions(half.train) != questions(load(fraction=0.5, seed=4).train)
    numbers = [int(answer) for answer in half.train["answer"]]
    assert numbers == sorted(numbers) != list(range(1, 51))  # a random share, in the order of the source
    assert questions(load(limit=3).train) == [f"What is {i} + 1?" for i in range(3)]
    both = load(limit=5, eval_size=10, seed=1)
    assert (len(both.train), len(both.eval or [])) == (5, 10)
    assert questions(load(eval_size=10).eval) != questions(load(eval_size=10, seed=1).eval)


def test_loading_leaves_the_global_generators_alone(tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", additions(10)))
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    load_prompts(file, eval_size=2, fraction=0.5)
    load_prompts("reasoning_gym:chain_sum?size=5", eval_size=2)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert before == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_size": 1.5}, "eval_size is 1.5; it must be a number of rows, or a fraction below 1"),
        ({"eval_size": -1}, "eval_size is -1"),
        ({"fraction": 0.0}, "fraction is 0.0; it must be above 0 and at most 1"),
        ({"fraction": 1.1}, "fraction is 1.1"),
        ({"limit": 2.5}, "limit is 2.5; it must be a whole number"),
        ({"seed": "1"}, "seed is '1'; it must be a whole number"),
        ({"eval_size": "1"}, "eval_size is '1'; it must be a number"),
        ({"eval_size": float("nan")}, "eval_size is nan"),
        ({"fraction": None}, "fraction is None; it must be a number"),
        ({"limit": 0}, "limit is 0; it must be at least 1, or None"),
        ({"eval_size": 9}, "leaves no training row beside 3 for evaluation; lower eval_size"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", additions(3)))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_prompts(file, **options)


# --- lengths


def test_prompts_without_room_are_left_out() -> None:
    tokenizer = tiny_tokenizer()
    texts = ["1 2", "1 2 " * 50, "3"]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    dataset = datasets.Dataset.from_dict({"prompt": texts})
    kept, skipped = check_prompt_lengths(dataset, tokenizer, lengths[1])
    assert kept["prompt"] == ["1 2", "3"]
    assert skipped == [
        Skipped(1, f"the prompt has {lengths[1]} tokens and leaves no room for 1 token of response in {lengths[1]}")
    ]
    assert check_prompt_lengths(dataset, tokenizer, lengths[1] + 1) == (dataset, [])
    with pytest.raises(ValueError, match=r"no prompt fits: 3 rows skipped: 3 x the prompt has \d+ tokens"):
        check_prompt_lengths(dataset, tokenizer, 10, min_response=10)


def test_lengths_of_messages_count_the_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}1 2 3{% endif %}"
    )
    dataset = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "4"}]]})
    length = len(tokenizer("4 1 2 3", add_special_tokens=False)["input_ids"])
    assert check_prompt_lengths(dataset, tokenizer, length + 1)[1] == []
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens"):
        check_prompt_lengths(dataset, tokenizer, length)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template; use conversational=False"):
        check_prompt_lengths(dataset, tokenizer, 100)


# --- prompts of any dataset, as the trainer checks them


@pytest.mark.parametrize("empty", [None, "", " \n", []])
def test_a_row_without_a_prompt_is_named(empty: Any) -> None:
    kind = [[{"role": "user", "content": "a"}], empty] if empty == [] else ["a", empty]
    with pytest.raises(ValueError, match=r"the prompt in row 1 of train is .*; leave the row out"):
        prompts.check_prompts({"train": datasets.Dataset.from_dict({"prompt": kind})}, tiny_tokenizer())


def test_messages_need_a_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    data = {"train": datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "a"}]]}), "eval": None}
    prompts.check_prompts(data, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"row 0 of train is messages.*no chat template.*conversational=False"):
        prompts.check_prompts(data, tokenizer)


# --- real data, where there is some


@pytest.mark.skipif("FASTGRPO_DATA" not in os.environ, reason="FASTGRPO_DATA names no folder with gsm8k_test.jsonl")
def test_every_row_of_gsm8k_is_usable() -> None:
    loaded = load_prompts(str(Path(os.environ["FASTGRPO_DATA"]) / "gsm8k_test.jsonl"))
    assert (len(loaded.train), loaded.skipped) == (1319, [])
