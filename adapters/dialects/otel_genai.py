"""Dialect: OTel GenAI spans with JSON attributes (conventions 1.37 and later), spangrad's own included.

`read(span)` is a pure function of one span. It knows attribute names and decoding;
it does not know other spans, merging or grading.

Invariants:
* a span that is broken becomes a reading with a fault, never an exception: its
  neighbours are kept;
* ids, logprobs and versions are copied as the engine gave them, never made up.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from spangrad.adapters.dialects.decoding import FAILED_FINISHES, FINISHES_DIFFER, Decoder, finish_reason
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.messages import chat_messages, chat_tools, system_messages
from spangrad.adapters.model_call import Choice, Purpose
from spangrad.adapters.packed import packed_floats, packed_ints
from spangrad.adapters.reading import Reading, parsed, text, whole_number
from spangrad.adapters.scrubbing import scrubbed
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

DIALECT_OTEL: Final = "otel_genai"
DIALECT_SPANGRAD: Final = "spangrad"
EMBEDDINGS: Final = "embeddings"
CALL_OPERATIONS: Final = frozenset({"chat", "text_completion", "generate_content", EMBEDDINGS})

SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
SAMPLING: Final = {
    "temperature": c.REQUEST_TEMPERATURE,
    "top_p": c.REQUEST_TOP_P,
    "top_k": c.REQUEST_TOP_K,
    "max_tokens": c.REQUEST_MAX_TOKENS,
    "seed": c.REQUEST_SEED,
    "stop": c.REQUEST_STOP,
    "n": c.REQUEST_CHOICE_COUNT,
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
_OWN_SCOPES: Final = (c.SCOPE_TRACER, c.SCOPE_GATEWAY)
USAGE: Final = {
    "input_tokens": c.INPUT_TOKENS,
    "output_tokens": c.OUTPUT_TOKENS,
    "cache_read_tokens": c.CACHE_READ_TOKENS,
    "cache_creation_tokens": c.CACHE_CREATION_TOKENS,
    "reasoning_tokens": c.REASONING_TOKENS,
}
TOKEN_DATA: Final = (
    "token_ids",
    "prompt_token_ids",
    "sampled_token_ids",
    "sampled_logprobs",
    "policy_versions",
)
"""What may be dropped from a span without harm to its text."""
TEXT_DATA: Final = ("media", "earlier_turns")
"""What may be missing from a span without harm to its ids."""


def is_call(span: Span) -> bool:
    """Whether the span says, in the conventions' words, that it is a call to a model."""
    operation = span.attributes.get(c.OPERATION_NAME)
    return isinstance(operation, str) and operation in CALL_OPERATIONS


def is_spangrad(span: Span) -> bool:
    """Whether spangrad's own tracer or gateway wrote the span."""
    return span.scope in _OWN_SCOPES


def is_otel(span: Span) -> bool:
    """Whether a call span is told as the conventions 1.37 and later have it."""
    return is_call(span) and (c.PROVIDER_NAME in span.attributes or _has_messages(span))


def read(span: Span) -> Reading:
    """Read a call span of spangrad's, or any other of this dialect."""
    return read_as(DIALECT_SPANGRAD if is_spangrad(span) else DIALECT_OTEL, span)


