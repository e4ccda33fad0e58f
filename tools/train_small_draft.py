"""Train a small draft in minutes and print how many tokens a target pass gives with it.

The target answers word problems, the draft learns from the answers, and the engine decodes prompts that neither saw,
with a chain of 3 and with a tree of 8: greedily, and by the law of the answers, with proposals coupled to the target's
noise and with the draft's most likely tokens. The draft is saved as a folder. The last line is one JSON object.
Without --prompts the problems are those built in, most to train on and the last ones to judge by; sizes are for two
cores of a laptop and ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastgrpo.drafting.pretrain import PretrainConfig, PretrainProgress, sample_answers, train_draft
from fastgrpo.evidence.machine import Report, aligned
from fastgrpo.evidence.workload import BUILTIN, encoded_prompts
from fastgrpo.models.draft import DraftModel
from fastgrpo.models.loading import load_model
from fastgrpo.speculation.engine import Engine
from fastgrpo.speculation.policy import DraftShape, make_policy
from fastgrpo.speculation.proposers import DraftProposer, Noise
from fastgrpo.speculation.sampling import SamplingParams
from fastgrpo.speculation.tree import Tree

SHAPES = {"chain of 3": (3, 1, 3), "tree of 8": (3, 3, 8)}  # depth, width, nodes


class MostLikely(DraftProposer):
    """Proposes what the draft finds most likely, whatever the target's noise."""

    def propose(self, roots: Tensor, shape: DraftShape, noise: Noise) -> Tree:
        return super().propose(roots, shape, None)


@dataclass(frozen=True)
class Cell:
    """One way of decoding the held-out prompts."""

    law: str
    proposals: str
    proposer: Callable[[DraftModel], DraftProposer]
    sampling: SamplingParams


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", required=True, help="folder that the draft is written to")
    parser.add_argument("--model", default="smollm2-135m", help="hub id, folder, .gguf file, built-in (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 (%(default)s)")
    parser.add_argument("--prompts", default=BUILTIN, help="builtin, or a data source as `fastgrpo grpo` takes it")
    parser.add_argument("--train_prompts", type=int, default=24, help="prompts to train on (%(default)s)")
    parser.add_argument("--group_size", type=int, default=6, help="answers to each of them (%(default)s)")
    parser.add_argument("--new_tokens", type=int, default=256, help="longest answer to train on (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the answers (%(default)s)")
    parser.add_argument("--top_p", type=float, default=0.95, help="of the answers (%(default)s)")
    parser.add_argument("--slots", type=int, default=48, help="rows that decode at once (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that the draft knows (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="depth of the drafts that are practised (%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="times over the answers (%(default)s)")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="its peak (%(default)s)")
    parser.add_argument("--eval_prompts", type=int, default=8, help="held-out prompts (%(default)s)")
    parser.add_argument("--eval_tokens", type=int, default=128, help="longest answer to judge by (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="threads of torch (its own choice)")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model, dtype=args.dtype)
    prompts = encoded_prompts(args.prompts, args.train_prompts + args.eval_prompts, tokenizer)
    train, held_out = prompts[: args.train_prompts], prompts[args.train_prompts :]
    if not held_out or any(prompt in train for prompt in held_out):
        raise SystemExit(
            f"{args.prompts} has too few prompts for {len(train)} to train on and {len(held_out)} others to judge by: "
            "lower --train_prompts (there are 32 built-in problems), or name another source by --prompts"
        )
    config = PretrainConfig(
        sampling=SamplingParams(temperature=args.temperature, top_p=args.top_p),
        group_size=args.group_size,
        max_new_tokens=args.new_tokens,
        slots=args.slots,
        vocabulary=args.vocabulary,
        steps=args.steps,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    told = Telling()
    answers = sample_answers(model, train, config, on_progress=told)
    draft = train_draft(model, answers, config, on_progress=told)
    draft.save_pretrained(args.output)
    parameters = sum(weight.numel() for weight in draft.parameters())
    trained = {
        "answers": len(answers),
        "answer_tokens": sum(len(answer.token_ids) for answer in answers),
        "parameters": parameters,
        "seconds": told.seconds(),
        "last_update": told.metrics,
    }
    print(f"wrote {args.output}: {parameters / 1e6:.1f} M parameters", file=sys.stderr, flush=True)
    results = judge(model, draft, held_out, args)
    settings = {**vars(args), "dtype": str(model.dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    report = Report("train_small_draft", settings, "", results)
    print(render(results))
    print(
        f"trained on {trained['answer_tokens']} tokens of {trained['answers']} answers; seconds: {trained['seconds']}"
    )
    report.settings["trained"] = trained
    print(report.json_line(), flush=True)
    return 0


class Telling:
    """Prints progress to stderr every ten seconds, and remembers the time of each stage."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.printed = 0.0
        self.metrics: dict[str, float] = {}

    def __call__(self, now: PretrainProgress) -> None:
        clock = time.perf_counter()
        self.began.setdefault(now.stage, max(self.latest.values(), default=clock))
        self.latest[now.stage] = clock
        self.metrics = now.metrics
        if clock - self.printed > 10 or now.done == now.total:
            self.printed = clock
            numbers = " ".join(f"{name} {value:.3f}" for name, value in now.metrics.items() if name.endswith("1"))
            print(f"  {now.stage} {now.done}/{now.total} {numbers}".rstrip(), file=sys.stderr, flush=True)

    def seconds(self) -> dict[str, float]:
        return {stage: round(self.latest[stage] - began, 1) for stage, began in self.began.items()}


def judge(model: Any, draft: DraftModel, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode the held-out prompts in every way. Tokens are the same whatever is drafted, within a law."""
    law = SamplingParams(temperature=args.temperature, top_p=args.top_p)
    cells = [Cell("greedy", "most likely", DraftProposer, SamplingParams(temperature=0))]
    if args.temperature > 0:
        name = f"temperature {args.temperature:g}, top-p {args.top_p:g}"
        cells += [
            Cell(name, "most likely", MostLikely, law),
            Cell(name, "coupled", DraftProposer, law),
            Cell(name, "coupled, draft at 0.8", lambda draft: DraftProposer(draft, 0.8), law),
        ]
    results = []
    for cell in cells:
        for shape, (depth, width, nodes) in SHAPES.items():
            policy = make_policy("fixed", spec_depth=depth, spec_width=width, spec_nodes=nodes)
            engine = Engine(model, proposer=cell.proposer(draft), policy=policy)
            stats = engine.generate(
                prompts, cell.sampling, max_new_tokens=args.eval_tokens, seed=args.seed, first_uid=1 << 32
            ).stats
            results.append(
                {
                    "engine": "fastgrpo",
                    "policy": "fixed",
                    "law": cell.law,
                    "proposals": cell.proposals,
                    "shape": shape,
                    "rows": len(prompts),
                    "tokens": stats.completion_tokens,
                    "row_passes": sum(stats.live_rows),
                    "tokens_per_target_pass": stats.accept_length,
                    "accepted_share": stats.accepted / max(1, stats.drafted),
                    "tokens_per_s": stats.completion_tokens / stats.total_s,
                    "spread": None,
                }
            )
    return results


def render(results: list[dict[str, Any]]) -> str:
    columns = ("law", "proposals", "shape", "tokens", "row_passes", "tokens_per_target_pass", "accepted_share")
    header = ("law", "proposals", "shape", "tokens", "row passes", "tokens a pass", "accepted share")
    return aligned(header, [[result[column] for column in columns] for result in results])


if __name__ == "__main__":
    sys.exit(main())
