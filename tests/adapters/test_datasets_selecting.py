"""Which rollouts go out, from a real store."""

import json

import pytest

from spangrad.adapters.datasets import Filters, read, select
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.datasets.selecting import in_heldout
from spangrad.adapters.model_call import Grade
from spangrad.errors import ConfigError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes, token_attributes


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def message(role, text):
    return {"role": role, "parts": [{"type": "text", "content": text}], "finish_reason": "stop"}


def add(store, rollout_id, task, reply, *, ids=False, status=RolloutStatus.SUCCEEDED, more=None):
    """A finished rollout of one call: the task is what the user says."""
    number = len(store.rollouts()) + 1
    store.enqueue([Rollout(rollout_id, task_id=task)])
    (claimed,) = store.claim(worker="w")
    told = text_attributes(**{c.ROLLOUT_ID: rollout_id, c.RESPONSE_ID: rollout_id}) | {
        c.INPUT_MESSAGES: json.dumps([message("user", task)]),
        c.OUTPUT_MESSAGES: json.dumps([message("assistant", reply)]),
        **(token_attributes() if ids else {}),
        **(more or {}),
    }
    store.put_otlp(encode_request([span("a", trace=str(number), attributes=told)]))
    store.finish(rollout_id, claimed.attempt, status=status)


def chosen(store, rewards=None, **filters):
    given = rewards or {}
    found = select(
        store,
        store.rollouts(),
        Filters(**filters),
        lambda rollouts, calls: {one.rollout_id: given.get(one.rollout_id) for one in rollouts},
    )
    return [one.rollout.rollout_id for one in found.chosen], found.refused


def test_rollouts_come_by_task_and_id_whatever_order_they_were_stored_in(store):
    for rollout_id, task in (("z", "one"), ("a", "two"), ("b", "one")):
        add(store, rollout_id, task, f"reply of {rollout_id}")
    assert chosen(store)[0] == ["b", "z", "a"]


def test_the_best_of_a_task_and_a_least_reward(store):
    for rollout_id in ("a", "b", "c", "unscored"):
        add(store, rollout_id, "one", f"reply of {rollout_id}")
    rewards = {"a": 0.5, "b": 1.0, "c": 0.0}
    ids, refused = chosen(store, rewards, per_task=2)
    assert (ids, refused.rollouts) == (["a", "b"], {"not among the best 2 of its task": 2})
    ids, refused = chosen(store, rewards, min_reward=0.5)
    assert (ids, refused.rollouts) == (["a", "b"], {"reward below 0.5": 1, "no reward": 1})


def test_of_rollouts_of_a_task_that_say_the_same_the_best_stays(store):
    for rollout_id, task in (("a", "one"), ("b", "one"), ("c", "two")):
        add(store, rollout_id, task, "the same")
    ids, refused = chosen(store, {"a": 0.0, "b": 1.0})
    assert (ids, refused.rollouts) == (["b", "c"], {"says what another rollout of its task does": 1})
    assert chosen(store, drop_repeats=False)[0] == ["a", "b", "c"]


def test_calls_are_left_out_by_grade_model_and_purpose_with_the_reason(store):
    add(store, "text", "one", "x")
    add(store, "exact", "two", "x", ids=True)
    add(store, "other", "three", "x", ids=True, more={c.REQUEST_MODEL: "other-model"})
    add(store, "title", "four", "x", ids=True, more={c.PURPOSE: "title"})
    add(store, "failed", "five", "x", status=RolloutStatus.FAILED)
    ids, refused = chosen(store, min_grade=Grade.EXACT, policy="policy")
    assert ids == ["exact"]
    assert refused.rollouts == {"no usable call": 3, "rollout did not succeed: failed": 1}
    assert refused.calls == {
        "grade text: no token ids": 1,
        "made by another model: other-model": 1,
        "purpose is not to act: title": 1,
    }


