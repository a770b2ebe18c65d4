"""Which sequences are compared, which are good, and what nothing can be made of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.call_tree import build_tree
from spangrad.credit.labels import best, labelled, mismatched
from spangrad.credit.pairs import OUTSIDE, Preferred, paired
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import MISSING_REWARD, transitions
from spangrad.errors import ConfigError, CreditError
from tests.adapters.building import call
from tests.reference import preferences

Turn = tuple[Sequence[int], Sequence[int]]


def rows_of(rollout: str, *turns: Turn, group: str | None = "g") -> list[Transition]:
    """A rollout that is one conversation: (observation, reply) a turn."""
    calls = []
    so_far: list[int] = []
    for step, (observation, reply) in enumerate(turns):
        so_far = [*so_far, *observation]
        calls.append(call(f"{rollout}{step}", so_far, list(reply), start_ns=step, rollout_id=rollout))
        so_far = [*so_far, *reply]
    return transitions(build_tree(calls), None, group_id=group)


def branched() -> list[Transition]:
    """Three rollouts of a task: `a` and `b` part at their second call, `c` at its first."""
    return [
        *rows_of("a", ([1], [2, 3]), ([4], [5])),
        *rows_of("b", ([1], [2, 3]), ([4], [6, 7]), ([8], [9])),
        *rows_of("c", ([1], [2, 9]), ([4], [5])),
    ]


def said(found: Preferred) -> dict[tuple[str, bool], list[list[int]]]:
    """(pair, side) -> the trained tokens of its rows."""
    sides: dict[tuple[str, bool], list[list[int]]] = {}
    for row in found.rows:
        for preference in row.preferences:
            tokens = row.token_ids[row.action_mask].tolist()
            sides.setdefault((preference.id, preference.is_good), []).append(tokens)
    return sides


def reasons(found: Preferred) -> dict[str, str]:
    return {str(refused.call_id): refused.reason for refused in found.refused}


def test_a_success_is_paired_with_every_failure_of_its_task():
    found = paired(branched(), {"a": 1.0, "b": 0.0, "c": 0.0})
    assert said(found) == {
        ("a > b", True): [[2, 3, 5]],
        ("a > c", True): [[2, 3, 5]],
        ("a > b", False): [[2, 3, 6, 7, 9]],
        ("a > c", False): [[2, 9, 5]],
    }
    assert [row.rollout_id for row in found.rows] == ["a", "b", "c"]
    assert {preference.weight for row in found.rows for preference in row.preferences} == {0.5}
    # The store is told +1 of what is better and -1 of what is worse.
    assert [row.advantages[row.action_mask].tolist() for row in found.rows] == [[1] * 3, [-1] * 5, [-1] * 3]
    assert (found.refused, found.diagnostics) == ([], {"preference/pairs": 2.0, "preference/left_out": 0.0})


def test_a_step_is_compared_where_two_rollouts_part_after_the_same_tokens():
    found = paired(branched(), {"a": 1.0, "b": 0.0, "c": 0.0}, level="step")
    # a > b: second calls; a > c: first calls. a's two calls are in different pairs: two rows of it.
    assert said(found) == {
        ("a > c", True): [[2, 3]],
        ("a > b", True): [[5]],
        ("a > b", False): [[6, 7]],
        ("a > c", False): [[2, 9]],
    }
    assert reasons(found) == {"b0": OUTSIDE, "b2": OUTSIDE, "c1": OUTSIDE}
    assert [refused.sampled_tokens for refused in found.refused] == [2, 1, 1]
    first, second = found.rows[:2]
    assert first.token_ids.tolist() == [1, 2, 3]
    assert (second.token_ids.tolist(), second.action_mask.tolist()) == ([1, 2, 3, 4, 5], [False] * 4 + [True])
    assert np.isnan(second.behavior_logprobs[:4]).all() and second.policy_versions[4] == 0


def test_a_tail_is_everything_from_there_on():
    found = paired(branched(), {"a": 1.0, "b": 0.0, "c": 0.0}, level="tail")
    assert said(found) == {
        ("a > c", True): [[2, 3], [5]],
        ("a > b", True): [[5]],
        ("a > b", False): [[6, 7, 9]],
        ("a > c", False): [[2, 9, 5]],
    }
    assert reasons(found) == {"b0": OUTSIDE}


def test_rollouts_that_see_other_things_before_they_differ_share_no_step():
    rows = [*rows_of("a", ([1], [2]), ([3], [4])), *rows_of("b", ([1], [2]), ([5], [6]))]
    found = paired(rows, {"a": 1.0, "b": 0.0}, level="step")
    assert found.rows == []
    assert set(reasons(found)) == {"a0", "a1", "b0", "b1"}
    assert "differs from one of a better or worse rollout after the same tokens" in reasons(found)["a1"]


@pytest.mark.parametrize(
    ("returns", "options", "expected"),
    [
        ({"a": 1.0, "b": 0.0}, {}, {"c": MISSING_REWARD}),
        ({"a": 1.0, "b": 0.0, "c": None}, {}, {"c": MISSING_REWARD}),
        (
            {"a": 1.0},
            {},
            {"a": "no other rollout of its group has a reward", "b": MISSING_REWARD, "c": MISSING_REWARD},
        ),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, {}, dict.fromkeys("abc", "all returns of its group are equal")),
        (
            {"a": 1.0, "b": 0.5, "c": 0.75},
            {"min_gap": 0.5},
            dict.fromkeys("abc", "no return of its group differs by more than 0.5"),
        ),
        (
            {"a": 1.0, "b": 0.0, "c": 0.5},
            {"min_gap": 0.5},
            {"c": "no return of its group differs by more than 0.5"},
        ),
        (
            {"a": 1.0, "b": 0.0, "c": 0.5},
            {"pairs_per_group": 1},
            {"c": "other pairs of its group have larger gaps; 1 are taken"},
        ),
    ],
)
def test_what_is_not_compared_says_why(returns, options, expected):
    found = paired(branched(), returns, **options)
    by_rollout = {name[0]: reason for name, reason in reasons(found).items()}
    assert by_rollout == expected
    assert {row.rollout_id for row in found.rows} == set("abc") - set(expected)


def test_the_same_tokens_are_compared_once_and_never_with_themselves():
    rows = [*branched(), *rows_of("copy", ([1], [2, 3]), ([4], [5]))]
    found = paired(rows, {"a": 1.0, "b": 0.0, "copy": 1.0})
    assert set(said(found)) == {("a > b", True), ("a > b", False)}
    assert reasons(found)["copy0"] == "a pair said before"
    found = paired(rows, {"a": 1.0, "copy": 0.0})
    assert reasons(found)["a0"] == reasons(found)["copy0"] == "the same tokens as what it is compared with"


def test_a_rollout_without_a_group_has_nothing_to_be_compared_with():
    rows = [*rows_of("a", ([1], [2]), group=None), *rows_of("b", ([1], [3]), group=None)]
    assert set(reasons(paired(rows, {"a": 1.0, "b": 0.0})).values()) == {
        "no group says what it can be compared with"
    }


def test_what_can_not_be_asked_for():
    with pytest.raises(ConfigError, match="level is 'turn'; expected one of rollout, tail, step"):
        paired([], {}, level="turn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"min_gap is -1\.0"):
        paired([], {}, min_gap=-1.0)
    with pytest.raises(ConfigError, match="per_group is -1"):
        best([], {}, per_group=-1)
    rows = branched()
    with pytest.raises(CreditError, match="rollout 'a' has rows of attempts 0 and 1"):
        paired([rows[0], replace(rows[0], attempt=1)], {"a": 1.0})
    with pytest.raises(CreditError, match="rollout 'a' has return nan"):
        labelled(rows, {"a": float("nan")})
    with pytest.raises(
        CreditError, match=r"rollout 'a' has return 1e\+308; expected a finite one of size 1e\+100"
    ):
        labelled(rows, {"a": 1e308})


@st.composite
def rollouts(draw):
    """Few tokens, so that rollouts share beginnings and whole replies."""
    turn = st.tuples(
        st.lists(st.integers(1, 2), min_size=1, max_size=1),
        st.lists(st.integers(1, 2), min_size=1, max_size=2),
    )
    made = draw(st.lists(st.lists(turn, min_size=1, max_size=3), min_size=2, max_size=5))
    rewards = [draw(st.sampled_from([None, 0.0, 0.5, 1.0])) for _ in made]
    groups = [draw(st.sampled_from("gh")) for _ in made]
    return made, rewards, groups


@settings(max_examples=30, deadline=None)
@given(rollouts(), st.sampled_from(["rollout", "tail", "step"]), st.sampled_from([0.0, 0.5]))
def test_pairs_are_those_of_the_definition(given_rollouts, level, min_gap):
    made, rewards, groups = given_rollouts
    rows: list[Transition] = []
    defined = {}
    for k, (turns, reward, group) in enumerate(zip(made, rewards, groups, strict=True)):
        mine = rows_of(f"r{k}", *turns, group=group)
        rows += mine
        whole = [
            (tuple(row.token_ids[: s.start].tolist()), tuple(row.token_ids[s.start : s.stop].tolist()))
            for row in mine
            for s in row.segments
        ]
        defined[f"r{k}"] = (group, reward, whole)
    expected: set[tuple[object, ...]] = set()
    for left, right in preferences.pairs(defined, level, min_gap).values():
        if left != right:
            expected.add((tuple(left), tuple(right)))
    found = paired(rows, dict(zip(defined, rewards, strict=True)), level=level, min_gap=min_gap)
    sides: dict[str, dict[bool, list[tuple[int, Any]]]] = {}
    for row in found.rows:
        for segment in row.segments:
            one = (
                tuple(row.token_ids[: segment.start].tolist()),
                tuple(row.token_ids[segment.start : segment.stop].tolist()),
            )
            for preference in row.preferences:
                sides.setdefault(preference.id, {}).setdefault(preference.is_good, []).append(
                    (segment.step_index, one)
                )
    got = {tuple(tuple(one for _, one in sorted(side[is_good])) for is_good in (True, False))
           for side in sides.values()}  # fmt: skip
    assert got == expected
    assert len(sides) == len(expected) == found.diagnostics["preference/pairs"]
    # The books: every sampled token is in one row, or refused.
    trained = sum(int(row.action_mask.sum()) for row in found.rows)
    refused = sum(refused.sampled_tokens for refused in found.refused)
    assert trained + refused == sum(int(row.action_mask.sum()) for row in rows)


def test_rollouts_are_good_from_a_return_on():
    found = labelled(branched(), {"a": 1.0, "b": 0.5, "c": None}, good_at=0.75)
    assert [(j.id, j.is_good, j.weight) for row in found.rows for j in row.preferences] == [
        ("a", True, 0.5),
        ("b", False, 0.5),
    ]
    assert set(reasons(found).values()) == {MISSING_REWARD}
    assert found.diagnostics == {"preference/good": 1.0, "preference/bad": 1.0, "preference/left_out": 2.0}


def test_the_best_are_kept_without_repetitions():
    rows = [*branched(), *rows_of("copy", ([1], [2, 3]), ([4], [5]))]
    returns = {"a": 0.8, "b": 0.9, "c": 0.1, "copy": 1.0}
    found = best(rows, returns, good_at=0.5, per_group=1)
    assert [row.rollout_id for row in found.rows] == ["copy"]
    assert reasons(found) == {
        **dict.fromkeys(("a0", "a1"), "another rollout of its group says the same"),
        **dict.fromkeys(("b0", "b1", "b2"), "1 rollouts of its group are kept already"),
        **dict.fromkeys(("c0", "c1"), "its return is below 0.5"),
    }
    assert [row.rollout_id for row in best(branched(), {}).rows] == ["a", "b", "c"]
    assert best(branched(), {}, good_at=0.5).rows == []


def test_what_was_said_stands_behind_the_prompt_of_another_task():
    rows = [
        *rows_of("a", ([1, 1], [2]), ([3], [4]), group="g"),
        *rows_of("b", ([5], [6, 7]), group="h"),
    ]
    first, second = mismatched(rows)
    assert (first.token_ids.tolist(), first.action_mask.tolist()) == (
        [5, 2, 3, 4],
        [False, True, False, True],
    )
    assert (second.token_ids.tolist(), second.action_mask.tolist()) == (
        [1, 1, 6, 7],
        [False] * 2 + [True] * 2,
    )
    assert mismatched(rows[:1]) == mismatched([rows[0], replace(rows[1], group_id="g")]) == []
