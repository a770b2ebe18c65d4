"""Attributes of `/chat/completions` and `/completions` calls, from decoded JSON.

Knows the OpenAI API and vLLM's additions to it (`prompt_token_ids`, `token_ids`); ids and logprobs are
`tokens.py`'s part. Invariants:
* Sampling parameters that have a `gen_ai.*` name are under it if their value has the right type; all other
  request fields are in `spangrad.request.extra`, verbatim.
* A reply is what was sampled: a prompt that `echo` puts before it is taken off again.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from spangrad.tracer import conventions as c
from spangrad.tracer.wire import media, tokens
from spangrad.tracer.wire.constraints import is_constrained
from spangrad.tracer.wire.messages import input_message, output_message
from spangrad.tracer.wire.repeated import once

Attributes = dict[str, Any]

_NUMBERS = {
    "temperature": c.REQUEST_TEMPERATURE,
    "top_p": c.REQUEST_TOP_P,
}
_INTEGERS = {
    "top_k": c.REQUEST_TOP_K,
    "max_tokens": c.REQUEST_MAX_TOKENS,
    "max_completion_tokens": c.REQUEST_MAX_TOKENS,
    "seed": c.REQUEST_SEED,
    "n": c.REQUEST_CHOICE_COUNT,
}
_CONTENT = frozenset({"messages", "prompt", "tools", "functions", "model", "stream", "stop"})
USAGE = {
    "prompt_tokens": c.INPUT_TOKENS,
    "completion_tokens": c.OUTPUT_TOKENS,
    "prompt_tokens_details.cached_tokens": c.CACHE_READ_TOKENS,
    "prompt_cache_hit_tokens": c.CACHE_READ_TOKENS,  # DeepSeek
    "completion_tokens_details.reasoning_tokens": c.REASONING_TOKENS,
}
DROPPED_MEDIA = "media"
"""Key in `spangrad.dropped`: bytes of images, sound and files are not on the span."""


def dumps(value: Any) -> str:
    """Compact JSON that UTF-8 can hold: lone surrogates stay escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def clean(text: str) -> str:
    """`text` without lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def request_attributes(request: Mapping[str, Any], dropped: dict[str, str] | None = None) -> Attributes:
    """What was asked; what is not kept is added to `dropped` with the reason."""
    attributes: Attributes = {}
    extra: dict[str, Any] = {}
    if isinstance(request.get("model"), str):
        attributes[c.REQUEST_MODEL] = clean(request["model"])
    for key, value in request.items():
        if key in _CONTENT or value is None:
            continue
        if key in _NUMBERS and _is_number(value):
            attributes[_NUMBERS[key]] = float(value)
        elif key in _INTEGERS and is_int64(value):
            attributes[_INTEGERS[key]] = value
        else:
            extra[key] = value
    stop = request.get("stop")
    if stop is not None:
        attributes[c.REQUEST_STOP] = [
            clean(str(item)) for item in ([stop] if isinstance(stop, str) else stop)
        ]
    if request.get("stream"):
        attributes[c.REQUEST_STREAM] = True
    if tools := request.get("tools") or request.get("functions"):
        attributes[c.TOOL_DEFINITIONS] = once(dumps, tools)
    if "messages" in request:
        _put_told(attributes, [once(_told_message, message) for message in request["messages"]], dropped)
    elif (prompt := single_prompt(request)) is not None:
        put_messages(attributes, [{"role": "user", "parts": [{"type": "text", "content": prompt}]}], dropped)
    elif "prompt" in request:
        extra["prompt"] = request["prompt"]
    if request.get("tools") and request.get("functions"):
        extra["functions"] = request["functions"]
    if extra:
        attributes[c.REQUEST_EXTRA] = dumps(extra)
    if is_constrained(request):
        attributes[c.CONSTRAINED] = True
    return attributes


def put_messages(
    attributes: Attributes, messages: list[dict[str, Any]], dropped: dict[str, str] | None
) -> None:
    """Add the request's messages, and say how many of their images and files are only referred to."""
    _put_told(attributes, [_told(message) for message in messages], dropped)


