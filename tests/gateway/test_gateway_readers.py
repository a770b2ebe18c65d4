"""A reader says that a reply is complete only once all that was asked for has come to its end."""

import json
from typing import Any

import pytest

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.readers import Facts, TokenReader
from spangrad.tracer.gateway.rewrite import Route, upstream_request
from spangrad.tracer.gateway.versions import SampledBy


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a"]}, 1),
        ({"prompt": [5, 6, 7]}, 1),  # one prompt of ids
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[5], [6, 7]], "n": 2}, 4),
    ],
)
def test_a_stream_is_complete_once_every_choice_of_every_prompt_has_ended(
    asked: dict[str, Any], count: int
) -> None:
    raw = json.dumps({"model": "m", "stream": True, **asked}).encode()
    reader = TokenReader(upstream_request(raw, Route.COMPLETION, {}), Route.COMPLETION, keeps_raw=False)
    for index in range(count):
        assert not reader.is_complete()
        chunk = {"choices": [{"index": index, "text": "x", "finish_reason": "stop"}]}
        reader.take(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assert reader.is_complete()


def test_a_stream_whose_chunks_with_text_lost_some_ids_has_none() -> None:
    raw = json.dumps({"model": "m", "stream": True, "messages": []}).encode()
    reader = TokenReader(upstream_request(raw, Route.CHAT, {}), Route.CHAT, keeps_raw=False)
    for ids, delta in (
        ([5], {"content": "a"}),
        (None, {"content": "b"}),
        (None, {}),
        ([6], {"content": "c"}),
    ):
        choice = {"index": 0, "delta": delta, "token_ids": ids, "logprobs": None, "finish_reason": None}
        reader.take(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    attributes = reader.attributes(Facts(versions=SampledBy(1, 1), logprobs_mode="processed"))
    assert names.SAMPLED_TOKEN_IDS not in attributes
    told = json.loads(attributes[names.DROPPED])
    assert told["sampled_token_ids"] == "1 chunks with text came without token ids"
