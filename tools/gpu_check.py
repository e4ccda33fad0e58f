"""Exactness and plain speed of the engine on one GPU, in under ten minutes; JSON out.

`make gpu-check` runs it. It prints what it finds, writes gpu_check.json into the folder that $OUT names, else into the
current one, and exits with 1 if a check of exactness failed. Without a GPU, or with --tiny, the same checks run on tiny
models with a few tokens, which says that the script works and nothing about speed. It needs no network: the tiny models
are built here, and SmolLM2 is used where its package is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from fastgrpo.evidence.bench import compare, render
from fastgrpo.evidence.doctor import describe_machine
from fastgrpo.evidence.machine import machine, versions
from fastgrpo.evidence.workload import Workload, encoded_prompts, transformers_responses
from fastgrpo.models.loading import load_model
from fastgrpo.speculation.engine import Engine, Rollout
from fastgrpo.speculation.sampling import SamplingParams

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
VOCABULARY, WINDOW = 512, 16
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
NEAR_TIE = 1e-3  # logits; float32 rounding moves them by about 1e-4 at most
LOGPROB_TOLERANCE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, as without a GPU")
    parser.add_argument("--model", default="smollm2-135m", help="the real model (%(default)s); left out with --tiny")
    args = parser.parse_args()
    tiny = args.tiny or not torch.cuda.is_available()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # float32 products in float32: TF32 would compare roundings, not programs
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    started = time.perf_counter()
    for label, value in describe_machine():
        print(f"{label:<16}{value}")
    checks = [check for name in ARCHITECTURES for check in exactness(name, tiny_model(name).to(device), 24)]
    missing = None
    model, prompts = tiny_model("llama").to(device), tiny_prompts(4)
    rows, new_tokens = (1, 4), 8
    if not tiny:
        try:
            model, tokenizer = load_model(args.model, dtype="float32")
            prompts, rows, new_tokens = encoded_prompts("builtin", 128, tokenizer), (1, 8, 32, 128), 256
            checks += exactness(args.model, model, 64, prompts[:8])
            model.to(torch.bfloat16)
        except (ImportError, OSError) as error:  # the model is not here: what was checked still counts
            missing = str(error)
            print(f"no {args.model}: {missing}")
    speed = measure_speed(model, prompts, rows, new_tokens)
    result = {
        "bench": "gpu_check",
        "machine": machine(),
        "versions": versions(),
        "settings": {"device": str(device), "tiny": tiny, "model": None if tiny else args.model, "missing": missing},
        "checks": checks,
        "results": speed,
        "seconds": time.perf_counter() - started,
    }
    path = Path(os.environ.get("OUT") or ".") / "gpu_check.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    failed = [check["name"] for check in checks if not check["passed"]]
    print(
        f"{len(checks) - len(failed)} checks passed, {len(failed)} failed; {result['seconds']:.0f} s; wrote {path.name}"
    )
    return 1 if failed else 0


def tiny_model(kind: str) -> PreTrainedModel:
    """A random model of that kind, awake enough that a wrong cache entry changes its tokens; the same every time."""
    special = {
        "mistral": {"sliding_window": WINDOW},
        "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
                        "query_pre_attn_scalar": 16},
    }  # fmt: skip
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=False, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, **special.get(kind, {}),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" not in name:
                    gain = 1.0 if "embed" in name else 2.0 * weight.shape[-1] ** -0.5
                    weight.copy_(torch.randn(weight.shape) * gain)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1)
    return model.eval()


def exactness(
    name: str, model: PreTrainedModel, new_tokens: int, prompts: list[list[int]] | None = None
) -> list[dict[str, Any]]:
    """Greedy tokens against Hugging Face `generate`, and sampled tokens of one row against themselves in other company.

    In float32 a near-tie may fall either way, so a difference counts as a failure only where the two likeliest logits
    are further apart than rounding explains.
    """
    if prompts is None:
        prompts = tiny_prompts(6)
    engine = Engine(model)
    greedy = engine.generate(prompts, GREEDY, max_new_tokens=new_tokens, stop_token_ids=())
    theirs = transformers_responses(model, Workload(prompts, 1, new_tokens, (), GREEDY), seed=0).tolist()
    rows = [prompt for prompt in prompts for _ in range(2)]
    whole = engine.generate(rows, SAMPLED, max_new_tokens=new_tokens, stop_token_ids=(), seed=7)
    uids = list(range(len(rows)))[::-1]
    few = Engine(model, slots=3).generate(
        rows[::-1], SAMPLED, max_new_tokens=new_tokens, stop_token_ids=(), seed=7, uids=uids
    )
    another = engine.generate(rows, SAMPLED, max_new_tokens=new_tokens, stop_token_ids=(), seed=8)
    unequal = sum(a != b for a, b in zip(tokens_of(whole), tokens_of(few)[::-1], strict=True))
    furthest = logprob_difference(model, rows, whole)
    checks = [
        greedy_check(model, prompts, tokens_of(greedy), theirs),
        ("sampled tokens by 3 slots in reverse order", unequal == 0, f"{unequal} of {len(rows)} rows differ"),
        ("another seed gives other tokens", tokens_of(another) != tokens_of(whole), ""),
        ("log-probs equal one full forward", furthest < LOGPROB_TOLERANCE, f"largest difference {furthest:.1e}"),
    ]
    for what, passed, detail in checks:
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {what} {f'({detail})' if detail else ''}".rstrip(), flush=True)
    return [{"name": f"{name}: {what}", "passed": passed, "detail": detail} for what, passed, detail in checks]


def tiny_prompts(count: int) -> list[list[int]]:
    """Prompts of ragged lengths, of any tokens."""
    return [[2 + (7 * i + 11 * j) % (VOCABULARY - 2) for j in range(3 + 5 * i)] for i in range(count)]


def tokens_of(rollout: Rollout) -> list[list[int]]:
    return [completion.token_ids for completion in rollout.completions]


def greedy_check(
    model: PreTrainedModel, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> tuple[str, bool, str]:
    """Where a row differs first, the two tokens must be a near-tie by the model's own forward."""
    gaps = []
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if a == b:
            continue
        first = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = full_logits(model, prompt + a[:first])[-1]
        gaps.append(abs(float(logits[a[first]] - logits[b[first]])))
    detail = f"{len(gaps)} of {len(prompts)} rows differ" + (f", logits apart by {max(gaps):.1e}" if gaps else "")
    return "greedy equals generate", all(gap < NEAR_TIE for gap in gaps), detail