def tell_media(count: int, dropped: dict[str, str] | None) -> None:
    """Say that this many images, sounds and files are only referred to."""
    if dropped is not None and count:
        dropped.setdefault(DROPPED_MEDIA, f"bytes of images, sound or files are not kept: {count} of them")


def _put_told(attributes: Attributes, told: list[tuple[str, int]], dropped: dict[str, str] | None) -> None:
    attributes[c.INPUT_MESSAGES] = f"[{','.join(text for text, _ in told)}]"
    tell_media(sum(count for _, count in told), dropped)


def _told_message(message: Mapping[str, Any]) -> tuple[str, int]:
    return _told(input_message(message))


def _told(message: Mapping[str, Any]) -> tuple[str, int]:
    """A message as JSON, and how many references are in it."""
    text = dumps(message)
    return text, media.references_in(message) if '"sha256"' in text else 0


def single_prompt(request: Mapping[str, Any]) -> str | None:
    """The prompt of a `/completions` request that has one, as text."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None


def prompt_count(request: Mapping[str, Any]) -> int:
    """How many prompts a request has; a list of token ids is one."""
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return len(prompt) if several and isinstance(prompt, list) else 1


def response_attributes(
    response: Mapping[str, Any], dropped: dict[str, str], request: Mapping[str, Any] | None = None
) -> Attributes:
    """What was answered; what can't be kept is added to `dropped` with the reason."""
    asked = request or {}
    attributes = identity_attributes(response)
    attributes |= usage_attributes(response.get("usage"), USAGE)
    choices = sorted(response.get("choices") or (), key=lambda choice: choice.get("index") or 0)
    if not choices:
        return attributes
    reasons = [choice.get("finish_reason") for choice in choices]
    attributes[c.RESPONSE_FINISH_REASONS] = [clean(reason or "") for reason in reasons]
    replies = [choice.get("message") or {"content": _text(choice, asked, dropped)} for choice in choices]
    messages = [output_message(message, reason) for message, reason in zip(replies, reasons, strict=True)]
    told = [_told(message) for message in messages]
    attributes[c.OUTPUT_MESSAGES] = f"[{','.join(text for text, _ in told)}]"
    tell_media(sum(count for _, count in told), dropped)
    if prompt_count(asked) > 1:
        reason = "one call with several prompts: it is not known which prompt a choice continues"
        dropped[c.PROMPT_TOKEN_IDS] = dropped[c.SAMPLED_TOKEN_IDS] = reason
    else:
        attributes |= tokens.token_attributes(response, choices, asked, dropped)
    return attributes


def identity_attributes(response: Mapping[str, Any]) -> Attributes:
    """Id and model of a response."""
    names = (("id", c.RESPONSE_ID), ("model", c.RESPONSE_MODEL))
    return {name: clean(response[key]) for key, name in names if isinstance(response.get(key), str)}


def usage_attributes(usage: Any, names: Mapping[str, str]) -> Attributes:
    """Token counts. `names`: key of the usage object, or `key.inner key`, -> attribute."""
    found: Attributes = {}
    if not isinstance(usage, Mapping):
        return found
    for path, name in names.items():
        key, _, inner = path.partition(".")
        value = usage.get(key)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        if is_int64(value):
            found[name] = value
    return found


def _text(choice: Mapping[str, Any], request: Mapping[str, Any], dropped: dict[str, str]) -> Any:
    """Text of a `/completions` choice without the prompt that `echo` puts before it."""
    text = choice.get("text")
    if not request.get("echo") or not isinstance(text, str):
        return text
    prompt = single_prompt(request)
    if prompt is None or not text.startswith(prompt):
        dropped[c.OUTPUT_MESSAGES] = "echo: it is not known where the prompt ends and the reply begins"
        return text
    return text[len(prompt) :]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int64(value: object) -> TypeGuard[int]:
    """Whether an OTel attribute can hold `value` as an integer."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
