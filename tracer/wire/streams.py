"""Server-sent events, and the chat completion that a stream of chunks adds up to.

Knows bytes and JSON. Invariants:
* Every chunk counts, also one without text: its token ids, logprobs and reasoning are kept.
* A stream is complete if as many choices as were asked for have a finish reason. Anything else is
  partial, also when the server said `[DONE]`.
* An event that can't be read costs that event, and is counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spangrad.tracer.wire.fast_json import loads
from spangrad.tracer.wire.tokens import ID_GAPS, logprobs_of

_SAMPLED = ("content", "reasoning", "reasoning_content", "refusal", "tool_calls", "function_call")


@dataclass(slots=True)
class Assembled:
    """What a stream amounts to."""

    body: dict[str, Any] = field(default_factory=dict)
    """In the form of a non-streamed response."""
    is_complete: bool = False
    error: dict[str, Any] | None = None
    """An error object that came inside the stream."""
    unreadable: int = 0
    """Events that are no JSON object."""


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


def objects(body: bytes, result: Assembled) -> Iterator[dict[str, Any]]:
    """The JSON object of each event; those that are none are counted in `result`."""
    for _, data in events(body):
        if data.strip() == b"[DONE]":
            continue
        try:
            event = loads(data)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            yield event
        else:
            result.unreadable += 1


def assemble_chat(body: bytes, choice_count: int) -> Assembled:
    """Add up the chunks of a streamed chat completion (or text completion) with `choice_count` choices."""
    result = Assembled()
    choices: dict[int, dict[str, Any]] = {}
    for chunk in objects(body, result):
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
    if isinstance(update.get("text"), str):  # /completions
        choice["text"] = choice.get("text", "") + update["text"]
    _add_delta(choice, update.get("delta") or {})
    token_ids = update.get("token_ids")
    if token_ids is None:
        token_ids = (update.get("provider_specific_fields") or {}).get("token_ids")
    if token_ids is not None:
        choice.setdefault("token_ids", []).extend(token_ids)
    elif has_text(update):
        choice[ID_GAPS] = choice.get(ID_GAPS, 0) + 1
    if update.get("prompt_token_ids") is not None:
        choice["prompt_token_ids"] = update["prompt_token_ids"]
    block = update.get("logprobs") or {}
    values = logprobs_of(block)
    if values:
        tokens = block.get("tokens") or [
            item.get("token") for key in ("content", "refusal") for item in block.get(key) or ()
        ]
        merged = choice.setdefault("logprobs", {"tokens": [], "token_logprobs": []})
        merged["tokens"].extend(tokens)
        merged["token_logprobs"].extend(values)


def has_text(update: Mapping[str, Any]) -> bool:
    """Whether a chunk shows something that was sampled."""
    delta = update.get("delta") or {}
    return bool(update.get("text")) or any(delta.get(key) for key in _SAMPLED)


def _add_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    message = choice["message"]
    for key in ("content", "reasoning", "reasoning_content", "refusal"):
        if isinstance(delta.get(key), str):
            message[key] = message.get(key, "") + delta[key]
    if delta.get("role"):
        message["role"] = delta["role"]
    for call in delta.get("tool_calls") or ():
        _add_tool_call(choice["tools"], call)
    for key in ("function_call", "audio"):
        if isinstance(delta.get(key), dict):
            add_fields(message.setdefault(key, {}), delta[key], added=("arguments", "data", "transcript"))
    for key in ("thinking_blocks", "reasoning_details"):
        for block in delta.get(key) or ():
            _add_block(message.setdefault(key, []), block)
    message.setdefault("images", []).extend(delta.get("images") or ())


def add_fields(whole: dict[str, Any], update: dict[str, Any], *, added: tuple[str, ...]) -> None:
    """Take in an update of an object: texts named in `added` grow, other fields are replaced."""
    for key, value in update.items():
        if key in added and isinstance(value, str):
            whole[key] = (whole.get(key) or "") + value
        elif value is not None:
            whole[key] = value


def _add_block(blocks: list[dict[str, Any]], update: dict[str, Any]) -> None:
    """Pieces of one block follow each other; a signature or another kind of block ends it."""
    last = blocks[-1] if blocks else None
    same = last is not None and all(
        last.get(key) == update.get(key) for key in ("type", "index") if update.get(key) is not None
    )
    if last is None or not same or last.get("signature"):
        last = {}
        blocks.append(last)
    add_fields(last, update, added=("thinking", "text", "summary", "data"))


def _add_tool_call(tools: dict[int, dict[str, Any]], update: dict[str, Any]) -> None:
    index = update.get("index")
    if index is None:  # some servers leave it out: a new id is a new call
        index = len(tools) if update.get("id") or not tools else len(tools) - 1
    call = tools.setdefault(
        index, {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}
    )
    custom = update.get("custom")
    if isinstance(custom, dict):
        call.pop("function", None)
        call["type"] = "custom"
        add_fields(call.setdefault("custom", {}), custom, added=("input",))
    function = update.get("function") or {}
    call["id"] = call["id"] or update.get("id")
    if "function" not in call:
        return
    call["function"]["name"] = call["function"]["name"] or function.get("name")
    call["function"]["arguments"] += function.get("arguments") or ""


def _finished(index: int, choice: dict[str, Any]) -> dict[str, Any]:
    tools = choice.pop("tools")
    message = choice["message"]
    if not message.get("images"):
        message.pop("images", None)
    if tools:
        message["tool_calls"] = [tools[key] for key in sorted(tools)]
        if message.get("content") == "":  # the first chunk's placeholder
            message["content"] = None
    return choice | {"index": index}
