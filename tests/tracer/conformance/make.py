"""Writes `sessions/*.json`. Run it as `python -m tests.tracer.conformance.make`; the same every time."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.tracer.conformance.dialect import (
    Json,
    Reply,
    calls_tools,
    chat,
    chat_chunks,
    completion,
    completion_chunks,
    embeddings,
    message,
    message_events,
    response,
    response_events,
    response_text,
    says,
    thinks,
)
from tests.tracer.conformance.engine import SESSIONS

CHAT = "/v1/chat/completions"
ASKS_IDS: Json = {"return_token_ids": True, "logprobs": True}
STREAMS: Json = {"stream": True}

DRY = says("Dry", " in", " Oslo", ".")
WET = says("Wet", " in", " Oslo", ".", first_id=121)
THOUGHT = thinks([" Look", " outside"], ["Dry", "."])
ONE_TOOL = calls_tools(("call_1", "get_weather", ['{"city":', ' "Zürich",', '  "days":2}']))
TWO_TOOLS = calls_tools(
    ("call_1", "get_weather", ['{"city": "Oslo",', ' "days": 1}']),
    ("call_2", "get_weather", ['{"city": "Bergen",', ' "days": 1}']),
)
JSON_REPLY = says('{"city":', ' "Oslo",', ' "days": 3}', first_id=141)

_BUSY: Json = {"message": "slow down", "type": "RateLimitError", "param": None, "code": 429}
_DEAD: Json = {"message": "engine core died", "type": "InternalServerError", "param": None, "code": 500}
_OVERLOADED: Json = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}


def exchange(path: str, match: Json | None = None, *, says: str = "", **reply: Any) -> Json:
    """One request that is expected, and what it gets."""
    entry: Json = {"path": path, "status": 200}
    if match:
        entry["match"] = match
    if says:
        entry["says"] = says
    return entry | reply


def whole(*replies: Reply, name: str, says: str = "", ids: bool = True, **more: Any) -> Json:
    """A chat completion that is not streamed."""
    match = {**(ASKS_IDS if ids else {}), **more}
    return exchange(CHAT, match, says=says, body=chat(*replies, name=name, ids=ids, logprobs=ids))


def streamed(
    *replies: Reply, name: str, says: str = "", ids: bool = True, faults: Json | None = None, **more: Any
) -> Json:
    """A chat completion as a stream."""
    match = {**STREAMS, **(ASKS_IDS if ids else {}), **more}
    events = plain_events(chat_chunks(*replies, name=name, ids=ids, logprobs=ids))
    return exchange(CHAT, match, says=says, events=events, **({"faults": faults} if faults else {}))


def plain_events(chunks: Sequence[Json]) -> list[tuple[str, Any]]:
    """OpenAI's events: without names, `[DONE]` at the end."""
    return [*(("", chunk) for chunk in chunks), ("", "[DONE]")]


def failing(status: int, error: Json, path: str = CHAT, **headers: str) -> Json:
    """An error instead of a reply."""
    return exchange(path, body={"error": error}, headers=headers) | {"status": status}


def sessions() -> Iterator[tuple[str, Json]]:
    """Name and content of every session."""
    groups = _chats() | _faults() | _routes() | _graphs() | _through_gateway()
    for name, exchanges in groups.items():
        yield name, {"exchanges": exchanges}


def _chats() -> dict[str, list[Json]]:
    return {
        "chat": [whole(DRY, name="1")],
        "chat_stream": [streamed(DRY, name="1")],
        "chat_n2": [whole(DRY, WET, name="1", n=2)],
        "chat_n2_stream": [streamed(DRY, WET, name="1", n=2)],
        "chat_plain": [whole(DRY, name="1", ids=False)],
        "chat_plain_stream": [streamed(DRY, name="1", ids=False)],
        "chat_gzip": [whole(DRY, name="1") | {"faults": {"gzip": True}}],
        "thoughts": [whole(THOUGHT, name="1")],
        "thoughts_stream": [streamed(THOUGHT, name="1")],
        "tools": [whole(ONE_TOOL, name="1", says="weather"), whole(DRY, name="2", says="dry in")],
        "tools_stream": [
            streamed(TWO_TOOLS, name="1", says="weather"),
            streamed(DRY, name="2", says="dry in"),
        ],
        "structured": [whole(JSON_REPLY, name="1", response_format={"type": "json_schema"})],
        "structured_stream": [streamed(JSON_REPLY, name="1", response_format={"type": "json_schema"})],
        "batch": [whole(DRY, name="1", says="Oslo"), whole(WET, name="2", says="Bergen")],
    }


def _faults() -> dict[str, list[Json]]:
    busy = failing(429, _BUSY, **{"retry-after-ms": "1"})
    silent = [chunk for chunk in chat_chunks(DRY, name="1", with_usage=False)][:3]
    return {
        "retries": [busy, busy, whole(DRY, name="1")],
        "error_500": [failing(500, _DEAD)],
        "error_400": [failing(400, {"message": "too long", "type": "BadRequestError", "code": 400})],
        "slow": [whole(DRY, name="1") | {"faults": {"hold": "before"}}],
        "not_json": [exchange(CHAT, raw='{"id": "chatcmpl-1", "choices": [{"ind')],
        "half_body": [whole(DRY, name="1") | {"faults": {"cut_after": 40}}],
        "stream_held": [streamed(DRY, name="1", faults={"hold": 3})],
        "stream_cut": [streamed(DRY, name="1", faults={"cut_after": 3})],
        "stream_unfinished": [exchange(CHAT, STREAMS, events=plain_events(silent))],
        "stream_error": [
            exchange(CHAT, STREAMS, events=[*(("", chunk) for chunk in silent), ("", {"error": _DEAD})])
        ],
        "stream_not_json": [
            exchange(CHAT, STREAMS, events=[("", silent[0]), ("", '{"choices": [{'), ("", "[DONE]")])
        ],
        "fallback": [
            failing(500, _DEAD) | {"match": {"model": "first"}},
            whole(DRY, name="1", model="second"),
        ],
    }


