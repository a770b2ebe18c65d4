"""Which readings tell of one call, and what they say together.

Which clients' accounts are of one call, `same_call.py` says. A gateway's account belongs to
the client's span above it, or else to the client's of the same response id: in its trace or
rollout, or anywhere if the times and the requests agree.

Invariants:
* an HTTP retry below the SDK (several gateway spans under one client span) is one
  call: the attempt whose reply the client got;
* a reply that the client never read is a call of its own, and unusable;
* faults and notes follow the span whose content is used;
* what one account was redacted in is not trained, though another has it in clear.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from spangrad.adapters.model_call import Choice
from spangrad.adapters.reading import Reading
from spangrad.adapters.same_call import (
    CANDIDATES,
    begin_together,
    group_accounts,
    named_rollout,
    same_place,
    same_request,
)

T = TypeVar("T")

NEVER_READ: Final = "the agent never read this reply"
SERVED_BEFORE: Final = "the same reply was served before: nothing was sampled"

ANYWHERE: Final = ""
Parents = Mapping[tuple[str, str], str | None]
"""(trace_id, span_id) -> parent span id, of every span."""


def cluster(readings: Sequence[Reading], parents: Parents) -> list[list[Reading]]:
    """Group readings by call, the one that names the call first in its group."""
    groups = group_accounts([reading for reading in readings if not reading.is_gateway])
    if not any(reading.is_gateway for reading in readings):
        return groups
    owner = {_key(reading): group for group in groups for reading in group}
    by_response: dict[tuple[str, str], list[list[Reading]]] = {}
    for group in groups:
        for key in dict.fromkeys(key for reading in group for key in _response_keys(reading)):
            by_response.setdefault(key, []).append(group)
    below: dict[int, list[Reading]] = {}
    alone: list[list[Reading]] = []
    for reading in readings:
        if not reading.is_gateway:
            continue
        found = _client_above(reading, parents, owner) or _client_with_id(reading, by_response)
        if found is None:
            alone.append([reading])
        else:
            below.setdefault(id(found), []).append(reading)
    for group in groups:
        alone.extend(_attach(group, below.get(id(group), [])))
    return groups + alone


def merge(group: Sequence[Reading]) -> Reading:
    """One reading of a call: names from the first of the group, content from the best of it.

    Gateway spans of retries that failed are part of the group and say nothing about the outcome.
    """
    namer = group[0]
    if len(group) == 1:
        return namer
    content = max(group, key=_content_quality)
    others = [content, *group]
    told = [content, *(reading for reading in group if not reading.is_gateway)]
    return replace(
        content,
        span=namer.span,
        dialect=namer.dialect,
        model=_first(namer.model, *(r.model for r in others)),
        response_id=_first(*(r.response_id for r in others)),
        agent_name=_first(*(r.agent_name for r in group)),
        step_name=_first(*(r.step_name for r in group)),
        step_index=_first(*(r.step_index for r in group)),
        state_key=_first(*(r.state_key for r in group)),
        ancestor_span_ids=namer.ancestor_span_ids,
        rollout_id=_first(*(r.rollout_id for r in group)),
        conversation_id=_first(*(r.conversation_id for r in group)),
        user_id=_first(*(r.user_id for r in group)),
        attempt=_first(*(r.attempt for r in group)),
        purpose=_first(*(r.purpose for r in group)),
        is_trained_policy=_first(content.is_trained_policy, *(r.is_trained_policy for r in group)),
        messages=next((r.messages for r in others if r.messages), ()),
        tools=next((r.tools for r in others if r.tools), ()),
        keeps_tools=any(r.keeps_tools for r in others),
        sampling=next((r.sampling for r in others if r.sampling), {}),
        choices=_choices(others),
        usage=next((r.usage for r in others if r.usage), {}),
        error=_first(*(r.error for r in told)),
        is_stream_complete=_both(*(r.is_stream_complete for r in told)),
        is_constrained=any(r.is_constrained for r in told),
        redacted=tuple(dict.fromkeys(name for r in told for name in r.redacted)),
        is_cached=any(r.is_cached for r in told),
        synthetic=_first(*(r.synthetic for r in group)),
    )


def mark_repeated(readings: Sequence[Reading]) -> list[Reading]:
    """Fault every reading that is the reply of an earlier one once more, in the order given.

    A cache without a mark serves the same response id, request and reply to the same rollout. Equal ids alone
    prove nothing: some servers number anew after every start.
    """
    marked = {id(reading): reading for reading in readings}
    seen: dict[tuple[str | None, int | None, str], list[Reading]] = {}
    for reading in sorted(readings, key=lambda r: (r.span.start_ns, r.span.span_id)):
        if reading.response_id is None or not reading.choices or reading.error is not None:
            continue
        place = reading.rollout_id or reading.span.trace_id
        earlier = seen.setdefault((place, reading.attempt, reading.response_id), [])
        if any(_is_repeated(reading, first) for first in earlier):
            marked[id(reading)] = replace(reading, faults=(*reading.faults, SERVED_BEFORE))
        else:
            earlier.append(reading)
    return [marked[id(reading)] for reading in readings]


def _is_repeated(reading: Reading, first: Reading) -> bool:
    return (
        first.span.end_ns <= reading.span.start_ns
        and first.messages == reading.messages
        and first.prompt_token_ids == reading.prompt_token_ids
        and first.choices == reading.choices
    )


def _client_above(
    reading: Reading, parents: Parents, owner: Mapping[tuple[str, str], list[Reading]]
) -> list[Reading] | None:
    """The group of the nearest client call span above a gateway span."""
    trace_id, seen = reading.span.trace_id, set[str]()
    span_id = reading.span.parent_span_id
    while span_id is not None and span_id not in seen:
        if (trace_id, span_id) in owner:
            return owner[trace_id, span_id]
        seen.add(span_id)
        span_id = parents.get((trace_id, span_id))
    return None


def _client_with_id(
    reading: Reading, by_response: Mapping[tuple[str, str], list[list[Reading]]]
) -> list[Reading] | None:
    """The group of the same response id: in the gateway span's trace or rollout, or at the same time."""
    *near, anywhere = _response_keys(reading) or [("", "")]
    for key in near:
        if key in by_response:
            latest = by_response[key][-1]
            return next((g for g in by_response[key][-CANDIDATES:] if _is_around(reading, g)), latest)
    groups = by_response.get(anywhere, [])
    before = bisect_right(groups, reading.span.start_ns, key=lambda group: group[0].span.start_ns)
    around = [
        group
        for group in reversed(groups[max(0, before - CANDIDATES) : before])
        if _is_around(reading, group)
        and all(same_place(member, reading) and same_request(member, reading) for member in group)
    ]
    return around[0] if around else None