def read_as(dialect: str, span: Span) -> Reading:
    """Read what a span says in the conventions' attributes, under a dialect's name.

    For dialects that use the conventions and add to them: they correct the reading where they differ.
    """
    attributes = span.attributes
    decoder = Decoder(span)
    choices = _choices(attributes, decoder)
    messages = _messages(attributes, decoder)
    losses = _losses(span, decoder)
    defaults = decoder.json(c.SAMPLING_DEFAULTS)
    if not (is_own := is_spangrad(span)):
        losses.content += scrubbed(messages, "message")
        losses.content += scrubbed([choice.message for choice in choices], "choice")
    return Reading(
        span=span,
        dialect=dialect,
        is_gateway=span.scope == c.SCOPE_GATEWAY,
        model=text(attributes, c.REQUEST_MODEL) or text(attributes, c.RESPONSE_MODEL),
        response_id=text(attributes, c.RESPONSE_ID),
        messages=messages,
        tools=decoder.convert(c.TOOL_DEFINITIONS, chat_tools) or (),
        keeps_tools=is_own,
        sampling={**(defaults if isinstance(defaults, Mapping) else {}), **_sampling(attributes, decoder)},
        choices=choices,
        prompt_token_ids=decoder.token_ids(c.PROMPT_TOKEN_IDS),
        agent_name=text(attributes, c.AGENT_NAME),
        step_name=text(attributes, c.STEP_NAME),
        step_index=whole_number(attributes, c.STEP_INDEX),
        state_key=text(attributes, c.STATE_KEY),
        rollout_id=span.rollout_id or text(attributes, c.ROLLOUT_ID),
        conversation_id=text(attributes, c.CONVERSATION_ID),
        attempt=span.attempt if span.attempt is not None else whole_number(attributes, c.ATTEMPT),
        purpose=_purpose(attributes),
        is_trained_policy=_policy(attributes),
        error=_error(span),
        usage=_usage(attributes),
        is_streamed=bool(attributes.get(c.REQUEST_STREAM)) or TIME_TO_FIRST_CHUNK in attributes,
        is_stream_complete=None
        if c.STREAM_COMPLETE not in attributes
        else bool(attributes[c.STREAM_COMPLETE]),
        logprobs_mode=text(attributes, c.LOGPROBS_MODE),
        unknown_defaults=defaults if isinstance(defaults, str) else None,
        is_constrained=bool(attributes.get(c.CONSTRAINED)),
        faults=(*decoder.faults, *losses.content),
        notes=tuple(decoder.notes),
        token_losses=(*losses.tokens, *decoder.token_losses),
        text_losses=tuple(losses.text),
        redacted=_redacted(decoder),
        is_cached=attributes.get(c.CACHED) is True,
        synthetic=text(attributes, c.SYNTHETIC),
    )


def _has_messages(span: Span) -> bool:
    """Whether the span has messages as the conventions 1.37 have them; others know the name, not the form."""
    for name in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        messages = parsed(span.attributes.get(name))
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return True
    return False


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("parts"), list)


def _messages(attributes: Mapping[str, Any], decoder: Decoder) -> list[dict[str, Any]]:
    system: list[dict[str, Any]] = []
    if SYSTEM_INSTRUCTIONS in attributes:
        instructions = attributes[SYSTEM_INSTRUCTIONS]
        if isinstance(instructions, str) and not instructions.lstrip().startswith("["):
            system = system_messages(instructions, decoder.notes)
        else:
            convert = decoder.convert(SYSTEM_INSTRUCTIONS, lambda v: system_messages(v, decoder.notes))
            system = convert or []
    return system + (decoder.messages(c.INPUT_MESSAGES) or [])


def _choices(attributes: Mapping[str, Any], decoder: Decoder) -> list[Choice]:
    outputs = decoder.json(c.OUTPUT_MESSAGES)
    convert = partial(chat_messages, notes=decoder.notes)
    messages = decoder.converted(c.OUTPUT_MESSAGES, outputs, convert) or []
    reasons = _finish_reasons(attributes)
    count = max(len(messages), len(reasons) if not messages else 0, _packed_choices(attributes))
    if messages and len(outputs) != len(messages):
        outputs = [{} for _ in messages]
    choices = []
    for index in range(count):
        known = index < len(messages)
        message = messages[index] if known else {"role": "assistant", "content": None}
        told = reasons[index] if index < len(reasons) else None
        own = outputs[index].get("finish_reason") if known else None
        choices.append(
            Choice(
                message=message,
                finish_reason=_finish(index, told, own if isinstance(own, str) else None, decoder),
                sampled_token_ids=decoder.token_ids(c.choice_key(c.SAMPLED_TOKEN_IDS, index)),
                logprobs=decoder.unpack(c.choice_key(c.SAMPLED_LOGPROBS, index), packed_floats),
                policy_versions=decoder.unpack(c.choice_key(c.POLICY_VERSIONS, index), packed_ints),
            )
        )
    return choices


