"""`fastgrpo grpo`: flags over file over defaults, unknown names refused with the nearest, and a run end to end."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_checkpoint
from trainers import draft_for

from fastgrpo import cli
from fastgrpo.cli.grpo import RunArguments, adapter, closing_lines, resolve
from fastgrpo.config import FastGRPOConfig

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def exit_code(argv: list[str]) -> int:
    try:
        return cli.main(argv)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def write_config(folder: Path, **changes: Any) -> Path:
    """A config that trains the tiny model for two steps on a data set with one row that has no answer."""
    rows = [{"question": f"what is {n}", "answer": str(n)} for n in range(6)] + [{"question": "lost", "answer": ""}]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model_name_or_path": str(folder / "tiny-qwen2"),
        "dataset_name": str(data),
        "eval_size": 2,
        "reward_funcs": ["number"],
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": "1e-4",  # YAML reads 1e-4 as text
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**values, **changes}))
    return file


def resolved(file: Path, *flags: str) -> tuple[RunArguments, FastGRPOConfig]:
    return resolve(cli.parse_command("grpo", ["--config", str(file), *flags]))


def test_a_run_from_file_and_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path, "qwen2")
    file = write_config(tmp_path, use_peft=True, lora_r=2)
    flags = [
        "--max_steps",
        "1",
        "--lora_alpha",
        "4",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "1",
        "--bf16",
        "false",
    ]
    assert exit_code(["grpo", "--config", str(file), *flags]) == 0
    out = capsys.readouterr().out
    assert "4 training prompts, 2 evaluation prompts, 1 row skipped" in out
    run = tmp_path / "run"
    assert f"Model and summary.json are in {run}" in out and "Mean reward of the first generation" in out
    assert json.loads((run / "summary.json").read_text())["steps"] == 1  # the flag won over the file
    adapter_config = json.loads((run / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (2, 4)
    assert [row["row"] for row in json.loads((run / "skipped_rows.json").read_text())] == [6]

    ours, config = resolved(run / "resolved_config.yaml")  # what was resolved can be run again, and is the same
    before, config_before = resolved(file, *flags)
    assert ours == before
    assert config.to_dict() == config_before.to_dict()
    assert config.learning_rate == 1e-4 and config.max_steps == 1


def test_a_run_with_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path, "qwen2")
    draft_for("qwen2").save_pretrained(tmp_path / "draft")
    file = write_config(tmp_path, draft_model=str(tmp_path / "draft"), spec_policy="fixed", spec_depth=2)
    assert exit_code(["grpo", "--config", str(file), "--spec_depth", "4"]) == 0
    assert "of the drafted tokens were accepted" in capsys.readouterr().out
    speculation = json.loads((tmp_path / "run" / "summary.json").read_text())["speculation"]
    assert speculation["draft"] == str(tmp_path / "draft") and speculation["policy"] == "fixed"
    assert speculation["drafted"] == 4 * speculation["row_passes"] > 0  # the flag won over the file
    _, config = resolved(tmp_path / "run" / "resolved_config.yaml")
    assert (config.draft_model, config.spec_policy, config.spec_depth) == (str(tmp_path / "draft"), "fixed", 4)

    file.write_text(file.read_text().replace("spec_policy: fixed", "spec_policy: off"))  # which YAML reads as false
    assert resolved(file)[1].spec_policy == "off"


def test_a_bug_in_a_reward_keeps_its_traceback_and_a_sound_run_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, "qwen2")
    (tmp_path / "my_broken_rewards.py").write_text("def raises(completions, **columns):\n    return [int('x')]\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = write_config(tmp_path, reward_funcs=["number", "my_broken_rewards:raises"])
    with warnings.catch_warnings(record=True) as heard, pytest.raises(ValueError, match="invalid literal") as error:
        warnings.simplefilter("always")
        exit_code(["grpo", "--config", str(file)])
    assert error.traceback[-1].path.name == "my_broken_rewards.py"
    assert error.value.__notes__ == ["This came out of the reward function 'raises'."]
    known = ("pin_memory", "gradient_checkpointing")
    assert [str(w.message) for w in heard if any(word in str(w.message) for word in known)] == []


def test_a_reward_without_its_column_is_still_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path, "qwen2")
    file = write_config(tmp_path, reward_funcs=["accuracy"], answers="none", eval_size=0)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"what is {n}"}) + "\n" for n in range(6)))
    assert exit_code(["grpo", "--config", str(file)]) == 1
    assert "fastgrpo: error: accuracy_reward needs the dataset column 'answer'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_generation", "4"], "unknown flag --num_generation; did you mean --num_generations?"),
        (["--lora_alphas=4"], "unknown flag --lora_alphas; did you mean --lora_alpha?"),
        (["--num_gen", "4"], "unknown flag --num_gen"),  # no abbreviations
        (["--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
        (["--lora_r", "big"], "argument --lora_r: invalid int value: 'big'"),
        (["--use_peft", "perhaps"], "'perhaps' is neither true nor false"),
        (["--lora_r", "4", "stray"], "unexpected 'stray'"),
    ],
)
def test_a_wrong_command_line_exits_2(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["grpo", "--config", str(write_config(tmp_path)), *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"num_generation": 4}, 2, "'num_generation' is not a key of fastgrpo grpo. Did you mean 'num_generations'?"),
        ({"reward_func": "number"}, 2, "Did you mean 'reward_funcs'?"),
        ({"max_prompt_length": 128}, 2, "max_prompt_length does not exist any more"),
        ({"num_generations": 2.5}, 1, "num_generations is 2.5, and must be an integer"),
        ({"temperature": [1]}, 1, "temperature is [1], and must be a number"),
        ({"lora_r": "4"}, 1, "lora_r is '4', and must be int"),
        ({"reward_funcs": [1]}, 1, "reward_funcs is [1], and must be a list of str"),
        ({"lora_r": 4}, 1, "lora_r=4 has no effect without use_peft"),
        ({"dataset_name": None}, 1, "dataset_name is missing. Give --dataset_name"),
        ({"use_vllm": True}, 1, "use_vllm=True asks for another rollout engine"),
        ({"temperature": 0}, 1, "temperature=0 must be above 0"),
        ({"spec_policy": "fxed"}, 1, "spec_policy='fxed': 'fxed' is no policy: did you mean 'fixed'?"),
        ({"spec_depth": 2.5}, 1, "spec_depth is 2.5, and must be an integer"),
        ({"reward_funcs": ["nmber"]}, 1, "there is no reward 'nmber'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["grpo", "--config", str(write_config(tmp_path, **changes))]) == code
    assert message in capsys.readouterr().err


def test_files_that_are_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["grpo", "--config", str(tmp_path / "no.yaml")]) == 1
    assert "no.yaml" in capsys.readouterr().err
    for text, message in (("a: [1", "is not a YAML file"), ("- 1\n- 2\n", "must hold a mapping")):
        (tmp_path / "bad.yaml").write_text(text)
        assert exit_code(["grpo", "--config", str(tmp_path / "bad.yaml")]) == 1
        assert message in capsys.readouterr().err


def test_evaluation_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path, "qwen2")
    file = write_config(tmp_path, eval_size=0, eval_strategy="steps", eval_steps=1)
    assert exit_code(["grpo", "--config", str(file)]) == 1
    assert "needs evaluation rows. Set eval_size or eval_split" in capsys.readouterr().err


def test_no_name_means_two_things() -> None:
    ours = {f.name for f in dataclasses.fields(RunArguments)}
    assert not ours & {f.name for f in dataclasses.fields(FastGRPOConfig)}
    assert all(f.metadata["help"] for f in dataclasses.fields(RunArguments))


def test_an_adapter_is_made_only_when_asked_for() -> None:
    needed: dict[str, Any] = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["number"]}
    assert adapter(RunArguments(**needed)) is None
    made = adapter(RunArguments(**needed, use_peft=True, lora_target_modules=["q_proj"]))
    assert (made.r, made.target_modules) == (16, {"q_proj"})


def test_closing_lines_of_a_run_that_made_no_step() -> None:
    summary = {
        "steps": 0, "seconds": {"run": 0.1}, "shares": {"rollout": 0.0}, "ceiling_of_faster_sampling": 1.0,
        "reward": {"first": None, "last": None},
    }  # fmt: skip
    assert closing_lines(summary, "out").endswith("Model and summary.json are in out")
