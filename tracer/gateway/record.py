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
from spangrad.tracer.gateway.reply import Reply, ReplyChoice
from spangrad.tracer.gateway.rewrite import Route
from spangrad.tracer.wire import chat
from spangrad.tracer.wire.messages import output_message

_MASKS = ("guided_decoding", "allowed_token_ids", "bad_words", "logit_bias")
"""Fields beside those that `chat.is_constrained` knows which take tokens away from the policy."""


def choice_count(body: Any) -> int:
    """How many choices a request asks for."""
    count = body.get("n") if isinstance(body, dict) else None
    return count if isinstance(count, int) and count > 0 else 1


def request_attributes(body: Any, route: Route) -> dict[str, Any]:
    """Attributes of a request as the client sent it. Raises TypeError and the like if it can't be read."""
    attributes: dict[str, Any] = {names.OPERATION_NAME: route.value, names.PROVIDER_NAME: "vllm"}
    if isinstance(body, dict):
        attributes |= chat.request_attributes(body)
        attributes[names.CONSTRAINED] = is_constrained(body)
    return attributes


def is_constrained(body: Mapping[str, Any]) -> bool:
    """Whether the request masks what the policy could have said.

    A strict tool counts too: vLLM's parsers with structural tags then force its
    grammar, even where the choice of tool is left to the model.
    """
    if chat.is_constrained(body) or any(body.get(field) for field in _MASKS):
        return True
    if body.get("tool_choice") == "none":
        return False
    functions = (tool.get("function") for tool in body.get("tools") or () if isinstance(tool, dict))
    return any(isinstance(function, dict) and function.get("strict") is True for function in functions)


def reply_attributes(
    reply: Reply, body: Any, *, version: int | None, version_problem: str | None, logprobs_mode: str
) -> dict[str, Any]:
    """Attributes of a reply, complete or not.

    Args:
        reply: What the engine sent.
        body: The client's request.
        version: Policy version that sampled every token; None: unknown.
        version_problem: Why the version is unknown.
        logprobs_mode: `processed` or `raw`, as the engine was started.
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
            [output_message(choice.message, choice.finish_reason) for choice in choices]
        )
        dropped |= _add_tokens(attributes, reply, body, version)
        if any(name.startswith(names.SAMPLED_LOGPROBS) for name in attributes):
            attributes[names.LOGPROBS_MODE] = logprobs_mode
        if version is None and version_problem is not None:
            dropped["policy_versions"] = version_problem
    attributes |= _usage(reply)
    if dropped:
        attributes[names.DROPPED] = chat.dumps(dropped)
    return attributes


def _add_tokens(attributes: dict[str, Any], reply: Reply, body: Any, version: int | None) -> dict[str, str]:
    """Add prompt ids and every choice's ids, logprobs and versions; returns what was dropped and why."""
    if _has_several_prompts(body):
        reason = "one call with several prompts: it is not known which prompt a choice continues"
        return {"prompt_token_ids": reason, "sampled_token_ids": reason}
    dropped: dict[str, str] = {}
    if reply.prompt_token_ids is None:
        dropped["prompt_token_ids"] = "the engine sent none"
    else:
        attributes[names.PROMPT_TOKEN_IDS] = names.pack_ints(reply.prompt_token_ids)
    sum_problem = _count_problem(reply)
    for index, choice in sorted(reply.choices.items()):
        if choice.token_ids is None:
            dropped[names.choice_key("sampled_token_ids", index)] = "the engine sent none"
            continue
        if (problem := sum_problem or _length_problem(choice.token_ids, choice.logprobs)) is not None:
            dropped[names.choice_key("sampled_token_ids", index)] = problem
            continue
        attributes[names.choice_key(names.SAMPLED_TOKEN_IDS, index)] = names.pack_ints(choice.token_ids)
        if version is not None:
            packed = names.pack_ints([version] * len(choice.token_ids))
            attributes[names.choice_key(names.POLICY_VERSIONS, index)] = packed
        if (missing := _logprobs_problem(choice, body)) is not None:
            dropped[names.choice_key("sampled_logprobs", index)] = missing
        elif choice.logprobs is not None:
            packed = names.pack_floats(choice.logprobs)
            attributes[names.choice_key(names.SAMPLED_LOGPROBS, index)] = packed
    return dropped


def _count_problem(reply: Reply) -> str | None:
    """Why the ids of a reply can't be all that was sampled."""
    told = (reply.usage or {}).get("completion_tokens")
    ids = [choice.token_ids for choice in reply.choices.values()]
    if not isinstance(told, int) or any(token_ids is None for token_ids in ids):
        return None
    if any(choice.finish_reason is None for choice in reply.choices.values()):
        return None  # usage of an unfinished stream is a running count
    seen = sum(len(token_ids or ()) for token_ids in ids)
    return None if seen == told else f"{seen} token ids came, usage counts {told}"


def _length_problem(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> str | None:
    if logprobs is None or len(logprobs) == len(token_ids):
        return None
    return f"{len(token_ids)} token ids, {len(logprobs)} logprobs"


def _logprobs_problem(choice: ReplyChoice, body: Any) -> str | None:
    if choice.logprobs is None:
        return "the engine sent none"
    if choice.has_gap:
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


def _has_several_prompts(body: Any) -> bool:
    prompt = body.get("prompt") if isinstance(body, dict) else None
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
