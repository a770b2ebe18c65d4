"""What counts as an observation: by provenance, once, and never what was sampled."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.call_tree import build_tree
from spangrad.adapters.model_call import ModelCall, Purpose
from spangrad.credit.aggregation import weigh
from spangrad.credit.observations import observation_rows
from spangrad.credit.pairs import paired
from spangrad.credit.transition import Transition
from spangrad.credit.transitions import acting_nodes, transitions
from tests.adapters.building import call

CONVERSATION = [
    call("a", [1, 2], [3, 4], start_ns=0),
    call("b", [1, 2, 3, 4, 5, 6], [7], start_ns=1),
    call("c", [1, 2, 3, 4, 5, 6, 7, 8], [9], start_ns=2),
]


def shown(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Observed positions of every training row."""
    rows = transitions(build_tree(calls), None, group_id="g")
    return [row.observation_mask.nonzero()[0].tolist() for row in rows if row.observation_mask is not None]


def world_rows(calls: Sequence[ModelCall]) -> list[Transition]:
    tree = build_tree(calls)
    return observation_rows(tree, acting_nodes(tree), group_id="g")


def test_an_observation_is_what_a_later_prompt_adds_behind_the_reply():
    assert shown(CONVERSATION) == [[4, 5, 7]]
    (row,) = world_rows(CONVERSATION)
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row.action_mask.tolist() == [False] * 4 + [True, True, False, True]
    assert [(s.call_id, s.start, s.stop) for s in row.segments] == [("a", 4, 6), ("b", 7, 8)]
    assert (weigh([row])[0].loss_weight, row.advantages.tolist()) == (1 / 3, [0, 0, 0, 0, 1, 1, 0, 1])


def test_the_first_prompt_and_a_prompt_that_continues_nothing_are_no_observations():
    calls = [CONVERSATION[0], call("x", [1, 2, 3, 9, 9], [5], start_ns=1)]
    assert shown(calls) == [[], []]
    assert world_rows(calls) == []


@pytest.mark.parametrize("change", [{"purpose": Purpose.JUDGE}, {"is_trained_policy": False}])
@pytest.mark.parametrize("which", [0, 1])
def test_only_what_answers_the_policy_acting_and_is_shown_to_it_counts(change, which):
    calls = list(CONVERSATION)
    calls[which] = dataclasses.replace(calls[which], **change)
    expected = [7] if which == 0 else []
    assert shown(calls) == [expected]
    assert [row.action_mask.nonzero()[0].tolist() for row in world_rows(calls)] == [expected] * (1 - which)


def test_what_two_calls_were_shown_alike_is_an_observation_once():
    # d was asked again with the same prompt as b, e saw the same beginning and then something else.
    calls = [
        *CONVERSATION[:2],
        call("d", [1, 2, 3, 4, 5, 6], [8], start_ns=2),
        call("e", [1, 2, 3, 4, 5, 9], [8], start_ns=3),
    ]
    assert shown(calls) == [[4, 5], [], [5]]
    assert [row.action_mask.nonzero()[0].tolist() for row in world_rows(calls)] == [[4, 5], [5]]


def test_an_observation_behind_the_last_trained_token_is_of_the_world_model_alone():
    tree = build_tree(CONVERSATION)
    (row,) = transitions(tree, {"a": 1.0}, group_id="g")
    assert row.observation_mask is not None and not row.observation_mask.any()
    assert world_rows(CONVERSATION)[0].action_mask.sum() == 3


def test_rows_that_are_split_have_their_observations_once():
    rows = []
    for name, last in (("x", 9), ("y", 8), ("z", 7)):
        calls = [
            call(f"{name}a", [1], [2 if name != "z" else 3], start_ns=0, rollout_id=name),
            call(f"{name}b", [1, 2 if name != "z" else 3, 4, 5], [last], start_ns=1, rollout_id=name),
        ]
        rows += transitions(build_tree(calls), None, group_id="g")
    split = paired(rows, {"x": 1.0, "y": 0.0, "z": 0.0}, level="step").rows
    of_x = [row.observation_mask.tolist() for row in split if row.rollout_id == "x"]  # type: ignore[union-attr]
    assert of_x == [[False, False], [False, False, True, True, False]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 2)), min_size=1, max_size=6))
def test_every_token_is_sampled_or_shown_at_most_once(steps):
    # Each call goes on from an earlier one (or begins anew), with a short observation and a short reply.
    calls: list[ModelCall] = []
    for k, (from_, observation, reply) in enumerate(steps):
        before = calls[from_ % len(calls)] if calls and from_ else None
        start = [] if before is None else [*before.prompt_token_ids, *before.choices[0].sampled_token_ids]
        calls.append(call(f"c{k}", [*start, *[5] * observation], [6] * reply, start_ns=k))
    seen = set()
    for row in transitions(build_tree(calls), None, group_id="g"):
        assert row.observation_mask is not None
        assert not (row.observation_mask & row.action_mask).any()
        for t in row.observation_mask.nonzero()[0]:
            prefix = tuple(row.token_ids[: t + 1].tolist())
            assert prefix not in seen
            seen.add(prefix)
