"""What of the engine's reply the client gets, and what it amounts to: one reader per call.

`TokenReader` parses every chunk as it comes, because it has to take out what the client
did not ask for. `TextReader` passes bytes on untouched and parses them once the client
has its reply.

Invariants: a reader never raises into the relay; a stream counts as complete only after
the mark that its route ends with.

Knows vLLM's, OpenAI's and Anthropic's JSON. Knows no HTTP and no OpenTelemetry.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.engine_settings import EngineSettings
from spangrad.tracer.gateway.raw_log import parse_json
from spangrad.tracer.gateway.record import choice_count, reply_attributes
from spangrad.tracer.gateway.reply import Reply
from spangrad.tracer.gateway.rewrite import (
    EventSplitter,
    Route,
    UpstreamRequest,
    dump,
    event_data,
    is_left_over,
    is_reply,
    strip_reply,
)
from spangrad.tracer.gateway.versions import SampledBy
from spangrad.tracer.wire import chat
from spangrad.tracer.wire.streams import Assembled, events

MAX_KEPT_BYTES = 64 * 2**20
"""A longer reply of a text route is passed on as ever, but not kept."""
UNFINISHED_REASONS = ("abort", "error")
"""vLLM's finish reasons of a choice that the engine gave up."""

Problem = tuple[str, str]
"""Type and message of an error."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a call beside its reply."""

    versions: SampledBy
    logprobs_mode: str
    """The config's, for engines that do not tell."""
    settings: EngineSettings = field(default_factory=EngineSettings)


class Reader(Protocol):
    """Takes in a reply piece by piece."""

    has_tokens: bool
    """Whether the reply can have token ids, and so needs a policy version."""

    def take_whole(self, content: bytes, *, is_success: bool) -> bytes:
        """Take in a reply that is no stream; returns what the client gets."""
        ...

    def take(self, data: bytes) -> bytes:
        """Take in a piece of a stream; returns what the client gets of it."""
        ...

    def take_rest(self) -> bytes:
        """The stream has ended; returns what is left for the client."""
        ...

    def is_complete(self) -> bool:
        """Whether the reply has come to its end, as far as is known without parsing it."""
        ...

    def needs_version(self) -> bool:
        """Whether there are tokens whose policy version matters."""
        ...

    def problem(self) -> Problem | None:
        """What the reply itself says went wrong; asked once the client has its reply."""
        ...

    def attributes(self, facts: Facts) -> dict[str, Any]:
        """The reply as span attributes; asked once the client has its reply."""
        ...

    def raw(self) -> list[bytes]:
        """The JSON of a whole reply, or of every event of a stream."""
        ...


class TokenReader:
    """Chat and text completions: ids and logprobs were asked for and are taken out again."""

    has_tokens = True

    def __init__(self, request: UpstreamRequest, route: Route, *, keeps_raw: bool) -> None:
        """Read the reply to `request`; `raw` stays empty without `keeps_raw`."""
        self.reply = Reply()
        self._request = request
        self._route = route
        self._choice_count = choice_count(request.body)
        self._events = EventSplitter()
        self._raw: list[bytes] | None = [] if keeps_raw else None
        self._is_whole = False
        self._broken: str | None = None

    def take_whole(self, content: bytes, *, is_success: bool) -> bytes:
        """Take in a whole reply; an error object in it counts."""
        self._is_whole = True
        self._keep(content)
        data = parse_json(content)
        if not isinstance(data, dict):
            return content
        self._add(data)
        return self._stripped(data, content)

    def take(self, data: bytes) -> bytes:
        """Take in the events that `data` completes."""
        passed = b"".join([self._pass_event(event) for event in self._events.feed(data)])
        return data if self._request.is_untouched else passed

    def take_rest(self) -> bytes:
        """Take in an event that the stream's end left without a blank line."""
        rest = self._events.rest()
        passed = self._pass_event(rest) if rest else b""
        return b"" if self._request.is_untouched else passed

    def is_complete(self) -> bool:
        """Whether every choice has a finish reason."""
        return self.reply.is_complete(self._choice_count)

    def needs_version(self) -> bool:
        """Whether there is a choice."""
        return bool(self.reply.choices)

    def problem(self) -> Problem | None:
        """An error object, a choice that was given up, or a reply without its end."""
        reply = self.reply
        if self._broken is not None:
            return "invalid_reply", self._broken
        if reply.error is not None:
            return str(reply.error.get("type") or "engine_error"), str(reply.error.get("message"))
        if self._is_whole and not reply.choices:
            return "invalid_reply", "the engine's reply has no choices"
        reasons = [choice.finish_reason for choice in reply.choices.values()]
        given_up = next((reason for reason in reasons if reason in UNFINISHED_REASONS), None)
        if given_up is not None:
            return given_up, "the engine gave up the call"
        if not self.is_complete():
            return "incomplete_reply", "the engine's reply ended without a finish reason"
        return None

    def attributes(self, facts: Facts) -> dict[str, Any]:
        """Output, ids, logprobs, versions."""
        return reply_attributes(
            self.reply,
            self._request.body,
            versions=facts.versions,
            logprobs_mode=facts.logprobs_mode,
            settings=facts.settings,
        )

    def raw(self) -> list[bytes]:
        """What was kept."""
        return self._raw or []

    def _pass_event(self, event: bytes) -> bytes:
        data = event_data(event)
        if not data or data == b"[DONE]":
            return event
        self._keep(data)
        chunk = parse_json(data)
        if not isinstance(chunk, dict):
            return event
        self._add(chunk)
        stripped = self._stripped(chunk, data)
        if self._route is Route.CHAT and is_left_over(chunk, self._request):
            return b""
        return event if stripped is data else b"data: " + stripped + b"\n\n"

    def _stripped(self, data: dict[str, Any], raw: bytes) -> bytes:
        """`data` without what the client did not ask for, as JSON; `raw` itself if it may pass as it is."""
        if self._request.is_untouched or not is_reply(data):
            return raw
        return dump(strip_reply(data, self._request))

    def _add(self, data: Mapping[str, Any]) -> None:
        try:
            self.reply.add(data)
        except (TypeError, AttributeError, ValueError, KeyError) as error:
            self._broken = f"the engine's reply can't be read: {error!r}"

    def _keep(self, raw: bytes) -> None:
        if self._raw is not None:
            self._raw.append(raw)


