"""The main job, small: GRPO teaches SmolLM2-135M sums, differences and products, on a laptop's CPU.

A response earns 1 if its last number is the right result, else 0, and nothing else. Before and after, one response to
each of 200 held-out questions is sampled at the temperature of training. Writes reward.png, demo.json and the
trainer's summary.json into the output folder.

    python examples/demo.py                    # what `make demo` runs
    python examples/demo.py --seed 1 --steps 30 --output runs/longer
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from fastgrpo import Engine, FastGRPOConfig, FastGRPOTrainer, SamplingParams, load_model
from fastgrpo.grpo.data import load_prompts
from fastgrpo.grpo.rewards import number_reward

TASK = (
    "reasoning_gym:basic_arithmetic?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    '&operators=["+","-","*"]&allow_parentheses=false&allow_negation=false&size=160'
)
HELD_OUT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch a small language model get better at arithmetic with GRPO.")
    parser.add_argument("--seed", type=int, default=0, help="of the items, the noise and the order (0)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of 8 prompts x 8 responses (10)")
    parser.add_argument("--max_new_tokens", type=int, default=16, help="limit of every response (16)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for what it writes")
    options = parser.parse_args()
    started = time.perf_counter()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)  # TRL's own use

    prompts = load_prompts(
        TASK, eval_size=HELD_OUT, seed=options.seed, system_prompt="Write the equation with its result."
    )
    model, tokenizer = load_model("smollm2-135m")
    print(prompts.summary())
    before = answer_held_out(model, tokenizer, prompts.eval, options.max_new_tokens, "before")

    trainer = FastGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=number_reward,
        args=training_arguments(options),
        train_dataset=prompts.train,
        callbacks=[OneLineAStep()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    after = answer_held_out(model, tokenizer, prompts.eval, options.max_new_tokens, "after")

    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    options.output.mkdir(parents=True, exist_ok=True)
    picture = plot(rewards, before, after, options.output / "reward.png")
    result = {
        "seed": options.seed,
        "rewards": rewards,
        "reward_rise_p": trend_p(rewards),
        "held_out": len(before),
        "accuracy_before": mean(before),
        "accuracy_after": mean(after),
        "accuracy_rise_p": paired_p(before, after),
        "seconds": time.perf_counter() - started,
        "training": trainer.summary(),
    }
    (options.output / "demo.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    print(f"\n{closing_sentence(result)}\nPlot: {picture}")


def training_arguments(options: argparse.Namespace) -> FastGRPOConfig:
    """What docs/benchmarks.md says was tried: all weights in float32, constant rate, responses of at most 16 tokens."""
    return FastGRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=64,  # 8 prompts x 8 responses a step,
        max_training_token=512,  # updated this many tokens at a time; a prompt counts once for its responses
        num_generations=8,
        max_completion_length=options.max_new_tokens,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,  # OneLineAStep says more in less room
        dataloader_pin_memory=False,
        seed=options.seed,
    )


class OneLineAStep(TrainerCallback):
    """Prints what a person wants to see of a step; everything else is in the trainer's logs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            bar = "#" * round(30 * float(logs["reward"]))
            print(
                f"step {state.global_step:2d}/{state.max_steps}  reward {float(logs['reward']):.2f} |{bar:<30}|  "
                f"{float(logs['completions/mean_length']):4.1f} tokens a response, "
                f"{float(logs['throughput/rollout_tokens_per_s']):3.0f} tokens/s, "
                f"sampling {float(logs['time/rollout']):.1f} s + update {float(logs['time/update']):.1f} s",
                flush=True,
            )


def answer_held_out(model: Any, tokenizer: Any, items: Any, limit: int, when: str) -> list[float]:
    """1 or 0 per held-out item: one sampled response each, with the same noise before and after training."""
    texts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in items["prompt"]]
    rollout = Engine(model).generate(
        tokenizer(texts, add_special_tokens=False)["input_ids"],
        SamplingParams(temperature=1.0),
        max_new_tokens=limit,
        seed=2**40,  # a noise that training never draws
    )
    answers = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in rollout.completions]
    scores = number_reward(prompts=items["prompt"], completions=answers, answer=items["answer"])
    print(f"Held-out accuracy {when} training: {mean(scores):.1%} of {len(scores)}. For example:")
    for message, answer in list(zip(items["prompt"], answers, strict=True))[:3]:
        print(f"    {message[-1]['content']!r} -> {answer!r}")
    return scores


def trend_p(rewards: list[float], draws: int = 20_000) -> float:
    """One-sided permutation test: how often shuffled steps rise from first to last as much as these did."""

    def rise(values: list[float]) -> float:
        middle = (len(values) - 1) / 2
        return sum((step - middle) * value for step, value in enumerate(values))

    chooser, observed, shuffled = random.Random(0), rise(rewards), list(rewards)
    hits = 0
    for _ in range(draws):
        chooser.shuffle(shuffled)
        hits += rise(shuffled) >= observed
    return (hits + 1) / (draws + 1)


def paired_p(before: list[float], after: list[float]) -> float:
    """One-sided exact sign test over the items whose answer changed from wrong to right or back (McNemar)."""
    better = sum(b < a for b, a in zip(before, after, strict=True))
    changed = better + sum(b > a for b, a in zip(before, after, strict=True))
    return sum(math.comb(changed, k) for k in range(better, changed + 1)) / 2**changed


def plot(rewards: list[float], before: list[float], after: list[float], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o", label="mean reward of a step's 64 responses")
    for value, when, style in ((mean(before), "before", ":"), (mean(after), "after", "--")):
        axes.axhline(value, color="gray", linestyle=style, label=f"held-out accuracy {when}: {value:.0%}")
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1), title="GRPO on one-digit arithmetic")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return path.resolve()


def closing_sentence(result: dict[str, Any]) -> str:
    few = min(5, len(result["rewards"]))
    shares = result["training"]["shares"]
    spent = ", ".join(f"{share:.0%} {phase}" for phase, share in shares.items())
    first, last = mean(result["rewards"][:few]), mean(result["rewards"][-few:])
    return (
        f"In {len(result['rewards'])} steps the mean reward went from {first:.2f} (first {few}) to {last:.2f} "
        f"(last {few}; permutation test p = {result['reward_rise_p']:.2g}), and held-out accuracy from "
        f"{result['accuracy_before']:.1%} to {result['accuracy_after']:.1%} of {result['held_out']} "
        f"(paired p = {result['accuracy_rise_p']:.2g}), in {result['seconds'] / 60:.1f} minutes. "
        f"Training time went to: {spent}."
    )


if __name__ == "__main__":
    main()
