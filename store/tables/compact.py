"""What a span's attributes look like in the table: only what is new.

Turn k of an agent repeats turns 1..k-1. So token ids are stored as a difference to an
earlier call of the same rollout, and arrays of messages as references to `messages`,
again as a difference to an earlier call's references. `expand.py` undoes it.

    attributes JSON                                   columns
    "spangrad.prompt_token_ids": {"$column": "new_prompt_token_ids"}   prompt_base, prompt_keep, new_...
    "gen_ai.input.messages":     {"$messages": {...}}                  message_ids

Knows spans and an index of recent calls; knows no connection. Invariants:

* what can't be put together again byte for byte stays in the JSON as it came;
* the index only makes rows smaller: forgetting any of it changes no result of a read;
* a base is always a span stored before, or earlier in the same transaction.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from spangrad.store.encoding import json_text, tagged
from spangrad.store.records import Span
from spangrad.tracer import conventions

MESSAGE_ATTRIBUTES: Final = (
    conventions.INPUT_MESSAGES,
    conventions.OUTPUT_MESSAGES,
    conventions.TOOL_DEFINITIONS,
)
INT_COLUMNS: Final[Mapping[str, str]] = {
    conventions.SAMPLED_TOKEN_IDS: "sampled_token_ids",
    conventions.POLICY_VERSIONS: "policy_versions",
}
CALLS_PER_ROLLOUT = 8
INDEX_BYTES = 64 * 2**20
KNOWN_MESSAGES = 50_000

_SEPARATOR = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_decode_at = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class MessageArray:
    """A JSON array as it came: its text but for the last bracket, its elements' ids, what is between them."""

    body: str
    ids: tuple[str, ...]
    separator: str


@dataclass(slots=True)
class _Call:
    key: str
    prompt: bytes = b""
    sampled: bytes = b""
    """Ids as they came: a prompt is compared with them where they are."""
    arrays: dict[str, MessageArray] = field(default_factory=dict)
    bases: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Attribute -> the call that it goes on from, and how much of that it repeats."""

    def size_bytes(self) -> int:
        ids = len(self.prompt) + len(self.sampled)
        return ids + sum(len(a.body) + 100 * len(a.ids) for a in self.arrays.values())

    def id_count(self) -> int:
        return (len(self.prompt) + len(self.sampled)) // 4

    def shared_ids(self, prompt: bytes) -> int:
        """How many ids a prompt repeats."""
        if prompt.startswith(self.prompt) and prompt.startswith(self.sampled, len(self.prompt)):
            return self.id_count()
        mine, other = (np.frombuffer(ids, "<i4") for ids in (self.prompt + self.sampled, prompt))
        length = min(mine.size, other.size)
        differs = mine[:length] != other[:length]
        return int(differs.argmax()) if differs.any() else length

    def has_all_of(self, other: "_Call") -> bool:
        """Whether whatever goes on from the other one's prompt can as well go on from this one."""
        size = other.id_count()
        if size and self.bases.get(conventions.PROMPT_TOKEN_IDS) != (other.key, size):
            return False
        return all(
            self.arrays.get(name) is array or self.bases.get(name) == (other.key, len(array.ids))
            for name, array in other.arrays.items()
            if name != conventions.OUTPUT_MESSAGES
        )


class _Recent:
    """The last calls of the rollouts that were heard of last."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._calls: OrderedDict[str, list[_Call]] = OrderedDict()

    def get(self, rollout: str) -> Sequence[_Call]:
        return self._calls.get(rollout, ())

    def pop(self, rollout: str) -> Sequence[_Call]:
        calls = self._calls.pop(rollout, ())
        self._size_bytes -= sum(call.size_bytes() for call in calls)
        return calls

    def put(self, rollout: str, calls: list[_Call]) -> None:
        """Add a rollout that is not there; what was heard of longest ago makes room."""
        self._calls[rollout] = calls
        self._size_bytes += sum(call.size_bytes() for call in calls)
        while self._size_bytes > self._limit_bytes and self._calls:
            self.pop(next(iter(self._calls)))


class Compactor:
    """Packs attributes, remembering the last calls of each rollout.

    Rollouts of which one call has come have a quarter of the index to themselves: most of those that make no
    other would else push out the ones that grow.
    """

    def __init__(self, index_bytes: int = INDEX_BYTES) -> None:
        """Start with an empty index of at most about `index_bytes`."""
        self._index_bytes = index_bytes
        self.forget()

    def forget(self) -> None:
        """Empty the index: after a transaction that did not commit."""
        self._begun = _Recent(self._index_bytes // 4)
        self._growing = _Recent(self._index_bytes - self._index_bytes // 4)
        self._messages: OrderedDict[str, None] = OrderedDict()

    def pack(self, span: Span, rollout: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Columns of a span's attributes, and the messages that they refer to and that may be new."""
        earlier = self._growing.get(rollout) or self._begun.get(rollout)
        call = _Call(f"{span.trace_id}-{span.span_id}")
        columns: dict[str, Any] = {"message_ids": None}
        contents: dict[str, str] = {}
        document: dict[str, Any] = {}
        for name, value in span.attributes.items():
            packed = self._pack_one(name, value, call, earlier, columns, contents)
            document[name] = tagged(value) if packed is None else packed
        columns["attributes"] = json_text(document)
        if call.arrays or call.prompt:
            if columns.get("sampled_token_ids") is not None:
                call.sampled = columns["sampled_token_ids"].tobytes()
            self._remember(rollout, call)
        return columns, self._unknown(contents)

    def _pack_one(
        self,
        name: str,
        value: Any,
        call: _Call,
        earlier: Sequence[_Call],
        columns: dict[str, Any],
        contents: dict[str, str],
    ) -> dict[str, Any] | None:
        if isinstance(value, bytes):
            return _pack_bytes(name, value, call, earlier, columns)
        if name in MESSAGE_ATTRIBUTES and isinstance(value, str):
            return _pack_messages(name, value, call, earlier, columns, contents)
        return None

    def _remember(self, rollout: str, call: _Call) -> None:
        earlier = self._growing.pop(rollout) or self._begun.pop(rollout)
        kept = [old for old in earlier if not call.has_all_of(old)][1 - CALLS_PER_ROLLOUT :]
        (self._growing if earlier else self._begun).put(rollout, [*kept, call])

    def _unknown(self, contents: dict[str, str]) -> dict[str, str]:
        unknown = {key: text for key, text in contents.items() if key not in self._messages}
        for key in contents:
            self._messages[key] = None
            self._messages.move_to_end(key)
        while len(self._messages) > KNOWN_MESSAGES:
            self._messages.popitem(last=False)
        return unknown


