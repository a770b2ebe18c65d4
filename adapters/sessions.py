"""Which calls are one rollout, where no recorder says: by trace, conversation and content.

A raw client writes a trace of one span for every call; a chat writes a trace for every
turn. Their calls are joined where one shows that it goes on from another. Knows calls'
messages and ids; does not know stores, dialects or token ids.

Invariants:
* the calls of one trace stay together: nothing here splits;
* a call goes on only from calls that had ended when it began, a day before at most;
* no rule that guesses joins traces of different users, or of different specific conversations of theirs,
  directly or through others;
* every joining has a named rule, and so has what is kept apart: none of them is proof;
* what is found follows from the calls alone, not from their order.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

from spangrad.adapters.comparing import plain_content, plain_tool_calls
from spangrad.adapters.conversations import conversation_key
from spangrad.adapters.model_call import ModelCall
from spangrad.adapters.same_call import request_key

PREFIXES_KEPT: Final = 8
"""How many of its earlier replies a call is looked up by, the last first."""
CANDIDATES: Final = 64
"""How many calls with the very same messages and reply are looked through, the latest first."""
UNIQUE_ID_LENGTH: Final = 8
"""Tool-call ids that are shorter are counters (`call_0`) and join nothing."""
GAP_NS: Final = 24 * 3600 * 10**9
"""What begins later than this after the end of what it goes on from is a rollout of its own."""


class Rule(StrEnum):
    """Why two traces are one rollout."""

    CONVERSATION = "conversation id"
    """Both name the same session, thread or conversation, and the same service or project."""
    PREFIX = "message prefix"
    """The later call's messages begin with the earlier call's messages and its reply."""
    TOOL_CALL = "tool-call id"
    """The later call shows the result of a tool call that the earlier one's reply made, and no other's."""
    ONE_CALL = "one call in several traces"
    """Spans of both tell of one call: of its request and its reply, or of its framework and its client."""
    RESPONSE = "previous response id"
    """The later call names the earlier one's response as what it goes on from."""

    @property
    def option(self) -> str:
        """What it is called on a command line."""
        return self.name.lower().replace("_", "-")


GUESSED: Final = (Rule.CONVERSATION, Rule.PREFIX, Rule.RESPONSE, Rule.TOOL_CALL)
"""Rules that can be switched off; that a call is told in two traces is no guess."""


class KeptApart(StrEnum):
    """Why a trace is no part of an earlier rollout."""

    UNSPECIFIC = "unspecific conversation id"
    """Its id is one that anybody could have thought of (`thread-1`), and no other rule joins it."""
    GAP = "more than 24 h later"
    """It goes on from another one, but that had ended more than GAP_NS before."""
    OTHERS = "another user or session"
    """It goes on from another one, but names, or is joined to what names, another user or conversation."""


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
    conversation_key: str | None = None
    """None where the conversation id is not specific."""
    request_key: str | None = None
    """Of the messages, as every recorder tells them."""
    recorders: Sequence[str] | None = None
    trace_ids: Sequence[str] | None = None
    """Traces that it is told in."""
    rules: Sequence[str] | None = None
    """Rules that may join it; None: all."""
    user_id: str | None = None

    def may(self, rule: Rule) -> bool:
        """Whether this rule may join it."""
        return self.rules is None or rule in self.rules


@dataclass(slots=True)
class Session:
    """Traces that are one rollout."""

    reasons: dict[str, Rule | KeptApart | None]
    """Trace -> the rule that joined it to an earlier one, or what kept it apart; in order of first calls."""

    @property
    def trace_ids(self) -> list[str]:
        """In order of their first call."""
        return list(self.reasons)

    @property
    def joined_by(self) -> Counter[Rule]:
        """How many joinings each rule made; empty for a trace of its own."""
        return Counter(reason for reason in self.reasons.values() if isinstance(reason, Rule))


def keys_of(call: ModelCall, rules: Sequence[Rule] = GUESSED) -> CallKeys:
    """The keys of one call. Cost: two hashes over its messages."""
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
        conversation_key=conversation_key(call.service, call.conversation_id),
        request_key=request_key(call.messages),
        recorders=tuple(call.recorders),
        trace_ids=tuple(call.trace_ids),
        rules=None if set(rules) >= set(GUESSED) else tuple(sorted(rules)),
        user_id=call.user_id,
    )


