"""Spans in which one recorder tells of one call bit by bit -> one reading each.

A part belongs to the call span above it, or else to the request of its recorder that was told without a
reply, says the same and ended nearest to when the part's reply began. Knows readings; does not know which
recorders do so.

Invariants:
* a part whose call is not there is a call of its own, a request whose reply is not there stays one;
* names, place and beginning are the first span's, the end is the last one's;
* a part that can't be read takes nothing from what the first span says.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from spangrad.adapters.reading import Reading


def join_parts(readings: Sequence[Reading]) -> list[Reading]:
    """The readings, each part put into the one that it belongs to."""
    parts = sorted((r for r in readings if r.is_part), key=lambda r: (r.span.start_ns, r.span.span_id))
    if not parts:
        return list(readings)
    whole = {id(r): r for r in readings if not r.is_part}
    above = {(r.span.trace_id, r.span.span_id): r for r in whole.values()}
    waiting: dict[str, list[Reading]] = {}
    for reading in whole.values():
        if not reading.choices and reading.error is None:
            waiting.setdefault(_asked(reading), []).append(reading)
    alone: list[Reading] = []
    for part in parts:
        owner = above.get((part.span.trace_id, part.span.parent_span_id or ""))
        if owner is None or owner.span.scope != part.span.scope:
            owner = _nearest(part, waiting.get(_asked(part), ())) if part.began_ns is not None else None
            if owner is not None:
                waiting[_asked(part)] = [r for r in waiting[_asked(part)] if r is not owner]
        if owner is None:
            alone.append(replace(part, is_part=False))
        else:
            whole[id(owner)] = _joined(whole[id(owner)], part)
    return [*whole.values(), *alone]


def _asked(reading: Reading) -> str:
    """The same for a request and the part that tells of its reply."""
    request = [reading.dialect, reading.model, list(reading.messages), list(reading.tools)]
    return json.dumps(request, sort_keys=True, default=str)


def _nearest(part: Reading, requests: Iterable[Reading]) -> Reading | None:
    began = part.began_ns or part.span.start_ns
    earlier = [r for r in requests if r.span.start_ns <= part.span.start_ns]
    return min(
        earlier,
        key=lambda r: (r.span.trace_id != part.span.trace_id, abs(began - r.span.end_ns), r.span.span_id),
        default=None,
    )


def _joined(whole: Reading, part: Reading) -> Reading:
    span = replace(whole.span, end_ns=max(whole.span.end_ns, part.span.end_ns))
    members = (*whole.parts, part.span)
    if whole.choices and (part.faults or not part.choices):
        losses = (*whole.token_losses, *part.faults, *part.token_losses)
        return replace(whole, span=span, parts=members, token_losses=losses)
    return replace(
        part,
        span=span,
        parts=members,
        is_part=False,
        model=whole.model or part.model,
        response_id=part.response_id or whole.response_id,
        messages=part.messages or whole.messages,
        tools=part.tools or whole.tools,
        keeps_tools=part.keeps_tools or whole.keeps_tools,
        sampling={**whole.sampling, **part.sampling},
        agent_name=whole.agent_name or part.agent_name,
        step_name=whole.step_name or part.step_name,
        step_index=whole.step_index if whole.step_name else part.step_index,
        state_key=whole.state_key or part.state_key,
        ancestor_span_ids=whole.ancestor_span_ids,
        rollout_id=whole.rollout_id or part.rollout_id,
        conversation_id=whole.conversation_id or part.conversation_id,
        user_id=whole.user_id or part.user_id,
        attempt=whole.attempt if whole.attempt is not None else part.attempt,
        purpose=whole.purpose or part.purpose,
        is_trained_policy=part.is_trained_policy
        if whole.is_trained_policy is None
        else whole.is_trained_policy,
        error=whole.error or part.error,
        usage={**whole.usage, **part.usage},
        is_streamed=whole.is_streamed or part.is_streamed,
        is_constrained=whole.is_constrained or part.is_constrained,
        redacted=tuple(dict.fromkeys((*whole.redacted, *part.redacted))),
        is_cached=whole.is_cached or part.is_cached,
    )
