"""Models of other people, reached through LiteLLM: what a teacher says is recorded like any call.

    call --> httpx client --> this transport --> litellm.acompletion --> OpenAI, Anthropic, ...

To the rest of the gateway a hosted model is one more engine: it answers HTTP requests in OpenAI's
form, or in Anthropic's below /v1/messages. There is no socket behind it; LiteLLM has its own, which
it closes when the process ends.

Invariants: agents choose messages and sampling, and nothing of where a request goes or with which
key; a failure is an error in OpenAI's form with LiteLLM's status; nothing is asked twice.

Knows LiteLLM, which is imported when a hosted model is configured and not before. Knows no spans.
"""

import importlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from spangrad.errors import ConfigError
from spangrad.tracer.gateway.config import HostedModel
from spangrad.tracer.gateway.http_parts import error_body, error_event
from spangrad.tracer.gateway.rewrite import dump

SCHEME = "litellm://"
"""Begins the addresses of hosted models, which no socket has."""


@dataclass(frozen=True, slots=True)
class _Function:
    """One of LiteLLM's functions, and the fields that agents may give it.

    LiteLLM takes addresses and keys as fields of the same call: whatever is not named here would
    let an agent send our keys elsewhere.
    """

    name: str
    fields: frozenset[str]


def _function(name: str, *groups: str) -> _Function:
    return _Function(name, frozenset(field for group in groups for field in group.split()))


_SAMPLING = "temperature top_p stream"
_OPENAI = "n stream_options stop max_tokens seed user presence_penalty frequency_penalty logit_bias logprobs"
_FUNCTIONS = {
    "/v1/chat/completions": _function(
        "acompletion",
        _SAMPLING,
        _OPENAI,
        "messages max_completion_tokens top_k top_logprobs reasoning_effort thinking verbosity",
        "tools tool_choice parallel_tool_calls functions function_call response_format",
        "modalities audio prediction web_search_options service_tier prompt_cache_key safety_identifier",
    ),
    "/v1/completions": _function("atext_completion", _SAMPLING, _OPENAI, "prompt echo best_of suffix"),
    "/v1/responses": _function(
        "aresponses",
        _SAMPLING,
        "input instructions max_output_tokens reasoning text tools tool_choice parallel_tool_calls include",
        "previous_response_id truncation user service_tier safety_identifier",
    ),
    "/v1/messages": _function(
        "anthropic_messages",
        _SAMPLING,
        "messages max_tokens system stop_sequences top_k thinking tools tool_choice",
    ),
    "/v1/embeddings": _function("aembedding", "input dimensions encoding_format user"),
}
"""Path -> who answers it."""
_IGNORED = {"model", "metadata", "store"}
"""Fields that say nothing to the model."""
_HAS_DONE = ("/v1/chat/completions", "/v1/completions")
"""Paths whose streams end with `[DONE]`; the others' events have names."""


