"""`fastgrpo generate`: sample completions of prompts with the engine, printed as they finish.

Completions go to standard output, everything else (progress, notes, the closing line with tokens per second) to
standard error, so that `--json` can be piped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastgrpo.speculation.requests import Completion, Progress, RolloutStats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="one or more prompts")
    parser.add_argument("--model", required=True, help="hub id, local folder, .gguf file, smollm2-135m or gemma3-270m")
    parser.add_argument(
        "--prompt_file", type=Path, help="more prompts: one a line, or .jsonl with a `prompt` (text or messages) a line"
    )
    parser.add_argument("--num_generations", type=int, default=1, metavar="G", help="completions per prompt (1)")
    parser.add_argument("--max_new_tokens", type=int, default=512, metavar="N", help="length limit (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (%(default)s)")
    parser.add_argument("--top_k", type=int, default=0, help="keep the k likeliest tokens; 0 is off (%(default)s)")
    parser.add_argument("--top_p", type=float, default=1.0, help="keep this much probability; 1 is off (%(default)s)")
    parser.add_argument(
        "--min_p",
        type=float,
        default=0.0,
        help="drop what is below this share of the likeliest; 0 is off (%(default)s)",
    )
    parser.add_argument("--repetition_penalty", type=float, default=1.0, help="1 is off (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same tokens (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (%(default)s)")
    parser.add_argument("--slots", type=int, help="rows decoded at once; the rest wait (as many as fit)")
    parser.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object a completion")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")


def run(args: argparse.Namespace) -> int:
    prompts = gather_prompts(args.prompts, args.prompt_file)
    if args.num_generations < 1:
        raise ValueError(f"--num_generations is {args.num_generations}; give at least 1")

    from transformers.utils.logging import disable_progress_bar

    from fastgrpo import Engine, SamplingParams, load_model

    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading weights
    model, tokenizer = load_model(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    if not args.raw and not tokenizer.chat_template:
        print(f"fastgrpo generate: {args.model} has no chat template; prompts are given as they are", file=sys.stderr)
    prompt_ids = [encode_prompt(prompt, tokenizer, raw=args.raw) for prompt in prompts]

    bar = ProgressLine(sys.stderr)
    show = print_json if args.json else print_text

    def on_completion(completion: Completion) -> None:
        bar.clear()
        show(completion, prompts, args.num_generations, tokenizer)

    try:
        rollout = Engine(model, slots=args.slots).generate(
            prompt_ids,
            sampling,
            group_size=args.num_generations,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            on_completion=on_completion,
            on_round=bar.update,
        )
    finally:
        bar.clear()
    print(closing_line(len(rollout.completions), rollout.stats), file=sys.stderr)
    return 0


def gather_prompts(given: list[str], file: Path | None) -> list[Any]:
    """The prompts of the command line, then those of the file: each a text, or a list of chat messages."""
    prompts: list[Any] = list(given)
    if file is not None:
        lines = file.read_text(encoding="utf-8").splitlines()
        if file.suffix == ".jsonl":
            prompts += [prompt_of_json(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
        else:
            prompts += [line for line in lines if line.strip()]
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; give it some text or leave it out")
    if not prompts:
        raise ValueError('no prompt: write one after the flags ("2 + 2 = ?") or name a file with --prompt_file')
    return prompts


def prompt_of_json(line: str, place: str) -> Any:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{place}: needs a JSON object with a "prompt", found {line[:60]!r}') from error
    messages = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not (isinstance(prompt, str) or messages):
        raise ValueError(
            f'{place}: "prompt" must be a text or a list of {{role, content}} messages, found {prompt!r:.60}'
        )
    return prompt


def encode_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase, *, raw: bool) -> list[int]:
    """Token ids of a prompt, through the chat template where there is one and `raw` does not forbid it."""
    if raw or not tokenizer.chat_template:
        if not isinstance(prompt, str):
            raise ValueError("a prompt of chat messages needs a chat template: drop --raw, or use a chat model")
        ids = tokenizer(prompt)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template wrote the special tokens
    if not ids:
        raise ValueError(f"prompt {prompt!r:.60} has no tokens; give it some text")
    return list(ids)


def print_text(completion: Completion, prompts: list[Any], group: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """The text; under a heading where there is more than one, because they arrive in the order in which they end."""
    if len(prompts) * group > 1:
        prompt, response = divmod(completion.index, group)
        which = f"prompt {prompt + 1}, response {response + 1}" if group > 1 else f"prompt {prompt + 1}"
        print(f"--- {which} ({len(completion.token_ids)} tokens, {completion.finish_reason})")
    print(tokenizer.decode(completion.token_ids, skip_special_tokens=True), flush=True)


def print_json(completion: Completion, prompts: list[Any], group: int, tokenizer: PreTrainedTokenizerBase) -> None:
    record = {
        "index": completion.index,
        "prompt": prompts[completion.index // group],
        "completion": tokenizer.decode(completion.token_ids, skip_special_tokens=True),
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }
    print(json.dumps(record, ensure_ascii=False), flush=True)


def closing_line(count: int, stats: RolloutStats) -> str:
    rate = stats.completion_tokens / stats.total_s if stats.total_s > 0 else 0.0
    what = "completion" if count == 1 else "completions"
    return (
        f"{count} {what}, {stats.completion_tokens} tokens in {stats.total_s:.1f} s: {rate:.1f} tokens/s "
        f"({stats.passes} passes; prefill of {stats.prompt_tokens} tokens {stats.prefill_s:.1f} s)"
    )


class ProgressLine:
    """One line on a terminal that is rewritten in place; silent where the stream is no terminal."""

    REDRAW_S = 0.1

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.clock = clock
        self.live = stream.isatty()
        self.drawn_at = float("-inf")
        self.on_screen = False

    def update(self, progress: Progress) -> None:
        if not self.live or self.clock() - self.drawn_at < self.REDRAW_S:
            return
        self.drawn_at = self.clock()
        self.on_screen = True
        done = 20 * progress.rows_done // max(progress.rows_total, 1)
        rate = progress.tokens / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
        self.stream.write(
            f"\r\x1b[K[{'#' * done}{'.' * (20 - done)}] {progress.rows_done}/{progress.rows_total} rows, "
            f"{progress.tokens} tokens, {rate:.1f} tokens/s"
        )
        self.stream.flush()

    def clear(self) -> None:
        """Wipe the line, so that what is printed next starts at its beginning."""
        if self.on_screen:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.on_screen = False
            self.drawn_at = float("-inf")
