"""vLLM's own spans: no calls, and what they add to those that they served."""

from dataclasses import replace

import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.store.otlp import decode_request, json_to_protobuf
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes
from tests.adapters.captured import FIXTURES, captured

FILE = FIXTURES / "exports" / "vllm_otel" / "server_spans.jsonl"


def server_spans():
    return [
        each for line in FILE.read_bytes().splitlines() for each in decode_request(json_to_protobuf(line))[0]
    ]


def served(name="s", *, response_id="r1", output_tokens=2):
    """A span of the engine's, below the client's span `a` of `building`."""
    told = {"gen_ai.request.id": response_id, "gen_ai.request.temperature": 0.7, "gen_ai.request.top_p": 0.9}
    told |= {
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": output_tokens,
        "gen_ai.request.max_tokens": 99,
    }
    made = span(name, parent="a", scope="vllm.tracing.otel", kind=2, attributes=told)
    return replace(made, name="llm_request")


def client(**changes):
    """A client's span that names neither sampling parameters nor usage."""
    told = {name: value for name, value in text_attributes(**changes).items() if value is not None}
    return span("a", scope="acme", attributes=told)


def test_a_server_span_is_no_call_and_no_unknown_dialect():
    assert [recognise(each) for each in server_spans()] == [None]
    assert calls_from_spans(server_spans()) == []


def test_the_captured_span_adds_to_the_one_call_that_it_served_what_its_client_does_not_say():
    alone = calls_from_spans(captured("genai_openai/multi_turn"))
    joined = calls_from_spans([*captured("genai_openai/multi_turn"), *server_spans()])
    assert joined[1:] == alone[1:]
    assert joined[0] == replace(alone[0], sampling={**alone[0].sampling, "top_p": 1.0})
    assert alone[0].usage["output_tokens"] == 37  # the engine counted the same


def test_what_the_client_does_not_say_comes_from_the_engine():
    (call,) = calls_from_spans([client(**{c.REQUEST_TEMPERATURE: None}), served()])
    assert call.sampling == {"temperature": 0.7, "top_p": 0.9}
    assert call.usage == {"input_tokens": 3, "output_tokens": 2}
    assert call.span_ids == (call.span_id,)


def test_what_the_client_says_stays():
    (call,) = calls_from_spans([client(**{c.INPUT_TOKENS: 5}), served()])
    assert call.sampling["temperature"] == 1.0
    assert call.usage == {"input_tokens": 5, "output_tokens": 2}


def test_a_temperature_that_vllm_left_out_is_not_known():
    cold = replace(served(), attributes={"gen_ai.request.id": "r1"})
    (call,) = calls_from_spans([client(**{c.REQUEST_TEMPERATURE: None}), cold])
    assert "temperature" not in call.sampling


@pytest.mark.parametrize(
    "servers",
    [
        [served(response_id="r2")],  # an attempt that failed, or another call
        [served("s"), served("t")],  # two that claim the same reply
        [replace(served(), trace_id="f" * 32)],
    ],
)
def test_a_span_that_may_be_anothers_is_not_joined(servers):
    (call,) = calls_from_spans([client(), *servers])
    assert (call.usage, call.sampling) == ({}, {"temperature": 1.0})


def test_of_several_attempts_the_one_whose_reply_the_client_got_is_joined():
    failed = served("s", response_id="r0", output_tokens=9)
    (call,) = calls_from_spans([client(), failed, served("t")])
    assert call.usage == {"input_tokens": 3, "output_tokens": 2}


def test_a_client_that_names_no_response_takes_the_only_one_below_it():
    nameless = client(**{c.RESPONSE_ID: None})
    (call,) = calls_from_spans([nameless, served()])
    assert (call.response_id, call.usage["output_tokens"]) == ("r1", 2)
    (call,) = calls_from_spans([nameless, served("s"), served("t", response_id="r2")])
    assert (call.response_id, call.usage) == (None, {})
