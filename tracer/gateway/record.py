"""A model call as span attributes: request, reply, token ids, logprobs, versions.

Invariants: whatever is known is written, whatever is dropped is named in
`spangrad.dropped`; ids and logprobs are the engine's, and are left out where their
counts contradict each other; no attribute is an OTel list of numbers.

Knows attribute names and vLLM's JSON; the rest of OpenAI's is `tracer/wire`'s part.
Knows no HTTP and no OpenTelemetry.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.engine_settings import EngineSettings
from spangrad.tracer.gateway.reply import Reply, ReplyChoice
from spangrad.tracer.gateway.rewrite import Route
from spangrad.tracer.gateway.versions import SampledBy
from spangrad.tracer.wire import chat
from spangrad.tracer.wire.constraints import is_constrained
from spangrad.tracer.wire.messages import output_message
from spangrad.tracer.wire.tokens import NO_LOGPROB, count_problem


def choice_count(body: Any) -> int:
    """How many choices a request asks for."""
    if not isinstance(body, dict):
        return 1
    count = body.get("n")
    return chat.prompt_count(body) * (count if isinstance(count, int) and count > 0 else 1)


def request_attributes(body: Any, route: Route) -> dict[str, Any]:
    """Attributes of a request as the client sent it. Raises TypeError and the like if it can't be read."""
    attributes: dict[str, Any] = {names.OPERATION_NAME: route.value, names.PROVIDER_NAME: "vllm"}
    if isinstance(body, dict):
        dropped: dict[str, str] = {}
        attributes |= chat.request_attributes(body, dropped)
        attributes[names.CONSTRAINED] = is_constrained(body)
        if dropped:
            attributes[names.DROPPED] = chat.dumps(dropped)
    return attributes


def reply_attributes(
    reply: Reply,
    body: Any,
    *,
    versions: SampledBy,
    logprobs_mode: str,
    settings: EngineSettings | None = None,
) -> dict[str, Any]:
    """Attributes of a reply, complete or not.

    Args:
        reply: What the engine sent.
        body: The client's request.
        versions: Policy versions that sampled the tokens.
        logprobs_mode: `processed` or `raw`, as the gateway's config says that the engine was started.
        settings: What the engine says itself; None: nothing.
    """
    attributes: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for name, value in ((names.RESPONSE_ID, reply.response_id), (names.RESPONSE_MODEL, reply.model)):
        if isinstance(value, str):
            attributes[name] = value
    choices = [reply.choices[index] for index in sorted(reply.choices)]
    if choices:
        attributes[names.RESPONSE_FINISH_REASONS] = [choice.finish_reason or "" for choice in choices]
        attributes[names.OUTPUT_MESSAGES] = chat.dumps(
            [output_message(_said(choice, body, dropped), choice.finish_reason) for choice in choices]
        )
        dropped |= _add_tokens(attributes, reply, body, versions)
        _add_settings(attributes, dropped, logprobs_mode, settings or EngineSettings())
        if versions.problem is not None:
            dropped["policy_versions"] = versions.problem
    attributes |= _usage(reply)
    if dropped:
        attributes[names.DROPPED] = chat.dumps(dropped)
    return attributes


def _add_tokens(attributes: dict[str, Any], reply: Reply, body: Any, versions: SampledBy) -> dict[str, str]:
    """Add prompt ids and every choice's ids, logprobs and versions; returns what was dropped and why."""
    if isinstance(body, dict) and chat.prompt_count(body) > 1:
        reason = "one call with several prompts: it is not known which prompt a choice continues"
        return {"prompt_token_ids": reason, "sampled_token_ids": reason}
    dropped: dict[str, str] = {}
    if reply.prompt_token_ids is None:
        dropped["prompt_token_ids"] = "the engine sent none"
    else:
        attributes[names.PROMPT_TOKEN_IDS] = names.pack_ints(reply.prompt_token_ids)
    told = (reply.usage or {}).get("completion_tokens")
    is_finished = all(choice.finish_reason is not None for choice in reply.choices.values())
    ids = [choice.token_ids for choice in reply.choices.values()]
    sum_problem = count_problem(told, ids) if is_finished else None
    for index, choice in sorted(reply.choices.items()):
        if choice.token_ids is None:
            dropped[names.choice_key("sampled_token_ids", index)] = "the engine sent none"
            continue
        logprobs = _without_prompt(choice, reply, body)
        if choice.chunks_without_ids:
            gaps = f"{choice.chunks_without_ids} chunks with text came without token ids"
            dropped[names.choice_key("sampled_token_ids", index)] = gaps
            continue
        if (problem := sum_problem or _length_problem(choice.token_ids, logprobs)) is not None:
            dropped[names.choice_key("sampled_token_ids", index)] = problem
            continue
        attributes[names.choice_key(names.SAMPLED_TOKEN_IDS, index)] = names.pack_ints(choice.token_ids)
        if versions.oldest is not None:
            packed = names.pack_ints([versions.oldest] * len(choice.token_ids))
            attributes[names.choice_key(names.POLICY_VERSIONS, index)] = packed
            if versions.newest != versions.oldest:
                attributes[names.NEWEST_POLICY_VERSION] = versions.newest
        if (missing := _logprobs_problem(logprobs, body)) is not None:
            dropped[names.choice_key("sampled_logprobs", index)] = missing
        elif logprobs is not None:
            packed = names.pack_floats(logprobs)
            attributes[names.choice_key(names.SAMPLED_LOGPROBS, index)] = packed
    return dropped


