"""The parts of a rollout by themselves: who a sequence is, its law, how far off its sampler was, the time it took."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from fastgrpo.config import FastGRPOConfig, sampling_params
from fastgrpo.grpo.accounting import Account, write_json
from fastgrpo.grpo.drafts import DraftTally
from fastgrpo.grpo.rollouts import (
    RolloutBar,
    RowLedger,
    fit_to_context,
    precision_correction,
    sequence_uid,
)
from fastgrpo.speculation.requests import Completion, Progress, Rollout, RolloutStats


def test_the_ledger_tells_equal_prompts_apart_by_what_followed() -> None:
    ledger = RowLedger(evaluation=False, generation=3, first_row=8)
    assert ledger.identify([[5, 6], [5, 6], [7]]) == [0, 1, 2]
    ledger.record([0, 1, 2], [[5, 6], [5, 6], [7]], [[1], [2], [3, 3]])
    assert ledger.identify([[5, 6, 2, 9], [7, 3, 3, 9]]) == [1, 2]
    assert ledger.limits([1, 2], [[5, 6, 2, 9], [7, 3, 3, 9]], 4) == [2, 1]
    assert ledger.uids([1, 2]) == [sequence_uid(evaluation=False, generation=3, row=row) for row in (9, 10)]
    with pytest.raises(RuntimeError, match="continues none of the 3 rows"):
        ledger.identify([[5, 6, 8, 9]])


def test_limits_are_cut_to_the_models_context() -> None:
    assert fit_to_context([8, 8, 8], [[1] * 13, [1] * 8, [1]], 16) == [3, 8, 8]
    assert fit_to_context([8], [[1] * 13], None) == [8]
    with pytest.raises(ValueError, match="A prompt of 16 tokens leaves no room for a response in the model's context"):
        fit_to_context([8, 8], [[1], [1] * 16], 16)


def test_sequence_uids_are_distinct_in_every_field() -> None:
    grid = [(e, g, r) for e in (False, True) for g in (0, 1, 2**38 - 1) for r in (0, 1, 2**24 - 1)]
    uids = {sequence_uid(evaluation=e, generation=g, row=r) for e, g, r in grid}
    assert len(uids) == len(grid) and max(uids) < 2**63
    with pytest.raises(ValueError, match=r"row=16777216 must lie in 0\.\.16777215"):
        sequence_uid(evaluation=False, generation=0, row=2**24)
    with pytest.raises(ValueError, match="generation=-1 must lie in"):
        sequence_uid(evaluation=False, generation=-1, row=0)


def test_the_correction_is_the_capped_ratio_where_the_policy_wrote_and_one_elsewhere() -> None:
    trainer = torch.tensor([[-1.0, -2.0, -0.5, -7.0], [-1.0, -1.0, -1.0, -1.0]])
    sampler = torch.tensor([[-1.2, -1.5, -2.5, 0.0], [-1.0, float("nan"), -1.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    found = precision_correction(trainer, sampler, mask, cap=2.0)
    expected = torch.tensor([[0.2, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]).exp()
    expected[0, 2] = 2.0
    torch.testing.assert_close(found.weights, expected)
    assert found.mean_difference.item() == pytest.approx((0.2 + 0.5 + 2.0) / 5)
    assert found.max_difference.item() == pytest.approx(2.0)
    assert found.capped_fraction.item() == pytest.approx(1 / 5)


def test_every_sampling_field_reaches_the_engine(tmp_path: Path) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.05, "repetition_penalty": 1.1}
    law = sampling_params(FastGRPOConfig(str(tmp_path), use_cpu=True, **settings))
    assert vars(law) == settings
    given = {"generation_kwargs": {"top_p": 0.5, "min_p": None, "top_k": 3}}
    law = sampling_params(FastGRPOConfig(str(tmp_path), use_cpu=True, **settings, **given))
    assert vars(law) == {**settings, "top_p": 0.5, "min_p": 0.0, "top_k": 3}
    with pytest.raises(ValueError, match="top_p"):
        sampling_params(FastGRPOConfig(str(tmp_path), use_cpu=True, top_p=1.5))


def test_an_account_adds_up() -> None:
    account = Account(torch.device("cpu"))
    # two ranks: rollout, reward, logprob, update seconds, rollout tokens, trained tokens, step and drafting seconds
    ranks = torch.tensor([[2.0, 1.0, 0.0, 4.0, 30, 90, 8.0, 0.0], [4.0, 1.0, 0.0, 2.0, 10, 70, 8.0, 0.0]])
    metrics = account.book(ranks)
    assert "time/draft" not in metrics
    assert metrics["time/rollout"] == 3 and metrics["time/update"] == 3
    assert metrics["throughput/rollout_tokens_per_s"] == 40 / 4 and metrics["throughput/train_tokens_per_s"] == 160 / 4
    summary = account.summary()
    assert summary["shares"] == {"rollout": 3 / 8, "reward": 1 / 8, "logprob": 0, "update": 3 / 8, "other": 1 / 8}
    assert summary["ceiling_of_faster_sampling"] == pytest.approx(8 / 5)
    with account.evaluation(), account.phase("rollout"):
        account.add_rollout(5)
        account.add_drafting(0.5)
    numbers = account.end_step()
    assert numbers[:5] == [0, 0, 0, 0, 0] and numbers[7] == 0 and account.evaluation_s > 0
    account.add_drafting(0.5)
    assert account.book(torch.tensor([account.end_step()]))["time/draft"] == 0.5
    assert account.book(torch.tensor([account.end_step()]))["time/draft"] == 0  # a step that reuses a generation


def rollout_of(live_rows: list[int], drafts: list[int], tokens: int, drafted: int, accepted: int) -> Rollout:
    rows = [Completion(i, i, [5], [-1.0], None, "length", [1], 0, 0) for i in range(max(live_rows))]
    counts = {"completion_tokens": tokens, "drafted": drafted, "accepted": accepted}
    return Rollout(rows, RolloutStats(passes=len(drafts), live_rows=live_rows, drafts=drafts, **counts))


def test_a_tally_counts_by_vllms_definitions_and_adds_up() -> None:
    tally = DraftTally()
    assert tally.metrics() == {"spec/drafted_tokens": 0, "spec/accepted_tokens": 0}
    # four rows for two plain passes, then two rows and one with drafts of three: 4 tokens by prefills, 11 + 2 by passes
    tally.add_rollout(rollout_of([4, 4, 2, 1], [0, 0, 3, 3], tokens=17, drafted=9, accepted=2))
    found = {
        "spec/acceptance_rate": 2 / 9,
        "spec/mean_accept_length": 1 + 2 / 3,
        "spec/tokens_per_target_forward": 13 / 11,
        "spec/active_rows_mean": 11 / 4,
        "spec/off_fraction": 1 / 2,
        "spec/drafted_tokens": 9,
        "spec/accepted_tokens": 2,
    }
    assert tally.metrics() == pytest.approx(found)
    both = DraftTally()
    both.add(torch.cat([tally.counts(torch.device("cpu"))] * 2))  # two ranks
    doubled = {name: value * (2 if name.endswith("tokens") else 1) for name, value in found.items()}
    assert both.metrics() == pytest.approx(doubled)
    assert both.summary()["row_passes"] == 22 and both.summary()["off_fraction"] == 1 / 2
    idle = DraftTally()
    idle.add_rollout(rollout_of([2], [0], tokens=4, drafted=0, accepted=0))
    assert "spec/acceptance_rate" not in idle.metrics() and idle.metrics()["spec/off_fraction"] == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_rows_and_speed_on_a_terminal_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, wanted, shown in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = RolloutBar(wanted=wanted)
        for done, length in ((0, None), (3, None), (8, 2.5)):
            bar.update(Progress(done, rows_total=8, tokens=100 * done, elapsed_s=2.0, accept_length=length))
        assert (bar._line is not None) is shown
        if bar._line is not None:
            assert bar._line.postfix == "800 tokens, 400 tokens/s, accept length 2.50"
        bar.close()
        bar.close()
        assert ("rollout" in stream.getvalue() and "/8" in stream.getvalue()) is shown
        if shown:
            assert stream.getvalue().endswith("\r") and "\n" not in stream.getvalue()


def test_a_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "new" / "summary.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert [path.name for path in file.parent.iterdir()] == ["summary.json"]
