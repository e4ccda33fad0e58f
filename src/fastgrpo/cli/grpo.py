"""`fastgrpo grpo`: a GRPO run from a YAML file and flags. Flags win over the file, the file over the defaults.

Keys and flags are the fields of RunArguments (model, data, rewards, adapter), which are this file's, and all fields of
FastGRPOConfig. Here names become objects; training itself is FastGRPOTrainer's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

from fastgrpo.cli import nearest

if TYPE_CHECKING:
    from fastgrpo.config import FastGRPOConfig
    from fastgrpo.grpo.data import PromptSet

TAKES_OTHER_FLAGS = True  # every field of FastGRPOConfig; listing them in the parser would cost the import of TRL

RESOLVED_FILE = "resolved_config.yaml"
SKIPPED_FILE = "skipped_rows.json"
_SECRETS = ("hub_token", "push_to_hub_token")
# TRL derives the first from the second and then refuses both together, so a resolved config keeps one.
_DERIVED = ("generation_batch_size",)


def _says(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(kw_only=True)
class RunArguments:
    """What a run needs besides FastGRPOConfig. Names that TRL's command line has are spelled as there."""

    model_name_or_path: str = field(
        default="", metadata=_says("hub id, local folder, .gguf file, smollm2-135m or gemma3-270m (required)")
    )
    model_revision: str | None = field(default=None, metadata=_says("branch, tag or commit of a hub id"))
    dtype: str = field(
        default="float32", metadata=_says("precision of the trained weights: float32, bfloat16, float16 or auto")
    )
    dataset_name: str = field(
        default="", metadata=_says("gsm8k, a file, a folder, a hub id, or reasoning_gym:<task>?size=.. (required)")
    )
    dataset_config: str | None = field(default=None, metadata=_says("configuration of a hub dataset"))
    dataset_split: str = field(default="train", metadata=_says("split to train on"))
    eval_size: float = field(default=0, metadata=_says("evaluation rows: a number, or a fraction below 1"))
    eval_split: str | None = field(default=None, metadata=_says("take the evaluation rows from this split"))
    prompt_column: str | None = field(default=None, metadata=_says("column of the question (unset: found by name)"))
    answer_column: str | None = field(default=None, metadata=_says("column of the gold answer (unset: found by name)"))
    answers: str = field(default="math", metadata=_says("what gold answers are: math, text or none"))
    system_prompt: str | None = field(default=None, metadata=_says("a system message in front of every prompt"))
    template: str | None = field(default=None, metadata=_says("text with {question}, or published"))
    dataset_fraction: float = field(default=1.0, metadata=_says("keep this random share of the rows"))
    dataset_limit: int | None = field(default=None, metadata=_says("at most this many training rows"))
    data_dir: str = field(default="data", metadata=_says("folder of the published data sets"))
    reward_funcs: list[str] | None = field(
        default=None, metadata=_says("accuracy, format, number, reasoning_gym, or module:function (required)")
    )
    use_peft: bool = field(default=False, metadata=_says("train a LoRA adapter instead of all weights"))
    lora_r: int = field(default=16, metadata=_says("rank of the adapter"))
    lora_alpha: int = field(default=32, metadata=_says("scale of the adapter"))
    lora_dropout: float = field(
        default=0.0, metadata=_says("dropout in the adapter; rollouts never drop, so above 0 the loss sees another law")
    )
    lora_target_modules: list[str] | None = field(
        default=None, metadata=_says("modules that get an adapter (unset: every linear layer but the head)")
    )

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "dataset_name", "reward_funcs"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing. Give --{name} or put it into the file of --config.")
        if not self.use_peft:
            for f in dataclasses.fields(self):
                if f.name.startswith("lora_") and getattr(self, f.name) != f.default:
                    raise ValueError(
                        f"{f.name}={getattr(self, f.name)!r} has no effect without use_peft. Set use_peft."
                    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Every field of FastGRPOConfig, that is of TRL's GRPOConfig and transformers' TrainingArguments, is a flag and "
        "a key of the file as well: --learning_rate 1e-5 --num_generations 8 --max_completion_length 256. Added here: "
        "--rollout_slots, --rollout_dtype, --rollout_correction_cap; for rewards --reward_workers, --reward_timeout, "
        "--reward_retries; for updates --max_training_token and --max_training_padding_gap; for speculation "
        "--draft_model, --spec_policy and what the policies can be told, such as --spec_depth or "
        "--verification_capacity."
    )
    parser.add_argument("--config", type=Path, default=argparse.SUPPRESS, help="YAML file of keys and values")
    for f in dataclasses.fields(RunArguments):
        kind, many = _kind(f.name)
        options: dict[str, Any] = {"type": _boolean if kind is bool else kind}
        if many:
            options["nargs"] = "+"
        elif kind is bool:
            options.update(nargs="?", const=True)
        shown = "" if f.default in (None, "") else f" ({f.default})"
        # no default here: only what was typed may win over the file
        parser.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=f.metadata["help"] + shown, **options)


