"""Spans of agents as the tracer writes them, for the benchmarks: of real sizes, none like another.

Texts are words of a fixed vocabulary in the frequencies of a language, ids are uniform, logprobs exponential:
what compresses is what would compress in a real run.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from spangrad.store.otlp import encode_request
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

VOCABULARY = 150_000
_WORDS = 4_000
_START_NS = 1_700_000_000_000_000_000


@dataclass
class Source:
    """Random content from a seed."""

    seed: int
    _random: np.random.Generator = field(init=False)
    _words: "np.ndarray[Any, np.dtype[np.str_]]" = field(init=False)
    _shares: "np.ndarray[Any, np.dtype[np.float64]]" = field(init=False)

    def __post_init__(self) -> None:
        letters = np.random.default_rng(7)  # one language for all
        self._words = np.array(
            [
                "".join(chr(97 + letter) for letter in letters.integers(0, 26, size))
                for size in letters.integers(2, 10, _WORDS)
            ]
        )
        shares = 1 / (np.arange(_WORDS) + 10)
        self._shares = shares / shares.sum()
        self._random = np.random.default_rng(self.seed)

    def text(self, size: int) -> str:
        """About `size` characters."""
        return " ".join(self._random.choice(self._words, size // 6 + 1, p=self._shares))[:size]

    def ids(self, count: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
        return self._random.integers(0, VOCABULARY, count, dtype=np.int32)

    def logprobs(self, count: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        return -self._random.exponential(0.5, count).astype(np.float32)

    def hex(self, size: int) -> str:
        return str(self._random.bytes(size).hex())


@dataclass(frozen=True)
class Growth:
    """What a call of an agent adds to the one before."""

    text: int
    """Characters: a tool's result, and a fifth of it the reply."""
    prompt_ids: int
    sampled_ids: int


LONG = Growth(text=4_000, prompt_ids=800, sampled_ids=200)
"""About 8 kB a call: 4 kB of text, 4 kB of ids, and logprobs."""
STEADY = Growth(text=1_200, prompt_ids=200, sampled_ids=100)
"""60,000 tokens in 200 calls."""


