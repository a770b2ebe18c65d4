"""Calls that train nothing: embeddings, replies out of caches, and what is too long for a span."""

import base64
import gzip
import random
import zlib
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from spangrad.adapters.grading import EMBEDDED, FROM_CACHE
from spangrad.adapters.merging import SERVED_BEFORE
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.tracer import calls as tracer_calls
from spangrad.tracer import conventions as c
from spangrad.tracer import span_size
from tests.tracer.wire.exchange import HI, choice, completion, exchange, model_call, model_calls, recorded

EMBED = {"model": "small", "input": ["one", "two"]}
VECTORS = {
    "model": "small",
    "data": [{"index": i, "embedding": [0.5, 0.25, 0.125]} for i in range(2)],
    "usage": {"prompt_tokens": 2, "total_tokens": 2},
}


def test_an_embedding_is_recorded_with_its_text_and_without_its_vectors() -> None:
    attributes = recorded(EMBED, VECTORS, route="embeddings")
    assert attributes[c.OPERATION_NAME] == "embeddings"
    assert attributes[c.PURPOSE] == "embedding"
    assert [part["content"] for part in attributes[c.INPUT_MESSAGES][0]["parts"]] == ["one", "two"]
    assert (attributes[c.EMBEDDING_DIMENSIONS], attributes[c.INPUT_TOKENS]) == (3, 2)
    assert "0.125" not in str(attributes)


def test_vectors_in_base64_are_measured_too() -> None:
    packed = base64.b64encode(array("f", [0.5, 0.25, 0.125, 1.0]).tobytes()).decode()
    reply = VECTORS | {"data": [{"index": 0, "embedding": packed}]}
    assert recorded(EMBED, reply, route="embeddings")[c.EMBEDDING_DIMENSIONS] == 4


def test_an_embedding_of_token_ids_says_that_it_has_no_text() -> None:
    attributes = recorded(EMBED | {"input": [[1, 2], [3]]}, VECTORS, route="embeddings")
    assert "no text" in attributes[c.DROPPED][c.INPUT_MESSAGES]


def test_an_embedding_is_a_call_with_nothing_to_train_and_none_the_worse_for_it() -> None:
    call = model_call(EMBED, VECTORS, route="embeddings")
    assert (call.purpose, call.grade, call.grade_reasons) == (Purpose.EMBEDDING, Grade.UNUSABLE, (EMBEDDED,))


def test_an_embedding_that_failed_is_an_error() -> None:
    call = model_call(EMBED, {"error": {}}, route="embeddings", status=500)
    assert call.grade_reasons != (EMBEDDED,)
    assert call.error is not None


@pytest.mark.parametrize(
    "headers",
    [
        {"x-litellm-cache-key": "9f86"},
        {"X-Cache": "HIT from edge"},
        {"X-Cache": "MISS, HIT"},
        {"helicone-cache": "Hit"},
        {"cf-aig-cache-status": "HIT"},
    ],
)
def test_a_reply_that_a_cache_says_to_have_served_is_marked_and_not_trained(headers: dict[str, str]) -> None:
    reply = completion(choice(token_ids=[4]), prompt_token_ids=[1])
    assert recorded(HI, reply, headers=headers)[c.CACHED] is True
    call = model_call(HI, reply, headers=headers)
    assert (call.grade, FROM_CACHE in call.grade_reasons) == (Grade.UNUSABLE, True)


@pytest.mark.parametrize("headers", [{"x-cache": "Miss"}, {"x-litellm-cache-key": ""}, {"cookie": "hit"}])
def test_other_headers_mark_nothing_and_are_not_recorded(headers: dict[str, str]) -> None:
    attributes = recorded(HI, completion(), headers=headers)
    assert c.CACHED not in attributes
    assert "cookie" not in str(attributes)


def twice(second: Any, request: Any = HI, **origin: Any) -> list[Any]:
    named: dict[str, Any] = {"attributes": {c.ROLLOUT_ID: "r"}}
    later = exchange(request, second, number=2, **(named | origin))
    return model_calls(exchange(HI, completion(), **named), later)


def test_the_same_reply_twice_in_a_rollout_is_one_sample() -> None:
    first, second = twice(completion())
    assert (first.grade, second.grade) == (Grade.TEXT, Grade.UNUSABLE)
    assert SERVED_BEFORE in second.grade_reasons


def test_a_server_that_repeats_its_ids_gives_other_samples() -> None:
    other_reply = twice(completion(choice("Another.")))
    other_request = twice(completion(), HI | {"messages": [{"role": "user", "content": "Bye"}]})
    other_rollout = twice(completion(), attributes={c.ROLLOUT_ID: "s"})
    for calls in (other_reply, other_request, other_rollout):
        assert [call.grade for call in calls] == [Grade.TEXT, Grade.TEXT]


def test_what_makes_a_span_too_long_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_size, "MAX_SPAN_BYTES", 2000)
    request = HI | {"messages": [{"role": "user", "content": "å" * 1500}]}
    attributes = recorded(request, completion())
    assert c.INPUT_MESSAGES not in attributes
    assert c.OUTPUT_MESSAGES in attributes
    assert attributes[c.DROPPED][c.INPUT_MESSAGES].startswith("too long: ")
    assert model_call(request, completion()).grade is Grade.UNUSABLE


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    "encode", [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)]
)
def test_a_compressed_reply_is_read_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, encode: tuple[str, Callable[[bytes], bytes]]
) -> None:
    text = random.Random(0).randbytes(60_000).hex()  # several pieces, also compressed
    reply = completion(choice(text))
    assert recorded(HI, reply, encode=encode)[c.OUTPUT_MESSAGES][0]["parts"][0]["content"] == text
    monkeypatch.setattr(tracer_calls, "MAX_RESPONSE_BYTES", 100_000)
    attributes = recorded(HI, reply, encode=encode)  # 66 KB, which stand for 120
    assert c.OUTPUT_MESSAGES not in attributes
    assert "longer than 100000 bytes" in attributes[c.DROPPED]["response"]
