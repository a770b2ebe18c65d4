"""The views of a store, asked in a real file."""

from dataclasses import replace
from typing import Any

import pytest

from spangrad.adapters.purpose import NO_TURN_LEFT
from spangrad.store import SpanStore
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, RunEvent, Span, Update, UpdateSample
from spangrad.store.views import VIEWS

CALL = {
    "attempt": 0,
    "dialect": "d",
    "grade": "text",
    "grade_reasons": ["no token ids", "no token ids: choice 1"],
    "purpose": "agent",
    "start_ns": 1_000,
    "end_ns": 3_000_000,
}


def call(name, **fields):
    return {**CALL, "call_id": name, "rollout_id": "r", "trace_id": "1" * 32, "span_id": "2" * 16} | fields


def tool(number, **fields: Any):
    named = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"}
    attributes = fields.pop("attributes", named)
    told: dict[str, Any] = {"status_code": 0, "status_message": ""}
    ids = ("1" * 32, f"{number:016x}")
    return Span(*ids, None, "t", 1, 1, 2, scope="s", attributes=attributes, **(told | fields))


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


@pytest.mark.parametrize("view", [view.name for view in VIEWS])
def test_every_view_answers_for_an_empty_store(store, view):
    assert store.query(f"SELECT * FROM {view}") == []


def test_steps_are_the_agents_calls_in_order(store):
    store.put_calls([call("b", start_ns=5), call("a", start_ns=2), call("t", start_ns=1, purpose="title")])
    rows = store.query("SELECT step, call_id FROM steps ORDER BY step")
    assert rows == [{"step": 0, "call_id": "a"}, {"step": 1, "call_id": "b"}]


def test_tool_errors_of_several_recorders(store):
    inference = {"openinference.span.kind": "TOOL", "tool.name": "convert"}
    failing = {"status_code": 2, "status_message": "no such city"}
    spans = [
        tool(1),
        tool(2, **failing),
        tool(3, attributes=inference, status_code=2),
        tool(4, attributes={}),
    ]
    store.put_otlp(encode_request(spans))
    assert store.query("SELECT count(*) AS n FROM tools") == [{"n": 3}]
    rows = store.query("SELECT tool, error FROM tool_errors ORDER BY span_id")
    assert rows == [{"tool": "look", "error": "no such city"}, {"tool": "convert", "error": ""}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gen_ai.operation.name", "execute_tool"),
        ("spangrad.span.role", "tool"),
        ("openinference.span.kind", "TOOL"),
        ("langfuse.observation.type", "tool"),
        ("traceloop.span.kind", "tool"),
        ("langsmith.span.kind", "tool"),
        ("mlflow.spanType", '"TOOL"'),
    ],
)
def test_a_tool_of_any_recorder_is_of_attempt_0_where_none_is_named_as_its_calls_are(store, name, value):
    others = [tool(2, attributes={name: f"{value}s"}), tool(3, attributes={f"{name}s": value})]
    store.put_otlp(encode_request([tool(1, attributes={"spangrad.rollout.id": "r", name: value}), *others]))
    rows = store.query("SELECT span_id, rollout_id, attempt FROM tools")
    assert rows == [{"span_id": f"{1:016x}", "rollout_id": "r", "attempt": 0}]


def test_lineage_leads_from_an_update_to_the_span(store):
    store.enqueue([Rollout("r")])
    [claimed] = store.claim(worker="w")
    store.finish("r", claimed.attempt)
    store.put_calls([call("c", step_name="plan")])
    sample = UpdateSample("r", "c", 0, 0.5, 7, 3, 1)
    store.commit_update(Update("run", 0, 4, ["r"], [sample], {}, "folder"))
    [row] = store.query("SELECT * EXCLUDE committed FROM lineage")
    assert (row["trained_version"], row["sampled_version"], row["span_id"]) == (4, 3, "2" * 16)
    assert (row["advantage"], row["trained_tokens"], row["step_name"]) == (0.5, 7, "plan")