def run_of_agent(source: Source, rollout: str, growth: Growth) -> Iterator[Span]:
    """Calls of one rollout, without end: each prompt is all that was before, and something new."""
    trace_id = source.hex(16)
    told = [_message("system", source.text(2_000))]
    tools = json.dumps([_tool(f"tool_{i}", source.text(200)) for i in range(4)])
    ids = source.ids(500)
    turn = 0
    while True:
        told.append(_message("tool" if turn else "user", source.text(growth.text * 4 // 5)))
        reply = source.text(growth.text // 5)
        prompt = np.concatenate([ids, source.ids(growth.prompt_ids)])
        sampled = source.ids(growth.sampled_ids)
        attributes = {
            c.ROLLOUT_ID: rollout,
            c.ATTEMPT: 0,
            c.INPUT_MESSAGES: f"[{','.join(told)}]",
            c.TOOL_DEFINITIONS: tools,
            **_reply(source, reply, prompt, sampled),
        }
        yield _span(trace_id, source.hex(8), turn, "chat policy", c.SCOPE_TRACER, attributes)
        told.append(_message("assistant", reply))
        ids = np.concatenate([prompt, sampled])
        turn += 1


def agent_calls(source: Source, count: int) -> list[Span]:
    """Calls of 20 messages, 1,000 + 200 ids and logprobs that have nothing in common."""
    spans = []
    for index in range(count):
        roles = ("system", *("user", "assistant") * 9, "user")
        told = [_message(role, source.text(200)) for role in roles]
        attributes = {
            c.ROLLOUT_ID: f"single-{source.seed}-{index}",
            c.ATTEMPT: 0,
            c.INPUT_MESSAGES: f"[{','.join(told)}]",
            **_reply(source, source.text(800), source.ids(1_000), source.ids(200)),
        }
        spans.append(_span(source.hex(16), source.hex(8), 0, "chat policy", c.SCOPE_TRACER, attributes))
    return spans


def small_spans(source: Source, count: int) -> list[Span]:
    """Uses of a tool, 100 a trace."""
    spans: list[Span] = []
    while len(spans) < count:
        trace_id = source.hex(16)
        for index in range(min(100, count - len(spans))):
            attributes = {
                c.OPERATION_NAME: "execute_tool",
                "gen_ai.tool.name": "search",
                "gen_ai.tool.call.arguments": source.text(60),
                "gen_ai.tool.call.result": source.text(200),
                "duration_ms": 12.5,
                "ok": True,
            }
            spans.append(_span(trace_id, source.hex(8), index, "search", "bench", attributes))
    return spans


def rollouts(seed: int, count: int, turns: int, growth: Growth) -> list[list[Span]]:
    """The first calls of several rollouts."""
    source = Source(seed)
    return [list(islice(run_of_agent(source, f"r-{seed}-{i}", growth), turns)) for i in range(count)]


def bodies(spans: Sequence[Span], batch: int) -> list[bytes]:
    """OTLP requests of so many spans each."""
    return [encode_request(spans[i : i + batch]) for i in range(0, len(spans), batch)]


def new_content(spans: Sequence[Span]) -> bytes:
    """What the calls of a rollout add to each other, once: messages, tools, ids, logprobs."""
    seen: dict[str, None] = {}
    numbers: list[bytes] = []
    length = 0
    for span in spans:
        for name in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.TOOL_DEFINITIONS):
            for message in json.loads(span.attributes.get(name, "[]")):
                seen[json.dumps(message)] = None
        numbers.append(span.attributes[c.PROMPT_TOKEN_IDS][length:])
        numbers += [span.attributes[c.SAMPLED_TOKEN_IDS], span.attributes[c.SAMPLED_LOGPROBS]]
        length = len(span.attributes[c.PROMPT_TOKEN_IDS]) + len(span.attributes[c.SAMPLED_TOKEN_IDS])
    return "".join(seen).encode() + b"".join(numbers)


def _message(role: str, content: str) -> str:
    part = {"type": "text", "content": content}
    if role == "tool":
        part = {"type": "tool_call_response", "id": "call_1", "response": content}
    return json.dumps({"role": role, "parts": [part]})


def _tool(name: str, description: str) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string", "description": name} for i in range(4)}
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties},
    }


def _reply(source: Source, reply: str, prompt: Any, sampled: Any) -> dict[str, Any]:
    output = {
        "role": "assistant",
        "parts": [{"type": "text", "content": reply}],
        "finish_reason": "stop",
    }
    return {
        c.OPERATION_NAME: "chat",
        c.PROVIDER_NAME: "vllm",
        c.REQUEST_MODEL: "policy",
        c.RESPONSE_MODEL: "policy",
        c.RESPONSE_ID: f"chatcmpl-{source.hex(8)}",
        c.RESPONSE_FINISH_REASONS: ["stop"],
        c.REQUEST_TEMPERATURE: 1.0,
        c.INPUT_TOKENS: len(prompt),
        c.OUTPUT_TOKENS: len(sampled),
        c.OUTPUT_MESSAGES: json.dumps([output]),
        c.LOGPROBS_MODE: "processed",
        c.PROMPT_TOKEN_IDS: prompt.astype("<i4").tobytes(),
        c.SAMPLED_TOKEN_IDS: sampled.astype("<i4").tobytes(),
        c.SAMPLED_LOGPROBS: source.logprobs(len(sampled)).astype("<f4").tobytes(),
        c.POLICY_VERSIONS: np.full(len(sampled), 3, "<i4").tobytes(),
    }


def _span(trace_id: str, span_id: str, turn: int, name: str, scope: str, attributes: dict[str, Any]) -> Span:
    start_ns = _START_NS + turn * 1_000_000_000
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=None,
        name=name,
        kind=3,
        start_ns=start_ns,
        end_ns=start_ns + 900_000_000,
        status_code=0,
        status_message="",
        scope=scope,
        scope_version="1.0.0",
        attributes=attributes,
        resource={"service.name": "agent", "telemetry.sdk.language": "python"},
    )
