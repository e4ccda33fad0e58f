"""A slow, obvious twin of fastgrpo.speculation.siblings: texts are lists, and what came before is searched for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Path = tuple[int, ...]
DOUBT, OPEN_RATE = 4.0, math.exp(0.5772156649)


@dataclass
class SlowText:
    group: int
    tokens: list[int]  # the prompt's in front of a response's


class SlowSiblings:
    """Prompts, rows and the order in which tokens came."""

    def __init__(self, shortest: int, capacity: int, recent: int):
        self.sizes = [shortest << i for i in range(5)][::-1]
        self.capacity, self.recent = capacity, recent
        self.log: list[tuple[SlowText, int]] = []  # every token: its text, its place there
        self.prompts: list[SlowText] = []
        self.rows: list[SlowText] = []

    def _say(self, text: SlowText, token: int) -> None:
        self.log.append((text, len(text.tokens)))
        text.tokens.append(token)

    def read_prompt(self, tokens: Sequence[int], history: Sequence[Sequence[int]] = ()) -> SlowText:
        prompt = SlowText(len(self.prompts), [])
        self.prompts.append(prompt)
        for token in tokens:
            self._say(prompt, token)
        for response in history:
            text = SlowText(prompt.group, list(tokens))
            for token in response:
                self._say(text, token)
        return prompt

    def admit(self, prompt: SlowText, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.rows.append(SlowText(prompt.group, list(prompt.tokens)))
            self._say(self.rows[-1], token)

    def observe(self, said: Sequence[Sequence[int]]) -> None:
        step = max(self.capacity // len(self.rows), 1)  # what a log can take at once, row after row
        for first in range(0, max(len(tokens) for tokens in said), step):
            for row, tokens in zip(self.rows, said, strict=True):
                for token in tokens[first : first + step]:
                    self._say(row, token)

    def leave(self, row: int) -> None:
        mover = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = mover

    def find(self, row: int, most: int) -> list[tuple[int, SlowText, int]]:
        """(size, text, place of the token behind) of up to `most` matches, longest first, then the latest."""
        text = self.rows[row]
        remembered = self.log[max(len(self.log) - (self.capacity - 1), 0) :][::-1]

        def fits(size: int, other: SlowText, place: int) -> bool:
            long_enough = min(place, len(text.tokens)) >= size
            return long_enough and other.tokens[place - size : place] == text.tokens[-size:]

        found = []
        for i, size in enumerate(self.sizes):
            hits = [(t, p) for t, p in remembered if t.group == text.group and fits(size, t, p)][: self.recent]
            found += [(size, t, p) for t, p in hits if i == 0 or not fits(self.sizes[i - 1], t, p)]
        return found[:most]

    def scores(
        self, row: int, depth: int, width: int, most: int, times: Sequence[Sequence[float]] | None = None
    ) -> dict[Path, float]:
        """Every path of a row's tree with its score; times[depth - 1][token]: when it arrives in the race there."""
        matches = [(size, text.tokens[place : place + depth]) for size, text, place in self.find(row, most)]
        tree: dict[Path, float] = {}

        def visit(path: Path, score: float) -> None:
            at = len(path)
            voters = [(size + at, said[at]) for size, said in matches if len(said) > at and tuple(said[:at]) == path]
            law: dict[int, float] = {}  # in the order in which the matches propose
            left = 1.0
            for size in sorted({size for size, _ in voters}, reverse=True):
                votes = [token for n, token in voters if n == size]
                for token in votes:
                    law[token] = law.get(token, 0.0) + left * size / (size * len(votes) + DOUBT)
                left *= DOUBT / (size * len(votes) + DOUBT)
            rates = {token: q / (times[at][token] if times else 1.0) for token, q in law.items()}
            whole = sum(rates.values()) + left * (OPEN_RATE if times else 1.0)
            for token in sorted(rates, key=lambda token: -rates[token])[:width]:
                tree[*path, token] = score + math.log(rates[token] / whole)
                visit((*path, token), tree[*path, token])

        visit((), 0.0)
        return tree
