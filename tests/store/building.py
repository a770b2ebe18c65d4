"""Spans for the store's tests."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.store.otlp import encode_request
from spangrad.store.records import Span, SpanEvent
from spangrad.tracer import conventions as names


def new_trace() -> str:
    return secrets.token_hex(16)


def span(
    trace_id: str,
    *,
    parent: str | None = None,
    start_ns: int = 1000,
    name: str = "work",
    attributes: Mapping[str, Any] | None = None,
    events: Sequence[SpanEvent] = (),
    rollout: str | None = None,
    attempt: int | None = None,
    status_code: int = 0,
) -> Span:
    own = dict(attributes or {})
    if rollout:
        own[names.ROLLOUT_ID] = rollout
    if attempt is not None:
        own[names.ATTEMPT] = attempt
    return Span(
        trace_id=trace_id,
        span_id=secrets.token_hex(8),
        parent_span_id=parent,
        name=name,
        kind=1,
        start_ns=start_ns,
        end_ns=start_ns + 10,
        status_code=status_code,
        status_message="",
        scope="test",
        attributes=own,
        events=events,
        rollout_id=rollout,
        attempt=attempt if rollout else None,
    )


def conversation(trace_id: str, rollout: str, turns: int) -> list[Span]:
    """Model calls whose prompts each repeat everything before; 100 new ids and 2 new messages a turn."""
    ids = list(range(500))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a clerk. " * 30}]
    spans = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": f"question {turn} of {trace_id}: " + "why? " * 40}]
        sampled = [7000 + turn] * 60
        reply = {"role": "assistant", "content": f"answer {turn} of {trace_id}"}
        attributes = {
            names.OPERATION_NAME: "chat",
            names.INPUT_MESSAGES: json.dumps(messages),
            names.OUTPUT_MESSAGES: json.dumps([reply | {"finish_reason": "stop"}]),
            names.TOOL_DEFINITIONS: json.dumps([{"type": "function", "name": f"tool_{i}"} for i in range(5)]),
            names.PROMPT_TOKEN_IDS: names.pack_ints(ids),
            names.SAMPLED_TOKEN_IDS: names.pack_ints(sampled),
            names.SAMPLED_LOGPROBS: names.pack_floats([-0.25] * 60),
            names.POLICY_VERSIONS: names.pack_ints([3] * 60),
        }
        spans.append(
            span(
                trace_id, rollout=rollout, attempt=0, start_ns=1000 + turn, name="chat", attributes=attributes
            )
        )
        ids = ids + sampled + [9000 + turn] * 40
        messages = [*messages, reply]
    return spans


def request(spans: Sequence[Span]) -> bytes:
    return encode_request(spans)