def run(args: argparse.Namespace) -> int:
    ours, config = resolve(args)
    from fastgrpo.grpo.rewards import load_reward
    from fastgrpo.grpo.trainer import FastGRPOTrainer
    from fastgrpo.models.loading import load_model

    rewards = [load_reward(name) for name in ours.reward_funcs or []]
    model, tokenizer = load_model(
        ours.model_name_or_path,
        dtype=ours.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        revision=ours.model_revision,
    )
    prompts = read_prompts(ours, config, model, tokenizer)
    if config.eval_strategy != "no" and prompts.eval is None:
        raise ValueError(f"eval_strategy={config.eval_strategy!s} needs evaluation rows. Set eval_size or eval_split.")
    if config.process_index == 0:
        write_records(Path(config.output_dir), ours, config, prompts)
        print(prompts.summary(), flush=True)
    trainer = FastGRPOTrainer(
        model,
        rewards,
        config,
        prompts.train,
        prompts.eval,
        processing_class=tokenizer,
        peft_config=adapter(ours),
    )
    resume = config.resume_from_checkpoint
    trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
    trainer.save_model(config.output_dir)
    trainer.accelerator.print(closing_lines(trainer.summary(), config.output_dir))
    trainer.end()
    return 0


def read_prompts(ours: RunArguments, config: FastGRPOConfig, model: Any, tokenizer: Any) -> PromptSet:
    """The rows that this model can be trained on; what is left out is listed in the result."""
    from fastgrpo.grpo.data import check_prompt_lengths, load_prompts

    prompts = load_prompts(
        ours.dataset_name,
        split=ours.dataset_split,
        config=ours.dataset_config,
        eval_size=int(ours.eval_size) if ours.eval_size >= 1 else ours.eval_size,
        eval_split=ours.eval_split,
        prompt_column=ours.prompt_column,
        answer_column=ours.answer_column,
        answers=ours.answers,  # type: ignore[arg-type]  # load_prompts refuses another value by name
        system_prompt=ours.system_prompt,
        template=ours.template,
        conversational=tokenizer.chat_template is not None,
        fraction=ours.dataset_fraction,
        limit=ours.dataset_limit,
        seed=config.seed,
        data_dir=ours.data_dir,
    )
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return prompts
    parts, skipped = {}, list(prompts.skipped)
    for name, rows in (("train", prompts.train), ("eval", prompts.eval)):
        if rows is not None:
            parts[name], long = check_prompt_lengths(
                rows, tokenizer, context, chat_template_kwargs=config.chat_template_kwargs
            )
            skipped += long
    return dataclasses.replace(prompts, **parts, skipped=skipped)


def adapter(ours: RunArguments) -> Any:
    """The LoRA configuration, or None for training all weights."""
    if not ours.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=ours.lora_r,
        lora_alpha=ours.lora_alpha,
        lora_dropout=ours.lora_dropout,
        target_modules=ours.lora_target_modules or "all-linear",
    )


# From flags and a file to values


