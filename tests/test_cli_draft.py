"""`fastgrpo generate --draft`: the same tokens as without, what is shown of drafts, and which flags are refused."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from tiny import tiny_checkpoint, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastgrpo import DraftModel, cli
from fastgrpo.cli.completions import in_stretches, marker
from fastgrpo.speculation.requests import Completion

GREEN = re.compile("\x1b\\[32m(.*?)\x1b\\[0m", re.DOTALL)


def completion_of(blocks: list[int], accepted: int, token_ids: list[int] | None = None) -> Completion:
    token_ids = list(range(sum(blocks))) if token_ids is None else token_ids
    return Completion(0, 0, token_ids, [0.0] * len(token_ids), None, "length", blocks, drafted=9, accepted=accepted)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_checkpoint(folder, "llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        DraftModel.for_target(tiny_model("llama")).save_pretrained(folder / "draft")
    return ["--model", str(model), "--draft", str(folder / "draft"), "--dtype", "float32", "--max_new_tokens", "24"]


def without_draft(flags: list[str]) -> list[str]:
    return [*flags[:2], *flags[4:]]


def records(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert cli.main(["generate", "--json", *argv]) == 0
    return sorted((json.loads(line) for line in capsys.readouterr().out.splitlines()), key=lambda r: r["index"])


@pytest.mark.parametrize(
    "policy",
    [
        [],
        ["--policy", "paper", "--verification_capacity", "12", "--max_draft_k", "2"],
        ["--policy", "fixed", "--spec_depth", "2", "--spec_width", "3", "--spec_nodes", "5"],
        ["--policy", "threshold", "--spec_threshold_rows", "4"],
        ["--policy", "off"],
    ],
    ids=lambda policy: "-".join(policy[1:2]) or "default",
)
def test_a_draft_changes_the_passes_and_not_the_tokens(
    policy: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--num_generations", "2", "--seed", "5", "one", "three"]
    plain = records([*without_draft(flags), *more], capsys)
    drafted = records([*flags, *policy, *more], capsys)
    assert [r["token_ids"] for r in drafted] == [r["token_ids"] for r in plain]
    for record in [*plain, *drafted]:
        assert sum(record["blocks"]) == len(record["token_ids"])
        assert record["rounds"] == len(record["blocks"]) - 1
        assert record["accepted"] <= record["drafted"]
    assert all(record["drafted"] == 0 for record in plain)
    assert any(record["drafted"] for record in drafted) == (policy[1:2] != ["off"])


def test_accepted_tokens_are_marked_in_the_text(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*flags, "--temperature", "0", "--policy", "fixed", "--spec_depth", "1", "--spec_width", "40", "hello"]
    (record,) = records(argv, capsys)
    assert record["accepted"] > 0
    assert cli.main(["generate", "--show-accepted", *argv]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[0].endswith("look {+so+}")
    assert f"accept length {1 + record['accepted'] / record['rounds']:.2f}: {record['accepted']} of " in shown.err
    accepted = re.findall(r"\{\+(.*?)\+\}", shown.out, re.DOTALL)
    # one character a token; special tokens are not shown
    special = len(record["token_ids"]) - len(record["completion"])
    assert record["accepted"] - special <= len("".join(accepted)) <= record["accepted"]
    assert shown.out.replace("{+", "").replace("+}", "") == record["completion"] + "\n"


def test_from_draft_says_which_tokens_were_drafted_and_accepted() -> None:
    own, drafted = False, True
    assert completion_of([1, 3, 1, 2], 3).from_draft == [own, drafted, drafted, own, own, drafted, own]
    # the row ended inside its last block, before the target's own token
    assert completion_of([1, 3, 2], 4).from_draft == [own, drafted, drafted, own, drafted, drafted]
    assert completion_of([1, 1], 1).from_draft == [own, drafted]
    assert completion_of([1], 0).from_draft == [own]


def test_stretches_join_to_the_text_even_where_tokens_share_a_character() -> None:
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tokenizer("aé b")["input_ids"]
    assert len(ids) == 5  # a byte a token
    # the bytes of é come from two blocks; it belongs to the later one's
    pieces = in_stretches(completion_of([1, 2, 2], 2, ids), tokenizer)
    assert pieces == [("a", False), ("é", False), (" ", True), ("b", False)]
    half = completion_of([1, 1], 1, ids[:2])
    assert in_stretches(half, tokenizer) == [("a", False), ("\N{REPLACEMENT CHARACTER}", True)]


def test_special_tokens_leave_no_empty_marks() -> None:
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id]
    assert in_stretches(completion_of([1, 1], 1, ids), tokenizer) == [("a", False)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert GREEN.findall(marker(Terminal())("yes")) == ["yes"]
    assert marker(io.StringIO())("yes") == "{+yes+}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert marker(Terminal())("yes") == "{+yes+}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--show-accepted"], "so --show-accepted would do nothing: add --draft FOLDER, or leave it out"),
        (["--policy", "paper", "--spec_depth", "2"], "so --policy, --spec_depth would do nothing"),
    ],
)
def test_flags_of_drafts_need_a_draft(
    argv: list[str], message: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *without_draft(flags), *argv, "hi"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "papr"], "did you mean 'paper'?"),
        (["--spec_depth", "2"], "--spec_depth is no knob of the policy 'paper'"),
        (["--policy", "off", "--max_draft_k", "2"], "--max_draft_k is no knob of the policy 'off'"),
        (["--policy", "fixed", "--spec_depth", "0"], "spec_depth is 0"),
        (["--show-accepted", "--json"], "leave one out"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    argv: list[str], message: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *flags, *argv, "hi"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("fastgrpo: error: ") and message in err
    assert len(err.splitlines()) == 1


def test_a_folder_without_a_draft_and_a_draft_of_another_model_are_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [*flags[:2], *flags[4:]]
    assert cli.main(["generate", *model, "--draft", str(tmp_path / "nothing"), "hi"]) == 1
    assert "holds no draft: give the folder that" in capsys.readouterr().err
    DraftModel.for_target(tiny_model("qwen3")).save_pretrained(tmp_path)
    assert cli.main(["generate", *model, "--draft", str(tmp_path), "hi"]) == 1
    assert "target_model_type 'qwen3', and this one has 'llama'" in capsys.readouterr().err
