"""Which accounts of clients tell of one call: a framework's, an SDK's, two instrumentations'.

Several recorders write a call each in its own way: the inner one's span is below the outer one's, or in a
trace of its own. What shows that two accounts are of one call, the surest first: one is the nearest call
above the other; the same response id; the same request (and reply, where both know it) at the same time.
Knows readings; does not know dialects, gateways or grades.

Invariants:
* a recorder tells of a call once: two of its accounts are never joined, whatever they share;
* accounts are of one time: each begins while the other goes on;
* accounts that contradict each other are not joined: other rollouts, models, response ids, replies, and
  outside of one trace other users or requests;
* near linear in the number of accounts, also where thousands ask the same at once.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from spangrad.adapters.comparing import plain_content, plain_tool_calls
from spangrad.adapters.reading import Reading, parsed

CANDIDATES: Final = 64
"""How many open calls with one key are looked through."""
_TRACE_ID: Final = re.compile("[0-9a-f]{32}")


def group_accounts(readings: Sequence[Reading]) -> list[list[Reading]]:
    """The readings, grouped by call; in each group the one that began first, the outermost, comes first."""
    alone = [[reading] for reading in sorted(readings, key=_order)]
    recorders = {reading.span.scope for reading in readings}
    if len(recorders) <= 1:
        return alone
    groups = _joined([_Group(members) for members in alone], len(recorders))
    return [sorted(group.members, key=_order) for group in groups]


def begin_together(one: Reading, other: Reading) -> bool:
    """Whether each begins while the other goes on."""
    return one.span.start_ns <= other.span.end_ns and other.span.start_ns <= one.span.end_ns


def same_place(one: Reading, other: Reading) -> bool:
    """Whether nothing says that they are of different rollouts or attempts."""
    return _agree(named_rollout(one), named_rollout(other)) and _agree(one.attempt, other.attempt)


def same_request(one: Reading, other: Reading) -> bool:
    """Whether both asked the same; what is not known contradicts nothing."""
    return _agree(_request_of(one), _request_of(other))


@dataclass(slots=True, eq=False)
class _Group:
    """Accounts of one call, so far."""

    members: list[Reading]
    keys: dict[str, Hashable] = field(default_factory=dict)
    """What was computed of its content."""

    @property
    def end_ns(self) -> int:
        return max(reading.span.end_ns for reading in self.members)

    @property
    def has_error(self) -> bool:
        return any(reading.error is not None for reading in self.members)

    def recorders(self) -> set[str]:
        return {reading.span.scope for reading in self.members}

    def known(self, name: str, of: Callable[[Reading], Hashable]) -> Hashable:
        """What the first account that knows it says; computed once."""
        if name not in self.keys:
            values = (of(reading) for reading in self.members)
            self.keys[name] = next((value for value in values if value is not None), None)
        return self.keys[name]

    def join(self, other: "_Group") -> None:
        self.members.extend(other.members)
        self.keys.clear()


Keys = Callable[[_Group], Iterable[Hashable]]
Fits = Callable[[_Group, _Group], bool]


def _joined(groups: list[_Group], recorders: int) -> list[_Group]:
    calls = {(reading.span.trace_id, reading.span.span_id) for group in groups for reading in group.members}

    def above(group: _Group) -> Iterable[Hashable]:
        for reading in group.members:
            in_trace = ((reading.span.trace_id, span_id) for span_id in reading.ancestor_span_ids)
            yield next((key for key in in_trace if key in calls), None)

    def by_parent(some: list[_Group]) -> list[_Group]:
        return _pass(some, recorders, _spans, above, _same_gist_and_reply)

    def by_request(some: list[_Group]) -> list[_Group]:
        for keys in (_trace_request_reply, _request_reply, _request):
            some = _pass(some, recorders, keys, keys, _same_content)
        return some

    groups = _settled_first(groups, by_parent)
    groups = _pass(groups, recorders, _placed_id_request, _placed_id_request, _same_gist)
    groups = _pass(groups, recorders, _placed_id, _placed_id, _same_gist)
    groups = _pass(groups, recorders, _id, _id, _same_content)
    return _settled_first(groups, by_request)


def _settled_first(groups: list[_Group], step: Callable[[list[_Group]], list[_Group]]) -> list[_Group]:
    """A step over the calls that did not fail, then over all: a reply goes before the retries it took."""
    failed = [group for group in groups if group.has_error]
    return step(step([group for group in groups if not group.has_error]) + failed) if failed else step(groups)


def _pass(groups: list[_Group], recorders: int, put: Keys, look: Keys, fits: Fits) -> list[_Group]:
    """Join each group, in order of time, to the first open one that fits."""
    waiting = _Waiting(recorders)
    kept: list[_Group] = []
    for group in sorted(groups, key=lambda g: min(map(_order, g.members))):
        keys = list(put(group))
        looked = (waiting.find(key, group, fits) for key in look(group) if key is not None)
        found = next((each for each in looked if each is not None), None)
        if found is None:
            kept.append(group)
        else:
            found.join(group)
        for key in keys:
            if key is not None:
                waiting.add(key, found or group)
    return kept


class _Waiting:
    """Groups that may get another account, by key, the earliest first."""

    def __init__(self, recorders: int) -> None:
        self._recorders = recorders
        self._queues: dict[Hashable, deque[_Group]] = {}

    def add(self, key: Hashable, group: _Group) -> None:
        queue = self._queues.setdefault(key, deque())
        if len(group.members) < self._recorders and not (queue and queue[-1] is group):
            queue.append(group)

    def find(self, key: Hashable, group: _Group, fits: Fits) -> _Group | None:
        queue = self._queues.get(key)
        if not queue:
            return None
        start_ns = min(reading.span.start_ns for reading in group.members)
        seen: list[_Group] = []
        found = None
        while queue and found is None and len(seen) < CANDIDATES:
            candidate = queue.popleft()
            if candidate.end_ns < start_ns or len(candidate.members) >= self._recorders:
                continue  # later groups begin later still
            seen.append(candidate)
            if _may_be_one(candidate, group) and fits(candidate, group):
                found = candidate
        queue.extendleft(reversed(seen))
        return found


def _may_be_one(one: _Group, other: _Group) -> bool:
    return one.recorders().isdisjoint(other.recorders()) and all(
        begin_together(a, b) and same_place(a, b) and _same_user(a, b) and _same_model(a.model, b.model)
        for a in one.members
        for b in other.members
    )


def _same_gist(one: _Group, other: _Group) -> bool:
    """For accounts of one trace or rollout, which may write messages down in different ways."""
    return _agree(one.known("id", _id_of), other.known("id", _id_of)) and _agree(
        one.known("gist", _gist_of), other.known("gist", _gist_of)
    )


def _same_gist_and_reply(one: _Group, other: _Group) -> bool:
    return _same_gist(one, other) and _agree(one.known("reply", _reply_of), other.known("reply", _reply_of))


def _same_content(one: _Group, other: _Group) -> bool:
    return (
        _agree(one.known("id", _id_of), other.known("id", _id_of))
        and _agree(one.known("request", _request_of), other.known("request", _request_of))
        and _agree(one.known("reply", _reply_of), other.known("reply", _reply_of))
    )


def _spans(group: _Group) -> Iterable[Hashable]:
    return [(reading.span.trace_id, reading.span.span_id) for reading in group.members]


def _places(group: _Group) -> list[str]:
    places = (
        place for r in group.members for place in (r.span.trace_id, named_rollout(r)) if place is not None
    )
    return list(dict.fromkeys(places))


def _id(group: _Group) -> Iterable[Hashable]:
    return [group.known("id", _id_of)]


def _placed_id(group: _Group) -> Iterable[Hashable]:
    found = group.known("id", _id_of)
    return [] if found is None else [(place, found) for place in _places(group)]


def _placed_id_request(group: _Group) -> Iterable[Hashable]:
    return [
        (*key, group.known("request", _request_of)) for key in _placed_id(group) if isinstance(key, tuple)
    ]


def _request(group: _Group) -> Iterable[Hashable]:
    return [group.known("request", _request_of)]


def _request_reply(group: _Group) -> Iterable[Hashable]:
    request, reply = group.known("request", _request_of), group.known("reply", _reply_of)
    return [] if request is None or reply is None else [(request, reply)]


def _trace_request_reply(group: _Group) -> Iterable[Hashable]:
    return [(place, key) for key in _request_reply(group) for place in _places(group)]


def _agree(one: Any, other: Any) -> bool:
    return one is None or other is None or one == other


def named_rollout(reading: Reading) -> str | None:
    """The rollout that a recorder named; one that was found afterwards is named by its first trace."""
    name = reading.rollout_id
    return None if name is None or _TRACE_ID.fullmatch(name) else name


def _same_user(one: Reading, other: Reading) -> bool:
    """Whether they are of one trace, or nothing says that they are for different users."""
    return one.span.trace_id == other.span.trace_id or _agree(one.user_id, other.user_id)


def _same_model(one: str | None, other: str | None) -> bool:
    """Whether two names can be one model: `hosted_vllm/m` and `m`, `gpt-4o` and `gpt-4o-2024-08-06`."""
    if one is None or other is None:
        return True
    short, long = sorted((one.rpartition("/")[2].lower(), other.rpartition("/")[2].lower()), key=len)
    return long.startswith(short)


def request_key(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The same for the same messages, whoever tells them; None if there are none."""
    return _digest(map(_plain, messages)) if messages else None


