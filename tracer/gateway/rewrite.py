"""Ask the engine for more than the client asked, and take it out of the reply again.

Invariants: a client that asked for token ids and logprobs itself gets the engine's
bytes untouched; any other gets what the engine would have sent without us (vLLM
0.32 writes a field that was not asked for as null, so stripping writes null).

Knows OpenAI's and vLLM's JSON. Knows no spans and no HTTP.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Parse = Callable[[bytes], Any]
"""Decodes JSON as `json.loads` does; what it gives is not changed."""


class Route(StrEnum):
    """Routes with token ids; the value is the GenAI operation's name."""

    CHAT = "chat"
    COMPLETION = "text_completion"


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """What goes to the engine, and what of its reply the client did not ask for."""

    body: Any
    """The client's JSON; None if it sent none."""
    content: bytes
    """Body for the engine."""
    strip_ids: bool
    strip_logprobs: bool

    @property
    def is_untouched(self) -> bool:
        """Whether the reply goes to the client byte for byte."""
        return not (self.strip_ids or self.strip_logprobs)

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return isinstance(self.body, dict) and self.body.get("stream") is True


def upstream_request(
    raw: bytes, route: Route, models: Mapping[str, str], parse: Parse = json.loads
) -> UpstreamRequest:
    """Add `return_token_ids` and `logprobs` to a request, and map its model's name.

    A body that is no JSON object is passed on as it is: refusing it is the engine's part.
    """
    body = _parsed(raw, parse)
    if not isinstance(body, dict):
        return UpstreamRequest(body, raw, strip_ids=False, strip_logprobs=False)
    added = _renamed(body, models)
    if route is Route.COMPLETION and body.get("echo"):  # with ids vLLM leaves the echo out of the text
        content = _with_fields(raw, body, added)
        return UpstreamRequest(body, content, strip_ids=False, strip_logprobs=False)
    strip_ids = body.get("return_token_ids") is not True
    if strip_ids:
        added["return_token_ids"] = True
    strip_logprobs = _wants_no_logprobs(body, route)
    if strip_logprobs:
        added["logprobs"] = True if route is Route.CHAT else 0
    return UpstreamRequest(body, _with_fields(raw, body, added), strip_ids, strip_logprobs)


def renamed_request(raw: bytes, models: Mapping[str, str], parse: Parse = json.loads) -> UpstreamRequest:
    """Map the name of a request's model and change nothing else."""
    body = _parsed(raw, parse)
    added = _renamed(body, models) if isinstance(body, dict) else {}
    return UpstreamRequest(body, _with_fields(raw, body, added), strip_ids=False, strip_logprobs=False)


def with_model(content: bytes, name: str) -> bytes:
    """A request's body with another model; what is no JSON object stays as it is."""
    body = _parsed(content, json.loads)
    return dump({**body, "model": name}) if isinstance(body, dict) else content


def _with_fields(raw: bytes, body: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """A request's JSON with these fields; the client's bytes stay as they are where only new ones come."""
    if not added:
        return raw
    text = raw.rstrip(b" \t\r\n")
    is_utf8 = b"\0" not in text  # JSON may be UTF-16, too
    if not body or not body.keys().isdisjoint(added) or not (is_utf8 and text.endswith(b"}")):
        return dump({**body, **added})
    return text[:-1] + b"," + dump(added)[1:]


def _renamed(body: Mapping[str, Any], models: Mapping[str, str]) -> dict[str, Any]:
    name = body.get("model")
    served = models.get(name, models.get("*")) if isinstance(name, str) else models.get("*")
    return {} if served is None or served == name else {"model": served}


def _wants_no_logprobs(body: Mapping[str, Any], route: Route) -> bool:
    if route is Route.COMPLETION:
        return body.get("logprobs") is None
    # top_logprobs or logprob_token_ids without logprobs is an error that the engine reports itself.
    return not (body.get("logprobs") or body.get("top_logprobs") or body.get("logprob_token_ids"))


def is_reply(data: Mapping[str, Any]) -> bool:
    """Whether `data` is a reply or a chunk of one, and not an error or something that we don't know."""
    choices = data.get("choices")
    return isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)


def strip_reply(reply: dict[str, Any], request: UpstreamRequest) -> dict[str, Any]:
    """Blank what the client did not ask for, in place; `reply` must be one by `is_reply`."""
    if request.strip_ids and "prompt_token_ids" in reply:
        reply["prompt_token_ids"] = None
    for choice in reply["choices"]:
        if request.strip_ids:
            for key in ("token_ids", "prompt_token_ids"):
                if key in choice:
                    choice[key] = None
        if request.strip_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
    return reply


def is_left_over(chunk: Mapping[str, Any], request: UpstreamRequest) -> bool:
    """Whether a chat chunk was sent only because ids or logprobs were asked for by us.

    vLLM skips a token without visible text (a parser's control token) unless ids or
    logprobs are wanted; then it sends it with an empty delta.
    """
    if not (request.strip_ids and request.strip_logprobs and is_reply(chunk) and chunk["choices"]):
        return False
    return all(
        choice.get("delta") == {} and choice.get("finish_reason") is None for choice in chunk["choices"]
    )


class EventSplitter:
    """Cut a byte stream into server-sent events, each with its blank line."""

    def __init__(self) -> None:
        """Start with nothing buffered."""
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Events that `data` completes."""
        self._buffer += data
        while True:
            ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := self._buffer.find(mark)) >= 0]
            if not ends:
                return
            event, self._buffer = self._buffer[: min(ends)], self._buffer[min(ends) :]
            yield event

    def rest(self) -> bytes:
        """What the stream's end left without a blank line."""
        rest, self._buffer = self._buffer, b""
        return rest


def event_data(event: bytes) -> bytes:
    """The data of one event; empty for a comment such as a keep-alive."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return event[6:].strip()
    lines = event.splitlines()
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))


def dump(value: Any) -> bytes:
    """JSON as vLLM writes it; lone surrogates stay escaped because UTF-8 has no form for them."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _parsed(raw: bytes, parse: Parse) -> Any:
    try:
        return parse(raw)
    except (ValueError, TypeError, RecursionError):
        return None
