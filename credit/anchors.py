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

from spangrad.adapters.datasets.conversation import running_keys
from spangrad.adapters.model_call import ModelCall

IGNORED_KEYS: Final = frozenset({"id", "tool_call_id"})


def anchor_of(call: ModelCall) -> str | None:
    """Hash of the state that a call began in; None where neither the agent nor the request tells of one."""
    if call.state_key is not None:
        return _hash("state " + call.state_key)
    observation = _observation(call.messages)
    if not observation:
        return None
    text = json.dumps([_canonical(message) for message in observation], sort_keys=True, ensure_ascii=False)
    return _hash(text)


def observation_of(call: ModelCall) -> str | None:
    """The observation as text; None where the agent named the state, or there is none.

    Roles and contents, without the form of JSON around them: likeness is of what was said.
    """
    if call.state_key is not None:
        return None
    texts = [_text_of(_canonical(message)) for message in _observation(call.messages)]
    return "\n".join(texts) if texts else None


def history_keys(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A key of the messages up to and with each; ids do not count, nor how a client wrote them down."""
    return running_keys([_canonical(message) for message in messages])


def _text_of(message: Mapping[str, Any]) -> str:
    if message.keys() <= {"role", "content"} and isinstance(message.get("content"), str):
        return f"{message.get('role')}: {message['content']}"
    return json.dumps(message, sort_keys=True, ensure_ascii=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _observation(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    last_reply = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=None)
    if last_reply is not None:
        return messages[last_reply + 1 :]
    asked = [message for message in messages if message.get("role") == "user"]
    return asked[-1:] or messages[-1:]


def _canonical(value: Any) -> Any:
    """The value without ids, and with text content in one form."""
    if isinstance(value, Mapping):
        kept = {key: _canonical(item) for key, item in value.items() if key not in IGNORED_KEYS}
        if isinstance(kept.get("content"), list) and all(_is_text(item) for item in kept["content"]):
            kept["content"] = "".join(item["text"] for item in kept["content"])
        return kept
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_canonical(item) for item in value]
    return value


def _is_text(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "text" and isinstance(item.get("text"), str)