def _finish(index: int, of_span: str | None, of_message: str | None, decoder: Decoder) -> str | None:
    """The finish reason of a choice: the span's, or its message's where that one says that it was cut."""
    told, own = finish_reason(of_span), finish_reason(of_message)
    if told is None or own is None or told == own:
        return told or own
    decoder.notes.append(
        f"{FINISHES_DIFFER}: choice {index} ended with {told!r} and its message with {own!r}"
    )
    if told.lower() not in FAILED_FINISHES and own.lower() in (*FAILED_FINISHES, "length"):
        return own
    return told


def _finish_reasons(attributes: Mapping[str, Any]) -> list[str | None]:
    reasons = attributes.get(c.RESPONSE_FINISH_REASONS)
    if isinstance(reasons, str) and reasons.startswith("["):  # Logfire, LiteLLM
        try:
            reasons = json.loads(reasons)
        except (ValueError, RecursionError):
            return []
    if isinstance(reasons, str):
        return [reasons]
    if not isinstance(reasons, Sequence):
        return []
    return [reason if isinstance(reason, str) else None for reason in reasons]


def _packed_choices(attributes: Mapping[str, Any]) -> int:
    count = 0
    while c.choice_key(c.SAMPLED_TOKEN_IDS, count) in attributes:
        count += 1
    return count


def _sampling(attributes: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    extra = decoder.json(c.REQUEST_EXTRA)
    sampling = dict(extra) if isinstance(extra, Mapping) else {}
    sampling.update({key: attributes[name] for key, name in SAMPLING.items() if name in attributes})
    return sampling


def _purpose(attributes: Mapping[str, Any]) -> Purpose | None:
    value = text(attributes, c.PURPOSE)
    if value is None:
        return Purpose.EMBEDDING if attributes.get(c.OPERATION_NAME) == EMBEDDINGS else None
    return Purpose(value) if value in set(Purpose) else Purpose.OTHER


def _policy(attributes: Mapping[str, Any]) -> bool | None:
    value = attributes.get(c.POLICY)
    return None if value is None else value == "trained"


def _usage(attributes: Mapping[str, Any]) -> dict[str, int]:
    told = {key: whole_number(attributes, name) for key, name in USAGE.items() if name in attributes}
    return {key: count for key, count in told.items() if count is not None}


def _error(span: Span) -> str | None:
    kind = span.attributes.get(c.ERROR_TYPE)
    if kind is None and span.status_code != 2:
        return None
    return ": ".join(str(text) for text in (kind, span.status_message) if text) or "error"


@dataclass(slots=True)
class _Losses:
    content: list[str] = field(default_factory=list)
    """They spoil everything."""
    tokens: list[str] = field(default_factory=list)
    """Of token data: they only explain the grade."""
    text: list[str] = field(default_factory=list)
    """Of text: they matter where there are no ids."""


def _losses(span: Span, decoder: Decoder) -> _Losses:
    losses = _Losses()
    if span.dropped_attributes > 0:
        count = span.dropped_attributes
        losses.content.append(f"attributes were dropped: {count} of them, by a limit of the SDK")
    dropped = decoder.json(c.DROPPED)
    if isinstance(dropped, Mapping):
        for name, reason in dropped.items():
            if name in TEXT_DATA:
                losses.text.append(str(reason))
            elif name.removeprefix("spangrad.").startswith(TOKEN_DATA):
                losses.tokens.append(f"{name} was dropped: {reason}")
            else:
                losses.content.append(f"{name} was dropped: {reason}")
    elif dropped:
        losses.content.append(f"content was dropped: {dropped}")
    return losses


def _redacted(decoder: Decoder) -> tuple[str, ...]:
    """Names of the attributes that redaction changed, if they are of the request or the reply."""
    names = decoder.json(c.REDACTED)
    if names is None:
        return ()
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, Sequence):
        return ()
    content = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.REQUEST_EXTRA, SYSTEM_INSTRUCTIONS, c.TOOL_DEFINITIONS)
    return tuple(name for name in names if name in content)


SPANGRAD: Final = Dialect(DIALECT_SPANGRAD, is_spangrad, is_call, read)
OTEL_GENAI: Final = Dialect(DIALECT_OTEL, is_otel, is_call, read)