def sessions(calls: Iterable[CallKeys], joined: Iterable[Sequence[str]] = ()) -> list[Session]:
    """Join the traces of calls that name no rollout; ordered by the start of their first call.

    Near linear in the number of calls.

    Args:
        calls: What is known of each call.
        joined: Traces that were found to be one before, and are without further reason.
    """
    in_order = sorted(calls, key=lambda call: (call.start_ns, call.call_id))
    several = [call.trace_ids for call in in_order if call.trace_ids is not None and len(call.trace_ids) > 1]
    known = [call.trace_id for call in in_order] + [trace_id for some in several for trace_id in some]
    traces = _Joined(dict.fromkeys(known))
    for call in in_order:
        traces.name(call)
    for own, *others in several:
        for other in others:
            traces.join(own, other, Rule.ONE_CALL)
    found = _Found()
    late: set[str] = set()
    foreign: set[str] = set()
    unspecific: set[str] = set()
    for call in in_order:
        users = traces.users(call.trace_id)
        for rule, earlier in found.continued_by(call, users, traces.fit):
            if _is_late(call, earlier):
                late.add(call.trace_id)
            elif not traces.fit(earlier, call):
                foreign.add(call.trace_id)
            else:
                traces.join(earlier.trace_id, call.trace_id, rule)
        if call.conversation_id is not None and call.conversation_key is None:
            unspecific.add(call.trace_id)
        found.add(call, users)
    for own, *others in joined:
        for other in others:
            if traces.may_join(own, other):
                traces.join(own, other, None)
    return traces.sessions(
        {t: KeptApart.UNSPECIFIC for t in unspecific}
        | {t: KeptApart.OTHERS for t in foreign}
        | {t: KeptApart.GAP for t in late}
    )


def _is_late(call: CallKeys, earlier: CallKeys) -> bool:
    return call.start_ns - earlier.end_ns > GAP_NS


Users = frozenset[str]
Fit = Callable[[CallKeys, CallKeys], bool]


def _places(key: str, users: Users) -> list[tuple[str, Users | None]]:
    """Where calls are that may be of these users: theirs, nobody's, and at last anybody's."""
    return [(key, users), (key, frozenset()), (key, None)] if users else [(key, None)]


class _Found:
    """Earlier calls, by what a later one may go on from."""

    def __init__(self) -> None:
        self._conversations: dict[tuple[str, Users | None], CallKeys] = {}
        """By key and users; None: whoever they are."""
        self._responses: dict[str, CallKeys] = {}
        self._replies: dict[tuple[str, Users | None], list[CallKeys]] = defaultdict(list)
        self._tool_calls: dict[str, list[CallKeys]] = {}
        self._continued: set[tuple[str, str]] = set()

    def add(self, call: CallKeys, users: Users) -> None:
        if (key := call.conversation_key) is not None and call.may(Rule.CONVERSATION):
            for place in ((key, users), (key, None)):
                last = self._conversations.get(place)
                if last is None or call.end_ns >= last.end_ns:
                    self._conversations[place] = call
        if call.response_id and call.may(Rule.RESPONSE):
            self._responses[call.response_id] = call
        for key in call.reply_keys if call.may(Rule.PREFIX) else ():
            self._replies[key, users].append(call)
            self._replies[key, None].append(call)
        for key in set(call.tool_calls_made) if call.may(Rule.TOOL_CALL) else ():
            self._tool_calls.setdefault(key, []).append(call)

    def continued_by(self, call: CallKeys, users: Users, fit: Fit) -> Iterable[tuple[Rule, CallKeys]]:
        """The calls that this one goes on from, with the rule that says so; rather those that fit."""
        if (conversation := call.conversation_key) is not None and call.may(Rule.CONVERSATION):
            places = _places(conversation, users)
            lasts = [last for place in places if (last := self._conversations.get(place)) is not None]
            lasts.sort(key=lambda last: (fit(last, call), last.end_ns))
            if lasts:
                yield Rule.CONVERSATION, lasts[-1]
        if call.previous_response_id and call.may(Rule.RESPONSE):
            named = self._responses.get(call.previous_response_id)
            if named is not None:
                yield Rule.RESPONSE, named
        for key in call.prefix_keys if call.may(Rule.PREFIX) else ():
            if (earlier := self._latest(key, call, users, fit)) is not None:
                yield Rule.PREFIX, earlier
                if fit(earlier, call):
                    if not _is_late(call, earlier):
                        self._continued.add((key, earlier.call_id))
                    return  # what that one goes on from is joined to it
        for key in call.tool_calls_answered if call.may(Rule.TOOL_CALL) else ():
            makers = self._tool_calls.get(key, ()) if len(key) >= UNIQUE_ID_LENGTH else ()
            if len(makers) == 1 and makers[0].end_ns <= call.start_ns:
                yield Rule.TOOL_CALL, makers[0]

    def _latest(self, key: str, call: CallKeys, users: Users, fit: Fit) -> CallKeys | None:
        """The latest call with that reply that had ended; rather one that nothing has gone on from."""
        last = [c for place in _places(key, users) for c in self._replies.get(place, ())[-CANDIDATES:]]
        last.sort(key=lambda c: (c.start_ns, c.call_id))
        ended = [c for c in last if c.end_ns <= call.start_ns]
        ended = [c for c in ended if fit(c, call)] or ended[-1:]
        ended = [c for c in ended if not _is_late(call, c)] or ended[-1:]
        own = [c for c in ended if c.trace_id == call.trace_id]
        fresh = [c for c in ended if (key, c.call_id) not in self._continued]
        return next((group[-1] for group in (own, fresh, ended) if group), None)


