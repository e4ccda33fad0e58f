"""`fastgrpo generate`: sample completions of prompts with the engine, with or without a draft, printed as they finish.

Completions go to standard output, everything else (progress, notes, the closing line with tokens per second) to
standard error, so that `--json` can be piped. How either looks is in completions.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgrpo.cli.completions import ProgressLine, closing_line, in_colour, marker, print_json, print_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastgrpo.speculation.generate import SpeculativeModel
    from fastgrpo.speculation.policy import Policy
    from fastgrpo.speculation.requests import Completion

# The policies' knobs that are flags, each with what it says; the others keep their published values.
KNOBS = {
    "verification_capacity": "paper: tokens of a target pass, over all rows, before it takes longer (160)",
    "max_draft_token_length": "paper: most levels of a tree (5)",
    "max_draft_k": "paper: most children of a node (8)",
    "spec_depth": "fixed, threshold: levels (3)",
    "spec_width": "fixed, threshold: children of a node (1: a chain)",
    "spec_nodes": "fixed, threshold: drafted tokens of a row that are verified (all)",
    "spec_threshold_rows": "threshold: most live rows with drafts (32)",
}


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
    parser.add_argument("--draft", type=Path, metavar="FOLDER", help="speculate with this draft model; same tokens")
    parser.add_argument("--policy", help="how much to draft: paper, threshold, fixed or off (paper)")
    for knob, about in KNOBS.items():
        parser.add_argument(f"--{knob}", type=int, metavar="N", help=about)
    parser.add_argument(
        "--show-accepted", "--show_accepted", action="store_true", help="mark the drafted tokens that were accepted"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")


def run(args: argparse.Namespace) -> int:
    prompts = gather_prompts(args.prompts, args.prompt_file)
    if args.num_generations < 1:
        raise ValueError(f"--num_generations is {args.num_generations}; give at least 1")
    policy = choose_policy(args)

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
        disable_progress_bar()  # where tqdm was imported before the command could tell it
    model, tokenizer = load_model(args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    if not args.raw and not tokenizer.chat_template:
        print(f"fastgrpo generate: {args.model} has no chat template; prompts are given as they are", file=sys.stderr)
    pair = load_draft(args.draft, model) if args.draft is not None else None
    prompt_ids = [encode_prompt(prompt, tokenizer, raw=args.raw) for prompt in prompts]

    bar = ProgressLine(sys.stderr)
    mark = marker(sys.stdout) if args.show_accepted else None
    if mark is not None:
        look = "are green" if in_colour(sys.stdout) else f"look {mark('so')}"
        print(f"fastgrpo generate: tokens that were drafted and accepted {look}", file=sys.stderr)

    def on_completion(completion: Completion) -> None:
        bar.clear()
        if args.json:
            print_json(completion, prompts, args.num_generations, tokenizer)
        else:
            print_text(completion, prompts, args.num_generations, tokenizer, mark)

    proposer = pair.proposer(sampling) if pair else None
    try:
        rollout = Engine(model, slots=args.slots, proposer=proposer, policy=policy).generate(
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


def choose_policy(args: argparse.Namespace) -> Policy | None:
    """The policy that the flags ask for, None without a draft. Flags that would do nothing are refused."""
    knobs = {knob: value for knob in KNOBS if (value := getattr(args, knob)) is not None}
    if args.draft is None:
        idle = ["--policy"] * (args.policy is not None) + [f"--{knob}" for knob in knobs]
        if args.show_accepted:
            idle.append("--show-accepted")
        if idle:
            flags, them = ", ".join(idle), "it" if len(idle) == 1 else "them"
            raise ValueError(f"nobody drafts, so {flags} would do nothing: add --draft FOLDER, or leave {them} out")
        return None
    if args.show_accepted and args.json:
        raise ValueError("--show-accepted marks text, and --json prints none: leave one out (`blocks` says the same)")

    from fastgrpo.speculation.policy import make_policy

    name = args.policy or "paper"
    policy = make_policy(name, **knobs)
    for knob in knobs:
        if not hasattr(policy, knob):
            raise ValueError(f"--{knob} is no knob of the policy {name!r}: leave it out, or choose another --policy")
    return policy


def load_draft(folder: Path, model: PreTrainedModel) -> SpeculativeModel:
    """The draft in `folder`, in the precision and on the device of the target."""
    from fastgrpo import DraftModel, SpeculativeModel

    if not (folder / "config.json").is_file():
        raise ValueError(f"--draft {folder} holds no draft: give the folder that DraftModel.save_pretrained wrote")
    draft = DraftModel.from_pretrained(folder, dtype=model.dtype).to(model.device)
    return SpeculativeModel(model, draft)


def gather_prompts(given: list[str], file: Path | None) -> list[Any]:
    """The prompts of the command line, then those of the file: each a text, or a list of chat messages."""
    prompts: list[Any] = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt_file {file} is not UTF-8 ({error}); convert it") from error
        if file.suffix == ".jsonl":
            prompts += [prompt_of_json(line, f"{file}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
        else:
            prompts += [line for line in lines if line.strip()]
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; give it some text or leave it out")
        try:
            json.dumps(prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt {number} holds bytes or halves of characters that are no text: {error}"
            ) from error
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
