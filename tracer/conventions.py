"""Names of the span attributes that spangrad writes and reads.

Content follows the OpenTelemetry GenAI conventions (`gen_ai.*`, message parts as
JSON strings). What they lack is under `spangrad.*`. Arrays are packed bytes:
token ids little-endian int32, logprobs little-endian float32; never OTel lists,
which cost the SDK about 0.2 us an element.

Choices beyond the first (`n > 1`) carry the suffix `.1`, `.2`, ... behind the names
of the three per-choice attributes; `choice_key` makes the name.

This module knows names and packing. It does not know spans, HTTP or stores.
"""

import contextlib
import struct
import sys
from array import array
from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T", int, float)

SCOPE_TRACER: Final = "spangrad.tracer"
SCOPE_GATEWAY: Final = "spangrad.gateway"

# OpenTelemetry GenAI
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
AGENT_NAME: Final = "gen_ai.agent.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_CREATION_TOKENS: Final = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
EMBEDDING_DIMENSIONS: Final = "gen_ai.embeddings.dimension.count"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
RETRIEVAL_QUERY: Final = "gen_ai.retrieval.query.text"
RETRIEVAL_DOCUMENTS: Final = "gen_ai.retrieval.documents"
INVOKE_AGENT: Final = "invoke_agent"  # operations of spans that are no calls
EXECUTE_TOOL: Final = "execute_tool"
RETRIEVAL: Final = "retrieval"
ERROR_TYPE: Final = "error.type"

# spangrad
ROLLOUT_ID: Final = "spangrad.rollout.id"
ATTEMPT: Final = "spangrad.attempt"
TASK_ID: Final = "spangrad.task.id"
SPAN_ROLE: Final = "spangrad.span.role"  # "rollout" on a rollout's root span; agent, step, tool, retrieval
ROLE_END: Final = "end"  # on the gateway's span that says that the rollout is over
STEP_NAME: Final = "spangrad.step.name"  # LangGraph node, or what `spangrad.step` says
STEP_INDEX: Final = "spangrad.step.index"
STATE_KEY: Final = "spangrad.state.key"  # what the agent was looking at when the call began
INTERRUPTED: Final = "spangrad.interrupted"  # True: a LangGraph interrupt ended the node or tool
PURPOSE: Final = "spangrad.call.purpose"  # agent, title, summary, judge, embedding, other
POLICY: Final = "spangrad.policy"  # trained, frozen
POLICY_ASKED: Final = "spangrad.policy.asked"  # promoted, latest, canary: by share; absent: any version
PROMPT_TOKEN_IDS: Final = "spangrad.prompt_token_ids"  # packed int32
SAMPLED_TOKEN_IDS: Final = "spangrad.sampled_token_ids"  # packed int32, per choice
SAMPLED_LOGPROBS: Final = "spangrad.sampled_logprobs"  # packed float32, per choice
# packed int32, one per sampled token, per choice; the oldest that can have sampled it
POLICY_VERSIONS: Final = "spangrad.policy_versions"
NEWEST_POLICY_VERSION: Final = "spangrad.policy_version.newest"  # only if it changed during the call
LOGPROBS_MODE: Final = "spangrad.logprobs_mode"  # "processed" or "raw"
# JSON: what the engine puts in for what a request leaves out, or a text that says why that is unknown
SAMPLING_DEFAULTS: Final = "spangrad.sampling.defaults"
CONSTRAINED: Final = (
    "spangrad.call.constrained"  # True: grammar or forced tool choice masked the distribution
)
REQUEST_EXTRA: Final = "spangrad.request.extra"  # JSON of request fields that gen_ai.* has no name for
STREAM_COMPLETE: Final = "spangrad.stream.complete"  # False: abandoned or cancelled
DROPPED: Final = "spangrad.dropped"  # JSON: what was dropped from this span and why
RETRIES: Final = "spangrad.http.retries"
TOKENS_IN: Final = "spangrad.tokens_in"  # "used", "fallback: <reason>" or "failed: <reason>"
ENGINE: Final = "spangrad.engine"  # address of the engine that answered, as the gateway knows it
CACHED: Final = "spangrad.call.cached"  # True: the reply came from a cache, nothing was sampled
SYNTHETIC: Final = "spangrad.call.synthetic"  # why the gateway answered itself and asked no engine
NO_TURN_LEFT: Final = "turn budget"  # such a reason: the rollout had taken all its turns
REDACTED: Final = "spangrad.redacted"  # JSON list: the places (attribute names) that redaction changed

# On a rollout's root span; also the event `gen_ai.evaluation.result`
REWARD_EVENT: Final = "gen_ai.evaluation.result"
REWARD_NAME: Final = "gen_ai.evaluation.name"
REWARD_VALUE: Final = "gen_ai.evaluation.score.value"
REWARD_EXPLANATION: Final = "gen_ai.evaluation.explanation"

# HTTP headers between tracer, gateway and hub
HEADER_ROLLOUT: Final = "x-spangrad-rollout"
HEADER_ATTEMPT: Final = "x-spangrad-attempt"
MAX_ATTEMPT: Final = 999_999
"""Highest retry number that is believed of a span or a header; a store counts on in 32 bits."""
_MAX_DIGITS: Final = 20
"""Longer texts are not even read as numbers."""
HEADER_STEP: Final = "x-spangrad-step"
HEADER_PURPOSE: Final = "x-spangrad-purpose"
HEADER_STATE: Final = "x-spangrad-state"
HEADER_POLICY: Final = "x-spangrad-policy"  # any, latest or promoted
HEADER_KEY: Final = "authorization"  # "Bearer KEY"


def storable(text: str) -> str:
    """`text` with lone surrogates escaped: protobuf refuses them, and the batch with them."""
    if not isinstance(text, str) or text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def attempt_number(text: str) -> int | None:
    """`text` as an attempt, or None if it is none."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number and int(text) <= MAX_ATTEMPT else None


def choice_key(name: str, choice: int) -> str:
    """Name of a per-choice attribute: `name` for choice 0, `name.<choice>` beyond."""
    return name if choice == 0 else f"{name}.{choice}"


def pack_ints(values: Iterable[int]) -> bytes:
    """Pack token ids or versions as little-endian int32."""
    if isinstance(values, list):  # twice as fast as an array
        with contextlib.suppress(struct.error):  # the array says what is wrong
            return struct.pack(f"<{len(values)}i", *values)
    return _little_endian(array("i", values))


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack logprobs as little-endian float32."""
    return _little_endian(array("f", values))


def unpack_ints(packed: bytes) -> list[int]:
    """Undo `pack_ints`. Raises ValueError if the length is no multiple of 4."""
    return _native(array("i"), packed).tolist()


def unpack_floats(packed: bytes) -> list[float]:
    """Undo `pack_floats`, exactly as float32. Raises ValueError if the length is no multiple of 4."""
    return _native(array("f"), packed).tolist()


def _little_endian(values: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _native(into: "array[T]", packed: bytes) -> "array[T]":
    into.frombytes(packed)
    if sys.byteorder == "big":
        into.byteswap()
    return into
