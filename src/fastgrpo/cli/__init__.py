"""The `fastgrpo` command: which subcommands there are, and how their errors reach a person.

Each subcommand is a module of this folder with `add_arguments(parser)` and `run(args) -> int`, imported when it is
called for, so that `fastgrpo --help` loads nothing heavy; a module keeps heavy imports inside `run`. A subcommand that
takes flags beyond its parser's (grpo: every field of its config) says `TAKES_OTHER_FLAGS = True` and finds them,
unparsed and in order, in `args.other_flags`; the others refuse an unknown flag with the nearest name.

Exit codes: 0 done; 1 a problem with the user's input or machine, said in one line; 2 a command line that does not
parse; 130 interrupted. Anything else is a bug, of ours or of code that the user brought, and keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import fastgrpo
from fastgrpo.cli.noise import silence_known_noise

COMMANDS = {
    "grpo": "train a policy with GRPO",
    "generate": "sample completions of prompts with the engine",
    "bench": "measure the engine against its baselines",
    "doctor": "show versions, what this machine is fast at, and what is missing",
}

# What a user's input or machine can cause. Other exceptions are somebody's to fix, so their traceback is shown.
USER_ERRORS = (ValueError, OSError, ImportError, NotImplementedError, MemoryError, FloatingPointError)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and ends with one line, without the usage."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def flags(self) -> list[str]:
        """Every long flag, in the order of declaration."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"` for the known name that is close to `name`, else an empty string."""
    # A hyphen for an underscore is the commonest slip, and would count as several differences.
    close = difflib.get_close_matches(name.replace("-", "_"), [k.replace("-", "_") for k in known], n=1, cutoff=0.6)
    by_spelling = {k.replace("-", "_"): k for k in known}
    return f"; did you mean {by_spelling[close[0]]}?" if close else ""


def command_module(name: str) -> ModuleType:
    return importlib.import_module(f"fastgrpo.cli.{name}")


def command_parser(name: str) -> CommandParser:
    """The parser of subcommand `name`, with the flags that all of them share."""
    parser = CommandParser(f"fastgrpo {name}", COMMANDS[name])
    command_module(name).add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def parse_command(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser(name)
    args, others = parser.parse_known_args(argv)
    if getattr(command_module(name), "TAKES_OTHER_FLAGS", False):
        args.other_flags = others
    elif others:
        wrong = others[0].split("=")[0]
        hint = nearest(wrong, parser.flags()) if wrong.startswith("-") else ""
        kind = "unknown flag" if wrong.startswith("-") else "unexpected argument"
        parser.error(f"{kind} {wrong}{hint}")
    return args


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fastgrpo COMMAND [flags]",
            "",
            "GRPO with its own rollout engine.",
            "",
            *lines,
            "",
            "fastgrpo COMMAND --help lists the flags of one; fastgrpo --version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"fastgrpo {fastgrpo.__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        print(
            f"fastgrpo: error: unknown command {name!r}{nearest(name, COMMANDS)} (commands: {', '.join(COMMANDS)})",
            file=sys.stderr,
        )
        return 2
    return run_command(name, argv[1:])


def run_command(name: str, argv: Sequence[str]) -> int:
    wants_traceback = "--traceback" in argv or os.environ.get("FASTGRPO_TRACEBACK", "0") not in ("", "0")
    silence_known_noise()
    try:
        args = parse_command(name, argv)
        return int(command_module(name).run(args))
    except KeyboardInterrupt:
        print(f"\nfastgrpo {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (`| head`): nothing to report, and nothing more may be flushed to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        if wants_traceback or not answers_the_input(error):
            raise
        print(f"fastgrpo: error: {error}", file=sys.stderr)
        return 1


def answers_the_input(error: BaseException) -> bool:
    """Whether `error` says it all in a line: our own code raised it, or a library did while it read what was named.

    Not so where code of the user's own ran (a reward, a callback, a model's code), or where a library raised it in the
    middle of training: the same types mean a bug there, which only a traceback finds.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [(str(frame.f_globals.get("__name__")), frame.f_code.co_name) for frame in frames]
    if any(_is_the_users(Path(frame.f_code.co_filename)) for frame in frames):
        return False
    return names[-1][0].split(".")[0] == "fastgrpo" or ("fastgrpo.grpo.trainer", "train") not in names


def _is_the_users(file: Path) -> bool:
    """Whether this source file is neither ours nor of an installed package nor of Python."""
    if file.name.startswith("<") or {"site-packages", "dist-packages"} & set(file.parts):
        return False
    homes = (Path(fastgrpo.__file__).parent, Path(sysconfig.get_path("stdlib")))
    return not any(file.is_relative_to(home) for home in homes)
