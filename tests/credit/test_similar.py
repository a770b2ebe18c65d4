"""Anchors by similarity: what is one state, whatever the order."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.credit.anchors import observation_of
from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.groups import Ints
from spangrad.credit.similar import similar_leaders
from spangrad.credit.transitions import trajectory_of
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import CreditError
from tests.adapters.building import call
from tests.reference import similar as reference

WORDS = ["room", "door", "key", "table", "box", "lamp", "cat", "red", "blue", "open", "north", "you", "see"]


def variants(seed: int, *, groups: int = 3, each: int = 30) -> tuple[list[str], Ints, Ints]:
    """Observations of a few kinds with a clock and changed words; their groups and how often each occurs."""
    chance = random.Random(seed)
    kinds = [[chance.choice(WORDS) for _ in range(50)] for _ in range(8)]
    found: dict[tuple[int, str], int] = {}
    for group in range(groups):
        for _ in range(each):
            words = list(chance.choice(kinds))
            for _ in range(chance.choice([0, 0, 1, 2, 3, 8])):
                words[chance.randrange(len(words))] = chance.choice(WORDS)
            found[group, f"{chance.randrange(20)} s: {' '.join(words)}"] = chance.randint(1, 3)
    keys = list(found)
    return [text for _, text in keys], np.array([group for group, _ in keys]), np.array(list(found.values()))


def leaders(texts, groups, counts, similarity):
    return similar_leaders(texts, texts, groups, counts, similarity=similarity).tolist()


@pytest.mark.parametrize("similarity", [0.95, 0.9, 0.7])
def test_pools_are_those_of_comparing_all_pairs(similarity):
    texts, groups, counts = variants(1)
    found = leaders(texts, groups, counts, similarity)
    expected = reference.leaders(texts, groups.tolist(), counts.tolist(), similarity)
    assert len(set(found)) < len(texts)
    # Buckets find a pair with a probability; on these texts, fixed as they are, they find all that matter.
    assert found == expected


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.8, 0.95, 1.0]), st.randoms())
def test_pools_do_not_depend_on_order_and_members_are_similar_to_their_leader(seed, similarity, chance):
    texts, groups, counts = variants(seed, each=12)
    found = leaders(texts, groups, counts, similarity)
    order = list(range(len(texts)))
    chance.shuffle(order)
    again = leaders([texts[i] for i in order], groups[order], counts[order], similarity)
    assert [order[leader] for leader in again] == [found[i] for i in order]
    for i, leader in enumerate(found):
        assert groups[i] == groups[leader]
        assert found[leader] == leader
        assert i == leader or reference.dice(texts[i], texts[leader]) >= similarity


def test_pools_are_the_same_whatever_is_worked_on_at_once(monkeypatch):
    texts, groups, counts = variants(2)
    whole = leaders(texts, groups, counts, 0.9)
    monkeypatch.setattr("spangrad.credit.similar.CHUNK", 50)
    assert leaders(texts, groups, counts, 0.9) == whole


def test_a_chain_of_small_changes_is_not_one_state():
    # Each has all but 4 of 99 characters in common with the next, the first nothing with the last.
    texts = [" ".join(f"{i:03d}" for i in range(k, k + 25)) for k in range(30)]
    found = leaders(texts, np.zeros(30, dtype=np.int64), np.ones(30, dtype=np.int64), 0.9)
    assert 6 < len(set(found)) < 30
    assert all(reference.dice(texts[i], texts[leader]) >= 0.9 for i, leader in enumerate(found))


def test_the_most_frequent_observation_leads():
    texts = [f"{'The door is closed. ' * 5}{clock}" for clock in ("10:01", "10:02", "10:03")]
    groups = np.zeros(3, dtype=np.int64)
    assert leaders(texts, groups, np.array([1, 2, 1]), 0.9) == [1, 1, 1]
    assert leaders(texts, groups, np.array([1, 1, 1]), 0.9) == [0, 0, 0]


def test_repeated_characters_count_as_often_as_they_are_there():
    # As sets of shingles both are {aaaa} and the ends.
    assert leaders(["a" * 20, "a" * 60], np.zeros(2, dtype=np.int64), np.ones(2, dtype=np.int64), 0.8) == [
        0,
        1,
    ]


def test_short_empty_and_odd_texts_have_pools():
    texts = ["", "a", "ab", "\ud800", "日本語の観察", ""]
    groups = np.array([0, 0, 0, 0, 0, 1])
    assert leaders(texts, groups, np.ones(6, dtype=np.int64), 0.5) == [0, 1, 2, 3, 4, 5]
    assert leaders([], groups[:0], groups[:0], 0.9) == []
    with pytest.raises(CreditError, match="lengths"):
        leaders(["a"], groups, groups, 0.9)


def test_named_states_stay_exact_and_observations_are_without_ids():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    told = [*messages, {"role": "tool", "tool_call_id": "c1", "content": "rows"}]
    seen = dataclasses.replace(call("a", [1], [2]), messages=told)
    named = dataclasses.replace(seen, state_key="room 1")
    assert observation_of(seen) == "tool: rows"
    assert observation_of(dataclasses.replace(seen, messages=messages)) is None
    assert observation_of(named) is None
    (step,) = trajectory_of([seen], 1.0, rollout_id="r").steps
    (with_text,) = trajectory_of([seen], 1.0, rollout_id="r", with_observations=True).steps
    assert (step.observation, with_text.observation) == (None, "tool: rows")
    assert step.anchor == with_text.anchor


def test_similar_states_are_compared_named_ones_only_if_they_are_equal():
    clock = "It is {} o'clock, and the door to the north of the long hall with the portraits is closed."
    batch = [
        Trajectory(name, "g", reward, [Step("0", 0, key, observation=key), Step("1", 1, f"key {name}")])
        for name, reward, key in (("a", 1.0, clock.format(10)), ("b", 0.0, clock.format(11)))
    ]
    exact = CreditConfig(episode="none", step="gigpo", gamma=1.0)
    assert set(assign(batch, exact).advantages.values()) == {0.0}
    result = assign(batch, dataclasses.replace(exact, anchors="similar", similarity=0.9))
    assert result.of("a") == {"0": pytest.approx(1.0, abs=1e-5), "1": 0.0}
    found = result.diagnostics
    assert (found.anchor_coverage, found.anchor_coverage_exact, found.anchors_from_similarity) == (
        0.5,
        0,
        0.5,
    )
    assert "anchors/from_similarity" not in assign(batch, exact).diagnostics.metrics()
