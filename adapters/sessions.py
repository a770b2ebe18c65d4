"""Which calls are one rollout, where no recorder says: by trace, conversation and content.

A raw client writes a trace of one span for every call; a chat writes a trace for every
turn. Their calls are joined where one shows that it goes on from another. Knows calls'
messages and ids; does not know dialects or token ids.

Invariants:
* calls whose recorder names a rollout are left alone, and nothing is joined to them;
* the calls of one trace stay together: nothing here splits;
* a call goes on only from calls that had ended when it began;
* every joining has a named rule and is counted: none of them is proof.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

from spangrad.adapters.comparing import plain_content, plain_tool_calls
from spangrad.adapters.model_call import ModelCall
from spangrad.store.base import Store

PREFIXES_KEPT: Final = 8
"""How many of its earlier replies a call is looked up by, the last first."""
CANDIDATES: Final = 64
"""How many calls with the very same messages and reply are looked through, the latest first."""
_TRACE_ID: Final = re.compile("[0-9a-f]{32}")
UNIQUE_ID_LENGTH: Final = 8
"""Tool-call ids that are shorter are counters (`call_0`) and join nothing."""


class Rule(StrEnum):
    """Why two traces are one rollout."""

    CONVERSATION = "conversation id"
    """Both name the same session, thread or conversation."""
    PREFIX = "message prefix"
    """The later call's messages begin with the earlier call's messages and its reply."""
    TOOL_CALL = "tool-call id"
    """The later call shows the result of a tool call that the earlier one's reply made, and no other's."""
    ONE_CALL = "one call in several traces"
    """Spans of both tell of one call: of its request and its reply, or of its framework and its client."""
    RESPONSE = "previous response id"
    """The later call names the earlier one's response as what it goes on from."""


@dataclass(frozen=True, slots=True)
class CallKeys:
    """What of a call is needed to find what it goes on from; small, whatever the call's size."""

    call_id: str
    trace_id: str
    start_ns: int
    end_ns: int
    conversation_id: str | None = None
    response_id: str | None = None
    previous_response_id: str | None = None
    reply_keys: Sequence[str] = ()
    """Of the messages and each choice's reply."""
    prefix_keys: Sequence[str] = ()
    """Of the messages up to each of the last assistant messages, the longest first."""
    tool_calls_made: Sequence[str] = ()
    tool_calls_answered: Sequence[str] = ()


@dataclass(slots=True)
class Session:
    """Traces that are one rollout."""

    rollout_id: str
    """The trace id of the earliest."""
    trace_ids: list[str]
    """In order of their first call."""
    joined_by: Counter[Rule] = field(default_factory=Counter)
    """How many joinings each rule made; empty for a trace of its own."""


def keys_of(call: ModelCall) -> CallKeys:
    """The keys of one call. Cost: one hash over its messages."""
    running = blake2b(digest_size=16)
    prefixes: list[str] = []
    answered: list[str] = []
    for message in call.messages:
        running.update(message_key(message))
        if message.get("role") == "assistant":
            prefixes.append(running.copy().hexdigest())
        elif message.get("role") == "tool" and isinstance(message.get("tool_call_id"), str):
            answered.append(message["tool_call_id"])
    replies: list[str] = []
    for choice in call.choices:
        with_reply = running.copy()
        with_reply.update(message_key({**choice.message, "role": "assistant"}))
        replies.append(with_reply.hexdigest())
    previous = call.sampling.get("previous_response_id")
    return CallKeys(
        call_id=call.call_id,
        trace_id=call.trace_id,
        start_ns=call.start_ns,
        end_ns=call.end_ns,
        conversation_id=call.conversation_id,
        response_id=call.response_id,
        previous_response_id=previous if isinstance(previous, str) else None,
        reply_keys=tuple(replies),
        prefix_keys=tuple(reversed(prefixes[-PREFIXES_KEPT:])),
        tool_calls_made=tuple(i for choice in call.choices for i in _tool_call_ids(choice.message)),
        tool_calls_answered=tuple(answered),
    )


def join_sessions(store: Store, calls: Sequence[ModelCall]) -> Counter[Rule]:
    """Give a rollout to every call that names none, together with what the store has of it already.

    Returns how many joinings each rule made, those of earlier times included where the calls touch them.
    """
    unnamed = [call for call in calls if _names_no_rollout(call)]
    rows = [asdict(keys_of(call)) for call in unnamed]
    if not rows:
        return Counter()
    store.put_call_keys(rows)
    related = store.related_call_keys(rows)
    further = store.related_call_keys(related) if related else []  # what else goes on from the same
    by_id = {row["call_id"]: CallKeys(**row) for row in (*further, *related, *rows)}
    found = sessions(by_id.values(), [call.trace_ids for call in unnamed])
    touched = {row["trace_id"] for row in rows}
    groups = [session for session in found if touched.intersection(session.trace_ids)]
    store.join_traces([session.trace_ids for session in groups])
    return sum((session.joined_by for session in groups), Counter())