def _order(reading: Reading) -> tuple[int, int, str]:
    return reading.span.start_ns, -reading.span.end_ns, reading.span.span_id


def _id_of(reading: Reading) -> str | None:
    return reading.response_id


def _request_of(reading: Reading) -> str | None:
    return request_key(reading.messages)


def _gist_of(reading: Reading) -> str | None:
    """What the user said last."""
    last = next((m for m in reversed(reading.messages) if m.get("role") == "user"), None)
    return None if last is None else _digest([plain_content(last.get("content"))])


def _reply_of(reading: Reading) -> str | None:
    """What was answered; not known of a reply that may have been left early."""
    if not reading.choices or any(choice.finish_reason is None for choice in reading.choices):
        return None
    return _digest([_plain({**choice.message, "role": "assistant"}) for choice in reading.choices])


def _digest(values: Iterable[Any]) -> str:
    running = blake2b(digest_size=16)
    for value in values:
        told = json.dumps(value, sort_keys=True, default=repr)
        running.update(told.encode("utf-8", "surrogatepass") + b"\n")
    return running.hexdigest()


def _plain(message: Mapping[str, Any]) -> list[Any]:
    """A message as every recorder tells it: results parsed, arguments parsed, ids and names left out."""
    role = message.get("role")
    content = plain_content(message.get("content"))
    return [
        "system" if role == "developer" else role,
        parsed(content) if role == "tool" else content,
        plain_tool_calls(message),
    ]
