"""The dispatcher and `fastgrpo generate`: what is parsed, what is printed, and how errors are said."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import types
import warnings
from functools import partial
from pathlib import Path

import pytest
from tiny import tiny_checkpoint, tiny_tokenizer

from fastgrpo import Engine, SamplingParams, cli, load_model
from fastgrpo.cli import generate
from fastgrpo.cli.completions import ProgressLine
from fastgrpo.cli.noise import silence_known_noise
from fastgrpo.speculation.requests import Progress, real_number


def exit_code(argv: list[str]) -> int:
    try:
        return cli.main(argv)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate"], "unknown command 'genrate'; did you mean generate?"),
        (["xyzzy"], "unknown command 'xyzzy' (commands: grpo, generate"),
        (
            ["generate", "--model", "m", "--temprature", "1", "hi"],
            "unknown flag --temprature; did you mean --temperature?",
        ),
        (
            ["generate", "--model", "m", "--max-new-tokens=3"],
            "unknown flag --max-new-tokens; did you mean --max_new_tokens?",
        ),
        (["generate", "--model", "m", "--qqqqqqq", "hi"], "unknown flag --qqqqqqq (see"),
        (["generate", "--model", "m", "--temp", "1", "hi"], "unknown flag --temp"),  # no abbreviations
        (["generate", "--model", "m", "--seed", "x", "hi"], "argument --seed: invalid int value: 'x'"),
        (["generate", "hi"], "the following arguments are required: --model"),
    ],
)
def test_a_wrong_command_line_exits_2_with_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert exit_code([]) == 2
    assert exit_code(["--version"]) == 0
    assert exit_code(["generate", "--help"]) == 0
    assert "--temperature" in capsys.readouterr().out


def with_command(monkeypatch: pytest.MonkeyPatch, run: object, **attributes: object) -> None:
    """Let `fastgrpo doctor` be a command that does `run(args)`."""
    module = types.SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--known"), run=run, **attributes)
    monkeypatch.setattr(cli, "command_module", lambda name: module)


def raiser(error: BaseException) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_a_users_error_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FASTGRPO_TRACEBACK", raising=False)
    with_command(monkeypatch, partial(real_number, "top_p"))  # raises in our code, and no code of this file runs
    assert exit_code(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fastgrpo: error: top_p is Namespace(") and said.endswith("must be a number.\n")
    assert len(said.splitlines()) == 1
    with pytest.raises(ValueError, match="top_p"):
        exit_code(["doctor", "--traceback"])
    monkeypatch.setenv("FASTGRPO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="top_p"):
        exit_code(["doctor"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (IndexError("ours"), ValueError("of code that the user brought"), OSError("of such code")):
        with_command(monkeypatch, raiser(error))
        with pytest.raises(type(error), match=str(error)):
            exit_code(["doctor"])


def test_a_library_is_believed_while_it_reads_but_not_while_it_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_the_trainer(function: str) -> object:
        space = {"__name__": "fastgrpo.grpo.trainer", "loads": json.loads}
        exec(compile(f"def {function}(args): loads('nonsense')", json.__file__, "exec"), space)
        return space[function]

    with_command(monkeypatch, of_the_trainer("__init__"))
    assert exit_code(["doctor"]) == 1
    assert capsys.readouterr().err.startswith("fastgrpo: error: Expecting value")
    with_command(monkeypatch, of_the_trainer("train"))
    with pytest.raises(json.JSONDecodeError):
        exit_code(["doctor"])


def test_known_noise_is_silenced_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)  # and whatever the command sets is taken back
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        silence_known_noise()
        warnings.warn("use_gradient_checkpointing is old", FutureWarning, stacklevel=1)
        warnings.warn("'pin_memory' argument is set as true but no accelerator is found, then", stacklevel=1)
        warnings.warn("something else is old", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["something else is old"]

    def told(keys: list[str]) -> bool:
        text = f"There were missing keys in the checkpoint model loaded: {keys}."
        record = logging.LogRecord("transformers.trainer", logging.WARNING, "", 0, text, (), None)
        return bool(logging.getLogger("transformers.trainer").filter(record))

    assert not told(["lm_head.weight"])
    assert told(["model.norm.weight"]) and told(["lm_head.weight", "model.norm.weight"])


def test_no_bar_goes_into_a_file() -> None:
    lines = "from tqdm.auto import tqdm; list(tqdm(range(3)))"
    code = f"from fastgrpo.cli.noise import silence_known_noise; silence_known_noise(); {lines}"
    clean = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    for source, silent in ((code, True), (lines, False)):
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=clean)
        assert (done.stderr == "") is silent


def test_an_interrupt_exits_130_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_command(monkeypatch, raiser(KeyboardInterrupt()))
    assert exit_code(["doctor"]) == 130
    assert capsys.readouterr().err.strip() == "fastgrpo doctor: interrupted"


def test_a_command_may_take_other_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        seen.append(args)
        return 0

    with_command(monkeypatch, run, TAKES_OTHER_FLAGS=True)
    assert exit_code(["doctor", "--known", "1", "--beta", "0.1"]) == 0
    assert seen[0].known == "1"
    assert seen[0].other_flags == ["--beta", "0.1"]


@pytest.mark.parametrize(
    "argv",
    [
        ["hi", "there", "--model", "m", "--raw"],
        ["--model", "m", "hi", "there", "--raw"],
        ["--raw", "--model", "m", "hi", "there"],
    ],
)
def test_prompts_stand_before_or_after_flags(argv: list[str]) -> None:
    args = cli.parse_command("generate", argv)
    assert args.prompts == ["hi", "there"]
    assert args.raw and args.model == "m"


def test_prompts_come_from_the_command_line_and_files(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\ntwo\n")
    assert generate.gather_prompts(["zero"], text) == ["zero", "one", "two"]
    rows = tmp_path / "p.jsonl"
    messages = [{"role": "user", "content": "two"}]
    rows.write_text(json.dumps({"prompt": "one"}) + "\n" + json.dumps({"prompt": messages}) + "\n")
    assert generate.gather_prompts([], rows) == ["one", messages]


@pytest.mark.parametrize("line", ["{", '{"text": "x"}', "3", '{"prompt": 3}', '{"prompt": [{"role": "user"}]}'])
def test_a_bad_prompt_line_is_named(line: str, tmp_path: Path) -> None:
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"p\.jsonl:2: .*prompt"):
        generate.gather_prompts([], rows)


def test_no_prompt_and_an_empty_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompt_file"):
        generate.gather_prompts([], None)
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        generate.gather_prompts(["a", ""], None)
    with pytest.raises(ValueError, match="prompt 2 holds bytes or halves of characters"):
        generate.gather_prompts(["a", "caf\udce9"], None)  # as the shell's byte arrives here
    latin = tmp_path / "latin.txt"
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"--prompt_file .*latin\.txt is not UTF-8 .*; convert it"):
        generate.gather_prompts([], latin)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(rows_done: int, tokens: int, accept_length: float | None = None) -> Progress:
    return Progress(rows_done, rows_total=4, tokens=tokens, elapsed_s=2.0, accept_length=accept_length)


def test_the_bar_redraws_at_most_ten_times_a_second_and_clears() -> None:
    now = [0.0]
    screen = Terminal()
    bar = ProgressLine(screen, clock=lambda: now[0])
    bar.update(progress(1, 50))
    bar.update(progress(2, 60))  # too soon
    assert "1/4 rows, 50 tokens, 25.0 tokens/s" in screen.getvalue()
    assert "2/4" not in screen.getvalue()
    assert "accept length" not in screen.getvalue()
    now[0] = 0.2
    bar.update(progress(3, 70, accept_length=2.5))
    assert "3/4 rows" in screen.getvalue()
    assert screen.getvalue().endswith("accept length 2.50")
    bar.clear()
    assert screen.getvalue().endswith("\r\x1b[K")


def test_the_bar_is_silent_in_a_pipe() -> None:
    pipe = io.StringIO()
    bar = ProgressLine(pipe)
    bar.update(progress(1, 50))
    bar.clear()
    assert pipe.getvalue() == ""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2"))


def generated(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    """The records of `fastgrpo generate --json`, in row order."""
    assert cli.main(["generate", "--json", *argv]) == 0
    return sorted((json.loads(line) for line in capsys.readouterr().out.splitlines()), key=lambda r: r["index"])


def test_generate_samples_what_the_engine_samples(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model",
        checkpoint,
        "--num_generations",
        "2",
        "--max_new_tokens",
        "5",
        "--top_p",
        "0.9",
        "--dtype",
        "float32",
    ]
    records = generated([*flags, "--seed", "3", "one", "three"], capsys)

    model, tokenizer = load_model(checkpoint, dtype="float32")
    messages = [[{"role": "user", "content": text}] for text in ("one", "three")]
    prompts = [
        tokenizer(tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True)) for m in messages
    ]
    rollout = Engine(model).generate(
        [prompt["input_ids"] for prompt in prompts],
        SamplingParams(top_p=0.9),
        group_size=2,
        max_new_tokens=5,
        seed=3,
    )
    assert [record["prompt"] for record in records] == ["one", "one", "three", "three"]
    assert [record["token_ids"] for record in records] == [c.token_ids for c in rollout.completions]
    assert [record["logprobs"] for record in records] == [c.logprobs for c in rollout.completions]
    assert records[0]["completion"] == tokenizer.decode(records[0]["token_ids"], skip_special_tokens=True)

    other_seed = generated([*flags, "--seed", "4", "one", "three"], capsys)
    assert [record["token_ids"] for record in other_seed] != [c.token_ids for c in rollout.completions]


def test_raw_leaves_the_chat_template_out(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", checkpoint, "--temperature", "0", "--max_new_tokens", "4", "--dtype", "float32", "--raw"]
    (record,) = generated([*flags, "abc"], capsys)
    model, tokenizer = load_model(checkpoint, dtype="float32")
    rollout = Engine(model).generate([tokenizer("abc")["input_ids"]], SamplingParams(temperature=0), max_new_tokens=4)
    assert record["token_ids"] == rollout.completions[0].token_ids


def test_one_completion_is_printed_bare_and_the_rate_on_stderr(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "--model", checkpoint, "--max_new_tokens", "4", "--dtype", "float32", "hi"]
    assert cli.main(argv) == 0
    shown = capsys.readouterr()
    assert "---" not in shown.out
    assert shown.err.startswith("1 completion, ") and "tokens/s" in shown.err
    assert cli.main([*argv, "there"]) == 0
    assert capsys.readouterr().out.count("--- prompt ") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top_p", "2"], "top_p is 2.0"),
        (["--max_new_tokens", "0"], "max_new_tokens of row 0 is 0"),
        (["--num_generations", "0"], "--num_generations is 0"),
        (["--slots", "0"], "slots is 0"),
        (["--dtype", "float23"], "float32"),
    ],
)
def test_generate_says_what_is_wrong_in_one_line(
    flags: list[str], message: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--model", checkpoint, *flags, "hi"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("fastgrpo: error: ") and message in err
    assert len(err.splitlines()) == 1


def test_a_prompt_of_messages_needs_a_template() -> None:
    with pytest.raises(ValueError, match="drop --raw"):
        generate.encode_prompt([{"role": "user", "content": "hi"}], tiny_tokenizer(), raw=True)