class _Joined:
    """Union-find over traces; the earliest trace of a set is its root."""

    def __init__(self, trace_ids: Iterable[str]) -> None:
        self._order = {trace_id: index for index, trace_id in enumerate(trace_ids)}
        self._parents = {trace_id: trace_id for trace_id in self._order}
        self._rules: dict[str, Rule | None] = {}
        """Each trace but the earliest of its set is joined once."""
        self._users: dict[str, Users] = {}
        """Those that a set names, by its root."""
        self._conversations: dict[str, frozenset[str]] = {}

    def name(self, call: CallKeys) -> None:
        """Keep whose trace a call's is."""
        if call.user_id is not None:
            self._users[call.trace_id] = self.users(call.trace_id) | {call.user_id}
        if call.conversation_id is not None and call.conversation_key is not None:
            known = self._conversations.get(call.trace_id, frozenset())
            self._conversations[call.trace_id] = known | {call.conversation_id}

    def users(self, trace_id: str) -> Users:
        """Users that a trace, and what it is joined to, names."""
        return self._users.get(self._root(trace_id), frozenset())

    def fit(self, one: CallKeys, other: CallKeys) -> bool:
        """Whether nothing says that their traces are of different users or conversations."""
        return self.may_join(one.trace_id, other.trace_id)

    def may_join(self, one: str, other: str) -> bool:
        """The same of traces; several services may name one conversation each in its own words."""
        first, second = self._root(one), self._root(other)
        users, others = self.users(first), self.users(second)
        if users and others and users != others:
            return False
        told, also = self._conversations.get(first), self._conversations.get(second)
        return told is None or also is None or not told.isdisjoint(also)

    def join(self, one: str, other: str, rule: Rule | None) -> None:
        first, second = sorted((self._root(one), self._root(other)), key=self._order.__getitem__)
        if first != second:
            self._parents[second] = first
            self._rules[second] = rule
            for told in (self._users, self._conversations):
                if second in told:
                    told[first] = told.get(first, frozenset()) | told.pop(second)

    def _root(self, trace_id: str) -> str:
        root = trace_id
        while self._parents[root] != root:
            root = self._parents[root]
        while self._parents[trace_id] != root:
            self._parents[trace_id], trace_id = root, self._parents[trace_id]
        return root

    def sessions(self, kept_apart: Mapping[str, KeptApart]) -> list[Session]:
        members: dict[str, dict[str, Rule | KeptApart | None]] = {}
        for trace_id in self._order:
            root = self._root(trace_id)
            is_first = root == trace_id
            reason = kept_apart.get(trace_id) if is_first else self._rules[trace_id]
            members.setdefault(root, {})[trace_id] = reason
        return [Session(reasons) for reasons in members.values()]


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
