"""Responses, messages and embeddings: passed on untouched, recorded as text, every bad day included."""

import json
import socket
from collections.abc import Mapping
from typing import Any

import anthropic
import httpx
import openai
import pytest

from spangrad.tracer import conventions as names
from tests.gateway.gateway_setup import GatewayFactory, Setup, dropped, gateway_before
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.waiting import wait_until

TOOL = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def message(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "stub",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": text}],
        **more,
    }


def response(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "stub", "input": text, **more}


ASK = {"/v1/messages": message, "/v1/responses": response}
REQUESTS = [
    ("/v1/messages", message("some words")),
    ("/v1/messages", message("naïve TOOL", tools=[TOOL], thinking={"type": "adaptive"})),
    ("/v1/messages", message("FAIL")),
    ("/v1/messages", message("ABORT")),
    ("/v1/responses", response("some words")),
    ("/v1/responses", response("naïve TOOL", tools=[FUNCTION])),
    ("/v1/responses", response("FAIL")),
    ("/v1/embeddings", {"model": "stub", "input": ["a", "b"]}),
    ("/v1/embeddings", {"model": "stub", "input": "a", "encoding_format": "base64"}),
]


def parts(attributes: Mapping[str, Any], name: str = names.OUTPUT_MESSAGES) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(attributes[name])[0]["parts"]
    return found


def claude(gateway: Setup, path: str = "", key: str = "any") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{gateway.url}{path}", api_key=key, max_retries=0)


def gpt(gateway: Setup, path: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}{path}/v1", api_key="any", max_retries=0)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prefix", ["", "/rollout/r-1", "/rollout/r-1/2"])
def test_the_reply_is_byte_for_byte_the_one_without_a_gateway(
    gateway: Setup, prefix: str, is_stream: bool
) -> None:
    for path, request in REQUESTS:
        request = {**request, "stream": is_stream} if path in ASK else request
        direct = httpx.post(gateway.engine.url + path, json=request)
        through = httpx.post(gateway.url + prefix + path, json=request)
        assert through.status_code == direct.status_code, request
        assert through.headers["content-type"] == direct.headers["content-type"], request
        assert through.content == direct.content, request
        sent, passed_on = gateway.engine.requests[-2:]
        assert passed_on == sent
    assert gateway.engine.asked_versions == 0
    rollouts = [(span.attributes or {}).get(names.ROLLOUT_ID) for span in gateway.spans()]
    assert rollouts == ["r-1" if prefix else None] * len(REQUESTS)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_message_of_anthropics_client_is_recorded(gateway: Setup, is_stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "stub",
        "max_tokens": 64,
        "system": "be brief",
        "messages": [{"role": "user", "content": "naïve words"}],
        "stop_sequences": ["x"],
        "extra_body": {"temperature": 0.5},
    }
    with claude(gateway, "/rollout/r-1/2") as sdk:
        if is_stream:
            with sdk.messages.stream(**asked) as stream:
                reply = stream.get_final_message()
        else:
            reply = sdk.messages.create(**asked)
    assert [block.text for block in reply.content if block.type == "text"] == ["naïve words "]
    assert gateway.engine.headers[0]["anthropic-version"]
    attributes = gateway.attributes()
    assert attributes[names.OPERATION_NAME] == "chat"
    assert parts(attributes) == [{"type": "text", "content": "naïve words "}]
    assert [turn["role"] for turn in json.loads(attributes[names.INPUT_MESSAGES])] == ["system", "user"]
    assert (attributes[names.ROLLOUT_ID], attributes[names.ATTEMPT]) == ("r-1", 2)
    assert attributes[names.REQUEST_TEMPERATURE] == 0.5 and attributes[names.REQUEST_STOP] == ("x",)
    assert (attributes[names.INPUT_TOKENS], attributes[names.OUTPUT_TOKENS]) == (3, 3)
    assert attributes[names.RESPONSE_ID] == "chatcmpl-7"
    assert attributes[names.ENGINE] == gateway.engine.url and attributes[names.POLICY] == "trained"
    assert attributes.get(names.STREAM_COMPLETE) is (True if is_stream else None)
    assert names.DROPPED not in attributes and names.ERROR_TYPE not in attributes


