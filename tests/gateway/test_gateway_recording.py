"""What a gateway records of whole replies and of streams, from real clients."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.tracer.spool import Spool
from tests.gateway.gateway_setup import GatewayFactory, Setup, body, dropped, ids, logprobs, versions
from tests.gateway.stub_engine import TOOL_ARGUMENTS, StubEngine, prompt_ids, tokens_of

TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
MESSAGES: list[Any] = [{"role": "user", "content": "naïve TOOL use"}]


def float32(values: list[float]) -> list[float]:
    return list(struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values)))


def client(gateway: Setup, path: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}{path}/v1", api_key="any", max_retries=0)


def test_a_whole_reply_is_recorded_with_the_engines_ids_and_logprobs(gateway: Setup) -> None:
    with client(gateway) as sdk:
        reply = sdk.chat.completions.create(
            model="stub", messages=MESSAGES, tools=TOOLS, temperature=0.5, seed=4
        )
    calls = reply.choices[0].message.tool_calls
    assert calls and calls[0].type == "function" and calls[0].function.arguments == TOOL_ARGUMENTS

    attributes = gateway.attributes()
    tokens = tokens_of("TOOL", tools=True)
    assert ids(attributes) == [token.id for token in tokens]
    assert logprobs(attributes) == float32([token.logprob for token in tokens])
    assert versions(attributes) == [3] * len(tokens)
    assert names.unpack_ints(attributes[names.PROMPT_TOKEN_IDS]) == prompt_ids(MESSAGES)
    assert attributes[names.RESPONSE_ID] == reply.id
    assert attributes[names.RESPONSE_FINISH_REASONS] == ("tool_calls",)
    assert attributes[names.LOGPROBS_MODE] == "processed"
    assert attributes[names.REQUEST_TEMPERATURE] == 0.5
    assert attributes[names.REQUEST_SEED] == 4
    assert attributes[names.INPUT_TOKENS] == 2 and attributes[names.OUTPUT_TOKENS] == len(tokens)
    assert attributes[names.CONSTRAINED] is False
    assert names.DROPPED not in attributes and names.STREAM_COMPLETE not in attributes
    assert json.loads(attributes[names.TOOL_DEFINITIONS]) == TOOLS
    part = json.loads(attributes[names.OUTPUT_MESSAGES])[0]["parts"][0]
    assert part == {"type": "tool_call", "id": "call_1", "name": "look", "arguments": TOOL_ARGUMENTS}


def test_a_stream_is_recorded_like_the_whole_reply(gateway: Setup) -> None:
    settings: dict[str, Any] = {"model": "stub", "messages": MESSAGES, "tools": TOOLS}
    with client(gateway) as sdk:
        sdk.chat.completions.create(**settings)
        with sdk.chat.completions.create(**settings, stream=True) as stream:
            chunks = list(stream)
    arguments = "".join(
        call.function.arguments or ""
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or ()
        if call.function
    )
    assert arguments == TOOL_ARGUMENTS
    whole, streamed = (dict(span.attributes or {}) for span in gateway.spans())
    assert streamed.pop(names.STREAM_COMPLETE) is True
    assert streamed.pop(names.REQUEST_STREAM) is True
    assert streamed == whole


@pytest.mark.parametrize("is_stream", [False, True])
def test_every_choice_of_a_call_is_recorded(gateway: Setup, is_stream: bool) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk:
            settings: dict[str, Any] = {
                "model": "stub",
                "messages": [{"role": "user", "content": "a b"}],
                "n": 2,
            }
            reply: Any = await sdk.chat.completions.create(**settings, stream=is_stream)
            if is_stream:
                assert {choice.index async for chunk in reply for choice in chunk.choices} == {0, 1}
            else:
                assert len(reply.choices) == 2

    asyncio.run(ask())
    attributes = gateway.attributes()
    expected = [token.id for token in tokens_of("a b", tools=False)]
    for choice in (0, 1):
        assert ids(attributes, choice) == expected
        assert len(versions(attributes, choice)) == len(logprobs(attributes, choice)) == len(expected)
    assert len(json.loads(attributes[names.OUTPUT_MESSAGES])) == 2
    assert attributes[names.REQUEST_CHOICE_COUNT] == 2


def test_a_text_completion_is_recorded(gateway: Setup) -> None:
    with client(gateway) as sdk:
        reply = sdk.completions.create(model="stub", prompt="x y")
    assert reply.choices[0].text == "x y <end>" and reply.choices[0].logprobs is None
    attributes = gateway.attributes()
    assert attributes[names.OPERATION_NAME] == "text_completion"
    assert ids(attributes) == [token.id for token in tokens_of("x y", tools=False)]
    assert len(logprobs(attributes)) == 3
    assert names.unpack_ints(attributes[names.PROMPT_TOKEN_IDS]) == [7, 8, 9]


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("", {}, (None, None)),
        ("/rollout/r-1", {}, ("r-1", 0)),
        ("/rollout/r-1/2", {}, ("r-1", 2)),
        ("", {names.HEADER_ROLLOUT: "r-2", names.HEADER_ATTEMPT: "1"}, ("r-2", 1)),
        ("/rollout/r-1/2", {names.HEADER_ROLLOUT: "r-2"}, ("r-1", 2)),
    ],
)
def test_a_call_belongs_to_the_rollout_of_its_url_or_headers(
    gateway: Setup, path: str, headers: dict[str, str], expected: tuple[str | None, int | None]
) -> None:
    with client(gateway, path) as sdk:
        sdk.chat.completions.create(model="stub", messages=MESSAGES, extra_headers=headers)
    attributes = gateway.attributes()
    assert (attributes.get(names.ROLLOUT_ID), attributes.get(names.ATTEMPT)) == expected
    assert not any(name.startswith("x-spangrad") for name in gateway.engine.headers[0])


def test_an_attempt_that_is_no_number_is_refused(gateway: Setup) -> None:
    headers = {names.HEADER_ROLLOUT: "r", names.HEADER_ATTEMPT: "two"}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a"), headers=headers)
    assert answer.status_code == 400 and "'two'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("attempt", ["1000000", "2147483647", "9" * 5000, "-1", "1.5", "²"])
def test_an_attempt_beyond_belief_is_refused_and_leaves_the_gateway_alone(
    gateway: Setup, attempt: str
) -> None:
    headers = [(names.HEADER_ROLLOUT.encode(), b"r"), (names.HEADER_ATTEMPT.encode(), attempt.encode())]
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a"), headers=headers)
    assert answer.status_code == 400 and "a number from 0 to 999999" in answer.json()["error"]["message"]
    path = f"/rollout/r/{attempt}/v1/chat/completions"
    assert httpx.post(f"{gateway.url}{path}", json=body("a")).status_code == 400
    assert httpx.post(f"{gateway.url}/rollout/r/999999/v1/chat/completions", json=body("a")).is_success
    assert gateway.attributes()[names.ATTEMPT] == 999_999


@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_span_is_a_child_of_the_callers_and_the_engines_parent(gateway: Setup, flags: str) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-{flags}"
    headers = {
        "traceparent": parent,
        names.HEADER_STEP: "draft",
        names.HEADER_PURPOSE: "agent",
        names.HEADER_STATE: "page 3",
    }
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a"), headers=headers).raise_for_status()
    (span,) = gateway.spans()
    assert span.context is not None and span.parent is not None and span.attributes is not None
    assert f"{span.context.trace_id:032x}" == "a" * 32
    assert f"{span.parent.span_id:016x}" == "b" * 16
    assert span.attributes[names.STEP_NAME] == "draft" and span.attributes[names.PURPOSE] == "agent"
    assert span.attributes[names.STATE_KEY] == "page 3"
    assert f"-{span.context.span_id:016x}-" in gateway.engine.headers[0]["traceparent"]
    assert span.instrumentation_scope is not None and span.instrumentation_scope.name == names.SCOPE_GATEWAY


def test_request_fields_without_a_standard_name_are_kept(gateway: Setup) -> None:
    request = body("a", frequency_penalty=0.5, temperature="hot", stop="x", seed=None)
    httpx.post(f"{gateway.url}/v1/chat/completions", json=request).raise_for_status()
    attributes = gateway.attributes()
    assert json.loads(attributes[names.REQUEST_EXTRA]) == {"frequency_penalty": 0.5, "temperature": "hot"}
    assert attributes[names.REQUEST_STOP] == ("x",)


def test_ids_that_cannot_be_complete_are_dropped_and_named(gateway: Setup) -> None:
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a SHORT b")).raise_for_status()
    attributes = gateway.attributes()
    assert names.SAMPLED_TOKEN_IDS not in attributes and names.SAMPLED_LOGPROBS not in attributes
    assert dropped(attributes) == {"sampled_token_ids": "3 token ids came, usage counts 4"}


def test_text_that_utf8_cannot_hold_is_passed_on_and_recorded(gateway: Setup) -> None:
    half_an_emoji = {"role": "system", "content": "a \ud83d b"}
    request = {"model": "stub", "messages": [half_an_emoji, {"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=json.dumps(request).encode())
    assert answer.status_code == 200
    assert gateway.engine.requests[0]["messages"][0] == half_an_emoji
    recorded = str(gateway.attributes()[names.INPUT_MESSAGES])
    assert json.loads(recorded.encode())[0]["parts"][0]["content"] == "a \ud83d b"


def test_model_names_are_mapped_and_the_span_keeps_the_asked_one(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(models={"gpt-4o": "policy"})
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a") | {"model": "gpt-4o"}).raise_for_status()
    assert gateway.engine.requests[0]["model"] == "policy"
    attributes = gateway.attributes()
    assert attributes[names.REQUEST_MODEL] == "gpt-4o" and attributes[names.RESPONSE_MODEL] == "policy"


def test_the_raw_log_rebuilds_what_was_recorded(start_gateway: GatewayFactory, tmp_path: Any) -> None:
    gateway = start_gateway(raw_log=tmp_path / "raw.jsonl")
    for is_stream in (False, True):
        url = f"{gateway.url}/rollout/r-9/1/v1/chat/completions"
        httpx.post(url, json=body("p q", stream=is_stream)).raise_for_status()
    spans = gateway.spans()
    lines = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    by_span = {line["span_id"]: line for line in lines}
    for span in spans:
        assert span.context is not None and span.attributes is not None
        line = by_span[f"{span.context.span_id:016x}"]
        assert (line["rollout_id"], line["attempt"]) == ("r-9", 1)
        assert line["request"]["return_token_ids"] is True
        response = line["response"]
        parts = response if isinstance(response, list) else [response]
        raw = [i for part in parts for choice in part["choices"] for i in choice.get("token_ids") or ()]
        assert raw == ids(span.attributes)


def test_spans_wait_beside_a_file_store_as_otlp(engine: StubEngine, tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    odd_model = body("a b") | {"model": "half \ud83d"}
    with running(GatewayConfig(engine_url=engine.url, store=str(store), port=0)) as url:
        httpx.post(f"{url}/v1/chat/completions", json=body("a b")).raise_for_status()
        httpx.post(f"{url}/v1/chat/completions", content=json.dumps(odd_model).encode())
        assert httpx.post(f"{url}/spangrad/flush").json()["spans"]["exported"] == 2
    requests: list[bytes] = []
    Spool(f"{store}.spool").drain(requests.append)
    spans = [
        span
        for request in requests
        for resource in ExportTraceServiceRequest.FromString(request).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(span.name for span in spans) == ["chat half \\ud83d", "chat stub"]
    stored = {
        item.key: item.value for item in min(spans, key=lambda span: span.start_time_unix_nano).attributes
    }
    expected = [token.id for token in tokens_of("a b", tools=False)]
    assert names.unpack_ints(stored[names.SAMPLED_TOKEN_IDS].bytes_value) == expected
