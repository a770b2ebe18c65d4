"""Anchor state of a step: what the policy saw last, without what never repeats.

Where the agent has said what it was looking at (`spangrad.state`), that is the state and
nothing else counts. Elsewhere it is the observation.

The observation of a step is the messages after the last assistant message of its
request; for a first step, the last user message. Two steps of a group with the same
observation are taken to be in the same state, which is what GiGPO compares.

Observations that are nearly equal are one state where that is asked for (`similar.py`); a state that the
agent named is always compared exactly.

Knows chat messages. Ignores ids (tool-call ids are random) and history; two states
that differ in their history alone are one anchor.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spangrad.adapters.comparing import plain_content, plain_tool_calls
from spangrad.adapters.datasets.conversation import running_keys
from spangrad.adapters.model_call import ModelCall

IGNORED_KEYS: Final = frozenset({"id", "tool_call_id"})
_encoded: Final = json.JSONEncoder(ensure_ascii=False, default=repr).encode


class _Mark(str):
    """What stands between values in JSON."""

    __slots__ = ()


_COMMA: Final = _Mark(", ")


def anchor_of(call: ModelCall) -> str | None:
    """Hash of the state that a call began in; None where neither the agent nor the request tells of one."""
    if call.state_key is not None:
        return _hash("state " + call.state_key)
    observation = _observation(call.messages)
    if not observation:
        return None
    return _hash(_written(observation))


def observation_of(call: ModelCall) -> str | None:
    """The observation as text; None where the agent named the state, or there is none.

    Roles and contents, without the form of JSON around them: likeness is of what was said.
    """
    if call.state_key is not None:
        return None
    texts = [_text_of(message) for message in _observation(call.messages)]
    return "\n".join(texts) if texts else None


def history_keys(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A key of the messages up to and with each; ids do not count, nor how a client wrote them down."""
    return running_keys(messages, _key)


def _key(message: Mapping[str, Any]) -> bytes:
    content, calls = plain_content(message.get("content")), plain_tool_calls(message)
    plain = _written({"role": message.get("role"), "content": content, "calls": calls})
    return plain.encode("utf-8", "surrogatepass")


def _text_of(message: Mapping[str, Any]) -> str:
    content = _plain(message.get("content"))
    if message.keys() - IGNORED_KEYS <= {"role", "content"} and isinstance(content, str):
        return f"{message.get('role')}: {content}"
    return _written(message)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _observation(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    last_reply = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=None)
    if last_reply is not None:
        return messages[last_reply + 1 :]
    asked = [message for message in messages if message.get("role") == "user"]
    return asked[-1:] or messages[-1:]


def _written(value: Any) -> str:
    """As JSON, keys sorted, without ids, and with text content in one form.

    Iterative: an observation can be nested as deep as whoever made it likes.
    """
    parts: list[str] = []
    left: list[Any] = [value]
    while left:
        item = left.pop()
        inner: list[Any] = []
        if isinstance(item, _Mark):
            parts.append(item)
            continue
        if isinstance(item, Mapping):
            kept = {str(key): each for key, each in item.items() if key not in IGNORED_KEYS}
            for key in sorted(kept):
                each = _plain(kept[key]) if key == "content" else kept[key]
                inner += [_Mark(f"{_encoded(key)}: "), each, _COMMA]
            opened, closed = "{", "}"
        elif isinstance(item, Sequence) and not isinstance(item, str | bytes):
            for each in item:
                inner += [each, _COMMA]
            opened, closed = "[", "]"
        else:
            parts.append(_encoded(item))
            continue
        left += reversed([_Mark(opened), *inner[:-1], _Mark(closed)])
    return "".join(parts)


def _plain(content: Any) -> Any:
    """Text that stands in parts as one; other content as it is."""
    if isinstance(content, list) and all(_is_text(item) for item in content):
        return "".join(item["text"] for item in content)
    return content


def _is_text(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str)
