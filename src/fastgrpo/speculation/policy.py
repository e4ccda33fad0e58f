"""How many tokens to draft for the rows that are live now, or none: the policies `paper`, `threshold`, `fixed`, `off`.

A policy sees the number of live rows and answers with the shape of a draft; it never changes what is emitted, only how
fast. It knows no model and no tensors. Knobs carry the published names.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from fastgrpo.speculation.requests import whole_number


@dataclass(frozen=True)
class DraftShape:
    """What to draft for every live row.

    depth: levels that the draft runs. width: beams a level, and children of each beam. nodes: how many drafted nodes
    the target sees, the root not counted. Raises ValueError for less than 1.
    """

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            _at_least_one(f"{name} of a draft shape", getattr(self, name), "answer None to decode plainly")


class Policy(Protocol):
    """Chooses before every round, and may learn from every round."""

    def choose(self, live_rows: int) -> DraftShape | None:
        """The draft for `live_rows` >= 1 rows; None is plain decoding."""

    def observe(self, shape: DraftShape | None, counts: Sequence[int], seconds: float) -> None:
        """What came of a choice: the tokens that each live row emitted, before any were cut, and the round's time."""


def candidates(depth: int, width: int) -> int:
    """How many nodes a draft makes to choose from: `width` for the root, then `width` for each of `width` beams."""
    return width + width * width * (depth - 1)


class _Unlearning:
    """A policy that is a rule: rounds teach it nothing."""

    def observe(self, shape: DraftShape | None, counts: Sequence[int], seconds: float) -> None:
        """Nothing to do."""


@dataclass(frozen=True, kw_only=True)
class PaperPolicy(_Unlearning):
    """The published rule: the fewer rows are live, the larger their trees, a pass taking about the same all the time.

    verification_capacity: tokens of a target pass before it takes longer, over all rows. max_verification_num: most
    tokens that the target sees of one row, the root included. min_draft_token_length, max_draft_token_length: levels.
    max_draft_k: most children of a node. draft_token_length_c: the better the draft, the smaller.
    Differs from the published code where that breaks or wastes: plain decoding when only the root has room, no more
    nodes than there are candidates, and no level that the nodes cannot reach.
    """

    verification_capacity: int = 160
    max_draft_token_length: int = 5
    max_draft_k: int = 8
    max_verification_num: int = 160
    min_draft_token_length: int = 3
    draft_token_length_c: float = 0.75

    def __post_init__(self) -> None:
        for name, remedy in (
            ("verification_capacity", "give the tokens of a target pass before it slows down (published: 160)"),
            ("max_verification_num", "give the most tokens of one row in a pass (published: 160)"),
            ("max_draft_k", "give the most children of a node (published: 8)"),
            ("min_draft_token_length", "give the fewest levels (published: 3), or choose the policy 'off'"),
            ("max_draft_token_length", "give the most levels (published: 5), or choose the policy 'off'"),
        ):
            _at_least_one(name, getattr(self, name), remedy)
        if self.min_draft_token_length > self.max_draft_token_length:
            raise ValueError(
                f"min_draft_token_length is {self.min_draft_token_length} and max_draft_token_length is "
                f"{self.max_draft_token_length}, but the least cannot exceed the most: lower one or raise the other."
            )
        c = self.draft_token_length_c
        if isinstance(c, bool) or not isinstance(c, int | float) or not (math.isfinite(c) and c > 0):
            raise ValueError(
                f"draft_token_length_c is {c!r}, but must be finite and > 0: use the published 0.75, less for a draft "
                "that is often right."
            )

    def choose(self, live_rows: int) -> DraftShape | None:
        seen = min(self.verification_capacity // live_rows, self.max_verification_num)  # root included
        if seen < 2:
            return None
        levels = math.floor(math.log2(seen / self.draft_token_length_c))
        levels = max(min(levels, self.max_draft_token_length), self.min_draft_token_length)
        width = min(seen - 1, self.max_draft_k)
        nodes = min(seen - 1, candidates(levels, width))
        return DraftShape(depth=min(levels, nodes), width=width, nodes=nodes)


@dataclass(frozen=True, kw_only=True)
class FixedPolicy(_Unlearning):
    """The same draft always, by default a chain of 3.

    spec_depth: levels. spec_width: beams a level and children of each, 1 is a chain. spec_nodes: how many of the
    candidates the target sees (default: all).
    """

    spec_depth: int = 3
    spec_width: int = 1
    spec_nodes: int | None = None

    def __post_init__(self) -> None:
        _at_least_one("spec_depth", self.spec_depth, "give the levels to draft, or choose the policy 'off'")
        _at_least_one("spec_width", self.spec_width, "give the children of a node, 1 for a chain")
        most = candidates(self.spec_depth, self.spec_width)
        if self.spec_nodes is None:
            return
        _at_least_one("spec_nodes", self.spec_nodes, "give the drafted tokens to verify, or choose the policy 'off'")
        if self.spec_nodes > most:
            raise ValueError(
                f"spec_nodes is {self.spec_nodes}, but a draft of depth {self.spec_depth} and width {self.spec_width} "
                f"has {most} candidates: lower it to {most}, leave it out to verify them all, or draft more."
            )

    def choose(self, live_rows: int) -> DraftShape | None:
        nodes = self.spec_nodes or candidates(self.spec_depth, self.spec_width)
        return DraftShape(depth=min(self.spec_depth, nodes), width=self.spec_width, nodes=nodes)


@dataclass(frozen=True, kw_only=True)
class ThresholdPolicy(FixedPolicy):
    """A fixed draft while at most `spec_threshold_rows` rows are live, plain decoding above."""

    spec_threshold_rows: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one("spec_threshold_rows", self.spec_threshold_rows, "for no speculation choose the policy 'off'")

    def choose(self, live_rows: int) -> DraftShape | None:
        return super().choose(live_rows) if live_rows <= self.spec_threshold_rows else None


@dataclass(frozen=True, kw_only=True)
class OffPolicy(_Unlearning):
    """Plain decoding always."""

    def choose(self, live_rows: int) -> DraftShape | None:
        return None


_POLICIES: dict[str, type[PaperPolicy] | type[FixedPolicy] | type[OffPolicy]] = {
    "paper": PaperPolicy,
    "threshold": ThresholdPolicy,
    "fixed": FixedPolicy,
    "off": OffPolicy,
}
_KNOBS = {name: [knob.name for knob in fields(policy)] for name, policy in _POLICIES.items()}


def make_policy(name: str, **knobs: Any) -> Policy:
    """The policy called `name` with these knobs; others keep their published defaults.

    Every policy's knobs are accepted, so that one call serves all names; each policy reads, and checks, its own.
    Raises ValueError for an unknown name or knob, with the nearest known one, and for a value that cannot be.
    """
    if name not in _POLICIES:
        raise ValueError(f"{name!r} is no policy:{_nearest(name, _POLICIES)} the policies are {', '.join(_POLICIES)}.")
    known = dict.fromkeys(knob for names in _KNOBS.values() for knob in names)
    for knob in knobs:
        if knob not in known:
            raise ValueError(
                f"{knob!r} is no knob of a policy:{_nearest(knob, known)} the knobs are {', '.join(known)}."
            )
    return _POLICIES[name](**{knob: knobs[knob] for knob in _KNOBS[name] if knob in knobs})


def _nearest(name: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f" did you mean {close[0]!r}?" if close else ""


def _at_least_one(name: str, value: Any, remedy: str) -> None:
    try:
        whole_number(name, value, at_least=1)
    except ValueError as error:
        raise ValueError(f"{str(error).removesuffix('.')}: {remedy}.") from None
