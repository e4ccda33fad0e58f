"""The speculation bench on tiny models: what it compares, how a round is taken apart, what it says of differences."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import ALWAYS, check_report, quiet
from tiny import tiny_checkpoint, tiny_model, tiny_tokenizer

from fastgrpo import Engine, SamplingParams, cli
from fastgrpo.evidence import footprint, speculation
from fastgrpo.evidence.agreement import Agreement, agreement, margin
from fastgrpo.evidence.footprint import Footprint, Plan, open_draft
from fastgrpo.evidence.speculation import SHAPES, Side, SpeculationSettings, speculation_bench
from fastgrpo.speculation.noise import arrival_times, row_keys

SMALL = SpeculationSettings(rows=(1, 3), new_tokens=10, repeats=1, memory_rows=0)
PROMPTS = [[5, 9, 11], [30, 31, 32, 33, 34], [7]]


def test_every_shape_is_compared_with_plain_decoding_at_both_laws() -> None:
    notes: list[str] = []
    report = speculation_bench(SMALL, tiny_model("llama"), tiny_tokenizer(), notes.append)
    results = check_report(report.json_line(), "speculation")
    assert [(r["top_p"], r["rows"], r["policy"]) for r in results] == [
        (top_p, rows, shape) for top_p in (0.95, 1.0) for rows in (1, 3) for shape in SHAPES
    ]
    for r in results:
        assert r.keys() >= ALWAYS
        off = next(o for o in results if (o["top_p"], o["rows"], o["policy"]) == (r["top_p"], r["rows"], "off"))
        assert r["equal_tokens"] == r["tokens"] == 10 * r["rows"] and r["margins"] == []
        assert r["timed_rounds"] > 0
        assert r["ratio"] == pytest.approx(r["tokens_per_s"] / off["tokens_per_s"])
        assert r["host_share"] == pytest.approx(r["host_ms"] / off["pass_ms"])
        if r["policy"] == "off":
            assert (r["ratio"], r["pass_ratio"], r["accept_length"], r["draft_forwards_ms"]) == (1, 1, None, 0)
            assert r["tokens_per_target_pass"] == 1
        else:
            assert r["accept_length"] >= 1 and r["draft_forwards_ms"] > 0 and r["draft_host_ms"] > 0
    assert "untrained" in notes[0] and "tree 8" in report.table


@pytest.mark.parametrize("shape", SHAPES)
def test_the_parts_of_a_round_are_inside_it(shape: str) -> None:
    model = tiny_model("qwen3")
    side = Side(model, open_draft(model, None, 0), SHAPES[shape], 1.0, watched=True)
    run = side.run(PROMPTS, 12, SamplingParams(), 0)
    stats = run.rollout.stats
    assert len(run.rounds) == sum(rows == 3 for rows in stats.live_rows[1:]) > 0
    for r in run.rounds:
        assert 0 < r.target < r.whole
        assert r.target + r.drafting < r.whole
        assert (r.forwards > 0) == (shape != "off") and r.forwards <= r.drafting
    assert run.seconds > sum(r.whole for r in run.rounds)
    assert (
        Side(model, open_draft(model, None, 0), SHAPES[shape], 1.0, watched=False)
        .run(PROMPTS, 12, SamplingParams(), 0)
        .rounds
        == []
    )


def test_a_trained_draft_is_read_from_its_folder(tmp_path: Path) -> None:
    model = tiny_model("llama")
    draft = open_draft(model, None, 3)
    draft.save_pretrained(tmp_path)
    read = open_draft(model, str(tmp_path), 4)
    assert torch.equal(read.lm_head.weight, draft.lm_head.weight)
    assert not torch.equal(open_draft(model, None, 4).lm_head.weight, draft.lm_head.weight)
    state = torch.get_rng_state()
    open_draft(model, None, 5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("setting", [{"new_tokens": 7}, {"memory_rows": 2}])
def test_settings_that_cannot_be_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"new_tokens is 7.*use 8 or more|memory_rows is 2.*name one of them"):
        replace(SMALL, **setting)


# What differs


def test_margins_are_the_gap_of_the_race_or_of_the_cut() -> None:
    model, text, law = tiny_model("llama"), [5, 9, 11], SamplingParams(temperature=0.8)
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -1]
    scores = (logits / 0.8).double().log_softmax(-1)
    p = scores.exp()
    scores = (
        scores - arrival_times(row_keys(4, torch.tensor([-3]), torch.tensor([3])), torch.arange(100)[None])[0].log()
    )
    one, other = scores.topk(2).indices.tolist()
    assert margin(model, text, (one, other), law, 2**64 - 3, 4) == pytest.approx(float(scores[one] - scores[other]))
    greedy = SamplingParams(temperature=0)
    assert margin(model, text, (1, 2), greedy, 0, 0) == pytest.approx(float((logits[1] - logits[2]).abs()))
    # the better one stands right at the edge of the nucleus
    edge = float(p[p > p[one]].sum()) + 1e-9
    assert margin(model, text, (one, other), replace(law, top_p=edge), -3, 4) == pytest.approx(1e-9, abs=1e-7)
    with pytest.raises(ValueError, match="a temperature and top_p, not for"):
        margin(model, text, (1, 2), replace(law, top_k=5), 0, 0)


def test_agreement_counts_up_to_the_first_difference() -> None:
    model, law = tiny_model("llama"), SamplingParams(top_p=0.95)

    def rollout() -> list[Any]:
        return Engine(model).generate(PROMPTS, law, max_new_tokens=6, stop_token_ids=(), seed=2).completions

    one, other = rollout(), rollout()
    assert agreement(model, PROMPTS, one, other, law, 2) == Agreement(18, 18, ())
    other[1].token_ids[2] = (other[1].token_ids[2] + 1) % 100
    found = agreement(model, PROMPTS, one, other, law, 2)
    assert (found.tokens, found.equal, len(found.margins)) == (18, 14, 1)
    assert found.widest == found.margins[0] > 1e-3, "another token is no near-tie"


# Memory


def test_memory_is_measured_in_another_process(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama")
    plan = Plan(str(checkpoint), "float32", None, {"spec_depth": 3}, "builtin", 2, 8, 1.0, 0.95, 0, 1)
    found = footprint.footprint(plan)
    draft = open_draft(tiny_model("llama"), None, 0)
    assert found.draft == sum(4 * weight.numel() for weight in draft.parameters())
    assert 50 << 20 < found.before <= found.peak < 4 << 30
    with pytest.raises(RuntimeError, match="the process that measures memory failed"):
        footprint.footprint(replace(plan, model=str(tmp_path / "nothing")))


def test_the_peak_is_the_rollouts_and_not_that_of_loading(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("peaks can be set back on Linux only")
    cpu = torch.device("cpu")
    big = torch.ones(30 << 20)
    high = footprint._peak(cpu)
    del big
    footprint._forget_peak(cpu)
    assert footprint._peak(cpu) < high - (100 << 20)


def test_memory_is_added_to_the_results_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def fake(plan: Plan) -> Footprint:
        plans.append(plan)
        return Footprint(50 << 20, (100 << 20) + (30 << 20) * (plan.shape is not None), (20 << 20) * bool(plan.shape))

    monkeypatch.setattr(speculation, "footprint", fake)
    report = speculation_bench(
        replace(SMALL, memory_rows=None, top_p=0.9), tiny_model("llama"), tiny_tokenizer(), quiet
    )
    assert [(plan.rows, plan.shape) for plan in plans] == [(3, shape) for shape in SHAPES.values()]
    with_memory = {r["policy"]: r["peak_ratio"] for r in report.results if "peak_ratio" in r}
    assert with_memory == {"off": 1.0, "chain 3": pytest.approx(1.1), "tree 8": pytest.approx(1.1)}
    assert "memory, 3 rows, chain 3: 50 MiB loaded, 130 MiB at the peak; less the draft's 20 MiB 1.100" in report.table


def test_the_command_ends_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "gemma3")
    open_draft(tiny_model("gemma3"), None, 0).save_pretrained(tmp_path / "draft")
    flags = ["--model", str(checkpoint), "--draft", str(tmp_path / "draft"), "--rows", "2", "--new_tokens", "8"]
    assert cli.main(["bench", "speculation", *flags, "--repeats", "1", "--memory_rows", "0", "--top_p", "0.95"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split()[:3] == ["rows", "top-p", "policy"]
    assert len(check_report(lines[-1], "speculation")) == 3
    assert json.loads(lines[-1])["settings"]["draft"] == str(tmp_path / "draft")
    assert "untrained" not in shown.err and "2 rows, top-p 0.95: off" in shown.err