class HostedTransport(httpx.AsyncBaseTransport):
    """Answers the requests of one hosted model."""

    def __init__(self, name: str, model: HostedModel, *, timeout_s: float) -> None:
        """Import LiteLLM. Raises ConfigError if it is missing or knows no such model.

        Args:
            name: What agents call the model.
            model: What LiteLLM calls it, and its settings.
            timeout_s: Longest silence of the provider, in seconds.
        """
        self._litellm = _litellm(name)
        self._name = name
        self._settings = {"timeout": timeout_s, "max_retries": 0, **model.settings, "model": model.model}
        try:
            _, self.provider, _, _ = self._litellm.get_llm_provider(
                model=model.model,
                custom_llm_provider=model.settings.get("custom_llm_provider"),
                api_base=model.settings.get("api_base"),
            )
        except Exception as error:  # LiteLLM's own tree of errors
            raise ConfigError(
                f"gateway.hosted: LiteLLM knows no provider of {model.model!r} for {name!r}; "
                "expected PROVIDER/MODEL, such as openai/gpt-4o"
            ) from error

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """One request, as an OpenAI-compatible server would answer it."""
        if request.method == "GET":
            return self._read(request)
        path = next((path for path in _FUNCTIONS if request.url.path.endswith(path)), None)
        if path is None:
            message = f"hosted model {self._name!r} answers POST {', '.join(_FUNCTIONS)} only"
            return _refusal(request.url.path, 404, "not_found", message)
        try:
            body = json.loads(await request.aread())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            message = "the request's body is no JSON object"
            return _refusal(path, 400, "invalid_request_error", message)
        function = _FUNCTIONS[path]
        fields = {key: value for key, value in body.items() if key not in _IGNORED and value is not None}
        if unknown := sorted(fields.keys() - function.fields):
            message = f"hosted model {self._name!r} takes no field {unknown[0]!r}; leave it out"
            return _refusal(path, 400, "invalid_request_error", message)
        try:
            answer = await getattr(self._litellm, function.name)(**{**self._settings, **fields})
        except ImportError as error:
            message = f"LiteLLM lacks what it needs for {path}: {error}; `pip install 'litellm[proxy]'`"
            return _refusal(path, 501, "not_implemented", message)
        except Exception as error:  # LiteLLM's own tree of errors, and whatever a provider's code raises
            return _failure(path, error)
        if body.get("stream") is True:
            headers = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=headers, stream=_Events(path, answer))
        return httpx.Response(200, json=_whole(answer))

    def _read(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/v1/models"):
            entry = {"id": self._name, "object": "model", "owned_by": self.provider}
            return httpx.Response(200, json={"object": "list", "data": [entry]})
        message = f"hosted model {self._name!r} has no {request.url.path}"
        return _refusal(request.url.path, 404, "not_found", message)


class _Events(httpx.AsyncByteStream):
    """A stream's chunks as server-sent events, as they come."""

    def __init__(self, path: str, chunks: Any) -> None:
        self._path = path
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        has_done = self._path in _HAS_DONE
        try:
            async for chunk in self._chunks:
                yield _event(chunk, is_named=not has_done)
        except Exception as error:  # as in `handle_async_request`; what came must not look whole
            yield error_event(*_told(error), path=self._path)
            return
        if has_done:
            yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()


def _event(chunk: Any, *, is_named: bool) -> bytes:
    if isinstance(chunk, bytes):  # a provider's own events
        return chunk
    if isinstance(chunk, dict):
        kind, data = chunk.get("type"), dump(chunk)
    else:
        kind = getattr(chunk, "type", None)
        data = chunk.model_dump_json(exclude_none=True, exclude_unset=True).encode()
    name = f"event: {getattr(kind, 'value', kind)}\n".encode() if is_named else b""
    return name + b"data: " + data + b"\n\n"


def _litellm(name: str) -> Any:
    # Else the import asks the network for a list of prices.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        litellm: Any = importlib.import_module("litellm")
    except ImportError as error:
        raise ConfigError(
            f"gateway.hosted names {name!r}, which is reached through LiteLLM; `pip install litellm`"
        ) from error
    litellm.suppress_debug_info = True  # it prints advice to stdout
    return litellm


def _whole(answer: Any) -> dict[str, Any]:
    if isinstance(answer, dict):
        return answer
    data: dict[str, Any] = answer.model_dump(mode="json", exclude_none=True)
    for choice in data.get("choices", ()):
        if "message" in choice:
            choice["message"].setdefault("content", None)
    return data


def _told(error: Exception) -> tuple[int, str, str]:
    """Status, type and message of a failure."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int) or not 400 <= status <= 599:
        status = 500
    message = getattr(error, "message", None) or str(error) or "no message"
    return status, type(error).__name__, str(message)


def _failure(path: str, error: Exception) -> httpx.Response:
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", None) or {}
    kept = {name: headers[name] for name in ("retry-after",) if name in headers}
    return _refusal(path, *_told(error), headers=kept)


def _refusal(
    path: str, status: int, kind: str, message: str, *, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    content = dump(error_body(status, kind, message, path=path))
    headers = {"content-type": "application/json", **(headers or {})}
    return httpx.Response(status, headers=headers, content=content)
