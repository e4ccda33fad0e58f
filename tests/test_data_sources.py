"""Where prompts come from: the published names, local files and folders, the hub; every error message of reading."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from test_data import additions, questions, write_jsonl

from fastgrpo.grpo import data_sources
from fastgrpo.grpo.data import Skipped, load_prompts

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
    rows = [
        {"prompt": "a", "answer": "1", "level": 3, "completions": 1, "image": "i", "images": ["i"]},
        {"prompt": "b", "answer": "2", "level": "x"},
    ]
    train = load_prompts(str(write_jsonl(tmp_path / "rows.jsonl", rows))).train
    assert train["level"] == ["3", '"x"']
    assert not {"completions", "image", "images"} & set(train.column_names)  # images would be put into the messages


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


def test_errors_of_foreign_parsers_name_the_file(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    for name, message in (("a.jsonl", r"a\.jsonl, line 1 is not JSON"), ("b.json", r"b\.json cannot be read as json")):
        (tmp_path / name).write_text(f'{{"prompt": "a", "answer": "1", "x": {deep}}}\n')
        with pytest.raises(ValueError, match=message):
            load_prompts(str(tmp_path / name))
    rows = [{"prompt": f"some text {i}", "answer": "1"} for i in range(2000)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    content = bytearray((tmp_path / "c.parquet").read_bytes())
    content[200:600] = bytes(byte ^ 0xFF for byte in content[200:600])
    (tmp_path / "c.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.parquet cannot be read as parquet: .*; convert or repair the file"):
        load_prompts(str(tmp_path / "c.parquet"))
    for file in ("state.json", "data-00000-of-00001.arrow"):
        datasets.Dataset.from_list(rows[:2]).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / file).write_bytes(b"{x")
        with pytest.raises(ValueError, match=r"saved cannot be read as a saved dataset"):
            load_prompts(str(tmp_path / "saved"))


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    for name, content in (
        ("a.jsonl", '{"prompt": "a", "answer": "1"}\n'),
        ("b.json", '[{"prompt": "a", "answer": "1"}]'),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert load_prompts(str(tmp_path / name)).train["answer"] == ["1"]


def test_rows_that_no_dataset_can_store_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\nb,2,3,4\na,1\n")
    loaded = load_prompts(str(tmp_path / "a.csv"))
    assert loaded.skipped == [Skipped(0, "the row has 2 more fields than the header")]
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "answer": "1", "x": 2**63},
        {"prompt": "a", "answer": "1", "x": [{"deep": "\ud800"}]},
        {"prompt": "\ud800", "answer": "1"},
        {"prompt": "a", "answer": "1", "\ud800": 1},
        {"prompt": "a", "answer": "1", "x": 5},
    ]
    loaded = load_prompts(str(write_jsonl(tmp_path / "b.jsonl", rows)))
    assert loaded.train["x"] == [5]
    assert [item.row for item in loaded.skipped] == [0, 1, 2, 3]
    assert loaded.skipped[0].reason.startswith("the column x holds what a dataset cannot store: OverflowError")


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
