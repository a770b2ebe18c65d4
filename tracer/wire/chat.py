"""Attributes of `/chat/completions` and `/completions` calls, from decoded JSON.

Knows the OpenAI API and vLLM's additions to it (`prompt_token_ids`, `token_ids`). Invariants:
* Sampling parameters that have a `gen_ai.*` name are under it if their value has the right type; all other
  request fields are in `spangrad.request.extra`, verbatim.
* Ids and logprobs are the response's. None is computed, padded or cut; a list with a hole in it is left
  out and named in `spangrad.dropped`.
"""

import json
from collections.abc import Mapping
from typing import Any

from spangrad.tracer import conventions as c
from spangrad.tracer.wire.messages import input_message, output_message

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
_CONTENT = frozenset({"messages", "prompt", "tools", "model", "stream", "stop"})
_CONSTRAINTS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)
_ID_TOKEN = "token_id:"


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


def request_attributes(request: Mapping[str, Any]) -> Attributes:
    """What was asked."""
    attributes: Attributes = {}
    extra: dict[str, Any] = {}
    if isinstance(request.get("model"), str):
        attributes[c.REQUEST_MODEL] = clean(request["model"])
    for key, value in request.items():
        if key in _CONTENT or value is None:
            continue
        if key in _NUMBERS and _is_number(value):
            attributes[_NUMBERS[key]] = float(value)
        elif key in _INTEGERS and _is_int64(value):
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
    if request.get("tools"):
        attributes[c.TOOL_DEFINITIONS] = dumps(request["tools"])
    if "messages" in request:
        attributes[c.INPUT_MESSAGES] = dumps([input_message(message) for message in request["messages"]])
    elif isinstance(request.get("prompt"), str):
        prompt = {"role": "user", "parts": [{"type": "text", "content": request["prompt"]}]}
        attributes[c.INPUT_MESSAGES] = dumps([prompt])
    elif "prompt" in request:
        extra["prompt"] = request["prompt"]
    if extra:
        attributes[c.REQUEST_EXTRA] = dumps(extra)
    if is_constrained(request):
        attributes[c.CONSTRAINED] = True
    return attributes


def is_constrained(request: Mapping[str, Any]) -> bool:
    """Whether a grammar or a forced tool choice masked the distribution that was sampled from."""
    tool_choice = request.get("tool_choice")
    if tool_choice == "required" or isinstance(tool_choice, Mapping):
        return True
    if isinstance(request.get("function_call"), Mapping):
        return True
    response_format = request.get("response_format")
    if isinstance(response_format, Mapping) and response_format.get("type") != "text":
        return True
    return any(request.get(key) is not None for key in _CONSTRAINTS)


def response_attributes(response: Mapping[str, Any], dropped: dict[str, str]) -> Attributes:
    """What was answered; what can't be kept is added to `dropped` with the reason."""
    attributes: Attributes = {}
    for key, name in (("id", c.RESPONSE_ID), ("model", c.RESPONSE_MODEL)):
        if isinstance(response.get(key), str):
            attributes[name] = clean(response[key])
    usage = response.get("usage") or {}
    for key, name in (("prompt_tokens", c.INPUT_TOKENS), ("completion_tokens", c.OUTPUT_TOKENS)):
        if _is_int64(usage.get(key)):
            attributes[name] = usage[key]
    choices = sorted(response.get("choices") or (), key=lambda choice: choice.get("index") or 0)
    if not choices:
        return attributes
    reasons = [choice.get("finish_reason") for choice in choices]
    attributes[c.RESPONSE_FINISH_REASONS] = [clean(reason or "") for reason in reasons]
    messages = [choice.get("message") or {"content": choice.get("text")} for choice in choices]
    attributes[c.OUTPUT_MESSAGES] = dumps(
        [output_message(message, reason) for message, reason in zip(messages, reasons, strict=True)]
    )
    prompt = response.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
    if prompt:
        _pack(attributes, c.PROMPT_TOKEN_IDS, prompt, dropped)
    for choice in choices:
        _choice_attributes(attributes, choice, dropped)
    return attributes


def _choice_attributes(attributes: Attributes, choice: Mapping[str, Any], dropped: dict[str, str]) -> None:
    index = choice.get("index") or 0
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    token_ids = choice.get("token_ids")
    if token_ids is None:
        token_ids = (choice.get("provider_specific_fields") or {}).get("token_ids")
    if token_ids is None and content:
        token_ids = _ids_in(content)
    if token_ids:
        _pack(attributes, c.choice_key(c.SAMPLED_TOKEN_IDS, index), token_ids, dropped)
    if content:
        values = [item.get("logprob") for item in content]
        _pack(attributes, c.choice_key(c.SAMPLED_LOGPROBS, index), values, dropped)


def _pack(attributes: Attributes, name: str, values: Any, dropped: dict[str, str]) -> None:
    pack = c.pack_floats if name.startswith(c.SAMPLED_LOGPROBS) else c.pack_ints
    try:
        attributes[name] = pack(values)
    except (TypeError, OverflowError) as error:
        dropped[name] = f"not a list of numbers: {error}"


def _ids_in(content: list[Mapping[str, Any]]) -> list[int] | None:
    """Ids that vLLM wrote into the logprobs (`return_tokens_as_token_ids`)."""
    tokens = [item.get("token") for item in content]
    ids = [
        int(token[len(_ID_TOKEN) :])
        for token in tokens
        if isinstance(token, str) and token.startswith(_ID_TOKEN) and token[len(_ID_TOKEN) :].isdecimal()
    ]
    return ids if len(ids) == len(tokens) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
