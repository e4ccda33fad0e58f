"""The policies: `paper` by the published table and an independent formula, the others by their rule, knobs checked."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgrpo.speculation.policy import DraftShape, Policy, candidates, make_policy

# The published table for the default knobs: live rows -> tokens in the pass (root included), levels before the clamp to
# the nodes (None where the table does not repeat them), children of a node, drafted nodes.
TABLE: dict[int, tuple[int, int | None, int, int]] = {
    1: (160, 5, 8, 159),
    2: (80, None, 8, 79),
    4: (40, None, 8, 39),
    6: (26, 5, 8, 25),
    7: (22, 4, 8, 21),
    8: (20, None, 8, 19),
    10: (16, None, 8, 15),
    13: (12, 4, 8, 11),
    14: (11, 3, 8, 10),
    16: (10, None, 8, 9),
    17: (9, None, 8, 8),
    18: (8, None, 7, 7),
    19: (8, None, 7, 7),
    20: (8, None, 7, 7),
    26: (6, None, 5, 5),
    32: (5, 3, 4, 4),
    40: (4, None, 3, 3),
    53: (3, None, 2, 2),
    **dict.fromkeys(range(54, 81), (2, None, 1, 1)),
}


@dataclass(frozen=True)
class PublishedRule:
    """The rule counted out instead of computed: no logarithm, no division."""

    capacity: int = 160
    most_levels: int = 5
    most_children: int = 8
    most_seen: int = 160
    least_levels: int = 3
    c: float = 0.75

    def seen(self, rows: int) -> int:
        return max(seen for seen in range(self.most_seen + 1) if seen * rows <= self.capacity)

    def levels(self, seen: int) -> int:
        fitting = [level for level in range(-40, self.most_levels + 1) if self.c * 2.0**level <= seen]
        return max([self.least_levels, *fitting])

    def shape(self, rows: int) -> DraftShape | None:
        seen = self.seen(rows)
        if seen <= 1:
            return None
        children = sorted([seen - 1, self.most_children])[0]
        made = children  # by the root's level, then by one after the other
        for _ in range(self.levels(seen) - 1):
            made += children**2
        nodes = sorted([seen - 1, made])[0]
        return DraftShape(depth=sorted([self.levels(seen), nodes])[0], width=children, nodes=nodes)


@pytest.mark.parametrize("rows", TABLE)
def test_paper_equals_the_published_table(rows: int) -> None:
    seen, levels, children, nodes = TABLE[rows]
    shape = make_policy("paper").choose(rows)
    assert shape is not None
    assert (shape.nodes + 1, shape.width, shape.nodes) == (seen, children, nodes)
    if levels is not None:
        assert shape.depth == min(levels, nodes)


def test_paper_equals_the_rule_counted_out_for_all_rows() -> None:
    policy = make_policy("paper")
    for rows in range(1, 81):
        assert policy.choose(rows) == PublishedRule().shape(rows), rows
    # between the table's rows the levels only fall: 5 up to 6 rows, 4 up to 13, 3 after that, less where nodes are few
    depths = [policy.choose(rows).depth for rows in range(1, 81)]  # type: ignore[union-attr]
    assert depths == [5] * 6 + [4] * 7 + [3] * 27 + [2] * 13 + [1] * 27


@pytest.mark.parametrize("rows", [81, 82, 160, 161, 1000])
def test_paper_is_plain_where_the_published_code_breaks(rows: int) -> None:
    assert make_policy("paper").choose(rows) is None


@settings(deadline=None)
@given(
    rows=st.integers(1, 300),
    capacity=st.integers(1, 2000),
    least=st.integers(1, 6),
    more=st.integers(0, 5),
    children=st.integers(1, 12),
    most_seen=st.integers(1, 700),
    c=st.sampled_from([0.1, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 300.0]),
)
def test_paper_equals_the_rule_for_any_knobs(
    rows: int, capacity: int, least: int, more: int, children: int, most_seen: int, c: float
) -> None:
    policy = make_policy(
        "paper",
        verification_capacity=capacity,
        max_draft_token_length=least + more,
        max_draft_k=children,
        max_verification_num=most_seen,
        min_draft_token_length=least,
        draft_token_length_c=c,
    )
    shape = policy.choose(rows)
    assert shape == PublishedRule(capacity, least + more, children, most_seen, least, c).shape(rows)
    if shape is not None:
        assert (shape.nodes + 1) * rows <= capacity
        assert shape.nodes <= candidates(shape.depth, shape.width), "the levels that are run make enough candidates"


def test_paper_never_asks_for_more_nodes_than_there_are() -> None:
    # the published code fails here: 511 nodes wanted of 264
    policy = make_policy("paper", verification_capacity=512, max_verification_num=512)
    assert policy.choose(1) == DraftShape(depth=5, width=8, nodes=264)


@pytest.mark.parametrize(
    ("knobs", "shape"),
    [
        ({}, DraftShape(3, 1, 3)),
        ({"spec_depth": 5}, DraftShape(5, 1, 5)),
        ({"spec_depth": 2, "spec_width": 3}, DraftShape(2, 3, 12)),
        ({"spec_depth": 4, "spec_width": 3, "spec_nodes": 10}, DraftShape(4, 3, 10)),
        ({"spec_depth": 4, "spec_width": 3, "spec_nodes": 2}, DraftShape(2, 3, 2)),
    ],
)
def test_fixed_is_the_same_draft_for_any_rows(knobs: dict[str, int], shape: DraftShape) -> None:
    policy = make_policy("fixed", **knobs)
    assert [policy.choose(rows) for rows in (1, 7, 500)] == [shape] * 3


def test_threshold_is_fixed_up_to_its_rows_and_plain_above() -> None:
    policy = make_policy("threshold")
    assert [policy.choose(rows) for rows in (1, 32, 33)] == [DraftShape(3, 1, 3), DraftShape(3, 1, 3), None]
    policy = make_policy("threshold", spec_threshold_rows=2, spec_depth=2, spec_width=2, spec_nodes=4)
    assert [policy.choose(rows) for rows in (1, 2, 3)] == [DraftShape(2, 2, 4), DraftShape(2, 2, 4), None]


def test_off_never_drafts() -> None:
    assert [make_policy("off").choose(rows) for rows in (1, 8, 1000)] == [None] * 3


@pytest.mark.parametrize("name", ["paper", "threshold", "fixed", "off"])
def test_every_policy_takes_every_knob_and_every_observation(name: str) -> None:
    policy: Policy = make_policy(
        name,
        verification_capacity=100,
        max_draft_token_length=5,
        max_draft_k=8,
        max_verification_num=160,
        min_draft_token_length=3,
        draft_token_length_c=0.75,
        spec_threshold_rows=9,
        spec_depth=2,
        spec_width=2,
        spec_nodes=4,
    )
    before = [policy.choose(rows) for rows in range(1, 200)]
    policy.observe(policy.choose(2), [1, 3], 0.1)
    assert [policy.choose(rows) for rows in range(1, 200)] == before


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("papper", {}, "'papper' is no policy: did you mean 'paper'? the policies are paper, threshold, fixed, off"),
        ("measured", {}, "'measured' is no policy: the policies are"),
        ("paper", {"max_draft_n": 3}, "'max_draft_n' is no knob of a policy: did you mean 'max_draft_k'?"),
        ("paper", {"verification_capacity": 0}, "verification_capacity is 0, but must be a whole number of at least 1"),
        ("paper", {"verification_capacity": "auto"}, "verification_capacity is 'auto', but must be a whole number"),
        ("paper", {"max_verification_num": 2.5}, "max_verification_num is 2.5"),
        ("paper", {"max_draft_k": True}, "max_draft_k is True"),
        ("paper", {"min_draft_token_length": 0}, "or choose the policy 'off'"),
        ("paper", {"max_draft_token_length": 2}, "min_draft_token_length is 3 and max_draft_token_length is 2"),
        (
            "paper",
            {"draft_token_length_c": 0},
            "draft_token_length_c is 0, but must be finite and > 0: use the published",
        ),
        ("paper", {"draft_token_length_c": math.nan}, "draft_token_length_c is nan"),
        ("paper", {"draft_token_length_c": "0.75"}, "draft_token_length_c is '0.75'"),
        ("fixed", {"spec_depth": 0}, "spec_depth is 0"),
        ("fixed", {"spec_width": -1}, "spec_width is -1"),
        ("fixed", {"spec_nodes": 4}, "spec_nodes is 4, but a draft of depth 3 and width 1 has 3 candidates: lower it"),
        ("threshold", {"spec_nodes": 0}, "spec_nodes is 0"),
        ("threshold", {"spec_threshold_rows": 0}, "for no speculation choose the policy 'off'"),
    ],
)
def test_bad_values_are_refused_with_a_remedy(name: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_policy(name, **knobs)


def test_a_shape_without_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nodes of a draft shape is 0.*answer None"):
        DraftShape(1, 1, 0)