def test_a_streamed_message_with_thinking_and_a_tool_keeps_the_arguments_characters(gateway: Setup) -> None:
    request = message("TOOL", tools=[TOOL], thinking={"type": "adaptive"}, stream=True)
    httpx.post(f"{gateway.url}/v1/messages", json=request).raise_for_status()
    thinking, call = parts(gateway.attributes())
    assert (thinking["type"], thinking["content"]) == ("reasoning", "hm")
    assert (call["name"], call["arguments"]) == ("look", '{"city": "Orléans"}')


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_of_openais_client_is_recorded(gateway: Setup, is_stream: bool) -> None:
    asked: dict[str, Any] = {"model": "stub", "input": "naïve words", "instructions": "be brief"}
    with gpt(gateway, "/rollout/r-1") as sdk:
        if is_stream:
            with sdk.responses.stream(**asked) as stream:
                text = stream.get_final_response().output_text
        else:
            text = sdk.responses.create(**asked).output_text
    assert text == "naïve words "
    attributes = gateway.attributes()
    assert attributes[names.OPERATION_NAME] == "chat" and attributes[names.ROLLOUT_ID] == "r-1"
    assert parts(attributes) == [{"type": "text", "content": "naïve words "}]
    assert [turn["role"] for turn in json.loads(attributes[names.INPUT_MESSAGES])] == ["system", "user"]
    assert (attributes[names.INPUT_TOKENS], attributes[names.OUTPUT_TOKENS]) == (3, 4)
    assert attributes.get(names.STREAM_COMPLETE) is (True if is_stream else None)
    assert names.DROPPED not in attributes and names.ERROR_TYPE not in attributes


def test_a_response_that_continues_what_the_engine_keeps_says_so(gateway: Setup) -> None:
    request = response("more", previous_response_id="resp_0")
    httpx.post(f"{gateway.url}/v1/responses", json=request).raise_for_status()
    assert "previous_response_id" in str(dropped(gateway.attributes()))


def test_stored_responses_are_read_and_cancelled_without_a_span(gateway: Setup) -> None:
    with gpt(gateway, "/rollout/r-1") as sdk:
        assert sdk.responses.retrieve("resp_5").id == "resp_5"
        assert sdk.responses.cancel("resp_6").model_extra == {"method": "POST"}
    assert gateway.spans() == []


@pytest.mark.parametrize("keeper", [0, 1, None])
def test_a_stored_response_is_found_at_the_engine_that_keeps_it(
    engine: StubEngine, start_gateway: GatewayFactory, keeper: int | None
) -> None:
    with stub_engine() as second:
        engines = (engine, second)
        for number, one in enumerate(engines):
            one.keeps_responses = number == keeper
        gateway = start_gateway(engine_url=None, engines=[one.url for one in engines])
        for method, path in (("GET", "resp_5"), ("POST", "resp_5/cancel")):
            answer = httpx.request(method, f"{gateway.url}/v1/responses/{path}")
            assert answer.status_code == (404 if keeper is None else 200), path


