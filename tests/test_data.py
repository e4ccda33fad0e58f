"""load_prompts: each source from tiny files, columns, templates, splits, unusable rows, and every error message."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from tiny import tiny_tokenizer

from fastgrpo.grpo import data_sources, prompts
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


SIMPLELR_ROW = {
    "data_source": "simplelr",
    "prompt": [{"role": "user", "content": "Solve $2x=1$."}],
    "reward_model": {"ground_truth": r"\frac{1}{2}", "style": "rule"},
    "extra_info": {"index": 0},
}


# --- the published names


def test_gsm8k_as_jsonl_parquet_and_saved_dataset(tmp_path: Path) -> None:
    rows = additions(3)
    write_jsonl(tmp_path / "jsonl" / "gsm8k" / "train.jsonl", rows)
    write_jsonl(tmp_path / "jsonl" / "gsm8k" / "test.jsonl", additions(1))
    parquet = tmp_path / "parquet" / "gsm8k" / "main" / "train-00000-of-00001.parquet"
    parquet.parent.mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(parquet)
    write_jsonl(tmp_path / "parquet" / "gsm8k" / "socratic" / "train.jsonl", additions(2))  # another configuration
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(tmp_path / "saved" / "gsm8k")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "single" / "gsm8k")
    for kind in ("jsonl", "parquet", "saved", "single"):
        loaded = load_prompts("gsm8k", data_dir=tmp_path / kind)
        assert loaded.train["prompt"][0] == [{"role": "user", "content": "What is 0 + 1?"}]
        assert loaded.train["answer"] == ["1", "2", "3"]
        assert loaded.train["solution"] == [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}"]
        assert loaded.skipped == [] and loaded.eval is None
        assert loaded.source.startswith("gsm8k (")


@pytest.mark.parametrize("name", ["simplelr_abel_level3to5", "simplelr_qwen_level3to5"])
def test_simplelr(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    datasets.Dataset.from_list([SIMPLELR_ROW] * 2).to_parquet(tmp_path / name / "train.parquet")
    loaded = load_prompts(name, data_dir=tmp_path)
    assert questions(loaded.train) == ["Solve $2x=1$."] * 2
    assert loaded.train["answer"] == [r"\frac{1}{2}"] * 2


def test_dapo(tmp_path: Path) -> None:
    row = {"prompt": "What is 6 x 7?", "solution": "42", "data_source": "math_dapo", "source_prompt": [{"a": "b"}]}
    for folder in ("all", "en"):
        write_jsonl(tmp_path / "DAPO-Math-17k-Processed" / folder / "train.jsonl", [row] * (2 if folder == "en" else 3))
    assert len(load_prompts("DAPO-math", data_dir=tmp_path).train) == 3
    english = load_prompts("DAPO-math", data_dir=tmp_path, config="en")
    assert (english.train["answer"], questions(english.train)) == (["42"] * 2, ["What is 6 x 7?"] * 2)
    with pytest.raises(ValueError, match=r"no configuration 'de'; its folders are: all, en\."):
        load_prompts("DAPO-math", data_dir=tmp_path, config="de")


def test_a_missing_published_dataset_says_where_and_how(tmp_path: Path) -> None:
    where = re.escape(str(tmp_path / "gsm8k"))
    with pytest.raises(FileNotFoundError, match=f"'gsm8k' is not in {where}; get it with: hf download openai/gsm8k"):
        load_prompts("gsm8k", data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="--include 'simplelr_abel_level3to5/"):
        load_prompts("simplelr_abel_level3to5", data_dir=tmp_path)


# --- local files and folders


def test_every_file_type_and_usual_column_names(tmp_path: Path) -> None:
    table = [{"Problem": "1+1?", "Answer": 2.0, "level": 3}, {"Problem": "2+2?", "Answer": 4.0, "level": 4}]
    write_jsonl(tmp_path / "a.jsonl", table)
    (tmp_path / "b.json").write_text(json.dumps(table))
    (tmp_path / "c.json").write_text(json.dumps({"data": table}))
    write_jsonl(tmp_path / "d.json", table)
    (tmp_path / "e.csv").write_text('Problem,Answer,level\n"1+1?",2,3\n"2+2?",4,4\n')
    datasets.Dataset.from_list(table).to_parquet(tmp_path / "f.parquet")
    for file in sorted(tmp_path.iterdir()):
        loaded = load_prompts(str(file))
        assert (questions(loaded.train), loaded.train["answer"]) == (["1+1?", "2+2?"], ["2", "4"]), file.name
        assert [int(level) for level in loaded.train["level"]] == [3, 4], file.name  # other columns stay


def test_named_and_nested_columns_and_their_errors(tmp_path: Path) -> None:
    row = {"task_text": "1+1?", "meta": {"gold": {"value": "2"}}, "prompt": "not this one"}
    file = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    loaded = load_prompts(file, prompt_column="task_text", answer_column="meta.gold", answers="none")
    assert questions(loaded.train) == ["1+1?"]
    with pytest.raises(
        ValueError, match=r"no prompt column 'task_txt'; it has task_text, meta, prompt\. Did you mean 'tas"
    ):
        load_prompts(file, prompt_column="task_txt")
    with pytest.raises(ValueError, match=r"no answer column 'meta\.gould'.*Did you mean 'meta\.gold'"):
        load_prompts(file, answer_column="meta.gould")
    with pytest.raises(
        ValueError, match=r"no answer column was found: looked for answer, .*; name it with answer_column"
    ):
        load_prompts(file)
    other = str(write_jsonl(tmp_path / "other.jsonl", [{"text": "1+1?", "answer": "2"}]))
    with pytest.raises(
        ValueError, match=r"no prompt column was found: .* among text, answer; name it with prompt_column"
    ):
        load_prompts(other)


def test_answers_that_are_text_or_absent(tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Say (", "answer": " ( "}, {"prompt": "Sing"}]))
    text = load_prompts(file, answers="text")
    assert text.train["answer"] == ["("]
    assert text.skipped == [Skipped(1, "the answer is missing")]
    bare = load_prompts(file, answers="none")
    assert questions(bare.train) == ["Say (", "Sing"] and "solution" not in bare.train.column_names
    with pytest.raises(ValueError, match='answers is \'maths\'; it must be "math", "text" or "none"'):
        load_prompts(file, answers="maths")  # type: ignore[arg-type]


def test_columns_without_a_common_type_and_trls_own_names(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1", "level": 3, "completions": 1}, {"prompt": "b", "answer": "2", "level": "x"}]
    train = load_prompts(str(write_jsonl(tmp_path / "rows.jsonl", rows))).train
    assert train["level"] == ["3", '"x"']
    assert "completions" not in train.column_names


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def refused(name: str, content: str | bytes, message: str) -> None:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=message):
            load_prompts(str(path))

    refused(
        "a.jsonl", '{"prompt": "a", "answer": "1"}\n{"prompt": \n', r"a\.jsonl, line 2 is not JSON .*; repair or remove"
    )
    refused("b.jsonl", "[1]\n", r"line 1 is a JSON list; each line must be an object")
    refused("c.json", '"text"', "must hold a list of objects")
    refused("d.parquet", "no parquet", r"d\.parquet cannot be read as parquet")
    refused("e.csv", b"prompt,answer\n\xff\xfe,1\n", r"e\.csv cannot be read as csv")
    refused("f.jsonl", "\n", r"f\.jsonl holds no rows")
    refused("g.txt", "text", r"is a \.txt file; datasets are read from \.jsonl, \.json, \.parquet, \.csv")


def test_folders(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "named" / "math_train.jsonl", additions(2))
    write_jsonl(tmp_path / "named" / "math_test.jsonl", additions(5)[3:])
    write_jsonl(tmp_path / "only" / "problems.jsonl", additions(3))
    write_jsonl(tmp_path / "two" / "a" / "train.jsonl", additions(1))
    write_jsonl(tmp_path / "two" / "b" / "train.jsonl", additions(2))
    (tmp_path / "empty").mkdir()
    assert len(load_prompts(str(tmp_path / "named")).train) == 2
    assert len(load_prompts("named", data_dir=tmp_path, split="test").train) == 2
    assert len(load_prompts(str(tmp_path / "only")).train) == 3
    assert len(load_prompts(str(tmp_path / "two"), config="b").train) == 2
    with pytest.raises(ValueError, match=r"in several folders \(a, b\); choose one with config"):
        load_prompts(str(tmp_path / "two"))
    with pytest.raises(ValueError, match=r"no file for split 'dev' .*it holds math_test.jsonl, math_train.jsonl"):
        load_prompts(str(tmp_path / "named"), split="dev")
    with pytest.raises(FileNotFoundError, match="holds no data file"):
        load_prompts(str(tmp_path / "empty"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(additions(2))).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"has no split 'test'; it has train"):
        load_prompts(str(tmp_path / "saved"), split="test")


def test_sources_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'gsm9k' is not a published name \(gsm8k, .* Did you mean 'gsm8k'\?"):
        load_prompts("gsm9k")
    with pytest.raises(FileNotFoundError, match=r"dataset file 'rows\.jsonl' does not exist"):
        load_prompts("rows.jsonl")


# --- hub


def test_a_hub_id_goes_through_load_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> datasets.Dataset:
        calls.append((path, name, split))
        return datasets.Dataset.from_list(additions(3 if split == "train" else 5))

    monkeypatch.setattr(data_sources.datasets, "load_dataset", load_dataset)
    loaded = load_prompts("openai/gsm8k", config="main", eval_split="test", eval_size=4)
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert loaded.eval is not None and len(loaded.eval) == 4
    assert not set(questions(loaded.train)) & set(questions(loaded.eval))


def test_a_hub_failure_keeps_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **kwargs: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist.")

    monkeypatch.setattr(data_sources.datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError, match=r"hub dataset 'a/b' \(config None, split 'train'\).*doesn't exist.*or give a local"
    ):
        load_prompts("a/b")


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


def test_reasoning_gym_sizes() -> None:
    assert len(load_prompts("reasoning_gym:chain_sum", limit=7).train) == 7
    assert len(load_prompts("reasoning_gym:chain_sum?size=9", limit=7).train) == 7
    tiny = "reasoning_gym:chain_sum?min_terms=1&max_terms=1&min_digits=1&max_digits=1"  # ten different items
    loaded = load_prompts(f"{tiny}&size=20", eval_size=4)
    assert (len(loaded.train), len(loaded.eval or [])) == (6, 4)
    assert "only 6 of 20 training items are different" in loaded.summary()
    with pytest.raises(ValueError, match="too few different items: 10 were found, 10 for evaluation and at least 1"):
        load_prompts(tiny, eval_size=10)


def test_reasoning_gym_errors() -> None:
    with pytest.raises(ValueError, match="no task 'chain_sums'; did you mean chain_sum"):
        load_prompts("reasoning_gym:chain_sums")
    with pytest.raises(ValueError, match="'chain_sum' has no setting 'terms'; it has allow_negation, max_digits"):
        load_prompts("reasoning_gym:chain_sum?terms=2")
    with pytest.raises(ValueError, match=r"refuses its settings .*: max_terms must be >= min_terms"):
        load_prompts("reasoning_gym:chain_sum?min_terms=4&max_terms=2")
    with pytest.raises(ValueError, match="needs a size of at least 1 and a whole number as seed"):
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
    suffix = r"{Body} {question} Answer in \boxed{x}, {like_this} or {}."
    assert prompt(template=suffix, system_prompt="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": r"Two birds. How many? Answer in \boxed{x}, {like_this} or {}."},
    ]
    assert prompt(template="{Body}", system_prompt="S", conversational=False) == "S\n\nTwo birds."
    with pytest.raises(ValueError, match=r"has no \{question\}: every prompt would be the same"):
        prompt(template="Solve it.")
    with pytest.raises(ValueError, match=r"holds \{Answer\}, the answer column: the prompt would give it away"):
        prompt(template="{question} {Answer}")


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
    import random

    import numpy as np
    import torch

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


# --- real data, where there is some


@pytest.mark.skipif("FASTGRPO_DATA" not in os.environ, reason="FASTGRPO_DATA names no folder with gsm8k_test.jsonl")
def test_every_row_of_gsm8k_is_usable() -> None:
    loaded = load_prompts(str(Path(os.environ["FASTGRPO_DATA"]) / "gsm8k_test.jsonl"))
    assert (len(loaded.train), loaded.skipped) == (1319, [])
