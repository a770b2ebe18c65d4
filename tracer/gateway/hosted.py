"""Models of other people, reached through LiteLLM: what a teacher says is recorded like any call.

    call --> httpx client --> this transport --> litellm.acompletion --> OpenAI, Anthropic, ...

To the rest of the gateway a hosted model is one more engine: it answers HTTP requests in OpenAI's
form. There is no socket behind it; LiteLLM has its own, which it closes when the process ends.

Invariants: agents choose messages and sampling, and nothing of where a request goes or with which
key; a failure is an error in OpenAI's form with LiteLLM's status; nothing is asked twice.

Knows LiteLLM, which is imported when a hosted model is configured and not before. Knows no spans.
"""

import importlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from spangrad.errors import ConfigError
from spangrad.tracer.gateway.config import HostedModel
from spangrad.tracer.gateway.http_parts import error_body, error_event
from spangrad.tracer.gateway.rewrite import dump

SCHEME = "litellm://"
"""Begins the addresses of hosted models, which no socket has."""
_SAMPLING = {
    *("temperature", "top_p", "n", "stream", "stream_options", "stop", "max_tokens", "seed", "user"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs"),
}
_FUNCTIONS = {
    "/v1/chat/completions": (
        "acompletion",
        {
            *_SAMPLING,
            *("messages", "max_completion_tokens", "top_k", "top_logprobs", "reasoning_effort", "thinking"),
            *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
            *("response_format", "verbosity", "modalities", "audio", "prediction", "web_search_options"),
            *("service_tier", "prompt_cache_key", "safety_identifier"),
        },
    ),
    "/v1/completions": ("atext_completion", {*_SAMPLING, "prompt", "echo", "best_of", "suffix"}),
    "/v1/embeddings": ("aembedding", {"input", "dimensions", "encoding_format", "user"}),
}
"""Path -> LiteLLM's function, and the fields that agents may give it.

LiteLLM takes addresses and keys as fields of the same call: whatever is not named here would let
an agent send our keys elsewhere.
"""
_IGNORED = {"model", "metadata", "store"}
"""Fields that say nothing to the model."""


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
        path = next((path for path in _FUNCTIONS if request.url.path.endswith(path)), None)
        if request.method == "GET":
            return self._read(request)
        if path is None:
            message = f"hosted model {self._name!r} answers POST {', '.join(_FUNCTIONS)} only"
            return _refusal(404, "not_found", message)
        try:
            body = json.loads(await request.aread())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return _refusal(400, "invalid_request_error", "the request's body is no JSON object")
        function, known = _FUNCTIONS[path]
        fields = {key: value for key, value in body.items() if key not in _IGNORED and value is not None}
        if unknown := sorted(fields.keys() - known):
            message = f"hosted model {self._name!r} takes no field {unknown[0]!r}; leave it out"
            return _refusal(400, "invalid_request_error", message)
        try:
            answer = await getattr(self._litellm, function)(**{**self._settings, **fields})
        except Exception as error:  # LiteLLM's own tree of errors, and whatever a provider's code raises
            return _failure(error)
        if body.get("stream") is True:
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=_Events(answer))
        return httpx.Response(200, json=_whole(answer))

    def _read(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/v1/models"):
            entry = {"id": self._name, "object": "model", "owned_by": self.provider}
            return httpx.Response(200, json={"object": "list", "data": [entry]})
        return _refusal(404, "not_found", f"hosted model {self._name!r} has no {request.url.path}")


class _Events(httpx.AsyncByteStream):
    """A stream's chunks as server-sent events, as they come."""

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                data: str = chunk.model_dump_json(exclude_none=True, exclude_unset=True)
                yield b"data: " + data.encode() + b"\n\n"
        except Exception as error:  # as in `handle_async_request`; what came must not look whole
            yield error_event(*_told(error))
            return
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()


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


def _failure(error: Exception) -> httpx.Response:
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", None) or {}
    kept = {name: headers[name] for name in ("retry-after",) if name in headers}
    return _refusal(*_told(error), headers=kept)


def _refusal(
    status: int, kind: str, message: str, *, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    content = dump(error_body(status, kind, message))
    return httpx.Response(
        status, headers={"content-type": "application/json", **(headers or {})}, content=content
    )
