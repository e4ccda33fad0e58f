"""The benches on tiny models: what they count, what they compare, and that their last line is the promised JSON."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import EOS_ID, tiny_checkpoint, tiny_model, tiny_tokenizer

from fastgrpo import Engine, SamplingParams, cli
from fastgrpo.evidence import workload
from fastgrpo.evidence.bench import RolloutSettings, compare, rollout_bench
from fastgrpo.evidence.context import ContextSettings, context_bench
from fastgrpo.evidence.invariance import SHAPES, Shape, measure
from fastgrpo.evidence.machine import aligned
from fastgrpo.evidence.parts import PartsSettings, parts_bench
from fastgrpo.evidence.step import OURS, TRL, StepSettings, one_step, step_bench
from fastgrpo.evidence.timing import Spread, alternate
from fastgrpo.evidence.update import UpdateSettings, update_bench
from fastgrpo.evidence.word_problems import PROBLEMS, question
from fastgrpo.evidence.workload import Workload
from fastgrpo.grpo.rewards import number_reward

SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 9, 11], [30, 31, 32, 33, 34], [7]]
ALWAYS = {"engine", "policy", "rows", "tokens_per_s", "tokens_per_target_pass", "spread"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bench"), "llama")


def quiet(text: str) -> None:
    del text


# Fair timing


def test_sides_are_run_in_turn_and_backwards_every_second_time() -> None:
    calls: list[str] = []
    sides = {name: lambda repeat, name=name: calls.append(f"{name}{repeat}") or repeat for name in "ab"}
    assert alternate(sides, 3) == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert calls == ["a0", "b0", "b1", "a1", "a2", "b2"]
    with pytest.raises(ValueError, match="repeats is 0"):
        alternate(sides, 0)


def test_spread_is_median_and_extremes() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_the_table_is_aligned() -> None:
    lines = aligned(("name", "x"), [("a", 1234.5), ("long name", None), ("b", 0.12345)]).splitlines()
    assert lines == ["name           x", "a           1234", "long name      -", "b          0.123"]


# The workload


def test_the_word_problems_are_distinct_and_their_answers_are_numbers() -> None:
    assert len(PROBLEMS) == 32 == len({text for text, _ in PROBLEMS})
    answers = [answer for _, answer in PROBLEMS]
    assert number_reward([f"so it is {answer}" for answer in answers], answer=answers) == [1.0] * 32
    assert question(33) == question(1) != question(2)


def test_left_padding_hides_what_it_adds() -> None:
    ids, mask = workload.left_padded(PROMPTS, torch.device("cpu"))
    assert ids.tolist()[2] == [0, 0, 0, 0, 7]
    assert mask.tolist()[0] == [0, 0, 1, 1, 1]


def test_real_tokens_end_with_the_first_stop() -> None:
    responses = torch.tensor([[4, 1, 0, 1], [4, 5, 6, 7], [1, 1, 1, 1]])
    assert workload.real_tokens(responses, (1,)) == 2 + 4 + 1
    assert workload.real_tokens(responses, (7, 1)) == 2 + 4 + 1
    assert workload.real_tokens(responses, ()) == 12


def test_both_sides_give_exactly_the_asked_number_of_tokens() -> None:
    model = tiny_model("llama")
    work = Workload(PROMPTS, 2, 7, (), SAMPLED)
    ours, theirs = workload.run_engine(Engine(model), work, 0), workload.run_transformers(model, work, 0)
    assert ours.tokens == theirs.tokens == 6 * 7
    assert ours.passes == theirs.passes == 6
    assert ours.row_passes == theirs.row_passes == 36
    assert set(ours.parts) == {"setup_s", "prefill_s", "decode_s", "sampling_s"}


def test_both_sides_are_the_same_work_and_the_model_is_left_alone() -> None:
    model = tiny_model("llama")
    config, state = model.generation_config, torch.get_rng_state()
    work = Workload(PROMPTS, 1, 40, (EOS_ID,), GREEDY)
    theirs = workload.transformers_responses(model, work, 0)
    assert model.generation_config is config
    assert torch.equal(torch.get_rng_state(), state)
    rollout = Engine(model).generate(PROMPTS, GREEDY, max_new_tokens=40, stop_token_ids=(EOS_ID,))
    for row, completion in zip(theirs.tolist(), rollout.completions, strict=True):
        assert row[: len(completion.token_ids)] == completion.token_ids
    assert workload.real_tokens(theirs, (EOS_ID,)) == sum(len(c.token_ids) for c in rollout.completions)


def test_finished_rows_lower_the_tokens_per_pass_of_generate_only() -> None:
    model = tiny_model("llama")
    stops = tuple(range(50))  # about every second token ends a row
    work = Workload(PROMPTS * 4, 1, 30, stops, SAMPLED)
    ours, theirs = compare(Engine(model), model, work, repeats=1, seed=0)
    assert ours["tokens_per_target_pass"] == 1.0
    assert theirs["tokens_per_target_pass"] < 0.9
    assert ours["tokens"] < 12 * 30


def test_prompts_of_a_data_source(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "1"}) + "\n" for i in range(3)))
    tokenizer = tiny_tokenizer()
    prompts = workload.encoded_prompts(str(file), 4, tokenizer)
    assert "q0" in tokenizer.decode(prompts[0])
    assert prompts[3] == prompts[0] != prompts[1]
    tokenizer.chat_template = None
    assert tokenizer.decode(workload.encoded_prompts("builtin", 1, tokenizer)[0]) == question(0)


# The benches


def check_report(line: str, bench: str) -> list[dict[str, Any]]:
    report = json.loads(line)
    assert list(report) == ["bench", "machine", "versions", "settings", "results"]
    assert report["bench"] == bench
    assert "torch" in report["versions"] and "cpu" in report["machine"]
    assert report["settings"]["dtype"] == "float32" and report["settings"]["threads"] == torch.get_num_threads()
    return report["results"]


def test_the_rollout_bench_has_a_pair_per_workload() -> None:
    settings = RolloutSettings(rows=(1, 3), new_tokens=4, repeats=2, group_prompts=2, group_size=2)
    report = rollout_bench(settings, tiny_model("llama"), tiny_tokenizer(), quiet)
    results = check_report(report.json_line(), "rollout")
    assert [(r["engine"], r["rows"], r["prompts"], r["repeats"]) for r in results] == [
        ("fastgrpo", 1, 1, 2),
        ("transformers", 1, 1, 2),
        ("fastgrpo", 3, 3, 2),
        ("transformers", 3, 3, 2),
        ("fastgrpo", 4, 2, 1),
        ("transformers", 4, 2, 1),
    ]
    for ours, theirs in zip(results[::2], results[1::2], strict=True):
        assert ours.keys() & theirs.keys() >= ALWAYS
        assert ours["ratio"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
        assert ours["spread"][0] <= ours["tokens_per_s"] <= ours["spread"][1]
        assert ours["tokens"] == theirs["tokens"] == ours["rows"] * 4
    assert "2 prompts x 2" in report.table


def test_the_context_bench_separates_attention_from_the_rest() -> None:
    settings = ContextSettings(lengths=(24, 12), rows=(2,), new_tokens=3, repeats=1)
    model = tiny_model("qwen2")
    results = check_report(context_bench(settings, model, tiny_tokenizer(), quiet).json_line(), "context")
    assert [r["context"] for r in results] == [12, 24]
    for r in results:
        assert r.keys() >= ALWAYS
        assert r["attention_ms"] + r["rest_ms"] == pytest.approx(r["pass_ms"])
        # 3 layers of 2 heads of 8, keys and values in float32
        assert r["kv_mib"] == 2 * (r["context"] + 1) * 3 * 2 * 8 * 2 * 4 / 2**20
    with pytest.raises(ValueError, match="exceed the 1024 positions"):
        context_bench(replace(settings, lengths=(1023,)), model, tiny_tokenizer(), quiet)


def test_the_parts_bench_takes_a_pass_apart() -> None:
    settings = PartsSettings(rows=(1, 3), context=9, repeats=2)
    results = check_report(parts_bench(settings, tiny_model("qwen3"), tiny_tokenizer(), quiet).json_line(), "parts")
    assert [r["rows"] for r in results] == [1, 3]
    for r in results:
        assert r.keys() >= ALWAYS
        whole = r["products_ms"] + r["attention_ms"] + r["norms_ms"] + r["host_ms"]
        assert r["pass_ms"] == pytest.approx(whole)
        assert r["spread"][0] <= r["tokens_per_s"] <= r["spread"][1]
        assert min(r[f"{name}_ms"] for name in ("floor", "sampling", "their_pass", "their_sampling")) > 0


STEP = StepSettings(group_prompts=2, group_size=2, new_tokens=5, batch=2)


def test_the_update_bench_does_the_same_update_on_every_side() -> None:
    settings = UpdateSettings(group_prompts=2, group_size=4, batch=4, new_tokens=6, context=12, budgets=(20, 60))
    results = check_report(update_bench(settings, tiny_model("llama"), tiny_tokenizer(), quiet).json_line(), "update")
    assert [(r["engine"], r["budget"], r["micro_batch"]) for r in results] == [
        (TRL, None, 4), (OURS, None, 4), (OURS, 20, 8), (OURS, 60, 8)
    ]  # fmt: skip
    assert results[0]["ratio"] == 1
    for result in results:
        assert 0 < result["forward_s"] < result["update_s"]
        assert result["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-5)


def test_the_step_bench_times_both_trainers_by_phase() -> None:
    report = step_bench(STEP, tiny_model("llama"), tiny_tokenizer(), quiet)
    results = check_report(report.json_line(), "step")
    assert [r["engine"] for r in results] == [OURS, TRL]
    for r in results:
        assert r.keys() >= ALWAYS
        phases = [r[f"{name}_s"] for name in ("rollout", "reward", "logprob", "update", "other")]
        assert sum(phases) == pytest.approx(r["step_s"])
        assert r["rollout_s"] > 0 and r["reward_s"] > 0 and 0 < r["forward_s"] < r["update_s"]
        assert 0 < r["mean_length"] <= 5
    assert "its sampling 1/" in report.table


def test_a_step_leaves_the_model_alone() -> None:
    model = tiny_model("llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    one_step(TRL, STEP, model, tiny_tokenizer())
    one_step(OURS, STEP, model, tiny_tokenizer())
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    with pytest.raises(ValueError, match="do not divide"):
        replace(STEP, batch=3)


def test_invariance_compares_bits_with_the_reference() -> None:
    shapes = (SHAPES[0], Shape(2), Shape(3, place=2), Shape(2, queries=2, longer=40))
    stream = [3 + (7 * i) % 90 for i in range(120)]
    records = measure(tiny_model("llama"), stream, dtype=torch.float32, lean=False, context=20, steps=4, shapes=shapes)
    decode = [r for r in records if r.kind == "decode"]
    assert [r.shape for r in decode] == [
        "2 x 1, same row repeated", "2 x 1", "3 x 1, last row", "2 x 2, neighbours 40 longer",
    ]  # fmt: skip
    for r in records:
        assert r.path == "HuggingFace"
        assert r.equal == (r.law == "A") == (r.max_abs == 0)
        assert r.max_abs < 1e-3 and r.flips == 0  # another shape of the same computation, and not another computation
    with pytest.raises(ValueError, match="the text has 30 tokens"):
        measure(tiny_model("llama"), stream[:30], dtype=torch.float32, lean=True, shapes=shapes)


# The command


def test_the_command_prints_a_table_and_ends_with_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(checkpoint), "--rows", "1,2", "--new_tokens", "3", "--repeats", "1", "--group_prompts", "0"]
    assert cli.main(["bench", "rollout", *flags, "--natural_stops"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split()[:2] == ["workload", "engine"]
    assert len(check_report(lines[-1], "rollout")) == 4
    assert "times Hugging Face generate" in shown.err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["bench"], 2, "the following arguments are required: WHAT"),
        (["bench", "speed"], 2, "invalid choice: 'speed'"),
        (["bench", "rollout", "--lengths", "3"], 1, "--lengths is not a flag of the rollout bench, which has --arch"),
        (["bench", "rollout", "--rows", "1,0"], 2, "must be positive numbers with commas"),
        (["bench", "context", "--repeats", "0"], 2, "0 must be at least 1"),
        (["bench", "rollout", "--row", "1"], 2, "unknown flag --row; did you mean --rows?"),
        (["bench", "step", "--batch", "7"], 1, "are 64 rows, and micro-batches of 7 do not divide them"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert cli.main(argv) == code
    except SystemExit as stop:
        assert stop.code == code
    assert message in capsys.readouterr().err


def test_the_gpu_check_runs_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parent.parent / "tools" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--tiny"])
    monkeypatch.setattr(module, "ARCHITECTURES", ("llama", "gemma3_text"))
    assert module.main() == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(found["checks"]) == 16 and all(check["passed"] for check in found["checks"])
    assert [r["rows"] for r in found["results"]] == [1, 1, 4, 4]
    assert [(r["rows"], r["policy"]) for r in found["speculation"]] == [
        (rows, policy) for rows in (1, 4) for policy in ("off", "chain 3", "tree 8")
    ]

    # and it can fail: a row of other tokens is no near-tie
    model = module.tiny_model("llama")
    right = module.transformers_responses(model, Workload([[5, 6]], 1, 4, (), GREEDY), 0).tolist()
    assert module.greedy_check(model, [[5, 6]], right, right)[1]
    wrong = [[(token + 1) % module.VOCABULARY for token in right[0]]]
    assert not module.greedy_check(model, [[5, 6]], wrong, right)[1]