def message_id(content: str) -> str:
    """Content hash that names a message."""
    return blake2b(content.encode(), digest_size=16).hexdigest()


def _pack_bytes(
    name: str, value: bytes, call: _Call, earlier: Sequence[_Call], columns: dict[str, Any]
) -> dict[str, Any] | None:
    if len(value) % 4:
        return None
    if name == conventions.SAMPLED_LOGPROBS:
        logprobs = np.frombuffer(value, "<f4")
        if np.isnan(logprobs).any():
            return None
        columns["sampled_logprobs"] = logprobs
        return {"$column": "sampled_logprobs"}
    if name == conventions.PROMPT_TOKEN_IDS:
        call.prompt = value
        base, keep = _longest_ids(value, earlier)
        columns["prompt_base"] = base
        if base:
            call.bases[name] = base, keep
        columns["prompt_keep"] = keep if base else None
        columns["new_prompt_token_ids"] = np.frombuffer(value, "<i4")[keep:]
        return {"$column": "new_prompt_token_ids"}
    if column := INT_COLUMNS.get(name):
        columns[column] = np.frombuffer(value, "<i4")
        return {"$column": column}
    return None


def _longest_ids(prompt: bytes, earlier: Sequence[_Call]) -> tuple[str | None, int]:
    base, keep = None, 0
    for call in reversed(earlier):
        if min(call.id_count(), len(prompt) // 4) > keep and (shared := call.shared_ids(prompt)) > keep:
            base, keep = call.key, shared
    return base, keep


def _pack_messages(
    name: str,
    text: str,
    call: _Call,
    earlier: Sequence[_Call],
    columns: dict[str, Any],
    contents: dict[str, str],
) -> dict[str, Any] | None:
    known = [(other.key, other.arrays[name]) for other in earlier if name in other.arrays]
    array = parse_array(text, [array for _, array in known], contents)
    if array is None:
        return None
    base, keep = _longest_list(array.ids, known)
    call.arrays[name] = array
    if base:
        call.bases[name] = base, keep
    new = array.ids[keep:]
    stored = columns["message_ids"] = columns["message_ids"] or []
    reference: dict[str, Any] = {"from": len(stored), "new": len(new), "sep": array.separator}
    if base:
        reference |= {"base": base, "keep": keep}
    stored.extend(new)
    return {"$messages": reference}


def _longest_list(ids: tuple[str, ...], known: Sequence[tuple[str, MessageArray]]) -> tuple[str | None, int]:
    base, keep = None, 0
    for key, array in reversed(known):
        longest = min(len(ids), len(array.ids))
        if longest <= keep or array.ids[: keep + 1] != ids[: keep + 1]:
            continue
        if array.ids[:longest] == ids[:longest]:
            base, keep = key, longest
        else:
            pairs = zip(ids, array.ids, strict=False)
            base, keep = key, next(i for i, (mine, other) in enumerate(pairs) if mine != other)
    return base, keep


def parse_array(text: str, known: Sequence[MessageArray], contents: dict[str, str]) -> MessageArray | None:
    """Split a JSON array; None if its bytes can't be put together again from its elements.

    Elements that `contents` lacks are added to it. What a known array begins with is not parsed again.
    """
    if not text.startswith("[") or not text.endswith("]"):
        return None
    longest_first = sorted(known, key=lambda array: len(array.body), reverse=True)
    start = next((a for a in longest_first if len(a.body) < len(text) and text.startswith(a.body)), None)
    if start is not None:
        if len(start.body) == len(text) - 1:
            return start
        longer = _continue(text, start, contents)
        if longer is not None:
            return longer
    return _elements(text, 1, [], None, contents)


def _continue(text: str, start: MessageArray, contents: dict[str, str]) -> MessageArray | None:
    position = len(start.body)
    match = _SEPARATOR.match(text, position)
    if match is None or (len(start.ids) > 1 and match.group() != start.separator):
        return None
    return _elements(text, match.end(), list(start.ids), match.group(), contents)


def _elements(
    text: str, position: int, ids: list[str], separator: str | None, contents: dict[str, str]
) -> MessageArray | None:
    found: dict[str, str] = {}
    while True:
        try:
            _, end = _decode_at(text, position)
        except (ValueError, RecursionError):
            return None
        element = text[position:end]
        key = message_id(element)
        found[key] = element
        ids.append(key)
        if end == len(text) - 1:
            contents |= found
            return MessageArray(text[:-1], tuple(ids), separator or ",")
        match = _SEPARATOR.match(text, end)
        if match is None or (separator is not None and match.group() != separator):
            return None
        separator = match.group()
        position = match.end()