def test_alarms_show_the_newest_first_with_version_and_checkpoint(store):
    for index in range(2):
        store.commit_update(Update("run", index, index + 4, [], [], {}, f"folder/{index}"))
        store.put_events([RunEvent("run", index, "gap", 0.2, 0.1, "warn", "wide", time_ns=index + 1)])
    rows = store.query("SELECT * EXCLUDE (run_id, seen) FROM alarms")
    assert [(row["update_index"], row["trained_version"], row["checkpoint"]) for row in rows] == [
        (1, 5, "folder/1"),
        (0, 4, "folder/0"),
    ]
    assert (rows[0]["monitor"], rows[0]["action"], rows[0]["value"]) == ("gap", "warn", 0.2)


def test_outcomes_show_the_last_trusted_reward_of_each_name(store):
    store.enqueue([Rollout("r")])
    store.put_rewards([Reward("r", 0.0, time_ns=1, attempt=0), Reward("r", 1.0, time_ns=2, attempt=0)])
    store.put_rewards([Reward("r", 9.0, time_ns=3, attempt=0)], author=RewardAuthor.AGENT)
    store.put_rewards([Reward("r", 0.3, name="style", time_ns=1, attempt=0)])
    store.put_calls([call("a", sampled_tokens=5, grade="exact"), call("b", sampled_tokens=2)])
    [row] = store.query("SELECT rewards, calls, sampled_tokens, worst_grade FROM outcomes")
    assert row == {
        "rewards": {"reward": 1.0, "style": 0.3},
        "calls": 2,
        "sampled_tokens": 7,
        "worst_grade": "text",
    }


def test_outcomes_tell_whose_turns_did_not_suffice(store):
    store.enqueue([Rollout("r", turn_budget=1), Rollout("s", turn_budget=1), Rollout("t")])
    beyond = {"purpose": "other", "purpose_reason": NO_TURN_LEFT, "grade": "unusable"}
    store.put_calls([call("a"), call("b", **beyond), call("c", rollout_id="s")])
    store.put_calls([call("d", rollout_id="s", attempt=1, **beyond)])  # of another attempt
    sql = "SELECT rollout_id, turn_budget, out_of_turns, calls, worst_grade FROM outcomes ORDER BY rollout_id"
    assert [tuple(row.values()) for row in store.query(sql)] == [
        ("r", 1, True, 1, "text"),
        ("s", 1, False, 1, "text"),
        ("t", None, False, 0, None),
    ]


def test_a_call_counts_once_for_a_kind_of_reason(store):
    store.put_calls([call("a"), call("b", grade="exact", grade_reasons=[])])
    rows = store.query("SELECT grade, reason, calls FROM grades ORDER BY grade")
    assert rows == [
        {"grade": "exact", "reason": None, "calls": 1},
        {"grade": "text", "reason": "no token ids", "calls": 1},
    ]


def test_a_clock_that_says_anything_costs_no_other_row(store):
    owned = {"spangrad.rollout.id": "r", "gen_ai.operation.name": "execute_tool"}
    never = 2**64 - 1
    store.put_otlp(
        encode_request([tool(1), replace(tool(2, attributes=owned, status_code=2), start_ns=never, end_ns=0)])
    )
    store.put_calls([call("a"), call("b", start_ns=never, end_ns=never)])
    store.put_rewards([Reward("r", 1.0, time_ns=2**63 - 1)])
    for view, rows in (("steps", 2), ("tools", 2), ("tool_errors", 1), ("outcomes", 1)):
        found = store.query(f"SELECT started FROM {view} ORDER BY started NULLS LAST")
        assert len(found) == rows
        assert found[-1] == {"started": None}
    assert len(SpanStore(store).calls().rows()) == 2
    assert len(SpanStore(store).spans().rows()) == 2
    assert SpanStore(store).rewards().rows()[0]["given"] is None
