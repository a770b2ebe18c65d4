"""The OpenAI SDK over real HTTP: what a captured call holds."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, calls
from tests.tracer.stub_server import ARGUMENTS, PROMPT_IDS, ModelServer, logprobs, reply_words, sampled_ids

IDS = {"return_token_ids": True}
WORDS = reply_words("Hello")


def client(model: ModelServer, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=model.url, api_key="k", max_retries=retries)


def async_client(model: ModelServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=model.url, api_key="k", max_retries=0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def assert_has_everything(call: Recorded) -> None:
    assert c.unpack_ints(call[c.PROMPT_TOKEN_IDS]) == PROMPT_IDS
    assert c.unpack_ints(call[c.SAMPLED_TOKEN_IDS]) == sampled_ids(WORDS)
    assert c.unpack_floats(call[c.SAMPLED_LOGPROBS]) == logprobs(WORDS)
    assert call.json(c.OUTPUT_MESSAGES) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "You said Hello."}],
            "finish_reason": "stop",
        }
    ]
    assert call[c.RESPONSE_ID] == "chatcmpl-Hello"
    assert call[c.RESPONSE_FINISH_REASONS] == ["stop"]
    assert (call[c.INPUT_TOKENS], call[c.OUTPUT_TOKENS]) == (4, 5)
    assert not call.is_error


def test_a_call_holds_request_reply_ids_and_logprobs(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with client(model) as agent:
        agent.chat.completions.create(
            model="policy",
            messages=[{"role": "system", "content": "Be brief."}, *user("Hello there")],
            tools=[tool],
            temperature=0,
            top_p=0.9,
            max_tokens=16,
            seed=7,
            stop=["END"],
            logprobs=True,
            presence_penalty=0.5,
            extra_body=IDS | {"top_k": 5},
        )
    (call,) = calls(recorded())
    assert_has_everything(call)
    assert call.name == "chat policy"
    assert (call.kind, call.scope) == (3, c.SCOPE_TRACER)
    assert call.json(c.INPUT_MESSAGES) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Hello there"}]},
    ]
    assert call.json(c.TOOL_DEFINITIONS) == [tool]
    assert call[c.REQUEST_MODEL] == "policy"
    assert call[c.REQUEST_TEMPERATURE] == 0.0
    assert (call[c.REQUEST_TOP_P], call[c.REQUEST_TOP_K]) == (0.9, 5)
    assert (call[c.REQUEST_MAX_TOKENS], call[c.REQUEST_SEED]) == (16, 7)
    assert call[c.REQUEST_STOP] == ["END"]
    assert call.json(c.REQUEST_EXTRA) == {"logprobs": True, "presence_penalty": 0.5, "return_token_ids": True}
    assert c.CONSTRAINED not in call.attributes
    assert c.DROPPED not in call.attributes
    assert 0 < call.start_ns <= call.end_ns


def test_a_stream_holds_the_same_as_a_plain_call(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    with client(model) as agent:
        stream: Any = agent.chat.completions.create(
            model="policy", messages=user("Hello"), stream=True, logprobs=True, extra_body=IDS
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == "You said Hello."
    (call,) = calls(recorded())
    assert_has_everything(call)
    assert call[c.STREAM_COMPLETE] is True


def test_async_calls_and_streams_hold_the_same(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    async def run() -> None:
        async with async_client(model) as agent:
            await agent.chat.completions.create(
                model="policy", messages=user("Hello"), logprobs=True, extra_body=IDS
            )
            stream: Any = await agent.chat.completions.create(
                model="policy", messages=user("Hello"), stream=True, logprobs=True, extra_body=IDS
            )
            async for _ in stream:
                pass

    asyncio.run(run())
    plain, streamed = calls(recorded())
    assert_has_everything(plain)
    assert_has_everything(streamed)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_arguments_stay_the_characters_that_the_model_wrote(
    model: ModelServer, recorded: Callable[[], list[Recorded]], stream: bool
) -> None:
    with client(model) as agent:
        reply = agent.chat.completions.create(model="policy", messages=user("TOOL"), stream=stream)
        if stream:
            list(reply)
        turns: list[Any] = [
            *user("TOOL"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
        ]
        agent.chat.completions.create(model="policy", messages=turns)
    first, second = calls(recorded())
    part = {"type": "tool_call", "id": "call_1", "name": "get_weather", "arguments": ARGUMENTS}
    assert first.json(c.OUTPUT_MESSAGES) == [
        {"role": "assistant", "parts": [part], "finish_reason": "tool_calls"}
    ]
    assert second.json(c.INPUT_MESSAGES)[1:] == [
        {"role": "assistant", "parts": [part | {"name": "f"}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "dry"}]},
    ]


def test_every_choice_has_its_ids(model: ModelServer, recorded: Callable[[], list[Recorded]]) -> None:
    with client(model) as agent:
        agent.chat.completions.create(
            model="policy", messages=user("Hello"), n=2, logprobs=True, extra_body=IDS
        )
    (call,) = calls(recorded())
    assert len(call.json(c.OUTPUT_MESSAGES)) == 2
    assert call[c.REQUEST_CHOICE_COUNT] == 2
    assert c.unpack_ints(call[c.SAMPLED_TOKEN_IDS + ".1"]) == sampled_ids(WORDS)
    assert c.unpack_floats(call[c.SAMPLED_LOGPROBS + ".1"]) == logprobs(WORDS)


@pytest.mark.parametrize(
    "forced",
    [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}, {"guided_regex": "a"}],
)
def test_a_masked_distribution_is_marked(
    model: ModelServer, recorded: Callable[[], list[Recorded]], forced: dict[str, object]
) -> None:
    with client(model) as agent:
        agent.chat.completions.create(model="policy", messages=user("Hello"), extra_body=forced)
    (call,) = calls(recorded())
    assert call[c.CONSTRAINED] is True


def test_a_retried_attempt_is_a_failed_call_and_the_last_one_counts_it(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    with client(model, retries=2) as agent:
        agent.chat.completions.create(model="policy", messages=user("RATE"), extra_body=IDS)
    failed, answered = calls(recorded())
    assert (failed.is_error, failed[c.ERROR_TYPE]) == (True, "429")
    assert c.OUTPUT_MESSAGES not in failed.attributes
    assert (answered.is_error, answered[c.RETRIES]) == (False, 1)
    assert c.SAMPLED_TOKEN_IDS in answered.attributes


def test_failures_reach_the_client_unchanged_and_are_recorded(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    with client(model) as agent, pytest.raises(openai.InternalServerError, match="the engine died"):
        agent.chat.completions.create(model="policy", messages=user("FAIL"))
    nobody = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="k", max_retries=0)
    with nobody, pytest.raises(openai.APIConnectionError):
        nobody.chat.completions.create(model="policy", messages=user("Hello"))
    failed, unreached = calls(recorded())
    assert (failed.is_error, failed[c.ERROR_TYPE]) == (True, "500")
    assert "the engine died" in failed.message
    assert (unreached.is_error, unreached[c.ERROR_TYPE]) == (True, "httpx2.ConnectError")


def test_raw_responses_and_parse_helpers_work_as_ever(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    with client(model) as agent:
        raw = agent.chat.completions.with_raw_response.create(model="policy", messages=user("Hello"))
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().choices[0].message.content == "You said Hello."
        with agent.chat.completions.with_streaming_response.create(
            model="policy", messages=user("Hello")
        ) as streaming:
            assert streaming.parse().choices[0].message.content == "You said Hello."
        with agent.chat.completions.stream(model="policy", messages=user("Hello")) as events:
            assert events.get_final_completion().choices[0].message.content == "You said Hello."
    spans = calls(recorded())
    assert len(spans) == 3
    assert all(c.OUTPUT_MESSAGES in span.attributes for span in spans)


def gated_stream(agent: openai.OpenAI) -> Any:
    stream: Any = agent.chat.completions.create(
        model="policy", messages=user("GATED"), stream=True, logprobs=True, extra_body=IDS
    )
    next(stream)
    return stream


@pytest.mark.parametrize("leave", ["with", "close", "drop"])
def test_a_stream_left_early_is_recorded_as_incomplete(
    model: ModelServer, recorded: Callable[[], list[Recorded]], leave: str
) -> None:
    with client(model) as agent:
        if leave == "with":
            with gated_stream(agent):
                pass
        elif leave == "close":
            gated_stream(agent).close()
        else:
            stream = gated_stream(agent)
            del stream
            gc.collect()
    (call,) = calls(recorded())
    assert call[c.STREAM_COMPLETE] is False
    assert c.unpack_ints(call[c.PROMPT_TOKEN_IDS]) == PROMPT_IDS


def test_a_stream_cut_by_the_server_is_incomplete(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    with client(model) as agent:
        list(agent.chat.completions.create(model="policy", messages=user("CUT"), stream=True))
    (call,) = calls(recorded())
    assert call[c.STREAM_COMPLETE] is False
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [{"type": "text", "content": "You said"}]


def test_cancelled_calls_and_streams_end_as_errors(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    async def read(agent: openai.AsyncOpenAI, started: asyncio.Event) -> None:
        stream: Any = await agent.chat.completions.create(model="policy", messages=user("GATED"), stream=True)
        async for _ in stream:
            started.set()

    async def run() -> None:
        async with async_client(model) as agent:
            started = asyncio.Event()
            task = asyncio.create_task(read(agent, started))
            await asyncio.wait_for(started.wait(), 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    (call,) = calls(recorded())
    assert call.is_error
    assert call[c.ERROR_TYPE] == "asyncio.exceptions.CancelledError"
    assert call[c.STREAM_COMPLETE] is False


def test_a_client_gets_the_same_bytes_in_the_same_pieces(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    body = {"model": "policy", "messages": user("Hello"), "stream": True}
    with httpx.Client() as agent:
        with agent.stream("POST", f"{model.url}/chat/completions", json=body) as response:
            captured = b"".join(response.iter_raw())
            assert response.is_stream_consumed
        recorded_spans = recorded()
        with agent.stream("POST", f"{model.url}/chat/completions", json=body) as response:
            plain = b"".join(response.iter_raw())
    assert captured == plain
    (call,) = calls(recorded_spans)
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"][0]["content"] == "You said Hello."


def test_a_chunk_reaches_the_client_before_the_next_one_is_sent(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    with client(model) as agent:
        stream = gated_stream(agent)  # returns, although the server holds back the third chunk
        model.gate.set()
        rest = list(stream)
    assert len(rest) == 6
    assert calls(recorded())[0][c.STREAM_COMPLETE] is True


def test_a_compressed_body_is_read(model: ModelServer, recorded: Callable[[], list[Recorded]]) -> None:
    with httpx.Client() as agent:
        reply = agent.post(
            f"{model.url}/chat/completions", json={"model": "policy", "messages": user("GZIP")}
        )
    assert reply.json()["id"] == "chatcmpl-GZIP"
    (call,) = calls(recorded())
    assert call[c.RESPONSE_ID] == "chatcmpl-GZIP"


def test_a_body_that_is_no_chat_request_still_becomes_a_span(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    surrogate = '{"model": "policy", "messages": [{"role": "user", "content": "\\ud83d half"}]}'
    with httpx.Client() as agent:
        agent.post(f"{model.url}/chat/completions", content=surrogate.encode())
        streamed = b'{"model": "policy", "messages": []}'
        length = {"content-length": str(len(streamed))}
        agent.post(f"{model.url}/chat/completions", content=iter([streamed]), headers=length)
        agent.post(f"{model.url}/embeddings", json={"model": "policy", "messages": user("Hello")})
        agent.post(f"{model.url}/chat/completions", json={"model": "policy", "messages": user("FAIL")})
    spans = calls(recorded())
    assert spans[0].json(c.INPUT_MESSAGES)[0]["parts"][0]["content"] == "\ud83d half"
    assert spans[1].json(c.DROPPED) == {"request": "the client streamed its body"}
    assert [span.is_error for span in spans] == [False, False, True]


def test_nothing_is_patched_any_more_after_shutdown(
    model: ModelServer, recorded: Callable[[], list[Recorded]]
) -> None:
    patched: Any = httpx.HTTPTransport.handle_request
    assert hasattr(patched, "__wrapped__")
    recorded()
    assert httpx.HTTPTransport.handle_request is patched.__wrapped__
