"""Exactness and speed of the engine on one GPU, plain and with drafts, in under ten minutes; JSON out.

`make gpu-check` runs it. It prints what it finds, writes gpu_check.json into the folder that $OUT names, else into the
current one, and exits with 1 if a check of exactness failed. Drafts must not change a token in float32; in bfloat16 the
claim is equality in law, so there the share of equal tokens and the margins of what differs are reported. Without a
GPU, or with --tiny, the same checks run on tiny models with a few tokens, which says that the script works and nothing
about speed. It needs no network: the tiny models are built here, and SmolLM2 is used where its package is installed.
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
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from fastgrpo.evidence import speculation
from fastgrpo.evidence.agreement import agreement
from fastgrpo.evidence.bench import compare, render
from fastgrpo.evidence.doctor import describe_machine
from fastgrpo.evidence.footprint import open_draft
from fastgrpo.evidence.machine import machine, versions
from fastgrpo.evidence.speculation import SpeculationSettings
from fastgrpo.evidence.workload import Workload, encoded_prompts, transformers_responses
from fastgrpo.models.loading import load_model
from fastgrpo.speculation.engine import Engine, Rollout
from fastgrpo.speculation.policy import DraftShape, make_policy
from fastgrpo.speculation.proposers import DraftProposer, Proposer
from fastgrpo.speculation.sampling import SamplingParams
from fastgrpo.speculation.tree import Tree, chain, grow

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
    parser.add_argument("--draft", help="folder of a draft model for it; an untrained one is timed as well")
    args = parser.parse_args()
    tiny = args.tiny or not torch.cuda.is_available()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # float32 products in float32: TF32 would compare roundings, not programs
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    started = time.perf_counter()
    for label, value in describe_machine():
        print(f"{label:<16}{value}")
    checks = []
    for name in ARCHITECTURES:
        tiny_one = tiny_model(name).to(device)
        checks += exactness(name, tiny_one, 24) + exactness_with_drafts(name, tiny_one, 24)
    missing = None
    model, prompts = tiny_model("llama").to(device), tiny_prompts(4)
    rows, new_tokens = (1, 4), 8
    if not tiny:
        try:
            model, tokenizer = load_model(args.model, dtype="float32")
            prompts, rows, new_tokens = encoded_prompts("builtin", 128, tokenizer), (1, 8, 32, 128), 256
            checks += exactness(args.model, model, 64, prompts[:8])
            checks += exactness_with_drafts(args.model, model, 64, prompts[:8])
            model.to(torch.bfloat16)
        except (ImportError, OSError) as error:  # the model is not here: what was checked still counts
            missing = str(error)
            print(f"no {args.model}: {missing}")
    speed = measure_speed(model, prompts, rows, new_tokens)
    drafts = [None] if tiny or not args.draft else [None, args.draft]
    with_drafts = [r for d in drafts for r in measure_drafts(model, d, prompts, rows[:3], min(new_tokens, 128))]
    result = {
        "bench": "gpu_check",
        "machine": machine(),
        "versions": versions(),
        "settings": {"device": str(device), "tiny": tiny, "model": None if tiny else args.model, "missing": missing},
        "checks": checks,
        "results": speed,
        "speculation": with_drafts,
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
    return told(name, checks)


def told(name: str, checks: list[tuple[str, bool, str]]) -> list[dict[str, Any]]:
    """Print what each check found, and return it as JSON has it."""
    for what, passed, detail in checks:
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {what} {f'({detail})' if detail else ''}".rstrip(), flush=True)
    return [{"name": f"{name}: {what}", "passed": passed, "detail": detail} for what, passed, detail in checks]


class Echo:
    """Drafts what each prompt's row said in a rollout before, a wrong token in front of each right one, and every fifth
    right one left out: so drafts are accepted, refused, and moved to where the text goes on."""

    taps: tuple[int, ...] = ()

    def __init__(self, prompts: list[list[int]], rollout: Rollout):
        self.answers = {tuple(p): c.token_ids for p, c in zip(prompts, rollout.completions, strict=True)}

    def start(self, rows: int, capacity: int) -> bool:
        self.rows: list[Any] = [None] * rows
        return True

    def read_prompt(self, tokens: Any, prefix: Any) -> tuple[int, ...]:
        return tuple(tokens)

    def admit(self, prompt: tuple[int, ...], first_row: int, tokens: Tensor) -> None:
        for row in range(first_row, first_row + len(tokens)):
            self.rows[row] = [prompt, 1]

    def observe(self, features: Tensor | None, tokens: Tensor, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            self.rows[row][1] += count

    def move_row(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]

    def propose(self, roots: Tensor, shape: DraftShape, noise: Any) -> Tree:
        tree = chain(roots, roots[:, None][:, :0])
        scores = torch.zeros((len(roots), 1), device=roots.device)
        for depth in range(shape.depth):
            level = []
            for prompt, done in self.rows[: len(roots)]:
                place = done + depth
                right = (self.answers[prompt] + [0] * (shape.depth + 1))[place]
                level.append([[right ^ 1, right ^ 2 if place % 5 == 0 else right]])
            tokens = torch.tensor(level, device=roots.device)
            parents = torch.full((len(roots), 1), 2 * depth, device=roots.device)
            tree, scores = grow(tree, scores, parents, tokens, torch.zeros(tokens.shape, device=roots.device))
        return tree


def exactness_with_drafts(
    name: str, model: PreTrainedModel, new_tokens: int, prompts: list[list[int]] | None = None
) -> list[dict[str, Any]]:
    """The tokens of plain decoding, with trees of drafts that are right as often as not and with an untrained draft.

    As above, a difference is a failure only where it is no near-tie: of the race, or of the nucleus' edge.
    """
    if prompts is None:
        prompts = tiny_prompts(6)
    checks = []
    for law_name, law in (("greedy", GREEDY), ("sampled", SAMPLED)):
        arguments: dict[str, Any] = {"max_new_tokens": new_tokens, "stop_token_ids": (), "seed": 7}
        plain = Engine(model).generate(prompts, law, **arguments)
        sources: list[tuple[str, Proposer]] = [
            ("an echo", Echo(prompts, plain)),
            ("an untrained draft", DraftProposer(open_draft(model, None, 0))),
        ]
        for source, proposer in sources:
            shape = make_policy("fixed", spec_depth=4, spec_width=2, spec_nodes=8)
            rollout = Engine(model, slots=4, proposer=proposer, policy=shape).generate(prompts, law, **arguments)
            found = agreement(model, prompts, plain.completions, rollout.completions, law, 7)
            passed = all(margin < NEAR_TIE for margin in found.margins)
            used = rollout.stats.drafted > 0 and (source != "an echo" or rollout.stats.accepted > len(prompts))
            detail = f"{found.equal} of {found.tokens} tokens equal, accept length {rollout.stats.accept_length:.2f}"
            detail += f", margins up to {found.widest:.1e}" if found.widest is not None else ""
            checks.append((f"{law_name} with trees of {source} equals plain", passed and used, detail))
    return told(name, checks)


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


def measure_drafts(
    model: PreTrainedModel, draft: str | None, prompts: list[list[int]], rows: tuple[int, ...], new_tokens: int
) -> list[dict[str, Any]]:
    """Chains and trees of drafts against plain decoding: speed, parts of a round, tokens that are equal."""
    print(f"drafts of {draft or 'an untrained model, whose guesses are worth nothing'}:")
    settings = SpeculationSettings(draft=draft, new_tokens=new_tokens, rows=rows, memory_rows=0)
    found = open_draft(model, draft, 0)
    results = []
    for count in rows:
        results += speculation.compare(settings, model, found, prompts[:count], SAMPLED)
    print(speculation.render(results), flush=True)
    return [r | {"draft": draft} for r in results]


if __name__ == "__main__":
    sys.exit(main())
