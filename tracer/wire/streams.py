"""Server-sent events, and the chat completion that a stream of chunks adds up to.

Knows bytes and JSON. Invariants:
* Every chunk counts, also one without text: its token ids, logprobs and reasoning are kept.
* A stream is complete if as many choices as were asked for have a finish reason. Anything else is
  partial, also when the server said `[DONE]`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Assembled:
    """What a stream amounts to."""

    body: dict[str, Any] = field(default_factory=dict)
    """In the form of a non-streamed response."""
    is_complete: bool = False
    error: dict[str, Any] | None = None
    """An error object that came inside the stream."""


def events(body: bytes) -> Iterator[tuple[str, bytes]]:
    """(event name, data) of each whole event. A tail without its blank line is left out."""
    name = ""
    data: list[bytes] = []
    for line in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if not line:
            if data:
                yield name, b"\n".join(data)
            name, data = "", []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")


def assemble_chat(body: bytes, choice_count: int) -> Assembled:
    """Add up the chunks of a streamed chat completion (or text completion) with `choice_count` choices."""
    result = Assembled()
    choices: dict[int, dict[str, Any]] = {}
    for _, data in events(body):
        if data.strip() == b"[DONE]":
            continue
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            continue
        if isinstance(chunk.get("error"), dict):
            result.error = chunk["error"]
            continue
        for key in ("id", "model", "object", "created", "system_fingerprint", "usage", "prompt_token_ids"):
            if chunk.get(key) is not None:
                result.body[key] = chunk[key]
        for delta in chunk.get("choices") or ():
            _add_choice(choices.setdefault(delta.get("index") or 0, _new_choice()), delta)
    result.body["choices"] = [_finished(index, choices[index]) for index in sorted(choices)]
    finished = sum(bool(choice["finish_reason"]) for choice in choices.values())
    result.is_complete = result.error is None and finished >= choice_count
    return result


def _new_choice() -> dict[str, Any]:
    return {"message": {}, "tools": {}, "finish_reason": None}


def _add_choice(choice: dict[str, Any], update: dict[str, Any]) -> None:
    if update.get("finish_reason"):
        choice["finish_reason"] = update["finish_reason"]
    delta = update.get("delta") or {}
    if isinstance(update.get("text"), str):  # /completions
        delta = {"content": update["text"]}
    message = choice["message"]
    for key in ("content", "reasoning", "reasoning_content", "refusal"):
        if isinstance(delta.get(key), str):
            message[key] = message.get(key, "") + delta[key]
    if delta.get("role"):
        message["role"] = delta["role"]
    for call in delta.get("tool_calls") or ():
        _add_tool_call(choice["tools"], call)
    token_ids = update.get("token_ids")
    if token_ids is None:
        token_ids = (update.get("provider_specific_fields") or {}).get("token_ids")
    if token_ids is not None:
        choice.setdefault("token_ids", []).extend(token_ids)
    if update.get("prompt_token_ids") is not None:
        choice["prompt_token_ids"] = update["prompt_token_ids"]
    content = (update.get("logprobs") or {}).get("content")
    if content is not None:
        choice.setdefault("logprobs", {"content": []})["content"].extend(content)


def _add_tool_call(tools: dict[int, dict[str, Any]], update: dict[str, Any]) -> None:
    index = update.get("index")
    if index is None:  # some servers leave it out: a new id is a new call
        index = len(tools) if update.get("id") or not tools else len(tools) - 1
    call = tools.setdefault(
        index, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
    )
    function = update.get("function") or {}
    call["id"] = call["id"] or update.get("id")
    call["function"]["name"] = call["function"]["name"] or function.get("name")
    call["function"]["arguments"] += function.get("arguments") or ""


def _finished(index: int, choice: dict[str, Any]) -> dict[str, Any]:
    tools = choice.pop("tools")
    message = choice["message"]
    if tools:
        message["tool_calls"] = [tools[key] for key in sorted(tools)]
        if message.get("content") == "":  # the first chunk's placeholder
            message["content"] = None
    return choice | {"index": index}
