"""Plain OpenAI chat: conversations and raw exchanges become the calls that they are."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.exports.formats import format_of
from spangrad.adapters.exports.making import time_ns
from spangrad.adapters.exports.plain_chat import is_row, scores_of, spans_of
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.adapters.purpose import purpose_of  # noqa: F401  (the module that names purposes)
from tests.adapters import picnic
from tests.adapters.captured import FIXTURES

FOLDER = FIXTURES / "exports" / "plain_chat"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def calls(*given_rows: dict[str, Any]):
    return calls_from_spans(span for row in given_rows for span in spans_of(row))


@pytest.mark.parametrize("name", ["messages", "request_response"])
def test_the_conversation_is_told_as_every_recorder_tells_it(name):
    found = calls(*rows(name))
    assert picnic.told(found) == picnic.expected()
    assert [call.choices[0].finish_reason for call in found] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in found[0].tools] == list(picnic.TOOLS)
    asked = [call["function"]["arguments"] for call in found[0].choices[0].message["tool_calls"]]
    asked += [call["function"]["arguments"] for call in found[1].choices[0].message["tool_calls"]][:1]
    assert asked == picnic.ARGUMENTS
    assert {call.conversation_id for call in found} == {"sess-7"}
    assert len({call.trace_id for call in found}) == 1
    assert {call.dialect for call in found} == {"plain_chat"}


def test_a_conversation_is_text_and_its_finish_reasons_are_not_told():
    for call in calls(*rows("messages")):
        assert call.grade is Grade.TEXT
        assert call.grade_reasons == (
            "no token ids",
            "finish reasons are not told: a conversation was written down",
        )


def test_ids_and_logprobs_of_the_raw_response_are_kept():
    told = rows("request_response")
    found = calls(*told)
    for row, call in zip(told, found, strict=True):
        choice = row["response"]["choices"][0]
        assert call.prompt_token_ids == row["response"]["prompt_token_ids"]
        assert call.choices[0].sampled_token_ids == choice["token_ids"]
        logprobs = [item["logprob"] for item in choice["logprobs"]["content"]]
        assert call.choices[0].logprobs == pytest.approx(logprobs)
        assert call.grade is Grade.IDS
        assert call.grade_reasons == (
            "policy version unknown: choice 0",
            "logprobs are not of the sampled distribution: they have no known mode, with temperature 0.7",
        )
        assert call.response_id == row["response"]["id"]
        assert call.start_ns == time_ns(row["started_at"])
        assert call.sampling["max_tokens"] == 256
        assert call.usage["output_tokens"] == len(choice["token_ids"])


def test_a_stream_is_what_its_chunks_say():
    request = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    chunks = [
        {"id": "r", "prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"role": "assistant"}}]},
        {"choices": [{"index": 0, "delta": {"content": "hel"}, "token_ids": [3]}]},
        {"choices": [{"index": 0, "delta": {"content": "lo"}, "token_ids": [4], "finish_reason": "stop"}]},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    [call] = calls({"request": request, "response": body})
    assert call.choices[0].message["content"] == "hello"
    assert (call.prompt_token_ids, call.choices[0].sampled_token_ids) == ([1, 2], [3, 4])
    [left] = calls({"request": request, "response": body[:-150]})
    assert left.grade is Grade.UNUSABLE
    assert left.grade_reasons[0] == "stream was left early"


def test_a_batch_and_a_proxy_put_bodies_around_it():
    row = rows("request_response")[0]
    wrapped = {
        "custom_id": "a",
        "request": {"method": "POST", "body": row["request"]},
        "response": {"status_code": 200, "body": json.dumps(row["response"])},
    }
    [call] = calls(wrapped)
    assert picnic.told([call]) == picnic.expected()[:1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"response": {"error": {"type": "server_error", "message": "x"}}}, "error: server_error: x"),
        ({"response": None, "error": "timed out"}, "error: timed out"),
        ({"response": None}, "error: no response was recorded"),
    ],
)
def test_a_call_that_failed_is_unusable_and_says_why(row, reason):
    [call] = calls({"request": {"messages": [{"role": "user", "content": "hi"}]}, **row})
    assert (call.grade, call.grade_reasons[0]) == (Grade.UNUSABLE, reason)


def test_the_responses_api_and_anthropic_are_read():
    answer = {
        "object": "response",
        "id": "resp_1",
        "status": "completed",
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}
        ],
    }
    claude = {
        "type": "message",
        "id": "msg_1",
        "content": [{"type": "text", "text": "B"}],
        "stop_reason": "end_turn",
    }
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    found = calls(
        {"request": {"model": "m", "input": "hi"}, "response": answer}, {"request": asked, "response": claude}
    )
    assert {call.response_id: call.choices[0].message["content"] for call in found} == {
        "resp_1": "A",
        "msg_1": "B",
    }
    assert {call.grade for call in found} == {Grade.TEXT}


def test_a_message_of_weight_0_is_not_trained():
    row = rows("messages")[0]
    row["messages"][2]["weight"] = 0
    assert [call.purpose for call in calls(row)] == [Purpose.OTHER, *[Purpose.AGENT] * 3]


def test_rewards_are_of_the_trace():
    row = rows("messages")[0]
    trace_id = next(spans_of(row)).trace_id
    [score] = scores_of(row)
    assert (score.trace_id, score.span_id, score.name, score.value) == (trace_id, None, "reward", 1.0)
    named = {**row, "reward": None, "rewards": {"style": 0.5, "done": True, "note": "good"}}
    assert [(s.name, s.value) for s in scores_of(named)] == [("style", 0.5), ("done", 1.0), ("note", None)]


@pytest.mark.parametrize(
    "value", ["0.5", "", float("nan"), float("inf"), 10**400, {}, [], [0.5], {"value": 1.0}]
)
def test_a_reward_that_is_no_number_is_a_score_without_one(value):
    row = {**rows("messages")[0], "reward": value}
    assert [(s.name, s.value) for s in scores_of(row)] == [("reward", None)]
    assert [(s.name, s.value) for s in scores_of({**row, "reward": None, "rewards": [1.0]})] == [
        ("rewards", None)
    ]
    assert list(scores_of({**row, "reward": None, "rewards": {"style": None}})) == []


def test_the_same_row_is_the_same_spans_and_another_is_not():
    first, second = rows("request_response")[:2]
    assert list(spans_of(first)) == list(spans_of(json.loads(json.dumps(first))))
    assert len({span.span_id for row in (first, second) for span in spans_of(row)}) == 2
    alone = {key: value for key, value in first.items() if key != "session_id"}
    assert next(spans_of(alone)).trace_id != next(spans_of(first)).trace_id


def test_other_rows_are_not_plain_chat():
    others: list[dict[str, Any]] = [
        {},
        {"messages": "hi"},
        {"messages": []},
        {"messages": [{"content": "x"}]},
    ]
    for row in (*others, {"request": {}}):
        assert not is_row(row)
        assert not list(spans_of(row)) and not list(scores_of(row))
    assert format_of({"x": 1}) is None
    assert format_of(rows("messages")[0]).name == "plain_chat"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("1970-01-01T00:00:01Z", 10**9),
        ("1970-01-01 00:00:01.5", 15 * 10**8),
        ("1970-01-01T01:00:01+01:00", 10**9),
        (1_700_000_000, 1_700_000_000 * 10**9),
        (1_700_000_000.5, 1_700_000_000 * 10**9 + 5 * 10**8),
        (1_700_000_000_000, 1_700_000_000 * 10**9),
        (1_700_000_000_000_000, 1_700_000_000 * 10**9),
        (1_700_000_000_000_000_001, 1_700_000_000_000_000_001),
        ("1700000000", 1_700_000_000 * 10**9),
        ("yesterday", None),
        (None, None),
        (True, None),
        (float("nan"), None),
        (-1, None),
    ],
)
def test_times_are_read_in_every_unit(told, expected):
    assert time_ns(told) == expected


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "body", "choices", "error"]), inner
        )
    ),
    max_leaves=5,
)


@given(
    junk=_JUNK, place=st.sampled_from(["request", "response", "messages", "tools", "choices", "usage", "row"])
)
def test_junk_anywhere_never_raises(junk, place):
    row = json.loads(json.dumps(rows("request_response")[0]))
    if place == "row":
        row = {"request": junk, "response": junk, "started_at": junk, "session_id": junk, "reward": junk}
    elif place in ("request", "response"):
        row[place] = junk
    else:
        row["request" if place in ("messages", "tools") else "response"][place] = junk
    chat = {
        "messages": [{"role": "assistant", "tool_calls": junk, "content": junk}],
        "tools": junk,
        "model": junk,
    }
    for each in (row, chat):
        assert all(call.grade for call in calls(each))
        assert list(scores_of(each)) is not None
