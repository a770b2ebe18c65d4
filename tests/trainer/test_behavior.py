"""What agents of an update did, in numbers."""

import json
from typing import Any

import pytest
from tests.adapters.building import call

from spangrad.adapters.model_call import Choice, ModelCall, Purpose
from spangrad.store.records import Rollout
from spangrad.trainer.monitoring.behavior import behavior_metrics, share_alike, text_of
from spangrad.trainer.monitoring.monitor_config import MonitorConfig

PATTERNS = MonitorConfig().test_files


def replied(rollout_id: str, place: int, message: dict[str, Any], **more: Any) -> ModelCall:
    choices = [Choice(message={"role": "assistant", **message})]
    fields = {"start_ns": place, "rollout_id": rollout_id, "choices": choices, **more}
    return call(f"{rollout_id}-{place}", [1], **fields)


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}


def test_calls_of_rollouts_are_counted_and_judges_and_strangers_are_not() -> None:
    rollouts = [Rollout(f"r{n}", task_id=f"t{n}") for n in range(5)]
    calls = [replied(f"r{n}", place, {"content": f"{n} {place}"}) for n in range(4) for place in range(n + 1)]
    calls += [
        replied("r0", 9, {"content": "good"}, purpose=Purpose.JUDGE),
        replied("stranger", 0, {"content": "x"}),
    ]
    # calls 1, 2, 3, 4 (r4 has none): mean 2.5, median 2.5, the lower quartile is the first number
    assert behavior_metrics(calls, rollouts, PATTERNS) == {
        "behavior/steps_mean": 2.5,
        "behavior/steps_median": 2.5,
        "behavior/steps_low": 1.0,
        "behavior/test_edits": 0.0,
        "behavior/first_step_alike": 0.0,
    }
    assert behavior_metrics([], rollouts, PATTERNS) == {}


def test_pairs_of_different_tasks_that_begin_alike() -> None:
    # tasks a, a, b, c: 16 - (4 + 1 + 1) = 10 ordered pairs; x is the first reply of a, b and c: a-b, a-c, b-c
    steps = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")]
    assert share_alike(steps) == pytest.approx(6 / 10)
    assert share_alike([("a", "x"), ("a", "x")]) is None
    assert share_alike([]) is None
    assert share_alike([("a", "x"), ("b", "x")]) == 1.0


def test_a_first_step_is_what_it_calls_whatever_it_says_beside_it() -> None:
    rollouts = [Rollout(f"r{n}", task_id=f"t{n % 2}") for n in range(4)]
    calls = [replied(f"r{n}", 0, {"content": f"thought {n}", **tool("ls", path="/")}) for n in range(4)]
    assert behavior_metrics(calls, rollouts, PATTERNS)["behavior/first_step_alike"] == 1.0
    same_task = [Rollout(f"r{n}", task_id="t") for n in range(4)]
    assert "behavior/first_step_alike" not in behavior_metrics(calls, same_task, PATTERNS)


def test_edits_of_tests_are_seen_in_tool_calls_and_in_blocks_of_code() -> None:
    rollouts = [Rollout(f"r{n}", task_id=f"t{n}") for n in range(4)]
    calls = [
        replied("r0", 0, tool("write_file", path="tests/test_a.py", content="x")),
        replied("r1", 0, {"content": "I change it\n```bash\nrm tests/test_a.py\n```\n"}),
        replied("r2", 0, {"content": "run `rm tests/test_a.py` yourself"}),
        replied("r3", 0, tool("write_file", path="src/a.py", content="rm tests/test_a.py")),
    ]
    assert behavior_metrics(calls, rollouts, PATTERNS)["behavior/test_edits"] == 0.5
    assert behavior_metrics(calls, rollouts, ("src/*",))["behavior/test_edits"] == 0.25


def test_text_of_a_reply_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, "odd", {"type": "text", "text": "b"}]
    assert [text_of({"content": content}) for content in ("x", parts, None)] == ["x", "ab", ""]
