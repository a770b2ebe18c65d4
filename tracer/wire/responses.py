"""Attributes of OpenAI `/responses` calls, whole and streamed.

Knows the Responses API. Invariants:
* This route has no token ids. Neighbouring items of the assistant (reasoning, message, calls) are one turn.
* An item that is not a message, reasoning, or a function's call or result is a part of its own type.
* A prompt of which a part is at the server only (`previous_response_id`, `conversation`, a stored prompt, a
  reference to an item) is not whole, and `spangrad.dropped` says so.
* A stream that is cut gives the items that were finished, and of the others what had come.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spangrad.tracer import conventions as c
from spangrad.tracer.wire import media
from spangrad.tracer.wire.chat import (
    Attributes,
    clean,
    dumps,
    identity_attributes,
    put_messages,
    request_attributes,
    tell_media,
    usage_attributes,
)
from spangrad.tracer.wire.messages import custom_tool_call
from spangrad.tracer.wire.streams import Assembled, objects

DROPPED_TURNS = "earlier_turns"
"""Key in `spangrad.dropped`: the prompt is not whole."""
_USAGE = {
    "input_tokens": c.INPUT_TOKENS,
    "output_tokens": c.OUTPUT_TOKENS,
    "input_tokens_details.cached_tokens": c.CACHE_READ_TOKENS,
    "output_tokens_details.reasoning_tokens": c.REASONING_TOKENS,
}
_AT_SERVER = ("previous_response_id", "conversation", "prompt")
_ENDS = {
    "response.completed": True,
    "response.incomplete": True,
    "response.failed": False,
    "response.cancelled": False,
}
_DELTAS = {
    "response.output_text.delta": ("content", "output_text", "text"),
    "response.refusal.delta": ("content", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text", "text"),
}
"""Event -> list of the item, type of its entry, key that grows."""
_FIELD_DELTAS = {
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.mcp_call_arguments.delta": "arguments",
    "response.code_interpreter_call_code.delta": "code",
}


def responses_request(request: Mapping[str, Any], dropped: dict[str, str]) -> Attributes:
    """What a client of the Responses API asked."""
    rest = {key: value for key, value in request.items() if key not in ("input", "instructions", "prompt")}
    if "max_output_tokens" in rest:
        rest["max_tokens"] = rest.pop("max_output_tokens")
    if request.get("prompt") is not None:
        rest["stored_prompt"] = request["prompt"]
    attributes = request_attributes(rest)
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    turns = list(_turns(items))
    if request.get("instructions"):
        turns.insert(0, {"role": "system", "parts": [{"type": "text", "content": request["instructions"]}]})
    put_messages(attributes, turns, dropped)
    elsewhere = [f"{key} {_short(request[key])}" for key in _AT_SERVER if request.get(key)]
    elsewhere += ["item_reference" for item in items if item.get("type") == "item_reference"][:1]
    if elsewhere:
        dropped[DROPPED_TURNS] = f"earlier turns are at the server: {', '.join(elsewhere)}"
    text = request.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        attributes[c.CONSTRAINED] = True
    return attributes


def responses_response(
    response: Mapping[str, Any], dropped: dict[str, str], request: Mapping[str, Any] | None = None
) -> Attributes:
    """What a Responses server answered."""
    reason = _reason(response)
    parts = [part for item in response.get("output") or () for part in _item(item)["parts"]]
    if response.get("status") in ("queued", "in_progress") and (request or {}).get("background"):
        dropped["response"] = "it is made in the background and is not in this exchange"
    messages = [{"role": "assistant", "parts": parts, "finish_reason": reason}]
    tell_media(media.references_in(messages), dropped)
    return (
        identity_attributes(response)
        | {c.RESPONSE_FINISH_REASONS: [clean(reason)], c.OUTPUT_MESSAGES: dumps(messages)}
        | usage_attributes(response.get("usage"), _USAGE)
    )


def assemble_responses(body: bytes, choice_count: int = 1) -> Assembled:
    """What a streamed `/responses` call amounts to: its last event carries all of it, if it comes."""
    result = Assembled()
    items: dict[int, dict[str, Any]] = {}
    is_over = False
    for event in objects(body, result):
        kind = str(event.get("type"))
        if isinstance(event.get("response"), dict):
            result.body = event["response"]
        if kind in _ENDS:
            is_over, result.is_complete = True, _ENDS[kind]
        if kind in ("error", "response.failed"):
            result.error = event.get("error") or result.body.get("error") or _error_of(event)
        elif kind in ("response.output_item.added", "response.output_item.done"):
            items[event.get("output_index", len(items))] = dict(event.get("item") or {})
        else:
            _add_delta(items, kind, event)
    if result.error is not None:
        result.is_complete = False
    if items and not (is_over and result.body.get("output")):
        result.body["output"] = [items[index] for index in sorted(items)]
    return result


def _add_delta(items: dict[int, dict[str, Any]], kind: str, event: Mapping[str, Any]) -> None:
    delta = event.get("delta")
    if not isinstance(delta, str):
        return
    item = items.setdefault(event.get("output_index", 0), {"role": "assistant"})
    if (name := _FIELD_DELTAS.get(kind)) is not None:
        item[name] = (item.get(name) or "") + delta
    elif kind in _DELTAS:
        place, entry_type, key = _DELTAS[kind]
        entries: list[dict[str, Any]] = list(item.get(place) or ())
        item[place] = entries
        index = event.get("summary_index" if place == "summary" else "content_index", 0)
        while len(entries) <= index:
            entries.append({"type": entry_type, key: ""})
        entries[index] = entries[index] | {key: (entries[index].get(key) or "") + delta}


def _error_of(event: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": event.get("code") or "error", "message": event.get("message") or "failed"}


def _reason(response: Mapping[str, Any]) -> str:
    status = str(response.get("status") or "")
    details = response.get("incomplete_details")
    if status == "incomplete" and isinstance(details, Mapping) and details.get("reason"):
        return str(details["reason"])
    return status


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("id")
    return repr(value)[:80]


def _turns(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages of a request: what the assistant did in one go is one of them."""
    open_turn: dict[str, Any] | None = None
    for item in items:
        turn = _item(item)
        is_message = (item.get("type") or "message") == "message"
        if turn["role"] != "assistant":
            if open_turn is not None:
                yield open_turn
            open_turn = None
            yield turn
        elif open_turn is None or (is_message and any(part["type"] == "text" for part in open_turn["parts"])):
            if open_turn is not None:
                yield open_turn
            open_turn = turn
        else:
            open_turn["parts"].extend(turn["parts"])
    if open_turn is not None:
        yield open_turn