@dataclass(frozen=True, slots=True)
class TextForm:
    """How the replies of a route without token ids are read."""

    attributes: Callable[[Mapping[str, Any], dict[str, str], Mapping[str, Any] | None], dict[str, Any]]
    """A whole reply as span attributes; gets what was dropped and why, and the request."""
    parse: Callable[[bytes], Any] = parse_json
    """The bytes of a whole reply as JSON."""
    assemble: Callable[[bytes, int], Assembled] | None = None
    """The bytes of a stream as what they add up to; None: the route has no streams."""
    ends: tuple[bytes, ...] = ()
    """First line of the event that ends a stream; JSON can't contain it, for it ends in a newline."""
    unfinished: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    """Why a reply is not what the policy would have said to its end, else None."""


class TextReader:
    """Responses, messages, embeddings: the engine sends no ids, and the bytes pass as they are."""

    has_tokens = False

    def __init__(self, form: TextForm, request: Any) -> None:
        """Read a reply of this form to a request's JSON."""
        self._form = form
        self._request = request if isinstance(request, dict) else None
        self._pieces: list[bytes] = []
        self._size = 0
        self._tail = b""
        self._is_stream = False
        self._is_success = True
        self._has_ended = False
        self._parsed: Assembled | None = None

    def take_whole(self, content: bytes, *, is_success: bool) -> bytes:
        """Keep a whole reply."""
        self._is_success = is_success
        self._keep(content)
        self._has_ended = is_success
        return content

    def take(self, data: bytes) -> bytes:
        """Keep a piece, and look whether it has the stream's end."""
        self._is_stream = True
        self._keep(data)
        seen = self._tail + data
        self._has_ended = self._has_ended or any(end in seen for end in self._form.ends)
        self._tail = seen[-64:]
        return data

    def take_rest(self) -> bytes:
        """Nothing is held back."""
        return b""

    def is_complete(self) -> bool:
        """Whether the stream's last event has begun; once it is parsed, whether it was whole."""
        return self._has_ended if self._parsed is None else self._parsed.is_complete

    def needs_version(self) -> bool:
        """No: versions are told token by token."""
        return False

    def problem(self) -> Problem | None:
        """An error object or event, a reply that was given up, or one without its end."""
        if not self._is_success:
            return None  # the status says it
        try:
            parsed = self._whole()
        except Exception as error:  # foreign data: whatever it is, the span must come out
            return "invalid_reply", f"the engine's reply can't be read: {error!r}"
        if parsed.error is not None:
            return str(parsed.error.get("type") or "engine_error"), str(parsed.error.get("message"))
        if not parsed.is_complete:
            return "incomplete_reply", "the engine's reply ended before its last event"
        if (reason := self._form.unfinished(parsed.body)) is not None:
            return "incomplete_reply", reason
        return None

    def attributes(self, facts: Facts) -> dict[str, Any]:
        """Output and usage as text."""
        if self._size > MAX_KEPT_BYTES:
            return {names.DROPPED: chat.dumps({"response": f"longer than {MAX_KEPT_BYTES} bytes"})}
        body = self._whole().body if self._is_success else {}
        if not body:
            return {}
        dropped: dict[str, str] = {}
        attributes = self._form.attributes(body, dropped, self._request)
        return attributes | ({names.DROPPED: chat.dumps(dropped)} if dropped else {})

    def raw(self) -> list[bytes]:
        """The reply, or the data of every event."""
        content = b"".join(self._pieces)
        return [data for _, data in events(content)] if self._is_stream else [content]

    def _whole(self) -> Assembled:
        if self._parsed is None:
            content = b"".join(self._pieces)
            if self._size > MAX_KEPT_BYTES:
                self._parsed = Assembled(is_complete=self._has_ended)
            elif self._is_stream and self._form.assemble is not None:
                self._parsed = self._form.assemble(content, 1)
            else:
                self._parsed = _whole_reply(self._form.parse(content))
        return self._parsed

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_KEPT_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()


def _whole_reply(data: Any) -> Assembled:
    if not isinstance(data, dict):
        raise TypeError(f"expected a JSON object, got {type(data).__name__}")
    error = data.get("error")
    return Assembled(body=data, is_complete=True, error=error if isinstance(error, dict) else None)


def refusal(content: bytes) -> str:
    """What a reply with an error's status says."""
    data = parse_json(content)
    error = data.get("error") if isinstance(data, dict) else None
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return error if isinstance(error, str) else content[:500].decode(errors="replace")


def embeddings_reply(content: bytes) -> Any:
    """An embeddings reply as JSON with its first vector only: the others are most of it, and are not kept."""
    first_end, end = content.find(b"}"), content.rfind(b'"usage":')
    if 0 <= first_end < end:
        try:
            return json.loads(content[: first_end + 1] + b"]," + content[end:])
        except ValueError:
            pass  # another order of fields
    return parse_json(content)