def test_what_is_read_is_what_was_chosen(store):
    for rollout_id, task in (("a", "one"), ("b", "two")):
        add(store, rollout_id, task, "x")
    filters = Filters()
    found = select(store, store.rollouts(), filters, lambda rollouts, calls: {"a": 1.0})
    (a, b) = list(read(store, found.chosen, filters))
    assert (a.rollout_id, a.task_key, a.reward, len(a.calls)) == ("a", "task:one", 1.0, 1)
    assert (b.rollout_id, b.reward) == ("b", None)
    assert a.fingerprint == found.chosen[0].fingerprint


def test_a_task_is_on_one_side_whatever_else_is_there():
    tasks = [f"task:{number}" for number in range(2000)]
    held = {task for task in tasks if in_heldout(task, 0.1)}
    assert 150 <= len(held) <= 250  # 200 are expected; the hash is fixed, so is the number
    assert held <= {task for task in tasks if in_heldout(task, 0.2)}
    assert not any(in_heldout(task, 0.0) for task in tasks)


@pytest.mark.parametrize(
    ("unlike", "filters"),
    [
        ({c.RESPONSE_FINISH_REASONS: ["content_filter"]}, {}),
        ({c.REQUEST_MODEL: "other-model"}, {"policy": "policy"}),
        ({c.OUTPUT_MESSAGES: None}, {}),
    ],
)
def test_a_task_without_an_id_is_what_the_agent_was_first_shown_usable_or_not(store, unlike, filters):
    for rollout_id, more in (("whole", {}), ("unlike", unlike)):
        store.enqueue([Rollout(rollout_id)])
        (claimed,) = store.claim(worker="w")
        shown = [message("user", "question")]
        for number, told in enumerate(({c.PURPOSE: "title"}, more, {})):
            asked = [message("user", "name it"), *shown] if c.PURPOSE in told else shown
            attributes = text_attributes(**{c.ROLLOUT_ID: rollout_id, c.RESPONSE_ID: f"{rollout_id}{number}"})
            attributes |= {c.INPUT_MESSAGES: json.dumps(asked), **told}
            said = {name: value for name, value in attributes.items() if value is not None}
            trace = rollout_id.encode().hex()
            store.put_otlp(encode_request([span(str(number), trace=trace, start_ns=number, attributes=said)]))
            if number:
                shown = [*shown, message("assistant", "hello"), message("user", "go on")]
        store.finish(rollout_id, claimed.attempt, status=RolloutStatus.SUCCEEDED)
    found = select(store, store.rollouts(), Filters(**filters), lambda rollouts, calls: {})
    assert len(found.tasks) == 2
    assert len(set(found.tasks.values())) == 1


def test_the_split_leaks_no_task(store):
    for number in range(12):
        add(store, f"r{number}", f"task {number % 4}", f"reply {number}")
    found = select(store, store.rollouts(), Filters(heldout=0.5), lambda rollouts, calls: {})
    train, held = (found.side(0.5, is_heldout=side) for side in (False, True))
    assert len(train) + len(held) == 12
    assert not {one.task_key for one in train} & {one.task_key for one in held}


@pytest.mark.parametrize(
    "wrong",
    [
        {"heldout": 1.0},
        {"heldout": -0.1},
        {"min_reward": float("nan")},
        {"per_task": 0},
        {"min_grade": Grade.UNUSABLE},
    ],
)
def test_filters_that_can_not_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        Filters(**wrong)


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ({"content": "my key is sk-proj-1234567890abcdef"}, {"api key"}),
        ([{"function": {"arguments": {"password": "hunter2hunter2"}}}], {"secret"}),
        ({"content": "line\nAKIAABCDEFGHIJKLMNOP\nline"}, {"api key"}),
        ({"content": "x" * 20_000 + " sk-proj-1234567890abcdef"}, {"api key"}),
        ({"content": "was [redacted: api key] before", "ids": [1, None, True]}, set()),
    ],
)
def test_secrets_are_found_in_any_place_of_a_row(row, kinds):
    scanner = Scanner()
    assert (scanner.has_secret(row), set(scanner.found)) == (bool(kinds), kinds)