def logprob_difference(model: PreTrainedModel, prompts: list[list[int]], rollout: Rollout) -> float:
    """The largest difference between the engine's log-probs and those of one full forward a row."""
    furthest = 0.0
    for prompt, completion in zip(prompts, rollout.completions, strict=True):
        logprobs = full_logits(model, prompt + completion.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs[torch.arange(len(completion.token_ids)), completion.token_ids].cpu()
        furthest = max(furthest, float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return furthest


@torch.no_grad()
def full_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocab) float32, by the model's own forward without a cache."""
    return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()


def measure_speed(
    model: PreTrainedModel, prompts: list[list[int]], rows: tuple[int, ...], new_tokens: int
) -> list[dict[str, Any]]:
    """Tokens per second against Hugging Face `generate` at those numbers of rows, all of one length."""
    engine = Engine(model)
    results: list[dict[str, Any]] = []
    warm = Workload(prompts[: min(rows[-1], 8)], 1, 4, (), SAMPLED)
    compare(engine, model, warm, 1, 0)
    for count in rows:
        results += compare(engine, model, Workload(prompts[:count], 1, new_tokens, (), SAMPLED), 2, 0)
        print(f"{count} rows: {results[-2]['ratio']:.2f} times Hugging Face generate", flush=True)
    print(render(results))
    return results


if __name__ == "__main__":
    sys.exit(main())
