"""Spans and their log records -> ModelCalls: one per call, however many spans tell of it.

Finds the call spans, reads each in its dialect, merges the accounts of one call,
grades the result. It does not know tokens' meaning, trees or credit.

Invariants:
* a call counts once: the client's span gives names and step, the gateway's gives
  ids, logprobs, versions and the exact request;
* a span that can't be read harms no other;
* no call of an attempt that is over reaches a trainer (`calls_of`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from spangrad.adapters.conversations import service_of, user_of
from spangrad.adapters.dialects import DIALECTS, NO_DIALECT, recognise
from spangrad.adapters.dialects.dialect import Names
from spangrad.adapters.dialects.growing import read_together
from spangrad.adapters.grading import grade
from spangrad.adapters.log_events import with_logs
from spangrad.adapters.merging import cluster, mark_repeated, merge
from spangrad.adapters.model_call import ModelCall, Purpose
from spangrad.adapters.parts import join_parts
from spangrad.adapters.purpose import purpose_of
from spangrad.adapters.reading import Reading, text, whole_number
from spangrad.adapters.server_spans import with_server_spans
from spangrad.adapters.trace_faults import first_names
from spangrad.store.base import Store
from spangrad.store.records import LogRecord, Span
from spangrad.tracer import conventions as c

NO_NAMES: Final = Names()


def calls_from_spans(spans: Iterable[Span], records: Iterable[LogRecord] = ()) -> list[ModelCall]:
    """Every model call that the spans and their log records tell of, graded, ordered by start time."""
    by_id = {(span.trace_id, span.span_id): span for span in with_logs(spans, records)}
    with read_together():
        read = [DIALECTS[name].read(span) for name, span in _readable(by_id.values())]
    told = [_filled_in(reading, by_id) for reading in read]
    readings = with_server_spans(join_parts(told), by_id.values())
    parents = {key: span.parent_span_id for key, span in by_id.items()}
    groups = cluster(readings, parents)
    merged = mark_repeated([merge(group) for group in groups])
    calls = [_call(reading, group) for reading, group in zip(merged, groups, strict=True)]
    return sorted(calls, key=lambda call: (call.start_ns, call.call_id))


def calls_of(
    store: Store, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
) -> list[ModelCall]:
    """Calls of these rollouts or traces (all in the store without), those of current attempts.

    The store says which attempt is current. A span that names no attempt belongs to attempt 0.
    """
    spans = store.spans(rollout_ids, trace_ids=trace_ids)
    calls = calls_from_spans(spans, store.logs(rollout_ids, trace_ids=trace_ids))
    named = list({call.rollout_id for call in calls if call.rollout_id is not None})
    found = store.rollouts(rollout_ids=named) if named else ()
    current: dict[str | None, int] = {rollout.rollout_id: rollout.attempt for rollout in found}
    return [call for call in calls if call.attempt == current.get(call.rollout_id, call.attempt)]


def record_calls(
    store: Store,
    calls: Iterable[ModelCall],
    read: Mapping[str, int | None] | None = None,
    unknown: Iterable[Span] = (),
) -> int:
    """Write the summaries of calls to the store's table `calls`, where SQL can ask about grades and sizes.

    With `read`, these are all calls of these traces, and `unknown` those in an unknown dialect, as in
    `Store.put_calls`.
    """
    rows = [_summary(call) for call in calls]
    strays = [
        {
            "trace_id": span.trace_id,
            "span_id": span.span_id,
            "scope": span.scope,
            "attributes": first_names(span),
        }
        for span in unknown
    ]
    return store.put_calls(rows, read=read, unknown=strays) if rows or read else 0


def _summary(call: ModelCall) -> dict[str, Any]:
    versions = [version for choice in call.choices for version in choice.policy_versions or ()]
    return {
        "call_id": call.call_id,
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "trace_id": call.trace_id,
        "span_id": call.span_id,
        "dialect": call.dialect,
        "model": call.model,
        "grade": str(call.grade),
        "grade_reasons": list(call.grade_reasons),
        "finish_reason": call.choices[0].finish_reason if call.choices else None,
        "purpose": str(call.purpose),
        "step_name": call.step_name,
        "start_ns": call.start_ns,
        "end_ns": call.end_ns,
        "prompt_tokens": None if call.prompt_token_ids is None else len(call.prompt_token_ids),
        "sampled_tokens": _sampled_tokens(call),
        "policy_version": min(versions) if versions else None,
        "step_index": call.step_index,
        "state_key": call.state_key,
        "purpose_reason": call.purpose_reason,
    }


def _sampled_tokens(call: ModelCall) -> int | None:
    """By the ids; where those of the first choice are not known, what the recorder's usage says."""
    sampled = [choice.sampled_token_ids for choice in call.choices]
    if sampled and sampled[0] is not None:
        return sum(len(ids) for ids in sampled if ids is not None)
    told = call.usage.get("output_tokens")
    return told if told is not None and 0 <= told < 2**63 else None


