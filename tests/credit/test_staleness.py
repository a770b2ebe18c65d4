"""Rollouts of weights that are too old, or that nobody published, are refused as a whole."""

from dataclasses import replace

import pytest

from spangrad.credit.staleness import TOO_STALE, UNKNOWN_VERSION, too_stale
from tests.adapters.building import call


def of_version(name, *versions, model="policy"):
    made = call(name, [1, 2], [3, 4])
    choices = [replace(made.choices[0], policy_versions=versions or None)]
    return replace(made, model=model, choices=choices)


def kinds(calls, version=5, most=1):
    return [(refused.call_id, refused.kind) for refused in too_stale(calls, version, most)]


@pytest.mark.parametrize(("versions", "is_refused"), [((5, 5), 0), ((4, 5), 0), ((3, 4), 1), ((5, 6), 1)])
def test_the_oldest_and_the_newest_token_decide_for_the_whole_rollout(versions, is_refused):
    found = kinds([of_version("a", 5, 5), of_version("b", *versions)])
    assert found == [("a", TOO_STALE), ("b", TOO_STALE)] * is_refused


@pytest.mark.parametrize("versions", [(), (-1, -1), (5, -1)])
def test_a_call_of_unpublished_weights_costs_its_rollout(versions):
    (first, *_) = too_stale([of_version("a", 5, 5), of_version("b", *versions)], 5, 1)
    assert "which version sampled call 'b', and others of its rollout are of version 5" in first.reason
    assert kinds([of_version("a", 5, 5), of_version("b", *versions)]) == [
        ("a", UNKNOWN_VERSION),
        ("b", UNKNOWN_VERSION),
    ]


def test_calls_of_another_model_and_of_rollouts_without_any_version_are_left_to_their_grades():
    assert kinds([of_version("a", 5, 5), of_version("b", model="judge")]) == []
    assert kinds([of_version("a"), of_version("b")]) == []


def test_a_call_that_sampled_nothing_that_is_known_needs_no_version():
    text = replace(of_version("b"), choices=[replace(of_version("b").choices[0], sampled_token_ids=None)])
    assert kinds([of_version("a", 5, 5), text]) == []
