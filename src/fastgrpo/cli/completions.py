"""How `fastgrpo generate` shows completions and progress: text, accepted tokens marked in it, JSON, and one live line.

Nothing is sampled here.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastgrpo.speculation.requests import Completion, Progress, RolloutStats

Mark = Callable[[str], str]


def in_colour(stream: TextIO) -> bool:
    """Whether colours are seen and wanted (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def marker(stream: TextIO) -> Mark:
    """What makes accepted text stand out on a stream: green, or the signs of a word diff where no colour is seen."""
    if in_colour(stream):
        return lambda text: f"\x1b[32m{text}\x1b[0m"
    return lambda text: f"{{+{text}+}}"


def print_text(
    completion: Completion,
    prompts: list[Any],
    group: int,
    tokenizer: PreTrainedTokenizerBase,
    mark: Mark | None = None,
) -> None:
    """The text; under a heading where there is more than one, because they arrive in the order in which they end.

    mark: makes what was drafted and accepted stand out; None shows plain text.
    """
    if len(prompts) * group > 1:
        prompt, response = divmod(completion.index, group)
        which = f"prompt {prompt + 1}, response {response + 1}" if group > 1 else f"prompt {prompt + 1}"
        passes = f" in {len(completion.blocks)} passes" if mark else ""
        print(f"--- {which} ({len(completion.token_ids)} tokens{passes}, {completion.finish_reason})")
    if mark is None:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    else:
        stretches = in_stretches(completion, tokenizer)
        text = "".join(mark(part) if accepted else part for part, accepted in stretches)
    print(text, flush=True)


def in_stretches(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The text in pieces, and of each whether its tokens were drafted and accepted; joined, it is the whole text.

    A character whose bytes several tokens share belongs to the piece of the last of them.
    """

    def decoded(count: int) -> str:
        return tokenizer.decode(completion.token_ids[:count], skip_special_tokens=True)

    whole = decoded(len(completion.token_ids))
    pieces, count, begin = [], 0, 0
    for accepted, tokens in itertools.groupby(completion.from_draft):
        count += len(list(tokens))
        # decoded with what stands before them, since alone they may lose a space; half a character ends in U+FFFD
        end = max(begin, len(decoded(count).rstrip("\N{REPLACEMENT CHARACTER}")))
        if count == len(completion.token_ids):
            end = len(whole)
        if whole[begin:end]:
            pieces.append((whole[begin:end], accepted))
        begin = end
    return pieces


def print_json(completion: Completion, prompts: list[Any], group: int, tokenizer: PreTrainedTokenizerBase) -> None:
    record = {
        "index": completion.index,
        "prompt": prompts[completion.index // group],
        "completion": tokenizer.decode(completion.token_ids, skip_special_tokens=True),
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "rounds": completion.rounds,
        "drafted": completion.drafted,
        "accepted": completion.accepted,
        "blocks": completion.blocks,
    }
    print(json.dumps(record, ensure_ascii=False), flush=True)


def closing_line(count: int, stats: RolloutStats) -> str:
    rate = stats.completion_tokens / stats.total_s if stats.total_s > 0 else 0.0
    what = "completion" if count == 1 else "completions"
    drafts = ""
    if stats.accept_length is not None:
        drafts = (
            f", accept length {stats.accept_length:.2f}: {stats.accepted} of {stats.drafted} drafted tokens accepted, "
            f"drafting {stats.draft_s:.1f} s"
        )
    return (
        f"{count} {what}, {stats.completion_tokens} tokens in {stats.total_s:.1f} s: {rate:.1f} tokens/s "
        f"({stats.passes} passes{drafts}; prefill of {stats.prompt_tokens} tokens {stats.prefill_s:.1f} s)"
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
        gained = "" if progress.accept_length is None else f", accept length {progress.accept_length:.2f}"
        self.stream.write(
            f"\r\x1b[K[{'#' * done}{'.' * (20 - done)}] {progress.rows_done}/{progress.rows_total} rows, "
            f"{progress.tokens} tokens, {rate:.1f} tokens/s{gained}"
        )
        self.stream.flush()

    def clear(self) -> None:
        """Wipe the line, so that what is printed next starts at its beginning."""
        if self.on_screen:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self.on_screen = False
            self.drawn_at = float("-inf")
