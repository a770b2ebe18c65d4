"""Plain OpenAI chat: conversations (`messages`, as for fine-tuning) and raw requests with their responses.

A conversation is a trace, each message of the assistant a call whose request is all before it. A request with
its response is one call; those of one session are one trace. Ids and logprobs of a raw response are kept.

Invariants: rows that say the same are the same spans; a tool call's arguments stay the string that they were;
a message that the file weighs 0 is kept out of training (`purpose` other).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from spangrad.adapters.dialects.imported import CONVERSATION, SCOPE_PLAIN_CHAT
from spangrad.adapters.exports.making import (
    call_attributes,
    call_span,
    decoded,
    number,
    session_of,
    span_id_of,
    time_ns,
    trace_id_of,
)
from spangrad.adapters.exports.score import Score
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

NAME: Final = "plain_chat"
METADATA: Final = "spangrad.exports.metadata"
_PLACED: Final = frozenset({"messages", "tools", "functions", "request", "response", "reward", "rewards"})
_STARTS: Final = ("started_at", "start_time", "timestamp", "created_at", "created", "time")
_ENDS: Final = ("ended_at", "end_time", "completed_at")


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is a conversation, or a request with its response."""
    return _is_conversation(row) or _is_exchange(row)


def spans_of(row: Mapping[str, Any]) -> Iterator[Span]:
    """One span for each call."""
    if _is_exchange(row):
        yield _exchange(row)
    elif _is_conversation(row):
        yield from _conversation(row)


def scores_of(row: Mapping[str, Any]) -> Iterator[Score]:
    """`reward` (a number), and `rewards` (name -> number); null is no score.

    Any other value, text of a number too, is a score without one: it gives no reward and is counted.
    """
    if not is_row(row):
        return
    named = row.get("rewards")
    given = [("reward", row.get("reward"))]
    given += named.items() if isinstance(named, Mapping) else [("rewards", named)]
    for name, value in given:
        if value is not None:
            yield Score(_trace_id(row), None, str(name), number(value), None, None, None, _end(row), NAME)


def _is_conversation(row: Mapping[str, Any]) -> bool:
    messages = row.get("messages")
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages)
    )


def _is_exchange(row: Mapping[str, Any]) -> bool:
    if "request" not in row or not {"response", "error"} & row.keys():
        return False
    request = decoded(row["request"])
    body = decoded(request.get("body")) if isinstance(request, Mapping) else None
    return any(
        isinstance(each, Mapping) and bool({"messages", "prompt", "input"} & each.keys())
        for each in (request, body)
    )


def _trace_id(row: Mapping[str, Any]) -> str:
    session = session_of(row) if _is_exchange(row) else None
    return trace_id_of(NAME, session) if session is not None else trace_id_of(NAME, row)


def _exchange(row: Mapping[str, Any]) -> Span:
    response = row.get("response")
    failed = row.get("error") if response is None else None
    attributes, error = call_attributes(row["request"], {"error": failed} if failed else response)
    start = next((ns for key in _STARTS if (ns := time_ns(row.get(key))) is not None), None)
    if start is None:
        answer = decoded(response)
        start = time_ns(answer.get("created")) if isinstance(answer, Mapping) else None
    attributes |= _said(row)
    start = start or 0
    return call_span(
        SCOPE_PLAIN_CHAT,
        _trace_id(row),
        span_id_of(NAME, row),
        attributes,
        error,
        start_ns=start,
        end_ns=max(_end(row) or start, start),
    )


def _conversation(row: Mapping[str, Any]) -> Iterator[Span]:
    start = next((ns for key in _STARTS if (ns := time_ns(row.get(key))) is not None), 0)
    trace_id = _trace_id(row)
    messages = row["messages"]
    asked = {key: row[key] for key in ("model", "tools", "functions") if row.get(key)}
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        reason = "tool_calls" if message.get("tool_calls") or message.get("function_call") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        attributes, error = call_attributes(asked | {"messages": messages[:index]}, {"choices": [choice]})
        attributes |= {CONVERSATION: True, **_said(row)}
        if message.get("weight") == 0:
            attributes[c.PURPOSE] = "other"
        yield call_span(
            SCOPE_PLAIN_CHAT,
            trace_id,
            span_id_of(NAME, row, index),
            attributes,
            error,
            start_ns=start + index,
            end_ns=start + index,
        )


def _end(row: Mapping[str, Any]) -> int | None:
    return next((ns for key in _ENDS if (ns := time_ns(row.get(key))) is not None), None)


def _said(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says beside the call."""
    session = session_of(row)
    rest = {key: value for key, value in row.items() if key not in _PLACED and value is not None}
    return ({c.CONVERSATION_ID: session} if session is not None else {}) | (
        {METADATA: json.dumps(rest, default=str)} if rest else {}
    )