def resolve(args: argparse.Namespace) -> tuple[RunArguments, FastGRPOConfig]:
    """The run's arguments and config: defaults, then the file, then the flags. Exits with 2 for an unknown name."""
    from transformers import HfArgumentParser

    from fastgrpo.config import FastGRPOConfig, unknown_name_message

    ours = {f.name for f in dataclasses.fields(RunArguments)}
    theirs = {f.name for f in dataclasses.fields(FastGRPOConfig) if f.init}
    file = read_config(args.config) if hasattr(args, "config") else {}
    for name in file:
        if name not in ours | theirs:
            usage_error(f"{args.config}: {unknown_name_message(name, sorted(ours | theirs), 'key of fastgrpo grpo')}")

    class FieldParser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            usage_error(message)

    parser = FieldParser(FastGRPOConfig, allow_abbrev=False, add_help=False)
    for action in parser._actions:
        if action.dest in file:
            action.default, action.required = _checked_theirs(action, file[action.dest], args.config), False
    values, others = parser.parse_known_args(args.other_flags)
    if others:
        wrong = others[0].split("=")[0]
        known = [f"--{name}" for name in sorted(ours | theirs | {"config"})]
        usage_error(f"unknown flag {wrong}{nearest(wrong, known)}" if wrong[:1] == "-" else f"unexpected {wrong!r}")
    given = {name: _checked_ours(name, file[name], args.config) for name in ours & file.keys()}
    given |= {name: getattr(args, name) for name in ours if hasattr(args, name)}
    return RunArguments(**given), FastGRPOConfig(**vars(values))


def read_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of keys to values, and holds {type(values).__name__}.")
    return values


def usage_error(message: str) -> NoReturn:
    print(f"fastgrpo grpo: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _kind(name: str) -> tuple[type, bool]:
    """The type of a field of RunArguments, and whether it takes several values."""
    hint = get_type_hints(RunArguments)[name]
    plain = [part for part in get_args(hint) or (hint,) if part is not type(None)]
    if plain == [list[str]] or hint == list[str]:
        return str, True
    return plain[0], False


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _checked_ours(name: str, value: Any, path: Path) -> Any:
    kind, many = _kind(name)
    if value is None or (many and isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    if many and isinstance(value, str):
        return [value]
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    wanted = f"a list of {kind.__name__}" if many else kind.__name__
    raise ValueError(f"{path}: {name} is {value!r}, and must be {wanted}.")


def _checked_theirs(action: argparse.Action, value: Any, path: Path) -> Any:
    """A value of the file for a field of FastGRPOConfig: argparse converts text only, and takes the rest unseen."""
    if action.type is int and isinstance(value, float | bool):
        raise ValueError(f"{path}: {action.dest} is {value!r}, and must be an integer.")
    if action.type is float and isinstance(value, bool | list | dict):
        raise ValueError(f"{path}: {action.dest} is {value!r}, and must be a number.")
    return value


# What a run leaves besides the model


def write_records(folder: Path, ours: RunArguments, config: FastGRPOConfig, prompts: PromptSet) -> None:
    """The resolved config, which `--config` reads again, and the rows of the data set that are not used."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    kept = {f.name for f in dataclasses.fields(config) if f.init} - {*_SECRETS, *_DERIVED}
    settings = {name: value for name, value in config.to_dict().items() if name in kept and value is not None}
    resolved = {**dataclasses.asdict(ours), **settings}
    (folder / RESOLVED_FILE).write_text(yaml.safe_dump(resolved, sort_keys=True), encoding="utf-8")
    if prompts.skipped:
        rows = [dataclasses.asdict(row) for row in prompts.skipped]
        (folder / SKIPPED_FILE).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def closing_lines(summary: dict[str, Any], folder: str) -> str:
    """What a person wants to know at the end of a run; everything else is in summary.json."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in summary["shares"].items())
    lines = [f"{summary['steps']} steps in {summary['seconds']['run']:,.0f} s. Time of a step: {shares}."]
    if summary["ceiling_of_faster_sampling"] is not None:
        ceiling = summary["ceiling_of_faster_sampling"]
        lines.append(f"Infinitely fast sampling would make these steps {ceiling:.2f} times as fast, no more.")
    if (drafting := summary.get("speculation", {})).get("drafted"):
        lines.append(
            f"With drafts a response gained {drafting['tokens_per_target_forward']:.2f} tokens in a pass of the model; "
            f"{drafting['acceptance_rate']:.0%} of the drafted tokens were accepted."
        )
    if summary["reward"]["first"] is not None:
        first, last = summary["reward"]["first"], summary["reward"]["last"]
        lines.append(f"Mean reward of the first generation {first:.3f}, of the last {last:.3f}.")
    return "\n".join([*lines, f"Model and summary.json are in {folder}"])