def _add_settings(
    attributes: dict[str, Any], dropped: dict[str, str], stated_mode: str, settings: EngineSettings
) -> None:
    """Add what the logprobs are of, and what was put in for what the request leaves out."""
    found = [name for name in attributes if name.startswith(names.SAMPLED_LOGPROBS)]
    if not found:
        return
    mode, is_logprobs, kind = (settings.logprobs_mode or f"{stated_mode}_logprobs").partition("_logprobs")
    if not is_logprobs or kind:
        for name in found:
            del attributes[name]
            dropped[name] = f"the engine gives {settings.logprobs_mode}: these are no logprobs"
        return
    attributes[names.LOGPROBS_MODE] = mode
    if settings.is_known:
        attributes[names.SAMPLING_DEFAULTS] = chat.dumps(settings.unknown_defaults or dict(settings.defaults))


def _length_problem(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> str | None:
    if logprobs is None or len(logprobs) == len(token_ids):
        return None
    return f"{len(token_ids)} token ids, {len(logprobs)} logprobs"


def _said(choice: ReplyChoice, body: Any, dropped: dict[str, str]) -> dict[str, Any]:
    """A choice's message without the part of the prompt that `echo` puts before it."""
    content = choice.message.get("content")
    if not isinstance(body, dict) or not body.get("echo") or not isinstance(content, str):
        return choice.message
    echoed = _echoed(body)
    if echoed is None or not content.startswith(echoed):
        dropped[names.OUTPUT_MESSAGES] = "echo: it is not known where the prompt ends and the reply begins"
        return choice.message
    return {**choice.message, "content": content[len(echoed) :]}


def _echoed(body: Mapping[str, Any]) -> str | None:
    """What vLLM puts before a reply; None: not known."""
    messages = body.get("messages")
    if messages is None:  # with ids vLLM leaves the prompt out of the text
        return "" if body.get("return_token_ids") else chat.single_prompt(body)
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else None


def _without_prompt(choice: ReplyChoice, reply: Reply, body: Any) -> list[float] | None:
    """A choice's logprobs without those of the prompt, which `echo` puts before them on /completions."""
    logprobs, ids, prompt = choice.logprobs, choice.token_ids or [], reply.prompt_token_ids or []
    is_echo = isinstance(body, dict) and "messages" not in body and bool(body.get("echo"))
    if logprobs is not None and is_echo and len(logprobs) == len(prompt) + len(ids):
        return logprobs[len(prompt) :]
    return logprobs


def _logprobs_problem(logprobs: Sequence[float] | None, body: Any) -> str | None:
    if logprobs is None:
        return "the engine sent none"
    if any(value <= NO_LOGPROB for value in logprobs):  # `min` would stop at a NaN
        return "a sampled token came without a logprob"
    if isinstance(body, dict) and body.get("use_beam_search"):
        return "beam search does not sample"
    return None


def _usage(reply: Reply) -> dict[str, int]:
    """Token counts: the engine's, or counted from its ids where a stream carried no usage."""
    usage = reply.usage or {}
    found = {
        names.INPUT_TOKENS: usage.get("prompt_tokens"),
        names.OUTPUT_TOKENS: usage.get("completion_tokens"),
    }
    if found[names.INPUT_TOKENS] is None and reply.prompt_token_ids is not None:
        found[names.INPUT_TOKENS] = len(reply.prompt_token_ids)
    ids = [choice.token_ids for choice in reply.choices.values() if choice.token_ids is not None]
    if found[names.OUTPUT_TOKENS] is None and ids:
        found[names.OUTPUT_TOKENS] = sum(len(token_ids) for token_ids in ids)
    return {name: count for name, count in found.items() if isinstance(count, int)}