def call_to_json(call: ModelCall) -> dict[str, Any]:
    """A call as a JSON object; per-choice fields are those of the first choice, `choices` has all."""
    choices = [
        {
            "message": dict(choice.message),
            "finish_reason": choice.finish_reason,
            "sampled_token_ids": _listed(choice.sampled_token_ids),
            "logprobs": _listed(choice.logprobs),
            "policy_versions": _listed(choice.policy_versions),
        }
        for choice in call.choices
    ]
    first: Mapping[str, Any] = choices[0] if choices else {}
    versions = first.get("policy_versions") or ()
    return {
        "call_id": call.call_id,
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "trace_id": call.trace_id,
        "span_id": call.span_id,
        "span_ids": list(call.span_ids),
        "trace_ids": list(call.trace_ids),
        "dialect": call.dialect,
        "model": call.model,
        "grade": str(call.grade),
        "grade_reasons": list(call.grade_reasons),
        "finish_reason": first.get("finish_reason"),
        "messages": [dict(message) for message in call.messages],
        "tools": [dict(tool) for tool in call.tools],
        "sampling": dict(call.sampling),
        "output": first.get("message"),
        "prompt_token_ids": _listed(call.prompt_token_ids),
        "sampled_token_ids": first.get("sampled_token_ids"),
        "logprobs": first.get("logprobs"),
        "policy_version": versions[0] if versions else None,
        "choices": choices,
        "agent_name": call.agent_name,
        "step_name": call.step_name,
        "step_index": call.step_index,
        "state_key": call.state_key,
        "parent_span_id": call.parent_span_id,
        "purpose": str(call.purpose),
        "purpose_reason": call.purpose_reason,
        "is_trained_policy": call.is_trained_policy,
        "response_id": call.response_id,
        "conversation_id": call.conversation_id,
        "user_id": call.user_id,
        "error": call.error,
        "usage": dict(call.usage),
        "start_ns": call.start_ns,
        "end_ns": call.end_ns,
    }


def _listed(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


def _readable(spans: Iterable[Span]) -> Iterator[tuple[str, Span]]:
    for span in spans:
        dialect = recognise(span)
        if dialect is not None and dialect != NO_DIALECT:
            yield dialect, span


def _filled_in(reading: Reading, by_id: Mapping[tuple[str, str], Span]) -> Reading:
    """Fill in what only the span's ancestors say: agent, step, rollout, attempt, conversation, user."""
    span, seen = reading.span, dict[str, None]()
    agent, step, index = reading.agent_name, reading.step_name, reading.step_index
    rollout, attempt = reading.rollout_id, reading.attempt
    dialect = DIALECTS[reading.dialect]
    names, conversation, user = dialect.names, reading.conversation_id, reading.user_id
    whole = by_id.get((span.trace_id, dialect.trace_span_id or ""))
    if names is not None and whole is not None:
        conversation, user = names(whole).conversation or conversation, user or user_of(whole)
    while span.span_id not in seen:
        seen[span.span_id] = None
        told = NO_NAMES if names is None or span is reading.span else names(span)
        agent = agent or text(span.attributes, c.AGENT_NAME) or told.agent
        conversation = conversation or text(span.attributes, c.CONVERSATION_ID) or told.conversation
        user = user or user_of(span)
        if step is None and told.step is not None:
            step, index = told.step, told.step_index
        if step is None and (step := text(span.attributes, c.STEP_NAME)) is not None:
            index = whole_number(span.attributes, c.STEP_INDEX)
        rollout = rollout or text(span.attributes, c.ROLLOUT_ID)
        attempt = attempt if attempt is not None else whole_number(span.attributes, c.ATTEMPT)
        parent = by_id.get((span.trace_id, span.parent_span_id or ""))
        if parent is None:
            break
        if span is reading.span and (with_parent := dialect.with_parent) is not None:
            reading = with_parent(reading, parent)
        span = parent
    reading.agent_name, reading.step_name, reading.step_index = agent, step, index
    reading.rollout_id, reading.attempt, reading.conversation_id = rollout, attempt, conversation
    reading.user_id, reading.ancestor_span_ids = user, tuple(seen)[1:]
    return reading


def _call(reading: Reading, group: Sequence[Reading]) -> ModelCall:
    span = reading.span
    level, reasons = grade(reading)
    purpose, purpose_reason = purpose_of(reading)
    attempt = reading.attempt or 0
    told_in = [told for member in group for told in (member.span, *member.parts)]
    return ModelCall(
        call_id=f"{span.trace_id}-{span.span_id}",
        trace_id=span.trace_id,
        span_id=span.span_id,
        span_ids=tuple([told.span_id for told in told_in]),
        trace_ids=tuple(dict.fromkeys([told.trace_id for told in told_in])),
        dialect=reading.dialect,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        grade=level,
        grade_reasons=reasons,
        rollout_id=reading.rollout_id,
        attempt=attempt if attempt <= c.MAX_ATTEMPT else 0,  # the store does not believe it either
        model=reading.model,
        response_id=reading.response_id,
        service=next((name for r in group if (name := service_of(r.span)) is not None), None),
        recorders=tuple(sorted({r.span.scope for r in group})),
        conversation_id=reading.conversation_id,
        user_id=reading.user_id,
        messages=reading.messages,
        tools=reading.tools,
        sampling=reading.sampling,
        choices=reading.choices,
        prompt_token_ids=reading.prompt_token_ids,
        agent_name=reading.agent_name,
        step_name=reading.step_name,
        step_index=reading.step_index,
        state_key=reading.state_key,
        ancestor_span_ids=reading.ancestor_span_ids,
        purpose=purpose,
        purpose_reason=purpose_reason,
        # A judge whose own calls are trained would learn to be pleased.
        is_trained_policy=reading.is_trained_policy is not False and purpose is not Purpose.JUDGE,
        error=reading.error,
        usage=reading.usage,
    )
