"""What a verifier gets and may return, in this process."""

import pickle

import pytest

from spangrad.adapters.model_call import Choice, ModelCall, Purpose
from spangrad.adapters.scoring import StoredRollout
from spangrad.adapters.scoring.stored_rollout import stored_rollouts
from spangrad.adapters.scoring.values import as_rewards
from spangrad.adapters.scoring.verifier import Verifier
from spangrad.errors import ConfigError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Rollout
from spangrad.tracer import conventions as c
from tests.adapters.building import call, span, text_attributes

VERIFIERS = """
import functools

class Judge:
    async def __call__(self, rollout):
        return {"judge": 2}

class Client:
    loop = None

def number(rollout): return len(rollout.calls)
def nothing(rollout): return None
def several(rollout): return {"a": 1, "b": True, "c": None}
def trainers(task, output): return task["x"] == output
def optional(rollout, scale=2.0): return scale
def wrong(rollout): return "1"
async def later(rollout):
    import asyncio
    running = asyncio.get_running_loop()
    Client.loop = Client.loop or running
    await asyncio.sleep(0)
    return Client.loop is running

judge = Judge()
partial = functools.partial(lambda scale, rollout: scale, 4)
"""


def rollout(*calls: ModelCall) -> StoredRollout:
    return StoredRollout("r-1", {"x": 1}, 1, calls)


def replied(name, text, start_ns=0, purpose=Purpose.AGENT, **message):
    choice = Choice(message={"role": "assistant", "content": text, **message})
    asked = [{"role": "user", "content": f"to {name}"}]
    return call(name, [], start_ns=start_ns, choices=[choice], messages=asked, purpose=purpose)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("number", {"q": 0.0}),
        ("nothing", None),
        ("several", {"a": 1.0, "b": 1.0}),
        ("trainers", {"q": 1.0}),
        ("optional", {"q": 2.0}),
        ("judge", {"judge": 2.0}),
        ("partial", {"q": 4.0}),
    ],
)
def test_a_verifier_gives_a_number_names_with_numbers_or_no_opinion(tmp_path, name, given):
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    with Verifier(f"verifiers.py:{name}", str(tmp_path)) as verifier:
        assert verifier(rollout(), "q") == given


def test_what_is_async_keeps_its_event_loop(tmp_path):
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    with Verifier("verifiers.py:later", str(tmp_path)) as verifier:
        assert [verifier(rollout(), "q") for _ in range(2)] == [{"q": 1.0}, {"q": 1.0}]


def test_what_is_no_reward_raises(tmp_path):
    (tmp_path / "verifiers.py").write_text(VERIFIERS)
    with Verifier("verifiers.py:wrong", str(tmp_path)) as verifier, pytest.raises(ValueError, match="'1' is"):
        verifier(rollout(), "q")
    with pytest.raises(ConfigError, match="no function 'nosuch'"):
        Verifier("verifiers.py:nosuch", str(tmp_path))


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), "1", b"1", [1], {"a": "x"}, {"": 1}, {1: 1}, 10**400]
)
def test_only_finite_numbers_and_names_of_text_are_rewards(bad):
    with pytest.raises(ValueError, match="is no"):
        as_rewards(bad, "q")


def test_a_dict_without_a_number_is_no_opinion():
    assert as_rewards({}, "q") is None
    assert as_rewards({"a": None}, "q") is None
    assert as_rewards({"a": 0}, "q") == {"a": 0.0}


def test_messages_are_the_conversation_of_the_last_call_that_acted():
    title = replied("title", "A title", 3, Purpose.TITLE)
    told = rollout(replied("first", "one"), replied("second", "two", 1), title)
    assert told.messages == [
        {"role": "user", "content": "to second"},
        {"role": "assistant", "content": "two"},
    ]
    assert told.final_text == "two"
    assert rollout(title).final_text == "A title"
    assert (rollout().messages, rollout().final_text) == ([], None)
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    assert rollout(replied("parts", parts)).final_text == "ab"
    assert rollout(replied("tools", None, tool_calls=[{"id": "x"}])).final_text is None


def test_stored_rollouts_have_their_task_output_and_calls_and_can_be_sent(tmp_path):
    with FileStore(tmp_path / "s.duckdb") as store:
        store.enqueue([Rollout(f"r-{i}", task={"n": i}, task_id=f"t-{i}") for i in range(40)])
        for each in store.claim(worker="w", limit=40):
            store.finish(each.rollout_id, each.attempt, output=[each.task["n"]])
        own = {c.ROLLOUT_ID: "r-7", c.ATTEMPT: 0, **text_attributes()}
        store.put_otlp(encode_request([span("call", attributes=own)]))
        told = list(stored_rollouts(store, store.rollouts()))
    assert [one.rollout_id for one in told] == [f"r-{i}" for i in range(40)]
    assert [(one.task, one.output, one.task_id) for one in told][7] == ({"n": 7}, [7], "t-7")
    assert [len(one.calls) for one in told] == [int(i == 7) for i in range(40)]
    assert told[7].final_text == "hello"
    assert pickle.loads(pickle.dumps(told)) == told
