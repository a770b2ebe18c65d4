"""Rows: what they train, exactly once, and what a row weighs."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.model_call import Grade, ModelCall, Purpose
from spangrad.credit.aggregation import reweigh, weigh
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import (
    informative,
    require_grade,
    row_to_json,
    trajectory_of,
    transitions,
)
from spangrad.errors import ConfigError, GradeError
from tests.adapters.building import call

CONVERSATION = [
    call("a", [1, 2], [3, 4], start_ns=0),
    call("b", [1, 2, 3, 4, 5], [6], start_ns=1),
]


def rows_of(
    calls: Sequence[ModelCall], advantages: Mapping[str, float | None] | None = None
) -> list[Transition]:
    return transitions(build_tree(calls), advantages, group_id="g")


def test_a_conversation_is_one_row_that_trains_its_sampled_tokens():
    (row,) = rows_of(CONVERSATION, {"a": 0.5, "b": -1.0})
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.action_mask.tolist() == [False, False, True, True, False, True]
    assert row.advantages.tolist() == [0, 0, 0.5, 0.5, 0, -1.0]
    assert row.policy_versions.tolist() == [-1, -1, 0, 1, -1, 0]
    np.testing.assert_allclose(row.behavior_logprobs, [np.nan, np.nan, 0.0, -0.1, np.nan, 0.0], atol=1e-7)
    assert [(s.call_id, s.step_index, s.start, s.stop) for s in row.segments] == [
        ("a", 0, 2, 4),
        ("b", 1, 5, 6),
    ]
    assert (row.rollout_id, row.group_id, row.grade, row.loss_weight) == ("r", "g", "exact", 1 / 3)


def test_branches_train_a_shared_reply_in_the_first_row_only():
    calls = [*CONVERSATION, call("c", [1, 2, 3, 4, 7], [8, 9], start_ns=2)]
    first, second = rows_of(calls)
    assert [s.call_id for s in first.segments] == ["a", "b"]
    assert [s.call_id for s in second.segments] == ["c"]
    assert second.action_mask.tolist() == [False] * 5 + [True, True]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 7, 8, 9]


def test_a_call_without_an_advantage_is_context():
    for advantages in ({"b": 1.0}, {"a": None, "b": 1.0}):
        (row,) = rows_of(CONVERSATION, advantages)
        assert row.action_mask.tolist() == [False] * 5 + [True]
        assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]


def test_an_advantage_of_zero_is_assigned():
    (row,) = rows_of(CONVERSATION, {"a": 0.0, "b": 0.0})
    assert row.action_mask.sum() == 3
    assert informative([row]) == []


def test_tokens_behind_the_last_trained_one_are_cut_off():
    (row,) = rows_of(CONVERSATION, {"a": 1.0})
    assert row.token_ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"purpose": Purpose.JUDGE}, {"is_trained_policy": False}])
def test_only_the_trained_policy_acting_is_trained_and_the_rest_is_context(change):
    (row,) = rows_of([dataclasses.replace(CONVERSATION[0], **change), CONVERSATION[1]])
    assert row.action_mask.tolist() == [False] * 5 + [True]


def test_nothing_to_train_gives_no_row():
    assert rows_of(CONVERSATION, {}) == []
    assert rows_of([]) == []


def test_calls_of_different_temperatures_are_trained_in_rows_of_their_own():
    calls = [
        dataclasses.replace(CONVERSATION[0], sampling={"temperature": 0.5}),
        dataclasses.replace(CONVERSATION[1], sampling={"temperature": 1.0}),
    ]
    first, second = rows_of(calls)
    assert (first.temperature, first.action_mask.tolist()) == (0.5, [False, False, True, True])
    assert (second.temperature, second.action_mask.tolist()) == (1.0, [False] * 5 + [True])
    assert first.loss_weight == second.loss_weight == 1 / 3


def test_text_grade_calls_with_rendered_ids_have_no_logprobs_and_no_version():
    rendered = call("a", [1, 2], [3], grade=Grade.TEXT)
    choice = dataclasses.replace(rendered.choices[0], logprobs=None, policy_versions=None)
    (row,) = rows_of([dataclasses.replace(rendered, choices=[choice])])
    assert np.isnan(row.behavior_logprobs).all()
    assert row.policy_versions.tolist() == [-1, -1, -1]
    assert (row.grade, row.advantages.tolist()) == ("text", [0, 0, 1.0])


def test_the_worst_grade_of_the_trained_calls_is_the_rows():
    (row,) = rows_of([CONVERSATION[0], dataclasses.replace(CONVERSATION[1], grade=Grade.IDS)])
    assert row.grade == "ids"
    (row,) = rows_of([CONVERSATION[0], dataclasses.replace(CONVERSATION[1], grade=Grade.IDS)], {"a": 1.0})
    assert row.grade == "exact"


def test_a_missing_logprob_is_not_a_number_and_never_zero():
    choice = dataclasses.replace(CONVERSATION[0].choices[0], logprobs=[-9999.0, -0.5])
    (row,) = rows_of([dataclasses.replace(CONVERSATION[0], choices=[choice])])
    assert np.isnan(row.behavior_logprobs[2])
    assert row.behavior_logprobs[3] == -0.5


def loss(rows: Sequence[Transition], token_loss: Mapping[int, float] | None = None) -> float:
    """Sum over trained tokens of weight * advantage [* a loss that depends on the token alone]."""
    total = 0.0
    for row in rows:
        tokens = [(token_loss or {}).get(int(token), 1.0) for token in row.token_ids]
        total += row.loss_weight * float((row.advantages * tokens)[row.action_mask].sum())
    return total


# A = +1 on a rollout of 2 trained tokens, -1 on one of 6.
UNEQUAL = [
    *rows_of([call("s", [1], [2, 2], rollout_id="short")], {"s": 1.0}),
    *rows_of([call("l", [1], [2] * 6, rollout_id="long")], {"l": -1.0}),
]


def test_aggregations_give_the_golden_numbers():
    assert loss(weigh(UNEQUAL, "token-mean")) == pytest.approx(-0.5)  # (2 - 6) / 8
    assert loss(weigh(UNEQUAL)) == pytest.approx(0.0)  # (2/2 - 6/6) / 2
    assert loss(weigh(UNEQUAL, "constant", constant=8)) == pytest.approx(-0.25)  # (2 - 6) / (2 * 8)


def test_a_rollout_of_many_short_calls_weighs_as_one_of_few_long_calls_under_the_step_mean():
    # Every call has 2 tokens: the weights are 1 / (2 * 1 * 2) and 1 / (2 * 3 * 2).
    many = [call(name, [k], [9, 9], rollout_id="many", start_ns=k) for k, name in enumerate("abc", start=1)]
    rows = weigh([*UNEQUAL[:1], *rows_of(many, dict.fromkeys("abc", 1.0))], "rollout-step-mean")
    assert [row.loss_weight for row in rows] == pytest.approx([1 / 4, *[1 / 12] * 3])
    # Calls of unlike length: (2 tokens, 1 call) and (6 tokens, 1 call), 4 in the mean.
    assert [row.loss_weight for row in weigh(UNEQUAL, "rollout-step-mean")] == [1 / 8, 1 / 8]


def test_a_rollout_of_three_rows_counts_three_times_under_the_mean_over_rows():
    forked = [call(name, [k], [9], start_ns=k) for k, name in enumerate("abc", start=1)]
    rows = rows_of(forked, dict.fromkeys("abc", 1.0)) + rows_of(
        [call("d", [1], [9], rollout_id="q")], {"d": 0.0}
    )
    assert loss(weigh(rows, "row-token-mean")) == pytest.approx(0.75)


def cut(row: Transition, tokens: int) -> Transition:
    """The row without its last trained tokens."""
    mask = row.action_mask.copy()
    mask[np.flatnonzero(mask)[len(np.flatnonzero(mask)) - tokens :]] = False
    return dataclasses.replace(row, action_mask=mask)


@pytest.mark.parametrize("aggregation", ["token-mean", "rollout-token-mean", "row-token-mean", "constant"])
@pytest.mark.parametrize("gone", [(0, 2), (1, 3), (2, 0), (0, 6)])
def test_tokens_that_leave_a_batch_leave_its_denominators(aggregation, gone):
    rows = weigh(UNEQUAL, aggregation, constant=8)
    kept = reweigh(rows, [cut(row, count) for row, count in zip(rows, gone, strict=True)])
    # As if they had never been there; a constant stays what it was, and so does its N.
    afresh = weigh(
        [cut(row, count) for row, count in zip(rows, gone, strict=True) if count < row.action_mask.sum()],
        aggregation,
        constant=8,
        n_rollouts=2 if aggregation == "constant" else None,
    )
    assert [row.loss_weight for row in kept if row.action_mask.any()] == pytest.approx(
        [row.loss_weight for row in afresh]
    )


def test_rollouts_without_rows_can_be_counted():
    assert weigh(UNEQUAL, n_rollouts=4)[0].loss_weight == 1 / (4 * 2)


def test_a_rollout_of_three_rows_counts_as_much_as_a_rollout_of_one():
    # Rewards 1 and 0 as advantages; three rows and one: 0.5 per rollout, 0.75 per row.
    forked = [call(name, [k], [9], start_ns=k) for k, name in enumerate("abc", start=1)]
    rows = rows_of(forked, dict.fromkeys("abc", 1.0)) + rows_of(
        [call("d", [1], [9], rollout_id="q")], {"d": 0.0}
    )
    assert len(rows) == 4
    assert loss(weigh(rows)) == pytest.approx(0.5)


def test_attempts_of_one_rollout_are_weighed_apart():
    again = [dataclasses.replace(row, attempt=1) for row in UNEQUAL[:1]]
    assert [row.loss_weight for row in weigh([*UNEQUAL[:1], *again])] == [0.25, 0.25]


@pytest.mark.parametrize("constant", [None, 0.0, -1.0])
def test_a_constant_aggregation_needs_its_constant(constant):
    with pytest.raises(ConfigError, match="constant"):
        weigh(UNEQUAL, "constant", constant=constant)


def test_calls_below_the_wanted_grade_are_refused_with_their_reasons():
    bad = dataclasses.replace(CONVERSATION[1], grade=Grade.IDS, grade_reasons=("no logprobs: choice 0",))
    kept, refused = require_grade([CONVERSATION[0], bad], "exact")
    assert [k.call_id for k in kept] == ["a"]
    assert (refused[0].call_id, refused[0].reason) == (
        "b",
        "grade ids, exact is needed: no logprobs: choice 0",
    )
    assert require_grade([CONVERSATION[0], bad], "ids")[1] == []
    with pytest.raises(GradeError, match="1 of 2 calls"):
        require_grade([CONVERSATION[0], bad], "exact", otherwise="raise")
    with pytest.raises(GradeError, match="'good'"):
        require_grade([], "good")


def test_a_trajectory_has_the_steps_of_the_trained_policy():
    calls = [
        dataclasses.replace(CONVERSATION[0], messages=[{"role": "user", "content": "q"}]),
        call("j", [1], [2], start_ns=1, purpose=Purpose.JUDGE),
        call("f", [1], [2], start_ns=2, grade=Grade.UNUSABLE),
        dataclasses.replace(CONVERSATION[1], start_ns=3),
    ]
    found = trajectory_of(calls, 1.0, group_id="g", step_rewards={"b": 0.5})
    assert [(step.call_id, step.step_index, step.reward) for step in found.steps] == [
        ("a", 0, None),
        ("b", 3, 0.5),
    ]
    assert found.steps[0].anchor is not None
    assert (found.rollout_id, found.group_id, found.total_reward) == ("r", "g", 1.5)


def test_a_row_as_json_is_valid_json_without_invented_numbers():
    (row,) = rows_of(CONVERSATION, {"a": 0.5, "b": 0.0})
    found = json.loads(json.dumps(row_to_json(row), allow_nan=False))
    assert found["behavior_logprobs"][0] is None
    assert found["policy_versions"][:3] == [None, None, 0]
    assert found["advantages"] == [None, None, 0.5, 0.5, None, 0.0]
    assert found["action_mask"] == [False, False, True, True, False, True]


token = st.integers(1, 3)
rollouts = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 9)),
        st.lists(token, min_size=1, max_size=3),
        st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=2),
        st.sampled_from([None, 0.0, 1.5, -2.0]),
        st.sampled_from([Purpose.AGENT, Purpose.AGENT, Purpose.SUMMARY]),
        st.sampled_from([0.5, 1.0]),
    ),
    min_size=1,
    max_size=7,
)


def made(
    specification: Sequence[Any], rollout_id: str = "r"
) -> tuple[list[ModelCall], dict[str, float | None]]:
    calls: list[ModelCall] = []
    sequences: list[list[int]] = []
    advantages: dict[str, float | None] = {}
    for k, (base, prompt, replies, advantage, purpose, temperature) in enumerate(specification):
        start = sequences[base % len(sequences)] if base is not None and sequences else []
        name = f"{rollout_id}{k:02d}"
        more = {"purpose": purpose, "sampling": {"temperature": temperature}, "rollout_id": rollout_id}
        calls.append(call(name, [*start, *prompt], *replies, start_ns=k, **more))
        sequences += [[*start, *prompt, *reply] for reply in replies]
        advantages[name] = advantage
    return calls, advantages


@settings(max_examples=200)
@given(rollouts)
def test_every_sampled_token_of_a_trained_call_is_trained_once_and_nothing_else_is(specification):
    calls, advantages = made(specification)
    rows = rows_of(calls, advantages)
    trained: dict[str, list[list[int]]] = {}
    for row in rows:
        covered = np.zeros(len(row.token_ids), dtype=bool)
        for segment in row.segments:
            place = slice(segment.start, segment.stop)
            assert not covered[place].any()
            covered[place] = True
            trained.setdefault(segment.call_id, []).append(row.token_ids[place].tolist())
            assert (row.advantages[place] == advantages[segment.call_id]).all()
            assert row.policy_versions[place].tolist() == list(range(segment.stop - segment.start))
        assert covered.tolist() == row.action_mask.tolist()
        assert np.isnan(row.behavior_logprobs[~row.action_mask]).all()
        assert (row.policy_versions[~row.action_mask] == -1).all()
        assert (row.advantages[~row.action_mask] == 0).all()
        assert row.action_mask[-1]
    expected = {
        c.call_id: [list(choice.sampled_token_ids or ()) for choice in c.choices]
        for c in calls
        if c.purpose is Purpose.AGENT and advantages[c.call_id] is not None
    }
    assert {name: sorted(replies) for name, replies in trained.items()} == {
        name: sorted(replies) for name, replies in expected.items()
    }


@settings(max_examples=100)
@given(
    st.lists(rollouts, min_size=1, max_size=3),
    st.sampled_from(["rollout-token-mean", "rollout-step-mean", "token-mean", "constant"]),
)
def test_cutting_rollouts_into_other_rows_changes_no_weighted_sum(specifications, aggregation):
    whole: list[Transition] = []
    apart: list[Transition] = []
    for index, specification in enumerate(specifications):
        calls, advantages = made(specification, f"r{index}")
        whole += rows_of(calls, advantages)
        for one in calls:
            apart += rows_of([one], advantages)
    token_loss = {1: 0.25, 2: -3.0, 3: 11.0}
    together = weigh(whole, aggregation, constant=10)
    assert loss(together, token_loss) == pytest.approx(
        loss(weigh(apart, aggregation, constant=10), token_loss), abs=1e-9
    )


@settings(max_examples=100)
@given(st.lists(rollouts, min_size=1, max_size=3))
def test_every_rollout_with_a_trained_token_weighs_the_same(specifications):
    rows: list[Transition] = []
    for index, specification in enumerate(specifications):
        rows += rows_of(*made(specification, f"r{index}"))
    weights: dict[str, float] = {}
    for row in weigh(rows):
        weights[row.rollout_id] = weights.get(row.rollout_id, 0.0) + row.loss_weight * row.action_mask.sum()
    for weight in weights.values():
        assert weight == pytest.approx(1 / len(weights))