def _names_no_rollout(call: ModelCall) -> bool:
    """A rollout that was found here is named by a trace; a recorder's own name is no such id."""
    return call.rollout_id is None or _TRACE_ID.fullmatch(call.rollout_id) is not None


def sessions(calls: Iterable[CallKeys], told_in: Iterable[Sequence[str]] = ()) -> list[Session]:
    """Join the traces of calls that name no rollout; ordered by the start of their first call.

    Near linear in the number of calls.

    Args:
        calls: What is known of each call.
        told_in: For calls that are told in several traces: these traces, the call's own first.
    """
    in_order = sorted(calls, key=lambda call: (call.start_ns, call.call_id))
    several = [trace_ids for trace_ids in told_in if len(trace_ids) > 1]
    known = [call.trace_id for call in in_order] + [trace_id for some in several for trace_id in some]
    joined = _Joined(dict.fromkeys(known))
    for own, *others in several:
        for other in others:
            joined.join(own, other, Rule.ONE_CALL)
    found = _Found()
    for call in in_order:
        for rule, earlier in found.continued_by(call):
            joined.join(earlier.trace_id, call.trace_id, rule)
        found.add(call)
    return joined.sessions()


class _Found:
    """Earlier calls, by what a later one may go on from."""

    def __init__(self) -> None:
        self._conversations: dict[str, CallKeys] = {}
        self._responses: dict[str, CallKeys] = {}
        self._replies: dict[str, list[CallKeys]] = {}
        self._tool_calls: dict[str, list[CallKeys]] = {}
        self._continued: set[tuple[str, str]] = set()

    def add(self, call: CallKeys) -> None:
        if call.conversation_id:
            self._conversations.setdefault(call.conversation_id, call)
        if call.response_id:
            self._responses[call.response_id] = call
        for key in call.reply_keys:
            self._replies.setdefault(key, []).append(call)
        for key in set(call.tool_calls_made):
            self._tool_calls.setdefault(key, []).append(call)

    def continued_by(self, call: CallKeys) -> Iterable[tuple[Rule, CallKeys]]:
        """The calls that this one goes on from, with the rule that says so."""
        if call.conversation_id and (first := self._conversations.get(call.conversation_id)):
            yield Rule.CONVERSATION, first
        if call.previous_response_id and (named := self._responses.get(call.previous_response_id)):
            yield Rule.RESPONSE, named
        for key in call.prefix_keys:
            if (earlier := self._latest(key, call)) is not None:
                self._continued.add((key, earlier.call_id))
                yield Rule.PREFIX, earlier
                return  # what that one goes on from is joined to it
        for key in call.tool_calls_answered:
            makers = self._tool_calls.get(key, ()) if len(key) >= UNIQUE_ID_LENGTH else ()
            if len(makers) == 1 and makers[0].end_ns <= call.start_ns:
                yield Rule.TOOL_CALL, makers[0]

    def _latest(self, key: str, call: CallKeys) -> CallKeys | None:
        """The latest call with that reply that had ended; rather one that nothing has gone on from."""
        last = self._replies.get(key, ())[-CANDIDATES:]
        ended = [c for c in last if c.end_ns <= call.start_ns]
        own = [c for c in ended if c.trace_id == call.trace_id]
        fresh = [c for c in ended if (key, c.call_id) not in self._continued]
        return next((group[-1] for group in (own, fresh, ended) if group), None)


class _Joined:
    """Union-find over traces; the earliest trace of a set is its root."""

    def __init__(self, trace_ids: Iterable[str]) -> None:
        self._order = {trace_id: index for index, trace_id in enumerate(trace_ids)}
        self._parents = {trace_id: trace_id for trace_id in self._order}
        self._rules: dict[str, Counter[Rule]] = {}

    def join(self, one: str, other: str, rule: Rule) -> None:
        first, second = sorted((self._root(one), self._root(other)), key=self._order.__getitem__)
        if first != second:
            self._parents[second] = first
            counts = self._rules.setdefault(first, Counter())
            counts.update(self._rules.pop(second, Counter()))
            counts[rule] += 1

    def _root(self, trace_id: str) -> str:
        root = trace_id
        while self._parents[root] != root:
            root = self._parents[root]
        while self._parents[trace_id] != root:
            self._parents[trace_id], trace_id = root, self._parents[trace_id]
        return root

    def sessions(self) -> list[Session]:
        members: dict[str, list[str]] = {}
        for trace_id in self._order:
            members.setdefault(self._root(trace_id), []).append(trace_id)
        return [Session(root, ids, self._rules.get(root, Counter())) for root, ids in members.items()]


def message_key(message: Mapping[str, Any]) -> bytes:
    """A message as bytes that are equal for equal content, however a client wrote it down."""
    plain = {
        "role": message.get("role"),
        "content": plain_content(message.get("content")),
        "calls": plain_tool_calls(message),
        "answers": message.get("tool_call_id"),
    }
    return json.dumps(plain, sort_keys=True, default=repr).encode("utf-8", "surrogatepass") + b"\n"


def _tool_call_ids(message: Mapping[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    ids = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return [i for i in ids if isinstance(i, str)]