def _item(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        return {"role": "user", "parts": [{"type": "unknown", "content": item}]}
    match item.get("type") or "message":
        case "message":
            return {"role": item.get("role") or "assistant", "parts": _parts(item.get("content"))}
        case "reasoning":
            return {"role": "assistant", "parts": _reasoning(item)}
        case "function_call":
            call = {
                "type": "tool_call",
                "id": item.get("call_id"),
                "name": item.get("name"),
                "arguments": item.get("arguments"),
            }
            return {"role": "assistant", "parts": [call]}
        case "function_call_output":
            response = {
                "type": "tool_call_response",
                "id": item.get("call_id"),
                "response": _output(item.get("output")),
            }
            return {"role": "tool", "parts": [response]}
        case "custom_tool_call":
            return {"role": "assistant", "parts": [custom_tool_call(item.get("call_id"), item)]}
        case "image_generation_call" if isinstance(item.get("result"), str):
            made = media.blob(item["result"], "image", None) | {"id": item.get("id")}
            return {"role": "assistant", "parts": [made]}
        case kind:
            role = "tool" if str(kind).endswith("_output") else "assistant"
            return {"role": role, "parts": [dict(media.without_data(item))]}


def _reasoning(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was thought, a summary of it, or bytes that only the server can read."""
    parts: list[dict[str, Any]] = [
        {"type": "reasoning", "content": entry.get("text")} for entry in item.get("content") or ()
    ]
    if not parts:
        parts = [
            {"type": "reasoning_summary", "content": entry.get("text")} for entry in item.get("summary") or ()
        ]
        if item.get("encrypted_content") or not parts:
            parts.append({"type": "reasoning_encrypted", "data": item.get("encrypted_content")})
    return parts


def _output(output: Any) -> Any:
    """A function's result: text, or a list of parts of which texts take the form of a chat message."""
    if not isinstance(output, list):
        return output
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
        else media.without_data(part)
        for part in output
    ]


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    if not isinstance(content, Sequence):
        return []
    return [_part(part) for part in content]


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        return {"type": "unknown", "content": part}
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            notes = {"annotations": part["annotations"]} if part.get("annotations") else {}
            return {"type": "text", "content": part.get("text")} | notes
        case "refusal":
            return {"type": "refusal", "content": part.get("refusal")}
        case "input_image":
            if part.get("image_url") is None:
                return media.by_id(part.get("file_id"), "image")
            return media.by_url(part["image_url"], "image")
        case "input_file":
            return _file(part)
        case "input_audio" if isinstance(part.get("input_audio"), Mapping):
            sound = part["input_audio"]
            return media.blob(sound.get("data"), "audio", f"audio/{sound.get('format')}")
    return dict(media.without_data(part))


def _file(part: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": part["filename"]} if part.get("filename") else {}
    data = part.get("file_data")
    if isinstance(data, str):
        known = media.by_url(data, "file") if data.startswith("data:") else media.blob(data, "file", None)
        return known | named
    if part.get("file_url") is not None:
        return media.by_url(part["file_url"], "file") | named
    return media.by_id(part.get("file_id"), "file") | named