def _routes() -> dict[str, list[Json]]:
    function = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed"}
    function |= {"name": "get_weather", "arguments": '{"city":  "Oslo"}'}
    answer = response(response_text("Dry in Oslo."))
    asks = response(response_text("One moment."), function)
    text: Json = {"type": "text", "text": "Dry in Oslo."}
    thought: Json = {"type": "thinking", "thinking": "Look outside.", "signature": "sig"}
    tool: Json = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    pieces = ['{"city":', '  "Oslo"}']
    plain = message(text, name="1")
    asking = message(text, tool, name="2", stop_reason="tool_use")
    considered = message(thought, text, name="3")
    broken = [*message_events(plain)[:4], ("error", _OVERLOADED)]
    path, vectors = "/v1/messages", embeddings([0.5, -0.25], [0.125, 1.0])
    base64 = {**vectors, "data": [{**item, "embedding": "AAAAPwAAgL4="} for item in vectors["data"]]}
    return {
        "completion": [
            exchange("/v1/completions", {"return_token_ids": True}, body=completion(DRY, name="1"))
        ],
        "completion_stream": [
            exchange("/v1/completions", STREAMS, events=plain_events(completion_chunks(DRY, name="1")))
        ],
        "embeddings": [exchange("/v1/embeddings", {"model": "embedder"}, body=vectors)],
        "embeddings_base64": [exchange("/v1/embeddings", {"encoding_format": "base64"}, body=base64)],
        "response": [exchange("/v1/responses", body=answer)],
        "response_stream": [exchange("/v1/responses", STREAMS, events=response_events(answer))],
        "response_tools": [exchange("/v1/responses", body=asks)],
        "response_tools_stream": [exchange("/v1/responses", STREAMS, events=response_events(asks))],
        "response_cut": [
            exchange("/v1/responses", STREAMS, events=response_events(answer), faults={"cut_after": 5})
        ],
        "message": [exchange(path, body=plain)],
        "message_stream": [exchange(path, STREAMS, events=message_events(plain))],
        "message_tools": [exchange(path, body=asking)],
        "message_tools_stream": [
            exchange(path, STREAMS, events=message_events(asking, argument_pieces=pieces))
        ],
        "message_thoughts": [exchange(path, body=considered)],
        "message_thoughts_stream": [exchange(path, STREAMS, events=message_events(considered))],
        "message_overloaded": [exchange(path, STREAMS, events=broken)],
        "message_held": [exchange(path, STREAMS, events=message_events(plain), faults={"hold": 4})],
        "message_retries": [
            exchange(path, body=_OVERLOADED, headers={"retry-after-ms": "1"}) | {"status": 529},
            exchange(path, body=plain),
        ],
    }


def _graphs() -> dict[str, list[Json]]:
    return {
        "graph_tools": [whole(TWO_TOOLS, name="1", says="weather"), whole(DRY, name="2", says="dry in")],
        "graph_branches": [
            whole(DRY, name="1", says="left"),
            whole(WET, name="2", says="right"),
            whole(says("Both", "."), name="3", says="join"),
        ],
        "graph_inner": [whole(DRY, name="1", says="outer"), whole(WET, name="2", says="inner")],
        "graph_stream": [streamed(DRY, name="1")],
        "graph_resume": [whole(DRY, name="1", says="before"), whole(WET, name="2", says="after")],
    }


def _through_gateway() -> dict[str, list[Json]]:
    return {
        "gateway_chat": [whole(DRY, name="g1")],
        "gateway_stream": [streamed(DRY, name="g2")],
        "gateway_tools": [
            whole(ONE_TOOL, name="g3", says="weather"),
            whole(DRY, name="g4", says="dry in"),
        ],
        "gateway_retry": [
            failing(429, _BUSY, **{"retry-after-ms": "1"}),
            whole(DRY, name="g5"),
        ],
    }


def main() -> None:
    """Write them all; files of sessions that are no more go."""
    SESSIONS.mkdir(exist_ok=True)
    for path in SESSIONS.glob("*.json"):
        path.unlink()
    for name, session in sessions():
        (SESSIONS / f"{name}.json").write_text(as_text(session))


def as_text(session: Json) -> str:
    """A session as its file holds it: one line for an event."""
    exchanges = []
    for entry in session["exchanges"]:
        events = entry.get("events")
        rest = {key: value for key, value in entry.items() if key != "events"}
        text = _dumps(rest)
        if events is not None:
            lines = ",\n      ".join(_dumps(event) for event in events)
            text = text[:-1] + ', "events": [\n      ' + lines + "\n    ]}"
        exchanges.append(text)
    return '{"exchanges": [\n    ' + ",\n    ".join(exchanges) + "\n]}\n"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
