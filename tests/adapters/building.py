"""Spans as spangrad's tracer and gateway write them, and calls with ids, in one line each."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

USER = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
REPLY = [{"role": "assistant", "parts": [{"type": "text", "content": "hello"}], "finish_reason": "stop"}]


def span(
    span_id: str = "a",
    *,
    trace: str = "1",
    parent: str | None = None,
    scope: str = c.SCOPE_TRACER,
    start_ns: int = 0,
    end_ns: int | None = None,
    kind: int = 3,
    status_code: int = 0,
    status_message: str = "",
    dropped_attributes: int = 0,
    rollout_id: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Span:
    """A span with short ids."""
    return Span(
        trace_id=trace.rjust(32, "0"),
        span_id=span_id.encode().hex().rjust(16, "0"),
        parent_span_id=parent.encode().hex().rjust(16, "0") if parent else None,
        name="chat policy",
        kind=kind,
        start_ns=start_ns,
        end_ns=start_ns + 10 if end_ns is None else end_ns,
        status_code=status_code,
        status_message=status_message,
        scope=scope,
        attributes=dict(attributes or {}),
        dropped_attributes=dropped_attributes,
        rollout_id=rollout_id,
    )


def text_attributes(**more: Any) -> dict[str, Any]:
    """A call told as text."""
    return {
        c.OPERATION_NAME: "chat",
        c.PROVIDER_NAME: "openai",
        c.REQUEST_MODEL: "policy",
        c.REQUEST_TEMPERATURE: 1.0,
        c.RESPONSE_ID: "r1",
        c.RESPONSE_FINISH_REASONS: ["stop"],
        c.INPUT_MESSAGES: json.dumps(USER),
        c.OUTPUT_MESSAGES: json.dumps(REPLY),
        **more,
    }


def token_attributes(
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    logprobs: Sequence[float] | None = None,
    version: int | None = 7,
    choice: int = 0,
) -> dict[str, Any]:
    """Ids, logprobs and versions of one choice, packed."""
    attributes: dict[str, Any] = {
        c.PROMPT_TOKEN_IDS: c.pack_ints(prompt),
        c.choice_key(c.SAMPLED_TOKEN_IDS, choice): c.pack_ints(sampled),
        c.choice_key(c.SAMPLED_LOGPROBS, choice): c.pack_floats(
            [-0.5] * len(sampled) if logprobs is None else logprobs
        ),
        c.LOGPROBS_MODE: "processed",
    }
    if version is not None:
        attributes[c.choice_key(c.POLICY_VERSIONS, choice)] = c.pack_ints([version] * len(sampled))
    return attributes


def call(
    name: str,
    prompt: Sequence[int],
    *replies: Sequence[int],
    start_ns: int = 0,
    rollout_id: str | None = "r",
    grade: Grade = Grade.EXACT,
    **more: Any,
) -> ModelCall:
    """A call with ids: logprob -i/10 and version i for the i-th sampled token."""
    choices = [
        Choice(
            message={"role": "assistant", "content": name},
            finish_reason="stop",
            sampled_token_ids=list(reply),
            logprobs=[-i / 10 for i in range(len(reply))],
            policy_versions=list(range(len(reply))),
        )
        for reply in replies
    ]
    fields: dict[str, Any] = {
        "call_id": name,
        "trace_id": "t",
        "span_id": name,
        "span_ids": (name,),
        "dialect": "spangrad",
        "start_ns": start_ns,
        "end_ns": start_ns + 1,
        "grade": grade,
        "grade_reasons": (),
        "rollout_id": rollout_id,
        "choices": choices,
        "prompt_token_ids": list(prompt),
        **more,
    }
    return ModelCall(**fields)