def test_a_stored_response_is_streamed_as_it_comes(engine: StubEngine, gateway: Setup) -> None:
    with httpx.stream("GET", f"{gateway.url}/v1/responses/resp_5", params={"stream": "true"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.iter_text()
        assert "response.created" in next(events)  # while the engine still holds the rest back
        engine.release.set()
        assert "response.completed" in "".join(events)


def test_counting_tokens_is_passed_on_without_a_span(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(models={"claude-x": "stub"})
    with claude(gateway, "/rollout/r-1") as sdk:
        counted = sdk.messages.count_tokens(model="claude-x", messages=[{"role": "user", "content": "a"}])
    assert counted.input_tokens > 0
    assert gateway.engine.requests[0]["model"] == "stub"
    assert gateway.spans() == []


@pytest.mark.parametrize("given", ["a text", ["one", "two"], [[5, 6], [7]]])
def test_embeddings_are_recorded_without_their_vectors(gateway: Setup, given: Any) -> None:
    with gpt(gateway) as sdk:
        assert len(sdk.embeddings.create(model="stub", input=given).data[0].embedding) > 1
    attributes = gateway.attributes()
    assert attributes[names.OPERATION_NAME] == "embeddings" and attributes[names.PURPOSE] == "embedding"
    assert attributes[names.RESPONSE_MODEL] == "stub" and attributes[names.INPUT_TOKENS] == 4
    assert names.OUTPUT_MESSAGES not in attributes and names.ERROR_TYPE not in attributes
    assert not any("1e-05" in str(value) or "AACA" in str(value) for value in attributes.values())
    if given == ["one", "two"]:
        assert [part["content"] for part in parts(attributes, names.INPUT_MESSAGES)] == given


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
def test_model_names_are_mapped_and_nothing_else_is_changed(start_gateway: GatewayFactory, path: str) -> None:
    gateway = start_gateway(models={"big": "policy"})
    request = ASK[path]("a") if path in ASK else {"model": "stub", "input": "a"}
    httpx.post(gateway.url + path, json={**request, "model": "big", "odd": [1, None]}).raise_for_status()
    assert gateway.engine.requests[-1] == {**request, "model": "policy", "odd": [1, None]}
    assert gateway.attributes()[names.REQUEST_MODEL] == "big"


@pytest.mark.parametrize("path", list(ASK))
def test_an_event_reaches_the_client_before_the_engine_has_made_the_next(gateway: Setup, path: str) -> None:
    request = ASK[path]("first HOLD second", stream=True)
    with httpx.stream("POST", gateway.url + path, json=request) as answer:
        seen = b""
        pieces = answer.iter_raw()
        while b"first " not in seen:
            seen += next(pieces)
        assert not gateway.engine.release.is_set()
        gateway.engine.release.set()
        seen += b"".join(pieces)
    assert seen == httpx.post(gateway.engine.url + path, json=request).content


@pytest.mark.parametrize("path", list(ASK))
def test_a_stream_that_breaks_off_does_not_look_whole(gateway: Setup, path: str) -> None:
    seen = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", gateway.url + path, json=ASK[path]("one two BREAK four", stream=True)) as answer,
    ):
        for data in answer.iter_raw():
            seen += data
    last = seen.rstrip().rpartition(b"\n\n")[2]
    assert last.startswith(b"event: error\ndata: ") and gateway.engine.url.encode() in last
    assert json.loads(last.partition(b"data: ")[2])["error"]["type"] in ("api_error", "engine_error")
    attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is False
    assert attributes[names.ERROR_TYPE] == "RemoteProtocolError"


def test_clients_raise_on_a_stream_that_breaks_off(gateway: Setup) -> None:
    with claude(gateway) as sdk, pytest.raises(anthropic.APIError, match="broke off"):
        for _ in sdk.messages.create(**message("one two BREAK four"), stream=True):
            pass
    with gpt(gateway) as sdk, pytest.raises(openai.APIError, match="broke off"):
        for _ in sdk.responses.create(**response("one two BREAK four"), stream=True):
            pass


@pytest.mark.parametrize("path", list(ASK))
def test_an_error_inside_a_stream_is_passed_on_and_recorded(gateway: Setup, path: str) -> None:
    request = ASK[path]("one two ERROR", stream=True)
    direct, through = (httpx.post(url + path, json=request) for url in (gateway.engine.url, gateway.url))
    assert through.content == direct.content and b"engine core died" in through.content
    attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is False
    assert attributes[names.ERROR_TYPE] == "internal_error"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", list(ASK))
def test_a_reply_that_the_engine_gave_up_is_an_error(gateway: Setup, path: str, is_stream: bool) -> None:
    httpx.post(gateway.url + path, json=ASK[path]("ABORT now", stream=is_stream)).raise_for_status()
    attributes = gateway.attributes()
    assert attributes[names.ERROR_TYPE] == "incomplete_reply"
    assert attributes.get(names.STREAM_COMPLETE) is (False if is_stream else None)


@pytest.mark.parametrize("path", list(ASK))
def test_a_client_that_leaves_a_stream_cancels_the_engines_request(gateway: Setup, path: str) -> None:
    with httpx.stream("POST", gateway.url + path, json=ASK[path]("one LONG three", stream=True)) as answer:
        seen = b""
        for data in answer.iter_raw():
            seen += data
            if b"one " in seen:
                break
    wait_until(lambda: gateway.engine.cancelled)
    wait_until(lambda: gateway.spans())
    attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is False
    assert attributes[names.ERROR_TYPE] == "client_disconnected"


@pytest.mark.parametrize("path", list(ASK))
def test_a_client_that_leaves_before_the_reply_cancels_the_engines_request(gateway: Setup, path: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(gateway.url + path, json=ASK[path]("HOLD"), timeout=httpx.Timeout(5, read=1))
    wait_until(lambda: gateway.engine.cancelled)
    wait_until(lambda: gateway.spans())
    assert gateway.attributes()[names.ERROR_TYPE] == "client_disconnected"


@pytest.mark.parametrize("path", list(ASK))
def test_a_client_that_stops_reading_at_the_last_event_loses_nothing(gateway: Setup, path: str) -> None:
    with httpx.stream("POST", gateway.url + path, json=ASK[path]("one two", stream=True)) as answer:
        seen = b""
        for data in answer.iter_raw():
            seen += data
            if b"event: message_stop" in seen or b"event: response.completed" in seen:
                break
        attributes = gateway.attributes()  # a flush from now on waits for the span
    assert attributes[names.STREAM_COMPLETE] is True and names.ERROR_TYPE not in attributes
    assert parts(attributes) == [{"type": "text", "content": "one two "}]


def test_an_engines_refusal_reaches_the_client_and_the_span(gateway: Setup) -> None:
    with claude(gateway) as sdk, pytest.raises(anthropic.BadRequestError, match="context too long"):
        sdk.messages.create(**message("FAIL"))
    with gpt(gateway) as sdk, pytest.raises(openai.BadRequestError, match="context too long"):
        sdk.responses.create(**response("FAIL"))
    for span in gateway.spans():
        assert (span.attributes or {})[names.ERROR_TYPE] == "400"
        assert "context too long" in (span.status.description or "")


def test_errors_of_the_gateway_have_the_clients_form() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with gateway_before(StubEngine(url=url), agent_key="agents") as gateway:
        with claude(gateway, key="nope") as sdk, pytest.raises(anthropic.AuthenticationError):
            sdk.messages.create(**message("a"))
        with claude(gateway, key="agents") as sdk, pytest.raises(anthropic.APIStatusError) as raised:
            sdk.messages.create(**message("a"))
        assert raised.value.status_code == 502 and raised.value.type == "api_error"
        with claude(gateway, key="agents") as sdk, pytest.raises(anthropic.APIStatusError) as raised:
            sdk.messages.count_tokens(model="stub", messages=[{"role": "user", "content": "a"}])
        assert raised.value.status_code == 502 and isinstance(raised.value.body, dict)
        headers = {names.HEADER_ROLLOUT: "r", names.HEADER_ATTEMPT: "two", "x-api-key": "agents"}
        answer = httpx.post(f"{gateway.url}/v1/messages", json=message("a"), headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_the_agents_key_does_not_reach_an_engine_that_has_another(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    url = f"{start_gateway(agent_key='agents', engine_key='engines').url}/v1/messages"
    assert httpx.post(url, json=message("a"), headers={"x-api-key": "wrong"}).status_code == 401
    httpx.post(url, json=message("a"), headers={"x-api-key": "agents"}).raise_for_status()
    (sent,) = engine.headers
    assert sent["authorization"] == "Bearer engines" and "x-api-key" not in sent


def test_the_agents_own_key_is_passed_on_where_no_key_is_configured(gateway: Setup) -> None:
    httpx.post(f"{gateway.url}/v1/messages", json=message("a"), headers={"x-api-key": "own"})
    assert gateway.engine.headers[0]["x-api-key"] == "own"


def test_a_reply_that_cannot_be_read_is_passed_on_and_recorded_as_an_error(gateway: Setup) -> None:
    answer = httpx.post(f"{gateway.url}/v1/messages", content=b"[1]")
    assert answer.status_code == 500  # the stub fails on it
    assert gateway.attributes()[names.ERROR_TYPE] == "500"


def test_the_raw_log_has_whole_replies_and_the_events_of_streams(
    start_gateway: GatewayFactory, tmp_path: Any
) -> None:
    gateway = start_gateway(raw_log=tmp_path / "raw.jsonl")
    for is_stream in (False, True):
        httpx.post(f"{gateway.url}/v1/messages", json=message("a", stream=is_stream)).raise_for_status()
        gateway.flush()
    whole, streamed = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    assert whole["response"]["type"] == "message"
    assert [event["type"] for event in streamed["response"]][-1] == "message_stop"