def _is_around(reading: Reading, group: Sequence[Reading]) -> bool:
    return all(begin_together(member, reading) for member in group)


def _attach(group: list[Reading], gateway: Sequence[Reading]) -> list[list[Reading]]:
    """Merge into the group the gateway's account of the reply that the client got.

    Returns the replies that it never got, each as a call of its own.
    """
    if not gateway:
        return []
    wanted = {reading.response_id for reading in group if reading.response_id}
    in_order = sorted(gateway, key=lambda r: (r.error is None, r.span.start_ns))
    matching = [reading for reading in in_order if reading.response_id in wanted]
    read = (matching or in_order)[-1]
    group.append(read)
    unread = [r for r in in_order if r is not read and r.error is None and r.choices]
    group.extend(r for r in in_order if r is not read and not any(r is u for u in unread))
    return [[replace(r, faults=(*r.faults, NEVER_READ))] for r in unread]


def _content_quality(reading: Reading) -> tuple[bool, bool, bool, bool]:
    has_ids = any(choice.sampled_token_ids for choice in reading.choices)
    return (reading.error is None, has_ids, bool(reading.messages and not reading.faults), reading.is_gateway)


def _key(reading: Reading) -> tuple[str, str]:
    return reading.span.trace_id, reading.span.span_id


def _response_keys(reading: Reading) -> list[tuple[str, str]]:
    """Where a response id is looked for: in the trace, in the rollout, anywhere."""
    if reading.response_id is None:
        return []
    places = (reading.span.trace_id, named_rollout(reading), ANYWHERE)
    return [(place, reading.response_id) for place in places if place is not None]


def _choices(accounts: Sequence[Reading]) -> Sequence[Choice]:
    """The first account's choices; a finish reason and logprobs that it lacks from another one."""
    told = [reading.choices for reading in accounts if reading.choices]
    if not told:
        return ()
    same = [choices for choices in told if len(choices) == len(told[0])]
    return [_filled(versions[0], versions[1:]) for versions in zip(*same, strict=True)]


def _filled(choice: Choice, others: Sequence[Choice]) -> Choice:
    finish, logprobs = choice.finish_reason, choice.logprobs
    if finish is None:
        finish = next((other.finish_reason for other in others if other.finish_reason), None)
    if logprobs is None and choice.sampled_token_ids is not None:
        count = len(choice.sampled_token_ids)
        found = (other.logprobs for other in others if other.logprobs is not None)
        logprobs = next((values for values in found if len(values) == count), None)
    return replace(choice, finish_reason=finish, logprobs=logprobs)


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _both(*values: bool | None) -> bool | None:
    if False in values:
        return False
    return True if True in values else None
